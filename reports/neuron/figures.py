"""Figures of one neuron: its tokens over the response surface of g and its exchange, and its scaling curve."""

import numpy as np
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from pandas import DataFrame

from analysis.neuron import NeuronRecord
from analysis.units.registry import Unit
from reports.run.figures import GAUSSIAN, POOLED, REPAIRED, TOKENS, alpha_label

POINTS = 61
LEVELS = 17
INSIDE = 0.99
"""Share of tokens inside a panel; the others are drawn at its border."""
DOT = "#111111"
"""Not black: the page recolours black as its text colour, but the surface stays light on a dark page."""


def draw_neuron(record: NeuronRecord, curve: DataFrame) -> dict[str, Figure]:
    """Every figure of a neuron's page."""
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"):
        return {"response": response(record), "curve": _curve(curve)}


def response(record: NeuronRecord) -> Figure:
    """The sampled (a, b) over g(a, b) on the left and g(b, a) on the right, with the same colour scale."""
    unit, (a, b) = record.measured.unit, record.sample.numpy()
    reach = _reach(a), _reach(b)
    here, mirrored = surfaces(unit, *reach)
    size = _size(record) or max(float(np.abs(here).max()), float(np.abs(mirrored).max())) or 1.0
    steps = np.linspace(-1, 1, LEVELS)
    levels = size * np.sign(steps) * steps**2  # small values stay visible next to large ones
    figure = Figure(figsize=(10, 4.6))
    grid = figure.add_gridspec(1, 3, width_ratios=(1, 1, 0.04), left=0.07, right=0.92, bottom=0.11, top=0.92, wspace=0.06)
    left, right, right_margin = (figure.add_subplot(grid[0, column]) for column in range(3))
    surface = _surface(left, here, reach, levels)
    _surface(right, mirrored, reach, levels)
    for ax, title in ((left, "g(a, b)"), (right, "g(b, a), exchanged")):
        _tokens(ax, a, b, reach)
        ax.set(title=title, xlabel="gate pre-activation a", xlim=(-reach[0], reach[0]), ylim=(-reach[1], reach[1]))
    left.set_ylabel("up pre-activation b")
    right.tick_params(labelleft=False)
    ticks = levels[[0, 2, 4, 8, 12, 14, 16]]
    bar = figure.colorbar(surface, cax=right_margin, label="h", ticks=ticks)
    bar.ax.set_yticklabels([f"{tick:.3g}".replace("-", "−") for tick in ticks])
    return figure


def outside(record: NeuronRecord) -> int:
    """The number of sampled tokens outside the panels."""
    a, b = record.sample.numpy()
    return int(((np.abs(a) > _reach(a)) | (np.abs(b) > _reach(b))).sum())


def surfaces(unit: Unit, reach_a: float, reach_b: float) -> tuple[np.ndarray, np.ndarray]:
    """g(a, b) and g(b, a) over the panel, [b, a]."""
    a = torch.linspace(-reach_a, reach_a, POINTS, dtype=torch.float64)
    b = torch.linspace(-reach_b, reach_b, POINTS, dtype=torch.float64)
    up, gate = torch.meshgrid(b, a, indexing="ij")
    return unit(gate, up).numpy(), unit.exchanged(gate, up).numpy()


def scaling_curve(curve: DataFrame, ax: Axes) -> Axes:
    """The neuron's asymmetry at every α, with its nulls and the quartiles of its layer."""
    x = np.arange(len(curve))
    ax.fill_between(
        x, curve["layer_q1"], curve["layer_q3"], color=TOKENS, alpha=0.2, linewidth=0, label="quartiles of its layer"
    )
    ax.plot(x, curve["layer_median"], color=TOKENS, marker="s", markersize=3, label="median neuron of its layer")
    ax.plot(x, curve["null_gaussian"], color=GAUSSIAN, linestyle="--", label="null: Gaussian (a, b)")
    ax.plot(x, curve["null_repaired"], color=REPAIRED, linestyle=":", label="null: permutation")
    ax.plot(x, curve["asymmetry"], color=POOLED, marker="o", markersize=4, label="this neuron")
    ax.set_xticks(x, [alpha_label(alpha) for alpha in curve["alpha"]])
    ax.set(xlabel="α", ylabel="asymmetry", ylim=(0, None))
    return ax


def _curve(curve: DataFrame) -> Figure:
    figure = Figure(figsize=(7.5, 3.8))
    ax = scaling_curve(curve, figure.add_axes((0.1, 0.26, 0.87, 0.7)))
    figure.legend(*ax.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _surface(ax: Axes, values: np.ndarray, reach: tuple[float, float], levels: np.ndarray) -> QuadContourSet:
    a, b = (np.linspace(-r, r, POINTS) for r in reach)
    surface = ax.contourf(a, b, values, levels=levels, cmap="RdBu_r", extend="both")
    surface.set_edgecolor("face")  # otherwise hairlines show between the bands
    ax.axhline(0, color=DOT, linewidth=0.5)
    ax.axvline(0, color=DOT, linewidth=0.5)
    ax.grid(False)
    return surface


def _tokens(ax: Axes, a: np.ndarray, b: np.ndarray, reach: tuple[float, float]) -> None:
    beyond = (np.abs(a) > reach[0]) | (np.abs(b) > reach[1])
    ax.plot(a[~beyond], b[~beyond], ".", color=DOT, markersize=2.5, alpha=0.5)
    last = 0.985 * reach[0], 0.985 * reach[1]  # keeps the crosses inside the panel
    edges = np.clip(a[beyond], -last[0], last[0]), np.clip(b[beyond], -last[1], last[1])
    ax.plot(*edges, "x", color=DOT, markersize=4)


def _size(record: NeuronRecord) -> float:
    """The end of the colour scale: almost all tokens have a smaller |h|, before and after exchange."""
    a, b = record.sample
    both = torch.cat([record.measured.unit(a, b), record.measured.unit.exchanged(a, b)])
    return float(both.abs().quantile(INSIDE))


def _reach(values: np.ndarray) -> float:
    """Half the width of a panel, which contains almost all tokens."""
    return 1.1 * float(np.quantile(np.abs(values), INSIDE)) or 1.0
