"""The page of one neuron as a self-contained HTML file, which a notebook can show as well.

page = NeuronPage(inspect_neuron(model, model.read(), "11:1229"))
page                               displayed in a notebook
page.write("11-1229.html")
page.standing                      the numbers as a DataFrame
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup
from pandas import DataFrame
from torch import Tensor

from analysis.errors import UserError
from analysis.neuron import Context, NeuronRecord
from reports.html.render import TOKEN_LENGTH, render
from reports.neuron.figures import draw_neuron, outside
from reports.neuron.summary import (
    MEASURES,
    SIGNS,
    WEIGHTS,
    Histogram,
    costs,
    curve,
    histogram,
    quadrants,
    remarks,
    sentences,
    standing,
)
from reports.run.definitions import DEFINITIONS, LIMITS, NOTATION
from reports.run.page import lines, shown_figures

MARK = "gated-mlp-symmetry, page of a neuron"
"""A file with this mark in its head may be replaced without ``--force``."""
HEIGHT = 720
"""Pixels of the frame in a notebook."""
READOUTS = {
    "v": ("v through the unembedding", "promotes", "suppresses"),
    "q": ("q through the embedding", "raise a", "lower a"),
    "k": ("k through the embedding", "raise b", "lower b"),
}
PAIRS = (
    "cos(q, q′)·cos(k, k′), the cosine of q⊗k, which scaling does not change; or that of the exchanged pair, "
    "cos(q, k′)·cos(k, q′), if it is larger."
)
SIMILARITIES = {
    "v": ("By value", "cos(v, v′): what the neurons write."),
    "qk": ("By query and key", PAIRS),
}
DEFINED = (
    *("asymmetry", "exchange", "scaling", "euler", "bilinear", "placement", "gate", "…_null_g", "…_null_rep", "…_se"),
    *("energy", "cos_qk"),
)
"""The definitions on this page, by how their names begin."""


@dataclass(frozen=True)
class ShownToken:
    """A token of a context on the page: its text, its numbers, and its |h| scaled to 0 to 1."""

    text: str
    numbers: str
    strength: float
    positive: bool
    focus: bool


@dataclass(frozen=True)
class NeuronPage:
    """The page of a neuron.

    Attributes:
        record: from ``hooks.neuron.inspect_neuron``.
        command: the command line that made it, if any.
    """

    record: NeuronRecord
    command: str | None = None

    @cached_property
    def standing(self) -> DataFrame:
        """Its numbers, with errors, nulls and rank in the layer: see ``reports.neuron.summary.standing``."""
        return standing(self._columns, self.record.neuron)

    @cached_property
    def quadrants(self) -> DataFrame:
        """Its shares of tokens and of energy by the signs of (a, b)."""
        return quadrants(self._columns, self.record.neuron)

    @cached_property
    def curve(self) -> DataFrame:
        """Its asymmetry at every α."""
        return curve(self.record)

    @cached_property
    def costs(self) -> DataFrame:
        """Costs of editing it, if its run has them; otherwise empty."""
        return DataFrame() if self.record.run is None else costs(Path(self.record.run), self.record)

    def html(self) -> str:
        """The whole page."""
        record = self.record
        figures = draw_neuron(record, self.curve)
        return render(
            "neuron.html",
            mark=MARK,
            record=record,
            sentences=self.sentences,
            remarks=list(remarks(record)),
            weights=list(self._rows(WEIGHTS)),
            measures=list(self._rows(MEASURES)),
            figures={figure.name: figure for figure in shown_figures(figures, _captions(record))},
            quadrants=self.quadrants.reset_index().to_dict(orient="records"),
            contexts=[(SIGNS[name], list(_drawn(found, _largest(record)))) for name, found in record.contexts.items()],
            readouts=[(*READOUTS[name], readout) for name, readout in record.readouts.items()],
            similar=[(*SIMILARITIES[name], found) for name, found in record.similar.items()],
            costs=self.costs.to_dict(orient="records"),
            command=self.command,
            provenance=lines(
                {"model": record.model, "settings": record.settings, "corpus": record.corpus, "record": record.record}
            ),
            notation=NOTATION,
            definitions=[definition for definition in DEFINITIONS if definition.names.startswith(DEFINED)],
            limits=LIMITS,
        )

    def write(self, path: str | Path, force: bool = False) -> None:
        """Write the page; UserError if another kind of file exists there and ``force`` is not set, or if writing fails."""
        target = Path(path)
        check_page(target, force)
        staging = target.with_name(f".writing-{target.name}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.write_text(self.html(), encoding="utf-8")
            os.replace(staging, target)
        except OSError as error:
            staging.unlink(missing_ok=True)
            raise UserError(f"cannot write {target} ({error.strerror}): choose another --out") from error

    def _repr_html_(self) -> str:
        """The page in a frame, so that its style does not affect the notebook."""
        frame = Markup('<iframe srcdoc="{}" title="neuron {}" sandbox="allow-scripts" style="{}"></iframe>')
        return str(frame.format(self.html(), self.record.name, f"width:100%;height:{HEIGHT}px;border:0"))

    def __repr__(self) -> str:
        return "\n".join((f"neuron {self.record.name} of {self.record.model['name']}", *self.sentences))

    @property
    def sentences(self) -> list[str]:
        """The summary in words."""
        return list(sentences(self.record, self.standing, self.quadrants))

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        """Every number of every neuron of its layer."""
        return self.record.measured.estimates.neuron_numbers()

    def _rows(self, names: dict[str, str]) -> Iterator[tuple[str, str, dict[str, float], Histogram | None]]:
        rows = self.standing.to_dict(orient="index")
        for name, meaning in names.items():
            yield name, meaning, rows[name], histogram(self._columns[name].numpy(), self.record.neuron)


def check_page(path: Path, force: bool = False) -> None:
    """UserError unless the path is free, holds the page of a neuron, or ``force`` is set."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name a file, like {path / 'neuron.html'}")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UserError(f"{above} is a file: choose another --out")
    if path.exists() and not force and not _is_page(path):
        raise UserError(f"{path} is not a page of a neuron: choose another --out or add --force")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK.encode() in file.read(4096)


