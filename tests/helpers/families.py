"""Tiny models of every family, each saved once and loaded once, and which of them stand for all.

What is loaded is shared by all tests of a process: who changes a model loads one of its own, from the directory.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hooks.models import LoadedModel, load_model
from tests.helpers.tiny import save_tiny

SAMPLE = (
    *("llama", "llama-bias", "gemma3", "gemma3n", "phi3", "granite", "t5", "modernbert"),
    *("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4", "jamba", "dbrx"),
)
"""One of every way in which units are made, held, routed and placed."""


class Families:
    """Directories of tiny models under one root, and the models in them."""

    def __init__(self, root: Path) -> None:
        self.directory = cache(lambda family: save_tiny(family, root / family))
        self._loaded = cache(lambda family, dtype: load_model(str(self.directory(family)), device="cpu", dtype=dtype))

    def loaded(self, family: str, dtype: str = "float32") -> LoadedModel:
        """The family's model in memory, as a user would load it."""
        return self._loaded(family, dtype)


def grid(values: Iterable[Any], sample: Iterable[Any] = SAMPLE) -> list[Any]:
    """Parameters of a test: those that are not in the sample are exhaustive."""
    kept = set(sample)
    assert kept, "a grid without a sample would not be tested at all"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
