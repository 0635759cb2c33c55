"""The null of random weights: a run of its own on the same tokens, joined in the tables, and nothing else changed by it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.compare import layer_excess
from analysis.measures import asymmetry as measures
from analysis.measures.jackknife import pooled_replicates
from analysis.measures.output_numbers import OUTPUT_MEASURES, output_replicates
from analysis.run import Run
from analysis.storage.files import RANDOM_INIT
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from reports.directory import load_random
from reports.tables import tables_of
from tests.helpers import reference
from tests.helpers.command_line import QUICK, call, no_figures, refused
from tests.helpers.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("without_figures")
NULLED = ("exchange", "exchange_balanced", "scaling_half", "scaling_double", "scaling_flip")
PARTS = ("null_random", "excess_random", "excess_random_se")
COLUMNS = [f"{name}_{part}" for name in NULLED for part in PARTS]
OF_LAYERS = [*COLUMNS, *(f"{name}_{part}" for name in OUTPUT_MEASURES for part in PARTS)]


@pytest.fixture(scope="module")
def written(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with their nulls, and a whole run without."""
    root = tmp_path_factory.mktemp("null")
    for name, options in (
        ("first", ["--shard", "0/2", "--null", "random-init", "--seed", 3]),
        ("second", ["--shard", "1/2", "--null", "random-init", "--seed", 3]),
        ("plain", ["--shard", "0/2", "--seed", 3]),
    ):
        with no_figures():
            code, out, err = call("analyze", tiny_llama, "--out", root / name, *options, *QUICK)
        assert (code, err) == (0, ""), out
    return root


def columns_of(directory: Path) -> list[set[str]]:
    tables = pd.read_csv(directory / "layers.csv"), pd.read_parquet(directory / "neurons.parquet")
    return [set(table.columns) for table in tables]


def test_the_null_is_a_run_of_its_own_on_the_same_tokens(written: Path) -> None:
    run, random = Run.load(written / "first"), Run.load(written / "first" / RANDOM_INIT)
    assert torch.equal(random.windows, run.windows)
    assert random.settings == run.settings
    assert random.corpus == run.corpus
    assert list(random.layers) == list(run.layers)
    assert random.passed
    assert random.model["weights"] == "random weights, seed 3"
    assert "random" not in run.model["weights"]
    assert not torch.allclose(random.layers[0].geometry.norm_q, run.layers[0].geometry.norm_q)


def test_its_columns_are_joined_in_the_tables(written: Path) -> None:
    run, random = Run.load(written / "first"), Run.load(written / "first" / RANDOM_INIT)
    layers = pd.read_csv(written / "first" / "layers.csv").set_index("layer")
    neurons = pd.read_parquet(written / "first" / "neurons.parquet")
    assert np.isfinite(layers[OF_LAYERS].to_numpy()).all()
    assert np.isfinite(neurons[COLUMNS].to_numpy()).all()
    own = tables_of(random).layers.set_index("layer")
    for name in NULLED:
        np.testing.assert_allclose(layers[f"{name}_null_random"], own[name], rtol=1e-9)
        for table in (layers, neurons):
            np.testing.assert_allclose(
                table[f"{name}_excess_random"], table[name] - table[f"{name}_null_random"], atol=1e-9
            )
        spread = neurons.groupby("layer")[f"{name}_null_random"].agg(["min", "max"])
        np.testing.assert_allclose(spread["min"], layers[f"{name}_null_random"], rtol=1e-9)
        np.testing.assert_allclose(spread["max"], layers[f"{name}_null_random"], rtol=1e-9)
    for name in OUTPUT_MEASURES:
        np.testing.assert_allclose(layers[f"{name}_null_random"], own[name], rtol=1e-9)
        np.testing.assert_allclose(layers[f"{name}_excess_random"], layers[name] - own[name], atol=1e-9)
    pair = [output_replicates("output_exchange", x.layers[1].estimates) for x in (run, random)]
    expected = reference.jackknife((pair[0] - pair[1]).tolist())
    assert layers.loc[1, "output_exchange_excess_random_se"] == pytest.approx(expected, rel=1e-9)
    pair = [pooled_replicates(measures.exchange, x.layers[1].moments) for x in (run, random)]
    expected = reference.jackknife((pair[0] - pair[1]).tolist())
    assert layers.loc[1, "exchange_excess_random_se"] == pytest.approx(expected, rel=1e-9)


