"""Quantized checkpoints: every weight equals plain loops in float64 over the file's own bytes, or the model is refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from analysis.errors import UserError
from hooks.loading.checkpoint import SINGLE
from hooks.loading.sources import load_files, locate
from hooks.models import load_model
from tests.helpers.quantizing import E4M3, Files, rewrite
from tests.helpers.tiny import SHAPE, save_tiny, tiny_tokenizer


def e4m3(byte: int) -> float:
    """An FP8 number by its bits: sign, 4 of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = (-1) ** (byte >> 7), (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(nibble: int) -> float:
    """An FP4 number by its bits: sign, 2 of exponent with bias 1, 1 of mantissa."""
    sign, exponent, mantissa = (-1) ** (nibble >> 3), (nibble >> 1) & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def fp8_codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).mul(3).to(E4M3)


def by_hand(codes: Tensor, factor: Callable[[int, int], float]) -> Tensor:
    """Every FP8 code times the factor of its row and column, in float64."""
    values = codes.view(torch.uint8).tolist()
    return torch.tensor([[e4m3(c) * factor(i, j) for j, c in enumerate(row)] for i, row in enumerate(values)]).double()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model")


def loaded(directory: Path, precision: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], str | None]:
    source = locate(str(directory), None, trust_remote_code=False)
    model, _ = load_files(source, precision, trust_remote_code=False)
    assert {parameter.dtype for parameter in model.parameters()} == {precision}
    assert not hasattr(model.config, "quantization_config")
    return dict(model.state_dict()), source.weights_format


