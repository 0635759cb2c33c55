"""Finds a model's files, and loads them.

MODEL is a built-in name, a hub id (org/name), a directory with safetensors, or a .gguf file. For built-in and local models
the hub is never contacted; a hub model is downloaded as a snapshot and then treated as a local one. Pickles are never
loaded, and a repository's own code runs only if the user allows it.
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
from hooks.loading.devices import SPREAD, spread_options
from hooks.loading.gguf import gguf_format, load_gguf
from hooks.loading.quantized import OF_WEIGHTS, REMEDY, quantization_in, read_quantized, readable_method

HUB_TIMEOUT_S = 10


@dataclass(frozen=True)
class Source:
    """The files on this machine, and their provenance.

    Attributes:
        path: a directory, or a .gguf file.
        name: for reports.
        fingerprint: hash or revision of the weights.
        weights_format: how the weights are stored; None if that is to be taken from the configuration.
    """

    path: Path
    name: str
    fingerprint: str
    weights_format: str | None = None

    def with_random_weights(self, seed: int) -> "Source":
        """The provenance of a model of this architecture with random weights."""
        fingerprint = f"random weights, seed {seed}, for {self.fingerprint}"
        return replace(self, fingerprint=fingerprint, weights_format=f"random weights, seed {seed}")


def locate(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """Find the files of MODEL, downloading hub and built-in models that are not cached.

    Args:
        name: MODEL.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: also download the hub model's Python code.

    Raises:
        UserError: the model does not exist, cannot be downloaded, or is in a format that is not supported.
    """
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
    """How a directory stores its weights; UserError if files are missing or the format is not supported."""
    if (path / "adapter_config.json").is_file():
        raise UserError(
            f"{path} contains an adapter (adapter_config.json), not a full model: merge it into its model first"
        )
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: give a directory written by save_pretrained")
    checkpoint = read_checkpoint(path)
    quantized = read_quantized(path, checkpoint)
    return checkpoint.summary if quantized is None else quantized.summary


def _stated_format(path: Path) -> str | None:
    """How the weights of a converted built-in were stored, as recorded in its directory; None for other directories."""
    try:
        return str(json.loads((path / SOURCE_FILE).read_text(encoding="utf-8"))["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """A snapshot of the hub's files on this machine, or the cached one if the hub cannot be reached."""
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    duplicates: list[str] = []
    config: dict[str, Any] = {}
    try:
        info = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S)
        commit, config = info.sha, info.config or {}
        duplicates = _duplicates([file.rfilename for file in info.siblings or ()])
    except GatedRepoError as error:
        raise UserError(f"{name} is gated: accept its terms on its page and log in with 'hf auth login'") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}: check the branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"the hub has no model {name}: check the name, or log in if it is private") from error
    except Exception:  # network errors, whose classes change with the client: the model may still be cached
        commit = None
    if settings := quantization_in(config):
        readable_method(settings, name)  # refuse before the download
    try:
        path = snapshot_download(
            name,
            revision=commit or revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*", *duplicates],
            local_files_only=commit is None,
        )
    except LocalEntryNotFoundError as error:
        builtins = ", ".join(BUILTINS)
        raise UserError(
            f"{name} is not cached and the hub cannot be reached: check the network, or use {builtins}"
        ) from error
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a hub id ({first_line(error)}): write it as org/name") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"downloading {name} failed ({first_line(error)}): try again") from error
    return Source(Path(path), name, f"revision {Path(path).name}", _weights_format(Path(path)))


def _duplicates(files: list[str]) -> list[str]:
    """Safetensors files that are not needed: second copies of the model, and the shards if it is also in one file."""
    if SINGLE not in files and INDEX not in files:
        return []
    weights = [file for file in files if file.endswith((".safetensors", INDEX))]
    if SINGLE in files:
        return [file for file in weights if file != SINGLE]
    return [file for file in weights if file.startswith("consolidated")]


def load_files(
    source: Source, precision: torch.dtype, trust_remote_code: bool, *, spread: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer.

    Args:
        source: from ``locate``.
        precision: dtype of the weights; a GGUF file is always loaded in float32.
        trust_remote_code: run the model's own Python code.
        spread: distribute the model over all GPUs, the CPU's memory and disk, as far as each is needed.

    Raises:
        UserError: the files cannot be loaded, are incomplete, or belong to another architecture.
    """
    if source.path.is_file():
        if spread:
            raise UserError(f"{source.name} is dequantized on one device: use another --device than {SPREAD}")
        return load_gguf(source.path)
    config = read_config(source.path, source.name, trust_remote_code)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        model, info = _loaded(source, config, precision, options, spread_options() if spread else {})
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds; each means that the files are unusable
        remedy = "add --trust-remote-code if you trust it" if "trust_remote_code" in str(error) else "check the files"
        raise UserError(f"cannot load {source.name} ({first_line(error)}): {remedy}") from error
    _check_complete(model, info, source.name)
    return model, tokenizer


def _loaded(
    source: Source, config: PreTrainedConfig, precision: torch.dtype, options: dict[str, bool], places: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' loading info: missing and unexpected keys."""
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
    """The model with a dequantized state dict; the quantization settings are removed from its configuration."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=precision, output_loading_info=True, **places)


def _check_complete(model: PreTrainedModel, info: dict[str, Any], name: str) -> None:
    """UserError unless every weight of the model came from the checkpoint as a float, and no scale was left unused."""
    if info["missing_keys"]:
        raise UserError(
            f"{name} lacks {len(info['missing_keys'])} weights ({min(info['missing_keys'])}): the checkpoint is "
            "incomplete or belongs to another architecture"
        )
    if scales := sorted(key for key in info["unexpected_keys"] if OF_WEIGHTS.search(key)):
        raise UserError(f"{name} has scales that its model does not use ({scales[0]}): if it is quantized, {REMEDY}")
    for key, weight in model.named_parameters():
        if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{name} was loaded with {key} in {weight.dtype}, which is not a float dtype: {REMEDY}")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
