"""The controls of a run: the layers' own weights on their own inputs of the first window."""

from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from analysis.controls import measure_controls
from hooks.corpus import Corpus
from hooks.forward import forward
from hooks.models import LoadedModel
from hooks.sites import Site


def controls_of(model: LoadedModel, corpus: Corpus, sites: dict[int, Site], seed: int = 0) -> tuple[dict[str, Any], ...]:
    """Every control of every layer: see ``analysis.controls``."""
    window = corpus.windows[0]
    inputs: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: HookPoint) -> None:
        inputs[str(hook.name)] = x[0, window.counted_from :]

    forward(model, [window], [(site.hook_x, keep) for site in sites.values()], last_layer=max(sites))
    found = []
    for layer, site in sites.items():
        x = inputs.pop(site.hook_x)
        wide = torch.promote_types(x.dtype, torch.float32)
        found += [{"layer": layer} | record for record in measure_controls(site.gated_mlp().to(wide), x.to(wide), seed)]
    return tuple(found)
