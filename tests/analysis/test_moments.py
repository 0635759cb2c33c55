"""Moments of disjoint tokens add: the laws of a monoid, and arithmetic that survives data far from zero."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add

import pytest
import torch
from torch import Tensor

from analysis.measures.gaussian_null import GaussianFit
from analysis.sums.batch import Window
from analysis.sums.layout import Layout, Sums
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Moments
from analysis.sums.tiled import TILE
from analysis.sums.token_histograms import RATIO_BINS
from analysis.units.registry import unit_named
from analysis.weights.geometry import derangements
from tests.helpers import reference
from tests.helpers.families import grid
from tests.helpers.random_layers import Case, ClampedUnit, assert_close, layer_sums, random_case


@dataclass(frozen=True)
class Family:
    """Random tokens of one layer, and how exactly sums of them agree.

    Attributes:
        case: all tokens as one sequence.
        relative: rounding allowed when the tokens are added up in another order.
        moved: how many ratios of tokens may cross to another bin by rounding.
    """

    case: Case
    relative: float
    moved: int = 0


FAMILIES = {
    "silu": Family(random_case("silu", (201,), 4), 1e-12),
    "clamped": Family(random_case(ClampedUnit(), (150,), 3, draws=2, seed=1), 1e-12),
    "two neurons": Family(random_case("relu", (70,), 2, seed=2), 1e-12),
    "single precision": Family(random_case("gelu", (201,), 4, dtype=torch.float32, seed=3), 1e-6, 2),
    "bfloat16": Family(random_case("gelu", (99,), 4, dtype=torch.bfloat16, seed=4), 1e-6, 2),
}


def assert_same(x: Moments, y: Moments) -> None:
    """Bit for bit."""
    theirs = y.tensors()
    for name, tensor in x.tensors().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)


def assert_agree(x: Moments, y: Moments, family: Family) -> None:
    """Equal but for the rounding of sums in another order; places of sequences that were cut differ."""
    single = max(family.relative, 1e-6)  # sums of groups are kept in single precision
    for name, exactness in (("neuron", family.relative), ("pooled", family.relative), ("neuron_groups", single)):
        a, b = x.tensors()[name], y.tensors()[name]
        scale = b.abs().amax(dim=-1, keepdim=True).clamp(min=1e-300 if b.dtype == torch.float64 else 1e-30)
        torch.testing.assert_close(a / scale, b / scale, rtol=0, atol=exactness, msg=name)
    for name in ("tokens.ratios", "tokens.ratio_blocks"):
        a, b = x.tensors()[name], y.tensors()[name]
        assert int((a.cumsum(-1) - b.cumsum(-1)).abs().max()) <= family.moved
    torch.testing.assert_close(x.tokens.by_energy.sum(1), y.tokens.by_energy.sum(1), rtol=10 * family.relative, atol=1e-9)
    assert torch.equal(x.signs, y.signs)
    assert torch.equal(x.blocks, y.blocks)
    torch.testing.assert_close(x.peaks.values, y.peaks.values, rtol=family.relative, atol=0, equal_nan=True)
    torch.testing.assert_close(x.top_tokens.energy, y.top_tokens.energy, rtol=family.relative, atol=0)
    assert (x.n_tokens, x.n_sequences) == (y.n_tokens, y.n_sequences)


def split(case: Case, cuts: list[int], blocks: list[int]) -> list[Moments]:
    """The moments of the pieces between the cuts."""
    edges = [0, *cuts, len(case.a)]
    pieces = enumerate(zip(pairwise(edges), blocks, strict=True))
    return [
        case.moments_of(case.a[start:end], case.b[start:end], block, Window(index, torch.arange(start, end), 0))
        for index, ((start, end), block) in pieces
    ]


def random_splits(case: Case, blocks: int = N_JACKKNIFE_BLOCKS) -> Iterator[list[Moments]]:
    """Three random ways to cut the tokens into four sequences, the first of one token, each in a random block."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        cuts = sorted((torch.randperm(len(case.a) - 2, generator=generator)[:2] + 2).tolist())
        yield split(case, [1, *cuts], torch.randint(blocks, (4,), generator=generator).tolist())


def identity(family: Family) -> None:
    case = family.case
    empty = Moments.empty(case.a.shape[1], case.layout)
    for part in next(random_splits(case)):
        assert_same(empty + part, part)
        assert_same(part + empty, part)


def commutativity(family: Family) -> None:
    for x, y, *_ in random_splits(family.case):
        assert_same(x + y, y + x)


