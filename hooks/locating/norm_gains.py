"""Norm gains: the gain of the norm before a gated MLP, and the factor on its output before the residual stream.

Input: x is a norm's output, and the gain γ of that norm is folded into q and k. Output: the block may add y to the residual
stream unchanged, times a constant, times a weight per token, or through another norm, whose gain is folded into v. Families
differ in all of this and in names, so both are verified on the block itself: a norm's gain must make its output parallel to
its input, and the factor on y is measured by running the block with y replaced by random rows, by twice these, and by zero.
So it does not matter whether attention runs before the MLP or in parallel.

A norm after the MLP also divides by the RMS of y, which differs from token to token; this division is left out of v. What
it does to a whole output is computed with the norm itself (``hooks.locating.output_path``), if it is verified to explain
all that the block adds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.loading.devices import weights_of
from hooks.locating.output_path import OutputPath
from hooks.tolerance import TOLERANCE

SLACK = 10
"""A norm or a block rounds several times: its error may be this much larger than that of one operation."""
FACTOR_TOLERANCE = 0.05
"""Relative deviation of a norm's output that is attributed to an unknown ε, not to a constant factor of the norm."""
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
NOTHING_BEFORE = "none: the MLP does not read a norm's output"
NOTHING_AFTER = "none: added to the residual stream as it is"
NOT_VERIFIED = "not verified: left out"

Vector = Float[Tensor, " d_model"]
Rows = Float[Tensor, "place d_model"]


@dataclass(frozen=True)
class OutputGain:
    """The factor on an output before it is added to the residual stream.

    Attributes:
        gain: one factor per component.
        source: where it comes from, in words.
        path: what turns the output into what is added, norm included; None if it could not be verified.
        token_weight: one factor per token of the probe, None if there is none. It is not part of the path.
    """

    gain: Vector
    source: str
    path: OutputPath | None = None
    token_weight: Float[Tensor, " place"] | None = None


def find_input_gain(x: Rows, norms: Iterator[tuple[str, nn.Module, Rows, Rows]]) -> tuple[Vector, str]:
    """The gain of the norm whose output is x, and its source in words; ones if there is no such norm.

    Args:
        x: input of the MLP.
        norms: modules that may be norms: name, module, input and output.
    """
    for name, module, before, after in norms:
        if after.shape == x.shape == before.shape and torch.equal(after, x) and not torch.equal(before, after):
            match = match_gain(module, before, x)
            if match is not None:
                return match[0], f"{name}, {match[1]}"
    return torch.ones_like(x[0]), NOTHING_BEFORE


def match_gain(norm: nn.Module, before: Rows, x: Rows) -> tuple[Vector, str] | None:
    """The gain with which the norm maps ``before`` to x, and its form in words; None if no form fits.

    The normalized input times γ must be parallel to x in every row. Of the forms that satisfy this, the one is taken whose
    length fits best; a constant factor that remains belongs to the norm and is multiplied into the gain as measured.
    """
    bias = weights_of(norm, inside=False).get("bias")
    shifted = x.double() - (0 if bias is None else bias.double())
    wide = before.double()
    normalized = [_rms_normalized(rows, norm) for rows in (wide, wide - wide.mean(dim=-1, keepdim=True))]
    fits = []
    for form, gain in _gains(norm, x):
        if not bool((gain != 0).any()):
            continue
        expected = min((gain.double() * rows for rows in normalized), key=lambda rows: _misalignment(shifted, rows))
        factor = (shifted * expected).sum(dim=-1) / expected.square().sum(dim=-1)
        deviation = abs(float(factor.median()) - 1)
        fits.append((_misalignment(shifted, expected) > _limit(x.dtype), deviation, form, gain, factor))
    if not fits:
        return None
    is_misaligned, deviation, form, gain, factor = min(fits, key=lambda fit: fit[:2])
    if is_misaligned:
        return None
    median = float(factor.median())
    variation = float((factor / factor.median() - 1).abs().max())
    if deviation <= FACTOR_TOLERANCE or variation > FACTOR_TOLERANCE:
        return gain, form
    return median * gain, f"{form}, × {median:.4g} (as measured)"


