"""The cost of an exact causal sweep, in forward passes over the same tokens.

    python -m benchmarks.causal [MODEL] [--tokens 64] [--layers 4]

Two edits, exchange and the removal of the MLP, on two windows of that many tokens. Reports the sweep's counts of blocks
and unembeddings, and its seconds beside those of one whole pass.
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from analysis.causal.edits import PlainExchange, Zero
from benchmarks.common import report
from hooks.corpus import Corpus
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.models import LoadedModel, load_model
from hooks.patching.partial_pass import full_pass
from hooks.patching.sweep import sweep

EDITS = {"exchange": PlainExchange(), "zero": Zero()}


def main(
    name: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=8)] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Edited layers, evenly spread.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    model = load_model(name)
    corpus = model.read(context=tokens, max_tokens=2 * tokens)
    every = list(model.sites)
    chosen = every[:: max(1, len(every) // layers)][:layers]
    effort = sweep(model, corpus.windows, dict.fromkeys(chosen, EDITS)).effort()
    whole = statistics.median(_pass(model, corpus) for _ in range(5))
    row = {
        "edits": len(EDITS),
        "layers": len(chosen),
        "seconds": effort["seconds"],
        "seconds of one pass": whole,
        "in passes": effort["seconds"] / whole,
        "passes of the blocks": effort["block_passes"],
        "of the unembedding": effort["unembedding_passes"],
    }
    report([row], out, model=name, tokens=2 * tokens)


def _pass(model: LoadedModel, corpus: Corpus) -> float:
    started = time.perf_counter()
    with torch.no_grad():
        for window in corpus.windows:
            full_pass(model, window.tokens[None])
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
