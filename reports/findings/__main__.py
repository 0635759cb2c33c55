"""The tables and the figure of ``docs/findings.md``, made from saved runs:

    python -m reports.findings docs/findings.md --activations out/smollm2-135m out/gemma3-270m

Each part of the file stands between two marks of its own: what is between them is replaced, the text around them stays.
A part whose runs are not named is left as it is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.errors import UserError
from reports.findings.activations import activation_tables
from reports.findings.causal import causal_tables
from reports.findings.figure import draw_families
from reports.findings.runs import found_in
from reports.markdown import written_into

DPI = 120


def main(arguments: Sequence[str]) -> None:
    """Write the tables of the runs into the file, and the figure beside it."""
    given = _parser().parse_args(arguments)
    if not given.activations and (given.first or given.figure):
        raise UserError("--first and --figure go with --activations: name the runs that they belong to")
    if not given.activations and not given.causal:
        raise UserError("no run is named: give --activations, --causal or both")
    text = given.file.read_text(encoding="utf-8")
    if given.activations:
        found = found_in(given.activations, given.first, given.causal)
        text = written_into(text, "activations", "\n\n".join(activation_tables(found)))
        if given.figure:
            draw_families(found).savefig(given.figure, dpi=DPI)
    if given.causal:
        paragraphs = [paragraph for directory in given.causal for paragraph in causal_tables(directory)]
        text = written_into(text, "causal", "\n\n".join(paragraphs))
    given.file.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports.findings", description="Write the tables of docs/findings.md.")
    parser.add_argument("file", type=Path)
    runs = {
        "--activations": "one run a model, made with --null random-init",
        "--first": "runs of the same models made with --skip-positions 0",
        "--causal": "runs made with --causal exact or both",
    }
    for option, words in runs.items():
        parser.add_argument(option, type=Path, nargs="+", default=[], metavar="DIR", help=words)
    parser.add_argument("--figure", type=Path, metavar="PNG", help="where to draw the models over relative depth")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
