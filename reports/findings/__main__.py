"""The tables and the figure of ``docs/findings.md``, made from saved runs:

    python -m reports.findings docs/findings.md --activations out/smollm2-135m out/gemma3-270m

Only the text between the marks of a part is replaced. A part is unchanged if no runs are given for it.
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
    """Write the tables of the runs into the file, and draw the figure."""
    options = _parser().parse_args(arguments)
    if not options.activations and (options.first or options.figure):
        raise UserError("--first and --figure need --activations: give the runs that they belong to")
    if not options.activations and not options.causal:
        raise UserError("no runs are given: add --activations, --causal or both")
    text = options.file.read_text(encoding="utf-8")
    if options.activations:
        found = found_in(options.activations, options.first, options.causal)
        text = written_into(text, "activations", "\n\n".join(activation_tables(found)))
        if options.figure:
            draw_families(found).savefig(options.figure, dpi=DPI)
    if options.causal:
        paragraphs = [paragraph for directory in options.causal for paragraph in causal_tables(directory)]
        text = written_into(text, "causal", "\n\n".join(paragraphs))
    options.file.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports.findings", description="Write the tables of docs/findings.md.")
    parser.add_argument("file", type=Path)
    runs = {
        "--activations": "one run per model, made with --null random-init",
        "--first": "runs of the same models made with --skip-positions 0",
        "--causal": "runs made with --causal exact or both",
    }
    for option, description in runs.items():
        parser.add_argument(option, type=Path, nargs="+", default=[], metavar="DIR", help=description)
    parser.add_argument("--figure", type=Path, metavar="PNG", help="file for the figure of the models by relative depth")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
