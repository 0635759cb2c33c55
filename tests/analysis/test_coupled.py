"""A layer whose gates hang together, the top-k gate of Gemma 3n: every number of it, by loops over whole layers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from analysis.errors import UserError
from analysis.measures import asymmetry as measures
from analysis.measures.controls import measure_controls
from analysis.measures.gaussian_null import GaussianFit, gaussian_nulls
from analysis.sums.layout import scaling_name
from analysis.theory.actions import ChangeOfBasis, Permutation, residual
from analysis.theory.conversions import absorbed_biases, low_rank_gated
from analysis.theory.gated import GatedMLP, LowRankGated
from analysis.units.registry import unit_named
from hooks.collect import analyze
from hooks.locating.sites import LocatedLayers
from hooks.models import LoadedModel
from hooks.neuron import inspect_neuron
from reports.theory.figures import units_figure
from tests.helpers import reference
from tests.helpers.random_layers import (
    Case,
    assert_close,
    assert_numbers_close,
    layer_numbers,
    layer_sums,
    permuted,
    random_case,
    regauged,
)
from tests.helpers.scalar_gates import ACTIVATION, top_k_gates

NAME, SIGMA, SHARE = "top_k(gelu_pytorch_tanh,0.6)", ACTIVATION["gelu_pytorch_tanh"], 0.6
Rows = list[list[float]]


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(NAME, (9, 5, 8), 6, draws=2)


def h_of(a: Rows, b: Rows) -> Rows:
    """h of a layer by a loop over tokens and, for the cutoff, over neurons."""
    gates = [top_k_gates(row, SIGMA, SHARE) for row in a]
    return [[gate * up for gate, up in zip(row, ups, strict=True)] for row, ups in zip(gates, b, strict=True)]


def times(rows: Rows, factors: list[float]) -> Rows:
    return [[x * factor for x, factor in zip(row, factors, strict=True)] for row in rows]


def close(found: Tensor, expected: float) -> None:
    """Φ⁻¹ is taken in float32."""
    assert float(found) == pytest.approx(expected, rel=3e-6)


def test_the_numbers_of_a_layer_are_those_of_loops(case: Case) -> None:
    (a, b, w), sums, d_mlp = case.grids, layer_sums(case.moments), 6
    h = h_of(a, b)
    swapped = reference.compare(h, h_of(b, a), w)
    close(measures.exchange(sums), swapped.pooled_asymmetry)
    close(measures.exchange_relative_change(sums), swapped.pooled_change)
    torch.testing.assert_close(
        measures.exchange(case.moments.neuron), torch.tensor(swapped.asymmetry).double(), rtol=1e-5, atol=1e-7
    )
    for place, alpha in enumerate(case.layout.alphas):
        if 0 < abs(alpha) < 100:
            one = [alpha] * d_mlp
            scaled = h_of(times(a, one), times(b, [1 / alpha] * d_mlp))
            close(measures.scaling(sums)[place], reference.compare(h, scaled, w).pooled_asymmetry)
    product = [[x * y for x, y in zip(*pair, strict=True)] for pair in zip(a, b, strict=True)]
    ones = [[1.0] * d_mlp for _ in a]
    close(measures.placement(sums), reference.compare(h, h_of(product, ones), w).pooled_asymmetry)
    step = 1e-6
    high, low = (h_of(times(a, [s] * d_mlp), times(b, [1 / s] * d_mlp)) for s in (1 + step, 1 - step))
    slope = [[(x - y) / (2 * step) for x, y in zip(*pair, strict=True)] for pair in zip(high, low, strict=True)]
    assert float(measures.euler_residual(sums)) == pytest.approx(reference._residual(slope, h, w)[1], rel=1e-4)


def test_the_balanced_number_is_of_the_layer_in_the_balanced_gauge(case: Case) -> None:
    """The cutoff of the exchanged gate is over β_j b_j of all neurons; energies count in the layer's own gauge."""
    (a, b, w), beta = case.grids, case.balance.tolist()
    key, per_beta = times(b, beta), [1 / x for x in beta]
    swapped = times(h_of(key, a), per_beta)
    expected = reference.compare(h_of(a, b), swapped, w).pooled_asymmetry
    close(measures.exchange_balanced(layer_sums(case.moments)), expected)
    one_cutoff_for_all = times(h_of(b, a), per_beta)
    assert abs(reference.compare(h_of(a, b), one_cutoff_for_all, w).pooled_asymmetry - expected) > 1e-3


def test_re_paired_gates_have_the_cutoff_of_the_layer(case: Case) -> None:
    a, b, w = case.grids
    for draw, partner in enumerate(case.partners.tolist()):
        other = [[row[p] for p in partner] for row in b]
        expected = reference.compare(h_of(a, other), h_of(other, a), w).pooled_asymmetry
        close(measures.exchange_of_draws(layer_sums(case.moments))[draw], expected)
        beta = case.pairing.balance[draw].tolist()
        own = [1 / x for x in case.balance.tolist()]
        key = times(other, beta)
        balanced = reference.compare(times(h_of(a, key), own), times(h_of(key, a), own), w).pooled_asymmetry
        close(measures.exchange_balanced_of_draws(layer_sums(case.moments))[draw], balanced)


