"""The cost of analysing a mixture of experts, as the number of experts grows and that of routed tokens does not.

    python -m benchmarks.experts [--tokens 4096] [--turns 5] [--experts 4,16,64]

A Mixtral of random weights, in which every token is routed to two experts, beside a Llama whose MLP is as wide as these
two. ``a token and neuron`` is the time of the sums alone, the analysis minus a plain pass, per token and neuron of its
experts. Time and memory should grow with the routed tokens, not with the experts.
"""

import analysis  # noqa: F401  before torch, as in a run

# isort: split

import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from analysis.sums.layout import DEFAULT_ALPHAS, DEFAULT_DRAWS
from benchmarks.common import long_corpus, report
from benchmarks.overhead import timed
from hooks.loading.network import base_of, run_network
from hooks.models import LoadedModel, load_model
from hooks.reading.accumulators import accumulator_of
from hooks.reading.batches import read_through
from tests.helpers.tiny import tiny_tokenizer

WIDTH, NEURONS, LAYERS, EACH = 256, 512, 2, 2
"""d_model, neurons of an expert, layers, and experts a token."""


def main(
    tokens: Annotated[int, typer.Option(min=512)] = 4096,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    experts: Annotated[str, typer.Option(help="Numbers of experts.")] = "4,16,64",
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table."""
    tokenizer = tiny_tokenizer()
    shape = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    configs: dict[str, PreTrainedConfig] = {"dense": LlamaConfig(**shape, intermediate_size=EACH * NEURONS)}
    for count in map(int, experts.split(",")):
        mixture = MixtralConfig(**shape, intermediate_size=NEURONS, num_local_experts=count, num_experts_per_tok=EACH)
        configs[f"{count} experts"] = mixture
    rows = []
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            rows.append(_measured(name, load_model(folder, device="cpu"), tokens, turns))
    report(rows, out, tokens=tokens, turns=turns)


def _measured(name: str, model: LoadedModel, tokens: int, turns: int) -> dict[str, str | float]:
    corpus = long_corpus(model, tokens)
    batches = torch.stack([window.tokens for window in corpus.windows if len(window.tokens) == 256]).split(8)
    accumulators = [accumulator_of(layer, DEFAULT_ALPHAS, DEFAULT_DRAWS, index) for index, layer in model.layers.items()]
    plain, whole = [], []
    for turn in range(turns + 1):
        whole_s = timed(lambda: read_through(model, corpus, accumulators, batch_size=8, quiet=True), model.device)
        plain_s = timed(lambda: [run_network(base_of(model.hf_model), batch) for batch in batches], model.device)
        if turn:  # the first one warms up
            plain.append(plain_s)
            whole.append(whole_s)
    sums = statistics.median(both - alone for both, alone in zip(whole, plain, strict=True))
    reached = tokens * EACH * NEURONS * LAYERS
    return {
        "model": name,
        "plain, s": statistics.median(plain),
        "analysis, s": statistics.median(whole),
        "sums, ns a token and neuron": 1e9 * sums / reached,
    }


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
