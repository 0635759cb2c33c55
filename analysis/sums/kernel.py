"""The sums of ``analysis.sums.tiled`` fused into one pass over the activations, compiled by numba for a CPU.

Every sum needs a and b of a token once, but one torch expression per sum would read and write them a hundred times. Here
the whole inner loop is compiled. A tile of at most 256 tokens is transposed so that a neuron's tokens are adjacent; then
each neuron in turn goes through all its sums while its values of a and b stay in the L1 cache. The loops over a neuron's
tokens are short and without branches, so that each becomes vector instructions; for this even exp is written out.

Products are float32 and summed over at most 256 tokens in float32, in the lanes of a vector; tiles are added in float64, as
in ``analysis.sums.tiled``, whose float64 results every sum is tested against.

All compiled code is in this file, because numba's cache on disk does not notice changes elsewhere. ``FusedReducer`` in
``analysis.sums.fused_reducer`` calls it.
"""

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64
from llvmlite import binding
from numba import njit
from numpy import ndarray

from analysis.sums.layout import MAIN_SCALES, Layout

STEP = 16
"""Tile lengths are multiples of this, the number of float32 values in the widest vector register."""
KINDS = {
    name: kind
    for kind, name in enumerate(
        (
            "linear",
            "relu",
            "leaky_relu",
            "relu2",
            "gelu",
            "gelu_pytorch_tanh",
            "quick_gelu",
            "silu",
            "sigmoid",
            "tanh",
            "softplus",
        )
    )
}
"""The activations that are implemented below, by their canonical names, with the number that selects each."""

_f, _i = np.float32, np.int32
_LINEAR, _RELU, _LEAKY, _RELU2, _GELU, _GELU_TANH, _QUICK, _SILU, _SIGMOID, _TANH, _SOFTPLUS = KINDS.values()
_ZERO, _ONE, _HALF = _f(0), _f(1), _f(0.5)
_LEAK = _f(0.01)
_STEEP = _f(1.702)
_ROOT_HALF, _GAUSS = _f(math.sqrt(0.5)), _f(1 / math.sqrt(2 * math.pi))
_TANH_LINEAR, _TANH_CUBIC = _f(2 * math.sqrt(2 / math.pi)), _f(2 * math.sqrt(2 / math.pi) * 0.044715)
_LOG2_E, _LN2_HIGH, _LN2_LOW = _f(1.4426950408889634), _f(0.693359375), _f(-2.12194440e-4)
_STEEPEST = _f(87)
_TO_INTEGER = _f(1.5 * 2**23)  # adding it leaves the nearest integer in the lowest bits


def _wide_vectors() -> None:
    """Let numba use full AVX-512 registers where the CPU has them: by default LLVM uses half of each, a fifth slower."""
    features, config = binding.get_host_cpu_features(), vars(numba.config)
    if features.get("avx512f") and not (config["CPU_NAME"] or config["CPU_FEATURES"]):
        config["CPU_NAME"] = binding.get_host_cpu_name()
        config["CPU_FEATURES"] = f"{features.flatten()},-prefer-256-bit"


_wide_vectors()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(*fastmath: str) -> Callable[[_Function], _Function]:
    """A decorator: compile on the first call, and cache on disk where a cache directory is writable."""
    # All memory is allocated by the caller, so no references are counted: each count would be an atomic instruction.
    options = {"nogil": True, "error_model": "numpy", "_nrt": False, "fastmath": set(fastmath)}

    def compiled(function: _Function) -> _Function:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no writable cache directory
            return njit(**options)(function)

    return compiled


# Sums may be reassociated, which allows vector instructions; NaN and infinity must survive, they indicate overflow.
_fast, _exact = _compiled("reassoc", "nsz", "contract", "arcp", "afn"), _compiled("contract")


