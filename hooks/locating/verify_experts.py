"""Verifies that a layer is a mixture of gated MLPs.

Experts have no modules of their own, so a and b are not captured: they are computed from the input of the experts' module.
The output must follow from them for every expert, and together with a shared expert it must be the output of the layer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from analysis.theory.gated import GatedMLP
from analysis.units.registry import Unit
from analysis.weights.experts import SHARED
from hooks.loading.network import hidden_of
from hooks.locating.expected import Expected, NotASiteError, VerificationError
from hooks.locating.expert_weights import ExpertSlice, ExpertWeights, FusedExperts, fused_experts_of
from hooks.locating.norm_gains import NOTHING_AFTER, OutputGain, find_input_gain, find_output_gain, parallel
from hooks.locating.output_path import OutputPath
from hooks.locating.recording import Recording
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error


def expert_candidates(expected: Expected, recording: Recording) -> list[FusedExperts]:
    """Every candidate for the fused weights of experts in a block."""
    candidates = fused_experts_of(recording.block, expected.config.hidden_size)
    return [one for one in candidates if not one.is_flat or _receives_routing(one, recording)]


@dataclass
class ExpertsVerifier:
    """Verifies one mixture after the other; the layout of the last one is tried first in the next.

    Attributes:
        expected: what is known of the model's layers.
        layout: gate, up, down and unit of the last mixture that was verified.
    """

    expected: Expected
    layout: tuple[ExpertSlice, ExpertSlice, ExpertSlice, Unit] | None = None

    def verify(
        self, layer: int, recording: Recording, dense: Sequence[tuple[Site, OutputGain]], candidates: Sequence[FusedExperts]
    ) -> Mixture:
        """The mixture of a block.

        Args:
            layer: index of the block.
            recording: of the block on the probe.
            dense: verified gated MLPs made of linear modules, one of which may be a shared expert.
            candidates: for the weights of the experts.

        Raises:
            NotASiteError: no candidate is verified, or the block contains something else besides.
        """
        failures = []
        if len(modules := {one.module for one in candidates}) > 1:
            raise NotASiteError(f"it has {len(modules)} modules of experts in parallel")
        for expert_weights in self._in_order(candidates):
            try:
                unit, error = self.verified_unit(layer, expert_weights, recording)
            except VerificationError as failure:
                failures.append(failure)
                continue
            return self._mixture(layer, expert_weights, unit, error, recording, dense)
        raise NotASiteError(str(min(failures, key=lambda failure: failure.error)))

    def _mixture(
        self,
        layer: int,
        expert_weights: FusedExperts,
        unit: Unit,
        error: float,
        recording: Recording,
        dense: Sequence[tuple[Site, OutputGain]],
    ) -> Mixture:
        """The mixture of verified experts and at most one shared expert; NotASiteError if these are not all of it."""
        self.layout = expert_weights.gate, expert_weights.up, expert_weights.down, unit
        gain, source = self._input_gain(expert_weights, recording)
        y = hidden_of(recording.calls[expert_weights.module][2])
        output_gain = find_output_gain(
            recording.rerun,
            recording.block_output,
            expert_weights.module,
            y,
            recording.norms(y.flatten(0, -2)),
            recording.block,
            self.expected.constants,
        )
        if output_gain.token_weight is not None:
            raise NotASiteError("the output of its experts has another weight for every token")
        gains = gain, source, output_gain.gain, output_gain.source
        sites = [
            Site(layer, unit, ExpertWeights(expert_weights, number), *gains, 0.0, error, output_gain.path, number)
            for number in range(expert_weights.n_experts)
        ]
        with_weights = [_shared(site, own_gain, recording) for site, own_gain in dense]
        if len(with_weights) > 1:
            raise NotASiteError(
                f"it has {len(with_weights)} gated MLPs beside its experts, expected one shared expert at most"
            )
        shared = [site for site, _ in with_weights]
        _verify_sum(sites[0], expert_weights, shared, [weight for _, weight in with_weights], recording)
        return Mixture(layer, (*sites, *shared), expert_weights, _parent(expert_weights, shared, recording))

    def _input_gain(self, expert_weights: FusedExperts, recording: Recording) -> tuple[Tensor, str]:
        x = recording.input_of(expert_weights.module)
        routing = _routing(expert_weights, recording)
        if routing is not None and routing.scaled:  # rows of x are a norm's outputs times routing weights
            rows = x.any(dim=1)
            for _, _, _, normed in recording.norms(x):
                if len(normed) * expert_weights.n_experts == len(x) and parallel(x[rows], normed[routing.place[rows]]):
                    x = normed
                    break
        return find_input_gain(x, recording.norms(x))

    def _in_order(self, candidates: Iterable[FusedExperts]) -> list[FusedExperts]:
        return sorted(candidates, key=lambda one: self.layout is None or (one.gate, one.up, one.down) != self.layout[:3])

    def verified_unit(self, layer: int, expert_weights: FusedExperts, recording: Recording) -> tuple[Unit, float]:
        """The unit of the experts under a candidate, and its largest relative error over all experts.

        Raises:
            VerificationError: the output does not follow from the candidate's weights with any known unit.
        """
        self.expected.require_unshared(expert_weights.module)
        if (fired := recording.fired[expert_weights.module]) != 1:
            raise VerificationError(f"its experts ran {fired} times on the probe, expected once")
        routing = _routing(expert_weights, recording)
        if routing is None:
            raise VerificationError(
                f"its experts ({type(expert_weights.module).__name__}) do not read tokens, their experts and their weights"
            )
        y = recording.output_of(expert_weights.module)
        units = self.expected.units(layer, expert_weights.module)
        known = [place for place, unit in enumerate(units) if self.layout is not None and unit == self.layout[3]]
        limit = OUTPUT_SLACK * TOLERANCE[y.dtype]
        for some in ([units[: known[0] + 1]] if known else []) + [units]:  # first the last unit, and those before it
            errors = [experts_error(expert_weights, unit, routing, y) for unit in some]
            best = min(range(len(errors)), key=lambda place: (errors[place] != errors[place], errors[place]))
            if errors[best] <= limit:
                return some[best], max(
                    errors[best], self._verify_every_expert(expert_weights, some[best], routing, recording)
                )
        raise VerificationError(
            f"the output of its experts is not Σ r·g(a, b) v for any known g (nearest {units[best].name}, off by "
            f"{errors[best]:.1e}, limit {limit:.0e})",
            errors[best],
        )

    def _verify_every_expert(
        self, expert_weights: FusedExperts, unit: Unit, routing: Routing, recording: Recording
    ) -> float:
        """The largest error when every expert reads tokens: the probe reaches few of many, so the module is run again.

        Raises:
            VerificationError: the output does not follow from the weights of one of them.
        """
        args, kwargs, _ = recording.calls[expert_weights.module]
        errors = [0.0]
        for other in routing.covering_all(expert_weights.n_experts):
            other_args, other_kwargs = other.substituted(args, kwargs)
            y = hidden_of(expert_weights.module(*other_args, **other_kwargs)).flatten(0, -2)
            error, limit = experts_error(expert_weights, unit, other, y), OUTPUT_SLACK * TOLERANCE[y.dtype]
            if not error <= limit:
                raise VerificationError(
                    f"an expert that the probe did not reach is off by {error:.1e} (limit {limit:.0e})", error
                )
            errors.append(error)
        return max(errors)


def _routing(expert_weights: FusedExperts, recording: Recording) -> Routing | None:
    """The routing of the experts on the probe; None if their arguments are no routing."""
    if expert_weights.module not in recording.calls:
        return None
    args, kwargs, _ = recording.calls[expert_weights.module]
    return Routing.of(args, kwargs, expert_weights.n_experts)


def _receives_routing(expert_weights: FusedExperts, recording: Recording) -> bool:
    """Whether a module reads the experts chosen for each token, which shows that its tables are expert weights."""
    routing = _routing(expert_weights, recording)
    return routing is not None and not routing.scaled


def experts_error(expert_weights: FusedExperts, unit: Unit, routing: Routing, y: Tensor) -> float:
    """Relative error of Σ r·g(a, b) v against the experts' output y.

    Args:
        expert_weights: q, k and v of every expert.
        unit: g.
        routing: the inputs [tokens, d_model], the experts of each, and the routing weights r.
        y: output of the experts' module, [tokens, d_model].
    """
    total = torch.zeros(len(routing.x), y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32), device=y.device)
    for expert, (token, weight) in zip(expert_weights.experts(), routing.by_expert(expert_weights.n_experts), strict=True):
        if len(token):
            form = GatedMLP(unit, *expert.matrices, *expert.biases).to(total.dtype)
            total.index_add_(0, token, weight[:, None].to(total.dtype) * form(routing.x[token].to(total.dtype)))
    return relative_error(total, y)


def _shared(site: Site, output_gain: OutputGain, recording: Recording) -> tuple[Site, Float[Tensor, "place 1"]]:
    """A shared expert, and its weight for each token of the probe: 1, or the sigmoid of a linear module's output."""
    measured = output_gain.token_weight
    if measured is None:
        return replace(site, expert=SHARED), site.gain.new_ones(1, 1)
    for module in recording.block.modules():
        if isinstance(module, nn.Linear) and module.out_features == 1 and module in recording.calls:
            weight = recording.output_of(module).double().sigmoid()
            ratio = float((measured / weight[:, 0]).median())
            limit = OUTPUT_SLACK * TOLERANCE[site.dtype]
            if relative_error(ratio * weight[:, 0], measured) <= limit:
                gain, source = ratio * site.value_gain, NOTHING_AFTER
                if abs(ratio - 1) > OUTPUT_SLACK * TOLERANCE[site.dtype]:
                    source = f"× {ratio:g} (as measured)"
                else:
                    gain = site.value_gain
                gated = replace(site, expert=SHARED, token_gate=module, value_gain=gain, value_gain_source=source)
                return replace(gated, output_path=OutputPath(gain)), weight.to(site.dtype)
    raise NotASiteError("its shared expert has a weight for every token, which no module of the block computes")


