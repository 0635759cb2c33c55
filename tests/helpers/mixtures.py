"""Random layers of experts, and a run that has some."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from analysis.run import Layer, Run
from analysis.sums.batch import Batch, Window
from analysis.sums.fused_reducer import FusedReducer
from analysis.sums.moments import Accumulator, Moments
from analysis.sums.reducer import Reducer
from analysis.sums.tiled import TileReducer
from analysis.weights.experts import SHARED
from analysis.weights.geometry import Geometry
from tests.helpers.random_layers import Case, random_case

LENGTHS, BLOCKS = (7, 12, 9, 5), (0, 0, 5, 15)


@dataclass(frozen=True)
class Mixture:
    """A layer of experts on a few windows.

    Attributes:
        cases: the weights of every expert, and its a and b at every place, padding included.
        routing: the routing weight of every place for every expert, NaN where it was not routed there.
        lengths, blocks: of the windows; the first position of each is not counted.
    """

    cases: tuple[Case, ...]
    routing: tuple[Tensor, ...]
    lengths: tuple[int, ...] = LENGTHS
    blocks: tuple[int, ...] = BLOCKS

    @cached_property
    def batch(self) -> Batch:
        return batch_of(self.lengths, self.blocks)

    @property
    def experts(self) -> Tensor:
        """The last one is the shared one."""
        numbers = [*range(len(self.cases) - 1), SHARED]
        return torch.cat([torch.full((len(case.q),), number) for number, case in zip(numbers, self.cases, strict=True)])

    @property
    def starts(self) -> list[int]:
        widths = [len(case.q) for case in self.cases]
        return [sum(widths[:e]) for e in range(len(widths))]

    @property
    def geometry(self) -> Geometry:
        return Geometry.cat([case.geometry for case in self.cases])

    @property
    def partners(self) -> Tensor:
        return torch.cat([case.partners + start for case, start in zip(self.cases, self.starts, strict=True)], dim=1)

    @property
    def d_mlp(self) -> int:
        return len(self.experts)

    def parts(self, only: Callable[[Tensor], Tensor] | None = None) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
        """What the accumulator is given; of all places or of those that are chosen."""
        fed = self.batch.places[3] >= 0
        for e, (case, weight) in enumerate(zip(self.cases, self.routing, strict=True)):
            there = fed & ~weight.isnan()
            places = (there if only is None else there & only(there)).nonzero()[:, 0]
            yield e, case.a[places], case.b[places], places, weight[places]

    def reducers(self, kind: str = "exact") -> list[Reducer]:
        made: list[Reducer] = []
        for case in self.cases:
            layer = case.unit, case.layout, case.geometry, case.pairing
            fused = kind == "fused"
            made.append(FusedReducer(*layer) if fused else TileReducer(*layer, dtype=DTYPES[kind]))  # type: ignore[arg-type]
        return made

    def moments(self, kind: str = "exact") -> Moments:
        accumulator = Accumulator(self.d_mlp, self.reducers(kind))
        accumulator.add_experts(self.parts(), self.batch)
        return accumulator.moments()

    def weighted(self, change: Callable[[Tensor], Tensor]) -> "Mixture":
        """The same with other routing weights."""
        return replace(self, routing=tuple(map(change, self.routing)))


DTYPES = {"exact": torch.float64, "eager": torch.float32}


def batch_of(lengths: Sequence[int], blocks: Sequence[int], first: int = 0) -> Batch:
    windows = [Window(first + i, torch.arange(length) + 100, 1) for i, length in enumerate(lengths)]
    return Batch.of(windows, blocks)


def mixture(
    widths: Sequence[int] = (3, 2, 4, 3),
    lengths: tuple[int, ...] = LENGTHS,
    blocks: tuple[int, ...] = BLOCKS,
    name: str = "silu",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Mixture:
    """Some tokens go to one expert, some to more; the second expert is idle, the last one takes every token."""
    places = len(lengths) * max(lengths)
    generator = torch.Generator().manual_seed(seed)
    cases, routing = [], []
    for e, width in enumerate(widths):
        cases.append(random_case(name, (places,), width, dtype=dtype, draws=3, seed=seed + e))
        weight = torch.rand(places, generator=generator, dtype=torch.float64) + 0.1
        weight[torch.rand(places, generator=generator) < 0.5] = torch.nan
        routing.append(torch.full_like(weight, torch.nan) if e == 1 else weight)
    routing[0][[1, 4]], routing[0][[2, 5]] = 0.0, -0.7
    routing[-1] = torch.ones(places, dtype=torch.float64)
    return Mixture(tuple(cases), tuple(routing), lengths, blocks)


def many_blocks(**options: Any) -> Mixture:
    """A window in every jackknife block."""
    return mixture(lengths=(9, 12, 7, 12) * 4, blocks=tuple(range(16)), **options)


def layer_of(mixture: Mixture) -> Layer:
    unit, geometry = mixture.cases[0].unit, mixture.geometry
    return Layer(unit, mixture.moments("fused"), geometry, "none", 0.5, mixture.partners, mixture.experts)


def with_experts(run: Run, seed: int = 0) -> Run:
    """The run with its two last layers made mixtures of three experts, one of them idle, and a shared one."""
    layers = {index: layer_of(many_blocks(dtype=torch.float32, seed=seed + 7 * index)) for index in (1, 2)}
    return replace(run, layers=run.layers | layers, token_texts={token: f"⟨{token}⟩" for token in range(320)})
