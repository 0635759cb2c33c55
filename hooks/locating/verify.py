"""Which layers of a model can be analysed: each is verified on a short probe before anything is measured.

``hooks.locating.projections`` and ``hooks.locating.expert_weights`` list the candidates by the shapes of weights; names are
not used. ``hooks.locating.verify_dense`` and ``hooks.locating.verify_experts`` compare each candidate with what the model
computes. A layer without a verified candidate is skipped, and the reason is kept.
"""

from contextlib import ExitStack
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hooks.loading.network import blocks_of, run_network
from hooks.locating.expected import Expected, NotASiteError
from hooks.locating.expert_weights import unmatched_expert_weights
from hooks.locating.recording import Recording, record
from hooks.locating.sites import LocatedLayers, Mixture, Site
from hooks.locating.verify_dense import STATIC, verify_dense
from hooks.locating.verify_experts import ExpertsVerifier, expert_candidates

NOT_GATED = "its experts are not gated MLPs: they have no key to exchange with the query"


def find_sites(model: PreTrainedModel, probe: Int[Tensor, "batch pos"]) -> LocatedLayers:
    """Every layer that is verified on the probe, block by block during one pass, and for the others the reason."""
    config = model.config.get_text_config()
    blocks = blocks_of(model, config.num_hidden_layers)
    expected = Expected.of(config, blocks)
    experts_verifier = ExpertsVerifier(expected)
    verified: dict[int, Site | Mixture] = {}
    skipped: dict[int, str] = {}
    returns_tuple = set()

    def verify(layer: int, recording: Recording) -> None:
        if recording.returns_tuple:
            returns_tuple.add(layer)
        try:
            verified[layer] = _verify_block(expected, experts_verifier, layer, recording)
        except NotASiteError as reason:
            skipped[layer] = str(reason)

    with ExitStack() as stack, torch.no_grad():
        for layer, block in enumerate(blocks):
            if expected.uses[block] > 1:
                skipped[layer] = "its block is also that of another layer, and runs more than once in a pass"
            else:
                record(block, partial(verify, layer), stack)
        run_network(model, probe)
    for layer in range(len(blocks)):
        if layer not in verified:
            skipped.setdefault(layer, "it did not run on the probe")
    sites = {layer: site for layer, site in sorted(verified.items()) if isinstance(site, Site)}
    mixtures = {layer: mixture for layer, mixture in sorted(verified.items()) if isinstance(mixture, Mixture)}
    return LocatedLayers(sites, mixtures, dict(sorted(skipped.items())), frozenset(returns_tuple))


def _verify_block(expected: Expected, mixtures: ExpertsVerifier, layer: int, recording: Recording) -> Site | Mixture:
    """The dense site or the mixture of a block; NotASiteError with the reason if it is neither."""
    dense, reason = verify_dense(expected, layer, recording)
    candidates = expert_candidates(expected, recording)
    if candidates:
        return mixtures.verify(layer, recording, dense, candidates)
    unmatched = {name.partition(".")[0] for name in unmatched_expert_weights(recording.block)}
    if any(site.projections.path.partition(".")[0] in unmatched for site, _ in dense) or (unmatched and not dense):
        raise NotASiteError(NOT_GATED if reason == STATIC or not dense else "its expert weights have another shape")
    if not dense:
        raise NotASiteError(reason)
    if len(dense) > 1:
        raise NotASiteError(f"it has {len(dense)} gated MLPs in parallel, none of which is an expert")
    site, output_gain = dense[0]
    if output_gain.token_weight is not None:
        raise NotASiteError("its output has a separate weight for every token, like that of an expert")
    return site
