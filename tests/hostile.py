"""A run in which everything that a stranger may choose is hostile: names, tokens, text, reasons."""

from dataclasses import replace

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from analysis.run import Run
from tests.tiny import VOCABULARY, train_tokenizer

SCRIPT = "<script>window.hacked = 1</script>"
TOKENS = (
    SCRIPT,
    '"><img src=x onerror="window.hacked = 1">',
    "</script></table></main><h1>broken",
    "\u202egnp.exe\u202c",
    "\u2067אבג (1, 2)",
    "a\u0301\u0302\u0303\u0304\u0305\u0306\u0307" * 20,
    "\x00\x1b[31m\n\r\t",
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


def made_hostile(run: Run) -> Run:
    """The same numbers under hostile names."""
    texts = {token: TOKENS[place % len(TOKENS)] for place, token in enumerate(run.token_texts)}
    check = {"check": TOKENS[3], "value": SCRIPT, "limit": TOKENS[1], "passed": False}
    control = {"layer": 0, "control": SCRIPT, "must": "hold", "value": 1.0, "limit": 0.0, "passed": False}
    return replace(
        run,
        model=run.model | {"name": TOKENS[1], "weights": TOKENS[2], "fingerprint": TOKENS[3]},
        corpus=tuple(part | {"name": SCRIPT + TOKENS[4]} for part in run.corpus),
        token_texts=texts,
        acceptance=(*run.acceptance, check),
        controls=(*run.controls, control),
        skipped={7: SCRIPT},
        record=run.record | {"command": f"analyze {TOKENS[1]} {TOKENS[2]}"},
    )
