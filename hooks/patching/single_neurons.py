"""Single-neuron patching: the exact cost of editing one neuron, next to its attribution, a first-order estimate."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from analysis.causal.costs import SingleNeurons
from analysis.causal.edits import Change, Edit
from hooks.corpus import Window
from hooks.models import LoadedModel
from hooks.patching.attribution import attribute
from hooks.patching.partial_pass import clean_pass
from hooks.patching.patched_runs import PatchedRun, StartPoint

N_NEURONS = 200
"""The number of neurons with the largest attribution, and of as many random others."""


def patch_single_neurons(
    model: LoadedModel,
    windows: Sequence[Window],
    edits: Mapping[int, Mapping[str, Edit]],
    name: str,
    *,
    n_neurons: int = N_NEURONS,
    seed: int = 0,
) -> SingleNeurons:
    """Attribution and exact ΔCE of single neurons under one edit, in nats per scored token.

    Args:
        model: from ``load_model``.
        windows: the sequences on which both are measured; each neuron costs about half a pass over them.
        edits: by layer and name.
        name: of the edit that is measured.
        n_neurons: the number of neurons with the largest |attribution|, and of random others.
        seed: of the random choice.
    """
    chosen = {layer: {name: of_layer[name]} for layer, of_layer in edits.items()}
    attribution = attribute(model, windows, chosen)
    layers = list(attribution.layers)
    predictions = [attribution.neurons(layer)[0] for layer in layers]
    width = torch.tensor([len(prediction) for prediction in predictions])
    layer_of = torch.tensor(layers).repeat_interleave(width)
    neuron_of = torch.cat([torch.arange(int(count)) for count in width])
    predicted = torch.cat(predictions)
    places, largest = _choice(predicted, n_neurons, seed)
    layer, neuron = layer_of[places], neuron_of[places]
    exact = _exact(model, windows, {index: of_layer[name] for index, of_layer in chosen.items()}, layer, neuron)
    return SingleNeurons(layer, neuron, largest, predicted[places], exact / attribution.n_tokens.sum())


def _choice(
    predicted: Float64[Tensor, " neuron"], n_neurons: int, seed: int
) -> tuple[Int64[Tensor, " chosen"], Bool[Tensor, " chosen"]]:
    """Indices of the largest |prediction| and of random others, and which of them are the largest."""
    order = predicted.abs().argsort(descending=True, stable=True)
    largest, others = order[:n_neurons], order[n_neurons:]
    drawn = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))[:n_neurons]]
    places = torch.cat([largest, drawn])
    return places, torch.arange(len(places)) < len(largest)


def _exact(
    model: LoadedModel,
    windows: Sequence[Window],
    edits: Mapping[int, Edit],
    layer: Int64[Tensor, " chosen"],
    neuron: Int64[Tensor, " chosen"],
) -> Float64[Tensor, " chosen"]:
    """Σ ΔCE over all windows of editing each neuron alone."""
    places = defaultdict(list)
    for place, index in enumerate(layer.tolist()):
        places[index].append(place)
    total = torch.zeros(len(layer), dtype=torch.float64)
    for window in windows:
        _, inputs = clean_pass(model, window, {})
        counted = torch.arange(len(window.tokens)) >= window.counted_from
        for index, of_layer in places.items():
            start, unit = StartPoint.of(model, index, window, inputs[index]), model.layers[index].unit
            changes = [Change(edits[index], unit, neuron[place : place + 1], counted) for place in of_layer]
            costs, _ = start.costs([PatchedRun(inputs[index], {index: change}) for change in changes])
            total[of_layer] += costs[1]
    return total
