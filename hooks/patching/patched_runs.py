"""Costs of many patched runs of one window: each row of a batch has its own input and its own changes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from analysis.causal.divergence import costs, log_probabilities
from analysis.causal.edits import Change
from hooks.corpus import Window
from hooks.models import LoadedModel
from hooks.patching.partial_pass import Scored, pass_from_layer

MAX_LOGITS = 1 << 27
"""Logits of one batch, half a gigabyte in float32; the larger the vocabulary, the fewer runs in a batch."""


@dataclass(frozen=True)
class PatchedRun:
    """One run of a window.

    Attributes:
        hidden: input of the first block that runs.
        changes: by layer.
    """

    hidden: Float[Tensor, "pos d_model"]
    changes: Mapping[int, Change]


@dataclass
class Effort:
    """The number of blocks and unembeddings computed so far, each row of a batch counted."""

    blocks: int = 0
    unembeddings: int = 0


@dataclass(frozen=True)
class StartPoint:
    """A window and the layer at which its patched runs start; measures their costs against the unedited model.

    Attributes:
        model: the model.
        layer: the first block that runs.
        window: the tokens.
        scored: the positions whose predictions are compared.
        base: the unedited model's log-probabilities there.
        effort: what has been computed so far.
    """

    model: LoadedModel
    layer: int
    window: Window
    scored: Scored
    base: Float[Tensor, "token vocab"]
    effort: Effort = field(default_factory=Effort)

    @classmethod
    def of(cls, model: LoadedModel, layer: int, window: Window, hidden: Float[Tensor, "pos d_model"]) -> "StartPoint":
        """From the input of the layer in the unedited model."""
        scored = Scored.of(window)
        logits, _ = pass_from_layer(model, layer, hidden[None], window, {})
        start = cls(model, layer, window, scored, log_probabilities(scored.of_logits(logits[0])))
        start._count(1)
        return start

    def costs(
        self, runs: Sequence[PatchedRun], keep: int | None = None
    ) -> tuple[Float64[Tensor, "quantity row"], list[Float[Tensor, "pos d_model"]]]:
        """KL and ΔCE of each run in nats, summed over scored tokens, and the input of block ``keep`` in each."""
        batch_costs, kept = [], []
        targets = self.scored.targets.to(self.base.device)
        for batch in self._batches(runs):
            hidden = torch.stack([run.hidden for run in batch])
            layers = {layer for run in batch for layer in run.changes}
            rewrites = {layer: partial(_rewritten, [run.changes.get(layer) for run in batch]) for layer in sorted(layers)}
            logits, inputs = pass_from_layer(self.model, self.layer, hidden, self.window, rewrites, keep)
            batch_costs.append(costs(self.base, self.scored.of_logits(logits), targets))
            kept += [] if inputs is None else list(inputs)
            self._count(len(batch))
        return torch.cat(batch_costs, dim=1), kept

    def _batches(self, runs: Sequence[PatchedRun]) -> Iterator[Sequence[PatchedRun]]:
        size = max(1, MAX_LOGITS // (len(self.window.tokens) * self.base.shape[-1]))
        for start in range(0, len(runs), size):
            yield runs[start : start + size]

    def _count(self, rows: int) -> None:
        self.effort.blocks += rows * (self.model.description["n_layers"] - self.layer)
        self.effort.unembeddings += rows


def _rewritten(
    changes: Sequence[Change | None],
    a: Float[Tensor, "row pos d_mlp"],
    b: Float[Tensor, "row pos d_mlp"],
    h: Float[Tensor, "row pos d_mlp"],
) -> Float[Tensor, "row pos d_mlp"]:
    """h with the change of every row applied."""
    rows = zip(changes, a, b, h, strict=True)
    return torch.stack([now if change is None else change(gate, up, now) for change, gate, up, now in rows])
