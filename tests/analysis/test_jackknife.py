"""The jackknife: its formula, its closed form for a mean, and how often its interval holds the truth."""

import math
from dataclasses import replace
from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.jackknife import (
    filled_jackknife_blocks,
    gate_positive_error,
    jackknife,
    neuron_error,
    pooled_error,
    quantile_error,
    t95,
)
from analysis.sums.layout import MAIN_SCALES, Layout, Sums
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Moments
from tests.helpers import reference
from tests.helpers.families import grid
from tests.helpers.random_layers import assert_close, layer_sums, random_case

LAYOUT = Layout(())


def table(**rows: Tensor) -> Moments:
    """A layer of one neuron with the pooled rows given, zero elsewhere, and a token in every block given."""
    empty, blocks = Moments.empty(1, LAYOUT), len(next(iter(rows.values())))
    values, tokens = empty.pooled.values.clone(), empty.blocks.clone()
    tokens[:blocks] = 1
    for name, row in rows.items():
        values[LAYOUT.rows[name], :blocks] = row
    return replace(empty, pooled=Sums(LAYOUT, values), blocks=tokens)


def mean_of_a(sums: Sums) -> Tensor:
    """Σa over Σb."""
    return sums["a"] / sums["b"]


@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_standard_error_equals_the_twin(name: str) -> None:
    case = random_case(name, (70, 1, 21, 40, 33), 4)
    pooled = case.moments.pooled
    exchange = reference.jackknife_se(pooled["exchange_gap"], 2 * (pooled["hh"] + pooled["exchange"]), skip_empty=True)
    assert_close(pooled_error(measures.exchange, case.moments), exchange)
    scaling = pooled_error(measures.scaling, case.moments)
    for index in range(len(case.layout.alphas)):
        energies = 2 * (pooled["hh"] + pooled["scaling"][index])
        assert_close(scaling[index], reference.jackknife_se(pooled["scaling_gap"][index], energies, skip_empty=True))


def test_replicates_are_the_measure_without_each_block() -> None:
    case = random_case("silu", (70, 1, 21, 40), 3)
    parts = case.parts
    replicates = []
    for left_out in range(len(parts)):
        others = [part for index, part in enumerate(parts) if index != left_out]
        replicates.append(measures.exchange_relative_change(layer_sums(sum(others[1:], others[0]))).item())
    mean, count = math.fsum(replicates) / len(replicates), len(replicates)
    expected = math.sqrt((count - 1) / count * math.fsum((x - mean) ** 2 for x in replicates))
    assert_close(pooled_error(measures.exchange_relative_change, case.moments), expected)


@pytest.mark.parametrize("n_blocks", [2, 3, N_JACKKNIFE_BLOCKS])
def test_error_of_a_mean_is_its_standard_error(n_blocks: int) -> None:
    values = torch.randn(n_blocks, generator=torch.Generator().manual_seed(n_blocks), dtype=torch.float64)
    error = pooled_error(mean_of_a, table(a=values, b=torch.ones_like(values)))
    assert_close(error, values.std(correction=1) / math.sqrt(n_blocks))


def test_blocks_without_tokens_do_not_count() -> None:
    case = random_case("silu", (70, 21, 40), 3)
    scattered = [case.moments_of(a, b, block) for (a, b), block in zip(case.sequences, (15, 5, 12), strict=True)]
    moments = reduce(add, scattered)
    assert filled_jackknife_blocks(moments) == 3
    assert_close(pooled_error(measures.exchange, moments), pooled_error(measures.exchange, case.moments))


def test_block_without_energy_counts() -> None:
    """Tokens where a ReLU is silent are tokens: leaving them out changes nothing, but they are a block."""
    values = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)
    swapped = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    moments = table(exchange_gap=values, hh=values, exchange=swapped)
    assert filled_jackknife_blocks(moments) == 3
    assert_close(pooled_error(measures.exchange, moments), reference.jackknife_se(values, 2 * (values + swapped)))


def test_equal_blocks_have_no_error() -> None:
    equal = torch.full((8,), 0.3, dtype=torch.float64)
    assert_close(pooled_error(mean_of_a, table(a=equal, b=equal)), 0.0)


@pytest.mark.parametrize("lengths", [(), (70,)])
def test_fewer_than_two_blocks_have_no_error_to_give(lengths: tuple[int, ...]) -> None:
    case = random_case("silu", (70, 21), 3)
    moments = reduce(add, case.parts[: len(lengths)], Moments.empty(3, case.layout))
    assert filled_jackknife_blocks(moments) == len(lengths)
    assert pooled_error(measures.exchange, moments).isnan()
    assert pooled_error(measures.scaling, moments).isnan().all()
    assert pooled_error(measures.scaling, moments).shape == (len(case.layout.alphas),)
    assert math.isnan(t95(filled_jackknife_blocks(moments)))
    if lengths:
        assert neuron_error(measures.exchange, moments).isnan().all()
        assert neuron_error(measures.exchange, moments).shape == (3,)
        assert math.isnan(quantile_error("exchange", 0.5, moments.tokens, moments.blocks))
        assert math.isnan(gate_positive_error(moments))


