"""Runs compared: layer by layer for the same architecture, by relative depth otherwise.

The first run is the reference. A run of the same shape gets its differences from it, layer by layer, with errors that are
paired if both counted the same windows (``analysis.compare``). The relative depth of layer i of n is (i + ½)/n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare import COMPARED, difference, estimate, same_shape, same_windows
from analysis.errors import UserError
from analysis.measures.jackknife import FEW_JACKKNIFE_BLOCKS, filled_jackknife_blocks
from analysis.run import Run

VERDICT_MEASURES = {
    "output_exchange_balanced": "what a layer writes, balanced exchange",
    "output_scaling_double": "what a layer writes, scaling at α = 2",
    "output_scaling_flip": "what a layer writes, sign flip",
    "output_exchange": "what a layer writes, exchange as stored",
    "exchange_balanced": "neurons' mean, balanced exchange",
    "bilinear_share": "bilinear share",
}
"""The measures of the verdict, in words."""
THIRDS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison.

    Attributes:
        label: the name of its directory, or the whole path where two directories share a name.
        directory: where it is.
        run: the loaded run.
        comparable: whether it has the shape of the first run, so that layers correspond.
        paired: whether it counted the same windows as the first run.
    """

    label: str
    directory: Path
    run: Run
    comparable: bool
    paired: bool


@dataclass(frozen=True)
class Comparison:
    """Compared runs; the first is the reference.

    Attributes:
        runs: two or more.
        table: one row per run, layer and measure (``reports.columns``).
    """

    runs: tuple[ComparedRun, ...]
    table: pd.DataFrame

    @property
    def reference(self) -> ComparedRun:
        return self.runs[0]

    @property
    def others(self) -> tuple[ComparedRun, ...]:
        return self.runs[1:]

    @property
    def passed(self) -> bool:
        """Whether every check and control of every run passed."""
        return all(one.run.passed for one in self.runs)


