"""A saved run comes back bit for bit, shards merge to the whole, and a directory is never left half written."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from analysis.errors import UserError
from analysis.run import Run
from analysis.storage import staged_writes
from analysis.storage.files import MOMENTS_FILE
from analysis.storage.staged_writes import check_writable, is_run, staged
from analysis.sums.output_moments import OutputMoments
from analysis.units.registry import unit_named
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from tests.helpers.tiny import save_tiny


def read(model: LoadedModel, shard: str = "0/1", **options: object) -> Run:
    return analyze(model, model.read(context=32, max_tokens=320, shard=shard), quiet=True, **options)


@pytest.fixture(scope="module")
def run(llama: LoadedModel) -> Run:
    return read(llama)


def assert_same(first: Run, second: Run, exact: bool = True) -> None:
    assert list(first.layers) == list(second.layers)
    for index, layer in first.layers.items():
        ours, theirs = layer.moments.tensors(), second.layers[index].moments.tensors()
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            relative = 0.0 if exact or not values.is_floating_point() else 1e-6 if name == "neuron_groups" else 1e-12
            torch.testing.assert_close(values, theirs[name], rtol=relative, atol=relative, equal_nan=True, msg=name)
        assert layer.moments.layout == second.layers[index].moments.layout
        assert layer.unit == second.layers[index].unit
        assert layer.interaction_antisymmetry == second.layers[index].interaction_antisymmetry
        for name, values in layer.geometry.tensors().items():
            assert torch.equal(values, second.layers[index].geometry.tensors()[name])


def test_a_unit_with_parameters_comes_back_with_them(run: Run, tmp_path: Path) -> None:
    units = [unit_named(name) for name in ("multiplied(silu,0.3)", "top_k(gelu,0.95)", "gpt_oss(1.1,2.5)")]
    layers = {
        index: replace(layer, unit=unit, output=OutputMoments.empty(unit, 32))
        for unit, (index, layer) in zip(units, run.layers.items(), strict=True)
    }
    replace(run, layers=layers).save(tmp_path / "run")
    assert [layer.unit for layer in Run.load(tmp_path / "run").layers.values()] == units


def test_a_saved_run_comes_back(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "deep" / "er")
    loaded = Run.load(tmp_path / "deep" / "er")
    assert_same(run, loaded)
    for part in ("model", "settings", "corpus", "acceptance", "controls", "token_texts", "skipped", "record"):
        assert getattr(loaded, part) == getattr(run, part), part
    assert sorted(path.name for path in (tmp_path / "deep" / "er").iterdir()) == [MOMENTS_FILE, "run.json"]


def test_shards_merge_to_the_whole(llama: LoadedModel, run: Run) -> None:
    shards = [read(llama, shard=f"{k}/3") for k in (2, 0, 1)]
    merged = Run.merge(shards)
    assert_same(run, merged, exact=False)
    assert [part["shard"] for part in merged.corpus] == ["2/3", "0/3", "1/3"]
    assert len(merged.record["merged_from"]) == 3


def test_merging_leaves_its_inputs_alone(llama: LoadedModel) -> None:
    first, second = read(llama, shard="0/2"), read(llama, shard="1/2")
    before = [layer.moments.neuron.values.clone() for layer in first.layers.values()]
    Run.merge([first, second])
    assert all(torch.equal(b, layer.moments.neuron.values) for b, layer in zip(before, first.layers.values(), strict=True))


@pytest.mark.parametrize("other", ["0/1", "1/2", "2/4"])
def test_the_same_tokens_are_not_counted_twice(llama: LoadedModel, other: str) -> None:
    with pytest.raises(UserError, match="both runs counted the same [0-9]+ windows of sample"):
        Run.merge([read(llama, shard="0/2"), read(llama, shard="0/2" if other == "1/2" else other)])
    Run.merge([read(llama, shard="0/2"), read(llama, shard="1/4")])


def test_runs_of_different_things_do_not_merge(llama: LoadedModel, run: Run, tmp_path: Path) -> None:
    shard = read(llama, shard="0/2")
    for others, complaint in (
        (read(llama, shard="1/2", alphas=[2.0]), "differ in alphas"),
        (read(llama, shard="1/2", layers=[0]), "differ in layers"),
        (replace(read(llama, shard="1/2"), model={**run.model, "dtype": "bfloat16"}), "differ in dtype"),
    ):
        with pytest.raises(UserError, match=complaint):
            Run.merge([shard, others])
    other_model = load_model(str(save_tiny("llama", tmp_path / "llama", seed=1)), device="cpu")
    disguised = replace(read(other_model, shard="1/2"), model=run.model)
    with pytest.raises(UserError, match="other weights in the second run"):
        Run.merge([shard, disguised])
    with pytest.raises(UserError, match="needs at least two"):
        Run.merge([shard])


def test_a_run_that_is_not_whole_is_refused(run: Run, tmp_path: Path) -> None:
    def damaged(name: str) -> Path:
        run.save(tmp_path / name)
        return tmp_path / name

    with pytest.raises(UserError, match="is not a run: run.json is missing"):
        Run.load(tmp_path / "absent")
    folder = damaged("lost")
    (folder / MOMENTS_FILE).unlink()
    with pytest.raises(UserError, match=f"{MOMENTS_FILE} is missing"):
        Run.load(folder)
    folder = damaged("cut")
    data = (folder / MOMENTS_FILE).read_bytes()
    (folder / MOMENTS_FILE).write_bytes(data[:-8])
    with pytest.raises(UserError, match="is not the file that run.json describes"):
        Run.load(folder)
    for name, text in (("text", "{"), ("list", "[]"), ("empty", "{}")):
        folder = damaged(name)
        (folder / "run.json").write_text(text)
        with pytest.raises(UserError, match="is not a readable run"):
            Run.load(folder)
    folder = damaged("newer")
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**document, "schema": 99}))
    with pytest.raises(UserError, match="schema 99, this version reads 3"):
        Run.load(folder)


def test_missing_numbers_have_a_reason(llama: LoadedModel, run: Run) -> None:
    assert set(run.missing()) == {"output_*_raw"}
    few = analyze(llama, llama.read(context=32, max_tokens=32), alphas=[2.0], quiet=True)
    assert set(few.missing()) == {
        *("*_se", "scaling_half", "scaling_flip"),
        *("output_*_raw", "output_*_rank, output_antisymmetric_in_top10"),
    }
    layer = run.layers[0]
    silent = replace(layer.moments, neuron=replace(layer.moments.neuron, values=layer.moments.neuron.values.clone()))
    silent.neuron.values[silent.layout.rows["hh"], 3] = 0
    dead = replace(run, layers={0: replace(layer, moments=silent)})
    assert "1 in layer 0" in dead.missing()["neurons without energy"]


def test_a_directory_that_holds_something_else_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"holds something other than a run \(thesis.tex\)"):
        run.save(tmp_path)
    run.save(tmp_path, force=True)
    run.save(tmp_path)  # it is a run now
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    with pytest.raises(UserError, match="is a file"):
        check_writable(tmp_path / "thesis.tex")


def test_a_full_disk_leaves_what_was_there(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(tmp_path / "old")
    before = (tmp_path / "old" / "run.json").read_bytes()

    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    for target in ("old", "new"):
        with pytest.raises(UserError, match="No space left on device.*nothing was changed"):
            run.save(tmp_path / target)
    monkeypatch.undo()
    assert (tmp_path / "old" / "run.json").read_bytes() == before
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [MOMENTS_FILE, "run.json"]
    assert not (tmp_path / "new").exists()
    Run.load(tmp_path / "old")


def test_a_file_that_cannot_be_moved_leaves_all_as_before(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "z").write_text("a file where a folder has to be")
    with pytest.raises(UserError, match="nothing was changed"), staged(tmp_path) as folder:
        for name in (MOMENTS_FILE, "new.csv", "z/figure.png", "run.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
    (tmp_path / "z").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same(run, Run.load(tmp_path))


def test_a_full_disk_by_the_name_that_safetensors_gives_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("analysis.run.save_file", full)
    with pytest.raises(UserError, match="No space left on device.*nothing was changed"):
        run.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "damage",
    [{"layers": {}}, {"corpus": []}, {"corpus": [{"name": "x"}]}, {"acceptance": [{"check": "x"}]}, {"model": {}}],
    ids=lambda damage: next(iter(damage)),
)
def test_a_record_that_lacks_something_is_refused_when_it_is_read(run: Run, tmp_path: Path, damage: dict) -> None:
    run.save(tmp_path)
    document = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**document, **damage}))
    with pytest.raises(UserError, match="is not a readable run"):
        Run.load(tmp_path)


def test_the_beginning_of_a_text_is_not_counted_again(llama: LoadedModel) -> None:
    short, long = (analyze(llama, llama.read(context=32, max_tokens=n), quiet=True) for n in (64, 320))
    with pytest.raises(UserError, match="both runs counted the same 2 windows"):
        Run.merge([short, long])


def test_an_interruption_while_writing_leaves_what_was_there(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    with pytest.raises(KeyboardInterrupt), staged(tmp_path) as folder:
        (folder / "run.json").write_text("half")
        raise KeyboardInterrupt
    assert_same(run, Run.load(tmp_path))


def test_an_interruption_while_moving_waits_until_all_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move, order = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        move(source, target)
        order.append(target.name)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(staged_writes.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out") as folder:
        for name in ("run.json", "a.csv", "z.csv"):
            (folder / name).write_text('{"schema": 1}')
    assert order[-1] == "run.json"
    assert is_run(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.csv", "run.json", "z.csv"]
