"""The closing summary on a terminal: what was measured, the verdict in words, a table by layer, what stands out."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis.run import Run

OUTLIER = 3.5
"""Modified z-score above which a layer stands out among the layers (Iglewicz & Hoaglin 1993)."""
SINK_SHARE = 0.1
"""A layer in which one token holds more than this share of the energy speaks of that token."""
CHANCE = 0.5
COLUMNS = {
    "exchange": "exchange",
    "exchange_se": "±",
    "exchange_token_median": "token\nmedian",
    "exchange_null_gaussian": "Gauss\nnull",
    "exchange_balanced": "balanced",
    "scaling_double": "scale\nα = 2",
    "scaling_flip": "flip\nα = −1",
    "euler_residual": "Euler",
    "bilinear_share": "bilinear\nshare",
    "top_token_share": "top\ntoken",
}


def print_summary(run: Run, layers: pd.DataFrame, directory: Path, console: Console) -> None:
    """Print the verdict, the table of layers, and where the files are."""
    console.print()
    for sentence in verdict(run, layers):
        console.print(sentence, highlight=False, markup=False)
    console.print()
    console.print(layer_table(layers))
    for sentence in remarks(run, layers):
        console.print(f"! {sentence}", highlight=False, markup=False)
    console.print(f"files are in {directory}/", highlight=False, markup=False, soft_wrap=True)


def verdict(run: Run, layers: pd.DataFrame) -> Iterator[str]:
    """Plain sentences made from the numbers; a sentence whose numbers are missing is left out."""
    model, tokens = run.model, sum(part["tokens_counted"] for part in run.corpus)
    yield (
        f"{model['name']} ({model['weights']}; {model['dtype']}): {len(layers)} of {model['n_layers']} layers, "
        f"gate {', '.join(model['units'])}, {tokens:,} tokens counted."
    )
    yield (
        f"Exchanging gate and up: asymmetry {_span(layers['exchange'])} (0 = no change, {CHANCE} = unrelated); "
        f"{_degree(layers['exchange'])} broken, most in layer {_at_max(layers, 'exchange')}. "
        f"With up brought to the size and side of gate: {_span(layers['exchange_balanced'])}."
    )
    if layers["scaling_double"].notna().all():
        yield (
            f"Scaling gate by 2 and up by ½: asymmetry {_span(layers['scaling_double'])}; "
            f"{_degree(layers['scaling_double'])} broken."
        )
    if layers["scaling_flip"].notna().all():
        yield f"Flipping both signs: {_span(layers['scaling_flip'])}; {_degree(layers['scaling_flip'])} broken."
    share = layers["bilinear_share"]
    spread = f"{share.min():.0%} to {share.max():.0%}"
    yield f"A purely bilinear unit c·ab explains {share.median():.0%} of the energy (layers {spread})."


def remarks(run: Run, layers: pd.DataFrame) -> Iterator[str]:
    """What a reader must know before believing a number: outliers, sinks, failed checks, skipped layers."""
    for row in layers.itertuples():
        if row.top_token_share > SINK_SHARE:
            yield f"layer {row.layer}: one token holds {row.top_token_share:.0%} of the energy; read the token median"
    for column in ("exchange", "scaling_double", "bilinear_share"):
        standing_out = _outliers(layers, column)
        if standing_out:
            listed = ", ".join(f"{layer} ({value:.3f})" for layer, value in standing_out)
            yield f"{column} stands out in layer {listed}; the median over layers is {layers[column].median():.3f}"
    for check in run.acceptance:
        if not check["passed"]:
            yield f"check failed: {check['check']}: {check['value']:.1e}, limit {check['limit']:.0e}"
    for layer, reason in run.skipped.items():
        yield f"layer {layer} was not analysed: {reason}"
    if any(part["cut_at_max_tokens"] for part in run.corpus):
        yield "the corpus was cut at --tokens"


def layer_table(layers: pd.DataFrame) -> Table:
    """The main columns, one line a layer; a layer that stands out is bold."""
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    bold = {layer for layer, _ in _outliers(layers, "exchange")}
    for _, row in layers.iterrows():
        cells = ["–" if pd.isna(row[column]) else f"{row[column]:.3f}" for column in COLUMNS]
        table.add_row(str(int(row["layer"])), *cells, style="bold" if row["layer"] in bold else "")
    return table


def _outliers(layers: pd.DataFrame, column: str) -> list[tuple[int, float]]:
    """Layers whose modified z-score exceeds ``OUTLIER``."""
    if layers[column].isna().all():
        return []
    distance = (layers[column] - layers[column].median()).abs()
    spread = 1.4826 * distance.median()
    found = layers[distance > OUTLIER * spread] if spread > 0 else layers.iloc[:0]
    return [(int(row["layer"]), float(row[column])) for _, row in found.iterrows()]


def _span(values: pd.Series) -> str:
    if len(values) == 1:
        return f"{values.iloc[0]:.3f}"
    return f"{values.median():.3f} (layers {values.min():.3f} to {values.max():.3f})"


def _at_max(layers: pd.DataFrame, column: str) -> str:
    values = layers[column]
    return "none" if values.isna().all() else str(int(layers.loc[values.idxmax(), "layer"]))


def _degree(values: pd.Series) -> str:
    """A word for the asymmetry of the median layer."""
    bounds = ((1e-6, "not"), (0.01, "hardly"), (0.05, "slightly"), (0.2, "moderately"))
    return next((word for bound, word in bounds if values.median() < bound), "strongly")
