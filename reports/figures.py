"""Figures: functions from a table and an axes to that axes, and the set that a run's directory holds.

They are drawn on plain Figure objects, never through pyplot, so they need no display and leave no state behind.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Z95 = 1.96
PALETTE = sns.color_palette("colorblind")
POOLED, TOKENS, GAUSSIAN, REPAIRED = PALETTE[0], PALETTE[1], PALETTE[7], PALETTE[4]


@dataclass(frozen=True)
class Tables:
    """The three tables of a run, as ``reports.tables`` makes them."""

    layers: pd.DataFrame
    neurons: pd.DataFrame
    curves: pd.DataFrame


@dataclass(frozen=True)
class Shown:
    """How a column of the table of layers is named and drawn."""

    column: str
    title: str
    companion: str
    companion_label: str


MAIN_MEASURES = (
    Shown("exchange_balanced", "Exchange, balanced", "exchange_balanced_token_median", "median over tokens"),
    Shown("scaling_half", "Scaling, α = ½", "scaling_half_token_median", "median over tokens"),
    Shown("scaling_double", "Scaling, α = 2", "scaling_double_token_median", "median over tokens"),
    Shown("scaling_flip", "Sign flip, α = −1", "scaling_flip_token_median", "median over tokens"),
    Shown("euler_residual", "Euler residual", "euler_residual_token_median", "median over tokens"),
    Shown("placement", "Placement, σ(a)b against σ(ab)", "placement_token_median", "median over tokens"),
    Shown("bilinear_share", "Bilinear share", "bilinear_share_neuron_median", "median over neurons"),
    Shown("gate_positive", "Share of open gates", "", ""),
)


def exchange_by_layer(layers: pd.DataFrame, ax: Axes) -> Axes:
    """Exchange asymmetry with its 95 % interval, the median over tokens, and both nulls."""
    x = layers["layer"]
    ax.plot(x, layers["exchange_null_gaussian"], color=GAUSSIAN, linestyle="--", label="null: Gaussian (a, b)")
    ax.plot(x, layers["exchange_null_repaired"], color=REPAIRED, linestyle=":", label="null: re-paired neurons")
    ax.plot(x, layers["exchange_token_median"], color=TOKENS, marker="s", markersize=3, label="median over tokens")
    ax.errorbar(
        x, layers["exchange"], yerr=Z95 * layers["exchange_se"], color=POOLED, marker="o", markersize=4, capsize=2,
        label="pooled, 95 % interval",
    )  # fmt: skip
    ax.axhline(0.5, color="0.6", linewidth=0.8)
    ax.annotate("unrelated", (x.iloc[0], 0.5), xytext=(0, 2), textcoords="offset points", color="0.4", fontsize=8)
    ax.set(title="Exchange asymmetry A(g(a,b), g(b,a))", ylabel="asymmetry", ylim=(0, max(0.55, ax.get_ylim()[1])))
    ax.legend(fontsize=8, ncols=2, loc="lower right")
    return _by_layer(ax)


def measure_by_layer(layers: pd.DataFrame, ax: Axes, shown: Shown) -> Axes:
    """One measure, pooled, with its robust companion beside it."""
    if shown.companion:
        ax.plot(
            layers["layer"], layers[shown.companion], color=TOKENS, marker="s", markersize=3, label=shown.companion_label
        )
    ax.plot(layers["layer"], layers[shown.column], color=POOLED, marker="o", markersize=4, label="pooled")
    ax.set(title=shown.title, ylim=(0, None))
    if shown.companion:
        ax.legend(fontsize=8)
    return _by_layer(ax)


def scaling_heatmap(curves: pd.DataFrame, ax: Axes) -> Axes:
    """Asymmetry under (a, b) → (αa, b/α), one row a layer and one column a scale."""
    grid = curves.pivot(index="layer", columns="alpha", values="asymmetry")
    grid.columns = [_alpha_label(alpha) for alpha in grid.columns]
    norm = PowerNorm(0.5, vmin=0, vmax=0.5)  # small asymmetries near α = 1 stay visible
    sns.heatmap(grid, ax=ax, cmap="viridis", norm=norm, cbar_kws={"label": "asymmetry"})
    ax.set(title="Scaling asymmetry A(g(a,b), g(αa, b/α))", xlabel="α", ylabel="layer")
    ax.tick_params(axis="both", rotation=0)
    return ax


def neuron_exchange(neurons: pd.DataFrame, ax: Axes) -> Axes:
    """How the exchange asymmetry of single neurons is distributed in each layer."""
    layers = sorted(neurons["layer"].unique())
    position = neurons["layer"].map({layer: place for place, layer in enumerate(layers)})
    bins = (np.arange(len(layers) + 1) - 0.5, np.linspace(0, 1, 81))
    counts, *_ = np.histogram2d(position, neurons["exchange"].fillna(-1), bins=bins)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    mesh = ax.pcolormesh(*bins, np.ma.masked_equal(share.T, 0), cmap="mako_r", rasterized=True)
    medians = neurons.groupby("layer")["exchange"].median()
    ax.plot(range(len(layers)), medians, color=TOKENS, marker="_", linestyle="none", label="median neuron")
    ax.figure.colorbar(mesh, ax=ax, label="share of the layer's neurons")
    top = max(0.55, neurons["exchange"].max())
    ax.set(title="Exchange asymmetry of single neurons", xlabel="layer", ylabel="asymmetry", ylim=(0, top))
    step = max(1, len(layers) // 15)
    ax.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.legend(fontsize=8, loc="upper right")
    return ax


def draw_all(tables: Tables) -> dict[str, Figure]:
    """Every figure of a run's directory, by file name without its ending."""
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"):
        return {
            "exchange": _single(lambda ax: exchange_by_layer(tables.layers, ax)),
            "measures": _measures(tables.layers),
            "scaling": _single(lambda ax: scaling_heatmap(tables.curves, ax), height=1.6 + 0.16 * len(tables.layers)),
            "neurons": _single(lambda ax: neuron_exchange(tables.neurons, ax)),
        }


def _single(draw: Callable[[Axes], Axes], height: float = 4.0) -> Figure:
    figure = Figure(figsize=(7.5, height), layout="constrained")
    draw(figure.add_subplot())
    return figure


def _measures(layers: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.subplots(4, 2).ravel()
    for ax, shown in zip(axes, MAIN_MEASURES, strict=True):
        measure_by_layer(layers, ax, shown)
    return figure


def _by_layer(ax: Axes) -> Axes:
    ax.set_xlabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def _alpha_label(alpha: float) -> str:
    named = {0.0: "→0", 0.125: "⅛", 0.25: "¼", 0.5: "½", np.inf: "→∞"}
    return named.get(alpha, f"{alpha:g}".replace("-", "−"))
