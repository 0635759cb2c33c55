"""Edits against scalar twins, placebos of equal size, costs against the textbook sum, and the sums by sequence."""

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from analysis.causal.costs import Attribution, LayerAttribution, error_per_token, per_token, rank_correlation
from analysis.causal.divergence import costs, kl_divergence, log_probabilities
from analysis.causal.edits import (
    ABLATIONS,
    DEFAULT_EDITS,
    Change,
    EditCoefficients,
    Partial,
    PlainExchange,
    Rescaled,
    Zero,
    existing_edits,
    make_edit,
    parse_edits,
    scale_of,
)
from analysis.errors import UserError
from analysis.noise import directions
from analysis.storage.progress import Progress
from analysis.units.activations import activation_named
from analysis.units.registry import GatedUnit, unit_named

SILU = GatedUnit(activation_named("silu"))
Scalar = Callable[[float, float, dict[str, float]], float]


def silu(z: float) -> float:
    return z / (1 + math.exp(-z))


TWINS: dict[str, Scalar] = {
    "exchange": lambda a, b, _: silu(b) * a,
    "exchange-balanced": lambda a, b, fit: silu(fit["balance"] * b) * a / fit["balance"],
    "scale:2": lambda a, b, _: silu(2 * a) * b / 2,
    "scale:-0.5": lambda a, b, _: silu(-0.5 * a) * b / -0.5,
    "flip": lambda a, b, _: silu(-a) * -b,
    "bilinear-limit": lambda a, b, _: a * b / 2,
    "relu-limit": lambda a, b, _: max(a, 0.0) * b,
    "symmetric": lambda a, b, _: (silu(a) * b + silu(b) * a) / 2,
    "antisymmetric": lambda a, b, _: (silu(a) * b - silu(b) * a) / 2,
    "bilinear": lambda a, b, fit: fit["bilinear"] * a * b,
    "placement": lambda a, b, fit: fit["placement"] * silu(a * b),
    "mean": lambda a, b, fit: fit["mean"],
    "zero": lambda a, b, _: 0.0,
}


def random_fit(d_mlp: int) -> EditCoefficients:
    generator = torch.Generator().manual_seed(3)
    return EditCoefficients(
        *(torch.randn(d_mlp, generator=generator, dtype=torch.float64) for _ in fields(EditCoefficients))
    )


@pytest.mark.parametrize("name", TWINS)
def test_each_edit_is_its_scalar_twin(name: str) -> None:
    a, b = 2 * torch.randn(2, 7, 5, dtype=torch.float64)
    fit = random_fit(5)
    changed = make_edit(name, fit)(a, b, SILU)
    for j in range(5):
        knows = {item.name: getattr(fit, item.name)[j].item() for item in fields(EditCoefficients)}
        for t in range(7):
            assert changed[t, j].item() == pytest.approx(TWINS[name](a[t, j].item(), b[t, j].item(), knows), rel=1e-12)


def test_all_names_have_a_twin() -> None:
    assert set(DEFAULT_EDITS) <= set(TWINS) | {"scale:0.5"}
    known = set(TWINS) - {"scale:2", "scale:-0.5"}
    assert set(parse_edits(",".join(known))) == known


def test_the_limits_are_what_scales_tend_to() -> None:
    a, b = torch.randn(2, 50, 4, dtype=torch.float64)
    fit = random_fit(4)
    for limit, alphas in (("relu-limit", (30, 300, 3000)), ("bilinear-limit", (0.03, 0.003, 0.0003))):
        end = make_edit(limit, fit)(a, b, SILU)
        gaps = [float((make_edit(f"scale:{alpha}", fit)(a, b, SILU) - end).abs().max()) for alpha in alphas]
        assert gaps[0] > 5 * gaps[1] > 25 * gaps[2] > 0


