"""What edits cost the model: results of the exact sweep and of the first-order attribution, as sums by sequence.

Costs are in nats per scored token; a token is scored if it is counted and followed by another token. Tokens of a sequence
depend on each other, so errors come from the variation between sequences: for a ratio R = Σ x_s / Σ n_s over S sequences

    SE² = S/(S − 1) · Σ (x_s − R n_s)² / (Σ n_s)²

(linearized ratio estimator: Cochran 1977, Sampling Techniques, §2.11 without the finite population). An ``Attribution`` is
the sum Σ_t ∂CE/∂h_j·(h′_j − h_j): to first order, ΔCE if neuron j alone were edited.

What they do not show: costs on other kinds of text, and costs after further training with the edit in place.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Float64, Int64
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from analysis.checks import Check
from analysis.errors import UserError
from analysis.storage.files import CAUSAL_FILE, MOMENTS_FILE, RUN_FILE
from analysis.storage.hashing import sha256_of
from analysis.storage.tensors import read_tensors

CAUSAL_SCHEMA = 1
VERSIONS = ("edit", "placebo")
POSITIONS = ("counted", "all")
QUANTITIES = ("kl", "dce")
CONTROL_LIMIT = {"float64": 1e-6, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}
"""Largest cost, in nats per token, of an edit that changes nothing, by precision of the model."""
BASE_LIMIT = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
"""Largest error, in nats per token, of the cross-entropy of a start-at-layer pass compared with a whole pass."""

CostSums = Float64[Tensor, "*case sequence"]
Counts = Int64[Tensor, " sequence"]
Fields = TypeVar("Fields", "LayerCosts", "LayerAttribution", "SingleNeurons")


def per_token(sums: CostSums, n_tokens: Counts) -> Float64[Tensor, "*case"]:
    """The mean over all tokens, a ratio of sums."""
    return sums.sum(dim=-1) / n_tokens.sum()


def error_per_token(sums: CostSums, n_tokens: Counts) -> Float64[Tensor, "*case"]:
    """The standard error of ``per_token`` over sequences; NaN with fewer than two."""
    residual = sums - per_token(sums, n_tokens)[..., None] * n_tokens
    return _ratio_error(residual.square().sum(dim=-1), n_tokens)


def _ratio_error(squares: Float64[Tensor, "*case"], n_tokens: Counts) -> Float64[Tensor, "*case"]:
    n_sequences = len(n_tokens)
    if n_sequences < 2:
        return torch.full_like(squares, torch.nan)
    return (n_sequences / (n_sequences - 1) * squares).sqrt() / n_tokens.sum()


@dataclass(frozen=True)
class LayerCosts:
    """The costs of the edits of one layer, summed over the scored tokens of each sequence; first axis ``QUANTITIES``.

    Attributes:
        single: this layer edited alone, by edit, ``VERSIONS`` and ``POSITIONS``.
        bottom: this layer and all before it edited, on counted positions.
        top: this layer and all after it edited, on counted positions.
        control: an edit that changes nothing.
        base: cross-entropy of the start-at-layer pass without an edit.
        effort: seconds, blocks run and unembeddings, each summed over all windows and their patched runs.
    """

    single: Float64[Tensor, "quantity edit version positions sequence"]
    bottom: Float64[Tensor, "quantity edit sequence"]
    top: Float64[Tensor, "quantity edit sequence"]
    control: Float64[Tensor, "quantity sequence"]
    base: Float64[Tensor, " sequence"]
    effort: Float64[Tensor, " effort"]


@dataclass(frozen=True)
class Sweep:
    """The exact costs of every layer.

    Attributes:
        edits: their names.
        n_tokens: number of scored tokens of each sequence.
        base: cross-entropy of a whole pass, summed over each sequence.
        layers: costs by layer.
        n_blocks: number of transformer blocks in the model.
        clean_seconds: seconds for one whole pass over all sequences.
    """

    edits: tuple[str, ...]
    n_tokens: Counts
    base: Float64[Tensor, " sequence"]
    layers: dict[int, LayerCosts]
    n_blocks: int
    clean_seconds: float

    def effort(self) -> dict[str, float]:
        """The effort of the sweep: in whole passes over the text, of the blocks and of the unembedding, and in seconds."""
        seconds, blocks, unembeddings = torch.stack([costs.effort for costs in self.layers.values()]).sum(dim=0).tolist()
        n_sequences = len(self.n_tokens)
        return {
            "block_passes": blocks / (self.n_blocks * n_sequences),
            "unembedding_passes": unembeddings / n_sequences,
            "seconds": seconds,
            "seconds_of_one_pass": self.clean_seconds,
        }

    def checks(self, dtype: str) -> tuple[Check, ...]:
        """The checks of the sweep, for a run's acceptance: a control edit, and start-at-layer passes."""
        controls = [per_token(costs.control[0], self.n_tokens) for costs in self.layers.values()]
        misses = [per_token(costs.base - self.base, self.n_tokens).abs() for costs in self.layers.values()]
        control, miss = (float(torch.stack(values).max()) for values in (controls, misses))  # NaN if one of them is NaN
        nothing = "KL of an edit that changes nothing, largest over layers"
        entry = "cross-entropy from a layer on and from a whole pass, largest over layers"
        return Check(nothing, control, CONTROL_LIMIT[dtype]), Check(entry, miss, BASE_LIMIT[dtype])


