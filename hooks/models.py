"""From a name on the command line to a model whose gated MLPs have been verified.

``hooks.loading`` finds and reads the files. The model runs as its authors wrote it; TransformerLens gives a second view of
the same weights where it supports the family. Every layer is verified on a short probe to be the gated MLP that it is taken
for, see ``hooks.locating.verify``; a layer that is not is skipped, with the reason.
"""

import threading
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from analysis.checks import Check
from analysis.errors import UserError
from analysis.run import Record
from hooks.corpus import DEFAULT_CONTEXT, SAMPLE, Corpus, load_corpus
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.loading.devices import SPREAD, device_of, in_precision, is_spread
from hooks.loading.network import blocks_of
from hooks.loading.prepare import (
    bos_of,
    check_weights,
    choose_attention,
    eager,
    first_outputs,
    probe_for,
    quiet_loading,
    resolve_device,
    resolve_dtype,
    to_device,
    twin,
    with_random_weights,
)
from hooks.loading.sources import Source, load_files, locate
from hooks.locating.bridge import bridge_of, has_user_hooks, with_hook_names, without_bridge
from hooks.locating.expected import configured_activations
from hooks.locating.sites import LocatedLayers, Mixture, Site
from hooks.locating.verify import find_sites
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE

_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
LOGIT_SLACK = 10
"""Logits may differ by this much more than one computed number: every layer has norms, and a softmax in float32 at best."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, its verified layers, and what a report states about it.

    Attributes:
        hf_model: the Hugging Face model.
        bridge: the same model in TransformerLens, with the same weights; None where it does not support the family.
        tokenizer: encodes text; TransformerLens may have added special tokens that the model does not know.
        bos: the token that the model expects before a text, or None. It is read from the tokenizer as its authors published
            it, because TransformerLens prepends a BOS for every model that has one.
        located: the verified layers, and for each of the others the reason.
        description: the ``model`` part of a run's provenance.
        acceptance: the checks made while loading, each with its value, limit and verdict.
        lock: held during a pass with capture hooks, for the two views share modules: one thread at a time.
    """

    hf_model: PreTrainedModel
    bridge: TransformerBridge | None
    tokenizer: PreTrainedTokenizerBase
    bos: int | None
    located: LocatedLayers
    description: Record
    acceptance: tuple[Check, ...]
    lock: AbstractContextManager[Any] = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def sites(self) -> dict[int, Site]:
        """Dense layers, by index."""
        return self.located.sites

    @property
    def mixtures(self) -> dict[int, Mixture]:
        """Layers of experts, by index."""
        return self.located.mixtures

    @property
    def layers(self) -> dict[int, Site | Mixture]:
        """All layers that can be analysed, by index."""
        layers: dict[int, Site | Mixture] = {**self.sites, **self.mixtures}
        return dict(sorted(layers.items()))

    @property
    def skipped(self) -> dict[int, str]:
        """For every layer that cannot be analysed, the reason."""
        return self.located.skipped

    @property
    def network(self) -> nn.Module:
        """The module that a forward pass calls: the Hugging Face model, or the bridge's if the user has hooked that."""
        return self.bridge.original_model if self.bridge and has_user_hooks(self.bridge) else self.hf_model

    def blocks(self, network: nn.Module) -> nn.ModuleList:
        """The transformer blocks of ``hf_model`` or of the bridge's model."""
        return self._blocks if network is self.hf_model or self.bridge is None else self.bridge.blocks

    @cached_property
    def _blocks(self) -> nn.ModuleList:
        return blocks_of(self.hf_model, self.description["n_layers"])

    @property
    def predicts(self) -> bool:
        """Whether it is a causal language model, so that edits of it have a cost in cross-entropy."""
        name = type(self.hf_model).__name__
        return name in _CAUSAL or name.endswith("ForCausalLM")

    @property
    def device(self) -> torch.device:
        """The device of its inputs."""
        return device_of(self.hf_model)

    @property
    def context_limit(self) -> int | None:
        """The longest window in tokens that its configuration allows, None if it states none."""
        text = self.hf_model.config.get_text_config()
        return next((n for key in ("max_position_embeddings", "n_positions") if (n := getattr(text, key, None))), None)

    def read(
        self,
        source: str = SAMPLE,
        *,
        context: int = DEFAULT_CONTEXT,
        skip_positions: int = 1,
        max_tokens: int | None = None,
        shard: str = "0/1",
    ) -> Corpus:
        """A corpus in this model's tokens: see ``hooks.corpus.load_corpus``; UserError if ``context`` is too long."""
        if self.context_limit is not None and context > self.context_limit:
            raise UserError(f"a context of {context} is beyond this model's limit of {self.context_limit}: lower --context")
        return load_corpus(
            source,
            self.tokenizer,
            bos=self.bos,
            context=context,
            skip_positions=skip_positions,
            max_tokens=max_tokens,
            shard=shard,
        )


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
    random_seed: int | None = None,
) -> LoadedModel:
    """Load a model, verify its gated MLPs, and wrap it in TransformerLens where that is possible.

    Args:
        name: built-in name, hub id, directory or .gguf file.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``, ``spread`` (all GPUs, memory, disk).
        dtype: precision of weights and forward pass: float32, bfloat16, float16, float64.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run the Python code that comes with a hub model or a directory.
        random_seed: replace the weights by random ones, drawn with this seed as the architecture initialises them: the
            random-init null.

    Raises:
        UserError: the model does not exist, is damaged, or no layer of it is a gated MLP.
    """
    spread = device == SPREAD
    target, precision = resolve_device("auto" if spread else device), resolve_dtype(dtype)
    if spread and random_seed is not None:
        raise UserError(f"random weights are drawn on one device: use another --device than {SPREAD}")
    limit = LOGIT_SLACK * max(TOLERANCE[precision], TOLERANCE[torch.float32])
    with quiet_loading():
        source, model, tokenizer = _loaded(name, target, precision, revision, trust_remote_code, spread, random_seed)
        probe, bos = probe_for(model).to(device_of(model)), bos_of(tokenizer)
        hf_model = model if is_spread(model) else twin(model)  # accelerate's hooks are tied to the modules they move
        with eager(model):  # as TransformerLens runs it, so that the comparison tests the wrapping alone
            reference = first_outputs(model, probe, name)
        attention_error = choose_attention(hf_model, probe, reference, limit)
        located = find_sites(hf_model, probe)
        if not located.sites and not located.mixtures:
            raise UserError(f"{name} has no gated MLP that can be analysed: {_most_common(located.skipped)}")
        if bos is not None:
            tokenizer.init_kwargs["add_bos_token"] = True  # true already; unless it is stated, TransformerLens reloads it
        bridge, check = None, without_bridge("the model is spread over devices") if _has_logits(model) else None
        if model is not hf_model:
            bridge, check = bridge_of(model, tokenizer, name, precision, probe, reference, limit)
        if bridge is not None:
            located = replace(located, sites=with_hook_names(located.sites, hf_model, bridge, probe))
    attention = Check("logits of the pass that reads, with its own attention", attention_error, limit)
    acceptance = (*_layer_checks(located, precision), *([] if check is None else [check]), attention)
    description = _describe(model, source, located, dtype)
    return LoadedModel(hf_model, bridge, tokenizer, bos, located, description, acceptance)


