"""Measure how gated MLPs break the symmetries of rank-1 bilinear attention: the command line.

Arguments become a model, a model and a text become a run, a run becomes a directory. No mathematics is done here.
Exit codes: 0 done, 1 a check failed (of the model: files are written and say which), 2 bad input, 130 interrupted.
"""

import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import UserError
from analysis.storage.files import PROGRESS
from analysis.storage.staged_writes import check_writable
from hooks.loading.builtin import BUILTINS, DEFAULT_MODEL

if TYPE_CHECKING:
    from analysis.causal.costs import Causal
    from analysis.run import Run

MAX_LAYERS = 10_000
MAX_ALPHA = 1e4
"""Beyond it (αa, b/α) leaves float32; the limits are what such scales would show."""


class Null(str, Enum):
    """A null that needs a forward pass of its own."""

    RANDOM_INIT = "random-init"


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Model = Annotated[str, typer.Argument(help="Built-in name, hub id (org/name), directory, or .gguf file.")]
Tokens = Annotated[int, typer.Option(min=1, help="Stop after the window that reaches this many tokens.")]
Context = Annotated[int, typer.Option(min=2, help="Tokens in a window, BOS included.")]
SkipPositions = Annotated[int, typer.Option(min=0, help="Leading positions fed but not counted.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, spread (over all GPUs).")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]
Out = Annotated[Path | None, typer.Option(help="Directory to write; default out/<model>.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a directory that holds something else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON, everything else on stderr.")]


