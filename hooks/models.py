"""From a name on the command line to a model whose gated layers have proved themselves.

Files are found and read in ``hooks.loading.sources``. The model runs as its authors wrote it; TransformerLens gives a
second view of the same weights where it knows the family. Every layer must prove that it is the gated MLP it is taken for.
"""

import copy
import logging
import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
import transformers
from jaxtyping import Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from analysis.checks import Check
from analysis.errors import UserError
from analysis.run import Record
from hooks.corpus import DEFAULT_CONTEXT, SAMPLE, Corpus, load_corpus
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.loading.devices import SPREAD, in_precision, is_spread, place_of, weights_of
from hooks.loading.network import blocks_of, outputs_of
from hooks.loading.sources import Source, first_line, load_files, locate
from hooks.locating.bridge import named, wrap
from hooks.locating.expected import configured_activations
from hooks.locating.sites import LocatedLayers, Mixture, Site
from hooks.locating.verify import find_sites
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PROBE_LENGTH = 16
_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
logger = logging.getLogger(__name__)
LOGIT_SLACK = 10
"""TransformerLens computes norms and attention in its own way in every layer, with a softmax in float32 at best."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, its proven sites, and what a report must say about it.

    Attributes:
        hf_model: the model as Hugging Face runs it.
        bridge: the same model in TransformerLens, with the same weights and projections; None where it has no such view.
        tokenizer: encodes text; TransformerLens may have given it special tokens that the model does not know.
        bos: the token that the model expects before a text, or None: asked of the tokenizer as its authors ship it,
            because TransformerLens puts a BOS before every text of every model that has one.
        located: layers that proved themselves, and reasons of those that did not.
        description: the ``model`` part of a run's provenance.
        acceptance: the checks made at load, each with value, limit and verdict.
        passing: held while something listens, for it hears whatever pass goes by: the two views share modules.
    """

    hf_model: PreTrainedModel
    bridge: TransformerBridge | None
    tokenizer: PreTrainedTokenizerBase
    bos: int | None
    located: LocatedLayers
    description: Record
    acceptance: tuple[Check, ...]
    passing: AbstractContextManager[Any] = field(default_factory=threading.RLock, repr=False, compare=False)

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
        """All layers that are analysed, by index."""
        every: dict[int, Site | Mixture] = {**self.sites, **self.mixtures}
        return dict(sorted(every.items()))

    @property
    def skipped(self) -> dict[int, str]:
        """Reasons of the layers that are neither."""
        return self.located.skipped

    @property
    def network(self) -> nn.Module:
        """What a pass runs: the model itself, or the wrapped one if somebody has hooked something to that."""
        if self.bridge is None:
            return self.hf_model
        hooks = (hook for point in self.bridge.hook_dict.values() for hook in point._forward_hooks.values())
        hooked = any(not getattr(hook, "__module__", "").startswith("hooks.") for hook in hooks)
        return self.bridge.original_model if hooked else self.hf_model

    def blocks(self, network: nn.Module) -> nn.ModuleList:
        """The blocks of either view."""
        return self._blocks if network is self.hf_model or self.bridge is None else self.bridge.blocks

    @cached_property
    def _blocks(self) -> nn.ModuleList:
        return blocks_of(self.hf_model, self.description["n_layers"])

    @property
    def predicts(self) -> bool:
        """Whether it predicts the next token, so that a change of it has a cost."""
        name = type(self.hf_model).__name__
        return name in _CAUSAL or name.endswith("ForCausalLM")

    @property
    def device(self) -> torch.device:
        """Where its inputs have to be."""
        return place_of(self.hf_model)

    @property
    def context_limit(self) -> int | None:
        """The longest window the model was made for, where it says so."""
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
        """A corpus in this model's tokens: see ``hooks.corpus.load_corpus``; UserError if a window is too long for it."""
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
    """Load, wrap and prove a model.

    Args:
        name: built-in name, hub id, directory or .gguf file.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``, ``spread`` (all GPUs, memory, disk).
        dtype: precision of weights and forward pass: float32, bfloat16, float16, float64.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run the Python code that comes with a hub model or a directory.
        random_seed: give the architecture fresh random weights, as it initialises them, drawn with this seed: the
            random-init null.

    Raises:
        UserError: the model is not there, is damaged, or has no layer that is a gated MLP.
    """
    spread = device == SPREAD
    place, precision = resolve_device("auto" if spread else device), resolve_dtype(dtype)
    if spread and random_seed is not None:
        raise UserError(f"random weights are drawn on one device: use another --device than {SPREAD}")
    with _quiet():
        source = locate(name, revision, trust_remote_code)
        model, tokenizer = load_files(source, precision, trust_remote_code, spread=spread)
        if random_seed is not None:
            model, source = _with_random_weights(model, random_seed), source.with_random_weights(random_seed)
        if not is_spread(model):
            model = _to_device(in_precision(model, precision), place)
        model, place = model.eval(), place_of(model)
        _check_weights(model, name)
        probe, bos = _probe(model).to(place), _bos(tokenizer)
        hf_model = model if is_spread(model) else _twin(model)  # what moves weights about is tied to its modules
        with _eager(model):  # as TransformerLens needs it: what is compared is the wrapping alone
            reference = _first_outputs(model, probe, name)
        limit = LOGIT_SLACK * max(TOLERANCE[precision], TOLERANCE[torch.float32])
        fast_attention_error = _with_fast_attention(hf_model, probe, reference, limit)
        located = find_sites(hf_model, probe)
        if not located.sites and not located.mixtures:
            raise UserError(f"{name} has no gated MLP that can be analysed: {_commonest(located.skipped)}")
        if bos is not None:
            tokenizer.init_kwargs["add_bos_token"] = True  # it does so already; unsaid, TransformerLens loads it again
        bridge, view = _view(model, hf_model, tokenizer, name, precision, probe, reference, limit)
        if bridge is not None:
            located = replace(located, sites=named(located.sites, hf_model, bridge, probe))
    description = _describe(model, source, located, dtype)
    acceptance = _acceptance(located, view, fast_attention_error, precision, limit)
    return LoadedModel(hf_model, bridge, tokenizer, bos, located, description, acceptance)


