"""Comparisons: differences with the errors of their pairing, relative depth where layers do not correspond, bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.compare import COMPARED, difference, estimate, same_shape, same_windows
from analysis.measures.jackknife import t95
from analysis.run import Run
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from reports.compare.figures import draw_comparison
from reports.compare.page import comparison_html, comparison_json
from reports.compare.tables import by_third, compare_runs, verdict, warnings
from reports.tables import layers_table
from tests.helpers.command_line import call, refused
from tests.helpers.hostile import SCRIPT, TOKENS
from tests.helpers.html_page import Page
from tests.helpers.tiny import save_tiny

READ = {"context": 32, "max_tokens": 640}


@pytest.fixture(scope="module")
def run(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(**READ), quiet=True)


@pytest.fixture(scope="module")
def coarse(tiny_llama: Path) -> Run:
    """The same model in bfloat16 on the same text: almost the same numbers."""
    model = load_model(str(tiny_llama), device="cpu", dtype="bfloat16")
    return analyze(model, model.read(**READ), quiet=True)


@pytest.fixture(scope="module")
def elsewhere(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same model on another text."""
    text = tmp_path_factory.mktemp("text") / "other.txt"
    text.write_text("Nothing of this stands in the sample, and it is said over and over again. " * 60)
    return analyze(llama, llama.read(str(text), **READ), quiet=True)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Run:
    model = load_model(str(save_tiny("gemma3", tmp_path_factory.mktemp("tiny") / "gemma3")), device="cpu")
    return analyze(model, model.read(**READ), layers=[0, 2], quiet=True)


@pytest.mark.parametrize("name", COMPARED)
def test_estimates_are_those_of_the_table_of_layers(run: Run, name: str) -> None:
    table = layers_table(run).set_index("layer")
    for index, layer in run.layers.items():
        found = estimate(name, layer)
        assert found.value == pytest.approx(table.loc[index, name], rel=1e-12)
        assert found.error == pytest.approx(table.loc[index, f"{name}_se"], rel=1e-9)
        assert found.reach == pytest.approx(found.error * t95(found.n_blocks))


def test_a_paired_error_leaves_each_block_out_of_both(run: Run, coarse: Run) -> None:
    first, second = run.layers[1], coarse.layers[1]
    replicates = []
    for block in range(len(first.moments.blocks)):
        exchanges = []
        for layer in (first, second):
            sums = dict(zip(layer.moments.layout.names, range(99), strict=False))
            rows = [sums[name] for name in ("exchange_gap", "hh", "exchange")]
            total = layer.moments.pooled.values
            gap, before, after = (float(total[row].sum() - total[row, block]) for row in rows)
            exchanges.append(gap / (2 * (before + after)))
        replicates.append(exchanges[1] - exchanges[0])
    n = len(replicates)
    expected = np.sqrt((n - 1) / n * np.square(np.array(replicates) - np.mean(replicates)).sum())
    assert difference("exchange", first, second, paired=True).error == pytest.approx(expected, rel=1e-9)


def test_what_the_text_does_to_both_alike_cancels(run: Run, coarse: Run, elsewhere: Run) -> None:
    assert same_windows(run, coarse)
    assert not same_windows(run, elsewhere)
    for name in COMPARED:
        one, other = run.layers[1], coarse.layers[1]
        none = difference(name, one, one, paired=True)
        assert (none.value, none.error) == (0, 0)
        apart = difference(name, one, other, paired=False)
        assert apart.error == pytest.approx(np.hypot(estimate(name, one).error, estimate(name, other).error))
        assert difference(name, one, other, paired=True).error < 0.5 * apart.error
        assert difference(name, one, other, paired=True).value == pytest.approx(-difference(name, other, one, True).value)


def test_the_table_has_a_row_per_run_layer_and_measure(run: Run, elsewhere: Run, gemma: Run) -> None:
    comparison = compare_runs([run, elsewhere, gemma], ["a", "b", "c"])
    table = comparison.table
    assert len(table) == (3 + 3 + 2) * len(COMPARED)
    assert [(one.comparable, one.paired) for one in comparison.runs] == [(True, True), (True, False), (False, True)]
    assert table.loc[table["run"] == "b", "difference"].notna().all()
    assert table.loc[table["run"] != "b", "difference"].isna().all()
    rows = table.set_index(["measure", "layer", "run"])
    for measure in COMPARED:
        a, b = rows.loc[(measure, 1, "a")], rows.loc[(measure, 1, "b")]
        assert b["difference"] == pytest.approx(b["value"] - a["value"])
        assert b["difference_se"] == pytest.approx(np.hypot(a["value_se"], b["value_se"]))
        assert b["difference_high"] - b["difference_low"] == pytest.approx(2 * (b["difference_high"] - b["difference"]))
    assert sorted(table["depth"].unique()) == pytest.approx([1 / 6, 1 / 2, 5 / 6])
    thirds = by_third(comparison)
    assert thirds.loc[("exchange", "a"), "middle third"] == rows.loc[("exchange", 1, "a"), "value"]
    assert np.isnan(thirds.loc[("exchange", "c"), "middle third"])
    how, told = zip(*verdict(comparison), strict=True)
    assert how[0] == "b against a layer by layer (independent errors: different windows)"
    assert how[1] == "c against a by relative depth (3 and 3 layers, different shapes)"
    assert re.search(r"higher in \d and lower in \d of 3 layers \(95 % intervals\); largest difference [+−]", told[0][0])
    assert any("counted different windows" in line for line in warnings(comparison))


