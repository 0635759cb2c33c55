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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError
from analysis.hashing import sha256_of
from hooks.builtin import BUILTINS, SOURCE_FILE, builtin_directory, builtin_named
from hooks.gguf import gguf_format, load_gguf

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
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: give a directory that save_pretrained wrote")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = next((file.name for file in sorted(path.glob("*.bin"))), None)
        found = f"only pickled weights ({pickled}), which are never loaded" if pickled else "no weights"
        raise UserError(f"{path} has {found}: save the model as safetensors")
    return Source(path, path.resolve().name, f"sha256 {sha256_of(*weights)}", _stated_format(path))


def _stated_format(path: Path) -> str | None:
    """What a directory that we converted says of its weights; a copy of it says it too."""
    try:
        return str(json.loads((path / SOURCE_FILE).read_text(encoding="utf-8"))["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """A snapshot of the hub's files on this machine, or the cached one if the hub cannot be reached."""
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if trust_remote_code else [])]
    try:
        commit = HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_S).sha
    except GatedRepoError as error:
        raise UserError(f"{name} is gated: accept its terms on its page and log in with 'hf auth login'") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}: check the branch, tag or commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"the hub has no model {name}: check the name, or log in if it is private") from error
    except Exception:  # whatever the network raised (its classes change with the client): the cache may still serve
        commit = None
    try:
        path = snapshot_download(
            name,
            revision=commit or revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            local_files_only=commit is None,
        )
    except LocalEntryNotFoundError as error:
        near = ", ".join(BUILTINS)
        raise UserError(f"{name} is not cached and the hub cannot be reached: check the network, or use {near}") from error
    except HFValidationError as error:
        raise UserError(f"{name!r} is no hub id ({first_line(error)}): write it like org/name") from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"downloading {name} failed ({first_line(error)}): try again") from error
    source = _directory(Path(path))
    return Source(source.path, name, f"revision {Path(path).name}")


def load_files(
    source: Source, precision: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in this precision and its tokenizer; UserError if the files do not make one."""
    if source.path.is_file():
        return load_gguf(source.path)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path, dtype=precision, use_safetensors=True, output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    except Exception as error:  # transformers raises many kinds; each means that these files do not make a model
        remedy = "add --trust-remote-code if you trust it" if "trust_remote_code" in str(error) else "check the files"
        raise UserError(f"cannot load {source.name} ({first_line(error)}): {remedy}") from error
    if info["missing_keys"]:
        raise UserError(
            f"{source.name} lacks {len(info['missing_keys'])} weights ({min(info['missing_keys'])}): the checkpoint is "
            "incomplete or of another architecture"
        )
    return model, tokenizer


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
