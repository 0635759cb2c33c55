"""Every column of every table that a run or a comparison writes: what it means, its unit, and which tables have it.

A name may hold a placeholder: ``MEASURE`` stands for each column listed in ``of``, ``EDIT`` for the name of any edit, with
``-`` and ``:`` replaced by ``_``. So a family such as ``exchange_se``, ``scaling_flip_se``, … is stated once. The report
page, the neuron page and ``docs/output.md`` take their explanations from here.

    meaning_of("layers.csv", "exchange_se")     'standard error of exchange, by …'
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from analysis.measures.output_numbers import OUTPUT_MEASURES
from analysis.storage.files import (
    AGREEMENT,
    COMPARISON_TABLE,
    COSTS,
    COSTS_BY_NEURON,
    CURVES,
    EXPERTS,
    EXTREMES,
    LAYERS,
    NEURONS,
    REPLACEABLE,
)

MEASURE, EDIT = "MEASURE", "EDIT"
EDIT_PATTERN = r"(?P<part>.+)(?<!_se)(?<!_placebo)(?<!_per_asymmetry)"
"""The name of an edit, which never ends like a family."""
WITH_NULLS = ("exchange", "exchange_balanced", "scaling_half", "scaling_double", "scaling_flip")
OVER_TOKENS = (*WITH_NULLS, "euler_residual", "placement", "placement_balanced")
BY_TOKEN = (*OUTPUT_MEASURES, *OVER_TOKENS)
NEURON_MEDIANS = ("exchange", "exchange_balanced", "bilinear_share")
POOLED_TABLES = (LAYERS, NEURONS, EXPERTS)
OUTPUT_READINGS = tuple(
    f"{name}{reading}" for name in OUTPUT_MEASURES for reading in ("", "_raw", "_centred", "_coherence")
)
"""The numbers of the output that have standard errors, beside those of single columns."""
ASYMMETRY, SHARE, COSINE, NATS, INDEX = "asymmetry, 0 to 1", "share, 0 to 1", "cosine, −1 to 1", "nats per token", "index"
TOKENS, NEURON_COUNT, FLAG, LENGTH = "tokens", "neurons", "true or false", "norm"
ACTIVATION, SAME = "activation", f"that of {MEASURE}"


@dataclass(frozen=True)
class Column:
    """One column, or a family of columns.

    Attributes:
        name: its name, possibly with a placeholder.
        meaning: one sentence; a placeholder in it is filled in as in the name.
        unit: unit or range.
        tables: the files that have it.
        of: the columns that ``MEASURE`` stands for.
    """

    name: str
    meaning: str
    unit: str
    tables: tuple[str, ...]
    of: tuple[str, ...] = ()

    @property
    def is_family(self) -> bool:
        """Whether the name holds a placeholder."""
        return MEASURE in self.name or EDIT in self.name

    def names(self) -> list[str]:
        """The names that it stands for; a family over edits remains one name with its placeholder."""
        return [self.name.replace(MEASURE, measure) for measure in self.of] if self.of else [self.name]

    def meaning_for(self, name: str) -> str | None:
        """Its meaning with the placeholder filled in, or None if it does not explain a column of that name."""
        measures = "|".join(map(re.escape, self.of))
        pattern = re.escape(self.name).replace(MEASURE, f"(?P<part>{measures})").replace(EDIT, EDIT_PATTERN)
        found = re.fullmatch(pattern, name)
        if found is None:
            return None
        part = found["part"] if self.is_family else ""
        return self.meaning.replace(MEASURE, part).replace(EDIT, part)


LAYER_COLUMNS = (
    Column("n_neurons", "number of neurons, in a mixture those of all experts together", NEURON_COUNT, (LAYERS,)),
    Column("n_tokens", "number of counted tokens", TOKENS, (LAYERS,)),
    Column(
        "n_blocks", "jackknife blocks with counted tokens: a 95 % interval is ± t(n_blocks − 1) · SE", "blocks", (LAYERS,)
    ),
    Column("top_token_share", "share of the layer's energy Σ w h² on the token with the most", SHARE, (LAYERS,)),
    Column("top_tokens_share", "share of the layer's energy on the 0.1 % of tokens with the most", SHARE, (LAYERS,)),
    Column(
        "effective_tokens", "(Σe)² / Σe² over the energies e of the tokens: how many hold the energy", TOKENS, (LAYERS,)
    ),
    Column(
        "effective_neurons",
        "(Σe)² / Σe² over neurons, e = w (E[h²] + E[h′²]) before and after balanced exchange: how many determine it",
        NEURON_COUNT,
        (LAYERS,),
    ),
    Column(
        "few_tokens",
        "whether effective_tokens is under 1 % of the tokens, or leaving out 0.1 % of them changes a measure by over 10 %",
        FLAG,
        (LAYERS,),
    ),
    Column(
        "n_MEASURE_differs",
        "number of neurons whose MEASURE differs from the permutation null (false discovery rate 5 %)",
        NEURON_COUNT,
        (LAYERS,),
        ("exchange", "exchange_balanced"),
    ),
    Column("score_max_ratio", "largest score ‖q‖‖k‖‖v‖ over the median score", "ratio", (LAYERS,)),
    Column(
        "interaction_antisymmetry",
        "share of the energy of Σⱼ vⱼ⊗qⱼ⊗kⱼ that is antisymmetric in q ↔ k, from the weights alone: 0 if every q is "
        "parallel to its k, 0.5 if they are unrelated",
        SHARE,
        (LAYERS,),
    ),
)
OUTPUT_COLUMNS = (
    Column(
        "output_exchange_balanced",
        "asymmetry of y, the vector that the layer adds to the residual stream, if all its neurons exchange a ↔ b after "
        "rescaling k to ‖k‖ = ‖q‖ and cos(q, k) ≥ 0",
        ASYMMETRY,
        (LAYERS,),
    ),
    Column("output_scaling_half", "asymmetry of y if all neurons scale (a, b) → (a/2, 2b)", ASYMMETRY, (LAYERS,)),
    Column("output_scaling_double", "asymmetry of y if all neurons scale (a, b) → (2a, b/2)", ASYMMETRY, (LAYERS,)),
    Column("output_scaling_flip", "asymmetry of y if all neurons flip (a, b) → (−a, −b)", ASYMMETRY, (LAYERS,)),
    Column(
        "output_scaling_zero",
        "asymmetry of y in the limit α → 0 of scaling, the bilinear ab/2 for SiLU and GELU; empty if there is no limit",
        ASYMMETRY,
        (LAYERS,),
    ),
    Column(
        "output_scaling_infinity",
        "asymmetry of y in the limit α → ∞ of scaling, relu(a)·b for SiLU and GELU; empty if there is no limit",
        ASYMMETRY,
        (LAYERS,),
    ),
    Column(
        "output_exchange",
        "asymmetry of y if all neurons exchange a ↔ b, with q and k as the checkpoint stores them",
        ASYMMETRY,
        (LAYERS,),
    ),
    Column("output_tokens", "counted tokens on which y was measured (--output-share)", TOKENS, (LAYERS,)),
    Column("output_energy", "E‖y‖²", "squared norm", (LAYERS,)),
    Column("output_mean_share", "‖E y‖² / E‖y‖²: the share of the energy that y's mean over tokens has", SHARE, (LAYERS,)),
    Column(
        "output_symmetric_energy",
        "E‖(y + y′)/2‖² under balanced exchange: the energy of the part that exchange leaves as it is",
        "squared norm",
        (LAYERS,),
    ),
    Column(
        "output_antisymmetric_energy",
        "E‖(y − y′)/2‖² under balanced exchange: the energy of the part whose sign exchange flips",
        "squared norm",
        (LAYERS,),
    ),
    Column(
        "output_symmetric_rank",
        "effective rank (participation ratio) of the covariance of (y + y′)/2, from pairs of tokens of different blocks",
        "directions",
        (LAYERS,),
    ),
    Column("output_antisymmetric_rank", "the same of (y − y′)/2", "directions", (LAYERS,)),
    Column(
        "output_antisymmetric_in_top10",
        "share of the variance of (y − y′)/2 inside the ten directions in which y varies most, found on other tokens",
        SHARE,
        (LAYERS,),
    ),
    Column(
        "output_effective_tokens",
        "(Σe)² / Σe² over the energies e = ‖y‖² of the tokens: how many hold the energy of y",
        TOKENS,
        (LAYERS,),
    ),
    Column(
        "output_few_tokens",
        "whether that is under 1 % of output_tokens, or leaving out 0.1 % of them changes an asymmetry of y by over 10 %",
        FLAG,
        (LAYERS,),
    ),
)
MEASURE_COLUMNS = (
    Column("exchange", "asymmetry of h under a ↔ b, with q and k as the checkpoint stores them", ASYMMETRY, POOLED_TABLES),
    Column(
        "exchange_balanced",
        "asymmetry of h under a ↔ b after rescaling k to ‖k‖ = ‖q‖ and cos(q, k) ≥ 0",
        ASYMMETRY,
        POOLED_TABLES,
    ),
    Column("scaling_half", "asymmetry of h under (a, b) → (a/2, 2b)", ASYMMETRY, POOLED_TABLES),
    Column("scaling_double", "asymmetry of h under (a, b) → (2a, b/2)", ASYMMETRY, POOLED_TABLES),
    Column("scaling_flip", "asymmetry of h under (a, b) → (−a, −b)", ASYMMETRY, POOLED_TABLES),
    Column(
        "euler_residual", "√(E[(a ∂g/∂a − b ∂g/∂b)²] / E[h²]): response to infinitesimal scaling", "ratio", POOLED_TABLES
    ),
    Column("placement", "asymmetry between σ(a)b and σ(ab), with q and k as stored", ASYMMETRY, POOLED_TABLES),
    Column(
        "placement_balanced", "asymmetry between σ(a)b and σ(ab) after the same rescaling of k", ASYMMETRY, POOLED_TABLES
    ),
    Column("exchange_relative_change", "√(E‖h′ − h‖² / E‖h‖²) under exchange as stored", "ratio", (LAYERS, NEURONS)),
    Column(
        "bilinear_share", "share of the energy that c·ab explains, each neuron with its own best c", SHARE, POOLED_TABLES
    ),
    Column("gate_positive", "share of tokens with a > 0 (an open gate)", SHARE, POOLED_TABLES),
    Column("cos_qk_abs_mean", "mean over neurons of |cos(q, k)|", SHARE, (LAYERS, EXPERTS)),
)
FAMILIES = (
    Column(
        "MEASURE_se",
        "standard error of MEASURE, by a jackknife over blocks of sequences",
        SAME,
        (LAYERS,),
        (
            *OUTPUT_READINGS,
            *("output_mean_share", "output_symmetric_rank", "output_antisymmetric_rank", "output_antisymmetric_in_top10"),
            *OVER_TOKENS,
            *("exchange_relative_change", "bilinear_share", "gate_positive"),
        ),
    ),
    Column(
        "MEASURE_relative_change", "√(E‖y′ − y‖² / E‖y‖²), the change behind MEASURE", "ratio", (LAYERS,), OUTPUT_MEASURES
    ),
    Column(
        "MEASURE_raw",
        "MEASURE before the norm behind the MLP; empty if there is no such norm",
        SAME,
        (LAYERS,),
        OUTPUT_MEASURES,
    ),
    Column("MEASURE_centred", "MEASURE of y and y′ each without its mean over tokens", SAME, (LAYERS,), OUTPUT_MEASURES),
    Column(
        "MEASURE_coherence",
        "MEASURE over the same measure pooled over neurons, of all tokens: below 1 their changes cancel in y, above 1 they "
        "add up (behind a norm it also contains what the norm does)",
        "ratio",
        (LAYERS,),
        OUTPUT_MEASURES,
    ),
    Column(
        "MEASURE_se",
        "standard error of MEASURE, by a jackknife over 8 groups of blocks",
        SAME,
        (NEURONS, EXPERTS),
        (*WITH_NULLS, "bilinear_share"),
    ),
    Column("MEASURE_token_q1", "lower quartile over tokens of each token's own MEASURE", SAME, (LAYERS,), BY_TOKEN),
    Column("MEASURE_token_median", "median over tokens of each token's own MEASURE", SAME, (LAYERS,), BY_TOKEN),
    Column("MEASURE_token_median_se", "standard error of that median", SAME, (LAYERS,), BY_TOKEN),
    Column("MEASURE_token_q3", "upper quartile over tokens of each token's own MEASURE", SAME, (LAYERS,), BY_TOKEN),
    Column(
        "MEASURE_trimmed",
        "MEASURE without the 0.1 % of tokens with the largest energy (rounded up to whole tokens)",
        SAME,
        (LAYERS,),
        BY_TOKEN,
    ),
    Column("MEASURE_neuron_median", "median over neurons of each neuron's own MEASURE", SAME, (LAYERS,), NEURON_MEDIANS),
    Column("MEASURE_neuron_median_se", "standard error of that median", SAME, (LAYERS,), NEURON_MEDIANS),
    Column(
        "MEASURE_null_gaussian",
        "MEASURE if (a, b) were Gaussian with each neuron's own means and covariance",
        SAME,
        (LAYERS, NEURONS),
        WITH_NULLS,
    ),
    Column(
        "MEASURE_null_repaired",
        "MEASURE if each neuron's a were paired with the b of other neurons of its layer or expert (permutation null)",
        SAME,
        POOLED_TABLES,
        WITH_NULLS,
    ),
    Column(
        "MEASURE_null_random",
        "MEASURE of the same layer with random weights, pooled over its neurons (only with --null random-init)",
        SAME,
        (LAYERS, NEURONS),
        WITH_NULLS,
    ),
    *(
        column
        for null, words in (("gaussian", "Gaussian"), ("repaired", "permutation"), ("random", "random-weight"))
        for column in (
            Column(f"MEASURE_excess_{null}", f"MEASURE minus its {words} null", SAME, (LAYERS, NEURONS), WITH_NULLS),
            Column(f"MEASURE_excess_{null}_se", "standard error of that difference", SAME, (LAYERS, NEURONS), WITH_NULLS),
        )
    ),
    Column(
        "MEASURE_null_random",
        "MEASURE of the same layer with random weights (only with --null random-init)",
        SAME,
        (LAYERS,),
        OUTPUT_MEASURES,
    ),
    Column("MEASURE_excess_random", "MEASURE minus that null", SAME, (LAYERS,), OUTPUT_MEASURES),
    Column("MEASURE_excess_random_se", "standard error of that difference", SAME, (LAYERS,), OUTPUT_MEASURES),
    Column(
        "MEASURE_repaired_p",
        "p-value of the neuron's MEASURE among its permutation draws",
        "p-value, 0 to 1",
        (NEURONS,),
        WITH_NULLS[:2],
    ),
    Column(
        "MEASURE_repaired_q",
        "smallest false discovery rate, within the layer, at which MEASURE differs from the permutation null",
        "q-value, 0 to 1",
        (NEURONS,),
        WITH_NULLS[:2],
    ),
    Column("MEASURE_repaired_differs", "whether that rate is at most 5 %", FLAG, (NEURONS,), WITH_NULLS[:2]),
)
IDENTIFIERS = (
    Column(
        "layer",
        "index of the layer in the model, from 0",
        INDEX,
        (LAYERS, NEURONS, CURVES, EXPERTS, EXTREMES, COSTS, REPLACEABLE, COSTS_BY_NEURON, COMPARISON_TABLE),
    ),
    Column(
        "expert",
        "index of the expert in its layer; −1 for the shared experts, which count as one; empty in a dense layer (only if "
        "some layer is a mixture)",
        INDEX,
        (NEURONS, EXPERTS, EXTREMES, COSTS_BY_NEURON),
    ),
    Column("neuron", "index in its layer, or in its expert, from 0", INDEX, (NEURONS, EXTREMES, COSTS_BY_NEURON)),
)
NEURON_COLUMNS = (
    Column("n_tokens", "number of counted tokens that reach it (only if some layer is a mixture)", TOKENS, (NEURONS,)),
    Column("bilinear_coef", "the c for which c·ab is closest to h", "coefficient", (NEURONS,)),
    Column("energy_share", "share of its layer's energy Σ w h², cross terms ignored", SHARE, (NEURONS, EXPERTS)),
    Column("mean_a", "mean of the gate pre-activation a", ACTIVATION, (NEURONS,)),
    Column("mean_b", "mean of the up pre-activation b", ACTIVATION, (NEURONS,)),
    Column("std_a", "standard deviation of a", ACTIVATION, (NEURONS,)),
    Column("std_b", "standard deviation of b", ACTIVATION, (NEURONS,)),
    Column("corr_ab", "correlation of a and b", "correlation, −1 to 1", (NEURONS,)),
    *(
        column
        for pair, signs in (("pp", "a > 0, b > 0"), ("pn", "a > 0, b ≤ 0"), ("np", "a ≤ 0, b > 0"), ("nn", "a ≤ 0, b ≤ 0"))
        for column in (
            Column(f"quadrant_{pair}", f"share of tokens with {signs}", SHARE, (NEURONS,)),
            Column(f"quadrant_energy_{pair}", f"share of E[h²] on tokens with {signs}", SHARE, (NEURONS,)),
        )
    ),
    Column("cos_qk", "cosine of q (gate row) and k (up row)", COSINE, (NEURONS, EXTREMES)),
    Column("cos_qv", "cosine of q and v (down column)", COSINE, (NEURONS,)),
    Column("cos_kv", "cosine of k and v", COSINE, (NEURONS,)),
    Column("norm_q", "‖q‖, with the gain of the norm before the MLP folded in", LENGTH, (NEURONS,)),
    Column("norm_k", "‖k‖, with the gain of the norm before the MLP folded in", LENGTH, (NEURONS,)),
    Column("norm_v", "‖v‖, with the gain of what follows the MLP folded in", LENGTH, (NEURONS,)),
    Column("score", "‖q‖‖k‖‖v‖, unchanged by k → βk, v → v/β", "product of norms", (NEURONS, EXTREMES)),
)
CURVE_COLUMNS = (
    Column("alpha", "scale α; 0 and inf are the limits α → 0+ and α → ∞, if the unit has them", "scale", (CURVES,)),
    Column("asymmetry", "asymmetry of h under (a, b) → (αa, b/α), pooled over the layer", ASYMMETRY, (CURVES,)),
    Column("asymmetry_se", "its jackknife standard error", ASYMMETRY, (CURVES,)),
    Column("null_repaired", "its permutation null", ASYMMETRY, (CURVES,)),
    Column("null_gaussian", "its Gaussian null", ASYMMETRY, (CURVES,)),
    Column("token_median", "median over tokens of each token's own asymmetry", ASYMMETRY, (CURVES,)),
    Column("relative_change", "√(E‖h′ − h‖² / E‖h‖²) under the scaling", "ratio", (CURVES,)),
)
EXPERT_COLUMNS = (
    Column("n_neurons", "number of neurons of the expert", NEURON_COUNT, (EXPERTS,)),
    Column("n_tokens", "number of counted tokens routed to it", TOKENS, (EXPERTS,)),
    Column("token_share", "share of the layer's counted tokens that were routed to it", SHARE, (EXPERTS,)),
    Column("few_tokens", "whether fewer than 256 counted tokens were routed to it", FLAG, (EXPERTS,)),
)
EXTREME_COLUMNS = (
    Column("size", "largest |h|·‖v‖ on any token, including tokens that are not counted", "norm", (EXTREMES,)),
    Column("window", "window of the corpus with that token", INDEX, (EXTREMES,)),
    Column("position", "position of that token in its window", INDEX, (EXTREMES,)),
    Column("counted", "whether that token is counted", FLAG, (EXTREMES,)),
    Column("token", "its token id", "id", (EXTREMES,)),
    Column("text", "its text", "text", (EXTREMES,)),
    Column("a", "gate pre-activation on that token", ACTIVATION, (EXTREMES,)),
    Column("b", "up pre-activation on that token", ACTIVATION, (EXTREMES,)),
    Column("h", "h on that token, in a mixture times the routing weight", ACTIVATION, (EXTREMES,)),
    Column("score_ratio", "score over the median score of the layer", "ratio", (EXTREMES,)),
)
COST_COLUMNS = (
    Column("edit", "name of the edit, as in --edits", "text", (COSTS, REPLACEABLE)),
    Column("positions", "counted: only counted positions are edited; all: every position", "text", (COSTS,)),
    Column("tokens", "number of scored tokens, the same for both choices of positions", TOKENS, (COSTS,)),
    Column("kl", "KL(model ‖ edited) when this layer alone is edited", NATS, (COSTS, REPLACEABLE)),
    Column("dce", "increase of the cross-entropy when this layer alone is edited", NATS, (COSTS,)),
    Column(
        "MEASURE_placebo",
        "the same for a random change of h with the same norm on every token",
        NATS,
        (COSTS,),
        ("kl", "dce"),
    ),
    Column(
        "MEASURE_bottom",
        "MEASURE when this layer and all before it are edited; empty for all",
        NATS,
        (COSTS,),
        ("kl", "dce"),
    ),
    Column(
        "MEASURE_top", "MEASURE when this layer and all after it are edited; empty for all", NATS, (COSTS,), ("kl", "dce")
    ),
    Column("attribution", "first-order estimate of the dce of the whole layer; empty for all", NATS, (COSTS,)),
    Column(
        "MEASURE_se",
        "standard error of MEASURE over sequences",
        NATS,
        (COSTS,),
        (*(f"{cost}{ending}" for cost in ("kl", "dce") for ending in ("", "_placebo", "_bottom", "_top")), "attribution"),
    ),
    Column(
        "asymmetry", "asymmetry of the layer's activations under the edit, if the edit is a symmetry", ASYMMETRY, (COSTS,)
    ),
    Column("MEASURE_per_asymmetry", "MEASURE over asymmetry", NATS, (COSTS,), ("kl", "kl_placebo")),
    Column("kl_EDIT", "KL(model ‖ edited) under EDIT of this layer, on counted positions", NATS, (LAYERS,)),
    Column("kl_EDIT_se", "its standard error over sequences", NATS, (LAYERS,)),
    Column("kl_EDIT_placebo", "the same for a random change of h with the same norm on every token", NATS, (LAYERS,)),
    Column("dce_EDIT", "increase of the cross-entropy under EDIT of this layer, on counted positions", NATS, (LAYERS,)),
    Column("dce_EDIT_se", "its standard error over sequences", NATS, (LAYERS,)),
    Column("dce_EDIT_placebo", "the same for a random change of h with the same norm on every token", NATS, (LAYERS,)),
    Column(
        "attribution_EDIT",
        "Σ ∂CE/∂h·(h′ − h): first-order increase of the cross-entropy under EDIT",
        NATS,
        (LAYERS, NEURONS),
    ),
    Column("attribution_EDIT_se", "its standard error over sequences", NATS, (LAYERS, NEURONS)),
    Column(
        "attribution_EDIT_placebo", "root mean square of the same sum with a random sign on every token", NATS, (NEURONS,)
    ),
    Column(
        "attribution_EDIT_per_asymmetry", "attribution over the neuron's asymmetry under EDIT, if > 0", NATS, (NEURONS,)
    ),
    Column("attribution_EDIT_placebo_per_asymmetry", "the same for the placebo", NATS, (NEURONS,)),
    Column("epsilon", "threshold ε", NATS, (REPLACEABLE,)),
    Column(
        "whole_layer",
        "whether kl plus two standard errors is below ε when the whole layer is replaced",
        FLAG,
        (REPLACEABLE,),
    ),
    Column("kl_se", "its standard error over sequences", NATS, (REPLACEABLE,)),
    Column(
        "neurons",
        "number of neurons whose |attribution|, smallest first, add up to less than ε",
        NEURON_COUNT,
        (REPLACEABLE,),
    ),
    Column("of", "number of neurons in the layer", NEURON_COUNT, (REPLACEABLE,)),
    Column(
        "largest", "true for the neurons of largest attribution, false for those drawn at random", FLAG, (COSTS_BY_NEURON,)
    ),
    Column("predicted", "attribution of the first edit on this neuron alone", NATS, (COSTS_BY_NEURON,)),
    Column("exact", "increase of the cross-entropy when this neuron alone is edited", NATS, (COSTS_BY_NEURON,)),
    Column("over", "the layers or neurons compared", "text", (AGREEMENT,)),
    Column("n", "their number", "count", (AGREEMENT,)),
    Column("rank_correlation", "Spearman correlation of attribution and exact dce", "correlation, −1 to 1", (AGREEMENT,)),
    Column("exact_per_predicted", "slope of exact against predicted through zero", "ratio", (AGREEMENT,)),
)
COMPARISON_COLUMNS = (
    Column("run", "name of the run's directory, or its path if two share a name", "text", (COMPARISON_TABLE,)),
    Column("depth", "relative depth (i + ½)/n of layer i of n", SHARE, (COMPARISON_TABLE,)),
    Column("measure", "name of a column of layers.csv", "text", (COMPARISON_TABLE,)),
    Column("value", "its value", "that of the measure", (COMPARISON_TABLE,)),
    Column("value_se", "its standard error", "that of the measure", (COMPARISON_TABLE,)),
    Column(
        "difference",
        "value minus that of the same layer of the first run; empty if the runs have different shapes",
        "that of the measure",
        (COMPARISON_TABLE,),
    ),
    Column("difference_se", "its standard error", "that of the measure", (COMPARISON_TABLE,)),
    Column("difference_low", "lower end of its 95 % interval", "that of the measure", (COMPARISON_TABLE,)),
    Column("difference_high", "upper end of its 95 % interval", "that of the measure", (COMPARISON_TABLE,)),
    Column(
        "paired",
        "whether both runs counted the same windows: then a jackknife block is left out of both at once, otherwise the two "
        "errors are combined as independent",
        FLAG,
        (COMPARISON_TABLE,),
    ),
)
COLUMNS = (
    *IDENTIFIERS,
    *OUTPUT_COLUMNS,
    *MEASURE_COLUMNS,
    *LAYER_COLUMNS,
    *EXPERT_COLUMNS,
    *NEURON_COLUMNS,
    *CURVE_COLUMNS,
    *EXTREME_COLUMNS,
    *COST_COLUMNS,
    *COMPARISON_COLUMNS,
    *FAMILIES,
)
TABLES = tuple(dict.fromkeys(table for column in COLUMNS for table in column.tables))


def columns_of(table: str) -> list[Column]:
    """The columns and families of a table."""
    return [column for column in COLUMNS if table in column.tables]


def column_named(table: str, name: str) -> Column | None:
    """What explains a column: the entry whose fixed part is longest, so that ``kl_EDIT_se`` comes before ``kl_EDIT``."""
    fitting = [column for column in columns_of(table) if column.meaning_for(name) is not None]
    return max(fitting, key=_fixed_length, default=None)


def meaning_of(table: str, name: str) -> str:
    """The meaning of a column; KeyError for one that is not listed."""
    column = column_named(table, name)
    meaning = None if column is None else column.meaning_for(name)
    if meaning is None:
        raise KeyError(f"{name} of {table} is not explained: add it to reports/columns.py")
    return meaning


def meanings(table: str, names: Iterable[str]) -> dict[str, str]:
    """The meaning of each of these columns of a table."""
    return {name: meaning_of(table, name) for name in names}


def listed_names(table: str) -> Iterator[str]:
    """Every name that is listed for a table, families over measures written out."""
    for column in columns_of(table):
        yield from column.names()


def _fixed_length(column: Column) -> int:
    return len(column.name.replace(MEASURE, "").replace(EDIT, ""))