def test_a_run_is_no_excess_over_itself(written: Path) -> None:
    layer = Run.load(written / "plain").layers[0]
    for name, value in layer_excess(layer, layer).items():
        if "excess" in name:
            assert value == 0, name


def test_without_the_option_there_are_no_such_columns_and_the_same_numbers(written: Path) -> None:
    both = (columns_of(written / name) for name in ("first", "plain"))
    for with_null, without, added in zip(*both, (OF_LAYERS, COLUMNS), strict=True):
        assert with_null - without == set(added)
        assert without < with_null
    first, plain = (Run.load(written / name) for name in ("first", "plain"))
    for index, layer in plain.layers.items():
        for name, values in layer.moments.tensors().items():
            torch.testing.assert_close(values, first.layers[index].moments.tensors()[name], rtol=0, atol=0, equal_nan=True)


def test_nulls_merge_with_their_runs(written: Path, tmp_path: Path) -> None:
    code, _, _ = call("merge", written / "first", written / "second", "--out", tmp_path / "merged")
    assert code == 0
    random = Run.load(tmp_path / "merged" / RANDOM_INIT)
    parts = [Run.load(written / name / RANDOM_INIT) for name in ("first", "second")]
    torch.testing.assert_close(
        random.layers[2].moments.neuron.values, sum(part.layers[2].moments.neuron.values for part in parts)
    )
    assert set(OF_LAYERS) < columns_of(tmp_path / "merged")[0]
    line = refused("merge", written / "plain", written / "second", "--out", tmp_path / "no")
    assert "1 of 2 runs have a random-init null: make it for all of them, or for none" in line
    assert not (tmp_path / "no").exists()


def test_a_null_of_other_tokens_is_not_joined(written: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """A run without a null, written over one that had it, must not inherit it."""
    run, random = Run.load(written / "first"), Run.load(written / "first" / RANDOM_INIT)
    assert load_random(written / "first", run) is not None
    assert load_random(written / "plain", Run.load(written / "plain")) is None
    for other in (
        replace(run, windows=run.windows + 1),
        replace(run, settings=run.settings | {"seed": 4}),
        replace(run, model=run.model | {"name": "another"}),
    ):
        assert load_random(written / "first", other) is None
    run.save(tmp_path / "over")
    random.save(tmp_path / "over" / RANDOM_INIT)
    options = ["--shard", "1/2", "--seed", 3, "--quiet", *QUICK]
    assert call("analyze", tiny_llama, "--out", tmp_path / "over", *options)[0] == 0
    assert load_random(tmp_path / "over", Run.load(tmp_path / "over")) is None
    assert not set(OF_LAYERS) & columns_of(tmp_path / "over")[0]


def weights_of(model: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.bridge.original_model.state_dict().items()}


def test_the_seed_alone_decides_the_random_weights(tiny_llama: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (weights_of(load_model(str(tiny_llama), device="cpu", random_seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    drawn = [name for name in first if name.endswith("proj.original_component.weight") or "mlp" in name]
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn if first[name].ndim == 2)


def test_a_norm_that_begins_with_weights_of_zero_has_a_gain(tmp_path: Path) -> None:
    """Gemma 3's fresh norms have γ = 1 + 0: read as γ = weight they would show 0/0."""
    random = load_model(str(save_tiny("gemma3", tmp_path)), device="cpu", random_seed=0)
    for site in random.sites.values():
        assert site.value_gain_source.endswith("γ = 1 + weight")
        torch.testing.assert_close(site.value_gain, torch.ones(32))
    run = analyze(random, random.read(context=32, max_tokens=64), quiet=True)
    assert all(layer.geometry.norm_v.isfinite().all() for layer in run.layers.values())


def test_the_trained_model_is_as_before(tiny_llama: Path, llama: LoadedModel) -> None:
    before = weights_of(llama)
    random = load_model(str(tiny_llama), device="cpu", random_seed=1)
    analyze(random, llama.read(context=32, max_tokens=64), quiet=True)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(llama).items())
