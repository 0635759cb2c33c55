"""Every sum of a layer from one tile of tokens: a function of tensors alone, so that it can be compiled.

Products are taken in the precision of the weights (at least float32). Tokens are added up in that precision within a chunk
only; chunks are added up in float64, so a long tile is as exact as a short one, in whatever order a device adds. Sums over
neurons are taken in that precision: their length is the layer's width, however long the tile. Nothing here is a matrix
product, which a GPU may take in less than the precision of its factors. a and b themselves are squared in float64, because
a variance is a difference of large numbers.
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
"""The sums that are float64 from the first: nothing is rounded in them."""


class Plan(NamedTuple):
    """Which sums there are: of a layout, what is needed here, looked up once.

    Attributes:
        alphas: the scales.
        main_alphas: those of them that re-pairings follow.
        names: the sums in order, of one row or more.
        scalings: of every scale, the name of its token measure.
        token_measures: all of these, in order.
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
        partners, pair_balance: partners, and the β of each pair.
        length, per_length: ‖k‖, and its inverse or 0, by which keys are brought to one length; 1 where up is not linear.
    """

    value: Float[Tensor, " d_mlp"]
    balance: Float[Tensor, " d_mlp"]
    partners: Int64[Tensor, "draw d_mlp"]
    pair_balance: Float[Tensor, "draw d_mlp"]
    length: Float[Tensor, " d_mlp"]
    per_length: Float[Tensor, " d_mlp"]


class TileSums(NamedTuple):
    """What one tile gives.

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
        weights: of the layer.
        a: gate pre-activations of the tile's chunks.
        b: up pre-activations.
        live: which tokens are not padding; None where all are. Padding is left out of the neurons' sums only.
        routing_weight: the routing weights r; None where all are 1. A token counts with r², in the tokens' sums as well.
    """
    a, b = a.to(weights.value.dtype), b.to(weights.value.dtype)
    gate, up, gate_of_b, up_of_a = unit.gate(a), unit.up(b), unit.gate(b), unit.up(a)
    h, ab = gate * up, a * b
    there, square, exact_square = _token_weights(a, live, routing_weight)
    parts: dict[str, list[Tensor]] = defaultdict(list)
    gaps: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}

    def add(name: str, values: Tensor, weight: Tensor | None = square) -> None:
        """Add up every chunk, and the chunks at the end, all sums at once."""
        parts[name].append((values if weight is None else values * weight).sum(dim=1))

    def over_neurons(values: Tensor, weight: Tensor) -> Tensor:
        return (values * weight).sum(dim=2)

    def compare(name: str, measure: str, changed: Tensor, of: Tensor, energy_of: Tensor, weight: Tensor) -> None:
        """The rows of a changed version, and the two parts of every token's asymmetry."""
        energy, gap = changed.square(), (of - changed).square()
        add(name, energy)
        add(f"{name}_gap", gap)
        gaps[measure] = over_neurons(gap, weight)
        scales[measure] = 2 * (energy_of + over_neurons(energy, weight))

    parts["weight"].append(_counted(a, exact_square))
    for name, values in _pre_activations(a, b):
        add(name, values, exact_square)
    hh = h.square()
    token_energy = over_neurons(hh, weights.value)
    add("hh", hh)
    add("h_ab", h * ab)
    add("abab", ab.square())
    for quadrant, inside in zip(QUADRANTS, _quadrants(a > 0, b > 0), strict=True):
        add(f"count_{quadrant}", inside.to(a.dtype), there)
        add(f"energy_{quadrant}", hh * inside)

    plain = (h, token_energy, weights.value)
    compare("exchange", "exchange", gate_of_b * up_of_a, *plain)
    compare("placement", "placement", unit.placed_outside(a, b), *plain)

    euler = unit.euler(a, b).square()
    add("euler", euler)
    gaps["euler"] = over_neurons(euler, weights.value)
    scales["euler"] = gaps["euler"] + token_energy

    everyone = b * weights.per_length
    power = unit.up(everyone).square().sum(dim=2, keepdim=True)
    add("mixed_hh", power * gate.square())
    main_gates: list[tuple[float, Tensor]] = []
    for alpha, measure in zip(plan.alphas, plan.scalings, strict=True):
        scaled_gate = unit.scaled_gate(a, alpha)
        scaled = scaled_gate * unit.scaled_up(b, alpha)
        if alpha in plan.main_alphas:
            main_gates.append((alpha, scaled_gate))
        compare("scaling", measure, scaled, *plain)
        powers = (power, power) if unit.up_is_linear else _powers(unit.scaled_up(everyone, alpha), unit.up(everyone))
        add("mixed_scaling", powers[0] * scaled_gate.square())
        add("mixed_product", powers[1] * (gate * scaled_gate))
        add("product", h * scaled)

    # In a balanced gauge all of a neuron's energies are 1/β² of what is summed here.
    balanced_b = weights.balance * b
    balanced, weight = gate * unit.up(balanced_b), weights.value / weights.balance.square()
    balanced_squared = balanced.square()
    add("balanced_hh", balanced_squared)
    in_balance = (balanced, over_neurons(balanced_squared, weight), weight)
    compare("balanced_exchange", "balanced_exchange", unit.gate(balanced_b) * up_of_a, *in_balance)
    compare("balanced_placement", "balanced_placement", unit.placed_outside(a, balanced_b), *in_balance)

    for draw in range(len(weights.partners)):
        partner = weights.partners[draw]
        other = b[..., partner]
        key, plain_pair = weights.pair_balance[draw] * other, gate * unit.up(other)
        for alpha, scaled_gate in main_gates:
            scaled = scaled_gate * unit.scaled_up(other, alpha)
            add("repaired_scaling", scaled.square())
            add("repaired_product", plain_pair * scaled)
        for kind, repaired, swapped in (
            ("", plain_pair, gate_of_b[..., partner] * up_of_a),
            ("balanced_", gate * unit.up(key), unit.gate(key) * up_of_a),
        ):
            add(f"repaired_{kind}hh", repaired.square())
            add(f"repaired_{kind}exchange", swapped.square())
            add(f"repaired_{kind}exchange_gap", (repaired - swapped).square())

    rows = _totals(parts, PRE_ACTIVATIONS) | _totals(parts, [name for name in parts if name not in PRE_ACTIVATIONS])
    # Of the pairs of a neuron's a with every b, keys brought to the own key's length, the own pair is none.
    for name, own in (("mixed_hh", "hh"), ("mixed_scaling", "scaling"), ("mixed_product", "product")):
        if name in rows:
            rows[name] = rows[name] * weights.length.double().square() - rows[own]
    for name in rows:
        if "balanced" in name:
            rows[name] = rows[name] / weights.balance.double().square()
    neuron = torch.cat([rows[name] for name in plan.names if name in rows])
    token_gap, token_scale = (torch.stack([of[name].flatten() for name in plan.token_measures]) for of in (gaps, scales))
    token_energy = token_energy.flatten()
    if square is None or routing_weight is None:
        return TileSums(neuron, token_gap, token_scale, token_energy)
    of_token = square.flatten()
    return TileSums(neuron, of_token * token_gap, of_token * token_scale, of_token * token_energy)


