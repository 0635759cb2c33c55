"""Every sum of a layer from one tile of tokens: a function of tensors alone, so that it can be compiled.

Products are computed in the precision of ``ValueWeights`` (at least float32). Tokens are summed in that precision within a
chunk only; chunks are summed in float64, so a long tile is as exact as a short one, whatever the order in which a device
adds. Sums over neurons are taken in that precision: their length is the layer's width, however long the tile. Nothing here
is a matrix product, which a GPU may compute in less than the precision of its factors. The moments of a and b are products
in float64, because a variance is a difference of large numbers.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from analysis.sums.layout import QUADRANTS, Layout
from analysis.units.registry import Unit

PRE_ACTIVATIONS = ("weight", "a", "b", "aa", "bb", "ab")
"""The sums whose products, too, are float64, so that nothing is rounded to float32."""


class Plan(NamedTuple):
    """Which sums to compute: what this module needs of a layout, looked up once.

    Attributes:
        alphas: the scales.
        main_alphas: those of them for which the permutation null is summed.
        names: the sums in order, each of one row or more.
        scalings: the name of the token measure of each scale.
        token_measures: the names of all token measures, in order.
    """

    alphas: tuple[float, ...]
    main_alphas: tuple[float, ...]
    names: tuple[str, ...]
    scalings: tuple[str, ...]
    token_measures: tuple[str, ...]

    @classmethod
    def of(cls, layout: Layout) -> "Plan":
        measures = layout.token_measures
        scalings = measures[len(measures) - len(layout.alphas) :]
        return cls(layout.alphas, layout.main_alphas, tuple(layout.rows), scalings, measures)


class ValueWeights(NamedTuple):
    """Constants of the layer's neurons, in the precision of the products.

    Attributes:
        value: w.
        balance: β.
        partners, pair_balance: the partner in each permutation, and the β of each pair.
        length, per_length: ‖k‖, and 1/‖k‖ (0 for k = 0), which normalizes every key to length 1; both 1 where up is not
            linear.
    """

    value: Float[Tensor, " d_mlp"]
    balance: Float[Tensor, " d_mlp"]
    partners: Int64[Tensor, "draw d_mlp"]
    pair_balance: Float[Tensor, "draw d_mlp"]
    length: Float[Tensor, " d_mlp"]
    per_length: Float[Tensor, " d_mlp"]


class TileSums(NamedTuple):
    """The sums of one tile.

    Attributes:
        neuron: the rows of the layout's table.
        token_gap, token_scale: for each of the layout's token measures and every token, the two sums over neurons whose
            ratio is the token's number.
        token_energy: Σ_j w_j h_j² of every token.
    """

    neuron: Float64[Tensor, "moment d_mlp"]
    token_gap: Float[Tensor, "measure token"]
    token_scale: Float[Tensor, "measure token"]
    token_energy: Float[Tensor, " token"]


def tile_sums(
    unit: Unit,
    plan: Plan,
    weights: ValueWeights,
    a: Float[Tensor, "chunk token d_mlp"],
    b: Float[Tensor, "chunk token d_mlp"],
    live: Bool[Tensor, "chunk token"] | None,
    routing_weight: Float[Tensor, "chunk token"] | None = None,
) -> TileSums:
    """Every sum of a tile.

    Args:
        unit: g.
        plan: which sums.
        weights: constants of the layer's neurons.
        a: gate pre-activations of the tile's chunks.
        b: up pre-activations.
        live: which tokens are not padding; None where all are. Padding is left out of the neurons' sums only.
        routing_weight: the routing weights r; None where all are 1. A token counts with r², also in the sums by token.
    """
    a, b = a.to(weights.value.dtype), b.to(weights.value.dtype)
    there, square, exact_square = _token_weights(a, live, routing_weight)
    sums, tile = _Collector(square), _Tile(a, b, unit.gate(a), unit.up(b), unit.gate(b), unit.up(a))
    h = tile.gate * tile.up
    hh = h.square()
    plain = _Reference(h, _over_neurons(hh, weights.value), weights.value)
    sums.parts["weight"].append(_counted(a, exact_square))
    for name, values in _pre_activations(a, b):
        sums.add_weighted(name, values, exact_square)
    _add_outputs(sums, tile, h, hh, there)
    sums.compare("exchange", "exchange", tile.gate_of_b * tile.up_of_a, plain)
    sums.compare("placement", "placement", unit.placed_outside(a, b), plain)
    _add_euler(sums, unit, tile, plain)
    main_gates = _add_scalings(sums, unit, plan, weights, tile, plain)
    _add_balanced(sums, unit, weights, tile)
    _add_permuted(sums, unit, weights, tile, main_gates)

    neuron, measures = _rows(sums.parts, plan, weights), plan.token_measures
    token_gap, token_scale = (torch.stack([of[name].flatten() for name in measures]) for of in (sums.gaps, sums.scales))
    token_energy = plain.energy.flatten()
    if square is None or routing_weight is None:
        return TileSums(neuron, token_gap, token_scale, token_energy)
    of_token = square.flatten()
    return TileSums(neuron, of_token * token_gap, of_token * token_scale, of_token * token_energy)


class _Tile(NamedTuple):
    """a and b of a tile, and both factors of h = gate·up and of the exchanged h′ = gate_of_b·up_of_a."""

    a: Tensor
    b: Tensor
    gate: Tensor
    up: Tensor
    gate_of_b: Tensor
    up_of_a: Tensor


class _Reference(NamedTuple):
    """What a changed version h′ is compared with: h, Σ_j weight_j h_j² of every token, and these weights."""

    h: Float[Tensor, "chunk token d_mlp"]
    energy: Float[Tensor, "chunk token"]
    weight: Float[Tensor, " d_mlp"]


class _Collector:
    """The sums of a tile as they are computed: by name, of every neuron and chunk; gap and scale of every token."""

    def __init__(self, square: Tensor | None) -> None:
        """``square`` is r² of every token, 0 for padding; None where it is 1 for all."""
        self.square = square
        self.parts: dict[str, list[Tensor]] = defaultdict(list)
        self.gaps: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add a row of a sum, every token weighted with r²."""
        self.add_weighted(name, values, self.square)

    def add_weighted(self, name: str, values: Tensor, weight: Tensor | None) -> None:
        """Add a row with other weights; chunks are summed at the end, all sums at once."""
        self.parts[name].append((values if weight is None else values * weight).sum(dim=1))

    def compare(self, name: str, measure: str, changed: Tensor, reference: _Reference) -> None:
        """Add the rows of a changed version h′, and gap and scale of every token's asymmetry."""
        energy, gap = changed.square(), (reference.h - changed).square()
        self.add(name, energy)
        self.add(f"{name}_gap", gap)
        self.gaps[measure] = _over_neurons(gap, reference.weight)
        self.scales[measure] = 2 * (reference.energy + _over_neurons(energy, reference.weight))


