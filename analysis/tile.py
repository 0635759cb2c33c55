"""The inner loop: every sum of a layer from one tile of tokens.

Products are taken in the precision of the activations (at least float32) and summed over a tile, few enough tokens for
that; tiles are added up in float64. a and b themselves are squared in float64, because a variance is a difference of large
numbers.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from analysis.extremes import Peaks
from analysis.geometry import Geometry, Pairing
from analysis.sums import QUADRANTS, Layout, scaling_name
from analysis.totals import N_BLOCKS, N_GROUPS, Reducer, TokenSums, Totals
from analysis.units import Unit
from analysis.window import Batch

TILE = 64
"""Tokens in a tile: few enough to stay in a core's cache and to be summed safely in float32."""


@dataclass(frozen=True)
class TileSums:
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


class TileReducer(Reducer):
    """Reduces (a, b) of one layer tile by tile with torch alone: any unit, any device, any precision."""

    def __init__(
        self,
        unit: Unit,
        layout: Layout,
        geometry: Geometry,
        pairing: Pairing,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            unit: g.
            layout: which scales and how many re-pairings to follow.
            geometry: the neurons' norms and balance β_j.
            pairing: the re-pairings, as many as ``layout.draws``.
            device: where the activations are.
            dtype: precision of the products; of the activations, and at least float32.
        """
        self.unit, self.layout = unit, layout
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.value_weight = geometry.value_weight.to(device)
        self._weight, self._balance = (x.to(device, self.dtype) for x in (geometry.value_weight, geometry.balance))
        self._partners = pairing.partners.to(device)
        self._pair_balance = pairing.balance.to(device, self.dtype)
        length = geometry.norm_k if unit.up_is_linear else torch.ones_like(geometry.norm_k)
        self._length = length.to(device, self.dtype)
        self._per_length = torch.where(self._length > 0, 1 / self._length, 0.0)

    def add(
        self, a: Float[Tensor, "place d_mlp"], b: Float[Tensor, "place d_mlp"], batch: Batch, totals: Totals
    ) -> TokenSums:
        """As ``Reducer.add``."""
        fed = torch.cat([batch.counted, batch.uncounted]).sort().values
        totals.peaks += Peaks.of(a[fed].to(self.dtype), b[fed].to(self.dtype), self.unit, batch.places[:, fed])
        counts = [self.layout.rows[f"count_{quadrant}"] for quadrant in QUADRANTS]
        tiles = []
        for start, stop, block in batch.runs:
            places = batch.counted[start:stop].split(TILE)
            run = [self(a[place].to(self.dtype), b[place].to(self.dtype)) for place in places]
            neuron = torch.stack([tile.neuron for tile in run]).sum(dim=0)
            totals.table += neuron.T
            totals.pooled[block] += neuron @ self.value_weight
            totals.groups[block * N_GROUPS // N_BLOCKS] += self.layout.narrow(neuron).T.float()
            totals.signs[block] += torch.stack([neuron[count].sum() for count in counts])
            tiles += run
        gap, scale = (torch.cat([getattr(t, part) for t in tiles], dim=1).double() for part in ("token_gap", "token_scale"))
        return TokenSums(gap, scale, torch.cat([tile.token_energy for tile in tiles]).double())

    def __call__(self, a: Float[Tensor, "token d_mlp"], b: Float[Tensor, "token d_mlp"]) -> TileSums:
        unit = self.unit
        gate, up, gate_of_b, up_of_a = unit.gate(a), unit.up(b), unit.gate(b), unit.up(a)
        h, ab = gate * up, a * b
        rows: dict[str, list[Tensor]] = defaultdict(list)
        gaps: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}

        def add(name: str, values: Tensor) -> None:
            rows[name].append(values.sum(dim=0).double())

        def compare(name: str, measure: str, changed: Tensor, of: Tensor, energy_of: Tensor, weight: Tensor) -> None:
            """The rows of a changed version, and the two parts of every token's asymmetry."""
            energy, gap = changed.square(), (of - changed).square()
            add(name, energy)
            add(f"{name}_gap", gap)
            gaps[measure] = gap @ weight
            scales[measure] = 2 * (energy_of + energy @ weight)

        for name, values in _pre_activations(a, b):
            add(name, values)
        hh = h.square()
        token_energy = hh @ self._weight
        add("hh", hh)
        add("h_ab", h * ab)
        add("abab", ab.square())
        for quadrant, inside in zip(QUADRANTS, _quadrants(a > 0, b > 0), strict=True):
            add(f"count_{quadrant}", inside.to(a.dtype))
            add(f"energy_{quadrant}", hh * inside)

        plain = (h, token_energy, self._weight)
        compare("exchange", "exchange", gate_of_b * up_of_a, *plain)
        compare("placement", "placement", unit.placed_outside(a, b), *plain)

        euler = unit.euler(a, b).square()
        add("euler", euler)
        gaps["euler"] = euler @ self._weight
        scales["euler"] = gaps["euler"] + token_energy

        everyone = b * self._per_length
        power = unit.up(everyone).square().sum(dim=1)
        rows["mixed_hh"].append(self._mixed(gate.square(), power, rows["hh"][0]))
        main_gates: dict[float, Tensor] = {}
        for alpha in self.layout.alphas:
            scaled_gate, others = unit.scaled_gate(a, alpha), unit.scaled_up(everyone, alpha)
            scaled = scaled_gate * unit.scaled_up(b, alpha)
            if alpha in self.layout.main_alphas:
                main_gates[alpha] = scaled_gate
            compare("scaling", scaling_name(alpha), scaled, *plain)
            powers = (power, power) if others is everyone else _powers(others, unit.up(everyone))
            own, own_product = rows["scaling"][-1], (h * scaled).sum(dim=0).double()
            rows["mixed_scaling"].append(self._mixed(scaled_gate.square(), powers[0], own))
            rows["mixed_product"].append(self._mixed(gate * scaled_gate, powers[1], own_product))

        # In a balanced gauge all of a neuron's energies are 1/β² of what is summed here.
        balanced_b = self._balance * b
        balanced, weight = gate * unit.up(balanced_b), self._weight / self._balance.square()
        balanced_squared = balanced.square()
        add("balanced_hh", balanced_squared)
        in_balance = (balanced, balanced_squared @ weight, weight)
        compare("balanced_exchange", "balanced_exchange", unit.gate(balanced_b) * up_of_a, *in_balance)
        compare("balanced_placement", "balanced_placement", unit.placed_outside(a, balanced_b), *in_balance)

        for partner, pair_balance in zip(self._partners, self._pair_balance, strict=True):
            other = b[:, partner]
            key, plain_pair = pair_balance * other, gate * unit.up(other)
            for alpha, scaled_gate in main_gates.items():
                scaled = scaled_gate * unit.scaled_up(other, alpha)
                add("repaired_scaling", scaled.square())
                add("repaired_product", plain_pair * scaled)
            for kind, repaired, swapped in (
                ("", plain_pair, gate_of_b[:, partner] * up_of_a),
                ("balanced_", gate * unit.up(key), unit.gate(key) * up_of_a),
            ):
                add(f"repaired_{kind}hh", repaired.square())
                add(f"repaired_{kind}exchange", swapped.square())
                add(f"repaired_{kind}exchange_gap", (repaired - swapped).square())

        for name in self.layout.names:
            if "balanced" in name:
                rows[name] = [row / self._balance.double().square() for row in rows[name]]
        neuron = torch.stack([row for name in self.layout.rows for row in rows[name]])
        names = self.layout.token_measures
        token_gap, token_scale = (torch.stack([parts[name] for name in names]) for parts in (gaps, scales))
        return TileSums(neuron, token_gap, token_scale, token_energy)

    def _mixed(
        self, own_factor: Float[Tensor, "token d_mlp"], power: Float[Tensor, " token"], own: Float64[Tensor, " d_mlp"]
    ) -> Float64[Tensor, " d_mlp"]:
        """Σ over tokens and over all neurons but the own one of a product of factors, keys of the own key's length."""
        return (power @ own_factor).double() * self._length.double().square() - own


def _powers(
    others: Float[Tensor, "token d_mlp"], ups: Float[Tensor, "token d_mlp"]
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"]]:
    """Σ over neurons of the squared factor, and of its product with the unscaled one."""
    return others.square().sum(dim=1), (others * ups).sum(dim=1)


def _pre_activations(a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    a, b = a.double(), b.double()
    yield from (("a", a), ("b", b), ("aa", a.square()), ("bb", b.square()), ("ab", a * b))


def _quadrants(p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    """Masks of the sign pairs, in the order of ``QUADRANTS``."""
    return p & q, p & ~q, ~p & q, ~(p | q)
