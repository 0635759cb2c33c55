"""What the fitted edits need to know of each layer: c_j of c·ab from the run, means and c_j of σ(ab) from one more pass."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.causal.edits import EditCoefficients
from analysis.measures import asymmetry as measures
from analysis.run import Run
from hooks.corpus import Window
from hooks.models import LoadedModel
from hooks.patching.interventions import Activations
from hooks.patching.partial_pass import observed_pass


def fit_coefficients(model: LoadedModel, windows: Sequence[Window], run: Run) -> dict[int, EditCoefficients]:
    """The fit of every layer of the run; means and the scale of σ(ab) are over the counted tokens of these windows."""
    sums: dict[int, Float64[Tensor, "sum d_mlp"]] = {}
    for window in windows:
        looks = {layer: partial(_look, model, layer, window.counted_from, sums) for layer in run.layers}
        observed_pass(model, window, looks)
    coefficients = {}
    for index, layer in run.layers.items():
        h, h_placed, placed_placed, n_tokens = sums[index]
        bilinear = measures.bilinear_coefficient(layer.moments.neuron).nan_to_num(0.0)  # 0 where ab is always 0
        placed, mean = (ratio.nan_to_num(0.0) for ratio in (h_placed / placed_placed, h / n_tokens))
        coefficients[index] = EditCoefficients(bilinear, placed, mean, layer.geometry.balance)
    return coefficients


def _look(
    model: LoadedModel,
    layer: int,
    counted_from: int,
    sums: dict[int, Float64[Tensor, "sum d_mlp"]],
    a: Activations,
    b: Activations,
    h: Activations,
) -> Activations:
    """Add Σ h, Σ h·p and Σ p² with p = g(ab, 1), and how many counted tokens of the one window reach each neuron."""
    gate, up, now = (x[0, counted_from:].double() for x in (a, b, h))
    placed = model.layers[layer].unit.placed_outside(gate, up)
    reached = ((gate != 0) | (up != 0)).double()
    found = torch.stack([each.sum(dim=0) for each in (now, now * placed, placed.square(), reached)]).cpu()
    sums[layer] = sums[layer] + found if layer in sums else found
    return h
