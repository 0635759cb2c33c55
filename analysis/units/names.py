"""Names with parameters, like clamped(silu,7): writing and parsing them.

A parameter is a name, which may have parameters itself, or a number, written with enough digits to be read back exactly.
"""

import math

from analysis.errors import UserError


def written(kind: str, *parameters: str | float) -> str:
    """The name of that kind with these parameters."""
    return f"{kind}({','.join(part if isinstance(part, str) else _digits(part) for part in parameters)})"


def parsed(name: str) -> tuple[str, tuple[str, ...]]:
    """The kind and the parameters of a name; 'silu', and whatever is not of this form, has no parameters."""
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
    """``count`` finite numbers; UserError, with the whole name, for anything else."""
    if len(parameters) != count:
        raise UserError(f"{name!r} has {len(parameters)} of its numbers: give {count}")
    found = []
    for text in parameters:
        try:
            found.append(float(text))
        except ValueError as error:
            raise UserError(f"{name!r} has {text!r} in place of a number: write it like 7 or 1.702") from error
        if not math.isfinite(found[-1]):
            raise UserError(f"{name!r} has {text!r} in place of a finite number: omit a parameter without effect")
    return tuple(found)


def require(holds: bool, name: str, what: str) -> None:
    """Raise UserError unless the condition on a parameter holds."""
    if not holds:
        raise UserError(f"{name!r} is not a unit: {what}")


def _digits(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)
