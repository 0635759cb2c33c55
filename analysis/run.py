"""A Run: the results for one model on one corpus, with their provenance.

A run consists of the moments and the geometry of every analysed layer, and a record of how they were obtained. It needs
neither the model nor TransformerLens: tables, figures and reports are made from it, on any machine.

    run.save(directory)            writes moments.safetensors and run.json
    Run.load(directory)            reads it back, bit for bit
    Run.merge([run, other])        adds shards; refuses runs of different models or settings, and tokens counted twice
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from analysis.checks import Check
from analysis.errors import UserError
from analysis.measures.asymmetry import tokens_seen
from analysis.measures.estimates import Estimates
from analysis.measures.jackknife import filled_jackknife_blocks
from analysis.measures.output_ranks import FEWEST_TOKENS
from analysis.measures.permutation_null import FEWEST_DRAWS
from analysis.storage.files import MOMENTS_FILE, RUN_FILE, SCHEMA
from analysis.storage.hashing import sha256_of
from analysis.storage.staged_writes import staged
from analysis.storage.tensors import read_tensors
from analysis.sums.layout import MAIN_SCALES, Layout
from analysis.sums.moments import Moments
from analysis.sums.output_edits import LIMITS
from analysis.sums.output_moments import OutputMoments
from analysis.units.registry import Unit, unit_named
from analysis.weights.experts import Experts, expert_name, expert_slices, same_experts
from analysis.weights.geometry import Geometry

MOST_LISTED = 8
"""Experts of a layer that a message lists by name."""
UNVERIFIED = "what stands between the MLP and the residual stream could not be verified"
"""Why the output of a layer was not measured."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """One layer of a run.

    Attributes:
        unit: g.
        moments: the sums over its counted tokens.
        geometry: norms and cosines of its weights, with the norm gain folded in as described by ``gain``.
        gain: in words, the norm gain that was folded into q and k.
        interaction_antisymmetry: antisymmetric share of the interaction tensor's energy, norm gain folded in.
        partners: for each permutation, the neuron (of the same expert) whose b was combined with each neuron's a.
        experts: the expert of each neuron in a mixture of experts (``analysis.weights.experts``); None in a dense layer.
        output: the sums of what the layer writes; None if the way from its MLP to the residual stream was not verified.
    """

    unit: Unit
    moments: Moments
    geometry: Geometry
    gain: str
    interaction_antisymmetry: float
    partners: Int64[Tensor, "draw d_mlp"]
    experts: Experts | None = None
    output: OutputMoments | None = None

    @cached_property
    def estimates(self) -> Estimates:
        """Its numbers; cached, because nulls and errors are expensive."""
        return Estimates(self.unit, self.moments, self.geometry, self.partners, self.experts, self.output)

    def __add__(self, other: "Layer") -> "Layer":
        """The layer over the tokens of both; the weights are the first one's."""
        output = None if self.output is None or other.output is None else self.output + other.output
        return replace(self, moments=self.moments + other.moments, output=output)


