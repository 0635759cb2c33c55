"""Prepares a loaded model to run: dtype, device, random weights, attention, and a twin that shares its weights.

TransformerLens needs attention computed eagerly, step by step; the model itself runs faster with a fused kernel. Which of
the two runs is stated in a model's configuration. So there are two models with one set of weights, see ``twin``.
"""

import copy
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError
from hooks.loading.devices import SPREAD, weights_of
from hooks.loading.network import outputs_of
from hooks.loading.sources import first_line
from hooks.tolerance import relative_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PROBE_LENGTH = 16
"""Tokens of the probe on which a model is verified when it is loaded."""

Probe = Int[Tensor, "1 pos"]


def resolve_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name; UserError if it is not in ``DTYPES``."""
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_device(device: str) -> torch.device:
    """The device of that name; UserError if this machine does not have it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}: choose auto, cpu, cuda, cuda:N or {SPREAD}") from error
    if resolved.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is not supported, sums need float64: choose cpu or cuda")
    count = torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        raise UserError(f"device {device!r} does not exist, torch sees {count} CUDA devices: use --device cpu")
    return resolved


def to_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model on that device; UserError if it does not fit into the GPU's memory."""
    try:
        return model.to(device)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"the model does not fit on {device}: use --dtype bfloat16 or --device cpu") from error


def with_random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A model of the same configuration, freshly initialised; torch's global generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(model.config)


def check_weights(model: PreTrainedModel, name: str) -> None:
    """UserError if a weight is NaN or infinite."""
    for prefix, module in model.named_modules():
        for key, weight in weights_of(module, inside=False).items():
            if weight.is_floating_point() and not math.isfinite(weight.sum(dtype=torch.float64)):
                count = int((~torch.isfinite(weight)).sum())
                raise UserError(f"{name} has {count} NaN or infinite weights in {prefix}.{key}: the file is damaged")


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model with the same weights: leaf modules are shared, all other modules and the configuration are copies.

    Setting the attention implementation of one leaves the other unchanged.
    """
    configs: dict[int, Any] = {}

    def copied(module: nn.Module) -> nn.Module:
        if not module._modules and not any(isinstance(value, PreTrainedConfig) for value in vars(module).values()):
            return module
        result = copy.copy(module)
        vars(result)["_modules"] = {name: child and copied(child) for name, child in module._modules.items()}
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):  # which names the attention implementation
                vars(result)[name] = configs.setdefault(id(value), copy.deepcopy(value))
        return result

    return cast(PreTrainedModel, copied(model))


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the tokenizer itself puts before a text, if any: its BOS, or the CLS of an encoder."""
    first = next(iter(tokenizer("a").input_ids), None)
    return first if first in (tokenizer.bos_token_id, tokenizer.cls_token_id) else None


def probe_for(model: PreTrainedModel) -> Probe:
    """A short sequence of random tokens, the same for all models with the same vocabulary size."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, PROBE_LENGTH), generator=torch.Generator().manual_seed(0))


def first_outputs(model: PreTrainedModel, probe: Probe, name: str) -> Float[Tensor, "1 pos out"]:
    """The model's outputs on the probe; UserError if it does not run at all."""
    try:
        return outputs_of(model, probe)
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ) as error:  # modelling code may raise anything; whatever it is, these files do not make a model that runs
        kind, reason = type(model).__name__, first_line(error)
        raise UserError(
            f"{name}, a {kind}, does not run ({type(error).__name__}: {reason}): check its config.json"
        ) from error


@contextmanager
def eager(model: PreTrainedModel) -> Iterator[None]:
    """Within the ``with`` block, attention and experts are computed eagerly."""
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    use_eager(model)
    yield
    with suppress(ValueError):
        model.set_attn_implementation(attention)
    with suppress(ValueError):
        model.set_experts_implementation(experts)


def use_eager(model: PreTrainedModel) -> None:
    """Compute attention and experts eagerly from now on, without fused kernels."""
    with suppress(ValueError):  # a family with a single implementation has the eager one
        model.set_attn_implementation("eager")
    with suppress(ValueError):
        model.set_experts_implementation("eager")


def choose_attention(hf_model: PreTrainedModel, probe: Probe, reference: Tensor, limit: float) -> float:
    """Relative error of the logits with the model's own attention kernel; beyond the limit the model is made eager.

    Args:
        hf_model: the model, whose attention implementation may be changed.
        probe: tokens.
        reference: logits computed eagerly.
        limit: the largest relative error that is accepted.

    Returns:
        The error of the implementation that is kept.
    """
    with suppress(RuntimeError):  # some kernels do not support every dtype
        error = relative_error(outputs_of(hf_model, probe), reference)
        if error <= limit:
            return error
    use_eager(hf_model)  # some kernels ignore soft caps and attention sinks
    return relative_error(outputs_of(hf_model, probe), reference)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Within the ``with`` block, progress bars, log messages and warnings of loading are suppressed; exceptions are not."""
    transformers_log, root = transformers.utils.logging, logging.getLogger()
    level, bars, root_level = transformers_log.get_verbosity(), transformers_log.is_progress_bar_enabled(), root.level
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_log.set_verbosity(level)
        root.setLevel(root_level)
        if bars:
            transformers_log.enable_progress_bar()