def test_one_block_has_no_error_even_of_a_measure_that_is_defined_on_nothing() -> None:
    assert pooled_error(lambda sums: sums["a"], table(a=torch.ones(1, dtype=torch.float64))).isnan()


@pytest.mark.parametrize(("n_blocks", "reach"), [(2, 12.706), (8, 2.365), (16, 2.131)])
def test_an_interval_reaches_as_far_as_students_table_says(n_blocks: int, reach: float) -> None:
    assert t95(n_blocks) == pytest.approx(reach, abs=1e-3)


def test_the_error_of_open_gates_equals_the_twin() -> None:
    case = random_case("silu", (70, 1, 21, 40), 3)
    opened = [sum(x > 0 for row in a.tolist() for x in row) for a, _ in case.sequences]
    twin = reference.jackknife_se(opened, [a.numel() for a, _ in case.sequences])
    assert gate_positive_error(case.moments) == pytest.approx(twin, rel=1e-12)


@pytest.mark.parametrize("empty", grid([(), (2, 3), (0, 1, 5)], [(2, 3)]), ids=str)
@pytest.mark.parametrize("measure", ["exchange", "exchange_balanced", *MAIN_SCALES, "bilinear_share"])
def test_neuron_errors_are_those_of_groups_of_blocks(measure: str, empty: tuple[int, ...]) -> None:
    """Each neuron's number without each group of consecutive blocks; a group without tokens is none."""
    case = random_case("silu", (9, 12, 7) * 4, 3)
    blocks = [block for block in range(N_JACKKNIFE_BLOCKS) if block // 2 not in empty]
    pieces = list(zip(blocks, case.sequences, strict=False))
    function = {**measures.LAYER_MEASURES, "bilinear_share": measures.bilinear_share}[measure]
    groups = sorted({block // 2 for block, _ in pieces})
    replicates = [
        function(reduce(add, [case.moments_of(*ab, block) for block, ab in pieces if block // 2 != group]).neuron)
        for group in groups
    ]
    moments = reduce(add, [case.moments_of(*ab, block) for block, ab in pieces])
    assert len(groups) <= N_JACKKNIFE_GROUPS
    for neuron, error in enumerate(neuron_error(function, moments).tolist()):
        twin = reference.jackknife([float(replicate[neuron]) for replicate in replicates])
        assert error == pytest.approx(twin, rel=2e-5, abs=1e-8)  # sums of groups are kept in single precision


def test_the_error_of_a_neurons_excess_is_that_of_the_difference() -> None:
    case = random_case("silu", (9,) * N_JACKKNIFE_BLOCKS, 3, draws=3)
    own, chance = measures.exchange, measures.exchange_null_repaired
    parts = [reduce(add, case.parts[start : start + 2]) for start in range(0, N_JACKKNIFE_BLOCKS, 2)]
    without = [reduce(add, parts[:k] + parts[k + 1 :]).neuron for k in range(N_JACKKNIFE_GROUPS)]
    expected = [reference.jackknife(x.tolist()) for x in torch.stack([own(x) - chance(x) for x in without], dim=1)]
    error = neuron_error(measures.excess_over_repaired("exchange"), case.moments)
    torch.testing.assert_close(error, torch.tensor(expected, dtype=torch.float64), rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("q", [0.25, 0.5])
def test_the_error_of_a_quantile_is_that_of_the_quantiles_without_each_block(q: float) -> None:
    """Within the width of the coarser bins."""
    case = random_case("silu", (70, 50, 90, 40), 4)
    h, swapped = case.unit(case.a, case.b), case.unit(case.b, case.a)
    ratios = ((h - swapped).square() @ case.weight / (2 * (h.square() + swapped.square()) @ case.weight)).split(
        [len(a) for a, _ in case.sequences]
    )
    replicates = [reference.quantile([x for j, r in enumerate(ratios) if j != k for x in r.tolist()], q) for k in range(4)]
    assert quantile_error("exchange", q, case.moments.tokens, case.moments.blocks) == pytest.approx(
        reference.jackknife(replicates), abs=2e-3
    )


def test_replicates_of_any_shape() -> None:
    values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [[reference.jackknife(row) for row in rows] for rows in values.tolist()]
    assert_close(jackknife(values), expected)
