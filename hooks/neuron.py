"""One neuron of a model in detail: its activations in one pass over a text up to its layer, and its weights.

    inspect_neuron(model, model.read(), "11:1229")
    inspect_neuron(mixture, mixture.read(), "11:5:1229")       of expert 5; of a shared expert, "11:shared:1229"

The sampled tokens and the contexts depend on the text alone, not on batches. By default one window is read at a time: a
matrix product over a larger batch differs in its last digits, and single windows are no slower on a CPU.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.errors import UserError
from analysis.neuron import NeuronRecord, NeuronSample, by_quadrant
from analysis.run import Layer, Run
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
from analysis.weights.experts import SHARED, expert_name
from analysis.weights.readouts import Readout, Similar, cosines, ends, excitation, nearest, pair_cosines, promoted
from hooks.collect import machine_of, select_layers, settings_of
from hooks.corpus import Corpus
from hooks.locating.ends import find_ends
from hooks.locating.sites import Mixture, Site
from hooks.models import LoadedModel
from hooks.reading.accumulators import accumulator_of, geometry_of_layer
from hooks.reading.batches import ActivationAccumulator, read_through
from hooks.reading.neuron_accumulators import neuron_accumulator

DEFAULT_TOP = 8
"""Contexts per sign pair, tokens at each end of a readout, similar neurons of the same layer and of others."""
MAX_TOP = 100


class NeuronAddress(NamedTuple):
    """A neuron's layer, its expert (None in a dense layer), and its index there; all from 0."""

    layer: int
    expert: int | None
    neuron: int


def parse_neuron(text: str) -> NeuronAddress:
    """The neuron of '11:1229' (layer and index) or '11:5:1229' (layer, expert and index); the expert may be 'shared'.

    Raises:
        UserError: the text has another form.
    """
    layer, *between, index = text.split(":") if ":" in text else ("", "")
    expert = next(iter(between), None)
    if len(between) > 1 or not all(part.isdecimal() for part in (layer, index, *(between if expert != "shared" else ()))):
        raise UserError(
            f"{text!r} is not a neuron: write LAYER:INDEX, both from 0, like 11:1229, or LAYER:EXPERT:INDEX for an expert's"
        )
    return NeuronAddress(int(layer), None if expert is None else SHARED if expert == "shared" else int(expert), int(index))


def inspect_neuron(
    model: LoadedModel,
    corpus: Corpus,
    neuron: str | tuple[int, int] | NeuronAddress,
    *,
    top: int = DEFAULT_TOP,
    run: str | Path | None = None,
    batch_size: int = 1,
    seed: int = 0,
    quiet: bool = False,
) -> NeuronRecord:
    """Measure one neuron.

    Args:
        model: from ``load_model``.
        corpus: from ``model.read()``.
        neuron: LAYER:INDEX or LAYER:EXPERT:INDEX as text, the two numbers, or an address.
        top: contexts per sign pair, and entries of every list.
        run: directory of a run of this model, whose numbers of the layer are used; None measures the layer on this text.
        batch_size: windows in one forward pass; changes time and memory, not results.
        seed: of the permutation null, if the layer is measured.
        quiet: no progress bar.

    Raises:
        UserError: the neuron does not exist, its layer has no gated MLP or couples its neurons, the run belongs to another
            model, or activations are NaN or infinite.
    """
    address = parse_neuron(neuron) if isinstance(neuron, str) else neuron
    address = address if isinstance(address, NeuronAddress) else NeuronAddress(address[0], None, address[1])
    layer = select_layers(model, [address.layer])[address.layer]
    site, first = _site_of(layer, address)
    if batch_size < 1:
        raise UserError(f"a batch of {batch_size} windows cannot be read: use at least 1")
    if not 1 <= top <= MAX_TOP:
        raise UserError(f"a list of {top} cannot be shown: choose from 1 to {MAX_TOP}")
    loaded = None if run is None else Run.load(run)
    saved = None if loaded is None else _layer_in(loaded, model, layer, str(run))
    index, column = address.neuron, first + address.neuron
    accumulators: list[ActivationAccumulator] = [of_neuron := neuron_accumulator(layer, site, index, top)]
    if saved is None:
        accumulators.append(of_layer := accumulator_of(layer, DEFAULT_ALPHAS, DEFAULT_DRAWS, seed + address.layer))
    read_through(model, corpus, accumulators, batch_size=batch_size, quiet=quiet)
    measured, seen = saved or of_layer.result(), of_neuron.seen
    readouts, output_gain = _readouts(model, site, index, top)
    return NeuronRecord(  # half of this function is the list of its fields
        layer=address.layer,
        neuron=column,
        expert=site.expert,
        index=index,
        measured=measured,
        sample=seen.pairs.values,
        contexts=by_quadrant(seen, site.unit, _texts(model, corpus, seen)),
        n_tokens=seen.n_tokens,
        readouts=readouts,
        output_gain=output_gain,
        similar=_similar(model, site, index, top),
        peak_text=_token(model, int(measured.moments.peaks.places[2, column])),
        model=model.description,
        settings=loaded.settings if loaded else settings_of(model, corpus, DEFAULT_ALPHAS, DEFAULT_DRAWS, seed),
        corpus=corpus.description,
        run=None if run is None else str(run),
        same_text=loaded is None or torch.equal(loaded.windows.sort().values, corpus.window_keys.sort().values),
        record=machine_of(model),
    )


