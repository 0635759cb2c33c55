"""Tables and sentences about one neuron: its rank in its layer, scaling curve, sign pairs, and costs of edits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pandas import DataFrame
from torch import Tensor

from analysis.errors import UserError
from analysis.measures import asymmetry as measures
from analysis.measures.false_discovery import FALSE_DISCOVERY_RATE
from analysis.neuron import NeuronRecord
from analysis.storage.files import NEURONS
from analysis.sums.layout import QUADRANTS, scaling_name
from reports.columns import meanings
from reports.html.render import standard_error

WEIGHTS = meanings(NEURONS, "norm_q norm_k norm_v cos_qk cos_qv cos_kv score".split())
MEASURES = meanings(
    NEURONS,
    (
        "exchange exchange_balanced scaling_half scaling_double scaling_flip euler_residual placement bilinear_share "
        "bilinear_coef energy_share gate_positive corr_ab"
    ).split(),
)
"""Numbers of a neuron that are shown with their distribution over its layer."""
SIGNS = {"pp": "a > 0, b > 0", "pn": "a > 0, b ≤ 0", "np": "a ≤ 0, b > 0", "nn": "a ≤ 0, b ≤ 0"}
BINS = 25
LONG_TAILED = 30
"""A histogram is logarithmic if the largest value exceeds this many medians."""
ATTRIBUTION = "attribution_"


@dataclass(frozen=True)
class Histogram:
    """The distribution of a number over the neurons of a layer.

    Attributes:
        bars: heights, the largest being 1.
        own_bin: the bin of this neuron.
        logarithmic: whether the bins are equally wide in the logarithm.
    """

    bars: tuple[float, ...]
    own_bin: int
    logarithmic: bool


Columns = dict[str, Tensor]
"""The table of neurons of its layer, from ``Estimates.neuron_numbers``."""


def standing(columns: Columns, at: int) -> DataFrame:
    """One row per number: its value, with error and nulls if it has them, and its rank in its layer.

    Columns: ``name, value, se, null_gaussian, null_repaired, layer_median, rank, of, percentile``. The rank is 1 for the
    largest; the percentile is the share of the layer's neurons below, counting half of those that are equal.
    """
    rows = []
    for name in (*WEIGHTS, *MEASURES):
        values = columns[name].numpy()
        value, known = float(values[at]), values[np.isfinite(values)]
        above, below = int((known > value).sum()), int((known < value).sum())
        row: dict[str, object] = {"name": name, "value": value}
        for part in ("se", "null_gaussian", "null_repaired"):
            row[part] = float(columns[f"{name}_{part}"][at]) if f"{name}_{part}" in columns else np.nan
        row |= {"layer_median": float(np.median(known)) if len(known) else np.nan}
        missing = not np.isfinite(value)
        row |= {"rank": np.nan if missing else above + 1, "of": len(known)}
        rows.append(row | {"percentile": np.nan if missing else 50 * (below + len(known) - above) / len(known)})
    return DataFrame(rows).set_index("name")


def histogram(values: np.ndarray, at: int) -> Histogram | None:
    """The layer's distribution of a number; None if this neuron has no value."""
    value, known = values[at], values[np.isfinite(values)]
    if not np.isfinite(value):
        return None
    logarithmic = bool(known.min() > 0 and known.max() > LONG_TAILED * np.median(known))
    known, value = (np.log(known), np.log(value)) if logarithmic else (known, value)
    edges = np.histogram_bin_edges(known, BINS)
    counts, _ = np.histogram(known, edges)
    own_bin = min(int(np.searchsorted(edges, value, side="right")) - 1, BINS - 1)
    return Histogram(tuple(np.sqrt(counts / counts.max()).tolist()), own_bin, logarithmic)


def curve(record: NeuronRecord) -> DataFrame:
    """One row per α: the neuron's asymmetry with its nulls, and median and quartiles over the neurons of its layer."""
    sums, at = record.measured.moments.neuron, record.neuron
    alphas, gaussian = sums.layout.alphas, record.measured.estimates.gaussian
    every = measures.scaling(sums).numpy()
    low, median, high = np.nanquantile(every, [0.25, 0.5, 0.75], axis=1)
    return DataFrame(
        {
            "alpha": alphas,
            "asymmetry": every[:, at],
            "null_gaussian": [float(gaussian[scaling_name(alpha)].by_neuron[at]) for alpha in alphas],
            "null_repaired": measures.scaling_null_repaired(sums)[:, at].numpy(),
            "layer_q1": low,
            "layer_median": median,
            "layer_q3": high,
        }
    )


def quadrants(columns: Columns, at: int) -> DataFrame:
    """Shares of tokens and of energy for every sign pair, of the neuron and of the median neuron of its layer."""
    rows = []
    for quadrant in QUADRANTS:
        tokens, energy = columns[f"quadrant_{quadrant}"], columns[f"quadrant_energy_{quadrant}"]
        medians = float(tokens.nanquantile(0.5)), float(energy.nanquantile(0.5))
        own = float(tokens[at]), float(energy[at])
        rows.append((quadrant, SIGNS[quadrant], own[0], medians[0], own[1], medians[1]))
    names = ["quadrant", "signs", "tokens", "tokens_median", "energy", "energy_median"]
    return DataFrame(rows, columns=names).set_index("quadrant")


