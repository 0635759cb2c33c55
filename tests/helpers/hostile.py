"""A run in which everything that a stranger may choose is hostile: names, tokens, text, reasons."""

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from analysis.checks import Check
from analysis.run import Run
from tests.helpers.tiny import VOCABULARY, train_tokenizer

SCRIPT = "<script>window.hacked = 1</script>"
TOKENS = (
    SCRIPT,
    '"><img src=x onerror="window.hacked = 1">',
    "</script></table></main><h1>broken",
    "\u202egnp.exe\u202c",
    "\u2067אבג (1, 2)",
    "a\u0301\u0302\u0303\u0304\u0305\u0306\u0307" * 20,
    "\x07\x1b[31m\n\r\t",
    "{{ 7 * 191 }}{% raw %}",
    "x" * 4000,
)
"""Tags, quotes, bidirectional marks, right-to-left letters, marks piled up, controls, a template, a long word."""
CORPUS = " ".join(TOKENS) * 40


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the tiny models' size whose vocabulary holds ``TOKENS``."""
    tokenizer = train_tokenizer(VOCABULARY - len(TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def renamed(run: Run, words: Sequence[str] = TOKENS) -> Run:
    """The same numbers under these names, as many as ``TOKENS``, and with a failed check and control of such names."""
    script, tag, closing, mark, letters, _, _, template, _ = words
    check = Check.stated(mark, script, tag, holds=False)
    control = Check(script, 1.0, 0.0, layer=0)
    return replace(
        run,
        model=run.model | {"name": tag, "weights": closing, "fingerprint": mark},
        corpus=tuple(part | {"name": script + letters} for part in run.corpus),
        token_texts={token: words[place % len(words)] for place, token in enumerate(run.token_texts)},
        acceptance=(*run.acceptance, check),
        controls=(*run.controls, control),
        skipped={7: script},
        record=run.record | {"command": f"analyze {tag} {closing} {template}"},
    )
