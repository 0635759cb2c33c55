"""The jackknife: its formula, its closed form for a mean, and how often its interval holds the truth."""

import math

import pytest
import torch
from torch import Tensor

from analysis import measures
from analysis.jackknife import filled_blocks, standard_error
from analysis.moments import N_BLOCKS, Moments
from analysis.sums import Layout, Sums
from tests import reference
from tests.analysis_helpers import assert_close, layer_sums, random_case

LAYOUT = Layout(())


def table(**rows: Tensor) -> Sums:
    """Pooled sums with the rows given, zero elsewhere, and a token in every block."""
    blocks = len(next(iter(rows.values())))
    values = torch.zeros(LAYOUT.size, blocks, dtype=torch.float64)
    values[LAYOUT.rows["count_pp"]] = 1
    for name, row in rows.items():
        values[LAYOUT.rows[name]] = row
    return Sums(LAYOUT, values)


def mean_of_a(sums: Sums) -> Tensor:
    """Σa over tokens."""
    return sums["a"] / sums["count_pp"]


@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_standard_error_equals_the_twin(name: str) -> None:
    case = random_case(name, (70, 1, 21, 40, 33), 4)
    pooled = case.moments.pooled
    exchange = reference.jackknife_se(pooled["exchange_gap"], 2 * (pooled["hh"] + pooled["exchange"]), skip_empty=True)
    assert_close(standard_error(measures.exchange, pooled), exchange)
    scaling = standard_error(measures.scaling, pooled)
    for index in range(len(case.layout.alphas)):
        energies = 2 * (pooled["hh"] + pooled["scaling"][index])
        assert_close(scaling[index], reference.jackknife_se(pooled["scaling_gap"][index], energies, skip_empty=True))


def test_replicates_are_the_measure_without_each_block() -> None:
    case = random_case("silu", (70, 1, 21, 40), 3)
    parts, pooled = case.parts, case.moments.pooled
    replicates = []
    for left_out in range(len(parts)):
        others = [part for index, part in enumerate(parts) if index != left_out]
        replicates.append(measures.exchange_relative_change(layer_sums(sum(others[1:], others[0]))).item())
    mean, count = math.fsum(replicates) / len(replicates), len(replicates)
    expected = math.sqrt((count - 1) / count * math.fsum((x - mean) ** 2 for x in replicates))
    assert_close(standard_error(measures.exchange_relative_change, pooled), expected)


@pytest.mark.parametrize("n_blocks", [2, 3, 32])
def test_error_of_a_mean_is_its_standard_error(n_blocks: int) -> None:
    values = torch.randn(n_blocks, generator=torch.Generator().manual_seed(n_blocks), dtype=torch.float64)
    assert_close(standard_error(mean_of_a, table(a=values)), values.std(correction=1) / math.sqrt(n_blocks))


def test_blocks_without_tokens_do_not_count() -> None:
    case = random_case("silu", (70, 21, 40), 3)
    scattered = [case.moments_of(a, b, block) for (a, b), block in zip(case.sequences, (31, 5, 12), strict=True)]
    pooled = sum(scattered[1:], scattered[0]).pooled
    assert filled_blocks(pooled) == 3
    assert_close(standard_error(measures.exchange, pooled), standard_error(measures.exchange, case.moments.pooled))


def test_block_without_energy_counts() -> None:
    """Tokens where a ReLU is silent are tokens: leaving them out changes nothing, but they are a block."""
    values = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)
    pooled = table(exchange_gap=values, hh=values, exchange=torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))
    twin = reference.jackknife_se(pooled["exchange_gap"], 2 * (pooled["hh"] + pooled["exchange"]))
    assert filled_blocks(pooled) == 3
    assert_close(standard_error(measures.exchange, pooled), twin)


def test_equal_blocks_have_no_error() -> None:
    assert_close(standard_error(mean_of_a, table(a=torch.full((8,), 0.3, dtype=torch.float64))), 0.0)


@pytest.mark.parametrize("lengths", [(), (70,)])
def test_fewer_than_two_blocks_have_no_error_to_give(lengths: tuple[int, ...]) -> None:
    case = random_case("silu", (70, 21), 3)
    kept = case.parts[: len(lengths)]
    pooled = sum(kept, Moments.empty(3, case.layout)).pooled
    assert filled_blocks(pooled) == len(lengths)
    assert standard_error(measures.exchange, pooled).isnan()
    assert standard_error(measures.scaling, pooled).isnan().all()
    assert standard_error(measures.scaling, pooled).shape == (len(case.layout.alphas),)


def test_one_block_has_no_error_even_of_a_measure_that_is_defined_on_nothing() -> None:
    assert standard_error(lambda sums: sums["a"], table(a=torch.ones(1, dtype=torch.float64))).isnan()


def test_interval_holds_the_truth_as_often_as_it_says() -> None:
    """300 data sets of blocks whose energies differ by chance; Student's 97.5% point with 31 degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    energy = (0.4 * torch.randn(300, N_BLOCKS, generator=generator, dtype=torch.float64)).exp()
    share = 0.3 + 0.1 * torch.randn(300, N_BLOCKS, generator=generator, dtype=torch.float64) + 0.05 * energy
    truth = 0.3 + 0.05 * math.exp(0.4**2 * 3 / 2)  # E[share·energy] / E[energy]
    held = 0
    for energies, gaps in zip(energy, share * energy, strict=True):
        pooled = table(exchange_gap=2 * gaps, hh=energies / 2, exchange=energies / 2)
        estimate = measures.exchange(pooled.pool(torch.ones(N_BLOCKS, dtype=torch.float64)))
        held += bool((estimate - truth).abs() <= 2.04 * standard_error(measures.exchange, pooled))
    assert 0.90 <= held / 300 <= 0.98
