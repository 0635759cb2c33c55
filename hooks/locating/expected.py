"""What is known before a layer is verified: the configuration, and which modules belong to several layers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from analysis.units.registry import PARAMETERS, Unit, candidate_units

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "ffn_activation", "dense_act_fn")


class NotASiteError(Exception):
    """The reason why a layer is not analysed."""


class VerificationError(Exception):
    """The reason why a candidate failed, and its relative error, infinite if there is none."""

    def __init__(self, reason: str, error: float = float("inf")) -> None:
        super().__init__(reason)
        self.error = error if error == error else float("inf")


@dataclass(frozen=True)
class Expected:
    """What is known of a model's layers before they run.

    Attributes:
        config: of the model; it may name the activation and its parameters.
        constants: positive numbers in the configuration, by name, which may be multipliers.
        uses: the number of blocks that contain each module.
    """

    config: Any
    constants: dict[str, float]
    uses: Counter[nn.Module] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: Any, blocks: nn.ModuleList) -> "Expected":
        """Of a model with this configuration and these blocks."""
        return cls(config, _constants(config), Counter(module for block in blocks for module in set(block.modules())))

    def units(self, layer: int, module: nn.Module) -> list[Unit]:
        """The units that a module may have, the most likely first.

        Parameters such as a clamp are taken from the module itself, then from the configuration, whose parameters may be
        meant for other modules: a clamp that does not act on the probe cannot be verified on it.
        """
        units: dict[str, Unit] = {}
        for holder in (module, self.config):
            parameters: dict[str, float | None] = {}
            for key in PARAMETERS:
                value = getattr(holder, key, None)
                value = value[layer] if isinstance(value, list | tuple) and layer < len(value) else value
                parameters[key] = value if isinstance(value, float | int) else None
            for unit in candidate_units(configured_activations(self.config), parameters):
                units.setdefault(unit.name, unit)
        return list(units.values())

    def require_unshared(self, *modules: nn.Module) -> None:
        """VerificationError for modules of several layers: what they compute in one pass mixes all these layers."""
        if any(self.uses[module] > 1 for module in modules):
            raise VerificationError("its projections also belong to another layer", 0.0)


def configured_activations(config: Any) -> list[str]:
    """The activation names in a Hugging Face configuration."""
    text = config.get_text_config()
    return [str(getattr(text, field)) for field in ACTIVATION_FIELDS if getattr(text, field, None) is not None]


def _constants(config: Any) -> dict[str, float]:
    """The numbers of a configuration that may be multipliers."""
    floats = {name: value for name, value in config.to_dict().items() if isinstance(value, float)}
    lists = {name: value for name, value in config.to_dict().items() if isinstance(value, list)}
    items = {
        f"{name}[{i}]": item for name, value in lists.items() for i, item in enumerate(value) if isinstance(item, float)
    }
    return {name: value for name, value in (floats | items).items() if value > 0}
