"""Every measure equals its loop twin, and obeys the symmetries it is made to detect."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.sums.layout import Layout, Sums
from analysis.sums.moments import Moments
from analysis.sums.token_histograms import RATIO_BINS, histogram_quantile
from analysis.units.registry import GatedUnit, Unit, unit_named
from tests.helpers import reference
from tests.helpers.families import grid
from tests.helpers.random_layers import (
    TWINS,
    Case,
    ClampedUnit,
    SymmetricUnit,
    assert_close,
    assert_numbers_close,
    by_quadrant,
    layer_numbers,
    layer_sums,
    permuted,
    random_case,
    regauged,
    scalar_unit,
)


def name_of(value: object) -> str | None:
    """A unit's name, where a test is named after one."""
    return value.name if isinstance(value, Unit) else None


SHAPES = [((1,), 2), ((63,), 4), ((64, 1), 2), ((129,), 3), ((65, 1, 41), 5)]
"""Lengths of the sequences and d_mlp; the tile is 64 tokens."""

Table = dict[str, tuple[object, object]]
"""Measure to its numbers per neuron and its number for the layer."""

GAUGE_INVARIANT = (
    "scaling",
    "scaling_relative_change",
    "scaling_half",
    "scaling_double",
    "scaling_flip",
    "euler_residual",
    "bilinear_share",
    "top_token_share",
    "exchange_balanced",
    "placement_balanced",
    "gate_positive",
)
"""Layer numbers that k → βk, v → v/β leaves alone whatever β is for each neuron."""

INDIFFERENT_TO_EQUAL_POSITIVE_GAUGE = (*GAUGE_INVARIANT, "quadrant_tokens", "quadrant_energy")
"""Those and what depends on the signs or on the relative value weights: one β > 0 for all neurons leaves them alone."""


def measured(moments: Moments, weight: Tensor) -> Table:
    """What the package computes."""
    pooled = layer_sums(moments)

    def both(measure: measures.Measure) -> tuple[Tensor, Tensor]:
        return measure(moments.neuron), measure(pooled)[..., 0]

    table: Table = {
        "exchange": both(measures.exchange),
        "exchange_relative_change": both(measures.exchange_relative_change),
        "exchange_null_repaired": both(measures.exchange_null_repaired),
        "exchange_balanced_null_repaired": both(measures.exchange_balanced_null_repaired),
        "euler_residual": both(measures.euler_residual),
        "placement": both(measures.placement),
        "exchange_balanced": both(measures.exchange_balanced),
        "placement_balanced": both(measures.placement_balanced),
        "gate_positive": (
            measures.gate_positive(moments.neuron),
            measures.gate_positive(moments.neuron).mean(),
        ),
        "quadrant_tokens": both(measures.quadrant_tokens),
        "quadrant_energy": both(measures.quadrant_energy),
        "bilinear_share": (
            measures.bilinear_share(moments.neuron),
            measures.layer_bilinear_share(moments.neuron, weight),
        ),
        "bilinear_coefficient": (measures.bilinear_coefficient(moments.neuron), math.nan),
        "top_token_share": (math.nan, moments.top_energy / pooled["hh"][0]),
    }
    for index, alpha in enumerate(moments.neuron.layout.alphas):
        asymmetry, change = both(measures.scaling), both(measures.scaling_relative_change)
        table[f"scaling {alpha:g}"] = (asymmetry[0][index], asymmetry[1][index])
        table[f"scaling_relative_change {alpha:g}"] = (change[0][index], change[1][index])
    return table


