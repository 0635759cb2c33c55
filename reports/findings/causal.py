"""The costs of edits in one model, as the tables of ``docs/findings.md``."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.causal.costs import Causal
from analysis.errors import UserError
from analysis.storage.files import AGREEMENT, COSTS, REPLACEABLE, RUN_FILE
from reports.markdown import markdown, short

N_DEPTHS = 6
"""Approximate number of depths shown of each cumulative series; ``causal.csv`` has all of them."""
Row = dict[Any, Any]


def causal_tables(directory: Path) -> Iterator[str]:
    """The paragraphs and tables of one run."""
    causal = Causal.load(directory)
    if causal is None or causal.sweep is None:
        raise UserError(f"{directory} has no exact sweep: analyze with --causal exact or both")
    document = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    model, sweep = document["model"], causal.sweep
    table = pd.read_csv(directory / COSTS)
    counted, everywhere = (table[table["positions"] == positions] for positions in ("counted", "all"))
    effort, base = sweep.effort(), float(sweep.base.sum() / sweep.n_tokens.sum())
    yield f"### {model['name']}"
    yield (
        f"{model['architecture']}, {model['weights']}, {model['dtype']}; {len(sweep.n_tokens)} sequences of "
        f"{document['settings']['context']} tokens, {int(sweep.n_tokens.sum())} scored, cross-entropy {base:.3f} nats per "
        f"token. The sweep took {effort['block_passes']:.0f} passes through the blocks and "
        f"{effort['unembedding_passes']:.0f} through the unembedding over that text, {effort['seconds'] / 60:.0f} minutes "
        f"of wall time (one full pass: {effort['seconds_of_one_pass']:.1f} s)."
    )
    checks = sweep.checks(model["dtype"])
    listed = [f"{check.what}: {check.value:.1e} (limit {check.limit:.0e})" for check in checks]
    yield "Controls: " + "; ".join(listed) + "."
    yield "**KL, nats per token, counted positions; in parentheses the placebo of the same size.**"
    yield _by_layer(counted, lambda row: f"{short(row['kl'])} ({short(row['kl_placebo'])})")
    yield "**ΔCE ± standard error over sequences, nats per token, counted positions.**"
    yield _by_layer(counted, lambda row: f"{row['dce']:+.3f} ± {row['dce_se']:.3f}")
    yield "**KL if the uncounted positions, mostly the first token, are edited too.**"
    yield _by_layer(everywhere, lambda row: short(row["kl"]))
    yield "**Layers edited together, counted positions: KL, nats per token.**"
    yield _together(counted)
    yield "**Whole layers that can be replaced (KL plus two standard errors below ε), and first-order counts of neurons.**"
    yield _replaceable(pd.read_csv(directory / REPLACEABLE))
    if (directory / AGREEMENT).exists():
        yield "**Attribution against exact ΔCE.**"
        yield _agreement(pd.read_csv(directory / AGREEMENT))


def _by_layer(table: pd.DataFrame, cell: Callable[[Row], str]) -> str:
    """One line per layer, one column per edit."""
    edits = list(dict.fromkeys(table["edit"]))
    cells = {(row["layer"], row["edit"]): cell(row) for row in table.to_dict("records")}
    rows = [[str(layer), *(cells[layer, edit] for edit in edits)] for layer in dict.fromkeys(table["layer"])]
    return markdown(["layer", *edits], rows)


def _together(table: pd.DataFrame) -> str:
    """A few depths of both cumulative series, and all layers at once."""
    layers = sorted(map(int, table["layer"].unique()))
    chosen = layers[:: max(1, len(layers) // N_DEPTHS)]
    by_place = table.set_index(["layer", "edit"])
    edits = list(dict.fromkeys(table["edit"]))

    def line(title: str, layer: int, column: str) -> list[str]:
        return [title, *(short(by_place.loc[(layer, edit), column]) for edit in edits)]

    rows = [line(f"{layers[0]}–{layer}", layer, "kl_bottom") for layer in chosen[1:] if layer != layers[-1]]
    rows += [line(f"{layer}–{layers[-1]}", layer, "kl_top") for layer in chosen[1:]]
    return markdown(["layers", *edits], [*rows, line("all", layers[-1], "kl_bottom")])


def _replaceable(table: pd.DataFrame) -> str:
    rows = []
    for (edit, epsilon), group in table.groupby(["edit", "epsilon"]):
        whole = ", ".join(str(layer) for layer in group.loc[group["whole_layer"].astype(bool), "layer"]) or "none"
        neurons = f"{group['neurons'].sum() / group['of'].sum():.0%}" if "neurons" in group else ""
        rows.append([str(edit), f"{epsilon:g}", whole, neurons])
    return markdown(["replacement", "ε", "whole layers", "neurons, layer by layer"], rows)


def _agreement(table: pd.DataFrame) -> str:
    rows = [
        [str(row["over"]), str(row["n"]), f"{row['rank_correlation']:.2f}", f"{row['exact_per_predicted']:.2f}"]
        for row in table.to_dict("records")
        if not str(row["over"]).startswith("neurons of layer")
    ]
    return markdown(["over", "n", "rank correlation", "exact per predicted"], rows)
