"""Where a model's files are, and how they are read.

MODEL is a built-in name, a hub id (org/name), a directory with safetensors, or a .gguf file. Nothing is looked up on a hub
for built-in and local models; a hub model becomes a snapshot on this machine first, and is a local one from then on. No
pickle is ever loaded, and a repository's own code runs only if the user says so.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError
from analysis.storage.hashing import sha256_of
from hooks.loading.architectures import auto_class_for, model_class_for, read_config
from hooks.loading.builtin import BUILTINS, SOURCE_FILE, builtin_directory, builtin_named
from hooks.loading.checkpoint import INDEX, SINGLE, read_checkpoint
from hooks.loading.devices import SPREAD, spreading
from hooks.loading.gguf import gguf_format, load_gguf
from hooks.loading.quantized import OF_WEIGHTS, REMEDY, quantization_in, read_quantized, readable_method

HUB_TIMEOUT_S = 10


@dataclass(frozen=True)
class Source:
    """Where the weights are on this machine, and their provenance."""

    path: Path
    name: str
    fingerprint: str
    weights_format: str | None = None

    def with_random_weights(self, seed: int) -> "Source":
        """The same architecture with weights of its own."""
        fingerprint = f"random weights, seed {seed}, for {self.fingerprint}"
        return replace(self, fingerprint=fingerprint, weights_format=f"random weights, seed {seed}")


def locate(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """Find the files of MODEL, fetching them where that is meant; UserError if they are not to be had."""
    if not name.strip():
        raise UserError("the model's name is empty: give a built-in name, a hub id, a directory or a .gguf file")
    path = Path(name).expanduser()
    is_path = path.suffix == ".gguf" or name.startswith((".", "~", "/")) or name.count("/") > 1
    if name not in BUILTINS and not path.exists() and not is_path and "/" in name:
        return _from_hub(name, revision, trust_remote_code)
    if revision is not None:
        raise UserError(f"{name} has no revision {revision!r}: revisions belong to hub models (org/name)")
    if name not in BUILTINS and path.is_dir():
        return _directory(path)
    if name not in BUILTINS and path.is_file():
        return Source(path, path.name, f"sha256 {sha256_of(path)}", gguf_format(path))
    if is_path:
        raise UserError(f"there is no file or directory {name}: check the path")
    builtin = builtin_named(name)
    fingerprint = f"gguf sha256 {builtin.gguf_sha256}"
    return Source(builtin_directory(builtin), builtin.title, fingerprint, builtin.weights_format)


def _directory(path: Path) -> Source:
    weights_format = _weights_format(path)
    fingerprint = f"sha256 {sha256_of(*read_checkpoint(path).files)}"
    return Source(path, path.resolve().name, fingerprint, _stated_format(path) or weights_format)


def _weights_format(path: Path) -> str:
    """How a directory stores its weights; UserError if it lacks some, or holds what is not read."""
    if (path / "adapter_config.json").is_file():
        raise UserError(f"{path} holds an adapter (adapter_config.json) and no whole model: merge it into its model first")
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: give a directory that save_pretrained wrote")
    checkpoint = read_checkpoint(path)
    quantized = read_quantized(path, checkpoint)
    return checkpoint.summary if quantized is None else quantized.summary


def _stated_format(path: Path) -> str | None:
    """What a directory that we converted says of its weights; a copy of it says it too."""
    try:
        return str(json.loads((path / SOURCE_FILE).read_text(encoding="utf-8"))["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """A snapshot of the hub's files on this machine, or the cached one if the hub cannot be reached."""
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    unread: list[str] = []
    stated: dict[str, Any] = {}
    try:
        info = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
        commit, stated = info.sha, info.config or {}
        unread = _second_copies([file.rfilename for file in info.siblings or ()])
    except GatedRepoError as error:
        raise UserError(f"{name} is gated: accept its terms on its page and log in with 'hf auth login'") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}: check the branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"the hub has no model {name}: check the name, or log in if it is private") from error
    except Exception:  # whatever the network raised (its classes change with the client): the cache may still serve
        commit = None
    if settings := quantization_in(stated):
        readable_method(settings, name)  # before the download
    try:
        path = snapshot_download(
            name,
            revision=commit or revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*", *unread],
            local_files_only=commit is None,
        )
    except LocalEntryNotFoundError as error:
        near = ", ".join(BUILTINS)
        raise UserError(f"{name} is not cached and the hub cannot be reached: check the network, or use {near}") from error
    except HFValidationError as error:
        raise UserError(f"{name!r} is no hub id ({first_line(error)}): write it like org/name") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"downloading {name} failed ({first_line(error)}): try again") from error
    return Source(Path(path), name, f"revision {Path(path).name}", _weights_format(Path(path)))


def _second_copies(files: list[str]) -> list[str]:
    """Safetensors that repeat the model under other names, not worth a download; the shards, if it is there in one file."""
    if SINGLE not in files and INDEX not in files:
        return []
    weights = [file for file in files if file.endswith((".safetensors", INDEX))]
    if SINGLE in files:
        return [file for file in weights if file != SINGLE]
    return [file for file in weights if file.startswith("consolidated")]


def load_files(
    source: Source, precision: torch.dtype, trust_remote_code: bool, *, spread: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in this precision and its tokenizer; UserError if the files do not make one.

    With ``spread``, over all GPUs, the CPU's memory and disk, as much as is needed of each. GGUF comes in float32.
    """
    if source.path.is_file():
        if spread:
            raise UserError(f"{source.name} is dequantized on one device: use another --device than {SPREAD}")
        return load_gguf(source.path)
    config = read_config(source.path, source.name, trust_remote_code)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        model, info = _loaded(source, config, precision, options, spreading() if spread else {})
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds; each means that these files do not make a model
        remedy = "add --trust-remote-code if you trust it" if "trust_remote_code" in str(error) else "check the files"
        raise UserError(f"cannot load {source.name} ({first_line(error)}): {remedy}") from error
    _check_complete(model, info, source.name)
    return model, tokenizer


def _loaded(
    source: Source, config: PreTrainedConfig, precision: torch.dtype, options: dict[str, bool], places: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and what transformers says of the weights that it missed and of those it had no use for."""
    auto = auto_class_for(config, source.name)
    quantized = read_quantized(source.path, read_checkpoint(source.path))
    if quantized is None:
        return auto.from_pretrained(
            source.path, dtype=precision, use_safetensors=True, output_loading_info=True, **options, **places
        )
    kind, config = model_class_for(auto, config, source.path, options["trust_remote_code"])
    return _from_state(kind, config, quantized.state(precision), precision, places)


def _from_state(
    kind: Any, config: PreTrainedConfig, state: dict[str, Tensor], precision: torch.dtype, places: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model that plain weights make; its configuration then says nothing of how they were stored."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=precision, output_loading_info=True, **places)


def _check_complete(model: PreTrainedModel, info: dict[str, Any], name: str) -> None:
    """Every weight of the model came from the checkpoint, as a float, and no scale was left lying there."""
    if info["missing_keys"]:
        raise UserError(
            f"{name} lacks {len(info['missing_keys'])} weights ({min(info['missing_keys'])}): the checkpoint is "
            "incomplete or of another architecture"
        )
    if scales := sorted(key for key in info["unexpected_keys"] if OF_WEIGHTS.search(key)):
        raise UserError(f"{name} has scales that its model does not know ({scales[0]}): is it quantized? {REMEDY}")
    for key, weight in model.named_parameters():
        if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{name} was read with {key} as {weight.dtype}, which are no plain numbers: {REMEDY}")


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
