"""One neuron of a model, looked at closely: one pass over the text up to its layer, and its weights.

    inspect_neuron(model, model.read(), "11:1229")

Which tokens are sampled and which contexts are kept depends on the text alone, not on the batch. Windows are read one at a
time unless more are asked for: a matrix product over a larger batch rounds its last digits in another way, and one window
at a time is no slower on a CPU.
"""

from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.errors import UserError
from analysis.geometry import Geometry
from analysis.neuron import NeuronRecord, Seen, by_quadrant
from analysis.readouts import Readout, Similar, cosines, ends, excitation, nearest, pair_cosines, promoted
from analysis.run import Layer, Run
from analysis.sums import DEFAULT_ALPHAS, DEFAULT_DRAWS
from analysis.window import Batch
from hooks.collect import LayerStream, machine_of, select_sites, settings_of
from hooks.corpus import Corpus
from hooks.models import LoadedModel
from hooks.reading import Stream, read_through
from hooks.sites import Site, find_ends

DEFAULT_TOP = 8
"""Contexts of each sign pair, tokens at each end of a read-out, like neurons of the same layer and of others."""
MAX_TOP = 100


def parse_neuron(text: str) -> tuple[int, int]:
    """'11:1229' as layer and index."""
    layer, colon, neuron = text.partition(":")
    if not (colon and layer.isdecimal() and neuron.isdecimal()):
        raise UserError(f"{text!r} is no neuron: write LAYER:INDEX, both from 0, like 11:1229")
    return int(layer), int(neuron)


