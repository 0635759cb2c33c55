"""Looking at one neuron: the streaming choice of tokens, read-outs, likeness, the page, the command."""

import html as html_module
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import permutations
from operator import add
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from analysis.errors import UserError
from analysis.neuron import AFTER, BEFORE, SAMPLED, Context, NeuronRecord, NeuronSample, by_quadrant
from analysis.sums.batch import Window
from analysis.units.registry import Unit, unit_named
from analysis.weights.readouts import ends, excitation, nearest, pair_cosines, promoted
from hooks.collect import analyze
from hooks.locating.sites import LocatedLayers
from hooks.models import LoadedModel, load_model
from hooks.neuron import inspect_neuron
from reports.neuron.page import NeuronPage
from reports.neuron.summary import histogram
from tests.helpers.command_line import call, no_figures, refused
from tests.helpers.families import Families
from tests.helpers.hostile import CORPUS, SCRIPT, hostile_tokenizer
from tests.helpers.html_page import Page
from tests.helpers.tiny import save_tiny, tiny_model, train_tokenizer

SILU = unit_named("silu")
PRODUCT = unit_named("linear")
"""g(a, b) = ab, of which equal a and b give equal values to the last bit."""
QUADRANTS = ("pp", "pn", "np", "nn")
QUICK = ["--context", "32", "--tokens", "320", "--device", "cpu", "--quiet"]


def random_windows(count: int, seed: int = 0) -> list[tuple[Window, Tensor, Tensor]]:
    """Windows of uneven lengths with a and b on them; rounded, so that there are ties, and with a silent window."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = int(torch.randint(3, 60, (1,), generator=generator))
        a, b = torch.randn(2, length, generator=generator, dtype=torch.float64).mul(2).round().clamp(-3, 3) / 2
        window = Window(3 * index, torch.arange(length), min(1 + index % 3, length - 1))
        found.append((window, a, 0 * b if index == 2 else b))
    return found


def seen_of(windows: Sequence[tuple[Window, Tensor, Tensor]], size: int, unit: Unit = PRODUCT) -> NeuronSample:
    total = NeuronSample.empty(size)
    for window, a, b in windows:
        total += NeuronSample.of(a, b, unit, window, size)
    return total


def same(first: NeuronSample, second: NeuronSample) -> None:
    """Equal to the last bit."""
    assert first.n_tokens == second.n_tokens
    assert torch.equal(first.pairs.keys, second.pairs.keys)
    assert torch.equal(first.pairs.values, second.pairs.values)
    for mine, theirs in zip(first.strongest, second.strongest, strict=True):
        assert torch.equal(mine.h, theirs.h)
        assert torch.equal(mine.places, theirs.places)
        assert torch.equal(mine.around.nan_to_num(nan=99.0), theirs.around.nan_to_num(nan=99.0))


def split_mix(x: int) -> int:
    """The finalizer of SplitMix64 on Python's own integers, as a signed number."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def test_what_is_kept_is_what_a_plain_loop_over_everything_would_keep() -> None:
    windows = random_windows(60)
    seen = seen_of(windows, 5)
    tokens = [
        (window.index, position, float(a[position]), float(b[position]))
        for window, a, b in windows
        for position in range(window.counted_from, len(a))
    ]
    assert seen.n_tokens == len(tokens) > SAMPLED
    hashed = sorted((split_mix(window * 2**32 + position + 1), a, b) for window, position, a, b in tokens)[:SAMPLED]
    assert seen.pairs.keys.tolist() == [key for key, _, _ in hashed]
    assert seen.pairs.values.T.tolist() == [[a, b] for _, a, b in hashed]
    for quadrant, strongest in zip(QUADRANTS, seen.strongest, strict=True):
        mine = [
            (-abs(h), window, position)
            for window, position, a, b in tokens
            if ("p" if a > 0 else "n") + ("p" if b > 0 else "n") == quadrant
            if (h := a * b) != 0
        ]
        expected = sorted(mine)[:5]
        assert strongest.places.T.tolist() == [[window, position] for _, window, position in expected]
        torch.testing.assert_close(strongest.h.abs(), torch.tensor([-h for h, _, _ in expected]).double())


