"""GGUF files: every type of tensor and every family gives the weights that are in the file, or is refused."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
)
from transformers.integrations.gguf import dequant

from analysis.errors import UserError
from hooks.loading.gguf import can_dequantize, load_gguf
from hooks.loading.sources import locate
from hooks.models import load_model
from tests.helpers.families import grid
from tests.helpers.tiny import SHAPE
from tests.helpers.tiny_gguf import encoding, llama_order, plain, randomize, write_gguf

TYPES = [kind for kind in GGMLQuantizationType if can_dequantize(kind)]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def signed(nibble: int) -> float:
    return E2M1[nibble & 7] * (-1 if nibble & 8 else 1)


def half(data: bytes) -> float:
    return struct.unpack("<e", data)[0]


def five_bits(block: bytes, start: int) -> list[int]:
    """32 numbers of 4 bits, low nibbles first, and one word with the fifth bit of each."""
    (high,) = struct.unpack("<I", block[start : start + 4])
    low = [byte & 15 for byte in block[start + 4 :]] + [byte >> 4 for byte in block[start + 4 :]]
    return [value | (high >> place & 1) << 4 for place, value in enumerate(low)]


def ternary(block: bytes) -> list[float]:
    """Base-3 digits, five a byte, in a fixed-point form in which the first digit is the largest."""
    digits = []
    for start, stop, places in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        digits += [((block[i] * 3**n % 256) * 3 >> 8) - 1 for n in range(places) for i in range(start, stop)]
    return [half(block[52:]) * digit for digit in digits]


def two_bits(block: bytes) -> list[float]:
    groups = [(block[i] >> shift & 3) - 1 for start in (0, 32) for shift in (0, 2, 4, 6) for i in range(start, start + 32)]
    return [half(block[64:]) * digit for digit in groups]


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return 0.0  # as ggml reads the code that would be NaN
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nvfp4(block: bytes) -> list[float]:
    """Four scales in FP8, then four groups of 16 numbers in FP4, low nibbles first."""
    values = []
    for group in range(4):
        part = block[4 + 8 * group : 12 + 8 * group]
        values += [e4m3(block[group]) * signed(n) for n in [b & 15 for b in part] + [b >> 4 for b in part]]
    return values


BLOCKS: dict[str, Callable[[bytes], list[float]]] = {
    "F32": lambda b: list(struct.unpack("<f", b)),
    "F16": lambda b: [half(b)],
    "BF16": lambda b: list(struct.unpack("<f", b"\0\0" + b)),
    "Q5_0": lambda b: [half(b[:2]) * (value - 16) for value in five_bits(b, 2)],
    "Q5_1": lambda b: [half(b[:2]) * value + half(b[2:4]) for value in five_bits(b, 4)],
    "TQ1_0": ternary,
    "TQ2_0": two_bits,
    "MXFP4": lambda b: [2.0 ** (b[0] - 127) * signed(n) for n in [x & 15 for x in b[1:]] + [x >> 4 for x in b[1:]]],
    "NVFP4": nvfp4,
}
"""Plain loops over one block's bytes, for the types that transformers has no code of its own for."""


def independently(data: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """The tensor's values by other code than the loader's: loops, or transformers' own functions for packed models."""
    raw = np.ascontiguousarray(data).view(np.uint8)
    shape = quants.quant_shape_from_byte_shape(raw.shape, kind)
    if kind.name not in BLOCKS:
        return dequant.dequantize(torch.from_numpy(raw.copy()).flatten(), int(kind)).reshape(shape)
    size = quants.GGML_QUANT_SIZES[kind][1]
    blocks = raw.reshape(-1, size)
    return torch.tensor([BLOCKS[kind.name](block.tobytes()) for block in blocks], dtype=torch.float64).reshape(shape)


SOME_TYPES = [
    getattr(GGMLQuantizationType, name) for name in ("F16", "BF16", "Q8_0", "Q4_K", "Q6_K", "IQ1_M", "IQ4_XS", "MXFP4")
]


@pytest.fixture(scope="module")
def wide() -> torch.nn.Module:
    torch.manual_seed(0)
    return randomize(AutoModelForCausalLM.from_config(LlamaConfig(**WIDE)))


def test_there_is_no_type_without_a_second_opinion() -> None:
    named = {kind.name for kind in TYPES}
    assert named - set(BLOCKS) <= set(dequant.GGML_NAME.values())
    assert len(TYPES) >= 26, named
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "IQ1_M", "IQ4_XS", "TQ1_0", "MXFP4", "NVFP4"} <= named


