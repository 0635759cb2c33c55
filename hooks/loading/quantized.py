"""Checkpoints with quantized weights: what they say of themselves, and the plain state of a model made from them.

``config.json`` names a method in ``quantization_config``. The methods in ``READERS`` are read here, tensor by tensor,
without their packages and on any machine; the others are refused by name. Nothing is guessed: codes without a scale, scales
that belong to no codes and shapes that do not fit are refused. A last block may be cut short, which transformers 5.24 does
not know of when it dequantizes FP8: it then takes smaller blocks. Scales of activations are left out: weights are
dequantized, and activations are not quantized.
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
from hooks.loading.checkpoint import DTYPE_NAMES, Checkpoint, Stored
from hooks.loading.dequantize import MX_QUANT_BLOCK, e8m0, grid_of, integers, mxfp4, nested_absmax, scaled, table_codes

FP8 = ("F8_E4M3", "F8_E5M2")
CODES = (*FP8, "F8_E8M0", "F4", "I8", "U8", "I16", "U16", "I32", "U32")
OF_ACTIVATIONS = re.compile(r"([._](input|output|activation)|\.[kqv])_(global_)?(scale|zero_point)(_ub)?$")
OF_WEIGHTS = re.compile(r"(scale|scale_inv|zero_point|scales|qzeros|g_idx|absmax|SCB|quant_map|global_scale)$")
REMEDY = "load it with its own library, dequantize it there and save it in bfloat16"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each read from its file when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._place = {name: path for path, header in checkpoint.headers.items() for name in header}
        self.stored = checkpoint.tensors

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._place[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


@dataclass(frozen=True)
class Weight:
    """One quantized weight: the name it has in the model, the tensors that make it, how, and what a report says of it."""

    name: str
    parts: tuple[str, ...]
    decode: Callable[[Tensors], Tensor]
    kind: str


Reader = Callable[[str, Tensors, dict[str, Any]], Weight | None]
"""From a tensor's name, if it holds codes, to the weight that it makes; None for a tensor that is plain."""