def test_a_token_on_which_it_is_silent_is_no_context() -> None:
    silent = random_windows(3)[2]
    seen = seen_of([silent], 4)
    assert seen.n_tokens == silent[0].n_counted == len(seen.pairs.keys)
    assert all(len(strongest.h) == 0 for strongest in seen.strongest)


def test_grouping_and_order_change_nothing() -> None:
    windows = random_windows(30)
    whole = seen_of(windows, 4)
    for seed in range(3):
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed)).tolist()
        same(whole, seen_of([windows[i] for i in order], 4))
    parts = [seen_of(windows[start : start + 7], 4) for start in range(0, 30, 7)]
    for some in permutations(parts[:3]):
        same(some[0] + (some[1] + some[2]), (parts[0] + parts[1]) + parts[2])
    same(whole, reduce(add, parts))
    same(whole, whole + NeuronSample.empty(4))
    inside = parts[0].pairs.keys, parts[0].strongest[0].h
    before = [tensor.clone() for tensor in inside]
    _ = parts[0] + parts[1]
    assert all(torch.equal(*pair) for pair in zip(before, inside, strict=True))


def test_contexts_hold_the_text_and_the_numbers_around_the_token() -> None:
    windows = random_windows(40)
    seen = seen_of(windows, 6, SILU)
    by_index = {window.index: (a, b) for window, a, b in windows}
    texts = {window.index: tuple(f"{window.index}.{i}" for i in range(len(a))) for window, a, _ in windows}
    contexts = by_quadrant(seen, SILU, texts)
    assert set(contexts) == set(QUADRANTS)
    at_an_edge = 0
    for context in (one for found in contexts.values() for one in found):
        a, b = by_index[context.window]
        first, last = max(0, context.position - BEFORE), min(len(a), context.position + AFTER + 1)
        assert context.texts == texts[context.window][first:last]
        assert context.texts[context.focus] == f"{context.window}.{context.position}"
        assert torch.equal(context.a, a[first:last])
        assert torch.equal(context.b, b[first:last])
        assert torch.equal(context.h, SILU(context.a, context.b))
        at_an_edge += first == 0 or last == len(a)
    assert at_an_edge


@pytest.fixture(scope="module")
def record(llama: LoadedModel) -> NeuronRecord:
    return inspect_neuron(llama, llama.read(context=32, max_tokens=320), "1:7", top=4, quiet=True)


@pytest.fixture(scope="module")
def page(record: NeuronRecord) -> NeuronPage:
    return NeuronPage(record, "neuron llama 1:7")


@pytest.mark.parametrize(
    ("family", "norm", "after", "offset"),
    [
        ("llama", "post_attention_layernorm", None, 0),
        ("gemma3", "pre_feedforward_layernorm", "post_feedforward_layernorm", 1),
        ("olmo2", None, "post_feedforward_layernorm", 0),
        ("cohere", "input_layernorm", None, 0),
    ],
)
def test_readouts_are_the_models_own_matrices(
    family: str, norm: str | None, after: str | None, offset: int, tmp_path: Path
) -> None:
    """Against Hugging Face's own weights, token by token; Cohere's one norm stands before attention and MLP alike."""
    model = load_model(str(save_tiny(family, tmp_path / family)), device="cpu")
    found = inspect_neuron(model, model.read(context=32, max_tokens=64), (1, 5), top=6, quiet=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / family).requires_grad_(False)
    block = plain.model.layers[1]
    gain, value_gain = (torch.ones(32) if name is None else getattr(block, name).weight + offset for name in (norm, after))
    q, k = ((gain * weight[5]).double() for weight in (block.mlp.gate_proj.weight, block.mlp.up_proj.weight))
    v = ((plain.model.norm.weight + offset) * value_gain * block.mlp.down_proj.weight[:, 5]).double()
    embedding, unembedding = plain.model.embed_tokens.weight.double(), plain.lm_head.weight.double()
    known = len(model.tokenizer)
    logits = [float(sum(v[i] * row[i] for i in range(32))) for row in unembedding]
    mean = sum(logits) / len(logits)
    expected = {
        "v": [logit - mean for logit in logits[:known]],
        "q": [float(32**0.5 * (q @ row) / row.norm()) for row in embedding[:known]],
        "k": [float(32**0.5 * (k @ row) / row.norm()) for row in embedding[:known]],
    }
    for name, values in expected.items():
        readout, ordered = found.readouts[name], sorted(values)
        assert [value for _, value in readout.highest] == pytest.approx(ordered[:-7:-1], rel=1e-5, abs=1e-6)
        assert [value for _, value in readout.lowest] == pytest.approx(ordered[:6], rel=1e-5, abs=1e-6)
        assert readout.standard_deviation == pytest.approx(float(np.std(values)), rel=1e-5)
        best = model.tokenizer.decode([int(np.argmax(values))])
        assert readout.highest[0][0] == best
    assert found.output_gain == ("model.norm, γ = 1 + weight" if offset else "model.norm, γ = weight")


