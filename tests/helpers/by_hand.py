"""The same edits done by hand: a plain Hugging Face model whose MLP has another forward. Knows nothing of ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

Unit = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
"""(gate, up, activation) → what the down projection is given."""

KNOWN = (
    *("llama", "llama-bias", "relu", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "glm4", "olmo2", "cohere"),
    *("granite", "stablelm", "exaone4", "smollm3"),
)
"""Families whose MLP is written below."""
KNOWN_MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v3", "dbrx")
BY_HAND: dict[str, Unit] = {
    "exchange": lambda gate, up, act: act(up) * gate,
    "scale:2": lambda gate, up, act: act(2 * gate) * (up / 2),
    "scale:0.5": lambda gate, up, act: act(gate / 2) * (2 * up),
    "flip": lambda gate, up, act: act(-gate) * -up,
    "bilinear-limit": lambda gate, up, act: gate * up / 2,
    "relu-limit": lambda gate, up, act: torch.relu(gate) * up,
    "symmetric": lambda gate, up, act: (act(up) * gate + act(gate) * up) / 2,
    "antisymmetric": lambda gate, up, act: (act(gate) * up - act(up) * gate) / 2,
    "zero": lambda gate, up, act: 0 * gate,
}


def plain_model(directory: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


@contextmanager
def by_hand(model: nn.Module, units: dict[int, Callable[[SimpleNamespace], Tensor]]) -> Iterator[None]:
    """Within the block the MLPs of these layers compute down(unit(…)); the unit sees gate, up, h and the activation."""
    changed = []
    for layer, unit in units.items():
        mlp = model.model.layers[layer].mlp
        mlp.forward = _forward(mlp, unit)
        changed.append(mlp)
    yield
    for mlp in changed:
        del mlp.forward


def edit_by_hand(name: str) -> Callable[[SimpleNamespace], Tensor]:
    """One of ``BY_HAND`` on all neurons and positions."""
    return lambda seen: BY_HAND[name](seen.gate, seen.up, seen.act)


def only(positions: Tensor, unit: Callable[[SimpleNamespace], Tensor]) -> Callable[[SimpleNamespace], Tensor]:
    """The same where ``positions`` [pos] is true, the model's own h elsewhere."""
    return lambda seen: torch.where(positions[:, None], unit(seen), seen.h)


@contextmanager
def experts_by_hand(model: nn.Module, layer: int, name: str) -> Iterator[None]:
    """Within the block one of ``BY_HAND`` is what the experts of a layer and its shared expert compute, token by token."""
    mlp = model.transformer.blocks[layer].ffn if hasattr(model, "transformer") else model.model.layers[layer].mlp
    unit = BY_HAND[name]

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, x = [], hidden.flatten(0, -2)
        for token in range(len(x)):
            total = torch.zeros_like(x[token])
            for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
                gate, up, down = _matrices(mlp.experts, expert)
                total = total + weight * (down @ unit(gate @ x[token], up @ x[token], nn.functional.silu))
            rows.append(total)
        return torch.stack(rows).view_as(hidden)

    mlp.experts.forward = forward
    shared = getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)
    if shared is not None:
        shared.forward = _forward(shared, edit_by_hand(name))
    yield
    for changed in (mlp.experts, shared):
        if changed is not None:
            del changed.forward


def _matrices(experts: nn.Module, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of an expert; those of a dbrx stand one under the other."""
    if not hasattr(experts, "mlp"):
        return *experts.gate_up_proj[expert].chunk(2), experts.down_proj[expert]
    m = experts.ffn_hidden_size
    gate, up, down = (getattr(experts.mlp, name)[m * expert : m * (expert + 1)] for name in ("w1", "v1", "w2"))
    return gate, up, down.T


def _forward(mlp: nn.Module, unit: Callable[[SimpleNamespace], Tensor]) -> Callable[[Tensor], Tensor]:
    act = getattr(mlp, "act_fn", None) or mlp.activation_fn

    def forward(x: Tensor) -> Tensor:
        gate, up = (
            mlp.gate_up_proj(x).chunk(2, dim=-1) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj(x), mlp.up_proj(x))
        )
        return mlp.down_proj(unit(SimpleNamespace(gate=gate, up=up, h=act(gate) * up, act=act)))

    return forward
