"""GGUF files: weights that llama.cpp quantized, dequantized on loading."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError

_MAGIC = b"GGUF"


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in float32, and the tokenizer; UserError if the file is not a whole GGUF file of a known architecture."""
    folder, options = path.parent, {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    with _reading(path), redirect_stderr(StringIO()):  # its progress bar heeds no setting
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if info["missing_keys"]:
        raise UserError(f"{path} lacks {len(info['missing_keys'])} weights ({min(info['missing_keys'])}): not used")
    _forget_quantization(model)
    return model, tokenizer


def gguf_format(path: Path) -> str:
    """How the weights are stored, by tensor count, as in ``GGUF Q4_K×87 Q6_K×13 F32×109, dequantized to float32``."""
    with _reading(path):
        kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors)
    return "GGUF " + " ".join(f"{kind}×{count}" for kind, count in kinds.most_common()) + ", dequantized to float32"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what a reader raises on a file that is not whole into one line for the user."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise UserError(f"{path} does not begin with GGUF: give a .gguf file, or a directory with safetensors")
    try:
        yield
    except Exception as error:  # the readers raise many kinds; each means that this file does not make a model
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot read {path} ({reason[0]}): is it truncated, or of a new architecture?") from error


def _forget_quantization(model: PreTrainedModel) -> None:
    """The weights are plain floats now; without this the model refuses to be saved."""
    del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
