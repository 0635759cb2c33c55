"""Checkpoints with quantized weights: how they declare it, and the dequantized state dict.

``config.json`` names a method in ``quantization_config``. The methods in ``READERS`` are supported here, tensor by tensor,
without their packages and on any machine; the others are refused by name. Nothing is guessed: codes without a scale, scales
without codes and shapes that do not fit are refused. The last block of a row or column may be smaller than the others, a
case in which transformers 5.24 dequantizes FP8 with the wrong block size. Scales of activations are ignored: only weights
are dequantized, and activations are not quantized.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from analysis.errors import UserError
from hooks.loading.checkpoint import DTYPE_NAMES, Checkpoint, StoredTensor
from hooks.loading.dequantize import MX_QUANT_BLOCK, e8m0, grid_of, integers, mxfp4, nested_absmax, scaled, table_codes

FP8 = ("F8_E4M3", "F8_E5M2")
CODES = (*FP8, "F8_E8M0", "F4", "I8", "U8", "I16", "U16", "I32", "U32")
OF_ACTIVATIONS = re.compile(r"([._](input|output|activation)|\.[kqv])_(global_)?(scale|zero_point)(_ub)?$")
OF_WEIGHTS = re.compile(r"(scale|scale_inv|zero_point|scales|qzeros|g_idx|absmax|SCB|quant_map|global_scale)$")
REMEDY = "load it with its own library, dequantize it there and save it in bfloat16"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read from its file on access."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = {name: path for path, header in checkpoint.headers.items() for name in header}
        self.stored = checkpoint.tensors

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._path[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path)

    def __len__(self) -> int:
        return len(self._path)


@dataclass(frozen=True)
class Weight:
    """One quantized weight.

    Attributes:
        name: of the parameter in the model.
        parts: names of the tensors that encode it: codes first, then scales.
        decode: computes it from the checkpoint's tensors, in float32.
        kind: its format, for reports.
    """

    name: str
    parts: tuple[str, ...]
    decode: Callable[[Tensors], Tensor]
    kind: str


Reader = Callable[[str, Tensors, dict[str, Any]], Weight | None]
"""From the name of a tensor, the checkpoint and its settings to the weight, if the tensor contains its codes; else None."""


@dataclass(frozen=True)
class Quantized:
    """A checkpoint with quantized weights."""

    checkpoint: Checkpoint
    weights: tuple[Weight, ...]

    @property
    def summary(self) -> str:
        """How the weights are stored, such as ``FP8 (e4m3, 128×128 blocks), dequantized to float32``."""
        kinds = Counter(weight.kind for weight in self.weights)
        return f"{' and '.join(kind for kind, _ in kinds.most_common())}, dequantized to float32"

    def state(self, precision: torch.dtype) -> dict[str, Tensor]:
        """The state dict: every weight dequantized and cast to this precision, by the name of its parameter."""
        tensors, state, used = Tensors(self.checkpoint), {}, set()
        for weight in self.weights:
            state[weight.name] = weight.decode(tensors).to(precision)
            used |= set(weight.parts)
        for name in tensors.keys() - used:
            if not OF_ACTIVATIONS.search(name):
                value = tensors[name]
                state[name] = value.to(precision) if value.is_floating_point() else value
        return state


def quantization_in(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization settings in a config.json, which may be nested in it; None if there are none."""
    for section in (config, config.get("text_config") or {}, config.get("llm_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if section.get(key):
                return dict(section[key])
    return None


def read_quantized(directory: Path, checkpoint: Checkpoint) -> Quantized | None:
    """The quantized checkpoint of a directory, None if its weights are not quantized.

    Raises:
        UserError: config.json is unreadable, the method is not supported, or the tensors do not fit it.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        settings = quantization_in(config)
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{directory / 'config.json'} is not a configuration ({error}): download it again") from error
    if settings is None:
        _refuse_codes(directory, checkpoint.tensors)
        return None
    method = readable_method(settings, str(directory))
    try:
        return Quantized(checkpoint, _weights(method, Tensors(checkpoint), settings))
    except UnsupportedError as error:
        raise UserError(f"{directory} is quantized with {method}, but {error}: {REMEDY}") from error


def readable_method(settings: dict[str, Any], name: str) -> str:
    """The method that a quantization_config names; UserError if it is not in ``READERS``."""
    method = str(settings.get("quant_method") or _unnamed(settings))
    if method not in READERS:
        raise UserError(f"{name} is quantized with {method}, which is not supported: {REMEDY}")
    return method


class UnsupportedError(Exception):
    """What in a quantized checkpoint contradicts its method, or is not supported."""


def _unnamed(settings: dict[str, Any]) -> str:
    """The method of old files, which do not name it."""
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in settings else "an unnamed method"


def _refuse_codes(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """UserError if a checkpoint without quantization settings contains codes."""
    for name, stored in tensors.items():
        if _is_codes(stored):
            kind = DTYPE_NAMES.get(stored.dtype, stored.dtype)
            raise UserError(
                f"{directory} contains {kind} values ({name}), but its config.json has no quantization_config for them: "
                f"{REMEDY}"
            )


def _is_codes(stored: StoredTensor) -> bool:
    """Whether a tensor can be the codes of a weight, unlike masks (4-D), counters and positions."""
    return stored.dtype in CODES and len(stored.shape) in (2, 3) and min(stored.shape[-2:]) > 1


def _weights(method: str, tensors: Tensors, settings: dict[str, Any]) -> tuple[Weight, ...]:
    """Every quantized weight; UnsupportedError if there are codes or scales that belong to none."""
    weights = tuple(weight for name in tensors if (weight := READERS[method](name, tensors, settings)) is not None)
    if not weights:
        raise UnsupportedError("none of its tensors is")
    names = Counter(weight.name for weight in weights)
    if twice := [name for name, count in names.items() if count > 1]:
        raise UnsupportedError(f"it contains {twice[0]} twice")
    used = {part for weight in weights for part in weight.parts}
    for name in tensors:
        if name in used or OF_ACTIVATIONS.search(name):
            continue
        stored = tensors.stored[name]
        if _is_codes(stored):
            raise UnsupportedError(f"the meaning of {name} ({DTYPE_NAMES.get(stored.dtype, stored.dtype)}) is unknown")
        if OF_WEIGHTS.search(name) and any(name.startswith(weight.name.removesuffix("weight")) for weight in weights):
            raise UnsupportedError(f"the purpose of {name} is unknown")
    return weights


def _one_of(candidates: list[str], tensors: Tensors, name: str) -> str:
    """The only candidate that the checkpoint contains."""
    present = [candidate for candidate in dict.fromkeys(candidates) if candidate in tensors]
    if len(present) != 1:
        raise UnsupportedError(f"{name} has {len(present)} scales, expected one")
    return present[0]


def _stem(name: str) -> str:
    """The prefix of the names of scales: ``…q_proj.`` of ``…q_proj.weight``, for fused experts the whole name and a dot."""
    return name.removesuffix("weight") if name.endswith(".weight") else f"{name}."


def _sharing(scale: StoredTensor, codes: StoredTensor, block: tuple[int, int] | None) -> str:
    """Which weights share a scale, in words; UnsupportedError if the shapes do not determine it."""
    if all(size == 1 for size in scale.shape):
        return "one scale a tensor"
    if block is not None and scale.shape == grid_of(codes.shape, block):
        return f"{block[0]}×{block[1]} blocks" if block[0] > 1 else f"blocks of {block[1]}"
    if scale.shape in (codes.shape[:-1], (*codes.shape[:-1], 1)):
        return "one scale a row"
    if scale.shape == (*codes.shape[:-2], 1, 1):
        return "one scale an expert"
    grid = "" if block is None else f" in blocks of {block[0]}×{block[1]}"
    raise UnsupportedError(f"{list(scale.shape)} scales do not fit {list(codes.shape)} weights{grid}")


def _as_scale(stored: StoredTensor, scale: Tensor) -> Tensor:
    """Scales in float32; those stored as bytes are exponents of two."""
    if stored.dtype in ("U8", "F8_E8M0"):
        return e8m0(scale.view(torch.uint8))
    return scale.float()


def _fp8(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """FP8 codes and their scales; the scale multiplies, whether it is called ``weight_scale_inv`` or ``weight_scale``."""
    codes = tensors.stored[name]
    if codes.dtype not in FP8:
        return None
    stem, block = _stem(name), settings.get("weight_block_size")
    names = [f"{name}_scale_inv", f"{name}_scale", f"{stem}scale", f"{stem}scale_inv", f"{stem}qscale_weight"]
    scale = _one_of(names, tensors, name)
    shape = None if block is None else (int(block[0]), int(block[1]))
    return _scaled_weight(name, name, scale, tensors, shape, f"FP8 ({codes.dtype[3:].lower()}, {{}})")


def _scaled_weight(name: str, codes: str, scale: str, tensors: Tensors, block: tuple[int, int] | None, kind: str) -> Weight:
    """A weight code × scale, with codes that torch can convert to float."""
    stored = tensors.stored[scale]
    sharing = _sharing(stored, tensors.stored[codes], block)

    def decode(tensors: Tensors) -> Tensor:
        return scaled(tensors[codes].float(), _as_scale(stored, tensors[scale]), block)

    return Weight(name, (codes, scale), decode, kind.format(sharing))


def _mxfp4(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """The experts of gpt-oss: ``…_blocks`` and ``…_scales``."""
    if not name.endswith("_blocks"):
        return None
    weight = name.removesuffix("_blocks")
    scale = _one_of([f"{weight}_scales"], tensors, name)
    shape, scales = tensors.stored[name].shape, tensors.stored[scale].shape
    if len(shape) != 4 or shape[-1] != MX_QUANT_BLOCK // 2 or scales != shape[:-1]:
        raise UnsupportedError(f"{list(scales)} scales do not fit {list(shape)} blocks of {name}")
    return Weight(
        weight,
        (name, scale),
        lambda tensors: mxfp4(tensors[name], tensors[scale]),
        f"MXFP4 (4-bit, blocks of {MX_QUANT_BLOCK})",
    )


def _bitsandbytes(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """8 bits: codes, and the largest magnitude of each row, ``SCB``; 4 bits: indices into a table, scaled per block."""
    codes, stem = tensors.stored[name], _stem(name)
    if not name.endswith(".weight") or codes.dtype not in ("I8", "U8"):
        return None
    if codes.dtype == "I8":
        scale = _one_of([f"{stem}SCB"], tensors, name)
        parts = (name, scale, *(part for part in (f"{stem}weight_format",) if part in tensors))
        return Weight(name, parts, lambda tensors: _int8(tensors, name, scale), "bitsandbytes int8 (one scale a row)")
    state = _one_of([part for part in tensors if part.startswith(f"{name}.quant_state.")], tensors, name)
    quant_state = json.loads(bytes(tensors[state].tolist()))
    if quant_state["quant_type"] not in ("nf4", "fp4"):
        raise UnsupportedError(f"the table {quant_state['quant_type']} of {name} is unknown")
    parts = tuple(part for part in tensors if part == name or part.startswith(f"{name}."))
    kind = f"bitsandbytes {quant_state['quant_type'].upper()} (4-bit, blocks of {quant_state['blocksize']})"
    return Weight(name, parts, lambda tensors: _four_bits(tensors, name, quant_state), kind)


def _int8(tensors: Tensors, name: str, scale: str) -> Tensor:
    layout = f"{_stem(name)}weight_format"
    if layout in tensors and int(tensors[layout].item()) != 0:
        raise UserError(f"{name} is int8 in GPU layout {int(tensors[layout].item())}, not in row-major order: {REMEDY}")
    return tensors[name].float() * (tensors[scale].float() / 127)[:, None]


def _four_bits(tensors: Tensors, name: str, quant_state: dict[str, Any]) -> Tensor:
    absmax = tensors[f"{name}.absmax"]
    if f"{name}.nested_absmax" in tensors:
        nested = tensors[f"{name}.nested_quant_map"].float(), tensors[f"{name}.nested_absmax"].float()
        absmax = nested_absmax(absmax, *nested, quant_state["nested_blocksize"], quant_state["nested_offset"])
    table = tensors[f"{name}.quant_map"].float()
    return table_codes(tensors[name], table, absmax.float(), quant_state["blocksize"], quant_state["shape"])


def _compressed(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """compressed-tensors: FP8 or int8 ``weight``, or ``weight_packed`` words; ``weight_scale``, ``weight_zero_point``."""
    if settings.get("sparsity_config"):
        raise UnsupportedError("its weights are stored in a sparse format, which is not supported")
    codes = tensors.stored[name]
    packed = name.endswith(".weight_packed")
    if not packed and codes.dtype not in (*FP8, "I8"):
        return None
    weight = name.removesuffix("_packed")
    rule = _rule_of(settings, packed)
    scale, zero = _one_of([f"{weight}_scale"], tensors, name), f"{weight}_zero_point"
    if f"{weight}_g_idx" in tensors:
        raise UnsupportedError(f"the columns of {weight} are reordered (weight_g_idx), which is not supported")
    block = _quant_block_of(rule)
    if not packed:
        kind = f"FP8 ({codes.dtype[3:].lower()}, {{}})" if codes.dtype in FP8 else "int8 ({})"
        if zero not in tensors:
            return _scaled_weight(weight, name, scale, tensors, block, kind)
        return _shifted_weight(weight, (name, scale, zero), tensors, block, None, kind)
    if codes.dtype != "I32" or rule.get("num_bits") not in (4, 8):
        raise UnsupportedError(f"{rule.get('num_bits')}-bit values in {codes.dtype} ({name}) are not supported")
    parts = (name, scale, f"{weight}_shape", *((zero,) if zero in tensors else ()))
    return _shifted_weight(weight, parts, tensors, block, int(rule["num_bits"]), f"int{rule['num_bits']} ({{}})")


def _rule_of(settings: dict[str, Any], packed: bool) -> dict[str, Any]:
    """How weights are quantized; UnsupportedError if that differs between groups of layers."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    keys = ("num_bits", "group_size", "block_structure") if packed else ("group_size", "block_structure")
    rules = {json.dumps([group.get(key) for key in keys]) for group in groups}
    if len(rules) != 1:
        raise UnsupportedError(f"it has {len(rules)} rules for its layers, expected one for all")
    return groups[0]


def _quant_block_of(rule: dict[str, Any]) -> tuple[int, int] | None:
    if rule.get("block_structure"):
        rows, cols = rule["block_structure"]
        return int(rows), int(cols)
    size = rule.get("group_size")
    return (1, int(size)) if size and int(size) > 0 else None


def _shifted_weight(
    weight: str, parts: tuple[str, ...], tensors: Tensors, block: tuple[int, int] | None, bits: int | None, kind: str
) -> Weight:
    """A weight (codes − zero point) × scale; with ``bits``, codes and zero points are packed into words."""
    codes, scale = parts[0], parts[1]
    zero = next((part for part in parts if part.endswith("_zero_point")), None)
    shape = tensors.stored[codes].shape if bits is None else tuple(tensors[f"{weight}_shape"].tolist())
    sharing = _sharing(tensors.stored[scale], StoredTensor("F32", shape), block)

    def decode(tensors: Tensors) -> Tensor:
        values = tensors[codes].float() if bits is None else integers(tensors[codes], bits, shape[1])
        if zero is not None:
            shift = tensors[zero]
            shift = shift.float() if bits is None else integers(shift.T.contiguous(), bits, shape[0]).T
            values = values - scaled(torch.ones_like(values), shift, block)
        return scaled(values, tensors[scale].float(), block)

    return Weight(weight, parts, decode, kind.format(sharing))


READERS: dict[str, Reader] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
}
