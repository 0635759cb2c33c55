"""Where the largest values occur: each neuron's peak, and the tokens of largest energy in a layer.

A pooled measure is an average weighted by energy, and a handful of massive-activation tokens can dominate it. So their
places are kept beside the sums. Keeping the larger of two is associative and commutative, as addition is.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from analysis.sums.batch import Batch
from analysis.units.registry import Unit

TOP_TOKENS = 16
"""Number of tokens of largest energy whose places are kept."""


@dataclass(frozen=True)
class Peaks:
    """For each neuron, the token with the largest |r·h| among all tokens fed to the model, uncounted ones included.

    Attributes:
        values: r·h, a and b on it, [3, d_mlp], r the routing weight in a mixture of experts, else 1; NaN for a neuron
            without tokens.
        places: window, position, token id, and 1 if the token was counted, [4, d_mlp].
    """

    values: Float64[Tensor, "3 d_mlp"]
    places: Int64[Tensor, "4 d_mlp"]

    @classmethod
    def empty(cls, d_mlp: int, device: torch.device | str = "cpu") -> "Peaks":
        nothing = torch.full((3, d_mlp), torch.nan, dtype=torch.float64, device=device)
        return cls(nothing, torch.full((4, d_mlp), -1, device=device))

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for writing."""
        return {"values": self.values, "places": self.places}

    def to(self, device: torch.device | str) -> "Peaks":
        """The same on a device."""
        return Peaks(self.values.to(device), self.places.to(device))

    @classmethod
    def of(
        cls,
        a: Float[Tensor, "token d_mlp"],
        b: Float[Tensor, "token d_mlp"],
        unit: Unit,
        places: Int64[Tensor, "4 token"],
        routing_weight: Float[Tensor, " token"] | None = None,
    ) -> "Peaks":
        """The peaks over tokens in reading order, on their device; routing weights are 1 if None."""
        h = unit(a, b) if routing_weight is None else unit(a, b) * routing_weight[:, None].to(a.dtype)
        at = h.abs().argmax(dim=0)
        return cls(torch.stack([x.gather(0, at[None])[0] for x in (h, a, b)]).double(), places[:, at])

    def __add__(self, other: "Peaks") -> "Peaks":
        """The larger peak of each neuron; of equal ones the earlier in reading order."""
        mine, theirs = (peaks.values[0].abs().nan_to_num(nan=-1.0) for peaks in (self, other))
        earlier = reading_order(other.places[:2]) < reading_order(self.places[:2])
        take = (theirs > mine) | ((theirs == mine) & earlier)
        return Peaks(torch.where(take, other.values, self.values), torch.where(take, other.places, self.places))


@dataclass(frozen=True)
class TopTokens:
    """The counted tokens of largest energy Σ_j w_j h_j² in a layer, largest first, at most ``TOP_TOKENS``.

    Attributes:
        energy: their energies.
        places: window, position, token id, and the neuron that holds most of the energy, [4, token]; neuron −1 for a
            token that was routed to no expert.
        neuron_share: share of the token's energy that this neuron holds.
    """

    energy: Float64[Tensor, " token"]
    places: Int64[Tensor, "4 token"]
    neuron_share: Float64[Tensor, " token"]

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "TopTokens":
        nothing = torch.zeros(0, dtype=torch.float64, device=device)
        return cls(nothing, torch.zeros(4, 0, dtype=torch.int64, device=device), nothing)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for writing."""
        return {"energy": self.energy, "places": self.places, "neuron_share": self.neuron_share}

    def to(self, device: torch.device | str) -> "TopTokens":
        """The same on a device."""
        return TopTokens(self.energy.to(device), self.places.to(device), self.neuron_share.to(device))

    @classmethod
    def of(
        cls,
        token_energy: Float[Tensor, " token"],
        a: Float[Tensor, "place d_mlp"],
        b: Float[Tensor, "place d_mlp"],
        unit: Unit,
        value_weight: Float[Tensor, " d_mlp"],
        batch: Batch,
    ) -> "TopTokens":
        """Those of the counted tokens of a batch, on their device, given a and b at all its places."""
        energy, index = token_energy.topk(min(TOP_TOKENS, len(token_energy)))
        place = batch.counted[index]
        by_neuron = unit(a[place].double(), b[place].double()).square() * value_weight.double()
        most, neuron = by_neuron.max(dim=1)
        return cls(energy.double(), torch.cat([batch.places[:3, place], neuron[None]]), most / by_neuron.sum(dim=1))

    @classmethod
    def among(cls, token_energy: Float64[Tensor, " token"], heaviest: "Heaviest", batch: Batch) -> "TopTokens":
        """The same, where the activations are no longer in memory."""
        energy, index = token_energy.topk(min(TOP_TOKENS, len(token_energy)))
        places = torch.cat([batch.places[:3, batch.counted[index]], heaviest.neuron[index][None]])
        return cls(energy, places, heaviest.energy[index] / energy)

    def __add__(self, other: "TopTokens") -> "TopTokens":
        """The largest of both; of equal ones the earlier in reading order."""
        energy, places = torch.cat([self.energy, other.energy]), torch.cat([self.places, other.places], dim=1)
        share = torch.cat([self.neuron_share, other.neuron_share])
        kept = largest_first(energy, places[:2])[:TOP_TOKENS]
        return TopTokens(energy[kept], places[:, kept], share[kept])


@dataclass(frozen=True)
class Heaviest:
    """For every counted token of a batch, the neuron that holds most of its energy among the experts added so far.

    Attributes:
        energy: the energy that this neuron holds; −1 before the first expert.
        neuron: its index in the layer; −1 before the first expert.
    """

    energy: Float64[Tensor, " token"]
    neuron: Int64[Tensor, " token"]

    @classmethod
    def empty(cls, n_tokens: int, device: torch.device | str = "cpu") -> "Heaviest":
        nothing = torch.full((n_tokens,), -1, device=device)
        return cls(nothing.double(), nothing)

    def add(
        self,
        h: Float[Tensor, "part_token d_mlp"],
        value_weight: Float64[Tensor, " d_mlp"],
        tokens: Int64[Tensor, " part_token"],
        first_neuron: int,
    ) -> None:
        """Update with the neurons of one expert on some of the tokens, in place; of equal ones the earlier is kept.

        Args:
            h: r·h of the expert's neurons on these tokens.
            value_weight: w.
            tokens: indices of these tokens among the counted ones.
            first_neuron: index in the layer of the expert's first neuron.
        """
        if not len(tokens):
            return
        most, neuron = (h.square() * value_weight.to(h.dtype)).max(dim=1)
        known, larger = self.energy[tokens], most.double() > self.energy[tokens]
        self.energy[tokens] = torch.where(larger, most.double(), known)
        self.neuron[tokens] = torch.where(larger, neuron + first_neuron, self.neuron[tokens])


def reading_order(places: Int64[Tensor, "2 place"]) -> Int64[Tensor, " place"]:
    """A sort key for places: by window, then by position."""
    return places[0] * 2**32 + places[1]


def largest_first(sizes: Float64[Tensor, " place"], places: Int64[Tensor, "2 place"]) -> Int64[Tensor, " place"]:
    """Indices sorted by size, largest first; of equal ones the earlier in reading order first."""
    earliest = reading_order(places).argsort(stable=True)
    return earliest[sizes[earliest].argsort(descending=True, stable=True)]
