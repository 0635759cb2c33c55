"""Which class reads a checkpoint: causal, masked or encoder, by what its configuration names; the others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

from analysis.errors import UserError
from hooks.loading.architectures import auto_class_for, model_class_for, read_config
from hooks.loading.checkpoint import SINGLE
from hooks.loading.sources import load_files, locate
from hooks.locating.ends import find_ends
from hooks.models import load_model
from tests.helpers.tiny import SHAPE, VOCABULARY, save_tiny, tiny_tokenizer

SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
BERT = BertConfig(**SMALL, num_hidden_layers=1)
MODERN = ModernBertConfig(**SMALL, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1)
T5 = T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, feed_forward_proj="gated-gelu")
EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28}
GEMMA = Gemma3Config(text_config=SHAPE, vision_config=EYE | {"patch_size": 14}, mm_tokens_per_image=4)
QWEN = Qwen2VLConfig(
    text_config=SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
)


def saved(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def read(directory: Path) -> PreTrainedModel:
    return load_files(locate(str(directory), None, False), torch.float32, trust_remote_code=False)[0]


def refused(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        (LlamaForCausalLM, LlamaConfig(**SHAPE), LlamaForCausalLM),
        (ModernBertForMaskedLM, MODERN, ModernBertForMaskedLM),
        (BertForMaskedLM, BERT, BertForMaskedLM),
        (BertLMHeadModel, BertConfig(**SMALL, num_hidden_layers=1, is_decoder=True), BertLMHeadModel),
        (T5ForConditionalGeneration, T5, T5EncoderModel),
        (T5EncoderModel, T5, T5EncoderModel),
        (Gemma3ForConditionalGeneration, GEMMA, Gemma3ForConditionalGeneration),
    ],
)
def test_the_class_that_reads_a_checkpoint(kind: Any, config: Any, expected: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = kind(config)
    model = read(saved(stored, tmp_path))
    assert type(model) is expected
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, stored.state_dict()[name]), name
    config = read_config(tmp_path, "it", trust_remote_code=False)
    assert model_class_for(auto_class_for(config, "it"), config, tmp_path, trust_remote_code=False)[0] is expected


def test_models_that_no_class_reads(tmp_path: Path) -> None:
    line = refused(saved(Qwen2VLForConditionalGeneration(QWEN), tmp_path / "qwen"))
    assert line.startswith("qwen is Qwen2VLForConditionalGeneration, for which transformers")
    assert "its text model has a Qwen2VLTextConfig: save its language model separately" in line
    assert "lacks 1 weights (lm_head.weight)" in refused(saved(LlamaModel(LlamaConfig(**SHAPE)), tmp_path / "base"))


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path / "new")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "tomorrow"}))
    line = refused(directory)
    assert "does not know the architecture of new" in line
    assert "upgrade it, or add --trust-remote-code" in line
    del config["model_type"]
    (directory / "config.json").write_text(json.dumps(config))
    assert "does not know the architecture of new" in refused(directory)
    (directory / "config.json").write_text("[1")
    assert "is not a configuration" in refused(directory)


@pytest.mark.parametrize("tied", [False, True])
def test_read_outs_take_the_table_that_the_model_takes(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    with torch.no_grad():
        stored.model.norm.weight.add_(torch.rand(32))
    model = load_model(str(saved(stored, tmp_path)), device="cpu")
    ends = find_ends(model.hf_model, torch.arange(3, 13)[None], 32)
    assert ends is not None
    assert torch.equal(ends.embedding, stored.model.embed_tokens.weight)
    assert torch.equal(ends.unembedding, stored.lm_head.weight)
    assert torch.equal(ends.embedding, ends.unembedding) == tied
    tables = {tensor for tensor in load_file(tmp_path / SINGLE) if "embed" in tensor or "lm_head" in tensor}
    assert len(tables) == 2 - tied
    torch.testing.assert_close(ends.gain, stored.model.norm.weight.detach())


def test_untied_embeddings_of_which_one_is_missing(tmp_path: Path) -> None:
    """A table that is not there is neither drawn at random nor taken from the other end."""
    directory = saved(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)), tmp_path / "model")
    whole = load_file(directory / SINGLE)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        save_file(
            {key: value for key, value in whole.items() if key != name}, directory / SINGLE, metadata={"format": "pt"}
        )
        assert f"lacks 1 weights ({name})" in refused(directory)


def test_tied_embeddings_of_which_the_checkpoint_has_two(tmp_path: Path) -> None:
    """Both are taken as they are stored, whatever the configuration says."""
    directory = saved(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), tmp_path / "model")
    whole = load_file(directory / SINGLE)
    other = whole | {"lm_head.weight": whole["model.embed_tokens.weight"] + 1}
    save_file(other, directory / SINGLE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    model = load_model(str(directory), device="cpu")
    ends = find_ends(model.hf_model, torch.arange(3, 13)[None], 32)
    assert ends is not None
    assert torch.equal(ends.embedding, whole["model.embed_tokens.weight"])
    assert torch.equal(ends.unembedding, other["lm_head.weight"])
