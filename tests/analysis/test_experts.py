"""A mixture of experts: every sum equals a plain loop's; laws of routing weights, of order, of what was not routed."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from analysis.measures.estimates import Estimates
from analysis.measures.expert_numbers import FEW_EXPERT_TOKENS
from analysis.measures.gaussian_null import GaussianFit, gaussian_nulls
from analysis.measures.permutation_null import experts_permutation_variance, permutation_variance
from analysis.sums import tiled as tile
from analysis.sums.batch import Batch
from analysis.sums.eager import tile_sums
from analysis.sums.extremes import TOP_TOKENS, Heaviest, TopTokens
from analysis.sums.fused_reducer import EXPERT_TILE, TILE, _tiled
from analysis.sums.layout import QUADRANTS, Layout
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Accumulator, Moments
from analysis.sums.reducer import TokenSums, Totals
from analysis.sums.tiled import TileReducer
from analysis.sums.token_histograms import BLOCK_RATIO_BINS, ENERGY_BINS, RATIO_BINS
from analysis.units.registry import GatedUnit
from analysis.weights.experts import SHARED, expert_slices, index_within, neuron_name
from analysis.weights.geometry import derangements
from analysis.weights.interactions import antisymmetric_share, pooled_antisymmetric_share
from tests.helpers import reference
from tests.helpers.compiling import Waits, graphs, needs_compiler
from tests.helpers.mixtures import BLOCKS, LENGTHS, Mixture, batch_of, many_blocks, mixture
from tests.helpers.random_layers import assert_close, random_case


class Twin:
    """The same by plain loops over floats."""

    def __init__(self, layer: Mixture) -> None:
        self.layer, case = layer, layer.cases[0]
        assert isinstance(case.unit, GatedUnit)
        sigma, slope, *limits = reference.ACTIVATIONS[case.unit.name]
        self.g = reference.gate_unit(sigma)
        slopes = dict(zip((0.0, math.inf), limits, strict=True))
        self.scaled = lambda alpha, x, y: (
            (slopes[alpha][x > 0]) * x * y if alpha in slopes else self.g(alpha * x, y / alpha)
        )
        self.euler = lambda x, y: y * (x * slope(x) - sigma(x))
        self.experts = [
            reference.Expert(
                case.a.tolist(),
                case.b.tolist(),
                weight.tolist(),
                case.weight.tolist(),
                case.geometry.norm_k.tolist(),
                case.balance.tolist(),
                case.partners.tolist(),
                case.pairing.balance.tolist(),
            )
            for case, weight in zip(layer.cases, layer.routing, strict=True)
        ]

    def tokens(self, counted: bool = True) -> list[tuple[int, int, int]]:
        """Place, window and block of every counted, or of every fed token."""
        length = max(self.layer.lengths)
        return [
            (row * length + position, row, block)
            for row, (n, block) in enumerate(zip(self.layer.lengths, self.layer.blocks, strict=True))
            for position in range(1 if counted else 0, n)
        ]

    def sums(self, e: int, j: int, places: Sequence[int]) -> list[float]:
        """The column of neuron j of expert e over those of the places that were routed to it."""
        expert, layout = self.experts[e], self.layer.cases[0].layout
        routed = [place for place in places if not math.isnan(expert.r[place])]
        found = reference.expert_sums(self.g, self.scaled, self.euler, expert, j, routed, layout.alphas, layout.main_alphas)
        rows = [(name, rows.stop - rows.start) for name, rows in layout.rows.items()]
        return [x for name, size in rows for x in found.get(name, [0.0] * size)]

    def table(self, places: Sequence[int]) -> Tensor:
        columns = [self.sums(e, j, places) for e, expert in enumerate(self.experts) for j in range(len(expert.w))]
        return torch.tensor(columns, dtype=torch.float64).T

    @property
    def weight(self) -> Tensor:
        return torch.tensor([w for expert in self.experts for w in expert.w], dtype=torch.float64)


@pytest.fixture(scope="module")
def layer() -> Mixture:
    return mixture()


@pytest.fixture(scope="module")
def twin(layer: Mixture) -> Twin:
    return Twin(layer)


@pytest.fixture(scope="module")
def found(layer: Mixture) -> Moments:
    return layer.moments()


def test_every_sum_of_every_neuron_equals_the_twin(found: Moments, twin: Twin) -> None:
    expected = twin.table([place for place, *_ in twin.tokens()])
    for name, rows in found.layout.rows.items():
        torch.testing.assert_close(found.neuron.values[rows], expected[rows], rtol=1e-9, atol=1e-9, msg=name)
    idle = found.neuron.values[:, 3:5]
    assert (idle == 0).all()
    assert (found.neuron["weight"] != sum(found.neuron[f"count_{q}"] for q in QUADRANTS)).any()


def test_blocks_groups_and_signs_equal_the_twin(found: Moments, twin: Twin) -> None:
    narrow = found.layout.narrow
    for block in range(N_JACKKNIFE_BLOCKS):
        table = twin.table([place for place, _, its in twin.tokens() if its == block])
        torch.testing.assert_close(found.pooled.values[:, block], table @ twin.weight, rtol=1e-9, atol=1e-9)
        rows = torch.cat([table[found.layout.rows[f"count_{q}"]] for q in QUADRANTS])
        assert torch.equal(found.signs[:, block], rows.sum(dim=1))
        assert int(found.blocks[block]) == sum(its == block for *_, its in twin.tokens())
    for group in range(N_JACKKNIFE_GROUPS):
        table = twin.table(
            [place for place, _, its in twin.tokens() if its * N_JACKKNIFE_GROUPS // N_JACKKNIFE_BLOCKS == group]
        )
        torch.testing.assert_close(found.neuron_groups[group].double(), narrow(table), rtol=1e-5, atol=1e-5)


def parts_of_tokens(found: Moments, twin: Twin) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Of every counted token the two parts of every ratio, summed over experts, and its energy; and its block."""
    layout, gaps, scales, energies = found.layout, [], [], []
    for place, *_ in twin.tokens():
        pooled = {name: (twin.table([place]) @ twin.weight)[rows] for name, rows in layout.rows.items()}
        gap, scale = [], []
        for name in ("exchange", "placement", "balanced_exchange", "balanced_placement"):
            own = pooled["balanced_hh" if name.startswith("balanced") else "hh"]
            gap.append(pooled[f"{name}_gap"]), scale.append(2 * (own + pooled[name]))
        gap.append(pooled["euler"]), scale.append(pooled["euler"] + pooled["hh"])
        gap.append(pooled["scaling_gap"]), scale.append(2 * (pooled["hh"] + pooled["scaling"]))
        gaps.append(torch.cat(gap)), scales.append(torch.cat(scale)), energies.append(float(pooled["hh"]))
    return torch.stack(gaps, 1), torch.stack(scales, 1), torch.tensor(energies), [block for *_, block in twin.tokens()]