@_exact
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x to a relative 1e-7, x clamped to ±87: a polynomial on [−ln 2 / 2, ln 2 / 2] and a power of two (as in Cephes)."""
    x = x if x > -_STEEPEST else -_STEEPEST
    x = x if x < _STEEPEST else _STEEPEST
    shifted = _f(x * _LOG2_E + _TO_INTEGER)
    n = shifted - _TO_INTEGER
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _f(1.9875691500e-4)
    p = p * r + _f(1.3981999507e-3)
    p = p * r + _f(8.3334519073e-3)
    p = p * r + _f(4.1665795894e-2)
    p = p * r + _f(1.6666665459e-1)
    p = p * r + _f(5.0000001201e-1)
    return (p * r * r + r + _ONE) * _i((shifted.view(np.int32) << 23) + 0x3F800000).view(np.float32)


@_fast
def _activate(kind, scale, over, s, z, out, steps):  # type: ignore[no-untyped-def]
    """Write σ(scale·z)/over to row ``out`` of s, z its row of that number."""
    # Long because each activation has a loop of its own: a branch inside one loop would prevent vector instructions.
    part = _ONE / over
    if kind == _SILU:
        for t in range(STEP * len(steps)):
            x = scale * s[z, t]
            s[out, t] = part * x / (_ONE + _exp(-x))
    elif kind == _GELU_TANH:
        for t in range(STEP * len(steps)):
            x = scale * s[z, t]
            s[out, t] = part * x / (_ONE + _exp(-x * (_TANH_LINEAR + _TANH_CUBIC * x * x)))
    elif kind == _QUICK:
        for t in range(STEP * len(steps)):
            x = scale * s[z, t]
            s[out, t] = part * x / (_ONE + _exp(-_STEEP * x))
    elif kind == _SIGMOID:
        for t in range(STEP * len(steps)):
            s[out, t] = part / (_ONE + _exp(-scale * s[z, t]))
    elif kind == _GELU:
        for t in range(STEP * len(steps)):
            x = scale * s[z, t]
            s[out, t] = part * x * _normal_cdf(x)
    elif kind == _RELU:
        for t in range(STEP * len(steps)):
            x = part * scale * s[z, t]
            s[out, t] = x if scale * s[z, t] > _ZERO else _ZERO * x
    elif kind == _LEAKY:
        for t in range(STEP * len(steps)):
            x = part * scale * s[z, t]
            s[out, t] = x if scale * s[z, t] > _ZERO else _LEAK * x
    elif kind == _RELU2:
        for t in range(STEP * len(steps)):
            x = scale * s[z, t]
            s[out, t] = part * x * x if x > _ZERO else _ZERO * x
    elif kind == _LINEAR:
        for t in range(STEP * len(steps)):
            s[out, t] = part * scale * s[z, t]
    elif kind == _TANH:
        for t in range(STEP * len(steps)):
            s[out, t] = part * _f(math.tanh(scale * s[z, t]))
    elif kind == _SOFTPLUS:
        for t in range(STEP * len(steps)):
            x = scale * s[z, t]
            s[out, t] = part * ((x if x > _ZERO else _ZERO) + _f(math.log1p(_exp(-abs(x)))))


@_fast
def _euler(kind, s, z, out, steps):  # type: ignore[no-untyped-def]
    """Write zσ′(z) − σ(z), which is 0 where σ is homogeneous, to row ``out`` of s; one loop each, as in ``_activate``."""
    if kind == _SILU:
        for t in range(STEP * len(steps)):
            s[out, t] = s[z, t] * s[z, t] * _bell(_exp(-s[z, t]))
    elif kind == _GELU_TANH:
        for t in range(STEP * len(steps)):
            square = s[z, t] * s[z, t]
            slope = _TANH_LINEAR + _f(3) * _TANH_CUBIC * square
            s[out, t] = square * slope * _bell(_exp(-s[z, t] * (_TANH_LINEAR + _TANH_CUBIC * square)))
    elif kind == _GELU:
        for t in range(STEP * len(steps)):
            square = s[z, t] * s[z, t]
            s[out, t] = square * _GAUSS * _exp(-_HALF * square)
    elif kind == _QUICK:
        for t in range(STEP * len(steps)):
            s[out, t] = _STEEP * s[z, t] * s[z, t] * _bell(_exp(-_STEEP * s[z, t]))
    elif kind == _SIGMOID:
        for t in range(STEP * len(steps)):
            e = _exp(-s[z, t])
            s[out, t] = s[z, t] * _bell(e) - _ONE / (_ONE + e)
    elif kind == _RELU2:
        for t in range(STEP * len(steps)):
            s[out, t] = s[z, t] * s[z, t] if s[z, t] > _ZERO else _ZERO * s[z, t]
    elif kind == _TANH:
        for t in range(STEP * len(steps)):
            y = _f(math.tanh(s[z, t]))
            s[out, t] = s[z, t] * (_ONE - y * y) - y
    elif kind == _SOFTPLUS:
        _activate(kind, _ONE, _ONE, s, z, out, steps)
        for t in range(STEP * len(steps)):
            s[out, t] = s[z, t] / (_ONE + _exp(-s[z, t])) - s[out, t]
    else:  # linear on each side
        for t in range(STEP * len(steps)):
            s[out, t] = _ZERO * s[z, t]


@_exact
def _bell(e):  # type: ignore[no-untyped-def]
    """s(1 − s) of the logistic s(z) = 1/(1 + e), e = exp(−z)."""
    s = _ONE / (_ONE + e)
    return e * s * s


@_exact
def _normal_cdf(x):  # type: ignore[no-untyped-def]
    """Φ(x) with relative error 1.2e-7 in either tail, by the rational fit of erfc in Numerical Recipes (erfcc)."""
    y = abs(x) * _ROOT_HALF
    t = _ONE / (_ONE + _HALF * y)
    p = _f(0.17087277)
    p = p * t + _f(-0.82215223)
    p = p * t + _f(1.48851587)
    p = p * t + _f(-1.13520398)
    p = p * t + _f(0.27886807)
    p = p * t + _f(-0.18628806)
    p = p * t + _f(0.09678418)
    p = p * t + _f(0.37409196)
    p = p * t + _f(1.00002368)
    tail = _HALF * t * _exp(p * t - y * y - _f(1.26551223))
    return _ONE - tail if x > _ZERO else tail


class Scales(NamedTuple):
    """The scales of the layout, one entry each.

    Attributes:
        alpha: α; arbitrary for a limit.
        is_limit: whether the scale is one of the limits 0 and ∞.
        below, above: the slopes of σ at that limit, for a < 0 and for a > 0.
        main: index among the scales for which the permutation null is summed, −1 for all others.
        n_main: how many these are.
    """

    alpha: Float32[ndarray, " alpha"]
    is_limit: Int32[ndarray, " alpha"]
    below: Float32[ndarray, " alpha"]
    above: Float32[ndarray, " alpha"]
    main: Int32[ndarray, " alpha"]
    n_main: int


class Neurons(NamedTuple):
    """Constants of the layer's neurons.

    Attributes:
        weight: w.
        per_length, squared_length: 1/‖k‖, which normalizes every key to length 1, and ‖k‖².
        balance: β.
        partners, pair_balance: the partner in each permutation, and the β of each pair.
    """

    weight: Float64[ndarray, " d_mlp"]
    per_length: Float32[ndarray, " d_mlp"]
    squared_length: Float64[ndarray, " d_mlp"]
    balance: Float32[ndarray, " d_mlp"]
    partners: Int32[ndarray, "draw d_mlp"]
    pair_balance: Float32[ndarray, "draw d_mlp"]


class Tiles(NamedTuple):
    """Transposed tiles: the tokens of a neuron are adjacent. Tiles that are not full are padded with zeros.

    Attributes:
        a, b: pre-activations.
        power: Σ_j (b_j/‖k_j‖)² of every token.
        routing_weight: routing weight r of every token, 1 in a dense layer.
        square: r².
        n_tokens: tokens in each tile, without padding.
        first: index of its first token among the counted tokens of the batch.
        jackknife_block: its jackknife block.
    """

    a: Float32[ndarray, "tile d_mlp token"]
    b: Float32[ndarray, "tile d_mlp token"]
    power: Float32[ndarray, "tile token"]
    routing_weight: Float32[ndarray, "tile token"]
    square: Float64[ndarray, "tile token"]
    n_tokens: Int64[ndarray, " tile"]
    first: Int64[ndarray, " tile"]
    jackknife_block: Int64[ndarray, " tile"]


class Buffers(NamedTuple):
    """Memory that the compiled loop writes to.

    Attributes:
        table, groups: sums of every neuron, shared by all threads, each of which writes its own neurons.
        peak_size, peak_at: likewise, the largest |r·h| so far, and the index of the counted token of this batch on which it
            occurred, −1 if it is from an earlier batch.
        pooled, signs: by jackknife block, of one thread.
        tokens: for each tile the parts of every token's sums, of one thread.
        work, parts, sums, narrow: working memory of one thread.
        kept, kept_at: rows of the table that are also summed in ``groups``, and their rows there.
    """

    table: Float64[ndarray, "d_mlp moment"]
    groups: Float32[ndarray, "d_mlp group kept"]
    peak_size: Float32[ndarray, " d_mlp"]
    peak_at: Int64[ndarray, " d_mlp"]
    pooled: Float64[ndarray, "block moment"]
    signs: Float64[ndarray, "block 4"]
    tokens: Float64[ndarray, "tile part token"]
    work: Float32[ndarray, "row room"]
    parts: Float32[ndarray, "part room"]
    sums: Float64[ndarray, " moment"]
    narrow: Float32[ndarray, " kept"]
    kept: Int32[ndarray, " moment"]
    kept_at: Int32[ndarray, " moment"]


FirstRows: Any = namedtuple("FirstRows", Layout(()).names)  # type: ignore[misc]
"""The first row of each sum of a layout."""

# Rows of s, the working memory of a thread: one neuron in one tile at a time. Activations are applied to the unweighted
# a, b and ab; the other factor of h, and of every h′, carries the routing weight r. So r·a, r·b and r·other have rows of
# their own, ``_WEIGHTED`` rows after the unweighted ones.
_A, _B, _OTHER, _GATE, _H, _HH, _AB, _X, _ROUTING, _POWER = range(10)
_WEIGHTED = 10
_MAIN_GATE = 13
"""From this row on, for each main scale: σ(αa)/α, its square, and its product with σ(a)."""
N_WORK_ROWS = _MAIN_GATE + 3 * len(MAIN_SCALES)

# Parts of a token's sums: Σ_j w_j h_j², then for each of ``Layout.token_measures`` the gap and the energy of h′.
LINE = 16
"""Neurons of a token in one cache line."""
ENERGY, _EXCHANGE, _PLACEMENT, _BALANCED_EXCHANGE, _BALANCED_PLACEMENT, _EULER, _SCALING = 0, 1, 3, 5, 7, 9, 11


@_fast
def transpose_tile(first, last, places, x, scale, turned, power, s, steps):  # type: ignore[no-untyped-def]
    """Transpose x of a tile, neurons first to last, so that a neuron's tokens are adjacent; add Σ_j (scale_j x_j)²."""
    for i in range(LINE):
        for t in range(len(places), STEP * len(steps)):
            s[i, t] = _ZERO
    for j0 in range(first, last, LINE):
        n = min(LINE, last - j0)
        for t in range(len(places)):
            place = places[t]
            for i in range(n):
                s[i, t] = x[place, j0 + i]
        for i in range(n):
            factor = scale[j0 + i]
            for t in range(STEP * len(steps)):
                turned[j0 + i, t] = s[i, t]
                power[t] += (factor * s[i, t]) * (factor * s[i, t])


