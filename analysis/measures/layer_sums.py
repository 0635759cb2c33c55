"""What every number of a layer is computed from: its sums and weights, with the nulls that several tables share.

The numbers themselves are in ``layer_numbers``, ``neuron_numbers``, ``expert_numbers`` and ``token_numbers``, each a set of
functions of a ``LayerSums``.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from analysis.measures.asymmetry import LAYER_MEASURES, exchange_balanced_of_draws, exchange_of_draws
from analysis.measures.false_discovery import false_discovery
from analysis.measures.gaussian_null import GaussianFit, Parts, gaussian_nulls
from analysis.measures.jackknife import neuron_replicates
from analysis.sums.layout import MAIN_SCALES, Sums, scaling_name
from analysis.sums.moments import Moments
from analysis.sums.output_moments import OutputMoments
from analysis.units.registry import Unit
from analysis.weights.experts import Experts, index_within
from analysis.weights.geometry import Geometry

GAUSSIAN_NULLS = {
    "exchange": "exchange",
    "exchange_balanced": "exchange_balanced",
    **{name: scaling_name(alpha) for name, alpha in MAIN_SCALES.items()},
}
"""Measures that have a Gaussian null, with the name of that null in ``gaussian_nulls``."""
ERROR_NODES = 24
"""Quadrature nodes for the errors of the Gaussian null: only differences between replicates matter, and in these the
remaining quadrature error cancels."""
_DRAWS = {"exchange": exchange_of_draws, "exchange_balanced": exchange_balanced_of_draws}

Neurons = Float64[Tensor, " d_mlp"]


@dataclass(frozen=True)
class LayerSums:
    """The sums and weights of one layer, and the nulls derived from them, each computed once.

    Attributes:
        unit: g.
        moments: sums over the counted tokens.
        geometry: norms and cosines of the weights.
        partners: for each draw of the permutation null, the neuron whose b was combined with each neuron's a.
        experts: the expert of each neuron in a mixture of experts, None in a dense layer. Only the numbers of experts, the
            names of neurons, and the variance over permutations use them: everything else pools over all neurons.
        output: sums of what the layer writes; None if they could not be taken.
    """

    unit: Unit
    moments: Moments
    geometry: Geometry
    partners: Int64[Tensor, "draw d_mlp"]
    experts: Experts | None = None
    output: OutputMoments | None = None

    @cached_property
    def pooled(self) -> Sums:
        """The sums pooled over the neurons with the value weights, a table with one column."""
        return self.moments.neuron.pool(self.geometry.value_weight)

    @cached_property
    def gaussian(self) -> dict[str, Parts]:
        """The Gaussian null of both exchanges and of scaling at every α, summed over each neuron's counted tokens."""
        fit, layout = GaussianFit.of(self.moments.neuron), self.moments.layout
        nulls = gaussian_nulls(fit, self.unit, self.geometry.balance, layout.alphas)
        return {name: null.summed(self.moments.neuron["weight"]) for name, null in nulls.items()}

    @cached_property
    def gaussian_replicates(self) -> dict[str, Float64[Tensor, "part d_mlp group"]]:
        """Gap and scale of every Gaussian null, leaving out one group of jackknife blocks at a time."""
        layout = self.moments.layout.by_neuron_and_group

        def parts(sums: Sums) -> Float64[Tensor, "null part d_mlp"]:
            nulls = gaussian_nulls(GaussianFit.of(sums), self.unit, self.geometry.balance, layout.alphas, ERROR_NODES)
            summed = [null.summed(sums["weight"]) for null in nulls.values()]
            return torch.stack([torch.stack([null.gap, null.scale]) for null in summed])

        names = ("exchange", "exchange_balanced", *(scaling_name(alpha) for alpha in layout.alphas))
        return dict(zip(names, neuron_replicates(parts, self.moments), strict=True))

    @cached_property
    def discoveries(self) -> dict[str, tuple[Neurons, Neurons, Bool[Tensor, " d_mlp"]]]:
        """For both exchanges: p, q, and whether a neuron differs from its permuted versions (``false_discovery``)."""
        sums = self.moments.neuron
        return {name: false_discovery(LAYER_MEASURES[name](sums), draws(sums)) for name, draws in _DRAWS.items()}

    def neuron_columns(self, neurons: Int64[Tensor, " chosen"]) -> dict[str, Int64[Tensor, " chosen"]]:
        """The columns that identify neurons: in a mixture of experts, the expert and the index within it."""
        if self.experts is None:
            return {"neuron": neurons}
        return {"expert": self.experts[neurons], "neuron": index_within(self.experts)[neurons]}
