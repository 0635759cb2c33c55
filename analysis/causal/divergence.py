"""The cost of an edit: the divergence of the next-token distributions, and the rise of the cross-entropy, in nats.

With p from the model and q from the edited model, on every position

    KL(p‖q) = Σ_i p_i (e^{d_i} − 1 − d_i)      d = log q − log p

which is Σ p (log p − log q), because Σ (q − p) = 0; every term is ≥ 0, and an error in the normalization of p or q enters
only squared. So float32 probabilities give a small divergence to full relative precision, where the usual sum loses it.

    ΔCE = log p_target − log q_target
"""

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

_CHUNK = 1 << 21
"""Elements that are processed at a time: few enough to stay in a core's cache."""
_OVERFLOW = 80.0
"""e to this power does not overflow float32."""


def kl_divergence(base: Float[Tensor, "token vocab"], edited: Float[Tensor, "token vocab"]) -> Float64[Tensor, " token"]:
    """KL(base‖edited) of log-probabilities."""
    change = edited - base
    wide = change.double() if float(change.max()) > _OVERFLOW else change
    return (base.to(wide.dtype).exp() * (wide.expm1() - wide)).sum(dim=-1, dtype=torch.float64)


def costs(
    base: Float[Tensor, "token vocab"],
    logits: Float[Tensor, "row token vocab"],
    targets: Int64[Tensor, " token"],
) -> Float64[Tensor, "quantity row"]:
    """Σ over tokens of KL and of ΔCE for every patched run, on the CPU.

    Args:
        base: log-probabilities of the model.
        logits: of the patched runs, one row each.
        targets: the next tokens.
    """
    size = max(1, _CHUNK // base.shape[-1])
    sums = [torch.zeros(2, dtype=torch.float64, device=base.device) for _ in logits]
    for clean, expected, pieces in zip(base.split(size), targets.split(size), logits.split(size, dim=1), strict=True):
        for total, piece in zip(sums, pieces, strict=True):
            edited = log_probabilities(piece)
            rise = clean.gather(-1, expected[:, None]) - edited.gather(-1, expected[:, None])
            total += torch.stack([kl_divergence(clean, edited).sum(), rise.double().sum()])
    return torch.stack(sums, dim=1).cpu()


def log_probabilities(logits: Float[Tensor, "*row token vocab"]) -> Float[Tensor, "*row token vocab"]:
    """log softmax, at least in float32."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def cross_entropy(log_p: Float[Tensor, "token vocab"], targets: Int64[Tensor, " token"]) -> float:
    """Σ over tokens of −log p of the next token."""
    return -float(log_p.gather(-1, targets[:, None]).sum(dtype=torch.float64))
