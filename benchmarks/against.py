"""The activation pass compared with the usual way: cache every gate and up activation, then compute.

    python -m benchmarks.against [MODEL] [--tokens 16384] [--ways analysis,cache,nnsight]

    analysis    ``analyze``'s activation pass
    cache       TransformerLens: run_with_cache of the gate and up activations, then the same statistics from the cache
    nnsight     the same with nnsight's traces (pip install nnsight)

Each way runs in a process of its own, over the same tokens. Its memory is the peak of the process beyond its memory after
loading the model. The sums of every neuron are compared with those of the first way, relative to the largest of their row.
nnsight reads the same pass and must agree within 1e-5; TransformerLens has its own implementation of attention, which
changes a single neuron of a deep layer by some 1e-4: it must agree within 1e-3.
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from analysis.sums.batch import Batch
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS, Layout
from analysis.sums.moments import Accumulator
from analysis.sums.tiled import TileReducer
from analysis.weights.geometry import Geometry, derangements
from benchmarks.common import long_corpus, peak_memory, report
from hooks.corpus import Corpus
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.models import LoadedModel, load_model
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import read_through

LIMITS = {"analysis": 1e-5, "nnsight": 1e-5, "cache": 1e-3}
Sums = dict[int, np.ndarray]
"""The sums of every neuron, by layer."""
Kept = dict[int, list[tuple[Tensor, Tensor]]]
"""a and b of every batch, by layer."""


def main(
    name: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=256)] = 16384,
    ways: Annotated[str, typer.Option(help="Which, in order; the others are held against the first.")] = "analysis,cache",
    batch: Annotated[int, typer.Option(min=1, help="Windows at once.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    rows: list[dict[str, Any]] = []
    first: Sums = {}
    context = multiprocessing.get_context("spawn")
    for way in ways.split(","):
        mine, theirs = context.Pipe()
        process = context.Process(target=_run, args=(theirs, way, name, tokens, batch), daemon=True)
        process.start()
        theirs.close()
        seconds, held, sums = mine.recv()
        process.join()
        first = first or sums
        slowest = rows[0] if rows else {"seconds": seconds, "memory MB": held / 1e6}
        rows.append(
            {
                "way": way,
                "seconds": seconds,
                "times as long": seconds / slowest["seconds"],
                "memory MB": held / 1e6,
                "times the memory": held / 1e6 / slowest["memory MB"],
                "largest difference": _difference(sums, first),
            }
        )
    report(rows, out, model=name, tokens=tokens, batch=batch)
    if any(row["largest difference"] > LIMITS[row["way"]] for row in rows):
        raise SystemExit("the ways do not agree")


def _difference(sums: Sums, reference: Sums) -> float:
    """The largest difference of a sum, relative to the largest sum of its row."""
    return max(
        float((np.abs(mine - reference[layer]).max(1) / np.abs(reference[layer]).max(1).clip(1e-30)).max())
        for layer, mine in sums.items()
    )


def _run(answer: Connection, way: str, name: str, tokens: int, batch: int) -> None:
    model = load_model(name)
    corpus = long_corpus(model, tokens)
    before, started = peak_memory(), time.perf_counter()
    sums = {"analysis": _analysed, "cache": _cached, "nnsight": _traced}[way](model, corpus, batch)
    answer.send((time.perf_counter() - started, peak_memory() - before, sums))


def _analysed(model: LoadedModel, corpus: Corpus, batch: int) -> Sums:
    accumulators = {
        layer: accumulator_of(site, DEFAULT_ALPHAS, DEFAULT_DRAWS, layer) for layer, site in model.sites.items()
    }
    read_through(model, corpus, list(accumulators.values()), batch_size=batch, quiet=True)
    return {layer: accumulator.result().moments.neuron.values.numpy() for layer, accumulator in accumulators.items()}


def _cached(model: LoadedModel, corpus: Corpus, batch: int) -> Sums:
    names = {name for site in model.sites.values() for name in (site.hook_a, site.hook_b)}
    kept: Kept = {layer: [] for layer in model.sites}
    with torch.no_grad():
        for start in range(0, len(corpus.windows), batch):
            tokens = _tokens(corpus, start, batch)
            _, cache = model.bridge.run_with_cache(tokens, names_filter=lambda name: name in names)
            for layer, site in model.sites.items():
                kept[layer].append((cache[site.hook_a], cache[site.hook_b]))
    return _statistics(model, corpus, batch, kept)


def _traced(model: LoadedModel, corpus: Corpus, batch: int) -> Sums:
    from nnsight import NNsight

    traced = NNsight(model.hf_model)
    kept: Kept = {layer: [] for layer in model.sites}
    for start in range(0, len(corpus.windows), batch):
        tokens = _tokens(corpus, start, batch)
        with torch.no_grad(), traced.trace(tokens):
            saved = [
                (block.mlp.gate_proj.output.save(), block.mlp.up_proj.output.save()) for block in traced.model.layers
            ].save()
        for layer in model.sites:
            kept[layer].append(saved[layer])
    return _statistics(model, corpus, batch, kept)


def _tokens(corpus: Corpus, start: int, batch: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([w.tokens for w in corpus.windows[start : start + batch]], batch_first=True)


def _statistics(model: LoadedModel, corpus: Corpus, batch: int, kept: Kept) -> Sums:
    """The same sums from the cached activations, in torch."""
    sums = {}
    for layer, site in model.sites.items():
        geometry = Geometry.of(*site.weights.matrices, site.gain, site.value_gain)
        pairing = geometry.permuted_pairs(site.q, site.k, site.gain, derangements(len(site.q), DEFAULT_DRAWS, layer))
        reduce = TileReducer(site.unit, Layout.of(site.unit, DEFAULT_ALPHAS), geometry, pairing)
        accumulator = Accumulator(len(site.q), reduce)
        for number, (a, b) in enumerate(kept[layer]):
            windows = corpus.windows[number * batch : (number + 1) * batch]
            accumulator.add(a, b, Batch.of(windows, [corpus.jackknife_block_of(window) for window in windows]))
        sums[layer] = accumulator.moments().neuron.values.numpy()
    return sums


if __name__ == "__main__":
    typer.run(main)
