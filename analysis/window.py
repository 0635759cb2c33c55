"""A window: one sequence of tokens, the unit that is read at once."""

from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """One sequence of tokens, its number in the corpus, and the first position that is counted."""

    index: int
    tokens: Int64[Tensor, " pos"]
    counted_from: int

    @property
    def n_counted(self) -> int:
        return len(self.tokens) - self.counted_from
