"""One neuron of a model, looked at closely: one pass over the text up to its layer, and its weights.

    inspect_neuron(model, model.read(), "11:1229")
    inspect_neuron(mixture, mixture.read(), "11:5:1229")       of expert 5; of a shared expert, "11:shared:1229"

Which tokens are sampled and which contexts are kept depends on the text alone, not on the batch. Windows are read one at a
time unless more are asked for: a matrix product over a larger batch rounds its last digits in another way, and one window
at a time is no slower on a CPU.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from analysis.errors import UserError
from analysis.neuron import NeuronRecord, NeuronSample, by_quadrant
from analysis.run import Layer, Run
from analysis.sums.batch import Batch
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
from analysis.weights.experts import SHARED, expert_name
from analysis.weights.readouts import Readout, Similar, cosines, ends, excitation, nearest, pair_cosines, promoted
from hooks.collect import machine_of, select_layers, settings_of
from hooks.corpus import Corpus
from hooks.locating.ends import find_ends
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.models import LoadedModel
from hooks.reading.accumulators import accumulator_of, geometry_of_layer
from hooks.reading.batches import ActivationAccumulator, read_through

DEFAULT_TOP = 8
"""Contexts of each sign pair, tokens at each end of a read-out, like neurons of the same layer and of others."""
MAX_TOP = 100


class Place(NamedTuple):
    """Layer, expert (None in a dense layer) and number of a neuron there."""

    layer: int
    expert: int | None
    neuron: int


def parse_neuron(text: str) -> Place:
    """'11:1229' as layer and index, '11:5:1229' as layer, expert and index, all from 0; the expert may be 'shared'."""
    layer, *between, index = text.split(":") if ":" in text else ("", "")
    expert = next(iter(between), None)
    if len(between) > 1 or not all(part.isdecimal() for part in (layer, index, *(between if expert != "shared" else ()))):
        raise UserError(
            f"{text!r} is no neuron: write LAYER:INDEX, both from 0, like 11:1229, or LAYER:EXPERT:INDEX for an expert's"
        )
    return Place(int(layer), None if expert is None else SHARED if expert == "shared" else int(expert), int(index))


def inspect_neuron(
    model: LoadedModel,
    corpus: Corpus,
    neuron: str | tuple[int, int] | Place,
    *,
    top: int = DEFAULT_TOP,
    run: str | Path | None = None,
    batch_size: int = 1,
    seed: int = 0,
    quiet: bool = False,
) -> NeuronRecord:
    """Everything about one neuron.

    Args:
        model: from ``load_model``.
        corpus: from ``model.read()``.
        neuron: LAYER:INDEX or LAYER:EXPERT:INDEX, or the two numbers, or a place.
        top: contexts of each sign pair, and entries of every list.
        run: directory of a run of this model to take the layer's numbers from; None measures the layer on this very text.
        batch_size: windows in one forward pass; changes time and memory, not results.
        seed: of the re-pairings, where the layer is measured.
        quiet: no progress bar.

    Raises:
        UserError: there is no such neuron, its layer is no site or couples its neurons, the run is not of this model, or
            something overflowed.
    """
    place = parse_neuron(neuron) if isinstance(neuron, str) else neuron
    place = place if isinstance(place, Place) else Place(place[0], None, place[1])
    whole_layer = select_layers(model, [place.layer])[place.layer]
    site, first = _site_of(whole_layer, place)
    if batch_size < 1:
        raise UserError(f"a batch of {batch_size} windows cannot be read: use at least 1")
    if not 1 <= top <= MAX_TOP:
        raise UserError(f"a list of {top} cannot be shown: choose from 1 to {MAX_TOP}")
    loaded = None if run is None else Run.load(run)
    saved = None if loaded is None else _layer_in(loaded, model, whole_layer, str(run))
    index, column = place.neuron, first + place.neuron
    close = _neuron_accumulator(whole_layer, site, index, top)
    whole = None if saved else accumulator_of(whole_layer, DEFAULT_ALPHAS, DEFAULT_DRAWS, seed + place.layer)
    read_through(model, corpus, [close] if whole is None else [close, whole], batch_size=batch_size, quiet=quiet)
    measured = saved or whole.result()  # type: ignore[union-attr]
    readouts, output_gain = _readouts(model, site, index, top)
    settings = settings_of(model, corpus, DEFAULT_ALPHAS, DEFAULT_DRAWS, seed) if loaded is None else loaded.settings
    return NeuronRecord(
        layer=place.layer,
        neuron=column,
        expert=site.expert,
        index=index,
        measured=measured,
        sample=close.seen.pairs.values,
        contexts=by_quadrant(close.seen, site.unit, _texts(model, corpus, close.seen)),
        n_tokens=close.seen.n_tokens,
        readouts=readouts,
        output_gain=output_gain,
        similar=_similar(model, site, index, top),
        peak_text=_token(model, int(measured.moments.peaks.places[2, column])),
        model=model.description,
        settings=settings,
        corpus=corpus.description,
        run=None if run is None else str(run),
        same_text=loaded is None or torch.equal(loaded.windows.sort().values, corpus.window_keys.sort().values),
        record=machine_of(model),
    )


class NeuronAccumulator(ActivationAccumulator):
    """One neuron as it is read: only its own a and b are kept."""

    def __init__(self, layer: Site | Mixture, site: Site, neuron: int, size: int) -> None:
        super().__init__(layer)
        self.seen = NeuronSample.empty(size)
        self._site, self._neuron, self._size = site, neuron, size
        self._finite = True

    @property
    def is_finite(self) -> Bool[Tensor, ""]:
        return torch.tensor(self._finite)

    def keep(self, captured: Float[Tensor, "*place d_mlp"]) -> Float[Tensor, "*place"]:
        return captured[..., self._neuron].double().cpu()

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        a, b = (captured.pop(symbol).reshape(len(batch.windows), -1) for symbol in "ab")
        self._take(a, b, torch.ones_like(a, dtype=torch.bool), batch)

    def _take(
        self,
        a: Float[Tensor, "batch pos"],
        b: Float[Tensor, "batch pos"],
        there: Bool[Tensor, "batch pos"],
        batch: Batch,
    ) -> None:
        """Take in a and b, NaN at tokens that do not reach the neuron."""
        for row, window in enumerate(batch.windows):
            length = len(window.tokens)
            mine_a, mine_b, mine = a[row, :length], b[row, :length], there[row, :length]
            self._finite &= bool(mine_a[mine].isfinite().all() and mine_b[mine].isfinite().all())
            self.seen += NeuronSample.of(mine_a, mine_b, self._site.unit, window, self._size)


class ExpertNeuronAccumulator(NeuronAccumulator):
    """One neuron of an expert, at the tokens that are sent to it."""

    def keep(self, captured: Any) -> Any:
        if not isinstance(captured, Routing):
            return None
        site, own = self._site, slice(self._neuron, self._neuron + 1)
        row, _ = captured.by_expert(int(site.expert or 0) + 1)[-1]
        pairs = zip(site.weights.matrices[:2], site.weights.biases[:2], strict=True)
        a, b = (
            linear(captured.x[row], weight[own], None if bias is None else bias[own])[:, 0].double().cpu()
            for weight, bias in pairs
        )
        return captured.place[row].cpu(), a, b

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        place, a, b = captured.pop("routing")
        shape = len(batch.windows), max(len(window.tokens) for window in batch.windows)
        whole = torch.full((2, shape[0] * shape[1]), torch.nan, dtype=torch.float64)
        whole[:, place] = torch.stack([a, b])
        there = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
        there[place] = True
        self._take(whole[0].view(shape), whole[1].view(shape), there.view(shape), batch)


def _neuron_accumulator(layer: Site | Mixture, site: Site, index: int, size: int) -> NeuronAccumulator:
    if site.expert is None or site.expert == SHARED:  # every token reaches it
        return NeuronAccumulator(site, site, index, size)
    return ExpertNeuronAccumulator(layer, site, index, size)


def _site_of(layer: Site | Mixture, place: Place) -> tuple[Site, int]:
    """The site of a neuron, and the first of its columns in the layer."""
    number = place.layer
    sites = (layer,) if isinstance(layer, Site) else layer.sites
    if place.expert not in [site.expert for site in sites]:
        has = "no experts" if isinstance(layer, Site) else f"experts 0-{len(layer.routed) - 1}"
        has += ", and a shared one" if isinstance(layer, Mixture) and layer.shared else ""
        wanted = "LAYER:INDEX" if isinstance(layer, Site) else "LAYER:EXPERT:INDEX"
        raise UserError(f"layer {number} has {has}: write a neuron of it as {wanted}")
    which = [site.expert for site in sites].index(place.expert)
    site, first = sites[which], 0 if isinstance(layer, Site) else layer.columns[which].start
    if not 0 <= place.neuron < site.n_neurons:
        where = f"layer {number}" if place.expert is None else f"expert {expert_name(place.expert)} of layer {number}"
        raise UserError(f"neuron {place.neuron} is out of range: {where} has neurons 0-{site.n_neurons - 1}")
    if not site.unit.is_pointwise:
        raise UserError(
            f"the gates of layer {number} hang together ({site.unit.name}): a neuron has no response to its own (a, b), "
            "find its numbers in the neurons.parquet of analyze"
        )
    return site, first


def _layer_in(run: Run, model: LoadedModel, layer: Site | Mixture, directory: str) -> Layer:
    """That layer of a saved run; UserError unless it has the same weights."""
    if layer.layer not in run.layers:
        raise UserError(f"{directory} has no layer {layer.layer}: give a run that analysed it, or none")
    found = run.layers[layer.layer]
    theirs, mine = found.geometry.tensors(), geometry_of_layer(layer).tensors()
    same = all(
        values.shape == mine[name].shape and torch.allclose(values, mine[name], rtol=1e-6, atol=1e-9, equal_nan=True)
        for name, values in theirs.items()
    )
    if not same:
        name = model.description["name"]
        raise UserError(f"{directory} is a run of {run.model['name']} with other weights than {name}: give a run of it")
    return found


def _readouts(model: LoadedModel, site: Site, index: int, top: int) -> tuple[dict[str, Readout], str]:
    """What v promotes and suppresses, and what excites q and k; with the final norm's gain in words."""
    probe = torch.arange(2, 10, device=model.device)[None]
    found = find_ends(model.hf_model, probe, model.description["d_model"])
    if found is None:
        return {}, "none: the embeddings are not as wide as the residual stream"
    values = {
        "v": promoted(site.v[index] * site.value_gain, found.unembedding, found.gain),
        "q": excitation(site.q[index], found.embedding, site.gain),
        "k": excitation(site.k[index], found.embedding, site.gain),
    }
    known = len(model.tokenizer)  # tables are often padded beyond the tokenizer's last token

    def listed(scores: Tensor, tokens: Tensor) -> tuple[tuple[str, float], ...]:
        return tuple((_token(model, token), float(scores[token])) for token in tokens.tolist())

    readouts = {}
    for name, scores in values.items():
        scores = scores[:known]
        highest, lowest = ends(scores, top)
        spread = float(scores.std(correction=0))
        readouts[name] = Readout(listed(scores, highest), listed(scores, lowest), spread, len(scores))
    return readouts, found.gain_source


