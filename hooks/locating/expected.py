"""What is known before a layer is proved: what the configuration says, and which modules belong to several layers."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from analysis.units.registry import PARAMETERS, Unit, candidate_units

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "ffn_activation", "dense_act_fn")


class NotASiteError(Exception):
    """Why a layer is not analysed."""


class VerificationError(Exception):
    """Why a candidate failed, and by how much."""

    def __init__(self, reason: str, error: float = float("inf")) -> None:
        super().__init__(reason)
        self.error = error if error == error else float("inf")


@dataclass(frozen=True)
class Expected:
    """What may be expected of the layers of a model.

    Attributes:
        config: of the model, which may name the activation and its parameters.
        constants: numbers of the configuration that may be multipliers.
        uses: in how many blocks each module is.
    """

    config: Any
    constants: dict[str, float]
    uses: Counter[nn.Module] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: Any, blocks: nn.ModuleList) -> "Expected":
        """Of a model with this configuration and these blocks."""
        return cls(config, _constants(config), Counter(module for block in blocks for module in set(block.modules())))

    def units(self, layer: int, module: nn.Module) -> list[Unit]:
        """What g of a module may be, the likeliest first.

        Its own parameters count, then those of the configuration, which may speak of other modules: a clamp that nothing
        reaches on the probe would be taken for proved.
        """
        found: dict[str, Unit] = {}
        for holder in (module, self.config):
            parameters: dict[str, float | None] = {}
            for key in PARAMETERS:
                value = getattr(holder, key, None)
                value = value[layer] if isinstance(value, list | tuple) and layer < len(value) else value
                parameters[key] = value if isinstance(value, float | int) else None
            for unit in candidate_units(configured_activations(self.config), parameters):
                found.setdefault(unit.name, unit)
        return list(found.values())

    def require_unshared(self, *modules: nn.Module) -> None:
        """Fails for modules of several layers: what is captured at them in a pass is of all these layers."""
        if any(self.uses[module] > 1 for module in modules):
            raise VerificationError("its projections belong to another layer too", 0.0)


def configured_activations(config: Any) -> list[str]:
    """The activation names in a Hugging Face configuration."""
    text = config.get_text_config()
    return [str(getattr(text, field)) for field in ACTIVATION_FIELDS if getattr(text, field, None) is not None]


def _constants(config: Any) -> dict[str, float]:
    """The numbers of a configuration that may be multipliers."""
    numbers = {name: value for name, value in config.to_dict().items() if isinstance(value, float)}
    pairs = {name: value for name, value in config.to_dict().items() if isinstance(value, list)}
    listed = {f"{name}[{i}]": one for name, value in pairs.items() for i, one in enumerate(value) if isinstance(one, float)}
    return {name: value for name, value in (numbers | listed).items() if value > 0}
