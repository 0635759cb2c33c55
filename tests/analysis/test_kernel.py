"""The fused loop gives the sums of the torch loop in float64, for every activation, shape and layout that it takes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from numba import njit
from torch import Tensor

from analysis.sums import kernel as fused
from analysis.sums.fused_reducer import NEURONS_AT_ONCE, TILE, FusedReducer, reducer_of
from analysis.sums.kernel import KINDS
from analysis.sums.layout import Layout
from analysis.sums.moments import Accumulator, Moments
from analysis.sums.tiled import TileReducer
from analysis.units.activations import ACTIVATIONS
from analysis.units.registry import GatedUnit, unit_named
from analysis.weights.geometry import derangements
from tests.helpers.batches import batch_of, padded
from tests.helpers.random_layers import Case, ClampedUnit, random_case

EXACTNESS = 2e-6
"""Of the largest sum of a row: products are float32, and so is what a neuron adds up over 256 tokens."""


def both(
    case: Case, lengths: Sequence[int], blocks: Sequence[int], times: int = 1, **window: int
) -> tuple[Moments, Moments]:
    """The moments by the fused loop and by the torch loop in float64."""
    assert isinstance(case.unit, GatedUnit)
    batch = batch_of(lengths, blocks, **window)
    fused = Accumulator(case.a.shape[1], FusedReducer(case.unit, case.layout, case.geometry, case.pairing))
    exact = TileReducer(case.unit, case.layout, case.geometry, case.pairing, dtype=torch.float64)
    plain = Accumulator(case.a.shape[1], exact)
    a, b = padded(case.a, lengths), padded(case.b, lengths)
    for _ in range(times):
        fused.add(a, b, batch)
        plain.add(a.double(), b.double(), batch)
    return fused.moments(), plain.moments()


def assert_agree(fused: Moments, exact: Moments) -> None:
    for name, rows in exact.layout.rows.items():
        if rows.start == rows.stop:  # no scale is followed in re-pairings
            continue
        for of in ("neuron", "pooled"):
            found, expected = (getattr(moments, of).values[rows] for moments in (fused, exact))
            # A gap that is 0 by identity is rounding here: it is held against the energy of what is compared.
            scale = expected.abs().amax().clamp(min=float(getattr(exact, of)["hh"].abs().max()))
            torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=EXACTNESS, msg=f"{of} {name}")
    groups, expected_groups = fused.neuron_groups.double(), exact.neuron_groups.double()
    torch.testing.assert_close(groups, expected_groups, rtol=1e-5, atol=1e-5 * float(expected_groups.abs().max()))
    assert torch.equal(fused.signs, exact.signs)
    assert torch.equal(fused.blocks, exact.blocks)
    assert torch.equal(fused.neuron["weight"], exact.neuron["weight"])
    assert torch.equal(fused.peaks.places, exact.peaks.places)
    torch.testing.assert_close(fused.peaks.values, exact.peaks.values, rtol=1e-6, atol=1e-30)
    assert torch.equal(fused.top_tokens.places, exact.top_tokens.places)
    torch.testing.assert_close(fused.top_tokens.energy, exact.top_tokens.energy, rtol=1e-5, atol=0)
    torch.testing.assert_close(fused.tokens.by_energy.sum(1), exact.tokens.by_energy.sum(1), rtol=1e-5, atol=1e-6)
    moved = (fused.tokens.ratios.cumsum(1) - exact.tokens.ratios.cumsum(1)).abs().max()
    assert moved <= 3  # a token's ratio may stand at the edge of a bin
    assert (fused.n_tokens, fused.n_sequences) == (exact.n_tokens, exact.n_sequences)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str) -> None:
    case = random_case(name, (40, 270, 3), 37, dtype=torch.float32, draws=2)
    assert name in KINDS
    assert_agree(*both(case, (40, 270, 3), (0, 0, 5)))


@pytest.mark.parametrize(
    ("lengths", "blocks", "counted_from"),
    [((TILE + 1,), (3,), 1), ((2,), (0,), 1), ((TILE, TILE), (1, 1), 0), ((5, 6, 7), (0, 15, 15), 2), ((3, 1), (0, 0), 1)],
)
def test_tiles_that_are_full_or_nearly_empty(lengths: tuple[int, ...], blocks: tuple[int, ...], counted_from: int) -> None:
    case = random_case("silu", lengths, 5, dtype=torch.float32)
    assert_agree(*both(case, lengths, blocks, counted_from=counted_from))


@pytest.mark.parametrize("d_mlp", [2, 3, 16, NEURONS_AT_ONCE + 1, 2 * NEURONS_AT_ONCE + 30])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_width_on_any_number_of_threads(d_mlp: int, threads: int) -> None:
    case = random_case("gelu_pytorch_tanh", (300, 31), d_mlp, dtype=torch.float32, draws=3, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_agree(*both(case, (300, 31), (2, 9), times=3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("alphas", [(), (2.0,), (-1.0, 3.0), (0.5, 2.0, -1.0, 1e-3, 1e3)])
@pytest.mark.parametrize("draws", [1, 5])
def test_any_scales_and_any_number_of_re_pairings(alphas: tuple[float, ...], draws: int) -> None:
    case = random_case("silu", (50, 60), 9, dtype=torch.float32)
    layout = Layout.of(case.unit, alphas, draws)
    assert_agree(*both(replace(case, layout=layout, partners=derangements(9, draws, 1)), (50, 60), (0, 1)))


def test_large_pre_activations_keep_their_variance() -> None:
    """Means a thousand times the spread: first and second moments are taken in float64."""
    case = random_case("silu", (200,), 4, dtype=torch.float32).with_data(lambda a, b: (a + 1000, b - 1000))
    fused, exact = both(case, (200,), (0,))
    for name in ("aa", "bb", "ab"):
        torch.testing.assert_close(fused.neuron[name], exact.neuron[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "relu", "softplus"])
@pytest.mark.parametrize("size", [1e-4, 50.0, 1e4])
def test_tiny_and_huge_pre_activations(name: str, size: float) -> None:
    case = random_case(name, (90,), 6, dtype=torch.float32).with_data(lambda a, b: (a * size, b))
    assert_agree(*both(case, (90,), (0,)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("name", ["silu", "relu", "gelu_pytorch_tanh", "gelu"])
def test_overflow_is_seen(value: float, which: str, name: str) -> None:
    case = random_case(name, (20,), 6, dtype=torch.float32)
    a, b = case.a.clone(), case.b.clone()
    (a if which == "a" else b)[13, 2] = value
    assert isinstance(case.unit, GatedUnit)
    accumulator = Accumulator(6, FusedReducer(case.unit, case.layout, case.geometry, case.pairing))
    batch = batch_of((20,), (0,))
    accumulator.add(case.a[None], case.b[None], batch)
    assert bool(accumulator.is_finite)
    accumulator.add(a[None], b[None], batch)
    assert not bool(accumulator.is_finite)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_read_as_it_is(dtype: torch.dtype) -> None:
    case = random_case("silu", (70,), 8, dtype=dtype)
    assert_agree(*both(case, (70,), (0,)))


def test_inputs_are_left_alone() -> None:
    case = random_case("silu", (70,), 8, dtype=torch.float32)
    a, b = case.a.clone(), case.b.clone()
    both(case, (70,), (0,))
    assert torch.equal(case.a, a)
    assert torch.equal(case.b, b)


def test_the_fastest_reducer_that_does_is_taken() -> None:
    case = random_case("silu", (5,), 4)
    made = {
        (name, dtype): type(reducer_of(unit, Layout.of(unit), case.geometry, case.pairing, torch.device("cpu"), dtype))
        for name, unit in (("silu", unit_named("silu")), ("gpt_oss", unit_named("gpt_oss")), ("clamped", ClampedUnit()))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    }
    for (name, dtype), kind in made.items():
        fused = name == "silu" and dtype != torch.float64
        assert kind is (FusedReducer if fused else TileReducer), (name, dtype)


@pytest.mark.parametrize("name", ["linear", "relu"])
def test_of_equal_peaks_the_first_is_kept(name: str) -> None:
    """Small whole numbers: many tokens are exactly equal, and a relu is often 0."""
    lengths = (30, 280, 30)
    generator = torch.Generator().manual_seed(1)

    def whole(x: Tensor) -> Tensor:
        return torch.randint(-2, 3, x.shape, generator=generator).float()

    weights = torch.eye(4, dtype=torch.float64)
    case = random_case(name, lengths, 4, dtype=torch.float32)
    case = case.with_data(lambda a, b: (whole(a), whole(b)), q=weights, k=weights, v=weights)
    for counted_from in (0, 1):
        fused, exact = both(case, lengths, (0, 1, 1), times=2, counted_from=counted_from)
        assert torch.equal(fused.peaks.places, exact.peaks.places)


def test_two_at_once_do_not_meet() -> None:
    """Memory for tiles is kept from batch to batch, but not shared by two threads that reduce at the same time."""
    cases = [random_case("silu", (300, 200), 40, dtype=torch.float32, seed=seed) for seed in range(4)]
    alone = [both(case, (300, 200), (0, 1), times=5)[0] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: both(case, (300, 200), (0, 1), times=5)[0], cases))
    for first, second in zip(alone, together, strict=True):
        torch.testing.assert_close(first.neuron.values, second.neuron.values, rtol=1e-12, atol=0)


def test_it_compiles_where_nothing_can_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(fused, "njit", nowhere)
    assert fused._compiled("contract")(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"])
@pytest.mark.parametrize("counted_from", [0, 1])
def test_of_equal_peaks_in_several_batches_the_first_is_kept(name: str, counted_from: int) -> None:
    """The loop's h and torch's differ in the last digit: equal tokens must be known as equal all the same."""
    case = random_case(name, (40,), 60, dtype=torch.float32)
    assert isinstance(case.unit, GatedUnit)
    accumulator = Accumulator(60, FusedReducer(case.unit, case.layout, case.geometry, case.pairing))
    for number in range(4):
        accumulator.add(case.a[None], case.b[None], batch_of((40,), (number,), counted_from=counted_from, first=number))
    assert (accumulator.moments().peaks.places[0] == 0).all()


def test_what_was_seen_stays_what_it_was() -> None:
    case = random_case("silu", (30,), 6, dtype=torch.float32)
    assert isinstance(case.unit, GatedUnit)
    accumulator = Accumulator(6, FusedReducer(case.unit, case.layout, case.geometry, case.pairing))
    accumulator.add(case.a[None], case.b[None], batch_of((30,), (0,)))
    seen = accumulator.moments()
    before = {name: tensor.clone() for name, tensor in seen.tensors().items()}
    accumulator.add(3 * case.a[None], 3 * case.b[None], batch_of((30,), (1,), first=1))
    for name, tensor in seen.tensors().items():
        assert torch.equal(tensor, before[name]), name