def expected(case: Case) -> Table:
    """What the loop twin computes; one draw of partners."""
    g, grids = scalar_unit(case.unit), case.grids
    a, _, w = grids
    exchange = reference.exchange(g, *grids)
    partner, q, k = (x.tolist() for x in (case.partners[0], case.q, case.k))
    repaired = reference.repaired_null(g, *grids, partner=partner)
    repaired_balanced = reference.repaired_balanced_null(g, *grids, q, k, partner)
    placement = reference.placement(g, *grids)
    exchange_balanced, placement_balanced = (
        twin(g, *balanced(case).grids) for twin in (reference.exchange, reference.placement)
    )
    tokens, energy, layer_tokens, layer_energy = reference.quadrants(g, *grids)
    shares, coefficients, layer_share = reference.bilinear(g, *grids)
    table: Table = {
        "exchange": (exchange.asymmetry, exchange.pooled_asymmetry),
        "exchange_relative_change": (exchange.change, exchange.pooled_change),
        "exchange_null_repaired": (repaired.asymmetry, repaired.pooled_asymmetry),
        "exchange_balanced_null_repaired": (repaired_balanced.asymmetry, repaired_balanced.pooled_asymmetry),
        "euler_residual": euler_twin(case, *grids),
        "placement": (placement.asymmetry, placement.pooled_asymmetry),
        "exchange_balanced": (exchange_balanced.asymmetry, exchange_balanced.pooled_asymmetry),
        "placement_balanced": (placement_balanced.asymmetry, placement_balanced.pooled_asymmetry),
        "gate_positive": reference.gate_positive(a, [1.0] * len(w)),
        "quadrant_tokens": (by_quadrant(tokens), by_quadrant(layer_tokens)),
        "quadrant_energy": (by_quadrant(energy), by_quadrant(layer_energy)),
        "bilinear_share": (shares, layer_share),
        "bilinear_coefficient": (coefficients, math.nan),
        "top_token_share": (math.nan, reference.top_token_share(g, *grids)),
    }
    for alpha in case.layout.alphas:
        comparison = scaling_twin(case, *grids, alpha=alpha)
        table[f"scaling {alpha:g}"] = (comparison.asymmetry, comparison.pooled_asymmetry)
        table[f"scaling_relative_change {alpha:g}"] = (comparison.change, comparison.pooled_change)
    return table


def balanced(case: Case) -> Case:
    """The layer in its balanced gauge: k → βk and v → v/β, so that b → βb and w → w/β²."""
    return regauged(case, case.balance)


def euler_twin(case: Case, a: reference.Grid, b: reference.Grid, w: reference.Vector) -> tuple[list[float], float]:
    """The Euler residual from σ′ where the unit has a σ, else from differences."""
    if isinstance(case.unit, GatedUnit):
        sigma, derivative, _, _ = reference.ACTIVATIONS[TWINS[case.unit.activation.name]]
        return reference.euler_residual(sigma, derivative, a, b, w)
    return reference.euler_residual_generic(scalar_unit(case.unit), a, b, w)


def scaling_twin(
    case: Case, a: reference.Grid, b: reference.Grid, w: reference.Vector, alpha: float
) -> reference.Comparison:
    """The scaling comparison at a finite α or at a limit."""
    if alpha != 0 and math.isfinite(alpha):
        return reference.scaling(scalar_unit(case.unit), a, b, w, alpha)
    assert isinstance(case.unit, GatedUnit)
    sigma, _, at_zero, at_infinity = reference.ACTIVATIONS[TWINS[case.unit.activation.name]]
    slopes = at_zero if alpha == 0 else at_infinity
    assert slopes is not None
    return reference.scaling_limit(sigma, slopes, a, b, w)


def assert_measures_equal_the_twin(case: Case, moments: Moments, dtype: torch.dtype) -> None:
    """Every measure, per neuron and for the layer."""
    actual, twin = measured(moments, case.weight), expected(case)
    assert actual.keys() == twin.keys()
    for measure, (neurons, layer) in twin.items():
        differences = measure == "euler_residual" and not isinstance(case.unit, GatedUnit)
        exactness = torch.float32 if differences else dtype
        assert_close(actual[measure][0], neurons, exactness, f"{measure} per neuron")
        assert_close(actual[measure][1], layer, exactness, f"{measure} of the layer")