def _view(
    model: PreTrainedModel,
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    precision: torch.dtype,
    probe: Int[Tensor, "1 pos"],
    reference: Tensor,
    limit: float,
) -> tuple[TransformerBridge | None, Check | None]:
    """The model in TransformerLens if that computes the same, and a line that says so or why not."""
    check = "logits with and without TransformerLens"
    if _lacks_head(model):
        return None, None
    if model is hf_model:
        return None, _no_view(check, "the model is spread over devices")
    _with_eager_attention(model)
    bridge, reason = wrap(model, tokenizer, name, precision)
    if bridge is not None:
        try:
            error = relative_error(outputs_of(bridge.original_model, probe), reference)
        except Exception as failure:  # a family that it takes for another one
            bridge, reason = None, f"TransformerLens cannot run a {type(hf_model).__name__} ({type(failure).__name__})"
        else:
            if error <= limit:
                return bridge, Check(check, error, limit)
            bridge, reason = None, f"TransformerLens gives other logits, off by {error:.1e} (limit {limit:.0e})"
    logger.info(f"{reason}: read at the model's own modules, model.bridge is None")
    return None, _no_view(check, reason)


def _first_outputs(model: PreTrainedModel, probe: Int[Tensor, "1 pos"], name: str) -> Tensor:
    """What the model gives on the probe; UserError if it does not run at all."""
    try:
        return outputs_of(model, probe)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # its own code may raise anything; each means that the files do not make a model that runs
        kind, reason = type(model).__name__, first_line(error)
        raise UserError(
            f"{name}, a {kind}, does not run ({type(error).__name__}: {reason}): check its config.json"
        ) from error


def _no_view(check: str, reason: str) -> Check:
    return Check.stated(check, f"none: {reason}", "read without it")


def _commonest(reasons: dict[int, str]) -> str:
    """The reason that most layers have, with the first of them."""
    if not reasons:
        return "it has no blocks"
    reason = Counter(reasons.values()).most_common(1)[0][0]
    return f"{reason} (layer {next(layer for layer, one in reasons.items() if one == reason)})"


