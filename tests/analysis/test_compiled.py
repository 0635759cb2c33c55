"""The compiled tile gives the eager sums or is not used; long tiles are as exact as short ones; nothing waits for a GPU.

Everything runs on the CPU, through the same code; where there is a GPU, also there.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.sums import compiled
from analysis.sums import tiled as tile
from analysis.sums.eager import Plan, TileSums, tile_sums
from analysis.sums.fused_reducer import reducer_of
from analysis.sums.layout import Layout
from analysis.sums.moments import Accumulator, Moments
from analysis.sums.tiled import ELEMENTS_ON_A_GPU, TEMPORARIES, TILE, TileReducer, tile_on
from analysis.units.registry import GatedUnit, Unit, unit_named
from analysis.weights.geometry import derangements
from hooks.collect import analyze
from hooks.models import LoadedModel
from tests.helpers.batches import batch_of, padded
from tests.helpers.compiling import Waits, graphs, needs_compiler
from tests.helpers.families import grid
from tests.helpers.random_layers import Case, ClampedUnit, random_case

ON = [
    pytest.param("cpu", marks=needs_compiler),
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
LENGTHS, BLOCKS = (300, 70, 5, 129), (0, 0, 5, 5)
"""Runs of 367 and 132 counted tokens."""
LONG = 4 * TILE


def case_of(unit: Unit | str, lengths: Sequence[int] = LENGTHS, d_mlp: int = 12) -> Case:
    """A layer with few sums of each kind: every one of them takes time to compile."""
    case = random_case(unit, lengths, d_mlp, dtype=torch.float32)
    layout = Layout((0.0, 0.5) if 0.0 in case.unit.limits else (0.5,), 1)
    return replace(case, layout=layout, partners=derangements(d_mlp, 1, 0))


def reducer(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> TileReducer:
    return TileReducer(case.unit, case.layout, case.geometry, case.pairing, device, dtype, **options)


def moments(case: Case, reduce: TileReducer, lengths: Sequence[int] = LENGTHS, blocks: Sequence[int] = BLOCKS) -> Moments:
    device = reduce.value_weight.device
    accumulator = Accumulator(case.a.shape[1], reduce)
    a, b = (padded(x, lengths).to(device) for x in (case.a, case.b))
    accumulator.add(a.to(reduce.dtype), b.to(reduce.dtype), batch_of(lengths, blocks, device=device))
    return accumulator.moments()


def exact(case: Case, lengths: Sequence[int] = LENGTHS, blocks: Sequence[int] = BLOCKS) -> Moments:
    return moments(case, reducer(case, torch.float64), lengths, blocks)


def assert_agree(found: Moments, expected: Moments, exactness: float) -> None:
    """Every neuron's sum of every row within the given part of the row's largest."""
    for of in ("neuron", "pooled"):
        for name, rows in expected.layout.rows.items():
            x, y = (getattr(moments, of).values[rows] for moments in (found, expected))
            scale = y.abs().amax().clamp(min=float(getattr(expected, of)["hh"].abs().max()))
            torch.testing.assert_close(x / scale, y / scale, rtol=0, atol=exactness, msg=f"{of} {name}")
    assert torch.equal(found.signs, expected.signs)
    assert torch.equal(found.peaks.places, expected.peaks.places)
    assert torch.equal(found.top_tokens.places, expected.top_tokens.places)
    torch.testing.assert_close(found.top_tokens.energy, expected.top_tokens.energy, rtol=exactness, atol=0)
    torch.testing.assert_close(found.tokens.by_energy.sum(1), expected.tokens.by_energy.sum(1), rtol=1e-5, atol=1e-6)
    groups, theirs = found.neuron_groups, expected.neuron_groups
    torch.testing.assert_close(groups, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    assert (found.n_tokens, found.n_sequences) == (expected.n_tokens, expected.n_sequences)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    "name", grid(["silu", "gelu_pytorch_tanh", "gpt_oss", "clamped(silu,2)", "top_k(gelu,0.5)"], ["silu"])
)
def test_compiled_sums_are_the_eager_ones_in_float64(name: str, device: str) -> None:
    """Tiles of 4, 2 and 3 chunks, the last of them padded; the second layer needs no compilation of its own."""
    before, case = graphs(), case_of(name)
    reduce = reducer(case, device=device, tile=LONG, compiled=True)
    assert_agree(moments(case, reduce), exact(case), 1e-5)
    assert (reduce.kind, graphs()) == ("compiled", before + 1)
    other, lengths, blocks = random_case(name, (5, 450), 12, dtype=torch.float32, seed=1), (5, 450), (0, 9)
    other = replace(other, layout=case.layout)
    reduce = reducer(other, device=device, tile=7 * TILE, compiled=True)
    assert_agree(moments(other, reduce, lengths, blocks), exact(other, lengths, blocks), 1e-5)
    assert (reduce.kind, graphs()) == ("compiled", before + 1)


@pytest.mark.parametrize("unit", [ClampedUnit(), GatedUnit(replace(unit_named("silu").activation, euler=None))])
def test_a_unit_that_torch_must_differentiate_is_not_compiled(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "compiled_sums", None)
    case = case_of(unit)
    reduce = reducer(case, tile=LONG, compiled=True)
    assert reduce.kind == "eager"
    assert_agree(moments(case, reduce), exact(case), 2e-6)


Change = Callable[[TileSums], TileSums]


def changed(part: str, place: tuple[int, int] | int, factor: float) -> Change:
    def change(sums: TileSums) -> TileSums:
        values = getattr(sums, part).clone()
        values[place] = values[place] * factor
        return sums._replace(**{part: values})

    return change


WRONG: dict[str, Change] = {
    "one neuron's energy": changed("neuron", (6, 3), 1.001),
    "one neuron's count": changed("neuron", (19, 11), 1.0001),
    "a gap": changed("neuron", (8, 0), 0.9),
    "a token's energy": changed("token_energy", 40, 1.0001),
    "a token's gap": changed("token_gap", (2, 7), 1.01),
    "a token's scale": changed("token_scale", (1, 200), 0.999),
    "not a number": changed("neuron", (12, 4), torch.nan),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_sums_are_seen_and_the_eager_ones_taken(wrong: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile, "compiled_sums", lambda *args: wrong(tile_sums(*args)))
    case = case_of("silu")
    reduce = reducer(case, tile=LONG, compiled=True)
    assert reduce.kind == "compiled"
    assert_agree(moments(case, reduce), exact(case), 2e-6)
    assert reduce.kind == "eager"


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "relu", "sigmoid", "softplus", "gpt_oss"])
def test_right_sums_are_kept_though_they_round_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of one layer in float64, as if compiled: other roundings than the eager ones everywhere. Padding counts for
    nothing, also where σ(0) is not 0."""
    case = case_of(name)
    precise = reducer(case, torch.float64)._weights
    calls = []

    def other(unit: Unit, plan: Plan, _: Any, *args: Any) -> TileSums:
        calls.append(args)
        return tile_sums(unit, plan, precise, *args)

    monkeypatch.setattr(tile, "compiled_sums", other)
    reduce = reducer(case, tile=LONG, compiled=True)
    assert_agree(moments(case, reduce), exact(case), 1e-12)
    assert (reduce.kind, len(calls)) == ("compiled", 3)


