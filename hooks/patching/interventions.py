"""Changes a model within a ``with`` block: its activations by an edit, or its weights by an action.

    with rewriting(model, {11: Change(Exchange(), model.sites[11].unit)}):
        model.hf_model(tokens)

``rewriting`` makes the down projection read h′ instead of h; to the output of experts it adds that of h′ − h. ``acting``
changes q, k, v themselves. When the ``with`` block ends, also by an exception, the model is restored bit for bit. Such
blocks can be nested; if two rewrite the same h, the inner one reads the h′ of the outer one, and the model's own a and b.

The two agree: exchanging the weights of a layer has the same effect as exchanging its pre-activations.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from analysis.errors import UserError
from analysis.theory.actions import Action
from analysis.weights.experts import SHARED
from hooks.locating.projections import Projection
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.models import LoadedModel
from hooks.reading.capture_points import Extract, capture_points_of

Activations = Float[Tensor, "batch pos d_mlp"]
Rewrite = Callable[[Activations, Activations, Activations], Activations]
"""(a, b, h) → what the down projection reads instead of h."""


@contextmanager
def rewriting(model: LoadedModel, rewrites: Mapping[int, Rewrite]) -> Iterator[None]:
    """Within the ``with`` block the given layers' h is rewritten in every pass; UserError if a layer cannot be edited."""
    with ExitStack() as stack:
        for layer, rewrite in rewrites.items():
            chosen = layer_of(model, layer)
            hooked = _hooked(chosen, rewrite) if isinstance(chosen, Site) else _hooked_experts(model, chosen, rewrite)
            for handle in hooked:
                stack.callback(handle.remove)
        yield


@contextmanager
def acting(model: LoadedModel, actions: Mapping[int, Action]) -> Iterator[None]:
    """Within the ``with`` block, the given layers' weights are those after the action.

    Raises:
        UserError: a layer has no gated MLP, is a mixture of experts, or has offloaded weights.
    """
    with ExitStack() as stack:
        for layer, action in actions.items():
            chosen = layer_of(model, layer)
            if isinstance(chosen, Mixture):
                raise UserError(f"layer {layer} is a mixture of experts, on whose weights actions are not defined")
            if any(weight.is_meta for weight in chosen.projections.down.parameters()):
                raise UserError(f"weights of layer {layer} are offloaded and cannot be changed: use another --device")
            form = chosen.gated_mlp()
            after = {name: weight.clone() for name, weight in action(form).weights.items()}  # q and k may be exchanged
            for name, weight in form.weights.items():
                stack.callback(weight.copy_, weight.clone())
                weight.copy_(after[name])
        yield


def layer_of(model: LoadedModel, layer: int) -> Site | Mixture:
    """The layer of that index; UserError with the reason if it cannot be edited."""
    if layer not in model.layers:
        reason = model.skipped.get(layer, f"the model has layers 0-{model.description['n_layers'] - 1}")
        raise UserError(f"layer {layer} cannot be edited ({reason}): choose one that is analysed")
    return model.layers[layer]


def _hooked(site: Site, rewrite: Rewrite) -> Iterator[RemovableHandle]:
    captured: dict[str, Tensor] = {}

    def keep(name: str, extract: Extract) -> Callable[..., None]:
        def hook(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            captured[name] = extract(args, kwargs, output)

        return hook

    def replace(_module: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        h, *others = inputs
        return (rewrite(captured.pop("a"), captured.pop("b"), h), *others)

    for name, points in capture_points_of(site).items():
        for module, extract in points:
            yield module.register_forward_hook(keep(name, extract), with_kwargs=True)
    yield site.projections.down.register_forward_pre_hook(replace)


def _hooked_experts(model: LoadedModel, mixture: Mixture, rewrite: Rewrite) -> Iterator[RemovableHandle]:
    """As ``_hooked``, for all neurons of a mixture at once in the order of its sites; 0 at tokens that do not reach one.

    The model's own computation is unchanged; the output of h′ − h is added to that of the experts. a, b and h have no
    gradient; the gradient of the output reaches h′ through the addition.
    """
    shape: list[int] = []
    shared_x: list[Tensor] = []

    def keep_shape(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shape[:] = (args[0] if args else kwargs["hidden_states"]).shape[:2]

    def keep_input(_module: object, args: tuple[Any, ...]) -> None:
        shared_x[:] = [args[0].detach().flatten(0, -2)]

    def add(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        routing = Routing.of(args, kwargs, mixture.expert_weights.n_experts)
        assert routing is not None
        parts = list(_parts(mixture, routing, shared_x))
        full = output.detach().new_zeros(3, shape[0] * shape[1], mixture.n_neurons)
        for part in parts:
            full[:, part.token, part.columns] = part.values
        a, b, h = full.view(3, *shape, -1)
        difference = (rewrite(a, b, h) - h).flatten(0, 1)
        rows = output.flatten(0, -2)
        for part in parts:
            added = part.weight * linear(difference[part.token, part.columns], part.values_out)
            rows = rows.index_add(0, part.row, added.to(output.dtype))
        return rows.view_as(output)

    block = model.blocks(model.hf_model)[mixture.layer]
    yield block.register_forward_pre_hook(keep_shape, with_kwargs=True)
    if mixture.shared is not None:
        yield mixture.parent.register_forward_pre_hook(keep_input)
    yield mixture.expert_weights.module.register_forward_hook(add, with_kwargs=True)


class _Reached(NamedTuple):
    """The neurons of an expert on the tokens that reach it.

    Attributes:
        columns: of its neurons among those of the layer.
        token, row: indices of the tokens in the batch, and the rows of the experts' output to which they contribute.
        values: a, b and h.
        weight: routing weight of each token.
        values_out: vᵀ; of a shared expert, times the ratio of its output gain to the experts'.
    """

    columns: slice
    token: Int64[Tensor, " reached"]
    row: Int64[Tensor, " reached"]
    values: Float[Tensor, "3 reached d_mlp"]
    weight: Float[Tensor, "reached 1"]
    values_out: Float[Tensor, "d_model d_mlp"]


def _parts(mixture: Mixture, routing: Routing, shared_x: list[Tensor]) -> Iterator[_Reached]:
    routed, experts = routing.by_expert(mixture.expert_weights.n_experts), mixture.expert_weights.experts()
    common = mixture.sites[0].value_gain
    for number, (site, columns) in enumerate(zip(mixture.sites, mixture.columns, strict=True)):
        weights = site.weights if site.expert == SHARED else experts[number]
        (q, k, v), (q_bias, k_bias, _) = weights.matrices, weights.biases
        if site.expert == SHARED:
            x = shared_x[0]
            row = torch.arange(len(x), device=x.device)
            token, weight = row, torch.ones_like(x[:, 0])
            if site.token_gate is not None:
                gate = Projection(site.token_gate)
                weight = linear(x, gate.weight, gate.bias).sigmoid()[:, 0]
            v = v * (site.value_gain / common)
        else:
            row, weight = routed[number]
            x, token = routing.x[row], routing.place[row]
        with torch.no_grad():
            a, b = linear(x, q, q_bias), linear(x, k, k_bias)
            values = torch.stack([a, b, site.unit(a, b)])
        yield _Reached(columns, token, row, values, weight[:, None], v.T)
