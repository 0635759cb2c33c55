"""Numbers beyond what a dtype holds are refused with the remedy, wherever they appear, and nothing is written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from analysis.errors import UserError
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from hooks.reading import batches as reading
from tests.helpers.command_line import QUICK, refused

LAYER = 1


def part_of(model: LoadedModel, layer: int, name: str) -> nn.Module:
    mlp = model.bridge.original_model.model.layers[layer].mlp
    return getattr(mlp, name).original_component


def exploding(model: LoadedModel, name: str, position: int | None = None, layer: int = LAYER) -> LoadedModel:
    """The model with a projection whose output is multiplied beyond float16, everywhere or at one position."""

    def explode(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        where = slice(None) if position is None else slice(position, position + 1)
        output = output.clone()
        output[:, where] *= 6e4
        output[:, where] *= 6e4
        return output

    part_of(model, layer, name).register_forward_hook(explode)
    return model


def half(directory: Path) -> LoadedModel:
    return load_model(str(directory), device="cpu", dtype="float16")


PLACES: dict[str, tuple[Callable[[LoadedModel], LoadedModel], list[int] | None, str]] = {
    "a": (lambda model: exploding(model, "gate_proj"), None, "activations of layer 1"),
    "b": (lambda model: exploding(model, "up_proj"), None, "activations of layer 1"),
    "an uncounted position": (lambda model: exploding(model, "up_proj", 0), [0, 1], "the residual stream after"),
    "the residual after the last hook": (lambda model: exploding(model, "down_proj"), [0, 1], "the residual stream after"),
    "the residual after the last layer": (
        lambda model: exploding(model, "down_proj", layer=2),
        None,
        "the residual stream",
    ),
    "the residual before a layer": (lambda model: exploding(model, "down_proj"), None, "activations of layer 2"),
}


@pytest.mark.parametrize(("tamper", "layers", "where"), PLACES.values(), ids=PLACES)
def test_overflow_is_refused_with_its_place_and_the_remedy(
    tiny_llama: Path, tamper: Callable[[LoadedModel], LoadedModel], layers: list[int] | None, where: str
) -> None:
    model = tamper(half(tiny_llama))
    with pytest.raises(UserError) as caught:
        analyze(model, model.read(context=32, max_tokens=160), layers=layers, quiet=True)
    message = str(caught.value)
    assert message.startswith(where)
    assert "NaN or infinite in windows 0-4, beyond what float16 holds: use --dtype bfloat16 or float32" in message


def test_a_model_that_fits_is_not_refused(tiny_llama: Path) -> None:
    model = half(tiny_llama)
    assert analyze(model, model.read(context=32, max_tokens=160), quiet=True).layers


@pytest.mark.parametrize(("position", "is_read"), [(0, True), (8, True), (9, False)])
def test_padding_may_overflow(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, position: int, is_read: bool) -> None:
    """What stands behind the end of a short window is not read, so it says nothing."""
    from dataclasses import replace

    capture_pass = reading.capture_pass

    def overflowing(*arguments: object, **options: object) -> Tensor:
        last = capture_pass(*arguments, **options).clone()
        last[-1, position] = torch.inf
        return last

    corpus = llama.read(context=32, max_tokens=64)
    short = replace(corpus.windows[1], tokens=corpus.windows[1].tokens[:9])
    corpus = replace(corpus, windows=(corpus.windows[0], short))
    monkeypatch.setattr(reading, "capture_pass", overflowing)
    if is_read:
        with pytest.raises(UserError, match="residual stream"):
            analyze(llama, corpus, quiet=True)
    else:
        assert analyze(llama, corpus, quiet=True).layers


def test_nothing_is_written(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hooks.measure.load_model", lambda *_, **__: exploding(half(tiny_llama), "down_proj"))
    line = refused("analyze", tiny_llama, "--dtype", "float16", "--layers", "0-1", "--out", tmp_path / "run", *QUICK)
    assert "use --dtype bfloat16 or float32" in line
    assert not (tmp_path / "run").exists()
