"""A Run: what was found in one model on one corpus, with its provenance.

A run is the moments and the geometry of every analysed layer, and the record of how they came about. It needs neither the
model nor TransformerLens: tables, figures and reports are made from it, here or on another machine, now or later.

    run.save(directory)            writes moments.safetensors and run.json
    Run.load(directory)            gives it back, bit for bit
    Run.merge([run, other])        adds shards; refuses runs that are not of the same thing, and the same tokens twice
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from analysis.directory import RUN_FILE, SCHEMA, staged
from analysis.errors import UserError
from analysis.geometry import Geometry
from analysis.hashing import sha256_of
from analysis.jackknife import filled_blocks
from analysis.moments import Moments
from analysis.nulls import gaussian_exchange
from analysis.sums import Layout, Sums
from analysis.units import Unit, unit_named

MOMENTS_FILE = "moments.safetensors"
Record = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One layer of a run.

    Attributes:
        unit: g.
        moments: what was seen of its neurons.
        geometry: their weights, with the norm gain folded as ``gain`` says.
        gain: in words, which norm's gain was folded into q and k.
        interaction_antisymmetry: share of the interaction tensor's energy that is antisymmetric in q ↔ k, gain folded.
    """

    unit: Unit
    moments: Moments
    geometry: Geometry
    gain: str
    interaction_antisymmetry: float

    @cached_property
    def gaussian_null(self) -> tuple[Float64[Tensor, " d_mlp"], float]:
        """The Gaussian null of exchange, by neuron and pooled; a quadrature, so it is done once for all tables."""
        return gaussian_exchange(self.moments, self.unit, self.geometry.value_weight)