def refused(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_files(locate(str(directory), None, trust_remote_code=False), torch.float32, trust_remote_code=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=2e-7, atol=1e-30)


FP8_SCHEMES = {
    "blocks that end within the matrix": ((20, 12), "weight_scale_inv", "FP8 (e4m3, 20×12 blocks), dequantized to float32"),
    "one a tensor": (None, "weight_scale_inv", "FP8 (e4m3, one scale a tensor), dequantized to float32"),
    "one a row": ("row", "weight_scale", "FP8 (e4m3, one scale a row), dequantized to float32"),
}


@pytest.mark.parametrize("scheme", FP8_SCHEMES)
def test_fp8(directory: Path, scheme: str) -> None:
    block, suffix, words = FP8_SCHEMES[scheme]
    generator = torch.Generator().manual_seed(3)

    def change(name: str, weight: Tensor) -> Files:
        rows, cols = weight.shape
        grid = {None: (), "row": (rows, 1)}.get(block) if not isinstance(block, tuple) else None
        grid = (math.ceil(rows / block[0]), math.ceil(cols / block[1])) if grid is None else grid
        scale = torch.rand(grid, generator=generator) + 0.1
        stem = name.removesuffix("weight")
        files = {name: fp8_codes((rows, cols), generator), stem + suffix: scale}
        return files | {f"{stem}input_scale": torch.ones(1), f"{stem}activation_scale": torch.ones(())}

    settings = {"quant_method": "fp8", "weight_block_size": block if isinstance(block, tuple) else None}
    files = rewrite(directory, settings | {"activation_scheme": "static"}, change)
    weights, said = loaded(directory)
    assert said == words
    for name, codes in files.items():
        if codes.dtype != E4M3:
            continue
        scale = files[name.removesuffix("weight") + suffix].double()

        def factor(i: int, j: int, scale: Tensor = scale) -> float:
            if isinstance(block, tuple):
                return float(scale[i // block[0], j // block[1]])
            return float(scale if block is None else scale[i, 0])

        close(weights[name], by_hand(codes, factor))
    assert torch.equal(weights["model.norm.weight"], files["model.norm.weight"])


def test_the_measured_model_is_the_dequantized_one(directory: Path) -> None:
    files = rewrite(
        directory,
        {"quant_method": "fp8", "weight_block_size": None},
        lambda n, w: {n: w.to(E4M3), f"{n}_scale": torch.tensor(0.5)},
    )
    model = load_model(str(directory), device="cpu", dtype="float64")
    site = model.sites[1]
    for rows, part in ((site.q, "gate"), (site.k, "up"), (site.v.T, "down")):
        close(rows, by_hand(files[f"model.layers.1.mlp.{part}_proj.weight"], lambda *_: 0.5))
    assert model.description["weights"] == "FP8 (e4m3, one scale a tensor), dequantized to float32"
    assert all(check.passed for check in model.acceptance)


def test_mxfp8_scales_are_powers_of_two(directory: Path) -> None:
    def change(name: str, weight: Tensor) -> Files:
        exponents = torch.randint(120, 130, (weight.shape[0], math.ceil(weight.shape[1] / 8)), dtype=torch.uint8)
        return {name: weight.to(E4M3), f"{name}_scale_inv": exponents}

    settings = {"quant_method": "mxfp8", "weight_block_size": [1, 8], "scale_fmt": "ue8m0"}
    files = rewrite(directory, settings, change)
    weights, said = loaded(directory)
    assert said == "FP8 (e4m3, blocks of 8), dequantized to float32"
    name = "model.layers.2.mlp.down_proj.weight"
    close(weights[name], by_hand(files[name], lambda i, j: 2.0 ** (int(files[f"{name}_scale_inv"][i, j // 8]) - 127)))


def test_experts_in_fp8_come_to_their_own_place(tmp_path: Path) -> None:
    shape = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE, **shape)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(4)
    files = rewrite(
        tmp_path,
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda n, w: {
            n: fp8_codes(tuple(w.shape), generator),
            f"{n}_scale_inv": torch.rand((math.ceil(w.shape[0] / 16), math.ceil(w.shape[1] / 16)), generator=generator),
        },
    )
    weights, _ = loaded(tmp_path)
    for expert in range(3):
        stem = f"model.layers.1.mlp.experts.{expert}"
        plain = {}
        for part in ("gate", "up", "down"):
            scale = files[f"{stem}.{part}_proj.weight_scale_inv"].double()
            plain[part] = by_hand(
                files[f"{stem}.{part}_proj.weight"], lambda i, j, scale=scale: float(scale[i // 16, j // 16])
            )
        close(weights["model.layers.1.mlp.experts.gate_up_proj"][expert], torch.cat((plain["gate"], plain["up"])))
        close(weights["model.layers.1.mlp.experts.down_proj"][expert], plain["down"])


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    config = GptOssConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 32}, num_local_experts=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    files: Files = {}
    for name, weight in load_file(tmp_path / SINGLE).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            files[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            files[f"{name}_scales"] = torch.randint(115, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        else:
            files[name] = weight
    save_file(files, tmp_path / SINGLE, metadata={"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    weights, said = loaded(tmp_path, torch.float64)
    assert said == "MXFP4 (4-bit, blocks of 32), dequantized to float32"
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        blocks, scales = files[f"{name}_blocks"].tolist(), files[f"{name}_scales"].tolist()
        for expert, row, group, byte in np.ndindex(*files[f"{name}_blocks"].shape):
            for half in (0, 1):
                value = e2m1((blocks[expert][row][group][byte] >> 4 * half) & 15)
                found = weights[name][expert, 32 * group + 2 * byte + half, row]
                assert found == value * 2.0 ** (scales[expert][row][group] - 127)


def test_bitsandbytes_8_bit(directory: Path) -> None:
    def change(name: str, weight: Tensor) -> Files:
        largest = weight.abs().amax(dim=1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        stem = name.removesuffix("weight")
        return {name: codes, f"{stem}SCB": largest, f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8)}

    plain = load_file(directory / SINGLE)
    files = rewrite(directory, {"quant_method": "bitsandbytes", "load_in_8bit": True}, change)
    weights, said = loaded(directory)
    assert said == "bitsandbytes int8 (one scale a row), dequantized to float32"
    name = "model.layers.0.mlp.up_proj.weight"
    largest = files["model.layers.0.mlp.up_proj.SCB"].double().tolist()
    expected = [[c * largest[i] / 127 for c in row] for i, row in enumerate(files[name].tolist())]
    close(weights[name], torch.tensor(expected).double())
    torch.testing.assert_close(weights[name], plain[name], rtol=0, atol=float(max(largest)) / 253)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4_bit(directory: Path, nested: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    table, outer = torch.randn(16, generator=generator), torch.randn(256, generator=generator)
    block, nested_block = 64, 3

    def change(name: str, weight: Tensor) -> Files:
        facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
        blocks = math.ceil(weight.numel() / block)
        files = {name: torch.randint(0, 256, (weight.numel() // 2, 1), dtype=torch.uint8, generator=generator)}
        files[f"{name}.quant_map"] = table
        files[f"{name}.absmax"] = torch.rand(blocks, generator=generator)
        if nested:
            facts |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.25}
            files[f"{name}.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8, generator=generator)
            files[f"{name}.nested_quant_map"] = outer
            files[f"{name}.nested_absmax"] = torch.rand(math.ceil(blocks / nested_block), generator=generator)
        state = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        return files | {f"{name}.quant_state.bitsandbytes__nf4": state}

    files = rewrite(directory, {"quant_method": "bitsandbytes", "load_in_4bit": True}, change)
    weights, said = loaded(directory)
    assert said == "bitsandbytes NF4 (4-bit, blocks of 64), dequantized to float32"
    for name in (name for name in files if name.endswith("mlp.down_proj.weight")):
        packed, absmax, expected = files[name].flatten().tolist(), files[f"{name}.absmax"].tolist(), []
        for place in range(weights[name].numel()):
            byte = packed[place // 2]
            scale = absmax[place // block]
            if nested:
                second = float(files[f"{name}.nested_absmax"][place // block // nested_block])
                scale = float(outer[int(scale)]) * second + 0.25
            expected.append(float(table[byte & 15 if place % 2 else byte >> 4]) * scale)
        torch.testing.assert_close(
            weights[name].double().flatten(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6
        )  # an offset that cancels


COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


def compressed(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, None)])
def test_compressed_tensors_packed_integers(directory: Path, bits: int, group: int | None, asymmetric: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    kept: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def packed(codes: Tensor) -> Tensor:
        """Rows of signed integers as words of 32 bits, written out bit by bit."""
        words = []
        for row in codes.tolist():
            fields = [value + 2 ** (bits - 1) for value in row] + [0] * (-len(row) % (32 // bits))
            chunks = [fields[i : i + 32 // bits] for i in range(0, len(fields), 32 // bits)]
            words.append([sum(field << bits * place for place, field in enumerate(chunk)) for chunk in chunks])
        return torch.tensor(words).to(torch.uint32).view(torch.int32)

    def change(name: str, weight: Tensor) -> Files:
        rows, cols = weight.shape
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        codes = torch.randint(low, high, (rows, cols), generator=generator)
        groups = 1 if group is None else math.ceil(cols / group)
        scale = torch.rand((rows, groups), generator=generator) + 0.1
        zero = torch.randint(low, high, (rows, groups), generator=generator) * asymmetric
        kept[name] = codes, scale, zero
        files = {f"{name}_packed": packed(codes), f"{name}_scale": scale, f"{name}_shape": torch.tensor([rows, cols])}
        return files | ({f"{name}_zero_point": packed(zero.T).T} if asymmetric else {})

    strategy = "channel" if group is None else "group"
    rewrite(directory, compressed(num_bits=bits, type="int", strategy=strategy, group_size=group), change)
    weights, said = loaded(directory)
    sharing = "one scale a row" if group is None else f"blocks of {group}"
    assert said == f"int{bits} ({sharing}), dequantized to float32"
    for name, (codes, scale, zero) in kept.items():
        expected = [
            [(c - int(zero[i, j // (group or 10**9)])) * float(scale[i, j // (group or 10**9)]) for j, c in enumerate(row)]
            for i, row in enumerate(codes.tolist())
        ]
        close(weights[name], torch.tensor(expected).double())


def test_compressed_tensors_int8_and_float8(directory: Path) -> None:
    def change(name: str, weight: Tensor) -> Files:
        codes = weight.mul(20).round().to(torch.int8) if "up_proj" in name else weight.to(E4M3)
        return {name: codes, f"{name}_scale": torch.rand(weight.shape[0], 1) + 0.1}

    files = rewrite(directory, compressed(num_bits=8, type="float", strategy="channel"), change)
    weights, said = loaded(directory)
    assert said == "FP8 (e4m3, one scale a row) and int8 (one scale a row), dequantized to float32"
    up, down = "model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.down_proj.weight"
    scale = {name: files[f"{name}_scale"].double() for name in (up, down)}
    close(weights[down], by_hand(files[down], lambda i, _: float(scale[down][i, 0])))
    expected = [[c * float(scale[up][i, 0]) for c in row] for i, row in enumerate(files[up].tolist())]
    close(weights[up], torch.tensor(expected).double())


def test_checkpoints_that_do_not_say_what_their_numbers_mean(directory: Path) -> None:
    first = "model.layers.0.mlp.down_proj.weight"
    one = torch.tensor(1.0)
    settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    kept = load_file(directory / SINGLE)

    def said_of(settings: dict[str, Any], change: Callable[[str, Tensor], Files]) -> str:
        save_file(kept, directory / SINGLE, metadata={"format": "pt"})
        rewrite(directory, settings, change)
        return refused(directory)

    assert "down_proj.weight has 0 scales, expected one" in said_of(settings, lambda n, w: {n: w.to(E4M3)})
    assert "has 2 scales, expected one" in said_of(
        settings, lambda n, w: {n: w.to(E4M3), f"{n}_scale": one, f"{n}_scale_inv": one}
    )
    assert "[2, 5] scales do not fit [32, 48] weights in blocks of 16×16" in said_of(
        settings, lambda n, w: {n: w.to(E4M3), f"{n}_scale": torch.ones(2, 5)}
    )
    assert "none of its tensors is" in said_of(settings, lambda n, w: {n: w})
    assert "weight_zero_point is unknown" in said_of(
        settings, lambda n, w: {n: w.to(E4M3), f"{n}_scale": one, f"{n}_zero_point": one}
    )
    assert f"has scales that its model does not use ({first}_scale)" in said_of(
        settings, lambda n, w: {n: w, f"{n}_scale": one} if n == first else {n: w.to(E4M3), f"{n}_scale_inv": one}
    )
    assert "the meaning of model.layers.0.mlp.down_proj.weight (I8) is unknown" in said_of(
        settings, lambda n, w: {n: w.to(torch.int8)} if n == first else {n: w.to(E4M3), f"{n}_scale_inv": one}
    )
    assert "contains float8 e4m3 values (model.layers.0.mlp.down_proj.weight)" in said_of({}, lambda n, w: {n: w.to(E4M3)})
    assert "contains I8 values" in said_of({}, lambda n, w: {n: w.to(torch.int8), f"{n}_scale": one})
    assert "has scales that its model does not use" in said_of({}, lambda n, w: {n: w, f"{n}_scale": one})


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq", "quanto", "torchao", "modelopt", "aqlm"])
def test_other_methods_are_refused_by_name(directory: Path, method: str) -> None:
    rewrite(directory, {"quant_method": method}, lambda n, w: {n: w})
    assert f"is quantized with {method}, which is not supported: load it with its own library" in refused(directory)


def test_a_quantization_that_only_the_text_model_names(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"text_config": {"quantization_config": {"bits": 3}}}))
    assert "is quantized with an unnamed method" in refused(directory)
