"""What edits cost the real SmolLM2-135M-Instruct."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from analysis.causal.costs import rank_correlation
from analysis.causal.divergence import kl_divergence, log_probabilities
from analysis.causal.edits import Edit, PlainExchange
from analysis.theory.actions import Action, Permutation, ValueRescaling
from hooks.causal import evenly_spaced
from hooks.corpus import Window
from hooks.loading.builtin import BUILTINS, builtin_directory
from hooks.models import LoadedModel
from hooks.patching.attribution import attribute
from hooks.patching.interventions import acting
from hooks.patching.partial_pass import full_pass
from hooks.patching.single_neurons import patch_single_neurons
from hooks.patching.sweep import sweep

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def windows(smollm2: LoadedModel) -> list[Window]:
    return evenly_spaced(smollm2.read(context=32, max_tokens=2000).windows, 64)


@pytest.fixture(scope="module")
def exchanges(smollm2: LoadedModel) -> dict[int, dict[str, Edit]]:
    return {layer: {"exchange": PlainExchange()} for layer in list(smollm2.sites)[::2]}


def test_exchange_costs_more_than_its_placebo_in_most_layers(
    smollm2: LoadedModel, windows: list[Window], exchanges: dict[int, dict[str, Edit]]
) -> None:
    """And the base is the plain Hugging Face model's, and the control costs nothing."""
    swept, attribution = sweep(smollm2, windows, exchanges), attribute(smollm2, windows, exchanges)
    plain = AutoModelForCausalLM.from_pretrained(builtin_directory(BUILTINS["smollm2-135m"])).eval()
    for s, window in enumerate(windows):
        with torch.no_grad():
            labels = window.tokens.clone()
            labels[: window.counted_from + 1] = -100  # the token after the first counted one is the first to be predicted
            loss = plain(window.tokens[None], labels=labels[None]).loss
        assert swept.base[s].item() / int(swept.n_tokens[s]) == pytest.approx(loss.item(), abs=1e-5)
        assert attribution.base[s].item() == pytest.approx(swept.base[s].item(), abs=1e-3)
    assert all(check.passed for check in swept.checks("float32"))
    edited, placebo = (torch.stack([costs.single[0, 0, v, 0].sum() for costs in swept.layers.values()]) for v in range(2))
    assert int((edited > placebo).sum()) > len(exchanges) / 2
    assert float(edited.min()) > 0


ACTIONS: dict[str, Action] = {
    "value rescaling by 3": ValueRescaling(torch.tensor([3.0])),
    "value rescaling by −1": ValueRescaling(torch.tensor([-1.0])),
    "permutation": Permutation(torch.randperm(1536, generator=torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_exact_symmetries_in_all_layers_at_once_cost_nothing(
    smollm2: LoadedModel, windows: list[Window], name: str
) -> None:
    tokens = windows[0].tokens[None]
    with torch.no_grad():
        clean = full_pass(smollm2, tokens)
        weights = smollm2.sites[7].k.clone()
        with acting(smollm2, dict.fromkeys(smollm2.sites, ACTIONS[name])):
            same = full_pass(smollm2, tokens)
            assert not torch.equal(smollm2.sites[7].k, weights)
        assert torch.equal(full_pass(smollm2, tokens), clean)
    assert float(kl_divergence(log_probabilities(clean[0]), log_probabilities(same[0])).mean()) < 1e-6


def test_first_order_ranks_single_neurons(
    smollm2: LoadedModel, windows: list[Window], exchanges: dict[int, dict[str, Edit]]
) -> None:
    some = {layer: exchanges[layer] for layer in (20, 26)}
    found = patch_single_neurons(smollm2, windows, some, "exchange", n_neurons=12)
    assert rank_correlation(found.predicted.tolist(), found.exact.tolist()) > 0.8
