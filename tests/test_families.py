"""Every family is read rightly: a, b and h against its own MLP written out by hand, whatever else it is made of."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.experts import SHARED
from analysis.window import Batch, Window
from hooks.forward import listen
from hooks.models import LoadedModel, load_model
from hooks.reading import Stream, Taking
from hooks.sites import Mixture, Site
from hooks.streams import parts_of
from tests.catalogue import table, written
from tests.mlps_by_hand import BY_FAMILY, load_plain, read_by_hand
from tests.tiny import DENSE, FAMILIES, MIXTURES, UNGATED, VOCABULARY, save_tiny

TOKENS = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(7))
READ = [*DENSE, *MIXTURES]


@pytest.fixture(scope="module", params=READ)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_tiny(request.param, tmp_path_factory.mktemp("family") / request.param)


class Heard(Stream):
    """Keeps a and b of every expert of a layer, with the places of its tokens and their weights."""

    def __init__(self, layer: Site | Mixture) -> None:
        super().__init__(layer)
        self._layer = layer
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @property
    def is_finite(self) -> Tensor:
        return torch.tensor(True)

    def take(self, heard: dict[str, Any], batch: Batch) -> None:
        if isinstance(self._layer, Site):
            a, b = (heard[symbol].flatten(0, 1) for symbol in "ab")
            self.seen[SHARED] = torch.arange(len(a)), torch.ones(len(a)), a, b
            return
        for number, a, b, places, weight in parts_of(self._layer, heard, batch):
            self.seen[int(self._layer.sites[number].expert or 0)] = places, weight, a, b


def heard_by_us(model: LoadedModel) -> dict[int, Heard]:
    windows = [Window(row, tokens, 1) for row, tokens in enumerate(TOKENS)]
    batch = Batch.of(windows, [0, 1])
    layers = dict(sorted({**model.sites, **model.mixtures}.items()))
    streams = {index: Heard(layer) for index, layer in layers.items()}
    listen(model, windows, [ear for stream in streams.values() for ear in stream.ears(batch, Taking())], max(layers))
    return streams


def test_what_is_heard_is_what_the_family_computes(family: tuple[str, Path]) -> None:
    name, directory = family
    model = load_model(str(directory), device="cpu")
    assert model.skipped == {}
    assert all(check["passed"] for check in model.acceptance), model.acceptance
    expected = read_by_hand(load_plain(directory, name), name, TOKENS)
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


def test_the_table_of_families_is_what_they_say_of_themselves(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("catalogue")
    lines = table({name: save_tiny(name, root / name) for name in FAMILIES})
    document = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    assert written(document, lines) == document, "run: python -m tests.catalogue docs/models.md"
