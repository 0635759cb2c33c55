"""The numbers of what a layer writes: those of the loop twin, unmoved by what changes nothing, right on planted layers."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor

from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.estimates import Estimates
from analysis.measures.output_numbers import OUTPUT_MEASURES, output_numbers, output_replicates, output_value
from analysis.measures.output_ranks import TOP_DIRECTIONS, output_ranks, participation_ratio
from analysis.sums.batch import Batch, Window
from analysis.sums.output_edits import edits_of, versions, versions_of
from analysis.sums.output_moments import SAMPLED_TOKENS, OutputAccumulator, OutputMoments, OutputSample, WrittenTile
from analysis.sums.token_sample import in_share, token_keys
from tests.helpers import reference, written
from tests.helpers.random_layers import Case, ClampedUnit, permuted, random_case, regauged, scalar_unit

GAIN = torch.tensor([0.5, 1.5, -1.0, 2.0], dtype=torch.float64)
LENGTHS = (23, 31, 17, 40, 9, 26)
MAIN = ("exchange", "exchange_balanced", "scaling_half", "scaling_double", "scaling_flip")
Norm = Callable[[Tensor], Tensor]


def rms_norm(y: Tensor) -> Tensor:
    return y / (y.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * GAIN


def keys_of(block: int, n_tokens: int) -> Tensor:
    return token_keys(torch.stack([torch.full((n_tokens,), block), torch.arange(n_tokens)]))


def output_of(case: Case, norm: Norm | None = None, tile: int = 16, blocks: Sequence[int] | None = None) -> OutputMoments:
    """The sums of what a case writes; of some of its blocks."""
    sums = OutputAccumulator(case.unit, case.v.shape[1], norm is not None, torch.device("cpu"))
    for block, (a, b) in enumerate(case.sequences):
        if blocks is None or block in blocks:
            every = [h @ case.v for _, h in versions(case.unit, a, b, case.balance)]
            raw, keys = torch.stack(every), keys_of(block, len(a))
            pieces = zip(raw.split(tile, dim=1), keys.split(tile), strict=True)
            sums.add([WrittenTile(norm(y) if norm else y, y if norm else None, block, own) for y, own in pieces])
    return sums.moments()


def numbers(case: Case, norm: Norm | None = None, **options: int) -> dict[str, int | float]:
    """The columns of a case that are about its output, and the same measures of its neurons."""
    output = output_of(case, norm, **options)
    estimates = Estimates(case.unit, case.moments, case.geometry, case.partners, output=output)
    return output_numbers(estimates) | {name: float(LAYER_MEASURES[name](estimates.pooled)) for name in MAIN}


def edited(case: Case) -> dict[str, tuple[reference.Grid, reference.Grid]]:
    """h before and after every edit, by loops."""
    (a, b, _), g = case.grids, scalar_unit(case.unit)
    beta = [reference.balance(q, k) for q, k in zip(case.q.tolist(), case.k.tolist(), strict=True)]
    h = reference.apply(g, a, b)

    def per_neuron(f: Callable[[float, float, float], float]) -> reference.Grid:
        rows = zip(a, b, strict=True)
        return [[f(x, y, s) for x, y, s in zip(row_a, row_b, beta, strict=True)] for row_a, row_b in rows]

    found = {
        "exchange": (h, reference.apply(lambda x, y: g(y, x), a, b)),
        "exchange_balanced": (per_neuron(lambda x, y, s: g(x, s * y) / s), per_neuron(lambda x, y, s: g(s * y, x) / s)),
    }
    for name, alpha in (("scaling_half", 0.5), ("scaling_double", 2.0), ("scaling_flip", -1.0)):
        found[name] = h, reference.apply(lambda x, y, alpha=alpha: g(alpha * x, y / alpha), a, b)
    if case.unit.name in ("silu", "gelu"):
        found["scaling_zero"] = h, reference.apply(lambda x, y: x * y / 2, a, b)
        found["scaling_infinity"] = h, reference.apply(lambda x, y: max(x, 0.0) * y, a, b)
    return found


def blocks_of(case: Case) -> list[int]:
    return [block for block, (a, _) in enumerate(case.sequences) for _ in range(len(a))]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("unit", ["silu", "gelu", "clamped"])
def test_every_number_equals_the_twin(unit: str, normed: bool) -> None:
    case = random_case(ClampedUnit() if unit == "clamped" else unit, LENGTHS, 5)
    row, blocks = numbers(case, rms_norm if normed else None), blocks_of(case)
    after = written.rms_norm(GAIN.tolist()) if normed else lambda y: y
    checked, found = set(), edited(case)
    assert set(found) == set(edits_of(case.unit))
    for edit, (h, changed) in found.items():
        y, e = (written.layer_output(grid, case.v.tolist(), after) for grid in (h, changed))
        before, raw = (written.layer_output(grid, case.v.tolist()) for grid in (h, changed))
        token = written.by_token(y, e)
        expected = {
            "": written.asymmetry(y, e),
            "_se": written.error(written.asymmetry, y, e, blocks),
            "_relative_change": written.change(y, e),
            "_raw": written.asymmetry(before, raw) if normed else math.nan,
            "_raw_se": written.error(written.asymmetry, before, raw, blocks) if normed else math.nan,
            "_centred": written.centred_asymmetry(y, e),
            "_centred_se": written.error(written.centred_asymmetry, y, e, blocks),
        }
        for part, value in expected.items():
            assert row[f"output_{edit}{part}"] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), (edit, part)
        for part, q in (("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
            width = math.sqrt(reference.quantile(token, q)) / 1024 + 1e-6
            assert row[f"output_{edit}_token_{part}"] == pytest.approx(reference.quantile(token, q), abs=width)
        replicates = [
            reference.quantile([r for r, own in zip(token, blocks, strict=True) if own != block], 0.5)
            for block in range(len(LENGTHS))
        ]
        assert row[f"output_{edit}_token_median_se"] == pytest.approx(reference.jackknife(replicates), abs=4e-3)
        assert row[f"output_{edit}_trimmed"] == pytest.approx(written.without_top(y, e, 0.001), rel=0.06)  # a bin in part
        checked |= {*expected, "_token_q1", "_token_median", "_token_median_se", "_token_q3", "_trimmed", "_coherence"}
    assert {name for name in row if name.startswith("output_exchange_balanced")} == {
        f"output_exchange_balanced{part}" for part in (*checked, "_coherence_se")
    }
    y, e = (written.layer_output(grid, case.v.tolist(), after) for grid in found["exchange_balanced"])
    own = written.layer_output(found["exchange"][0], case.v.tolist(), after)
    n = len(y)
    halves = [
        [[(s + sign * t) / 2 for s, t in zip(a, b, strict=True)] for a, b in zip(y, e, strict=True)] for sign in (1, -1)
    ]
    of_layer = {
        "tokens": n,
        "energy": written.energy(own) / n,
        "mean_share": written.mean_share(own, own),
        "mean_share_se": written.error(written.mean_share, own, own, blocks),
        "symmetric_energy": written.energy(halves[0]) / n,
        "antisymmetric_energy": written.energy(halves[1]) / n,
        "symmetric_rank": written.participation_ratio(halves[0], blocks),
        "antisymmetric_rank": written.participation_ratio(halves[1], blocks),
    }
    for name, value in of_layer.items():
        rel = 1e-5 if name.endswith("rank") else 1e-9  # the sample is kept in single precision
        assert row[f"output_{name}"] == pytest.approx(value, rel=rel), name
    energies = [written.energy([token]) for token in own]
    assert row["output_effective_tokens"] == pytest.approx(sum(energies) ** 2 / reference.dot(energies, energies), rel=0.02)


@pytest.mark.parametrize("edit", MAIN)
def test_coherence_is_the_output_over_the_neurons_with_the_error_of_the_ratio(edit: str) -> None:
    case = random_case("silu", LENGTHS, 5)
    row, weight, (h, changed) = numbers(case), case.weight.tolist(), edited(case)[edit]
    blocks = blocks_of(case)

    def coherence(h: reference.Grid, changed: reference.Grid) -> float:
        y, e = (written.layer_output(grid, case.v.tolist()) for grid in (h, changed))
        return written.asymmetry(y, e) / reference.compare(h, changed, weight).pooled_asymmetry

    assert row[f"output_{edit}_coherence"] == pytest.approx(coherence(h, changed), rel=1e-9)
    assert row[f"output_{edit}_coherence_se"] == pytest.approx(written.error(coherence, h, changed, blocks), rel=1e-8)


def planted(values: Tensor, copies: Sequence[int]) -> Case:
    """Neuron j has the data of neuron copies[j] of a random layer, and the last one none that exchange would change."""
    case = random_case("silu", LENGTHS, 3)
    index = torch.tensor(copies)

    def data(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        same = a[:, 2:3]
        return torch.cat([a[:, index], same], dim=1), torch.cat([b[:, index], same], dim=1)

    q, k = (torch.cat([rows[index], case.q[2:3]]) for rows in (case.q, case.k))
    partners = torch.tensor([[*range(1, len(values)), 0]])
    return case.with_data(data, q=q, k=k, v=values.double(), partners=partners)


def test_orthogonal_values_have_a_coherence_of_one() -> None:
    row = numbers(planted(torch.eye(4), [0, 1, 2]))
    for edit in MAIN:
        assert row[f"output_{edit}_coherence"] == pytest.approx(1, rel=1e-9), edit


def test_changes_of_opposite_values_cancel_and_those_of_equal_values_add_up() -> None:
    """Two neurons alike, beside one that exchange leaves as it is."""
    x, y = torch.eye(4)[:2]
    cancelling, adding = (numbers(planted(torch.stack([x, second, y]), [0, 0])) for second in (-x, x))
    for edit in ("exchange", "exchange_balanced"):
        assert cancelling[edit] > 1e-3
        assert cancelling[f"output_{edit}"] == cancelling[f"output_{edit}_coherence"] == 0
        assert adding[f"output_{edit}_coherence"] > 1.05


def test_a_pair_that_exchange_turns_into_each_other_writes_the_same() -> None:
    case = random_case("silu", LENGTHS, 2)
    pair = case.with_data(
        lambda a, b: (torch.stack([a[:, 0], b[:, 0]], 1), torch.stack([b[:, 0], a[:, 0]], 1)), v=case.v[[0, 0]]
    )
    row = numbers(pair)
    assert row["exchange"] > 0.01
    assert row["output_exchange"] < 1e-30
    opposite = numbers(pair.with_data(lambda a, b: (a, b), v=torch.stack([case.v[0], -case.v[0]])))
    assert opposite["output_exchange"] == pytest.approx(1)  # more than any single neuron of SiLU can reach


def test_a_bilinear_layer_reads_exactly_zero() -> None:
    """Every product with the scales ½, 2 and −1 is exact, and so is the exchange of two factors."""
    row = numbers(random_case("linear", LENGTHS, 5), rms_norm)
    for edit in MAIN:
        assert row[f"output_{edit}"] == 0 or edit == "exchange_balanced"
    assert row["output_exchange_balanced"] < 1e-30
    assert numbers(random_case("relu", LENGTHS, 5))["output_scaling_double"] == 0


@pytest.mark.parametrize("beta", [3.0, -1.0, -0.2])
def test_no_rescaling_of_keys_and_no_order_of_neurons_changes_it(beta: float) -> None:
    case = random_case("silu", LENGTHS, 5)
    scales = torch.tensor([beta, 1.0, beta, 0.5, -2.0], dtype=torch.float64)
    order = torch.tensor([3, 0, 4, 1, 2])
    own, again, other = (numbers(each, rms_norm) for each in (case, regauged(case, scales), permuted(case, order)))

    def assert_same(changed: dict[str, int | float], names: list[str]) -> None:
        for name in names:
            rel = 1e-4 if name.endswith("rank_se") else 1e-5 if "rank" in name or "top10" in name else 1e-9
            if "token_" not in name:  # a histogram's bin may change by rounding
                assert changed[name] == pytest.approx(own[name], rel=rel, abs=1e-9, nan_ok=True), name

    names = [name for name in own if name.startswith("output_")]
    assert_same(other, names)
    of_the_gauge = [name for name in names if name.startswith("output_exchange") and "balanced" not in name]
    assert_same(again, [name for name in names if name not in (*of_the_gauge, "output_few_tokens")])
    assert again["output_exchange"] != pytest.approx(own["output_exchange"], rel=1e-3)


def test_the_two_parts_hold_the_energy_and_their_ratio_is_the_asymmetry() -> None:
    row = numbers(random_case("gelu", LENGTHS, 5), rms_norm)
    symmetric, antisymmetric = row["output_symmetric_energy"], row["output_antisymmetric_energy"]
    assert antisymmetric / (symmetric + antisymmetric) == pytest.approx(row["output_exchange_balanced"], rel=1e-9)


def test_shards_tiles_and_the_order_of_reading_change_nothing() -> None:
    case = random_case("silu", LENGTHS, 5)
    whole = output_of(case, rms_norm, tile=1000)
    parts = [output_of(case, rms_norm, tile=7, blocks=chosen) for chosen in ((5, 1), (0, 4), (2,), (3,))]
    for order in itertools.islice(itertools.permutations(parts), 0, 24, 7):
        for name, values in reduce(add, order).tensors().items():
            torch.testing.assert_close(values, whole.tensors()[name], rtol=1e-9, atol=1e-12, msg=name)


def test_the_sums_come_back_from_their_tensors_and_others_are_refused() -> None:
    output = output_of(random_case("silu", LENGTHS, 5), rms_norm)
    again = OutputMoments.from_tensors(output.unit, output.tensors())
    assert all(torch.equal(values, output.tensors()[name]) for name, values in again.tensors().items())
    assert (again.edits, again.has_norm, again.n_tokens) == (output.edits, True, sum(LENGTHS))
    with pytest.raises(ValueError, match="expected"):
        OutputMoments.from_tensors(output.unit, output.tensors() | {"gap": output.gap[:1]})
    with pytest.raises(ValueError, match="do not add"):
        output + output_of(random_case("gelu", LENGTHS, 5), rms_norm)
    with pytest.raises(ValueError, match="do not add"):
        output + output_of(random_case("silu", LENGTHS, 5))


def test_what_was_not_measured_is_missing_and_not_left_out() -> None:
    case = random_case("silu", LENGTHS, 5)
    known = numbers(case)
    for output in (None, OutputMoments.empty(case.unit, 4)):
        estimates = Estimates(case.unit, case.moments, case.geometry, case.partners, output=output)
        row = output_numbers(estimates)
        assert list(row) == [name for name in known if name.startswith("output_")]
        values = [value for name, value in row.items() if name.startswith("output_") and name != "output_few_tokens"]
        assert all(math.isnan(value) for value in values if value != 0)
        assert row["output_tokens"] == 0
        assert math.isnan(output_value(OUTPUT_MEASURES[0], estimates))
        assert output_replicates(OUTPUT_MEASURES[0], estimates).isnan().all()


def test_a_unit_without_limits_has_no_numbers_of_them() -> None:
    row = numbers(random_case(ClampedUnit(), LENGTHS, 5))
    assert math.isnan(row["output_scaling_zero"])
    assert row["output_scaling_half"] > 0
    assert [name for name in versions_of(ClampedUnit()) if name not in edits_of(ClampedUnit())] == ["model", "rescaled"]


def test_few_tokens_are_marked() -> None:
    """One token a thousand times as large as the others."""
    case = random_case("silu", (400, 300), 5)
    assert not numbers(case)["output_few_tokens"]

    def massive(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, torch.cat([b[:1] * 1000, b[1:]])

    assert numbers(case.with_data(massive))["output_few_tokens"]


def test_a_block_without_sampled_tokens_changes_no_number_but_counts_as_a_block() -> None:
    case = random_case("silu", LENGTHS, 5)
    output = output_of(case, blocks=(0, 1, 2, 4))
    estimates = Estimates(case.unit, case.moments, case.geometry, case.partners, output=output)
    for name in OUTPUT_MEASURES:
        replicates = output_replicates(name, estimates)
        assert len(replicates) == len(LENGTHS)
        assert replicates[3] == replicates[5] == pytest.approx(output_value(name, estimates), rel=1e-12)


def test_the_share_of_a_text_is_the_same_in_every_batch_and_of_its_size() -> None:
    windows = [Window(index, torch.arange(100), 4) for index in range(40)]
    whole = Batch.of(windows, [index % 16 for index in range(40)])

    def chosen(batch: Batch, share: float, size: int) -> set[tuple[int, int]]:
        tiles = batch.sampled(share, size)
        assert all(0 < len(tile.places) <= size for tile in tiles)
        places = torch.cat([batch.places[:2, tile.places] for tile in tiles], dim=1)
        blocks = [tile.block for tile in tiles for _ in range(len(tile.places))]
        assert blocks == [index % 16 for index in places[0].tolist()]
        return set(map(tuple, places.T.tolist()))

    assert len(chosen(whole, 1.0, 7)) == 40 * 96
    for share in (0.5, 0.1):
        first = chosen(whole, share, 50)
        assert abs(len(first) - share * 3840) < 4 * math.sqrt(3840 * share * (1 - share))
        one_by_one = [chosen(Batch.of([window], [window.index % 16]), share, 3) for window in windows]
        assert set.union(*one_by_one) == first
    assert chosen(whole, 0.1, 50) < chosen(whole, 0.5, 50)


def test_a_share_does_not_prefer_any_position_or_window() -> None:
    places = torch.cartesian_prod(torch.arange(300), torch.arange(200)).T
    kept = places[:, in_share(token_keys(places), 0.25)]
    assert len(token_keys(places).unique()) == places.shape[1]
    for row, n, each in ((kept[0], 300, 200), (kept[1], 200, 300)):
        counts = row.bincount(minlength=n).double()
        deviation = (counts - each / 4).square().sum() / (each * 0.25 * 0.75)
        assert abs(deviation - n) < 4 * math.sqrt(2 * n)  # chi-square


def test_the_sample_is_the_tokens_with_the_smallest_keys() -> None:
    case = random_case("silu", (700, 500, 300), 5)
    output, y = output_of(case, tile=64), torch.stack([case.unit(case.a, case.b), case.unit(case.a, case.b)]) @ case.v
    keys = torch.cat([keys_of(block, len(a)) for block, (a, _) in enumerate(case.sequences)])
    order = keys.argsort()[:SAMPLED_TOKENS]
    assert torch.equal(output.sample.keys, keys[order])
    assert torch.equal(output.sample.blocks, torch.tensor(blocks_of(case))[order])
    torch.testing.assert_close(output.sample.outputs[0], y[0][order].float())


def sample_of(y: Tensor, edited: Tensor) -> OutputSample:
    n = len(y)
    return OutputSample(torch.arange(n), torch.arange(n) % 16, torch.stack([y, edited]).float())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_effective_rank_counts_directions_even_with_as_few_tokens_as_directions() -> None:
    """Taken naively, the rank of 200 directions from 300 tokens would be about 120."""
    blocks = torch.arange(300) % 16
    found = [participation_ratio(normal(300, 200, seed=seed), blocks)[0] for seed in range(20)]
    assert sum(found) / 20 == pytest.approx(200, rel=0.03)
    plane = normal(300, 2, seed=1) @ torch.linalg.qr(normal(200, 2, seed=2)).Q.T
    rank, error = participation_ratio(plane, blocks)
    assert rank == pytest.approx(2, abs=4 * error)
    assert math.isnan(participation_ratio(torch.ones(300, 5, dtype=torch.float64), blocks)[0])


def test_the_share_in_the_top_directions_tells_inside_from_outside() -> None:
    axes = torch.linalg.qr(normal(60, 60)).Q
    top, rest = axes[:, :TOP_DIRECTIONS], axes[:, TOP_DIRECTIONS:]
    y = 10 * normal(400, TOP_DIRECTIONS, seed=1) @ top.T + normal(400, 50, seed=2) @ rest.T
    for directions, expected in ((top, 1.0), (rest, 0.0)):
        part = normal(400, directions.shape[1], seed=3) @ directions.T
        found = output_ranks(sample_of(y, y - 2 * part))
        assert found["output_antisymmetric_in_top10"] == pytest.approx(expected, abs=0.02)
    blocks = (torch.arange(400) % 16).tolist()
    twin = written.share_in_top_directions(y.tolist(), part.tolist(), blocks, TOP_DIRECTIONS)
    assert found["output_antisymmetric_in_top10"] == pytest.approx(twin, rel=1e-3)


def test_ranks_need_tokens() -> None:
    assert all(math.isnan(value) for value in output_ranks(None).values())
    assert all(math.isnan(value) for value in output_ranks(sample_of(normal(39, 5), normal(39, 5))).values())
    assert all(math.isfinite(value) for value in output_ranks(sample_of(normal(80, 15), normal(80, 15, seed=1))).values())
