"""Windows hold every token once, BOS only where it belongs, and count what they say they count."""

import json
from pathlib import Path

import pytest
import torch

from analysis.errors import UserError
from hooks.corpus import SAMPLE, load_corpus, sample_text
from hooks.loading.builtin import BUILTINS
from hooks.models import LoadedModel
from tests.helpers.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
BOS = 1


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_windows_hold_the_text_in_order_and_nothing_else() -> None:
    corpus = load_corpus(SAMPLE, TOKENIZER, bos=None, context=50)
    ids = torch.cat([window.tokens for window in corpus.windows])
    assert ids.tolist() == TOKENIZER(sample_text(), add_special_tokens=False).input_ids
    assert {len(window.tokens) for window in corpus.windows[:-1]} == {50}
    assert TOKENIZER.decode(ids) == sample_text()


def test_bos_stands_first_in_every_window_and_takes_a_place() -> None:
    corpus = load_corpus(SAMPLE, TOKENIZER, bos=BOS, context=50)
    assert {int(window.tokens[0]) for window in corpus.windows} == {BOS}
    assert {len(window.tokens) for window in corpus.windows[:-1]} == {50}
    rest = torch.cat([window.tokens[1:] for window in corpus.windows])
    assert rest.tolist() == TOKENIZER(sample_text(), add_special_tokens=False).input_ids


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_counted_tokens_are_those_after_the_skipped_ones(skip: int) -> None:
    corpus = load_corpus(SAMPLE, TOKENIZER, bos=BOS, context=40, skip_positions=skip)
    assert {window.counted_from for window in corpus.windows} == {skip}
    assert corpus.n_counted == corpus.n_tokens - skip * len(corpus.windows)
    assert corpus.description["tokens_counted"] == corpus.n_counted
    assert corpus.description["tokens_fed"] == corpus.n_tokens


def test_repetitions_of_the_first_token_are_not_counted(tmp_path: Path) -> None:
    line_end = TOKENIZER("\n").input_ids
    assert len(line_end) == 1
    source = write(tmp_path / "t.txt", "\n\n\n\nA word and a few more words\n")
    assert load_corpus(source, TOKENIZER, bos=None).windows[0].counted_from == 4
    assert load_corpus(source, TOKENIZER, bos=BOS).windows[0].counted_from == 1
    assert load_corpus(source, TOKENIZER, bos=None, skip_positions=0).windows[0].counted_from == 0


def test_shards_part_the_windows() -> None:
    whole = load_corpus(SAMPLE, TOKENIZER, bos=None, context=64)
    parts = [load_corpus(SAMPLE, TOKENIZER, bos=None, context=64, shard=f"{k}/3") for k in range(3)]
    indices = sorted(window.index for part in parts for window in part.windows)
    assert indices == [window.index for window in whole.windows]
    assert {part.n_windows for part in parts} == {len(whole.windows)}
    assert {part.description["windows_sha256"] for part in parts} == {whole.description["windows_sha256"]}


def test_max_tokens_stops_at_the_window_that_reaches_it() -> None:
    corpus = load_corpus(SAMPLE, TOKENIZER, bos=None, context=50, max_tokens=101)
    assert corpus.n_tokens == 150
    assert corpus.description["cut_at_max_tokens"]
    assert not load_corpus(SAMPLE, TOKENIZER, bos=None, context=50).description["cut_at_max_tokens"]


def test_the_fingerprint_sees_tokens_and_where_windows_end() -> None:
    def fingerprint(**options: int) -> str:
        return load_corpus(SAMPLE, TOKENIZER, bos=None, **options).description["windows_sha256"]

    assert fingerprint(context=50) == fingerprint(context=50)
    assert len({fingerprint(context=50), fingerprint(context=51), fingerprint(context=50, max_tokens=500)}) == 3


def test_a_dataset_is_read_document_by_document(tmp_path: Path) -> None:
    documents = ["The first document.", "", "A second one, longer than the first."]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    corpus = load_corpus(str(tmp_path), TOKENIZER, bos=BOS)
    texts = [TOKENIZER.decode(window.tokens[1:]) for window in corpus.windows]
    assert texts == [documents[0], documents[2]]
    (tmp_path / "train.jsonl").write_text('{"words": "none"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="no column 'text', it has words"):
        load_corpus(str(tmp_path), TOKENIZER, bos=BOS)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"abc\xff\xfe", "is not UTF-8 text .byte 3"),
        (b"text\0text " * 30, "holds NUL bytes"),
        (b"a few", "too short, it has [0-9] tokens to count: at least 16"),
    ],
)
def test_a_file_that_gives_nothing_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        load_corpus(str(tmp_path / "t.txt"), TOKENIZER, bos=None)


@pytest.mark.parametrize("shard", ["1", "2/2", "-1/2", "a/b", "1/0"])
def test_a_shard_must_be_k_of_n(shard: str) -> None:
    with pytest.raises(UserError, match="shard"):
        load_corpus(SAMPLE, TOKENIZER, bos=None, shard=shard)


def test_a_context_must_leave_something_to_count() -> None:
    with pytest.raises(UserError, match="leaves no token after the 4 skipped"):
        load_corpus(SAMPLE, TOKENIZER, bos=None, context=4, skip_positions=4)


def test_an_unknown_source_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="neither a text file nor a dataset") as caught:
        load_corpus("no-such-thing", TOKENIZER, bos=None)
    assert "\n" not in str(caught.value)


def test_a_context_beyond_the_models_limit_is_refused(llama: LoadedModel) -> None:
    assert llama.context_limit == 128
    with pytest.raises(UserError, match="129 is beyond this model's limit of 128"):
        llama.read(context=129)


@pytest.mark.real
def test_real_tokenizers_put_a_bos_only_where_their_authors_did(smollm2: LoadedModel, gemma3: LoadedModel) -> None:
    assert smollm2.bos is None
    assert gemma3.bos == gemma3.tokenizer.bos_token_id == 2
    for model, title in ((smollm2, "smollm2-135m"), (gemma3, "gemma3-270m")):
        corpus = model.read()
        assert corpus.n_tokens >= 6000, BUILTINS[title].title
        assert len(corpus.windows) > 32
