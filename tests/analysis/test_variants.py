"""Units that are not σ(a)·b: against plain loops, against the models' own code, and what is exact about each."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV4Config,
    FalconH1Config,
    Gemma3nTextConfig,
    GptOssConfig,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4MLP
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2SoftcappedSwiGLU
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from analysis.errors import UserError
from analysis.measures import asymmetry as measures
from analysis.units.base import GatedUnit, Unit
from analysis.units.registry import OTHER_UNITS, PARAMETERS, candidate_units, nearest_unit, unit_named
from analysis.units.variants import GptOssUnit, TopKUnit
from tests.helpers import reference
from tests.helpers.random_layers import TWINS, assert_close, layer_sums, random_case
from tests.helpers.scalar_gates import ACTIVATION, top_k_gates

D_MLP = 24


def clip(z: float, low: float, high: float) -> float:
    return max(low, min(z, high))


def gpt_oss(slope: float, limit: float) -> reference.Unit:
    def unit(a: float, b: float) -> float:
        z = min(a, limit)
        return (clip(b, -limit, limit) + 1) * z * reference.sigmoid(slope * z)

    return unit


SCALAR: dict[str, reference.Unit] = {
    "gpt_oss": gpt_oss(1.702, 7),
    "gpt_oss(0.5,3)": gpt_oss(0.5, 3),
    "clamped(silu,10)": lambda a, b: ACTIVATION["silu"](min(a, 10)) * clip(b, -10, 10),
    "clamped(gelu,2)": lambda a, b: ACTIVATION["gelu"](min(a, 2)) * clip(b, -2, 2),
    "clamped(softplus,2)": lambda a, b: ACTIVATION["softplus"](min(a, 2)) * clip(b, -2, 2),
    "clamped(leaky_relu,2)": lambda a, b: ACTIVATION["leaky_relu"](min(a, 2)) * clip(b, -2, 2),
    "clamped_after(silu,16)": lambda a, b: min(ACTIVATION["silu"](a), 16) * clip(b, -16, 16),
    "clamped_after(relu2,3)": lambda a, b: min(ACTIVATION["relu2"](a), 3) * clip(b, -3, 3),
    "inkling2": lambda a, b: 4 * math.tanh(a / 4) * reference.sigmoid(a) * 25 * math.tanh(b / 25),
    "inkling2(9,2)": lambda a, b: 9 * math.tanh(a / 9) * reference.sigmoid(a) * 2 * math.tanh(b / 2),
    "soft_capped(gelu_pytorch_tanh,30)": lambda a, b: ACTIVATION["gelu_pytorch_tanh"](30 * math.tanh(a / 30)) * b,
    "soft_capped(silu,1.5)": lambda a, b: ACTIVATION["silu"](1.5 * math.tanh(a / 1.5)) * b,
    "soft_capped(sigmoid,1.5)": lambda a, b: ACTIVATION["sigmoid"](1.5 * math.tanh(a / 1.5)) * b,
    "multiplied(silu,0.5)": lambda a, b: ACTIVATION["silu"](0.5 * a) * b,
    "multiplied(leaky_relu,-3)": lambda a, b: ACTIVATION["leaky_relu"](-3 * a) * b,
    "multiplied(softplus,2)": lambda a, b: ACTIVATION["softplus"](2 * a) * b,
}
"""The formula of every kind on floats, by the unit's name."""
TOP_K = {
    "top_k(gelu_pytorch_tanh,0.95)": ("gelu_pytorch_tanh", 0.95),
    "top_k(silu,0.5)": ("silu", 0.5),
    "top_k(relu,0.3)": ("relu", 0.3),
    "top_k(softplus,0.8)": ("softplus", 0.8),
}
LIMITS = {
    "gpt_oss": (0, math.inf),
    "gpt_oss(0.5,3)": (0, math.inf),
    "clamped(silu,10)": (0, math.inf),
    "clamped(gelu,2)": (0, math.inf),
    "clamped(softplus,2)": (0, math.inf),
    "clamped(leaky_relu,2)": (0, math.inf),
    "clamped_after(silu,16)": (0, math.inf),
    "clamped_after(relu2,3)": (0,),
    "inkling2": (0, math.inf),
    "inkling2(9,2)": (0, math.inf),
    "soft_capped(gelu_pytorch_tanh,30)": (0, math.inf),
    "soft_capped(silu,1.5)": (0, math.inf),
    "soft_capped(sigmoid,1.5)": (math.inf,),
    "multiplied(silu,0.5)": (0, math.inf),
    "multiplied(leaky_relu,-3)": (0, math.inf),
    "multiplied(softplus,2)": (math.inf,),
    "top_k(gelu_pytorch_tanh,0.95)": (0, math.inf),
    "top_k(silu,0.5)": (0, math.inf),
    "top_k(relu,0.3)": (0, math.inf),
    "top_k(softplus,0.8)": (math.inf,),
}


