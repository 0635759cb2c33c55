"""One forward pass over the corpus, reduced to Moments layer by layer as it happens.

A layer's a and b live only until both have been seen; then they become sums and are let go. So the memory does not grow
with the corpus: it is that of the forward pass plus one table of sums a layer.
"""

import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm import tqdm
from transformer_lens.hook_points import HookPoint

from analysis import __version__
from analysis.errors import UserError
from analysis.geometry import Geometry
from analysis.interactions import antisymmetric_share
from analysis.moments import N_BLOCKS, Moments, derangements
from analysis.run import Layer, Run
from analysis.sums import DEFAULT_ALPHAS, Layout
from analysis.tile import TILE
from hooks.corpus import Corpus, Window
from hooks.models import LoadedModel
from hooks.sites import Site

DEFAULT_BATCH = 8
_REMEDY = {"float16": "use --dtype bfloat16 or float32", "bfloat16": "use --dtype float32"}
VERSIONED = ("torch", "transformer-lens", "transformers", "numpy")

HookFunction = Callable[[Tensor, HookPoint], None]


def analyze(
    model: LoadedModel,
    corpus: Corpus,
    *,
    layers: Sequence[int] | None = None,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    draws: int = 1,
    batch_size: int = DEFAULT_BATCH,
    seed: int = 0,
    quiet: bool = False,
) -> Run:
    """Read the corpus with the model and return what was found.

    Args:
        model: from ``load_model``.
        corpus: from ``load_corpus``, encoded with this model's tokenizer.
        layers: indices to analyze; None takes every layer that is a gated MLP.
        alphas: scales of the scaling symmetry, none of them 0; limits that exist are added.
        draws: random re-pairings of neurons for the null.
        batch_size: windows in one forward pass; changes time and memory, not results.
        seed: of the re-pairings.
        quiet: no progress bar.

    Raises:
        UserError: a layer is not there, or activations are NaN or infinite.
    """
    if batch_size < 1:
        raise UserError(f"a batch of {batch_size} windows cannot be read: use at least 1")
    started = time.perf_counter()
    sites = select_sites(model, layers)
    geometry = {layer: Geometry.of(site.q, site.k, site.v, site.gain) for layer, site in sites.items()}
    moments = collect(
        model,
        corpus,
        sites,
        geometry,
        alphas=alphas,
        draws=draws,
        batch_size=batch_size,
        seed=seed,
        quiet=quiet,
    )
    found = {
        layer: Layer(site.unit, moments[layer], geometry[layer], site.gain_source, _interaction_antisymmetry(site))
        for layer, site in sites.items()
    }
    asked = range(model.description["n_layers"]) if layers is None else layers
    skipped = {layer: reason for layer, reason in model.skipped.items() if layer in asked}
    settings = {
        "context": corpus.context,
        "bos": model.bos,
        "skip_positions": corpus.skip_positions,
        "alphas": [float(alpha) for alpha in alphas],
        "draws": draws,
        "jackknife_blocks": N_BLOCKS,
        "seed": seed,
        "accumulation": f"products in float32 or the model's dtype if wider, tiles of {TILE} tokens, sums in float64",
    }
    record = {
        "device": _device_name(model.device),
        "batch_size": batch_size,
        "wall_time_s": round(time.perf_counter() - started, 2),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"gated-mlp-symmetry": __version__, "python": platform.python_version()}
        | {name: version(name) for name in VERSIONED},
    }
    return Run(
        found, model.description, settings, (corpus.description,), corpus.window_keys, model.acceptance, skipped, record
    )


def select_sites(model: LoadedModel, layers: Sequence[int] | None) -> dict[int, Site]:
    """The proven sites among the layers asked for; UserError if there is none, or no such layer."""
    if layers is None:
        return model.sites
    if not layers:
        raise UserError("an empty list of layers was given: name some, or leave it out for all")
    n_layers = model.description["n_layers"]
    for layer in layers:
        if not 0 <= layer < n_layers:
            raise UserError(f"layer {layer} is out of range: {model.description['name']} has layers 0-{n_layers - 1}")
    sites = {layer: model.sites[layer] for layer in sorted(set(layers)) if layer in model.sites}
    if not sites:
        raise UserError(f"none of the layers asked for can be analysed (layer {layers[0]}: {model.skipped[layers[0]]})")
    return sites


