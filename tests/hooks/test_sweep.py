"""The sweep against whole passes of a plain model whose MLP was changed by hand, sums taken term by term in float64."""

import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from analysis.causal.costs import Causal, Sweep, error_per_token, per_token
from analysis.causal.edits import Edit, make_edit
from analysis.errors import UserError
from analysis.noise import directions
from analysis.run import Run
from analysis.storage.progress import Progress
from analysis.sums.moments import Moments
from hooks.causal import evenly_spaced, measure_causal
from hooks.collect import analyze
from hooks.corpus import Window
from hooks.models import LoadedModel
from hooks.patching.edit_coefficients import fit_coefficients
from hooks.patching.sweep import _Steps, sweep
from reports.causal.tables import CausalTables
from reports.directory import tables_of, write_directory
from tests.helpers.by_hand import by_hand, edit_by_hand, only, plain_model

NAMES = ("exchange", "scale:2", "relu-limit", "zero")
SEED = 4


@pytest.fixture(scope="module")
def run(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(context=24, max_tokens=120), quiet=True)


@pytest.fixture(scope="module")
def windows(llama: LoadedModel) -> tuple[Window, ...]:
    return llama.read(context=24, max_tokens=120).windows[1:4]


@pytest.fixture(scope="module")
def edits(llama: LoadedModel, run: Run, windows: tuple[Window, ...]) -> dict[int, dict[str, Edit]]:
    coefficients = fit_coefficients(llama, windows, run)
    return {layer: {name: make_edit(name, fit) for name in NAMES} for layer, fit in coefficients.items()}


@pytest.fixture(scope="module")
def swept(llama: LoadedModel, windows: tuple[Window, ...], edits: dict[int, dict[str, Edit]]) -> Sweep:
    return sweep(llama, windows, edits, seed=SEED)


def costs_by_hand(plain: nn.Module, window: Window, units: dict) -> tuple[float, float, float]:
    """Σ KL, Σ ΔCE and Σ CE over the tokens that are counted and followed by another."""
    with torch.no_grad():
        clean = torch.log_softmax(plain(window.tokens[None]).logits[0].double(), -1)
        with by_hand(plain, units):
            edited = torch.log_softmax(plain(window.tokens[None]).logits[0].double(), -1)
    kl, rise, base = [], [], []
    for t in range(window.counted_from, len(window.tokens) - 1):
        target = window.tokens[t + 1]
        kl += (clean[t].exp() * (clean[t] - edited[t])).tolist()
        rise.append(float(clean[t, target] - edited[t, target]))
        base.append(-float(clean[t, target]))
    return math.fsum(kl), math.fsum(rise), math.fsum(base)


def counted(window: Window) -> Tensor:
    return torch.tensor([t >= window.counted_from for t in range(len(window.tokens))])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_costs_are_those_of_whole_passes_done_by_hand(
    tiny_llama: Path, swept: Sweep, windows: tuple[Window, ...], layer: int
) -> None:
    plain, found = plain_model(tiny_llama), swept.layers[layer]
    for s, window in enumerate(windows):
        for e, name in enumerate(NAMES):
            unit = edit_by_hand(name)
            on_counted = only(counted(window), unit)
            cases = {
                "counted": ({layer: on_counted}, found.single[:, e, 0, 0, s]),
                "all": ({layer: unit}, found.single[:, e, 0, 1, s]),
                "bottom": (dict.fromkeys(range(layer + 1), on_counted), found.bottom[:, e, s]),
                "top": (dict.fromkeys(range(layer, 3), on_counted), found.top[:, e, s]),
            }
            for case, (units, (kl, dce)) in cases.items():
                expected = costs_by_hand(plain, window, units)
                assert kl.item() == pytest.approx(expected[0], rel=1e-3), (name, case)
                assert dce.item() == pytest.approx(expected[1], rel=1e-3, abs=1e-3), (name, case)
        base = costs_by_hand(plain, window, {})[2]
        assert swept.base[s].item() == pytest.approx(base, rel=1e-6)
        assert found.base[s].item() == pytest.approx(base, rel=1e-6)
        assert swept.n_tokens[s] == len(window.tokens) - 1 - window.counted_from


