"""What a layer writes, against plain Hugging Face models whose MLPs are edited by hand: the change of a block's output."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.errors import UserError
from analysis.run import Run
from analysis.sums.output_edits import versions_of
from analysis.sums.output_moments import READINGS, OutputMoments
from hooks.collect import analyze, output_share_for
from hooks.corpus import Corpus
from hooks.models import LoadedModel, load_model
from tests.helpers.by_hand import KNOWN, KNOWN_MIXTURES, by_hand, edit_by_hand, experts_by_hand, plain_model
from tests.helpers.command_line import QUICK, call, refused
from tests.helpers.families import Families, grid

EDITS = {
    "exchange": "exchange",
    "scaling_half": "scale:0.5",
    "scaling_double": "scale:2",
    "scaling_flip": "flip",
    "scaling_zero": "bilinear-limit",
    "scaling_infinity": "relu-limit",
}
"""Column names, with the names of the edits by hand."""
LAYER = 1


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return model.transformer.blocks if hasattr(model, "transformer") else model.model.layers


def counted(model: nn.Module, corpus: Corpus, block: nn.Module) -> Tensor:
    """What a block puts into the residual stream on the counted tokens."""
    seen: list[Tensor] = []
    handle = block.register_forward_hook(
        lambda *call: seen.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1])
    )
    with torch.no_grad():
        for window in corpus.windows:
            model(window.tokens[None])
    handle.remove()
    return torch.cat([x.view(-1, x.shape[-1])[w.counted_from :] for w, x in zip(corpus.windows, seen, strict=True)])


def added(model: nn.Module, corpus: Corpus, edited: Callable[[str], AbstractContextManager[None]]) -> dict[str, Tensor]:
    """What every edit adds to a block's output."""
    block = blocks_of(model)[LAYER]
    own, found = counted(model, corpus, block), {}
    for column, edit in (EDITS | {"nothing": "zero"}).items():
        with edited(edit):
            found[column] = counted(model, corpus, block) - own
    return found


def assert_written(output: OutputMoments | None, changes: dict[str, Tensor], limit: float = 1e-4) -> None:
    """The gap of every edit is the change of the block, and the energy that of its change without any h."""
    assert output is not None
    gap, energy, names = output.gap.sum(-1), output.energy.sum(-1), versions_of(output.unit)
    reading = READINGS.index("written")
    assert set(EDITS) < set(output.edits)
    for column in EDITS:
        own = float(changes[column].square().sum())
        assert float(gap[reading, output.edits.index(column)]) == pytest.approx(own, rel=limit, abs=1e-9), column
        after = float((changes[column] - changes["nothing"]).square().sum())
        assert float(energy[reading, names.index(column)]) == pytest.approx(after, rel=limit), column
    assert float(energy[reading, 0]) == pytest.approx(float(changes["nothing"].square().sum()), rel=limit)
    torch.testing.assert_close(output.total[0].sum(0), -changes["nothing"].double().sum(0), rtol=1e-3, atol=1e-4)


def measured(model: LoadedModel, **options: int) -> tuple[Run, Corpus]:
    corpus = model.read(context=24, max_tokens=72)
    return analyze(model, corpus, quiet=True, draws=1, **options), corpus


@pytest.mark.parametrize("family", grid([name for name in KNOWN if name != "llama-bias"]))
def test_the_changes_of_a_dense_layer_are_those_of_its_block(families: Families, family: str) -> None:
    """With parallel attention, norms behind the MLP, and multipliers; with no h a layer without bias writes 0."""
    run, corpus = measured(families.loaded(family))
    model = plain_model(families.directory(family), torch.float64)
    changes = added(model, corpus, lambda edit: by_hand(model, {LAYER: edit_by_hand(edit)}))
    if family == "relu":
        changes["scaling_zero"] = 0 * changes["scaling_zero"]  # no positive scale changes ReLU, nor does its limit
    assert_written(run.layers[LAYER].output, changes)


@pytest.mark.parametrize("family", grid(KNOWN_MIXTURES))
def test_the_changes_of_a_mixture_are_those_of_its_block(families: Families, family: str) -> None:
    """Every expert edited at once, token by token, with routing weights and the shared expert."""
    run, corpus = measured(families.loaded(family))
    model = plain_model(families.directory(family))  # grouped products of experts exist in single precision only
    changes = added(model, corpus, lambda edit: experts_by_hand(model, LAYER, edit))
    assert_written(run.layers[LAYER].output, changes, limit=1e-3)


def added_by_gemma(block: nn.Module, h: Tensor) -> Tensor:
    """The end of a block of Gemma 3 by hand: norm(down(h)), the norm with a gain of 1 + w."""
    y, norm = h @ block.mlp.down_proj.weight.T, block.post_feedforward_layernorm
    return y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (1 + norm.weight)