def test_rows_beyond_the_tokenizer_are_no_tokens(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(300), pad_token="<pad>").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    found = inspect_neuron(model, model.read(context=32, max_tokens=64), "0:3", top=100, quiet=True)
    assert {readout.tokens for readout in found.readouts.values()} == {len(model.tokenizer)}
    assert len(model.tokenizer) < len(model.bridge.original_model.get_input_embeddings().weight)


def test_readouts_of_vectors_with_equal_and_empty_rows() -> None:
    table = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-2.0, 0.0], [3.0, 4.0], [1.0, 0.0]])
    gain = torch.tensor([2.0, 1.0])
    assert excitation(torch.tensor([1.0, 1.0]), table, gain).tolist() == pytest.approx(
        [2 * 2**0.5, 0, -2 * 2**0.5, 2**0.5 * (2 * 3 + 4) / 5, 2 * 2**0.5]
    )
    assert float(promoted(torch.tensor([1.0, 1.0]), table, gain).sum()) == pytest.approx(0)
    highest, lowest = ends(torch.tensor([1.0, 3.0, 1.0, 3.0, 0.0]).double(), 3)
    assert (highest.tolist(), lowest.tolist()) == ([1, 3, 0], [4, 0, 2])


def test_likeness_of_reading_ignores_scaling_and_sees_exchange() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = torch.randn(2, 20, 8, generator=generator, dtype=torch.float64)
    q, k = queries[3], keys[3]
    queries[5], keys[5] = -3 * q, -k / 3  # scaled by a negative α
    queries[6], keys[6] = 2 * k, q  # exchanged, and with another length
    queries[7], keys[7] = q, -k  # the sign is v's to take
    queries[9] = 0
    cosine, exchanged = pair_cosines(q, k, queries, keys)
    assert cosine[[3, 5, 6, 7]].tolist() == pytest.approx([1, 1, 1, -1])
    assert exchanged[[3, 5, 6, 7]].tolist() == [False, False, True, False]
    for j in (0, 11, 19):
        tensor = torch.outer(q, k).flatten()
        other = torch.outer(keys[j], queries[j]) if exchanged[j] else torch.outer(queries[j], keys[j])
        assert float(cosine[j]) == pytest.approx(float(torch.cosine_similarity(tensor, other.flatten(), dim=0)))
    listed = nearest(2, cosine, exchanged, 4)
    assert [one.neuron for one in listed] == [3, 5, 6, 7] or {one.neuron for one in listed} == {3, 5, 6, 7}
    assert 9 not in {one.neuron for one in nearest(2, cosine, exchanged, 20)}


