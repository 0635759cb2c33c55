"""Neurons that differ from re-paired ones: the procedure against one by hand, no false alarms, planted neurons found."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.excess import layer_nulls
from analysis.measures.false_discovery import FALSE_DISCOVERY_RATE, false_discovery, repaired_p
from analysis.measures.jackknife import t95
from analysis.measures.permutation_null import permutation_variance
from analysis.run import Layer
from analysis.sums.batch import Batch, Window
from analysis.sums.layout import Layout
from analysis.sums.moments import Accumulator, Moments
from analysis.sums.tiled import TileReducer
from analysis.units.registry import unit_named
from analysis.weights.geometry import Geometry, derangements
from tests.helpers.random_layers import assert_close

D_MLP, D_MODEL, TOKENS, DRAWS, BLOCKS = 48, 12, 32, 4, 8
SILU = unit_named("silu")
LAYOUT = Layout.of(SILU, (2.0,), DRAWS)
DRAWN = {"exchange": measures.exchange_of_draws, "exchange_balanced": measures.exchange_balanced_of_draws}


def layer(seed: int, planted: int = 0, equal: bool = False) -> Layer:
    """A layer whose keys are drawn without regard to its queries, but for the first neurons, in which k = q.

    With ``equal`` neurons, a and b are noise of one law, whatever the weights: only tokens are then left to chance.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(3, D_MLP, D_MODEL) / D_MODEL**0.5 * (0.7 + 0.6 * torch.rand(3, D_MLP, 1, generator=generator))
    if equal:
        q, k, v = (x / x.norm(dim=1, keepdim=True) for x in (q, k, v))
    k[:planted] = q[:planted]
    gain = torch.ones(D_MODEL, dtype=torch.float64)
    geometry = Geometry.of(q, k, v, gain)
    pairing = geometry.permuted_pairs(q, k, gain, derangements(D_MLP, DRAWS, seed))
    accumulator = Accumulator(D_MLP, TileReducer(SILU, LAYOUT, geometry, pairing, dtype=torch.float64))
    for block in range(BLOCKS):
        x = 2 * (0.3 * normal(1, D_MODEL) + normal(TOKENS, D_MODEL))
        a, b = (normal(TOKENS, D_MLP) + 0.3 * normal(1, D_MLP) for _ in "ab") if equal else (x @ q.T, x @ k.T)
        accumulator.add(a[None], b[None], Batch.of([Window(block, torch.arange(TOKENS), 0)], [block]))
    return Layer(SILU, accumulator.moments(), geometry, "none", 0.0, pairing.partners)


def found_in(moments: Moments, name: str) -> Tensor:
    """Which neurons are listed."""
    return false_discovery(LAYER_MEASURES[name](moments.neuron), DRAWN[name](moments.neuron))[2]


@pytest.fixture(scope="module")
def unrelated() -> list[Layer]:
    """Layers of different neurons whose pairing is random."""
    return [layer(seed) for seed in range(60)]


def benjamini_hochberg(p: list[float]) -> list[float]:
    """q_(i) = min over j ≥ i of n p_(j)/j, written out."""
    n, order = len(p), sorted(range(len(p)), key=lambda i: p[i])
    q, smallest = [0.0] * n, 1.0
    for rank in range(n, 0, -1):
        smallest = min(smallest, n * p[order[rank - 1]] / rank)
        q[order[rank - 1]] = smallest
    return q


@pytest.mark.parametrize("planted", [0, 12])
def test_q_values_are_those_of_benjamini_and_hochberg(planted: int) -> None:
    sums = layer(1, planted).moments.neuron
    p, q, differs = false_discovery(measures.exchange(sums), measures.exchange_of_draws(sums))
    assert_close(q, benjamini_hochberg(p.tolist()))
    assert torch.equal(differs, q <= FALSE_DISCOVERY_RATE)
    assert (p > 0).all()
    assert bool(differs.any()) == bool(planted)


def test_p_values_equal_their_definition() -> None:
    """Rank of a neuron's distance from its re-pairings among the distances of all re-pairings from the others."""
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(7, generator=generator, dtype=torch.float64)
    draws = torch.rand(3, 7, generator=generator, dtype=torch.float64)
    x, y = value.logit().tolist(), draws.logit().tolist()
    chance = [
        abs(y[r][j] - sum(y[s][j] for s in range(3) if s != r) / 2) / (1 + 1 / 2) ** 0.5 for j in range(7) for r in range(3)
    ]
    own = [abs(x[j] - sum(y[r][j] for r in range(3)) / 3) / (1 + 1 / 3) ** 0.5 for j in range(7)]
    expected = [(1 + sum(c >= distance for c in chance)) / (1 + len(chance)) for distance in own]
    assert_close(repaired_p(value, draws), expected)