def _parent(expert_weights: FusedExperts, shared: Sequence[Site], recording: Recording) -> nn.Module:
    """The parent module of the experts; NotASiteError unless its input is also that of a shared expert."""
    parent = recording.module(expert_weights.path.rpartition(".")[0])
    for site in shared:
        if parent not in recording.calls or not torch.equal(
            recording.input_of(parent), recording.input_of(site.projections.gate.module)
        ):
            raise NotASiteError("its shared expert does not read the input of the experts' parent module")
    return parent


def _verify_sum(
    expert: Site, expert_weights: FusedExperts, shared: Sequence[Site], weights: Sequence[Tensor], recording: Recording
) -> None:
    """NotASiteError unless the parent module's output is the sum of the experts' outputs, alone or with the shared one.

    The experts' sum may have a factor before the shared expert is added: the ratio of their output gains.
    """
    parent = recording.module(expert_weights.path.rpartition(".")[0])
    if parent not in recording.calls:
        return
    whole, routed = recording.output_of(parent), recording.output_of(expert_weights.module)
    routed = routed.reshape(-1, len(whole), whole.shape[-1]).sum(dim=0)
    both = [
        _relative(expert.value_gain, site.value_gain) * routed + weight * recording.output_of(site.projections.down)
        for site, weight in zip(shared, weights, strict=True)
    ]
    error, limit = min(relative_error(one, whole) for one in (routed, *both)), OUTPUT_SLACK * TOLERANCE[whole.dtype]
    if not error <= limit:
        raise NotASiteError(f"its experts do not add up to the layer's output, off by {error:.1e} (limit {limit:.0e})")


def _relative(gain: Tensor, other: Tensor) -> Tensor:
    """gain / other, 1 where they are equal, also where both are 0."""
    return torch.where(gain == other, 1, gain / other)
