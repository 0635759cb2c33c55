"""Tables hold the contract's columns and the run's numbers; figures draw every table, also poor ones."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from analysis.checks import Check
from analysis.measures import asymmetry as measures
from analysis.run import Run
from hooks.collect import analyze
from hooks.models import LoadedModel
from reports.directory import tables_of, write_directory
from reports.run.figures import draw_all
from reports.run.terminal import print_summary
from reports.run.verdict import remarks, verdict
from reports.tables import curves_table, layers_table, neurons_table

NULLED = "exchange exchange_balanced scaling_half scaling_double scaling_flip".split()
OVER_TOKENS = [*NULLED, "euler_residual", "placement", "placement_balanced"]
NULLS = "null_gaussian excess_gaussian excess_gaussian_se null_repaired excess_repaired excess_repaired_se".split()
EDITS = "exchange exchange_balanced scaling_half scaling_double scaling_flip scaling_zero scaling_infinity".split()
OF_AN_EDIT = (
    " _se _relative_change _raw _raw_se _centred _centred_se _coherence _coherence_se "
    "_token_q1 _token_median _token_median_se _token_q3 _trimmed"
).split(" ")
OUTPUT_COLUMNS = [
    *(f"output_{edit}{part}" for edit in EDITS for part in OF_AN_EDIT),
    *"output_tokens output_energy output_symmetric_energy output_antisymmetric_energy".split(),
    *"output_effective_tokens output_few_tokens".split(),
    *(
        f"output_{name}{part}"
        for name in ("mean_share", "symmetric_rank", "antisymmetric_rank", "antisymmetric_in_top10")
        for part in ("", "_se")
    ),
]
LAYER_COLUMNS = [
    *"layer n_neurons n_tokens n_blocks".split(),
    *OUTPUT_COLUMNS,
    *(f"{name}{part}" for name in OVER_TOKENS for part in ("", "_se", "_trimmed")),
    *(f"{name}_token_{part}" for name in OVER_TOKENS for part in ("q1", "median", "median_se", "q3")),
    *(f"{name}_{part}" for name in NULLED for part in NULLS),
    *(
        f"{name}_neuron_median{part}"
        for name in ("exchange", "exchange_balanced", "bilinear_share")
        for part in ("", "_se")
    ),
    *(f"{name}{part}" for name in ("exchange_relative_change", "bilinear_share", "gate_positive") for part in ("", "_se")),
    *"top_token_share top_tokens_share effective_tokens effective_neurons few_tokens".split(),
    *"n_exchange_differs n_exchange_balanced_differs".split(),
    *"cos_qk_abs_mean score_max_ratio interaction_antisymmetry".split(),
]
NEURON_COLUMNS = [
    *"layer neuron exchange_relative_change euler_residual placement placement_balanced gate_positive".split(),
    *(f"{name}{part}" for name in (*NULLED, "bilinear_share") for part in ("", "_se")),
    *(f"{name}_{part}" for name in NULLED for part in NULLS),
    *(f"{name}_repaired_{part}" for name in ("exchange", "exchange_balanced") for part in ("p", "q", "differs")),
    *"bilinear_coef energy_share mean_a mean_b std_a std_b corr_ab quadrant_pp quadrant_pn quadrant_np quadrant_nn".split(),
    *(f"quadrant_energy_{quadrant}" for quadrant in ("pp", "pn", "np", "nn")),
    *"cos_qk cos_qv cos_kv norm_q norm_k norm_v score".split(),
]
CURVE_COLUMNS = "layer alpha asymmetry asymmetry_se null_repaired relative_change null_gaussian token_median".split()
EXTREME_COLUMNS = ("layer neuron size window position counted token text a b h cos_qk score score_ratio").split()


SPREADSHEETS = ("layers.csv", "curves.csv", "extremes.csv")


@pytest.fixture(scope="module")
def run(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(context=32, max_tokens=320), quiet=True)


@pytest.fixture(scope="module")
def poor(llama: LoadedModel) -> Run:
    """One layer, one window, one scale: no standard error, most scales missing."""
    return analyze(llama, llama.read(context=32, max_tokens=32), layers=[1], alphas=[3.0], quiet=True)


def test_tables_hold_the_contracts_columns(run: Run) -> None:
    tables = tables_of(run)
    layers, neurons, curves, extremes = tables.layers, tables.neurons, tables.curves, tables.extremes
    contract = (LAYER_COLUMNS, NEURON_COLUMNS, CURVE_COLUMNS, EXTREME_COLUMNS)
    for table, columns in zip((layers, neurons, curves, extremes), contract, strict=True):
        assert sorted(table.columns) == sorted(columns)
    assert list(layers["layer"]) == [0, 1, 2]
    assert len(neurons) == 3 * 48
    assert sorted(curves["alpha"].unique()) == [-1, 0, 0.125, 0.25, 0.5, 2, 4, 8, np.inf]
    assert (extremes.groupby("layer").size() == 10).all()
    assert extremes["text"].map(len).min() > 0
    written = layers.drop(columns=layers.filter(regex="_raw(_se)?$"))
    for table in (written, neurons, curves.drop(columns="alpha"), extremes.drop(columns="text")):
        assert np.isfinite(table.to_numpy(dtype=float)).all()


def test_tables_hold_the_runs_numbers(run: Run) -> None:
    layers, neurons, curves = (
        table.set_index("layer") for table in (layers_table(run), neurons_table(run), curves_table(run))
    )
    for index, layer in run.layers.items():
        pooled = layer.moments.neuron.pool(layer.geometry.value_weight)
        assert layers.loc[index, "exchange"] == measures.exchange(pooled).item()
        assert layers.loc[index, "scaling_half"] == curves.loc[index].set_index("alpha").loc[0.5, "asymmetry"]
        mine = neurons.loc[index]
        np.testing.assert_array_equal(mine["exchange"], measures.exchange(layer.moments.neuron))
        assert mine["energy_share"].sum() == pytest.approx(1)
        np.testing.assert_allclose(mine.filter(regex="^quadrant_[pn]").sum(axis=1), 1)
        np.testing.assert_allclose(mine.filter(like="quadrant_energy").sum(axis=1), 1, rtol=1e-5)
        assert layers.loc[index, "cos_qk_abs_mean"] == pytest.approx(mine["cos_qk"].abs().mean())
        assert layers.loc[index, "score_max_ratio"] == pytest.approx(mine["score"].max() / np.sort(mine["score"])[23])


def test_the_interaction_share_is_that_of_the_weights_with_the_gain_folded(llama: LoadedModel, run: Run) -> None:
    shares = layers_table(run).set_index("layer")["interaction_antisymmetry"]
    for index, site in llama.sites.items():
        gain = site.gain.double()
        whole = torch.einsum("ju,ja,jb->uab", site.v.double(), site.q * gain, site.k * gain)
        expected = ((whole - whole.mT) / 2).square().sum() / whole.square().sum()
        assert shares[index] == pytest.approx(float(expected), rel=1e-7)


def test_a_directory_holds_everything_and_reads_back(run: Run, tmp_path: Path) -> None:
    write_directory(run, tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    figures = {f"figures/{name}.png" for name in ("output", "output_parts", "exchange", "measures", "neurons", "scaling")}
    assert names == {"run.json", "report.html", "moments.safetensors", "neurons.parquet", *SPREADSHEETS} | figures
    again = tables_of(Run.load(tmp_path / "out"))
    for name in SPREADSHEETS:
        pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out" / name), getattr(again, name.removesuffix(".csv")))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "neurons.parquet"), again.neurons)


def test_a_missing_number_is_empty_and_never_zero(poor: Run) -> None:
    row = layers_table(poor).iloc[0]
    for column in ("exchange_se", "scaling_double_se", "scaling_half", "scaling_double", "scaling_flip"):
        assert np.isnan(row[column]), column
    assert row["exchange"] > 0
    assert set(poor.missing()) == {
        *("*_se", "scaling_half", "scaling_double", "scaling_flip"),
        *("output_*_raw", "output_*_rank, output_antisymmetric_in_top10"),
    }


@pytest.mark.parametrize("kind", ["run", "poor"])
def test_figures_and_summary_serve_every_run(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run = request.getfixturevalue(kind)
    tables = tables_of(run)
    figures = draw_all(tables)
    assert all(isinstance(figure, Figure) and figure.axes for figure in figures.values())
    line = next(line for line in figures["exchange"].axes[0].lines if line.get_label() == "median over tokens")
    np.testing.assert_array_equal(line.get_ydata(), tables.layers["exchange_token_median"])
    console = Console(file=StringIO(), width=80)
    print_summary(run, tables, tmp_path, console)
    text = console.file.getvalue()
    assert "nan" not in text
    assert str(tmp_path) in text.replace("\n", "")
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 80


def test_the_verdict_says_what_the_numbers_say(run: Run) -> None:
    tables = tables_of(run)
    layers = tables.layers.assign(
        output_exchange_balanced=[0.31, 0.30, 0.05], output_exchange_balanced_relative_change=[1.2, 0.9, 0.4],
        output_exchange=[0.4, 0.35, 0.06], output_scaling_double=0.0, output_scaling_double_relative_change=0.0,
        exchange_balanced=[0.2, 0.25, 0.1], bilinear_share=0.25, output_exchange_balanced_coherence=[1.5, 1.2, 0.5],
        output_exchange_balanced_coherence_se=[0.01, 0.5, 0.01],
    )  # fmt: skip
    text = " ".join(verdict(run, replace(tables, layers=layers)))
    assert "asymmetry 0.300 (layers 0.050 to 0.310), a change of 90% in root mean square, most in layer 0" in text
    assert "As stored: asymmetry 0.350 (layers 0.060 to 0.400)" in text
    assert "gate doubled and up halved: asymmetry 0.000 (layers 0.000 to 0.000), a change of 0%" in text
    assert "Neurons one by one: balanced exchange 0.200 (layers 0.100 to 0.250)" in text
    assert "cancel in 1 layers and add up in 1" in text
    assert "explains 25% of the energy" in text


def test_a_layer_whose_output_is_not_known_is_named(run: Run) -> None:
    some = replace(run, layers={i: replace(layer, output=layer.output if i else None) for i, layer in run.layers.items()})
    none = replace(run, layers={i: replace(layer, output=None) for i, layer in run.layers.items()})
    for unknown, named in ((some, "layer 0"), (none, "layers 0-2")):
        tables = tables_of(unknown)
        assert f"{named}: what is written was not measured" in " ".join(remarks(unknown, tables.layers))
        assert unknown.missing()["output_*"].endswith(f"could not be verified: {named}")
        assert ("output" in draw_all(tables)) == (unknown is some)
        text = " ".join(verdict(unknown, tables))
        assert ("(measured in 2 of 3 layers)" in text) == (unknown is some)
        assert ("was not measured" in text) == (unknown is none)
        assert "nan" not in text


def test_what_a_reader_must_know_is_remarked(run: Run) -> None:
    layers = layers_table(run)
    failed = Check("a check", 2.0, 1.0)
    control = Check("a control", 0.5, 1e-5, layer=2)
    text = " ".join(remarks(replace(run, skipped={7: "no gate"}, acceptance=(failed,), controls=(control,)), layers))
    assert "check failed: a check: 2.0e+00, limit at most 1e+00" in text
    assert "control failed in layer 2: a control: 5.0e-01, limit at most 1e-05" in text
    assert "layer 7 was not analysed: no gate" in text
    assert "the corpus was cut at --tokens" in text
