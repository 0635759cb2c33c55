"""What every benchmark needs: a description of the machine, a long text, peak memory, a table."""

import json
import platform
import resource
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hooks.corpus import Corpus, sample_text
from hooks.models import LoadedModel

SAMPLE_TOKENS = 8000
"""The sample has more in every tokenizer."""


def machine() -> dict[str, Any]:
    """Processor, threads, accelerator and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": named[0] if named else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "transformer-lens", "numba")},
    }


def long_corpus(model: LoadedModel, tokens: int, context: int = 256) -> Corpus:
    """That many tokens of the sample text, repeated."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(sample_text() * (1 + tokens // SAMPLE_TOKENS))
        file.flush()
        return model.read(file.name, context=context, max_tokens=tokens)


def peak_memory() -> int:
    """Peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(rows: Sequence[dict[str, Any]], out: Path | None, **settings: Any) -> None:
    """Print the rows as a table; write them, the settings and the machine as JSON if a file is given."""
    columns = list(rows[0])
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(f'{x:.4g}' if isinstance(x, float) else str(x) for x in row.values())} |")
    if out is not None:
        found = {"settings": settings, "rows": list(rows), "machine": machine()}
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