def _captions(record: NeuronRecord) -> dict[str, tuple[str, str]]:
    shown = f"{record.sample.shape[1]:,} of {record.n_tokens:,} counted tokens, sampled by a hash of their position"
    beyond = outside(record)
    border = f"; {beyond} outside the panel are crosses at its border" if beyond else ""
    return {
        "response": (
            "Tokens over the response g(a, b) and its exchange g(b, a)",
            f"{shown}{border}. If the two surfaces have the same colour under the tokens, exchange changes nothing.",
        ),
        "curve": (
            "Scaling by α",
            "Asymmetry under (a, b) → (αa, b/α); →0 and →∞ are the limits, if the unit has them.",
        ),
    }


def _cut(text: str) -> str:
    """A token, cut if it is long."""
    return text if len(text) <= TOKEN_LENGTH else f"{text[:TOKEN_LENGTH]}…"


def _largest(record: NeuronRecord) -> float:
    """The largest |h| of any context."""
    return max((float(context.h.abs().max()) for found in record.contexts.values() for context in found), default=0.0)


def _drawn(contexts: tuple[Context, ...], largest: float) -> Iterator[tuple[Context, list[ShownToken]]]:
    """Contexts with their tokens, each with |h| over the largest."""
    for context in contexts:
        numbers = zip(context.texts, context.a.tolist(), context.b.tolist(), context.h.tolist(), strict=True)
        yield (
            context,
            [
                ShownToken(
                    _cut(text),
                    f"a {a:.3g}, b {b:.3g}, h {h:.3g}".replace("-", "−"),
                    abs(h) / largest,
                    h > 0,
                    place == context.focus,
                )
                for place, (text, a, b, h) in enumerate(numbers)
            ],
        )