def test_similar_neurons_are_those_of_a_loop(llama: LoadedModel, record: NeuronRecord) -> None:
    site = llama.sites[1]
    v, q, k = site.v[7].double(), (site.q[7] * site.gain).double(), (site.k[7] * site.gain).double()

    def cosine(x: Tensor, y: Tensor) -> float:
        return float(x @ y / (x.norm() * y.norm()))

    by_value, by_pair = [], []
    for layer, other in llama.sites.items():
        for j in range(len(other.v)):
            if (layer, j) == (1, 7):
                continue
            mine, theirs = other.q[j].double() * other.gain, other.k[j].double() * other.gain
            direct, swapped = cosine(q, mine) * cosine(k, theirs), cosine(q, theirs) * cosine(k, mine)
            by_value.append((layer != 1, -abs(cosine(v, other.v[j].double())), layer, j))
            by_pair.append((layer != 1, -max(abs(direct), abs(swapped)), layer, j))
    for name, found in (("v", by_value), ("qk", by_pair)):
        own, others = ([entry[2:] for entry in sorted(found) if entry[0] == elsewhere][:4] for elsewhere in (False, True))
        assert [(one.layer, one.neuron) for one in record.similar[name]] == own + others


def test_a_batch_of_any_size_gives_the_same_page(tmp_path: Path) -> None:
    """Byte for byte, but for what rounding in float64 does to numbers written with all their digits."""
    model = load_model(str(save_tiny("llama", tmp_path / "llama")), device="cpu", dtype="float64")
    text = model.read(context=32, max_tokens=320)

    def page(batch_size: int) -> str:
        made = NeuronPage(inspect_neuron(model, text, "2:11", top=3, batch_size=batch_size, quiet=True)).html()
        return re.sub(r"\d+\.\d{7,}(e-?\d+)?", lambda found: f"{float(found[0]):.9g}", made)

    assert page(1) == page(3) == page(100)


def test_its_numbers_are_the_runs(llama: LoadedModel, page: NeuronPage) -> None:
    record = page.record
    run = analyze(llama, llama.read(context=32, max_tokens=320), layers=[1], batch_size=1, quiet=True)
    columns = run.layers[1].estimates.neuron_numbers()
    for name, row in page.standing.iterrows():
        values = columns[str(name)].tolist()
        assert row["value"] == pytest.approx(values[7], rel=1e-9)
        assert row["rank"] == 1 + sum(value > values[7] for value in values)
        below = sum(value < values[7] for value in values) + 0.5 * sum(value == values[7] for value in values)
        assert row["percentile"] == pytest.approx(100 * below / len(values))
    assert page.quadrants["tokens"].sum() == pytest.approx(1)
    assert page.quadrants["energy"].sum() == pytest.approx(1)
    counts = {quadrant: round(share * record.n_tokens) for quadrant, share in page.quadrants["tokens"].items()}
    a, b = record.sample
    assert record.n_tokens == record.sample.shape[1] == 310
    assert counts["pn"] == int(((a > 0) & (b <= 0)).sum())
    at_two = page.curve.set_index("alpha").loc[2.0, "asymmetry"]
    assert at_two == pytest.approx(page.standing.loc["scaling_double", "value"])


def test_a_histogram_holds_the_neuron_where_it_is() -> None:
    values = np.array([0.0, 0.5, 1.0, 1.0, np.nan, 2.0])
    for at, expected in ((0, 0), (5, 24), (2, 12)):
        found = histogram(values, at)
        assert found is not None
        assert (found.own_bin, found.logarithmic, max(found.bars)) == (expected, False, 1.0)
        assert found.bars[found.own_bin] > 0
    assert histogram(values, 4) is None
    far = histogram(np.array([1.0, 1.1, 0.9, 1000.0]), 3)
    assert far is not None
    assert (far.logarithmic, far.own_bin) == (True, 24)


