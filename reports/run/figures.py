"""The figures of a run: functions from a table and an axes to that axes.

They are drawn on Figure objects without pyplot, so they need no display and leave no global state.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from matplotlib.typing import ColorType

from analysis.measures.jackknife import t95
from analysis.storage.files import FIGURES
from analysis.weights.experts import SHARED
from reports.tables import Tables

DPI = 200
PALETTE = sns.color_palette("colorblind")
POOLED, TOKENS, GAUSSIAN, REPAIRED, RANDOM, WRITTEN = (PALETTE[i] for i in (0, 1, 7, 4, 2, 3))


MAIN_MEASURES = {
    "exchange_balanced": "Exchange, balanced",
    "scaling_half": "Scaling, α = ½",
    "scaling_double": "Scaling, α = 2",
    "scaling_flip": "Sign flip, α = −1",
    "euler_residual": "Euler residual",
    "placement": "Placement, σ(a)b against σ(ab)",
    "bilinear_share": "Bilinear share",
    "gate_positive": "Share of open gates",
}
"""The panels of the figure of measures, with their titles."""
MAIN_OUTPUTS = {
    "output_exchange_balanced": "Balanced exchange of what a layer writes",
    "output_scaling_double": "Scaling of what it writes, α = 2",
    "output_scaling_flip": "Sign flip of what it writes, α = −1",
    "output_exchange": "Exchange of what it writes, as stored",
}
"""The measures of the output that lead every summary, with their titles."""
EXCHANGES = {
    "exchange": "Exchange asymmetry of the neurons, as stored",
    "exchange_balanced": "Exchange asymmetry of the neurons, k rescaled to the norm of q",
}
COHERENCES = {
    "output_exchange_balanced_coherence": "balanced exchange",
    "output_scaling_double_coherence": "scaling, α = 2",
    "output_scaling_flip_coherence": "sign flip",
}
NULLS = {
    "null_gaussian": ("null: Gaussian (a, b)", GAUSSIAN, "--"),
    "null_repaired": ("null: permutation", REPAIRED, ":"),
    "null_random": ("null: random weights", RANDOM, "-."),
}


def interval(layers: pd.DataFrame, column: str) -> pd.Series:
    """Half the width of the 95 % interval of a column: Student's t with one degree of freedom less than blocks."""
    return layers[f"{column}_se"] * layers["n_blocks"].map(t95)


def output_by_layer(layers: pd.DataFrame, ax: Axes, edit: str = "exchange_balanced") -> Axes:
    """One edit of all neurons of a layer: the asymmetry of what it writes, and beside it the neurons' mean."""
    column = f"output_{edit}"
    _over_tokens(layers, ax, column)
    ax.plot(layers["layer"], layers[edit], color=POOLED, linestyle="--", label="neurons' mean")
    _nulls(layers, ax, column)
    _pooled(layers, ax, column, WRITTEN, "what the layer writes, 95 % interval")
    if edit == "exchange_balanced":
        ax.plot(
            layers["layer"], layers["output_exchange"], color="0.45", marker=".", linestyle=":",
            label="what it writes, k as stored",
        )  # fmt: skip
    ax.set(title=MAIN_OUTPUTS[column], ylabel="asymmetry", ylim=(0, None))
    return _by_layer(ax)


def coherence_by_layer(layers: pd.DataFrame, ax: Axes) -> Axes:
    """Asymmetry of what is written over the neurons' mean, with 95 % intervals, for exchange and both scalings."""
    ax.axhline(1, color="0.4", linewidth=0.8)
    for (column, label), color, marker in zip(COHERENCES.items(), PALETTE[:3], "os^", strict=True):
        _pooled(layers[layers[column].notna()], ax, column, color, label, marker, size=3)
    ax.set(title="Coherence: written over neurons' mean", ylabel="ratio", yscale="log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    ax.yaxis.set_minor_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}" if f"{ratio:e}"[0] in "25" else ""))
    ax.legend(fontsize=8, frameon=False)
    return _by_layer(ax)


def parts_by_layer(layers: pd.DataFrame, axes: Sequence[Axes]) -> None:
    """The symmetric and the antisymmetric part of what is written, in four panels.

    Args:
        layers: the table of layers.
        axes: energy, effective rank, share of the antisymmetric part in the top directions, share of the mean.
    """
    energy, rank, inside, mean = axes
    for part, color, marker in (("symmetric", POOLED, "o"), ("antisymmetric", WRITTEN, "s")):
        energy.plot(
            layers["layer"], layers[f"output_{part}_energy"], color=color, marker=marker, markersize=4, label=f"{part} part"
        )
        _pooled(layers, rank, f"output_{part}_rank", color, f"{part} part", marker)
    _pooled(layers, inside, "output_antisymmetric_in_top10", WRITTEN, "antisymmetric part", "s")
    _pooled(layers, mean, "output_mean_share", PALETTE[7], "y", "D")
    energy.set(title="Energy under balanced exchange", ylabel="mean squared norm", yscale="log")
    rank.set(title="Effective rank", ylabel="directions", yscale="log", ylim=(0.9, None))
    inside.set(title="Variance of the antisymmetric part in the\nten directions in which y varies most", ylim=(0, 1))
    mean.set(title="Share of y's energy that is its mean over tokens", ylim=(0, 1))
    for ax in (inside, mean):
        ax.set(ylabel="share")
    for ax in axes:
        _by_layer(ax)


