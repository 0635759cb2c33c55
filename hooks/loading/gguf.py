"""GGUF files: weights that llama.cpp quantized, dequantized on loading.

transformers builds the model, but ignores parts of some files without a warning. So the file is read a second time, and the
model is refused unless it uses every number of the file and agrees with the file's metadata.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError

_MAGIC = b"GGUF"
ROPE_FACTORS = "rope_freqs.weight"
REMEDY = "use the model's safetensors"


@dataclass(frozen=True)
class Contents:
    """What a file contains, apart from its weights.

    Attributes:
        metadata: the metadata that are single values, by key.
        types: how each tensor is stored, by name.
        sizes: the number of values of each tensor.
        rope_factors: divisors of the rotary frequencies, None if the file has none.
    """

    metadata: dict[str, Any]
    types: dict[str, GGMLQuantizationType]
    sizes: dict[str, int]
    rope_factors: Tensor | None

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "an unnamed architecture"))

    def value(self, key: str) -> Any:
        """An architecture-specific value, such as ``block_count``; None if the file does not state it."""
        return self.metadata.get(f"{self.architecture}.{key}")


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer.

    Raises:
        UserError: the file is not a complete GGUF file, or the model that transformers makes of it differs from it.
    """
    contents = contents_of(path)
    folder, options = path.parent, {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    with _reading(path), redirect_stderr(StringIO()):  # its progress bar cannot be switched off
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **options, **_unpacked()
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if info["missing_keys"]:
        raise UserError(
            f"{path} lacks {len(info['missing_keys'])} weights ({min(info['missing_keys'])}) of a {type(model).__name__}: "
            f"transformers {transformers.__version__} cannot read this {contents.architecture}; {REMEDY}"
        )
    _check_all_is_used(path, model, contents)
    _check_metadata(path, model.config, contents)
    if contents.rope_factors is not None:
        _divide_frequencies(path, model, contents.rope_factors)
    _forget_quantization(model)
    return model, tokenizer


def gguf_format(path: Path) -> str:
    """How many tensors are stored in which type, such as ``GGUF Q4_K×87 Q6_K×13 F32×109, dequantized to float32``."""
    kinds = Counter(kind.name for kind in contents_of(path).types.values())
    return "GGUF " + " ".join(f"{kind}×{count}" for kind, count in kinds.most_common()) + ", dequantized to float32"


def contents_of(path: Path) -> Contents:
    """What the file contains; UserError if it is not one complete model in types that can be dequantized."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{path} does not begin with GGUF: give a .gguf file, or a directory with safetensors")
    state = path.stat()
    contents = _contents(path, state.st_size, state.st_mtime_ns)
    if (parts := int(contents.metadata.get("split.count", 1))) > 1:
        part = int(contents.metadata.get("split.no", 0)) + 1
        raise UserError(f"{path} is part {part} of {parts}: join them with 'llama-gguf-split --merge FIRST_PART WHOLE'")
    for name, kind in contents.types.items():
        if not can_dequantize(kind):
            raise UserError(f"{path} contains {kind.name} values ({name}), which gguf cannot dequantize: {REMEDY}")
    return contents


@lru_cache(maxsize=2)
def _contents(path: Path, size: int, changed: int) -> Contents:
    """Cached by the file's size and time of change, because a large vocabulary takes seconds to read."""
    with _reading(path):
        reader = GGUFReader(path)
        metadata = {
            key: field.contents()
            for key, field in reader.fields.items()
            if field.types and field.types[0] != GGUFValueType.ARRAY
        }
        types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        factors = next((tensor for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
        values = None if factors is None else torch.from_numpy(dequantize(factors.data, factors.tensor_type).copy())
    return Contents(metadata, types, sizes, values)


@cache
def can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the installed gguf can dequantize this type, tried on one block."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unpacked() -> dict[str, Any]:
    """Options that make newer versions of transformers dequantize, which otherwise keep the blocks if kernels are there."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns the exceptions of a reader on an unusable file into one line for the user."""
    try:
        yield
    except Exception as error:  # the readers raise many kinds; each means that the file is unusable
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        remedy = REMEDY if "support" in reason else f"is it truncated, or of a new architecture? If so, {REMEDY}"
        raise UserError(f"cannot read {path} ({reason}): {remedy}") from error


def _check_all_is_used(path: Path, model: PreTrainedModel, contents: Contents) -> None:
    """UserError unless the model has as many values as the file, without its blocks for multi-token prediction."""
    layers = model.config.get_text_config().num_hidden_layers
    extra = {name for name in contents.sizes if name.startswith("blk.") and int(name.split(".")[1]) >= layers}
    stored = sum(size for name, size in contents.sizes.items() if name not in extra | {ROPE_FACTORS})
    unique = {weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}
    if stored != (used := sum(unique.values())):
        raise UserError(
            f"{path} has {stored} weights, but the {type(model).__name__} that transformers {transformers.__version__} "
            f"loads from it has {used}: {REMEDY}"
        )


def _rope(config: PreTrainedConfig, key: str, default: Any = None) -> Any:
    """A parameter of the rotary positions; where layers differ, that of the layers with full attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("full_attention", parameters).get(key, default)


def _head_width(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _any_of(*names: str) -> Callable[[PreTrainedConfig], Any]:
    return lambda config: next((value for name in names if (value := getattr(config, name, None)) is not None), None)


_EPSILON = _any_of("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
_CONFIG_VALUES: dict[str, Callable[[PreTrainedConfig], Any]] = {
    "block_count": _any_of("num_hidden_layers"),
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.key_length": _head_width,
    "attention.sliding_window": _any_of("sliding_window"),
    "attn_logit_softcapping": _any_of("attn_logit_softcapping"),
    "final_logit_softcapping": _any_of("final_logit_softcapping"),
    "expert_used_count": _any_of("num_experts_per_tok"),
    "rope.freq_base": lambda config: _rope(config, "rope_theta"),
    "rope.dimension_count": lambda config: round(_head_width(config) * _rope(config, "partial_rotary_factor", 1)),
    "rope.scaling.factor": lambda config: _rope(config, "factor", 1),
}
_BY_SIZE = {("gemma2", 46): "query_pre_attn_scalar", ("gemma3", 62): "query_pre_attn_scalar"}
"""Parameters that files do not state and llama.cpp infers from the number of blocks: in the 27B models d_model / heads."""


def _check_metadata(path: Path, config: PreTrainedConfig, contents: Contents) -> None:
    """UserError unless the model's configuration has the values that the metadata state."""
    text = config.get_text_config()
    nextn = contents.value("nextn_predict_layers") or 0
    for key, of_config in _CONFIG_VALUES.items():
        stated, read = contents.value(key), of_config(text)
        if stated is None or read is None or (key == "attention.key_length" and hasattr(text, "global_head_dim")):
            continue
        if key == "block_count":
            stated -= nextn
        if not math.isclose(stated, read, rel_tol=1e-5):
            raise UserError(f"{path} states {key} = {stated:g}, but transformers reads it as {read:g}: {REMEDY}")
    scalar = _BY_SIZE.get((contents.architecture, int(contents.value("block_count") or 0)))
    if scalar and getattr(text, scalar) != (value := text.hidden_size / text.num_attention_heads):
        raise UserError(f"{path} needs {scalar} = {value:g}, but transformers reads {getattr(text, scalar)}: {REMEDY}")


def _divide_frequencies(path: Path, model: PreTrainedModel, factors: Tensor) -> None:
    """Apply Llama 3's scaling of rotary positions, which a file stores as one factor per frequency."""
    rotary = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if not rotary or any(module.inv_freq.shape != factors.shape for module in rotary):
        raise UserError(
            f"{path} has {factors.numel()} {ROPE_FACTORS}, but the model has other rotary frequencies: {REMEDY}"
        )
    for module in rotary:
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(frequencies := getattr(module, name, None), Tensor):
                setattr(module, name, frequencies / factors.to(frequencies))


def _forget_quantization(model: PreTrainedModel) -> None:
    """Remove the traces of quantization, with which ``save_pretrained`` refuses the now dequantized model."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
