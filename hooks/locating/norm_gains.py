"""Where in its block a gated MLP stands: what is applied before it, and what to its output before the residual stream.

Before: x is a norm's output, and the gain γ of that norm belongs to q and k. OutputGain: the block may pass y on as it is,
times a constant, times a gate of each token, or through another norm, whose gain belongs to v. Families differ in all of
this and
in what they call it, so both are proved on the block itself: a norm's gain must make its output parallel to its input, and
what is applied after y is read from what the block gives when y is replaced by a random one, by twice that, and by nothing.
So it does not matter whether attention runs before the MLP or beside it.

A norm after the MLP also divides by the size of y, a number of each token that no weight holds; it is left out of v.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.loading.devices import weights_of
from hooks.tolerance import TOLERANCE

SLACK = 10
"""A norm or a block rounds several times: its error may be this much larger than that of one number."""
SIZED = 0.05
"""A norm's output may be longer or shorter by this much without a factor of its own: where its ε is not known."""
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
NOTHING_BEFORE = "none: the MLP does not read a norm's output"
NOTHING_AFTER = "none: added to the residual stream as it is"
NOT_VERIFIED = "not proved: left out"

Vector = Float[Tensor, " d_model"]
Rows = Float[Tensor, "place d_model"]


@dataclass(frozen=True)
class OutputGain:
    """What is applied to an output before it reaches the residual stream.

    Attributes:
        gain: one factor a component.
        source: in words.
        by_token: a factor of each token of the probe, None where there is none.
    """

    gain: Vector
    source: str
    by_token: Float[Tensor, " place"] | None = None


def find_input_gain(x: Rows, norms: Iterator[tuple[str, nn.Module, Rows, Rows]]) -> tuple[Vector, str]:
    """The gain of the norm whose output x is.

    Args:
        x: what the MLP reads.
        norms: modules that may be norms: name, module, what it was given and what it gave.
    """
    for name, module, given, gave in norms:
        if gave.shape == x.shape == given.shape and torch.equal(gave, x) and not torch.equal(given, gave):
            found = match_gain(module, given, x)
            if found is not None:
                return found[0], f"{name}, {found[1]}"
    return torch.ones_like(x[0]), NOTHING_BEFORE


def match_gain(norm: nn.Module, before: Rows, x: Rows) -> tuple[Vector, str] | None:
    """Which gain, in which form, takes the norm's input to its output x; None if none does.

    Its direction must make x/γ parallel to the input over its size, its length must do so without a factor; one that
    remains is the norm's own, and is folded as measured.
    """
    bias = weights_of(norm, inside=False).get("bias")
    shifted = x.double() - (0 if bias is None else bias.double())
    given = before.double()
    sized = [_sized(one, norm) for one in (given, given - given.mean(dim=-1, keepdim=True))]
    found = []
    for form, gain in _gains(norm, x):
        if not bool((gain != 0).any()):
            continue
        expected = min((gain.double() * one for one in sized), key=lambda one: _misalignment(shifted, one))
        factor = (shifted * expected).sum(dim=-1) / expected.square().sum(dim=-1)
        found.append(
            (_misalignment(shifted, expected) > _limit(x.dtype), abs(float(factor.median()) - 1), form, gain, factor)
        )
    if not found:
        return None
    is_other, off, form, gain, factor = min(found, key=lambda one: one[:2])
    if is_other:
        return None
    middle = float(factor.median())
    spread = float((factor / factor.median() - 1).abs().max())
    if off <= SIZED or spread > SIZED:
        return gain, form
    return middle * gain, f"{form}, × {middle:.4g} (as measured)"


