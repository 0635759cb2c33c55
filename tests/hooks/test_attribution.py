"""Attributions are derivatives: finite differences of a plain model in float64, edited by hand, converge to them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from analysis.causal.costs import Attribution, error_per_token
from analysis.causal.edits import Edit, Partial, make_edit
from analysis.run import Run
from hooks.collect import analyze
from hooks.corpus import Window
from hooks.models import LoadedModel, load_model
from hooks.patching.attribution import attribute
from hooks.patching.edit_coefficients import fit_coefficients
from hooks.patching.single_neurons import patch_single_neurons
from hooks.patching.sweep import sweep
from tests.helpers.by_hand import by_hand, edit_by_hand, only, plain_model

NAMES = ("exchange", "flip", "scale:2", "zero")


@pytest.fixture(scope="module", autouse=True)
def float64_throughout() -> Iterator[None]:
    """Norms and softmax of the Hugging Face model round to float32, which would drown the differences taken here."""
    softmax = torch.nn.functional.softmax

    def norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def precise(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.promote_types(dtype or x.dtype, x.dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", norm)
        patch.setattr(torch.nn.functional, "softmax", precise)
        yield


@pytest.fixture(scope="module")
def wide(tiny_llama: Path, float64_throughout: None) -> LoadedModel:
    return load_model(str(tiny_llama), device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def windows(wide: LoadedModel) -> tuple[Window, ...]:
    return wide.read(context=24, max_tokens=120).windows[:3]


@pytest.fixture(scope="module")
def edits(wide: LoadedModel, windows: tuple[Window, ...]) -> dict[int, dict[str, Edit]]:
    run: Run = analyze(wide, wide.read(context=24, max_tokens=120), quiet=True)
    coefficients = fit_coefficients(wide, windows, run)
    return {layer: {name: make_edit(name, fit) for name in NAMES} for layer, fit in coefficients.items()}


@pytest.fixture(scope="module")
def found(wide: LoadedModel, windows: tuple[Window, ...], edits: dict[int, dict[str, Edit]]) -> Attribution:
    return attribute(wide, windows, edits)


def loss(plain: nn.Module, window: Window) -> float:
    """Summed cross-entropy of the tokens that are counted and followed by another."""
    with torch.no_grad():
        log_p = torch.log_softmax(plain(window.tokens[None]).logits[0], -1)
    places = range(window.counted_from, len(window.tokens) - 1)
    return -sum(float(log_p[t, window.tokens[t + 1]]) for t in places)


def part_by_hand(name: str, epsilon: float, neuron: int, window: Window) -> object:
    """h + ε(h′ − h) for one neuron on the counted positions."""
    counted = torch.arange(len(window.tokens)) >= window.counted_from

    def unit(seen: SimpleNamespace) -> Tensor:
        chosen = torch.arange(seen.h.shape[-1]) == neuron
        return torch.where(chosen, seen.h + epsilon * (edit_by_hand(name)(seen) - seen.h), seen.h)

    return only(counted, unit)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_they_are_finite_differences_of_a_plain_model(
    tiny_llama: Path, windows: tuple[Window, ...], found: Attribution, layer: int
) -> None:
    plain, step = plain_model(tiny_llama, torch.float64), 1e-5
    for e, name in enumerate(NAMES):
        for neuron in (0, 17, 47):
            slope = 0.0
            for window in windows:
                ends = []
                for epsilon in (step, -step):
                    with by_hand(plain, {layer: part_by_hand(name, epsilon, neuron, window)}):
                        ends.append(loss(plain, window))
                slope += (ends[0] - ends[1]) / (2 * step)
            n_tokens = sum(len(window.tokens) - 1 - window.counted_from for window in windows)
            assert found.neurons(layer)[e, neuron].item() == pytest.approx(slope / n_tokens, rel=1e-5, abs=1e-8)
    assert found.base.tolist() == pytest.approx([loss(plain, window) for window in windows], rel=1e-9)


def test_the_exact_cost_of_a_small_part_of_an_edit_converges_to_them(
    wide: LoadedModel, windows: tuple[Window, ...], edits: dict[int, dict[str, Edit]], found: Attribution
) -> None:
    """The distance of cost/ε from the prediction falls in proportion to ε, in every layer."""
    distances = []
    for epsilon in (1e-2, 1e-3, 1e-4):
        parts = {layer: {name: Partial(edit, epsilon) for name, edit in of.items()} for layer, of in edits.items()}
        swept = sweep(wide, windows, parts)
        exact = torch.stack([swept.layers[layer].single[1, :, 0, 0] for layer in edits]) / epsilon
        predicted = torch.stack([found.layers[layer].total for layer in edits])
        distances.append((exact - predicted).abs())
    for nearer, further in zip(distances[1:], distances, strict=False):
        assert float((nearer / further).median()) == pytest.approx(0.1, rel=0.05)
    assert float((distances[-1] / predicted.abs()).median()) < 1e-3


def test_every_sequence_enters_the_error(
    wide: LoadedModel, windows: tuple[Window, ...], edits: dict[int, dict[str, Edit]], found: Attribution
) -> None:
    alone = [attribute(wide, [window], edits) for window in windows]
    for layer in edits:
        sums = torch.stack([one.layers[layer].x for one in alone], dim=-1)
        torch.testing.assert_close(found.neuron_errors(layer), error_per_token(sums, found.n_tokens))
        assert bool(alone[0].neuron_errors(layer).isnan().all())


def test_the_model_is_left_as_it_was(wide: LoadedModel, windows: tuple[Window, ...], edits: dict) -> None:
    weights = list(wide.bridge.original_model.parameters())
    required = [weight.requires_grad for weight in weights]
    for place, weight in enumerate(weights):
        weight.requires_grad_(place % 2 == 0)
    before = [(weight.requires_grad, weight.detach().clone()) for weight in weights]
    with torch.no_grad():  # also where the caller wants no gradients
        attribute(wide, windows[:1], edits)
    after = [weight.requires_grad for weight in weights]
    for weight, now in zip(weights, required, strict=True):
        weight.requires_grad_(now)
    assert after == [needed for needed, _ in before]
    for weight, (_, value) in zip(weights, before, strict=True):
        assert weight.grad is None
        assert torch.equal(weight, value)


def test_neurons_one_by_one_are_edited_alone(
    tiny_llama: Path, wide: LoadedModel, windows: tuple[Window, ...], edits: dict[int, dict[str, Edit]], found: Attribution
) -> None:
    single = patch_single_neurons(wide, windows, edits, "exchange", n_neurons=4, seed=1)
    assert single.largest.tolist() == [True] * 4 + [False] * 4
    everything = {(layer, j): x for layer in edits for j, x in enumerate(found.neurons(layer)[0].tolist())}
    ranked = sorted(everything, key=lambda place: -abs(everything[place]))
    chosen = list(zip(single.layer.tolist(), single.neuron.tolist(), strict=True))
    assert chosen[:4] == ranked[:4]
    assert len(set(chosen)) == 8
    plain = plain_model(tiny_llama, torch.float64)
    for place, (layer, neuron) in enumerate(chosen):
        assert single.predicted[place].item() == pytest.approx(everything[layer, neuron], rel=1e-9)
        rise = 0.0
        for window in windows:
            with by_hand(plain, {layer: part_by_hand("exchange", 1.0, neuron, window)}):
                rise += loss(plain, window)
            rise -= loss(plain, window)
        # costs are differences of log-probabilities in the model's own precision
        assert single.exact[place].item() == pytest.approx(rise / int(found.n_tokens.sum()), rel=1e-6, abs=1e-9)
