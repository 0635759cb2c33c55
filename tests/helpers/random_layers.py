"""Builders shared by the tests of the analysis layer: random layers, units with their scalar twins, comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.estimates import Estimates
from analysis.sums.batch import Window
from analysis.sums.layout import QUADRANTS, Layout, Sums
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, Moments
from analysis.sums.tiled import TileReducer
from analysis.sums.token_histograms import RATIO_BINS
from analysis.units.registry import GatedUnit, Unit, unit_named
from analysis.weights.geometry import Geometry, PermutedPairs, derangements
from tests.helpers import reference

TWINS = {
    "linear": "identity",
    "relu": "relu",
    "leaky_relu": "leaky_relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "softplus": "softplus",
}
"""Canonical activation name to its name in ``tests.helpers.reference``."""

D_MODEL = 4
"""Of random layers: few dimensions, so that queries and keys are far from orthogonal."""

TOLERANCES = {torch.float64: (1e-9, 1e-12), torch.float32: (1e-5, 1e-6)}
"""Relative and absolute; the absolute one is for numbers whose true value is 0."""


class ClampedUnit(Unit):
    """The unit of gpt-oss: (clamp(b, −7, 7) + 1) · z·sigmoid(1.702 z) with z = min(a, 7)."""

    up_is_linear = False

    @property
    def name(self) -> str:
        return "clamped"

    def gate(self, a: Tensor) -> Tensor:
        z = a.clamp(max=7)
        return z * torch.sigmoid(1.702 * z)

    def up(self, b: Tensor) -> Tensor:
        return b.clamp(-7, 7) + 1


class SymmetricUnit(Unit):
    """relu(a)·relu(b): unchanged by exchange, though not linear."""

    up_is_linear = False

    @property
    def name(self) -> str:
        return "symmetric"

    def gate(self, a: Tensor) -> Tensor:
        return a.relu()

    def up(self, b: Tensor) -> Tensor:
        return b.relu()


def clamped_twin(a: float, b: float) -> float:
    """``ClampedUnit`` on floats."""
    z = min(a, 7.0)
    return (max(-7.0, min(b, 7.0)) + 1) * z * reference.sigmoid(1.702 * z)


def scalar_unit(unit: Unit) -> reference.Unit:
    """The loop twin of a unit."""
    if isinstance(unit, GatedUnit):
        return reference.gate_unit(reference.ACTIVATIONS[TWINS[unit.activation.name]][0])
    return clamped_twin


@dataclass(frozen=True)
class Case:
    """Pre-activations and weights of one layer: sequence i is window i and belongs to jackknife block i."""

    unit: Unit
    sequences: tuple[tuple[Tensor, Tensor], ...]
    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    partners: Tensor

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry.of(self.q, self.k, self.v, self.gain)

    @property
    def gain(self) -> Tensor:
        return torch.ones(self.q.shape[1], dtype=torch.float64)

    @property
    def pairing(self) -> PermutedPairs:
        return self.geometry.permuted_pairs(self.q, self.k, self.gain, self.partners)

    @property
    def weight(self) -> Tensor:
        return self.geometry.value_weight

    @property
    def balance(self) -> Tensor:
        return self.geometry.balance

    @property
    def a(self) -> Tensor:
        return torch.cat([a for a, _ in self.sequences])

    @property
    def b(self) -> Tensor:
        return torch.cat([b for _, b in self.sequences])

    @property
    def grids(self) -> tuple[list[list[float]], list[list[float]], list[float]]:
        """a, b and the weights, as the twin reads them."""
        return self.a.tolist(), self.b.tolist(), self.weight.tolist()

    @property
    def parts(self) -> list[Moments]:
        """The moments of every sequence."""
        return [self.moments_of(a, b, block) for block, (a, b) in enumerate(self.sequences)]

    @cached_property
    def moments(self) -> Moments:
        """The moments of all sequences together."""
        return reduce(add, self.parts)

    @cached_property
    def estimates(self) -> Estimates:
        """The layer's numbers."""
        return Estimates(self.unit, self.moments, self.geometry, self.partners)

    def moments_of(self, a: Tensor, b: Tensor, block: int = 0, window: Window | None = None) -> Moments:
        """The moments of one sequence of this layer: all its tokens are counted, and token t has the id t."""
        reducer = TileReducer(self.unit, self.layout, self.geometry, self.pairing, dtype=a.dtype)
        return Moments.of(a, b, reducer, window or Window(block, torch.arange(len(a)), 0), block)

    def with_data(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], **fields: Any) -> "Case":
        """The same layer after ``change(a, b)`` of every sequence, other fields replaced as named."""
        return replace(self, sequences=tuple(change(a, b) for a, b in self.sequences), **fields)