def test_the_gauge_and_the_order_of_neurons_change_no_balanced_number(case: Case) -> None:
    expected = layer_numbers(case.moments, case.weight)
    beta = torch.tensor([2.0, -0.5, 3.0, -1.0, 0.2, 1.5], dtype=torch.float64)
    other = regauged(case, beta)
    plain = ("exchange", "exchange_relative_change", "placement", "token median of exchange", "token median of placement")
    plain += ("repaired exchange", "quadrant_tokens", "quadrant_energy", "gate_positive")
    found = layer_numbers(other.moments, other.weight)
    assert_numbers_close(*({name: x for name, x in of.items() if name not in plain} for of in (found, expected)))
    assert abs(found["exchange"] - expected["exchange"]) > 1e-3
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    reordered = permuted(case, order)
    assert_numbers_close(layer_numbers(reordered.moments, reordered.weight), expected)


def test_scaling_is_exact_for_a_gate_that_is_linear_above_its_cutoff() -> None:
    case = random_case("top_k(relu,0.6)", (30,), 6)
    sums, alphas = layer_sums(case.moments), case.layout.alphas
    found = dict(zip(alphas, measures.scaling(sums)[:, 0].tolist(), strict=True))
    assert all(found[alpha] < 1e-25 for alpha in alphas if alpha >= 0)
    assert found[-1.0] > 0.3
    assert float(measures.euler_residual(sums)) == 0


def test_a_neuron_of_its_own_has_no_gaussian_null(case: Case) -> None:
    law = GaussianFit.of(case.moments.neuron)
    found = gaussian_nulls(law, case.unit, case.balance, case.layout.alphas)
    assert set(found) == {"exchange", "exchange_balanced", *map(scaling_name, case.layout.alphas)}
    assert all(null.by_neuron.isnan().all() and math.isnan(null.pooled(case.weight)) for null in found.values())
    numbers = case.estimates.layer_numbers()
    assert all(math.isnan(value) for name, value in numbers.items() if "gaussian" in name)
    assert numbers["exchange_null_repaired"] > 0
    columns = case.estimates.neuron_numbers()
    assert all(column.isnan().all() for name, column in columns.items() if "gaussian" in name)


def test_a_run_says_why_there_is_no_gaussian_null(llama: LoadedModel) -> None:
    run = analyze(llama, llama.read(context=32, max_tokens=160), quiet=True)
    assert "*_null_gaussian" not in run.missing()
    layers = {index: replace(layer, unit=unit_named(NAME)) if index == 1 else layer for index, layer in run.layers.items()}
    assert NAME in replace(run, layers=layers).missing()["*_null_gaussian"]


def test_one_neuron_of_such_a_layer_is_not_shown(llama: LoadedModel) -> None:
    found = LocatedLayers({index: replace(site, unit=unit_named(NAME)) for index, site in llama.sites.items()})
    with pytest.raises(UserError, match=r"gates of layer 1 hang together \(top_k.*neurons.parquet"):
        inspect_neuron(replace(llama, located=found), llama.read(context=32, max_tokens=64), "1:7", quiet=True)


def test_a_figure_of_it_says_that_there_is_none() -> None:
    figure = units_figure({name: unit_named(name) for name in ("silu", NAME)})
    said = [text.get_text() for ax in figure.axes for text in ax.texts]
    assert [text for text in said if "not a function of one pair" in text]


def test_forms_with_it_see_the_whole_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    unit, x = unit_named(NAME), torch.randn(7, 5, generator=generator, dtype=torch.float64)
    mlp = GatedMLP.random(unit, 5, 8, generator=generator)
    assert isinstance(mlp, GatedMLP)
    assert_close(low_rank_gated(mlp)(x), mlp(x))
    form = LowRankGated.random(unit, 5, 4, 3, generator=generator)
    q, k = (weight.mT.reshape(12, 5) for weight in (form.q, form.k))
    assert_close(form(x), GatedMLP(unit, q, k, form.v.repeat_interleave(3, dim=0))(x))
    assert residual(mlp, Permutation(torch.tensor([3, 0, 5, 1, 4, 2, 7, 6])), x) < 1e-12
    assert residual(form, ChangeOfBasis(torch.eye(3, dtype=torch.float64)[[2, 0, 1]]), x) < 1e-12
    with pytest.raises(ValueError, match="cutoff over all neurons: no neuron can be added"):
        absorbed_biases(mlp)


def test_its_controls_hold() -> None:
    mlp = GatedMLP.random(unit_named(NAME), 6, 9, generator=torch.Generator().manual_seed(0))
    assert isinstance(mlp, GatedMLP)
    found = measure_controls(mlp, torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    assert [record.passed for record in found] == [True] * 4
