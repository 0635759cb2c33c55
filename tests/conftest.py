"""Nothing in the tests may look anything up on a hub; built-in models come from the package index, once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from pathlib import Path

from jaxtyping import install_import_hook

ROOT = Path(__file__).parent.parent
HOT = {
    *(f"analysis.units.{name}" for name in ("activations", "base", "variants")),
    *(f"analysis.sums.{name}" for name in ("tiled", "eager", "kernel")),
}
"""Called a hundred times for every 64 tokens: checking their shapes made tests of real models a quarter slower."""
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "analysis").rglob("[!_]*.py")}
install_import_hook([*sorted(MODULES - HOT), "hooks", "reports"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

from hooks.models import LoadedModel, load_model  # noqa: E402
from tests.helpers.tiny import save_tiny  # noqa: E402

torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random Llama: 3 layers, d_model 32, d_mlp 48, no BOS."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def llama(tiny_llama: Path) -> LoadedModel:
    return load_model(str(tiny_llama), device="cpu")


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The real SmolLM2-135M-Instruct."""
    return load_model("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def gemma3() -> LoadedModel:
    """The real Gemma 3 270M."""
    return load_model("gemma3-270m", device="cpu")
