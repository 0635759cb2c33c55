"""The proof that a layer is the mixture of experts that it is taken for.

Nothing of an expert passes through a module of its own: a and b are computed from what the experts are given, and what
follows from them must be what the experts give, for every expert; and together with a shared expert what the layer gives.
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
from hooks.locating.recording import Recording
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error


def expert_candidates(expected: Expected, recording: Recording) -> list[FusedExperts]:
    """Every candidate on the weights of experts in a block."""
    every = fused_experts_of(recording.block, expected.config.hidden_size)
    return [one for one in every if not one.is_flat or _receives_routing(one, recording)]


@dataclass
class ExpertsVerifier:
    """Proves one mixture after the other; how the experts of one are meant is tried first in the next.

    Attributes:
        expected: what is known of the model.
        layout: gate, up and down of the last expert_weights that proved themselves, and their unit.
    """

    expected: Expected
    layout: tuple[ExpertSlice, ExpertSlice, ExpertSlice, Unit] | None = None

    def verify(
        self, layer: int, recording: Recording, dense: Sequence[tuple[Site, OutputGain]], every: Sequence[FusedExperts]
    ) -> Mixture:
        failures = []
        if len(holders := {one.module for one in every}) > 1:
            raise NotASiteError(f"it has {len(holders)} modules of experts side by side")
        for expert_weights in self._in_order(every):
            try:
                unit, error = self.verified_unit(layer, expert_weights, recording)
            except VerificationError as failure:
                failures.append(failure)
                continue
            self.layout = expert_weights.gate, expert_weights.up, expert_weights.down, unit
            gain, source = self._gain_of_experts(expert_weights, recording)
            y = hidden_of(recording.calls[expert_weights.module][2])
            after = find_output_gain(
                recording.rerun, recording.block_output, expert_weights.module, y, recording.block, self.expected.constants
            )
            if after.by_token is not None:
                raise NotASiteError("what its experts give has yet another weight for every token")
            gains = gain, source, after.gain, after.source
            sites = [
                Site(layer, unit, ExpertWeights(expert_weights, number), *gains, 0.0, error, number)
                for number in range(expert_weights.n_experts)
            ]
            shared = [_shared(site, one, recording) for site, one in dense]
            if len(shared) > 1:
                raise NotASiteError(
                    f"it has {len(shared)} gated MLPs beside its experts, expected one shared expert at most"
                )
            _verify_sum(sites[0], expert_weights, [site for site, _ in shared], [weight for _, weight in shared], recording)
            reads = _around(expert_weights, [site for site, _ in shared], recording)
            return Mixture(layer, (*sites, *(site for site, _ in shared)), expert_weights, reads)
        raise NotASiteError(str(min(failures, key=lambda failure: failure.error)))

    def _gain_of_experts(self, expert_weights: FusedExperts, recording: Recording) -> tuple[Tensor, str]:
        x = recording.input_of(expert_weights.module)
        routing = _routing(expert_weights, recording)
        if routing is not None and routing.scaled:  # x is what a norm gave, times a weight of each row
            rows = x.any(dim=1)
            for _, _, _, gave in recording.norms(x):
                if len(gave) * expert_weights.n_experts == len(x) and parallel(x[rows], gave[routing.place[rows]]):
                    x = gave
                    break
        return find_input_gain(x, recording.norms(x))

    def _in_order(self, every: Iterable[FusedExperts]) -> list[FusedExperts]:
        return sorted(every, key=lambda one: self.layout is None or (one.gate, one.up, one.down) != self.layout[:3])

    def verified_unit(self, layer: int, expert_weights: FusedExperts, recording: Recording) -> tuple[Unit, float]:
        """The unit of the experts, if a candidate holds for every one of them, and its error; VerificationError if it does
        not."""
        self.expected.require_unshared(expert_weights.module)
        if (fired := recording.fired[expert_weights.module]) != 1:
            raise VerificationError(f"its experts ran {fired} times on the probe, expected once")
        routing = _routing(expert_weights, recording)
        if routing is None:
            raise VerificationError(
                f"its experts ({type(expert_weights.module).__name__}) are not given tokens, their experts and weights"
            )
        y = recording.output_of(expert_weights.module)
        units = self.expected.units(layer, expert_weights.module)
        known = [place for place, unit in enumerate(units) if self.layout is not None and unit == self.layout[3]]
        limit = OUTPUT_SLACK * TOLERANCE[y.dtype]
        for some in ([units[: known[0] + 1]] if known else []) + [units]:  # what is likelier here than what it was before
            errors = [experts_error(expert_weights, unit, routing, y) for unit in some]
            best = min(range(len(errors)), key=lambda place: (errors[place] != errors[place], errors[place]))
            if errors[best] <= limit:
                return some[best], max(errors[best], self._every_expert(expert_weights, some[best], routing, recording))
        raise VerificationError(
            f"what its experts give is not Σ r·g(a, b) v for any known g (nearest {units[best].name}, off by "
            f"{errors[best]:.1e}, limit {limit:.0e})",
            errors[best],
        )

    def _every_expert(self, expert_weights: FusedExperts, unit: Unit, routing: Routing, recording: Recording) -> float:
        """The same for every expert: a probe reaches few of many, so the module is run once more with tokens for each."""
        args, kwargs, _ = recording.calls[expert_weights.module]
        errors = [0.0]
        for asked in routing.rounds(expert_weights.n_experts):
            own, named = asked.written(args, kwargs)
            y = hidden_of(expert_weights.module(*own, **named)).flatten(0, -2)
            error, limit = experts_error(expert_weights, unit, asked, y), OUTPUT_SLACK * TOLERANCE[y.dtype]
            if not error <= limit:
                raise VerificationError(f"an expert that the probe did not reach gives something else ({error:.1e})", error)
            errors.append(error)
        return max(errors)


def _routing(expert_weights: FusedExperts, recording: Recording) -> Routing | None:
    """What the experts were given on the probe, if that is a routing."""
    if expert_weights.module not in recording.calls:
        return None
    args, kwargs, _ = recording.calls[expert_weights.module]
    return Routing.of(args, kwargs, expert_weights.n_experts)


def _receives_routing(expert_weights: FusedExperts, recording: Recording) -> bool:
    """Whether a module is given the experts of each token, by which its tables are known to be theirs."""
    routing = _routing(expert_weights, recording)
    return routing is not None and not routing.scaled


def experts_error(expert_weights: FusedExperts, unit: Unit, routing: Routing, y: Tensor) -> float:
    """Relative error of what the experts give, computed from the weights of each and the tokens that were sent to it."""
    total = torch.zeros(len(routing.x), y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32), device=y.device)
    for expert, (token, weight) in zip(expert_weights.experts(), routing.by_expert(expert_weights.n_experts), strict=True):
        if len(token):
            form = GatedMLP(unit, *expert.matrices, *expert.biases).to(total.dtype)
            total.index_add_(0, token, weight[:, None].to(total.dtype) * form(routing.x[token].to(total.dtype)))
    return relative_error(total, y)


def _shared(site: Site, after: OutputGain, recording: Recording) -> tuple[Site, Float[Tensor, "place 1"]]:
    """A gated MLP beside the experts, and its weight for each token of the probe; found where there is one."""
    if after.by_token is None:
        return replace(site, expert=SHARED), site.gain.new_ones(1, 1)
    for module in recording.block.modules():
        if isinstance(module, nn.Linear) and module.out_features == 1 and module in recording.calls:
            weight = recording.output_of(module).double().sigmoid()
            ratio = float((after.by_token / weight[:, 0]).median())
            limit = OUTPUT_SLACK * TOLERANCE[site.dtype]
            if relative_error(ratio * weight[:, 0], after.by_token) <= limit:
                gain, source = ratio * site.value_gain, NOTHING_AFTER
                if abs(ratio - 1) > OUTPUT_SLACK * TOLERANCE[site.dtype]:
                    source = f"× {ratio:g} (as measured)"
                else:
                    gain = site.value_gain
                gated = replace(site, expert=SHARED, token_gate=module, value_gain=gain, value_gain_source=source)
                return gated, weight.to(site.dtype)
    raise NotASiteError("its shared expert has a weight for every token, and nothing that gives it was found")


def _around(expert_weights: FusedExperts, shared: Sequence[Site], recording: Recording) -> nn.Module:
    """The module around the experts, which must be given what a shared expert reads."""
    around = recording.module(expert_weights.where.rpartition(".")[0])
    for site in shared:
        if around not in recording.calls or not torch.equal(
            recording.input_of(around), recording.input_of(site.projections.gate.module)
        ):
            raise NotASiteError("its shared expert does not read what the module around its experts is given")
    return around


def _verify_sum(
    expert: Site, expert_weights: FusedExperts, shared: Sequence[Site], weights: Sequence[Tensor], recording: Recording
) -> None:
    """Nothing else adds to what the experts give: the module around them gives their sum, alone or with the shared one.

    What the experts give may be multiplied before the shared one is added: by what is applied to it and not to that.
    """
    around = recording.module(expert_weights.where.rpartition(".")[0])
    if around not in recording.calls:
        return
    whole, routed = recording.output_of(around), recording.output_of(expert_weights.module)
    routed = routed.reshape(-1, len(whole), whole.shape[-1]).sum(dim=0)
    both = [
        _relative(expert.value_gain, site.value_gain) * routed + weight * recording.output_of(site.projections.down)
        for site, weight in zip(shared, weights, strict=True)
    ]
    error, limit = min(relative_error(one, whole) for one in (routed, *both)), OUTPUT_SLACK * TOLERANCE[whole.dtype]
    if not error <= limit:
        raise NotASiteError(f"its experts do not make up what the layer gives, off by {error:.1e} (limit {limit:.0e})")


def _relative(gain: Tensor, other: Tensor) -> Tensor:
    """What the one gain is of the other, 1 where they are equal."""
    return torch.where(gain == other, 1, gain / other)
