"""Peak memory of the activation pass against the number of tokens: it should not grow.

    python -m benchmarks.memory [MODEL] [--tokens 2048,4096,16384,65536]

Each length runs in a process of its own. The peak is that of the whole process, model and libraries included; the last
column is the part beyond the memory after loading the model.
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import typer

from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
from benchmarks.common import long_corpus, peak_memory, report
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.models import load_model
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import read_through


def main(
    name: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    tokens: Annotated[str, typer.Option(help="Lengths, comma-separated.")] = "2048,4096,16384,65536",
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    rows, context = [], multiprocessing.get_context("spawn")
    for count in map(int, tokens.split(",")):
        mine, theirs = context.Pipe()
        process = context.Process(target=_run, args=(theirs, name, count), daemon=True)
        process.start()
        theirs.close()
        seconds, loaded, peak = mine.recv()
        process.join()
        rows.append(
            {"tokens": count, "seconds": seconds, "peak MB": peak / 1e6, "beyond the model MB": (peak - loaded) / 1e6}
        )
    report(rows, out, model=name)


def _run(answer: Connection, name: str, tokens: int) -> None:
    model = load_model(name)
    corpus = long_corpus(model, tokens)
    loaded, started = peak_memory(), time.perf_counter()
    accumulators = [accumulator_of(site, DEFAULT_ALPHAS, DEFAULT_DRAWS, layer) for layer, site in model.layers.items()]
    read_through(model, corpus, accumulators, quiet=True)
    answer.send((time.perf_counter() - started, loaded, peak_memory()))


if __name__ == "__main__":
    typer.run(main)
