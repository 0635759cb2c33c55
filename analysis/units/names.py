"""Names with parameters, like clamped(silu,7): how they are written, and how they are read again.

A parameter is a name, which may have parameters itself, or a number, written with as many digits as give it back exactly.
"""

import math

from analysis.errors import UserError


def written(kind: str, *parameters: str | float) -> str:
    """The name of that kind with these parameters."""
    return f"{kind}({','.join(part if isinstance(part, str) else _digits(part) for part in parameters)})"


def parsed(name: str) -> tuple[str, tuple[str, ...]]:
    """The kind that a name says and its parameters; those of 'silu' and of whatever is not written like this are none."""
    kind, bracket, inside = name.partition("(")
    if not bracket or not inside.endswith(")"):
        return name, ()
    parts, depth = [""], 0
    for character in inside[:-1]:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return kind, tuple(part.strip() for part in parts)


def numbers(name: str, parameters: tuple[str, ...], count: int) -> tuple[float, ...]:
    """So many finite numbers; UserError, with the whole name, for anything else."""
    if len(parameters) != count:
        raise UserError(f"{name!r} says {len(parameters)} of its numbers: give {count}")
    found = []
    for text in parameters:
        try:
            found.append(float(text))
        except ValueError as error:
            raise UserError(f"{name!r} has {text!r} where a number stands: write it like 7 or 1.702") from error
        if not math.isfinite(found[-1]):
            raise UserError(f"{name!r} has {text!r} where a finite number stands: leave out what has no effect")
    return tuple(found)


def require(holds: bool, name: str, what: str) -> None:
    """UserError unless a parameter is as it must be."""
    if not holds:
        raise UserError(f"{name!r} is no unit: {what}")


def _digits(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