@dataclass(frozen=True)
class LayerAttribution:
    """First-order costs of every neuron of a layer; x_s is a neuron's sum over the counted tokens of sequence s.

    Attributes:
        x: Σ_s x_s.
        xx: Σ_s x_s².
        xn: Σ_s x_s n_s with n_s the scored tokens.
        tt: Σ over tokens of the squared first-order cost: the mean square of x for a placebo with random signs.
        total: x_s summed over the neurons, by sequence.
    """

    x: Float64[Tensor, "edit d_mlp"]
    xx: Float64[Tensor, "edit d_mlp"]
    xn: Float64[Tensor, "edit d_mlp"]
    tt: Float64[Tensor, "edit d_mlp"]
    total: Float64[Tensor, "edit sequence"]

    @classmethod
    def of(cls, first_order: Float[Tensor, "edit token d_mlp"], n_tokens: int) -> "LayerAttribution":
        """From the first-order costs on the counted tokens of one sequence, ``n_tokens`` of them scored."""
        x = first_order.sum(dim=1, dtype=torch.float64).cpu()
        tt = first_order.square().sum(dim=1, dtype=torch.float64).cpu()
        return cls(x, x.square(), n_tokens * x, tt, x.sum(dim=1)[:, None])

    def __add__(self, other: "LayerAttribution") -> "LayerAttribution":
        return LayerAttribution(
            self.x + other.x,
            self.xx + other.xx,
            self.xn + other.xn,
            self.tt + other.tt,
            torch.cat([self.total, other.total], dim=1),
        )


@dataclass(frozen=True)
class Attribution:
    """First-order ΔCE of every neuron and edit, applied at counted positions.

    Attributes:
        edits: their names.
        n_tokens: number of scored tokens of each sequence.
        base: cross-entropy summed over each sequence.
        layers: sums by layer.
    """

    edits: tuple[str, ...]
    n_tokens: Counts
    base: Float64[Tensor, " sequence"]
    layers: dict[int, LayerAttribution]

    def __add__(self, other: "Attribution") -> "Attribution":
        if (self.edits, list(self.layers)) != (other.edits, list(other.layers)):
            raise ValueError(f"attributions of {self.edits} and {other.edits}, or of other layers, do not add")
        layers = {index: layer + other.layers[index] for index, layer in self.layers.items()}
        n_tokens, base = torch.cat([self.n_tokens, other.n_tokens]), torch.cat([self.base, other.base])
        return Attribution(self.edits, n_tokens, base, layers)

    def neurons(self, layer: int) -> Float64[Tensor, "edit d_mlp"]:
        """ΔCE in nats per token, to first order, of editing each neuron alone."""
        return self.layers[layer].x / self.n_tokens.sum()

    def neuron_errors(self, layer: int) -> Float64[Tensor, "edit d_mlp"]:
        """The standard error over sequences of ``neurons``."""
        sums, mean = self.layers[layer], self.neurons(layer)
        squares = sums.xx - 2 * mean * sums.xn + mean.square() * self.n_tokens.square().sum()
        return _ratio_error(squares.clamp(min=0), self.n_tokens)

    def neuron_placebos(self, layer: int) -> Float64[Tensor, "edit d_mlp"]:
        """The typical size (root mean square) of the same change with a random sign on every token."""
        return self.layers[layer].tt.sqrt() / self.n_tokens.sum()


@dataclass(frozen=True)
class SingleNeurons:
    """Single-neuron patching: the first-order prediction and the exact cost of editing one neuron, on the same tokens.

    Attributes:
        layer, neuron: the neuron.
        largest: whether it was chosen for its large |prediction|; the others were drawn at random.
        predicted, exact: ΔCE in nats per token.
    """

    layer: Int64[Tensor, " chosen"]
    neuron: Int64[Tensor, " chosen"]
    largest: Bool[Tensor, " chosen"]
    predicted: Float64[Tensor, " chosen"]
    exact: Float64[Tensor, " chosen"]


