"""One neuron in detail: a sample of its (a, b), the contexts with the largest |h|, and what its vectors read and write.

A pass over the text results in a ``NeuronSample``: immutable, and a monoid under ``+``, so that the result does not depend
on the grouping or order of the windows. Of the activations only these are kept:

    pairs        (a, b) of at most ``SAMPLED`` counted tokens, those with the smallest hash of their place, so that the
                 choice does not depend on the order in which tokens are read
    strongest    for each sign pair of (a, b), the k counted tokens of largest |h|, with a and b of the tokens around

A ``NeuronRecord`` holds these with texts and provenance, beside the moments of the neuron's whole layer. Its numbers come
from sums over all counted tokens; the sampled pairs are only plotted.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from analysis.noise import mixed
from analysis.run import Layer
from analysis.sums.batch import Window
from analysis.sums.extremes import largest_first, reading_order
from analysis.sums.layout import QUADRANTS
from analysis.units.registry import Unit
from analysis.weights.experts import neuron_name
from analysis.weights.readouts import Readout, Similar

SAMPLED = 1000
"""Sampled tokens: enough to show the shape of the distribution in a plot, few enough for a small page."""
BEFORE, AFTER = 20, 8
"""Tokens of a context before and after the token it is shown for."""


@dataclass(frozen=True)
class SampledPairs:
    """(a, b) of the counted tokens with the smallest keys, at most ``SAMPLED``, in the order of their keys.

    Attributes:
        keys: a hash of each token's window and position; different places have different keys.
        values: a and b.
    """

    keys: Int64[Tensor, " token"]
    values: Float64[Tensor, "2 token"]

    @classmethod
    def empty(cls) -> "SampledPairs":
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.float64))

    @classmethod
    def of(cls, values: Float64[Tensor, "2 token"], places: Int64[Tensor, "2 token"]) -> "SampledPairs":
        """From the counted tokens of a window, given their a and b, and their window and position."""
        return cls(_key(places), values)._cut()

    def __add__(self, other: "SampledPairs") -> "SampledPairs":
        return SampledPairs(torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values], dim=1))._cut()

    def _cut(self) -> "SampledPairs":
        kept = self.keys.argsort()[:SAMPLED]
        return SampledPairs(self.keys[kept], self.values[:, kept])


@dataclass(frozen=True)
class Strongest:
    """The counted tokens of largest |h| within one sign pair of (a, b), largest first, at most ``size``.

    Attributes:
        size: the number of tokens kept.
        h: their h.
        places: their window and position.
        around: a and b from ``BEFORE`` tokens before each to ``AFTER`` tokens after it; NaN outside the window.
    """

    size: int
    h: Float64[Tensor, " place"]
    places: Int64[Tensor, "2 place"]
    around: Float64[Tensor, "2 near place"]

    @classmethod
    def empty(cls, size: int) -> "Strongest":
        nothing = torch.zeros(0, dtype=torch.float64)
        return cls(size, nothing, torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, BEFORE + 1 + AFTER, 0).double())

    @classmethod
    def of(
        cls,
        size: int,
        h: Float64[Tensor, " chosen"],
        places: Int64[Tensor, "2 chosen"],
        whole: Float64[Tensor, "2 pos"],
    ) -> "Strongest":
        """From some tokens of one window, given a and b at all of its positions; tokens with h = 0 are left out."""
        active = h != 0
        kept = largest_first(h[active].abs(), places[:, active])[:size]
        h, places = h[active][kept], places[:, active][:, kept]
        padded = torch.nn.functional.pad(whole, (BEFORE, AFTER), value=torch.nan)
        near = places[1] + torch.arange(BEFORE + 1 + AFTER)[:, None]
        return cls(size, h, places, padded[:, near])

    def __add__(self, other: "Strongest") -> "Strongest":
        """The largest of both; of equal ones the earlier in reading order."""
        h, places = torch.cat([self.h, other.h]), torch.cat([self.places, other.places], dim=1)
        kept = largest_first(h.abs(), places)[: self.size]
        around = torch.cat([self.around, other.around], dim=2)
        return Strongest(self.size, h[kept], places[:, kept], around[:, :, kept])


@dataclass(frozen=True)
class NeuronSample:
    """What is kept of one neuron's activations in some windows.

    Attributes:
        pairs: a random sample of (a, b).
        strongest: the counted tokens of largest |h| in each sign pair, in the order of ``QUADRANTS``.
        n_tokens: number of counted tokens.
    """

    pairs: SampledPairs
    strongest: tuple[Strongest, Strongest, Strongest, Strongest]
    n_tokens: int

    @classmethod
    def empty(cls, size: int) -> "NeuronSample":
        nothing = Strongest.empty(size)
        return cls(SampledPairs.empty(), (nothing, nothing, nothing, nothing), 0)

    @classmethod
    def of(
        cls, a: Float[Tensor, " pos"], b: Float[Tensor, " pos"], unit: Unit, window: Window, size: int
    ) -> "NeuronSample":
        """From one window: a and b at all of its positions, NaN for tokens that were not routed to the neuron's expert.

        ``size`` contexts are kept for each sign pair.
        """
        whole = torch.stack([a, b]).double().cpu()
        position = torch.arange(window.counted_from, len(a))
        position = position[~whole[0, position].isnan()]
        values = whole[:, position]
        places = torch.stack([torch.full_like(position, window.index), position])
        h, gate, up = unit(values[0], values[1]), values[0] > 0, values[1] > 0
        pp, pn, np, nn = (
            Strongest.of(size, h[mask], places[:, mask], whole)
            for mask in (gate & up, gate & ~up, ~gate & up, ~(gate | up))
        )
        return cls(SampledPairs.of(values, places), (pp, pn, np, nn), len(position))

    def __add__(self, other: "NeuronSample") -> "NeuronSample":
        pp, pn, np, nn = (mine + theirs for mine, theirs in zip(self.strongest, other.strongest, strict=True))
        return NeuronSample(self.pairs + other.pairs, (pp, pn, np, nn), self.n_tokens + other.n_tokens)


@dataclass(frozen=True)
class Context:
    """The text around a token on which the neuron's |h| was large.

    Attributes:
        window, position: place of that token in the corpus.
        texts: the tokens of the context.
        focus: index of that token among them.
        a, b, h: on each of them.
    """

    window: int
    position: int
    texts: tuple[str, ...]
    focus: int
    a: Float64[Tensor, " near"]
    b: Float64[Tensor, " near"]
    h: Float64[Tensor, " near"]


@dataclass(frozen=True)
class NeuronRecord:
    """Everything reported about one neuron.

    Attributes:
        layer, neuron: its layer, and its index in the layer, counted over all experts.
        measured: moments and geometry of the whole layer.
        sample: a and b of a sample of the counted tokens.
        contexts: those of largest |h| in each sign pair, by the names in ``QUADRANTS``, largest first.
        n_tokens: number of counted tokens from which sample and contexts were chosen.
        readouts: the vectors projected onto the vocabulary: ``v`` through the unembedding, ``q`` and ``k`` through the
            embedding; empty if the model's embeddings do not have the width of the residual stream.
        output_gain: in words, the gain of the final norm that was folded into the projection of v.
        similar: neurons with a similar value (``v``), and with similar query and key (``qk``), most similar first.
        peak_text: the token with the largest |h| among all tokens fed to the model.
        model, settings, corpus: provenance, as in a ``Run``.
        run: the directory of the run that the layer's numbers come from; None if they were measured on this text.
        same_text: whether that run counted the same windows.
        record: machine and versions.
        expert, index: its expert and its index within it, None in a dense layer; expert −1 is the shared one.
    """

    layer: int
    neuron: int
    measured: Layer
    sample: Float64[Tensor, "2 token"]
    contexts: dict[str, tuple[Context, ...]]
    n_tokens: int
    readouts: dict[str, Readout]
    output_gain: str
    similar: dict[str, tuple[Similar, ...]]
    peak_text: str
    model: dict[str, Any]
    settings: dict[str, Any]
    corpus: dict[str, Any]
    run: str | None = None
    same_text: bool = True
    record: dict[str, Any] = field(default_factory=dict)
    expert: int | None = None
    index: int | None = None

    @property
    def name(self) -> str:
        """LAYER:INDEX or LAYER:EXPERT:INDEX, as on the command line."""
        index = self.neuron if self.index is None else self.index
        return f"{self.layer}:{neuron_name({'neuron': index, 'expert': self.expert})}"


def contexts_of(strongest: Strongest, unit: Unit, windows: dict[int, tuple[str, ...]]) -> tuple[Context, ...]:
    """The strongest tokens with the text around them; ``windows`` has the token texts of each of their windows."""
    found = []
    for place, (window, position) in enumerate(strongest.places.T.tolist()):
        first = max(0, position - BEFORE)
        texts = windows[window][first : position + AFTER + 1]
        begin = first - (position - BEFORE)
        a, b = strongest.around[:, begin : begin + len(texts), place]
        found.append(Context(window, position, texts, position - first, a, b, unit(a, b)))
    return tuple(found)


def by_quadrant(sample: NeuronSample, unit: Unit, windows: dict[int, tuple[str, ...]]) -> dict[str, tuple[Context, ...]]:
    """The contexts of every sign pair."""
    pairs = zip(QUADRANTS, sample.strongest, strict=True)
    return {quadrant: contexts_of(strongest, unit, windows) for quadrant, strongest in pairs}


def _key(places: Int64[Tensor, "2 token"]) -> Int64[Tensor, " token"]:
    """A hash of each place, different for different places."""
    return mixed(reading_order(places) + 1)
