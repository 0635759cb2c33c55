"""From a name on the command line to a model whose gated layers have proved themselves.

Files are found and read in ``hooks.sources``; here they are wrapped by TransformerLens, and every layer must prove that it
is the gated MLP it is taken for.
"""

import copy
import logging
import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from analysis.errors import UserError
from analysis.run import Record, at_most
from hooks.builtin import DEFAULT_MODEL
from hooks.corpus import DEFAULT_CONTEXT, SAMPLE, Corpus, load_corpus
from hooks.sites import OUTPUT_SLACK, TOLERANCE, Site, configured_activations, describe_blocks, find_sites
from hooks.sources import Source, first_line, load_files, locate
from hooks.weights import SPREAD, in_precision, is_spread, offloaded, place_of, weights_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
PROBE_LENGTH = 16
LOGIT_SLACK = 10
"""TransformerLens computes norms and attention in its own way in every layer, with a softmax in float32 at best."""


@dataclass(frozen=True)
class LoadedModel:
    """A wrapped model, its proven sites, and what a report must say about it.

    Attributes:
        bridge: the model in TransformerLens.
        plain: the same model as Hugging Face runs it, with the same weights and projections; for passes that only read.
        tokenizer: encodes text; TransformerLens may have given it special tokens that the model does not know.
        bos: the token that the model expects before a text, or None: asked of the tokenizer as its authors ship it,
            because TransformerLens puts a BOS before every text of every model that has one.
        sites: layers that proved themselves, by index.
        skipped: reasons of the layers that did not.
        description: the ``model`` part of a run's provenance.
        acceptance: the checks made at load, each with value, limit and verdict.
        passing: held while something listens, for it hears whatever pass goes by: the two models share modules.
    """

    bridge: TransformerBridge
    plain: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    bos: int | None
    sites: dict[int, Site]
    skipped: dict[int, str]
    description: Record
    acceptance: tuple[Record, ...]
    passing: AbstractContextManager[Any] = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def is_hooked(self) -> bool:
        """Whether something is hooked to the wrapped model, of which the plain one knows nothing: a rewriting, say."""
        return any(point._forward_hooks for point in self.bridge.hook_dict.values())

    @property
    def device(self) -> torch.device:
        return next(self.bridge.original_model.parameters()).device

    def is_plain(self, site: Site) -> bool:
        """Whether the plain model calls this site's own projections."""
        return self._plain_modules.issuperset((site.gate_module, site.up_module))

    @cached_property
    def _plain_modules(self) -> frozenset[nn.Module]:
        return frozenset(self.plain.modules())

    @cached_property
    def plain_blocks(self) -> nn.ModuleList:
        """The blocks of the plain model."""
        site = next(iter(self.sites.values()))
        lists = (module for module in self.plain.modules() if isinstance(module, nn.ModuleList))
        return next(
            blocks
            for blocks in lists
            if len(blocks) == len(self.bridge.blocks) and site.gate_module in set(blocks[site.layer].modules())
        )

    @property
    def context_limit(self) -> int | None:
        """The longest window the model was made for, where it says so."""
        text = self.bridge.original_model.config.get_text_config()
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
        elif away := offloaded(model):
            raise UserError(
                f"{name} does not fit on the GPUs here, {len(away)} weights would be kept apart ({away[0]}) and no "
                "layer is read there yet: use --dtype bfloat16, more GPUs, or --device cpu"
            )
        model, place = model.eval(), place_of(model)
        _check_weights(model, name)
        plain = _plain(model)
        model.set_attn_implementation("eager")  # as TransformerLens needs it: what is compared is the wrapping alone
        probe = _probe(model).to(place)
        reference = _logits(model, probe)
        bos = _bos(tokenizer)
        if bos is not None:
            tokenizer.init_kwargs["add_bos_token"] = True  # it does so already; unsaid, TransformerLens loads it again
        bridge = _wrap(model, tokenizer, name, precision)
        limit = LOGIT_SLACK * max(TOLERANCE[precision], TOLERANCE[torch.float32])
        wrapped_error = _logit_error(bridge.original_model, probe, reference)
        plain_error = _with_fast_attention(plain, probe, reference, limit)
        sites, skipped = find_sites(bridge, probe)
    if not sites:
        reason = next(iter(skipped.values()), "it has no blocks")
        raise UserError(f"{name} has no gated MLP that can be analysed: {describe_blocks(bridge)} (layer 0: {reason})")
    description = _describe(model, source, sites, dtype)
    acceptance = _acceptance(sites, wrapped_error, plain_error, precision, limit)
    return LoadedModel(bridge, plain, tokenizer, bos, sites, skipped, description, acceptance)


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


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same model once more: its innermost modules, and so its weights, are shared; the tree above is its own."""
    configs: dict[int, Any] = {}

    def again(module: nn.Module) -> nn.Module:
        if not module._modules:
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
    """The BOS token if the tokenizer puts one before a text by itself."""
    ids = tokenizer("a").input_ids
    return ids[0] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else None


def _probe(model: PreTrainedModel) -> Int[Tensor, "1 pos"]:
    """A short sequence of random tokens, the same for every model of one vocabulary."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (1, PROBE_LENGTH), generator=torch.Generator().manual_seed(0))