def _over_neurons(values: Tensor, weight: Tensor) -> Tensor:
    return (values * weight).sum(dim=2)


def _add_outputs(sums: _Collector, tile: _Tile, h: Tensor, hh: Tensor, there: Tensor | None) -> None:
    """h², its product with ab, and counts and energies by sign pair."""
    ab = tile.a * tile.b
    sums.add("hh", hh)
    sums.add("h_ab", h * ab)
    sums.add("abab", ab.square())
    for quadrant, inside in zip(QUADRANTS, _quadrants(tile.a > 0, tile.b > 0), strict=True):
        sums.add_weighted(f"count_{quadrant}", inside.to(tile.a.dtype), there)
        sums.add(f"energy_{quadrant}", hh * inside)


def _add_euler(sums: _Collector, unit: Unit, tile: _Tile, plain: _Reference) -> None:
    euler = unit.euler(tile.a, tile.b).square()
    sums.add("euler", euler)
    sums.gaps["euler"] = _over_neurons(euler, plain.weight)
    sums.scales["euler"] = sums.gaps["euler"] + plain.energy


def _add_scalings(
    sums: _Collector, unit: Unit, plan: Plan, weights: ValueWeights, tile: _Tile, plain: _Reference
) -> list[tuple[float, Tensor]]:
    """Every scale, with a neuron's own b and with all b of the layer; returns α and σ(αa)/α of the main scales."""
    normalized_b = tile.b * weights.per_length
    power = unit.up(normalized_b).square().sum(dim=2, keepdim=True)
    sums.add("mixed_hh", power * tile.gate.square())
    main_gates: list[tuple[float, Tensor]] = []
    for alpha, measure in zip(plan.alphas, plan.scalings, strict=True):
        scaled_gate = unit.scaled_gate(tile.a, alpha)
        scaled = scaled_gate * unit.scaled_up(tile.b, alpha)
        if alpha in plan.main_alphas:
            main_gates.append((alpha, scaled_gate))
        sums.compare("scaling", measure, scaled, plain)
        powers = (
            (power, power) if unit.up_is_linear else _powers(unit.scaled_up(normalized_b, alpha), unit.up(normalized_b))
        )
        sums.add("mixed_scaling", powers[0] * scaled_gate.square())
        sums.add("mixed_product", powers[1] * (tile.gate * scaled_gate))
        sums.add("product", plain.h * scaled)
    return main_gates


