"""Every family is read rightly: a, b and h against its own MLP written out by hand, whatever else it is made of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.sums.batch import Batch, Window
from analysis.weights.experts import SHARED
from hooks.collect import analyze
from hooks.corpus import Corpus
from hooks.locating.sites import Mixture, Site
from hooks.models import LoadedModel
from hooks.reading.accumulators import parts_of
from hooks.reading.batches import ActivationAccumulator, BatchStatus
from hooks.reading.capture import capture_pass
from reports.tables import layers_table, tables_of
from tests.helpers.catalogue import BEGIN, END, table, written
from tests.helpers.families import SAMPLE, Families, grid
from tests.helpers.mlps_by_hand import BY_FAMILY, load_plain, read_by_hand
from tests.helpers.tiny import DENSE, FAMILIES, MIXTURES, UNGATED, VOCABULARY

TOKENS = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(7))
READ = [*DENSE, *MIXTURES]
DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text(encoding="utf-8")


class Heard(ActivationAccumulator):
    """Keeps a and b of every expert of a layer, with the places of its tokens and their weights."""

    def __init__(self, layer: Site | Mixture) -> None:
        super().__init__(layer)
        self._layer = layer
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @property
    def is_finite(self) -> Tensor:
        return torch.tensor(True)

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        if isinstance(self._layer, Site):
            a, b = (captured[symbol].flatten(0, 1) for symbol in "ab")
            self.seen[SHARED] = torch.arange(len(a)), torch.ones(len(a)), a, b
            return
        for number, a, b, places, weight in parts_of(self._layer, captured, batch):
            self.seen[int(self._layer.sites[number].expert or 0)] = places, weight, a, b


def heard_by_us(model: LoadedModel) -> dict[int, Heard]:
    windows = [Window(row, tokens, 1) for row, tokens in enumerate(TOKENS)]
    batch = Batch.of(windows, [0, 1])
    layers = dict(sorted({**model.sites, **model.mixtures}.items()))
    accumulators = {index: Heard(layer) for index, layer in layers.items()}
    capture_pass(
        model,
        windows,
        [
            capture_hook
            for accumulator in accumulators.values()
            for capture_hook in accumulator.capture_hooks(batch, BatchStatus())
        ],
        max(layers),
    )
    return accumulators


@pytest.mark.parametrize("name", grid(READ))
def test_what_is_heard_is_what_the_family_computes(families: Families, name: str) -> None:
    model = families.loaded(name)
    assert model.skipped == {}
    assert all(check.passed for check in model.acceptance), model.acceptance
    expected = read_by_hand(load_plain(families.directory(name), name), name, TOKENS)
    found = heard_by_us(model)
    assert sorted(found) == list(range(len(expected)))
    for index, by_hand in enumerate(expected):
        seen = {expert: parts for expert, parts in found[index].seen.items() if len(parts[0])}
        layer = model.sites.get(index) or model.mixtures[index]
        assert sorted(seen) == sorted(by_hand)
        assert isinstance(layer, Mixture) == (name in MIXTURES and list(by_hand) != [SHARED])
        for expert, theirs in by_hand.items():
            places, weight, a, b = seen[expert]
            order = theirs.place.argsort()
            assert torch.equal(places, theirs.place[order])
            for mine, reference in ((weight, theirs.weight), (a, theirs.a), (b, theirs.b)):
                torch.testing.assert_close(mine.double(), reference[order], rtol=1e-4, atol=1e-4)
            reference = theirs.h[order]
            torch.testing.assert_close(layer.unit(a.double(), b.double()), reference, rtol=1e-3, atol=1e-3)


def test_every_family_of_the_catalogue_is_written_by_hand() -> None:
    assert BY_FAMILY.keys() == {*DENSE, *MIXTURES}
    assert FAMILIES.keys() == {*BY_FAMILY, *UNGATED}


@pytest.mark.exhaustive
def test_the_table_of_families_is_what_they_say_of_themselves(families: Families) -> None:
    lines = table(FAMILIES, families.loaded)
    assert written(DOCUMENT, lines) == DOCUMENT, "run: python -m tests.helpers.catalogue docs/models.md"


def test_lines_of_the_table_of_families_are_what_these_say_of_themselves(families: Families) -> None:
    lines = table([*SAMPLE, "gpt2", "bitnet"], families.loaded).splitlines()
    rows = DOCUMENT.partition(BEGIN)[2].partition(END)[0].splitlines()
    assert [line for line in lines if line not in rows] == [], "run: python -m tests.helpers.catalogue docs/models.md"
    assert len([row for row in rows if row.startswith("| `")]) == len(FAMILIES)


MIXED = (
    *("llama", "phi3", "gemma3n", "granite", "mixtral", "qwen2_moe", "gpt_oss", "llama4", "t5", "modernbert", "jamba"),
    "dbrx",
)
"""One of every way in which units are made, held, routed and placed."""
SAMPLED = ("phi3", "qwen2_moe")
"""Halves of one projection, and experts with a shared one."""


def windows_of_many_lengths(model: LoadedModel) -> Corpus:
    """Windows of 12 to 40 tokens, so that every batch is padded."""
    text = model.read(context=40, max_tokens=400)
    cut = [replace(window, tokens=window.tokens[: 40 - 4 * (window.index % 8)]) for window in text.windows]
    return replace(text, windows=tuple(cut))


@pytest.mark.parametrize("name", grid(MIXED, SAMPLED))
def test_batches_and_padding_change_no_number(families: Families, name: str) -> None:
    model = families.loaded(name, "float64")
    text = windows_of_many_lengths(model)
    alone, together = (tables_of(analyze(model, text, batch_size=size, quiet=True)) for size in (1, 5))
    for frame in ("layers", "neurons", "curves"):
        mine, theirs = getattr(alone, frame), getattr(together, frame)
        for column in mine.select_dtypes("number"):
            if column.endswith(("_p", "_q")):
                continue  # ranks: of two that are equal to the last digit either may come first
            np.testing.assert_allclose(mine[column], theirs[column], rtol=1e-5, atol=1e-7, err_msg=f"{frame}.{column}")


@pytest.mark.parametrize("name", MIXED)
def test_what_stands_behind_a_window_changes_nothing(families: Families, name: str) -> None:
    """Padding is not read as text: windows of other lengths in the same batch leave a and b as they are."""
    model = families.loaded(name, "float64")
    layers, short = max(model.layers), Window(0, TOKENS[0, :9], 1)
    found = []
    for windows in ([short], [short, Window(1, TOKENS[1], 1)]):
        batch = Batch.of(windows, [0] * len(windows))
        accumulators = [Heard(layer) for layer in model.layers.values()]
        capture_pass(
            model,
            windows,
            [
                capture_hook
                for accumulator in accumulators
                for capture_hook in accumulator.capture_hooks(batch, BatchStatus())
            ],
            layers,
        )
        length = len(windows[-1].tokens)
        own = []
        for accumulator in accumulators:
            for expert, (places, weight, a, b) in sorted(accumulator.seen.items()):
                mine = (places < length) & (places % length < 9)  # row 0
                own.append((expert, places[mine], weight[mine], a[mine], b[mine]))
        found.append(own)
    for (expert, places, *values), (other, there, *theirs) in zip(*found, strict=True):
        assert expert == other
        assert torch.equal(places, there)
        for mine, reference in zip(values, theirs, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)  # routers compute in float32


@pytest.mark.parametrize("name", grid(MIXED, SAMPLED))
def test_precision_moves_numbers_by_its_rounding_only(families: Families, name: str) -> None:
    """Medians over the layers of what moves most: routing near a tie may send a token elsewhere."""
    tables = {}
    for dtype in ("float64", "float32", "bfloat16"):
        model = families.loaded(name, dtype)
        tables[dtype] = layers_table(analyze(model, model.read(context=40, max_tokens=400), quiet=True))
    for column in ("exchange", "exchange_balanced", "scaling_double", "bilinear_share", "placement"):
        exact = tables["float64"][column]
        np.testing.assert_allclose(tables["float32"][column], exact, rtol=2e-3, err_msg=column)
        assert float((tables["bfloat16"][column] / exact - 1).abs().median()) < 0.1, column
    geometry = tables["float32"]["cos_qk_abs_mean"]
    np.testing.assert_allclose(geometry, tables["float64"]["cos_qk_abs_mean"], rtol=1e-5)
