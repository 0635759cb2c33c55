"""The verdict of a run and the remarks on it: sentences made from the numbers.

The sentences about what edits cost, which end the verdict on a page, are in ``reports.causal.summary``.
"""

from collections.abc import Iterator
from itertools import islice

import pandas as pd

from analysis.measures.expert_numbers import FEW_EXPERT_TOKENS
from analysis.measures.false_discovery import FALSE_DISCOVERY_RATE
from analysis.measures.jackknife import FEW_JACKKNIFE_BLOCKS
from analysis.measures.token_numbers import CHANGED, TOKEN_MEASURES
from analysis.run import UNVERIFIED, Run, layers_named
from analysis.weights.experts import SHARED, neuron_name
from reports.run.figures import interval
from reports.tables import Tables

OUTLIER = 3.5
"""Modified z-score above which a layer is an outlier (Iglewicz & Hoaglin 1993)."""
FEW_NEURONS = 5
"""Below this effective number of neurons, a layer's pooled exchange describes single neurons."""
COHERENCE = "output_exchange_balanced_coherence"
CHANCE_WORDS = {"gaussian": "the Gaussian null", "repaired": "the permutation null", "random": "random weights"}


def verdict(run: Run, tables: Tables) -> Iterator[str]:
    """Sentences made from the numbers; one whose numbers are missing is left out."""
    layers = tables.layers
    model, tokens = run.model, sum(part["tokens_counted"] for part in run.corpus)
    yield (
        f"{model['name']} ({model['weights']}; {model['dtype']}): {len(layers)} of {model['n_layers']} layers, "
        f"gate {', '.join(model['units'])}, {tokens:,} counted tokens."
    )
    if tables.experts is not None:
        yield mixture(tables)
    yield from _of_outputs(layers)
    yield from _of_neurons(layers)
    yield from _against_chance(tables)
    share = layers["bilinear_share"]
    extent = f"{share.min():.0%} to {share.max():.0%}"
    yield f"The bilinear unit c·ab explains {share.median():.0%} of the energy (layers {extent})."


def _of_outputs(layers: pd.DataFrame) -> Iterator[str]:
    """How much what the layers write changes, under exchange and under scaling."""
    known = layers[layers["output_exchange_balanced"].notna()]
    if known.empty:
        yield "What the layers write was not measured: see the missing numbers."
        return
    fewer = "" if len(known) == len(layers) else f" (measured in {len(known)} of {len(layers)} layers)"
    tokens = int(known["output_tokens"].max())
    if tokens < known["n_tokens"].max():
        fewer += f" (on {tokens:,} tokens drawn at random)"
    yield (
        f"What a layer writes into the residual stream{fewer}, with gate and up of every neuron exchanged, up first "
        f"rescaled to the norm and sign of gate: {_change(known, 'output_exchange_balanced')}, most in layer "
        f"{_at_max(known, 'output_exchange_balanced')}. As stored: asymmetry {_span(known['output_exchange'])}. "
        "(0 = unchanged, 1 = sign reversed.)"
    )
    yield (
        f"With gate doubled and up halved: {_change(known, 'output_scaling_double')}. "
        f"With both signs flipped: {_change(known, 'output_scaling_flip')}."
    )


def _of_neurons(layers: pd.DataFrame) -> Iterator[str]:
    """The neurons' mean, and in how many layers their changes cancel or add up in what is written."""
    sentence = f"Neurons one by one: balanced exchange {_span(layers['exchange_balanced'])}"
    if layers["scaling_double"].notna().all():
        sentence += f", doubling {_span(layers['scaling_double'])}"
    if layers["scaling_flip"].notna().all():
        sentence += f", flip {_span(layers['scaling_flip'])}"
    coherence, reach = layers[COHERENCE], interval(layers, COHERENCE)
    if coherence.notna().any():
        cancel, add = int((coherence + reach < 1).sum()), int((coherence - reach > 1).sum())
        sentence += (
            f". In what is written their changes under balanced exchange cancel in {cancel} layers and add up in {add} "
            f"(95 % intervals; coherence {_extent(coherence, '.2f')})"
        )
    yield sentence + "."


def mixture(tables: Tables) -> str:
    """The number of experts of the layers, and the number that a token is routed to, as counted."""
    assert tables.experts is not None
    routed = tables.experts[tables.experts["expert"] != SHARED]
    by_layer = routed.groupby("layer")
    per_token = by_layer["token_share"].sum()
    shared = " plus a shared one" if len(routed) < len(tables.experts) else ""
    which = "All layers" if len(by_layer) == len(tables.layers) else f"{len(by_layer)} of {len(tables.layers)} layers"
    return (
        f"{which} are mixtures of {_extent(by_layer.size(), 'd')} experts, {_extent(per_token, '.3g')} per token{shared}: "
        "numbers pool over experts, and a token counts with the square of its routing weight."
    )


def against_chance(layers: pd.DataFrame, measure: str = "exchange_balanced") -> dict[str, tuple[int, int]]:
    """For every null with errors: the number of layers in which a measure is above and below it by its 95 % interval."""
    counts = {}
    for null in CHANCE_WORDS:
        column = f"{measure}_excess_{null}"
        if column in layers and not layers[f"{column}_se"].isna().all():
            reach = interval(layers, column)
            counts[null] = int((layers[column] > reach).sum()), int((layers[column] < -reach).sum())
    return counts


