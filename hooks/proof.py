"""The proof that a layer is the gated MLP, or the mixture of them, that it is taken for.

``hooks.taps`` says which modules may be meant; names prove nothing. On a short probe, before anything is measured, a claim
must show that gate and up read the same x, that the down projection is given h = g(a, b) for a known g, and that the output
follows from q, k and v. In a mixture of experts nothing of this passes through a module of its own: there a and b are
computed from what the experts are given, and what follows from them must be what the experts give, and together with a
shared expert what the layer gives. A layer without a claim that holds is no site; the reason is kept.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from analysis.experts import SHARED
from analysis.gated import GatedMLP
from analysis.units import PARAMETERS, Unit, candidate_units, nearest_unit
from hooks.network import blocks_of, hidden_of, run_whole
from hooks.placement import NOTHING_AFTER, After, gain_after, gain_before, parallel
from hooks.precision import OUTPUT_SLACK, TOLERANCE, relative_error
from hooks.sites import Found, Mixture, Site
from hooks.taps import Claim, Cut, ExpertWeights, Routing, Stacks, claims_of, stacks_of, unread_stacks
from hooks.watch import Seen, watch

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "ffn_activation", "dense_act_fn")
NOT_GATED = "its experts are no gated MLPs: they have no key to exchange with the query"
STATIC = "its MLP is a static key-value memory σ(xKᵀ)V, in which there is no key to exchange with the query"


class NotASiteError(Exception):
    """Why a layer is not analysed."""


def find_sites(model: PreTrainedModel, probe: Int[Tensor, "batch pos"]) -> Found:
    """Every layer that proves itself on the probe, block by block as it is run, and why the others do not."""
    config = model.config.get_text_config()
    finder = _Finder(config, _constants(config))
    found: dict[int, Site | Mixture] = {}
    skipped: dict[int, str] = {}
    in_tuples = set()

    def look(layer: int, seen: Seen) -> None:
        if seen.in_tuple:
            in_tuples.add(layer)
        try:
            found[layer] = finder.in_block(layer, seen)
        except NotASiteError as reason:
            skipped[layer] = str(reason)

    blocks = blocks_of(model, config.num_hidden_layers)
    uses = finder.uses = Counter(module for block in blocks for module in set(block.modules()))
    with ExitStack() as stack, torch.no_grad():
        for layer, block in enumerate(blocks):
            if uses[block] > 1:
                skipped[layer] = "its block is that of another layer too, and runs more than once in a pass"
            else:
                watch(block, partial(look, layer), stack)
        run_whole(model, probe)
    for layer in range(len(blocks)):
        if layer not in found:
            skipped.setdefault(layer, "it did not run on the probe")
    sites = {layer: one for layer, one in sorted(found.items()) if isinstance(one, Site)}
    mixtures = {layer: one for layer, one in sorted(found.items()) if isinstance(one, Mixture)}
    return Found(sites, mixtures, dict(sorted(skipped.items())), frozenset(in_tuples))


def configured_activations(config: Any) -> list[str]:
    """The activation names in a Hugging Face configuration."""
    text = config.get_text_config()
    return [str(getattr(text, field)) for field in ACTIVATION_FIELDS if getattr(text, field, None) is not None]


def _constants(config: Any) -> dict[str, float]:
    """The numbers of a configuration that may be multipliers."""
    numbers = {name: value for name, value in config.to_dict().items() if isinstance(value, float)}
    pairs = {name: value for name, value in config.to_dict().items() if isinstance(value, list)}
    listed = {f"{name}[{i}]": one for name, value in pairs.items() for i, one in enumerate(value) if isinstance(one, float)}
    return {name: value for name, value in (numbers | listed).items() if value > 0}


@dataclass
class _Finder:
    """Looks for the gated units of one block after the other; how the experts of one are meant is tried first in the next.

    Attributes:
        config: of the model, which may name the activation and its parameters.
        constants: numbers of the configuration that may be multipliers.
        uses: in how many blocks each module is.
        layout: gate, up and down of the last stacks that proved themselves, and their unit.
    """

    config: Any
    constants: dict[str, float]
    uses: Counter[nn.Module] = field(default_factory=Counter)
    layout: tuple[Cut, Cut, Cut, Unit] | None = None

    def units(self, layer: int, module: nn.Module) -> list[Unit]:
        """What g of a module may be, the likeliest first.

        Its own parameters count, then those of the configuration, which may speak of other modules: a clamp that nothing
        reaches on the probe would be taken for proved.
        """
        found: dict[str, Unit] = {}
        for holder in (module, self.config):
            parameters: dict[str, float | None] = {}
            for key in PARAMETERS:
                value = getattr(holder, key, None)
                value = value[layer] if isinstance(value, list | tuple) and layer < len(value) else value
                parameters[key] = value if isinstance(value, float | int) else None
            for unit in candidate_units(configured_activations(self.config), parameters):
                found.setdefault(unit.name, unit)
        return list(found.values())

    def in_block(self, layer: int, seen: Seen) -> Site | Mixture:
        """The dense site or the mixture of a block; NotASiteError with the reason if it is neither."""
        dense, reason = self._dense(layer, seen)
        every = [one for one in stacks_of(seen.block, self.config.hidden_size) if not one.is_flat or _is_told(one, seen)]
        if every:
            return self._mixture(layer, seen, dense, every)
        beside = {name.partition(".")[0] for name in unread_stacks(seen.block)}
        if any(site.taps.where.partition(".")[0] in beside for site, _ in dense) or (beside and not dense):
            raise NotASiteError(NOT_GATED if reason == STATIC or not dense else "its experts are stacks of another shape")
        if not dense:
            raise NotASiteError(reason)
        if len(dense) > 1:
            raise NotASiteError(f"it has {len(dense)} gated MLPs side by side, of which none is an expert")
        site, after = dense[0]
        if after.by_token is not None:
            raise NotASiteError("its output has a weight of its own for every token, as that of an expert has")
        return site

    def _dense(self, layer: int, seen: Seen) -> tuple[list[tuple[Site, After]], str]:
        """Every gated MLP of a block that is made of linear modules, and of the claim that came nearest why it failed."""
        found: dict[nn.Module, tuple[Site, After]] = {}
        failures = []
        for claim in claims_of(seen.block):
            if claim.down in found:
                continue
            try:
                found[claim.down] = self._proved(layer, claim, seen)
            except _FailedError as failure:
                failures.append(failure)
        nearest = min(failures, default=None, key=lambda failure: failure.error)
        described = _described(seen.block)
        return list(found.values()), described if nearest is None or described == STATIC else str(nearest)

    def _is_own(self, *modules: nn.Module) -> None:
        """Fails for modules of several layers: what is heard at them in a pass is of all these layers."""
        if any(self.uses[module] > 1 for module in modules):
            raise _FailedError("its projections belong to another layer too", 0.0)

    def _proved(self, layer: int, claim: Claim, seen: Seen) -> tuple[Site, After]:
        self._is_own(claim.gate.module, claim.up.module, claim.down)
        x, a, b, h, y = _read(claim, seen)
        unit, identity_error = identify(self.units(layer, seen.module(claim.where)), a, b, h, claim.where)
        form = GatedMLP(unit, *claim.matrices, *claim.biases)
        output_error = _proved_output(form, x, y)
        gain, source = gain_before(x, seen.norms(x))
        after = gain_after(seen.again, seen.gave_itself, claim.down, seen.calls[claim.down][2], seen.block, self.constants)
        errors, in_place = (identity_error, output_error), bool({claim.gate.module, claim.up.module} & seen.changed)
        return Site(layer, unit, claim, gain, source, after.gain, after.source, *errors, in_place=in_place), after

    def _mixture(self, layer: int, seen: Seen, dense: Sequence[tuple[Site, After]], every: Sequence[Stacks]) -> Mixture:
        failures = []
        if len(holders := {one.module for one in every}) > 1:
            raise NotASiteError(f"it has {len(holders)} modules of experts side by side")
        for stacks in self._in_order(every):
            try:
                unit, error = self._proved_stacks(layer, stacks, seen)
            except _FailedError as failure:
                failures.append(failure)
                continue
            self.layout = stacks.gate, stacks.up, stacks.down, unit
            gain, source = self._gain_of_experts(stacks, seen)
            y = hidden_of(seen.calls[stacks.module][2])
            after = gain_after(seen.again, seen.gave_itself, stacks.module, y, seen.block, self.constants)
            if after.by_token is not None:
                raise NotASiteError("what its experts give has yet another weight for every token")
            gains = gain, source, after.gain, after.source
            sites = [
                Site(layer, unit, ExpertWeights(stacks, number), *gains, 0.0, error, number)
                for number in range(stacks.n_experts)
            ]
            shared = [_shared(site, one, seen) for site, one in dense]
            if len(shared) > 1:
                raise NotASiteError(
                    f"it has {len(shared)} gated MLPs beside its experts, expected one shared expert at most"
                )
            _prove_complete(sites[0], stacks, [site for site, _ in shared], [weight for _, weight in shared], seen)
            reads = _around(stacks, [site for site, _ in shared], seen)
            return Mixture(layer, (*sites, *(site for site, _ in shared)), stacks, reads)
        raise NotASiteError(str(min(failures, key=lambda failure: failure.error)))

    def _gain_of_experts(self, stacks: Stacks, seen: Seen) -> tuple[Tensor, str]:
        x = seen.given(stacks.module)
        routing = _routing(stacks, seen)
        if routing is not None and routing.scaled:  # x is what a norm gave, times a weight of each row
            rows = x.any(dim=1)
            for _, _, _, gave in seen.norms(x):
                if len(gave) * stacks.n_experts == len(x) and parallel(x[rows], gave[routing.place[rows]]):
                    x = gave
                    break
        return gain_before(x, seen.norms(x))

    def _in_order(self, every: Iterable[Stacks]) -> list[Stacks]:
        return sorted(every, key=lambda one: self.layout is None or (one.gate, one.up, one.down) != self.layout[:3])

    def _proved_stacks(self, layer: int, stacks: Stacks, seen: Seen) -> tuple[Unit, float]:
        self._is_own(stacks.module)
        if (fired := seen.fired[stacks.module]) != 1:
            raise _FailedError(f"its experts ran {fired} times on the probe, expected once")
        routing = _routing(stacks, seen)
        if routing is None:
            raise _FailedError(
                f"its experts ({type(stacks.module).__name__}) are not given tokens, their experts and weights"
            )
        y = seen.gave(stacks.module)
        units = self.units(layer, stacks.module)
        known = [place for place, unit in enumerate(units) if self.layout is not None and unit == self.layout[3]]
        limit = OUTPUT_SLACK * TOLERANCE[y.dtype]
        for some in ([units[: known[0] + 1]] if known else []) + [units]:  # what is likelier here than what it was before
            errors = [experts_error(stacks, unit, routing, y) for unit in some]
            best = min(range(len(errors)), key=lambda place: (errors[place] != errors[place], errors[place]))
            if errors[best] <= limit:
                return some[best], max(errors[best], self._every_expert(stacks, some[best], routing, seen))
        raise _FailedError(
            f"what its experts give is not Σ r·g(a, b) v for any known g (nearest {units[best].name}, off by "
            f"{errors[best]:.1e}, limit {limit:.0e})",
            errors[best],
        )

    def _every_expert(self, stacks: Stacks, unit: Unit, routing: Routing, seen: Seen) -> float:
        """The same for every expert: a probe reaches few of many, so the module is run once more with tokens for each."""
        args, kwargs, _ = seen.calls[stacks.module]
        errors = [0.0]
        for asked in routing.rounds(stacks.n_experts):
            own, named = asked.written(args, kwargs)
            y = hidden_of(stacks.module(*own, **named)).flatten(0, -2)
            error, limit = experts_error(stacks, unit, asked, y), OUTPUT_SLACK * TOLERANCE[y.dtype]
            if not error <= limit:
                raise _FailedError(f"an expert that the probe did not reach gives something else ({error:.1e})", error)
            errors.append(error)
        return max(errors)


class _FailedError(Exception):
    """Why a claim failed, and by how much."""

    def __init__(self, reason: str, error: float = float("inf")) -> None:
        super().__init__(reason)
        self.error = error if error == error else float("inf")


def identify(units: Sequence[Unit], a: Tensor, b: Tensor, h: Tensor, where: str) -> tuple[Unit, float]:
    """The unit that gives h from a and b with the least error; of equal ones the first. Fails beyond the tolerance."""
    unit, error = nearest_unit(units, a, b, h)
    limit = TOLERANCE[h.dtype]
    if not error <= limit:
        reason = f"nearest {unit.name}, off by {error:.1e}, limit {limit:.0e}; first tried {units[0].name}"
        reason += f"; projections of {where or 'the block'}"
        raise _FailedError(f"h is not g(a, b) for any known g ({reason})", error)
    return unit, error


def _read(claim: Claim, seen: Seen) -> tuple[Tensor, ...]:
    """x, a, b, h and y of a claim, once it is clear that each was computed once, from one x, for every token."""
    modules = claim.gate.module, claim.up.module, claim.down
    if (fired := [seen.fired[module] for module in modules]) != [1, 1, 1]:
        raise _FailedError(
            f"gate, up and down of {claim.where or 'the block'} fired {fired} times in one pass, expected once each"
        )
    for module in modules:
        if module.weight.dtype not in TOLERANCE:
            raise _FailedError(f"weights of {claim.where} are stored as {module.weight.dtype}: load them dequantized")
    x, h, y = seen.given(claim.gate.module), seen.given(claim.down), seen.gave(claim.down)
    if not torch.equal(x, seen.given(claim.up.module)):
        raise _FailedError("gate and up do not read the same x")
    a, b = claim.gate.of(seen.gave(claim.gate.module)), claim.up.of(seen.gave(claim.up.module))
    if not len(a) == len(h):
        raise _FailedError(f"its down projection is given {len(h)} tokens of {len(a)}")
    if a.shape[1] < 2:
        raise _FailedError("it has one neuron, and re-pairing needs another")
    return x, a, b, h, y


def _proved_output(form: GatedMLP, x: Tensor, y: Tensor) -> float:
    wide = torch.promote_types(y.dtype, torch.float32)
    error, limit = relative_error(form.to(wide)(x.to(wide)), y), OUTPUT_SLACK * TOLERANCE[y.dtype]
    if not error <= limit:
        raise _FailedError(f"MLP output from q, k, v is off by {error:.1e} (limit {limit:.0e})", error)
    return error


def _routing(stacks: Stacks, seen: Seen) -> Routing | None:
    """What the experts were given on the probe, if that is a routing."""
    if stacks.module not in seen.calls:
        return None
    args, kwargs, _ = seen.calls[stacks.module]
    return Routing.of(args, kwargs, stacks.n_experts)


def _is_told(stacks: Stacks, seen: Seen) -> bool:
    """Whether a module is given the experts of each token, by which its tables are known to be theirs."""
    routing = _routing(stacks, seen)
    return routing is not None and not routing.scaled


def experts_error(stacks: Stacks, unit: Unit, routing: Routing, y: Tensor) -> float:
    """Relative error of what the experts give, computed from the weights of each and the tokens that were sent to it."""
    total = torch.zeros(len(routing.x), y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32), device=y.device)
    for expert, (token, weight) in zip(stacks.experts(), routing.by_expert(stacks.n_experts), strict=True):
        if len(token):
            form = GatedMLP(unit, *expert.matrices, *expert.biases).to(total.dtype)
            total.index_add_(0, token, weight[:, None].to(total.dtype) * form(routing.x[token].to(total.dtype)))
    return relative_error(total, y)


def _shared(site: Site, after: After, seen: Seen) -> tuple[Site, Float[Tensor, "place 1"]]:
    """A gated MLP beside the experts, and its weight for each token of the probe; found where there is one."""
    if after.by_token is None:
        return replace(site, expert=SHARED), site.gain.new_ones(1, 1)
    for module in seen.block.modules():
        if isinstance(module, nn.Linear) and module.out_features == 1 and module in seen.calls:
            weight = seen.gave(module).double().sigmoid()
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


def _around(stacks: Stacks, shared: Sequence[Site], seen: Seen) -> nn.Module:
    """The module around the experts, which must be given what a shared expert reads."""
    around = seen.module(stacks.where.rpartition(".")[0])
    for site in shared:
        if around not in seen.calls or not torch.equal(seen.given(around), seen.given(site.taps.gate.module)):
            raise NotASiteError("its shared expert does not read what the module around its experts is given")
    return around


def _prove_complete(expert: Site, stacks: Stacks, shared: Sequence[Site], weights: Sequence[Tensor], seen: Seen) -> None:
    """Nothing else adds to what the experts give: the module around them gives their sum, alone or with the shared one.

    What the experts give may be multiplied before the shared one is added: by what is applied to it and not to that.
    """
    around = dict(seen.block.named_modules()).get(stacks.where.rpartition(".")[0])
    if around is None or around not in seen.calls:
        return
    whole, routed = seen.gave(around), seen.gave(stacks.module)
    routed = routed.reshape(-1, len(whole), whole.shape[-1]).sum(dim=0)
    both = [
        _relative(expert.value_gain, site.value_gain) * routed + weight * seen.gave(site.taps.down)
        for site, weight in zip(shared, weights, strict=True)
    ]
    error, limit = min(relative_error(one, whole) for one in (routed, *both)), OUTPUT_SLACK * TOLERANCE[whole.dtype]
    if not error <= limit:
        raise NotASiteError(f"its experts do not make up what the layer gives, off by {error:.1e} (limit {limit:.0e})")


def _relative(gain: Tensor, other: Tensor) -> Tensor:
    """What the one gain is of the other, 1 where they are equal."""
    return torch.where(gain == other, 1, gain / other)


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
