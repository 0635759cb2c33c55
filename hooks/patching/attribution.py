"""First-order costs of every neuron and every edit, from one forward and one backward pass.

If neuron j's h_j became h_j + ε(h′_j − h_j) on the counted tokens, the summed cross-entropy would change by

    ε Σ_t ∂CE/∂h_jt · (h′_jt − h_jt) + O(ε²)

The derivative includes all later layers. The sum at ε = 1 is the attribution; ``hooks.patching.single_neurons`` and the
exact sweep show how accurate it is. Attributions of neurons add up to first order; higher orders contain interactions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.causal.costs import Attribution, LayerAttribution
from analysis.causal.edits import Edit
from hooks.corpus import Window
from hooks.models import LoadedModel
from hooks.patching.interventions import Activations, Rewrite, rewriting
from hooks.patching.partial_pass import Scored, full_pass


def attribute(model: LoadedModel, windows: Sequence[Window], edits: Mapping[int, Mapping[str, Edit]]) -> Attribution:
    """The attribution, in nats, of every neuron of every layer with edits.

    Args:
        model: from ``load_model``.
        windows: the sequences, each with at least one scored token.
        edits: by layer and name, with the same names in every layer.
    """
    return reduce(add, (_of_window(model, window, edits) for window in windows))


def _of_window(model: LoadedModel, window: Window, edits: Mapping[int, Mapping[str, Edit]]) -> Attribution:
    scored, layers = Scored.of(window), {}

    def with_gradient(layer: int) -> Rewrite:
        def add_hook(a: Activations, b: Activations, h: Activations) -> Activations:
            leaf = h if h.requires_grad else h.detach().requires_grad_()  # the graph starts at the first layer
            activations = a.detach()[0], b.detach()[0], h.detach()[0]

            def on_gradient(gradient: Activations) -> None:
                first_order = _first_order(model, layer, edits[layer], *activations, gradient[0], window.counted_from)
                layers[layer] = LayerAttribution.of(first_order, len(scored))

            leaf.register_hook(on_gradient)
            return leaf

        return add_hook

    with _weights_frozen(model), torch.enable_grad(), rewriting(model, {layer: with_gradient(layer) for layer in edits}):
        logits = scored.of_logits(full_pass(model, window.tokens[None])[0])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = torch.nn.functional.cross_entropy(wide, scored.targets.to(wide.device), reduction="sum")
        loss.backward()
    n_tokens, base = torch.tensor([len(scored)]), loss.detach().double().cpu()[None]
    names = tuple(next(iter(edits.values())))
    return Attribution(names, n_tokens, base, {layer: layers[layer] for layer in sorted(edits)})


def _first_order(
    model: LoadedModel,
    layer: int,
    edits: Mapping[str, Edit],
    a: Float[Tensor, "pos d_mlp"],
    b: Float[Tensor, "pos d_mlp"],
    h: Float[Tensor, "pos d_mlp"],
    gradient: Float[Tensor, "pos d_mlp"],
    counted_from: int,
) -> Float[Tensor, "edit token d_mlp"]:
    """∂CE/∂h·(h′ − h) on every counted token, for every edit, in float32 or wider."""
    unit, rows = model.layers[layer].unit, slice(counted_from, None)
    changes = torch.stack([edit(a[rows], b[rows], unit) - h[rows] for edit in edits.values()])
    return changes * gradient[rows].to(torch.promote_types(gradient.dtype, torch.float32))


@contextmanager
def _weights_frozen(model: LoadedModel) -> Iterator[None]:
    """Within the ``with`` block no gradients of weights are computed."""
    parameters = [weight for weight in model.network.parameters() if weight.requires_grad]
    for weight in parameters:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in parameters:
            weight.requires_grad_(True)
