"""The proof that a layer is the gated MLP that it is taken for, made of linear modules.

Gate and up must read the same x, the down projection must be given h = g(a, b) for a known g, and the output must follow
from q, k and v. Of what is no such MLP, what it is instead is said.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from analysis.theory.gated import GatedMLP
from analysis.units.registry import Unit, nearest_unit
from hooks.locating.expected import Expected, FailedError
from hooks.locating.norm_gains import After, gain_after, gain_before
from hooks.locating.projections import Claim, claims_of
from hooks.locating.recording import Seen
from hooks.locating.sites import Site
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error

STATIC = "its MLP is a static key-value memory σ(xKᵀ)V, in which there is no key to exchange with the query"


def prove_dense(expected: Expected, layer: int, seen: Seen) -> tuple[list[tuple[Site, After]], str]:
    """Every gated MLP of a block that is made of linear modules, and of the claim that came nearest why it failed."""
    found: dict[nn.Module, tuple[Site, After]] = {}
    failures = []
    for claim in claims_of(seen.block):
        if claim.down in found:
            continue
        try:
            found[claim.down] = proved_claim(expected, layer, claim, seen)
        except FailedError as failure:
            failures.append(failure)
    nearest = min(failures, default=None, key=lambda failure: failure.error)
    described = _described(seen.block)
    return list(found.values()), described if nearest is None or described == STATIC else str(nearest)


def proved_claim(expected: Expected, layer: int, claim: Claim, seen: Seen) -> tuple[Site, After]:
    expected.are_own(claim.gate.module, claim.up.module, claim.down)
    x, a, b, h, y = _read(claim, seen)
    unit, identity_error = identify(expected.units(layer, seen.module(claim.where)), a, b, h, claim.where)
    form = GatedMLP(unit, *claim.matrices, *claim.biases)
    output_error = _proved_output(form, x, y)
    gain, source = gain_before(x, seen.norms(x))
    after = gain_after(seen.again, seen.gave_itself, claim.down, seen.calls[claim.down][2], seen.block, expected.constants)
    errors, in_place = (identity_error, output_error), bool({claim.gate.module, claim.up.module} & seen.changed)
    return Site(layer, unit, claim, gain, source, after.gain, after.source, *errors, in_place=in_place), after


def identify(units: Sequence[Unit], a: Tensor, b: Tensor, h: Tensor, where: str) -> tuple[Unit, float]:
    """The unit that gives h from a and b with the least error; of equal ones the first. Fails beyond the tolerance."""
    unit, error = nearest_unit(units, a, b, h)
    limit = TOLERANCE[h.dtype]
    if not error <= limit:
        reason = f"nearest {unit.name}, off by {error:.1e}, limit {limit:.0e}; first tried {units[0].name}"
        reason += f"; projections of {where or 'the block'}"
        raise FailedError(f"h is not g(a, b) for any known g ({reason})", error)
    return unit, error


def _read(claim: Claim, seen: Seen) -> tuple[Tensor, ...]:
    """x, a, b, h and y of a claim, once it is clear that each was computed once, from one x, for every token."""
    modules = claim.gate.module, claim.up.module, claim.down
    if (fired := [seen.fired[module] for module in modules]) != [1, 1, 1]:
        raise FailedError(
            f"gate, up and down of {claim.where or 'the block'} fired {fired} times in one pass, expected once each"
        )
    for module in modules:
        if module.weight.dtype not in TOLERANCE:
            raise FailedError(f"weights of {claim.where} are stored as {module.weight.dtype}: load them dequantized")
    x, h, y = seen.given(claim.gate.module), seen.given(claim.down), seen.gave(claim.down)
    if not torch.equal(x, seen.given(claim.up.module)):
        raise FailedError("gate and up do not read the same x")
    a, b = claim.gate.of(seen.gave(claim.gate.module)), claim.up.of(seen.gave(claim.up.module))
    if not len(a) == len(h):
        raise FailedError(f"its down projection is given {len(h)} tokens of {len(a)}")
    if a.shape[1] < 2:
        raise FailedError("it has one neuron, and re-pairing needs another")
    return x, a, b, h, y


def _proved_output(form: GatedMLP, x: Tensor, y: Tensor) -> float:
    wide = torch.promote_types(y.dtype, torch.float32)
    error, limit = relative_error(form.to(wide)(x.to(wide)), y), OUTPUT_SLACK * TOLERANCE[y.dtype]
    if not error <= limit:
        raise FailedError(f"MLP output from q, k, v is off by {error:.1e} (limit {limit:.0e})", error)
    return error


def _described(block: nn.Module) -> str:
    """What a block without any claim has instead."""
    claimed = {claim.where for claim in claims_of(block)}
    for where, parent in block.named_modules():
        maps = [size for child in parent.children() if where not in claimed and (size := _map_of(child))]
        if any(d_model < d_mlp and (d_mlp, d_model) in maps for d_model, d_mlp in maps):
            return STATIC
    matrices = [
        type(module).__name__ for module in block.modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]
    kinds = ", ".join(dict.fromkeys(matrices)) or "nothing"
    return f"it has no two projections d_model → d_mlp with a third one back (matrices in: {kinds})"


def _map_of(module: nn.Module) -> tuple[int, int] | None:
    """From how many numbers to how many a module maps linearly, if it does."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if isinstance(module, Conv1D) else None
