"""Runs with mixtures of experts: saved and merged with them, every neuron shown with its expert, few tokens marked."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from analysis.errors import UserError
from analysis.measures.expert_numbers import FEW_EXPERT_TOKENS
from analysis.run import Run
from analysis.storage.files import EXPERTS, MOMENTS_FILE
from analysis.storage.hashing import sha256_of
from analysis.weights.experts import SHARED
from hooks.collect import analyze
from hooks.models import LoadedModel
from reports.causal.tables import CausalTables
from reports.directory import write_directory
from reports.run.definitions import EXPERT_COLUMNS
from reports.run.document import summary_json
from reports.run.figures import draw_all
from reports.run.page import report_html
from reports.run.terminal import print_summary
from reports.run.verdict import remarks, verdict
from reports.tables import Tables, tables_of
from tests.helpers.html_page import Page
from tests.helpers.mixtures import with_experts

NULLED = "exchange exchange_balanced scaling_half scaling_double scaling_flip".split()
COLUMNS = [
    *"layer expert n_neurons n_tokens token_share energy_share few_tokens".split(),
    *NULLED,
    *"euler_residual placement placement_balanced bilinear_share gate_positive cos_qk_abs_mean".split(),
    *(f"{name}_se" for name in (*NULLED, "bilinear_share")),
    *(f"{name}_null_repaired" for name in NULLED),
]


@pytest.fixture(scope="module")
def dense(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(context=32, max_tokens=320), draws=3, quiet=True)


@pytest.fixture(scope="module")
def run(dense: Run) -> Run:
    """Of what was read of a model only the provenance and layer 0 remain."""
    return with_experts(dense)


@pytest.fixture(scope="module")
def tables(run: Run) -> Tables:
    return tables_of(run)


@pytest.fixture(scope="module")
def experts(tables: Tables) -> pd.DataFrame:
    assert tables.experts is not None
    return tables.experts


# --- saved, loaded, merged ---


def test_a_saved_run_comes_back_with_its_experts(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    loaded = Run.load(tmp_path)
    assert loaded.layers[0].experts is None
    for index in (1, 2):
        assert torch.equal(loaded.layers[index].experts, run.layers[index].experts)  # type: ignore[arg-type]
        assert loaded.layers[index].estimates.expert_numbers()[2] == run.layers[index].estimates.expert_numbers()[2]


def other_windows(run: Run) -> Run:
    return replace(run, windows=run.windows + 1_000_000)


def test_merged_runs_hold_the_tokens_of_both(run: Run) -> None:
    merged = Run.merge([run, other_windows(run)])
    for index in (1, 2):
        ours, theirs = (of.layers[index].estimates.expert_numbers() for of in (merged, run))
        for mine, one in zip(ours, theirs, strict=True):
            assert mine["n_tokens"] == 2 * one["n_tokens"]
            assert mine["exchange"] == pytest.approx(one["exchange"], rel=1e-12, nan_ok=True)
            assert mine["token_share"] == one["token_share"]


@pytest.mark.parametrize("other", ["more", "none", "fewer"])
def test_runs_with_other_experts_do_not_merge(run: Run, other: str) -> None:
    experts = {"more": torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, -1, -1, -1]), "none": None, "fewer": torch.zeros(12).long()}
    changed = replace(run.layers[1], experts=experts[other])
    with pytest.raises(UserError, match="layer 1 has other experts in the second run"):
        Run.merge([run, replace(other_windows(run), layers=run.layers | {1: changed})])


@pytest.mark.parametrize("experts", [[0, 0, 1], [1] * 6 + [0] * 6])
def test_experts_that_do_not_fit_the_layer_are_refused(run: Run, tmp_path: Path, experts: list[int]) -> None:
    run.save(tmp_path)
    tensors = load_file(tmp_path / MOMENTS_FILE) | {"1.experts": torch.tensor(experts)}
    save_file(tensors, tmp_path / MOMENTS_FILE)
    document = json.loads((tmp_path / "run.json").read_text())
    document["moments_sha256"] = sha256_of(tmp_path / MOMENTS_FILE)
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="is not a readable run"):
        Run.load(tmp_path)


def test_experts_without_tokens_are_the_reason_for_their_missing_numbers(run: Run, dense: Run) -> None:
    reasons = run.missing()
    assert "no counted token was routed to them" in reasons["experts without tokens"]
    assert "1 in layer 1; 1 in layer 2" in reasons["experts without tokens"]
    assert "neurons without energy" not in reasons
    assert "experts without tokens" not in dense.missing()


# --- tables ---


def test_tables_hold_the_experts(run: Run, tables: Tables, experts: pd.DataFrame) -> None:
    assert sorted(experts.columns) == sorted(COLUMNS)
    assert experts[["layer", "expert"]].to_numpy().tolist() == [[i, e] for i in (1, 2) for e in (0, 1, 2, SHARED)]
    neurons = tables.neurons
    assert list(neurons.columns[:3]) == ["layer", "expert", "neuron"]
    assert neurons.loc[neurons["layer"] == 0, "expert"].isna().all()
    assert neurons.loc[neurons["layer"] == 0, "neuron"].tolist() == list(range(48))
    assert (neurons.loc[neurons["layer"] == 0, "n_tokens"] == 310).all()
    for index in (1, 2):
        mine = neurons[neurons["layer"] == index]
        assert torch.equal(torch.tensor(mine["expert"].tolist()).long(), run.layers[index].experts)  # type: ignore[arg-type]
        assert mine["neuron"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2]
        of_expert = experts[experts["layer"] == index].set_index("expert")
        assert (mine["n_tokens"].to_numpy() == of_expert.loc[mine["expert"], "n_tokens"].to_numpy()).all()
        shares = mine.groupby("expert")["energy_share"].sum()
        np.testing.assert_allclose(shares.fillna(0), of_expert.loc[shares.index, "energy_share"], rtol=1e-12)
    extremes = tables.extremes
    assert list(extremes.columns[:3]) == ["layer", "expert", "neuron"]
    assert extremes.loc[extremes["layer"] == 0, "expert"].isna().all()
    assert (extremes.loc[extremes["layer"] > 0, "neuron"] < 4).all()


def test_a_run_of_dense_layers_has_no_experts(dense: Run, tmp_path: Path) -> None:
    tables = tables_of(dense)
    assert tables.experts is None
    assert not {"expert", "n_tokens"} & set(tables.neurons)
    assert "expert" not in tables.extremes
    assert "experts" not in draw_all(tables)
    page = report_html(dense, tables, {})
    assert 'id="experts"' not in page
    assert "mixture" not in Page(page).text
    assert "experts" not in json.loads(summary_json(dense, tables, tmp_path))


def test_a_directory_holds_the_experts_and_loses_those_of_another_run(run: Run, dense: Run, tmp_path: Path) -> None:
    tables = write_directory(run, tmp_path)
    assert (tmp_path / "figures" / "experts.png").is_file()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / EXPERTS), tables.experts)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "extremes.csv"), tables.extremes)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "neurons.parquet"), tables.neurons)
    files = json.loads(summary_json(run, tables, tmp_path))["files"]
    assert files[EXPERTS] == str(tmp_path / EXPERTS)
    assert all(Path(file).is_file() for file in files.values())
    write_directory(dense, tmp_path)
    assert not (tmp_path / EXPERTS).exists()
    assert not (tmp_path / "figures" / "experts.png").exists()


def test_costs_join_the_neurons_by_their_place_in_the_layer(tables: Tables) -> None:
    """They are numbered through the layer, whatever its experts."""
    places = tables.neurons.groupby("layer").cumcount()
    costs = pd.DataFrame({"layer": tables.neurons["layer"], "neuron": places, "attribution_x": range(len(places))})
    none = pd.DataFrame({"layer": [0], "edit": ["x"], "positions": ["counted"], "attribution": [0.0]})
    joined = CausalTables(none, costs, none, None, none).joined_to(tables).neurons
    assert joined["attribution_x"].tolist() == list(range(len(places)))
    assert list(joined.columns[:3]) == ["layer", "expert", "neuron"]


# --- in words, figures, and on the page ---


def test_the_verdict_says_of_what_the_layers_are_mixtures(run: Run, tables: Tables, experts: pd.DataFrame) -> None:
    even = experts.assign(token_share=0.5)
    text = " ".join(verdict(run, replace(tables, experts=even)))
    assert "2 of 3 layers are mixtures of 3 experts, 1.5 per token plus a shared one: numbers pool" in text
    routed = even[even["expert"] != SHARED]
    text = " ".join(verdict(run, replace(tables, experts=routed, layers=tables.layers[1:])))
    assert "All layers are mixtures of 3 experts, 1.5 per token: numbers pool" in text
    shares = experts[experts["expert"] != SHARED].groupby("layer")["token_share"].sum()
    assert f"{shares.min():.3g} to {shares.max():.3g} per token" in " ".join(verdict(run, tables))


def test_experts_that_saw_little_are_remarked(run: Run, tables: Tables, experts: pd.DataFrame) -> None:
    layers = tables.layers
    text = " ".join(remarks(run, layers, experts))
    assert (
        f"8 of 8 experts have fewer than {FEW_EXPERT_TOKENS} counted tokens, 2 of them with none (layers 1-2): their"
        in text
    )
    enough = experts.assign(few_tokens=experts["layer"] == 2, n_tokens=1000)
    text = " ".join(remarks(run, layers, enough))
    assert "4 of 8 experts have fewer than 256 counted tokens: their own numbers are uncertain" in text
    assert "use more text (layer 2)" in text
    assert "counted tokens: their" not in " ".join(remarks(run, layers, enough.assign(few_tokens=False)))


def test_a_heavy_token_is_said_to_sit_in_a_neuron_of_an_expert(run: Run, tables: Tables, tmp_path: Path) -> None:
    places = {index: places[0] for index, places in run.massive_activation_tokens().items()}
    assert places
    console = Console(file=StringIO(), width=80)
    print_summary(run, tables, tmp_path, console)
    text = " ".join(console.file.getvalue().split())
    for index, place in places.items():
        if index:
            name = "shared" if place["expert"] == SHARED else str(place["expert"])
            assert f"most of it in neuron {name}:{place['neuron']}: use the token median" in text


def test_the_figure_draws_every_expert_that_has_a_number(tables: Tables, experts: pd.DataFrame) -> None:
    mixed = experts.assign(few_tokens=experts["layer"] == 2)
    left, right = draw_all(replace(tables, experts=mixed))["experts"].axes
    for ax, x in ((left, "layer"), (right, "token_share")):
        drawn = np.concatenate([points.get_offsets() for points in ax.collections])
        known = mixed[mixed["exchange_balanced"].notna()]
        assert len(drawn) == len(known) == 6
        assert sorted(map(tuple, drawn)) == sorted(zip(known[x], known["exchange_balanced"], strict=True))
        hollow = [points for points in ax.collections if not len(points.get_facecolors())]
        found = np.concatenate([points.get_offsets()[:, 1] for points in hollow])
        assert sorted(found) == sorted(known.loc[known["few_tokens"], "exchange_balanced"])
    nothing = experts.assign(exchange_balanced=np.nan)
    assert "experts" not in draw_all(replace(tables, experts=nothing))


def test_the_page_shows_experts_and_names_neurons_by_them(run: Run, tables: Tables, experts: pd.DataFrame) -> None:
    page = Page(report_html(run, tables, draw_all(tables)))
    ids = [attributes.get("id") for _, attributes in page.elements]
    assert {"experts", "figure-experts"} <= set(ids)
    assert page.text.count("shared*") == 2
    assert "expert:neuron" in page.text
    named = tables.extremes[tables.extremes["layer"] > 0].groupby("layer").head(3)
    for row in named.to_dict("records"):
        expert = "shared" if row["expert"] == SHARED else str(int(row["expert"]))
        assert f"{expert}:{row['neuron']}" in page.text
    header = next(text for attributes, text in page.scripts if attributes.get("id") == "neuron-header")
    assert {"expert", "n_tokens"} <= set(json.loads(header)["columns"])
    assert set(EXPERT_COLUMNS) <= set(experts)


def test_of_many_experts_the_page_shows_the_largest(
    run: Run, tables: Tables, experts: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.run.page.EXPERTS_SHOWN", 3)
    text = " ".join(Page(report_html(run, tables, {})).text.split())
    assert "Shown are the 3 of 8 experts with the largest share of their layer's energy." in text
    monkeypatch.setattr("reports.run.page.EXPERTS_SHOWN", 8)
    assert "experts with the largest share" not in Page(report_html(run, tables, {})).text


def test_json_holds_the_experts(run: Run, tables: Tables, tmp_path: Path) -> None:
    document = json.loads(summary_json(run, tables, tmp_path))
    assert len(document["experts"]) == 8
    assert document["experts"][1]["exchange"] is None
    assert any("mixtures of 3 experts" in sentence for sentence in document["verdict"]["sentences"])
