"""How often a 95 % interval holds the truth: simulated corpora whose tokens depend on each other.

Tokens of a sequence follow an AR(1) process around a level of the sequence's own, so that a sequence says far less than
its number of tokens. Gate and up are Gaussian at every token, so the true numbers are integrals.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from analysis.measures.asymmetry import Measure, excess_over_repaired, exchange, exchange_null_repaired
from analysis.measures.jackknife import jackknife, pooled_error, t95
from analysis.sums.layout import Layout, Sums
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, Moments
from analysis.units.registry import unit_named
from tests.helpers.random_layers import assert_close

CORPORA = 2000
CORRELATION = 0.5
MEMORY, LEVEL, NEURONS = 0.7, 0.1, 8
"""Correlation of neighbouring tokens, what share of the variance is the sequence's own, and how many equal neurons pool."""
LAYOUT = Layout((), draws=1)
SILU = unit_named("silu")


def streams(n_sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """Two independent standard normal streams of every sequence, [stream, sequence, token]."""
    level = torch.randn(2, n_sequences, 1, generator=generator)
    noise = torch.randn(2, n_sequences, length, generator=generator)
    steps = [noise[..., 0]]
    for token in range(1, length):
        steps.append(MEMORY * steps[-1] + (1 - MEMORY**2) ** 0.5 * noise[..., token])
    return LEVEL**0.5 * level + (1 - LEVEL) ** 0.5 * torch.stack(steps, dim=-1)


def sums_of(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Σ(h − h′)², Σh² and Σh′² under exchange, over the tokens of each sequence."""
    h, swapped = SILU(a, b), SILU(b, a)
    return tuple(x.square().sum(dim=-1).double() for x in (h - swapped, h, swapped))


@cache
def simulated(blocks: int, per_block: int, length: int, seed: int) -> Tensor:
    """The pooled sums of every corpus by block, [row, corpus, block]: neurons re-paired with unrelated ones."""
    generator = torch.Generator().manual_seed(seed)
    per_block *= NEURONS
    a, noise = streams(CORPORA * blocks * per_block, length, generator)
    b, other = CORRELATION * a + (1 - CORRELATION**2) ** 0.5 * noise, streams(len(a), length, generator)[0]
    values = torch.zeros(LAYOUT.size, CORPORA, blocks, dtype=torch.float64)
    rows = ("exchange_gap", "hh", "exchange", "repaired_exchange_gap", "repaired_hh", "repaired_exchange")
    for row, value in zip(rows, (*sums_of(a, b), *sums_of(a, other)), strict=True):
        values[LAYOUT.rows[row]] = value.reshape(CORPORA, blocks, per_block).sum(dim=-1)
    return values


def truth(correlation: float) -> float:
    """The exchange asymmetry of standard normal (a, b) of this correlation, by quadrature over the plane."""
    points, weights = (torch.from_numpy(x) for x in hermegauss(80))
    a, noise = torch.meshgrid(points, points, indexing="ij")
    h, swapped = SILU(a, b := correlation * a + (1 - correlation**2) ** 0.5 * noise), SILU(b, a)
    gap, before, after = (weights @ x.square() @ weights for x in (h - swapped, h, swapped))
    return float(gap / (2 * (before + after)))


def moments_of(values: Tensor) -> Moments:
    """A layer with these pooled sums, [row, block], and tokens in every one of these blocks."""
    empty, blocks = Moments.empty(1, LAYOUT), values.shape[1]
    pooled, tokens = empty.pooled.values.clone(), empty.blocks.clone()
    pooled[:, :blocks], tokens[:blocks] = values, 1
    return replace(empty, pooled=Sums(LAYOUT, pooled), blocks=tokens)


def errors_of(measure: Measure, values: Tensor) -> Tensor:
    """The standard error of every corpus, all at once; the first ones as a run gives them, one at a time."""
    without = (values.sum(dim=-1, keepdim=True) - values).flatten(1)
    errors = jackknife(measure(Sums(LAYOUT, without)).reshape(values.shape[1:]))
    for corpus, error in zip(values.unbind(1)[:20], errors, strict=False):
        assert_close(pooled_error(measure, moments_of(corpus)), error)
    return errors


PLANS = {"16 blocks": (N_JACKKNIFE_BLOCKS, 2, 16, 2.131), "8 sequences": (8, 1, 64, 2.365)}
"""Blocks, sequences in each, tokens in each, and Student's 97.5 % point from a table."""


@pytest.mark.parametrize("excess", [False, True], ids=["value", "excess"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_95_percent_interval_holds_the_truth_in_95_percent_of_corpora(plan: str, excess: bool) -> None:
    blocks, per_block, length, reach = PLANS[plan]
    values = simulated(blocks, per_block, length, seed=1)
    measure: Measure = excess_over_repaired("exchange") if excess else exchange
    true = truth(CORRELATION) - (truth(0.0) if excess else 0.0)
    estimates = measure(Sums(LAYOUT, values.sum(dim=-1)))
    errors = errors_of(measure, values)
    assert t95(blocks) == pytest.approx(reach, abs=1e-3)
    held = float(((estimates - true).abs() <= reach * errors).double().mean())
    assert 0.93 <= held <= 0.97, held
    if excess:
        null = exchange_null_repaired(Sums(LAYOUT, values.sum(dim=(1, 2))[:, None]))
        assert float(null) == pytest.approx(truth(0.0), rel=0.02)


def test_errors_that_take_tokens_for_independent_would_not_do() -> None:
    """The simulation is able to tell: intervals that treat the tokens as unrelated are far too short."""
    values, (_, _, length, reach) = simulated(*PLANS["8 sequences"][:3], seed=1), PLANS["8 sequences"]
    generator = torch.Generator().manual_seed(0)
    a, noise = torch.randn(2, 8 * CORPORA // 20, NEURONS * length, generator=generator)
    independent = [x.reshape(-1, 8) for x in sums_of(a, CORRELATION * a + (1 - CORRELATION**2) ** 0.5 * noise)]
    unrelated = values[:, : CORPORA // 20].clone()
    for row, value in zip(("exchange_gap", "hh", "exchange"), independent, strict=True):
        unrelated[LAYOUT.rows[row]] = value
    error = errors_of(exchange, unrelated).mean()
    off = exchange(Sums(LAYOUT, values.sum(dim=-1))) - truth(CORRELATION)
    assert float((off.abs() <= reach * error).double().mean()) < 0.9
