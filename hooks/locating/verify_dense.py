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
from hooks.locating.expected import Expected, VerificationError
from hooks.locating.norm_gains import OutputGain, find_input_gain, find_output_gain
from hooks.locating.projections import Candidate, candidates_of
from hooks.locating.recording import Recording
from hooks.locating.sites import Site
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error

STATIC = "its MLP is a static key-value memory σ(xKᵀ)V, in which there is no key to exchange with the query"


def verify_dense(expected: Expected, layer: int, recording: Recording) -> tuple[list[tuple[Site, OutputGain]], str]:
    """Every gated MLP of a block that is made of linear modules, and of the candidate that came nearest why it failed."""
    found: dict[nn.Module, tuple[Site, OutputGain]] = {}
    failures = []
    for candidate in candidates_of(recording.block):
        if candidate.down in found:
            continue
        try:
            found[candidate.down] = verify_candidate(expected, layer, candidate, recording)
        except VerificationError as failure:
            failures.append(failure)
    nearest = min(failures, default=None, key=lambda failure: failure.error)
    described = _described(recording.block)
    return list(found.values()), described if nearest is None or described == STATIC else str(nearest)


def verify_candidate(expected: Expected, layer: int, candidate: Candidate, recording: Recording) -> tuple[Site, OutputGain]:
    expected.require_unshared(candidate.gate.module, candidate.up.module, candidate.down)
    x, a, b, h, y = _read(candidate, recording)
    unit, identity_error = identify(expected.units(layer, recording.module(candidate.where)), a, b, h, candidate.where)
    form = GatedMLP(unit, *candidate.matrices, *candidate.biases)
    output_error = _verify_output(form, x, y)
    gain, source = find_input_gain(x, recording.norms(x))
    after = find_output_gain(
        recording.rerun,
        recording.block_output,
        candidate.down,
        recording.calls[candidate.down][2],
        recording.block,
        expected.constants,
    )
    errors, in_place = (
        (identity_error, output_error),
        bool({candidate.gate.module, candidate.up.module} & recording.changed),
    )
    return Site(layer, unit, candidate, gain, source, after.gain, after.source, *errors, in_place=in_place), after


def identify(units: Sequence[Unit], a: Tensor, b: Tensor, h: Tensor, where: str) -> tuple[Unit, float]:
    """The unit that gives h from a and b with the least error; of equal ones the first. Fails beyond the tolerance."""
    unit, error = nearest_unit(units, a, b, h)
    limit = TOLERANCE[h.dtype]
    if not error <= limit:
        reason = f"nearest {unit.name}, off by {error:.1e}, limit {limit:.0e}; first tried {units[0].name}"
        reason += f"; projections of {where or 'the block'}"
        raise VerificationError(f"h is not g(a, b) for any known g ({reason})", error)
    return unit, error


def _read(candidate: Candidate, recording: Recording) -> tuple[Tensor, ...]:
    """x, a, b, h and y of a candidate, once it is clear that each was computed once, from one x, for every token."""
    modules = candidate.gate.module, candidate.up.module, candidate.down
    if (fired := [recording.fired[module] for module in modules]) != [1, 1, 1]:
        raise VerificationError(
            f"gate, up and down of {candidate.where or 'the block'} fired {fired} times in one pass, expected once each"
        )
    for module in modules:
        if module.weight.dtype not in TOLERANCE:
            raise VerificationError(
                f"weights of {candidate.where} are stored as {module.weight.dtype}: load them dequantized"
            )
    x, h, y = (
        recording.input_of(candidate.gate.module),
        recording.input_of(candidate.down),
        recording.output_of(candidate.down),
    )
    if not torch.equal(x, recording.input_of(candidate.up.module)):
        raise VerificationError("gate and up do not read the same x")
    a, b = (
        candidate.gate.of(recording.output_of(candidate.gate.module)),
        candidate.up.of(recording.output_of(candidate.up.module)),
    )
    if not len(a) == len(h):
        raise VerificationError(f"its down projection is given {len(h)} tokens of {len(a)}")
    if a.shape[1] < 2:
        raise VerificationError("it has one neuron, and re-pairing needs another")
    return x, a, b, h, y


def _verify_output(form: GatedMLP, x: Tensor, y: Tensor) -> float:
    wide = torch.promote_types(y.dtype, torch.float32)
    error, limit = relative_error(form.to(wide)(x.to(wide)), y), OUTPUT_SLACK * TOLERANCE[y.dtype]
    if not error <= limit:
        raise VerificationError(f"MLP output from q, k, v is off by {error:.1e} (limit {limit:.0e})", error)
    return error


def _described(block: nn.Module) -> str:
    """What a block without any candidate has instead."""
    claimed = {candidate.where for candidate in candidates_of(block)}
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