def _loaded(
    name: str,
    device: torch.device,
    precision: torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    spread: bool,
    random_seed: int | None,
) -> tuple[Source, PreTrainedModel, PreTrainedTokenizerBase]:
    """Where the files are, the model in evaluation mode on its device, and its tokenizer; its weights are finite."""
    source = locate(name, revision, trust_remote_code)
    model, tokenizer = load_files(source, precision, trust_remote_code, spread=spread)
    if random_seed is not None:
        model, source = with_random_weights(model, random_seed), source.with_random_weights(random_seed)
    if not is_spread(model):
        model = to_device(in_precision(model, precision), device)
    model = model.eval()
    check_weights(model, name)
    return source, model, tokenizer


def _has_logits(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is not None


def _most_common(reasons: dict[int, str]) -> str:
    """The reason that most layers share, with the first of these layers."""
    if not reasons:
        return "it has no blocks"
    reason = Counter(reasons.values()).most_common(1)[0][0]
    return f"{reason} (layer {next(layer for layer, other in reasons.items() if other == reason)})"


def _layer_checks(located: LocatedLayers, precision: torch.dtype) -> list[Check]:
    """The largest errors of the layers on the probe."""
    tolerance, output_limit = TOLERANCE[precision], OUTPUT_SLACK * TOLERANCE[precision]
    experts = [site for mixture in located.mixtures.values() for site in mixture.routed]
    dense = [*located.sites.values(), *(mixture.shared for mixture in located.mixtures.values() if mixture.shared)]
    checks = []
    if dense:
        checks += [
            Check("h = g(a, b) on the probe, largest over layers", max(s.identity_error for s in dense), tolerance),
            Check("MLP output from q, k, v, largest over layers", max(s.output_error for s in dense), output_limit),
        ]
    if experts:
        worst = max(site.output_error for site in experts)
        checks.append(Check("experts' output from q, k, v and routing, largest over layers", worst, output_limit))
    return checks


def _describe(model: PreTrainedModel, source: Source, located: LocatedLayers, dtype: str) -> Record:
    """The ``model`` part of a run's provenance."""
    text = model.config.get_text_config()
    stored = getattr(model.config, "quantization_config", None)
    as_stored = f"quantized: {stored}" if stored else f"safetensors, {str(text.dtype).removeprefix('torch.')}"
    weights = source.weights_format or as_stored
    layers: list[Site | Mixture] = [*located.sites.values(), *located.mixtures.values()]
    return {
        "name": source.name,
        "fingerprint": source.fingerprint,
        "weights": weights,
        "architecture": type(model).__name__,
        "units": sorted({layer.unit.name for layer in layers}),
        "activation_in_config": configured_activations(model.config),
        "n_layers": text.num_hidden_layers,
        "d_model": text.hidden_size,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype,
    }
