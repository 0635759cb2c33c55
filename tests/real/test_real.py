"""The real models: SmolLM2-135M-Instruct and Gemma 3 270M, from their packages."""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from analysis.errors import UserError
from analysis.measures import asymmetry as measures
from analysis.run import Run
from analysis.sums.layout import Layout
from analysis.sums.tiled import TileReducer
from analysis.theory.actions import Exchange, Scaling, ValueRescaling, residual
from analysis.theory.conversions import bilinear_sibling, exchanged_twin, fitted_coefficients, symmetric_sibling
from analysis.theory.gated import GatedMLP
from analysis.units.registry import Unit
from analysis.weights.geometry import Geometry, PermutedPairs
from analysis.weights.interactions import antisymmetric_share, value_groups
from hooks.collect import analyze
from hooks.loading.builtin import BUILTINS, builtin_directory
from hooks.models import LoadedModel, load_model
from reports.findings.runs import heaviest_neurons
from reports.tables import extremes_table, layers_table, neurons_table

pytestmark = pytest.mark.real
ROOT = Path(__file__).parent.parent.parent


def generate(model: LoadedModel, prompt: str, n_tokens: int) -> str:
    ids = torch.tensor(
        [[*([] if model.bos is None else [model.bos]), *model.tokenizer(prompt, add_special_tokens=False).input_ids]]
    )
    with torch.no_grad():
        for _ in range(n_tokens):
            ids = torch.cat([ids, model.bridge.original_model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return model.tokenizer.decode(ids[0])


def test_they_are_the_real_models(smollm2: LoadedModel, gemma3: LoadedModel) -> None:
    assert "Paris" in generate(smollm2, "The capital of France is", 3)
    assert "Paris" in generate(gemma3, "Rome is the capital of Italy. The capital of France is", 3)
    for model in (smollm2, gemma3):
        assert "dequantized" in model.description["weights"]
        assert model.skipped == {}
        assert all(check.passed for check in model.acceptance)


@pytest.fixture(scope="module")
def smollm2_run(smollm2: LoadedModel) -> Run:
    return analyze(smollm2, smollm2.read(max_tokens=3000), quiet=True)


def test_streamed_moments_are_those_of_cached_activations(smollm2: LoadedModel, smollm2_run: Run) -> None:
    """Every a, b and h of four layers, kept from the plain Hugging Face model, summed in float64."""
    plain = AutoModelForCausalLM.from_pretrained(builtin_directory(BUILTINS["smollm2-135m"])).eval()
    cache: dict[tuple[int, str], list[Tensor]] = {}

    def keep(layer: int, name: str, tensor: Tensor) -> None:
        cache.setdefault((layer, name), []).append(tensor[0].double())

    layers = (0, 11, 15, 28)
    for layer in layers:
        mlp = plain.model.layers[layer].mlp
        mlp.gate_proj.register_forward_hook(lambda *call, layer=layer: keep(layer, "a", call[-1]))
        mlp.up_proj.register_forward_hook(lambda *call, layer=layer: keep(layer, "b", call[-1]))
        mlp.down_proj.register_forward_pre_hook(lambda _, inputs, layer=layer: keep(layer, "h", inputs[0]))
    windows = smollm2.read(max_tokens=3000).windows
    with torch.no_grad():
        for window in windows:
            plain(window.tokens[None])
    table = layers_table(smollm2_run).set_index("layer")
    for layer in layers:
        a, b, h = (
            torch.cat([x[w.counted_from :] for w, x in zip(windows, cache[layer, name], strict=True)]) for name in "abh"
        )
        torch.testing.assert_close(functional.silu(a) * b, h, rtol=1e-5, atol=1e-5)
        sums = smollm2_run.layers[layer].moments.neuron
        swapped, doubled = functional.silu(b) * a, functional.silu(2 * a) * b / 2
        expected = {"a": a, "b": b, "aa": a * a, "ab": a * b, "hh": h * h, "h_ab": h * a * b}
        expected |= {"exchange": swapped**2, "exchange_gap": (h - swapped) ** 2}
        expected |= {"count_pn": ((a > 0) & (b <= 0)).double()}
        tolerance = {"a": 0.02, "b": 0.02, "count_pn": 3}  # sums that cancel; signs of numbers at zero
        for name, values in expected.items():
            torch.testing.assert_close(sums[name], values.sum(0), rtol=1e-4, atol=tolerance.get(name, 1e-3), msg=name)
        gap = sums["scaling_gap"][sums.layout.alphas.index(2.0)]
        torch.testing.assert_close(gap, ((h - doubled) ** 2).sum(0), rtol=1e-4, atol=1e-3)
        weight = plain.model.layers[layer].mlp.down_proj.weight.detach().double().square().sum(0)
        pooled = ((h - swapped) ** 2).sum(0) @ weight / (2 * (h**2 + swapped**2).sum(0) @ weight)
        row = table.loc[layer]
        assert row["exchange"] == pytest.approx(pooled.item(), rel=1e-5)
        per_token = ((h - swapped) ** 2) @ weight / (2 * (h**2 + swapped**2) @ weight)
        assert row["exchange_token_median"] == pytest.approx(per_token.median().item(), abs=3e-4)
        assert row["top_token_share"] == pytest.approx(
            ((h**2) @ weight).max().item() / ((h**2) @ weight).sum().item(), rel=1e-4
        )


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_every_column_is_that_of_float64_statistics(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same activations, by the fused loop and in float64 throughout: values within 1e-5.

    Errors are differences of nearly equal sums, those of neurons from sums that are kept in float32.
    """
    model: LoadedModel = request.getfixturevalue(name)
    text, layers = model.read(max_tokens=2000), [0, 11, 17]
    fast = layers_table(analyze(model, text, layers=layers, quiet=True))

    def exact(unit: Unit, layout: Layout, geometry: Geometry, pairing: PermutedPairs, *_: object) -> TileReducer:
        return TileReducer(unit, layout, geometry, pairing, dtype=torch.float64)

    monkeypatch.setattr("hooks.reading.accumulators.reducer_of", exact)
    slow = layers_table(analyze(model, text, layers=layers, quiet=True))
    assert list(fast.columns) == list(slow.columns)
    for column in fast.select_dtypes("number"):
        limit = 1e-4 if column.endswith("_se") else 1e-5
        np.testing.assert_allclose(fast[column], slow[column], rtol=limit, atol=1e-9, err_msg=column)


def test_the_pass_that_reads_is_the_models_own(smollm2: LoadedModel, gemma3: LoadedModel) -> None:
    """What is listened to is what Hugging Face computes, with the attention it takes by itself."""
    for model in (smollm2, gemma3):
        assert model.network is model.hf_model
        assert all(site.hook_names for site in model.sites.values())
        assert model.hf_model.config._attn_implementation == "sdpa"
        tokens = model.read(max_tokens=300).windows[0].tokens[None]
        with torch.no_grad():
            mine, theirs = model.hf_model(tokens).logits, model.bridge.original_model(tokens).logits
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-4


def test_the_first_token_hides_what_layers_11_and_28_do(smollm2: LoadedModel, smollm2_run: Run) -> None:
    counted = layers_table(smollm2_run).set_index("layer")
    all_positions = smollm2.read(max_tokens=3000, skip_positions=0)
    run = analyze(smollm2, all_positions, layers=[11, 28], quiet=True)
    with_first = layers_table(run).set_index("layer")
    assert with_first.loc[11, "exchange"] < 0.01
    assert with_first.loc[28, "exchange"] < 0.06
    assert counted.loc[11, "exchange"] == pytest.approx(0.4, abs=0.05)
    assert counted.loc[28, "exchange"] == pytest.approx(0.35, abs=0.1)
    for layer in (11, 28):  # the median over tokens is not fooled
        assert with_first.loc[layer, "exchange_token_median"] == pytest.approx(
            counted.loc[layer, "exchange_token_median"], abs=0.01
        )
    assert with_first["few_tokens"].all()
    assert list(run.massive_activation_tokens()) == [11, 28]
    for layer, neuron in ((11, 1229), (28, 678)):
        places = run.massive_activation_tokens()[layer]
        assert {place["position"] for place in places} == {0}
        assert {place["neuron"] for place in places} == {neuron}
        assert sum(place["energy_share"] for place in places) > 0.1


def test_the_extreme_neurons_are_those_of_the_first_token(smollm2_run: Run) -> None:
    """Their token is in the table of extremes, though it is not counted."""
    extremes = extremes_table(smollm2_run).groupby("layer").first()
    for layer, neuron in ((11, 1229), (28, 678)):
        row = extremes.loc[layer]
        assert (row["neuron"], row["position"], row["counted"]) == (neuron, 0, False)
        assert row["score_ratio"] > 15


def test_the_score_finds_the_neurons_that_carry_the_massive_activation(smollm2_run: Run) -> None:
    neurons = neurons_table(smollm2_run).set_index(["layer", "neuron"])
    for layer, neuron, ratio, cosine in ((11, 1229, 19, 0.58), (28, 678, 74, 0.71)):
        score = neurons.loc[layer]["score"]
        assert score.idxmax() == neuron
        assert score.max() / score.median() == pytest.approx(ratio, rel=0.05)
        assert neurons.loc[(layer, neuron), "cos_qk"] == pytest.approx(cosine, abs=0.01)


def test_layer_numbers_do_not_depend_on_the_gauge_but_plain_exchange_does(smollm2: LoadedModel) -> None:
    """k → βk, v → v/β in the real weights: the model is the same, and so is every number but those of raw exchange."""
    layer, corpus = 16, smollm2.read(max_tokens=512)
    before = layers_table(analyze(smollm2, corpus, layers=[layer], quiet=True)).iloc[0]
    mlp = smollm2.bridge.original_model.model.layers[layer].mlp
    up, down = (getattr(mlp, name).original_component.weight for name in ("up_proj", "down_proj"))
    beta = torch.tensor([2.0, -1.0, -0.25, 1.0]).repeat(len(up) // 4)  # powers of two: exact in binary
    with torch.no_grad():
        up.mul_(beta[:, None]), down.div_(beta)
        after = layers_table(analyze(smollm2, corpus, layers=[layer], quiet=True)).iloc[0]
        up.div_(beta[:, None]), down.mul_(beta)
    moved = {
        "output_exchange",
        "exchange",
        "exchange_token_median",
        "exchange_null_gaussian",
        "exchange_null_repaired",
        "placement",
    }
    assert moved < set(before.index)
    for column, value in before.items():
        if column in moved:
            assert after[column] != pytest.approx(value, rel=1e-3), column
        elif "balanced" in column or not column.startswith(("output_exchange", "exchange", "placement", "n_exchange")):
            assert after[column] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), column


def mlp_inputs_and_outputs(model: LoadedModel, text: str) -> dict[int, tuple[Tensor, Tensor]]:
    """x and y of every MLP, from hooks on the model's own modules, position 0 left out."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    layers = model.bridge.original_model.model.layers
    handles = [
        layer.mlp.register_forward_hook(lambda _, x, y, index=index: seen.update({index: (x[0][0, 1:], y[0, 1:])}))
        for index, layer in enumerate(layers)
    ]
    with torch.no_grad():
        model.bridge.original_model(torch.tensor([model.tokenizer(text).input_ids]))
    for handle in handles:
        handle.remove()
    return seen


def test_a_form_filled_from_a_real_layer_is_that_layer(smollm2: LoadedModel) -> None:
    seen = mlp_inputs_and_outputs(smollm2, "The capital of France is Paris, and the capital of Italy is Rome.")
    assert list(seen) == list(smollm2.sites)
    for layer, (x, y) in seen.items():
        form = smollm2.sites[layer].gated_mlp()
        assert form.n_parameters == GatedMLP.count(576, 1536)
        torch.testing.assert_close(form(x), y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))
        x, wide = x.double(), form.to(torch.float64)
        assert residual(wide, ValueRescaling(torch.linspace(-3, 4, 1536).double()), x) < 1e-12
        assert residual(wide, Exchange(), x) > 0.1
        assert residual(wide, Scaling(2.0), x) > 0.01
        coefficients = fitted_coefficients(wide, x)
        errors = [
            float((sibling(x) - wide(x)).norm() / wide(x).norm())
            for sibling in (bilinear_sibling(wide, coefficients), symmetric_sibling(wide), exchanged_twin(wide))
        ]
        assert 0.01 < errors[0] < 1
        assert errors[2] == pytest.approx(residual(wide, Exchange(), x), rel=1e-9)
        assert residual(symmetric_sibling(wide), Exchange(), x) == 0


def test_what_the_interactions_of_smollm2_show(smollm2: LoadedModel) -> None:
    """The aligned q and k of the two neurons that carry the massive activation show in the whole layer's share."""
    shares, ranks = {}, {}
    for layer in (2, 8, 11, 28):
        site = smollm2.sites[layer]
        q, k, v = (w.double() for w in (site.q * site.gain, site.k * site.gain, site.v))
        shares[layer] = antisymmetric_share(q, k, v)
        ranks[layer] = [(len(group.neurons), group.rank) for group in value_groups(q, k, v, 0.9)]
    assert shares[28] == pytest.approx(0.305, abs=0.003)
    assert shares[11] == pytest.approx(0.442, abs=0.003)
    assert shares[2] == pytest.approx(0.496, abs=0.003)
    assert ranks == {2: [(3, 3)], 8: [(3, 3), (2, 2)], 11: [(2, 2)], 28: []}
    q, k, v = (weight[:40, :64] for weight in (q, k, v))
    whole = torch.einsum("ju,ja,jb->uab", v, q, k)
    brute = ((whole - whole.mT) / 2).square().sum() / whole.square().sum()
    assert antisymmetric_share(q, k, v, rows_at_once=7) == pytest.approx(float(brute), rel=1e-10)


@pytest.fixture(scope="module")
def gemma3_run(gemma3: LoadedModel) -> Run:
    return analyze(gemma3, gemma3.read(max_tokens=1500), quiet=True)


def test_gemma3_gives_eighteen_rows(gemma3_run: Run) -> None:
    layers = layers_table(gemma3_run)
    assert list(layers["layer"]) == list(range(18))
    assert np.isfinite(layers.to_numpy(dtype=float)).all()
    assert {layer.unit.name for layer in gemma3_run.layers.values()} == {"gelu_pytorch_tanh"}
    assert {layer.gain for layer in gemma3_run.layers.values()} == {
        "pre_feedforward_layernorm, γ = 1 + weight; v: post_feedforward_layernorm, γ = 1 + weight"
    }
    for layer in gemma3_run.layers.values():
        assert measures.exchange(layer.moments.neuron).isfinite().all()


@pytest.mark.parametrize(("name", "layers"), [("smollm2", (0, 4, 29)), ("gemma3", (7, 8, 10))])
def test_what_layers_write_is_that_of_the_plain_model(
    name: str, layers: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    """By the plain Hugging Face modules, in float64 from the MLP's input on: what the block adds, and edited."""
    model, run = request.getfixturevalue(name), request.getfixturevalue(f"{name}_run")
    builtin = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}[name]
    plain = AutoModelForCausalLM.from_pretrained(builtin_directory(BUILTINS[builtin])).eval()
    windows = model.read(max_tokens={"smollm2": 3000, "gemma3": 1500}[name]).windows
    seen: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for layer in layers:
        mlp = plain.model.layers[layer].mlp
        mlp.register_forward_pre_hook(lambda _, inputs, layer=layer: seen[layer].append(inputs[0][0]))
    table = layers_table(run).set_index("layer")
    with torch.no_grad():
        for window in windows:
            plain.model(window.tokens[None])
        plain.double()
        for layer in layers:
            x = torch.cat([x[w.counted_from :] for w, x in zip(windows, seen[layer], strict=True)]).double()
            block, act = plain.model.layers[layer], functional.silu
            gain, after = block.post_attention_layernorm.weight, lambda y: y
            if name == "gemma3":
                gain, after = 1 + block.pre_feedforward_layernorm.weight, block.post_feedforward_layernorm
                act = partial(functional.gelu, approximate="tanh")
            q, k = block.mlp.gate_proj.weight, block.mlp.up_proj.weight
            a, b, beta = x @ q.T, x @ k.T, (q * gain).norm(dim=1) / (k * gain).norm(dim=1)
            beta = beta * ((q * gain) * (k * gain)).sum(dim=1).sign()
            edits = {
                "exchange": act(b) * a,
                "exchange_balanced": act(beta * b) * a / beta,
                "scaling_half": act(a / 2) * b * 2,
                "scaling_double": act(2 * a) * b / 2,
                "scaling_flip": act(-a) * -b,
                "scaling_zero": a * b / 2,
                "scaling_infinity": a.relu() * b,
            }
            raw = block.mlp.down_proj(act(a) * b)
            y, row = after(raw), table.loc[layer]
            assert row["output_tokens"] == len(y)
            assert row["output_energy"] == pytest.approx(float(y.square().sum(dim=1).mean()), rel=1e-5)
            share = y.mean(dim=0).square().sum() / y.square().sum(dim=1).mean()
            assert row["output_mean_share"] == pytest.approx(float(share), rel=1e-5)
            for edit, h in edits.items():
                before = block.mlp.down_proj(h)
                readings = {"": (y, after(before)), "_centred": (y - y.mean(0), after(before) - after(before).mean(0))}
                if name == "gemma3":
                    readings["_raw"] = raw, before
                for reading, (f, e) in readings.items():
                    expected = (f - e).square().sum() / (2 * (f.square().sum() + e.square().sum()))
                    assert row[f"output_{edit}{reading}"] == pytest.approx(float(expected), rel=1e-4), (layer, edit)


def stated_of_gemma3(row: str) -> float:
    """The median over layers that docs/findings.md states, in the last column of that row."""
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    return float(re.search(rf"^\| {row} \|.*\| ([\d.]+) \([^|]*\|$", text, re.MULTILINE)[1])


def test_what_docs_findings_says_of_gemma3(gemma3_run: Run) -> None:
    """Loosely: it is of 9,903 tokens, this of fewer, on which c·ab with its best c explains a little more."""
    layers, neurons = layers_table(gemma3_run).set_index("layer"), neurons_table(gemma3_run)
    heaviest = heaviest_neurons(gemma3_run, neurons).set_index("layer")
    for column, row, slack in (
        ("bilinear_share", "bilinear share", 0.04),
        ("scaling_double", "scaling, α = 2", 0.003),
        ("exchange_balanced_neuron_median", "its median over neurons", 0.02),
    ):
        assert layers[column].median() == pytest.approx(stated_of_gemma3(row), abs=slack), column
    assert layers.loc[0, "exchange_balanced"] < 0.06 < 0.3 < layers.loc[0, "exchange_balanced_neuron_median"]
    assert layers.loc[1:8, "exchange_balanced"].min() > 0.17
    assert layers.loc[9:, "exchange_balanced"].max() < 0.3
    for layer, neuron in ((5, 584), (6, 1824), (7, 1455), (8, 188)):
        row = heaviest.loc[layer]
        assert (row["neuron"], layers.loc[layer, "effective_neurons"] < 5) == (neuron, True)
        assert row["gate_positive"] < 0.01
        assert row["energy_share"] < 0.4
        assert row["share"] > 0.4
        assert row["score_ratio"] == pytest.approx(layers.loc[layer, "score_max_ratio"], rel=1e-5)


def test_gemma3_in_float16_is_refused_with_the_remedy() -> None:
    """Its residual stream exceeds what float16 holds."""
    model = load_model("gemma3-270m", device="cpu", dtype="float16")
    with pytest.raises(UserError, match="NaN or infinite in windows 0-0, beyond what float16 holds: use --dtype bfloat16"):
        analyze(model, model.read(max_tokens=64, context=64), quiet=True)


def test_the_second_load_is_quick(smollm2: LoadedModel) -> None:
    """Loose on purpose, for a noisy machine: converting again takes ten times as long."""
    started = time.perf_counter()
    load_model("smollm2-135m", device="cpu")
    assert time.perf_counter() - started < 10


def test_the_readmes_command_gives_thirty_rows(tmp_path: Path) -> None:
    """The first command of the README in a folder of its own, on part of the text; ``.ci/run`` runs it as it stands."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^pip install -c constraints\.txt -e \. && python run_analysis\.py analyze$", readme, re.MULTILINE)
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_analysis.py"), "analyze", "--tokens", "4000"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "30 of 30 layers" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr
    layers = pd.read_csv(tmp_path / "out" / "smollm2-135m" / "layers.csv")
    assert len(layers) == 30
    assert np.isfinite(layers.drop(columns=layers.filter(regex="_raw(_se)?$")).to_numpy(dtype=float)).all()
    assert layers["exchange"].between(0.05, 0.6).all()
    assert len(pd.read_parquet(tmp_path / "out" / "smollm2-135m" / "neurons.parquet")) == 30 * 1536
