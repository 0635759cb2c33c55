"""How time grows with tokens, layers and width: fitted exponents.

    python -m benchmarks.growth

Tokens and layers on SmolLM2, for layers on its first ones; width on random Llamas of one layer whose d_mlp grows
while d_model stays 256. Each point is the median of three passes; an exponent is the slope of log(time) over log(size).
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
from benchmarks.common import long_corpus, report
from hooks.corpus import Corpus
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.models import LoadedModel, load_model
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import read_through


def main(out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None) -> None:
    """Print the table."""
    model = load_model(DEFAULT_MODEL)
    fixed = long_corpus(model, 2048)
    points = {
        "tokens": [(count, _seconds(model, long_corpus(model, count), len(model.sites))) for count in (2048, 4096, 8192)],
        "layers": [(count, _seconds(model, fixed, count)) for count in (4, 8, 15, 30)],
        "d_mlp": [(width, _of_width(model, width)) for width in (1024, 2048, 4096, 8192)],
    }
    rows = [
        {
            "size": size,
            "range": f"{found[0][0]}-{found[-1][0]}",
            "seconds": " ".join(f"{seconds:.2f}" for _, seconds in found),
            "exponent": float(np.polyfit(*np.log(np.array(found)).T, 1)[0]),
        }
        for size, found in points.items()
    ]
    report(rows, out)


def _seconds(model: LoadedModel, corpus: Corpus, n_layers: int) -> float:
    sites = list(model.sites.items())[:n_layers]

    def run() -> None:
        accumulators = [accumulator_of(site, DEFAULT_ALPHAS, DEFAULT_DRAWS, layer) for layer, site in sites]
        started.append(time.perf_counter())
        read_through(model, corpus, accumulators, quiet=True)

    started: list[float] = []
    return statistics.median(_timed(run, started) for _ in range(3))


def _timed(run: Callable[[], Any], started: list[float]) -> float:
    run()
    return time.perf_counter() - started.pop()


def _of_width(like: LoadedModel, width: int) -> float:
    """A random Llama with the tokenizer of another model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(like.tokenizer),
        hidden_size=256,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with TemporaryDirectory() as directory:
        LlamaForCausalLM(config).save_pretrained(directory)
        like.tokenizer.save_pretrained(directory)
        model = load_model(directory)
    return _seconds(model, long_corpus(model, 4096), 1)


if __name__ == "__main__":
    typer.run(main)
