"""Runs side by side: the same architecture layer by layer, any others on relative depth.

The first run is the reference. A run of the same shape gets differences from it, layer by layer, with errors that are
paired where both counted the same windows (``analysis.compare``). The relative depth of layer i of n is (i + ½)/n.
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

TOLD = {
    "exchange_balanced": "balanced exchange asymmetry",
    "scaling_double": "scaling asymmetry at α = 2",
    "scaling_flip": "asymmetry under the sign flip",
    "bilinear_share": "bilinear share",
}
"""The measures that sentences are made of, in words."""
THIRDS = ("first third", "middle third", "last third")


@dataclass(frozen=True)
class Side:
    """A run in a comparison.

    Attributes:
        label: the name of its directory, or the whole path where two directories share a name.
        directory: where it is.
        run: what was found.
        comparable: whether it has the shape of the first run, so that layers correspond.
        paired: whether it also counted the same windows.
    """

    label: str
    directory: Path
    run: Run
    comparable: bool
    paired: bool


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; the first is the reference.

    Attributes:
        sides: the runs, two or more.
        table: one row per run, layer and measure, as ``docs/output.md`` says.
    """

    sides: tuple[Side, ...]
    table: pd.DataFrame

    @property
    def reference(self) -> Side:
        return self.sides[0]

    @property
    def others(self) -> tuple[Side, ...]:
        return self.sides[1:]

    @property
    def passed(self) -> bool:
        """Whether every check and control of every run came out as it must."""
        return all(side.run.passed for side in self.sides)


def compare(directories: Sequence[Path]) -> Comparison:
    """Load runs and set them side by side; UserError if there are fewer than two, one is none, or one is given twice."""
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
    """Set runs side by side under these labels; directories are only named."""
    first = runs[0]
    places = directories or [Path(label) for label in labels]
    sides = tuple(
        Side(label, place, run, same_shape(first, run), same_windows(first, run))
        for label, place, run in zip(labels, places, runs, strict=True)
    )
    rows = [row for side in sides for row in _rows(side, sides[0])]
    return Comparison(sides, pd.DataFrame(rows))


def by_third(comparison: Comparison) -> pd.DataFrame:
    """The median over layers of each third of the depth, one row per measure and run; NaN where a third has no layer."""
    thirds = pd.cut(comparison.table["depth"], [0, 1 / 3, 2 / 3, 1], labels=THIRDS)
    grouped = comparison.table.groupby(["measure", "run", thirds], sort=False, observed=False)["value"]
    return grouped.median().unstack().reindex(columns=list(THIRDS))


def difference_numbers(comparison: Comparison, side: Side, measure: str) -> dict[str, Any]:
    """How one run differs from the reference in one measure; the medians alone where layers do not correspond."""
    table = comparison.table[comparison.table["measure"] == measure]
    mine = table[table["run"] == side.label].set_index("layer")
    reference = table.loc[table["run"] == comparison.reference.label, "value"]
    numbers = {"median": _number(mine["value"].median()), "reference_median": _number(reference.median())}
    found = mine["difference"].dropna()
    if not side.comparable or found.empty:
        return numbers
    largest = int(found.abs().idxmax())
    return numbers | {
        "median_difference": _number(found.median()),
        "layers_compared": len(found),
        "layers_higher": int((mine["difference_low"] > 0).sum()),
        "layers_lower": int((mine["difference_high"] < 0).sum()),
        "largest_difference": _number(found[largest]),
        "layer_of_largest": largest,
        "intervals": bool(mine["difference_se"].notna().any()),
    }


def verdict(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    """What the numbers of each run but the first say: how it was compared, and a sentence a measure that has numbers."""
    for side in comparison.others:
        told = ((words, difference_numbers(comparison, side, measure)) for measure, words in TOLD.items())
        yield _how(comparison.reference, side), [f"{words}: {_told(numbers)}" for words, numbers in told if _known(numbers)]


def warnings(comparison: Comparison) -> Iterator[str]:
    """What stands between the runs besides the models, and what is wrong with one of them."""
    reference = comparison.reference
    for side in comparison.others:
        for key, value in side.run.settings.items():
            if value != reference.run.settings.get(key):
                yield f"{side.label} has {key} {value}, {reference.label} {reference.run.settings.get(key)}"
        if not side.paired:
            yield f"{side.label} counted other windows than {reference.label}: another text, tokenizer or number of tokens"
        missing = sorted(set(reference.run.layers) ^ set(side.run.layers))
        if side.comparable and missing:
            yield f"{side.label} and {reference.label} do not both have layer {', '.join(map(str, missing))}"
    for side in comparison.sides:
        if not side.run.passed:
            yield f"{side.label}: a check or a control failed; its own report says which"
        blocks = min(filled_jackknife_blocks(layer.moments) for layer in side.run.layers.values())
        if blocks < FEW_JACKKNIFE_BLOCKS:
            yield f"{side.label}: errors rest on {blocks} blocks of sequences, fewer than {FEW_JACKKNIFE_BLOCKS}"


def _rows(side: Side, reference: Side) -> Iterator[dict[str, Any]]:
    """One row per layer and measure."""
    for index, layer in side.run.layers.items():
        place = {"run": side.label, "layer": index, "depth": (index + 0.5) / side.run.model["n_layers"]}
        other = reference.run.layers.get(index) if side.comparable and side is not reference else None
        for name in COMPARED:
            own = estimate(name, layer)
            row = place | {"measure": name, "value": own.value, "value_se": own.error, "value_reach": own.reach}
            gap, error, reach = np.nan, np.nan, np.nan
            if other is not None:
                found = difference(name, other, layer, side.paired)
                gap, error, reach = found.value, found.error, found.reach
            row |= {"difference": gap, "difference_se": error}
            yield row | {"difference_low": gap - reach, "difference_high": gap + reach, "paired": side.paired}


def _how(reference: Side, side: Side) -> str:
    if not side.comparable:
        depths = f"{side.run.model['n_layers']} and {reference.run.model['n_layers']} layers"
        return f"{side.label} against {reference.label} on relative depth ({depths}, of other shapes)"
    errors = "errors paired by blocks of the same windows" if side.paired else "errors combined: other windows were counted"
    return f"{side.label} against {reference.label} layer by layer ({errors})"


def _known(numbers: dict[str, Any]) -> bool:
    return numbers["median"] is not None and numbers["reference_median"] is not None


def _told(numbers: dict[str, Any]) -> str:
    medians = f"median over layers {numbers['median']:.3g} against {numbers['reference_median']:.3g}"
    if "median_difference" not in numbers:
        return medians
    layers = numbers["layers_compared"]
    counted = f"; higher in {numbers['layers_higher']} and lower in {numbers['layers_lower']} of {layers} layers"
    largest = f"largest difference {numbers['largest_difference']:+.2g} in layer {numbers['layer_of_largest']}"
    return f"{medians}{counted + ' (95 % intervals)' if numbers['intervals'] else ''}; {largest}".replace("-", "−")


def _number(value: float) -> float | None:
    return None if pd.isna(value) else float(value)
