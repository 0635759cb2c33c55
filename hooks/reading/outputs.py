"""From a layer's activations to what it writes: y and every edited y′, and their sums.

For every version h′ of the units (``analysis.sums.output_edits``) one more down projection is computed, and then what
the block itself does to an MLP's output before adding it to the residual stream. It may be done for a random share of the
tokens only. In a mixture of experts every unit of every expert is edited, and the shared expert's too.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from analysis.sums.batch import Batch
from analysis.sums.moments import Part
from analysis.sums.output_edits import versions, versions_of
from analysis.sums.output_moments import OutputAccumulator, OutputMoments, WrittenTile
from analysis.weights.experts import SHARED
from analysis.weights.geometry import Geometry
from hooks.locating.output_path import OutputPath
from hooks.locating.projections import Weights
from hooks.locating.sites import Mixture, Site

TOKENS_IN_A_TILE = {"cpu": 256, "cuda": 4096}
"""On a CPU a version of h and its output stay in a core's cache."""


class LayerOutput:
    """Accumulates what a layer writes, in every version."""

    def __init__(self, layer: Site | Mixture, paths: Sequence[OutputPath], share: float) -> None:
        """
        Args:
            layer: a dense layer or a mixture of experts.
            paths: from its outputs to the residual stream, one per output.
            share: of the counted tokens on which it is computed.
        """
        self.share, self.unit = share, layer.unit
        self.dtype = torch.promote_types(layer.dtype, torch.float32)
        self.paths = [path.to(self.dtype) for path in paths]
        self.has_norm = any(path.norm is not None for path in paths)
        self._tile = TOKENS_IN_A_TILE[layer.device.type]
        self._sums = OutputAccumulator(layer.unit, len(paths[0].factor), self.has_norm, layer.device)

    @property
    def is_finite(self) -> Bool[Tensor, ""]:
        """Whether everything added so far was finite; a tensor on the device."""
        return self._sums.is_finite

    def moments(self) -> OutputMoments:
        """The sums so far."""
        return self._sums.moments()


class SiteOutput(LayerOutput):
    """Accumulates what a dense layer writes."""

    def __init__(self, site: Site, path: OutputPath, geometry: Geometry, share: float) -> None:
        super().__init__(site, [path], share)
        self._site, self._balance = site, geometry.balance.to(site.device, self.dtype)

    def add(self, a: Float[Tensor, "place d_mlp"], b: Float[Tensor, "place d_mlp"], batch: Batch) -> None:
        """Add a batch, given the pre-activations at all its places."""
        self._sums.add(self._written(a, b, batch))

    def _written(
        self, a: Float[Tensor, "place d_mlp"], b: Float[Tensor, "place d_mlp"], batch: Batch
    ) -> Iterator[WrittenTile]:
        v, bias = _down(self._site.weights, self.dtype)
        (path,) = self.paths
        for tile in batch.sampled(self.share, self._tile):
            pair = a[tile.places].to(self.dtype), b[tile.places].to(self.dtype)
            raw = torch.stack([linear(h, v, bias) for _, h in versions(self.unit, *pair, self._balance)])
            yield WrittenTile(path(raw), raw if self.has_norm else None, tile.block, tile.keys)


class MixtureOutput(LayerOutput):
    """Accumulates what a layer of experts writes: their outputs times the routing weights, and the shared expert's."""

    def __init__(self, mixture: Mixture, paths: Sequence[OutputPath], geometries: Sequence[Geometry], share: float) -> None:
        super().__init__(mixture, paths, share)
        self._mixture = mixture
        self._balances = [geometry.balance.to(mixture.device, self.dtype) for geometry in geometries]

    def passing(self, parts: Iterator[Part], batch: Batch) -> Iterator[Part]:
        """The parts of a batch, one after the other, each added to the output on its way; the sums follow the last one."""
        tiles = batch.sampled(self.share, self._tile)
        places = torch.cat([tile.places for tile in tiles]) if tiles else batch.counted[:0]
        row_of = torch.full((batch.places.shape[1],), -1, device=places.device)
        row_of[places] = torch.arange(len(places), device=places.device)
        shape = len(self.paths), len(versions_of(self.unit)), len(places), len(self.paths[0].factor)
        raw = torch.zeros(shape, dtype=self.dtype, device=places.device)
        sites = self._mixture.sites
        experts = [*self._mixture.expert_weights.experts(), *(site.weights for site in sites if site.expert == SHARED)]
        for part in parts:
            number, a, b, at, weight = part
            v, bias = _down(experts[number], self.dtype)
            output = raw[-1 if sites[number].expert == SHARED else 0]
            rows = row_of[at]
            for reached in (rows >= 0).nonzero()[:, 0].split(self._tile):
                pair, scale = (a[reached].to(self.dtype), b[reached].to(self.dtype)), weight[reached, None].to(self.dtype)
                for version, (_, h) in enumerate(versions(self.unit, *pair, self._balances[number])):
                    output[version].index_add_(0, rows[reached], scale * linear(h, v, bias))
            yield part
        self._sums.add(self._written(raw, batch))

    def _written(self, raw: Float[Tensor, "path version token d_model"], batch: Batch) -> Iterator[WrittenTile]:
        start = 0
        for tile in batch.sampled(self.share, self._tile):
            own = raw[:, :, start : start + len(tile.places)]
            start += len(tile.places)
            written = torch.stack([path(y) for path, y in zip(self.paths, own, strict=True)]).sum(dim=0)
            yield WrittenTile(written, own.sum(dim=0) if self.has_norm else None, tile.block, tile.keys)


def _down(weights: Weights, dtype: torch.dtype) -> tuple[Float[Tensor, "d_model d_mlp"], Float[Tensor, " d_model"] | None]:
    """Weight and bias of the down projection."""
    v, bias = weights.matrices[2], weights.biases[2]
    return v.T.to(dtype), None if bias is None else bias.to(dtype)


def site_output(site: Site, geometry: Geometry, share: float) -> SiteOutput | None:
    """Of a dense layer; None if the way from its MLP to the residual stream is not verified."""
    return None if site.output_path is None else SiteOutput(site, site.output_path, geometry, share)


def mixture_output(mixture: Mixture, geometries: Sequence[Geometry], share: float) -> MixtureOutput | None:
    """Of a layer of experts, given the geometry of each; None if one of its ways to the residual stream is not verified."""
    paths = [path for path in mixture.output_paths if path is not None]
    return MixtureOutput(mixture, paths, geometries, share) if len(paths) == len(mixture.output_paths) else None