def test_part_of_an_edit_lies_between() -> None:
    a, b = torch.randn(2, 6, 4, dtype=torch.float64)
    h, changed = SILU(a, b), PlainExchange()(a, b, SILU)
    torch.testing.assert_close(Partial(PlainExchange(), 0.0)(a, b, SILU), h)
    torch.testing.assert_close(Partial(PlainExchange(), 1.0)(a, b, SILU), changed)
    torch.testing.assert_close(Partial(PlainExchange(), 0.25)(a, b, SILU), 0.75 * h + 0.25 * changed)


@pytest.mark.parametrize("beta", [3.0, -3.0])
def test_rescaling_values_is_no_edit(beta: float) -> None:
    a, b = torch.randn(2, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(Rescaled(beta)(a, b, SILU), SILU(a, b), rtol=1e-14, atol=0)


def test_a_change_touches_nothing_else() -> None:
    a, b = torch.randn(2, 2, 6, 4)
    h = SILU(a, b)
    positions = torch.tensor([[False, True, True, False, False, True], [True] * 6])
    changed = Change(PlainExchange(), SILU, torch.tensor([1, 3]), positions)(a, b, h)
    for row in range(2):
        for t in range(6):
            for j in range(4):
                if positions[row, t] and j in (1, 3):
                    twin = silu(b[row, t, j].item()) * a[row, t, j].item()
                    assert changed[row, t, j].item() == pytest.approx(twin, rel=1e-5, abs=1e-7)
                else:
                    assert changed[row, t, j] == h[row, t, j]


def test_a_placebo_moves_every_token_as_far_as_the_edit() -> None:
    a, b = torch.randn(2, 9, 40)
    a[4] = b[4]  # exchange leaves this token as it is
    h = SILU(a, b)
    noise = directions(0, 3, 5, 9, 40)
    positions = torch.arange(9) >= 2
    neurons = torch.arange(3, 30)
    edited = Change(PlainExchange(), SILU, neurons, positions)(a, b, h)
    placebo = Change(PlainExchange(), SILU, neurons, positions, noise)(a, b, h)
    far, moved = (edited - h).norm(dim=-1), placebo - h
    torch.testing.assert_close(moved.norm(dim=-1), far, rtol=1e-5, atol=1e-6)
    assert torch.equal(placebo[:2], h[:2])
    assert torch.equal(placebo[4], h[4])
    assert torch.equal(placebo[:, :3], h[:, :3])
    assert torch.equal(placebo[:, 30:], h[:, 30:])
    cosine = (moved[5] @ (edited - h)[5]) / far[5] ** 2
    assert abs(float(cosine)) < 0.6  # it goes another way


def splitmix(state: int) -> int:
    """The finalizer on Python's own integers."""
    word = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
    return state ^ (state >> 31)


def test_noise_depends_on_what_it_is_for_and_on_nothing_else() -> None:
    whole = directions(7, 2, 11, 20, 30)
    assert torch.equal(directions(7, 2, 11, 12, 30), whole[:12])
    others = [directions(*key, 20, 30) for key in ((8, 2, 11), (7, 3, 11), (7, 2, 12), (7, 11, 2))]
    assert all(abs(float(torch.corrcoef(torch.stack([whole.flatten(), x.flatten()]))[0, 1])) < 0.15 for x in others)
    golden, word = 0x9E3779B97F4A7C15, (1 << 64) - 1
    key = 0
    for part in (7, 2, 11):
        key = splitmix((key + golden) & word) ^ part
    key = splitmix(key)
    for place in (0, 1, 599):
        bits = splitmix((place * golden + key) & word)
        first, second = bits >> 40, bits & 0xFFFFFF
        number = math.sqrt(-2 * math.log((first + 0.5) / 2**24)) * math.cos(2 * math.pi * second / 2**24)
        assert whole.flatten()[place].item() == pytest.approx(number, rel=1e-5, abs=1e-6)


def test_noise_is_normal() -> None:
    sample = directions(0, 0, 0, 400, 500).double().flatten()
    assert sample.mean().item() == pytest.approx(0, abs=0.01)
    assert sample.var().item() == pytest.approx(1, abs=0.01)
    for z, share in ((-1.96, 0.025), (-1.0, 0.1587), (0.5, 0.6915), (2.576, 0.995)):
        assert (sample < z).double().mean().item() == pytest.approx(share, abs=0.003)


def test_edits_are_read_from_the_command_line() -> None:
    assert parse_edits("exchange, scale:2,scale:2.0,scale:-1") == ("exchange", "scale:2", "flip", *ABLATIONS)
    assert parse_edits("zero,exchange") == ("zero", "exchange", "mean")
    assert [scale_of(name) for name in ("scale:0.5", "flip", "relu-limit", "bilinear-limit", "exchange")] == [
        0.5,
        -1.0,
        math.inf,
        0.0,
        None,
    ]
    sigmoid = GatedUnit(activation_named("sigmoid"))  # σ(αa)·b/α grows without bound as α → 0
    assert existing_edits(("exchange", "bilinear-limit", "relu-limit"), [sigmoid]) == ("exchange", "relu-limit")
    assert existing_edits(("exchange", "bilinear-limit"), [SILU, sigmoid]) == ("exchange",)
    assert existing_edits(("exchange", "relu-limit"), [SILU]) == ("exchange", "relu-limit")
    clamped = unit_named("clamped(silu,7)")  # its limits exist, and are neither bilinear nor relufied
    assert clamped.limits == (0, math.inf)
    assert existing_edits(("exchange", "bilinear-limit", "relu-limit"), [clamped]) == ("exchange",)
    assert existing_edits(("relu-limit",), [unit_named("top_k(gelu,0.5)")]) == ("relu-limit",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("swap", "unknown edit 'swap': choose from exchange,"),
        ("exchange,", "unknown edit ''"),
        ("scale:two", "'scale:two' is not a scaling"),
        ("scale:0", "must lie between 1e-4 and 1e4: the limits are called bilinear-limit and relu-limit"),
        ("scale:inf", "must lie between"),
        ("scale:nan", "must lie between"),
        ("scale:1", "'scale:1' changes nothing"),
    ],
)
def test_what_is_no_edit(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_edits(text)


def textbook(p: Tensor, q: Tensor) -> float:
    """Σ p (log p − log q) from logits, in float64, term by term."""
    log_p, log_q = (torch.log_softmax(x.double(), -1) for x in (p, q))
    return math.fsum((log_p.exp() * (log_p - log_q)).tolist())


def test_divergence_is_the_textbook_sum() -> None:
    p, q = 3 * torch.randn(2, 4, 301)
    found = kl_divergence(log_probabilities(p), log_probabilities(q))
    for t in range(4):
        assert found[t].item() == pytest.approx(textbook(p[t], q[t]), rel=1e-5)


@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5])
def test_small_divergences_keep_their_digits_and_their_sign(size: float) -> None:
    p = (3 * torch.randn(64, 5000)).double()
    q = p + size * torch.randn(64, 5000)
    wide = [textbook(x, y) for x, y in zip(p, q, strict=True)]
    found = kl_divergence(torch.log_softmax(p, -1), torch.log_softmax(q, -1))
    torch.testing.assert_close(found, torch.tensor(wide, dtype=torch.float64), rtol=1e-6, atol=1e-14)
    assert float(kl_divergence(log_probabilities(p.float()), log_probabilities(q.float())).min()) >= -1e-9


