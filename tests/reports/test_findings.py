"""The command that writes tables into docs/findings.md: numbers of the runs, and nothing else in the file is touched."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn import functional

from analysis.errors import UserError
from analysis.measures.jackknife import t95
from analysis.run import Run
from hooks.causal import measure_causal
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from reports.directory import write_directory
from reports.findings.__main__ import main
from reports.findings.activations import activation_tables, excess_beyond
from reports.findings.figure import draw_families
from reports.findings.runs import ModelResults, cost_per_asymmetry, energy_by_quadrant, found_in, heaviest_neurons
from reports.markdown import marks, written_into
from reports.run.verdict import against_chance
from tests.helpers.command_line import no_figures
from tests.helpers.tiny import save_tiny

EDITS = ["exchange", "exchange-balanced", "scale:2", "bilinear", "relu-limit"]
PARTS = ("activations", "causal")


@pytest.fixture(scope="module")
def models(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LoadedModel, Path]]:
    place = tmp_path_factory.mktemp("models")
    return {
        "llama": (llama, save_tiny("llama", place / "llama")),
        "gemma3": (load_model(str(save_tiny("gemma3", place / "gemma3")), device="cpu"), place / "gemma3"),
    }


@pytest.fixture(scope="module")
def root(models: dict[str, tuple[LoadedModel, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both models: a run with its null, one with costs of edits, and one with the first position counted."""
    root = tmp_path_factory.mktemp("found")
    with no_figures():
        for name, (model, directory) in models.items():
            text = model.read(context=24, max_tokens=480)
            random = analyze(load_model(str(directory), device="cpu", random_seed=0), text, quiet=True)
            write_directory(analyze(model, text, quiet=True), root / "runs" / name, random=random)
            short = model.read(context=24, max_tokens=60)
            run = analyze(model, short, quiet=True)
            costs = measure_causal(model, short, run, mode="both", edits=EDITS, n_tokens=48)
            write_directory(run, root / "causal" / name, causal=costs)
            every = model.read(context=24, max_tokens=480, skip_positions=0)
            write_directory(analyze(model, every, quiet=True), root / "first" / name)
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> list[ModelResults]:
    return found_in(*([root / kind / name for name in ("llama", "gemma3")] for kind in ("runs", "first", "causal")))


def options(root: Path, *kinds: str) -> list[str]:
    named = {"runs": "--activations", "first": "--first", "causal": "--causal"}
    return [part for kind in kinds for part in (named[kind], str(root / kind / "llama"), str(root / kind / "gemma3"))]


def empty_file(directory: Path) -> Path:
    file = directory / "findings.md"
    parts = [f"before {part}\n{begin}\nold\n{end}\n" for part in PARTS for begin, end in [marks(part)]]
    file.write_text("".join(parts) + "after\n")
    return file


def tables_in(text: str) -> list[list[list[str]]]:
    """Every table of a text, as rows of cells."""
    lines = ["", *text.splitlines()]
    starts = [place for place, (before, line) in enumerate(pairwise(lines), 1) if line[:1] == "|" != before[:1]]
    tables = []
    for start in starts:
        end = next((i for i in range(start, len(lines)) if lines[i][:1] != "|"), len(lines))
        rows = [line.replace("\\|", "¦")[2:-2].split(" | ") for line in lines[start:end]]
        tables.append([rows[0], *rows[2:]])
    return tables


def read(root: Path, kind: str, name: str, table: str) -> pd.DataFrame:
    return pd.read_csv(root / kind / name / f"{table}.csv")


def number(cell: str) -> float:
    return float(cell.replace("−", "-").strip("*[]()"))


def test_costs_are_put_between_their_marks(root: Path, tmp_path: Path) -> None:
    file = empty_file(tmp_path)
    main([str(file), "--causal", str(root / "causal" / "llama")])
    first = file.read_text()
    main([str(file), "--causal", str(root / "causal" / "llama")])
    assert file.read_text() == first
    begin, end = marks("causal")
    assert first.startswith(f"before activations\n{marks('activations')[0]}\nold\n{marks('activations')[1]}\n")
    assert first.endswith(f"{end}\nafter\n")
    assert first.count("\nold\n") == 1
    costs = pd.read_csv(root / "causal" / "llama" / "causal.csv").set_index(["layer", "edit", "positions"])
    counted, everywhere = (costs.xs(positions, level="positions") for positions in ("counted", "all"))
    cells = [next(row for row in table if row[0] == "1") for table in tables_in(first.partition(begin)[2])[:3]]
    kl, dce = counted.loc[(1, "exchange"), ["kl", "kl_placebo"]], counted.loc[(1, "relu-limit"), "dce"]
    assert [number(part) for part in cells[0][1].split()] == pytest.approx(kl.tolist(), rel=0.06)
    assert float(cells[1][1 + EDITS.index("relu-limit")].split()[0]) == pytest.approx(dce, abs=6e-4)
    assert float(cells[2][1]) == pytest.approx(everywhere.loc[(1, "exchange"), "kl"], rel=0.06)


