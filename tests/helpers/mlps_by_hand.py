"""The MLP of every family written out by hand, from its own modules by their names. Knows nothing of ours."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, ModernBertForMaskedLM, T5EncoderModel

Act = Callable[[Tensor], Tensor]
Unit = Callable[[Tensor, Tensor], Tensor]


def gelu_tanh(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


def silu(z: Tensor) -> Tensor:
    return z / (1 + torch.exp(-z))


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return silu(a) * b


def clamped_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """That of gpt-oss and MiniMax-M3."""
    a = a.clamp(max=7)
    return (b.clamp(-7, 7) + 1) * a / (1 + torch.exp(-1.702 * a))


def sparse_gelu(z: Tensor) -> Tensor:
    """Gemma 3n keeps what exceeds mean + quantile·std of all neurons."""
    cut = z.mean(dim=-1, keepdim=True) + NormalDist().inv_cdf(0.5) * z.std(dim=-1, keepdim=True, correction=0)
    return gelu_tanh(functional.relu(z - cut))


@dataclass
class Recording:
    """What some neurons do on the tokens that reach them, in float64."""

    place: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor
    h: Tensor


@dataclass(frozen=True)
class Separate:
    """Two projections of x, of which the first is activated."""

    path: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    act: Act = silu
    scale: float = 1.0
    weight: str | None = None
    first_layer_act: Act | None = None

    def __call__(self, block: nn.Module, seen: dict[str, Any], layer: int) -> dict[int, Recording]:
        mlp, x = block.get_submodule(self.path), seen[self.path][0][0]
        a, b = (getattr(mlp, name)(x).flatten(0, -2).double() for name in (self.gate, self.up))
        act = self.first_layer_act if self.first_layer_act and layer == 0 else self.act
        return {-1: Recording(torch.arange(len(a)), self._weight(block, x), a, b, act(self.scale * a) * b)}

    def _weight(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.weight is None:
            return torch.ones(x.numel() // x.shape[-1]).double()
        return torch.sigmoid(block.get_submodule(self.weight)(x)).flatten().double()


@dataclass(frozen=True)
class Halves:
    """One projection whose first half is activated and whose second half is not."""

    path: str
    both: str
    act: Act = silu
    unit: Unit | None = None

    def __call__(self, block: nn.Module, seen: dict[str, Any], layer: int) -> dict[int, Recording]:
        x = seen[self.path][0][0]
        both = getattr(block.get_submodule(self.path), self.both)(x).flatten(0, -2).double()
        a, b = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        h = self.act(a) * b if self.unit is None else self.unit(a, b)
        return {-1: Recording(torch.arange(len(a)), torch.ones(len(a)).double(), a, b, h)}


@dataclass(frozen=True)
class Experts:
    """FusedExperts of matrices; token by token and slot by slot, as the router says."""

    path: str = "mlp.experts"
    shared: Any = None
    unit: Unit = swiglu

    def __call__(self, block: nn.Module, seen: dict[str, Any], layer: int) -> dict[int, Recording]:
        experts, (x, index, weights) = block.get_submodule(self.path), seen[self.path][0]
        rows: dict[int, list[tuple[int, float, Tensor, Tensor]]] = {}
        for token in range(len(x)):
            for slot in range(index.shape[1]):
                expert = int(index[token, slot])
                both = experts.gate_up_proj[expert].double() @ x[token].double()
                m = len(both) // 2
                rows.setdefault(expert, []).append((token, float(weights[token, slot]), both[:m], both[m:]))
        found = {expert: self._seen(mine, self.unit) for expert, mine in rows.items()}
        return found | ({} if self.shared is None else self.shared(block, seen, layer))

    @staticmethod
    def _seen(rows: list[tuple[int, float, Tensor, Tensor]], unit: Unit) -> Recording:
        token, weight, a, b = zip(*rows, strict=True)
        a, b = torch.stack(a), torch.stack(b)
        return Recording(torch.tensor(token), torch.tensor(weight).double(), a, b, unit(a, b))


@dataclass(frozen=True)
class DbrxExperts(Experts):
    """The rows of w1, v1 and w2 are neurons, those of one expert after those of the other."""

    def __call__(self, block: nn.Module, seen: dict[str, Any], layer: int) -> dict[int, Recording]:
        experts, (x, index, weights) = block.get_submodule(self.path), seen[self.path][0]
        x, m = x.flatten(0, -2), experts.ffn_hidden_size
        rows: dict[int, list[tuple[int, float, Tensor, Tensor]]] = {}
        for token in range(len(x)):
            for slot in range(index.shape[1]):
                expert = int(index[token, slot])
                mine = slice(m * expert, m * (expert + 1))
                a, b = (table[mine].double() @ x[token].double() for table in (experts.mlp.w1, experts.mlp.v1))
                rows.setdefault(expert, []).append((token, float(weights[token, slot]), a, b))
        return {expert: self._seen(mine, self.unit) for expert, mine in rows.items()}


@dataclass(frozen=True)
class GptOssExperts(Experts):
    """Rows of gate and up alternate, matrices stand with their inputs first, and there are biases, clamps and a 1."""

    def __call__(self, block: nn.Module, seen: dict[str, Any], layer: int) -> dict[int, Recording]:
        experts, (x, index, weights) = block.get_submodule(self.path), seen[self.path][0]
        rows: dict[int, list[tuple[int, float, Tensor, Tensor]]] = {}
        for token in range(len(x)):
            for slot in range(index.shape[1]):
                expert = int(index[token, slot])
                both = (
                    x[token].double() @ experts.gate_up_proj[expert].double() + experts.gate_up_proj_bias[expert].double()
                )
                rows.setdefault(expert, []).append((token, float(weights[token, slot]), both[0::2], both[1::2]))

        return {expert: self._seen(mine, clamped_swiglu) for expert, mine in rows.items()}


@dataclass(frozen=True)
class Llama4Experts(Experts):
    """The router's weight multiplies what an expert reads, not what it gives."""

    def __call__(self, block: nn.Module, seen: dict[str, Any], layer: int) -> dict[int, Recording]:
        moe = block.get_submodule(self.path.rpartition(".")[0])
        x = seen[self.path.rpartition(".")[0]][0][0].flatten(0, -2)
        logits = x @ moe.router.weight.T
        experts, rows = moe.experts, {}
        for token in range(len(x)):
            expert = int(logits[token].argmax())
            read = torch.sigmoid(logits[token, expert]).double() * x[token].double()
            both = read @ experts.gate_up_proj[expert].double()
            m = len(both) // 2
            rows.setdefault(expert, []).append((token, 1.0, both[:m], both[m:]))
        found = {expert: self._seen(mine, self.unit) for expert, mine in rows.items()}
        return found | self.shared(block, seen, layer)