def associativity(family: Family) -> None:
    exact = replace(family, relative=1e-12, moved=0)
    for x, y, z, _ in random_splits(family.case):
        first, second = (x + y) + z, x + (y + z)
        assert_agree(first, second, exact)
        for name in ("peaks.values", "peaks.places", "top_tokens.energy", "top_tokens.places"):
            assert torch.equal(first.tensors()[name], second.tensors()[name]), name


def split_is_whole(family: Family) -> None:
    whole = family.case.moments_of(family.case.a, family.case.b, block=0)
    for parts in random_splits(family.case, blocks=1):
        assert_agree(reduce(add, parts), replace(whole, n_sequences=4), family)


def inputs_are_unchanged(family: Family) -> None:
    x, y, *_ = next(random_splits(family.case))
    before = [{name: tensor.clone() for name, tensor in part.tensors().items()} for part in (x, y)]
    for tensor in (x + y).tensors().values():
        tensor.add_(1)
    for part, copies in zip((x, y), before, strict=True):
        for name, tensor in part.tensors().items():
            assert torch.equal(tensor, copies[name]), name


def blocks_pool_the_neurons(family: Family) -> None:
    for parts in random_splits(family.case):
        total = reduce(add, parts)
        pooled = total.neuron.pool(family.case.weight).values
        torch.testing.assert_close(layer_sums(total).values, pooled, rtol=1e-12, atol=1e-12)


def groups_part_the_neurons(family: Family) -> None:
    for parts in random_splits(family.case):
        total = reduce(add, parts)
        narrow = family.case.layout.narrow(total.neuron.values)
        torch.testing.assert_close(total.neuron_groups.double().sum(0), narrow, rtol=1e-5, atol=1e-5)


def tensors_hold_everything(family: Family) -> None:
    for parts in random_splits(family.case):
        total = reduce(add, parts)
        assert_same(Moments.from_tensors(family.case.layout, total.tensors()), total)