def random_case(
    unit: Unit | str,
    lengths: Sequence[int],
    d_mlp: int,
    *,
    dtype: torch.dtype = torch.float64,
    draws: int = 1,
    seed: int = 0,
) -> Case:
    """Normal a and b of different widths and correlations; the first token has a > 0, so every neuron has energy."""
    unit = unit_named(unit) if isinstance(unit, str) else unit
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common, own = normal(sum(lengths), d_mlp), normal(sum(lengths), d_mlp)
    a = 0.3 * normal(d_mlp) + common * (0.5 + 2 * torch.rand(d_mlp, generator=generator))
    b = 0.3 * normal(d_mlp) + (own + normal(d_mlp) * common) * (0.5 + torch.rand(d_mlp, generator=generator))
    a[0] = a[0].abs()
    q, k, v = normal(3, d_mlp, D_MODEL) * (0.3 + torch.rand(3, d_mlp, 1, generator=generator, dtype=torch.float64))
    sequences = tuple(zip(a.to(dtype).split(list(lengths)), b.to(dtype).split(list(lengths)), strict=True))
    return Case(unit, sequences, q, k, v, Layout.of(unit, draws=draws), derangements(d_mlp, draws, seed))


def regauged(case: Case, beta: Tensor) -> Case:
    """The layer after k → βk, v → v/β: the same map from x to y."""
    return case.with_data(lambda a, b: (a, b * beta), k=case.k * beta[:, None], v=case.v / beta[:, None])


def permuted(case: Case, order: Tensor) -> Case:
    """The layer with its neurons, and their partners, in another order."""
    place = order.argsort()
    weights = {name: getattr(case, name)[order] for name in "qkv"}
    return case.with_data(lambda a, b: (a[:, order], b[:, order]), partners=place[case.partners[:, order]], **weights)


def layer_sums(moments: Moments) -> Sums:
    """The layer's sums, from its jackknife blocks."""
    return moments.pooled.pool(torch.ones(N_JACKKNIFE_BLOCKS, dtype=torch.float64))


def layer_numbers(moments: Moments, weight: Tensor) -> dict[str, Tensor]:
    """Every number of the layer that comes from moments, each a scalar or a vector over scales or quadrants."""
    sums = layer_sums(moments)
    pooled = {
        **measures.LAYER_MEASURES,
        **{f"repaired {name}": null for name, null in measures.REPAIRED_NULLS.items()},
        "scaling": measures.scaling,
        "scaling_null_repaired": measures.scaling_null_repaired,
        "scaling_relative_change": measures.scaling_relative_change,
        "quadrant_tokens": measures.quadrant_tokens,
        "quadrant_energy": measures.quadrant_energy,
    }
    numbers = {name: measure(sums)[..., 0] for name, measure in pooled.items()}
    numbers["gate_positive"] = measures.gate_positive(moments.neuron).mean()
    numbers["bilinear_share"] = torch.tensor(measures.layer_bilinear_share(moments.neuron, weight))
    numbers["top_token_share"] = moments.top_energy / sums["hh"][0]
    for name in moments.neuron.layout.token_measures:
        numbers[f"token median of {name}"] = torch.tensor(moments.tokens.quantile(name, 0.5))
    return numbers


def by_quadrant(values: Mapping[str, Any]) -> list[Any]:
    """A twin's dictionary over quadrants in the order of ``QUADRANTS``."""
    return [values[quadrant] for quadrant in QUADRANTS]


def assert_close(actual: Any, expected: Any, dtype: torch.dtype = torch.float64, what: str = "") -> None:
    """Equal within the tolerance of arithmetic in ``dtype``; NaN equals NaN."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(
        actual, expected, rtol=relative, atol=absolute, equal_nan=True, msg=lambda message: f"{what}: {message}"
    )


def assert_numbers_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two tables of ``layer_numbers`` agree; a median may move to the next bin by rounding."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("token median"):
            assert abs(actual[name] - value) <= 2 / RATIO_BINS, name
        else:
            assert_close(actual[name], value, what=name)
