"""GGUF files: weights that llama.cpp quantized, dequantized on loading."""

from collections import Counter
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError

_MAGIC = b"GGUF"


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in float32, and the tokenizer; UserError if the file is not a whole GGUF file of a known architecture."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{path} does not begin with GGUF: give a .gguf file, or a directory with safetensors")
    try:
        with redirect_stderr(StringIO()):  # its progress bar heeds no setting
            model, info = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, IndexError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot read {path} ({reason[0]}): is it truncated, or of a new architecture?") from error
    if info["missing_keys"]:
        raise UserError(f"{path} lacks {len(info['missing_keys'])} weights ({min(info['missing_keys'])}): not used")
    _forget_quantization(model)
    return model, tokenizer


def gguf_format(path: Path) -> str:
    """How the weights are stored, by tensor count, as in ``GGUF Q4_K×87 Q6_K×13 F32×109, dequantized to float32``."""
    from gguf import GGUFReader

    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors)
    return "GGUF " + " ".join(f"{kind}×{count}" for kind, count in kinds.most_common()) + ", dequantized to float32"


def _forget_quantization(model: PreTrainedModel) -> None:
    """The weights are plain floats now; without this the model refuses to be saved."""
    del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
