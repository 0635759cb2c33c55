"""The figure of the two symmetries: g(a, b), g(b, a), their difference, and g(αa, b/α) for several α."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.units.registry import Unit

REACH = 4.0
POINTS = 161
ALPHAS = (-1.0, 0.25, 0.5, 1.0, 2.0, 4.0)
COLORS = ("tab:red", "#c6dbef", "#6baed6", "black", "#3182bd", "#08519c")


def units_figure(units: dict[str, Unit]) -> Figure:
    """One row per unit: g(a, b), g(b, a), the difference, and g(αa, b/α) along a at b = 1 for several α."""
    figure = Figure(figsize=(13, 2.8 * len(units)), layout="constrained")
    rows = figure.subplots(len(units), 4, squeeze=False)
    for axes, unit in zip(rows, units.values(), strict=True):
        if not unit.is_pointwise:
            _explain_missing(unit, axes)
            continue
        whole, swapped, difference, family = axes
        h, exchanged = _over_the_plane(unit)
        reach = float(np.abs(h).max())
        span = unit.span
        draw_plane(h, whole, f"{unit.name}\ng(a, b)", reach, span)
        draw_plane(exchanged, swapped, "g(b, a)", reach, span)
        draw_plane(h - exchanged, difference, "g(a, b) − g(b, a)", reach, span)
        draw_family(unit, family)
    return figure


def draw_plane(values: np.ndarray, ax: Axes, title: str, reach: float, span: float = 1.0) -> Axes:
    """Values over the (a, b) plane; the three panels of a unit share a colour scale."""
    extent = (-REACH * span, REACH * span, -REACH * span, REACH * span)
    image = ax.imshow(values.T, origin="lower", extent=extent, cmap="RdBu_r", vmin=-reach, vmax=reach)
    ax.figure.colorbar(image, ax=ax)
    ax.set(title=title, xlabel="a", ylabel="b")
    return ax


def draw_family(unit: Unit, ax: Axes) -> Axes:
    """g(αa, b/α) at b = 1 (or the unit's span); the curves coincide for all α > 0 if scaling is a symmetry."""
    a = unit.span * torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    for alpha, color in zip(ALPHAS, COLORS, strict=True):
        h = unit.scaled(a, torch.full_like(a, unit.span), alpha)
        style = "--" if alpha < 0 else "-"
        ax.plot(a.numpy(), h.numpy(), color=color, linestyle=style, label=f"α = {alpha:g}")
    ax.set(title=f"g(αa, {unit.span:g}/α)", xlabel="a")
    ax.legend(fontsize=7)
    return ax


def _over_the_plane(unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    points = unit.span * torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    a, b = torch.meshgrid(points, points, indexing="ij")
    return unit(a, b).numpy(), unit.exchanged(a, b).numpy()


def _explain_missing(unit: Unit, axes: np.ndarray) -> None:
    """Text instead of panels: the unit is not a function of a single pair (a, b)."""
    for ax in axes:
        ax.set_axis_off()
    axes[0].set_title(unit.name)
    axes[0].text(0, 0.5, "The gate depends on every a of its layer,\nso g is not a function of one pair (a, b).")