def test_activations_are_put_between_theirs_with_the_numbers_of_the_runs(root: Path, tmp_path: Path) -> None:
    file = empty_file(tmp_path)
    main([str(file), *options(root, "runs", "first", "causal"), "--figure", str(tmp_path / "families.png")])
    text = file.read_text()
    assert (tmp_path / "families.png").stat().st_size > 10_000
    assert "\nold\n" not in text
    summary, curves, bridge, *rest = tables_in(text.partition(marks("activations")[1])[0])
    by_layer = rest[-2:]
    assert summary[0] == ["", "llama", "gemma3"]
    rows = {title: cells for title, *cells in summary}
    for place, name in enumerate(("llama", "gemma3")):
        layers = read(root, "runs", name, "layers")
        first = read(root, "first", name, "layers")
        for column, title in (("exchange", "exchange, as stored"), ("cos_qk_abs_mean", "mean ¦cos(q, k)¦")):
            low, middle, high = sorted(layers[column])
            cell = rows[title][place].replace("(", "").replace(")", "").replace("–", " ")
            assert [float(part) for part in cell.split()] == pytest.approx([middle, low, high], rel=6e-3), title
        above = sum(
            row.scaling_double_excess_repaired > t95(row.n_blocks) * row.scaling_double_excess_repaired_se
            for row in layers.itertuples()
        )
        assert rows["scaling α = 2 above / below the permutation null"][place].split(" / ")[0] == str(above)
        marked = [str(row.layer) for row in first.itertuples() if row.few_tokens]
        assert rows["the same, first position counted"][place] == (", ".join(marked) or "none")
        table = {row[0].strip("*"): row[1:] for row in by_layer[place][1:]}
        for row in layers.itertuples():
            cells = table[str(row.layer)]
            assert [number(part) for part in cells[1].split(" ± ")] == pytest.approx(
                [row.exchange_balanced, row.exchange_balanced_se], abs=6e-4
            )
            excess, error = row.exchange_balanced_excess_random, row.exchange_balanced_excess_random_se
            assert number(cells[4].split(" ± ")[0]) == pytest.approx(excess, abs=6e-4)
            assert cells[4].startswith("**") == (abs(excess) > t95(row.n_blocks) * error)
            assert number(cells[5]) == pytest.approx(first["exchange_balanced"][row.layer], abs=6e-4)
        scaled = read(root, "runs", name, "curves")
        at_eight = np.median([row.asymmetry for row in scaled.itertuples() if row.alpha == 8])
        assert number(curves[1 + place][curves[0].index("8")]) == pytest.approx(at_eight, rel=6e-3)
    for edit, column in (("exchange-balanced", "exchange_balanced"), ("scale:2", "scaling_double")):
        cells = next(row[1:] for row in bridge if row[0] == edit)
        for place, name in enumerate(("llama", "gemma3")):
            layers, costs = read(root, "runs", name, "layers"), read(root, "causal", name, "causal")
            kl = [row.kl for row in costs.itertuples() if (row.edit, row.positions) == (edit, "counted")]
            prices = sorted(one / another for one, another in zip(kl, layers[column], strict=True))
            assert number(cells[2 * place].split()[0]) == pytest.approx(prices[1], rel=6e-3)
            assert number(cells[2 * place + 1]) == pytest.approx(spearmanr(kl, layers[column]).statistic, abs=6e-3)
    assert [row[0] for row in bridge[1:]] == ["exchange", "exchange-balanced", "scale:2", "bilinear"]


