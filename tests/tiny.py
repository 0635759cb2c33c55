"""Tiny random models of many families, saved as a user would find them: a directory with a config, weights, a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
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
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-bias": LlamaConfig(**SHAPE, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=8, sliding_window=64),
    "phi3": Phi3Config(**SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
    "cohere": CohereConfig(**SHAPE),
    "granite": GraniteConfig(**SHAPE, residual_multiplier=0.5),
    "stablelm": StableLmConfig(**SHAPE),
    "relu": LlamaConfig(**SHAPE, hidden_act="relu"),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT_LIMIT, bos_token_id=1, eos_token_id=2
    ),
}
GATED = tuple(name for name in CONFIGS if name not in ("mixtral", "gpt2"))


def tiny_model(family: str, seed: int = 0) -> torch.nn.Module:
    """A random model with weights large enough that gates are far from linear."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
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
