"""The command that writes tables into docs/findings.md: numbers of the run, and nothing else in the file is touched."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.errors import UserError
from hooks.causal import measure_causal
from hooks.collect import analyze
from hooks.models import LoadedModel
from reports.directory import write_directory
from reports.findings import BEGIN, END, main, written_into


@pytest.fixture(scope="module")
def directory(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, corpus = tmp_path_factory.mktemp("found") / "run", llama.read(context=24, max_tokens=60)
    run = analyze(llama, corpus, quiet=True)
    causal = measure_causal(llama, corpus, run, mode="exact", edits=["exchange", "relu-limit"], n_tokens=48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reports.directory.draw_all", lambda _: {})
        patch.setattr("reports.directory.draw_causal", lambda *_: {})
        write_directory(run, folder, causal=causal)
    return folder


def test_tables_are_put_between_the_marks(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "findings.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main([str(file), str(directory)])
    first = file.read_text()
    main([str(file), str(directory)])
    assert file.read_text() == first
    assert first.startswith(f"before\n{BEGIN}\n")
    assert first.endswith(f"{END}\nafter\n")
    assert "old" not in first
    costs = pd.read_csv(directory / "causal.csv").set_index(["layer", "edit", "positions"])
    counted, everywhere = (costs.xs(positions, level="positions") for positions in ("counted", "all"))
    lines = [line for line in first.splitlines() if line.startswith("| 1 |")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kl, dce, on_all = (counted.loc[1, "exchange"][["kl", "kl_placebo"]], counted.loc[1, "relu-limit"]["dce"], everywhere)
    assert [float(part.strip("()")) for part in cells[0][1].split()] == pytest.approx(kl.tolist(), rel=0.06)
    assert float(cells[1][2].split()[0]) == pytest.approx(dce, abs=6e-4)
    assert float(cells[2][1]) == pytest.approx(on_all.loc[1, "exchange"]["kl"], rel=0.06)


def test_what_cannot_be_written(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no marks"):
        written_into("a text without marks", "tables")
    file = tmp_path / "findings.md"
    file.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(UserError, match="has no exact sweep: analyze with --causal exact or both"):
        main([str(file), str(tmp_path)])