@pytest.mark.parametrize("kind", grid(TYPES, SOME_TYPES), ids=lambda kind: kind.name)
def test_every_type(kind: GGMLQuantizationType, wide: torch.nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, wide, "llama", encoding(kind))
    model, _ = load_gguf(path)
    weights = model.state_dict()
    for name, place in {
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
    }.items():
        expected = independently(written[place], kind).double()
        torch.testing.assert_close(
            weights[name].double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()), msg=name
        )
    rotated = llama_order(weights["model.layers.0.self_attn.q_proj.weight"], 4).double()
    expected = independently(written["blk.0.attn_q.weight"], kind).double()
    torch.testing.assert_close(rotated, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    assert weights["lm_head.weight"].dtype == torch.float32
    said = locate(str(path), None, trust_remote_code=False).weights_format
    matrices, vectors = 9, 3
    if kind.name == "F32":
        assert said == f"GGUF F32×{matrices + vectors}, dequantized to float32"
    else:
        assert said == f"GGUF {kind.name}×{matrices} F32×{vectors}, dequantized to float32"


MOE: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, **ROPE, rms_norm_eps=1e-3),
    "qwen2": Qwen2Config(**SHAPE, **ROPE, rms_norm_eps=1e-3),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 128}, **ROPE),
    "gemma2": Gemma2Config(**SHAPE, **ROPE),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=16),
    "phi3": Phi3Config(**SHAPE, **ROPE),
    "stablelm": StableLmConfig(**SHAPE),
    "qwen2moe": Qwen2MoeConfig(**SHAPE, **MOE, moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "qwen3moe": Qwen3MoeConfig(**SHAPE, **MOE, moe_intermediate_size=768, norm_topk_prob=True),
}


def random_model(config: PreTrainedConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    return randomize(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_loads_as_the_model_it_was(architecture: str, tmp_path: Path) -> None:
    """Same weights and same logits, so the same rotary positions, norms, experts and halves."""
    model = random_model(FAMILIES[architecture])
    write_gguf(tmp_path / "model.gguf", model, architecture)
    again, tokenizer = load_gguf(tmp_path / "model.gguf")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=2e-7, msg=name)
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    assert tokenizer.decode(tokenizer("the gate").input_ids) == "the gate"


def test_tied_and_untied_embeddings(tmp_path: Path) -> None:
    for tied in (False, True):
        model = random_model(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
        write_gguf(tmp_path / "model.gguf", model, "llama")
        again, _ = load_gguf(tmp_path / "model.gguf")
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_the_scaling_of_rotary_positions_that_is_a_tensor(tmp_path: Path) -> None:
    """Llama 3's: the file has a factor for every frequency, where config.json has the rule for them."""
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule |= {"original_max_position_embeddings": 32, "rope_theta": 5000.0}
    model = random_model(LlamaConfig(**SHAPE, rope_parameters=rule))
    unscaled = random_model(LlamaConfig(**SHAPE, **ROPE))
    factors = unscaled.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert float(factors.max()) == pytest.approx(8)
    write_gguf(tmp_path / "model.gguf", model, "llama", extra={"rope_freqs.weight": factors.numpy()})
    again, _ = load_gguf(tmp_path / "model.gguf")
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    write_gguf(tmp_path / "other.gguf", model, "llama", extra={"rope_freqs.weight": factors.numpy()[:3]})
    assert "has 3 rope_freqs.weight, but the model has other rotary frequencies" in refused(tmp_path / "other.gguf")


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "extra", "complaint"),
    [
        (
            "stablelm",
            {"stablelm.rope.freq_base": 5000.0},
            "states rope.freq_base = 5000, but transformers reads it as 10000",
        ),
        ("llama", {"llama.rope.scaling.factor": 4.0}, "states rope.scaling.factor = 4, but transformers reads it as 1"),
        ("llama", {"llama.attention.key_length": 16}, "states attention.key_length = 16, but transformers reads it as 8"),
        ("gemma2", {"gemma2.attn_logit_softcapping": 20.0}, "states attn_logit_softcapping = 20"),
        ("phi3", {"phi3.rope.dimension_count": 4}, "states rope.dimension_count = 4, but transformers reads it as 8"),
        ("llama", {"extra.weight": np.ones(5, np.float32)}, "has 43749 weights, but the LlamaForCausalLM"),
    ],
)
def test_what_transformers_leaves_out_of_a_file(
    architecture: str, extra: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    config = LlamaConfig(**SHAPE) if architecture == "llama" else FAMILIES[architecture]
    write_gguf(tmp_path / "model.gguf", random_model(config), architecture, extra=extra)
    assert complaint in refused(tmp_path / "model.gguf")


@pytest.mark.exhaustive  # 46 layers: 20 seconds
def test_a_size_from_which_llama_cpp_knows_the_scale_of_attention(tmp_path: Path) -> None:
    config = Gemma2Config(**SHAPE | {"num_hidden_layers": 46})
    write_gguf(tmp_path / "model.gguf", random_model(config), "gemma2")
    assert "needs query_pre_attn_scalar = 8, but transformers reads 256" in refused(tmp_path / "model.gguf")


def test_mixtures_of_experts_that_transformers_reads_as_something_else(tmp_path: Path) -> None:
    mixtral = random_model(MixtralConfig(**SHAPE, num_local_experts=4))
    write_gguf(tmp_path / "mixtral.gguf", mixtral, "llama", extra={"llama.expert_count": 4})
    assert "of a LlamaForCausalLM: transformers" in refused(tmp_path / "mixtral.gguf")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F64, GGMLQuantizationType.I32], ids=lambda kind: kind.name)
