"""Which layers of a model can be read: each is proved on a short probe, before anything is measured.

``hooks.locating.projections`` and ``hooks.locating.expert_weights`` say which modules may be meant; names prove nothing.
``hooks.locating.verify_dense`` and ``hooks.locating.verify_experts`` compare each candidate with what the model computes. A
layer without a candidate that holds is no site; the reason is kept.
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

NOT_GATED = "its experts are no gated MLPs: they have no key to exchange with the query"


def find_sites(model: PreTrainedModel, probe: Int[Tensor, "batch pos"]) -> LocatedLayers:
    """Every layer that proves itself on the probe, block by block as it is run, and why the others do not."""
    config = model.config.get_text_config()
    blocks = blocks_of(model, config.num_hidden_layers)
    expected = Expected.of(config, blocks)
    proof = ExpertsVerifier(expected)
    found: dict[int, Site | Mixture] = {}
    skipped: dict[int, str] = {}
    returns_tuple = set()

    def look(layer: int, recording: Recording) -> None:
        if recording.returns_tuple:
            returns_tuple.add(layer)
        try:
            found[layer] = _in_block(expected, proof, layer, recording)
        except NotASiteError as reason:
            skipped[layer] = str(reason)

    with ExitStack() as stack, torch.no_grad():
        for layer, block in enumerate(blocks):
            if expected.uses[block] > 1:
                skipped[layer] = "its block is that of another layer too, and runs more than once in a pass"
            else:
                record(block, partial(look, layer), stack)
        run_network(model, probe)
    for layer in range(len(blocks)):
        if layer not in found:
            skipped.setdefault(layer, "it did not run on the probe")
    sites = {layer: one for layer, one in sorted(found.items()) if isinstance(one, Site)}
    mixtures = {layer: one for layer, one in sorted(found.items()) if isinstance(one, Mixture)}
    return LocatedLayers(sites, mixtures, dict(sorted(skipped.items())), frozenset(returns_tuple))


def _in_block(expected: Expected, mixtures: ExpertsVerifier, layer: int, recording: Recording) -> Site | Mixture:
    """The dense site or the mixture of a block; NotASiteError with the reason if it is neither."""
    dense, reason = verify_dense(expected, layer, recording)
    every = expert_candidates(expected, recording)
    if every:
        return mixtures.verify(layer, recording, dense, every)
    beside = {name.partition(".")[0] for name in unmatched_expert_weights(recording.block)}
    if any(site.projections.where.partition(".")[0] in beside for site, _ in dense) or (beside and not dense):
        raise NotASiteError(
            NOT_GATED if reason == STATIC or not dense else "its experts are expert_weights of another shape"
        )
    if not dense:
        raise NotASiteError(reason)
    if len(dense) > 1:
        raise NotASiteError(f"it has {len(dense)} gated MLPs side by side, of which none is an expert")
    site, after = dense[0]
    if after.by_token is not None:
        raise NotASiteError("its output has a weight of its own for every token, as that of an expert has")
    return site