def test_a_neuron_without_a_number_has_no_p_and_costs_the_others_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    value, draws = (torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((6,), (4, 6)))
    dead = torch.cat([value, torch.tensor([torch.nan])]).double(), torch.cat([draws, torch.full((4, 1), torch.nan)], dim=1)
    for with_dead, without in zip(false_discovery(*dead), false_discovery(value, draws), strict=True):
        assert torch.equal(with_dead[:6], without)
    p, q, differs = (x[6] for x in false_discovery(*dead))
    assert p.isnan()
    assert q.isnan()
    assert not differs


def test_one_draw_is_too_few_to_rank_among() -> None:
    p, q, differs = false_discovery(torch.rand(5).double(), torch.rand(1, 5).double())
    assert p.isnan().all()
    assert q.isnan().all()
    assert not differs.any()


@pytest.mark.parametrize("name", DRAWN)
def test_p_values_of_a_random_pairing_are_uniform(unrelated: list[Layer], name: str) -> None:
    sums = [layer.moments.neuron for layer in unrelated]
    p = torch.cat([repaired_p(LAYER_MEASURES[name](each), DRAWN[name](each)) for each in sums])
    for level in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
        assert float((p <= level).double().mean()) == pytest.approx(level, abs=0.035)


@pytest.mark.parametrize("name", DRAWN)
def test_no_neuron_is_listed_where_the_pairing_is_random(unrelated: list[Layer], name: str) -> None:
    alarms = [bool(found_in(layer.moments, name).any()) for layer in unrelated]
    assert sum(alarms) <= 0.05 * len(alarms)


@pytest.mark.parametrize("name", DRAWN)
def test_planted_neurons_are_those_that_are_listed(name: str) -> None:
    planted = 12
    hits = false = 0
    for seed in range(10):
        found = layer(100 + seed, planted)
        listed = found_in(found.moments, name)
        hits, false = hits + int(listed[:planted].sum()), false + int(listed[planted:].sum())
        numbers = layer_nulls(found.estimates, name)
        assert numbers[f"{name}_excess_repaired"] < 0
        assert_close(found.moments.neuron["exchange_gap"][:planted], torch.zeros(planted))
    assert hits >= 0.95 * 10 * planted
    assert false <= 0.1 * hits


def held(layers: list[Layer], name: str) -> float:
    """In what share of layers the 95 % interval of the excess holds 0."""
    inside = []
    for layer in layers:
        numbers = layer_nulls(layer.estimates, name)
        reach = t95(BLOCKS) * numbers[f"{name}_excess_repaired_se"]
        inside.append(abs(numbers[f"{name}_excess_repaired"]) <= reach)
    return sum(inside) / len(inside)


@pytest.fixture(scope="module")
def equal_layers() -> list[Layer]:
    return [layer(1000 + seed, equal=True) for seed in range(150)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["exchange", "exchange_balanced", "scaling_double"])
def test_no_excess_is_found_where_the_pairing_is_random(name: str, equal_layers: list[Layer]) -> None:
    assert held(equal_layers, name) >= 0.95


@pytest.mark.parametrize("name", ["exchange", "exchange_balanced", "scaling_double"])
def test_no_excess_is_found_where_different_neurons_are_paired_at_random(name: str, unrelated: list[Layer]) -> None:
    assert held(unrelated, name) >= 0.9


def over_permutations(parts: Tensor) -> float:
    """The variance of Σ_j parts[j, π(j)] over every permutation π."""
    orders = permutations(range(len(parts)))
    return float(torch.stack([parts[torch.arange(len(parts)), list(order)].sum() for order in orders]).var(correction=0))


def by_hoeffding(parts: Tensor) -> float:
    """The same in closed form: Σ ε²/(n − 1) with ε the parts less the means of their rows and columns."""
    rest = parts - parts.mean(dim=0) - parts.mean(dim=1, keepdim=True) + parts.mean()
    return float(rest.square().sum() / (len(parts) - 1))


def test_the_variance_of_a_pairing_is_that_over_all_permutations() -> None:
    """Four pairings of sixty neurons tell it, and what neurons and partners hold alone adds nothing."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(6, 6, generator=generator).double()
    assert over_permutations(small) == pytest.approx(by_hoeffding(small))
    neurons, partners, both = (torch.randn(*shape, generator=generator).double() for shape in ((60, 1), (1, 60), (60, 60)))
    draws = derangements(60, 4, seed=1)
    for parts, expected in ((neurons + partners, 0.0), (5 * (neurons + partners) + both, by_hoeffding(both))):
        estimated = permutation_variance(parts[torch.arange(60), draws], draws)
        assert estimated == pytest.approx(expected, rel=0.15, abs=1e-9)


def test_two_pairings_cannot_tell_their_own_variance() -> None:
    assert math.isnan(permutation_variance(torch.rand(2, 5).double(), derangements(5, 2, seed=0)))