def _site_of(layer: Site | Mixture, address: NeuronAddress) -> tuple[Site, int]:
    """The site of a neuron, and the first of the site's columns in the layer."""
    number = address.layer
    sites = (layer,) if isinstance(layer, Site) else layer.sites
    if address.expert not in [site.expert for site in sites]:
        has = "no experts" if isinstance(layer, Site) else f"experts 0-{len(layer.routed) - 1}"
        has += ", and a shared one" if isinstance(layer, Mixture) and layer.shared else ""
        wanted = "LAYER:INDEX" if isinstance(layer, Site) else "LAYER:EXPERT:INDEX"
        raise UserError(f"layer {number} has {has}: write a neuron of it as {wanted}")
    which = [site.expert for site in sites].index(address.expert)
    site, first = sites[which], 0 if isinstance(layer, Site) else layer.columns[which].start
    if not 0 <= address.neuron < site.n_neurons:
        owner = f"layer {number}" if address.expert is None else f"expert {expert_name(address.expert)} of layer {number}"
        raise UserError(f"neuron {address.neuron} is out of range: {owner} has neurons 0-{site.n_neurons - 1}")
    if not site.unit.is_pointwise:
        raise UserError(
            f"the gates of layer {number} hang together ({site.unit.name}): a neuron has no response to its own (a, b), "
            "find its numbers in the neurons.parquet of analyze"
        )
    return site, first


def _layer_in(run: Run, model: LoadedModel, layer: Site | Mixture, directory: str) -> Layer:
    """The same layer in a saved run; UserError unless it has the same weights."""
    if layer.layer not in run.layers:
        raise UserError(f"{directory} has no layer {layer.layer}: give a run that analysed it, or none")
    stored = run.layers[layer.layer]
    theirs, mine = stored.geometry.tensors(), geometry_of_layer(layer).tensors()
    same = all(
        values.shape == mine[name].shape and torch.allclose(values, mine[name], rtol=1e-6, atol=1e-9, equal_nan=True)
        for name, values in theirs.items()
    )
    if not same:
        name = model.description["name"]
        raise UserError(f"{directory} is a run of {run.model['name']} with other weights than {name}: give a run of it")
    return stored


def _readouts(model: LoadedModel, site: Site, index: int, top: int) -> tuple[dict[str, Readout], str]:
    """The tokens that v promotes and suppresses, and those that excite q and k; and the final norm's gain in words."""
    probe = torch.arange(2, 10, device=model.device)[None]
    tables = find_ends(model.hf_model, probe, model.description["d_model"])
    if tables is None:
        return {}, "none: the embeddings are not as wide as the residual stream"
    values = {
        "v": promoted(site.v[index] * site.value_gain, tables.unembedding, tables.gain),
        "q": excitation(site.q[index], tables.embedding, site.gain),
        "k": excitation(site.k[index], tables.embedding, site.gain),
    }
    known = len(model.tokenizer)  # tables are often padded beyond the tokenizer's last token

    def listed(scores: Tensor, tokens: Tensor) -> tuple[tuple[str, float], ...]:
        return tuple((_token(model, token), float(scores[token])) for token in tokens.tolist())

    readouts = {}
    for name, scores in values.items():
        scores = scores[:known]
        highest, lowest = ends(scores, top)
        deviation = float(scores.std(correction=0))
        readouts[name] = Readout(listed(scores, highest), listed(scores, lowest), deviation, len(scores))
    return readouts, tables.gain_source


def _similar(model: LoadedModel, site: Site, index: int, top: int) -> dict[str, tuple[Similar, ...]]:
    """The most similar neurons of its own layer, then those of other layers, by value and by query and key."""
    v, q, k = site.v[index] * site.value_gain, site.q[index] * site.gain, site.k[index] * site.gain
    neurons: dict[str, list[Similar]] = {"v": [], "qk": []}
    for other in (*model.sites.values(), *(expert for mixture in model.mixtures.values() for expert in mixture.sites)):
        queries, keys, values = other.weights.matrices
        by_value = cosines(v, values * other.value_gain)
        by_pair, exchanged = pair_cosines(q, k, queries * other.gain, keys * other.gain)
        if other is site:
            by_value[index] = by_pair[index] = torch.nan  # the neuron itself
        neurons["v"] += nearest(other.layer, by_value, None, top, other.expert)
        neurons["qk"] += nearest(other.layer, by_pair, exchanged, top, other.expert)
    return {name: _own_then_others(similar, site.layer, top) for name, similar in neurons.items()}


def _own_then_others(neurons: list[Similar], layer: int, count: int) -> tuple[Similar, ...]:
    by_size = sorted(neurons, key=lambda neuron: -abs(neuron.cosine))
    own, others = ([neuron for neuron in by_size if (neuron.layer == layer) == same][:count] for same in (True, False))
    return (*own, *others)


def _texts(model: LoadedModel, corpus: Corpus, seen: NeuronSample) -> dict[int, tuple[str, ...]]:
    """The texts of all tokens of the windows that contain a context, by window."""
    with_context = {window for strongest in seen.strongest for window in strongest.places[0].tolist()}
    windows = (window for window in corpus.windows if window.index in with_context)
    return {window.index: tuple(_token(model, token) for token in window.tokens.tolist()) for window in windows}


def _token(model: LoadedModel, token: int) -> str:
    """A token as text; its number if it decodes to nothing."""
    return model.tokenizer.decode([token]) or f"⟨{token}⟩"
