"""Runs of models with experts and of models with norms after their MLP, against numbers worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from hooks.collect import analyze
from hooks.models import LoadedModel
from reports.tables import experts_table, layers_table
from tests.helpers.command_line import QUICK, call
from tests.helpers.families import Families, grid
from tests.helpers.mlps_by_hand import gelu_tanh, load_plain, read_by_hand, silu

pytestmark = pytest.mark.usefixtures("without_figures")
CONTEXT, TOKENS = 32, 320


def gpt_oss(a: Tensor, b: Tensor) -> Tensor:
    return (b.clamp(-7, 7) + 1) * a.clamp(max=7) * torch.sigmoid(1.702 * a.clamp(max=7))


def gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: act(a) * b


def down_of(block: Any, expert: int) -> Tensor:
    """Values of an expert (−1: of what every token reads), one row a neuron, by the family's own names."""
    mlp = getattr(block, "mlp", None) or getattr(block, "feed_forward", None) or block.block_sparse_moe
    if expert >= 0:
        down, inputs_first = mlp.experts.down_proj[expert], ("GptOssExperts", "Llama4TextExperts")
        return down if type(mlp.experts).__name__ in inputs_first else down.T
    shared = next((getattr(mlp, name) for name in ("shared_expert", "shared_experts") if hasattr(mlp, name)), mlp)
    return shared.down_proj.weight.T


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Any], Tensor | float]]] = {
    "mixtral": (gated(silu), lambda block: 1.0),
    "qwen2_moe": (gated(silu), lambda block: 1.0),
    "deepseek_v3": (gated(silu), lambda block: 1.0),
    "granitemoe": (gated(silu), lambda block: 0.5),
    "gpt_oss": (gpt_oss, lambda block: 1.0),
    "llama4": (gated(silu), lambda block: 1.0),
    "gemma3": (gated(gelu_tanh), lambda block: 1 + block.post_feedforward_layernorm.weight),
    "olmo2": (gated(silu), lambda block: block.post_feedforward_layernorm.weight),
}
"""For every family its unit, and what is applied to the output before it reaches the residual stream."""


def by_hand(family: str, directory: Path, model: LoadedModel) -> list[dict[int, list[tuple[Tensor, Tensor, Tensor]]]]:
    """For every layer and expert: routing weight, a and b of the counted tokens of every window."""
    plain = load_plain(directory, family)
    found: list[dict[int, list[tuple[Tensor, Tensor, Tensor]]]] = []
    for window in model.read(context=CONTEXT, max_tokens=TOKENS).windows:
        for layer, seen in enumerate(read_by_hand(plain, family, window.tokens[None])):
            if len(found) <= layer:
                found.append({})
            for expert, part in seen.items():
                counted = part.place >= window.counted_from
                found[layer].setdefault(expert, []).append((part.weight[counted], part.a[counted], part.b[counted]))
    return found


@pytest.mark.parametrize("family", grid(CASES, ["qwen2_moe", "gpt_oss"]))
def test_layers_and_experts_are_what_they_are_by_hand(families: Families, family: str) -> None:
    """Exchange, scaling at 2 and energy of every expert and layer: Σ r² w (h − h′)² over 2 Σ r² w (h² + h′²)."""
    directory, model = families.directory(family), families.loaded(family)
    run = analyze(model, model.read(context=CONTEXT, max_tokens=TOKENS), quiet=True)
    unit, after = CASES[family]
    blocks, layers = load_plain(directory, family).model.layers, layers_table(run).set_index("layer")
    experts = experts_table(run)
    for index, parts in enumerate(by_hand(family, directory, model)):
        sums: dict[int, np.ndarray] = {}
        with torch.no_grad():
            for expert, windows in parts.items():
                values = (down_of(blocks[index], expert) * after(blocks[index])).double()
                worth = values.square().sum(dim=1)
                total = np.zeros(5)
                for r, a, b in windows:
                    h, swapped, scaled = unit(a, b), unit(b, a), unit(2 * a, b / 2)
                    for place, energy in enumerate((h, swapped, h - swapped, scaled, h - scaled)):
                        total[place] += float(((r[:, None] * energy) ** 2 @ worth).sum())
                sums[expert] = total
        whole = sum(sums.values())
        row = layers.loc[index]
        assert row["exchange"] == pytest.approx(whole[2] / (2 * (whole[0] + whole[1])), rel=2e-4)
        assert row["scaling_double"] == pytest.approx(whole[4] / (2 * (whole[0] + whole[3])), rel=2e-3)
        for expert, total in sums.items():
            if experts is None or list(sums) == [-1]:
                continue  # a dense layer
            line = experts[experts["layer"] == index].set_index("expert").loc[expert]
            assert line["exchange"] == pytest.approx(total[2] / (2 * (total[0] + total[1])), rel=2e-4)
            assert line["energy_share"] == pytest.approx(total[0] / whole[0], rel=2e-4)
            assert line["n_tokens"] == sum(len(r) for r, _, _ in parts[expert])


