"""Which tests run and on how many processes, what is checked while they run, and the models that they share.

Nothing in the tests may look anything up on a hub; built-in models come from the package index, once.
What takes long to import is imported where it is used: the process that only hands out tests needs none of it.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: there is a process for every core already
    os.environ["OMP_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from hooks.models import LoadedModel
    from tests.helpers.families import Families

pytest.register_assert_rewrite("tests.helpers")

ROOT = Path(__file__).parent.parent
HOT = {
    *(f"analysis.units.{name}" for name in ("activations", "base", "variants")),
    *(f"analysis.sums.{name}" for name in ("tiled", "eager", "kernel", "layout")),
}
"""Called a hundred times for every 64 tokens, or ten thousand times for a table: checking their shapes made tests of real
models a quarter slower, and tables take twice as long."""
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "analysis").rglob("[!_]*.py")}
CHECK_SHAPES = "CHECK_SHAPES"
"""The environment variable that has shapes and types checked at run time. It doubles the time; ``.ci/run`` sets it."""
if os.environ.get(CHECK_SHAPES, "0") != "0":
    install_import_hook([*sorted(MODULES - HOT), "hooks", "reports"], "beartype.beartype")

MOST_PROCESSES = 4
"""Each may hold both real models, 2 GB."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run on every core, as with ``-n``, unless told otherwise or given single files. (-p no:xdist works too.)"""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.hasplugin("xdist") or config.option.usepdb:
        return
    if config.option.numprocesses is None and config.option.dist == "no" and not any(".py" in arg for arg in config.args):
        config.option.numprocesses = min(os.cpu_count() or 1, MOST_PROCESSES)
        config.option.dist = "worksteal"  # neighbours stay together, so that most of what a file shares is made once


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Exhaustive tests run only where the -m expression names them; those of real models begin, as they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)
    if "exhaustive" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Llama: 3 layers, d_model 32, d_mlp 48, no BOS."""
    from tests.helpers.tiny import save_tiny

    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


def loaded(name: str) -> LoadedModel:
    from hooks.models import load_model

    return load_model(name, device="cpu")


@pytest.fixture(scope="session")
def llama(tiny_llama: Path) -> LoadedModel:
    return loaded(str(tiny_llama))


@pytest.fixture(scope="session", autouse=True)
def seeded_and_with_coarse_figures() -> Iterator[None]:
    """What is written in the tests' own process has small figures."""
    import torch

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reports.directory.DPI", 20)
        yield


@pytest.fixture
def without_figures() -> Iterator[None]:
    """For a test of something else in what a run writes."""
    from tests.helpers.command_line import no_figures

    with no_figures():
        yield


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Tiny models of every family."""
    from tests.helpers.families import Families

    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real SmolLM2-135M-Instruct."""
    return loaded("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> LoadedModel:
    """The real Gemma 3 270M."""
    return loaded("gemma3-270m")
