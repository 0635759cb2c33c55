"""Measure how gated MLPs break the symmetries of rank-1 bilinear attention: the command line.

Exit codes: 0 done, 1 a check failed (files are written and say which), 2 bad input, 130 interrupted.
"""

import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import UserError
from analysis.storage.files import PROGRESS
from analysis.storage.staged_writes import check_writable
from hooks.loading.builtin import BUILTINS, DEFAULT_MODEL

if TYPE_CHECKING:
    from analysis.full_run import FullRun
    from analysis.run import Run

MAX_LAYERS = 10_000


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
Force = Annotated[bool, typer.Option("--force", help="Write into a directory that holds other files.")]
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
    """Ctrl-C reports how many layers of a sweep have been kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        finished = len(list(folder.glob("layer-*.safetensors")))
        if not finished:
            raise
        print(f"interrupted: {finished} layers are kept, continue with the same command and --resume", file=sys.stderr)
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
    draws: Annotated[int, typer.Option(min=1, max=64, help="Random permutations of neurons for the null.")] = 4,
    output_share: Annotated[
        float | None,
        typer.Option(help="Share of the tokens on which layers' outputs are compared; default 1, or about 4,096 tokens."),
    ] = None,
    null: Annotated[
        Null | None, typer.Option(help="random-init: also run the same architecture with fresh random weights.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of permutations, placebos and random weights.")] = 0,
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
        typer.Option(min=1, help="Tokens for --causal, in whole windows, at least two; default 1024, or 512 with a sweep."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an exact sweep that was interrupted.")] = False,
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
    from hooks.measure import measure

    _announce(quiet)
    with sweep_kept(directory / PROGRESS):
        full = measure(
            model, corpus=corpus, tokens=tokens, context=context, skip_positions=skip_positions, shard=shard, layers=wanted,
            alphas=scales, draws=draws, output_share=output_share, batch_size=batch_size, seed=seed,
            random_weights=null is Null.RANDOM_INIT, causal=causal, edits=edits, causal_tokens=causal_tokens,
            progress=directory / PROGRESS, resume=resume, device=device, dtype=dtype, revision=revision,
            trust_remote_code=trust_remote_code, quiet=quiet,
        )  # fmt: skip
    _write(replace(full, run=_with_command(full.run)), directory, force, quiet, as_json)


@app.command()
@errors_reported()
def merge(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs of one model on different shards or texts.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Add runs of the same model on different tokens: the result is the run of all tokens together."""
    check_writable(out, force)
    from analysis.full_run import FullRun
    from analysis.run import Run
    from reports.directory import load_random

    loaded = [Run.load(directory) for directory in runs]
    random = [load_random(directory, run) for directory, run in zip(runs, loaded, strict=True)]
    whole = [run for run in random if run is not None]
    if whole and len(whole) < len(runs):
        raise UserError(f"{len(whole)} of {len(runs)} runs have a random-init null: make it for all of them, or for none")
    merged = FullRun(_with_command(Run.merge(loaded)), random=Run.merge(whole) if whole else None)
    _write(merged, out, force, quiet)


@app.command()
@errors_reported()
def report(
    run: Annotated[Path, typer.Argument(help="Directory of a saved run; neither model nor TransformerLens is needed.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write; default the run's own.")] = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Redraw the tables, figures and report.html of a saved run."""
    from analysis.full_run import FullRun
    from analysis.run import Run
    from reports.directory import load_causal, load_random

    loaded, directory = Run.load(run), out or run
    check_writable(directory, force)
    full = FullRun(loaded, load_causal(run), load_random(run, loaded))
    _write(full, directory, force, quiet, as_json)


@app.command()
@errors_reported()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs; the first is the reference.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    force: Force = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare runs side by side: layer by layer if the shapes agree, else by relative depth."""
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
        Path | None, typer.Option(help="A run of this model to take the layer's numbers, and costs of edits, from.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the permutations.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="HTML file; default out/<model>-<LAYER>-<INDEX>.html.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a page of a neuron.")] = False,
    quiet: Quiet = False,
) -> None:
    """Show one neuron as a page: its response, contexts, vocabulary and rank in its layer."""
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
    """Check the theory's claims about every form, symmetry and activation; needs no model."""
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
            raise UserError(f"layers {part.strip()} is not a range of layers: write the smaller index first")
        chosen += range(int(first), int(last or first) + 1)
    return chosen


def parse_alphas(text: str) -> list[float]:
    """'-1,0.5,2' as a list of scales."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"alphas {text!r} is not a list of numbers: write it like -1,0.5,2") from error


def _write(full: "FullRun", directory: Path, force: bool, quiet: bool, as_json: bool = False) -> None:
    """Write the directory, show the summary, and exit with 1 if a check failed."""
    from rich.console import Console

    from reports.causal.summary import print_costs
    from reports.directory import write_directory
    from reports.run.document import summary_json
    from reports.run.terminal import print_summary

    tables = write_directory(full.run, directory, force, full.random, full.causal)
    shutil.rmtree(directory / PROGRESS, ignore_errors=True)
    if as_json:
        print(summary_json(full.run, tables, directory))
    elif not quiet:
        print_summary(full.run, tables, directory, Console())
        if full.causal is not None:
            print_costs(full.causal, tables.layers, full.run.model["dtype"], Console())
    if not full.passed:
        raise typer.Exit(1)


def _with_command(run: "Run") -> "Run":
    """The run with the command line that made it in its record."""
    return replace(run, record=run.record | {"command": _command()})


def _command() -> str:
    """The command line; bytes of it that are no UTF-8 as escapes."""
    words = [*(["python"] if sys.argv[0].endswith(".py") else []), Path(sys.argv[0]).name, *sys.argv[1:]]
    return shlex.join(words).encode("utf-8", "backslashreplace").decode("utf-8")


def _announce(quiet: bool) -> None:
    """Let the loading of models report its progress on stderr."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("hooks").setLevel(logging.ERROR if quiet else logging.INFO)


if __name__ == "__main__":
    app()