def _token_weights(
    a: Float[Tensor, "chunk token d_mlp"],
    live: Bool[Tensor, "chunk token"] | None,
    root: Float[Tensor, "chunk token"] | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a token counts in counts, in energies, and in sums that are float64 from the first; None where all are 1."""
    there = None if live is None else live[..., None]
    if root is None:
        return there, there, there
    square = root.double().square()[..., None]
    square = square if there is None else square * there
    return there, square.to(a.dtype), square


def _totals(parts: dict[str, list[Tensor]], names: Sequence[str]) -> dict[str, Float64[Tensor, "row d_mlp"]]:
    """The sums of these names, all of one precision, over the chunks."""
    table = torch.stack([part for name in names for part in parts[name]]).double().sum(dim=1)
    return dict(zip(names, table.split([len(parts[name]) for name in names]), strict=True))


def _powers(
    others: Float[Tensor, "chunk token d_mlp"], ups: Float[Tensor, "chunk token d_mlp"]
) -> tuple[Float[Tensor, "chunk token 1"], Float[Tensor, "chunk token 1"]]:
    """Σ over neurons of the squared factor, and of its product with the unscaled one."""
    return others.square().sum(dim=2, keepdim=True), (others * ups).sum(dim=2, keepdim=True)


def _counted(a: Float[Tensor, "chunk token d_mlp"], square: Tensor | None) -> Float64[Tensor, "chunk d_mlp"]:
    """Σ r² of every chunk."""
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