def exchange_by_layer(layers: pd.DataFrame, ax: Axes, column: str = "exchange") -> Axes:
    """Exchange asymmetry with its 95 % interval, quartiles over tokens, and every null."""
    measure_by_layer(layers, ax, column, EXCHANGES[column])
    ax.axhline(0.5, color="0.6", linewidth=0.8)
    ax.text(0.003, 0.505, "orthogonal", color="0.4", fontsize=8, transform=ax.get_yaxis_transform())
    ax.set(ylabel="asymmetry", ylim=(0, max(0.55, ax.get_ylim()[1])))
    return ax


def measure_by_layer(layers: pd.DataFrame, ax: Axes, column: str, title: str = "") -> Axes:
    """One measure, pooled, with its 95 % interval, and with its nulls and quartiles over tokens if it has them."""
    if f"{column}_token_q1" in layers:
        _over_tokens(layers, ax, column)
    _nulls(layers, ax, column)
    _pooled(layers, ax, column, POOLED, "pooled, 95 % interval")
    if layers.get("few_tokens", pd.Series(False)).any() and f"{column}_trimmed" in layers:
        flagged = layers[layers["few_tokens"]]
        ax.plot(
            flagged["layer"], flagged[f"{column}_trimmed"], color="black", marker="x", linestyle="none",
            label="without 0.1 % of the tokens",
        )  # fmt: skip
    ax.set(title=title, ylim=(0, None))
    return _by_layer(ax)


def _over_tokens(layers: pd.DataFrame, ax: Axes, column: str) -> None:
    """Median and quartiles over tokens of each token's own number."""
    x, low, high = layers["layer"], layers[f"{column}_token_q1"], layers[f"{column}_token_q3"]
    ax.fill_between(x, low, high, color=TOKENS, alpha=0.2, linewidth=0, label="quartiles over tokens")
    ax.plot(x, layers[f"{column}_token_median"], color=TOKENS, marker="s", markersize=3, label="median over tokens")


def _nulls(layers: pd.DataFrame, ax: Axes, column: str) -> None:
    """Every null that the table has of a column."""
    for suffix, (label, color, style) in NULLS.items():
        if f"{column}_{suffix}" in layers:
            ax.plot(layers["layer"], layers[f"{column}_{suffix}"], color=color, linestyle=style, label=label)


def _pooled(
    layers: pd.DataFrame, ax: Axes, column: str, color: ColorType, label: str, marker: str = "o", size: int = 4
) -> None:
    """A column with its 95 % interval."""
    reach = interval(layers, column)
    ax.errorbar(
        layers["layer"], layers[column], yerr=reach, color=color, marker=marker, markersize=size, capsize=2, label=label
    )


def scaling_heatmap(curves: pd.DataFrame, ax: Axes) -> Axes:
    """Asymmetry under (a, b) → (αa, b/α), one row per layer and one column per scale."""
    grid = curves.pivot(index="layer", columns="alpha", values="asymmetry")
    grid.columns = [alpha_label(alpha) for alpha in grid.columns]
    norm = PowerNorm(0.5, vmin=0, vmax=0.5)  # small asymmetries near α = 1 stay visible
    sns.heatmap(grid, ax=ax, cmap="viridis", norm=norm, cbar_kws={"label": "asymmetry"})
    ax.set(title="Scaling asymmetry A(g(a,b), g(αa, b/α))", xlabel="α", ylabel="layer")
    ax.tick_params(axis="both", rotation=0)
    return ax


def neuron_exchange(neurons: pd.DataFrame, ax: Axes) -> Axes:
    """Distribution of the exchange asymmetry of single neurons in each layer."""
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


def experts_by_layer(experts: pd.DataFrame, ax: Axes) -> Axes:
    """Balanced exchange of every expert by layer; hollow markers have few tokens."""
    _experts(experts, experts["layer"], ax, dict.fromkeys(experts["layer"], POOLED))
    ax.set(title="Experts of each layer", ylabel="exchange asymmetry, balanced")
    return _by_layer(ax)


