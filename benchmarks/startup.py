"""How long it takes until the first batch is read: import, load, first batch; each in a fresh process.

    python -m benchmarks.startup [MODEL] [--times 3]

"first" deletes the caches of earlier runs: the compiled loop of ``analysis.sums.kernel`` and, with --download, the model's
files. "second" finds both.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from shutil import rmtree
from typing import Annotated

import typer

from benchmarks.common import report
from hooks.loading.builtin import DEFAULT_MODEL, builtin_directory, builtin_named

ROOT = Path(__file__).parent.parent
PROGRAM = """
import time
t = [time.perf_counter()]
from hooks.models import load_model
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import read_through
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
t.append(time.perf_counter())
model = load_model({name!r})
t.append(time.perf_counter())
corpus = model.read(max_tokens=2048)
accumulators = [accumulator_of(s, DEFAULT_ALPHAS, DEFAULT_DRAWS, layer) for layer, s in model.layers.items()]
t.append(time.perf_counter())
read_through(model, corpus, accumulators, quiet=True)
t.append(time.perf_counter())
print(*(b - a for a, b in zip(t, t[1:])))
"""


def main(
    name: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    times: Annotated[int, typer.Option(min=1)] = 3,
    download: Annotated[bool, typer.Option("--download", help="Fetch the model's files anew for the first start.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    for compiled in ROOT.glob("analysis/__pycache__/fused.*.nb*"):
        compiled.unlink()
    if download:
        rmtree(builtin_directory(builtin_named(name)), ignore_errors=True)
    found = {"first": [_start(name)], "second": [_start(name) for _ in range(times)]}
    rows = []
    for start, measured in found.items():
        imported, loaded, prepared, read = (statistics.median(column) for column in zip(*measured, strict=True))
        steps = {"start": start, "import": imported, "load": loaded, "prepare": prepared}
        rows.append(steps | {"until the first batch": imported + loaded + prepared, "the first batch": read})
    report(rows, out, model=name, times=times)


def _start(name: str) -> list[float]:
    command, environment = [sys.executable, "-c", PROGRAM.format(name=name)], os.environ | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return [float(part) for part in made.stdout.split()]


if __name__ == "__main__":
    typer.run(main)
