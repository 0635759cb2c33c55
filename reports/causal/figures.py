"""Figures of the costs of edits: by layer with placebos, against α, and attribution against exact cost."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.causal.edits import ABLATIONS, scale_of

Z95 = 1.96
FLOOR = 1e-6
"""Nats; smaller costs are drawn at this value, where the logarithmic axis and the precision of float32 end."""
PALETTE = sns.color_palette("colorblind")
PLACEBO, COUNTED, ALL = "0.55", PALETTE[0], PALETTE[1]
N_COLUMNS = 2
Draw = Callable[[Axes], Axes]


def cost_by_layer(table: pd.DataFrame, ax: Axes, edit: str) -> Axes:
    """KL of one edit by layer for counted and all positions, with its placebo and the cost of zeroing the layer."""
    rows = dict(iter(table[table["edit"] == edit].groupby("positions")))
    counted = rows["counted"]
    x = counted["layer"]
    low, high = (_floored(counted["kl_placebo"] + sign * Z95 * counted["kl_placebo_se"].fillna(0)) for sign in (-1, 1))
    ax.fill_between(x, low, high, color=PLACEBO, alpha=0.35, linewidth=0)
    ax.plot(x, _floored(counted["kl_placebo"]), color=PLACEBO, linestyle="--", label="placebo of the same size")
    zero = table[(table["edit"] == "zero") & (table["positions"] == "counted")]
    if edit != "zero" and len(zero):
        ax.plot(zero["layer"], _floored(zero["kl"]), color="0.2", linewidth=0.8, linestyle=":", label="layer removed")
    ax.plot(x, _floored(rows["all"]["kl"]), color=ALL, marker="s", markersize=3, label="all positions")
    ax.errorbar(
        x, _floored(counted["kl"]), yerr=Z95 * counted["kl_se"].fillna(0), color=COUNTED, marker="o", markersize=3,
        capsize=2, label="counted positions, 95 %",
    )  # fmt: skip
    ax.set(title=edit, yscale="log", ylabel="KL, nats per token", xlabel="layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def cost_by_scale(table: pd.DataFrame, ax: Axes) -> Axes:
    """ΔCE against α, one line per layer, from the bilinear limit through α = 1 (the model) to the ReLU limit."""
    counted = table[table["positions"] == "counted"]
    scales = {edit: alpha for edit in counted["edit"].unique() if (alpha := scale_of(edit)) is not None and alpha >= 0}
    ordered = sorted({*scales.values(), 1.0})
    place = {alpha: index for index, alpha in enumerate(ordered)}
    layers = sorted(counted["layer"].unique())
    colors = sns.color_palette("viridis", len(layers))
    for color, layer in zip(colors, layers, strict=True):
        rows = counted[(counted["layer"] == layer) & counted["edit"].isin(scales)]
        costs = {1.0: 0.0} | {scales[edit]: cost for edit, cost in zip(rows["edit"], rows["dce"], strict=True)}
        ax.plot([place[alpha] for alpha in ordered], [costs[alpha] for alpha in ordered], color=color, linewidth=1)
        ax.annotate(str(layer), (len(ordered) - 1, costs[ordered[-1]]), fontsize=5, color=color)
    ax.set_xticks(range(len(ordered)), [_scale_label(alpha) for alpha in ordered])
    ax.set_yscale("symlog", linthresh=1e-3)
    ax.set(title="Cost of g(αa, b/α), one line per layer", xlabel="α", ylabel="ΔCE, nats per token")
    return ax


def attribution_against_exact(predicted: pd.Series, exact: pd.Series, ax: Axes, title: str) -> Axes:
    """One point per layer or neuron on symmetric logarithmic axes; the diagonal is perfect agreement."""
    size = float(np.nanmax(np.abs([*predicted, *exact, FLOOR])))
    ax.plot([-size, size], [-size, size], color="0.7", linewidth=0.8)
    ax.scatter(predicted, exact, s=6, color=COUNTED, alpha=0.6, linewidth=0)
    for axis in (ax.set_xscale, ax.set_yscale):
        axis("symlog", linthresh=max(FLOOR, size / 1e3))
    ax.set(title=title, xlabel="attribution, nats per token", ylabel="exact ΔCE, nats per token")
    return ax


def cumulative_cost(table: pd.DataFrame, ax: Axes, series: str) -> Axes:
    """KL when layers are edited together, one line per edit; ``series`` is bottom or top."""
    counted = table[table["positions"] == "counted"]
    for edit, rows in counted.groupby("edit", sort=False):
        line = ":" if edit in ABLATIONS else "-"
        ax.plot(rows["layer"], _floored(rows[f"kl_{series}"]), label=edit, linewidth=1, linestyle=line)
    which = "this layer and all before it" if series == "bottom" else "this layer and all after it"
    ax.set(title=f"Edited together: {which}", yscale="log", xlabel="layer", ylabel="KL, nats per token")
    ax.legend(fontsize=6, ncols=2)
    return ax


def draw_causal(table: pd.DataFrame, single_neurons: pd.DataFrame | None) -> dict[str, Figure]:
    """Every figure for which the table has the columns, by file name without extension."""
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"):
        figures = _exact_figures(table) if "kl" in table else {}
        scatters = [*_layer_scatters(table), *_neuron_scatters(single_neurons)]
        if scatters:
            figures["causal_attribution"] = _grid(scatters)
    return figures


def _exact_figures(table: pd.DataFrame) -> dict[str, Figure]:
    edits = list(dict.fromkeys(table["edit"]))
    by_layer = _grid([partial(cost_by_layer, table, edit=edit) for edit in edits])
    by_layer.axes[0].legend(fontsize=6)
    return {
        "causal_cost": by_layer,
        "causal_alpha": _grid([lambda ax: cost_by_scale(table, ax)]),
        "causal_cumulative": _grid(
            [lambda ax: cumulative_cost(table, ax, "bottom"), lambda ax: cumulative_cost(table, ax, "top")]
        ),
    }


def _layer_scatters(table: pd.DataFrame) -> Iterator[Draw]:
    if {"dce", "attribution"} <= set(table):
        for edit, rows in table[table["positions"] == "counted"].groupby("edit", sort=False):
            yield _scatter(rows["attribution"], rows["dce"], f"{edit}, one point per layer")


def _neuron_scatters(single_neurons: pd.DataFrame | None) -> Iterator[Draw]:
    if single_neurons is not None:
        for largest, name in ((True, "largest attributions"), (False, "at random")):
            rows = single_neurons[single_neurons["largest"] == largest]
            yield _scatter(rows["predicted"], rows["exact"], f"single neurons, {name}")


def _scatter(predicted: pd.Series, exact: pd.Series, title: str) -> Draw:
    return lambda ax: attribution_against_exact(predicted, exact, ax, title)


def _grid(draws: Sequence[Draw]) -> Figure:
    n_columns = min(N_COLUMNS, len(draws))
    n_rows = -(-len(draws) // n_columns)
    figure = Figure(figsize=(5 * n_columns, 3.2 * n_rows), layout="constrained")
    for place, draw in enumerate(draws, 1):
        draw(figure.add_subplot(n_rows, n_columns, place))
    return figure


def _floored(values: pd.Series) -> pd.Series:
    return values.clip(lower=FLOOR)


def _scale_label(alpha: float) -> str:
    named = {0.0: "→0", 0.5: "½", 1.0: "1\nthe model", np.inf: "→∞"}
    return named.get(alpha, f"{alpha:g}")
