"""The sums of what a layer writes: of the vector y that it adds to the residual stream, and of y′ with its units edited.

A layer adds y = P(Σ_j h_j v_j), with P what stands between the down projection and the addition: a bias, a factor, a norm.
Errors of single neurons cancel or add up in it. For every edit of ``analysis.sums.output_edits`` all units of the layer are
edited at once, and y′ goes through P again. Kept are, by jackknife block,

    energy   Σ‖y‖² and Σ‖y′‖²          total   Σy and Σy′, for the readings without the mean over tokens
    gap      Σ‖y − y′‖²

once for y as written and, where P has a norm, once before it; each edit's asymmetry token by token; and y and y′ under
balanced exchange for a sample of tokens, from which the effective ranks are computed. All of it adds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from analysis.sums.output_edits import BALANCED, edits_of, reference_of, versions_of
from analysis.sums.reducer import N_JACKKNIFE_BLOCKS, TokenSums
from analysis.sums.token_histograms import TokenHistograms
from analysis.units.registry import Unit

SAMPLED_TOKENS = 512
"""Tokens of which y and y′ are kept."""
READINGS = ("written", "raw")
"""As added to the residual stream, and before a norm behind the MLP; the second is there only if there is such a norm."""


class WrittenTile(NamedTuple):
    """What a layer writes on some tokens of one jackknife block, in every version of ``versions_of``.

    Attributes:
        written: as added to the residual stream.
        raw: before the norm behind the MLP; None if there is none.
        block: the jackknife block.
        keys: of the tokens (``analysis.sums.token_sample``), on the CPU.
    """

    written: Float[Tensor, "version token d_model"]
    raw: Float[Tensor, "version token d_model"] | None
    block: int
    keys: Int64[Tensor, " token"]


@dataclass(frozen=True)
class OutputSample:
    """y and y′ under balanced exchange for the tokens with the smallest keys, ascending, at most ``SAMPLED_TOKENS``.

    Attributes:
        keys: their keys.
        blocks: their jackknife blocks.
        outputs: y and y′.
    """

    keys: Int64[Tensor, " sampled"]
    blocks: Int64[Tensor, " sampled"]
    outputs: Float32[Tensor, "2 sampled d_model"]

    @classmethod
    def empty(cls, d_model: int) -> "OutputSample":
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(nothing, nothing, torch.zeros(2, 0, d_model))

    def __add__(self, other: "OutputSample") -> "OutputSample":
        keys, blocks = torch.cat([self.keys, other.keys]), torch.cat([self.blocks, other.blocks])
        kept = keys.argsort(stable=True)[:SAMPLED_TOKENS]
        outputs = torch.cat([self.outputs, other.outputs], dim=1)
        return OutputSample(keys[kept], blocks[kept], outputs[:, kept.to(outputs.device)])

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for writing."""
        return {"keys": self.keys, "blocks": self.blocks, "outputs": self.outputs}

    def to(self, device: torch.device | str) -> "OutputSample":
        """The same with the outputs on a device."""
        return replace(self, outputs=self.outputs.to(device))


@dataclass(frozen=True)
class OutputMoments:
    """The sums of one layer's output over counted tokens, or a random share of them; a monoid under ``+``.

    Attributes:
        unit: g, which determines the versions and the edits.
        energy: Σ‖y‖² of every version.
        gap: Σ‖y − y′‖² of every edit.
        total: Σy of every version, as written.
        blocks: tokens by jackknife block.
        tokens: the asymmetry under every edit token by token, as written; a token's energy is ‖y‖².
        sample: y and y′ of some tokens.
    """

    unit: Unit
    energy: Float64[Tensor, "reading version block"]
    gap: Float64[Tensor, "reading edit block"]
    total: Float64[Tensor, "version block d_model"]
    blocks: Int64[Tensor, " block"]
    tokens: TokenHistograms
    sample: OutputSample

    @classmethod
    def empty(cls, unit: Unit, d_model: int, has_norm: bool = False, device: torch.device | str = "cpu") -> "OutputMoments":
        """Sums of 0; ``has_norm`` says whether a norm stands behind the MLP."""

        def zeros(*shape: int) -> Float64[Tensor, "..."]:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        readings, n_versions, edits = 1 + has_norm, len(versions_of(unit)), edits_of(unit)
        return cls(
            unit,
            zeros(readings, n_versions, N_JACKKNIFE_BLOCKS),
            zeros(readings, len(edits), N_JACKKNIFE_BLOCKS),
            zeros(n_versions, N_JACKKNIFE_BLOCKS, d_model),
            torch.zeros(N_JACKKNIFE_BLOCKS, dtype=torch.int64),
            TokenHistograms.empty(edits, device),
            OutputSample.empty(d_model).to(device),
        )

    def __add__(self, other: "OutputMoments") -> "OutputMoments":
        if self.unit != other.unit or self.energy.shape != other.energy.shape or self.total.shape != other.total.shape:
            raise ValueError(f"outputs of different units or widths do not add: {self.unit.name}, {other.unit.name}")
        summed = (getattr(self, item.name) + getattr(other, item.name) for item in fields(self) if item.name != "unit")
        return OutputMoments(self.unit, *summed)

    def tensors(self) -> dict[str, Tensor]:
        """All sums as tensors by name, for writing."""
        return {
            **{name: getattr(self, name) for name in ("energy", "gap", "total", "blocks")},
            **{f"tokens.{name}": values for name, values in self.tokens.tensors().items()},
            **{f"sample.{name}": values for name, values in self.sample.tensors().items()},
        }

    @classmethod
    def from_tensors(cls, unit: Unit, named: dict[str, Tensor]) -> "OutputMoments":
        """The inverse of ``tensors``; KeyError or ValueError if they are not of this unit."""
        expected = cls.empty(unit, named["total"].shape[-1], has_norm=len(named["energy"]) == len(READINGS))
        for name, tensor in expected.tensors().items():
            any_length = name.startswith("sample")
            if tensor.dtype != named[name].dtype or (tensor.shape != named[name].shape and not any_length):
                raise ValueError(f"output {name} is {tuple(named[name].shape)}, expected {tuple(tensor.shape)}")
        tokens = TokenHistograms(expected.tokens.measures, *(named[f"tokens.{part}"] for part in expected.tokens.tensors()))
        sample = OutputSample(*(named[f"sample.{part}"] for part in expected.sample.tensors()))
        return cls(unit, named["energy"], named["gap"], named["total"], named["blocks"], tokens, sample)

    @property
    def edits(self) -> tuple[str, ...]:
        return edits_of(self.unit)

    @property
    def has_norm(self) -> bool:
        """Whether a norm stands behind the MLP, so that there are two readings."""
        return len(self.energy) == len(READINGS)

    @property
    def n_tokens(self) -> int:
        return int(self.blocks.sum())