def token_twin(case: Case, name: str) -> list[float]:
    """One of ``Layout.token_measures`` at every token."""
    g, (a, b, w) = scalar_unit(case.unit), (balanced(case) if name.startswith("balanced") else case).grids
    tokens = [([row_a], [row_b], w) for row_a, row_b in zip(a, b, strict=True)]
    if name == "euler":
        squares = [euler_twin(case, *token)[1] ** 2 for token in tokens]
        return [square / (1 + square) for square in squares]
    if name.startswith("scaling"):
        alpha = float(name.removeprefix("scaling "))
        return [scaling_twin(case, *token, alpha=alpha).pooled_asymmetry for token in tokens]
    compare = reference.placement if name in ("placement", "balanced_placement") else reference.exchange
    return [compare(g, *token).pooled_asymmetry for token in tokens]


def assert_token_quartiles_equal_the_twin(case: Case, moments: Moments, name: str) -> None:
    """Within a bin."""
    ratios = [ratio for ratio in token_twin(case, name) if not math.isnan(ratio)]
    for q in (0.25, 0.5, 0.75):
        exact = reference.quantile(ratios, q)
        assert moments.tokens.quantile(name, q) == pytest.approx(exact, abs=2 / RATIO_BINS), (name, q)
    assert reference.quantile(ratios, 0.5) == reference.median(ratios)


SOME_TWINS = ["silu", "gelu", "relu2", "linear", "softplus"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("lengths", "d_mlp"), SHAPES)
@pytest.mark.parametrize("name", grid(TWINS, SOME_TWINS))
def test_measures_equal_the_twin(name: str, lengths: tuple[int, ...], d_mlp: int, dtype: torch.dtype) -> None:
    case = random_case(name, lengths, d_mlp, dtype=dtype)
    moments = case.moments
    assert_measures_equal_the_twin(case, moments, dtype)
    for token_measure in case.layout.token_measures:
        assert_token_quartiles_equal_the_twin(case, moments, token_measure)


def test_both_limits_are_among_the_scales_compared() -> None:
    assert Layout.of(unit_named("silu")).alphas == (-1, 0, 0.125, 0.25, 0.5, 2, 4, 8, math.inf)
    assert Layout.of(unit_named("relu2")).alphas == (-1, 0, 0.125, 0.25, 0.5, 2, 4, 8)
    assert Layout.of(unit_named("softplus")).alphas == (-1, 0.125, 0.25, 0.5, 2, 4, 8, math.inf)


@pytest.fixture(scope="module")
def clamped() -> Case:
    """A layer of a unit that the package does not know, with tokens beyond every clamp."""
    case = random_case(ClampedUnit(), (70, 21), 3).with_data(lambda a, b: (4 * a, 4 * b))
    assert all(beyond.any() for beyond in (case.a > 7, case.b > 7, case.b < -7))
    return case


def test_custom_unit_equals_the_twin_and_has_no_limits(clamped: Case) -> None:
    assert not {0, math.inf} & set(clamped.layout.alphas)
    assert_measures_equal_the_twin(clamped, clamped.moments, torch.float64)


@pytest.mark.parametrize("name", Layout.of(ClampedUnit()).token_measures)
def test_token_quartiles_of_a_custom_unit_equal_the_twin(clamped: Case, name: str) -> None:
    assert_token_quartiles_equal_the_twin(clamped, clamped.moments, name)


def test_token_median_of_an_even_number_of_tokens() -> None:
    counts = torch.zeros(RATIO_BINS, dtype=torch.int64)
    counts[[1000, 3000]] = 1
    exact = reference.median([(1000.5 / RATIO_BINS) ** 2, (3000.5 / RATIO_BINS) ** 2])
    assert histogram_quantile(counts, 0.5) == pytest.approx(exact, rel=1e-12)