def compare(directories: Sequence[Path]) -> Comparison:
    """Load and compare runs; UserError for fewer than two, a directory without a run, or a repeated directory."""
    if len(directories) < 2:
        raise UserError(f"{len(directories)} directory given: compare needs at least two")
    places = [directory.resolve() for directory in directories]
    for place, directory in zip(places, directories, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{directory} is given twice: name runs that differ")
    names = [place.name for place in places]
    labels = [
        name if names.count(name) == 1 else str(directory) for name, directory in zip(names, directories, strict=True)
    ]
    return compare_runs([Run.load(directory) for directory in directories], labels, directories)


def compare_runs(runs: Sequence[Run], labels: Sequence[str], directories: Sequence[Path] = ()) -> Comparison:
    """Compare loaded runs under these labels; the directories are only for display."""
    first = runs[0]
    places = directories or [Path(label) for label in labels]
    compared = tuple(
        ComparedRun(label, place, run, same_shape(first, run), same_windows(first, run))
        for label, place, run in zip(labels, places, runs, strict=True)
    )
    rows = [row for one in compared for row in _rows(one, compared[0])]
    return Comparison(compared, pd.DataFrame(rows))


def by_third(comparison: Comparison) -> pd.DataFrame:
    """The median over layers of each third of the depth, one row per measure and run; NaN for a third without layers."""
    thirds = pd.cut(comparison.table["depth"], [0, 1 / 3, 2 / 3, 1], labels=THIRDS)
    grouped = comparison.table.groupby(["measure", "run", thirds], sort=False, observed=False)["value"]
    return grouped.median().unstack().reindex(columns=list(THIRDS))


def difference_numbers(comparison: Comparison, other: ComparedRun, measure: str) -> dict[str, Any]:
    """The differences of one run from the reference in one measure; only the medians if layers do not correspond."""
    table = comparison.table[comparison.table["measure"] == measure]
    own = table[table["run"] == other.label].set_index("layer")
    reference = table.loc[table["run"] == comparison.reference.label, "value"]
    numbers = {"median": _number(own["value"].median()), "reference_median": _number(reference.median())}
    found = own["difference"].dropna()
    if not other.comparable or found.empty:
        return numbers
    largest = int(found.abs().idxmax())
    return numbers | {
        "median_difference": _number(found.median()),
        "layers_compared": len(found),
        "layers_higher": int((own["difference_low"] > 0).sum()),
        "layers_lower": int((own["difference_high"] < 0).sum()),
        "largest_difference": _number(found[largest]),
        "layer_of_largest": largest,
        "intervals": bool(own["difference_se"].notna().any()),
    }


def verdict(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    """For each run but the first: how it was compared, and one sentence per measure that has numbers."""
    for one in comparison.others:
        found = ((words, difference_numbers(comparison, one, measure)) for measure, words in VERDICT_MEASURES.items())
        sentences = [f"{words}: {_in_words(numbers)}" for words, numbers in found if _known(numbers)]
        yield _how(comparison.reference, one), sentences


def warnings(comparison: Comparison) -> Iterator[str]:
    """Differences between the runs other than the models, and problems of single runs."""
    reference = comparison.reference
    for one in comparison.others:
        for key, value in one.run.settings.items():
            if value != reference.run.settings.get(key):
                yield f"{one.label} has {key} {value}, {reference.label} has {reference.run.settings.get(key)}"
        if not one.paired:
            yield (
                f"{one.label} counted different windows from {reference.label}: "
                "the text, the tokenizer or the number of tokens differs"
            )
        missing = sorted(set(reference.run.layers) ^ set(one.run.layers))
        if one.comparable and missing:
            yield f"only one of {one.label} and {reference.label} has layer {', '.join(map(str, missing))}"
    for one in comparison.runs:
        if not one.run.passed:
            yield f"{one.label}: a check or a control failed: see its report"
        blocks = min(filled_jackknife_blocks(layer.moments) for layer in one.run.layers.values())
        if blocks < FEW_JACKKNIFE_BLOCKS:
            yield f"{one.label}: standard errors rest on {blocks} blocks of sequences, fewer than {FEW_JACKKNIFE_BLOCKS}"


def _rows(one: ComparedRun, reference: ComparedRun) -> Iterator[dict[str, Any]]:
    """One row per layer and measure."""
    for index, layer in one.run.layers.items():
        place = {"run": one.label, "layer": index, "depth": (index + 0.5) / one.run.model["n_layers"]}
        other = reference.run.layers.get(index) if one.comparable and one is not reference else None
        for name in COMPARED:
            own = estimate(name, layer)
            row = place | {"measure": name, "value": own.value, "value_se": own.error, "value_reach": own.reach}
            gap, error, reach = np.nan, np.nan, np.nan
            if other is not None:
                found = difference(name, other, layer, one.paired)
                gap, error, reach = found.value, found.error, found.reach
            row |= {"difference": gap, "difference_se": error}
            yield row | {"difference_low": gap - reach, "difference_high": gap + reach, "paired": one.paired}


def _how(reference: ComparedRun, one: ComparedRun) -> str:
    if not one.comparable:
        depths = f"{one.run.model['n_layers']} and {reference.run.model['n_layers']} layers"
        return f"{one.label} against {reference.label} by relative depth ({depths}, different shapes)"
    errors = "paired errors: same windows" if one.paired else "independent errors: different windows"
    return f"{one.label} against {reference.label} layer by layer ({errors})"


def _known(numbers: dict[str, Any]) -> bool:
    return numbers["median"] is not None and numbers["reference_median"] is not None


def _in_words(numbers: dict[str, Any]) -> str:
    medians = f"median over layers {numbers['median']:.3g} against {numbers['reference_median']:.3g}"
    if "median_difference" not in numbers:
        return medians
    layers = numbers["layers_compared"]
    counted = f"; higher in {numbers['layers_higher']} and lower in {numbers['layers_lower']} of {layers} layers"
    largest = f"largest difference {numbers['largest_difference']:+.2g} in layer {numbers['layer_of_largest']}"
    return f"{medians}{counted + ' (95 % intervals)' if numbers['intervals'] else ''}; {largest}".replace("-", "−")


def _number(value: float) -> float | None:
    return None if pd.isna(value) else float(value)
