"""What the fused pass requires of the machine, and what the machine can do.

    python -m benchmarks.roofline [--d-mlp 1536] [--tokens 2048]

Operations are counted from the source of ``analysis.sums.kernel`` for SiLU and the default layout, per token and neuron:
float32 additions, multiplications, comparisons and conversions one each, a fused multiplication and addition two, a
division apart. Bytes are those that must be transferred between a core's caches and memory. The machine's rates are
measured: a polynomial and divisions on one row in the L1 cache with the same compiler and settings, and copying
256 MB.
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from analysis.sums.batch import Batch, Window
from analysis.sums.fused_reducer import TILE, FusedReducer
from analysis.sums.kernel import _fast
from analysis.sums.layout import Layout
from analysis.sums.reducer import Totals
from analysis.units.registry import unit_named
from analysis.weights.geometry import Geometry, derangements
from benchmarks.common import report

ACTIVATION, EULER, COMPARE, SCALED, REPAIRED, BALANCED, REST = 26, 32, 11, 18, 30, 9, 50
"""Operations of one call for one token, divisions not counted: see the functions of these names."""
ROUNDS = 2000
DEGREE = 16


def main(
    d_mlp: Annotated[int, typer.Option(min=16)] = 1536,
    tokens: Annotated[int, typer.Option(min=256)] = 2048,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    unit = unit_named("silu")
    layout = Layout.of(unit)
    finite = sum(alpha not in (0.0, float("inf")) for alpha in layout.alphas)
    activations = 5 + finite + 2 * layout.draws
    operations = activations * ACTIVATION + EULER + 4 * COMPARE + len(layout.alphas) * SCALED + REST
    operations += layout.draws * (REPAIRED + BALANCED)
    divisions = activations + 1
    moved = 4 * (2 + 2 + 2 + layout.draws)  # a and b read, transposed, read again, and each partner's b
    threads = torch.get_num_threads()
    rates = {name: _rate(run, threads) for name, run in (("operations", _polynomial), ("divisions", _divisions))}
    rates["bytes"] = _copied()
    took = _fused(d_mlp, tokens) / (tokens * d_mlp)
    rows: list[dict[str, Any]] = []
    for what, count in (("operations", operations), ("divisions", divisions), ("bytes", moved)):
        least = count / rates[what]
        rows.append(
            {
                "what": what,
                "per token and neuron": count,
                "the machine does, 1e9/s": rates[what] / 1e9,
                "so at least ns": 1e9 * least,
                "of the time taken": least / took,
            }
        )
    report(rows, out, d_mlp=d_mlp, tokens=tokens, threads=threads, nanoseconds=1e9 * took)
    print(f"\nThe fused pass takes {1e9 * took:.2f} ns a token and neuron on {threads} threads.")


def _fused(d_mlp: int, tokens: int) -> float:
    """Seconds for a layer of random a and b."""
    torch.manual_seed(0)
    q, k, v, gain = *torch.randn(3, d_mlp, 64), torch.ones(64)
    geometry, unit = Geometry.of(q, k, v, gain), unit_named("silu")
    layout = Layout.of(unit)
    reduce = FusedReducer(unit, layout, geometry, geometry.permuted_pairs(q, k, gain, derangements(d_mlp, layout.draws, 0)))
    windows = [Window(i, torch.zeros(TILE, dtype=torch.int64), 0) for i in range(tokens // TILE)]
    batch, totals = Batch.of(windows, [i * 16 // len(windows) for i in range(len(windows))]), Totals.empty(d_mlp, layout)
    a, b = torch.randn(2, len(windows) * TILE, d_mlp)
    return _median(lambda: reduce.add(a, b, batch, totals))


@_fast
def _polynomial(x, rounds):  # type: ignore[no-untyped-def]
    for _ in range(rounds):
        for t in range(TILE):
            p = q = r = x[t]  # three independent chains
            for _ in range(DEGREE):
                p = p * x[t] + np.float32(0.5)
                q = q * x[t] + np.float32(0.25)
                r = r * x[t] + np.float32(0.125)
            x[t] = np.float32(0.1) * (p + q + r)


@_fast
def _divisions(x, rounds):  # type: ignore[no-untyped-def]
    for _ in range(rounds):
        for t in range(TILE):
            x[t] = np.float32(1) / (np.float32(1.5) + x[t])


def _rate(run: Callable[[Any, int], None], threads: int) -> float:
    """Operations, or divisions, a second on all threads."""
    rows = [torch.rand(TILE).numpy() for _ in range(threads)]
    count = threads * ROUNDS * TILE * (6 * DEGREE + 3 if run is _polynomial else 1)
    with ThreadPoolExecutor(threads) as pool:
        return count / _median(lambda: list(pool.map(lambda row: run(row, ROUNDS), rows)))


def _copied() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(2**26)
    target = torch.zeros_like(source)
    return 2 * 4 * source.numel() / _median(lambda: target.copy_(source))


def _median(run: Callable[[], Any], times: int = 7) -> float:
    seconds = []
    for _ in range(times + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    typer.run(main)
