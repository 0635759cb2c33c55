"""A whole analysis in one call: load, read, reduce, edit, and compare with random weights.

    full = measure("smollm2-135m", corpus="my.txt", causal="both")
    write_directory(full.run, Path("out/mine"), random=full.random, causal=full.causal)

This is what ``run_analysis.py analyze`` does. The steps are there to be called alone: ``load_model``, ``LoadedModel.read``,
``hooks.collect.analyze`` and ``hooks.causal.measure_causal``. One model at a time is in memory.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from analysis.causal.edits import parse_edits
from analysis.errors import UserError
from analysis.full_run import FullRun
from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS, check_alphas
from hooks.causal import MODES, measure_causal
from hooks.collect import analyze, check_output_share
from hooks.corpus import DEFAULT_CONTEXT, SAMPLE, check_windows
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.models import load_model

DEFAULT_TOKENS = 20_000


def measure(
    model: str = DEFAULT_MODEL,
    *,
    corpus: str = SAMPLE,
    tokens: int | None = DEFAULT_TOKENS,
    context: int = DEFAULT_CONTEXT,
    skip_positions: int = 1,
    shard: str = "0/1",
    layers: Sequence[int] | None = None,
    alphas: Sequence[float] = DEFAULT_ALPHAS,
    draws: int = DEFAULT_DRAWS,
    output_share: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    random_weights: bool = False,
    causal: str | None = None,
    edits: str | None = None,
    causal_tokens: int | None = None,
    progress: Path | None = None,
    resume: bool = False,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> FullRun:
    """Measure a model on a text.

    Args:
        model, device, dtype, revision, trust_remote_code: see ``hooks.models.load_model``.
        corpus, tokens, context, skip_positions, shard: see ``hooks.corpus.load_corpus``; ``tokens`` is its ``max_tokens``.
        layers, alphas, draws, output_share, batch_size, seed, quiet: see ``hooks.collect.analyze``.
        random_weights: also measure the same architecture with random weights, on the same tokens.
        causal: what edits cost: ``none``, ``attribution``, ``exact`` or ``both``. None is ``attribution`` where the model
            predicts the next token, else ``none``.
        edits, causal_tokens: see ``hooks.causal.measure_causal``; edits separated by commas.
        progress: where an exact sweep keeps finished layers.
        resume: continue an exact sweep from there.

    Raises:
        UserError: an argument is out of its range, or what ``load_model``, ``load_corpus``, ``analyze`` and
            ``measure_causal`` raise. Arguments are checked before the model is loaded.
    """
    check_windows(context, skip_positions, shard)
    check_alphas(alphas)
    check_output_share(output_share)
    names = None if edits is None else parse_edits(edits)
    _check_causal(causal, is_asked=edits is not None or causal_tokens is not None, resume=resume)
    load = partial(load_model, model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    read_all = partial(
        analyze, layers=layers, alphas=alphas, draws=draws, output_share=output_share, batch_size=batch_size, seed=seed,
        quiet=quiet,
    )  # fmt: skip

    subject = load()
    text = subject.read(corpus, context=context, skip_positions=skip_positions, max_tokens=tokens, shard=shard)
    run, costs = read_all(subject, text), None
    mode = causal or ("attribution" if subject.predicts or names or causal_tokens else "none")
    if mode != "none":
        costs = measure_causal(
            subject, text, run, mode=mode, edits=names, n_tokens=causal_tokens, seed=seed, folder=progress, resume=resume
        )
    del subject  # one model at a time
    random = read_all(load(random_seed=seed), text) if random_weights else None
    return FullRun(run, costs, random)


def _check_causal(causal: str | None, is_asked: bool, resume: bool) -> None:
    """UserError if the options about edits contradict each other."""
    if causal is not None and causal not in MODES:
        raise UserError(f"unknown --causal {causal!r}: choose one of {', '.join(MODES)}")
    if causal == "none" and is_asked:
        raise UserError("--edits and --causal-tokens say what --causal measures, which is none: leave them out")
    if resume and causal not in ("exact", "both"):
        raise UserError(
            f"--resume continues an exact sweep, not --causal {causal or 'attribution'}: add --causal exact or both"
        )
