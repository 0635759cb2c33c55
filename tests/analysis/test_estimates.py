"""The numbers of a layer and its neurons: laws of gauge and order, curves, and asymmetries planted with a known answer."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.gaussian_null import GaussianFit, gaussian_nulls
from analysis.measures.jackknife import pooled_error
from analysis.measures.permutation_null import permutation_variance
from analysis.sums.layout import scaling_name
from analysis.sums.moments import N_JACKKNIFE_BLOCKS
from analysis.sums.token_histograms import BLOCK_RATIO_BINS, RATIO_BINS
from analysis.units.registry import Unit, unit_named
from tests.helpers import reference
from tests.helpers.families import grid
from tests.helpers.random_layers import (
    Case,
    ClampedUnit,
    assert_close,
    layer_sums,
    permuted,
    random_case,
    regauged,
    scalar_unit,
)

BETA = torch.tensor([3.0, -1.0, -0.2, 3.0, -0.2, -1.0], dtype=torch.float64)
BETAS = {"3": BETA[[0]].expand(6), "-1": BETA[[1]].expand(6), "-0.2": BETA[[2]].expand(6), "mixed": BETA}
GAUGED = ("exchange", "placement", "n_exchange_differs")
"""What k → βk, v → v/β may change, but for what begins like the balanced measures."""
GAUGED_BY_NEURON = (*GAUGED, "mean_b", "std_b", "corr_ab", "quadrant", "cos_", "norm_k", "norm_v")
EXEMPT = ("exchange_balanced", "placement_balanced")


def assert_agree(actual: Mapping[str, Any], expected: Mapping[str, Any], but_for: tuple[str, ...] = ()) -> None:
    """Two tables hold the same numbers, but for columns that begin as named; what is binned may move to the next bin."""
    assert actual.keys() == expected.keys()
    kept = [name for name in expected if not name.startswith(but_for) or name.startswith(EXEMPT)] if but_for else expected
    for name in kept:
        ours, theirs = (torch.as_tensor(x[name], dtype=torch.float64) for x in (actual, expected))
        relative, absolute = 1e-8, 1e-11
        if name.endswith("_se"):
            relative, absolute = 1e-4, 1e-6  # sums of groups are kept in single precision
        if "_token_" in name:
            absolute = 4 / (BLOCK_RATIO_BINS if name.endswith("_se") else RATIO_BINS)
        torch.testing.assert_close(ours, theirs, rtol=relative, atol=absolute, equal_nan=True, msg=name)


def layer(name: str = "silu", draws: int = 3, d_mlp: int = 6) -> Case:
    """A layer with a sequence in every jackknife block."""
    return random_case(name, (11, 1, 19, 7) * (N_JACKKNIFE_BLOCKS // 4), d_mlp, draws=draws)


@pytest.mark.parametrize("of", grid(BETAS, ["3", "mixed"]))
@pytest.mark.parametrize("name", grid(["silu", "gelu", "leaky_relu"], ["silu", "leaky_relu"]))
def test_rescaling_key_and_value_changes_only_raw_exchange_and_placement(name: str, of: str) -> None:
    """With all nulls, errors, quartiles and discoveries, for layers and neurons; β is of either sign, one a neuron."""
    beta = BETAS[of]
    before, after = layer(name), regauged(layer(name), beta)
    numbers, new_numbers = before.estimates.layer_numbers(), after.estimates.layer_numbers()
    assert_agree(new_numbers, numbers, but_for=GAUGED)
    if name != "leaky_relu" or (beta < 0).any():  # a gate with σ(βz) = βσ(z) for β > 0
        for column in ("exchange", "exchange_null_repaired", "exchange_null_gaussian"):
            assert new_numbers[column] != pytest.approx(numbers[column], rel=1e-3), column
    assert_agree(after.estimates.neuron_numbers(), before.estimates.neuron_numbers(), but_for=GAUGED_BY_NEURON)
    assert_agree(after.estimates.curve_numbers(), before.estimates.curve_numbers())


@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_the_order_of_the_neurons_changes_no_number(name: str) -> None:
    case, order = layer(name), torch.tensor([3, 1, 5, 0, 2, 4])
    moved = permuted(case, order)
    assert_agree(moved.estimates.layer_numbers(), case.estimates.layer_numbers())
    in_order = {column: values[order] for column, values in case.estimates.neuron_numbers().items()}
    assert_agree(moved.estimates.neuron_numbers(), in_order)


def test_other_partners_change_the_repaired_null_of_exchange_only() -> None:
    """The null of scaling is over all pairs and knows no draw."""
    case = layer()
    other = case.with_data(lambda a, b: (a, b), partners=case.partners.roll(1, 0)[:, [1, 2, 3, 4, 5, 0]])
    ours, theirs = case.estimates.layer_numbers(), other.estimates.layer_numbers()
    changed = {name for name, value in ours.items() if value != theirs[name] and not math.isnan(value)}
    assert {"exchange_null_repaired", "exchange_balanced_null_repaired"} < changed
    assert not {"exchange", "exchange_null_gaussian", "scaling_double_null_repaired", "scaling_double"} & changed


@pytest.mark.parametrize("unit", [unit_named("silu"), ClampedUnit()], ids=lambda unit: unit.name)
def test_curves_equal_the_twins(unit: Unit) -> None:
    case = random_case(unit, (41, 23, 30), 4)
    a, b, w = case.grids
    g, curve = scalar_unit(unit), case.estimates.curve_numbers()
    assert curve["alpha"] == list(case.layout.alphas)
    everyone = reference.everyone_else(a, b, case.k.tolist() if unit.up_is_linear else None)
    gaussian = gaussian_nulls(GaussianFit.of(case.moments.neuron), unit, case.balance, case.layout.alphas)
    errors = pooled_error(measures.scaling, case.moments)
    for index, alpha in enumerate(case.layout.alphas):
        row = {name: column[index] for name, column in curve.items()}
        if alpha != 0 and math.isfinite(alpha):
            twin = reference.scaling(g, a, b, w, alpha)
            tokens = [reference.scaling(g, [x], [y], w, alpha).pooled_asymmetry for x, y in zip(a, b, strict=True)]
            assert row["asymmetry"] == pytest.approx(twin.pooled_asymmetry, rel=1e-9)
            assert row["relative_change"] == pytest.approx(twin.pooled_change, rel=1e-9)
            assert row["token_median"] == pytest.approx(reference.median(tokens), abs=2 / RATIO_BINS)
            null = reference.scaling(g, *everyone, w, alpha).pooled_asymmetry
            assert row["null_repaired"] == pytest.approx(null, rel=1e-9)
        assert row["asymmetry_se"] == errors[index] > 0
        assert row["null_gaussian"] == pytest.approx(gaussian[scaling_name(alpha)].pooled(case.weight), rel=1e-12)


def test_an_excess_is_the_measure_minus_its_null() -> None:
    estimates = layer().estimates
    for numbers in (estimates.layer_numbers(), estimates.neuron_numbers()):
        for name in ("exchange", "exchange_balanced", "scaling_half", "scaling_double", "scaling_flip"):
            for null in ("gaussian", "repaired"):
                difference = torch.as_tensor(numbers[name] - numbers[f"{name}_null_{null}"], dtype=torch.float64)
                assert_close(numbers[f"{name}_excess_{null}"], difference, what=name)


def test_the_error_of_a_layers_excess_is_that_of_the_difference() -> None:
    """Measure and null without each block, not a sum of two errors."""
    case = layer()
    parts = case.parts
    without = [sum_of(parts[:k] + parts[k + 1 :]) for k in range(N_JACKKNIFE_BLOCKS)]
    for name in ("exchange", "exchange_balanced", "scaling_double"):
        own, null = measures.LAYER_MEASURES[name], measures.REPAIRED_NULLS[name]
        tokens = reference.jackknife([float(own(sums) - null(sums)) for sums in without])
        expected = (tokens**2 + pairing_chance(case, name)) ** 0.5
        assert case.estimates.layer_numbers()[f"{name}_excess_repaired_se"] == pytest.approx(expected, rel=1e-9)


def pairing_chance(case: Case, name: str) -> float:
    """What the pairing adds to the variance of an excess: from the numbers of every pairing, one by one."""
    a, b, w = case.grids
    g, sums, totals = scalar_unit(case.unit), [], []
    for partner, balance in zip(case.partners.tolist(), case.pairing.balance.tolist(), strict=True):
        for j, p in enumerate(partner):
            own = [[row[j]] for row in a]
            if name == "scaling_double":
                ratio = float(case.geometry.norm_k[j] / case.geometry.norm_k[p])
                pair = reference.apply(g, own, other := [[ratio * row[p]] for row in b])
                changed = reference.apply(g, [[2 * x] for [x] in own], [[y / 2] for [y] in other])
            else:
                beta, side = (1.0, 1.0) if name == "exchange" else (float(case.balance[j]), balance[j])
                pair = [[g(x, side * row[p]) / beta] for [x], row in zip(own, b, strict=True)]
                changed = [[g(side * row[p], x) / beta] for [x], row in zip(own, b, strict=True)]
            gap = sum((x - y) ** 2 for [x], [y] in zip(pair, changed, strict=True))
            scale = 2 * sum(x * x + y * y for [x], [y] in zip(pair, changed, strict=True))
            sums.append(w[j] * gap), totals.append(w[j] * scale)
    shape = case.partners.shape
    gaps, scales = (torch.tensor(x, dtype=torch.float64).reshape(shape) for x in (sums, totals))
    parts = (gaps - gaps.sum() / scales.sum() * scales) / (scales.sum() / shape[0])
    return permutation_variance(parts, case.partners) * (1 if name == "scaling_double" else 1 + 1 / shape[0])


def sum_of(parts: list[Any]) -> Any:
    return layer_sums(sum(parts[1:], parts[0]))


def test_the_error_of_a_layers_gaussian_excess_is_that_of_the_difference() -> None:
    """Without each group of two blocks, the null from the moments that remain, by a coarser quadrature."""
    case, replicates = layer(), []
    parts = case.parts
    for k in range(0, N_JACKKNIFE_BLOCKS, 2):
        kept = parts[:k] + parts[k + 2 :]
        rest = sum(kept[1:], kept[0])
        null = gaussian_nulls(GaussianFit.of(rest.neuron), case.unit, case.balance, (2.0,))["scaling 2"]
        replicates.append(float(measures.at_scale(measures.scaling, 2.0)(layer_sums(rest))) - null.pooled(case.weight))
    error = case.estimates.layer_numbers()["scaling_double_excess_gaussian_se"]
    assert error == pytest.approx(reference.jackknife(replicates), rel=0.05)


def test_median_neurons_are_those_that_have_a_number() -> None:
    case = layer("relu").with_data(lambda a, b: (torch.cat([-a[:, :1].abs(), a[:, 1:]], dim=1), b))
    numbers, neurons = case.estimates.layer_numbers(), case.estimates.neuron_numbers()
    shares = neurons["bilinear_share"]
    assert shares.isnan().tolist() == [True] + 5 * [False]
    assert numbers["bilinear_share_neuron_median"] == pytest.approx(reference.median(shares[1:].tolist()), rel=1e-12)
    assert numbers["exchange_neuron_median"] == pytest.approx(reference.median(neurons["exchange"].tolist()), rel=1e-12)


def test_effective_neurons_of_equal_ones_are_all_of_them() -> None:
    equal = random_case("silu", (64,), 1).with_data(lambda a, b: (a.repeat(1, 5), b.repeat(1, 5)))
    ones = torch.ones(5, 4, dtype=torch.float64)
    equal = equal.with_data(lambda a, b: (a, b), q=ones, k=ones, v=ones, partners=torch.tensor([[1, 2, 3, 4, 0]]))
    assert equal.estimates.layer_numbers()["effective_neurons"] == pytest.approx(5)
    one = equal.with_data(lambda a, b: (a, b), v=torch.cat([1e3 * ones[:1], ones[1:]]))
    assert one.estimates.layer_numbers()["effective_neurons"] == pytest.approx(1, rel=1e-4)


# --- planted asymmetries ---


def planted(name: str, a: Tensor, b: Tensor) -> dict[str, Any]:
    """The numbers of a layer of two equal neurons with these pre-activations; q = k."""
    weights = torch.ones(2, 4, dtype=torch.float64)
    case = random_case(name, (len(a),), 2)
    pair = (a[:, None].repeat(1, 2), b[:, None].repeat(1, 2))
    return case.with_data(lambda *_: pair, q=weights, k=weights, v=weights).estimates.layer_numbers()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_planted_shares_of_invariant_and_unrelated_tokens(share: float) -> None:
    """ReLU: h = h′ at (2, 2), and h′ = 0 at (2, −2), on a share s of the tokens: A = s / 2(1 + 1 − s)."""
    n, size = 400, 2.0
    odd = torch.arange(n) < share * n
    a, b = (torch.full((n,), size, dtype=torch.float64) for _ in range(2))
    b = torch.where(odd, -b, b)
    numbers = planted("relu", a, b)
    assert numbers["exchange"] == pytest.approx(share / (2 * (2 - share)), rel=1e-12)
    assert numbers["scaling_double"] == pytest.approx(0, abs=1e-12)
    assert numbers["scaling_flip"] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_planted_keys_that_are_multiples_of_the_query(ratio: float) -> None:
    """ReLU² at b = ca: h = ca³ and h′ = c²a³, so A = (1 − c)² / 2(1 + c²); scaling by α is h → αh."""
    a = torch.linspace(0.1, 3, 50, dtype=torch.float64)
    numbers = planted("relu2", a, ratio * a)
    assert numbers["exchange"] == pytest.approx((1 - ratio) ** 2 / (2 * (1 + ratio**2)), rel=1e-12)
    assert numbers["scaling_double"] == pytest.approx(0.1, rel=1e-12)
    assert numbers["scaling_half"] == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("level", [0.3, 2.0])
def test_planted_gates_of_constant_size(level: float) -> None:
    """SiLU at b = −a = ±c: h and h′ are −c²(1 ± t)/2 with t = tanh(c/2), so A = t²/(1 + t²); so is the flip."""
    a = torch.tensor([level, -level], dtype=torch.float64).repeat(20)
    tanh = math.tanh(level / 2)
    numbers = planted("silu", a, -a)
    assert numbers["exchange"] == pytest.approx(tanh**2 / (1 + tanh**2), rel=1e-12)
    assert numbers["scaling_flip"] == pytest.approx(tanh**2 / (1 + tanh**2), rel=1e-12)
    assert numbers["exchange_token_median"] == pytest.approx(tanh**2 / (1 + tanh**2), abs=2 / RATIO_BINS)