def test_a_mixture_on_the_command_line(families: Families, tmp_path: Path) -> None:
    """Files, costs of single neurons beside what was predicted, shards that merge to the whole, and a second look."""
    directory, whole = families.directory("qwen2_moe"), tmp_path / "whole"
    quick = [argument for argument in QUICK if argument != "--quiet"]
    code, out, _ = call("analyze", directory, "--out", whole, "--causal", "both", "--causal-tokens", 64, *quick)
    assert code == 0, out
    words = " ".join(out.split())
    assert "mixtures of 4 experts, 2 per token plus a shared one" in words
    neurons, experts = pd.read_parquet(whole / "neurons.parquet"), pd.read_csv(whole / "experts.csv")
    assert neurons.groupby(["layer", "expert"]).size().to_dict() == {
        (layer, expert): 40 if expert < 0 else 24 for layer in range(3) for expert in (-1, 0, 1, 2, 3)
    }
    assert (experts.groupby("layer")["expert"].apply(list).map(lambda found: found == [0, 1, 2, 3, -1])).all()
    single = pd.read_csv(whole / "causal_neurons.csv")
    joined = single.merge(neurons, on=["layer", "expert", "neuron"], how="left")
    assert joined["exchange"].notna().any()
    assert len(joined) == len(single) == 400
    order = joined["predicted"].abs().rank().corr(joined["attribution_exchange"].abs().rank())
    assert order > 0.9  # of other windows, but of the same neurons
    for shard in ("0/2", "1/2"):
        assert call("analyze", directory, "--out", tmp_path / shard[0], "--shard", shard, *QUICK)[0] == 0
    assert call("merge", tmp_path / "0", tmp_path / "1", "--out", tmp_path / "merged", "--quiet")[0] == 0
    merged = pd.read_csv(tmp_path / "merged" / "experts.csv")
    for column in experts.select_dtypes("number"):
        np.testing.assert_allclose(merged[column], experts[column], rtol=1e-4, atol=1e-9, err_msg=column)
    code, out, _ = call("compare", whole, tmp_path / "merged", "--out", tmp_path / "both", "--json")
    assert code == 0
    json.loads(out)
    assert call("analyze", directory, "--out", tmp_path / "null", "--null", "random-init", *QUICK)[0] == 0
    assert "exchange_null_random" in pd.read_csv(tmp_path / "null" / "layers.csv")
    before = (whole / "experts.csv").read_text()
    assert call("report", whole, "--quiet")[0] == 0
    assert (whole / "experts.csv").read_text() == before


@pytest.mark.parametrize("family", grid(["t5", "modernbert"], ["t5"]))
def test_an_encoder_on_the_command_line(families: Families, family: str, tmp_path: Path) -> None:
    directory, out = families.directory(family), tmp_path / "out"
    assert call("analyze", directory, "--out", out, *QUICK)[0] == 0
    assert not (out / "causal.csv").exists()
    code, _, err = call("analyze", directory, "--out", out, "--causal", "exact", *QUICK)
    assert code == 2
    assert "does not predict the next token, so edits have no cost: use --causal none" in err
