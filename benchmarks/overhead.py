"""The cost of the analysis compared with a plain forward pass of the same model over the same tokens.

    python -m benchmarks.overhead [MODEL] [--dtype float32] [--batch 8] [--context 256] [--batches 2] [--pairs 7]

Three passes in turn, so that other load on the machine affects all of them, and the median of their ratios:

    plain       the Hugging Face model with logits: model(ids, use_cache=False)
    no head     the same without the unembedding
    analysis    ``analyze``'s activation pass over the same tokens with every default measure

On a CPU the first two run in a process of their own, which does not keep freed memory (``analysis.memory``). With --keep
it does: then the ratio shows the cost of the statistics alone.
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from analysis.memory import freed_memory_kept
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
from benchmarks.common import machine
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.loading.prepare import resolve_device, resolve_dtype
from hooks.loading.sources import load_files, locate
from hooks.models import load_model
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import read_through

Ask = Callable[[str], float]
"""Seconds of one plain pass: 'plain' or 'no head'."""


def main(
    name: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option()] = "float32",
    device: Annotated[str, typer.Option()] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Windows at once.")] = 8,
    context: Annotated[int, typer.Option(min=2)] = 256,
    batches: Annotated[int, typer.Option(min=1, help="Batches in a pass.")] = 2,
    pairs: Annotated[int, typer.Option(min=1)] = 7,
    keep: Annotated[bool, typer.Option("--keep", help="The plain pass keeps freed memory too.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    model = load_model(name, dtype=dtype, device=device)
    corpus = model.read(context=context, max_tokens=batches * batch * context)
    tokens = torch.stack([window.tokens for window in corpus.windows]).split(batch)
    accumulators = [accumulator_of(site, DEFAULT_ALPHAS, DEFAULT_DRAWS, layer) for layer, site in model.layers.items()]
    seconds: dict[str, list[float]] = {"plain": [], "no head": [], "analysis": []}
    plainly = _here(model.hf_model, tokens) if model.device.type == "cuda" else _elsewhere(name, dtype, tokens, keep)
    with plainly as ask:
        for turn in range(pairs + 1):
            taken = {
                "analysis": timed(
                    lambda: read_through(model, corpus, accumulators, batch_size=batch, quiet=True), model.device
                ),
                "plain": ask("plain"),
                "no head": ask("no head"),
            }
            for what, took in taken.items():
                seconds[what] += [took] if turn else []  # the first turn warms up
    ratios = {
        what: [analysed / took for analysed, took in zip(seconds["analysis"], seconds[what], strict=True)]
        for what in ("plain", "no head")
    }
    kept = ", freed memory kept in all" if keep else ""
    print(f"{model.description['name']}, {dtype}, {batches} batches of {batch}×{context} tokens, median of {pairs}{kept}\n")
    print("| pass | seconds | analysis takes, times that | lowest, highest |\n|---|---|---|---|")
    print(f"| analysis | {statistics.median(seconds['analysis']):.3f} | | |")
    for what, values in ratios.items():
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"| {what} | {statistics.median(seconds[what]):.3f} | {middle:.2f} | {low:.2f}, {high:.2f} |")
    if out is not None:
        settings = {"model": name, "dtype": dtype, "batch": batch, "context": context, "batches": batches, "keep": keep}
        found = {"settings": settings, "seconds": seconds, "ratios": ratios, "machine": machine()}
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds until it is done, the device included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started


def _pass(model: Any, tokens: tuple[torch.Tensor, ...], what: str) -> None:
    run = model if what == "plain" else model.base_model
    with torch.no_grad():
        for batch in tokens:
            run(batch.to(model.device), use_cache=False)


@contextmanager
def _here(model: Any, tokens: tuple[torch.Tensor, ...]) -> Iterator[Ask]:
    yield lambda what: timed(lambda: _pass(model, tokens, what), model.device)


@contextmanager
def _elsewhere(name: str, dtype: str, tokens: tuple[torch.Tensor, ...], keep: bool) -> Iterator[Ask]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, dtype, keep), daemon=True)
    process.start()
    mine.send(tokens)

    def ask(what: str) -> float:
        mine.send(what)
        return float(mine.recv())

    try:
        yield ask
    finally:
        mine.send(None)
        process.join()


def _serve(asked: Connection, name: str, dtype: str, keep: bool) -> None:
    """A Hugging Face model that runs on request."""
    model, _ = load_files(locate(name, None, False), resolve_dtype(dtype), False)
    model = model.to(resolve_dtype(dtype)).eval()
    tokens, cpu = asked.recv(), resolve_device("cpu")
    with freed_memory_kept() if keep else nullcontext():
        while (what := asked.recv()) is not None:
            asked.send(timed(lambda what=what: _pass(model, tokens, what), cpu))


if __name__ == "__main__":
    typer.run(main)