@dataclass(frozen=True)
class Causal:
    """All costs measured in one run.

    Attributes:
        record: provenance: windows, tokens, seed, the tokens that edit coefficients were fitted on.
        attribution, sweep: None if not requested.
        single_neurons: single-neuron patching with the first of the edits; only if both were requested.
    """

    record: dict[str, Any]
    attribution: Attribution | None = None
    sweep: Sweep | None = None
    single_neurons: SingleNeurons | None = None

    def checks(self, dtype: str) -> tuple[Check, ...]:
        """The checks of the sweep; none without a sweep."""
        return () if self.sweep is None else self.sweep.checks(dtype)

    def write(self, folder: Path) -> None:
        """Write ``causal.safetensors`` beside the moments of its run."""
        parts = (("attribution", self.attribution), ("sweep", self.sweep))
        tensors: dict[str, Tensor] = {}
        document: dict[str, Any] = {"schema": CAUSAL_SCHEMA, "record": self.record}
        document["moments_sha256"] = sha256_of(folder / MOMENTS_FILE)
        for name, part in parts:
            if part is None:
                continue
            document[name] = {"edits": list(part.edits), "layers": list(part.layers)}
            if isinstance(part, Sweep):
                document[name] |= {"n_blocks": part.n_blocks, "clean_seconds": part.clean_seconds}
            tensors |= {f"{name}.n_tokens": part.n_tokens, f"{name}.base": part.base}
            for index, layer in part.layers.items():
                tensors |= {f"{name}.{index}.{key}": value for key, value in tensors_of(layer).items()}
        if self.single_neurons is not None:
            tensors |= {f"one_by_one.{key}": value for key, value in tensors_of(self.single_neurons).items()}
        metadata = {"document": json.dumps(document, ensure_ascii=False, allow_nan=False)}
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / CAUSAL_FILE, metadata)
        shutil.copymode(folder / RUN_FILE, folder / CAUSAL_FILE)  # safetensors writes for its owner alone

    @classmethod
    def load(cls, folder: Path) -> "Causal | None":
        """The costs saved beside a run; None if there are none, UserError if they are damaged or of another run."""
        path = folder / CAUSAL_FILE
        if not path.exists():
            return None
        try:
            metadata, tensors = read_tensors(path)
            document = json.loads(metadata["document"])
            if (document["schema"], document["moments_sha256"]) != (CAUSAL_SCHEMA, sha256_of(folder / MOMENTS_FILE)):
                raise UserError(f"{path} belongs to another run or version: analyze again with --causal")
            return _read(document, tensors)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"{path} is not readable ({type(error).__name__}: {error}): analyze again") from error


def tensors_of(part: LayerCosts | LayerAttribution | SingleNeurons) -> dict[str, Tensor]:
    """The fields by name, for files."""
    return {item.name: getattr(part, item.name) for item in fields(part)}


def from_tensors(kind: type[Fields], tensors: dict[str, Tensor], prefix: str = "") -> Fields:
    """The inverse of ``tensors_of``."""
    return kind(**{item.name: tensors[prefix + item.name] for item in fields(kind)})


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, ties share their mean rank; NaN for fewer than two or constant values."""
    ranks = torch.stack([_ranks(values) for values in (first, second)])
    centered = ranks - ranks.mean(dim=1, keepdim=True)
    norms = centered.square().sum(dim=1).sqrt()
    return float(centered[0] @ centered[1] / norms.prod()) if bool((norms > 0).all()) else math.nan


def _ranks(values: Sequence[float]) -> Float64[Tensor, " value"]:
    _, place, counts = torch.unique(torch.tensor(values, dtype=torch.float64), return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def _read(document: dict[str, Any], tensors: dict[str, Tensor]) -> Causal:
    causal = Causal(document["record"])
    if "attribution" in document:
        part = document["attribution"]
        layers = {i: from_tensors(LayerAttribution, tensors, f"attribution.{i}.") for i in part["layers"]}
        shared = tensors["attribution.n_tokens"], tensors["attribution.base"]
        causal = replace(causal, attribution=Attribution(tuple(part["edits"]), *shared, layers))
    if "sweep" in document:
        part = document["sweep"]
        costs = {i: from_tensors(LayerCosts, tensors, f"sweep.{i}.") for i in part["layers"]}
        shared = tensors["sweep.n_tokens"], tensors["sweep.base"]
        causal = replace(causal, sweep=Sweep(tuple(part["edits"]), *shared, costs, part["n_blocks"], part["clean_seconds"]))
    if "one_by_one.layer" in tensors:
        causal = replace(causal, single_neurons=from_tensors(SingleNeurons, tensors, "one_by_one."))
    return causal
