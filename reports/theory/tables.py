"""The claims of theory and their checks as DataFrames, for the terminal, as JSON, and as files."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis.storage.files import CLAIMS, FIGURES, SIZES, THEOREMS, THEORY_FIGURE
from analysis.storage.staged_writes import staged
from analysis.theory.claims import Claim, Theorem, claims, theorems
from analysis.theory.gated import FAMILY
from analysis.theory.properties import Outcome
from analysis.units.registry import Unit
from reports.theory.figures import units_figure

SHAPES = {"SmolLM2-135M": (576, 1536), "a 7B model": (4096, 11008)}
"""d_model and d_mlp of a layer."""
RANK = 4
DPI = 100
SHORT = {outcome.value: word for outcome, word in zip(Outcome, ("invariant", "α>0 only", "broken"), strict=True)}


@dataclass(frozen=True)
class Theory:
    """The claims, the theorems, and the size of every form, one row each."""

    claims: pd.DataFrame
    theorems: pd.DataFrame
    sizes: pd.DataFrame

    @property
    def passed(self) -> bool:
        """Whether every claim and every theorem holds."""
        return bool(self.claims["passed"].all() and self.theorems["passed"].all())

    def to_json(self) -> str:
        """All three tables as lists of records; a number that does not exist is null."""
        tables = {name: table.astype(object).where(table.notna(), None) for name, table in vars(self).items()}
        document = {name: table.to_dict(orient="records") for name, table in tables.items()}
        return json.dumps({"passed": self.passed, **document}, indent=2, ensure_ascii=False, allow_nan=False)


def theory_of(units: dict[str, Unit]) -> Theory:
    """Predict and measure every claim about these units."""
    rows = pd.DataFrame([_claim_row(claim) for claim in claims(units)])
    columns = ["theorem", "unit", "condition", "symmetry", "passed"]
    checks = pd.DataFrame([_theorem_row(theorem) for theorem in theorems(units)], columns=columns)
    return Theory(rows, checks.astype({"passed": bool}), sizes_table())


def sizes_table() -> pd.DataFrame:
    """Parameters and operations per token of one layer, by form and shape."""
    rows = []
    for shape, (d_model, d_mlp) in SHAPES.items():
        for form in FAMILY:
            parameters, flops = form.count(d_model, d_mlp, RANK), form.count_flops(d_model, d_mlp, RANK)
            row = {"shape": shape, "form": form.__name__, "equation": form.equation, "d_model": d_model, "d_mlp": d_mlp}
            rows.append(row | {"rank": RANK, "parameters": parameters, "flops_per_token": flops})
    return pd.DataFrame(rows)


def print_theory(theory: Theory, console: Console) -> None:
    """Print the claims (one by one for a single unit, otherwise grouped), the theorems, the sizes, and the verdict."""
    single = theory.claims["unit"].nunique() == 1
    for table in (
        _by_claim(theory.claims) if single else _grouped(theory.claims),
        _theorems(theory.theorems),
        _sizes(theory.sizes),
    ):
        console.print(table)
        console.print()
    failed = int((~theory.claims["passed"]).sum() + (~theory.theorems["passed"]).sum())
    total = len(theory.claims) + len(theory.theorems)
    console.print(f"{total - failed} of {total} claims hold.", highlight=False)


def write_theory(theory: Theory, units: dict[str, Unit], directory: Path, force: bool = False) -> None:
    """Write theory.csv, theorems.csv, sizes.csv and figures/theory.png, all or none."""
    with staged(directory, force) as folder:
        theory.claims.to_csv(folder / CLAIMS, index=False)
        theory.theorems.to_csv(folder / THEOREMS, index=False)
        theory.sizes.to_csv(folder / SIZES, index=False)
        (folder / FIGURES).mkdir()
        units_figure(units).savefig(folder / FIGURES / THEORY_FIGURE, dpi=DPI)


def _claim_row(claim: Claim) -> dict[str, object]:
    witness = claim.witness
    values = (witness.a, witness.b, witness.action, witness.before, witness.after) if witness else (np.nan,) * 5
    names = ("witness_a", "witness_b", "witness_action", "witness_before", "witness_after")
    return {
        "unit": claim.unit,
        "form": claim.form,
        "action": claim.action,
        "prediction": claim.prediction.value,
        "measured": claim.measured.value,
        "residual": claim.residual,
        "residual_negative": claim.residual_negative,
        **dict(zip(names, values, strict=True)),
        "passed": claim.passed,
    }


def _theorem_row(theorem: Theorem) -> dict[str, object]:
    row = {"theorem": theorem.name, "unit": theorem.unit, "condition": theorem.condition, "symmetry": theorem.symmetry}
    return row | {"passed": theorem.passed}


def _by_claim(claims: pd.DataFrame) -> Table:
    """One line per claim."""
    title = f"Claims about {claims['unit'].iloc[0]}"
    table = _table(title, "form", "action", "theory says", "largest change", "at α, β < 0", "witness", "verdict")
    for row in claims.itertuples():
        texts = (_number(row.residual), _number(row.residual_negative), _witness(row), _verdict([row.passed]))
        table.add_row(row.form, row.action, SHORT[row.prediction], *texts)
    return table


def _grouped(claims: pd.DataFrame) -> Table:
    """One line for all units with the same prediction, with the witness of the first."""
    title = "Claims: largest relative change of the output over the units of a line"
    table = _table(title, "form", "action", "theory says", "units", "largest change", "one witness", "verdict")
    places = pd.factorize(claims["form"] + claims["action"])[0]
    in_order = claims.assign(place=places).sort_values("place", kind="stable")
    for (form, action, prediction), cells in in_order.groupby(["form", "action", "prediction"], sort=False):
        first, names = next(cells.itertuples()), ", ".join(cells["unit"])
        invariant = SHORT[prediction] == "invariant"
        change = np.nanmax(cells[["residual", "residual_negative"] if invariant else ["residual"]].to_numpy())
        witness = "" if invariant else f"{first.unit}: {_witness(first)}"
        units = "all" if len(cells) == claims.query("form == @form")["unit"].nunique() else names
        table.add_row(form, action, SHORT[prediction], units, _number(change), witness, _verdict(cells["passed"]))
    return table


def _theorems(checks: pd.DataFrame) -> Table:
    """One line per theorem and unit: how far the condition on σ, and the symmetry, are from holding."""
    table = _table(
        "Theorems: exchange ⇔ σ(z)/z constant; scaling ⇔ σ(αz) = ασ(z)",
        *("theorem", "unit", "σ is off by", "σ(a)b is off by", "verdict"),
    )
    for row in checks.itertuples():
        table.add_row(row.theorem, row.unit, _number(row.condition), _number(row.symmetry), _verdict([row.passed]))
    return table


def _sizes(sizes: pd.DataFrame) -> Table:
    """One line per form: its parameters and operations per token in one layer of each shape."""
    shapes = [f"{shape}: {what}" for shape in SHAPES for what in ("parameters", "FLOPs/token")]
    table = _table(f"Size of one layer (rank {RANK} if the form has a free rank)", "form", "equation", *shapes)
    for form, rows in sizes.groupby("form", sort=False):
        numbers = rows[["parameters", "flops_per_token"]].to_numpy().ravel()
        table.add_row(form, rows["equation"].iloc[0], *(f"{number:.3g}" for number in numbers))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


def _number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.1e}"


def _witness(row: object) -> str:
    if pd.isna(row.witness_a):  # type: ignore[attr-defined]
        return ""
    where = f"a = {row.witness_a:g}, b = {row.witness_b:g}, {row.witness_action}"  # type: ignore[attr-defined]
    return f"{where}: {row.witness_before + 0.0:.3g} → {row.witness_after + 0.0:.3g}"  # type: ignore[attr-defined]


def _verdict(passed: Iterable[bool]) -> str:
    return "holds" if all(passed) else "[bold red]FAILS[/]"