def collect(
    model: LoadedModel,
    corpus: Corpus,
    sites: dict[int, Site],
    geometry: dict[int, Geometry],
    *,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    draws: int = 1,
    batch_size: int = DEFAULT_BATCH,
    seed: int = 0,
    quiet: bool = False,
) -> dict[int, Moments]:
    """The moments of every site over the corpus, in one pass."""
    streams: dict[int, LayerStream] = {}
    for layer, site in sites.items():
        partners = derangements(site.q.shape[0], draws, seed + layer)
        streams[layer] = LayerStream(site, geometry[layer], Layout.of(site.unit, alphas, draws), partners, corpus)
    with tqdm(total=corpus.n_tokens, unit=" tokens", unit_scale=True, disable=quiet or not _watched()) as bar:
        for batch in _batches(corpus.windows, batch_size):
            hooks = [hook for stream in streams.values() for hook in stream.hooks(batch)]
            forward(model, batch, hooks, last_layer=max(sites))
            _check_finite(streams, batch, model.description["dtype"])
            bar.update(sum(len(window.tokens) for window in batch))
    return {layer: stream.moments for layer, stream in streams.items()}


class LayerStream:
    """The moments of one site as they grow: a and b are kept until both have been seen, then reduced and let go."""

    def __init__(
        self, site: Site, geometry: Geometry, layout: Layout, partners: Int64[Tensor, "draw d_mlp"], corpus: Corpus
    ) -> None:
        self.moments = Moments.empty(site.q.shape[0], layout)
        self._site, self._geometry, self._layout, self._partners = site, geometry, layout, partners
        self._corpus = corpus

    def hooks(self, batch: Sequence[Window]) -> list[tuple[str, HookFunction]]:
        """Hooks for one pass over these windows; a and b may come in either order."""
        seen: dict[str, Tensor] = {}

        def see(tensor: Tensor, hook: HookPoint) -> None:
            seen[str(hook.name)] = tensor
            if len(seen) == 2:
                self._reduce(seen.pop(self._site.hook_a), seen.pop(self._site.hook_b), batch)

        return [(self._site.hook_a, see), (self._site.hook_b, see)]

    def _reduce(
        self, a: Float[Tensor, "batch pos d_mlp"], b: Float[Tensor, "batch pos d_mlp"], batch: Sequence[Window]
    ) -> None:
        for row, window in enumerate(batch):
            counted = slice(window.counted_from, len(window.tokens))
            self.moments += Moments.of(
                a[row, counted],
                b[row, counted],
                unit=self._site.unit,
                value_weight=self._geometry.value_weight,
                balance=self._geometry.balance,
                layout=self._layout,
                partners=self._partners,
                block=self._corpus.block_of(window),
            )


def forward(model: LoadedModel, batch: Sequence[Window], hooks: list[tuple[str, HookFunction]], last_layer: int) -> None:
    """One hooked pass, without the unembedding and without the layers after the last one that is read."""
    tokens, mask = _padded(batch)
    tokens = tokens.to(model.device)
    attention = {} if mask is None else {"attention_mask": mask.to(model.device)}
    try:
        with torch.no_grad(), model.bridge.hooks(fwd_hooks=hooks):
            if last_layer + 1 < len(model.bridge.blocks):
                model.bridge(tokens, return_type=None, stop_at_layer=last_layer + 1, **attention)
            else:
                model.bridge.original_model.base_model(tokens, use_cache=False, **attention)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory with {len(batch)} windows a batch: use a smaller --batch-size") from error


def _interaction_antisymmetry(site: Site) -> float:
    return antisymmetric_share(site.q * site.gain, site.k * site.gain, site.v)


def _batches(windows: Sequence[Window], size: int) -> Iterator[Sequence[Window]]:
    for start in range(0, len(windows), size):
        yield windows[start : start + size]


def _padded(batch: Sequence[Window]) -> tuple[Int64[Tensor, "batch pos"], Int64[Tensor, "batch pos"] | None]:
    """Tokens padded on the right, and the attention mask if any were; padding is never counted."""
    tokens = torch.nn.utils.rnn.pad_sequence([window.tokens for window in batch], batch_first=True)
    lengths = torch.tensor([len(window.tokens) for window in batch])
    if bool((lengths == tokens.shape[1]).all()):
        return tokens, None
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


def _check_finite(streams: dict[int, LayerStream], batch: Sequence[Window], dtype: str) -> None:
    for layer, stream in streams.items():
        if not math.isfinite(float(stream.moments.neuron.values.sum())):
            raise UserError(
                f"activations of layer {layer} are NaN or infinite in windows {batch[0].index}-{batch[-1].index} "
                f"({dtype}): {_REMEDY.get(dtype, 'the weights do not bear this text')}"
            )


def _watched() -> bool:
    """Whether somebody sees a progress bar: a terminal, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _device_name(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else f"{device.type}, {torch.get_num_threads()} threads"
