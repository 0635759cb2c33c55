"""Where the largest values sit, and what numbers read without them: equal to their twins, in any order of adding."""

from collections.abc import Sequence
from functools import reduce
from itertools import permutations
from operator import add

import pytest
import torch
from torch import Tensor

from analysis.sums.batch import Window
from analysis.sums.extremes import TOP_TOKENS, Peaks
from analysis.sums.moments import Moments
from tests.helpers import reference
from tests.helpers.random_layers import Case, ClampedUnit, assert_close, random_case

SHIFT = 100
"""Token t of a window has the id SHIFT + t."""


def window_of(index: int, length: int, counted_from: int = 0) -> Window:
    return Window(index, torch.arange(length) + SHIFT, counted_from)


def parts_of(case: Case, counted_from: Sequence[int]) -> list[Moments]:
    """The moments of every sequence as a window of its own."""
    pieces = zip(case.sequences, counted_from, strict=True)
    return [case.moments_of(a, b, index, window_of(index, len(a), skip)) for index, ((a, b), skip) in enumerate(pieces)]


def outputs(case: Case, counted_from: Sequence[int] | None = None) -> list[list[list[float]]]:
    """h of every window, from the given position on."""
    starts = counted_from or [0] * len(case.sequences)
    return [case.unit(a, b)[start:].tolist() for (a, b), start in zip(case.sequences, starts, strict=True)]


def tied(lengths: Sequence[int]) -> Case:
    """A linear layer whose a and b are small whole numbers, so that many tokens are exactly equal."""
    generator = torch.Generator().manual_seed(3)
    case = random_case("linear", lengths, 4)

    def whole(x: Tensor) -> Tensor:
        return torch.randint(-2, 3, x.shape, generator=generator).double()

    weights = torch.eye(4, dtype=torch.float64)
    return case.with_data(lambda a, b: (whole(a), whole(b)), q=weights, k=weights, v=weights)


CASES = {
    "silu": (random_case("silu", (30, 1, 80), 4), (2, 0, 1)),
    "clamped": (random_case(ClampedUnit(), (30, 5), 3, seed=1), (1, 1)),
    "single precision": (random_case("gelu", (70, 9), 4, dtype=torch.float32), (0, 3)),
    "ties": (tied((30, 7, 70)), (0, 2, 1)),
}


@pytest.mark.parametrize(("case", "skipped"), CASES.values(), ids=CASES)
def test_peaks_equal_the_twin(case: Case, skipped: tuple[int, ...]) -> None:
    """Among all tokens fed, those that are not counted included."""
    places = reference.peaks(outputs(case))
    for order in permutations(parts_of(case, skipped)):
        peaks = reduce(add, order).peaks
        for neuron, (window, position) in enumerate(places):
            counted = position >= skipped[window]
            assert peaks.places[:, neuron].tolist() == [window, position, SHIFT + position, counted]
            a, b = (x[position, neuron] for x in case.sequences[window])
            assert_close(peaks.values[:, neuron], [case.unit(a[None], b[None])[0], a, b], torch.float32)


def test_peaks_of_nothing_are_missing() -> None:
    empty, some = Peaks.empty(3), random_case("silu", (5,), 3).moments.peaks
    assert empty.values.isnan().all()
    assert (empty.places == -1).all()
    for total in (empty + some, some + empty):
        assert torch.equal(total.values, some.values)
        assert torch.equal(total.places, some.places)


@pytest.mark.parametrize(("case", "skipped"), CASES.values(), ids=CASES)
def test_top_tokens_equal_the_twin(case: Case, skipped: tuple[int, ...]) -> None:
    """Among the counted tokens only; of equal ones the earlier."""
    expected = reference.top_tokens(outputs(case, skipped), case.weight.tolist(), TOP_TOKENS)
    dtype = case.a.dtype
    for order in permutations(parts_of(case, skipped)):
        top = reduce(add, order).top_tokens
        assert len(top.energy) == len(expected)
        for rank, (window, position, energy, neuron, share) in enumerate(expected):
            place = [window, position + skipped[window], SHIFT + position + skipped[window], neuron]
            assert top.places[:, rank].tolist() == place, rank
            assert_close(top.energy[rank], energy, dtype)
            assert_close(top.neuron_share[rank], share, dtype)


def test_fewer_tokens_than_are_remembered_are_all_there() -> None:
    moments = random_case("silu", (5, 1), 3).moments
    assert len(moments.top_tokens.energy) == 6
    assert moments.top_energy == moments.top_tokens.energy[0]
    assert Moments.empty(3, moments.layout).top_energy == 0


def uneven(n_tokens: int = 30, step: float = 0.75) -> Case:
    """A layer whose tokens have energies 2^(1.5 t), in a random order: every one in a bin of its own."""
    case = random_case("silu", (n_tokens,), 4)
    place = torch.randperm(n_tokens, generator=torch.Generator().manual_seed(0))
    size = (case.unit(case.a, case.b).square() @ case.weight).sqrt()[:, None]
    return case.with_data(lambda a, b: (a, b / size * 2 ** (step * place.double())[:, None]))


def parts_and_energies(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Of the exchange of every token: numerator and denominator; and its energy."""
    h, swapped = case.unit(case.a, case.b), case.unit(case.b, case.a)
    gap, scale = (h - swapped).square() @ case.weight, 2 * (h.square() + swapped.square()) @ case.weight
    return gap.tolist(), scale.tolist(), (h.square() @ case.weight).tolist()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.34, 0.9])
def test_numbers_without_the_tokens_of_largest_energy_equal_the_twin(share: float) -> None:
    """The share is rounded up to whole tokens; 0.1 % of 30 tokens is one."""
    case = uneven()
    gap, scale, energies = parts_and_energies(case)
    trimmed = case.moments.tokens.without_top("exchange", share)
    assert trimmed == pytest.approx(reference.without_top(gap, scale, energies, share), rel=1e-12)
    assert case.moments.tokens.top_share(share) == pytest.approx(reference.top_share(energies, share), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("measure", ["euler", "placement", "balanced_exchange", "scaling 2", "scaling inf"])
def test_every_token_measure_is_trimmed_by_the_same_tokens(measure: str) -> None:
    """Without the largest token a number is that of the other tokens."""
    case = uneven()
    largest = int((case.unit(case.a, case.b).square() @ case.weight).argmax())
    others = torch.arange(30) != largest
    rest = case.with_data(lambda a, b: (a[others], b[others])).moments
    trimmed = case.moments.tokens.without_top(measure, 0.001)
    assert trimmed == pytest.approx(rest.tokens.without_top(measure, 0.0), rel=1e-9)
    assert trimmed != pytest.approx(case.moments.tokens.without_top(measure, 0.0), rel=1e-3)


def test_of_tokens_of_like_energy_a_part_is_left_out() -> None:
    """All tokens in one bin: without a third of them the ratio is that of all, and a third of the energy is theirs."""
    moments = uneven(step=0.0).moments
    assert int((moments.tokens.by_energy[0] > 0).sum()) == 1
    assert moments.tokens.without_top("exchange", 1 / 3) == pytest.approx(moments.tokens.without_top("exchange", 0.0))
    assert moments.tokens.top_share(1 / 3) == pytest.approx(1 / 3)
    assert moments.tokens.effective == pytest.approx(30)


def test_effective_tokens_count_those_that_carry_the_energy() -> None:
    energies = parts_and_energies(uneven())[2]
    expected = sum(energies) ** 2 / sum(energy**2 for energy in energies)
    assert uneven().moments.tokens.effective == pytest.approx(expected, rel=1e-9)
    assert expected < 2.2