def _logits(model: PreTrainedModel, probe: Int[Tensor, "1 pos"]) -> Float[Tensor, "1 pos vocab"]:
    with torch.no_grad():
        return model(probe, use_cache=False).logits


def _wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, precision: torch.dtype
) -> TransformerBridge:
    try:
        return TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer, dtype=precision)
    except (ValueError, KeyError, NotImplementedError, AttributeError, RuntimeError) as error:
        family = type(model).__name__
        raise UserError(f"TransformerLens cannot wrap {name}, a {family} ({first_line(error)})") from error


def _logit_error(model: PreTrainedModel, probe: Int[Tensor, "1 pos"], reference: Float[Tensor, "1 pos vocab"]) -> float:
    return float((_logits(model, probe) - reference).double().norm() / reference.double().norm())


def _with_fast_attention(
    plain: PreTrainedModel, probe: Int[Tensor, "1 pos"], reference: Float[Tensor, "1 pos vocab"], limit: float
) -> float:
    """Error of the plain model's logits with its own attention; with eager attention if that is beyond the limit."""
    error = _logit_error(plain, probe, reference)
    if error <= limit:
        return error
    plain.set_attn_implementation("eager")  # not every kernel knows of soft caps and sinks
    return _logit_error(plain, probe, reference)


def _acceptance(
    sites: dict[int, Site], wrapped_error: float, plain_error: float, precision: torch.dtype, limit: float
) -> tuple[Record, ...]:
    tolerance = TOLERANCE[precision]
    identity, output = (max(getattr(s, error) for s in sites.values()) for error in ("identity_error", "output_error"))
    checks = (
        ("h = g(a, b) on the probe, largest over layers", identity, tolerance),
        ("MLP output from q, k, v, largest over layers", output, OUTPUT_SLACK * tolerance),
        ("logits with and without TransformerLens", wrapped_error, limit),
        ("logits of the pass that reads, with its own attention", plain_error, limit),
    )
    return tuple(at_most(*check) for check in checks)


def _describe(model: PreTrainedModel, source: Source, sites: dict[int, Site], dtype: str) -> Record:
    text = model.config.get_text_config()
    stored = getattr(model.config, "quantization_config", None)
    kept = f"quantized: {stored}" if stored else f"safetensors, {str(text.dtype).removeprefix('torch.')}"
    weights = source.weights_format or kept
    return {
        "name": source.name,
        "fingerprint": source.fingerprint,
        "weights": weights,
        "architecture": type(model).__name__,
        "units": sorted({site.unit.name for site in sites.values()}),
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