@dataclass
class OutputAccumulator:
    """Accumulates the sums of one layer's output on the device of the activations, without synchronizing it.

    Attributes:
        unit: g.
        d_model: width of the residual stream.
        has_norm: whether a norm stands behind the MLP.
        device: of the activations.
    """

    unit: Unit
    d_model: int
    has_norm: bool
    device: torch.device
    _sums: OutputMoments = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names, edits = versions_of(self.unit), edits_of(self.unit)
        self._sums = OutputMoments.empty(self.unit, self.d_model, self.has_norm, self.device)
        self._references = [names.index(reference_of(self.unit, edit)) for edit in edits]
        self._edited = [names.index(edit) for edit in edits]
        self._sampled = names.index(reference_of(self.unit, BALANCED)), names.index(BALANCED)

    def add(self, tiles: Iterable[WrittenTile]) -> None:
        """Add the tiles of a batch; an iterator keeps only one of them in memory at a time."""
        ratios, blocks = [], []
        for tile in tiles:
            ratios.append(self._add(tile))
            blocks += [tile.block] * len(tile.keys)
        if ratios:
            tokens = TokenSums(*(torch.cat(parts, dim=-1) for parts in zip(*ratios, strict=True)))
            self._sums.tokens.add_tokens(tokens, torch.tensor(blocks, device=self.device))

    def _add(self, tile: WrittenTile) -> tuple[Tensor, Tensor, Tensor]:
        """Add one tile; gap and scale of every edit on its tokens, and their energy."""
        sums, found = self._sums, []
        for reading, y in enumerate((tile.written, tile.raw)):
            if y is not None:
                energy = _squared_lengths(y)
                gap = torch.stack([_squared_lengths(y[one] - y[other]) for one, other in self._pairs])
                sums.energy[reading, :, tile.block] += energy.sum(dim=-1)
                sums.gap[reading, :, tile.block] += gap.sum(dim=-1)
                found.append((energy, gap))
        energy, gap = found[0]
        sums.total[:, tile.block] += tile.written.sum(dim=1).double()
        sums.blocks[tile.block] += len(tile.keys)
        self._sample(tile)
        return gap, 2 * (energy[self._references] + energy[self._edited]), energy[0]

    @property
    def _pairs(self) -> Iterable[tuple[int, int]]:
        return zip(self._references, self._edited, strict=True)

    def _sample(self, tile: WrittenTile) -> None:
        """Keep the tokens of a tile that are among those with the smallest keys; which they are is known on the CPU."""
        sample = self._sums.sample
        largest = int(sample.keys[-1]) if len(sample.keys) == SAMPLED_TOKENS else None
        chosen = tile.keys.argsort()[:SAMPLED_TOKENS] if largest is None else (tile.keys < largest).nonzero()[:, 0]
        if len(chosen):
            outputs = tile.written[list(self._sampled)][:, chosen.to(self.device)].float()
            one = OutputSample(tile.keys[chosen], torch.full_like(chosen, tile.block), outputs)
            self._sums = replace(self._sums, sample=sample + one)

    @property
    def is_finite(self) -> Tensor:
        """Whether everything added so far was finite; a tensor on the device."""
        return self._sums.energy.sum().isfinite()

    def moments(self) -> OutputMoments:
        """The sums of everything added so far, on the CPU."""
        sums = self._sums
        energy, gap, total, blocks = (x.to("cpu", copy=True) for x in (sums.energy, sums.gap, sums.total, sums.blocks))
        return OutputMoments(sums.unit, energy, gap, total, blocks, sums.tokens.to("cpu", copy=True), sums.sample.to("cpu"))


def _squared_lengths(rows: Float[Tensor, "*version token d_model"]) -> Float64[Tensor, "*version token"]:
    return torch.linalg.vecdot(rows, rows).double()