def test_token_histograms_equal_the_twin(found: Moments, twin: Twin) -> None:
    """A token's parts are summed over its experts before the ratio is taken."""
    gap, scale, energy, blocks = parts_of_tokens(found, twin)
    root = (gap / scale).sqrt()
    for bins, histogram in ((RATIO_BINS, found.tokens.ratios), (BLOCK_RATIO_BINS, found.tokens.ratio_blocks.sum(dim=1))):
        for measure, ratios in enumerate(root.tolist()):
            expected = torch.zeros(bins, dtype=torch.int64)
            for ratio in ratios:
                expected[min(int(ratio * bins), bins - 1)] += 1
            assert torch.equal(histogram[measure], expected), found.layout.token_measures[measure]
    for block in range(N_JACKKNIFE_BLOCKS):
        assert (found.tokens.ratio_blocks[:, block].sum(dim=1) == blocks.count(block)).all()
    octave = ((energy.double().log2() + 64) * 8).long()
    assert int(octave.max()) < ENERGY_BINS
    expected = torch.zeros_like(found.tokens.by_energy)
    rows = torch.cat([torch.ones_like(root[:1]), energy[None], torch.stack([gap, scale], 1).flatten(0, 1)])
    for token, at in enumerate(octave.tolist()):
        expected[:, at] += rows[:, token]
    torch.testing.assert_close(found.tokens.by_energy, expected, rtol=1e-6, atol=1e-9)


