"""Moments: the sums over counted tokens from which every measure of a layer is computed.

During a forward pass (a, b), of shape [token, d_mlp], go into an ``Accumulator``, which keeps a float64 table of sums for
every neuron (rows in ``analysis.sums.layout``), the same table pooled over neurons with one column per jackknife block,
histograms over tokens, and the places of the largest values. Moments of disjoint sets of tokens add, so batches, shards and
machines combine by ``+``, in any order, and a new measure needs no forward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from analysis.sums.batch import Batch, Window
from analysis.sums.extremes import Heaviest, Peaks, TopTokens
from analysis.sums.layout import Layout, Sums
from analysis.sums.reducer import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Reducer, TokenSums, Totals
from analysis.sums.token_histograms import TokenHistograms


@dataclass(frozen=True)
class Moments:
    """The sums of one layer over counted tokens: immutable, and a monoid under ``+`` with ``empty`` as its zero.

    Attributes:
        neuron: the sums of each neuron, [moment, d_mlp].
        pooled: the same sums pooled with the value weights w_j, by jackknife block, [moment, block].
        neuron_groups: the sums of ``layout.by_neuron_and_group`` by group of jackknife blocks, for errors of neurons.
        signs: tokens × neurons in each quadrant of (a, b), by jackknife block.
        blocks: counted tokens by jackknife block.
        tokens: ``layout.token_measures`` token by token, pooled over neurons; a token's energy is Σ_j w_j h_j².
        peaks: each neuron's largest |h|, and its place.
        top_tokens: the tokens of largest energy, and their places.
        n_tokens: number of counted tokens.
        n_sequences: number of sequences with at least one counted token.
    """

    neuron: Sums
    pooled: Sums
    neuron_groups: Float32[Tensor, "group kept d_mlp"]
    signs: Float64[Tensor, "4 block"]
    blocks: Int64[Tensor, " block"]
    tokens: TokenHistograms
    peaks: Peaks
    top_tokens: TopTokens
    n_tokens: int
    n_sequences: int

    @classmethod
    def empty(cls, d_mlp: int, layout: Layout) -> "Moments":
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        return cls(
            Sums(layout, zeros(layout.size, d_mlp)),
            Sums(layout, zeros(layout.size, N_JACKKNIFE_BLOCKS)),
            zeros(N_JACKKNIFE_GROUPS, layout.by_neuron_and_group.size, d_mlp, dtype=torch.float32),
            zeros(4, N_JACKKNIFE_BLOCKS),
            zeros(N_JACKKNIFE_BLOCKS, dtype=torch.int64),
            TokenHistograms.empty(layout.token_measures),
            Peaks.empty(d_mlp),
            TopTokens.empty(),
            0,
            0,
        )

    @classmethod
    def of(
        cls,
        a: Float[Tensor, "pos d_mlp"],
        b: Float[Tensor, "pos d_mlp"],
        reduce: Reducer,
        window: Window,
        jackknife_block: int,
    ) -> "Moments":
        """The moments of one sequence: see ``Accumulator.add``."""
        accumulator = Accumulator(a.shape[-1], reduce)
        accumulator.add(a[None], b[None], Batch.of([window], [jackknife_block], a.device))
        return accumulator.moments()

    def __add__(self, other: "Moments") -> "Moments":
        if self.neuron.layout != other.neuron.layout or self.neuron.values.shape != other.neuron.values.shape:
            raise ValueError(
                f"moments of different layouts or widths do not add: {self.neuron.layout}, {other.neuron.layout}"
            )
        return Moments(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def tensors(self) -> dict[str, Tensor]:
        """All fields as tensors by name, for writing."""
        named: dict[str, Tensor] = {"counts": torch.tensor([self.n_tokens, self.n_sequences])}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                named[field.name] = value
            elif isinstance(value, Sums):
                named[field.name] = value.values
            elif not isinstance(value, int):
                named |= {f"{field.name}.{part}": tensor for part, tensor in value.tensors().items()}
        return named

    @classmethod
    def from_tensors(cls, layout: Layout, named: dict[str, Tensor]) -> "Moments":
        """The inverse of ``tensors``; KeyError or ValueError if they are not of this layout."""
        neuron = named["neuron"]
        expected = cls.empty(neuron.shape[-1], layout)
        for name, tensor in expected.tensors().items():
            any_length = name.startswith("top_tokens")
            if tensor.dtype != named[name].dtype or (tensor.shape != named[name].shape and not any_length):
                raise ValueError(f"{name} is {tuple(named[name].shape)}, expected {tuple(tensor.shape)}")
        n_tokens, n_sequences = named["counts"].tolist()
        return replace(
            expected,
            neuron=Sums(layout, neuron),
            pooled=Sums(layout, named["pooled"]),
            tokens=TokenHistograms(layout.token_measures, *(named[f"tokens.{part}"] for part in expected.tokens.tensors())),
            peaks=Peaks(*(named[f"peaks.{part}"] for part in expected.peaks.tensors())),
            top_tokens=TopTokens(*(named[f"top_tokens.{part}"] for part in expected.top_tokens.tensors())),
            n_tokens=n_tokens,
            n_sequences=n_sequences,
            **{field.name: named[field.name] for field in fields(cls) if isinstance(getattr(expected, field.name), Tensor)},
        )

    def to(self, device: torch.device | str, copy: bool = False) -> "Moments":
        """The same, with its sums on a device."""

        def moved(values: Any) -> Any:
            if isinstance(values, Sums):
                return Sums(values.layout, values.values.to(device, copy=copy))
            if isinstance(values, Tensor | TokenHistograms):
                return values.to(device, copy=copy)
            return values

        return Moments(*(moved(getattr(self, field.name)) for field in fields(self)))

    @property
    def layout(self) -> Layout:
        return self.neuron.layout

    @property
    def d_mlp(self) -> int:
        return self.neuron.values.shape[1]

    @property
    def top_energy(self) -> float:
        """The largest energy of a single token; 0 without tokens."""
        return float(self.top_tokens.energy[0]) if len(self.top_tokens.energy) else 0.0


Part = tuple[int, Tensor, Tensor, Tensor, Tensor]
"""The part of a batch that is routed to one expert: the index of its reducer, a and b [routed, d_expert], the places of its
tokens and their routing weights [routed]. Shapes are not annotated, because ``routed`` differs between experts."""


class Accumulator:
    """Accumulates the moments of one layer on the device of the activations, without synchronizing it."""

    def __init__(self, d_mlp: int, reduce: Reducer | Sequence[Reducer]) -> None:
        """
        Args:
            d_mlp: neurons of the layer.
            reduce: the reducer; in a mixture of experts one per expert, in the order of their neurons.
        """
        self._reducers = (reduce,) if isinstance(reduce, Reducer) else tuple(reduce)
        edges = [0, *accumulate(len(reducer.value_weight) for reducer in self._reducers)]
        if edges[-1] != d_mlp:
            raise ValueError(f"the reducers take {edges[-1]} neurons, the layer has {d_mlp}")
        self._neurons = [slice(*ends) for ends in pairwise(edges)]
        layout, device = self._reducers[0].layout, self._reducers[0].value_weight.device
        self._totals = Totals.empty(d_mlp, layout, device)
        self._by_token = Moments.empty(1, layout).to(device)
        self._top_tokens = TopTokens.empty(device)
        self._n_tokens, self._n_sequences = 0, 0

    def add(self, a: Float[Tensor, "row pos d_mlp"], b: Float[Tensor, "row pos d_mlp"], batch: Batch) -> None:
        """Add a batch of a dense layer.

        Args:
            a: gate pre-activations at all its positions, padding included.
            b: up pre-activations.
            batch: its windows.
        """
        (reduce,) = self._reducers
        a, b = a.flatten(0, 1), b.flatten(0, 1)
        tokens = reduce.add(a, b, batch, self._totals)
        self._take(tokens, TopTokens.of(tokens.energy, a, b, reduce.unit, reduce.value_weight, batch), batch)

    def add_experts(self, parts: Iterable[Part], batch: Batch) -> None:
        """Add a batch of a mixture of experts; experts without tokens in it may be omitted.

        Args:
            parts: one for each expert; an iterator keeps only one expert's activations in memory at a time. Row i of a
                and b is ``places[i]`` of the batch; for the places see ``Batch.routed``.
            batch: its windows.
        """
        layout, device = self._by_token.layout, self._totals.table.device
        tokens = TokenSums.empty(len(layout.token_measures), len(batch.counted), device)
        heaviest = Heaviest.empty(len(batch.counted), device)
        for expert, a, b, places, weight in parts:
            reduce, neurons, routed = self._reducers[expert], self._neurons[expert], batch.routed(places, weight)
            assert routed.ranks is not None
            assert routed.routing_weight is not None
            tokens.add_at(routed.ranks, reduce.add(a, b, routed, self._totals.of(neurons)))
            a, b, weight = (x[routed.counted].to(reduce.dtype) for x in (a, b, routed.routing_weight))
            heaviest.add(reduce.unit(a, b) * weight[:, None], reduce.value_weight, routed.ranks, neurons.start)
        self._take(tokens, TopTokens.among(tokens.energy, heaviest, batch), batch)

    def _take(self, tokens: TokenSums, top_tokens: TopTokens, batch: Batch) -> None:
        """Add the sums of the tokens of a batch."""
        total = self._by_token
        self._top_tokens += top_tokens
        total.tokens.add_tokens(tokens, batch.blocks)
        total.blocks.index_add_(0, batch.blocks, torch.ones_like(batch.blocks))
        self._n_tokens += len(batch.counted)
        self._n_sequences += len(batch.windows)

    @property
    def kind(self) -> str:
        """How the sums are computed: see ``Reducer``."""
        return ", ".join(sorted({reduce.kind for reduce in self._reducers}))

    @property
    def is_finite(self) -> Bool[Tensor, ""]:
        """Whether everything added so far was finite; a tensor on the device, so that no synchronization is needed."""
        return self._totals.pooled.sum().isfinite()

    def moments(self) -> Moments:
        """The moments of everything added so far, on the CPU."""
        totals, layout = self._totals, self._by_token.layout
        return replace(
            self._by_token.to("cpu", copy=True),
            neuron=Sums(layout, totals.table.T.contiguous().cpu()),
            pooled=Sums(layout, totals.pooled.T.contiguous().cpu()),
            neuron_groups=totals.groups.permute(1, 2, 0).contiguous().cpu(),
            signs=totals.signs.T.contiguous().cpu(),
            peaks=Peaks(totals.peaks.values.to("cpu", copy=True), totals.peaks.places.to("cpu", copy=True)),
            top_tokens=self._top_tokens.to("cpu"),
            n_tokens=self._n_tokens,
            n_sequences=self._n_sequences,
        )
