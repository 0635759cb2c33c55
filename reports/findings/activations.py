"""Activations and weights of several models compared, as the tables of ``docs/findings.md``.

A cell "0.15 (0.02–0.47)" is the median over layers with minimum and maximum. An excess is a number minus its null.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd

from analysis.causal.costs import rank_correlation
from reports.causal.tables import ASYMMETRIES
from reports.findings.runs import QUADRANTS, UNEXPLAINED, ModelResults, cost_per_asymmetry, energy_by_quadrant
from reports.markdown import markdown, short
from reports.run.figures import alpha_label, interval
from reports.run.verdict import CHANCE_WORDS, FEW_NEURONS, against_chance

ModelCell = Callable[[ModelResults], str]
MEASURES = {
    "exchange": "exchange, as stored",
    "exchange_balanced": "exchange, balanced",
    "exchange_balanced_token_median": "its median over tokens",
    "exchange_balanced_neuron_median": "its median over neurons",
    "exchange_balanced_null_gaussian": "its Gaussian null",
    "exchange_balanced_null_repaired": "its permutation null",
    "exchange_balanced_null_random": "its random-weight null",
    "scaling_half": "scaling, α = ½",
    "scaling_double": "scaling, α = 2",
    "scaling_double_null_repaired": "its permutation null",
    "scaling_flip": "sign flip, α = −1",
    "euler_residual": "Euler residual",
    "bilinear_share": "bilinear share",
    "placement_balanced": "placement, balanced",
    "gate_positive": "share of open gates",
    "cos_qk_abs_mean": "mean |cos(q, k)|",
    "score_max_ratio": "largest score over the median",
    "interaction_antisymmetry": "antisymmetry of the interaction tensor",
    "effective_neurons": "effective neurons",
}
"""Columns of ``layers.csv`` whose median over layers is shown."""
DIGITS = 3


def activation_tables(found: Sequence[ModelResults]) -> Iterator[str]:
    """The paragraphs and tables of all models."""
    yield "**Median over layers (minimum–maximum).**"
    yield markdown(["", *(one.name for one in found)], [[title, *map(cell, found)] for title, cell in _summary()])
    yield "**Scaling (αa, b/α): median over layers of the asymmetry.**"
    yield _curves(found)
    with_costs = [one for one in found if one.costs is not None]
    if with_costs:
        yield (
            "**Cost per unit of asymmetry: KL over asymmetry, median over layers (minimum–maximum), in square brackets "
            "that of the placebo, and the rank correlation of KL and asymmetry over layers. For "
            f"{UNEXPLAINED} the asymmetry is replaced by the share of energy that it does not explain.**"
        )
        yield _costs_per_asymmetry(with_costs)
    yield (
        f"**Layers whose balanced exchange is dominated by fewer than {FEW_NEURONS} neurons, and the neuron of largest "
        "weight: its share of the layer's energy, and of the energy before plus after exchange.**"
    )
    yield _heaviest(found)
    for one in found:
        yield _caption(one)
        yield _by_layer(one)


def _caption(one: ModelResults) -> str:
    corpus, model = one.document["corpus"], one.document["model"]
    return (
        f"**{one.name}: {model['weights']}; {sum(part['tokens_counted'] for part in corpus):,} tokens of "
        f"{', '.join(part['name'] for part in corpus)} in windows of {one.document['settings']['context']}. ± is a "
        "standard error; an excess is bold if its 95 % interval excludes 0; * marks a layer dominated by few tokens.**"
    )


def excess_beyond(layers: pd.DataFrame, column: str) -> pd.Series:
    """Whether the 95 % interval of a column excludes 0."""
    return layers[column].abs() > interval(layers, column)


def _summary() -> Iterator[tuple[str, ModelCell]]:
    """The rows of the first table."""
    yield "layers × neurons", lambda one: f"{len(one.layers)} × {one.layers['n_neurons'].iloc[0]:,}"
    yield "gate", lambda one: ", ".join(one.document["model"]["units"])
    for column, title in MEASURES.items():
        yield title, partial(_column, column)
    for null, words in CHANCE_WORDS.items():
        yield f"balanced exchange above / below {words}", partial(_counts, "exchange_balanced", null)
    for null in ("gaussian", "repaired"):
        yield f"scaling α = 2 above / below {CHANCE_WORDS[null]}", partial(_counts, "scaling_double", null)
    yield "energy where a > 0", partial(_energy, ["pp", "pn"])
    for pair, words in QUADRANTS.items():
        yield f"energy where {words}", partial(_energy, [pair])
    yield "layers dominated by few tokens", lambda one: _listed(one.layers, one.layers["few_tokens"])
    yield "the same, first position counted", _first_few
    yield f"layers dominated by fewer than {FEW_NEURONS} neurons", _few_neurons
    yield "neurons that differ from the permutation null", _differing
    yield "of these, less asymmetric than the null", _less_broken
    yield "their median |cos(q, k)|, and that of all neurons", _cosines


def _column(column: str, one: ModelResults) -> str:
    return _span(one.layers[column])


def _energy(quadrants: list[str], one: ModelResults) -> str:
    return _span(energy_by_quadrant(one.neurons)[quadrants].sum(axis=1))


def _counts(measure: str, null: str, one: ModelResults) -> str:
    """The number of layers in which a measure is above and below a null; a dash if it has no errors."""
    counts = against_chance(one.layers, measure).get(null)
    return "–" if counts is None else f"{counts[0]} / {counts[1]} of {len(one.layers)}"


def _few_neurons(one: ModelResults) -> str:
    return _listed(one.layers, one.layers["effective_neurons"] < FEW_NEURONS)


def _first_few(one: ModelResults) -> str:
    return "–" if one.first is None else _listed(one.first, one.first["few_tokens"])


def _differing(one: ModelResults) -> str:
    differing = one.neurons["exchange_balanced_repaired_differs"].astype(bool)
    return f"{differing.sum():,} of {len(differing):,}"


def _less_broken(one: ModelResults) -> str:
    differing = one.neurons[one.neurons["exchange_balanced_repaired_differs"].astype(bool)]
    return f"{(differing['exchange_balanced'] < differing['exchange_balanced_null_repaired']).sum():,}"


def _cosines(one: ModelResults) -> str:
    cosines, differing = one.neurons["cos_qk"].abs(), one.neurons["exchange_balanced_repaired_differs"].astype(bool)
    return f"{short(cosines[differing].median(), DIGITS)}, {short(cosines.median(), DIGITS)}"


def _curves(found: Sequence[ModelResults]) -> str:
    medians = pd.DataFrame({one.name: one.curves.groupby("alpha")["asymmetry"].median() for one in found})
    rows = [[name, *(short(value, DIGITS) for value in medians[name])] for name in medians]
    return markdown(["α", *(alpha_label(alpha) for alpha in medians.index)], rows)


def _costs_per_asymmetry(found: Sequence[ModelResults]) -> str:
    """One line per edit, two columns per model."""
    known = [*ASYMMETRIES, UNEXPLAINED]
    edits = [edit for edit in known if all((one.costs["edit"] == edit).any() for one in found if one.costs is not None)]
    header = ["edit", *(title for one in found for title in (one.name, "rank correlation"))]
    return markdown(header, [[edit, *(cell for one in found for cell in _cost_cells(one, edit))] for edit in edits])


def _cost_cells(one: ModelResults, edit: str) -> tuple[str, str]:
    table = cost_per_asymmetry(one, edit)
    ratio, placebo = (table[column] / table["asymmetry"] for column in ("kl", "kl_placebo"))
    rank = rank_correlation(table["kl"].tolist(), table["asymmetry"].tolist())
    return f"{_span(ratio)} [{short(placebo.median(), DIGITS)}]", f"{rank:.2f}".replace("-", "−")


def _heaviest(found: Sequence[ModelResults]) -> str:
    """One line per layer that few neurons dominate."""
    header = ["model", "neuron", "effective neurons", "share of energy", "with exchanged", "gate open", "balanced exchange"]
    rows = []
    for one in found:
        table = one.heaviest.merge(one.layers[["layer", "effective_neurons"]], on="layer")
        for row in table[table["effective_neurons"] < FEW_NEURONS].to_dict("records"):
            shares = [f"{row[name]:.3f}" for name in ("energy_share", "share", "gate_positive", "exchange_balanced")]
            ending = [f"{row['cos_qk']:.2f}".replace("-", "−"), f"{row['score_ratio']:.1f}", _cost_alone(one, row)]
            rows.append([one.name, f"{row['layer']}:{row['neuron']}", f"{row['effective_neurons']:.1f}", *shares, *ending])
    return markdown([*header, "cos(q, k)", "score over the median", "ΔCE, exchanged alone"], rows)


def _cost_alone(one: ModelResults, row: dict[Any, Any]) -> str:
    """The cost of exchanging this neuron alone, as stored; a dash if it was not patched alone."""
    if one.single_neurons is None:
        return "–"
    alone = one.single_neurons[
        (one.single_neurons["layer"] == row["layer"]) & (one.single_neurons["neuron"] == row["neuron"])
    ]
    return f"{alone['exact'].iloc[0]:+.3f}".replace("-", "−") if len(alone) else "–"


def _by_layer(one: ModelResults) -> str:
    """One line per layer: measures with errors, the excess over each null, and the effect of the first position."""
    first = None if one.first is None else one.first.set_index("layer")
    differing = one.neurons.groupby("layer")["exchange_balanced_repaired_differs"].sum()
    beyond = {null: excess_beyond(one.layers, f"exchange_balanced_excess_{null}") for null in CHANCE_WORDS}
    rows = []
    for place, row in enumerate(one.layers.to_dict("records")):
        excesses = {null: f"exchange_balanced_excess_{null}" for null in CHANCE_WORDS}
        rows.append([
            f"{row['layer']}{'*' if row['few_tokens'] else ''}",
            _with_error(row, "exchange"),
            _with_error(row, "exchange_balanced"),
            *(_with_error(row, column, bool(beyond[null].iloc[place])) for null, column in excesses.items()),
            "–" if first is None else f"{first.loc[row['layer'], 'exchange_balanced']:.3f}",
            _with_error(row, "scaling_double"),
            _with_error(row, "bilinear_share"),
            f"{row['exchange_balanced_neuron_median']:.3f}",
            f"{row['effective_neurons']:.1f}",
            f"{row['score_max_ratio']:.1f}",
            f"{differing[row['layer']]:,}",
        ])  # fmt: skip
    header = [
        "layer",
        "exchange",
        "balanced",
        "− Gaussian",
        "− permutation",
        "− random",
        "balanced, first position counted",
    ]
    ending = ["median neuron, balanced", "effective neurons", "largest score", "neurons that differ"]
    return markdown([*header, "α = 2", "bilinear share", *ending], rows)


def _with_error(row: dict[Any, Any], column: str, bold: bool = False) -> str:
    """A number with its standard error; an excess is signed."""
    sign = "+" if "_excess_" in column else ""
    cell = f"{row[column]:{sign}.3f} ± {row[f'{column}_se']:.3f}".replace("-", "−")
    return f"**{cell}**" if bold else cell


def _span(values: pd.Series) -> str:
    """The median with minimum and maximum; a dash if there is no number."""
    low, middle, high = (short(value, DIGITS) for value in (values.min(), values.median(), values.max()))
    return "–" if values.isna().all() else f"{middle} ({low}–{high})"


def _listed(layers: pd.DataFrame, chosen: pd.Series) -> str:
    return ", ".join(str(layer) for layer in layers.loc[chosen.astype(bool), "layer"]) or "none"