def test_peaks_and_top_tokens_equal_the_twin(found: Moments, twin: Twin, layer: Mixture) -> None:
    outputs = torch.full((len(layer.routing[0]), layer.d_mlp), torch.nan, dtype=torch.float64)
    for start, case, weight in zip(layer.starts, layer.cases, layer.routing, strict=True):
        outputs[:, start : start + len(case.q)] = case.unit(case.a, case.b) * weight[:, None]
    fed, length = twin.tokens(counted=False), max(layer.lengths)
    for j in range(layer.d_mlp):
        seen = [(abs(float(outputs[place, j])), -place) for place, *_ in fed if not math.isnan(outputs[place, j])]
        if not seen:
            assert found.peaks.values[:, j].isnan().all()
            continue
        size, place = max(seen)
        row, position = divmod(-place, length)
        assert found.peaks.places[:, j].tolist() == [row, position, 100 + position, int(position > 0)]
        assert abs(float(found.peaks.values[0, j])) == pytest.approx(size, rel=1e-12)
    tokens = []
    for place, row, _ in twin.tokens():
        by_neuron = outputs[place].nan_to_num().square() * twin.weight
        tokens.append((-float(by_neuron.sum()), row, place - row * length, int(by_neuron.argmax())))
    for rank, (energy, row, position, neuron) in enumerate(sorted(tokens)[:TOP_TOKENS]):
        assert found.top_tokens.places[:, rank].tolist() == [row, position, 100 + position, neuron]
        assert float(found.top_tokens.energy[rank]) == pytest.approx(-energy, rel=1e-12)


# --- laws ---


def assert_same(x: Moments, y: Moments, relative: float = 0.0, but_for: tuple[str, ...] = ()) -> None:
    theirs = y.tensors()
    for name, tensor in x.tensors().items():
        if name not in but_for:
            scale = relative * float(theirs[name].double().nan_to_num().abs().max()) if relative else 0.0
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=scale, equal_nan=True, msg=name)


def test_an_order_of_experts_or_one_left_out_because_it_is_idle_changes_nothing(layer: Mixture, found: Moments) -> None:
    parts = [part for part in layer.parts() if len(part[3])]
    assert [part[0] for part in parts] == [0, 2, 3]
    accumulator = Accumulator(layer.d_mlp, layer.reducers())
    accumulator.add_experts(parts, layer.batch)
    assert_same(accumulator.moments(), found)


@pytest.mark.parametrize("kind", ["exact", "eager", "fused"])
def test_one_expert_that_takes_every_token_is_a_dense_layer(kind: str) -> None:
    """Bit for bit in torch; the fused loop has another compiled form for weights, which rounds otherwise."""
    lengths, blocks = (TILE + 1, 2 * TILE + 1, 40), (0, 0, 3)
    batch = batch_of(lengths, blocks)
    case = random_case("silu", (len(lengths) * max(lengths),), 5, dtype=torch.float32 if kind != "exact" else torch.float64)
    one = Mixture((case,), (torch.ones(len(case.a)),), lengths, blocks)
    (reduce,) = one.reducers(kind)
    dense = Accumulator(5, reduce)
    shape = (len(lengths), max(lengths), 5)
    dense.add(case.a.view(shape), case.b.view(shape), batch)
    expected, found = dense.moments(), one.moments(kind)
    if kind == "fused":
        moved = (found.tokens.ratios.cumsum(1) - expected.tokens.ratios.cumsum(1)).abs().max()
        assert moved <= 3
        assert_same(found, expected, 1e-6, ("tokens.ratios", "tokens.ratio_blocks", "tokens.by_energy"))
        torch.testing.assert_close(found.tokens.by_energy.sum(1), expected.tokens.by_energy.sum(1), rtol=1e-5, atol=1e-6)
    else:
        assert_same(found, expected, but_for=("top_tokens.neuron_share",))
        assert_close(found.top_tokens.neuron_share, expected.top_tokens.neuron_share, torch.float32)