def _against_chance(tables: Tables) -> Iterator[str]:
    """The number of layers and of neurons that differ from each null."""
    layers, neurons = tables.layers, tables.neurons
    clauses = [
        f"above {CHANCE_WORDS[null]} in {above} layers and below it in {below}"
        for null, (above, below) in against_chance(layers).items()
    ]
    if clauses:
        yield f"The neurons' balanced exchange is {'; '.join(clauses)} (95 % intervals)."
    for above, below in against_chance(layers, "output_exchange_balanced").values():
        yield f"That of what is written is above {CHANCE_WORDS['random']} in {above} layers and below it in {below}."
    differing = neurons["exchange_balanced_repaired_differs"]
    if neurons["exchange_balanced_repaired_p"].notna().any():
        yield (
            f"{int(differing.sum()):,} of {len(neurons):,} neurons differ in balanced exchange from their permutation null "
            f"(false discovery rate {FALSE_DISCOVERY_RATE:.0%} within each layer)."
        )


def remarks(run: Run, layers: pd.DataFrame, experts: pd.DataFrame | None = None) -> Iterator[str]:
    """What to know before relying on a number: few blocks, tokens or neurons, outliers, failed checks, skipped layers."""
    if 1 < (blocks := int(layers["n_blocks"].min())) < FEW_JACKKNIFE_BLOCKS:
        yield f"standard errors rest on {blocks} blocks of sequences, fewer than {FEW_JACKKNIFE_BLOCKS}: use more text"
    yield from _massive_activations(run, layers)
    yield from _about_outputs(run, layers)
    if experts is not None:
        yield from _experts_with_few_tokens(experts)
    for row in layers[layers["effective_neurons"] < FEW_NEURONS].itertuples():
        yield (
            f"layer {row.layer}: effectively {row.effective_neurons:.1f} of {row.n_neurons:,} neurons determine its pooled "
            "exchange: use the median over neurons"
        )
    for column in ("output_exchange_balanced", "output_scaling_double", "bilinear_share"):
        found = outliers(layers, column)
        if found:
            listed = ", ".join(f"{layer} ({value:.3f})" for layer, value in found)
            yield f"{column} is an outlier in layer {listed}; the median over layers is {layers[column].median():.3f}"
    for check in run.acceptance:
        if not check.passed:
            yield f"check failed: {check}"
    for control in run.controls:
        if not control.passed:
            yield f"control failed in layer {control.layer}: {control}"
    for layer, reason in run.skipped.items():
        yield f"layer {layer} was not analysed: {reason}"
    if any(part["cut_at_max_tokens"] for part in run.corpus):
        yield "the corpus was cut at --tokens"


def _massive_activations(run: Run, layers: pd.DataFrame) -> Iterator[str]:
    """Layers whose numbers depend on a few massive-activation tokens, with the largest of them."""
    for index, places in run.massive_activation_tokens().items():
        row, top = layers.set_index("layer").loc[index], places[0]
        changed = (name for name in TOKEN_MEASURES if abs(row[name] - row[f"{name}_trimmed"]) > CHANGED * row[name])
        without = ", ".join(f"{name} {row[name]:.3f} → {row[name + '_trimmed']:.3f}" for name in islice(changed, 2))
        yield (
            f"layer {index}: effectively {row['effective_tokens']:.0f} of {row['n_tokens']:,} tokens hold its energy"
            f"{f' (without 0.1 % of them: {without})' if without else ''}; the largest is {top['text']!r} at window "
            f"{top['window']}, position {top['position']}, with {top['energy_share']:.0%} of the energy, most of it in "
            f"neuron {neuron_name(top)}: use the token median"
        )


def _about_outputs(run: Run, layers: pd.DataFrame) -> Iterator[str]:
    """Layers of which the output is not known, or depends on few tokens."""
    if unknown := [index for index, layer in run.layers.items() if layer.output is None]:
        yield f"{layers_named(unknown)}: what is written was not measured, because {UNVERIFIED}"
    few = layers[layers["output_few_tokens"]]
    if len(few):
        yield (
            f"{layers_named(few['layer'])}: what is written depends on few tokens: use the token median "
            "(output_exchange_balanced_token_median) or the value without 0.1 % of the tokens"
        )


def _experts_with_few_tokens(experts: pd.DataFrame) -> Iterator[str]:
    """The number of experts with few tokens or none, and their layers."""
    few, none = experts[experts["few_tokens"]], experts[experts["n_tokens"] == 0]
    if len(few):
        without = f", {len(none)} of them with none ({layers_named(none['layer'])})" if len(none) else ""
        yield (
            f"{len(few):,} of {len(experts):,} experts have fewer than {FEW_EXPERT_TOKENS} counted tokens{without}: "
            f"their own numbers are uncertain, use more text ({layers_named(few['layer'])})"
        )


def _extent(values: pd.Series, form: str) -> str:
    """One number, or the smallest and the largest."""
    low, high = (format(value, form) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def outliers(layers: pd.DataFrame, column: str) -> list[tuple[int, float]]:
    """Layers whose modified z-score exceeds ``OUTLIER``."""
    if layers[column].isna().all():
        return []
    distance = (layers[column] - layers[column].median()).abs()
    scale = 1.4826 * distance.median()
    found = layers[distance > OUTLIER * scale] if scale > 0 else layers.iloc[:0]
    return [(int(row["layer"]), float(row[column])) for _, row in found.iterrows()]


def _change(layers: pd.DataFrame, column: str) -> str:
    """An asymmetry with the root-mean-square change behind it, of the median layer."""
    change = layers[f"{column}_relative_change"].median()
    return f"asymmetry {_span(layers[column])}, a change of {change:.0%} in root mean square"


def _span(values: pd.Series) -> str:
    if len(values) == 1:
        return f"{values.iloc[0]:.3f}"
    return f"{values.median():.3f} (layers {values.min():.3f} to {values.max():.3f})"


def _at_max(layers: pd.DataFrame, column: str) -> str:
    values = layers[column]
    return "none" if values.isna().all() else str(int(layers.loc[values.idxmax(), "layer"]))