def test_token_median_of_nothing_is_missing() -> None:
    assert math.isnan(histogram_quantile(torch.zeros(RATIO_BINS, dtype=torch.int64), 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("unit", [*map(unit_named, ("silu", "relu", "gelu", "relu2")), ClampedUnit()], ids=name_of)
def test_scaling_null_pairs_a_neuron_with_every_other(unit: Unit, dtype: torch.dtype) -> None:
    """Also where up is not linear, and no key is brought to another length; also at the limits."""
    case = random_case(unit, (65, 3), 4, dtype=dtype)
    a, b, w = case.grids
    everyone = reference.everyone_else(a, b, case.k.tolist() if unit.up_is_linear else None)
    neurons, layer = (measures.scaling_null_repaired(sums) for sums in (case.moments.neuron, layer_sums(case.moments)))
    rounding = 0 if dtype == torch.float64 else 1e-5  # a difference of sums, taken in single precision
    for index, alpha in enumerate(case.layout.alphas):
        twin = scaling_twin(case, *everyone, w, alpha=alpha)
        for actual, expected_number in ((neurons[index], twin.asymmetry), (layer[index], [twin.pooled_asymmetry])):
            difference = (actual - torch.tensor(expected_number, dtype=torch.float64)).abs().max()
            assert difference <= rounding + 1e-12, (alpha, difference)


def test_draws_are_averaged_within_the_ratio() -> None:
    case = random_case("silu", (50,), 4, draws=3)
    a, b, w = case.grids
    drawn_b = [[row[j] for j in partner] for partner in case.partners.tolist() for row in b]
    twin = reference.exchange(scalar_unit(case.unit), 3 * a, drawn_b, w)
    assert_close(measures.exchange_null_repaired(case.moments.neuron), twin.asymmetry)
    assert_close(measures.exchange_null_repaired(layer_sums(case.moments))[0], twin.pooled_asymmetry)


@pytest.mark.parametrize("unit", [unit_named("silu"), ClampedUnit()], ids=name_of)
def test_every_draw_equals_the_twin(unit: Unit) -> None:
    case = random_case(unit, (50,), 4, draws=3)
    g, grids, q, k = scalar_unit(unit), case.grids, case.q.tolist(), case.k.tolist()
    sums = case.moments.neuron
    plain, balanced_draws = measures.exchange_of_draws(sums), measures.exchange_balanced_of_draws(sums)
    for draw, partner in enumerate(case.partners.tolist()):
        assert_close(plain[draw], reference.repaired_null(g, *grids, partner).asymmetry)
        assert_close(balanced_draws[draw], reference.repaired_balanced_null(g, *grids, q, k, partner).asymmetry)


ENERGY_RATIOS = [
    measures.exchange_relative_change,
    measures.scaling_relative_change,
    measures.euler_residual,
    measures.bilinear_share,
    measures.quadrant_energy,
]


@pytest.mark.parametrize("measure", ENERGY_RATIOS, ids=lambda measure: measure.__name__)
def test_neuron_without_energy_is_missing_not_zero(measure: measures.Measure) -> None:
    case = random_case("relu", (20,), 2).with_data(lambda a, b: (-a.abs(), b))
    assert measure(case.moments.neuron).isnan().all()


@pytest.mark.parametrize("measure", [measures.exchange, measures.placement, measures.scaling])
def test_asymmetry_of_nothing_is_missing(measure: measures.Measure) -> None:
    case = random_case("silu", (20,), 2).with_data(lambda a, b: (0 * a, 0 * b))
    assert measure(case.moments.neuron).isnan().all()


def test_bilinear_fit_where_the_product_vanishes() -> None:
    case = random_case("sigmoid", (20,), 2).with_data(lambda a, b: (torch.stack([0 * a[:, 0], a[:, 1]], dim=1), b))
    shares, coefficients, layer = reference.bilinear(scalar_unit(case.unit), *case.grids)
    assert_close(measures.layer_bilinear_share(case.moments.neuron, case.weight), layer)
    assert_close(measures.bilinear_coefficient(case.moments.neuron), coefficients)
    assert_close(measures.bilinear_share(case.moments.neuron), shares)


def test_scale_that_was_not_followed_is_missing() -> None:
    assert measures.at_scale(measures.scaling, 3.0)(random_case("silu", (20,), 2).moments.neuron).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    narrow = random_case("silu", (70,), 3, dtype=dtype)
    wide = narrow.with_data(lambda a, b: (a.float(), b.float()))
    assert torch.equal(narrow.moments.neuron.values, wide.moments.neuron.values)


# --- laws ---


def test_linear_gate_breaks_nothing() -> None:
    case = random_case("linear", (70, 21), 4)
    for sums in (case.moments.neuron, layer_sums(case.moments)):
        for measure in (measures.exchange, measures.scaling, measures.euler_residual, measures.placement):
            assert_close(measure(sums), torch.zeros_like(measure(sums)))
    assert_close(measures.bilinear_share(case.moments.neuron), torch.ones(4))
    assert_close(measures.layer_bilinear_share(case.moments.neuron, case.weight), 1.0)


def test_relu_is_broken_only_by_the_flip() -> None:
    case = random_case("relu", (70, 21), 4)
    for sums in (case.moments.neuron, layer_sums(case.moments)):
        scaling = dict(zip(case.layout.alphas, measures.scaling(sums), strict=True))
        flip = scaling.pop(-1.0)
        assert {0.0, math.inf} < scaling.keys()
        assert_close(torch.stack([*scaling.values()]), torch.zeros(len(scaling), len(flip)))
        assert (flip > 0.1).all()
        assert_close(measures.euler_residual(sums), torch.zeros_like(flip))
        assert (measures.exchange(sums) > 0.01).all()


def test_symmetric_unit_is_exactly_unchanged_by_exchange() -> None:
    moments = random_case(SymmetricUnit(), (70, 21), 4, dtype=torch.float32).moments
    assert (measures.exchange(moments.neuron) == 0).all()
    assert measures.exchange(layer_sums(moments)) == 0
    assert moments.tokens.quantile("exchange", 0.5) <= 1 / RATIO_BINS


@pytest.mark.parametrize("name", TWINS)
def test_query_equal_to_key_makes_exchange_free(name: str) -> None:
    moments = random_case(name, (70,), 3).with_data(lambda a, _: (a, a.clone())).moments
    assert (measures.exchange(moments.neuron) == 0).all()
    assert measures.exchange(layer_sums(moments)) == 0


@pytest.mark.parametrize("name", ["relu2", "tanh", "silu"])
def test_flip_sees_the_parity_of_the_gain(name: str) -> None:
    """σ(−a)·(−b): an odd σ keeps h, and for SiLU the antisymmetric part of φ is tanh(a/2)/2."""
    case = random_case(name, (70,), 3)
    flip = measures.at_scale(measures.scaling, -1.0)(case.moments.neuron)
    ab = case.a * case.b
    even, odd = {
        "tanh": (case.a.tanh() * case.b, torch.zeros(3)),
        "silu": (ab / 2, ab * (case.a / 2).tanh() / 2),
        "relu2": (case.a * ab.sign() * ab.abs() / 2, case.a.square() * case.b / 2),
    }[name]
    even, odd = even.square().sum(dim=0), odd.square().sum(dim=0)
    assert_close(flip, odd / (even + odd))


@pytest.mark.parametrize("name", ["silu", "gelu", "relu2", "softplus"])
def test_permuting_neurons_changes_no_layer_number(name: str) -> None:
    case = random_case(name, (70, 1, 21), 6, draws=2)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(5))
    moved = permuted(case, order)
    assert_numbers_close(layer_numbers(moved.moments, moved.weight), layer_numbers(case.moments, case.weight))
    for null in measures.REPAIRED_NULLS.values():
        assert_close(null(moved.moments.neuron), null(case.moments.neuron)[order])


BETAS = [torch.full((6,), beta, dtype=torch.float64) for beta in (3.0, -1.0, -0.2)]
BETAS.append(torch.tensor([3.0, -1.0, -0.2, 3.0, -0.2, -1.0], dtype=torch.float64))


@pytest.mark.parametrize("beta", BETAS, ids=lambda beta: ",".join(f"{x:g}" for x in beta.unique()))
@pytest.mark.parametrize("name", ["silu", "gelu", "relu2", "softplus", "leaky_relu"])
def test_rescaling_key_and_value_leaves_the_scaling_measures(name: str, beta: Tensor) -> None:
    case = random_case(name, (70, 1, 21), 6)
    changed = regauged(case, beta)
    before, after = case.moments, changed.moments
    numbers, new_numbers = layer_numbers(before, case.weight), layer_numbers(after, changed.weight)
    for number in GAUGE_INVARIANT:
        assert_close(new_numbers[number], numbers[number], what=number)
    for token_measure in before.neuron.layout.token_measures:
        if token_measure not in ("exchange", "placement"):
            medians = [moments.tokens.quantile(token_measure, 0.5) for moments in (before, after)]
            assert abs(medians[0] - medians[1]) <= 2 / RATIO_BINS
    for measure in (measures.bilinear_share, measures.bilinear_coefficient, measures.gate_positive):
        assert_close(measure(after.neuron), measure(before.neuron), what=measure.__name__)
    energies = [x.weight * x.moments.neuron["hh"] for x in (case, changed)]
    assert_close(energies[1], energies[0])


@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_one_positive_factor_leaves_what_counts_signs(name: str) -> None:
    case = random_case(name, (70, 21), 6)
    changed = regauged(case, BETAS[0])
    numbers, new_numbers = (layer_numbers(x.moments, x.weight) for x in (case, changed))
    for number in INDIFFERENT_TO_EQUAL_POSITIVE_GAUGE:
        assert_close(new_numbers[number], numbers[number], what=number)


@pytest.mark.parametrize("measure", [measures.quadrant_tokens, measures.quadrant_energy])
def test_negative_factor_swaps_the_signs_of_b(measure: measures.Measure) -> None:
    case = random_case("silu", (70, 21), 6)
    pp, pn, np, nn = measure(case.moments.neuron)
    assert_close(measure(regauged(case, BETAS[2]).moments.neuron), torch.stack([pn, pp, nn, np]))


GATED_BOTH_WAYS: list[measures.Measure] = [measures.exchange, measures.exchange_relative_change, measures.placement]
HOMOGENEOUS = [("linear", (1, -1)), ("tanh", (-1,)), ("relu", (1,)), ("leaky_relu", (1,))]
"""Gates with the signs of β for which σ(βz) = βσ(z); for tanh only β = −1."""


@pytest.mark.parametrize("measure", GATED_BOTH_WAYS, ids=lambda measure: measure.__name__)
@pytest.mark.parametrize(("name", "signs"), HOMOGENEOUS)
def test_exchange_and_placement_are_gauge_invariant_for_homogeneous_gates(
    name: str, signs: tuple[int, ...], measure: measures.Measure
) -> None:
    """Only where σ(βz) = βσ(z) is σ(βb)·a a rescaled σ(b)·a."""
    case = random_case(name, (70, 21), 6)
    for sign in signs:
        beta = sign * (torch.ones(6) if name == "tanh" else BETAS[3].abs())
        assert_close(measure(layer_sums(regauged(case, beta).moments)), measure(layer_sums(case.moments)))


def test_exchange_depends_on_the_gauge_of_a_gate_that_is_not_homogeneous() -> None:
    """With b = βa: at β = 1 exchange is free, at β = −1 the difference is a²(φ(a) − φ(−a)), for SiLU a² tanh(a/2)."""
    case = random_case("silu", (90,), 3).with_data(lambda a, _: (a, a.clone()))
    assert (measures.exchange(case.moments.neuron) == 0).all()
    flipped = measures.exchange(regauged(case, -torch.ones(3)).moments.neuron)
    square, tanh = case.a.square(), (case.a / 2).tanh()
    assert_close(flipped, (square * tanh).square().sum(dim=0) / (square.square() * (1 + tanh.square())).sum(dim=0))


BALANCED: list[measures.Measure] = [measures.exchange_balanced, measures.placement_balanced]
PLAIN: list[measures.Measure] = [measures.exchange, measures.placement]


@pytest.mark.parametrize(("measure", "plain"), [*zip(BALANCED, PLAIN, strict=True)])
def test_balanced_measures_are_the_plain_ones_of_the_balanced_layer(
    measure: measures.Measure, plain: measures.Measure
) -> None:
    case = random_case("silu", (70, 21), 4)
    assert_close(measure(case.moments.neuron), plain(regauged(case, case.balance).moments.neuron))


@pytest.mark.parametrize("beta", [3.0, -1.0, -0.2])
def test_balanced_exchange_is_free_when_key_is_a_multiple_of_query(beta: float) -> None:
    case = random_case("silu", (70,), 3)
    sums = case.with_data(lambda a, _: (a, beta * a), k=beta * case.q).moments.neuron
    assert_close(measures.exchange_balanced(sums), torch.zeros(3))
    assert (measures.exchange(sums) > 1e-4).all()


@pytest.mark.parametrize("measure", BALANCED, ids=lambda measure: measure.__name__)
@pytest.mark.parametrize("dead", ["q", "k"])
def test_dead_neuron_does_not_hide_the_layer(dead: str, measure: measures.Measure) -> None:
    """q = 0 gives ‖q‖/‖k‖ = 0 and k = 0 gives ∞: a neuron without energy, that has no say in the layer's number."""
    q, k, v = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (q if dead == "q" else k)[0] = 0
    numbers = []
    for kept in (slice(0, 3), slice(1, 3)):
        weights = {"q": q[kept], "k": k[kept], "v": v[kept]}
        case = random_case("silu", (21,), len(q[kept]))
        case = case.with_data(lambda a, b, kept=kept: (x @ q[kept].T, x @ k[kept].T), **weights)
        numbers.append(measure(layer_sums(case.moments))[0])
    assert_close(*numbers)


@pytest.mark.parametrize(("beta", "alpha"), [(1e-7, 0.0), (1e7, math.inf)])
@pytest.mark.parametrize("measure", [measures.exchange, measures.placement])
def test_extreme_gauge_joins_exchange_and_placement_to_the_limits_of_scaling(
    measure: measures.Measure, beta: float, alpha: float
) -> None:
    """As β → 0 both σ(βb)a/β and σ(βab)/β become ab/2, the limit α → 0; as β → ∞ they become relu(b)a and relu(ab)."""
    case = random_case("silu", (90,), 3)
    number = measure(regauged(case, torch.full((3,), beta, dtype=torch.float64)).moments.neuron)
    h = case.unit(case.a, case.b)
    limits = {measures.exchange: case.a * case.b.relu(), measures.placement: (case.a * case.b).relu()}
    limit = case.a * case.b / 2 if alpha == 0 else limits[measure]
    gap, energies = (h - limit).square().sum(dim=0), (h.square() + limit.square()).sum(dim=0)
    torch.testing.assert_close(number, gap / (2 * energies), rtol=1e-5, atol=1e-8)
    if alpha == 0:
        at_limit = measures.at_scale(measures.scaling, 0.0)(case.moments.neuron)
        torch.testing.assert_close(number, at_limit, rtol=1e-5, atol=1e-8)


def scaling_at(unit: Unit, alpha: float) -> tuple[Tensor, Callable[[float], Tensor]]:
    """Scaling asymmetry per neuron at ``alpha``, and at the scales 0 and ∞, on the same data."""
    case = random_case(unit, (91,), 3)
    sums: Sums = case.with_data(lambda a, b: (a, b), layout=Layout.of(unit, (alpha,), draws=1)).moments.neuron
    return measures.at_scale(measures.scaling, alpha)(sums), lambda limit: measures.at_scale(measures.scaling, limit)(sums)


@pytest.mark.parametrize("name", [name for name in TWINS if unit_named(name).limits])
@pytest.mark.parametrize(("alpha", "limit"), [(1e-6, 0.0), (1e6, math.inf)])
def test_scaling_curve_approaches_its_limits(name: str, alpha: float, limit: float) -> None:
    unit = unit_named(name)
    number, at = scaling_at(unit, alpha)
    if limit in unit.limits:
        torch.testing.assert_close(number, at(limit), rtol=1e-4, atol=1e-6)
    else:
        assert at(limit).isnan().all()
        assert_close(number, torch.full((3,), 0.5), torch.float32)  # h_α has grown out of all proportion to h


@pytest.mark.parametrize("unit", [*map(unit_named, TWINS), ClampedUnit()], ids=lambda unit: unit.name)
def test_scaling_by_one_changes_nothing(unit: Unit) -> None:
    assert (scaling_at(unit, 1.0)[0] == 0).all()
