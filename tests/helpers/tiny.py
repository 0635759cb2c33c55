"""Tiny random models of many families, saved as a user would find them: a directory with a config, weights, a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ModernBertForMaskedLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5EncoderModel,
)

from hooks.corpus import sample_text

VOCABULARY = 320
CONTEXT_LIMIT = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT_LIMIT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
OF_DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": None,
}  # fmt: skip
GPT2_SHAPE = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LIMIT}
THREE_LAYERS = ["sliding_attention", "full_attention", "full_attention"]
CONV = ["conv", "full_attention", "conv"]

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"mlp_bias": True}),
    "relu": ("llama", {"hidden_act": "relu"}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8, "sliding_window": 64}),
    "gemma3n": (
        "gemma3n_text",
        {
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "altup_num_inputs": 2,
            "laurel_rank": 8, "num_kv_shared_layers": 0, "layer_types": THREE_LAYERS,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        },
    ),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {}),
    "granite": ("granite", {"residual_multiplier": 0.5}),
    "stablelm": ("stablelm", {}),
    "smollm3": ("smollm3", {}),
    "exaone4": ("exaone4", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "helium": ("helium", {}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": CONV}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "mlp_multipliers": [0.7, 0.9]}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 64, "block_types": ["recurrent", "attention"]},
    ),
    "t5": ("t5", {"d_kv": 8, "d_ff": 48, "feed_forward_proj": "gated-gelu"}),
    "modernbert": ("modernbert", {"global_attn_every_n_layers": 2, "local_attention": 16}),
}  # fmt: skip
"""Families whose layers are all gated MLPs, by a name of ours: Hugging Face's name, and what its shape has beyond SHAPE."""

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.5}),
    "deepseek_v3": ("deepseek_v3", OF_DEEPSEEK),
    "glm4_moe": ("glm4_moe", {**OF_DEEPSEEK, "num_key_value_heads": 2, "n_group": 1}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "layer_types": THREE_LAYERS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
        },
    ),
    "lfm2_moe": ("lfm2_moe", {**MOE, "num_dense_layers": 1, "layer_types": CONV}),
    "jamba": (
        "jamba",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
            "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 8, "mamba_dt_rank": 8,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **MOE, "shared_expert_intermediate_size": 40, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": CONTEXT_LIMIT,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
        },
    ),
    "minimax_m3": (
        "minimax_m3_vl_text",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "shared_intermediate_size": 40,
            "dense_intermediate_size": 48, "mlp_layer_types": ["dense", "sparse", "sparse"], "rotary_dim": 8,
            "routed_scaling_factor": 2.5,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
            "residual_multiplier": 0.5, "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
}  # fmt: skip
"""Families with layers of experts; some have dense layers too."""

UNGATED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2_SHAPE),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": ("starcoder2", {}),
    "nemotron": ("nemotron", {}),
    "apertus": ("apertus", {}),
    "phi": ("phi", {}),
    "arcee": ("arcee", {}),
    "nemotron_h": ("nemotron_h", {}),
    "bitnet": ("bitnet", {}),
}
"""Families that are refused: without a gate, or with something between h and the down projection."""

FAMILIES = DENSE | MIXTURES | UNGATED
GATED = tuple(name for name in DENSE if name not in ("t5", "modernbert", "gemma3n"))
"""Dense families that predict the next token from one residual stream."""


def tiny_config(family: str) -> PretrainedConfig:
    """A configuration of three narrow layers."""
    model_type, options = FAMILIES[family]
    return AutoConfig.for_model(model_type, **(GPT2_SHAPE | {"bos_token_id": 1} if family == "gpt2" else SHAPE | options))


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model with weights large enough that gates are far from linear."""
    torch.manual_seed(seed)
    kind = {"t5": T5EncoderModel, "modernbert": ModernBertForMaskedLM}.get(family)
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.35)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.2)
    return model.eval()


def save_tiny(family: str, directory: Path, *, seed: int = 0, bos: bool = False) -> Path:
    """Write a tiny model and a byte-level tokenizer, with a BOS of its own or without."""
    tiny_model(family, seed).save_pretrained(directory)
    tiny_tokenizer(bos).save_pretrained(directory)
    return directory


def tiny_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(VOCABULARY)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", add_bos_token=bos
    )


def train_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE of that many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sample_text()[:5000]], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