def _add_balanced(sums: _Collector, unit: Unit, weights: ValueWeights, tile: _Tile) -> None:
    """Exchange and placement in the balanced gauge, where a neuron's energies are 1/β² of what is summed here."""
    balanced_b = weights.balance * tile.b
    h, weight = tile.gate * unit.up(balanced_b), weights.value / weights.balance.square()
    hh = h.square()
    sums.add("balanced_hh", hh)
    balanced = _Reference(h, _over_neurons(hh, weight), weight)
    sums.compare("balanced_exchange", "balanced_exchange", unit.gate(balanced_b) * tile.up_of_a, balanced)
    sums.compare("balanced_placement", "balanced_placement", unit.placed_outside(tile.a, balanced_b), balanced)


def _add_permuted(
    sums: _Collector, unit: Unit, weights: ValueWeights, tile: _Tile, main_gates: list[tuple[float, Tensor]]
) -> None:
    """The permutation null: each neuron's a with the b of its partner in every permutation."""
    for draw in range(len(weights.partners)):
        partner = weights.partners[draw]
        other = tile.b[..., partner]
        balanced_b, plain = weights.pair_balance[draw] * other, tile.gate * unit.up(other)
        for alpha, scaled_gate in main_gates:
            scaled = scaled_gate * unit.scaled_up(other, alpha)
            sums.add("repaired_scaling", scaled.square())
            sums.add("repaired_product", plain * scaled)
        for kind, h, exchanged in (
            ("", plain, tile.gate_of_b[..., partner] * tile.up_of_a),
            ("balanced_", tile.gate * unit.up(balanced_b), unit.gate(balanced_b) * tile.up_of_a),
        ):
            sums.add(f"repaired_{kind}hh", h.square())
            sums.add(f"repaired_{kind}exchange", exchanged.square())
            sums.add(f"repaired_{kind}exchange_gap", (h - exchanged).square())


def _rows(parts: dict[str, list[Tensor]], plan: Plan, weights: ValueWeights) -> Float64[Tensor, "moment d_mlp"]:
    """The rows of the layout's table: sums over the chunks, in the neuron's own gauge."""
    rows = _totals(parts, PRE_ACTIVATIONS) | _totals(parts, [name for name in parts if name not in PRE_ACTIVATIONS])
    # The sums over all pairs are of keys of length 1; a neuron's pair with its own b is not among the pairs of the null.
    for name, own in (("mixed_hh", "hh"), ("mixed_scaling", "scaling"), ("mixed_product", "product")):
        if name in rows:
            rows[name] = rows[name] * weights.length.double().square() - rows[own]
    for name in rows:
        if "balanced" in name:
            rows[name] = rows[name] / weights.balance.double().square()
    return torch.cat([rows[name] for name in plan.names if name in rows])


def _token_weights(
    a: Float[Tensor, "chunk token d_mlp"],
    live: Bool[Tensor, "chunk token"] | None,
    routing_weight: Float[Tensor, "chunk token"] | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """A token's weight in counts, in energies, and in sums whose products are float64; None where all weights are 1."""
    there = None if live is None else live[..., None]
    if routing_weight is None:
        return there, there, there
    square = routing_weight.double().square()[..., None]
    square = square if there is None else square * there
    return there, square.to(a.dtype), square


def _totals(parts: dict[str, list[Tensor]], names: Sequence[str]) -> dict[str, Float64[Tensor, "row d_mlp"]]:
    """The named sums, all of one precision, summed over the chunks."""
    table = torch.stack([part for name in names for part in parts[name]]).double().sum(dim=1)
    return dict(zip(names, table.split([len(parts[name]) for name in names]), strict=True))


def _powers(
    others: Float[Tensor, "chunk token d_mlp"], ups: Float[Tensor, "chunk token d_mlp"]
) -> tuple[Float[Tensor, "chunk token 1"], Float[Tensor, "chunk token 1"]]:
    """Σ over neurons of the squared scaled factor, and of its product with the unscaled one."""
    return others.square().sum(dim=2, keepdim=True), (others * ups).sum(dim=2, keepdim=True)


def _counted(a: Float[Tensor, "chunk token d_mlp"], square: Tensor | None) -> Float64[Tensor, "chunk d_mlp"]:
    """Σ r² over each chunk, for every neuron."""
    chunks, tokens, d_mlp = a.shape
    if square is None:
        return torch.full((chunks, d_mlp), float(tokens), dtype=torch.float64, device=a.device)
    return square.sum(dim=1, dtype=torch.float64).expand(-1, d_mlp)


def _pre_activations(a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    a, b = a.double(), b.double()
    yield "a", a
    yield "b", b
    yield "aa", a.square()
    yield "bb", b.square()
    yield "ab", a * b


def _quadrants(p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    """Masks of the sign pairs, in the order of ``QUADRANTS``."""
    return p & q, p & ~q, ~p & q, ~(p | q)
