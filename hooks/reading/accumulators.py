"""Accumulates a layer's moments over a corpus: a and b are reduced to sums batch by batch, and released.

In a mixture of experts a and b are not captured but computed, one expert after the other, from the tokens routed to it, so
that memory and time grow with the routed tokens only.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import linear

from analysis.run import Layer
from analysis.sums.batch import Batch
from analysis.sums.fused_reducer import reducer_of
from analysis.sums.layout import Layout
from analysis.sums.moments import Accumulator, Part
from analysis.sums.reducer import Reducer
from analysis.weights.geometry import Geometry, PermutedPairs, derangements
from analysis.weights.interactions import antisymmetric_share, pooled_antisymmetric_share
from hooks.locating.norm_gains import NOTHING_AFTER
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.reading.batches import ActivationAccumulator
from hooks.reading.outputs import LayerOutput, mixture_output, site_output


def accumulator_of(
    layer: Site | Mixture, alphas: Sequence[float], draws: int, seed: int, output_share: float = 1.0
) -> "LayerAccumulator":
    """An empty accumulator.

    Args:
        layer: a dense layer or a mixture of experts.
        alphas: scales of the scaling symmetry.
        draws: random permutations of neurons for the permutation null.
        seed: of the permutations.
        output_share: share of the counted tokens on which the layer's output is computed in every version.
    """
    if isinstance(layer, Site):
        return SiteAccumulator(layer, alphas, draws, seed, output_share)
    return MixtureAccumulator(layer, alphas, draws, seed, output_share)


class LayerAccumulator(ActivationAccumulator):
    """Accumulates the moments of a layer."""

    _accumulator: Accumulator

    @property
    def kind(self) -> str:
        """The kind of reducer that computes its sums."""
        return self._accumulator.kind

    @property
    def is_finite(self) -> Bool[Tensor, ""]:
        output, finite = self._written, self._accumulator.is_finite
        return finite if output is None else finite & output.is_finite

    @property
    @abstractmethod
    def _written(self) -> LayerOutput | None:
        """What accumulates the layer's output, if that is known."""

    @abstractmethod
    def result(self) -> Layer:
        """The layer with the moments so far."""


def geometry_of(site: Site) -> Geometry:
    """The geometry of a site's q, k and v with the norm gains folded in."""
    return Geometry.of(*site.weights.matrices, site.gain, site.value_gain)


def geometry_of_layer(layer: Site | Mixture) -> Geometry:
    """The geometry of all neurons of a layer."""
    return geometry_of(layer) if isinstance(layer, Site) else Geometry.cat([geometry_of(site) for site in layer.sites])


@dataclass(frozen=True)
class _Prepared:
    """What is computed for a site before its first batch: geometry, permuted pairs, and the reducer."""

    geometry: Geometry
    pairing: PermutedPairs
    reduce: Reducer

    @classmethod
    def of(cls, site: Site, layout: Layout, draws: int, seed: int) -> "_Prepared":
        geometry, (q, k, _) = geometry_of(site), site.weights.matrices
        pairing = geometry.permuted_pairs(q, k, site.gain, derangements(site.n_neurons, draws, seed))
        return cls(geometry, pairing, reducer_of(site.unit, layout, geometry, pairing, site.device, site.dtype))


class SiteAccumulator(LayerAccumulator):
    """Accumulates the moments of one site."""

    def __init__(self, site: Site, alphas: Sequence[float], draws: int, seed: int, output_share: float = 1.0) -> None:
        super().__init__(site)
        self._site = site
        self._prepared = _Prepared.of(site, Layout.of(site.unit, alphas, draws), draws, seed)
        self._accumulator = Accumulator(site.n_neurons, self._prepared.reduce)
        self._output = site_output(site, self._prepared.geometry, output_share)

    @property
    def _written(self) -> LayerOutput | None:
        return self._output

    def result(self) -> Layer:
        site = self._site
        return Layer(
            unit=site.unit,
            moments=self._accumulator.moments(),
            geometry=self._prepared.geometry,
            gain=describe_gain(site),
            interaction_antisymmetry=antisymmetric_share(*_folded_weights(site)),
            partners=self._prepared.pairing.partners,
            output=None if self._output is None else self._output.moments(),
        )

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        a, b = (captured.pop(symbol) for symbol in "ab")
        rows = len(batch.windows)  # some families flatten batch and positions before their MLP
        self._accumulator.add(a.reshape(rows, -1, a.shape[-1]), b.reshape(rows, -1, b.shape[-1]), batch)
        if self._output is not None:
            self._output.add(a.flatten(0, -2), b.flatten(0, -2), batch)