@_fast
def _pre_activations(s, steps):  # type: ignore[no-untyped-def]
    """Σ a, Σ b, Σ a², Σ b², Σ ab in float64, because variances are differences of large numbers."""
    sa, sb, saa, sbb, sab = 0.0, 0.0, 0.0, 0.0, 0.0
    for t in range(STEP * len(steps)):
        x, y = np.float64(s[_A, t]), np.float64(s[_B, t])
        sa += x
        sb += y
        saa += x * x
        sbb += y * y
        sab += x * y
    return sa, sb, saa, sbb, sab


@_fast
def _weighted_pre_activations(s, square, steps):  # type: ignore[no-untyped-def]
    """The same, each token weighted with its r²."""
    sa, sb, saa, sbb, sab = 0.0, 0.0, 0.0, 0.0, 0.0
    for t in range(STEP * len(steps)):
        x, y = np.float64(s[_A, t]), np.float64(s[_B, t])
        weighted_x, weighted_y = square[t] * x, square[t] * y
        sa += weighted_x
        sb += weighted_y
        saa += weighted_x * x
        sbb += weighted_y * y
        sab += weighted_x * y
    return sa, sb, saa, sbb, sab


@_fast
def _outputs(s, b, weight, parts, steps):  # type: ignore[no-untyped-def]
    """Write h, h² and ab; return Σ h², Σ h·ab, Σ (ab)²; add to the energy of every token."""
    hh, h_ab, abab = _ZERO, _ZERO, _ZERO
    for t in range(STEP * len(steps)):
        h, ab = s[_GATE, t] * s[b, t], s[_A, t] * s[b, t]
        s[_H, t], s[_HH, t], s[_AB, t] = h, h * h, ab
        hh += h * h
        h_ab += h * ab
        abab += ab * ab
        parts[ENERGY, t] += weight * h * h
    return hh, h_ab, abab


