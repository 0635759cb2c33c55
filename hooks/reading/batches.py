"""One pass over a corpus, in batches that fit into memory, with one accumulator per layer."""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from analysis.errors import UserError
from analysis.memory import freed_memory_kept
from analysis.sums.batch import Batch, Window
from hooks.corpus import Corpus
from hooks.locating.sites import Mixture, Site
from hooks.models import LoadedModel
from hooks.reading.capture import CaptureHook, capture_pass
from hooks.reading.capture_points import Extract, capture_points_of

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Tokens per batch by default; larger batches are not faster."""
MEMORY_SHARE = 0.25
"""Fraction of a GPU's free memory for the activations of a batch, as estimated by ``batch_size_for``."""
_REMEDY = {"float16": "use --dtype bfloat16 or float32", "bfloat16": "use --dtype float32"}


@dataclass
class BatchStatus:
    """The accumulators that have started to add a batch, and those that have finished."""

    started: list["ActivationAccumulator"] = field(default_factory=list)
    finished: list["ActivationAccumulator"] = field(default_factory=list)


class ActivationAccumulator(ABC):
    """Accumulates the activations of one layer over a corpus; a batch is added once all its quantities are captured."""

    def __init__(self, layer: Site | Mixture) -> None:
        self.layer, self.device = layer.layer, layer.device
        self._points = capture_points_of(layer)

    @property
    @abstractmethod
    def is_finite(self) -> Bool[Tensor, ""]:
        """Whether all activations so far were finite."""

    def keep(self, captured: Any) -> Any:
        """The part of a captured quantity that is needed until the batch is complete."""
        return captured

    @abstractmethod
    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        """Add a batch, from what was kept, by the names of ``hooks.reading.capture_points``."""

    def capture_hooks(self, batch: Batch, status: BatchStatus) -> list[CaptureHook]:
        """The hooks that capture this batch and then add it."""
        captured: dict[str, Any] = {}

        def capture(name: str, extract: Extract, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            captured[name] = self.keep(extract(args, kwargs, output))
            if len(captured) == len(self._points):
                status.started.append(self)
                self.take(captured, batch)
                captured.clear()
                status.finished.append(self)

        return [
            CaptureHook(point.module, partial(capture, name, point.extract))
            for name, points in self._points.items()
            for point in points
        ]


def read_through(
    model: LoadedModel,
    corpus: Corpus,
    accumulators: Sequence[ActivationAccumulator],
    *,
    batch_size: int | None = None,
    quiet: bool = False,
) -> int:
    """One pass over the corpus, up to the last layer with an accumulator.

    A batch that does not fit into memory is halved, and so are those after it.

    Args:
        model: from ``load_model``.
        corpus: from ``model.read()``.
        accumulators: one per layer.
        batch_size: windows per batch; None chooses it by the available memory.
        quiet: no progress bar.

    Returns:
        The last batch size.

    Raises:
        UserError: activations are NaN or infinite, or a single window does not fit into memory.
    """
    size = batch_size_for(model, corpus) if batch_size is None else batch_size
    waiting = deque(corpus.windows)
    with (
        freed_memory_kept(),
        tqdm(total=corpus.n_tokens, unit=" tokens", unit_scale=True, disable=quiet or not _is_interactive()) as bar,
    ):
        while waiting:
            windows = [waiting.popleft() for _ in range(min(size, len(waiting)))]
            size = _read(model, corpus, windows, accumulators, max(accumulator.layer for accumulator in accumulators))
            bar.update(sum(len(window.tokens) for window in windows))
    return size


def batch_size_for(model: LoadedModel, corpus: Corpus) -> int:
    """Windows per batch of ``TOKENS_AT_ONCE`` tokens, or of as many as fit into a GPU's free memory if these are fewer.

    The estimate is eight vectors of size d_model and five of size d_mlp per token.
    """
    tokens = TOKENS_AT_ONCE[model.device.type]
    if model.device.type == "cuda":
        sites = [*model.sites.values(), *(mixture.sites[0] for mixture in model.mixtures.values())]
        d_mlp, d_model = max(site.n_neurons for site in sites), model.description["d_model"]
        per_token = (8 * d_model + 5 * d_mlp) * max(sites[0].dtype.itemsize, 4)
        free, _ = torch.cuda.mem_get_info(model.device)
        tokens = min(tokens, int(MEMORY_SHARE * free / per_token))
    return max(1, tokens // max(len(window.tokens) for window in corpus.windows))


def _read(
    model: LoadedModel,
    corpus: Corpus,
    windows: Sequence[Window],
    accumulators: Sequence[ActivationAccumulator],
    last_layer: int,
) -> int:
    """Read these windows in one batch, or in halves if they do not fit into memory; returns the size that did.

    Accumulators that have added the whole batch when memory runs out are left out of the passes over its halves.
    """
    blocks = [corpus.jackknife_block_of(window) for window in windows]
    batches = {
        device: Batch.of(windows, blocks, device) for device in {model.device, *(one.device for one in accumulators)}
    }
    batch, status = batches[model.device], BatchStatus()
    try:
        capture_hooks = [
            capture_hook
            for accumulator in accumulators
            for capture_hook in accumulator.capture_hooks(batches[accumulator.device], status)
        ]
        last = capture_pass(model, windows, capture_hooks, last_layer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if len(windows) == 1 or len(status.started) > len(status.finished):
            raise UserError(
                f"out of memory on {model.device} with {len(windows)} windows of {len(windows[0].tokens)} tokens at once: "
                "use a smaller --batch-size or --context, or --dtype bfloat16"
            ) from error
    else:
        _check_finite(accumulators, last, batch, model.description["dtype"])
        return len(windows)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    half, rest = len(windows) // 2, [accumulator for accumulator in accumulators if accumulator not in status.finished]
    size = min(_read(model, corpus, part, rest, last_layer) for part in (windows[:half], windows[half:]))
    _check_finite(status.finished, None, batch, model.description["dtype"])
    return size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; for main memory torch raises a RuntimeError that only its message distinguishes."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _check_finite(
    accumulators: Sequence[ActivationAccumulator],
    last: Float[Tensor, "*batch pos d_model"] | None,
    batch: Batch,
    dtype: str,
) -> None:
    """UserError if an activation of the batch is NaN or infinite, also at skipped positions and after the last hook."""
    finite = [accumulator.is_finite for accumulator in accumulators]
    if last is not None:
        finite.append(last.flatten(-3, -2)[..., batch.fed.to(last.device), :].isfinite().all())
    device = batch.fed.device
    if not finite or bool(torch.stack([flag.to(device) for flag in finite]).all()):
        return
    places = [
        f"activations of layer {accumulator.layer}"
        for accumulator, flag in zip(accumulators, finite, strict=False)
        if not flag
    ]
    places.append("the residual stream after the last layer read")
    remedy = _REMEDY.get(dtype, "the model cannot process this text")
    windows = f"windows {batch.windows[0].index}-{batch.windows[-1].index}"
    raise UserError(f"{places[0]}: NaN or infinite in {windows}, beyond what {dtype} holds: {remedy}")


def _is_interactive() -> bool:
    """Whether a progress bar is visible: in a terminal, or in a notebook."""
    ipython = sys.modules.get("IPython")
    return sys.stderr.isatty() or (ipython is not None and ipython.get_ipython() is not None)
