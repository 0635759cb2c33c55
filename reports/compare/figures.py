"""Figures of a comparison: every run by relative depth, and the differences from the first run layer by layer."""

from collections.abc import Callable

import pandas as pd
import seaborn as sns
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import ColorType

from reports.compare.tables import Comparison
from reports.html.render import visible
from reports.run.figures import MAIN_MEASURES, MAIN_OUTPUTS

Draw = Callable[[pd.DataFrame, Axes, ColorType, str], Axes]
PALETTE = sns.color_palette("colorblind")
SHOWN_MEASURES = MAIN_OUTPUTS | MAIN_MEASURES
"""What the layers write, then their neurons, each with its title."""
MARKERS = "os^DvPX<>*"
"""Each run also has its own marker, so that the runs can be told apart without colour."""


def draw_comparison(comparison: Comparison) -> dict[str, Figure]:
    """Every figure of a comparison, by file name without extension."""
    labels = [one.label for one in comparison.runs]
    comparable = [one.label for one in comparison.others if one.comparable]
    # A label is the name of a directory: a dollar sign in it does not start a formula.
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"), rc_context({"text.parse_math": False}):
        figures = {"depth": _panels(comparison.table, labels, labels, by_depth)}
        if comparable:
            figures["difference"] = _panels(comparison.table, labels, comparable, by_difference)
    return figures


def by_depth(table: pd.DataFrame, ax: Axes, color: ColorType, marker: str) -> Axes:
    """One measure of one run over relative depth, with its 95 % interval."""
    ax.axhline(0, color="0.4", linewidth=0.8)
    ax.errorbar(
        table["depth"], table["value"], yerr=table["value_reach"], color=color, marker=marker, markersize=4, capsize=2
    )
    ax.set(xlabel="relative depth", xlim=(0, 1))
    return ax


def by_difference(table: pd.DataFrame, ax: Axes, color: ColorType, marker: str) -> Axes:
    """The difference of one measure of one run from the first run, layer by layer, with its 95 % interval."""
    reach = table["difference_high"] - table["difference"]
    ax.axhline(0, color="0.4", linewidth=0.8)
    ax.errorbar(
        table["layer"], table["difference"], yerr=reach, color=color, marker=marker, markersize=4, capsize=2,
        linestyle="none",
    )  # fmt: skip
    ax.set(xlabel="layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def _panels(table: pd.DataFrame, labels: list[str], shown: list[str], draw: Draw) -> Figure:
    """One panel per measure with all runs; colours and markers follow the order of all labels."""
    rows_of_panels = len(SHOWN_MEASURES) // 2
    figure = Figure(figsize=(10, 2.75 * rows_of_panels), layout="constrained")
    axes = figure.subplots(rows_of_panels, 2).ravel()
    for ax, (measure, title) in zip(axes, SHOWN_MEASURES.items(), strict=True):
        for label in shown:
            place = labels.index(label)
            rows = table[(table["run"] == label) & (table["measure"] == measure)]
            draw(rows, ax, PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)])
        ax.set_title(title)
    numbers = [str(place) for place in range(len(shown))]
    legend = figure.legend(axes[0].containers, numbers, loc="outside lower center", ncols=2, frameon=False)
    for text, label in zip(legend.get_texts(), shown, strict=True):
        text.set_text(visible(label))  # matplotlib would skip a label that begins with an underscore
    return figure
