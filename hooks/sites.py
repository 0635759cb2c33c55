"""Sites: where in a model each gated unit is read, and the proof that it is the right place.

All knowledge of hook names and of how families name their parts is in this file. A site claims that in its layer

    a = x qᵀ (+ bias)     at blocks.L.mlp.gate.hook_out
    b = x kᵀ (+ bias)     at blocks.L.mlp.in.hook_out
    h = g(a, b)           at blocks.L.mlp.out.hook_in
    y = h v (+ bias)      at blocks.L.mlp.hook_out

and proves it on a short probe before anything is measured. Names prove nothing: in a mixture of experts the hook of that
name is the router. A layer whose claim fails is not a site; the reason is kept.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import MoEBridge

from analysis.activations import ACTIVATIONS, ALIASES
from analysis.gated import GatedMLP
from analysis.units import GatedUnit, Unit

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative error below which two computations of one quantity agree, by dtype of the model."""
OUTPUT_SLACK = 10
"""The output of the MLP sums d_mlp rounded products: its error may be this much larger."""
ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "ffn_activation")


@dataclass(frozen=True)
class Site:
    """One layer's gated units.

    Attributes:
        layer: index of the block.
        unit: g.
        q, k, v: queries, keys and values as the model holds them, one row a neuron; views, not copies.
        gain: gain of the norm whose output the MLP reads, ones where there is none.
        gain_source: which norm that is, in words.
        identity_error: relative error of h = g(a, b) on the probe.
        output_error: relative error of the MLP's output computed from q, k, v.
        gate_module, up_module: what gives a and b when it is called on x.
        q_bias, k_bias, v_bias: biases of a, b and y, None where the model has none.
    """

    layer: int
    unit: Unit
    q: Float[Tensor, "d_mlp d_model"]
    k: Float[Tensor, "d_mlp d_model"]
    v: Float[Tensor, "d_mlp d_model"]
    gain: Float[Tensor, " d_model"]
    gain_source: str
    identity_error: float
    output_error: float
    gate_module: nn.Linear
    up_module: nn.Linear
    q_bias: Float[Tensor, " d_mlp"] | None = None
    k_bias: Float[Tensor, " d_mlp"] | None = None
    v_bias: Float[Tensor, " d_model"] | None = None

    def gated_mlp(self) -> GatedMLP:
        """The layer's MLP as a form of the family, on x after its norm, with the model's own weights."""
        return GatedMLP(self.unit, self.q, self.k, self.v, self.q_bias, self.k_bias, self.v_bias)

    @property
    def hook_x(self) -> str:
        return _hooks(self.layer)["x"]

    @property
    def hook_a(self) -> str:
        return _hooks(self.layer)["a"]

    @property
    def hook_b(self) -> str:
        return _hooks(self.layer)["b"]

    @property
    def hook_h(self) -> str:
        return _hooks(self.layer)["h"]


class NotASiteError(Exception):
    """Why a layer is not analysed."""


def find_sites(bridge: TransformerBridge, probe: Int[Tensor, "batch pos"]) -> tuple[dict[int, Site], dict[int, str]]:
    """Every layer that proves itself on the probe, and for every other layer the reason why not."""
    names = [name for layer in range(len(bridge.blocks)) for name in _hooks(layer).values()]
    names += [name for layer in range(len(bridge.blocks)) for name in _norm_hooks(bridge, layer)]
    seen, fired = _capture(bridge, probe, [name for name in names if name in bridge.hook_dict])
    sites, skipped = {}, {}
    for layer in range(len(bridge.blocks)):
        try:
            sites[layer] = _prove(bridge, layer, seen, fired)
        except NotASiteError as reason:
            skipped[layer] = str(reason)
    return sites, skipped


@dataclass(frozen=True)
class Ends:
    """Where tokens enter the residual stream and where they leave it.

    Attributes:
        embedding, unembedding: one row a token, as the model holds them.
        gain: gain of the norm before the unembedding, ones where none proves itself.
        gain_source: which norm that is, in words.
    """

    embedding: Float[Tensor, "token d_model"]
    unembedding: Float[Tensor, "token d_model"]
    gain: Float[Tensor, " d_model"]
    gain_source: str