@contextmanager
def errors_reported() -> Iterator[None]:
    """One line and exit code 2 for a user's mistake; 130 for Ctrl-C."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        print("interrupted: nothing was written", file=sys.stderr)
        raise typer.Exit(130) from error


@contextmanager
def sweep_kept(folder: Path) -> Iterator[None]:
    """Ctrl-C during a sweep says what has been kept of it."""
    try:
        yield
    except KeyboardInterrupt as error:
        finished = len(list(folder.glob("layer-*.safetensors")))
        if not finished:
            raise
        print(f"interrupted: {finished} layers are kept, go on with the same call and --resume", file=sys.stderr)
        raise typer.Exit(130) from error


@app.command()
@errors_reported()
def analyze(
    model: Model = DEFAULT_MODEL,
    corpus: Annotated[
        str, typer.Option(help="'sample', a text file, or a dataset: name[:configuration][:split].")
    ] = "sample",
    tokens: Tokens = 20_000,
    layers: Annotated[str | None, typer.Option(help="Layers to analyze, like 0-5,11; default all.")] = None,
    context: Context = 256,
    skip_positions: SkipPositions = 1,
    alphas: Annotated[str, typer.Option(help="Scales α of (αa, b/α).")] = "-1,0.125,0.25,0.5,2,4,8",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows in one forward pass. [default: fits the memory]")
    ] = None,
    shard: Annotated[str, typer.Option(help="K/N: read every N-th window from K on; merge the runs afterwards.")] = "0/1",
    draws: Annotated[int, typer.Option(min=1, max=64, help="Random re-pairings of neurons for the null.")] = 4,
    null: Annotated[
        Null | None, typer.Option(help="random-init: also run the same architecture with fresh random weights.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of re-pairings, placebos and random weights.")] = 0,
    causal: Annotated[
        str | None,
        typer.Option(
            help="What edits cost: none, attribution (every neuron, first order; the default where the model predicts the "
            "next token), exact (every layer), both."
        ),
    ] = None,
    edits: Annotated[str | None, typer.Option(help="Edits, like exchange,scale:2; default the usual ones.")] = None,
    causal_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens for --causal, in whole windows, two at least; default 1024, or 512 with a sweep."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an exact sweep that was interrupted.")] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure every layer and neuron of a model on a text."""
    directory = out or default_directory(model)
    check_writable(directory, force)
    wanted, scales = parse_layers(layers), parse_alphas(alphas)
    from analysis.causal.edits import parse_edits
    from hooks.causal import MODES, measure_causal
    from hooks.collect import analyze as collect_run
    from hooks.corpus import check_windows
    from hooks.models import load_model

    check_windows(context, skip_positions, shard)
    chosen = None if edits is None else parse_edits(edits)
    if causal is not None and causal not in MODES:
        raise UserError(f"unknown --causal {causal!r}: choose one of {', '.join(MODES)}")
    if causal == "none" and (edits is not None or causal_tokens is not None):
        raise UserError("--edits and --causal-tokens say what --causal measures, which is none: leave them out")
    if resume and causal not in ("exact", "both"):
        raise UserError(
            f"--resume goes on with an exact sweep, not with --causal {causal or 'attribution'}: add --causal exact or both"
        )

    _announce(quiet)
    load = partial(load_model, model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    measure = partial(collect_run, layers=wanted, alphas=scales, draws=draws, batch_size=batch_size, seed=seed, quiet=quiet)
    subject = load()
    text = subject.read(corpus, context=context, skip_positions=skip_positions, max_tokens=tokens, shard=shard)
    run, found = measure(subject, text), None
    mode = causal or ("attribution" if subject.predicts or chosen or causal_tokens else "none")
    if mode != "none":
        with sweep_kept(directory / PROGRESS):
            found = measure_causal(
                subject, text, run, mode=mode, edits=chosen, n_tokens=causal_tokens, seed=seed,
                folder=directory / PROGRESS, resume=resume,
            )  # fmt: skip
    del subject  # one model at a time
    random = measure(load(random_seed=seed), text) if null is Null.RANDOM_INIT else None
    _write(_with_command(run), directory, force, quiet, random, found, as_json)


@app.command()
@errors_reported()
def merge(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs of one model on different shards or texts.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Add runs of equal provenance: the result is the run of all their tokens together."""
    check_writable(out, force)
    from analysis.run import Run
    from reports.directory import load_random

    loaded = [Run.load(directory) for directory in runs]
    random = [load_random(directory, run) for directory, run in zip(runs, loaded, strict=True)]
    whole = [run for run in random if run is not None]
    if whole and len(whole) < len(runs):
        raise UserError(f"{len(whole)} of {len(runs)} runs have a random-init null: make it for all of them, or for none")
    _write(_with_command(Run.merge(loaded)), out, force, quiet, Run.merge(whole) if whole else None)


@app.command()
@errors_reported()
def report(
    run: Annotated[Path, typer.Argument(help="Directory of a saved run; neither model nor TransformerLens is needed.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write; default the run's own.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make the tables, figures and report.html of a saved run anew."""
    from analysis.run import Run
    from reports.directory import load_causal, load_random

    loaded, directory = Run.load(run), out or run
    check_writable(directory, force)
    _write(loaded, directory, force, quiet, load_random(run, loaded), load_causal(run), as_json)


@app.command()
@errors_reported()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs; the first is the reference.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Set runs side by side: the same shape layer by layer, others on relative depth."""
    check_writable(out, force)
    from rich.console import Console

    from reports.compare.page import comparison_json, print_comparison, write_comparison
    from reports.compare.tables import compare as compared

    found = compared(runs)
    write_comparison(found, out, force)
    if as_json:
        print(comparison_json(found, out))
    elif not quiet:
        print_comparison(found, out, Console())
    if not found.passed:
        raise typer.Exit(1)


@app.command()
@errors_reported()
def neuron(
    model: Model,
    place: Annotated[
        str,
        typer.Argument(
            metavar="LAYER:INDEX", help="The neuron, numbers from 0, like 11:1229; LAYER:EXPERT:INDEX in a mixture."
        ),
    ],
    corpus: Annotated[str, typer.Option(help="As for analyze.")] = "sample",
    tokens: Tokens = 20_000,
    context: Context = 256,
    skip_positions: SkipPositions = 1,
    top: Annotated[int, typer.Option(min=1, max=100, help="Contexts of each sign pair, entries of every list.")] = 8,
    run: Annotated[
        Path | None, typer.Option(help="A run of this model: its numbers for the layer, and costs of edits if it has them.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the re-pairings.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="HTML file; default out/<model>-<LAYER>-<INDEX>.html.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is no page of a neuron.")] = False,
    quiet: Quiet = False,
) -> None:
    """Show one neuron: its response, contexts, vocabulary and place in its layer, as one page."""
    from hooks.corpus import check_windows
    from hooks.models import load_model
    from hooks.neuron import inspect_neuron, parse_neuron
    from reports.neuron.page import NeuronPage, check_page

    wanted, usual = parse_neuron(place), default_directory(model)
    page_file = out or usual.with_name(f"{usual.name}-{place.replace(':', '-')}.html")
    check_page(page_file, force)
    check_windows(context, skip_positions, "0/1")
    _announce(quiet)
    subject = load_model(model, device=device, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    text = subject.read(corpus, context=context, skip_positions=skip_positions, max_tokens=tokens)
    page = NeuronPage(inspect_neuron(subject, text, wanted, top=top, run=run, seed=seed, quiet=quiet), _command())
    page.write(page_file, force)
    if not quiet:
        print(f"{page!r}\nthe page is {page_file}")


@app.command()
@errors_reported()
def theory(
    activation: Annotated[str | None, typer.Option(help="One unit: silu, clamped(silu,10), ...; default all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for theory.csv and a figure; default none.")] = None,
    force: Force = False,
) -> None:
    """Check what theory says of every form, symmetry and activation; needs no model."""
    if out is not None:
        check_writable(out, force)
    from rich.console import Console

    from analysis.theory.claims import UNITS
    from analysis.units.registry import unit_named
    from reports.theory.tables import print_theory, theory_of, write_theory

    units = UNITS if activation is None else {activation: unit_named(activation)}
    found = theory_of(units)
    if out is not None:
        write_theory(found, units, out, force)
    if as_json:
        print(found.to_json())
    else:
        print_theory(found, Console())
    if not found.passed:
        raise typer.Exit(1)


@app.command()
def models() -> None:
    """List the built-in models."""
    for name, builtin in BUILTINS.items():
        default = ", the default" if name == DEFAULT_MODEL else ""
        print(f"{name:14} {builtin.title} ({builtin.megabytes} MB{default}); {builtin.weights_format}; {builtin.license}")


def default_directory(model: str) -> Path:
    """out/ and the model's own name; org/name becomes org--name."""
    return Path("out") / (Path(model).resolve().name if Path(model).exists() else model.replace("/", "--"))


def parse_layers(text: str | None) -> list[int] | None:
    """'0-5,11' as a list of indices."""
    if text is None:
        return None
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"layers {text!r} is not a list of indices and ranges: write it like 0-5,11")
        if not int(first) <= int(last or first) < MAX_LAYERS:
            raise UserError(f"layers {part.strip()} is no range of layers: write the smaller index first")
        chosen += range(int(first), int(last or first) + 1)
    return chosen


def parse_alphas(text: str) -> list[float]:
    """'-1,0.5,2' as a list of scales; 0 and ∞ are limits, added where they exist."""
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"alphas {text!r} is not a list of numbers: write it like -1,0.5,2") from error
    if not all(1 / MAX_ALPHA <= abs(scale) <= MAX_ALPHA for scale in scales):
        raise UserError(f"alphas {text!r} must lie between 1e-4 and 1e4: the limits 0 and ∞ are added where they exist")
    return scales


