"""A corpus read once: batches as large as the memory bears, and accumulators that each capture_pass to one layer."""

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
"""Tokens in a batch unless told otherwise: more make no pass faster."""
MEMORY_SHARE = 0.25
"""The share of a GPU's free memory that the activations of a batch may take by the estimate of ``batch_size_for``."""
_REMEDY = {"float16": "use --dtype bfloat16 or float32", "bfloat16": "use --dtype float32"}


@dataclass
class BatchStatus:
    """Which accumulators have begun to take in a batch, and which have it."""

    begun: list["ActivationAccumulator"] = field(default_factory=list)
    ended: list["ActivationAccumulator"] = field(default_factory=list)


class ActivationAccumulator(ABC):
    """What listens to one layer while the corpus is read: what is captured of a batch is kept until all of it has been."""

    def __init__(self, layer: Site | Mixture) -> None:
        self.layer, self.device = layer.layer, layer.device
        self._sources = capture_points_of(layer)

    @property
    @abstractmethod
    def is_finite(self) -> Bool[Tensor, ""]:
        """Whether everything taken in so far was finite."""

    def keep(self, captured: Any) -> Any:
        """What is kept of something that was captured until the rest has been."""
        return captured

    @abstractmethod
    def take(self, captured: dict[str, Any], batch: Batch) -> None:
        """Take in what was kept of a batch, by the names of ``hooks.reading.capture_points``."""

    def capture_hooks(self, batch: Batch, taking: BatchStatus) -> list[CaptureHook]:
        """What listens while this batch is read."""
        captured: dict[str, Any] = {}

        def capture(name: str, extract: Extract, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            captured[name] = self.keep(extract(args, kwargs, output))
            if len(captured) == len(self._sources):
                taking.begun.append(self)
                self.take(captured, batch)
                captured.clear()
                taking.ended.append(self)

        return [
            CaptureHook(source.module, partial(capture, name, source.extract))
            for name, sources in self._sources.items()
            for source in sources
        ]


def read_through(
    model: LoadedModel,
    corpus: Corpus,
    accumulators: Sequence[ActivationAccumulator],
    *,
    batch_size: int | None = None,
    quiet: bool = False,
) -> int:
    """One pass over the corpus, no further than the last layer that is listened to.

    Where a batch does not fit into the memory it is halved, and so are those that follow. Returns the last batch size.

    Args:
        model: from ``load_model``.
        corpus: from ``model.read()``.
        accumulators: what listens.
        batch_size: windows at once; None fits them to the memory.
        quiet: no progress bar.

    Raises:
        UserError: something overflowed, or not even one window fits into the memory.
    """
    size = batch_size_for(model, corpus) if batch_size is None else batch_size
    waiting = deque(corpus.windows)
    with (
        freed_memory_kept(),
        tqdm(total=corpus.n_tokens, unit=" tokens", unit_scale=True, disable=quiet or not _watched()) as bar,
    ):
        while waiting:
            windows = [waiting.popleft() for _ in range(min(size, len(waiting)))]
            size = _read(model, corpus, windows, accumulators, max(accumulator.layer for accumulator in accumulators))
            bar.update(sum(len(window.tokens) for window in windows))
    return size


def batch_size_for(model: LoadedModel, corpus: Corpus) -> int:
    """Windows at once so that a batch has ``TOKENS_AT_ONCE``, or on a GPU what its free memory bears if that is less.

    A token takes, by estimate, eight vectors of the residual stream and five of the MLP.
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
    """Read these windows at once, or in halves where there is no room for that; returns how many there was room for.

    A accumulator that has the whole batch when the memory runs out does not capture_pass to its halves.
    """
    blocks = [corpus.jackknife_block_of(window) for window in windows]
    batches = {
        device: Batch.of(windows, blocks, device) for device in {model.device, *(one.device for one in accumulators)}
    }
    batch, taking = batches[model.device], BatchStatus()
    try:
        capture_hooks = [
            capture_hook
            for accumulator in accumulators
            for capture_hook in accumulator.capture_hooks(batches[accumulator.device], taking)
        ]
        last = capture_pass(model, windows, capture_hooks, last_layer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if len(windows) == 1 or len(taking.begun) > len(taking.ended):
            raise UserError(
                f"out of memory on {model.device} with {len(windows)} windows of {len(windows[0].tokens)} tokens at once: "
                "use a smaller --batch-size or --context, or --dtype bfloat16"
            ) from error
    else:
        _check_finite(accumulators, last, batch, model.description["dtype"])
        return len(windows)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    half, rest = len(windows) // 2, [accumulator for accumulator in accumulators if accumulator not in taking.ended]
    size = min(_read(model, corpus, some, rest, last_layer) for some in (windows[:half], windows[half:]))
    _check_finite(taking.ended, None, batch, model.description["dtype"])
    return size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch says so of main memory in the words of a RuntimeError only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _check_finite(
    accumulators: Sequence[ActivationAccumulator],
    last: Float[Tensor, "*batch pos d_model"] | None,
    batch: Batch,
    dtype: str,
) -> None:
    """Refuse a batch in which something overflowed, be it at a position that is not counted or after the last hook."""
    finite = [accumulator.is_finite for accumulator in accumulators]
    if last is not None:
        finite.append(last.flatten(-3, -2)[..., batch.fed.to(last.device), :].isfinite().all())
    device = batch.fed.device
    if not finite or bool(torch.stack([flag.to(device) for flag in finite]).all()):
        return
    where = [
        f"activations of layer {accumulator.layer}"
        for accumulator, flag in zip(accumulators, finite, strict=False)
        if not flag
    ]
    where.append("the residual stream after the last layer read")
    remedy = _REMEDY.get(dtype, "the weights do not bear this text")
    windows = f"windows {batch.windows[0].index}-{batch.windows[-1].index}"
    raise UserError(f"{where[0]}: NaN or infinite in {windows}, beyond what {dtype} holds: {remedy}")


def _watched() -> bool:
    """Whether somebody sees a progress bar: a terminal, or a notebook."""
    ipython = sys.modules.get("IPython")
    return sys.stderr.isatty() or (ipython is not None and ipython.get_ipython() is not None)
