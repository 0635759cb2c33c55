"""What edits of a model's gated units cost: which windows and which edits are taken, and what is measured on them."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.causal.costs import CAUSAL_SCHEMA, Causal, SingleNeurons, from_tensors, tensors_of
from analysis.causal.edits import DEFAULT_EDITS, Edit, existing_edits, make_edit
from analysis.errors import UserError
from analysis.run import Record, Run
from analysis.storage.progress import Progress
from hooks.corpus import Corpus, Window
from hooks.models import LoadedModel
from hooks.patching.attribution import attribute
from hooks.patching.edit_coefficients import fit_coefficients
from hooks.patching.partial_pass import Scored
from hooks.patching.single_neurons import patch_single_neurons
from hooks.patching.sweep import sweep

MODES = ("none", "attribution", "exact", "both")
ATTRIBUTION_TOKENS = 1024
"""Tokens of the attribution unless asked otherwise: with ten edits about four forward passes over them."""
EXACT_TOKENS = 512
"""Tokens of the exact sweep unless asked otherwise: each costs hundreds of forward passes."""
SINGLE_TOKENS = 128
"""Tokens for single-neuron patching: few, because each neuron takes a pass of its own."""

logger = logging.getLogger(__name__)


def measure_causal(
    model: LoadedModel,
    corpus: Corpus,
    run: Run,
    *,
    mode: str = "both",
    edits: Sequence[str] | None = None,
    n_tokens: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
    resume: bool = False,
) -> Causal:
    """What the edits cost the model, in every layer of the run.

    Args:
        model: from ``load_model``.
        corpus: what the run was made from; some of its windows are taken, evenly spaced.
        run: from ``hooks.collect.analyze``: its layers are edited, and its moments give the c_j of c_j·ab.
        mode: ``attribution`` (first order, every neuron), ``exact`` (every layer) or ``both``.
        edits: names as ``analysis.causal.edits`` spells them; None for the usual ones that exist for the model's units.
        n_tokens: as many windows as hold about this many tokens, at least two.
        seed: of placebos and of the random choice of neurons.
        folder: where an exact sweep keeps finished layers; None for nowhere.
        resume: continue with what is in the folder.

    Raises:
        UserError: the model does not predict the next token, an edit does not exist for its units, or the folder holds
            another sweep.
    """
    if not model.predicts:
        raise UserError(
            f"a {type(model.hf_model).__name__} does not predict the next token, so edits have no cost: use --causal none"
        )
    names = _names(edits, run)
    default = ATTRIBUTION_TOKENS if mode == "attribution" else EXACT_TOKENS
    windows = evenly_spaced(corpus.windows, n_tokens or default)
    coefficients = fit_coefficients(model, windows, run)
    made = {layer: {name: make_edit(name, fit) for name in names} for layer, fit in coefficients.items()}
    progress = None
    if folder is not None and mode in ("exact", "both"):
        progress = Progress.open(folder, _identity(run, windows, names, seed), resume)
    record = {
        "mode": mode,
        "windows": [window.index for window in windows],
        "tokens_scored": sum(len(Scored.of(window)) for window in windows),
        "seed": seed,
        "fitted_on": "c of c·ab: all counted tokens of the run; mean and scale of σ(ab): the windows themselves",
    }
    attribution = attribute(model, windows, made) if mode in ("attribution", "both") else None
    costs = sweep(model, windows, made, seed=seed, progress=progress) if mode in ("exact", "both") else None
    singly = _single_neurons(model, windows, made, names[0], seed, progress) if mode == "both" else None
    return Causal(record, attribution, costs, singly)


def evenly_spaced(windows: Sequence[Window], n_tokens: int) -> list[Window]:
    """Windows evenly spaced over the text with about this many tokens together, at least two where there are two."""
    usable = [window for window in windows if len(Scored.of(window)) > 0]
    if not usable:
        raise UserError("no window has a counted token with another after it: raise --context, or use --causal none")
    per_window = sum(len(window.tokens) for window in usable) / len(usable)
    count = min(len(usable), max(2, math.ceil(n_tokens / per_window)))
    return [usable[place * len(usable) // count] for place in range(count)]


def _names(asked: Sequence[str] | None, run: Run) -> tuple[str, ...]:
    units = list({layer.unit.name: layer.unit for layer in run.layers.values()}.values())
    if asked is None:
        return existing_edits(DEFAULT_EDITS, units)
    names = tuple(asked)
    for name in names:
        if name not in existing_edits(names, units):
            raise UserError(f"{name} does not exist for {', '.join(u.name for u in units)}: leave it out of --edits")
    return names


def _identity(run: Run, windows: Sequence[Window], names: Sequence[str], seed: int) -> Record:
    """Everything that decides the result of a sweep."""
    return {
        "schema": CAUSAL_SCHEMA,
        "model": run.model,
        "layers": list(run.layers),
        "settings": run.settings,
        "text": run.corpus[0]["windows_sha256"],
        "shard": run.corpus[0]["shard"],
        "windows": [window.index for window in windows],
        "edits": list(names),
        "seed": seed,
    }


def _single_neurons(
    model: LoadedModel,
    windows: Sequence[Window],
    edits: Mapping[int, Mapping[str, Edit]],
    name: str,
    seed: int,
    progress: Progress | None,
) -> SingleNeurons:
    known = progress.finished("one-by-one") if progress else None
    if known:
        return from_tensors(SingleNeurons, known)
    logger.info(f"single neurons: {name}")
    found = patch_single_neurons(model, evenly_spaced(windows, SINGLE_TOKENS), edits, name, seed=seed)
    if progress:
        progress.keep("one-by-one", tensors_of(found))
    return found