def _write(
    run: "Run",
    directory: Path,
    force: bool,
    quiet: bool,
    random: "Run | None" = None,
    causal: "Causal | None" = None,
    as_json: bool = False,
) -> None:
    from rich.console import Console

    from reports.causal.summary import print_costs
    from reports.directory import write_directory
    from reports.run.document import summary_json
    from reports.run.summary import print_summary

    tables = write_directory(run, directory, force, random, causal)
    shutil.rmtree(directory / PROGRESS, ignore_errors=True)
    if as_json:
        print(summary_json(run, tables, directory))
    elif not quiet:
        print_summary(run, tables, directory, Console())
        if causal is not None:
            print_costs(causal, tables.layers, run.model["dtype"], Console())
    checks = () if causal is None else causal.checks(run.model["dtype"])
    passed = all(each.passed for each in (run, random) if each is not None)
    if not passed or not all(check.passed for check in checks):
        raise typer.Exit(1)


def _with_command(run: "Run") -> "Run":
    """The run with the command line that made it in its record."""
    return replace(run, record=run.record | {"command": _command()})


def _command() -> str:
    """The command line; bytes of it that are no UTF-8 as escapes."""
    words = [*(["python"] if sys.argv[0].endswith(".py") else []), Path(sys.argv[0]).name, *sys.argv[1:]]
    return shlex.join(words).encode("utf-8", "backslashreplace").decode("utf-8")


def _announce(quiet: bool) -> None:
    """Let the loading of models say on stderr what it is doing."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("hooks").setLevel(logging.ERROR if quiet else logging.INFO)


if __name__ == "__main__":
    app()