class MixtureAccumulator(LayerAccumulator):
    """Accumulates the moments of a layer of experts."""

    def __init__(self, mixture: Mixture, alphas: Sequence[float], draws: int, seed: int, output_share: float = 1.0) -> None:
        super().__init__(mixture)
        self._mixture = mixture
        layout = Layout.of(mixture.unit, alphas, draws)
        # Every expert has permutations of its own: with one seed their nulls would be correlated.
        seeds = torch.randint(2**62, (len(mixture.sites),), generator=torch.Generator().manual_seed(seed)).tolist()
        self._prepared = [_Prepared.of(site, layout, draws, own) for site, own in zip(mixture.sites, seeds, strict=True)]
        self._accumulator = Accumulator(mixture.n_neurons, [prepared.reduce for prepared in self._prepared])
        self._output = mixture_output(mixture, [prepared.geometry for prepared in self._prepared], output_share)

    @property
    def _written(self) -> LayerOutput | None:
        return self._output

    def result(self) -> Layer:
        sites = self._mixture.sites
        width = torch.tensor([site.n_neurons for site in sites])
        pairs = zip(self._prepared, self._mixture.columns, strict=True)
        partners = [prepared.pairing.partners + columns.start for prepared, columns in pairs]
        return Layer(
            unit=self._mixture.unit,
            moments=self._accumulator.moments(),
            geometry=Geometry.cat([prepared.geometry for prepared in self._prepared]),
            gain="; ".join(dict.fromkeys(describe_gain(site) for site in sites)),
            interaction_antisymmetry=pooled_antisymmetric_share(map(_folded_weights, sites)),
            partners=torch.cat(partners, dim=1),
            experts=torch.tensor([int(site.expert or 0) for site in sites]).repeat_interleave(width),
            output=None if self._output is None else self._output.moments(),
        )

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        parts = parts_of(self._mixture, captured, batch)
        self._accumulator.add_experts(parts if self._output is None else self._output.passing(parts, batch), batch)


def parts_of(mixture: Mixture, captured: dict[str, Any], batch: Batch) -> Iterator[Part]:
    """For one expert after the other: its number, a and b [tokens, d_mlp], the tokens' indices, and their weights."""
    routing: Routing = captured["routing"]
    is_fed = torch.zeros(batch.places.shape[1], dtype=torch.bool, device=routing.x.device)
    is_fed[batch.fed] = True
    experts = mixture.expert_weights.experts()
    for number, (row, weight) in enumerate(routing.by_expert(mixture.expert_weights.n_experts)):
        fed = is_fed[routing.place[row]]
        row, weight = row[fed], weight[fed]
        (q, k, _), (q_bias, k_bias, _) = experts[number].matrices, experts[number].biases
        x = routing.x[row]
        yield number, linear(x, q, q_bias), linear(x, k, k_bias), routing.place[row], weight
    if mixture.shared is not None:
        a, b = (captured[symbol].flatten(0, -2)[batch.fed] for symbol in "ab")
        weight = captured["weight"].flatten()[batch.fed] if "weight" in captured else torch.ones_like(a[:, 0])
        yield len(mixture.routed), a, b, batch.fed, weight


def _folded_weights(site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the norm gains folded in, in float32 or wider."""
    gains, wide = (site.gain, site.gain, site.value_gain), torch.promote_types(site.dtype, torch.float32)
    q, k, v = (weight.to(wide) * gain for weight, gain in zip(site.weights.matrices, gains, strict=True))
    return q, k, v


def describe_gain(site: Site) -> str:
    """The gains folded into q and k, and into v if there is one, in words."""
    return (
        site.gain_source if site.value_gain_source == NOTHING_AFTER else f"{site.gain_source}; v: {site.value_gain_source}"
    )
