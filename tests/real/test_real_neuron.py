"""The page of SmolLM2's neuron 11:1229, which carries the massive activation of the first token."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hooks.loading.builtin import BUILTINS, builtin_directory
from hooks.models import LoadedModel
from hooks.neuron import inspect_neuron
from reports.neuron.page import NeuronPage

pytestmark = pytest.mark.real
LAYER, NEURON = 11, 1229


def test_the_neuron_of_the_massive_activation(smollm2: LoadedModel) -> None:
    """Contexts and read-outs against the plain Hugging Face model and its weights."""
    text = smollm2.read(max_tokens=1000)
    record = inspect_neuron(smollm2, text, f"{LAYER}:{NEURON}", quiet=True)
    plain = AutoModelForCausalLM.from_pretrained(builtin_directory(BUILTINS["smollm2-135m"])).eval()
    block, seen = plain.model.layers[LAYER], dict[str, Tensor]()
    gate, up, down = (getattr(block.mlp, f"{part}_proj") for part in ("gate", "up", "down"))
    gate.register_forward_hook(lambda *call: seen.update(a=call[-1][0, :, NEURON].double()))
    up.register_forward_hook(lambda *call: seen.update(b=call[-1][0, :, NEURON].double()))
    down.register_forward_pre_hook(lambda _, inputs: seen.update(h=inputs[0][0, :, NEURON].double()))
    found: list[tuple[float, int, int, bool, bool]] = []
    with torch.no_grad():
        for window in text.windows:
            plain.model(window.tokens[None], use_cache=False)
            for position in range(window.counted_from, len(window.tokens)):
                a, b, h = (float(seen[name][position]) for name in "abh")
                found.append((h, window.index, position, a > 0, b > 0))
    assert record.n_tokens == len(found)
    for signs, contexts in record.contexts.items():
        mine = [entry for entry in found if (entry[3], entry[4]) == (signs[0] == "p", signs[1] == "p")]
        strongest = sorted(mine, key=lambda entry: -abs(entry[0]))[: len(contexts)]
        assert [(one.window, one.position) for one in contexts] == [entry[1:3] for entry in strongest]
        for context, (h, _, position, _, _) in zip(contexts, strongest, strict=True):
            assert float(context.h[context.focus]) == pytest.approx(h, rel=1e-3, abs=1e-6)
            tokens = text.windows[context.window].tokens
            assert context.texts[context.focus] == smollm2.tokenizer.decode([int(tokens[position])])
    with torch.no_grad():
        logits = plain.lm_head.weight @ (plain.model.norm.weight * down.weight[:, NEURON])
        embedding = torch.nn.functional.normalize(plain.model.embed_tokens.weight, dim=1)
        pre = 576**0.5 * embedding @ (block.post_attention_layernorm.weight * gate.weight[NEURON])
    for name, values in (("v", logits - logits.mean()), ("q", pre)):
        for end, largest in ((record.readouts[name].highest, True), (record.readouts[name].lowest, False)):
            best = values.topk(8, largest=largest)
            assert [value for _, value in end] == pytest.approx(best.values.tolist(), rel=1e-4)
            assert [shown for shown, _ in end] == [smollm2.tokenizer.decode([token]) for token in best.indices.tolist()]

    page = NeuronPage(record)
    assert page.standing.loc["score", "rank"] == 1
    assert page.standing.loc["score", "value"] / page.standing.loc["score", "layer_median"] == pytest.approx(19.4, abs=0.1)
    assert page.standing.loc["cos_qk", "value"] == pytest.approx(0.58, abs=0.01)
    assert page.quadrants.loc[["pp", "pn"], "tokens"].sum() < 0.01  # its gate opens on first tokens alone
    assert "which is fed but not counted" in page.sentences[-1]
    assert (record.similar["v"][8].layer, record.similar["v"][8].neuron) == (28, 678)  # it takes back what this one wrote
    assert record.similar["v"][8].cosine == pytest.approx(-0.988, abs=0.001)
    assert len(page.html()) < 1_000_000
