"""Every number of a layer, of its neurons and of its experts, through one value: ``Layer.estimates``.

Beside each measure stand what is needed to judge it: its standard error, its quartiles over tokens, its value without the
tokens of largest energy, its nulls, and the excess over each null with an error of its own.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from analysis.measures import expert_numbers, layer_numbers, neuron_numbers, token_numbers
from analysis.measures.layer_sums import LayerSums
from analysis.measures.neuron_numbers import EXTREMES


@dataclass(frozen=True)
class Estimates(LayerSums):
    """The numbers of one layer, with the nulls computed once for all of its tables."""

    def layer_numbers(self) -> dict[str, int | float]:
        """One row of the table of layers."""
        return layer_numbers.layer_numbers(self)

    def curve_numbers(self) -> dict[str, list[float]]:
        """The columns of the scaling curve, one value per α."""
        return layer_numbers.curve_numbers(self)

    def neuron_numbers(self) -> dict[str, Tensor]:
        """The columns of the table of neurons, [d_mlp] each."""
        return neuron_numbers.neuron_numbers(self)

    def extreme_neurons(self, count: int = EXTREMES) -> dict[str, Tensor]:
        """The columns of the table of extreme neurons, [count] each, largest |h|·‖v‖ first."""
        return neuron_numbers.extreme_neurons(self, count)

    def expert_numbers(self) -> list[dict[str, int | float]]:
        """The rows of the table of experts; none for a dense layer."""
        return expert_numbers.expert_numbers(self)

    @property
    def idle_experts(self) -> list[int]:
        """The experts to which no counted token was routed."""
        return expert_numbers.idle_experts(self)

    @cached_property
    def few_tokens(self) -> bool:
        """Whether some number of the layer depends on a handful of tokens."""
        return token_numbers.depends_on_few_tokens(self)

    def top_tokens(self) -> list[dict[str, int | float]]:
        """The tokens of largest energy, each with its place and the neuron that holds most of its energy."""
        return token_numbers.top_tokens(self)