def _similar(model: LoadedModel, site: Site, index: int, top: int) -> dict[str, tuple[Similar, ...]]:
    """The most like neurons of its own layer, then those of the others, by value and by query and key."""
    v, q, k = site.v[index] * site.value_gain, site.q[index] * site.gain, site.k[index] * site.gain
    found: dict[str, list[Similar]] = {"v": [], "qk": []}
    for other in (*model.sites.values(), *(expert for mixture in model.mixtures.values() for expert in mixture.sites)):
        queries, keys, values = other.weights.matrices
        by_value = cosines(v, values * other.value_gain)
        by_pair, exchanged = pair_cosines(q, k, queries * other.gain, keys * other.gain)
        if other is site:
            by_value[index] = by_pair[index] = torch.nan  # it is like itself
        found["v"] += nearest(other.layer, by_value, None, top, other.expert)
        found["qk"] += nearest(other.layer, by_pair, exchanged, top, other.expert)
    return {name: _own_then_others(every, site.layer, top) for name, every in found.items()}


def _own_then_others(found: list[Similar], layer: int, count: int) -> tuple[Similar, ...]:
    by_size = sorted(found, key=lambda neuron: -abs(neuron.cosine))
    own, others = ([neuron for neuron in by_size if (neuron.layer == layer) == same][:count] for same in (True, False))
    return (*own, *others)


def _texts(model: LoadedModel, corpus: Corpus, seen: NeuronSample) -> dict[int, tuple[str, ...]]:
    """The texts of all tokens of the windows that hold a context."""
    named = {window for strongest in seen.strongest for window in strongest.places[0].tolist()}
    windows = (window for window in corpus.windows if window.index in named)
    return {window.index: tuple(_token(model, token) for token in window.tokens.tolist()) for window in windows}


def _token(model: LoadedModel, token: int) -> str:
    """A token as text; its number where it has none."""
    return model.tokenizer.decode([token]) or f"⟨{token}⟩"
