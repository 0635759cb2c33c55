"""Several models by relative depth: balanced exchange of each with its nulls, and two measures of all together."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.typing import ColorType

from reports.compare.figures import MARKERS, PALETTE, by_depth
from reports.findings.runs import ModelResults
from reports.run.figures import MAIN_MEASURES, NULLS, interval

EXCHANGE = "exchange_balanced"
TOGETHER = ("bilinear_share", "scaling_double")


def draw_families(found: Sequence[ModelResults]) -> Figure:
    """Top: one panel per model with its nulls; bottom: one panel per measure with every model."""
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"), rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(9, 7.5), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.08, 1))[:, 0]
        panels = above.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for ax, one, color, marker in zip(panels, found, PALETTE, MARKERS, strict=False):
            _measure(one, EXCHANGE, ax, color, marker)
            exchange_nulls(one, ax)
            ax.set(title=f"{MAIN_MEASURES[EXCHANGE]}: {one.name}", ylim=(0, None))
        panels[0].set_ylabel("asymmetry")
        _legend(above, panels[0], (*(label for label, *_ in NULLS.values()), "measured, 95 % interval"))
        together = below.subplots(1, len(TOGETHER), squeeze=False)[0]
        for ax, measure in zip(together, TOGETHER, strict=True):
            for one, color, marker in zip(found, PALETTE, MARKERS, strict=False):
                _measure(one, measure, ax, color, marker)
            ax.set(title=MAIN_MEASURES[measure], ylim=(0, None))
        _legend(below, together[0], [one.name for one in found])
    return figure


def exchange_nulls(one: ModelResults, ax: Axes) -> Axes:
    """The nulls of balanced exchange, one line each."""
    for suffix, (label, color, style) in NULLS.items():
        ax.plot(one.depth, one.layers[f"{EXCHANGE}_{suffix}"], color=color, linestyle=style, label=label)
    return ax


def _measure(one: ModelResults, measure: str, ax: Axes, color: ColorType, marker: str) -> Axes:
    values, reach = one.layers[measure], interval(one.layers, measure)
    return by_depth(pd.DataFrame({"depth": one.depth, "value": values, "value_reach": reach}), ax, color, marker)


def _legend(figure: SubFigure, ax: Axes, labels: Sequence[str]) -> None:
    """One legend below a row of panels: the lines with labels, then the measured ones."""
    lines = [line for line in ax.get_lines() if line.get_label() in labels]
    handles: list[Any] = [*lines, *ax.containers]
    figure.legend(handles, list(labels), loc="outside lower center", ncols=len(labels), frameon=False)