def inspect_neuron(
    model: LoadedModel,
    corpus: Corpus,
    neuron: str | tuple[int, int],
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
        neuron: LAYER:INDEX, or the two numbers.
        top: contexts of each sign pair, and entries of every list.
        run: directory of a run of this model to take the layer's numbers from; None measures the layer on this very text.
        batch_size: windows in one forward pass; changes time and memory, not results.
        seed: of the re-pairings, where the layer is measured.
        quiet: no progress bar.

    Raises:
        UserError: there is no such neuron, its layer is no site or couples its neurons, the run is not of this model, or
            something overflowed.
    """
    layer, index = parse_neuron(neuron) if isinstance(neuron, str) else neuron
    site = _site_of(model, layer, index)
    if batch_size < 1:
        raise UserError(f"a batch of {batch_size} windows cannot be read: use at least 1")
    if not 1 <= top <= MAX_TOP:
        raise UserError(f"a list of {top} cannot be shown: choose from 1 to {MAX_TOP}")
    loaded = None if run is None else Run.load(run)
    saved = None if loaded is None else _layer_in(loaded, model, site, str(run))
    close = NeuronStream(site, index, top)
    whole = None if saved else LayerStream.of(site, corpus, DEFAULT_ALPHAS, DEFAULT_DRAWS, seed + layer)
    read_through(model, corpus, [close] if whole is None else [close, whole], batch_size=batch_size, quiet=quiet)
    measured = saved or whole.found()  # type: ignore[union-attr]
    readouts, output_gain = _readouts(model, site, index, top)
    settings = settings_of(model, corpus, DEFAULT_ALPHAS, DEFAULT_DRAWS, seed) if loaded is None else loaded.settings
    return NeuronRecord(
        layer=layer,
        neuron=index,
        measured=measured,
        sample=close.seen.sample.values,
        contexts=by_quadrant(close.seen, site.unit, _texts(model, corpus, close.seen)),
        n_tokens=close.seen.n_tokens,
        readouts=readouts,
        output_gain=output_gain,
        similar=_similar(model, site, index, top),
        peak_text=_token(model, int(measured.moments.peaks.places[2, index])),
        model=model.description,
        settings=settings,
        corpus=corpus.description,
        run=None if run is None else str(run),
        same_text=loaded is None or torch.equal(loaded.windows.sort().values, corpus.window_keys.sort().values),
        record=machine_of(model),
    )


class NeuronStream(Stream):
    """One neuron as it is read: only its own a and b are kept."""

    def __init__(self, site: Site, neuron: int, size: int) -> None:
        super().__init__(site)
        self.seen = Seen.empty(size)
        self._neuron, self._size = neuron, size
        self._finite = True

    @property
    def is_finite(self) -> Bool[Tensor, ""]:
        return torch.tensor(self._finite)

    def keep(self, tensor: Float[Tensor, "batch pos d_mlp"]) -> Float[Tensor, "batch pos"]:
        return tensor[:, :, self._neuron].double().cpu()

    def take(self, a: Float[Tensor, "batch pos"], b: Float[Tensor, "batch pos"], batch: Batch) -> None:
        for row, window in enumerate(batch.windows):
            length = len(window.tokens)
            mine_a, mine_b = a[row, :length], b[row, :length]
            self._finite &= bool(mine_a.isfinite().all() and mine_b.isfinite().all())
            self.seen += Seen.of(mine_a, mine_b, self._site.unit, window, self._size)


def _site_of(model: LoadedModel, layer: int, index: int) -> Site:
    site = select_sites(model, [layer])[layer]
    d_mlp = site.q.shape[0]
    if not 0 <= index < d_mlp:
        raise UserError(f"neuron {index} is out of range: layer {layer} has neurons 0-{d_mlp - 1}")
    if not site.unit.is_pointwise:
        raise UserError(
            f"the gates of layer {layer} hang together ({site.unit.name}): a neuron has no response to its own (a, b), "
            "find its numbers in the neurons.parquet of analyze"
        )
    return site


def _layer_in(run: Run, model: LoadedModel, site: Site, directory: str) -> Layer:
    """That layer of a saved run; UserError unless it has the same weights."""
    if site.layer not in run.layers:
        raise UserError(f"{directory} has no layer {site.layer}: give a run that analysed it, or none")
    found = run.layers[site.layer]
    theirs, mine = found.geometry.tensors(), Geometry.of(site.q, site.k, site.v, site.gain).tensors()
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
    found = find_ends(model.bridge, probe, model.description["d_model"])
    if found is None:
        return {}, "none: the embeddings are not as wide as the residual stream"
    values = {
        "v": promoted(site.v[index], found.unembedding, found.gain),
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
    v, q, k = site.v[index], site.q[index] * site.gain, site.k[index] * site.gain
    found: dict[str, list[Similar]] = {"v": [], "qk": []}
    for layer, other in model.sites.items():
        by_value = cosines(v, other.v)
        by_pair, exchanged = pair_cosines(q, k, other.q * other.gain, other.k * other.gain)
        if layer == site.layer:
            by_value[index] = by_pair[index] = torch.nan  # it is like itself
        found["v"] += nearest(layer, by_value, None, top)
        found["qk"] += nearest(layer, by_pair, exchanged, top)
    return {name: _own_then_others(every, site.layer, top) for name, every in found.items()}


def _own_then_others(found: list[Similar], layer: int, count: int) -> tuple[Similar, ...]:
    by_size = sorted(found, key=lambda neuron: -abs(neuron.cosine))
    own, others = ([neuron for neuron in by_size if (neuron.layer == layer) == same][:count] for same in (True, False))
    return (*own, *others)


def _texts(model: LoadedModel, corpus: Corpus, seen: Seen) -> dict[int, tuple[str, ...]]:
    """The texts of all tokens of the windows that hold a context."""
    named = {window for strongest in seen.strongest for window in strongest.places[0].tolist()}
    windows = (window for window in corpus.windows if window.index in named)
    return {window.index: tuple(_token(model, token) for token in window.tokens.tolist()) for window in windows}


def _token(model: LoadedModel, token: int) -> str:
    """A token as text; its number where it has none."""
    return model.tokenizer.decode([token]) or f"⟨{token}⟩"
