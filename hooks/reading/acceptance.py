"""The acceptance block: what was checked before a run's numbers may be trusted, each line with value, limit and verdict."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version

import torch
from packaging.version import Version

from analysis.checks import Check, worst
from analysis.run import Layer
from analysis.units.activations import ACTIVATIONS, ALIASES
from analysis.units.names import parsed
from hooks.corpus import Corpus
from hooks.models import LoadedModel

MINIMAL = {"torch": "2.6", "transformers": "5.9", "transformer-lens": "4.3"}


def acceptance_of(
    model: LoadedModel,
    corpus: Corpus,
    layers: dict[int, Layer],
    controls: tuple[Check, ...],
    on_text: tuple[Check, ...] = (),
) -> tuple[Check, ...]:
    """All checks of a run.

    Args:
        model: with the checks made while it was loaded.
        corpus: the text.
        layers: the results.
        controls: of every layer; only the worst layer of each is listed.
        on_text: the verification on the first window of the text.
    """
    return (*model.acceptance, *_controls(controls), *on_text, *_reading(model, corpus, layers))


def _controls(controls: tuple[Check, ...]) -> Iterator[Check]:
    """The worst layer of each control."""
    for name in dict.fromkeys(control.what for control in controls):
        control = worst(control for control in controls if control.what == name)
        what = "something" if control.sense == "more than" else "nothing"
        yield replace(control, what=f"{name} must change {what}", layer=None)


def _reading(model: LoadedModel, corpus: Corpus, layers: dict[int, Layer]) -> Iterator[Check]:
    units = Counter(layer.unit.name for layer in layers.values())
    configured = {ALIASES.get(name, name) for name in model.description["activation_in_config"]}
    named = all(_activation_of(unit) in {None, *configured} for unit in units) or not configured
    yield Check.stated(
        "activation, g(a, b) = σ(a)·b", _counted(units), f"configuration: {', '.join(configured) or 'silent'}", named
    )

    sums = {sums.values.dtype for layer in layers.values() for sums in (layer.moments.neuron, layer.moments.pooled)}
    precision = f"{model.description['dtype']} model, sums in {', '.join(str(t).removeprefix('torch.') for t in sums)}"
    yield Check.stated("precision", precision, "sums in float64", sums == {torch.float64})

    begins = all(model.bos is None or int(window.tokens[0]) == model.bos for window in corpus.windows)
    begin = "no BOS" if model.bos is None else f"BOS {model.bos} before every window"
    yield Check.stated("beginning of a window", begin, "as in the tokenizer's own configuration", begins)

    first = min(window.counted_from for window in corpus.windows)
    counted = f"from position {first} on, {corpus.n_counted} of {corpus.n_tokens} tokens"
    asked = corpus.skip_positions
    yield Check.stated("counted positions", counted, f"from position {asked} on", first >= asked)

    yield Check.stated(
        "norm gain folded into q and k", _counted(Counter(layer.gain for layer in layers.values())), "verified", True
    )

    n_layers = model.description["n_layers"]
    left_out = "" if not model.skipped else f", skipped: {', '.join(map(str, model.skipped))}"
    yield Check.stated(
        "layers analysed", f"{len(layers)} of {n_layers}{left_out}", "each verified on a probe", bool(layers)
    )

    versions = {name: version(name) for name in MINIMAL}
    recent = all(Version(versions[name]) >= Version(least) for name, least in MINIMAL.items())
    yield Check.stated("versions", _listed(versions), f"at least {_listed(MINIMAL)}", recent)


def _activation_of(unit: str) -> str | None:
    """The activation in a unit's name; None if it contains none that a configuration could name."""
    kind, parameters = parsed(unit)
    return next((part for part in (kind, *parameters) if part in ACTIVATIONS), None)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count} layers)" for name, count in names.items())


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
