"""The command line: what it writes, what it says, and how it refuses."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import run_analysis
from analysis.run import Run
from analysis.theory import properties
from hooks.loading import builtin as builtin_module
from run_analysis import parse_layers
from tests.helpers.command_line import FILES, QUICK, ROOT, call, refused


@pytest.fixture
def copied(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    target = tmp_path / "model"
    target.mkdir()
    for path in tiny_llama.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_analyze_writes_a_run_and_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    code, out, err = call("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK)
    assert (code, err) == (0, "")
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES
    assert "3 of 3 layers" in out
    assert "cut at --tokens" in out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {"model", "settings", "corpus", "acceptance", "layers", "skipped_layers", "missing", "record"} <= set(record)
    assert record["settings"]["context"] == 32
    assert record["corpus"][0]["tokens_fed"] == 160
    assert record["record"]["versions"]["torch"] == version("torch")
    assert len(pd.read_csv(tmp_path / "run" / "layers.csv")) == 3


@pytest.mark.usefixtures("without_figures")
def test_quiet_prints_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    assert call("analyze", tiny_llama, "--out", tmp_path / "run", "--quiet", *QUICK) == (0, "", "")


@pytest.mark.usefixtures("without_figures")
def test_options_reach_the_run(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("A text of my own, long enough to be cut into windows. " * 40)
    options = ["--corpus", tmp_path / "my.txt", "--layers", "0-1,1", "--alphas", "-1,3", "--skip-positions", 2, "--seed", 5]
    code, _, _ = call("analyze", tiny_llama, "--out", tmp_path / "run", "--dtype", "bfloat16", *options, *QUICK)
    assert code == 0
    run = Run.load(tmp_path / "run")
    assert list(run.layers) == [0, 1]
    assert run.settings["alphas"] == [-1, 3]
    assert (run.settings["skip_positions"], run.settings["seed"], run.model["dtype"]) == (2, 5, "bfloat16")
    assert run.corpus[0]["name"] == "my.txt"


@pytest.mark.usefixtures("without_figures")
def test_shards_merge_to_the_whole(tiny_llama: Path, tmp_path: Path) -> None:
    for name, shard in (("whole", "0/1"), ("first", "0/2"), ("second", "1/2")):
        options = ["--shard", shard, "--causal", "none", *QUICK]
        assert call("analyze", tiny_llama, "--out", tmp_path / name, *options)[0] == 0
    code, out, _ = call("merge", tmp_path / "first", tmp_path / "second", "--out", tmp_path / "merged")
    assert code == 0
    assert "3 of 3 layers" in out
    whole, merged = (pd.read_csv(tmp_path / name / "layers.csv") for name in ("whole", "merged"))
    pd.testing.assert_frame_equal(whole, merged, rtol=1e-5, atol=1e-9)
    assert "both runs counted the same" in refused(
        "merge", tmp_path / "whole", tmp_path / "first", "--out", tmp_path / "no"
    )
    assert "is not a run" in refused("merge", tmp_path / "whole", tmp_path / "nowhere", "--out", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_models_are_listed_at_once() -> None:
    code = "import sys, run_analysis; run_analysis.models(); assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "smollm2-135m" in done.stdout
    assert "gemma3-270m" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["smollm-135m"], "no model named 'smollm-135m': did you mean smollm2-135m"),
        (["gemma"], "did you mean gemma3-270m"),
        (["./no/such/dir"], "there is no file or directory ./no/such/dir"),
        (["no-such.gguf"], "there is no file or directory no-such.gguf"),
        (["someone/some-model"], "not cached and the hub cannot be reached"),
        (["some one/some!model"], "is not a hub id"),
        ([""], "the model's name is empty"),
        (["smollm2-135m", "--revision", "main"], "revisions belong to hub models"),
    ],
)
def test_a_model_that_is_not_there(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    assert complaint in refused("analyze", *arguments, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--layers", "0,3"], "layer 3 is out of range: llama has layers 0-2"),
        (["--layers", "2-1"], "layers 2-1 is not a range of layers"),
        (["--layers", "0-99999999999"], "is not a range of layers"),
        (["--layers", "one"], "layers 'one' is not a list"),
        (["--alphas", "0,2"], "must lie between 1e-4 and 1e4"),
        (["--alphas", "1e-300"], "must lie between 1e-4 and 1e4"),
        (["--alphas", "inf"], "must lie between 1e-4 and 1e4"),
        (["--alphas", "nan"], "must lie between 1e-4 and 1e4"),
        (["--skip-positions", "40"], "leaves no token after the 40 skipped"),
        (["--alphas", "two"], "is not a list of numbers"),
        (["--context", "4096"], "4096 is beyond this model's limit of 128"),
        (["--device", "cuda"], "torch sees 0 CUDA devices"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--device", "meta"], "is not supported"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--shard", "2/2"], "shard '2/2' is out of range"),
        (["--corpus", "no-such-corpus"], "neither a text file nor a dataset"),
    ],
)
def test_an_option_that_does_not_fit(tiny_llama: Path, tmp_path: Path, options: list[str], complaint: str) -> None:
    assert complaint in refused("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_figures")
def test_an_output_directory_with_something_else(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds something other than a run (notes.txt)" in refused("analyze", tiny_llama, "--out", tmp_path, *QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert call("analyze", tiny_llama, "--out", tmp_path, "--force", *QUICK)[0] == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_weights_that_are_not_numbers(copied: Path, tmp_path: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    line = refused("analyze", copied, "--out", tmp_path / "run")
    assert "1 NaN or infinite weights in model.layers.1.mlp.up_proj.weight" in line


def test_files_that_are_not_whole(copied: Path, tmp_path: Path) -> None:
    file = copied / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert "but its header says" in refused("analyze", copied, "--out", tmp_path / "run")
    file.write_bytes(data)
    kept = {name: weight for name, weight in load_file(file).items() if "layers.2.mlp" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    assert "lacks 3 weights (model.layers.2.mlp.down_proj.weight)" in refused("analyze", copied, "--out", tmp_path / "run")
    file.unlink()
    assert "has no weights" in refused("analyze", copied, "--out", tmp_path / "run")
    (copied / "pytorch_model.bin").write_bytes(b"pickle")
    assert "only pickled weights (pytorch_model.bin)" in refused("analyze", copied, "--out", tmp_path / "run")
    (copied / "config.json").unlink()
    assert "has no config.json" in refused("analyze", copied, "--out", tmp_path / "run")
    for content, complaint in ((b"nothing", "does not begin with GGUF"), (b"GGUF\x03\x00\x00", "cannot read")):
        (tmp_path / "m.gguf").write_bytes(content)
        assert complaint in refused("analyze", tmp_path / "m.gguf", "--out", tmp_path / "run")


def test_a_repositorys_own_code_is_not_run_unasked(copied: Path, tmp_path: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "add --trust-remote-code if you trust it" in refused("analyze", copied, "--out", tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_a_download_that_fails_or_has_the_wrong_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_module, "cache_root", lambda: tmp_path / "cache")

    def failing(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route to the index\n")

    monkeypatch.setattr(builtin_module.subprocess, "run", failing)
    line = refused("analyze", "--quiet", "--out", tmp_path / "run")
    assert "cannot download smollm2-135m (no route to the index): check the network" in line
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def test_ctrl_c_writes_nothing(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hooks.reading.batches.capture_pass", interrupt)
    code, out, err = call("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK)
    assert (code, out) == (130, "")
    assert "interrupted: nothing was written" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_figures")
def test_a_failed_check_exits_with_1_and_is_written(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hooks.models.LOGIT_SLACK", -1.0)
    code, out, _ = call("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK)
    assert code == 1
    assert "check failed: logits of the pass that reads" in out
    assert not all(check.passed for check in Run.load(tmp_path / "run").acceptance)


def test_theory_prints_every_claim_with_its_verdict(tmp_path: Path) -> None:
    code, out, err = call("theory", "--activation", "swish", "--out", tmp_path / "theory")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "37 of 37 claims hold." in words
    assert "FAILS" not in words
    assert "3.69e+11" in words
    names = {str(path.relative_to(tmp_path / "theory")) for path in (tmp_path / "theory").rglob("*.*")}
    assert names == {"theory.csv", "theorems.csv", "sizes.csv", "figures/theory.png"}
    claims = pd.read_csv(tmp_path / "theory" / "theory.csv")
    assert len(claims) == 35
    assert claims["passed"].all()
    assert (claims["measured"] == claims["prediction"]).all()
    assert claims.loc[claims["prediction"] == "invariant", "residual"].max() < 1e-12
    assert claims.loc[claims["prediction"] != "invariant", "witness_a"].notna().all()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    assert "add --force" in refused("theory", "--activation", "relu", "--out", tmp_path / "notes")


def test_theory_as_json() -> None:
    code, out, _ = call("theory", "--activation", "gpt_oss", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["passed"] is True
    assert {(claim["form"], claim["unit"]) for claim in document["claims"]} == {
        ("GatedMLP", "gpt_oss"),
        ("LowRankGated", "gpt_oss"),
    }
    permutation = next(claim for claim in document["claims"] if claim["action"] == "Permutation")
    assert (permutation["measured"], permutation["witness_a"]) == ("invariant", None)
    assert 0 < permutation["residual"] < 1e-12
    assert document["theorems"] == []
    assert [size["form"] for size in document["sizes"]][:2] == ["KeyValueMemory", "GlobalQueryMemory"]


def test_theory_that_fails_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(properties.PROPERTIES, "silu", properties.PROPERTIES["linear"])
    code, out, _ = call("theory", "--activation", "silu")
    assert code == 1
    assert "FAILS" in out
    assert "25 of 37 claims hold." in out  # 3 on the gated form, 4 on its rank r, value rescaling on the 5 others


@pytest.mark.parametrize("name", ["clamped(silu,7)", "top_k(gelu_pytorch_tanh,0.95)", "soft_capped(tanh,30)"])
def test_theory_takes_units_with_parameters(name: str, tmp_path: Path) -> None:
    code, out, err = call("theory", "--activation", name, "--out", tmp_path / "theory")
    claims = pd.read_csv(tmp_path / "theory" / "theory.csv")
    assert (code, err) == (0, "")
    assert set(claims["unit"]) == {name}
    assert claims["passed"].all()
    assert "FAILS" not in out


def test_theory_of_an_unknown_activation_is_one_line() -> None:
    said = refused("theory", "--activation", "mish")
    assert "unknown gate activation 'mish'" in said
    assert "top_k(NAME,NUMBER)" in said
    assert "give a limit above 0" in refused("theory", "--activation", "clamped(silu,0)")


def test_layers_are_lists_of_indices_and_ranges() -> None:
    assert parse_layers("0-2,11, 4") == [0, 1, 2, 11, 4]
    assert parse_layers(None) is None
    assert run_analysis.parse_alphas("-1,0.5") == [-1, 0.5]