def test_placebos_are_as_large_and_only_where_the_edit_is(
    tiny_llama: Path, swept: Sweep, windows: tuple[Window, ...]
) -> None:
    plain, layer = plain_model(tiny_llama), 1
    for s, window in enumerate(windows):
        noise = directions(SEED, layer, window.index, len(window.tokens), 48)

        def moved(seen: SimpleNamespace, noise: Tensor = noise) -> Tensor:
            edited = edit_by_hand("exchange")(seen)
            far = [float((edited - seen.h)[0, t].norm() / noise[t].norm()) for t in range(len(noise))]
            return seen.h + torch.tensor(far)[:, None] * noise

        for p, unit in enumerate((only(counted(window), moved), moved)):
            kl, dce, _ = costs_by_hand(plain, window, {layer: unit})
            assert swept.layers[layer].single[0, 0, 1, p, s].item() == pytest.approx(kl, rel=1e-3)
            assert swept.layers[layer].single[1, 0, 1, p, s].item() == pytest.approx(dce, rel=1e-3, abs=1e-3)


def test_controls_and_the_cost_of_the_sweep(swept: Sweep) -> None:
    assert all(check.passed for check in swept.checks("float32"))
    assert min(float(costs.single[0].min()) for costs in swept.layers.values()) >= -1e-9
    effort, n_edits = swept.effort(), len(NAMES)
    assert effort["unembedding_passes"] == 3 * (6 * n_edits + 2)
    assert effort["block_passes"] == (3 + 2 + 1) / 3 * (6 * n_edits + 2)
    assert swept.layers[2].bottom.equal(swept.layers[0].top) or torch.allclose(
        swept.layers[2].bottom, swept.layers[0].top, rtol=1e-4, atol=1e-4
    )


def test_a_control_that_costs_something_is_seen(swept: Sweep) -> None:
    layers = {i: type(c)(**{**vars(c), "control": c.control + 1e-3, "base": c.base + 1}) for i, c in swept.layers.items()}
    broken = Sweep(swept.edits, swept.n_tokens, swept.base, layers, swept.n_blocks, swept.clean_seconds)
    assert [check.passed for check in broken.checks("float32")] == [False, False]


@pytest.mark.parametrize("kept", [1, 2])
def test_an_interrupted_sweep_goes_on_where_it_was(
    llama: LoadedModel,
    windows: tuple[Window, ...],
    edits: dict[int, dict[str, Edit]],
    swept: Sweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
) -> None:
    steps, step = [], _Steps.step

    def counting(self: _Steps, layer: int) -> object:
        if len(steps) == kept and not resumed:
            raise KeyboardInterrupt
        steps.append(layer)
        return step(self, layer)

    monkeypatch.setattr(_Steps, "step", counting)
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        sweep(llama, windows, edits, seed=SEED, progress=Progress.open(tmp_path / "p", {}, resume=False))
    resumed = True
    again = sweep(llama, windows, edits, seed=SEED, progress=Progress.open(tmp_path / "p", {}, resume=True))
    assert steps == [0, 1, 2]
    for layer, costs in again.layers.items():
        for name in ("single", "bottom", "top", "control", "base"):
            expected = getattr(swept.layers[layer], name)
            torch.testing.assert_close(getattr(costs, name), expected, rtol=1e-4, atol=1e-4, msg=name)


