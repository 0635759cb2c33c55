"""Reduces activations tile by tile in torch: any unit, any device, any precision.

``analysis.sums.eager`` is about eight hundred small operations. On a CPU a tile is 64 tokens, which stay in a core's cache.
A GPU would spend its time launching kernels: there a tile has thousands of tokens, and the operations are compiled into a
few kernels. Compiled sums are verified against eager ones on the first tile of every layer; if they disagree, or do not
compile, eager sums are used, and ``TileReducer.kind`` reports it.
"""

from itertools import groupby

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.sums.batch import Batch
from analysis.sums.compiled import NotCompiledError, agree, compiled_sums
from analysis.sums.eager import Plan, TileSums, ValueWeights, tile_sums
from analysis.sums.extremes import Peaks
from analysis.sums.layout import QUADRANTS, Layout
from analysis.sums.reducer import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Reducer, TokenSums, Totals
from analysis.units.registry import Unit
from analysis.weights.geometry import Geometry, PermutedPairs

TILE = 64
"""Tokens in a chunk, which are summed in the precision of the products; on a CPU a tile is one chunk."""
ELEMENTS_ON_A_GPU = 2**24
"""Tokens × neurons in a tile on a GPU, enough to use all of it."""
TEMPORARIES = 30
"""Numbers held at once for each of these elements when the sums are computed eagerly."""
MEMORY_SHARE = 0.25
"""Share of a GPU's free memory that these may use; the activations of the batch use more of it."""


class TileReducer(Reducer):
    """Reduces batches of (a, b) of one layer in torch, eagerly or compiled."""

    def __init__(
        self,
        unit: Unit,
        layout: Layout,
        geometry: Geometry,
        pairs: PermutedPairs,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        tile: int | None = None,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            unit: g.
            layout: which sums to compute.
            geometry: norms and balance β_j of the neurons.
            pairs: the permuted pairs, ``layout.draws`` permutations.
            device: where the activations are.
            dtype: of the activations; products are in this precision, and at least in float32.
            tile: tokens in a tile, a multiple of ``TILE``; None chooses by device.
            compiled: whether to compile, for units that can be compiled.
        """
        self.unit, self.layout = unit, layout
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.tile = tile_on(device, len(geometry.norm_k), self.dtype) if tile is None else tile
        if self.tile % TILE:
            raise ValueError(f"a tile of {self.tile} tokens is not a multiple of {TILE}")
        self.value_weight = geometry.value_weight.to(device)
        length = geometry.norm_k if unit.up_is_linear else torch.ones_like(geometry.norm_k)
        length = length.to(device, self.dtype)
        self._weights = ValueWeights(
            geometry.value_weight.to(device, self.dtype),
            geometry.balance.to(device, self.dtype),
            pairs.partners.to(device),
            pairs.balance.to(device, self.dtype),
            length,
            torch.where(length > 0, 1 / length, 0.0),
        )
        self._plan, self._kept = Plan.of(layout), layout.kept_rows(device)
        self._counts = [layout.rows[f"count_{quadrant}"] for quadrant in QUADRANTS]
        self._compiled, self._verified = compiled and unit.can_be_compiled, False

    @property
    def kind(self) -> str:  # type: ignore[override]
        """As in ``Reducer``."""
        return "compiled" if self._compiled else "eager"

    def add(
        self, a: Float[Tensor, "place d_mlp"], b: Float[Tensor, "place d_mlp"], batch: Batch, totals: Totals
    ) -> TokenSums:
        """As ``Reducer.add``."""
        fed, routing_weight = batch.fed, batch.routing_weight
        if len(fed):
            pair, weight = (
                (a[fed].to(self.dtype), b[fed].to(self.dtype)),
                None if routing_weight is None else routing_weight[fed],
            )
            totals.raise_peaks(Peaks.of(*pair, self.unit, batch.places[:, fed], weight))
        tokens = []
        for block, tiles in groupby(batch.tiles(self.tile, TILE, padded=self._compiled), lambda tile: tile.jackknife_block):
            run = []
            for tile in tiles:
                sums = self._sums(a[tile.places], b[tile.places], tile.live, tile.routing_weight)
                run.append(sums.neuron)
                tokens.append([part[..., : tile.n_tokens].double() for part in sums[1:]])
            neuron = torch.stack(run).sum(dim=0)
            totals.table += neuron.T
            totals.pooled[block] += neuron @ self.value_weight
            totals.groups[:, block * N_JACKKNIFE_GROUPS // N_JACKKNIFE_BLOCKS] += self.layout.narrow(
                neuron, self._kept
            ).T.float()
            totals.signs[block] += torch.stack([neuron[count].sum() for count in self._counts])
        if not tokens:
            return TokenSums.empty(len(self.layout.token_measures), 0, a.device)
        return TokenSums(*(torch.cat(parts, dim=-1) for parts in zip(*tokens, strict=True)))

    def _sums(
        self,
        a: Float[Tensor, "chunk token d_mlp"],
        b: Float[Tensor, "chunk token d_mlp"],
        live: Bool[Tensor, "chunk token"] | None,
        routing_weight: Float[Tensor, "chunk token"] | None,
    ) -> TileSums:
        """Compiled sums, verified on the first tile; eager ones otherwise. The verification is the only synchronization."""
        layer = self.unit, self._plan, self._weights
        if not self._compiled or live is None:
            return tile_sums(*layer, a, b, live, routing_weight)
        try:
            # Always with weights, so that one compilation serves dense layers and experts.
            one = live.to(self.dtype) if routing_weight is None else routing_weight.to(self.dtype)
            sums = compiled_sums(*layer, a, b, live, one)
        except NotCompiledError:
            self._compiled = False
            return tile_sums(*layer, a, b, live, routing_weight)
        if not self._verified:
            eager = tile_sums(*layer, a, b, live, routing_weight)
            if not bool(agree(sums, eager, self.layout, live.flatten())):
                self._compiled, sums = False, eager
            self._verified = True
        return sums


def tile_on(device: torch.device | str, d_mlp: int, dtype: torch.dtype = torch.float32) -> int:
    """Tokens in a tile on this device, for products of this dtype."""
    if torch.device(device).type != "cuda":
        return TILE
    free, _ = torch.cuda.mem_get_info(device)
    elements = min(ELEMENTS_ON_A_GPU, int(MEMORY_SHARE * free) // (TEMPORARIES * dtype.itemsize))
    return TILE * max(2, elements // (TILE * d_mlp))