@dataclass(frozen=True)
class Run:
    """Moments and geometry by layer, with provenance.

    Attributes:
        layers: the analysed layers by index, ascending.
        model: name, revision or hash, format of the weights, activation, dtype, sizes.
        settings: context length, skipped positions, BOS, scales, seed. Runs merge only if these are equal.
        corpus: the parts of the text that were counted, one record each.
        windows: an identifier of every counted window, by which runs are compared.
        acceptance: the acceptance checks, and how the model was read.
        controls: every control of every layer.
        token_texts: the text of every token id that occurs in the tables.
        skipped: layers that were requested but not analysed, with the reason.
        record: versions, device, wall time; informative only.
    """

    layers: dict[int, Layer]
    model: Record
    settings: Record
    corpus: tuple[Record, ...]
    windows: Int64[Tensor, " window"]
    acceptance: tuple[Check, ...] = ()
    controls: tuple[Check, ...] = ()
    token_texts: dict[int, str] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    record: Record = field(default_factory=dict)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every check and every control."""
        return (*self.acceptance, *self.controls)

    @property
    def passed(self) -> bool:
        """Whether every check and every control passed."""
        return all(check.passed for check in self.checks)

    def massive_activation_tokens(self) -> dict[int, list[Record]]:
        """For every layer whose numbers depend on a handful of tokens: these tokens, largest energy first."""
        return {
            index: [place | {"text": self.token_texts[int(place["token"])]} for place in layer.estimates.top_tokens()]
            for index, layer in self.layers.items()
            if layer.estimates.few_tokens
        }

    def missing(self) -> dict[str, str]:
        """The reason for every kind of number that is missing somewhere in the tables."""
        return dict(_reasons(self))

    def save(self, directory: str | Path, force: bool = False) -> None:
        """Write the run; UserError if the directory has other content and ``force`` is not set."""
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
            "acceptance": [check.as_record() for check in self.acceptance],
            "controls": [control.as_control() for control in self.controls],
            "carried_by_few_tokens": {str(index): places for index, places in self.massive_activation_tokens().items()},
            "layers": {str(index): _describe(layer) for index, layer in self.layers.items()},
            "skipped_layers": {str(index): reason for index, reason in self.skipped.items()},
            "missing": self.missing(),
            "token_texts": {str(token): text for token, text in self.token_texts.items()},
            "record": self.record,
            "moments_sha256": sha256_of(folder / MOMENTS_FILE),
        }
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / RUN_FILE).write_text(text + "\n", encoding="utf-8")
        shutil.copymode(folder / RUN_FILE, folder / MOMENTS_FILE)  # safetensors writes for its owner alone

    @classmethod
    def load(cls, directory: str | Path) -> "Run":
        """Read a saved run; UserError if it is not a run, is damaged, or is of another schema."""
        folder = Path(directory)
        try:
            document = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise UserError(f"{folder} has schema {document['schema']}, this version reads {SCHEMA}: analyze again")
            if sha256_of(folder / MOMENTS_FILE) != document["moments_sha256"]:
                raise UserError(f"{folder / MOMENTS_FILE} is not the file that {RUN_FILE} describes: analyze again")
            _check_document(document)
            _, tensors = read_tensors(folder / MOMENTS_FILE)
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
                tuple(map(Check.of_record, document["acceptance"])),
                tuple(map(Check.of_record, document["controls"])),
                {int(token): text for token, text in document["token_texts"].items()},
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
        """The run over the tokens of all runs; UserError unless they are of the same model with the same settings."""
        if len(runs) < 2:
            raise UserError(f"{len(runs)} run given: merge needs at least two")
        return reduce(_add, runs)


def _add(first: Run, second: Run) -> Run:
    for part, theirs in ((first.model, second.model), (first.settings, second.settings)):
        for key in sorted({*part, *theirs}):
            if part.get(key) != theirs.get(key):
                remedy = ": give the same --output-share to every shard" if key == "output_share" else ""
                both = f"{part.get(key)} and {theirs.get(key)}"
                raise UserError(f"runs differ in {key} ({both}): they do not merge{remedy}")
    for what, mine, other in (
        ("layers", list(first.layers), list(second.layers)),
        ("skipped layers", list(first.skipped), list(second.skipped)),
        ("layers whose output was measured", _with_output(first), _with_output(second)),
        ("checks", [check.what for check in first.acceptance], [check.what for check in second.acceptance]),
        ("controls", _names(first), _names(second)),
    ):
        if mine != other:
            raise UserError(f"runs differ in {what} ({mine} and {other}): they do not merge")
    for index, layer in first.layers.items():
        if not same_experts(layer.experts, second.layers[index].experts):
            raise UserError(f"layer {index} has other experts in the second run: they do not merge")
        for name, values in layer.geometry.tensors().items():
            if not torch.allclose(values, second.layers[index].geometry.tensors()[name], rtol=1e-9, atol=1e-12):
                raise UserError(f"layer {index} has other weights in the second run ({name} differs): they do not merge")
    common = len(set(first.windows.tolist()) & set(second.windows.tolist()))
    if common:
        raise UserError(f"both runs counted the same {common} windows of {first.corpus[0]['name']}: they do not merge")
    layers = {index: layer + second.layers[index] for index, layer in first.layers.items()}
    record = {"merged_from": [part for run in (first, second) for part in run.record.get("merged_from", [run.record])]}
    return replace(
        first,
        layers=layers,
        corpus=first.corpus + second.corpus,
        windows=torch.cat([first.windows, second.windows]),
        acceptance=tuple(map(Check.worse, first.acceptance, second.acceptance)),
        controls=tuple(map(Check.worse, first.controls, second.controls)),
        token_texts=first.token_texts | second.token_texts,
        record=record,
    )


def _with_output(run: Run) -> list[int]:
    return [index for index, layer in run.layers.items() if layer.output is not None]


def _names(run: Run) -> list[tuple[int | None, str]]:
    return [(control.layer, control.what) for control in run.controls]


def _reasons(run: Run) -> Iterator[tuple[str, str]]:
    layers = run.layers.values()
    if min(filled_jackknife_blocks(layer.moments) for layer in layers) < 2:
        yield "*_se", "a standard error needs counted tokens in at least two jackknife blocks: give more text"
    for column, alpha in MAIN_SCALES.items():
        if alpha not in run.settings["alphas"]:
            yield column, f"scale {alpha:g} is not among --alphas; nor is output_{column}_coherence measured"
    yield from _reasons_of_outputs(run.layers)
    if run.settings["draws"] < FEWEST_DRAWS:
        yield "*_excess_repaired_se", f"the variance over permutations needs at least {FEWEST_DRAWS} of them: raise --draws"
    if run.settings["draws"] < 2:
        yield "*_repaired_p", "ranking a neuron among its permuted values needs at least two permutations: raise --draws"
    coupled = sorted({layer.unit.name for layer in layers if not layer.unit.is_pointwise})
    if coupled:
        yield (
            "*_null_gaussian",
            f"{', '.join(coupled)}: a neuron's gate depends on its whole layer, not on its own (a, b) alone",
        )
    idle = {i: layer.estimates.idle_experts for i, layer in run.layers.items()}
    if any(idle.values()):
        listed = "; ".join(f"{_listed(experts)} in layer {i}" for i, experts in idle.items() if experts)
        yield "experts without tokens", f"no counted token was routed to them, so their neurons have no values: {listed}"
    sums = {i: layer.moments.neuron for i, layer in run.layers.items()}
    dead = {i: int(((of["hh"] == 0) & (tokens_seen(of) > 0)).sum()) for i, of in sums.items()}
    if any(dead.values()):
        silent = ", ".join(f"{count} in layer {index}" for index, count in dead.items() if count)
        yield "neurons without energy", f"h was 0 on every counted token, so ratios are undefined: {silent}"


def _reasons_of_outputs(layers: dict[int, Layer]) -> Iterator[tuple[str, str]]:
    outputs = {index: layer.output for index, layer in layers.items()}
    if unknown := [index for index, output in outputs.items() if output is None]:
        yield "output_*", f"{UNVERIFIED}: {layers_named(unknown)}"
    known = {index: output for index, output in outputs.items() if output is not None}
    if unsampled := [index for index, output in known.items() if not output.n_tokens]:
        yield "output_*", f"no counted token was sampled, raise --output-share: {layers_named(unsampled)}"
    if bare := [index for index, output in known.items() if not output.has_norm]:
        yield "output_*_raw", f"no norm stands behind the MLP, so there is one reading: {layers_named(bare)}"
    for name in LIMITS:
        if without := sorted({output.unit.name for output in known.values() if name not in output.edits}):
            yield f"output_{name}*", f"{', '.join(without)} has no such limit"
    if few := [index for index, output in known.items() if 0 < output.n_tokens < FEWEST_TOKENS]:
        yield "output_*_rank, output_antisymmetric_in_top10", f"under {FEWEST_TOKENS} tokens of y: {layers_named(few)}"


def layers_named(layers: Iterable[int]) -> str:
    """Layers in words, as ranges: layers 0-5, 8."""
    ranges: list[list[int]] = []
    for layer in sorted(set(layers)):
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1].append(layer)
        else:
            ranges.append([layer])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)
    return f"layer{'' if listed.isdecimal() else 's'} {listed}"


def _listed(experts: Sequence[int]) -> str:
    """The first few, and the number of others."""
    more = f" and {len(experts) - MOST_LISTED} more" if len(experts) > MOST_LISTED else ""
    return ", ".join(map(expert_name, experts[:MOST_LISTED])) + more


def _check_document(document: Record) -> None:
    """Raise KeyError or ValueError if ``run.json`` lacks something that tables and merging need."""
    if not document["layers"] or not document["corpus"]:
        raise ValueError("it has no layers or no corpus")
    for part in document["corpus"]:
        _ = part["name"], part["shard"], int(part["tokens_counted"]), bool(part["cut_at_max_tokens"])
    for key in ("name", "weights", "units", "n_layers", "dtype"):
        _ = document["model"][key]


def _describe(layer: Layer) -> Record:
    return {"unit": layer.unit.name, "norm_gain": layer.gain, "d_mlp": layer.moments.d_mlp}


def _tensors(layers: dict[int, Layer]) -> Iterator[tuple[str, Tensor]]:
    for index, layer in layers.items():
        for name, values in layer.moments.tensors().items():
            yield f"{index}.{name}", values
        antisymmetry = torch.tensor(layer.interaction_antisymmetry, dtype=torch.float64)
        yield f"{index}.interaction_antisymmetry", antisymmetry
        yield f"{index}.partners", layer.partners
        if layer.experts is not None:
            yield f"{index}.experts", layer.experts
        if layer.output is not None:
            for name, values in layer.output.tensors().items():
                yield f"{index}.output.{name}", values
        for name, values in layer.geometry.tensors().items():
            yield f"{index}.geometry.{name}", values


def _read_layer(tensors: dict[str, Tensor], index: int, described: Record, settings: Record) -> Layer:
    unit = unit_named(described["unit"])
    layout = Layout.of(unit, settings["alphas"], settings["draws"])
    mine = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{index}.")}
    geometry = {key.partition(".")[2]: value for key, value in mine.items() if key.startswith("geometry.")}
    moments = Moments.from_tensors(layout, mine)
    antisymmetry = mine["interaction_antisymmetry"].item()
    gain, experts = described["norm_gain"], mine.get("experts")
    if experts is not None and (not expert_slices(experts) or len(experts) != moments.d_mlp):
        raise ValueError(f"experts are given for {len(experts)} of {moments.d_mlp} neurons")
    written = {key.partition(".")[2]: value for key, value in mine.items() if key.startswith("output.")}
    output = OutputMoments.from_tensors(unit, written) if written else None
    return Layer(unit, moments, Geometry(**geometry), gain, antisymmetry, mine["partners"], experts, output)
