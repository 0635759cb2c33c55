"""The Gram identity equals brute force, shares and spectra obey their laws, groups are what was planted."""

import pytest
import torch
from torch import Tensor

from analysis.theory.gated import GatedMLP
from analysis.units.registry import unit_named
from analysis.weights.interactions import antisymmetric_share, spectrum, value_groups

GENERATOR_SEEDS = range(5)


def layer(seed: int, d_mlp: int = 9, d_model: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, d_mlp, d_model, generator=generator, dtype=torch.float64)
    return q, k, v


def tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """T, materialized."""
    return torch.einsum("ju,ja,jb->uab", v, q, k)


@pytest.mark.parametrize("seed", GENERATOR_SEEDS)
@pytest.mark.parametrize("block", [1, 2, 4, 9, 50])
def test_the_share_equals_brute_force(seed: int, block: int) -> None:
    q, k, v = layer(seed, d_mlp=1 + 4 * seed)
    whole = tensor(q, k, v)
    odd = (whole - whole.mT) / 2
    expected = odd.square().sum() / whole.square().sum()
    assert antisymmetric_share(q, k, v, block) == pytest.approx(float(expected), rel=1e-12)


def test_the_share_at_its_ends() -> None:
    q, k, v = layer(0)
    assert antisymmetric_share(q, -3 * q, v) == pytest.approx(0, abs=1e-14)
    both, other = torch.cat([q, k]), torch.cat([k, -q])  # q⊗k − k⊗q
    assert antisymmetric_share(both, other, torch.cat([v, v])) == pytest.approx(1, abs=1e-14)
    q, k, v = layer(1, d_mlp=400, d_model=60)
    assert antisymmetric_share(q, k, v) == pytest.approx(0.5, abs=0.02)
    assert torch.tensor(antisymmetric_share(0 * q, k, v)).isnan()


def test_the_share_is_blind_to_exchange_gauge_and_order() -> None:
    q, k, v = layer(2)
    share = antisymmetric_share(q, k, v)
    beta, order = torch.linspace(-2, 3, len(q)).double()[:, None], torch.randperm(len(q))
    assert antisymmetric_share(k, q, v) == pytest.approx(share, rel=1e-12)
    assert antisymmetric_share(q, beta * k, v / beta) == pytest.approx(share, rel=1e-12)
    assert antisymmetric_share(q[order], k[order], v[order]) == pytest.approx(share, rel=1e-12)


def test_a_symmetric_bilinear_layer_cannot_see_the_antisymmetric_part() -> None:
    q, k, v = layer(3)
    x = torch.randn(6, 5, dtype=torch.float64)
    whole = tensor(q, k, v)
    seen = torch.einsum("uab,na,nb->nu", (whole + whole.mT) / 2, x, x)
    torch.testing.assert_close(GatedMLP(unit_named("linear"), q, k, v)(x), seen, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", GENERATOR_SEEDS)
def test_the_spectrum_is_that_of_the_contracted_tensor(seed: int) -> None:
    q, k, v = layer(seed)
    u = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = torch.einsum("uab,u->ab", tensor(q, k, v), u)
    matrix = (matrix + matrix.T) / 2
    found = spectrum(q, k, v, u, top=5)
    assert (found.eigenvalues.abs().diff() <= 0).all()
    rebuilt = found.eigenvectors.T @ torch.diag(found.eigenvalues) @ found.eigenvectors
    torch.testing.assert_close(rebuilt, matrix, rtol=1e-10, atol=1e-10)
    expected = matrix.square().sum() ** 2 / (matrix @ matrix).square().sum()
    assert found.effective_rank == pytest.approx(float(expected), rel=1e-10)
    few = spectrum(q, k, v, u, top=2)
    assert torch.equal(few.eigenvalues, found.eigenvalues[:2])
    assert few.eigenvectors.shape == (2, 5)
    assert few.effective_rank == found.effective_rank


def test_effective_rank_counts_equal_eigenvalues() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    u = eye[0]
    for n in (1, 3, 6):
        assert spectrum(eye[:n], eye[:n], u.expand(n, 6), u).effective_rank == pytest.approx(n)
    assert torch.tensor(spectrum(eye, eye, 0 * eye, u).effective_rank).isnan()


def test_groups_are_those_that_were_planted() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 12, 40, generator=generator, dtype=torch.float64)
    v[5], v[9] = -2 * v[1], 0.5 * v[1] + 1e-3 * v[0]
    v[4] = v[3]
    v[11] = 0
    k[4], q[4] = k[3], q[3]  # the same pair twice: two neurons, one rank
    groups = value_groups(q, k, v, 0.9)
    assert [(group.neurons, group.rank) for group in groups] == [((1, 5, 9), 3), ((3, 4), 1)]
    assert value_groups(q, k, v, 0.9, rows_at_once=5) == groups
    assert [group.neurons for group in value_groups(q, k, v, 1.0)] == [(1, 5), (3, 4)]


def test_a_chain_is_one_group() -> None:
    """Each link at 20°, the ends at 80°."""
    angles = torch.tensor([60.0, 0.0, 80.0, 40.0, 20.0]).deg2rad().double()
    v = torch.stack([angles.cos(), angles.sin()], dim=1)
    (group,) = value_groups(v, v, v, 0.9)
    assert group.neurons == (0, 1, 2, 3, 4)
    assert group.rank == 2
    assert value_groups(v, v, v, 0.95) == []


@pytest.mark.parametrize("tau", [0.0, -0.5, 1.1])
def test_a_threshold_that_connects_all_or_nothing_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match="out of range: give a cosine"):
        value_groups(*layer(0), tau)