@_fast
def _quadrants(s, steps):  # type: ignore[no-untyped-def]
    """The number of tokens with a > 0, with b > 0 and with both; and Σ h² by sign pair."""
    n_a, n_b, n_ab = _ZERO, _ZERO, _ZERO
    e_pp, e_pn, e_np, e_nn = _ZERO, _ZERO, _ZERO, _ZERO
    for t in range(STEP * len(steps)):
        p = _ONE if s[_A, t] > _ZERO else _ZERO
        q = _ONE if s[_B, t] > _ZERO else _ZERO
        n_a += p
        n_b += q
        n_ab += p * q
        positive, negative = p * s[_HH, t], (_ONE - p) * s[_HH, t]
        e_pp += q * positive
        e_pn += (_ONE - q) * positive
        e_np += q * negative
        e_nn += (_ONE - q) * negative
    return n_a, n_b, n_ab, e_pp, e_pn, e_np, e_nn


@_fast
def _largest(s, steps):  # type: ignore[no-untyped-def]
    """max |h|, found by comparing the bits, which for non-negative floats are ordered as integers."""
    bits = _i(0)
    for t in range(STEP * len(steps)):
        mine = _i(_f(s[_H, t]).view(np.int32) & 0x7FFFFFFF)
        bits = mine if mine > bits else bits
    return _i(bits).view(np.float32)


