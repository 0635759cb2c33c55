"""The result of one check: the value found, its limit, and whether it passed.

A check with a number passes if the number is at most its limit, or for other checks if it is more than its limit; NaN fails
either way. A check in words (how the model was read, which versions ran) states whether it passed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

Sense = Literal["at most", "more than", "stated"]
_MUST: dict[str, Sense] = {"hold": "at most", "fail": "more than"}
"""What a control must do, in the words of ``run.json``."""


@dataclass(frozen=True)
class Check:
    """What was checked, the value found, and its limit.

    Attributes:
        what: its name, one line.
        value: the value found, a number or words.
        limit: what the value is compared with, a number or words.
        sense: on which side of the limit the number must be; ``stated`` for words.
        holds: whether a check in words passed; a number is compared with its limit.
        layer: the layer that it is about; None for the whole run.
    """

    what: str
    value: float | str
    limit: float | str
    sense: Sense = "at most"
    holds: bool = True
    layer: int | None = None

    @classmethod
    def stated(cls, what: str, value: str, limit: str, holds: bool = True) -> "Check":
        """A check in words."""
        return cls(what, value, limit, "stated", holds)

    @property
    def passed(self) -> bool:
        """Whether the check passed."""
        if isinstance(self.value, str) or isinstance(self.limit, str):
            return self.holds
        return self.value > self.limit if self.sense == "more than" else self.value <= self.limit

    @property
    def value_in_words(self) -> str:
        return self.value if isinstance(self.value, str) else f"{self.value:.1e}"

    @property
    def limit_in_words(self) -> str:
        return self.limit if isinstance(self.limit, str) else f"{self.sense} {self.limit:.0e}"

    def __str__(self) -> str:
        return f"{self.what}: {self.value_in_words}, limit {self.limit_in_words}"

    def worse(self, other: "Check") -> "Check":
        """The worse of two results of one check; for checks in words, both values."""
        if isinstance(self.value, str) or isinstance(other.value, str):
            values = "; ".join(dict.fromkeys((str(self.value), str(other.value))))
            return replace(self, value=values, holds=self.passed and other.passed)
        if self.passed != other.passed:
            return other if self.passed else self
        return (min if self.sense == "more than" else max)(self, other, key=lambda check: float(check.value))

    def as_record(self) -> dict[str, Any]:
        """As an entry of ``acceptance`` in ``run.json``."""
        record = {"check": self.what, "value": self.value, "limit": self.limit, "passed": self.passed}
        return record if self.sense == "stated" else record | {"sense": self.sense}

    def as_control(self) -> dict[str, Any]:
        """As an entry of ``controls`` in ``run.json``."""
        must = next(word for word, sense in _MUST.items() if sense == self.sense)
        return {
            "layer": self.layer,
            "control": self.what,
            "must": must,
            "value": self.value,
            "limit": self.limit,
            "passed": self.passed,
        }

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "Check":
        """The inverse of ``as_record`` and of ``as_control``; KeyError or ValueError if it is neither."""
        value, limit, passed = record["value"], record["limit"], bool(record["passed"])
        if "control" in record:
            return cls(record["control"], float(value), float(limit), _MUST[record["must"]], layer=int(record["layer"]))
        if isinstance(value, str) or isinstance(limit, str):
            return cls.stated(record["check"], value, limit, passed)
        return cls(record["check"], float(value), float(limit), record.get("sense", "at most"))


def worst(checks: Iterable[Check]) -> Check:
    """The worst of several results of one check."""
    return reduce(Check.worse, checks)