def test_where_there_is_no_compiler_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def absent(*_: Any) -> TileSums:
        asked.append(1)
        raise RuntimeError("cannot find a working compiler")

    monkeypatch.setattr(compiled, "_function", lambda: absent)
    monkeypatch.setattr(compiled, "_refused", set())
    case = case_of("silu")
    for _ in range(2):
        reduce = reducer(case, tile=LONG, compiled=True)
        assert_agree(moments(case, reduce), exact(case), 2e-6)
        assert reduce.kind == "eager"
    assert len(asked) == 1


def test_no_memory_is_not_taken_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> TileSums:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(compiled, "_function", lambda: full)
    case = case_of("silu")
    reduce = reducer(case, tile=LONG, compiled=True)
    with pytest.raises(torch.OutOfMemoryError):
        moments(case, reduce)
    assert reduce.kind == "compiled"


@pytest.mark.parametrize("compile_it", [False, True])
def test_long_tiles_are_as_exact_as_short_ones(compile_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 20 000 tokens in one float32 number would lose a digit here, and more in a longer tile."""
    monkeypatch.setattr(tile, "compiled_sums", tile_sums)
    case = case_of("silu", (20_000,), 6)
    expected = exact(case, (20_000,), (0,))
    short, long = (
        moments(case, reducer(case, tile=length, compiled=compile_it), (20_000,), (0,)) for length in (2 * TILE, 20_032)
    )
    torch.testing.assert_close(long.neuron.values, short.neuron.values, rtol=1e-12, atol=1e-12)
    for name in ("hh", "exchange", "euler", "abab", "repaired_hh", "energy_pp", "mixed_hh", "mixed_scaling"):
        rtol = 5e-7 if name.startswith("mixed") else 3e-8  # a length of a key is a float32 number
        torch.testing.assert_close(long.neuron[name], expected.neuron[name], rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize("lengths", [(64,), (65,), (1, 1, 190), (2,)])
@pytest.mark.parametrize("tokens", [TILE, 2 * TILE, 512])
@pytest.mark.parametrize("are_padded", [False, True])
def test_tiles_hold_every_counted_token_once(lengths: tuple[int, ...], tokens: int, are_padded: bool) -> None:
    batch = batch_of(lengths, range(len(lengths)))
    tiles = batch.tiles(max(tokens, 2 * TILE) if are_padded else tokens, TILE, are_padded)
    there = [t.places.flatten() if t.live is None else t.places[t.live] for t in tiles]
    assert torch.equal(torch.cat([batch.counted[:0], *there]), batch.counted)
    assert [len(places) for places in there] == [t.n_tokens for t in tiles]
    assert [t.jackknife_block for t in tiles for _ in range(t.n_tokens)] == batch.blocks.tolist()
    if are_padded:
        assert all(t.places.shape[0] >= 2 and t.places.shape[1] == TILE for t in tiles)


def test_a_tile_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile_on("cpu", 1536) == tile_on("mps", 1536) == TILE
    for free, dtype, most in (
        (80 * 2**30, torch.float32, ELEMENTS_ON_A_GPU),
        (80 * 2**30, torch.float64, ELEMENTS_ON_A_GPU),
        (2**30, torch.float32, 2**28 // (4 * TEMPORARIES)),
        (2**30, torch.float64, 2**28 // (8 * TEMPORARIES)),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2 * free))
        for d_mlp in (576, 1536, 5632):
            tokens = tile_on("cuda", d_mlp, dtype)
            assert tokens % TILE == 0
            assert most / 2 < tokens * d_mlp <= most
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 1))
    assert tile_on("cuda", 1536) == 2 * TILE  # no less is compiled
    with pytest.raises(ValueError, match="not a multiple of 64"):
        reducer(case_of("silu"), tile=100)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{}, {"tile": LONG}, {"tile": LONG, "compiled": True}], ids=str)
def test_taking_in_a_batch_waits_for_nothing(device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """But once a layer, for the proof of its first compiled tile. On meta, tensors have no values that could be read."""
    monkeypatch.setattr(tile, "compiled_sums", tile_sums)
    case = case_of("gelu")
    reduce = reducer(case, device=device, **options)
    monkeypatch.setattr(reduce, "_verified", True)
    accumulator = Accumulator(12, reduce)
    a, b = (padded(x, LENGTHS).to(device) for x in (case.a, case.b))
    batch = batch_of(LENGTHS, BLOCKS, device=device)
    with Waits():
        for _ in range(2):
            accumulator.add(a, b, batch)
        assert accumulator.is_finite.shape == ()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), x.new_zeros(())),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x[[0, 1]],
        lambda x: torch.tensor([1.0, 2.0], device=x.device) + x,
        lambda x: x.to("meta"),
        lambda x: (x > 0).nonzero(),
        lambda x: torch.where(x > 0),
    ],
)
def test_a_wait_would_be_seen(wait: Callable[[Tensor], Any]) -> None:
    x = torch.randn(2)
    with pytest.raises(AssertionError), Waits():
        wait(x)


@pytest.mark.parametrize(("device", "name", "expected"), [("cpu", "silu", "fused"), ("cpu", "gpt_oss", "eager")])
def test_a_reducer_says_how_it_computes(device: str, name: str, expected: str) -> None:
    case = case_of(name)
    made = reducer_of(case.unit, case.layout, case.geometry, case.pairing, torch.device(device), torch.float32)
    assert made.kind == expected


def test_the_record_of_a_run_says_how_it_was_computed(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> str:
        return analyze(llama, llama.read(context=32, max_tokens=100), layers=[0, 1], quiet=True).record["statistics"]

    assert read() == "fused"
    made = iter([False, True])

    def some(*args: Any) -> Any:
        *layer, device, dtype = args
        return TileReducer(*layer, device, dtype, compiled=True) if next(made) else reducer_of(*args)

    monkeypatch.setattr(tile, "compiled_sums", tile_sums)
    monkeypatch.setattr("hooks.reading.accumulators.reducer_of", some)
    assert read() == "compiled, fused"


def test_what_a_tile_holds_at_once_is_what_its_length_counts_on() -> None:
    """Every number of every temporary, over the tokens × neurons of the tile."""
    case = case_of("silu", (640,), 256)
    case = replace(case, layout=Layout.of(case.unit), partners=derangements(256, 4, 0))
    reduce, a, b = reducer(case), *(x.view(-1, TILE, 256).clone() for x in (case.a, case.b))
    with Held() as held:
        tile_sums(reduce.unit, reduce._plan, reduce._weights, a, b, None)
    assert 0.6 * TEMPORARIES < held.most / (a.numel() * a.element_size()) < TEMPORARIES


class Held(TorchDispatchMode):
    """The bytes of what is computed and not yet let go, and the most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in _flat([result]):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._known:
                storage = x.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._let_go, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _let_go(self, known: int, n_bytes: int) -> None:
        self._known.discard(known)
        self.now -= n_bytes


def _flat(values: Any) -> list[Any]:
    return [x for value in values for x in _flat(value)] if isinstance(values, list | tuple) else [values]