@_fast
def _compare(s, x, y, weight, parts, part, steps):  # type: ignore[no-untyped-def]
    """Σ h′² and Σ (h − h′)² for h′ = xy; add both to the parts of every token."""
    energy, gap = _ZERO, _ZERO
    for t in range(STEP * len(steps)):
        changed = s[x, t] * s[y, t]
        squared, difference = changed * changed, (s[_H, t] - changed) * (s[_H, t] - changed)
        energy += squared
        gap += difference
        parts[part, t] += weight * difference
        parts[part + 1, t] += weight * squared
    return energy, gap


@_fast
def _compare_euler(s, x, b, weight, parts, steps):  # type: ignore[no-untyped-def]
    """Σ (b(aσ′(a) − σ(a)))²; add it to the parts of every token."""
    energy = _ZERO
    for t in range(STEP * len(steps)):
        squared = (s[x, t] * s[b, t]) * (s[x, t] * s[b, t])
        energy += squared
        parts[_EULER, t] += weight * squared
    return energy


@_fast
def _compare_scaled(s, x, b, weight, parts, part, steps):  # type: ignore[no-untyped-def]
    """As ``_compare`` for h′ = σ(αa)/α·b; also Σ power·(σ(αa)/α)² and Σ power·σ(a)·σ(αa)/α."""
    energy, gap, mixed, mixed_product = _ZERO, _ZERO, _ZERO, _ZERO
    for t in range(STEP * len(steps)):
        gate, h = s[x, t], s[_H, t]
        changed, weighted = gate * s[b, t], s[_POWER, t] * gate
        squared, difference = changed * changed, (h - changed) * (h - changed)
        energy += squared
        gap += difference
        mixed += weighted * gate
        mixed_product += weighted * s[_GATE, t]
        parts[part, t] += weight * difference
        parts[part + 1, t] += weight * squared
    return energy, gap, mixed, mixed_product