def test_a_run_gives_numbers_and_costs(llama: LoadedModel, page: NeuronPage, tmp_path: Path) -> None:
    text = llama.read(context=32, max_tokens=320)
    analyze(llama, text, batch_size=1, quiet=True).save(tmp_path / "run")
    table = pd.DataFrame({"layer": 1, "neuron": range(48), "attribution_flip": np.linspace(-1, 0.5, 48)})
    table = table.assign(attribution_flip_se=0.25, attribution_flip_placebo=0.125, attribution_flip_per_asymmetry=9.0)
    other = NeuronPage(inspect_neuron(llama, text, "1:7", top=4, run=tmp_path / "run", quiet=True))
    pd.testing.assert_frame_equal(other.standing, page.standing)
    assert other.costs.empty
    assert 'id="costs"' not in other.html()
    table.to_parquet(tmp_path / "run" / "neurons.parquet")
    with_costs = NeuronPage(other.record)
    assert with_costs.costs["edit"].tolist() == ["flip"]
    value = np.linspace(-1, 0.5, 48)[7]
    smaller = 100 * np.mean(np.abs(np.linspace(-1, 0.5, 48)) < abs(value))
    assert with_costs.costs.iloc[0, 1:].tolist() == pytest.approx([value, 0.25, 0.125, smaller])
    assert f"−{abs(value):.3f} <small>± 0.25</small>" in with_costs.html()
    assert not any("a different text" in sentence for sentence in _remarks(with_costs))
    short = inspect_neuron(llama, llama.read(context=32, max_tokens=64), "1:7", run=tmp_path / "run", quiet=True)
    assert "a different text" in Page(NeuronPage(short).html()).text
    (tmp_path / "run" / "neurons.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"neurons\.parquet is not readable"):
        NeuronPage(other.record).html()


def _remarks(page: NeuronPage) -> list[str]:
    from reports.neuron.summary import remarks

    return list(remarks(page.record))


def test_the_page_loads_nothing_and_says_what_was_found(page: NeuronPage) -> None:
    html = page.html()
    parsed = Page(html)
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {reference for _, a in parsed.elements if (reference := (a.get("href") or "").removeprefix("#"))} <= {
        *ids,
        "data:,",
    }
    assert html.count('class="near ') == sum(len(c.texts) for found in page.record.contexts.values() for c in found)
    assert html.count(" focus") == sum(map(len, page.record.contexts.values())) <= 16
    assert "neuron llama 1:7" in parsed.text
    assert "Its score ‖q‖‖k‖‖v‖ is" in parsed.text
    assert "nan" not in re.findall(r"[a-z]+", parsed.text)
    assert repr(page).startswith("neuron 1:7 of llama\nIts score")


def test_a_notebook_shows_the_same_page_in_a_frame(page: NeuronPage) -> None:
    frame = page._repr_html_()
    ((tag, attributes),) = Page(frame).elements
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == page.html()
    assert html_module.unescape(frame).count("<iframe") == 1


def test_what_comes_from_outside_cannot_act(tmp_path: Path) -> None:
    """Hostile tokens, corpus name and model name give the elements that harmless ones give, and no invisible marks."""
    place = tmp_path / "<b>model"
    tiny_model("llama").save_pretrained(place)
    hostile_tokenizer().save_pretrained(place)
    corpus = tmp_path / "<script>x.txt"
    corpus.write_text(CORPUS, encoding="utf-8", errors="surrogatepass")
    model = load_model(str(place), device="cpu")
    found = inspect_neuron(model, model.read(str(corpus), context=64, max_tokens=400), "0:3", top=20, quiet=True)

    def harmless(context: Context) -> Context:
        return replace(context, texts=tuple("x" for _ in context.texts))

    def tame(entries: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        return tuple(("x", value) for _, value in entries)

    readouts = {
        name: replace(one, highest=tame(one.highest), lowest=tame(one.lowest)) for name, one in found.readouts.items()
    }
    safe = replace(
        found,
        contexts={name: tuple(map(harmless, contexts)) for name, contexts in found.contexts.items()},
        readouts=readouts,
        peak_text="x",
        model=found.model | {"name": "x"},
        corpus=found.corpus | {"name": "x"},
    )
    pages = [Page(NeuronPage(one).html()) for one in (found, safe)]
    first, second = ([tag for tag in one.tags() if tag != "bdi"] for one in pages)
    assert first == second
    assert SCRIPT in pages[0].text
    assert "1337" not in pages[0].text
    unseen = {letter for letter in pages[0].text if unicodedata.category(letter) in ("Cf", "Cs", "Cc") and letter != "\n"}
    assert unseen == set()


@pytest.mark.parametrize("family", ["relu", "olmo2"])
def test_silent_neurons_and_empty_quadrants_have_a_page(family: str, tmp_path: Path) -> None:
    model = load_model(str(save_tiny(family, tmp_path / family)), device="cpu")
    text = model.read(context=32, max_tokens=96)
    relu = NeuronPage(inspect_neuron(model, text, "0:0", quiet=True))
    if family == "relu":
        assert "No counted token has these signs and h ≠ 0." in relu.html()
    with torch.no_grad():
        model.sites[0].k[0].zero_()
    silent = NeuronPage(inspect_neuron(model, text, "0:0", quiet=True))
    text_of_page = Page(silent.html()).text
    assert "h is 0 on every counted token" in text_of_page
    assert "nan" not in re.findall(r"[a-z]+", text_of_page)


def test_the_command_writes_a_page(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("neuron", tiny_llama, "1:7", *QUICK) == (0, "", "")
    usual = tmp_path / "out" / "llama-1-7.html"
    assert "Neuron 1:7" in Page(usual.read_text(encoding="utf-8")).text
    code, out, _ = call("neuron", tiny_llama, "1:7", "--top", 1, *QUICK[:-1])  # over its own page
    assert code == 0
    assert "Its score" in out
    assert "out/llama-1-7.html" in out
    assert Page(usual.read_text(encoding="utf-8")).text.count("position ") <= 6
    (tmp_path / "notes.html").write_text("my notes")
    assert "is not a page of a neuron" in refused("neuron", tiny_llama, "1:7", "--out", "notes.html", *QUICK)
    assert (tmp_path / "notes.html").read_text() == "my notes"
    assert call("neuron", tiny_llama, "1:7", "--out", "notes.html", "--force", "--top", 1, *QUICK)[0] == 0
    assert not list(tmp_path.rglob(".writing-*"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("11", "'11' is not a neuron: write LAYER:INDEX"),
        ("1:x", "'1:x' is not a neuron"),
        ("1:-2", "'1:-2' is not a neuron"),
        ("7:0", "layer 7 is out of range: llama has layers 0-2"),
        ("1:48", "neuron 48 is out of range: layer 1 has neurons 0-47"),
    ],
)
def test_a_neuron_that_is_not_there_is_refused(place: str, message: str, tiny_llama: Path, tmp_path: Path) -> None:
    assert message in refused("neuron", tiny_llama, place, "--out", tmp_path / "n.html", *QUICK)
    assert not (tmp_path / "n.html").exists()


def test_other_bad_input_is_refused(llama: LoadedModel, tiny_llama: Path, tmp_path: Path) -> None:
    text = llama.read(context=32, max_tokens=64)
    assert "is a directory" in refused("neuron", tiny_llama, "1:7", "--out", tmp_path, *QUICK)
    (tmp_path / "file").write_text("")
    assert "file is a file" in refused("neuron", tiny_llama, "1:7", "--out", tmp_path / "file" / "n.html", *QUICK)
    assert "is not a run" in refused(
        "neuron", tiny_llama, "1:7", "--run", tmp_path / "none", "--out", tmp_path / "n", *QUICK
    )
    analyze(llama, text, layers=[0], quiet=True).save(tmp_path / "run")
    with pytest.raises(UserError, match="has no layer 1: give a run that analysed it"):
        inspect_neuron(llama, text, "1:7", run=tmp_path / "run", quiet=True)
    stranger = load_model(str(save_tiny("llama", tmp_path / "other", seed=1)), device="cpu")
    with pytest.raises(UserError, match="with other weights than other"):
        inspect_neuron(stranger, text, "0:7", run=tmp_path / "run", quiet=True)
    for top in (0, 101):
        with pytest.raises(UserError, match=f"a list of {top} cannot be shown"):
            inspect_neuron(llama, text, "1:7", top=top, quiet=True)
    broken = replace(llama, located=LocatedLayers({0: llama.sites[0]}, {}, {1: "it is a router", 2: "it is a router"}))
    with pytest.raises(UserError, match=r"none of the layers asked for can be analysed \(layer 1: it is a router\)"):
        inspect_neuron(broken, text, "1:7", quiet=True)


@pytest.fixture(scope="module")
def run_of_a_mixture(families: Families, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixture") / "run"
    with no_figures():
        assert call("analyze", families.directory("qwen2_moe"), "--out", out, *QUICK)[0] == 0
    return out


@pytest.mark.parametrize("place", ["1:2:5", "1:shared:7"])
def test_a_neuron_of_an_expert(place: str, families: Families, run_of_a_mixture: Path, tmp_path: Path) -> None:
    """On the tokens that are sent to it, against the model's own modules; its page, and its costs from a run."""
    directory, model = families.directory("qwen2_moe"), families.loaded("qwen2_moe")
    text = model.read(context=32, max_tokens=320)
    record = inspect_neuron(model, text, place, top=4, quiet=True)
    plain, seen = AutoModelForCausalLM.from_pretrained(directory), {}
    mlp = plain.model.layers[1].mlp
    mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0], index=inputs[1]))
    found = []
    for window in text.windows:
        with torch.no_grad():
            plain(window.tokens[None])
        x, reached = seen["x"], (seen["index"] == 2).any(dim=1)
        if place == "1:shared:7":
            reached[:] = True
            a, b = mlp.shared_expert.gate_proj(x)[:, 7], mlp.shared_expert.up_proj(x)[:, 7]
        else:
            a, b = x @ mlp.experts.gate_up_proj[2, 5], x @ mlp.experts.gate_up_proj[2, 24 + 5]
        reached[: window.counted_from] = False
        found.append(torch.stack([a, b])[:, reached].detach())
    expected = torch.cat(found, dim=1)
    assert record.n_tokens == expected.shape[1]
    torch.testing.assert_close(record.sample.sort(dim=1).values.float(), expected.sort(dim=1).values, rtol=1e-4, atol=1e-4)
    h = torch.nn.functional.silu(expected[0]) * expected[1]
    strongest = max(abs(context.h[context.focus]) for contexts in record.contexts.values() for context in contexts)
    assert float(strongest) == pytest.approx(float(h.abs().max()), rel=1e-4)
    column = 4 * 24 + 7 if place == "1:shared:7" else 2 * 24 + 5
    assert (record.neuron, record.name) == (column, place)
    assert record.measured.moments.neuron["weight"].shape == (4 * 24 + 40,)
    assert all(each.name.count(":") == 2 for each in record.similar["v"])
    code, *_ = call("neuron", directory, place, "--run", run_of_a_mixture, "--out", tmp_path / "n.html", *QUICK)
    assert code == 0
    page = (tmp_path / "n.html").read_text(encoding="utf-8")
    assert f"{'the shared expert' if 'shared' in place else 'expert 2'} of layer 1" in page
    costs = NeuronPage(inspect_neuron(model, text, place, run=run_of_a_mixture, quiet=True)).costs
    table = pd.read_parquet(run_of_a_mixture / "neurons.parquet")
    mine = table[(table["layer"] == 1) & (table["expert"] == record.expert) & (table["neuron"] == record.index)]
    assert len(mine) == 1
    assert costs.set_index("edit").loc["exchange", "attribution"] == pytest.approx(
        float(mine["attribution_exchange"].iloc[0])
    )


def test_a_neuron_of_a_mixture_is_named_with_its_expert(families: Families, tmp_path: Path) -> None:
    directory = families.directory("qwen2_moe")
    for place, message in (
        ("1:5", "layer 1 has experts 0-3, and a shared one: write a neuron of it as LAYER:EXPERT:INDEX"),
        ("1:9:0", "layer 1 has experts 0-3, and a shared one"),
        ("1:2:24", "neuron 24 is out of range: expert 2 of layer 1 has neurons 0-23"),
        ("1:none:2", "'1:none:2' is not a neuron"),
        ("1:2:3:4", "'1:2:3:4' is not a neuron"),
    ):
        assert message in refused("neuron", directory, place, "--out", tmp_path / "n.html", *QUICK)
