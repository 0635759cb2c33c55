"""Changing a model for as long as a block lasts: its neurons by an edit, its weights by an action.

    with rewriting(model, {11: Change(Exchange(), model.sites[11].unit)}):
        model.plain(tokens)

``rewriting`` puts h′ where the down projection reads h; ``acting`` changes q, k, v themselves. When the block ends, also by
an exception, the model is what it was, bit for bit. Blocks nest; where two rewrite the same h, the inner one sees what the
outer one made of it, and a and b as the model computes them.

The two check each other: exchanging the weights of a layer is exchanging its pre-activations.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from analysis.actions import Action
from analysis.errors import UserError
from hooks.ears import Extract, sources_of
from hooks.models import LoadedModel
from hooks.sites import Site

Activations = Float[Tensor, "batch pos d_mlp"]
Rewrite = Callable[[Activations, Activations, Activations], Activations]
"""(a, b, h) → what the down projection reads instead of h."""


@contextmanager
def rewriting(model: LoadedModel, rewrites: Mapping[int, Rewrite]) -> Iterator[None]:
    """Within the block, the named layers' h is rewritten in every pass; UserError for a layer that is no site."""
    with ExitStack() as stack:
        for layer, rewrite in rewrites.items():
            for handle in _hooked(site_of(model, layer), rewrite):
                stack.callback(handle.remove)
        yield


@contextmanager
def acting(model: LoadedModel, actions: Mapping[int, Action]) -> Iterator[None]:
    """Within the block, the named layers' weights are those after the action."""
    with ExitStack() as stack:
        for layer, action in actions.items():
            form = site_of(model, layer).gated_mlp()
            after = {name: weight.clone() for name, weight in action(form).weights.items()}  # q and k may trade places
            for name, weight in form.weights.items():
                stack.callback(weight.copy_, weight.clone())
                weight.copy_(after[name])
        yield


def site_of(model: LoadedModel, layer: int) -> Site:
    """The site of a layer; UserError with the reason if it is none."""
    if layer not in model.sites:
        reason = model.skipped.get(layer, f"the model has layers 0-{model.description['n_layers'] - 1}")
        raise UserError(f"layer {layer} cannot be edited ({reason}): choose one that is analysed")
    return model.sites[layer]


def _hooked(site: Site, rewrite: Rewrite) -> Iterator[RemovableHandle]:
    seen: dict[str, Tensor] = {}

    def keep(name: str, extract: Extract) -> Callable[..., None]:
        def hook(_module: object, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen[name] = extract(args, kwargs, output)

        return hook

    def replace(_module: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        h, *others = inputs
        return (rewrite(seen.pop("a"), seen.pop("b"), h), *others)

    for name, sources in sources_of(site).items():
        for module, extract in sources:
            yield module.register_forward_hook(keep(name, extract), with_kwargs=True)
    yield site.taps.down.register_forward_pre_hook(replace)
