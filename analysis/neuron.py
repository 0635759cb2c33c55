"""One neuron, looked at closely: a sample of its (a, b), its strongest contexts, what its vectors read and write.

What a pass over the text leaves is a ``Seen``: immutable, and a monoid under ``+``, so that any grouping of the windows, in
any order, gives the same. No activations are kept:

    sample       the (a, b) of at most ``SAMPLED`` counted tokens, those whose place has the smallest hash: where a token is
                 decides, not when it was read
    strongest    for every sign pair of (a, b), the k counted tokens of largest |h|, with a and b of the tokens around

A ``NeuronRecord`` is that in words and numbers, beside the moments of the neuron's whole layer. Its numbers are exact sums
over all counted tokens; the sample is for looking at only.
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
"""Tokens in the sample: a picture of them is dense enough to see a shape and small enough to be sent."""
BEFORE, AFTER = 20, 8
"""Tokens of a context before and after the one it is about."""


@dataclass(frozen=True)
class Sample:
    """The counted tokens with the smallest keys, at most ``SAMPLED``, in the order of their keys.

    Attributes:
        keys: a number made from the token's window and position; different places have different keys.
        values: a and b there.
    """

    keys: Int64[Tensor, " token"]
    values: Float64[Tensor, "2 token"]

    @classmethod
    def empty(cls) -> "Sample":
        return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.float64))

    @classmethod
    def of(cls, values: Float64[Tensor, "2 token"], places: Int64[Tensor, "2 token"]) -> "Sample":
        """Of the counted tokens of a window, given their a and b and their window and position."""
        return cls(_key(places), values)._cut()

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values], dim=1))._cut()

    def _cut(self) -> "Sample":
        kept = self.keys.argsort()[:SAMPLED]
        return Sample(self.keys[kept], self.values[:, kept])


@dataclass(frozen=True)
class Strongest:
    """The counted tokens of largest |h| among those of one sign pair, largest first, at most ``size``.

    Attributes:
        size: how many are kept.
        h: the unit there.
        places: window and position.
        around: a and b from ``BEFORE`` tokens before it to ``AFTER`` tokens after it; NaN beyond the window.
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
        """Of some tokens of one window, given a and b on the whole of it; a token with h = 0 is in no list."""
        active = h != 0
        kept = largest_first(h[active].abs(), places[:, active])[:size]
        h, places = h[active][kept], places[:, active][:, kept]
        padded = torch.nn.functional.pad(whole, (BEFORE, AFTER), value=torch.nan)
        near = places[1] + torch.arange(BEFORE + 1 + AFTER)[:, None]
        return cls(size, h, places, padded[:, near])

    def __add__(self, other: "Strongest") -> "Strongest":
        """The largest of both; of equal ones the earlier."""
        h, places = torch.cat([self.h, other.h]), torch.cat([self.places, other.places], dim=1)
        kept = largest_first(h.abs(), places)[: self.size]
        around = torch.cat([self.around, other.around], dim=2)
        return Strongest(self.size, h[kept], places[:, kept], around[:, :, kept])


@dataclass(frozen=True)
class Seen:
    """What a pass over some windows leaves of one neuron; ``strongest`` is in the order of ``QUADRANTS``."""

    sample: Sample
    strongest: tuple[Strongest, Strongest, Strongest, Strongest]
    n_tokens: int

    @classmethod
    def empty(cls, size: int) -> "Seen":
        nothing = Strongest.empty(size)
        return cls(Sample.empty(), (nothing, nothing, nothing, nothing), 0)

    @classmethod
    def of(cls, a: Float[Tensor, " pos"], b: Float[Tensor, " pos"], unit: Unit, window: Window, size: int) -> "Seen":
        """Of one window: a and b at all of its positions, NaN at tokens that do not reach the neuron.

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
        return cls(Sample.of(values, places), (pp, pn, np, nn), len(position))

    def __add__(self, other: "Seen") -> "Seen":
        pp, pn, np, nn = (mine + theirs for mine, theirs in zip(self.strongest, other.strongest, strict=True))
        return Seen(self.sample + other.sample, (pp, pn, np, nn), self.n_tokens + other.n_tokens)


@dataclass(frozen=True)
class Context:
    """A stretch of text around a token on which the neuron was strong.

    Attributes:
        window, position: where that token is in the corpus.
        texts: the tokens of the stretch.
        focus: which of them it is about.
        a, b, h: on every one of them.
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
    """Everything that is known about one neuron.

    Attributes:
        layer, neuron: which; the neuron by its column in the layer, over all experts.
        measured: moments and geometry of its whole layer.
        sample: a and b of a sample of the counted tokens.
        contexts: the strongest of each sign pair, by the names in ``QUADRANTS``, strongest first.
        n_tokens: counted tokens that sample and contexts were chosen from.
        readouts: what the vectors say in the vocabulary: ``v`` through the unembedding, ``q`` and ``k`` through the
            embedding; empty where the model's embeddings are not of the residual stream's width.
        output_gain: in words, which final norm's gain was folded into the read-out of v.
        similar: neurons with a like value (``v``) and a like query and key (``qk``), nearest first.
        peak_text: the token on which |h| was largest among all that were fed.
        model, settings, corpus: as in a ``Run``: what was read and how.
        run: the directory of the run that the layer's numbers come from; None if they were measured on this very text.
        same_text: whether that run counted the same windows.
        record: machine and versions.
        expert, index: which expert it belongs to and its number there, None in a dense layer; −1 is a shared expert.
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
    """The strongest tokens with the text around them; ``windows`` holds the texts of every window named."""
    found = []
    for place, (window, position) in enumerate(strongest.places.T.tolist()):
        first = max(0, position - BEFORE)
        texts = windows[window][first : position + AFTER + 1]
        begin = first - (position - BEFORE)
        a, b = strongest.around[:, begin : begin + len(texts), place]
        found.append(Context(window, position, texts, position - first, a, b, unit(a, b)))
    return tuple(found)


def by_quadrant(seen: Seen, unit: Unit, windows: dict[int, tuple[str, ...]]) -> dict[str, tuple[Context, ...]]:
    """The contexts of every sign pair."""
    pairs = zip(QUADRANTS, seen.strongest, strict=True)
    return {quadrant: contexts_of(strongest, unit, windows) for quadrant, strongest in pairs}


def _key(places: Int64[Tensor, "2 token"]) -> Int64[Tensor, " token"]:
    """Different for every place, and in no order that a text could have."""
    return mixed(reading_order(places) + 1)