def _sized(rows: Float[Tensor, "place d_model"], norm: nn.Module) -> Float[Tensor, "place d_model"]:
    """Rows over their root mean square, with the norm's own ε."""
    named = (getattr(norm, name, None) for name in EPSILONS)
    epsilon = next((float(value) for value in named if isinstance(value, int | float)), 0.0)
    return rows / (rows.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()


def _limit(dtype: torch.dtype) -> float:
    """Norms compute in float32, also those of a model in float64."""
    return SLACK * max(TOLERANCE[dtype], TOLERANCE[torch.float32])


def _gains(norm: nn.Module, x: Rows) -> Iterator[tuple[str, Vector]]:
    weight = weights_of(norm, inside=False).get("weight")
    if weight is not None and weight.shape == x.shape[-1:]:
        yield "γ = weight", weight.to(x.dtype)
        yield "γ = 1 + weight", 1 + weight.to(x.dtype)
    yield "without gain", torch.ones_like(x[0])


def find_output_gain(
    run: Callable[[], Tensor],
    gave: Tensor,
    module: nn.Module,
    y: Float[Tensor, "*place d_model"],
    block: nn.Module,
    constants: dict[str, float],
) -> OutputGain:
    """What the block applies to the output of one of its modules before it adds it to the residual stream.

    Args:
        run: runs the block on what it was given, and gives its output.
        gave: what it gave on the probe, which it must give again.
        module: the module.
        y: its output on the probe.
        block: the block, among whose norms the one after the module is looked for.
        constants: numbers of the configuration, among which a multiplier is looked for.
    """
    nothing = OutputGain(torch.ones(y.shape[-1], dtype=y.dtype, device=y.device), NOT_VERIFIED)
    whole, d_model = run(), y.shape[-1]
    n_rows = whole.numel() // d_model
    if whole.shape[-1] != d_model or y.numel() < whole.numel() or _apart(gave, whole) > _limit(y.dtype):
        return nothing
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (n_rows, d_model), generator=generator) * 2 - 1
    noise = signs * (0.5 + torch.rand(n_rows, d_model, generator=generator))
    z = noise.to(y.device, y.dtype) * whole.double().square().mean().sqrt().to(y.dtype)

    def given(rows: Rows) -> Float[Tensor, "place d_model"]:
        """What the block gives when the module gives these rows, and nothing in any further ones."""
        output = torch.zeros_like(y).flatten(0, -2)
        output[:n_rows] = rows
        return _replaced(run, module, output).flatten(0, -2).double()

    zero = given(torch.zeros_like(z))
    once, twice = ((given(factor * z) - zero) / (factor * z).double() for factor in (1, 2))
    z, limit = z.double(), _limit(y.dtype)
    if _apart(once, twice) <= limit:
        return _linear(once, limit, constants, nothing)
    if _apart(once, 2 * twice) <= limit:
        return _through_norm(once * z.square().mean(dim=-1, keepdim=True).sqrt(), block, limit, constants, nothing)
    return nothing


def _linear(
    factor: Float[Tensor, "place d_model"], limit: float, constants: dict[str, float], nothing: OutputGain
) -> OutputGain:
    """From factors that do not depend on the size of y."""
    by_token, by_component = factor.median(dim=1).values, factor.median(dim=0).values
    if _apart(factor, factor.median().expand_as(factor)) <= limit:
        value, name = _named(float(factor.median()), limit, constants)
        return OutputGain(value * nothing.gain, NOTHING_AFTER if value == 1 else f"× {value:g} ({name})")
    if _apart(factor, by_token[:, None].expand_as(factor)) <= limit:
        return OutputGain(nothing.gain, "a gate of each token", by_token)
    if _apart(factor, by_component.expand_as(factor)) <= limit:
        return OutputGain(by_component.to(nothing.gain.dtype), "a factor of each component, as measured")
    return nothing


def _through_norm(
    gains: Float[Tensor, "place d_model"], block: nn.Module, limit: float, constants: dict[str, float], nothing: OutputGain
) -> OutputGain:
    """From the gains that an RMS norm shows on each token, which must be those of one of the block's norms."""
    measured = gains.median(dim=0).values
    if _apart(gains, measured.expand_as(gains)) > limit:
        return nothing
    found = []
    for name, module in block.named_modules():
        for form, gain in _gains(module, nothing.gain[None]):
            if form != "without gain" and bool((gain != 0).any()):
                ratio = float((measured @ gain.double()) / (gain.double() @ gain.double()))
                found.append((_apart(measured, ratio * gain.double()), ratio, gain, f"{name}, {form}"))
    best = min(found, default=None, key=lambda one: one[0])
    if best is None or best[0] > limit:
        return nothing
    value, constant = _named(best[1], limit, constants)
    return OutputGain(value * best[2], best[3] if value == 1 else f"{best[3]}, × {value:g} ({constant})")


def _named(value: float, limit: float, constants: dict[str, float]) -> tuple[float, str]:
    """A measured factor as the constant that it is: 1, or a number of the configuration; else as measured."""
    known = {"one": 1.0} | constants
    name = min(known, key=lambda one: abs(value - known[one]))
    near = abs(value - known[name]) <= limit / SLACK * abs(value)  # a median over many is as good as one number
    return (known[name], name) if near else (value, "as measured")


def _replaced(run: Callable[[], Tensor], module: nn.Module, output: Tensor) -> Tensor:
    """What the block gives when the module gives this."""

    def give(_module: nn.Module, _inputs: Any, now: Any) -> Any:
        return output.reshape(now.shape) if isinstance(now, Tensor) else (output.reshape(now[0].shape), *now[1:])

    handle = module.register_forward_hook(give)
    try:
        return run()
    finally:
        handle.remove()


def _apart(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖one‖."""
    return float((one - other).norm() / one.norm())


def parallel(x: Rows, y: Rows) -> bool:
    """Whether corresponding rows are parallel, within rounding."""
    return _misalignment(x.double(), y.double()) <= _limit(x.dtype)


def _misalignment(x: Tensor, y: Tensor) -> float:
    """The largest sine-like distance between corresponding rows, 0 where they are parallel."""
    return float((nn.functional.normalize(x, dim=-1) - nn.functional.normalize(y, dim=-1)).norm(dim=-1).max())