@pytest.mark.parametrize("lengths", [LENGTHS, (40, 300, 700), (2, 5)], ids=str)
def test_the_fused_loop_gives_the_sums_of_the_torch_loop(lengths: tuple[int, ...]) -> None:
    """Long and short tiles, experts that see some of them, and r that is 0 or negative."""
    layer = mixture((20, 3, 130, 33), lengths, (0, 0, 3, 15)[: len(lengths)], dtype=torch.float32, seed=5)
    fused, exact = layer.moments("fused"), layer.moments("exact")
    for of in ("neuron", "pooled"):
        for name, rows in exact.layout.rows.items():
            x, y = (getattr(moments, of).values[rows] for moments in (fused, exact))
            scale = y.abs().amax().clamp(min=float(getattr(exact, of)["hh"].abs().max()))
            torch.testing.assert_close(x / scale, y / scale, rtol=0, atol=2e-6, msg=f"{of} {name}")
    for name in ("signs", "blocks", "peaks.places", "top_tokens.places", "counts"):
        assert torch.equal(fused.tensors()[name], exact.tensors()[name]), name
    torch.testing.assert_close(fused.peaks.values, exact.peaks.values, rtol=1e-6, atol=1e-30, equal_nan=True)
    groups = exact.neuron_groups
    torch.testing.assert_close(fused.neuron_groups, groups, rtol=1e-5, atol=1e-5 * float(groups.abs().max()))
    assert (fused.tokens.ratios.cumsum(1) - exact.tokens.ratios.cumsum(1)).abs().max() <= 3


def test_an_experts_runs_are_cut_into_long_and_short_tiles() -> None:
    batch = batch_of((TILE + 1, 101, 2 * EXPERT_TILE + 2), (0, 0, 1))
    fed = batch.fed
    routed = batch.routed(fed, torch.ones(len(fed)))
    assert [(tile, group) for tile, group in _tiled(routed, 8)] == [
        (TILE, [(0, 256, 0)]),
        (EXPERT_TILE, [(256, 320, 0), (320, 356, 0)]),
        (TILE, [(356, 485, 1)]),
    ]


@pytest.mark.parametrize("kind", ["exact", "fused"])
def test_a_token_without_weight_is_counted_and_adds_no_energy(layer: Mixture, kind: str) -> None:
    nothing = layer.weighted(lambda weight: 0 * weight).moments(kind)
    full = layer.moments(kind)
    for name, rows in full.layout.rows.items():
        if name.startswith("count"):
            assert torch.equal(nothing.neuron.values[rows], full.neuron.values[rows])
        else:
            assert (nothing.neuron.values[rows] == 0).all(), name
    assert (nothing.tokens.ratios == 0).all()
    assert (nothing.peaks.values[0].nan_to_num() == 0).all()
    assert nothing.n_tokens == full.n_tokens == 29


@pytest.mark.parametrize("kind", ["exact", "fused"])
def test_the_sign_of_a_weight_does_not_count(layer: Mixture, kind: str) -> None:
    turned, full = layer.weighted(lambda weight: -weight).moments(kind), layer.moments(kind)
    assert torch.equal(turned.peaks.values[0].nan_to_num(), -full.peaks.values[0].nan_to_num())
    assert_same(turned, full, but_for=("peaks.values",))


@pytest.mark.parametrize("kind", ["exact", "fused"])
def test_doubling_all_weights_leaves_every_ratio(layer: Mixture, kind: str) -> None:
    double, once = layer.weighted(lambda weight: 2 * weight).moments(kind), layer.moments(kind)
    factor = torch.full_like(once.neuron.values, 4.0)
    for quadrant in QUADRANTS:
        factor[once.layout.rows[f"count_{quadrant}"]] = 1.0
    assert torch.equal(double.neuron.values, factor * once.neuron.values)
    assert torch.equal(double.tokens.ratios, once.tokens.ratios)
    assert torch.equal(double.top_tokens.places, once.top_tokens.places)


