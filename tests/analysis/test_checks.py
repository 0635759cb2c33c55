"""One judge for every check: its verdict, the worse of two, and what run.json holds of it."""

import math

import pytest

from analysis.checks import Check, worst

BELOW, ABOVE = Check("error", 1e-7, 1e-6), Check("exchange", 0.3, 1e-6, "more than", layer=4)
WORDS = Check.stated("precision", "float32", "sums in float64")


@pytest.mark.parametrize(("value", "below"), [(0.5, True), (1.0, True), (1.5, False), (math.nan, False), (math.inf, False)])
def test_a_number_is_judged_by_its_limit(value: float, below: bool) -> None:
    assert Check("x", value, 1.0).passed is below
    assert Check("x", value, 1.0, "more than").passed is (value > 1.0)


def test_words_carry_their_own_verdict() -> None:
    assert WORDS.passed
    assert not Check.stated("precision", "float32", "sums in float64", holds=False).passed


def test_the_worse_of_two_is_kept_whatever_their_order() -> None:
    for check, better in ((BELOW, 0.0), (ABOVE, 0.9)):
        other = Check(check.what, better, check.limit, check.sense, layer=check.layer)
        assert check.worse(other) == other.worse(check) == worst([other, check, other]) == check
    failed = Check("error", 1e-9, 1e-10)
    assert BELOW.worse(failed) == failed.worse(BELOW) == failed
    both = WORDS.worse(Check.stated("precision", "float16", "sums in float64", holds=False))
    assert (both.value, both.passed) == ("float32; float16", False)


@pytest.mark.parametrize("check", [BELOW, Check("error", 2e-6, 1e-6), Check("x", 0.1, 0.5, "more than"), WORDS])
def test_a_check_comes_back_from_its_record(check: Check) -> None:
    assert Check.of_record(check.as_record()) == check
    assert check.as_record()["passed"] is check.passed


def test_a_control_comes_back_from_its_record() -> None:
    assert ABOVE.as_control()["must"] == "fail"
    assert Check.of_record(ABOVE.as_control()) == ABOVE
    with pytest.raises(KeyError):
        Check.of_record({"check": "error", "limit": 1.0, "passed": True})


def test_a_failed_check_reads_as_one_line() -> None:
    assert str(Check("error", 2e-5, 1e-6)) == "error: 2.0e-05, limit at most 1e-06"
