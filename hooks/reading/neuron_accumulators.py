"""One neuron over a corpus: a sample of its (a, b), and the contexts of its strongest activations."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import linear

from analysis.neuron import NeuronSample
from analysis.sums.batch import Batch
from analysis.weights.experts import SHARED
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.reading.batches import ActivationAccumulator


class NeuronAccumulator(ActivationAccumulator):
    """Accumulates samples and strongest contexts of one neuron that every token reaches.

    Attributes:
        seen: the sample and the contexts so far.
    """

    def __init__(self, layer: Site | Mixture, site: Site, neuron: int, size: int) -> None:
        super().__init__(layer)
        self.seen = NeuronSample.empty(size)
        self._site, self._neuron, self._size = site, neuron, size
        self._finite = True

    @property
    def is_finite(self) -> Bool[Tensor, ""]:
        return torch.tensor(self._finite)

    def keep(self, captured: Float[Tensor, "*place d_mlp"]) -> Float[Tensor, "*place"]:
        return captured[..., self._neuron].double().cpu()

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        a, b = (captured.pop(symbol).reshape(len(batch.windows), -1) for symbol in "ab")
        self._take(a, b, torch.ones_like(a, dtype=torch.bool), batch)

    def _take(
        self,
        a: Float[Tensor, "batch pos"],
        b: Float[Tensor, "batch pos"],
        reached: Bool[Tensor, "batch pos"],
        batch: Batch,
    ) -> None:
        """Add a and b, which are NaN at tokens that do not reach the neuron."""
        for row, window in enumerate(batch.windows):
            length = len(window.tokens)
            own_a, own_b, at = a[row, :length], b[row, :length], reached[row, :length]
            self._finite &= bool(own_a[at].isfinite().all() and own_b[at].isfinite().all())
            self.seen += NeuronSample.of(own_a, own_b, self._site.unit, window, self._size)


class ExpertNeuronAccumulator(NeuronAccumulator):
    """Accumulates samples and contexts of one neuron of an expert, at the tokens routed to that expert."""

    def keep(self, captured: Any) -> Any:
        if not isinstance(captured, Routing):
            return None
        site, own = self._site, slice(self._neuron, self._neuron + 1)
        row, _ = captured.by_expert(int(site.expert or 0) + 1)[-1]
        pairs = zip(site.weights.matrices[:2], site.weights.biases[:2], strict=True)
        a, b = (
            linear(captured.x[row], weight[own], None if bias is None else bias[own])[:, 0].double().cpu()
            for weight, bias in pairs
        )
        return captured.place[row].cpu(), a, b

    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        place, a, b = captured.pop("routing")
        shape = len(batch.windows), max(len(window.tokens) for window in batch.windows)
        both = torch.full((2, shape[0] * shape[1]), torch.nan, dtype=torch.float64)
        both[:, place] = torch.stack([a, b])
        reached = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
        reached[place] = True
        self._take(both[0].view(shape), both[1].view(shape), reached.view(shape), batch)


def neuron_accumulator(layer: Site | Mixture, site: Site, index: int, size: int) -> NeuronAccumulator:
    """An empty accumulator for one neuron.

    Args:
        layer: the whole layer.
        site: of the layer, the MLP or expert of the neuron.
        index: of the neuron in the site.
        size: the number of contexts kept for each sign pair.
    """
    if site.expert is None or site.expert == SHARED:  # every token reaches it
        return NeuronAccumulator(site, site, index, size)
    return ExpertNeuronAccumulator(layer, site, index, size)