@pytest.mark.parametrize("kind", ["exact", "fused"])
def test_batches_of_some_windows_are_the_whole(kind: str) -> None:
    layer = mixture(seed=2)
    length, whole = max(LENGTHS), layer.moments(kind)
    accumulator, parts = Accumulator(layer.d_mlp, layer.reducers(kind)), []
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        batch = batch_of(LENGTHS[rows], BLOCKS[rows], first=rows.start)
        width = max(LENGTHS[rows])
        some = []
        for e, a, b, places, weight in layer.parts():
            row, position = places // length, places % length
            mine = (row >= rows.start) & (row < rows.stop)
            some.append((e, a[mine], b[mine], ((row - rows.start) * width + position)[mine], weight[mine]))
        accumulator.add_experts(some, batch)
        alone = Accumulator(layer.d_mlp, layer.reducers(kind))
        alone.add_experts(iter(some), batch)
        parts.append(alone.moments())
    for found in (accumulator.moments(), parts[2] + parts[0] + parts[1]):
        assert_same(found, whole, 1e-6 if kind == "fused" else 1e-7, but_for=("neuron_groups", "tokens.by_energy"))
        torch.testing.assert_close(found.neuron_groups, whole.neuron_groups, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.tokens.by_energy.sum(1), whole.tokens.by_energy.sum(1), rtol=1e-6, atol=1e-9)


def test_tokens_that_no_expert_took_have_no_ratio() -> None:
    layer = mixture()
    routed = torch.arange(len(layer.routing[0])) % 3 == 0
    layer = layer.weighted(lambda weight: torch.where(routed, weight, torch.nan))
    moments = layer.moments()
    taken = int(routed[layer.batch.counted].sum())
    assert (moments.tokens.ratios.sum(dim=1) == taken).all()
    assert moments.n_tokens == 29 == int(moments.tokens.by_energy[0].sum())
    assert (moments.top_tokens.places[3, : min(taken, TOP_TOKENS)] >= 0).all()
    assert (moments.top_tokens.places[3, taken:] == -1).all()


@pytest.mark.parametrize("kind", ["exact", "fused"])
def test_an_expert_that_sees_only_tokens_that_are_not_counted(kind: str) -> None:
    layer = mixture()
    first = torch.arange(len(layer.routing[0])) % max(LENGTHS) == 0
    layer = layer.weighted(lambda weight: torch.where(first, 1.0, torch.nan))
    moments = layer.moments(kind)
    assert (moments.neuron.values == 0).all()
    assert (moments.peaks.places[3] == 0).all()
    assert (moments.peaks.values[0].abs() > 0).all()


