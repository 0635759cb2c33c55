"""A random sample of tokens, the same on every machine: decided by a key of the token's place, not by the order of reading.

A token's key is a hash of its window and position. A share s of the tokens are those with a key below s, and a sample of n
those with the n smallest keys. Batches, shards and the order of reading therefore choose the same tokens, and samples of
disjoint texts combine into the sample of both.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

_BITS = 63
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64 (Steele, Lea & Flood 2014), as signed numbers


def token_keys(places: Int64[Tensor, "row token"]) -> Int64[Tensor, " token"]:
    """The keys of tokens, uniform in [0, 2^63); window and position are the first two rows."""
    state = places[0] * 2**32 + places[1] + 1
    for multiplier, shift in zip(_MULTIPLIERS, (30, 27), strict=True):
        state = (state ^ _shifted(state, shift)) * multiplier
    return (state ^ _shifted(state, 31)) & (2**_BITS - 1)


def in_share(keys: Int64[Tensor, " token"], share: float) -> Int64[Tensor, " chosen"]:
    """The indices of the keys that belong to a share of all tokens."""
    if share >= 1:
        return torch.arange(len(keys), device=keys.device)
    return (keys < int(share * 2**_BITS)).nonzero()[:, 0]


def _shifted(values: Int64[Tensor, " token"], bits: int) -> Int64[Tensor, " token"]:
    """A logical shift to the right, of unsigned numbers."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
