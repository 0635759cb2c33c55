"""How a layer's numbers depend on single tokens: medians, trimmed values, and massive-activation tokens.

A pooled measure is an average weighted by energy, and a handful of tokens may hold most of it. So each measure is also
computed token by token, each token's ratio pooled over the neurons, and once more without the tokens of largest energy.
"""

import math

from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.jackknife import quantile_error
from analysis.measures.layer_sums import LayerSums
from analysis.sums.layout import MAIN_SCALES, scaling_name

TRIMMED = 0.001
"""Share of the tokens, those of largest energy, that a trimmed value leaves out."""
CHANGED = 0.1
"""A measure that changes by more than this fraction of itself when they are left out depends on them."""
CONCENTRATED = 0.01
"""A layer depends on few tokens if its effective number of tokens is less than this share of them."""
TOKEN_MEASURES = {
    "exchange": "exchange",
    "exchange_balanced": "balanced_exchange",
    **{name: scaling_name(alpha) for name, alpha in MAIN_SCALES.items()},
    "euler_residual": "euler",
    "placement": "placement",
    "placement_balanced": "balanced_placement",
}
"""Measures that are also taken token by token, with their names in ``Layout.token_measures``."""


def over_tokens(layer: LayerSums, name: str) -> dict[str, float]:
    """Quartiles over tokens, the error of the median, and the trimmed value; NaN for a scale the run did not include."""
    key, moments = TOKEN_MEASURES[name], layer.moments
    if key not in moments.layout.token_measures:
        parts = ("token_q1", "token_median", "token_median_se", "token_q3", "trimmed")
        return {f"{name}_{part}": math.nan for part in parts}

    median = moments.tokens.quantile(key, 0.5)
    error = quantile_error(key, 0.5, moments.tokens, moments.blocks)
    if key == "euler":
        error *= 0.5 / math.sqrt(median * (1 - median) ** 3) if median else math.nan  # the derivative of ``_reported``
    return {
        f"{name}_token_q1": _reported(key, moments.tokens.quantile(key, 0.25)),
        f"{name}_token_median": _reported(key, median),
        f"{name}_token_median_se": error,
        f"{name}_token_q3": _reported(key, moments.tokens.quantile(key, 0.75)),
        f"{name}_trimmed": trimmed(layer, name),
    }


def trimmed(layer: LayerSums, name: str) -> float:
    """A measure pooled without the tokens of largest energy; NaN for a scale that the run did not include."""
    key = TOKEN_MEASURES[name]
    if key not in layer.moments.layout.token_measures:
        return math.nan
    return _reported(key, layer.moments.tokens.without_top(key, TRIMMED))


def depends_on_few_tokens(layer: LayerSums) -> bool:
    """Whether some number of the layer depends on a handful of tokens.

    It does if the effective number of tokens is below 1 % of them, or if leaving out the 0.1 % of tokens of largest energy
    changes one of the measures by more than a tenth of itself.
    """
    if layer.moments.tokens.effective < CONCENTRATED * layer.moments.n_tokens:
        return True
    values = {name: float(LAYER_MEASURES[name](layer.pooled)) for name in TOKEN_MEASURES}
    return any(abs(value - trimmed(layer, name)) > CHANGED * value for name, value in values.items())


def top_tokens(layer: LayerSums) -> list[dict[str, int | float]]:
    """The tokens of largest energy among the 0.1 % left out, at most ``extremes.TOP_TOKENS``, largest first.

    Each with its place, its share of the layer's energy, and the neuron that holds most of its energy.
    """
    top, energy = layer.moments.top_tokens, layer.moments.tokens.energy
    taken = top.places[3] >= 0
    window, position, token, neuron = top.places[:, taken]
    columns = {
        "window": window,
        "position": position,
        "token": token,
        **layer.neuron_columns(neuron),
        "energy_share": top.energy[taken] / energy,
        "neuron_share": top.neuron_share[taken],
    }
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows][: math.ceil(TRIMMED * layer.moments.n_tokens)]


def _reported(key: str, ratio: float) -> float:
    """The measure that a kept ratio stands for: the Euler residual ρ is kept as ρ²/(1 + ρ²)."""
    return math.sqrt(ratio / (1 - ratio)) if key == "euler" else ratio
