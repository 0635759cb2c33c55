"""Calls of the command line: quick options, the files that a run is, and what a refusal looks like."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from run_analysis import app

ROOT = Path(__file__).parent.parent.parent
QUICK = ["--context", "32", "--tokens", "160", "--device", "cpu"]
SPREADSHEETS = {"layers.csv", "curves.csv", "extremes.csv", "causal.csv", "causal_replaceable.csv"}
SUMS = {"moments.safetensors", "causal.safetensors"}
FILES = {"run.json", "neurons.parquet", "report.html", "figures", *SUMS, *SPREADSHEETS}


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@contextmanager
def no_figures() -> Iterator[None]:
    """Directories of runs are written without figures, which are most of the time that writing takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reports.directory.draw_all", lambda _: {})
        patch.setattr("reports.directory.draw_causal", lambda *_: {})
        yield


def refused(*arguments: object) -> str:
    """The one line that a call with bad input prints; it must exit with 2."""
    code, out, err = call(*arguments)
    assert code == 2, (code, out, err)
    assert out == ""
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]