def resolve_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_device(device: str) -> torch.device:
    """The device of that name; UserError if this machine does not have it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device {device!r}: choose auto, cpu, cuda, cuda:N or {SPREAD}") from error
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is not supported, sums need float64: choose cpu or cuda")
    count = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= count:
        raise UserError(f"device {device!r} is not there, torch sees {count} CUDA devices: use --device cpu")
    return place


def _with_random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A model of the same configuration, freshly initialised; the state of torch's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(model.config)


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same model once more: its innermost modules, and so its weights, are shared; the tree above is its own."""
    configs: dict[int, Any] = {}

    def again(module: nn.Module) -> nn.Module:
        if not module._modules and not any(isinstance(value, PreTrainedConfig) for value in vars(module).values()):
            return module
        twin = copy.copy(module)
        vars(twin)["_modules"] = {name: child and again(child) for name, child in module._modules.items()}
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):  # which says what attention is taken
                vars(twin)[name] = configs.setdefault(id(value), copy.deepcopy(value))
        return twin

    return cast(PreTrainedModel, again(model))


def _to_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    try:
        return model.to(device)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"the model does not fit on {device}: use --dtype bfloat16 or --device cpu") from error


def _check_weights(model: PreTrainedModel, name: str) -> None:
    for prefix, module in model.named_modules():
        for key, weight in weights_of(module, inside=False).items():
            if weight.is_floating_point() and not math.isfinite(weight.sum(dtype=torch.float64)):
                count = int((~torch.isfinite(weight)).sum())
                raise UserError(f"{name} has {count} NaN or infinite weights in {prefix}.{key}: the file is damaged")


def _bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the tokenizer puts before a text by itself, if any: its BOS, or the CLS of an encoder."""
    first = next(iter(tokenizer("a").input_ids), None)
    return first if first in (tokenizer.bos_token_id, tokenizer.cls_token_id) else None


def _probe(model: PreTrainedModel) -> Int[Tensor, "1 pos"]:
    """A short sequence of random tokens, the same for every model of one vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, PROBE_LENGTH), generator=torch.Generator().manual_seed(0))


def _lacks_head(model: PreTrainedModel) -> bool:
    """Whether it is an encoder alone, of which TransformerLens knows nothing."""
    return model.get_output_embeddings() is None


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, with attention and experts as they are written, not as they are fastest."""
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    _with_eager_attention(model)
    yield
    with suppress(ValueError):
        model.set_attn_implementation(attention)
    with suppress(ValueError):
        model.set_experts_implementation(experts)


def _with_eager_attention(model: PreTrainedModel) -> None:
    """With attention and experts as they are written, not as they are fastest."""
    with suppress(ValueError):  # a family without a choice has the eager one
        model.set_attn_implementation("eager")
    with suppress(ValueError):
        model.set_experts_implementation("eager")


def _with_fast_attention(hf_model: PreTrainedModel, probe: Int[Tensor, "1 pos"], reference: Tensor, limit: float) -> float:
    """Error of the plain model's logits with its own attention; with eager attention if that is beyond the limit."""
    with suppress(RuntimeError):  # not every kernel takes every dtype
        error = relative_error(outputs_of(hf_model, probe), reference)
        if error <= limit:
            return error
    _with_eager_attention(hf_model)  # not every kernel knows of soft caps and sinks
    return relative_error(outputs_of(hf_model, probe), reference)


def _acceptance(
    located: LocatedLayers, view: Check | None, fast_attention_error: float, precision: torch.dtype, limit: float
) -> tuple[Check, ...]:
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
    reads = Check("logits of the pass that reads, with its own attention", fast_attention_error, limit)
    return (*checks, *([] if view is None else [view]), reads)


def _describe(model: PreTrainedModel, source: Source, located: LocatedLayers, dtype: str) -> Record:
    text = model.config.get_text_config()
    stored = getattr(model.config, "quantization_config", None)
    kept = f"quantized: {stored}" if stored else f"safetensors, {str(text.dtype).removeprefix('torch.')}"
    weights = source.weights_format or kept
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading prints bars and notes that do not concern the user; errors still come through as exceptions."""
    logger = transformers.utils.logging
    level, bars = logger.get_verbosity(), logger.is_progress_bar_enabled()
    root_level = logging.getLogger().level
    logger.set_verbosity_error()
    logger.disable_progress_bar()
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.set_verbosity(level)
        logging.getLogger().setLevel(root_level)
        if bars:
            logger.enable_progress_bar()