def test_an_excess_is_beyond_only_with_its_whole_interval() -> None:
    """Planted: with 16 blocks the interval reaches 2.13 errors."""
    layers = pd.DataFrame({"n_blocks": 16, "x": [0.2, 0.22, -0.2, -0.22, 0.5], "x_se": [0.1, 0.1, 0.1, 0.1, np.nan]})
    assert excess_beyond(layers, "x").tolist() == [False, True, False, True, False]


def test_layers_beyond_a_null_are_counted_of_the_measure_asked_for() -> None:
    """Planted: scaling is above in two layers and below in one, balanced exchange nowhere."""
    planted = {"scaling_double_excess_repaired": [0.5, 0.4, -0.5, 0.1], "scaling_double_excess_repaired_se": 0.1}
    layers = pd.DataFrame({"n_blocks": [16] * 4, "exchange_balanced_excess_repaired": 0.0} | planted)
    layers["exchange_balanced_excess_repaired_se"] = 0.1
    assert against_chance(layers, "scaling_double") == {"repaired": (2, 1)}
    assert against_chance(layers) == {"repaired": (0, 0)}


def test_energy_by_quadrant_is_that_of_the_activations(
    models: dict[str, tuple[LoadedModel, Path]], found: list[ModelResults]
) -> None:
    """A plain sum over tokens and neurons of w h² in float64, from hooks on the model's own modules."""
    model, windows = models["llama"][0], models["llama"][0].read(context=24, max_tokens=480).windows
    mlp = model.hf_model.model.layers[1].mlp
    seen: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    handles = [
        part.register_forward_hook(lambda *call, name=name: seen[name].append(call[-1][0].double()))
        for name, part in (("a", mlp.gate_proj), ("b", mlp.up_proj))
    ]
    with torch.no_grad():
        for window in windows:
            model.hf_model(window.tokens[None])
    for handle in handles:
        handle.remove()
    a, b = (torch.cat([x[window.counted_from :] for x, window in zip(seen[name], windows, strict=True)]) for name in "ab")
    weight = mlp.down_proj.weight.detach().double().square().sum(0)
    energy = (functional.silu(a) * b) ** 2 * weight
    shares = energy_by_quadrant(found[0].neurons)
    signs = {"pp": (a > 0) & (b > 0), "pn": (a > 0) & (b <= 0), "np": (a <= 0) & (b > 0), "nn": (a <= 0) & (b <= 0)}
    for pair, where in signs.items():
        assert shares.loc[1, pair] == pytest.approx(float(energy[where].sum() / energy.sum()), rel=1e-5), pair
    np.testing.assert_allclose(shares.sum(axis=1), 1)


def test_the_heaviest_neuron_is_that_of_a_plain_loop(root: Path, found: list[ModelResults]) -> None:
    """Energies before and after balanced exchange, summed neuron by neuron; a planted giant is found."""
    run = Run.load(root / "runs" / "llama")
    layer = run.layers[2]
    sums, weight = layer.moments.neuron, layer.geometry.value_weight.tolist()
    before, after = sums["balanced_hh"].tolist(), sums["balanced_exchange"].tolist()
    energy = [w * (x + y) for w, x, y in zip(weight, before, after, strict=True)]
    row = found[0].heaviest.set_index("layer").loc[2]
    assert row["neuron"] == energy.index(max(energy))
    assert row["share"] == pytest.approx(max(energy) / sum(energy), rel=1e-12)
    effective = read(root, "runs", "llama", "layers").set_index("layer").loc[2, "effective_neurons"]
    assert row["share"] >= 1 / effective * (1 - 1e-12)
    planted = replace(layer.geometry, norm_v=layer.geometry.norm_v * torch.tensor([1.0] * 5 + [1e3] + [1.0] * 42))
    giant = heaviest_neurons(replace(run, layers=run.layers | {2: replace(layer, geometry=planted)}), found[0].neurons)
    assert giant.set_index("layer").loc[2, "neuron"] == 5
    assert giant.set_index("layer").loc[2, "share"] > 0.99
    scores = found[0].layers.set_index("layer")["score_max_ratio"]
    assert (found[0].heaviest["score_ratio"] <= scores.to_numpy() * (1 + 1e-6)).all()


