"""Weights in one file or many: which are read, whether they are whole, what a report says of them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.errors import UserError
from analysis.storage.hashing import sha256_of
from hooks.loading import sources
from hooks.loading.checkpoint import INDEX, SINGLE, read_checkpoint
from hooks.loading.sources import Source, load_files, locate
from hooks.models import load_model
from tests.helpers.tiny import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny Llama in shards of at most 20 kB."""
    tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="20kB")
    tiny_tokenizer().save_pretrained(tmp_path / "shards")
    return tmp_path / "shards"


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def found(directory: Path) -> Source:
    return locate(str(directory), None, trust_remote_code=False)


def refused(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        found(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_make_the_model_that_one_file_makes(sharded: Path, tiny_llama: Path) -> None:
    assert len(shards_of(sharded)) > 3
    whole, parts = load_model(str(tiny_llama), device="cpu"), load_model(str(sharded), device="cpu")
    for (name, expected), value in zip(
        whole.hf_model.state_dict().items(), parts.hf_model.state_dict().values(), strict=True
    ):
        assert torch.equal(expected, value), name
    assert whole.description["weights"] == "safetensors, float32"
    assert parts.description["weights"] == f"safetensors in {len(shards_of(sharded))} shards, float32"


def test_the_fingerprint_is_of_every_file_that_is_read_and_of_no_other(sharded: Path) -> None:
    before = found(sharded).fingerprint
    assert before == f"sha256 {sha256_of(*shards_of(sharded))}"
    shutil.copy(shards_of(sharded)[0], sharded / "consolidated.safetensors")
    assert found(sharded).fingerprint == before
    last = shards_of(sharded)[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    assert found(sharded).fingerprint != before


def test_the_dtype_said_is_the_stored_one(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path / "llama")
    weights = load_file(directory / SINGLE)
    half = {name: weight if "norm" in name else weight.bfloat16() for name, weight in weights.items()}
    save_file(half, directory / SINGLE, metadata={"format": "pt"})
    assert found(directory).weights_format == "safetensors, bfloat16 and float32"


def test_a_shard_that_is_missing_cut_or_of_another_model(sharded: Path) -> None:
    first, *_, last = shards_of(sharded)
    data = last.read_bytes()
    last.unlink()
    assert f"lacks 1 of the {len(shards_of(sharded)) + 1} shards in {INDEX} ({last.name})" in refused(sharded)
    last.write_bytes(data[:-100])
    assert f"{last} has {len(data) - 100} bytes, but its header says {len(data)}: download it again" in refused(sharded)
    last.write_bytes(data + b"more")
    assert f"has {len(data) + 4} bytes, but its header says {len(data)}" in refused(sharded)
    last.write_bytes(data[:50])
    assert "ends within its header (50 bytes)" in refused(sharded)
    last.write_bytes(b"")
    assert "(0 bytes)" in refused(sharded)
    last.write_bytes(b"<html>not found</html>")
    assert "is not a safetensors file" in refused(sharded)
    last.write_bytes((3).to_bytes(8, "little") + b"{{{")
    assert "has no readable header" in refused(sharded)
    last.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a git-lfs pointer, not the weights: download them with 'git lfs pull'" in refused(sharded)
    last.write_bytes(first.read_bytes())
    assert "contrary to model.safetensors.index.json" in refused(sharded)


def test_an_index_that_is_none(sharded: Path) -> None:
    for content in ("{", "[]", '{"metadata": {}}', '{"weight_map": 3}'):
        (sharded / INDEX).write_text(content)
        assert "is not an index of shards" in refused(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, *_, last = shards_of(sharded)
    name, value = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: value + 1}, last, metadata={"format": "pt"})
    assert f"{last} also contains {name}" in refused(sharded)


def test_one_file_beside_shards(sharded: Path, tiny_llama: Path) -> None:
    shutil.copy(tiny_llama / SINGLE, sharded / SINGLE)
    assert read_checkpoint(sharded).files == (sharded / SINGLE,)
    other = {name: value for name, value in load_file(tiny_llama / SINGLE).items() if "layers.2" not in name}
    save_file(other, sharded / SINGLE, metadata={"format": "pt"})
    assert "holds two models" in refused(sharded)


def test_a_directory_with_something_else_than_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert "only pickled weights (pytorch_model.bin), which are never loaded" in refused(tmp_path)
    (tmp_path / "model.Q4_0.gguf").write_bytes(b"GGUF")
    assert "has no safetensors but model.Q4_0.gguf: give that file itself" in refused(tmp_path)
    save_file({"w": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert "has consolidated.safetensors, but no model.safetensors" in refused(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "contains an adapter (adapter_config.json), not a full model" in refused(tmp_path)


def test_of_a_hub_model_no_second_copy_is_fetched(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [path.name for path in sharded.iterdir()]
    asked: dict[str, list[str]] = {}

    def snapshot(name: str, **options: object) -> str:
        asked.update(options)
        return str(sharded)

    def hub(*files: str) -> None:
        info = SimpleNamespace(sha="abc", config=None, siblings=[SimpleNamespace(rfilename=file) for file in files])
        monkeypatch.setattr(sources, "HfApi", lambda: SimpleNamespace(model_info=lambda *_, **__: info))

    monkeypatch.setattr(sources, "snapshot_download", snapshot)
    hub(*names, "consolidated.safetensors")
    source = locate("org/name", None, trust_remote_code=False)
    assert source == Source(
        sharded, "org/name", "revision shards", f"safetensors in {len(shards_of(sharded))} shards, float32"
    )
    assert asked["ignore_patterns"] == ["*/*", "consolidated.safetensors"]
    hub(*names, SINGLE, "model.fp16.safetensors")
    locate("org/name", None, trust_remote_code=False)
    assert set(asked["ignore_patterns"]) == {
        "*/*",
        "model.fp16.safetensors",
        INDEX,
        *(path.name for path in shards_of(sharded)),
    }
    shards_of(sharded)[0].unlink()
    with pytest.raises(UserError, match="lacks 1 of the"):
        locate("org/name", None, trust_remote_code=False)


def test_a_hub_model_that_cannot_be_read_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(sha="abc", siblings=[], config={"quantization_config": {"quant_method": "gptq", "bits": 4}})
    monkeypatch.setattr(sources, "HfApi", lambda: SimpleNamespace(model_info=lambda *_, **__: info))
    monkeypatch.setattr(sources, "snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    with pytest.raises(UserError, match="org/name is quantized with gptq, which is not supported"):
        locate("org/name", None, trust_remote_code=False)


def test_shards_load_in_every_dtype(sharded: Path) -> None:
    for precision in (torch.bfloat16, torch.float64):
        model, _ = load_files(found(sharded), precision, trust_remote_code=False)
        assert {parameter.dtype for parameter in model.parameters()} == {precision}
    index = json.loads((sharded / INDEX).read_text())
    assert set(index["weight_map"]) == set(read_checkpoint(sharded).tensors)
