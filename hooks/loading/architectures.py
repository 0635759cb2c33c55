"""Which transformers class loads a checkpoint, according to its configuration.

A causal language model where there is one, else a masked one, else the encoder of an encoder-decoder, whose text stack is
analysed. For a checkpoint with images or sound, the language model that transformers has for it.
"""

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    __version__,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from analysis.errors import UserError


def read_config(path: Path, name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The directory's configuration.

    Args:
        path: the directory.
        name: of the model, for messages.
        trust_remote_code: whether the directory's own Python code may run.

    Raises:
        UserError: config.json is unreadable, needs code of its own, or names an architecture unknown to transformers.
    """
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many kinds; each means that this configuration is unusable
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise UserError(f"{name} comes with its own Python code: add --trust-remote-code if you trust it") from error
        if "does not recognize this architecture" in text or "model_type" in text:
            raise UserError(
                f"transformers {__version__} does not know the architecture of {name} ({text[:120]}…): upgrade it, or "
                "add --trust-remote-code if the model comes with code that you trust"
            ) from error
        raise UserError(f"cannot read config.json of {name} ({text[:200] or type(error).__name__}): check it") from error


def auto_class_for(config: PreTrainedConfig, name: str) -> Any:
    """The auto class that loads this kind of model; UserError, which names the model's class, if there is none."""
    named = (config.architectures or ["a model without a class name"])[0]
    auto_map = getattr(config, "auto_map", None) or {}
    if named in _classes(AutoModelForMaskedLM, config) or set(auto_map) & set(_NAMES) == {"AutoModelForMaskedLM"}:
        return AutoModelForMaskedLM
    for auto in (AutoModelForCausalLM, AutoModelForMaskedLM):
        if auto.__name__ in auto_map or _classes(auto, config):
            return auto
    encoders = _classes(AutoModelForTextEncoding, config)
    if named in encoders or (config.is_encoder_decoder and encoders):
        return AutoModelForTextEncoding
    inside = type(config.get_text_config(decoder=True)).__name__
    what = f"; its text model has a {inside}" if inside != type(config).__name__ else ""
    raise UserError(
        f"{name} is {named}, for which transformers {__version__} has no causal or masked language model and no text "
        f"encoder{what}: save its language model separately, or choose another model"
    )


def model_class_for(
    auto: Any, config: PreTrainedConfig, path: Path, trust_remote_code: bool
) -> tuple[Any, PreTrainedConfig]:
    """The class that an auto class would instantiate, and the part of the configuration that it takes."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto.__name__)
    if trust_remote_code and reference:
        return get_class_from_dynamic_module(reference, path, local_files_only=True), config
    mapped = auto._model_mapping[type(config)]
    kinds = {kind.__name__: kind for kind in (mapped if isinstance(mapped, tuple) else (mapped,))}
    kind = kinds.get((config.architectures or [""])[0], next(iter(kinds.values())))
    text = config.get_text_config()
    return kind, (text if kind.config_class is type(text) else config)


_NAMES = ("AutoModelForCausalLM", "AutoModelForMaskedLM")


def _classes(auto: Any, config: PreTrainedConfig) -> set[str]:
    """Names of the classes that an auto class has for this configuration."""
    if type(config) not in auto._model_mapping:
        return set()
    mapped = auto._model_mapping[type(config)]
    return {kind.__name__ for kind in (mapped if isinstance(mapped, tuple) else (mapped,))}
