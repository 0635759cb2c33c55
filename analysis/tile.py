"""The inner loop: every sum of a layer from one tile of tokens.

Products are taken in the precision of the activations (at least float32) and summed over a tile, few enough tokens for
that; tiles are added up in float64. a and b themselves are squared in float64, because a variance is a difference of large
numbers.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from analysis.sums import QUADRANTS, Layout, scaling_name
from analysis.units import Unit

TILE = 64
"""Tokens in a tile: few enough to stay in a core's cache and to be summed safely in float32."""


@dataclass(frozen=True)
class TileSums:
    """What one tile gives.

    Attributes:
        neuron: the rows of the layout's table.
        token_ratios: for each of the layout's token measures, its ratio on every token.
        token_energy: Σ_j w_j h_j² of every token.
    """

    neuron: Float64[Tensor, "moment d_mlp"]
    token_ratios: Float[Tensor, "measure token"]
    token_energy: Float[Tensor, " token"]


@dataclass(frozen=True)
class TileReducer:
    """Reduces tiles of (a, b) of one layer.

    Attributes:
        unit: g.
        layout: which scales and how many re-pairings to follow.
        weight: w_j = ‖v_j‖².
        balance: β_j.
        partners: for each re-pairing, the neuron whose b is paired with each neuron's a.
    """

    unit: Unit
    layout: Layout
    weight: Float[Tensor, " d_mlp"]
    balance: Float[Tensor, " d_mlp"]
    partners: Int64[Tensor, "draw d_mlp"]

    def __call__(self, a: Float[Tensor, "token d_mlp"], b: Float[Tensor, "token d_mlp"]) -> TileSums:
        unit, beta = self.unit, self.balance
        h, ab = unit(a, b), a * b
        rows: dict[str, list[Tensor]] = defaultdict(list)
        ratios: dict[str, Tensor] = {}

        def add(name: str, values: Tensor) -> None:
            rows[name].append(values.sum(dim=0).double())

        def compare(name: str, changed: Tensor, of: Tensor, token_energy: Tensor, ratio: str) -> None:
            """The rows of a changed version, and the asymmetry of every token."""
            energy, gap = changed.square(), (of - changed).square()
            add(name, energy)
            add(f"{name}_gap", gap)
            ratios[ratio] = gap @ self.weight / (2 * (token_energy + energy @ self.weight))

        for name, values in _pre_activations(a, b):
            add(name, values)
        hh = h.square()
        token_energy = hh @ self.weight
        add("hh", hh)
        add("h_ab", h * ab)
        add("abab", ab.square())
        for quadrant, inside in zip(QUADRANTS, _quadrants(a > 0, b > 0), strict=True):
            add(f"count_{quadrant}", inside.to(a.dtype))
            add(f"energy_{quadrant}", hh * inside)

        compare("exchange", unit.exchanged(a, b), h, token_energy, "exchange")
        compare("placement", unit.placed_outside(a, b), h, token_energy, "placement")
        for alpha in self.layout.alphas:
            compare("scaling", unit.scaled(a, b, alpha), h, token_energy, scaling_name(alpha))

        euler = unit.euler(a, b).square()
        add("euler", euler)
        token_euler = euler @ self.weight
        ratios["euler"] = token_euler / (token_euler + token_energy)

        scaled_b = beta * b
        balanced = unit(a, scaled_b) / beta
        balanced_squared = balanced.square()
        balanced_energy = balanced_squared @ self.weight
        add("balanced_hh", balanced_squared)
        for name, change in (("balanced_exchange", unit.exchanged), ("balanced_placement", unit.placed_outside)):
            compare(name, change(a, scaled_b) / beta, balanced, balanced_energy, name)

        for partner in self.partners:
            other = b[:, partner]
            repaired, swapped = unit(a, other), unit.exchanged(a, other)
            add("repaired_hh", repaired.square())
            add("repaired_exchange", swapped.square())
            add("repaired_exchange_gap", (repaired - swapped).square())

        neuron = torch.stack([row for name in self.layout.rows for row in rows[name]])
        return TileSums(neuron, torch.stack([ratios[name] for name in self.layout.token_measures]), token_energy)


def _pre_activations(a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    a, b = a.double(), b.double()
    yield from (("a", a), ("b", b), ("aa", a.square()), ("bb", b.square()), ("ab", a * b))


def _quadrants(p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    """Masks of the sign pairs, in the order of ``QUADRANTS``."""
    return p & q, p & ~q, ~p & q, ~(p | q)