def _rms_normalized(rows: Float[Tensor, "place d_model"], norm: nn.Module) -> Float[Tensor, "place d_model"]:
    """Rows divided by their root mean square, with the norm's own ε."""
    values = (getattr(norm, name, None) for name in EPSILONS)
    epsilon = next((float(value) for value in values if isinstance(value, int | float)), 0.0)
    return rows / (rows.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()


def _limit(dtype: torch.dtype) -> float:
    """Largest accepted relative error; norms compute in float32 even in a model in float64."""
    return SLACK * max(TOLERANCE[dtype], TOLERANCE[torch.float32])


def _gains(norm: nn.Module, x: Rows) -> Iterator[tuple[str, Vector]]:
    """The forms that a norm's gain may have, with their values."""
    weight = weights_of(norm, inside=False).get("weight")
    if weight is not None and weight.shape == x.shape[-1:]:
        yield "γ = weight", weight.to(x.dtype)
        yield "γ = 1 + weight", 1 + weight.to(x.dtype)
    yield "without gain", torch.ones_like(x[0])


def find_output_gain(
    run: Callable[[], Tensor],
    recorded: Tensor,
    module: nn.Module,
    y: Float[Tensor, "*place d_model"],
    norms: Iterable[tuple[str, nn.Module, Rows, Rows]],
    block: nn.Module,
    constants: dict[str, float],
) -> OutputGain:
    """The factor that a block applies to the output of one of its modules before adding it to the residual stream.

    Args:
        run: runs the block on its recorded arguments and returns its output.
        recorded: the block's recorded output, which ``run`` must reproduce.
        module: the module.
        y: its recorded output.
        norms: modules that may be norms: name, module, recorded input and output.
        block: the block, whose norms are compared with a measured gain.
        constants: numbers of the configuration, with which a measured multiplier is compared.
    """
    unverified = OutputGain(torch.ones(y.shape[-1], dtype=y.dtype, device=y.device), NOT_VERIFIED)
    output, limit, d_model = run(), _limit(y.dtype), y.shape[-1]
    if output.shape[-1] != d_model or y.numel() < output.numel() or _distance(recorded, output) > limit:
        return unverified
    z = _random_like(output, y.dtype)
    zero = _with_output(run, module, y, torch.zeros_like(z))
    once, twice = ((_with_output(run, module, y, factor * z) - zero) / (factor * z).double() for factor in (1, 2))
    if _distance(once, twice) <= limit:
        return _linear(once, limit, constants, unverified)
    own, rows = y.flatten(0, -2), output.flatten(0, -2).double()
    added = [(own, rows - zero), (z, once * z), (2 * z, twice * 2 * z)]
    path = _norm_path(added, own, norms, limit, constants) if own.shape == rows.shape else None
    found = unverified
    if _distance(once, 2 * twice) <= limit:
        rms = z.double().square().mean(dim=-1, keepdim=True).sqrt()
        found = _through_norm(once * rms, block, limit, constants, unverified)
    return replace(found, path=path)


def _random_like(output: Tensor, dtype: torch.dtype) -> Rows:
    """Random rows as many and as wide as those of an output, of its size; no component is near 0."""
    shape, generator = (output.numel() // output.shape[-1], output.shape[-1]), torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    noise = signs * (0.5 + torch.rand(*shape, generator=generator))
    return noise.to(output.device, dtype) * output.double().square().mean().sqrt().to(dtype)


def _linear(
    factor: Float[Tensor, "place d_model"], limit: float, constants: dict[str, float], unverified: OutputGain
) -> OutputGain:
    """The output gain if the block is linear in y, from the measured factors."""
    per_token, per_component = factor.median(dim=1).values, factor.median(dim=0).values
    if _distance(factor, factor.median().expand_as(factor)) <= limit:
        value, name = _as_constant(float(factor.median()), limit, constants)
        gain = value * unverified.gain
        return OutputGain(gain, NOTHING_AFTER if value == 1 else f"× {value:g} ({name})", OutputPath(gain))
    if _distance(factor, per_token[:, None].expand_as(factor)) <= limit:
        return OutputGain(unverified.gain, "a weight per token", OutputPath(unverified.gain), per_token)
    if _distance(factor, per_component.expand_as(factor)) <= limit:
        gain = per_component.to(unverified.gain.dtype)
        return OutputGain(gain, "a factor of each component, as measured", OutputPath(gain))
    return unverified


def _through_norm(
    gains: Float[Tensor, "place d_model"],
    block: nn.Module,
    limit: float,
    constants: dict[str, float],
    unverified: OutputGain,
) -> OutputGain:
    """The output gain if y passes an RMS norm: the measured gains must be equal on all tokens, and those of a norm."""
    measured = gains.median(dim=0).values
    if _distance(gains, measured.expand_as(gains)) > limit:
        return unverified
    fits = []
    for name, module in block.named_modules():
        for form, gain in _gains(module, unverified.gain[None]):
            if form != "without gain" and bool((gain != 0).any()):
                ratio = float((measured @ gain.double()) / (gain.double() @ gain.double()))
                fits.append((_distance(measured, ratio * gain.double()), ratio, gain, f"{name}, {form}"))
    best = min(fits, default=None, key=lambda fit: fit[0])
    if best is None or best[0] > limit:
        return unverified
    value, constant = _as_constant(best[1], limit, constants)
    return OutputGain(value * best[2], best[3] if value == 1 else f"{best[3]}, × {value:g} ({constant})")


def _norm_path(
    added: list[tuple[Tensor, Tensor]],
    y: Tensor,
    norms: Iterable[tuple[str, nn.Module, Rows, Rows]],
    limit: float,
    constants: dict[str, float],
) -> OutputPath | None:
    """The norm that y passes, and the factor behind it; None if no norm that reads y explains what is added.

    Args:
        added: outputs of the MLP, and what the block then adds beyond what it adds for an output of 0.
        y: the recorded output of the MLP.
        norms: as for ``find_output_gain``.
        limit: largest relative error.
        constants: as for ``find_output_gain``.
    """
    for _, norm, before, _ in norms:
        if before.shape != y.shape or not torch.equal(before, y):
            continue
        pairs = [((norm.forward(rows) - norm.forward(torch.zeros_like(rows))).double(), change) for rows, change in added]
        factors = [float((normed * change).sum() / normed.square().sum()) for normed, change in pairs]
        value, _ = _as_constant(factors[0], limit, constants)
        if all(_distance(change, value * normed) <= limit for normed, change in pairs):
            return OutputPath(torch.full_like(y[0], value), norm)
    return None


def _as_constant(value: float, limit: float, constants: dict[str, float]) -> tuple[float, str]:
    """A measured factor as 1 or a number of the configuration if it equals one, with its name; else as measured."""
    known = {"one": 1.0} | constants
    name = min(known, key=lambda constant: abs(value - known[constant]))
    is_equal = abs(value - known[name]) <= limit / SLACK * abs(value)  # a median over many tokens averages out rounding
    return (known[name], name) if is_equal else (value, "as measured")


def _with_output(
    run: Callable[[], Tensor], module: nn.Module, y: Float[Tensor, "*place d_model"], rows: Rows
) -> Float[Tensor, "place d_model"]:
    """The block's output if the module's is replaced by these rows, and by 0 in any further rows of y."""
    replacement = torch.zeros_like(y).flatten(0, -2)
    replacement[: len(rows)] = rows

    def replace(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return replacement.reshape(output.shape)
        return (replacement.reshape(output[0].shape), *output[1:])

    handle = module.register_forward_hook(replace)
    try:
        return run().flatten(0, -2).double()
    finally:
        handle.remove()


def _distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖one‖."""
    return float((one - other).norm() / one.norm())


def parallel(x: Rows, y: Rows) -> bool:
    """Whether corresponding rows are parallel, within rounding."""
    return _misalignment(x.double(), y.double()) <= _limit(x.dtype)


def _misalignment(x: Tensor, y: Tensor) -> float:
    """The largest distance between corresponding rows after normalization, 0 if all are parallel."""
    return float((nn.functional.normalize(x, dim=-1) - nn.functional.normalize(y, dim=-1)).norm(dim=-1).max())