def test_shapes_correspond_only_if_depth_width_and_units_do(run: Run, gemma: Run) -> None:
    assert same_shape(run, run)
    assert not same_shape(run, gemma)
    assert not same_shape(run, replace(run, model=run.model | {"n_layers": 4}))
    assert not same_shape(replace(run, layers={0: run.layers[0]}), replace(run, layers={1: run.layers[1]}))


@pytest.mark.usefixtures("without_figures")
def test_random_init_against_trained_is_a_comparison(tiny_llama: Path, tmp_path: Path) -> None:
    options = ["--context", 32, "--tokens", 320, "--device", "cpu", "--null", "random-init", "--quiet"]
    assert call("analyze", tiny_llama, "--out", tmp_path / "run", *options)[0] == 0
    directories = [tmp_path / "run", tmp_path / "run" / "random-init"]
    code, out, err = call("compare", *directories, "--out", tmp_path / "cmp", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [run["label"] for run in document["runs"]] == ["run", "random-init"]
    assert document["runs"][1]["paired"]
    table = pd.read_csv(tmp_path / "cmp" / "compare.csv").set_index(["run", "measure", "layer"]).sort_index()
    layers = pd.read_csv(tmp_path / "run" / "layers.csv").set_index("layer")
    for measure in ("exchange", "exchange_balanced", "scaling_double"):
        mine = table.loc[("random-init", measure)]
        np.testing.assert_allclose(mine["difference"], -layers[f"{measure}_excess_random"], rtol=1e-9)
        np.testing.assert_allclose(mine["difference_se"], layers[f"{measure}_excess_random_se"], rtol=1e-9)
    names = {str(path.relative_to(tmp_path / "cmp")) for path in (tmp_path / "cmp").rglob("*") if path.is_file()}
    assert names == {"compare.csv", "compare.html", "figures/depth.png", "figures/difference.png"}
    numbers = document["verdict"]["random-init"]["exchange_balanced"]
    balanced = table.loc[("random-init", "exchange_balanced"), "difference"]
    assert numbers["median_difference"] == pytest.approx(balanced.median())
    assert {Path(path).name for path in document["files"].values()} == {"compare.csv", "compare.html"}


def test_hostile_names_are_only_names(run: Run, elsewhere: Run, gemma: Run) -> None:
    labels = [SCRIPT + "$x_{$", "_" + TOKENS[1], TOKENS[3]]
    comparison = compare_runs([run, elsewhere, gemma], labels)
    figures = draw_comparison(comparison)
    harmless = compare_runs([run, elsewhere, gemma], ["a", "b", "c"])
    page = Page(comparison_html(comparison, figures))
    assert page.tags() == Page(comparison_html(harmless, figures)).tags()
    assert labels[0] in page.text
    assert "\u202e" not in page.text
    assert [text.get_text() for text in figures["difference"].legends[0].get_texts()] == labels[1:2]
    assert labels[1] in json.loads(comparison_json(comparison, Path("out")))["verdict"]


def test_a_run_without_errors_is_compared_without_intervals(llama: LoadedModel) -> None:
    short = analyze(llama, llama.read(context=32, max_tokens=32), alphas=[3.0], quiet=True)
    comparison = compare_runs([short, short], ["a", "b"])
    ((how, told),) = verdict(comparison)
    assert "paired" in how
    assert len(told) == 6  # of a layer's output every edit is measured, whatever scales the neurons are followed at
    assert "intervals" not in " ".join(told)
    assert "nan" not in Page(comparison_html(comparison, {})).text.split()
    assert torch.isfinite(torch.tensor(json.loads(comparison_json(comparison, Path("o")))["layers"][0]["value"]))


def test_bad_input_is_one_line(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "one" / "run")
    run.save(tmp_path / "two" / "run")
    one, out = tmp_path / "one" / "run", tmp_path / "out"
    assert "1 directory given: compare needs at least two" in refused("compare", one, "--out", out)
    assert "is given twice: name runs that differ" in refused("compare", one, f"{one}/../run", "--out", out)
    assert "is not a run: run.json is missing" in refused("compare", one, tmp_path, "--out", out)
    assert not out.exists()
    code, text, _ = call("compare", one, tmp_path / "two" / "run", "--out", out)
    assert code == 0
    assert f"{tmp_path / 'two' / 'run'} against" in text.replace("\n", "")  # two directories of one name: whole paths
    assert "add --force" in refused("compare", one, tmp_path / "two" / "run", "--out", out)