@pytest.mark.parametrize(
    ("places", "complaint"),
    [([3, 2], "ascend"), ([2, 2], "ascend"), ([-1, 2], "within 0-47"), ([48], "within"), ([7], "padding")],
)
def test_places_that_cannot_be_routed_are_refused(layer: Mixture, places: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        layer.batch.routed(torch.tensor(places), torch.ones(len(places)))


def test_reducers_of_another_width_are_refused(layer: Mixture) -> None:
    with pytest.raises(ValueError, match="the reducers take 12 neurons, the layer has 11"):
        Accumulator(11, layer.reducers())


# --- numbers of a layer and of its experts ---


def estimates_of(layer: Mixture, kind: str = "exact") -> Estimates:
    case = layer.cases[0]
    return Estimates(case.unit, layer.moments(kind), layer.geometry, layer.partners, layer.experts)


@pytest.fixture(scope="module")
def wide() -> Mixture:
    return many_blocks()


@pytest.fixture(scope="module")
def estimates(wide: Mixture) -> Estimates:
    return estimates_of(wide)


def test_an_experts_numbers_pool_its_neurons_as_the_twin_does(wide: Mixture, estimates: Estimates) -> None:
    twin = Twin(wide)
    places = [place for place, *_ in twin.tokens()]
    table, rows = twin.table(places), estimates.moments.layout.rows
    energies = table[rows["hh"]][0] * twin.weight
    numbers = {row["expert"]: row for row in estimates.expert_numbers()}
    assert list(numbers) == [0, 1, 2, SHARED]
    for (start, case, weight), row in zip(
        zip(wide.starts, wide.cases, wide.routing, strict=True), numbers.values(), strict=True
    ):
        mine = slice(start, start + len(case.q))
        routed = sum(not math.isnan(weight[place]) for place in places)
        assert (row["n_neurons"], row["n_tokens"]) == (len(case.q), routed)
        assert row["token_share"] == routed / len(places)
        assert row["few_tokens"] is (routed < FEW_EXPERT_TOKENS)
        assert row["energy_share"] == pytest.approx(float(energies[mine].sum() / energies.sum()), rel=1e-12)
        pooled = {name: float((table[at][0, mine] * twin.weight[mine]).sum()) for name, at in rows.items()}
        if not routed:
            continue
        for name, own, other in (
            ("exchange", "hh", "exchange"),
            ("exchange_balanced", "balanced_hh", "balanced_exchange"),
            ("placement_balanced", "balanced_hh", "balanced_placement"),
        ):
            expected = pooled[f"{other}_gap"] / (2 * (pooled[own] + pooled[other]))
            assert row[name] == pytest.approx(expected, rel=1e-9)
        assert row["euler_residual"] == pytest.approx(math.sqrt(pooled["euler"] / pooled["hh"]), rel=1e-9)
        h_ab, abab = table[rows["h_ab"]][0, mine], table[rows["abab"]][0, mine]
        share = float((twin.weight[mine] * h_ab**2 / abab).sum()) / pooled["hh"]
        assert row["bilinear_share"] == pytest.approx(share, rel=1e-9)
        opened = (case.a[[place for place in places if not math.isnan(weight[place])]] > 0).double().mean()
        assert row["gate_positive"] == pytest.approx(float(opened), rel=1e-12)


def test_an_expert_without_tokens_has_no_numbers_but_those_of_its_weights(estimates: Estimates) -> None:
    idle = estimates.expert_numbers()[1]
    known = {name for name, value in idle.items() if not math.isnan(value)}
    assert known == {"expert", "n_neurons", "n_tokens", "token_share", "energy_share", "few_tokens", "cos_qk_abs_mean"}
    assert (idle["n_tokens"], idle["energy_share"], idle["few_tokens"]) == (0, 0.0, True)
    assert estimates.idle_experts == [1]


def test_a_layer_with_an_idle_expert_has_all_its_numbers(estimates: Estimates) -> None:
    """What the expert lacks is left out, it makes no number of the layer missing."""
    missing = [name for name, value in estimates.layer_numbers().items() if math.isnan(value)]
    assert [name for name in missing if not name.startswith("output_")] == []  # what it writes is not in these sums
    assert all(math.isfinite(x) for column in estimates.curve_numbers().values() for x in column[1:-1])
    neurons = estimates.neuron_numbers()
    assert neurons["exchange"].isnan().tolist() == [False] * 3 + [True] * 2 + [False] * 7
    assert neurons["n_tokens"].dtype == torch.int64
    assert neurons["n_tokens"].tolist()[3:5] == [0, 0]


@pytest.mark.parametrize("name", ["exchange", "exchange_balanced", "scaling_double", "bilinear_share"])
def test_an_experts_error_is_that_of_leaving_out_groups_of_blocks(wide: Mixture, estimates: Estimates, name: str) -> None:
    replicates = []
    for group in range(N_JACKKNIFE_GROUPS):
        kept = torch.tensor(
            [block * N_JACKKNIFE_GROUPS // N_JACKKNIFE_BLOCKS != group for block in wide.blocks]
        ).repeat_interleave(12)
        rest = wide.weighted(lambda weight, kept=kept: torch.where(kept, weight, torch.nan))  # type: ignore[misc]
        replicates.append(estimates_of(rest).expert_numbers()[2][name])
    error = estimates.expert_numbers()[2][f"{name}_se"]
    assert error == pytest.approx(reference.jackknife(replicates), rel=1e-4)


def test_an_expert_that_was_seen_in_one_group_only_has_no_error() -> None:
    """Its sums without that group are nothing, not the rounding of single precision."""
    wide = many_blocks(dtype=torch.float32)
    first = torch.arange(len(wide.routing[0])) < 24
    routing = (torch.where(first, wide.routing[0], torch.nan), *wide.routing[1:])
    numbers = estimates_of(replace(wide, routing=routing)).expert_numbers()
    assert numbers[0]["n_tokens"] > 0
    assert math.isfinite(numbers[0]["exchange"])
    for name in ("exchange_se", "exchange_balanced_se", "scaling_flip_se", "bilinear_share_se"):
        assert math.isnan(numbers[0][name]), name
        assert math.isfinite(numbers[2][name]), name


def test_the_gaussian_null_weighs_neurons_by_the_tokens_they_saw(wide: Mixture, estimates: Estimates) -> None:
    """From moments with weights r², by loops; pooled as the sums over those tokens would be."""
    twin, gap, scale = Twin(wide), 0.0, 0.0
    for case, weight in zip(wide.cases, wide.routing, strict=True):
        places = [place for place, *_ in twin.tokens() if not math.isnan(weight[place])]
        if not places:
            continue
        r2 = [float(weight[place]) ** 2 for place in places]
        total = math.fsum(r2)

        def mean(x: Tensor, places: list[int] = places, r2: list[float] = r2, total: float = total) -> Tensor:
            return sum(r * x[place] for r, place in zip(r2, places, strict=True)) / total

        mean_a, mean_b = mean(case.a), mean(case.b)
        std_a, std_b = (mean((x - m) ** 2).sqrt() for x, m in ((case.a, mean_a), (case.b, mean_b)))
        law = GaussianFit(mean_a, mean_b, std_a, std_b, mean((case.a - mean_a) * (case.b - mean_b)) / (std_a * std_b))
        null = gaussian_nulls(law, case.unit, case.balance, ())["exchange_balanced"]
        gap += total * float(null.gap @ case.weight)
        scale += total * float(null.scale @ case.weight)
    numbers = estimates.layer_numbers()
    assert numbers["exchange_balanced_null_gaussian"] == pytest.approx(gap / scale, rel=1e-9)
    assert numbers["exchange_balanced_excess_gaussian_se"] > 0


def test_the_chance_of_pairing_is_that_of_each_expert(estimates: Estimates, wide: Mixture) -> None:
    parts = torch.randn(3, wide.d_mlp, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together, alone = experts_permutation_variance(parts, wide.partners, wide.experts), []
    for start, case in zip(wide.starts, wide.cases, strict=True):
        alone.append(permutation_variance(parts[:, start : start + len(case.q)], case.partners))
    assert together == pytest.approx(sum(alone), rel=1e-12)
    assert together != pytest.approx(permutation_variance(parts, wide.partners), rel=1e-3)
    assert estimates.layer_numbers()["exchange_excess_repaired_se"] > 0


@pytest.mark.parametrize("kind", ["exact", "fused"])
def test_planted_an_expert_with_equal_query_and_key_is_not_broken(kind: str) -> None:
    wide = many_blocks(dtype=torch.float32)
    same = wide.cases[2].with_data(lambda a, b: (a, a), k=wide.cases[2].q)
    numbers = estimates_of(replace(wide, cases=(*wide.cases[:2], same, wide.cases[3])), kind).expert_numbers()
    assert numbers[2]["exchange"] == pytest.approx(0, abs=1e-12)
    assert numbers[2]["exchange_balanced"] == pytest.approx(0, abs=1e-12)
    assert numbers[2]["cos_qk_abs_mean"] == pytest.approx(1)
    assert numbers[0]["exchange_balanced"] > 0.01
    assert numbers[2]["scaling_double"] > 1e-3


def test_neurons_are_named_by_expert_and_index(wide: Mixture, estimates: Estimates) -> None:
    extremes = estimates.extreme_neurons(12)
    at = [wide.starts[expert] + neuron for expert, neuron in zip(extremes["expert"], extremes["neuron"], strict=True)]
    size = estimates.moments.peaks.values[0].abs() * wide.geometry.norm_v
    assert sorted(at) == list(range(12))
    torch.testing.assert_close(extremes["size"], size[torch.tensor(at)], rtol=0, atol=0, equal_nan=True)
    (place,) = estimates.top_tokens()
    neuron = int(estimates.moments.top_tokens.places[3, 0])
    assert (place["expert"], place["neuron"]) == (int(wide.experts[neuron]), neuron - wide.starts[place["expert"]])


@pytest.mark.parametrize(("experts", "names"), [([0, 0, 1, -1], "0:0 0:1 1:0 shared:0"), ([2, 5, 5], "2:0 5:0 5:1")])
def test_index_within_an_expert(experts: list[int], names: str) -> None:
    numbers = torch.tensor(experts)
    places = zip(experts, index_within(numbers).tolist(), strict=True)
    assert " ".join(neuron_name({"expert": expert, "neuron": neuron}) for expert, neuron in places) == names
    assert neuron_name({"neuron": 7}) == neuron_name({"expert": math.nan, "neuron": 7.0}) == "7"


@pytest.mark.parametrize("experts", [[1, 0], [0, 1, 0], [-1, 0], [0, -2], [-1, 3]])
def test_experts_out_of_order_are_refused(experts: list[int]) -> None:
    with pytest.raises(ValueError, match="not in order"):
        expert_slices(torch.tensor(experts))


def test_the_interaction_tensors_of_experts_are_their_own() -> None:
    """Σ antisymmetric energy over Σ energy, every tensor made in full."""
    generator = torch.Generator().manual_seed(0)
    experts = [tuple(torch.randn(3, n, 5, generator=generator, dtype=torch.float64)) for n in (4, 1, 7)]
    odd = whole = 0.0
    for q, k, v in experts:
        tensor = torch.einsum("ju,ja,jb->uab", v, q, k)
        odd += float(((tensor - tensor.mT) / 2).square().sum())
        whole += float(tensor.square().sum())
    assert pooled_antisymmetric_share(iter(experts)) == pytest.approx(odd / whole, rel=1e-12)
    together = antisymmetric_share(*(torch.cat(x) for x in zip(*experts, strict=True)))
    assert together != pytest.approx(odd / whole, rel=1e-3)


# --- compiled, and without waiting ---


@needs_compiler
@pytest.mark.exhaustive  # it compiles: 20 seconds
def test_experts_need_no_compilation_of_their_own() -> None:
    """Dense layers, then experts with weights, in one graph."""
    case = random_case("silu", (400,), 6, dtype=torch.float32)
    case = replace(case, layout=Layout((0.5,), 1), partners=derangements(6, 1, 0))
    layer = case.unit, case.layout, case.geometry, case.pairing

    def reduced(compiled: bool, routed: bool) -> tuple[Moments, str]:
        made = TileReducer(*layer, dtype=torch.float32, tile=256 if compiled else None, compiled=compiled)
        accumulator, batch = Accumulator(6, [made]), batch_of((400,), (3,))
        if routed:
            places = torch.arange(0, 400, 2)
            weight = torch.linspace(-1, 1, 200)
            accumulator.add_experts([(0, case.a[places], case.b[places], places, weight)], batch)
        else:
            accumulator.add(case.a[None], case.b[None], batch)
        return accumulator.moments(), accumulator.kind

    reduced(True, False)
    before = graphs()
    found, kind = reduced(True, True)
    assert (kind, graphs()) == ("compiled", before)
    expected, kind = reduced(False, True)
    assert kind == "eager"
    assert_same(found, expected, 1e-5, ("tokens.ratios", "tokens.ratio_blocks", "tokens.by_energy"))


@pytest.mark.parametrize("compiled", [False, True])
def test_an_experts_tiles_wait_for_nothing(layer: Mixture, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta, tensors have no values that could be read."""
    monkeypatch.setattr(tile, "compiled_sums", tile_sums)
    case = layer.cases[0]
    _, a, b, places, weight = next(layer.parts())
    routed = layer.batch.routed(places, weight)
    moved = {field.name: getattr(layer.batch, field.name) for field in fields(Batch) if field.init}
    moved |= {name: x.to("meta") for name, x in moved.items() if isinstance(x, Tensor)}
    made = TileReducer(case.unit, case.layout, case.geometry, case.pairing, "meta", tile=128, compiled=compiled)
    monkeypatch.setattr(made, "_verified", True)
    totals, whole = Totals.empty(layer.d_mlp, case.layout, "meta"), Batch(**moved)
    a, b, places, weight = (x.to("meta") for x in (a, b, places, weight))
    tokens, heaviest = TokenSums.empty(len(case.layout.token_measures), 29, "meta"), Heaviest.empty(29, "meta")
    with Waits():
        part = whole._part(places, weight, routed.runs)
        tokens.add_at(part.ranks, made.add(a, b, part, totals.of(slice(0, 3))))  # type: ignore[arg-type]
        heaviest.add(a[part.counted], made.value_weight, part.ranks, 0)  # type: ignore[arg-type]
        TopTokens.among(tokens.energy, heaviest, whole)
