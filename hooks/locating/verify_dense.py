"""Verifies that a layer is a gated MLP made of linear modules.

Gate and up must read the same x, the input of the down projection must be h = g(a, b) for a known g, and the output must
follow from q, k and v. For any other layer the reason states what it is instead.
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
    """Every gated MLP of a block that is made of linear modules, and the reason why the best other candidate failed."""
    verified: dict[nn.Module, tuple[Site, OutputGain]] = {}
    failures = []
    for candidate in candidates_of(recording.block):
        if candidate.down in verified:
            continue
        try:
            verified[candidate.down] = verify_candidate(expected, layer, candidate, recording)
        except VerificationError as failure:
            failures.append(failure)
    nearest = min(failures, default=None, key=lambda failure: failure.error)
    description = _describe(recording.block)
    return list(verified.values()), description if nearest is None or description == STATIC else str(nearest)


def verify_candidate(expected: Expected, layer: int, candidate: Candidate, recording: Recording) -> tuple[Site, OutputGain]:
    """The site of a candidate, and its output gain; VerificationError if the model computes something else."""
    expected.require_unshared(candidate.gate.module, candidate.up.module, candidate.down)
    x, a, b, h, y = _activations(candidate, recording)
    unit, identity_error = identify(expected.units(layer, recording.module(candidate.path)), a, b, h, candidate.path)
    form = GatedMLP(unit, *candidate.matrices, *candidate.biases)
    output_error = _verify_output(form, x, y)
    gain, source = find_input_gain(x, recording.norms(x))
    output_gain = find_output_gain(
        recording.rerun,
        recording.block_output,
        candidate.down,
        recording.calls[candidate.down][2],
        recording.norms(y),
        recording.block,
        expected.constants,
    )
    site = Site(
        layer=layer,
        unit=unit,
        weights=candidate,
        gain=gain,
        gain_source=source,
        value_gain=output_gain.gain,
        value_gain_source=output_gain.source,
        output_path=output_gain.path,
        identity_error=identity_error,
        output_error=output_error,
        in_place=bool({candidate.gate.module, candidate.up.module} & recording.changed),
    )
    return site, output_gain


def identify(units: Sequence[Unit], a: Tensor, b: Tensor, h: Tensor, path: str) -> tuple[Unit, float]:
    """The unit with the smallest relative error of h = g(a, b), the first among equals, and that error.

    Args:
        units: the known units, most likely first.
        a, b, h: [tokens, d_mlp].
        path: name of the module in its block, for messages.

    Raises:
        VerificationError: the error exceeds the tolerance of the dtype.
    """
    unit, error = nearest_unit(units, a, b, h)
    limit = TOLERANCE[h.dtype]
    if not error <= limit:
        reason = f"nearest {unit.name}, off by {error:.1e}, limit {limit:.0e}; first tried {units[0].name}"
        reason += f"; projections of {path or 'the block'}"
        raise VerificationError(f"h is not g(a, b) for any known g ({reason})", error)
    return unit, error


def _activations(candidate: Candidate, recording: Recording) -> tuple[Tensor, ...]:
    """x, a, b, h and y of a candidate; VerificationError unless each was computed once, from one x, for every token."""
    modules = candidate.gate.module, candidate.up.module, candidate.down
    if (fired := [recording.fired[module] for module in modules]) != [1, 1, 1]:
        raise VerificationError(
            f"gate, up and down of {candidate.path or 'the block'} ran {fired} times in one pass, expected once each"
        )
    for module in modules:
        if module.weight.dtype not in TOLERANCE:
            raise VerificationError(
                f"weights of {candidate.path} are stored as {module.weight.dtype}: load them dequantized"
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
        raise VerificationError(f"its down projection reads {len(h)} of {len(a)} tokens")
    if a.shape[1] < 2:
        raise VerificationError("it has one neuron, and the permutation null needs at least two")
    return x, a, b, h, y


def _verify_output(form: GatedMLP, x: Tensor, y: Tensor) -> float:
    wide = torch.promote_types(y.dtype, torch.float32)
    error, limit = relative_error(form.to(wide)(x.to(wide)), y), OUTPUT_SLACK * TOLERANCE[y.dtype]
    if not error <= limit:
        raise VerificationError(f"MLP output from q, k, v is off by {error:.1e} (limit {limit:.0e})", error)
    return error


def _describe(block: nn.Module) -> str:
    """What a block contains in modules without a candidate: an MLP without a gate, or the kinds of its matrices."""
    with_candidates = {candidate.path for candidate in candidates_of(block)}
    for path, parent in block.named_modules():
        sizes = [size for child in parent.children() if path not in with_candidates and (size := _size_of(child))]
        if any(d_model < d_mlp and (d_mlp, d_model) in sizes for d_model, d_mlp in sizes):
            return STATIC
    matrices = [
        type(module).__name__ for module in block.modules() if any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]
    kinds = ", ".join(dict.fromkeys(matrices)) or "nothing"
    return f"it has no two projections d_model → d_mlp with a third one back (matrices in: {kinds})"


def _size_of(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear module, None for any other."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if isinstance(module, Conv1D) else None