def test_both_readings_of_a_layer_with_a_norm_behind_it(families: Families) -> None:
    run, corpus = measured(families.loaded("gemma3"))
    model = plain_model(families.directory("gemma3"), torch.float64)
    block, seen = model.model.layers[LAYER], []
    handle = block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        for window in corpus.windows:
            model(window.tokens[None])
        handle.remove()
        x = torch.cat([rows[w.counted_from :] for w, rows in zip(corpus.windows, seen, strict=True)])
        a, b = block.mlp.gate_proj(x), block.mlp.up_proj(x)
        gain = 1 + block.pre_feedforward_layernorm.weight
        q, k = block.mlp.gate_proj.weight * gain, block.mlp.up_proj.weight * gain
        beta = q.norm(dim=1) / k.norm(dim=1) * (q * k).sum(dim=1).sign()
        h, edited = block.mlp.act_fn(a) * b, block.mlp.act_fn(beta * b) * a / beta
        down = block.mlp.down_proj.weight.T
        raw = h @ down, edited @ down
        written = added_by_gemma(block, h), added_by_gemma(block, edited)
    row = run.layers[LAYER].estimates.layer_numbers()
    for name, (y, e) in {"output_exchange_balanced": written, "output_exchange_balanced_raw": raw}.items():
        expected = (y - e).square().sum() / (2 * (y.square().sum() + e.square().sum()))
        assert row[name] == pytest.approx(float(expected), rel=1e-4), name
    assert row["output_exchange_balanced"] != pytest.approx(row["output_exchange_balanced_raw"], rel=1e-2)
    assert row["output_energy"] == pytest.approx(float(written[0].square().sum(dim=1).mean()), rel=1e-4)


@pytest.mark.parametrize("family", grid(["gemma3", "qwen2_moe", "gpt_oss"], ["gemma3"]))
def test_batches_and_shards_write_the_same(families: Families, family: str) -> None:
    """To 1e-9 in double precision; gpt-oss has a unit that is not linear in up, and biases."""
    model = load_model(str(families.directory(family)), device="cpu", dtype="float64")

    def read(batch_size: int, shard: str = "0/1") -> Run:
        corpus = model.read(context=24, max_tokens=240, shard=shard)
        return analyze(model, corpus, quiet=True, draws=1, batch_size=batch_size, output_share=0.5)

    whole, alone = read(7), read(1)
    parts = [read(2, shard) for shard in ("0/3", "1/3", "2/3")]
    for other in (alone, Run.merge(parts)):
        for index, layer in whole.layers.items():
            assert layer.output is not None
            assert 0.3 * 240 < layer.output.n_tokens < 0.7 * 240
            mine, theirs = (each.layers[index].output.tensors() for each in (whole, other))
            for name, values in mine.items():
                limit = 1e-5 if name == "sample.outputs" else 1e-9  # kept in single precision
                atol = 1e-6 if name == "sample.outputs" else 1e-12
                torch.testing.assert_close(theirs[name], values, rtol=limit, atol=atol, msg=f"{index} {name}")


def test_a_share_has_the_tokens_of_the_whole_and_about_its_numbers(llama: LoadedModel) -> None:
    corpus = llama.read(context=64, max_tokens=2000)
    whole, half = (analyze(llama, corpus, quiet=True, draws=1, output_share=share) for share in (1.0, 0.5))
    assert whole.layers[0].output.n_tokens == corpus.n_counted_everywhere
    for index, layer in whole.layers.items():
        assert layer.moments.n_tokens == half.layers[index].moments.n_tokens
        own, other = (run.layers[index].estimates.layer_numbers() for run in (whole, half))
        for name in ("output_exchange_balanced", "output_scaling_flip", "output_mean_share"):
            assert abs(own[name] - other[name]) < 4 * other[f"{name}_se"], name
            assert own[name] != other[name]
            assert own[f"{name}_se"] < 2 * other[f"{name}_se"] < 6 * own[f"{name}_se"]


def test_the_default_share_is_of_the_whole_text_on_every_shard(llama: LoadedModel) -> None:
    short, long = llama.read(context=64, max_tokens=2000), llama.read(context=64, max_tokens=9000)
    assert output_share_for(short) == 1
    assert output_share_for(long) == pytest.approx(4096 / long.n_counted_everywhere, rel=1e-5)
    shards = [llama.read(context=64, max_tokens=9000, shard=f"{k}/2") for k in (0, 1)]
    assert output_share_for(shards[0]) == output_share_for(shards[1]) == output_share_for(long)


def test_a_layer_whose_way_to_the_residual_stream_is_unknown_is_refused_by_name(families: Families, tmp_path: Path) -> None:
    """Gemma 3n mixes four streams behind its MLP."""
    code, out, _ = call("analyze", families.directory("gemma3n"), "--out", tmp_path / "run", *QUICK)
    assert code == 0
    words = " ".join(out.split())
    assert "layers 0-2: what is written was not measured" in words
    assert "What the layers write was not measured" in words
    run = Run.load(tmp_path / "run")
    assert all(layer.output is None for layer in run.layers.values())
    assert run.missing()["output_*"].endswith("could not be verified: layers 0-2")
    row = run.layers[0].estimates.layer_numbers()
    assert np.isnan(row["output_exchange_balanced"])
    assert row["exchange_balanced"] > 0


@pytest.mark.parametrize("share", [0, 2, -0.5, "nan", "inf"])
def test_a_share_that_is_none_is_refused(tiny_llama: Path, tmp_path: Path, share: object) -> None:
    line = refused("analyze", tiny_llama, "--output-share", share, "--out", tmp_path / "no")
    assert f"output share of {float(share):g}" in line
    assert "between 0.0001 and 1" in line
    assert not (tmp_path / "no").exists()


def test_shards_of_different_shares_do_not_merge(llama: LoadedModel) -> None:
    first, second = (
        analyze(llama, llama.read(context=24, max_tokens=96, shard=f"{k}/2"), quiet=True, draws=1, output_share=share)
        for k, share in ((0, 1.0), (1, 0.5))
    )
    with pytest.raises(UserError, match=r"differ in output_share \(1.0 and 0.5\).*give the same --output-share"):
        Run.merge([first, second])