def test_some_layers_only(llama: LoadedModel, windows: tuple[Window, ...], edits: dict, swept: Sweep) -> None:
    """Layers left out stay as they are; the cumulative series is over those named."""
    some = sweep(llama, windows, {0: edits[0], 2: edits[2]}, seed=SEED)
    torch.testing.assert_close(some.layers[2].single, swept.layers[2].single, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(some.layers[2].bottom, some.layers[0].top, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(some.layers[0].top, swept.layers[0].top, rtol=1e-2)


def test_fits_are_least_squares(tiny_llama: Path, llama: LoadedModel, run: Run, windows: tuple[Window, ...]) -> None:
    plain, seen = plain_model(tiny_llama, torch.float64), []
    plain.model.layers[1].mlp.register_forward_hook(lambda module, x, _: seen.append(x[0][0]))
    with torch.no_grad():
        for window in windows:
            plain(window.tokens[None])
        x = torch.cat([rows[w.counted_from :] for rows, w in zip(seen, windows, strict=True)])
        mlp = plain.model.layers[1].mlp
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    h, placed = torch.nn.functional.silu(gate) * up, torch.nn.functional.silu(gate * up)
    fit = fit_coefficients(llama, windows, run)[1]
    torch.testing.assert_close(fit.mean, h.mean(dim=0), rtol=1e-4, atol=1e-5)
    for j in range(0, 48, 7):
        c = torch.linalg.lstsq(placed[:, j : j + 1], h[:, j]).solution.item()
        assert fit.placement[j].item() == pytest.approx(c, rel=1e-4)
    moments: Moments = run.layers[1].moments
    torch.testing.assert_close(fit.bilinear, moments.neuron["h_ab"] / moments.neuron["abab"])
    assert torch.equal(fit.balance, run.layers[1].geometry.balance)


def test_windows_are_spread_evenly(windows: tuple[Window, ...]) -> None:
    many = [Window(i, torch.arange(10), 1) for i in range(20)]
    assert [window.index for window in evenly_spaced(many, 50)] == [0, 4, 8, 12, 16]
    assert [window.index for window in evenly_spaced(many, 1)] == [0, 10]
    assert len(evenly_spaced(many, 10_000)) == 20
    short = Window(3, torch.arange(10), 9)  # its only counted token has none after it
    assert [window.index for window in evenly_spaced([short, *many[4:6]], 100)] == [4, 5]
    with pytest.raises(UserError, match="no window has a counted token with another after it"):
        evenly_spaced([short], 100)


@pytest.fixture(scope="module")
def causal(llama: LoadedModel, run: Run) -> Causal:
    corpus, edits = llama.read(context=24, max_tokens=120), ("exchange", "flip", "scale:2", "relu-limit", "mean", "zero")
    return measure_causal(llama, corpus, run, mode="both", edits=edits, n_tokens=72, seed=SEED)


def test_what_was_found_is_saved_and_loaded(causal: Causal, run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    causal.write(tmp_path / "run")
    loaded = Causal.load(tmp_path / "run")
    assert loaded is not None
    assert loaded.record == causal.record
    for part in ("attribution", "sweep"):
        mine, theirs = getattr(causal, part), getattr(loaded, part)
        assert (mine.edits, list(mine.layers)) == (theirs.edits, list(theirs.layers))
        assert torch.equal(mine.n_tokens, theirs.n_tokens)
        assert torch.equal(mine.base, theirs.base)
        for layer in mine.layers:
            for name, values in vars(mine.layers[layer]).items():
                assert torch.equal(values, getattr(theirs.layers[layer], name)), name
    assert loaded.sweep.effort() == causal.sweep.effort()
    assert all(torch.equal(x, getattr(loaded.single_neurons, name)) for name, x in vars(causal.single_neurons).items())
    (tmp_path / "run" / "moments.safetensors").write_bytes(b"of another run")
    with pytest.raises(UserError, match="belongs to another run"):
        Causal.load(tmp_path / "run")


def test_tables_hold_the_means_of_the_sums(causal: Causal, run: Run) -> None:
    tables = tables_of(run)
    shown = CausalTables.of(causal, tables)
    sweep, attribution = causal.sweep, causal.attribution
    assert len(shown.costs) == 3 * 6 * 2
    rows = shown.costs.set_index(["layer", "edit", "positions"])
    for layer in range(3):
        for e, edit in enumerate(sweep.edits):
            for p, positions in enumerate(("counted", "all")):
                row = rows.loc[layer, edit, positions]
                for q, quantity in enumerate(("kl", "dce")):
                    for v, version in enumerate(("", "_placebo")):
                        sums = sweep.layers[layer].single[q, e, v, p]
                        assert row[quantity + version] == pytest.approx(per_token(sums, sweep.n_tokens).item())
                        error = error_per_token(sums, sweep.n_tokens).item()
                        assert row[f"{quantity}{version}_se"] == pytest.approx(error)
            row = rows.loc[layer, edit, "counted"]
            total = attribution.neurons(layer)[e].sum().item()
            assert row["attribution"] == pytest.approx(total, abs=1e-12)
            assert row["kl_bottom"] == pytest.approx(per_token(sweep.layers[layer].bottom[0, e], sweep.n_tokens).item())
            assert row["dce_top"] == pytest.approx(per_token(sweep.layers[layer].top[1, e], sweep.n_tokens).item())
    assert rows.loc[1, "exchange", "counted"]["asymmetry"] == tables.layers["exchange"][1]
    curve = tables.curves.set_index(["layer", "alpha"])["asymmetry"]
    assert rows.loc[1, "relu-limit", "counted"]["asymmetry"] == curve[1, math.inf]
    ratio = rows.loc[1, "flip", "all"]["kl"] / tables.layers["scaling_flip"][1]
    assert rows.loc[1, "flip", "all"]["kl_per_asymmetry"] == pytest.approx(ratio)
    assert math.isnan(rows.loc[1, "zero", "counted"]["asymmetry"])
    joined = shown.joined_to(tables)
    assert joined.layers["kl_scale_2_placebo"][2] == rows.loc[2, "scale:2", "counted"]["kl_placebo"]
    neuron = joined.neurons.set_index(["layer", "neuron"]).loc[2, 7]
    assert neuron["attribution_flip"] == attribution.neurons(2)[sweep.edits.index("flip"), 7].item()
    per = neuron["attribution_exchange"] / neuron["exchange"]
    assert neuron["attribution_exchange_per_asymmetry"] == pytest.approx(per)


def test_what_can_be_replaced(causal: Causal, run: Run) -> None:
    shown = CausalTables.of(causal, tables_of(run))
    e = causal.attribution.edits.index("relu-limit")
    for row in shown.replaceable[shown.replaceable["edit"] == "relu-limit"].itertuples():
        sizes, total, number = sorted(causal.attribution.neurons(row.layer)[e].abs().tolist()), 0.0, 0
        for size in sizes:
            total += size
            number += total < row.epsilon
        assert (row.neurons, row.of) == (number, 48)
        costs = shown.costs.set_index(["layer", "edit", "positions"]).loc[row.layer, "relu-limit", "counted"]
        assert row.whole_layer == (costs["kl"] + 2 * costs["kl_se"] < row.epsilon)


def test_costs_of_an_earlier_run_do_not_stay(
    causal: Causal, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.directory.DPI", 20)
    monkeypatch.setattr("reports.directory.draw_all", lambda _: {})

    def names() -> set[str]:
        return {path.name for path in (tmp_path / "run").rglob("*causal*")}

    write_directory(run, tmp_path / "run", causal=causal)
    assert {"causal.csv", "causal.safetensors", "causal_neurons.csv", "causal_cost.png", "causal_alpha.png"} <= names()
    first_order = Causal(causal.record, causal.attribution)
    write_directory(run, tmp_path / "run", causal=first_order)
    assert names() == {"causal.csv", "causal.safetensors", "causal_replaceable.csv"}
    assert "kl" not in pd.read_csv(tmp_path / "run" / "causal.csv")
    write_directory(run, tmp_path / "run")
    assert names() == set()
    assert Causal.load(tmp_path / "run") is None


def test_edits_that_do_not_exist_for_the_unit(llama: LoadedModel, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.units.registry.GatedUnit.limits", property(lambda _: ()))
    with pytest.raises(UserError, match=r"relu-limit does not exist for silu: leave it out of --edits"):
        measure_causal(llama, llama.read(context=24, max_tokens=60), run, mode="exact", edits=["exchange", "relu-limit"])
