"""The costs of edits in words and as a table for the terminal."""

from collections.abc import Iterator

import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis.causal.costs import Causal, Sweep
from reports.causal.tables import column_name

N_NAMED = 3
"""Layers named at each end of the ranking."""


def print_costs(causal: Causal, layers: pd.DataFrame, dtype: str, console: Console) -> None:
    """Print sentences and a table by layer; ``layers`` is the table of layers including its columns of costs."""
    console.print()
    for sentence in sentences(causal, layers):
        console.print(sentence, highlight=False, markup=False)
    if causal.sweep is not None:
        console.print()
        console.print(cost_table(causal.sweep, layers))
    for check in causal.checks(dtype):
        if not check.passed:
            failed = f"! check failed: {check}"
            console.print(failed, highlight=False, markup=False)


def sentences(causal: Causal, layers: pd.DataFrame) -> Iterator[str]:
    """The costs in words."""
    tokens = causal.record["tokens_scored"]
    sweep, attribution = causal.sweep, causal.attribution
    if attribution is not None:
        base = float(attribution.base.sum() / attribution.n_tokens.sum())
        edit = attribution.edits[0]
        name = f"attribution_{column_name(edit)}"
        worst = layers.loc[layers[name].abs().idxmax()]
        yield (
            f"To first order, on {tokens:,} tokens (cross-entropy {base:.3f} nats per token), {edit} changes the loss most "
            f"in layer {int(worst['layer'])}: {worst[name]:+.3f} nats. This is reliable for single neurons, "
            "not for whole layers: use --causal exact."
        )
    if sweep is not None:
        effort = sweep.effort()
        for edit in sweep.edits:
            yield _ranking(edit, layers)
        yield (
            f"The sweep took {effort['block_passes']:.0f} passes through the blocks and {effort['unembedding_passes']:.0f} "
            f"through the unembedding over {tokens:,} tokens, {effort['seconds']:.0f} s "
            f"(one full pass: {effort['seconds_of_one_pass']:.1f} s)."
        )


def cost_table(sweep: Sweep, layers: pd.DataFrame) -> Table:
    """KL of every edit on counted positions, one line per layer."""
    table = Table(title="KL, nats per token", header_style="bold", box=None, padding=(0, 1, 0, 0))
    for title in ("layer", *sweep.edits):
        table.add_column(title.replace("-", "\n").replace(":", "\n"), justify="right", no_wrap=True)
    for _, row in layers.iterrows():
        cells = [f"{row[f'kl_{column_name(edit)}']:.2g}" for edit in sweep.edits]
        table.add_row(str(int(row["layer"])), *cells)
    return table


def _ranking(edit: str, layers: pd.DataFrame) -> str:
    name = f"kl_{column_name(edit)}"
    ordered = layers.sort_values(name)
    above = int((layers[name] > layers[f"{name}_placebo"]).sum())
    lowest, highest = (
        ", ".join(f"{int(row['layer'])} ({row[name]:.2g})" for _, row in rows.iterrows())
        for rows in (ordered.head(N_NAMED), ordered.tail(N_NAMED).iloc[::-1])
    )
    return (
        f"{edit}: KL lowest in layer {lowest}, highest in {highest}; above its placebo in {above} of {len(layers)} layers."
    )
