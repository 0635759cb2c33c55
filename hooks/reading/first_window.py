"""Checks on the first window of the text: the controls of every layer, and the verification once more."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from analysis.checks import Check, worst
from analysis.measures.controls import measure_controls
from hooks.corpus import Corpus
from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site
from hooks.locating.verify_experts import experts_error
from hooks.models import LoadedModel
from hooks.reading.capture import CaptureHook, capture_pass
from hooks.reading.capture_points import CapturePoint, Extract, capture_points_of, input_point
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error


def controls_of(
    model: LoadedModel, corpus: Corpus, layers: Mapping[int, Site | Mixture], seed: int = 0
) -> tuple[Check, ...]:
    """Every control of every layer, see ``analysis.measures.controls``; of a mixture the worst expert's.

    Args:
        model: from ``load_model``.
        corpus: its first window is used.
        layers: by index.
        seed: of the controls' random numbers.
    """
    window = corpus.windows[0]
    points = {(index, name): one for index, layer in layers.items() for name, one in _inputs(layer).items()}
    captured = _captured(model, corpus, points)
    checks: list[Check] = []
    for index, layer in layers.items():
        by_name: dict[str, list[Check]] = {}
        for site, x in _own_inputs(layer, index, captured, window.counted_from):
            wide = torch.promote_types(x.dtype, torch.float32)
            for control in measure_controls(site.gated_mlp().to(wide), x.to(wide), seed):
                by_name.setdefault(control.what, []).append(control)
        checks += [replace(worst(controls), layer=index) for controls in by_name.values()]
    return tuple(checks)


def verified_on_text(model: LoadedModel, corpus: Corpus, layers: Mapping[int, Site | Mixture]) -> tuple[Check, ...]:
    """The largest errors of h = g(a, b) and of the experts' output on the first window of the text.

    They were verified on a probe when the model was loaded; a clamp, for example, may act on real text only.
    """
    points: dict[tuple[int, str], CapturePoint] = {}
    for index, layer in layers.items():
        points |= {(index, name): some[0] for name, some in capture_points_of(layer).items()}
        if isinstance(layer, Mixture):
            points[index, "y"] = CapturePoint(layer.expert_weights.module, lambda args, kwargs, output: output)
        for site in _dense(layer):
            points[index, "h"] = CapturePoint(site.projections.down, lambda args, kwargs, output: args[0])
    captured = _captured(model, corpus, points)
    dense, experts = [], []
    for index, layer in layers.items():
        for site in _dense(layer):
            a, b, h = (captured[index, name].flatten(0, -2) for name in "abh")
            dense.append(relative_error(site.unit(a, b), h))
        if isinstance(layer, Mixture):
            y = captured[index, "y"].flatten(0, -2)
            experts.append(experts_error(layer.expert_weights, layer.unit, captured[index, "routing"], y))
    tolerance = TOLERANCE[next(iter(layers.values())).dtype]
    checks = [("h = g(a, b) on the text's first window, largest over layers", dense, tolerance)]
    checks += [("experts' output on the text's first window, largest over layers", experts, OUTPUT_SLACK * tolerance)]
    return tuple(Check(name, max(errors), limit) for name, errors, limit in checks if errors)


def _captured(
    model: LoadedModel, corpus: Corpus, points: Mapping[tuple[int, str], CapturePoint]
) -> dict[tuple[int, str], Any]:
    """The quantities captured on the first window of the text, by layer and name."""
    captured: dict[tuple[int, str], Any] = {}

    def capture(key: tuple[int, str], extract: Extract, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = extract(args, kwargs, output)
        captured[key] = value.clone() if isinstance(value, Tensor) else value

    capture_hooks = [CaptureHook(point.module, partial(capture, key, point.extract)) for key, point in points.items()]
    capture_pass(model, [corpus.windows[0]], capture_hooks, last_layer=max(layer for layer, _ in points))
    return captured


def _dense(layer: Site | Mixture) -> tuple[Site, ...]:
    """The sites of a layer that every token reaches."""
    if isinstance(layer, Site):
        return (layer,)
    return () if layer.shared is None else (layer.shared,)


def _inputs(layer: Site | Mixture) -> dict[str, CapturePoint]:
    """The capture points of a layer's inputs."""
    if isinstance(layer, Site):
        return {"x": input_point(layer)}
    shared = {} if layer.shared is None else {"x": input_point(layer.shared)}
    return {"routing": capture_points_of(layer)["routing"][0]} | shared


def _own_inputs(
    layer: Site | Mixture, index: int, captured: dict[tuple[int, str], Any], counted_from: int
) -> list[tuple[Site, Tensor]]:
    """Every site of a layer that counted tokens reach, with its inputs at these tokens."""
    if isinstance(layer, Site):
        return [(layer, captured[index, "x"].flatten(0, -2)[counted_from:])]
    routing: Routing = captured[index, "routing"]
    rows = [row[routing.place[row] >= counted_from] for row, _ in routing.by_expert(layer.expert_weights.n_experts)]
    routed = [(site, routing.x[row]) for site, row in zip(layer.routed, rows, strict=True) if len(row)]
    if layer.shared is None:
        return routed
    return [*routed, (layer.shared, captured[index, "x"].flatten(0, -2)[counted_from:])]
