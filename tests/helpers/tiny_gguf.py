"""Tiny GGUF files: a model of transformers written as llama.cpp's converters write it, in any type of tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from torch import Tensor, nn
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from tests.helpers.tiny import train_tokenizer

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]]
ARCHITECTURES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
FLOATS = {
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.I32: np.int32,
}


def plain(_: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    return values.astype(np.float32), GGMLQuantizationType.F32


def valid_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    """Random bytes that are blocks of finite numbers."""
    rng, bytes_of = np.random.default_rng(seed), quants.quant_shape_to_byte_shape(shape, kind)
    size = quants.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (int(np.prod(bytes_of)) // size, size), dtype=np.uint8)
    if kind == GGMLQuantizationType.NVFP4:
        blocks[:, :4] &= 127  # scales without a sign
    with np.errstate(all="ignore"):
        while not (good := np.isfinite(quants.dequantize(blocks, kind)).all(axis=1)).all():
            blocks[~good] = rng.integers(0, 256, ((~good).sum(), size), dtype=np.uint8)
    return blocks.reshape(bytes_of)


def encoding(kind: GGMLQuantizationType) -> Encode:
    """Matrices in that type: quantized where gguf can, random valid blocks where it cannot; vectors in float32."""

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        if values.ndim < 2:
            return plain(name, values)
        if kind in FLOATS:
            return values.astype(FLOATS[kind]), kind
        try:
            return quants.quantize(values.astype(np.float32), kind), kind
        except NotImplementedError:
            return valid_blocks(values.shape, kind, len(name)), kind

    return encode


def llama_order(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection with the halves of each head interleaved, as llama.cpp rotates them."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gguf_tensors(model: nn.Module, architecture: str) -> dict[str, Tensor]:
    """The model's weights under their GGUF names, changed as that architecture's converter changes them."""
    config, tensors = model.config, {}
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture.startswith("gemma") and "norm" in name:
            weight = weight + 1
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = llama_order(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = half
            continue
        stem, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, ".", "weight")
        found = names.get_name(stem)
        assert found is not None, name
        tensors[found + dot + suffix] = weight.squeeze(0) if "shared_expert_gate" in name else weight
    return tensors


def write_gguf(
    path: Path,
    model: nn.Module,
    architecture: str,
    encode: Encode = plain,
    extra: dict[str, Any] | None = None,
    **split: int,
) -> dict[str, np.ndarray]:
    """Write the file, and give its tensors as they were encoded, by GGUF name; extra tensors or metadata are added."""
    writer = GGUFWriter(path, architecture, **split)
    config = model.config
    for key, attribute in GGUF_CONFIG_MAPPING[ARCHITECTURES.get(architecture, architecture)].items():
        rope = getattr(config, "rope_parameters", {})
        rope = rope.get("full_attention", rope)
        value = rope.get("rope_theta") if attribute == "rope_theta" else getattr(config, attribute or "", None)
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    _add_tokenizer(writer, config.vocab_size)
    written = {}
    for name, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_tensor(name, value)
    for name, weight in gguf_tensors(model, architecture).items():
        data, kind = encode(name, weight.float().numpy())
        written[name] = data
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _add_tokenizer(writer: GGUFWriter, size: int) -> None:
    state = json.loads(train_tokenizer(size).to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<pad>", "<bos>", "<eos>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that gates are far from linear; norms away from one, and every bias away from zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else 0.15
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()