def find_ends(bridge: TransformerBridge, probe: Int[Tensor, "batch pos"], d_model: int) -> Ends | None:
    """Both ends of the model, the norm's gain proved on a probe; None if they are not as wide as the residual stream."""
    names = {end: f"ln_final.hook_{end}" for end in ("in", "out")} | {"read": "unembed.hook_in"}
    tables = [getattr(getattr(bridge, end, None), "original_component", None) for end in ("embed", "unembed")]
    weights = [table.weight.detach() for table in tables if isinstance(table, nn.Embedding | nn.Linear)]
    if len(weights) < 2 or any(weight.shape[1] != d_model for weight in weights):
        return None
    seen, _ = _capture(bridge, probe, [name for name in names.values() if name in bridge.hook_dict])
    before, after, read = (seen.get(names[end]) for end in ("in", "out", "read"))
    gain, source = torch.ones_like(weights[1][0]), "none: the unembedding does not read a norm's output"
    if before is not None and after is not None and read is not None and torch.equal(after, read):
        found = _form_of_gain(bridge.ln_final.original_component, before, after)
        gain, source = (gain, source) if found is None else (found[0], f"ln_final, {found[1]}")
    embedding, unembedding = weights
    return Ends(embedding, unembedding, gain, source)


def describe_blocks(bridge: TransformerBridge) -> str:
    """What a model without any gated layer has instead, in one clause."""
    mlps = [getattr(block, "mlp", None) for block in bridge.blocks]
    if all(hasattr(mlp, "in") and not hasattr(mlp, "gate") for mlp in mlps):
        return "its MLPs are static key-value memories σ(xKᵀ)V, in which there is no key to exchange with the query"
    if any(isinstance(mlp, MoEBridge) for mlp in mlps):
        return "its MLPs are mixtures of experts, whose gate is a router"
    return "its layers were skipped"


def _hooks(layer: int) -> dict[str, str]:
    mlp = f"blocks.{layer}.mlp"
    ends = {"x": "hook_in", "a": "gate.hook_out", "b": "in.hook_out", "h": "out.hook_in", "y": "hook_out"}
    return {symbol: f"{mlp}.{end}" for symbol, end in ends.items()}


def _norms(block: nn.Module) -> list[str]:
    return [name for name in ("ln2", "ln1") if getattr(block, name, None) is not None]


def _norm_hooks(bridge: TransformerBridge, layer: int) -> list[str]:
    norms = _norms(bridge.blocks[layer])
    return [f"blocks.{layer}.{norm}.{end}" for norm in norms for end in ("hook_in", "hook_out")]


def _capture(
    bridge: TransformerBridge, probe: Int[Tensor, "batch pos"], names: list[str]
) -> tuple[dict[str, Tensor], Counter[str]]:
    """What each hook saw in one pass over the probe, with batch and position flattened, and how often it fired."""
    seen: dict[str, Tensor] = {}
    fired: Counter[str] = Counter()

    def keep(tensor: Tensor, hook: Any) -> None:
        seen[hook.name] = tensor.detach().flatten(0, -2)
        fired[hook.name] += 1

    with torch.no_grad():
        bridge.run_with_hooks(probe, fwd_hooks=[(name, keep) for name in names], return_type=None)
    return seen, fired


def _prove(bridge: TransformerBridge, layer: int, seen: dict[str, Tensor], fired: Counter[str]) -> Site:
    block = bridge.blocks[layer]
    mlp = getattr(block, "mlp", None)
    gate, up, down = (_linear(mlp, part) for part in ("gate", "in", "out"))
    q, k, v = gate.weight, up.weight, down.weight.T
    if not q.shape == k.shape or v.shape[0] != q.shape[0]:
        raise NotASiteError(f"gate {_size(q)}, up {_size(k)} and down {_size(v.T)} weights do not fit one gated unit")
    if q.shape[0] < 2:
        raise NotASiteError("it has one neuron, and re-pairing needs another")
    for symbol, name in _hooks(layer).items():
        if fired[name] != 1:
            raise NotASiteError(f"{name} ({symbol}) fired {fired[name]} times in one pass, expected once")
    x, a, b, h, y = (seen[_hooks(layer)[symbol]] for symbol in "xabhy")
    for symbol, tensor in (("a", a), ("b", b), ("h", h)):
        if tensor.shape[-1] != q.shape[0]:
            raise NotASiteError(f"{symbol} is {tensor.shape[-1]} wide, expected d_mlp = {q.shape[0]}")
    unit, identity_error = _identify(a, b, h, bridge.original_model.config)
    limit = OUTPUT_SLACK * TOLERANCE[h.dtype]
    wide = torch.promote_types(h.dtype, torch.float32)
    biases = gate.bias, up.bias, down.bias
    output = GatedMLP(unit, q, k, v, *biases).to(wide)(x.to(wide))
    output_error = max(_relative_error(output, y), _relative_error(output, _original(mlp, x)))
    if not output_error <= limit:
        raise NotASiteError(f"MLP output from q, k, v is off by {output_error:.1e} (limit {limit:.0e})")
    gain, source = _norm_gain(block, layer, x, seen)
    weights, errors = (q.detach(), k.detach(), v.detach()), (identity_error, output_error)
    return Site(layer, unit, *weights, gain, source, *errors, gate, up, *map(_detached, biases))