def test_layers_that_few_neurons_make_are_listed_with_what_the_neuron_costs(found: list[ModelResults]) -> None:
    """Planted: layer 1 is made by one neuron, which was exchanged alone; layer 0 by two, of which none was."""
    single_neurons = pd.DataFrame({"layer": [1, 1, 2], "neuron": [3, 7, 7], "exact": [-0.25, 0.5, 0.75]})
    layers = found[0].layers.assign(effective_neurons=[2.0, 1.0, 9.0])
    heaviest = found[0].heaviest.assign(neuron=[7, 7, 7])
    one = replace(found[0], layers=layers, heaviest=heaviest, single_neurons=single_neurons)
    summary, table = list(activation_tables([one]))[1], list(activation_tables([one]))[-3]
    assert [(row[1], row[-1]) for row in tables_in(table)[0][1:]] == [("0:7", "–"), ("1:7", "+0.500")]
    assert "| layers dominated by fewer than 5 neurons | 0, 1 |" in summary
    table = list(activation_tables([replace(one, single_neurons=None)]))[-3]
    assert [row[-1] for row in tables_in(table)[0][1:]] == ["–", "–"]


def test_cost_per_asymmetry_joins_two_runs_layer_by_layer(found: list[ModelResults], root: Path) -> None:
    """The costs are of one run and the asymmetries of the other; c·ab is set against what it does not explain."""
    costs = pd.read_csv(root / "causal" / "gemma3" / "causal.csv")
    layers = pd.read_csv(root / "runs" / "gemma3" / "layers.csv").set_index("layer")
    for edit, asymmetry in (("scale:2", layers["scaling_double"]), ("bilinear", 1 - layers["bilinear_share"])):
        table = cost_per_asymmetry(found[1], edit)
        assert table["asymmetry"].tolist() == pytest.approx(asymmetry.tolist(), rel=1e-9)
        for row in costs.itertuples():
            if (row.edit, row.positions) == (edit, "counted"):
                assert table.loc[row.layer, "kl"] == pytest.approx(row.kl, rel=1e-12)
                assert table.loc[row.layer, "kl_placebo"] == pytest.approx(row.kl_placebo, rel=1e-12)


def drawn_by(bars: Any) -> np.ndarray:
    """The values that error bars are drawn around."""
    return np.asarray(bars.lines[0].get_ydata(), dtype=float)


def test_the_figure_shows_the_tables(found: list[ModelResults]) -> None:
    above, below = draw_families(found).subfigs
    for ax, one in zip(above.axes, found, strict=True):
        assert one.name in ax.get_title()
        drawn = {line.get_label(): line for line in ax.get_lines()}
        null = drawn["null: permutation"]
        np.testing.assert_allclose(np.asarray(null.get_ydata(), dtype=float), one.layers["exchange_balanced_null_repaired"])
        np.testing.assert_allclose(np.asarray(null.get_xdata(), dtype=float), [1 / 6, 3 / 6, 5 / 6])
        np.testing.assert_allclose(drawn_by(ax.containers[0]), one.layers["exchange_balanced"])
    for ax, measure in zip(below.axes, ("bilinear_share", "scaling_double"), strict=True):
        for bars, one in zip(ax.containers, found, strict=True):
            np.testing.assert_allclose(drawn_by(bars), one.layers[measure])
    assert [text.get_text() for text in below.legends[0].get_texts()] == ["llama", "gemma3"]


def test_what_cannot_be_written(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no marks <!-- causal: begin --> and <!-- causal: end -->"):
        written_into("a text without marks", "causal", "tables")
    file, run = str(empty_file(tmp_path)), root / "runs" / "llama"
    with pytest.raises(UserError, match="has no exact sweep: analyze with --causal exact or both"):
        main([file, "--causal", str(tmp_path)])
    with pytest.raises(UserError, match="has no exact sweep: analyze with --causal exact or both"):
        found_in([run], costs=[run])
    with pytest.raises(UserError, match="is not a run"):
        found_in([tmp_path])
    with pytest.raises(UserError, match="has no random-weight null: analyze with --null random-init"):
        found_in([root / "first" / "llama"])
    with pytest.raises(UserError, match="skips 1 positions: analyze with --skip-positions 0"):
        found_in([run], first=[root / "causal" / "llama"])
    with pytest.raises(UserError, match="is a run of gemma3, not of llama"):
        found_in([run], costs=[root / "causal" / "gemma3"])
    with pytest.raises(UserError, match="no runs are given"):
        main([file])
    with pytest.raises(UserError, match="need --activations"):
        main([file, "--first", str(root / "first" / "llama")])
