"""One forward pass over the corpus, reduced to Moments layer by layer as it happens.

A layer's a and b live only until both have been captured; then they become sums and are freed. Memory does not grow with
the corpus: it is that of the forward pass plus one table of sums per layer.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from analysis import __version__
from analysis.errors import UserError
from analysis.run import Layer, Run
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS, check_alphas
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS
from analysis.sums.output_moments import SAMPLED_TOKENS
from hooks.corpus import Corpus
from hooks.locating.sites import Mixture, Site
from hooks.models import LoadedModel
from hooks.reading.acceptance import acceptance_of
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import batch_size_for, read_through
from hooks.reading.first_window import controls_of, verified_on_text

OUTPUT_TOKENS = 4096
"""Counted tokens on which the output of layers is computed by default: all of a text that has no more, else a random share
with about as many. So its cost does not grow with the text. A version costs one more down projection on each of them."""
SMALLEST_OUTPUT_SHARE = 1e-4
VERSIONED = ("torch", "transformer-lens", "transformers", "numpy", "numba")


def analyze(
    model: LoadedModel,
    corpus: Corpus,
    *,
    layers: Sequence[int] | None = None,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    draws: int = DEFAULT_DRAWS,
    output_share: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Run:
    """Run the model over the corpus and reduce what its gated units do to a ``Run``.

    Args:
        model: from ``load_model``.
        corpus: from ``load_corpus``, encoded with this model's tokenizer.
        layers: indices to analyze; None takes every layer that is a gated MLP.
        alphas: scales of the scaling symmetry, none of them 0; limits that exist are added.
        draws: random permutations of neurons for the permutation null.
        output_share: share of the counted tokens, chosen at random, on which what layers write is computed with all units
            edited; None is 1 for a text of up to ``OUTPUT_TOKENS``, and as many tokens of a longer one.
        batch_size: windows in one forward pass; changes time and memory, not results. None fits them to the memory.
        seed: of the permutations.
        quiet: no progress bar.

    Raises:
        UserError: a layer is not there, an argument is out of its range, or activations are NaN or infinite.
    """
    if batch_size is not None and batch_size < 1:
        raise UserError(f"a batch of {batch_size} windows cannot be read: use at least 1")
    if draws < 1:
        raise UserError(f"{draws} permutations cannot be drawn: use at least 1")
    check_output_share(output_share)
    check_alphas(alphas)
    started = time.perf_counter()
    chosen = select_layers(model, layers)
    size = batch_size_for(model, corpus) if batch_size is None else batch_size
    share = output_share_for(corpus) if output_share is None else output_share
    found, kinds = collect(
        model, corpus, chosen, alphas=alphas, draws=draws, output_share=share, batch_size=size, seed=seed, quiet=quiet
    )
    controls = controls_of(model, corpus, chosen, seed)
    asked = range(model.description["n_layers"]) if layers is None else layers
    skipped = {layer: reason for layer, reason in model.skipped.items() if layer in asked}
    record = {
        "batch_size": size,
        "statistics": ", ".join(sorted(kinds)),
        "wall_time_s": round(time.perf_counter() - started, 2),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return Run(
        layers=found,
        model=model.description,
        settings=settings_of(model, corpus, alphas, draws, seed, share),
        corpus=(corpus.description,),
        windows=corpus.window_keys,
        acceptance=acceptance_of(model, corpus, found, controls, verified_on_text(model, corpus, chosen)),
        controls=controls,
        token_texts=_token_texts(model, found),
        skipped=skipped,
        record=machine_of(model) | record,
    )


def output_share_for(corpus: Corpus) -> float:
    """The share of a text that has about ``OUTPUT_TOKENS`` counted tokens; 1 if there are no more."""
    return min(1.0, round(OUTPUT_TOKENS / corpus.n_counted_everywhere, 6))


def check_output_share(share: float | None) -> None:
    """Raise UserError if it is not a share of tokens that leaves some."""
    if share is not None and not SMALLEST_OUTPUT_SHARE <= share <= 1:
        raise UserError(
            f"an output share of {share:g} is out of range: it must lie between {SMALLEST_OUTPUT_SHARE:g} and 1"
        )


def settings_of(
    model: LoadedModel, corpus: Corpus, alphas: Sequence[float], draws: int, seed: int, output_share: float | None = None
) -> dict[str, Any]:
    """How a corpus is read, as recorded in a run's provenance."""
    return {
        "context": corpus.context,
        "bos": model.bos,
        "skip_positions": corpus.skip_positions,
        "alphas": [float(alpha) for alpha in alphas],
        "draws": draws,
        "jackknife_blocks": N_JACKKNIFE_BLOCKS,
        "jackknife_groups_of_neurons": N_JACKKNIFE_GROUPS,
        "output_share": output_share,
        "output_sample": SAMPLED_TOKENS,
        "seed": seed,
        "accumulation": "products in float32 or the model's dtype if wider, sums of up to 256 of them too, then float64",
    }


def machine_of(model: LoadedModel) -> dict[str, Any]:
    """The device and the versions of the libraries."""
    versions = {"gated-mlp-symmetry": __version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in VERSIONED}
    return {"device": _device_name(model.device), "versions": versions}


def _token_texts(model: LoadedModel, layers: dict[int, Layer]) -> dict[int, str]:
    """The text of every token that a table of tokens names."""
    named: set[int] = set()
    for layer in layers.values():
        named |= {int(token) for token in layer.estimates.extreme_neurons()["token"]}
        named |= {int(place["token"]) for place in layer.estimates.top_tokens()}
    return {token: model.tokenizer.decode([token]) for token in sorted(named) if token >= 0}


def select_layers(model: LoadedModel, layers: Sequence[int] | None) -> dict[int, Site | Mixture]:
    """The verified layers among those asked for; UserError if there is none, or no such layer."""
    every = model.layers
    if layers is None:
        return every
    if not layers:
        raise UserError("an empty list of layers was given: name some, or leave it out for all")
    n_layers = model.description["n_layers"]
    for layer in layers:
        if not 0 <= layer < n_layers:
            raise UserError(f"layer {layer} is out of range: {model.description['name']} has layers 0-{n_layers - 1}")
    chosen = {layer: every[layer] for layer in sorted(set(layers)) if layer in every}
    if not chosen:
        raise UserError(f"none of the layers asked for can be analysed (layer {layers[0]}: {model.skipped[layers[0]]})")
    return chosen


def collect(
    model: LoadedModel,
    corpus: Corpus,
    layers: Mapping[int, Site | Mixture],
    *,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    draws: int = DEFAULT_DRAWS,
    output_share: float = 1.0,
    batch_size: int | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> tuple[dict[int, Layer], set[str]]:
    """Every layer with its moments over the corpus, in one pass; and the kinds of reducers that took the sums."""
    accumulators = {
        index: accumulator_of(layer, alphas, draws, seed + index, output_share) for index, layer in layers.items()
    }
    read_through(model, corpus, list(accumulators.values()), batch_size=batch_size, quiet=quiet)
    kinds = {kind for accumulator in accumulators.values() for kind in accumulator.kind.split(", ")}
    return {index: accumulator.result() for index, accumulator in accumulators.items()}, kinds


def _device_name(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else f"{device.type}, {torch.get_num_threads()} threads"
