"""Dequantization: the arithmetic of each format, in float32.

A quantized weight is a code times a scale that it shares with its neighbours: w = code × scale. Formats differ in what the
code is (FP8, FP4, an integer, an index into a table), in which weights share a scale (a tensor, a row, a block), and in how
codes are packed into bytes.

Sources: the OCP Microscaling Formats specification 1.0 (FP4 E2M1, E8M0 scales); Dettmers et al. 2022 (arXiv 2208.07339) and
2023 (arXiv 2305.14314) for the formats of bitsandbytes; the pack-quantized format of compressed-tensors.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_QUANT_BLOCK = 32
E8M0_BIAS, E8M0_NAN = 127, 255
NF4_LEVELS = 16


class ScaleShapeError(ValueError):
    """The shape of the scales does not determine which weights share one."""


def scaled(codes: Float[Tensor, "*rows cols"], scale: Tensor, block: Sequence[int] | None) -> Float[Tensor, "*rows cols"]:
    """codes × scale, with one scale per tensor, per row, or per block.

    Args:
        codes: the codes as numbers.
        scale: one number, one per row, or one per block.
        block: (rows, columns) of a block, None if there are none; the last blocks may be smaller.

    Raises:
        ScaleShapeError: the shape of the scales is none of these.
    """
    if scale.numel() == 1:
        return codes * scale.reshape(())
    if block is not None and scale.shape == grid_of(codes.shape, block):
        return codes * _repeated(scale, block, codes.shape)
    if scale.shape == codes.shape[:-1]:
        return codes * scale[..., None]
    if scale.ndim == codes.ndim and all(s in (1, c) for s, c in zip(scale.shape, codes.shape, strict=True)):
        return codes * scale
    blocks = "" if block is None else f" in blocks of {'×'.join(map(str, block))}"
    raise ScaleShapeError(f"{list(scale.shape)} scales for {list(codes.shape)} weights{blocks}")


def grid_of(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Shape of the grid of blocks that covers each matrix, with leading dimensions unchanged."""
    return (*shape[:-2], *(math.ceil(size / step) for size, step in zip(shape[-2:], block, strict=True)))


def _repeated(scale: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Every block's scale, repeated for all its elements."""
    rows = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return rows.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


def e8m0(exponent: UInt8[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Powers of two 2^(exponent − 127) from biased exponents; 255 is NaN."""
    power = torch.exp2(exponent.float() - E8M0_BIAS)
    return torch.where(exponent == E8M0_NAN, torch.nan, power)


def fp4(packed: UInt8[Tensor, "*rows bytes"]) -> Float[Tensor, "*rows cols"]:
    """FP4 E2M1 values, two per byte, the low nibble first."""
    return torch.tensor(FP4_E2M1)[torch.stack((packed & 15, packed >> 4), dim=-1).long()].flatten(-2)


def mxfp4(
    blocks: UInt8[Tensor, "expert rows groups 16"], scales: UInt8[Tensor, "expert rows groups"]
) -> Float[Tensor, "expert cols rows"]:
    """Experts in MXFP4 as gpt-oss stores them: blocks of 32 along the input dimension, which comes first in the model."""
    return (fp4(blocks) * e8m0(scales)[..., None]).flatten(-2).transpose(1, 2).contiguous()


def integers(packed: Int32[Tensor, "rows words"], bits: int, cols: int) -> Float[Tensor, "rows cols"]:
    """Signed integers packed into 32-bit words, low bits first, each stored with an offset of 2^(bits−1)."""
    per_word = 32 // bits
    shifts = torch.arange(per_word, dtype=torch.int32) * bits
    fields = (packed[..., None] >> shifts) & (2**bits - 1)
    return (fields.flatten(-2)[:, :cols] - 2 ** (bits - 1)).float()


def table_codes(
    packed: UInt8[Tensor, "*any"],
    table: Float[Tensor, "16"],
    absmax: Float[Tensor, " blocks"],
    block: int,
    shape: Sequence[int],
) -> Tensor:
    """Weights from indices into a table of 16 levels, two per byte, the high nibble first.

    Each block of ``block`` consecutive weights is scaled by its largest magnitude ``absmax``.
    """
    flat = packed.flatten()
    levels = table[torch.stack((flat >> 4, flat & 15), dim=-1).flatten().long()][: math.prod(shape)]
    return (levels * absmax.repeat_interleave(block)[: levels.numel()]).reshape(tuple(shape))


def nested_absmax(
    codes: UInt8[Tensor, " blocks"], table: Float[Tensor, "256"], absmax: Float[Tensor, " outer"], block: int, offset: float
) -> Float[Tensor, " blocks"]:
    """The scales of a doubly quantized weight, which are themselves indices into a table of 256 levels."""
    return table[codes.long()] * absmax.repeat_interleave(block)[: codes.numel()] + offset