def layer(seed: int = 0, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Pre-activations of a layer on some tokens, far enough out for every clamp."""
    generator = torch.Generator().manual_seed(seed)
    a, b = size * 6 * torch.randn(2, 20, D_MLP, generator=generator, dtype=torch.float64)
    return a, b


def in_a_loop(name: str, a: Tensor, b: Tensor) -> Tensor:
    """h of a layer, by plain loops."""
    if name in SCALAR:
        return torch.tensor(reference.apply(SCALAR[name], a.tolist(), b.tolist()), dtype=torch.float64)
    sigma, share = ACTIVATION[TOP_K[name][0]], TOP_K[name][1]
    gates = [top_k_gates(row, sigma, share) for row in a.tolist()]
    return torch.tensor(gates, dtype=torch.float64) * b


@pytest.mark.parametrize("name", [*SCALAR, *TOP_K])
def test_a_unit_equals_its_loop(name: str) -> None:
    a, b = layer()
    unit, rounding = unit_named(name), 3e-6 if name in TOP_K else 1e-9  # Φ⁻¹ is taken in float32
    torch.testing.assert_close(unit(a, b), in_a_loop(name, a, b), rtol=rounding, atol=10 * rounding)
    torch.testing.assert_close(unit.exchanged(a, b), in_a_loop(name, b, a), rtol=rounding, atol=10 * rounding)
    for alpha in (-1.0, 0.5, 4.0):
        expected = in_a_loop(name, alpha * a, b / alpha)
        torch.testing.assert_close(unit.scaled(a, b, alpha), expected, rtol=rounding, atol=10 * rounding)


def test_every_kind_has_a_loop() -> None:
    assert set(OTHER_UNITS) <= {*SCALAR, *TOP_K} == set(LIMITS)


@pytest.mark.parametrize("name", [*SCALAR, *TOP_K])
def test_a_name_gives_the_unit_back(name: str) -> None:
    unit = unit_named(name)
    assert (unit.name, unit_named(unit.name)) == (name, unit)
    assert hash(unit) == hash(unit_named(name))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("gpt_oss(1.702,7)", "gpt_oss"),
        ("gpt_oss(1.702, 7.5)", "gpt_oss(1.702,7.5)"),
        ("inkling2(4,25)", "inkling2"),
        ("clamped(swish,1e1)", "clamped(silu,10)"),
        ("clamped(silu,0.1234567890123)", "clamped(silu,0.1234567890123)"),
        ("top_k(multiplied(silu,2),.5)", "top_k(multiplied(silu,2),0.5)"),
        ("soft_capped(soft_capped(gelu_new,3),2)", "soft_capped(soft_capped(gelu_pytorch_tanh,3),2)"),
    ],
)
def test_other_spellings_give_one_name(written: str, name: str) -> None:
    assert unit_named(written).name == name
    assert unit_named(written) == unit_named(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mish", "gpt_oss(NUMBER,NUMBER), inkling2(NUMBER,NUMBER), clamped(NAME,NUMBER)"),
        ("mish", "clamped_after(NAME,NUMBER), top_k(NAME,NUMBER)"),
        ("mish", "soft_capped(NAME,NUMBER), multiplied(NAME,NUMBER)"),
        ("clamped(mish,7)", "unknown gate activation 'mish'"),
        ("clamped", "unknown gate activation 'clamped'"),
        ("clamped(silu)", "'clamped(silu)' has 0 of its numbers: give 1"),
        ("gpt_oss(7)", "'gpt_oss(7)' has 1 of its numbers: give 2"),
        ("gpt_oss(x,7)", "'x' in place of a number: write it like 7 or 1.702"),
        ("gpt_oss(1,nan)", "'nan' in place of a finite number"),
        ("gpt_oss(0,7)", "'gpt_oss(0,7)' is not a unit: give a slope and a limit above 0"),
        ("clamped(silu,-7)", "give a limit above 0"),
        ("clamped_after(tanh,7)", "tanh does not grow, use it without a clamp"),
        ("inkling2(4,-1)", "give two caps above 0"),
        ("soft_capped(silu,0)", "give a cap above 0"),
        ("multiplied(silu,0)", "give another factor"),
        ("top_k(silu,1)", "between 0 and 1"),
        ("top_k(silu,0.999999999)", "float32 distinguishes from 0 and 1"),
    ],
)
def test_a_name_that_is_none_is_one_line_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        unit_named(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_what_scaling_tends_to(name: str) -> None:
    unit, (a, b) = unit_named(name), layer()
    assert unit.limits == LIMITS[name]
    for alpha, near in ((0.0, 1e-9), (math.inf, 1e9)):
        if alpha in unit.limits:
            torch.testing.assert_close(unit.scaled(a, b, alpha), in_a_loop(name, near * a, b / near), rtol=3e-6, atol=3e-6)
        else:
            with pytest.raises(ValueError, match="has no limit at scale"):
                unit.scaled(a, b, alpha)
    nothing = torch.full((4,), torch.nan)
    assert all(unit.scaled(nothing, nothing, alpha).isnan().all() for alpha in (*unit.limits, 2.0))  # tells of overflow


@pytest.mark.parametrize("name", [*SCALAR, *TOP_K])
def test_euler_written_out_is_what_differentiation_gives(name: str) -> None:
    unit, (a, b) = unit_named(name), layer()
    assert type(unit).euler is not Unit.euler
    assert unit.can_be_compiled
    expected = Unit.euler(unit, a, b)
    exactness = 1e-6 if "softplus" in name else 1e-10  # torch's own derivative of softplus is cut off
    torch.testing.assert_close(unit.euler(a, b), expected, rtol=exactness, atol=exactness)
    step = 1e-6
    slope = (unit.scaled(a, b, 1 + step) - unit.scaled(a, b, 1 - step)) / (2 * step)
    torch.testing.assert_close(unit.euler(a, b), slope, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(unit.euler(a.float(), b.float()).double(), expected, rtol=2e-4, atol=2e-4)
    near_zero = 1e-5 * a.float()
    assert unit.euler(near_zero, b.float()).isfinite().all()
    assert unit.euler(torch.zeros_like(a), b).isfinite().all()


@pytest.mark.parametrize("name", SCALAR)
def test_the_numbers_of_a_layer_are_those_of_loops(name: str) -> None:
    unit, scalar = unit_named(name), SCALAR[name]
    case = random_case(unit, (9, 8), 5, draws=1)
    case = case.with_data(lambda a, b: (unit.span * a, unit.span * b))
    (a, b, w), sums = case.grids, layer_sums(case.moments)
    close = pytest.approx
    assert float(measures.exchange(sums)) == close(reference.exchange(scalar, a, b, w).pooled_asymmetry, rel=1e-9)
    assert float(measures.placement(sums)) == close(reference.placement(scalar, a, b, w).pooled_asymmetry, rel=1e-9)
    for place, alpha in enumerate(case.layout.alphas):
        near = {0.0: 1e-9, math.inf: 1e9}.get(alpha, alpha)
        expected = reference.scaling(scalar, a, b, w, near).pooled_asymmetry
        assert float(measures.scaling(sums)[place]) == close(expected, rel=1e-5, abs=1e-12)
        others = reference.everyone_else(a, b, case.k.tolist() if unit.up_is_linear else None)
        expected = reference.scaling(scalar, *others, w, near).pooled_asymmetry
        assert float(measures.scaling_null_repaired(sums)[place]) == close(expected, rel=1e-5, abs=1e-12)
    assert float(measures.euler_residual(sums)) == close(
        reference.euler_residual_generic(scalar, a, b, w)[1], rel=1e-4, abs=1e-7
    )
    partner = case.partners[0].tolist()
    expected = reference.repaired_null(scalar, a, b, w, partner).pooled_asymmetry
    assert float(measures.exchange_null_repaired(sums)) == close(expected, rel=1e-9)


# --- the models' own code


def filled(module: nn.Module, seed: int = 0) -> Any:
    """The module in float64 with weights that reach every clamp."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def read(mlp: Any, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and h of a gated MLP on random inputs, read at its three projections."""
    seen: dict[str, Tensor] = {}
    mlp.gate_proj.register_forward_hook(lambda _, __, out: seen.update(a=out))
    mlp.up_proj.register_forward_hook(lambda _, __, out: seen.update(b=out))
    mlp.down_proj.register_forward_hook(lambda _, given, __: seen.update(h=given[0]))
    with torch.no_grad():
        mlp(
            size
            * torch.randn(30, mlp.gate_proj.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        )
    return seen["a"], seen["b"], seen["h"]


def applied(experts: Any, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and h of the gating function of an experts module."""
    a, b = layer()
    joined = torch.stack([a, b], dim=-1).flatten(-2) if interleaved else torch.cat([a, b], dim=-1)
    return a, b, experts._apply_gate(joined)


SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": D_MLP, "num_hidden_layers": 2}


def gemma3n(sparsity: float) -> tuple[Tensor, Tensor, Tensor]:
    config = Gemma3nTextConfig(**SMALL, activation_sparsity_pattern=[sparsity, 0.0], layer_types=["full_attention"] * 2)
    return read(filled(Gemma3nTextMLP(config, 0)), 2.0)


def deepseek(limit: float) -> tuple[Tensor, Tensor, Tensor]:
    return read(filled(DeepseekV4MLP(DeepseekV4Config(**SMALL, swiglu_limit=limit))), 2.0)


def deepseek_experts() -> tuple[Tensor, Tensor, Tensor]:
    return applied(
        DeepseekV4Experts(DeepseekV4Config(**SMALL, moe_intermediate_size=D_MLP, swiglu_limit=3.0, n_routed_experts=2))
    )


def gpt_oss_experts(**config: float) -> tuple[Tensor, Tensor, Tensor]:
    return applied(GptOssExperts(GptOssConfig(**SMALL, num_local_experts=2, **config)), interleaved=True)


class StepConfig:
    """What the experts of Step-3.7 read of a configuration."""

    num_local_experts, hidden_size, moe_intermediate_size, hidden_act = 2, 8, D_MLP, "silu"


def step() -> tuple[Tensor, Tensor, Tensor]:
    return applied(Step3p7Experts(StepConfig(), swiglu_limit=5.0))


def inkling() -> tuple[Tensor, Tensor, Tensor]:
    a, b = layer()
    return a, b, Inkling2SoftcappedSwiGLU(Inkling2TextConfig())(a, b)


def falcon() -> tuple[Tensor, Tensor, Tensor]:
    return read(filled(FalconH1MLP(FalconH1Config(**SMALL, mlp_multipliers=[0.3, 0.7]))), 2.0)


Case = tuple[str, Callable[[], tuple[Tensor, Tensor, Tensor]], tuple[str, ...], dict[str, float], float]
FAMILIES: dict[str, Case] = {
    "gemma3n": (
        "top_k(gelu_pytorch_tanh,0.95)",
        lambda: gemma3n(0.95),
        ("gelu_pytorch_tanh",),
        {"activation_sparsity": 0.95},
        1e-12,
    ),
    "gemma3n, a dense layer": (
        "gelu_pytorch_tanh",
        lambda: gemma3n(0.0),
        ("gelu_pytorch_tanh",),
        {"activation_sparsity": 0.0},
        1e-12,
    ),
    "deepseek_v4": ("clamped(silu,3)", lambda: deepseek(3.0), ("silu",), {"limit": 3.0}, 1e-12),
    "deepseek_v4 experts": ("clamped(silu,3)", deepseek_experts, ("silu",), {"swiglu_limit": 3.0}, 1e-12),
    "gpt_oss": ("gpt_oss", gpt_oss_experts, ("silu",), {"limit": 7.0, "alpha": 1.702}, 1e-12),
    "gpt_oss, other numbers": (
        "gpt_oss(1.1,2)",
        lambda: gpt_oss_experts(swiglu_alpha=1.1, swiglu_limit=2.0),
        (),
        {"swiglu_limit": 2.0, "swiglu_alpha": 1.1},
        1e-12,
    ),
    "step3p7": ("clamped_after(silu,5)", step, ("silu",), {"limit": 5.0}, 1e-12),
    "inkling2": ("inkling2", inkling, ("silu",), {"mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0}, 1e-6),  # in float32
    "falcon_h1": ("multiplied(silu,0.3)", falcon, ("silu",), {"gate_multiplier": 0.3}, 1e-12),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_unit_that_its_parameters_give(family: str) -> None:
    """h of the model's own code is g(a, b), and of all candidates this unit is found."""
    name, own, names, parameters, exactness = FAMILIES[family]
    a, b, h = own()
    candidates = candidate_units(names, parameters)
    found, error = nearest_unit(candidates, a, b, h)
    assert found.name == name
    assert error < exactness
    others = [unit for unit in candidates if unit != found]
    assert nearest_unit(others, a, b, h)[1] > 1e-5  # a unit that would do as well proves nothing


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_cutoff_is_the_models_own_in_every_precision(dtype: torch.dtype) -> None:
    config = Gemma3nTextConfig(**SMALL, activation_sparsity_pattern=[0.95, 0.0], layer_types=["full_attention"] * 2)
    mlp, (a, _) = Gemma3nTextMLP(config, 0), layer()
    unit = unit_named("top_k(linear,0.95)")
    assert isinstance(unit, TopKUnit)
    assert torch.equal(unit.above_cutoff(a.to(dtype)), mlp._gaussian_topk(a.to(dtype)))


# --- candidates


def test_configured_units_come_first_and_every_activation_is_there() -> None:
    names = [unit.name for unit in candidate_units(["gelu_new", "no such", "tanh"], {})]
    assert names[:2] == ["gelu_pytorch_tanh", "tanh"]
    assert set(names) == set(TWINS)
    assert len(names) == len(TWINS)
    with_limit = [unit.name for unit in candidate_units(["silu"], {"limit": 7.0, "unknown": 3.0})]
    assert with_limit[:4] == ["clamped(silu,7)", "clamped_after(silu,7)", "silu", "gpt_oss"]
    assert {*TWINS, "clamped(gelu,7)"} <= set(with_limit)
    assert not {"clamped(tanh,7)", "clamped(sigmoid,7)"} & set(with_limit)
    listed = [unit.name for unit in candidate_units(["silu"], {"swiglu_limits": 16.0})]
    assert listed[:3] == ["clamped_after(silu,16)", "clamped(silu,16)", "silu"]
    assert candidate_units([], {"swiglu_alpha": 1.1, "limit": 2.0})[0] == GptOssUnit(1.1, 2.0)


@pytest.mark.parametrize("key", PARAMETERS)
@pytest.mark.parametrize("value", [None, 0.0, math.inf])
def test_a_parameter_without_effect_makes_no_candidate(key: str, value: float | None) -> None:
    assert candidate_units(["silu"], {key: value}) == candidate_units(["silu"], {})


def test_the_first_of_equally_near_units_is_taken_and_nan_is_never_near() -> None:
    a, b = layer()
    clamped, plain, capped = (unit_named(name) for name in ("clamped(silu,1000)", "silu", "soft_capped(silu,2)"))
    h = plain(a, b)
    assert nearest_unit([clamped, plain], a, b, h) == (clamped, 0.0)
    assert nearest_unit([plain, clamped], a, b, h) == (plain, 0.0)
    found, error = nearest_unit([capped], a, b, h)
    difference = torch.linalg.vector_norm(capped(a, b) - h) / torch.linalg.vector_norm(h)
    assert (found, error) == (capped, pytest.approx(float(difference), rel=1e-12))

    class Overflowing(GatedUnit):
        def __call__(self, a: Tensor, b: Tensor) -> Tensor:
            return super().__call__(a, b) * torch.nan

    assert nearest_unit([Overflowing(plain.activation), capped], a, b, h)[0] == capped  # type: ignore[attr-defined]


# --- what is exact about a cutoff over the layer


def test_what_a_cutoff_over_the_layer_is_to_the_symmetries() -> None:
    a, b = layer()
    relu, gelu = (unit_named(f"top_k({name},0.7)") for name in ("relu", "gelu"))
    for alpha in (0.01, 0.5, 3.0, 1e4):
        torch.testing.assert_close(relu.scaled(a, b, alpha), relu(a, b), rtol=1e-12, atol=1e-12)
        rest = gelu.above_cutoff(alpha * a)  # type: ignore[attr-defined]
        torch.testing.assert_close(rest, alpha * gelu.above_cutoff(a), rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]
    assert relu.euler(a, b).abs().max() == 0
    order = torch.randperm(D_MLP, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(gelu(a[:, order], b[:, order]), gelu(a, b)[:, order], rtol=1e-12, atol=1e-12)
    shifted = a + torch.arange(20, dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        gelu(shifted, b), gelu(a, b), rtol=1e-9, atol=1e-9
    )  # a constant on all gates changes nothing
    alone = gelu(a[:, :1], b[:, :1])
    assert not torch.allclose(alone, gelu(a, b)[:, :1])  # a neuron on its own is another one
    assert not gelu.is_pointwise
    assert unit_named("gelu").is_pointwise


def test_of_gaussian_gates_the_stated_share_is_cut_off() -> None:
    a = 3 + 2 * torch.randn(50, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for share in (0.3, 0.95):
        unit = unit_named(f"top_k(relu,{share})")
        assert float((unit.gate(a) == 0).double().mean()) == pytest.approx(share, abs=3e-3)


def test_what_the_flip_leaves_of_a_soft_capped_gate_is_half_of_the_capped_product() -> None:
    a, b = layer()
    for name in ("silu", "gelu", "relu"):
        unit = unit_named(f"soft_capped({name},5)")
        torch.testing.assert_close((unit(a, b) + unit(-a, -b)) / 2, 5 * torch.tanh(a / 5) * b / 2, rtol=1e-12, atol=1e-12)


def test_a_clamp_that_is_never_reached_changes_nothing() -> None:
    a, b = layer()
    for name in ("silu", "gelu", "softplus"):
        plain = unit_named(name)
        for kind in ("clamped", "clamped_after"):
            far = unit_named(f"{kind}({name},1000)")
            assert torch.equal(far(a, b), plain(a, b))
            torch.testing.assert_close(far.euler(a, b), plain.euler(a, b), rtol=0, atol=0)
    assert_close(unit_named("soft_capped(silu,1e7)")(a, b), unit_named("silu")(a, b))