def test_a_token_that_the_model_excluded_overflows_nothing() -> None:
    p, q = torch.zeros(1, 3), torch.zeros(1, 3)
    p[0, 2], q[0, 2] = -150.0, 5.0
    found = kl_divergence(log_probabilities(p), log_probabilities(q)).item()
    assert found == pytest.approx(textbook(p[0], q[0]), rel=1e-6)


def test_costs_are_sums_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.causal.divergence._CHUNK", 300)  # three tokens at a time
    base, rows, targets = torch.randn(7, 100), torch.randn(2, 7, 100), torch.randint(0, 100, (7,))
    found = costs(log_probabilities(base), rows, targets)
    for row in range(2):
        assert found[0, row].item() == pytest.approx(sum(map(textbook, base, rows[row])), rel=1e-5)
        rises = torch.nn.functional.cross_entropy(rows[row].double(), targets, reduction="sum")
        rises -= torch.nn.functional.cross_entropy(base.double(), targets, reduction="sum")
        assert found[1, row].item() == pytest.approx(rises.item(), rel=1e-5)


def test_errors_are_those_of_the_ratio_estimator() -> None:
    sums, n_tokens = torch.randn(3, 5, dtype=torch.float64), torch.tensor([10, 20, 5, 7, 30])
    for case in range(3):
        mean = sum(sums[case].tolist()) / 72
        squares = sum((x - mean * n) ** 2 for x, n in zip(sums[case].tolist(), n_tokens.tolist(), strict=True))
        assert per_token(sums, n_tokens)[case].item() == pytest.approx(mean)
        assert error_per_token(sums, n_tokens)[case].item() == pytest.approx(math.sqrt(5 / 4 * squares) / 72)
    assert math.isnan(error_per_token(sums[0, :1], n_tokens[:1]).item())


