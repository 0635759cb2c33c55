"""Geometry of query, key and value: equal to its twin, and unchanged by what leaves the neuron as it is."""

import pytest
import torch
from torch import Tensor

from analysis.weights.geometry import Geometry
from tests.helpers import reference
from tests.helpers.random_layers import assert_close

D_MLP, D_MODEL = 7, 5
BETA = torch.tensor([3.0, -1.0, -0.2, 1.0, 3.0, -1.0, -0.2], dtype=torch.float64)
SIGN = BETA.sign()


def weights(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and a gain with both signs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, D_MLP, D_MODEL, generator=generator, dtype=torch.float64).to(dtype)
    return q, k, v, torch.randn(D_MODEL, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_geometry_equals_the_twin(dtype: torch.dtype) -> None:
    q, k, v, gain = weights(dtype)
    geometry = Geometry.of(q, k, v, gain)
    numbers = {**geometry.tensors(), "score": geometry.score}
    vectors = zip(q.tolist(), k.tolist(), v.tolist(), strict=True)
    twins = [reference.geometry(*neuron, gain.tolist()) for neuron in vectors]
    assert all(numbers.keys() == twin.keys() for twin in twins)
    for name, values in numbers.items():
        assert values.dtype == torch.float64
        assert_close(values, [twin[name] for twin in twins], what=name)


def test_value_weight_is_the_squared_norm_of_the_value() -> None:
    q, k, v, gain = weights()
    assert_close(Geometry.of(q, k, v, gain).value_weight, v.square().sum(dim=1))


def test_gain_is_folded_into_query_and_key_only() -> None:
    q, k, v, gain = weights()
    folded = Geometry.of(q * gain, k * gain, v, torch.ones_like(gain))
    for name, values in Geometry.of(q, k, v, gain).tensors().items():
        assert_close(values, folded.tensors()[name], what=name)


def test_rescaling_key_and_value_keeps_score_and_cosines_up_to_sign() -> None:
    q, k, v, gain = weights()
    before = Geometry.of(q, k, v, gain)
    after = Geometry.of(q, k * BETA[:, None], v / BETA[:, None], gain)
    assert_close(after.score, before.score)
    assert_close(after.cos_kv, before.cos_kv)
    assert_close(after.cos_qk, SIGN * before.cos_qk)
    assert_close(after.cos_qv, SIGN * before.cos_qv)
    assert_close(after.norm_k, BETA.abs() * before.norm_k)
    assert_close(after.value_weight, before.value_weight / BETA.square())


def test_balance_brings_the_key_to_the_length_and_side_of_the_query() -> None:
    q, k, v, gain = weights()
    before = Geometry.of(q, k, v, gain)
    balanced = Geometry.of(q, k * before.balance[:, None], v / before.balance[:, None], gain)
    assert_close(balanced.norm_k, before.norm_q)
    assert (before.cos_qk < 0).any()
    assert_close(balanced.cos_qk, before.cos_qk.abs())
    assert_close(balanced.balance, torch.ones(D_MLP))
    assert_close(Geometry.of(q, k * BETA[:, None], v / BETA[:, None], gain).balance, before.balance / BETA)


def test_exchange_of_query_and_key_swaps_their_numbers() -> None:
    q, k, v, gain = weights()
    before, after = Geometry.of(q, k, v, gain), Geometry.of(k, q, v, gain)
    assert_close(after.cos_qk, before.cos_qk)
    assert_close(after.score, before.score)
    assert_close(after.cos_qv, before.cos_kv)
    assert_close(after.norm_q, before.norm_k)


def test_rotation_of_the_residual_stream_changes_nothing() -> None:
    q, k, v, _ = weights()
    ones = torch.ones(D_MODEL, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(1)).double()).Q
    rotated = Geometry.of(q @ rotation, k @ rotation, v @ rotation, ones).tensors()
    for name, values in Geometry.of(q, k, v, ones).tensors().items():
        assert_close(rotated[name], values, what=name)


def test_aligned_vectors_have_cosine_one() -> None:
    q, _, _, gain = weights()
    geometry = Geometry.of(q, 2 * q, -3 * q * gain, gain)
    ones = torch.ones(D_MLP)
    for cosine, expected in ((geometry.cos_qk, ones), (geometry.cos_qv, -ones), (geometry.cos_kv, -ones)):
        assert_close(cosine, expected)


def test_cosine_with_a_zero_vector_is_missing() -> None:
    q, k, v, gain = weights()
    geometry = Geometry.of(q, torch.zeros_like(k), v, gain)
    assert geometry.cos_qk.isnan().all()
    assert (geometry.score == 0).all()


def test_what_is_applied_after_the_mlp_belongs_to_v() -> None:
    q, k, v = (torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3))
    gain, after = torch.tensor([1.0, 2.0, 0.5, 3.0]), torch.tensor([0.5, -1.0, 2.0, 0.25])
    found, bare = Geometry.of(q, k, v, gain, after), Geometry.of(q, k, v, gain)
    for neuron in range(5):
        folded = [float(after[i]) * float(v[neuron, i]) for i in range(4)]
        query = [float(gain[i]) * float(q[neuron, i]) for i in range(4)]
        size, other = sum(x * x for x in folded) ** 0.5, sum(x * x for x in query) ** 0.5
        assert float(found.norm_v[neuron]) == pytest.approx(size)
        cosine = sum(x * y for x, y in zip(query, folded, strict=True)) / (size * other)
        assert float(found.cos_qv[neuron]) == pytest.approx(cosine)
    assert torch.equal(found.norm_q, bare.norm_q)
    assert torch.equal(Geometry.of(q, k, v, gain, torch.ones(4)).norm_v, bare.norm_v)
