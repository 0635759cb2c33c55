"""Random numbers that depend only on their place, not on the order or the batch in which they are generated.

Every number is a hash of (seed, layer, window, position, neuron), so a run that is resumed, split or batched differently
uses the same placebos. The hash is the finalizer of SplitMix64 (Steele, Lea & Flood 2014, OOPSLA, "Fast splittable
pseudorandom number generators"); two 24-bit halves of it make a normal number by Box & Muller.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_WORD = 1 << 64
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_HALF = 1 << 24


def directions(seed: int, layer: int, window: int, n_positions: int, d_mlp: int) -> Float[Tensor, "pos d_mlp"]:
    """Independent standard normal numbers in float32, for every position and neuron of a layer in one window."""
    key = 0
    for part in (seed, layer, window):
        key = (int(mixed(torch.tensor(_signed(key + _GOLDEN)))) ^ part) % _WORD
    key = int(mixed(torch.tensor(_signed(key))))
    counter = torch.arange(n_positions * d_mlp, dtype=torch.int64) * _signed(_GOLDEN) + _signed(key)
    bits = mixed(counter)
    first, second = _shifted(bits, 40), bits & (_HALF - 1)
    radius = (-2 * ((first + 0.5) / _HALF).log()).sqrt()
    angle = 2 * math.pi * second / _HALF
    return (radius * angle.cos()).float().reshape(n_positions, d_mlp)


def mixed(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """The finalizer of SplitMix64: a bijection of 64-bit words whose result shows no pattern of its argument."""
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _shifted(x: Int64[Tensor, "*shape"], bits: int) -> Int64[Tensor, "*shape"]:
    """x shifted to the right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The same 64 bits as torch's int64 reads them."""
    x %= _WORD
    return x - _WORD if x >= _WORD // 2 else x