def test_attributions_add_and_their_errors_are_those_of_the_sequences() -> None:
    sequences = [torch.randn(2, n, 4, dtype=torch.float64) for n in (6, 3, 9)]
    counts = torch.tensor([5, 3, 8])
    parts = [LayerAttribution.of(x, int(n)) for x, n in zip(sequences, counts, strict=True)]
    singles = [
        Attribution(("x", "y"), counts[i : i + 1], torch.zeros(1).double(), {0: part}) for i, part in enumerate(parts)
    ]
    whole = singles[0] + singles[1] + singles[2]
    other = singles[0] + (singles[1] + singles[2])
    assert torch.equal(whole.n_tokens, counts)
    sums = torch.stack([x.sum(dim=1) for x in sequences], dim=-1)
    for found in (whole, other):
        torch.testing.assert_close(found.neurons(0), per_token(sums, counts))
        torch.testing.assert_close(found.neuron_errors(0), error_per_token(sums, counts))
        torch.testing.assert_close(found.layers[0].total, sums.sum(dim=1))
        squares = sum(x.square().sum(dim=1) for x in sequences)
        torch.testing.assert_close(found.neuron_placebos(0), squares.sqrt() / 16)
    with pytest.raises(ValueError, match="do not add"):
        _ = whole + Attribution(("x",), counts, counts.double(), {0: parts[0]})


def test_rank_correlation() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 100.0, 1000.0, 1e9]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1)
    # Pearson's correlation of the ranks (1, 2.5, 2.5, 4) and (2, 1, 3.5, 3.5), by hand
    assert rank_correlation([1.0, 2.0, 2.0, 5.0], [7.0, 3.0, 9.0, 9.0]) == pytest.approx(2.25 / 4.5)
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))
    assert math.isnan(rank_correlation([1.0], [1.0]))


def test_progress_is_kept_by_piece_and_only_of_the_same_work(tmp_path: Path) -> None:
    folder, piece = tmp_path / "progress", {"x": torch.arange(3)}
    progress = Progress.open(folder, {"edits": ["exchange"]}, resume=False)
    assert not folder.exists()
    assert progress.finished("layer-0") is None
    progress.keep("layer-0", piece)
    again = Progress.open(folder, {"edits": ["exchange"]}, resume=True)
    assert torch.equal(again.finished("layer-0")["x"], piece["x"])
    with pytest.raises(
        UserError, match=r"with edits \['exchange'\], not \['zero'\]: repeat that command, or leave out --resume"
    ):
        Progress.open(folder, {"edits": ["zero"]}, resume=True)
    (folder / "layer-0.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"layer-0.safetensors is damaged"):
        again.finished("layer-0")
    assert Progress.open(folder, {"edits": ["zero"]}, resume=False).finished("layer-0") is None


def test_zero_is_zero() -> None:
    a, b = torch.randn(2, 3, 2)
    assert torch.equal(Zero()(a, b, SILU), torch.zeros(3, 2))
