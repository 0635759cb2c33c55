"""Where the largest values sit: each neuron's peak, and the tokens that hold most of a layer's energy.

A pooled number is an average weighted by energy, and a handful of tokens can own it. So beside every sum go the places:
kept by the rule "the larger one stays", which is associative and commutative like a sum.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from analysis.units import Unit
from analysis.window import Window

TOP_TOKENS = 16
"""Tokens of largest energy that are remembered by place."""


@dataclass(frozen=True)
class Peaks:
    """For each neuron, the token on which |h| was largest, among all tokens fed, the uncounted first ones included.

    Attributes:
        values: h, a and b there, [3, d_mlp]; NaN for a neuron that has seen nothing.
        places: window, position, token id, and 1 if the token was counted, [4, d_mlp].
    """

    values: Float64[Tensor, "3 d_mlp"]
    places: Int64[Tensor, "4 d_mlp"]

    @classmethod
    def empty(cls, d_mlp: int) -> "Peaks":
        return cls(torch.full((3, d_mlp), torch.nan, dtype=torch.float64), torch.full((4, d_mlp), -1))

    @classmethod
    def of(cls, a: Float[Tensor, "pos d_mlp"], b: Float[Tensor, "pos d_mlp"], unit: Unit, window: Window) -> "Peaks":
        """The peaks of one whole window."""
        h = unit(a, b)
        position = h.abs().argmax(dim=0)
        values = torch.stack([x.gather(0, position[None])[0] for x in (h, a, b)]).double().cpu()
        position = position.cpu()
        index, counted = torch.full_like(position, window.index), (position >= window.counted_from).long()
        return cls(values, torch.stack([index, position, window.tokens.cpu()[position], counted]))

    def __add__(self, other: "Peaks") -> "Peaks":
        """The larger peak of each neuron; of equal ones the earlier."""
        mine, theirs = (peaks.values[0].abs().nan_to_num(nan=-1.0) for peaks in (self, other))
        earlier = reading_order(other.places[:2]) < reading_order(self.places[:2])
        take = (theirs > mine) | ((theirs == mine) & earlier)
        return Peaks(torch.where(take, other.values, self.values), torch.where(take, other.places, self.places))


@dataclass(frozen=True)
class TopTokens:
    """The counted tokens of largest energy Σ_j w_j h_j² in a layer, largest first, at most ``TOP_TOKENS``.

    Attributes:
        energy: their energies.
        places: window, position, token id, and the neuron that holds most of the energy, [4, token].
        neuron_share: what share of the token's energy that neuron holds.
    """

    energy: Float64[Tensor, " token"]
    places: Int64[Tensor, "4 token"]
    neuron_share: Float64[Tensor, " token"]

    @classmethod
    def empty(cls) -> "TopTokens":
        nothing = torch.zeros(0, dtype=torch.float64)
        return cls(nothing, torch.zeros(4, 0, dtype=torch.int64), nothing)

    @classmethod
    def of(
        cls,
        token_energy: Float[Tensor, " token"],
        a: Float[Tensor, "token d_mlp"],
        b: Float[Tensor, "token d_mlp"],
        unit: Unit,
        value_weight: Float[Tensor, " d_mlp"],
        window: Window,
    ) -> "TopTokens":
        """Of the counted tokens of one window."""
        energy, index = token_energy.topk(min(TOP_TOKENS, len(token_energy)))
        by_neuron = unit(a[index].double(), b[index].double()).square() * value_weight.double()
        most, neuron = by_neuron.max(dim=1)
        position = window.counted_from + index.cpu()
        number = torch.full_like(position, window.index)
        places = torch.stack([number, position, window.tokens.cpu()[position], neuron.cpu()])
        return cls(energy.double().cpu(), places, (most / by_neuron.sum(dim=1)).cpu())

    def __add__(self, other: "TopTokens") -> "TopTokens":
        """The largest of both; of equal ones the earlier."""
        energy, places = torch.cat([self.energy, other.energy]), torch.cat([self.places, other.places], dim=1)
        share = torch.cat([self.neuron_share, other.neuron_share])
        kept = largest_first(energy, places[:2])[:TOP_TOKENS]
        return TopTokens(energy[kept], places[:, kept], share[kept])


def reading_order(places: Int64[Tensor, "2 place"]) -> Int64[Tensor, " place"]:
    """One number by which places sort: by window, then by position."""
    return places[0] * 2**32 + places[1]


def largest_first(sizes: Float64[Tensor, " place"], places: Int64[Tensor, "2 place"]) -> Int64[Tensor, " place"]:
    """Indices by size, largest first; of equal ones the earlier."""
    earliest = reading_order(places).argsort(stable=True)
    return earliest[sizes[earliest].argsort(descending=True, stable=True)]