def experts_by_share(experts: pd.DataFrame, ax: Axes) -> Axes:
    """The same against the expert's share of the layer's tokens; darker means later layers."""
    layers = list(dict.fromkeys(experts["layer"]))
    colors = dict(zip(layers, sns.color_palette("crest", len(layers)), strict=True))
    _experts(experts, experts["token_share"], ax, colors)
    ax.set(title="By share of tokens; darker: later layers", xlabel="share of tokens", xscale="log")
    percent = FuncFormatter(lambda share, _: f"{100 * share:.3g} %")
    ax.xaxis.set_major_formatter(percent)
    ax.xaxis.set_minor_formatter(percent if ax.get_xlim()[1] / ax.get_xlim()[0] < 10 else NullFormatter())
    ax.tick_params(axis="x", which="both", labelrotation=30)
    return ax


def _experts(experts: pd.DataFrame, x: pd.Series, ax: Axes, colors: Mapping[int, tuple[float, float, float]]) -> None:
    """One point per expert with a number: filled with the color of its layer, or hollow if it has few tokens."""
    known = experts["exchange_balanced"].notna()
    for shared, marker in ((False, "o"), (True, "D")):
        for few in (False, True):
            chosen = experts[known & ((experts["expert"] == SHARED) == shared) & (experts["few_tokens"] == few)]
            if len(chosen):
                edge = [colors[layer] for layer in chosen["layer"]]
                ax.scatter(
                    x[chosen.index], chosen["exchange_balanced"], s=16, marker=marker, linewidths=0.8,
                    edgecolors=edge, facecolors="none" if few else edge,
                    label=f"{'shared' if shared else 'routed'}{', few tokens' if few else ''}",
                )  # fmt: skip
    ax.set_ylim(0, None)


def draw_all(tables: Tables) -> dict[str, Figure]:
    """Every figure of a run's directory, by file name without extension."""
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"):
        figures = {
            **_outputs(tables.layers),
            "exchange": _exchange(tables.layers),
            "measures": _measures(tables.layers),
            "scaling": _single(lambda ax: scaling_heatmap(tables.curves, ax), height=1.6 + 0.16 * len(tables.layers)),
            "neurons": _single(lambda ax: neuron_exchange(tables.neurons, ax)),
        }
        if tables.experts is not None and tables.experts["exchange_balanced"].notna().any():
            figures["experts"] = _experts_figure(tables.experts)
        return figures


def save_figures(figures: Mapping[str, Figure], folder: Path, dpi: int) -> None:
    """Save every figure as ``figures/NAME.png`` in an existing folder."""
    (folder / FIGURES).mkdir()
    for name, figure in figures.items():
        figure.savefig(folder / FIGURES / f"{name}.png", dpi=dpi)


def _single(draw: Callable[[Axes], Axes], height: float = 4.0) -> Figure:
    figure = Figure(figsize=(7.5, height), layout="constrained")
    draw(figure.add_subplot())
    return figure


def _outputs(layers: pd.DataFrame) -> dict[str, Figure]:
    """The two figures of what the layers write; none if it was measured in no layer."""
    if layers["output_exchange_balanced"].isna().all():
        return {}
    output, parts = (Figure(figsize=(10, 7.5), layout="constrained") for _ in range(2))
    exchange, double, flip, coherence = output.subplots(2, 2).ravel()
    output_by_layer(layers, exchange)
    output_by_layer(layers, double, "scaling_double")
    output_by_layer(layers, flip, "scaling_flip")
    coherence_by_layer(layers, coherence)
    axes = parts.subplots(2, 2).ravel().tolist()
    parts_by_layer(layers, axes)
    return {"output": _with_legend(output, exchange), "output_parts": _with_legend(parts, axes[0])}


def _exchange(layers: pd.DataFrame) -> Figure:
    """Exchange as stored above, balanced below, with one legend."""
    figure = Figure(figsize=(7.5, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, sharey=True)
    exchange_by_layer(layers, above)
    exchange_by_layer(layers, below, "exchange_balanced")
    above.set_xlabel("")
    return _with_legend(figure, above)


def _experts_figure(experts: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    experts_by_layer(experts, left)
    experts_by_share(experts, right)
    return _with_legend(figure, left)


def _measures(layers: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(10, 11), layout="constrained")
    axes = figure.subplots(4, 2).ravel()
    for ax, (column, title) in zip(axes, MAIN_MEASURES.items(), strict=True):
        measure_by_layer(layers, ax, column, title)
    return _with_legend(figure, axes[0])


def _with_legend(figure: Figure, ax: Axes) -> Figure:
    """One legend below all panels, taken from ``ax``."""
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _by_layer(ax: Axes) -> Axes:
    ax.set_xlabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def alpha_label(alpha: float) -> str:
    named = {0.0: "→0", 0.125: "⅛", 0.25: "¼", 0.5: "½", np.inf: "→∞"}
    return named.get(alpha, f"{alpha:g}".replace("-", "−"))