@_fast
def _mixed(s, steps):  # type: ignore[no-untyped-def]
    """Σ power·σ(a)²."""
    total = _ZERO
    for t in range(STEP * len(steps)):
        total += s[_POWER, t] * s[_GATE, t] * s[_GATE, t]
    return total


@_fast
def _permuted(s, a, b, steps):  # type: ignore[no-untyped-def]
    """With another neuron's b: Σ h², Σ h′² and Σ (h − h′)² for exchange; Σ h′² and Σ h·h′ for each main scale."""
    hh, energy, gap = _ZERO, _ZERO, _ZERO
    s0, s1, s2, p0, p1, p2 = _ZERO, _ZERO, _ZERO, _ZERO, _ZERO, _ZERO
    for t in range(STEP * len(steps)):
        other = s[b, t]
        h, changed, squared = s[_GATE, t] * other, s[_X, t] * s[a, t], other * other
        hh += h * h
        energy += changed * changed
        gap += (h - changed) * (h - changed)
        s0 += squared * s[_MAIN_GATE + 1, t]
        p0 += squared * s[_MAIN_GATE + 2, t]
        s1 += squared * s[_MAIN_GATE + 4, t]
        p1 += squared * s[_MAIN_GATE + 5, t]
        s2 += squared * s[_MAIN_GATE + 7, t]
        p2 += squared * s[_MAIN_GATE + 8, t]
    return hh, energy, gap, (s0, s1, s2), (p0, p1, p2)


@_fast
def _permuted_balanced(s, a, b, ratio, steps):  # type: ignore[no-untyped-def]
    """Σ h′² and Σ (h − h′)² for exchange in the balanced gauge: h′ = xa, and h is ``ratio`` times its unbalanced value."""
    energy, gap = _ZERO, _ZERO
    for t in range(STEP * len(steps)):
        h, changed = ratio * s[_GATE, t] * s[b, t], s[_X, t] * s[a, t]
        energy += changed * changed
        gap += (h - changed) * (h - changed)
    return energy, gap


