"""Coefficients of the fitted edits: c_j of c·ab from the run, the means of h and the scales of σ(ab) from one more pass."""

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
    """The edit coefficients of every layer of the run.

    Args:
        model: from ``load_model``.
        windows: means of h, and scales of σ(ab), are taken over their counted tokens.
        run: of the same model; c_j of c·ab is taken over all its tokens.
    """
    sums: dict[int, Float64[Tensor, "sum d_mlp"]] = {}
    for window in windows:
        observers = {layer: partial(_add_sums, model, layer, window.counted_from, sums) for layer in run.layers}
        observed_pass(model, window, observers)
    coefficients = {}
    for index, layer in run.layers.items():
        h, h_placed, placed_placed, n_tokens = sums[index]
        bilinear = measures.bilinear_coefficient(layer.moments.neuron).nan_to_num(0.0)  # 0 where ab is always 0
        placed, mean = (ratio.nan_to_num(0.0) for ratio in (h_placed / placed_placed, h / n_tokens))
        coefficients[index] = EditCoefficients(bilinear, placed, mean, layer.geometry.balance)
    return coefficients


def _add_sums(
    model: LoadedModel,
    layer: int,
    counted_from: int,
    sums: dict[int, Float64[Tensor, "sum d_mlp"]],
    a: Activations,
    b: Activations,
    h: Activations,
) -> Activations:
    """Add Σ h, Σ h·p and Σ p² with p = g(ab, 1), and the number of counted tokens that reach each neuron."""
    gate, up, now = (x[0, counted_from:].double() for x in (a, b, h))
    placed = model.layers[layer].unit.placed_outside(gate, up)
    reached = ((gate != 0) | (up != 0)).double()
    of_window = torch.stack([terms.sum(dim=0) for terms in (now, now * placed, placed.square(), reached)]).cpu()
    sums[layer] = sums[layer] + of_window if layer in sums else of_window
    return h