@dataclass(frozen=True)
class Run:
    """Moments and geometry by layer, with provenance.

    Attributes:
        layers: the analysed layers by index, ascending.
        model: what was read: name, revision or hash, weights' format, activation, dtype, sizes.
        settings: how it was read: context, skipped positions, BOS, scales, seed. Runs merge only if these are equal.
        corpus: the parts of text that were counted, one record each.
        windows: a number for every window that was counted, by which runs know that they counted the same.
        acceptance: the checks made when the model was loaded: ``check``, ``value``, ``limit``, ``passed``.
        skipped: layers that were asked for and not analysed, with the reason.
        record: versions, device, wall time; informative only.
    """

    layers: dict[int, Layer]
    model: Record
    settings: Record
    corpus: tuple[Record, ...]
    windows: Int64[Tensor, " window"]
    acceptance: tuple[Record, ...] = ()
    skipped: dict[int, str] = field(default_factory=dict)
    record: Record = field(default_factory=dict)

    def missing(self) -> dict[str, str]:
        """For every kind of number that has no value somewhere in the tables: why."""
        return dict(_reasons(self))

    def save(self, directory: str | Path, force: bool = False) -> None:
        """Write the run; UserError if the directory holds something else and ``force`` is not set."""
        with staged(Path(directory), force) as folder:
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write ``moments.safetensors`` and ``run.json`` into an existing folder."""
        save_file({"windows": self.windows, **dict(_tensors(self.layers))}, folder / MOMENTS_FILE)
        document = {
            "schema": SCHEMA,
            "model": self.model,
            "settings": self.settings,
            "corpus": list(self.corpus),
            "acceptance": list(self.acceptance),
            "layers": {str(index): _describe(layer) for index, layer in self.layers.items()},
            "skipped_layers": {str(index): reason for index, reason in self.skipped.items()},
            "missing": self.missing(),
            "record": self.record,
            "moments_sha256": sha256_of(folder / MOMENTS_FILE),
        }
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / RUN_FILE).write_text(text + "\n", encoding="utf-8")
        shutil.copymode(folder / RUN_FILE, folder / MOMENTS_FILE)  # safetensors writes for its owner alone

    @classmethod
    def load(cls, directory: str | Path) -> "Run":
        """Read a saved run; UserError if it is not one, is damaged, or comes from a newer version."""
        folder = Path(directory)
        try:
            document = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise UserError(f"{folder} has schema {document['schema']}, this version reads {SCHEMA}: analyze again")
            if sha256_of(folder / MOMENTS_FILE) != document["moments_sha256"]:
                raise UserError(f"{folder / MOMENTS_FILE} is not the file that {RUN_FILE} describes: analyze again")
            _check_document(document)
            tensors = load_file(folder / MOMENTS_FILE)
            layers = {
                int(index): _read_layer(tensors, int(index), described, document["settings"])
                for index, described in document["layers"].items()
            }
            skipped = {int(index): reason for index, reason in document["skipped_layers"].items()}
            return cls(
                layers,
                document["model"],
                document["settings"],
                tuple(document["corpus"]),
                tensors["windows"],
                tuple(document["acceptance"]),
                skipped,
                document["record"],
            )
        except FileNotFoundError as error:
            raise UserError(f"{folder} is not a run: {Path(error.filename or RUN_FILE).name} is missing") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{folder} is not a readable run ({reason}): analyze again") from error

    @classmethod
    def merge(cls, runs: Sequence["Run"]) -> "Run":
        """The run that would have come from all their tokens together; UserError unless they are of the same thing."""
        if len(runs) < 2:
            raise UserError(f"{len(runs)} run given: merge needs at least two")
        return reduce(_add, runs)


def _add(first: Run, second: Run) -> Run:
    for part, theirs in ((first.model, second.model), (first.settings, second.settings)):
        for key in sorted({*part, *theirs}):
            if part.get(key) != theirs.get(key):
                raise UserError(f"runs differ in {key} ({part.get(key)} and {theirs.get(key)}): they do not merge")
    for what, mine, other in (
        ("layers", list(first.layers), list(second.layers)),
        ("skipped layers", list(first.skipped), list(second.skipped)),
        ("checks", [check["check"] for check in first.acceptance], [check["check"] for check in second.acceptance]),
    ):
        if mine != other:
            raise UserError(f"runs differ in {what} ({mine} and {other}): they do not merge")
    for index, layer in first.layers.items():
        for name, values in layer.geometry.tensors().items():
            if not torch.allclose(values, second.layers[index].geometry.tensors()[name], rtol=1e-9, atol=1e-12):
                raise UserError(f"layer {index} has other weights in the second run ({name} differs): they do not merge")
    common = len(set(first.windows.tolist()) & set(second.windows.tolist()))
    if common:
        raise UserError(f"both runs counted the same {common} windows of {first.corpus[0]['name']}: they do not merge")
    layers = {
        index: replace(layer, moments=layer.moments + second.layers[index].moments) for index, layer in first.layers.items()
    }
    record = {"merged_from": [part for run in (first, second) for part in run.record.get("merged_from", [run.record])]}
    pairs = zip(first.acceptance, second.acceptance, strict=True)
    worst = tuple(max(pair, key=lambda check: check["value"]) for pair in pairs)
    corpus, windows = first.corpus + second.corpus, torch.cat([first.windows, second.windows])
    return Run(layers, first.model, first.settings, corpus, windows, worst, first.skipped, record)


def _reasons(run: Run) -> Iterator[tuple[str, str]]:
    layers = run.layers.values()
    if min(filled_blocks(layer.moments.pooled) for layer in layers) < 2:
        yield "*_se", "a standard error needs counted tokens in at least two jackknife blocks: give more text"
    for column, alpha in (("scaling_half", 0.5), ("scaling_double", 2.0), ("scaling_flip", -1.0)):
        if alpha not in run.settings["alphas"]:
            yield column, f"scale {alpha:g} was not among --alphas"
    dead = {i: int((layer.moments.neuron["hh"] == 0).sum()) for i, layer in run.layers.items()}
    if any(dead.values()):
        silent = ", ".join(f"{count} in layer {index}" for index, count in dead.items() if count)
        yield "neurons without energy", f"h was 0 on every counted token, ratios are undefined: {silent}"


def _check_document(document: Record) -> None:
    """Raise KeyError or ValueError where ``run.json`` lacks what tables and merging rely on."""
    if not document["layers"] or not document["corpus"]:
        raise ValueError("it has no layers or no corpus")
    for part in document["corpus"]:
        _ = part["name"], part["shard"], int(part["tokens_counted"]), bool(part["cut_at_max_tokens"])
    for check in document["acceptance"]:
        _ = check["check"], float(check["value"]), float(check["limit"]), bool(check["passed"])
    for key in ("name", "weights", "units", "n_layers", "dtype"):
        _ = document["model"][key]


def _describe(layer: Layer) -> Record:
    return {"unit": layer.unit.name, "norm_gain": layer.gain, "d_mlp": layer.moments.neuron.values.shape[1]}


def _tensors(layers: dict[int, Layer]) -> Iterator[tuple[str, Tensor]]:
    for index, layer in layers.items():
        moments = layer.moments
        yield f"{index}.neuron", moments.neuron.values
        yield f"{index}.pooled", moments.pooled.values
        yield f"{index}.token_ratios", moments.token_ratios
        yield f"{index}.top_energy", torch.tensor(moments.top_energy, dtype=torch.float64)
        antisymmetry = torch.tensor(layer.interaction_antisymmetry, dtype=torch.float64)
        yield f"{index}.interaction_antisymmetry", antisymmetry
        yield f"{index}.counts", torch.tensor([moments.n_tokens, moments.n_sequences])
        for name, values in layer.geometry.tensors().items():
            yield f"{index}.geometry.{name}", values


def _read_layer(tensors: dict[str, Tensor], index: int, described: Record, settings: Record) -> Layer:
    unit = unit_named(described["unit"])
    layout = Layout.of(unit, settings["alphas"], settings["draws"])
    prefix = f"{index}.geometry."
    geometry = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    n_tokens, n_sequences = tensors[f"{index}.counts"].tolist()
    moments = Moments(
        Sums(layout, tensors[f"{index}.neuron"]),
        Sums(layout, tensors[f"{index}.pooled"]),
        tensors[f"{index}.token_ratios"],
        tensors[f"{index}.top_energy"].item(),
        n_tokens,
        n_sequences,
    )
    antisymmetry = tensors[f"{index}.interaction_antisymmetry"].item()
    return Layer(unit, moments, Geometry(**geometry), described["norm_gain"], antisymmetry)