LAWS: list[Callable[[Family], None]] = [
    identity,
    commutativity,
    associativity,
    split_is_whole,
    inputs_are_unchanged,
    blocks_pool_the_neurons,
    groups_part_the_neurons,
    tensors_hold_everything,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("family", grid(FAMILIES, ["clamped", "two neurons", "bfloat16"]))
def test_monoid(family: str, law: Callable[[Family], None]) -> None:
    law(FAMILIES[family])


def test_each_sequence_is_pooled_in_its_own_block() -> None:
    case = random_case("silu", (5, 70, 9), 3)
    pooled = case.moments.pooled.values
    for block, part in enumerate(case.parts):
        assert torch.equal(pooled[:, block], part.neuron.values @ case.weight)
    assert (pooled[:, 3:] == 0).all()


def test_consecutive_blocks_share_a_group() -> None:
    case = random_case("silu", (9,) * N_JACKKNIFE_BLOCKS, 3)
    per_group = N_JACKKNIFE_BLOCKS // N_JACKKNIFE_GROUPS
    for group, sums in enumerate(case.moments.neuron_groups.double()):
        mine = reduce(add, case.parts[group * per_group : (group + 1) * per_group]).neuron.values
        torch.testing.assert_close(sums, case.layout.narrow(mine), rtol=1e-5, atol=1e-5)


def test_counts_of_tokens_and_sequences() -> None:
    moments = random_case("silu", (5, 70, 9), 3).moments
    assert (moments.n_tokens, moments.n_sequences) == (84, 3)
    assert (moments.tokens.ratios.sum(dim=1) == 84).all()
    counts = torch.stack([moments.neuron[f"count_{quadrant}"] for quadrant in reference.QUADRANTS])
    assert (counts.sum(dim=0) == 84).all()
    assert (moments.neuron["weight"] == 84).all()
    assert moments.blocks.tolist() == [5, 70, 9] + 13 * [0]


def test_inputs_of_a_batch_are_unchanged() -> None:
    case = random_case("linear", (70,), 3)
    a, b, weight = case.a, case.b, case.weight.clone()
    case.moments_of(a, b)
    assert torch.equal(a, case.a)
    assert torch.equal(b, case.b)
    assert torch.equal(case.weight, weight)


@pytest.mark.parametrize("lengths", [(1,), (1, 300), (TILE, 1, 236)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_first_moments_equal_the_twin(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    case = random_case("silu", lengths, 4, dtype=dtype)
    twin = reference.moments(*case.grids[:2])
    actual = vars(GaussianFit.of(case.moments.neuron))
    assert actual.keys() == twin.keys()
    for name, values in twin.items():
        assert_close(actual[name], values, what=name)  # a and b are summed in float64 whatever they come in


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_data_far_from_zero(dtype: torch.dtype) -> None:
    """A mean of 1000 standard deviations costs six digits of a variance, and none of them matter in float64."""
    case = random_case("silu", (1, 400, 399), 4)
    case = case.with_data(lambda a, b: ((a + 1000 * case.a.std(0)).to(dtype), (b - 1000 * case.b.std(0)).to(dtype)))
    moments = case.moments
    twin, actual = reference.moments(*case.grids[:2]), vars(GaussianFit.of(moments.neuron))
    for name, values in twin.items():
        torch.testing.assert_close(actual[name], torch.tensor(values, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e3 / 3])
def test_correlation_with_a_constant_is_missing(constant: float) -> None:
    case = random_case("silu", (37,), 3).with_data(lambda a, b: (torch.full_like(a, constant), b))
    law = GaussianFit.of(case.moments.neuron)
    torch.testing.assert_close(law.std_a, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-4)
    assert law.corr_ab.isnan().all()


def test_different_layouts_refuse_to_add() -> None:
    case = random_case("silu", (9,), 3, draws=1)
    others = [
        replace(case, layout=Layout.of(case.unit, (0.5,), draws=1)),
        replace(case, layout=Layout((-1.0, *case.layout.alphas[1:-1], 16.0), draws=1)),
        random_case("silu", (9,), 3, draws=2),
    ]
    for other in others:
        with pytest.raises(ValueError, match="layouts"):
            case.moments + other.moments


@pytest.mark.parametrize("d_mlp", [2, 4])
def test_layers_of_different_width_refuse_to_add(d_mlp: int) -> None:
    case, other = random_case("silu", (9,), 3), random_case("silu", (9,), d_mlp)
    with pytest.raises((ValueError, RuntimeError)):
        case.moments + other.moments


@pytest.mark.parametrize("layout", [Layout(()), Layout((0.5, 2.0), draws=3), Layout.of(unit_named("silu"))])
def test_rows_of_a_layout_tile_its_table(layout: Layout) -> None:
    spans = [(rows.start, rows.stop) for rows in layout.rows.values()]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == layout.size
    sums = Sums(layout, torch.arange(float(layout.size), dtype=torch.float64)[:, None].expand(-1, 2))
    assert sums["a"].shape == (2,)
    assert sums["scaling"].shape == (len(layout.alphas), 2)
    assert sums["repaired_exchange_gap"].shape == (layout.draws, 2)


class Odd(ClampedUnit):
    """a·|b|, which exchange turns into its negative wherever one of a and b is positive and the other negative."""

    def gate(self, a: Tensor) -> Tensor:
        return a

    def up(self, b: Tensor) -> Tensor:
        return b.abs()


def exchange_ratios(case: Case) -> Tensor:
    """The histogram of the exchange asymmetry of single tokens."""
    return case.moments.tokens.ratios[case.layout.token_measures.index("exchange")]


def test_histogram_holds_ratios_up_to_one() -> None:
    odd = exchange_ratios(random_case(Odd(), (20,), 2).with_data(lambda a, b: (a.abs(), -b.abs())))
    assert odd[-1] == odd.sum() == 20
    half = exchange_ratios(random_case("relu", (20,), 2).with_data(lambda a, b: (a.abs(), -b.abs())))  # h′ = 0
    assert half[int(0.5**0.5 * RATIO_BINS)] == half.sum() == 20
    same = exchange_ratios(random_case("relu", (20,), 2).with_data(lambda a, b: (a.abs(), b.abs())))
    assert same[0] == same.sum() == 20


def test_token_without_energy_has_no_ratio() -> None:
    case = random_case("relu", (20,), 2).with_data(lambda a, b: (-a.abs(), -b.abs()))
    moments = case.moments
    assert exchange_ratios(case).sum() == 0
    assert math.isnan(moments.tokens.quantile("exchange", 0.5))
    assert (moments.top_energy, moments.n_tokens) == (0.0, 20)


@pytest.mark.parametrize("d_mlp", [2, 3, 50])
def test_derangements_move_every_neuron_and_lose_none(d_mlp: int) -> None:
    partners = derangements(d_mlp, draws=20, seed=3)
    assert partners.shape == (20, d_mlp)
    everyone = torch.arange(d_mlp)
    assert (partners != everyone).all()
    assert torch.equal(partners.sort(dim=1).values, everyone.expand(20, -1))


def test_derangements_depend_on_seed_and_draw_only() -> None:
    partners = derangements(50, draws=3, seed=3)
    assert torch.equal(partners, derangements(50, draws=3, seed=3))
    assert torch.equal(partners[:2], derangements(50, draws=2, seed=3))
    assert not torch.equal(partners, derangements(50, draws=3, seed=4))
    assert not torch.equal(partners[0], partners[1])
