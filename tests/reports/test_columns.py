"""The table of columns explains every written column and lists no other; docs/output.md is generated from it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from analysis.storage.files import COMPARISON_TABLE, FIGURES, PROGRESS, RANDOM_INIT, RUN_FILES
from hooks.causal import measure_causal
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from reports.columns import COLUMNS, TABLES, column_named, listed_names, meaning_of
from reports.compare.page import write_comparison
from reports.compare.tables import compare_runs
from reports.directory import write_directory
from reports.output_reference import parts, with_tables
from tests.helpers.mixtures import with_experts

DOCUMENT = Path(__file__).parents[2] / "docs" / "output.md"
EDITS = ["exchange", "exchange-balanced", "scale:0.5", "bilinear", "relu-limit"]


def read(path: Path) -> list[str]:
    """The columns of a written table."""
    return list(pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, nrows=1))


@pytest.fixture(scope="module")
def directories(llama: LoadedModel, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A dense run with costs and random weights, the same with two layers made mixtures, and their comparison."""
    root = tmp_path_factory.mktemp("columns")
    text = llama.read(context=24, max_tokens=72)
    random = analyze(load_model(str(tiny_llama), device="cpu", random_seed=0), text, quiet=True, draws=3)
    run = analyze(llama, text, quiet=True, draws=3)
    costs = measure_causal(llama, text, run, mode="both", edits=EDITS, n_tokens=24)
    mixed = with_experts(run)
    with pytest.MonkeyPatch.context() as patch:
        for drawing in ("directory.draw_all", "directory.draw_causal", "compare.page.draw_comparison"):
            patch.setattr(f"reports.{drawing}", lambda *_: {})
        write_directory(run, root / "dense", random=random, causal=costs)
        write_directory(mixed, root / "mixture", causal=costs)  # costs of other layers, but the same columns
        write_comparison(compare_runs([run, replace(run)], ["a", "b"]), root / "comparison")
    return [root / name for name in ("dense", "mixture", "comparison")]


def written(directories: list[Path]) -> Iterator[tuple[str, str]]:
    """Every table and column that was written."""
    for directory in directories:
        for path in sorted({*directory.glob("*.csv"), *directory.glob("*.parquet")}):
            for name in read(path):
                yield path.name, name


def test_every_written_column_is_explained(directories: list[Path]) -> None:
    found = set(written(directories))
    assert {table for table, _ in found} == set(TABLES)
    assert [pair for pair in sorted(found) if column_named(*pair) is None] == []


def test_every_listed_column_is_written(directories: list[Path]) -> None:
    """By each table: every name over measures, and every family over edits."""
    found = set(written(directories))
    explained = {(table, id(column_named(table, name))) for table, name in found}
    for column in COLUMNS:
        for table in column.tables:
            if column.of or not column.is_family:
                assert {(table, name) for name in column.names()} <= found, (table, column.name)
            assert (table, id(column)) in explained, (table, column.name)


def test_a_column_is_explained_once() -> None:
    for table in TABLES:
        names = list(listed_names(table))
        assert len(names) == len(set(names)), table
    assert meaning_of("layers.csv", "kl_scale_2_se") == "its standard error over sequences"
    assert meaning_of("layers.csv", "kl_scale_2").startswith("KL(model ‖ edited) under scale_2 of this layer")
    with pytest.raises(KeyError, match="nothing of layers.csv is not explained"):
        meaning_of("layers.csv", "nothing")


def test_every_written_file_is_listed(directories: list[Path]) -> None:
    listed = {name.rstrip("/") for name in RUN_FILES}
    files = {path.name for directory in directories[:2] for path in directory.iterdir()} - {FIGURES}
    assert files <= listed
    assert listed - files == {f"{FIGURES}/*.png", PROGRESS}
    assert RANDOM_INIT in files
    assert (directories[2] / COMPARISON_TABLE).is_file()


def test_the_document_is_what_the_generator_gives() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m reports.output_reference docs/output.md"
    for part, _ in parts():
        assert text.count(f"<!-- {part}: begin -->") == 1