def test_types_that_gguf_cannot_dequantize(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", random_model(LlamaConfig(**SHAPE)), "llama", encoding(kind))
    assert f"contains {kind.name} values (" in refused(tmp_path / "model.gguf")


def test_files_that_are_not_one_whole_known_model(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model(LlamaConfig(**SHAPE))
    write_gguf(path, model, "llama")
    data = path.read_bytes()
    path.write_bytes(data[:-20000])
    assert "is it truncated, or of a new architecture?" in refused(path)
    path.write_bytes(data[:30])
    assert "cannot read" in refused(path)
    path.write_bytes(b"nothing")
    assert "does not begin with GGUF" in refused(path)
    write_gguf(path, model, "llama", extra={"split.count": 3, "split.no": 1})
    assert "is part 2 of 3: join them with 'llama-gguf-split --merge" in refused(path)
    path.write_bytes(
        data.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lLaMa",
        )
    )
    assert "GGUF model with architecture lLaMa is not supported yet.): use the model's safetensors" in refused(path)


def test_a_file_that_is_read_is_measured(wide: torch.nn.Module, tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "model.gguf", wide, "llama", encoding(GGMLQuantizationType.Q5_0))
    model = load_model(str(tmp_path / "model.gguf"), device="cpu", dtype="float64")
    up = independently(written["blk.0.ffn_up.weight"], GGMLQuantizationType.Q5_0)
    torch.testing.assert_close(model.sites[0].k, up, rtol=1e-6, atol=1e-9)
    assert model.description["weights"] == "GGUF Q5_0×9 F32×3, dequantized to float32"
    assert all(check.passed for check in model.acceptance)


def test_blocks_are_unpacked_even_where_they_could_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    original = AutoModelForCausalLM.from_pretrained

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.update(options)
        return original(*arguments, **options)

    write_gguf(tmp_path / "model.gguf", random_model(LlamaConfig(**SHAPE)), "llama", plain)
    monkeypatch.setattr("hooks.loading.gguf.AutoModelForCausalLM.from_pretrained", watched)
    model, _ = load_gguf(tmp_path / "model.gguf")
    assert isinstance(asked["quantization_config"], transformers.GgufConfig)
    assert asked["quantization_config"].dequantize
    assert not hasattr(model.config, "quantization_config")
