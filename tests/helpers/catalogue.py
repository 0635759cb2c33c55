"""The table of families in docs/models.md, made from tiny random models.

`python -m tests.helpers.catalogue docs/models.md` writes it.

`python -m tests.helpers.catalogue FAMILY …` prints the lines of these alone, by their names in ``tests.helpers.tiny``.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from analysis.errors import UserError
from hooks.locating.expert_weights import ExpertWeights
from hooks.locating.norm_gains import NOTHING_AFTER, NOTHING_BEFORE
from hooks.locating.sites import Site
from hooks.models import LoadedModel
from tests.helpers.families import Families
from tests.helpers.tiny import FAMILIES

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADER = (
    "| family | g | gate and up | norm before | after | TransformerLens | verdict |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def table(families: Iterable[str], load: Callable[[str], LoadedModel]) -> str:
    """One line a family, from a model of it."""
    return "\n".join([HEADER, *(row(family, load) for family in families)])


def row(family: str, load: Callable[[str], LoadedModel]) -> str:
    """What a family's model says of itself when it is loaded, or why it is refused."""
    name = f"`{FAMILIES[family][0]}`" + (f" ({family})" if family in ("llama-bias", "relu") else "")
    try:
        model = load(family)
    except UserError as refusal:
        reason = str(refusal).partition("can be analysed: ")[2].partition(" (")[0]
        return f"| {name} | – | – | – | – | – | refused: {reason} |"
    sites = [*model.sites.values(), *(site for mixture in model.mixtures.values() for site in mixture.sites)]
    cells = [
        _each(layer.unit.name for layer in model.layers.values()),
        _each(_read(site) for site in sites),
        _each(_norm(site.gain_source) for site in sites),
        _each(_norm(site.value_gain_source) for site in sites),
        _view(model),
        _verdict(model),
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def _each(values: object) -> str:
    return "; ".join(dict.fromkeys(values))  # type: ignore[call-overload]


def _read(site: Site) -> str:
    if isinstance(site.weights, ExpertWeights):
        return f"computed from the experts' {'tables' if site.weights.expert_weights.is_flat else 'stacks'}"
    if site.projections.gate.module is not site.projections.up.module:
        return "two modules"
    return "halves of one module" if site.projections.gate.rows.step is None else "alternating rows of one module"


def _norm(source: str) -> str:
    return {NOTHING_BEFORE: "none", NOTHING_AFTER: "–"}.get(source, source)


def _view(model: LoadedModel) -> str:
    if model.bridge is None:
        return "no view"
    named = sum(bool(site.hook_names) for site in model.sites.values())
    return "hooks agree" if named == len(model.layers) else f"hooks agree in {named} of {len(model.layers)} layers"


def _verdict(model: LoadedModel) -> str:
    assert all(check.passed for check in model.acceptance)
    said = []
    if model.sites:
        said.append(f"{len(model.sites)} dense" if model.mixtures else f"{len(model.sites)} layers")
    for mixture in list(model.mixtures.values())[:1]:
        shared = " and a shared one" if mixture.shared else ""
        weighted = ", weighted by token" if mixture.shared and mixture.shared.token_gate else ""
        said.append(f"{len(model.mixtures)} with {len(mixture.routed)} experts{shared}{weighted}")
    return "read: " + ", ".join(said) + (f"; skipped {len(model.skipped)}" if model.skipped else "")


def written(document: str, lines: str) -> str:
    """The document with the table between its marks replaced."""
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    chosen = [name for name in sys.argv[1:] if name in FAMILIES]
    with tempfile.TemporaryDirectory() as folder:
        lines = table(chosen or FAMILIES, Families(Path(folder)).loaded)
    if chosen:
        print(lines)
        return
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main()
