"""The exact sweep: the cost of every edit in every layer.

A layer is edited alone, on counted positions and on all of them, and so is its placebo; then together with all layers
before it, and with all layers after it. Costs are always measured on the same scored tokens. The inputs of every block come
from one clean pass, so that only the blocks from the edited layer on have to run. When all layers before it are edited too,
its input is the one kept from the previous step.

With E edits over L layers and both cumulative series this is 6E + 2 runs of the text per layer, each from that layer
on: about (6E + 2)·L/2 passes through the blocks, and (6E + 2)·L through the unembedding.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.causal.costs import POSITIONS, QUANTITIES, VERSIONS, LayerCosts, Sweep, from_tensors, tensors_of
from analysis.causal.divergence import cross_entropy, log_probabilities
from analysis.causal.edits import Change, Edit, Partial, Rescaled, Zero
from analysis.noise import directions
from analysis.storage.progress import Progress
from analysis.units.registry import Unit
from hooks.corpus import Window
from hooks.models import LoadedModel
from hooks.patching.partial_pass import Scored, clean_pass
from hooks.patching.patched_runs import PatchedRun, StartPoint


def control_of(unit: Unit) -> Edit:
    """An edit that changes nothing: k → −3k, v → −v/3 where up is linear, else h recomputed from a and b."""
    return Rescaled(-3.0) if unit.up_is_linear else Partial(Zero(), 0.0)


Hidden = Float[Tensor, "pos d_model"]
Edits = Mapping[int, Mapping[str, Edit]]
"""The edits of every layer, by name."""

logger = logging.getLogger(__name__)


def sweep(
    model: LoadedModel, windows: Sequence[Window], edits: Edits, *, seed: int = 0, progress: Progress | None = None
) -> Sweep:
    """Measure the cost of every edit in every layer.

    Args:
        model: from ``load_model``.
        windows: the sequences, each with at least one scored token.
        edits: by layer and name, with the same names in the same order in every layer.
        seed: of the placebos.
        progress: stores finished layers, and has those of an interrupted sweep.
    """
    started = time.perf_counter()
    states = [_State.of(model, window) for window in windows]
    clean_seconds = time.perf_counter() - started
    steps = _Steps(model, states, edits, seed)
    layers = sorted(edits)
    layer_costs: dict[int, LayerCosts] = {}
    for number, layer in enumerate(layers, 1):
        stored = progress.finished(f"layer-{layer}") if progress else None
        layer_costs[layer] = from_tensors(LayerCosts, stored) if stored else steps.step(layer)
        if progress and not stored:
            progress.keep(f"layer-{layer}", tensors_of(layer_costs[layer]))
        seconds = layer_costs[layer].effort[0]
        logger.info(f"layer {layer}: {'already finished' if stored else f'{seconds:.0f} s'} ({number} of {len(layers)})")
    n_tokens = torch.tensor([len(state.scored) for state in states])
    base = torch.tensor([state.base for state in states], dtype=torch.float64)
    names = tuple(edits[layers[0]])
    return Sweep(names, n_tokens, base, layer_costs, model.description["n_layers"], clean_seconds)


@dataclass
class _State:
    """The state of the sweep on one window.

    Attributes:
        window: the tokens.
        scored: the positions whose predictions are compared.
        inputs: of every block in the unedited model.
        base: cross-entropy of the unedited model, summed over scored tokens, in nats.
        reached: the layer up to which the cumulative edits have been applied, −1 before the first.
        edited: for each edit, the input of layer ``reached`` when all layers before it are edited.
    """

    window: Window
    scored: Scored
    inputs: Float[Tensor, "layer pos d_model"]
    base: float
    reached: int = -1
    edited: list[Hidden] = field(default_factory=list)

    @property
    def counted(self) -> Bool[Tensor, " pos"]:
        return torch.arange(len(self.window.tokens)) >= self.window.counted_from

    @classmethod
    def of(cls, model: LoadedModel, window: Window) -> "_State":
        logits, inputs = clean_pass(model, window, {})
        scored = Scored.of(window)
        log_p = log_probabilities(scored.of_logits(logits[0]))
        return cls(window, scored, inputs, cross_entropy(log_p, scored.targets.to(log_p.device)))


@dataclass(frozen=True)
class _Steps:
    """One step per layer, in ascending order; layers that are finished already may be left out."""

    model: LoadedModel
    states: Sequence[_State]
    edits: Edits
    seed: int

    def step(self, layer: int) -> LayerCosts:
        """All costs of one layer."""
        started = time.perf_counter()
        parts = [self._of_window(layer, state) for state in self.states]
        single, bottom, top, control, base, work = (torch.stack(part, dim=-1) for part in zip(*parts, strict=True))
        seconds = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        return LayerCosts(single, bottom, top, control, base, torch.cat([seconds, work.sum(dim=-1)]))

    def _of_window(self, layer: int, state: _State) -> tuple[Tensor, ...]:
        """The fields of ``LayerCosts`` without their last axis, for one window."""
        hidden, names = state.inputs[layer], list(self.edits[layer])
        start = StartPoint.of(self.model, layer, state.window, hidden)
        following = [other for other in sorted(self.edits) if other > layer]
        together = [PatchedRun(hidden, self._counted(name, [layer, *following], state)) for name in names]
        edited = zip(names, self._edited_inputs(layer, state), strict=True)
        cumulative = [PatchedRun(entry, self._counted(name, [layer], state)) for name, entry in edited]
        single, _ = start.costs([PatchedRun(hidden, {layer: change}) for change in self._alone(layer, state)])
        unit = self.model.layers[layer].unit
        control, _ = start.costs([PatchedRun(hidden, {layer: Change(control_of(unit), unit)})])
        top, _ = start.costs(together)
        bottom, next_inputs = start.costs(cumulative, keep=following[0] if following else None)
        if following:
            state.reached, state.edited = following[0], next_inputs
        base = cross_entropy(start.base, state.scored.targets.to(start.base.device))
        work = torch.tensor([start.effort.blocks, start.effort.unembeddings], dtype=torch.float64)
        shape = (len(QUANTITIES), len(names), len(VERSIONS), len(POSITIONS))
        return single.reshape(shape), bottom, top, control[:, 0], torch.tensor(base, dtype=torch.float64), work

    def _alone(self, layer: int, state: _State) -> Iterator[Change]:
        """Every edit of the layer as itself and as its placebo, each on counted and on all positions."""
        unit, length = self.model.layers[layer].unit, len(state.window.tokens)
        noise = directions(self.seed, layer, state.window.index, length, self.model.layers[layer].n_neurons)
        for edit in self.edits[layer].values():
            for noise_or_none in (None, noise):
                for positions in (state.counted, None):
                    yield Change(edit, unit, positions=positions, noise=noise_or_none)

    def _counted(self, name: str, layers: Sequence[int], state: _State) -> dict[int, Change]:
        """One edit in several layers, on counted positions."""
        return {
            layer: Change(self.edits[layer][name], self.model.layers[layer].unit, positions=state.counted)
            for layer in layers
        }

    def _edited_inputs(self, layer: int, state: _State) -> list[Hidden]:
        """The input of the layer under each edit of all layers before it: kept by the previous step, or recomputed."""
        names, first = list(self.edits[layer]), min(self.edits)
        hidden = state.inputs[first]
        if layer == first:
            return [hidden] * len(names)
        if state.reached != layer:
            before = [other for other in sorted(self.edits) if other < layer]
            start = StartPoint.of(self.model, first, state.window, hidden)
            runs = [PatchedRun(hidden, self._counted(name, before, state)) for name in names]
            state.reached, state.edited = layer, start.costs(runs, keep=layer)[1]
        return state.edited