def _linear(mlp: nn.Module | None, part: str) -> nn.Linear:
    """A projection of the MLP."""
    projection = getattr(getattr(mlp, part, None), "original_component", None)
    if not isinstance(projection, nn.Linear):
        kind = "the block" if mlp is None else type(getattr(mlp, "original_component", mlp)).__name__
        what = "nothing" if projection is None else type(projection).__name__
        raise NotASiteError(f"{kind} has {what} where a gated MLP has its {part} projection")
    if projection.weight.dtype not in TOLERANCE:
        raise NotASiteError(f"{part} weights are stored as {projection.weight.dtype}: load them dequantized")
    return projection


def _identify(a: Tensor, b: Tensor, h: Tensor, config: Any) -> tuple[Unit, float]:
    """The known unit that gives h from a and b with the least error; the configured activation wins a draw."""
    configured = configured_activations(config)
    names = dict.fromkeys([*(ALIASES.get(name, name) for name in configured), *ACTIVATIONS])
    units = [GatedUnit(ACTIVATIONS[name]) for name in names if name in ACTIVATIONS]
    errors = [_relative_error(unit(a, b), h) for unit in units]
    best = min(range(len(units)), key=errors.__getitem__)
    limit = TOLERANCE[h.dtype]
    if not errors[best] <= limit:
        raise NotASiteError(
            f"h is not σ(a)·b for any known σ (nearest {units[best].name}, off by {errors[best]:.1e}, limit {limit:.0e}; "
            f"the model says {', '.join(configured) or 'nothing'})"
        )
    return units[best], errors[best]


def configured_activations(config: Any) -> list[str]:
    """The activation names in a Hugging Face configuration."""
    text = config.get_text_config()
    return [str(getattr(text, field)) for field in ACTIVATION_FIELDS if getattr(text, field, None) is not None]


def _original(mlp: Any, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
    """The model's own code for this MLP, independent of how TransformerLens splits it."""
    with torch.no_grad():
        return mlp.original_component(x)


def _norm_gain(block: nn.Module, layer: int, x: Tensor, seen: dict[str, Tensor]) -> tuple[Tensor, str]:
    """The gain γ of the norm whose output x is: weight or 1 + weight, whichever makes x/γ parallel to the norm's input."""
    for name in _norms(block):
        before, after = (seen.get(f"blocks.{layer}.{name}.{end}") for end in ("hook_in", "hook_out"))
        if before is None or after is None or after.shape != x.shape or not torch.equal(after, x):
            continue
        found = _form_of_gain(getattr(block, name).original_component, before, x)
        if found is not None:
            return found[0], f"{name}, {found[1]}"
    return torch.ones_like(x[0]), "none: the MLP does not read a norm's output"


def _form_of_gain(norm: nn.Module, before: Tensor, x: Tensor) -> tuple[Tensor, str] | None:
    """Which gain, in which form, takes the norm's input to its output x; None if none does."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    candidates = {"without gain": torch.ones_like(x[0])}
    if weight is not None and weight.shape == x.shape[-1:]:
        candidates = {"γ = weight": weight.detach(), "γ = 1 + weight": 1 + weight.detach()} | candidates
    centered = before.double() - (before.double().mean(dim=-1, keepdim=True) if _centers(norm) else 0)
    shifted = x.double() - (0 if bias is None else bias.detach().double())
    errors = {form: _misalignment(shifted, gain.double() * centered) for form, gain in candidates.items()}
    form = min(errors, key=errors.__getitem__)
    return (candidates[form], form) if errors[form] <= OUTPUT_SLACK * TOLERANCE[x.dtype] else None


def _centers(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm) or "LayerNorm" in type(norm).__name__


def _misalignment(x: Tensor, y: Tensor) -> float:
    """The largest sine-like distance between corresponding rows, 0 where they are parallel."""
    return float((nn.functional.normalize(x, dim=-1) - nn.functional.normalize(y, dim=-1)).norm(dim=-1).max())


def _relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; NaN counts as an error by every comparison."""
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.norm())


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