@_fast
def reduce_neurons(kind, first, last, tiles, neurons, scales, rows, buffers, steps, weighted):  # type: ignore[no-untyped-def]
    """Every sum of the neurons first to last over all tiles.

    ``steps`` and ``weighted`` are tuples of empty tuples, whose lengths are constants to the compiler: tiles have
    STEP·len(steps) tokens, and if ``weighted`` is empty every routing weight is 1.
    """
    # Long because it is one loop nest: all sums of a neuron are taken while its values are in the L1 cache, each by a short
    # function that is inlined.
    a, b, other = _A + _WEIGHTED * len(weighted), _B + _WEIGHTED * len(weighted), _OTHER + _WEIGHTED * len(weighted)
    n_draws, n_moments, n_parts = len(neurons.partners), buffers.table.shape[1], buffers.tokens.shape[1]
    s, parts, sums, kept = buffers.work, buffers.parts, buffers.sums, buffers.narrow
    a_tiles, block_of, first_of, n_tokens = tiles.a, tiles.jackknife_block, tiles.first, tiles.n_tokens
    b_tiles, power, routing_weight, square = tiles.b, tiles.power, tiles.routing_weight, tiles.square
    balance, pair_balance, partners = neurons.balance, neurons.pair_balance, neurons.partners
    squared_length, weights = neurons.squared_length, neurons.weight
    above, alpha, below, is_limit, main_of = scales.above, scales.alpha, scales.below, scales.is_limit, scales.main
    n_main = scales.n_main
    groups, kept_rows, kept_at = buffers.groups, buffers.kept, buffers.kept_at
    peak_at, peak_size = buffers.peak_at, buffers.peak_size
    pooled, signs, table, tokens = buffers.pooled, buffers.signs, buffers.table, buffers.tokens
    for tile in range(len(n_tokens)):
        parts[:] = _ZERO
        for t in range(STEP * len(steps)):
            s[_ROUTING, t], s[_POWER, t] = routing_weight[tile, t], power[tile, t]
        sums[rows.weight] = n_tokens[tile]
        if len(weighted):
            sums[rows.weight] = 0.0
            for t in range(STEP * len(steps)):
                s[_POWER, t] *= _f(square[tile, t])
                sums[rows.weight] += square[tile, t]
        for j in range(first, last):
            weight, beta, length = _f(weights[j]), balance[j], squared_length[j]
            for t in range(STEP * len(steps)):
                s[_A, t], s[_B, t] = a_tiles[tile, j, t], b_tiles[tile, j, t]
            if len(weighted):
                for t in range(STEP * len(steps)):
                    s[a, t], s[b, t] = s[_ROUTING, t] * s[_A, t], s[_ROUTING, t] * s[_B, t]
            _activate(kind, _ONE, _ONE, s, _A, _GATE, steps)

            sa, sb, saa, sbb, sab = (
                _weighted_pre_activations(s, square[tile], steps) if len(weighted) else _pre_activations(s, steps)
            )
            sums[rows.a], sums[rows.b], sums[rows.aa], sums[rows.bb], sums[rows.ab] = sa, sb, saa, sbb, sab
            hh, sums[rows.h_ab], sums[rows.abab] = _outputs(s, b, weight, parts, steps)
            sums[rows.hh] = sums[rows.balanced_hh] = hh
            if len(weighted):
                for t in range(STEP * len(steps)):
                    s[_AB, t] = s[_A, t] * s[_B, t]
            n_a, n_b, n_ab, e_pp, e_pn, e_np, e_nn = _quadrants(s, steps)
            sums[rows.count_pp], sums[rows.count_pn], sums[rows.count_np] = n_ab, n_a - n_ab, n_b - n_ab
            sums[rows.count_nn] = n_tokens[tile] - n_a - n_b + n_ab
            sums[rows.energy_pp], sums[rows.energy_pn], sums[rows.energy_np], sums[rows.energy_nn] = e_pp, e_pn, e_np, e_nn
            size = _largest(s, steps)
            if size > peak_size[j]:
                peak_size[j] = size
                for t in range(n_tokens[tile]):
                    if abs(s[_H, t]) == size:
                        peak_at[j] = first_of[tile] + t
                        break

            _activate(kind, _ONE, _ONE, s, _B, _X, steps)
            energy, gap = _compare(s, _X, a, weight, parts, _EXCHANGE, steps)
            sums[rows.exchange], sums[rows.exchange_gap] = energy, gap
            _activate(kind, _ONE, _ONE, s, _AB, _X, steps)
            energy, gap = _compare(s, _X, _ROUTING, weight, parts, _PLACEMENT, steps)
            sums[rows.placement], sums[rows.placement_gap] = energy, gap
            _activate(kind, beta, beta, s, _B, _X, steps)
            energy, gap = _compare(s, _X, a, weight, parts, _BALANCED_EXCHANGE, steps)
            sums[rows.balanced_exchange], sums[rows.balanced_exchange_gap] = energy, gap
            _activate(kind, beta, beta, s, _AB, _X, steps)
            energy, gap = _compare(s, _X, _ROUTING, weight, parts, _BALANCED_PLACEMENT, steps)
            sums[rows.balanced_placement], sums[rows.balanced_placement_gap] = energy, gap
            _euler(kind, s, _A, _X, steps)
            sums[rows.euler] = _compare_euler(s, _X, b, weight, parts, steps)

            sums[rows.mixed_hh] = length * _mixed(s, steps) - hh
            for i in range(len(alpha)):
                main = main_of[i]
                x = _X if main < 0 else _MAIN_GATE + 3 * main
                if is_limit[i]:
                    negative, positive = below[i], above[i]
                    for t in range(STEP * len(steps)):
                        s[x, t] = s[_A, t] * (positive if s[_A, t] > _ZERO else negative)
                else:
                    _activate(kind, alpha[i], alpha[i], s, _A, x, steps)
                if main >= 0:
                    for t in range(STEP * len(steps)):
                        s[x + 1, t], s[x + 2, t] = s[x, t] * s[x, t], s[x, t] * s[_GATE, t]
                energy, gap, mixed, mixed_product = _compare_scaled(s, x, b, weight, parts, _SCALING + 2 * i, steps)
                sums[rows.scaling + i], sums[rows.scaling_gap + i] = energy, gap
                sums[rows.mixed_scaling + i] = length * mixed - energy
                sums[rows.mixed_product + i] = length * mixed_product - (hh + energy - gap) / 2  # minus its own h·h′

            for draw in range(n_draws):
                partner, pair_beta = partners[draw, j], pair_balance[draw, j]
                for t in range(STEP * len(steps)):
                    s[_OTHER, t] = b_tiles[tile, partner, t]
                if len(weighted):
                    for t in range(STEP * len(steps)):
                        s[other, t] = s[_ROUTING, t] * s[_OTHER, t]
                _activate(kind, _ONE, _ONE, s, _OTHER, _X, steps)
                hh, energy, gap, scaled, product = _permuted(s, a, other, steps)
                sums[rows.repaired_hh + draw] = hh
                sums[rows.repaired_exchange + draw], sums[rows.repaired_exchange_gap + draw] = energy, gap
                for main in range(n_main):
                    sums[rows.repaired_scaling + draw * n_main + main] = scaled[main]
                    sums[rows.repaired_product + draw * n_main + main] = product[main]
                ratio = pair_beta / beta
                _activate(kind, pair_beta, beta, s, _OTHER, _X, steps)
                energy, gap = _permuted_balanced(s, a, other, ratio, steps)
                sums[rows.repaired_balanced_hh + draw] = ratio * ratio * hh
                sums[rows.repaired_balanced_exchange + draw] = energy
                sums[rows.repaired_balanced_exchange_gap + draw] = gap

            block = block_of[tile]
            group = block * groups.shape[1] // len(pooled)
            for row in range(n_moments):
                table[j, row] += sums[row]
            for row in range(n_moments):
                pooled[block, row] += weights[j] * sums[row]
            kept[:] = _ZERO
            for i in range(len(kept_rows)):
                kept[kept_at[i]] += _f(sums[kept_rows[i]])
            for i in range(len(kept)):
                groups[j, group, i] += kept[i]
            for sign in range(4):
                signs[block, sign] += sums[rows.count_pp + sign]
        for part in range(n_parts):
            for t in range(STEP * len(steps)):
                tokens[tile, part, t] += parts[part, t]