FEED_FORWARD = Separate("feed_forward")
BY_FAMILY: dict[str, Any] = {
    **dict.fromkeys(
        ("llama", "llama-bias", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "cohere", "granite", "stablelm", "smollm3",
         "exaone4", "seed_oss", "ernie4_5", "helium"), Separate(),
    ),
    "relu": Separate(act=functional.relu),
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), Separate(act=gelu_tanh)),
    "gemma3n": Separate(act=gelu_tanh, first_layer_act=sparse_gelu),
    "phi3": Halves("mlp", "gate_up_proj"),
    "glm4": Halves("mlp", "gate_up_proj"),
    "lfm2": Separate("feed_forward", "w1", "w3"),
    "bamba": FEED_FORWARD,
    "falcon_h1": Separate("feed_forward", scale=0.7),
    "recurrent_gemma": Separate("mlp_block", act=gelu_tanh),
    "t5": Separate("layer.1.DenseReluDense", "wi_0", "wi_1", act=gelu_tanh),
    "modernbert": Halves("mlp", "Wi", functional.gelu),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe"), Experts()),
    "qwen2_moe": Experts(shared=Separate("mlp.shared_expert", weight="mlp.shared_expert_gate")),
    "qwen3_next": Experts(shared=Separate("mlp.shared_expert", weight="mlp.shared_expert_gate")),
    "granitemoe": Experts("block_sparse_moe.experts"),
    "granitemoehybrid": Experts("block_sparse_moe.experts", Halves("shared_mlp", "input_linear")),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "ernie4_5_moe"), Experts(shared=Separate("mlp.shared_experts"))),
    "gpt_oss": GptOssExperts(),
    "llama4": Llama4Experts("feed_forward.experts", Separate("feed_forward.shared_expert")),
    "lfm2_moe": Experts("feed_forward.experts"),
    "jamba": Experts("feed_forward.experts"),
    "dbrx": DbrxExperts("ffn.experts"),
    "minimax_m3": Experts(shared=Halves("mlp.shared_experts", "gate_up_proj", unit=clamped_swiglu), unit=clamped_swiglu),
}  # fmt: skip
"""How the MLP of a family is written."""
DENSE_LAYERS: dict[str, Any] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "ernie4_5_moe"), Separate()),
    "lfm2_moe": Separate("feed_forward", "w1", "w3"),
    "jamba": FEED_FORWARD,
    "llama4": FEED_FORWARD,
    "minimax_m3": Halves("mlp", "gate_up_proj", unit=clamped_swiglu),
}
"""How that of the family's layers without experts is."""


def load_plain(directory: Path, family: str) -> nn.Module:
    """The model by its own class, alone."""
    kind = {"t5": T5EncoderModel, "modernbert": ModernBertForMaskedLM}.get(family, AutoModelForCausalLM)
    return kind.from_pretrained(directory, attn_implementation="eager").eval()


def layers_of(model: nn.Module, family: str) -> nn.ModuleList:
    if family == "t5":
        return model.encoder.block
    if family == "dbrx":
        return model.transformer.blocks
    return model.model.layers


def read_by_hand(model: nn.Module, family: str, tokens: Tensor) -> list[dict[int, Recording]]:
    """For every layer and expert (−1 where every token is read) what its neurons do on these tokens."""
    found: list[dict[int, Recording]] = []
    with torch.no_grad():
        for layer, block in enumerate(layers_of(model, family)):
            seen: dict[str, Any] = {}
            handles = [
                module.register_forward_pre_hook(partial(_keep, seen, name)) for name, module in block.named_modules()
            ]
            model(tokens)
            for handle in handles:
                handle.remove()
            reader = BY_FAMILY[family]
            has_experts = not isinstance(reader, Experts) or reader.path in dict(block.named_modules())
            found.append((reader if has_experts else DENSE_LAYERS[family])(block, seen, layer))
    return found


def _keep(seen: dict[str, Any], name: str, module: nn.Module, inputs: Any) -> None:
    seen[name] = (inputs,)