@dataclass(frozen=True)
class Quantized:
    """A checkpoint whose weights are dequantized when they are read."""

    checkpoint: Checkpoint
    weights: tuple[Weight, ...]

    @property
    def summary(self) -> str:
        """As in ``FP8 (e4m3, 128×128 blocks), dequantized to float32``."""
        kinds = Counter(weight.kind for weight in self.weights)
        return f"{' and '.join(kind for kind, _ in kinds.most_common())}, dequantized to float32"

    def state(self, precision: torch.dtype) -> dict[str, Tensor]:
        """Every weight in this precision, by the name that it would have in a checkpoint that is not quantized."""
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
    """What a config.json says of the weights' quantization, wherever it says it."""
    for place in (config, config.get("text_config") or {}, config.get("llm_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if place.get(key):
                return dict(place[key])
    return None


def read_quantized(directory: Path, checkpoint: Checkpoint) -> Quantized | None:
    """The checkpoint as one to be dequantized, None if its weights are plain; UserError if they are neither."""
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
    except NotReadError as error:
        raise UserError(f"{directory} is quantized with {method}, but {error}: {REMEDY}") from error


def readable_method(settings: dict[str, Any], name: str) -> str:
    """The method that a quantization_config names; UserError if it is not one of those that are read here."""
    method = str(settings.get("quant_method") or _unnamed(settings))
    if method not in READERS:
        raise UserError(f"{name} is quantized with {method}, which is not read here: {REMEDY}")
    return method


class NotReadError(Exception):
    """What about a quantized checkpoint is not as its method says, or not read."""


def _unnamed(settings: dict[str, Any]) -> str:
    """Old files do not name their method."""
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in settings else "an unnamed method"


def _refuse_codes(directory: Path, tensors: Mapping[str, Stored]) -> None:
    """A checkpoint that is not said to be quantized must not hold codes."""
    for name, stored in tensors.items():
        if _is_codes(stored):
            kind = DTYPE_NAMES.get(stored.dtype, stored.dtype)
            raise UserError(
                f"{directory} holds {kind} numbers ({name}) and its config.json has no quantization_config that says what "
                f"they mean: {REMEDY}"
            )


def _is_codes(stored: Stored) -> bool:
    """Whether a tensor can be a weight's codes; masks (4-D), counters and positions are not."""
    return stored.dtype in CODES and len(stored.shape) in (2, 3) and min(stored.shape[-2:]) > 1


def _weights(method: str, tensors: Tensors, settings: dict[str, Any]) -> tuple[Weight, ...]:
    """Every quantized weight; NotReadError if codes or scales remain that belong to none."""
    found = tuple(weight for name in tensors if (weight := READERS[method](name, tensors, settings)) is not None)
    if not found:
        raise NotReadError("no tensor of it is")
    names = Counter(weight.name for weight in found)
    if twice := [name for name, count in names.items() if count > 1]:
        raise NotReadError(f"{twice[0]} is there twice")
    used = {part for weight in found for part in weight.parts}
    for name in tensors:
        if name in used or OF_ACTIVATIONS.search(name):
            continue
        stored = tensors.stored[name]
        if _is_codes(stored):
            raise NotReadError(f"what {name} means ({DTYPE_NAMES.get(stored.dtype, stored.dtype)}) is not known")
        if OF_WEIGHTS.search(name) and any(name.startswith(weight.name.removesuffix("weight")) for weight in found):
            raise NotReadError(f"what {name} is for is not known")
    return found


def _one_of(candidates: list[str], tensors: Tensors, name: str) -> str:
    """The one scale that is there."""
    present = [candidate for candidate in dict.fromkeys(candidates) if candidate in tensors]
    if len(present) != 1:
        raise NotReadError(f"{name} has {len(present)} scales, expected one")
    return present[0]


def _stem(name: str) -> str:
    """``…q_proj.`` of ``…q_proj.weight``; scales of fused experts are named after the whole name."""
    return name.removesuffix("weight") if name.endswith(".weight") else f"{name}."


def _sharing(scale: Stored, codes: Stored, block: tuple[int, int] | None) -> str:
    """Which weights share a scale, in words; NotReadError if the shapes do not say."""
    if all(size == 1 for size in scale.shape):
        return "one scale a tensor"
    if block is not None and scale.shape == grid_of(codes.shape, block):
        return f"{block[0]}×{block[1]} blocks" if block[0] > 1 else f"blocks of {block[1]}"
    if scale.shape in (codes.shape[:-1], (*codes.shape[:-1], 1)):
        return "one scale a row"
    if scale.shape == (*codes.shape[:-2], 1, 1):
        return "one scale an expert"
    grid = "" if block is None else f" in blocks of {block[0]}×{block[1]}"
    raise NotReadError(f"{list(scale.shape)} scales do not fit {list(codes.shape)} weights{grid}")


def _as_scale(stored: Stored, scale: Tensor) -> Tensor:
    """Scales as float32; those in bytes are powers of two."""
    if stored.dtype in ("U8", "F8_E8M0"):
        return e8m0(scale.view(torch.uint8))
    return scale.float()


def _fp8(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """FP8 codes and their scales, which multiply whatever they are called: ``weight_scale_inv``, ``weight_scale``."""
    codes = tensors.stored[name]
    if codes.dtype not in FP8:
        return None
    stem, block = _stem(name), settings.get("weight_block_size")
    names = [f"{name}_scale_inv", f"{name}_scale", f"{stem}scale", f"{stem}scale_inv", f"{stem}qscale_weight"]
    place = _one_of(names, tensors, name)
    shape = None if block is None else (int(block[0]), int(block[1]))
    return _scaled_weight(name, name, place, tensors, shape, f"FP8 ({codes.dtype[3:].lower()}, {{}})")


def _scaled_weight(name: str, codes: str, scale: str, tensors: Tensors, block: tuple[int, int] | None, kind: str) -> Weight:
    """A weight whose codes are numbers as they stand."""
    stored = tensors.stored[scale]
    sharing = _sharing(stored, tensors.stored[codes], block)

    def decode(tensors: Tensors) -> Tensor:
        return scaled(tensors[codes].float(), _as_scale(stored, tensors[scale]), block)

    return Weight(name, (codes, scale), decode, kind.format(sharing))


def _mxfp4(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """The experts of gpt-oss: ``…_blocks`` and ``…_scales``."""
    if not name.endswith("_blocks"):
        return None
    plain = name.removesuffix("_blocks")
    scale = _one_of([f"{plain}_scales"], tensors, name)
    shape, scales = tensors.stored[name].shape, tensors.stored[scale].shape
    if len(shape) != 4 or shape[-1] != MX_QUANT_BLOCK // 2 or scales != shape[:-1]:
        raise NotReadError(f"{list(scales)} scales do not fit {list(shape)} blocks of {name}")
    return Weight(
        plain,
        (name, scale),
        lambda tensors: mxfp4(tensors[name], tensors[scale]),
        f"MXFP4 (4-bit, blocks of {MX_QUANT_BLOCK})",
    )


def _bitsandbytes(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """8 bits: codes, and each row's largest magnitude ``SCB``; 4 bits: indices into a table, scaled by blocks."""
    codes, stem = tensors.stored[name], _stem(name)
    if not name.endswith(".weight") or codes.dtype not in ("I8", "U8"):
        return None
    if codes.dtype == "I8":
        scale = _one_of([f"{stem}SCB"], tensors, name)
        parts = (name, scale, *(part for part in (f"{stem}weight_format",) if part in tensors))
        return Weight(name, parts, lambda tensors: _int8(tensors, name, scale), "bitsandbytes int8 (one scale a row)")
    state = _one_of([part for part in tensors if part.startswith(f"{name}.quant_state.")], tensors, name)
    facts = json.loads(bytes(tensors[state].tolist()))
    if facts["quant_type"] not in ("nf4", "fp4"):
        raise NotReadError(f"the table {facts['quant_type']} of {name} is not known")
    parts = tuple(part for part in tensors if part == name or part.startswith(f"{name}."))
    kind = f"bitsandbytes {facts['quant_type'].upper()} (4-bit, blocks of {facts['blocksize']})"
    return Weight(name, parts, lambda tensors: _four_bits(tensors, name, facts), kind)


def _int8(tensors: Tensors, name: str, scale: str) -> Tensor:
    form = f"{_stem(name)}weight_format"
    if form in tensors and int(tensors[form].item()) != 0:
        raise UserError(f"{name} is int8 in the layout {int(tensors[form].item())} of a GPU, not by rows: {REMEDY}")
    return tensors[name].float() * (tensors[scale].float() / 127)[:, None]


def _four_bits(tensors: Tensors, name: str, facts: dict[str, Any]) -> Tensor:
    absmax = tensors[f"{name}.absmax"]
    if f"{name}.nested_absmax" in tensors:
        nested = tensors[f"{name}.nested_quant_map"].float(), tensors[f"{name}.nested_absmax"].float()
        absmax = nested_absmax(absmax, *nested, facts["nested_blocksize"], facts["nested_offset"])
    table = tensors[f"{name}.quant_map"].float()
    return table_codes(tensors[name], table, absmax.float(), facts["blocksize"], facts["shape"])


def _compressed(name: str, tensors: Tensors, settings: dict[str, Any]) -> Weight | None:
    """compressed-tensors: FP8 or int8 ``weight``, or ``weight_packed`` words; ``weight_scale``, ``weight_zero_point``."""
    if settings.get("sparsity_config"):
        raise NotReadError("its weights are stored as sparse ones, which are not read here")
    codes = tensors.stored[name]
    packed = name.endswith(".weight_packed")
    if not packed and codes.dtype not in (*FP8, "I8"):
        return None
    weight = name.removesuffix("_packed")
    rule = _rule_of(settings, packed)
    scale, zero = _one_of([f"{weight}_scale"], tensors, name), f"{weight}_zero_point"
    if f"{weight}_g_idx" in tensors:
        raise NotReadError(f"the columns of {weight} are reordered (weight_g_idx), which is not read here")
    block = _quant_block_of(rule)
    if not packed:
        kind = f"FP8 ({codes.dtype[3:].lower()}, {{}})" if codes.dtype in FP8 else "int8 ({})"
        if zero not in tensors:
            return _scaled_weight(weight, name, scale, tensors, block, kind)
        return _shifted_weight(weight, (name, scale, zero), tensors, block, None, kind)
    if codes.dtype != "I32" or rule.get("num_bits") not in (4, 8):
        raise NotReadError(f"{rule.get('num_bits')}-bit numbers in {codes.dtype} ({name}) are not read here")
    parts = (name, scale, f"{weight}_shape", *((zero,) if zero in tensors else ()))
    return _shifted_weight(weight, parts, tensors, block, int(rule["num_bits"]), f"int{rule['num_bits']} ({{}})")


def _rule_of(settings: dict[str, Any], packed: bool) -> dict[str, Any]:
    """How weights are quantized, the same in every group of layers."""
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    keys = ("num_bits", "group_size", "block_structure") if packed else ("group_size", "block_structure")
    rules = {json.dumps([group.get(key) for key in keys]) for group in groups}
    if len(rules) != 1:
        raise NotReadError(f"it has {len(rules)} rules for its layers, expected one for all")
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
    """(codes − zero point) × scale; with ``bits``, codes and zero points are packed into words."""
    codes, scale = parts[0], parts[1]
    zero = next((part for part in parts if part.endswith("_zero_point")), None)
    shape = tensors.stored[codes].shape if bits is None else tuple(tensors[f"{weight}_shape"].tolist())
    sharing = _sharing(tensors.stored[scale], Stored("F32", shape), block)

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