def costs(directory: Path, record: NeuronRecord) -> DataFrame:
    """What edits of this neuron alone cost, to first order, as a run with causal results has it; empty without them.

    Columns: ``edit, attribution, se, placebo, percentile``: ΔCE in nats per token, its standard error over sequences, the
    typical size of a placebo, and the share of the layer's neurons whose |ΔCE| is smaller.
    """
    try:
        table = pd.read_parquet(directory / "neurons.parquet")
    except FileNotFoundError:
        return DataFrame()
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / 'neurons.parquet'} is not readable ({error}): analyze again") from error
    layer = table[table["layer"] == record.layer].reset_index(drop=True)  # in the order of the layer's columns
    names = [name for name in layer if name.startswith(ATTRIBUTION) and f"{name}_se" in layer]
    rows = []
    for name in names:
        sizes, value = layer[name].abs(), float(layer.loc[record.neuron, name])
        se, placebo = (float(layer[f"{name}_{part}"].get(record.neuron, np.nan)) for part in ("se", "placebo"))
        rows.append((name.removeprefix(ATTRIBUTION), value, se, placebo, 100 * float((sizes < abs(value)).mean())))
    return DataFrame(rows, columns=["edit", "attribution", "se", "placebo", "percentile"])


def sentences(record: NeuronRecord, table: DataFrame, parts: DataFrame) -> Iterator[str]:
    """What the numbers say, in plain words; a sentence whose numbers are missing is left out."""
    score, cosine = table.loc["score"], table.loc["cos_qk"]
    yield (
        f"Its score ‖q‖‖k‖‖v‖ is {score['value']:.3g}, {score['value'] / score['layer_median']:.3g} times the layer's "
        f"median: {_place(score)}."
    )
    if np.isfinite(cosine["value"]):
        yield f"The cosine of query and key is {_signed(cosine['value'])} (layer median {_signed(cosine['layer_median'])})."
    if parts["energy"].isna().any():
        yield "h is 0 on every counted token, so its ratios are undefined."
    else:
        largest, open_share = parts.loc[parts["energy"].idxmax()], table.loc["gate_positive", "value"]
        gate = f"open (a > 0) on {open_share:.2%} of the tokens" if open_share else "closed (a ≤ 0) on every token"
        yield (
            f"Its gate is {gate}; {largest['energy']:.0%} of its energy is at {largest['signs']}, on "
            f"{largest['tokens']:.1%} of the tokens."
        )
    balanced = table.loc["exchange_balanced"]
    if np.isfinite(balanced["value"]):
        yield (
            f"Its balanced exchange asymmetry is {_with_error(balanced)}: {_place(balanced)}. "
            f"The permutation null is {balanced['null_repaired']:.3f}{_differs(record)}."
        )
    double, flip = table.loc["scaling_double"], table.loc["scaling_flip"]
    if np.isfinite(double["value"]) and np.isfinite(flip["value"]):
        yield f"Its asymmetry under scaling by α = 2 is {_with_error(double)}, under the sign flip {_with_error(flip)}."
    share = table.loc["bilinear_share"]
    if np.isfinite(share["value"]):
        best = f"{table.loc['bilinear_coef', 'value']:.3g}".replace("-", "−")
        yield f"The bilinear unit c·ab explains at best {share['value']:.0%} of its energy, with c = {best}."
    yield _peak(record)


def remarks(record: NeuronRecord) -> Iterator[str]:
    """What to know before relying on a number."""
    if record.run is not None and not record.same_text:
        yield (
            f"The numbers are from the run {record.run}, which counted a different text; the sample and the contexts are "
            f"from {record.corpus['name']}."
        )
    stored = record.model["weights"]
    if "bit" in stored or "quantized" in stored:
        yield f"The weights are quantized ({stored}); cosines and readouts are those of the quantized weights."
    if record.corpus["cut_at_max_tokens"]:
        yield "The corpus was cut at --tokens."


def _peak(record: NeuronRecord) -> str:
    h, a, b = record.measured.moments.peaks.values[:, record.neuron].tolist()
    window, position, _, counted = record.measured.moments.peaks.places[:, record.neuron].tolist()
    aside = "" if counted else ", which is fed but not counted"
    numbers = f"{h:.3g} (a {a:.3g}, b {b:.3g})".replace("-", "−")
    return (
        f"Its largest |h| on any token: h = {numbers} on “{record.peak_text}”, window {window}, position {position}{aside}."
    )


def _place(row: pd.Series) -> str:
    return f"rank {int(row['rank']):,} of {int(row['of']):,} from the largest"


def _with_error(row: pd.Series) -> str:
    return f"{row['value']:.3f}" + (f" ± {standard_error(row['se'])}" if np.isfinite(row["se"]) else "")


def _differs(record: NeuronRecord) -> str:
    if "exchange_balanced" not in record.measured.estimates.discoveries:
        return ""
    _, q, differs = record.measured.estimates.discoveries["exchange_balanced"]
    if not bool(q[record.neuron].isfinite()):
        return ""
    verb = "differs" if bool(differs[record.neuron]) else "does not differ"
    return f"; it {verb} from it at a false discovery rate of {FALSE_DISCOVERY_RATE:.0%} in its layer"


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
