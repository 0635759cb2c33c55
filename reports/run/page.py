"""report.html: the results of a run as one self-contained page.

A section appears only if its data exist, so a figure or a column that another part of the program adds needs no change
here.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from analysis.measures.expert_numbers import FEW_EXPERT_TOKENS
from analysis.run import Run
from analysis.weights.experts import expert_name, neuron_name
from reports.html.packed_table import packed
from reports.html.render import inline_svg, render
from reports.run.definitions import (
    CAUSAL,
    DEFINITIONS,
    EXPERT_COLUMNS,
    EXTREME_COLUMNS,
    LAYER_COLUMNS,
    LIMITS,
    MIXTURE,
    NEURON_COLUMNS,
    NOTATION,
)
from reports.run.verdict import remarks, verdict
from reports.tables import Tables

EXTREMES_SHOWN = 3
"""Extreme neurons of each layer on the page."""
EXPERTS_SHOWN = 1024
"""Experts on the page; if there are more, the page says so."""
CAUSAL_PREFIXES = ("kl_", "dce_")
CAPTIONS = {
    "output": (
        "What the layers write",
        (
            "Asymmetry of the vector that each layer adds to the residual stream if all its neurons are edited; the mean "
            "of its neurons one by one; and the coherence, the first over the second: below 1 where changes cancel, above "
            "1 where they add up."
        ),
    ),
    "output_parts": (
        "Symmetric and antisymmetric part of what the layers write",
        (
            "(y + y′)/2 and (y − y′)/2 under balanced exchange: energy, effective rank, overlap with the directions in "
            "which y varies most, and the share of y's mean; 95 % intervals."
        ),
    ),
    "exchange": (
        "Exchange of gate and up, neurons one by one",
        "Pooled over neurons, with 95 % intervals, quartiles over tokens, and the nulls; top: as stored, bottom: balanced.",
    ),
    "causal_cost": (
        "What the edits cost the model",
        "KL divergence from the unedited model, by layer and edit, with a placebo of the same size.",
    ),
    "causal_alpha": (
        "Loss against α",
        "Cost of scaling by α in each layer, from the bilinear limit through the unedited model to the ReLU limit.",
    ),
    "causal_cumulative": (
        "Layers edited together",
        "Every layer up to this one, and every layer from this one on.",
    ),
    "causal_attribution": (
        "Attribution against exact cost",
        "The first-order prediction from one backward pass against the exact cost of the edit.",
    ),
    "scaling": (
        "Scaling by α",
        "Asymmetry of every layer under (a, b) → (αa, b/α). The colour scale is nonlinear, so small values stay visible.",
    ),
    "measures": (
        "The other measures, neurons one by one",
        "With 95 % intervals, and medians over tokens and nulls if the measure has them. The last two are shares.",
    ),
    "experts": (
        "Experts",
        "Balanced exchange of every expert, by layer and by share of tokens; hollow markers have few tokens.",
    ),
    "neurons": ("Single neurons", "Distribution of the exchange asymmetry, as stored, over the neurons of each layer."),
}
"""Heading and caption of each figure, in the order of the page; a figure that is not listed comes last."""


@dataclass(frozen=True)
class ShownFigure:
    """A figure on the page: its file name without extension, heading, caption and SVG."""

    name: str
    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class NumberCell:
    """A number in a table, with its standard error if it has one."""

    value: float | int
    error: float | None = None


def report_html(run: Run, tables: Tables, figures: Mapping[str, Figure], costs: Iterable[str] = ()) -> str:
    """The page of a run, which needs no network; ``costs`` are sentences about the costs of edits."""
    layers = tables.layers
    causal = [name for name in layers if name.startswith(CAUSAL_PREFIXES) and not name.endswith(("_se", "_n"))]
    layer_columns = {
        name: meaning
        for name, meaning in _present(LAYER_COLUMNS | dict.fromkeys(causal, "nats per token"), layers).items()
        if not (name.endswith("_raw") and layers[name].isna().all())  # a reading that exists only behind a norm
    }
    return render(
        "report.html",
        model=run.model,
        verdict=[*verdict(run, tables), *costs],
        remarks=list(remarks(run, layers, tables.experts)),
        acceptance=run.acceptance,
        controls=run.controls,
        passed=run.passed,
        figures=list(shown_figures(figures, CAPTIONS)),
        layer_columns=layer_columns,
        layers=_rows(layers, layer_columns),
        few_tokens=set(layers.loc[layers["few_tokens"] | layers["output_few_tokens"], "layer"]),
        experts=[] if tables.experts is None else _experts(tables.experts),
        n_experts=0 if tables.experts is None else len(tables.experts),
        expert_columns=EXPERT_COLUMNS,
        few_expert_tokens=FEW_EXPERT_TOKENS,
        neurons=packed(tables.neurons[list(_present(NEURON_COLUMNS, tables.neurons))]),
        neuron_columns=_present(NEURON_COLUMNS, tables.neurons),
        n_neuron_columns=len(tables.neurons.columns),
        extreme_columns=EXTREME_COLUMNS,
        extremes=_extremes(tables.extremes),
        notation=NOTATION,
        definitions=(*DEFINITIONS, *([] if tables.experts is None else [MIXTURE]), *([CAUSAL] if causal else [])),
        limits=LIMITS,
        command=run.record.get("command"),
        provenance=provenance(run),
        missing=run.missing(),
    )


def shown_figures(figures: Mapping[str, Figure], captions: Mapping[str, tuple[str, str]]) -> Iterator[ShownFigure]:
    """The figures as SVG: those with a caption first, in the order of the captions."""
    for name in (*(name for name in captions if name in figures), *(name for name in figures if name not in captions)):
        title, caption = captions.get(name, (name, ""))
        yield ShownFigure(name, title, caption, inline_svg(figures[name], name, f"{title}. {caption}"))


def _present(columns: dict[str, str], table: pd.DataFrame) -> dict[str, str]:
    return {name: meaning for name, meaning in columns.items() if name in table}


def _rows(table: pd.DataFrame, columns: Mapping[str, str]) -> list[tuple[int, list[NumberCell]]]:
    """Each layer with its cells; a column has standard errors if the table has its ``_se``."""
    rows = (row for _, row in table.iterrows())
    return [(int(row["layer"]), [NumberCell(row[name], row.get(f"{name}_se")) for name in columns]) for row in rows]


def _extremes(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The largest extreme neurons of each layer."""
    largest = table.groupby("layer", sort=False).head(EXTREMES_SHOWN)
    rows = largest.where(largest["text"].notna(), {"text": ""}).to_dict(orient="records")
    return [row | {"name": neuron_name(row)} for row in rows]


def _experts(table: pd.DataFrame) -> list[tuple[int, int, str, bool, list[NumberCell]]]:
    """Layer, index and name of each expert, whether it has few tokens, and its cells; the largest if many."""
    largest = table.loc[table["energy_share"].fillna(-1).nlargest(EXPERTS_SHOWN).index.sort_values()]
    cells = (cells for _, cells in _rows(largest, EXPERT_COLUMNS))
    columns = (largest[name].tolist() for name in ("layer", "expert", "few_tokens"))
    return [(layer, expert, expert_name(expert), few, row) for layer, expert, few, row in zip(*columns, cells, strict=True)]


def provenance(run: Run) -> dict[str, dict[str, str]]:
    """Model, settings, corpus and record as lines of text, by heading."""
    corpora = {f"corpus, part {place}": part for place, part in enumerate(run.corpus, start=1)}
    record = {key: value for key, value in run.record.items() if key != "command"}
    return lines({"model": run.model, "settings": run.settings, **corpora, "record": record})


def lines(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Records as lines of text, by heading."""
    return {heading: {key: _line(value) for key, value in part.items()} for heading, part in parts.items()}


def _line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_line(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_line, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
