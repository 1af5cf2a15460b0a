"""Dtypes on the way in and out: finite numbers stay so, or one error names the leaves; only floats are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import functional_booster as fb
from functional_booster import booster_io, checkpoint, cli, hf_checkpoint
from functional_booster.checkpoint import conversions

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]
MODEL = fb.functionalize(torch.nn.Linear(3, 2))
TX = fb.optim.sgd(0.1)
FULL, HALF = fb.Booster("cpu"), fb.Booster("cpu", fb.Policy(param=torch.float16, compute=torch.float16))
LARGE = r"weight: finite numbers beyond float16's 65504"


def state_with(weight: float) -> fb.TrainState:
    state = FULL.init(MODEL, TX, key=fb.random.key(0))
    params = FULL.full_params(state)
    params["weight"][1, 2] = weight
    return FULL.shard(params, like=state)


@given(st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.lists(st.floats(width=64), max_size=5))
def test_overflow_is_what_becomes_infinite(saved: torch.dtype, wanted: torch.dtype, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(saved)
    lost = values.double().isfinite() & ~values.to(wanted).double().isfinite()
    if (saved, wanted) != (torch.float32, torch.bfloat16):  # whose ranges count as one
        assert conversions.overflow(values, wanted) == bool(lost.any())


def test_a_load_into_float16(tmp_path: Path) -> None:
    like = HALF.abstract(MODEL, TX)
    FULL.save(tmp_path, state_with(65504.0))
    assert HALF.load(tmp_path, like=like).params["weight"][1, 2] == 65504
    FULL.save(tmp_path, state_with(torch.inf))  # which it was before
    assert HALF.load(tmp_path, like=like).params["weight"][1, 2] == torch.inf
    FULL.save(tmp_path, state_with(-65536.0))
    for strict in (True, False):
        with pytest.raises(ValueError, match=rf"does not fit:\n  params\.{LARGE}"):
            checkpoint.load(tmp_path, like, "cpu", strict=strict)
    assert FULL.load(tmp_path, like=FULL.abstract(MODEL, TX)).params["weight"][1, 2] == -65536


def test_weights_loaded_into_float16(tmp_path: Path) -> None:
    FULL.save_pretrained(tmp_path, state_with(7e4), model=MODEL)
    state = HALF.init(MODEL, TX, key=fb.random.key(1))
    with pytest.raises(ValueError, match=LARGE):
        HALF.load_pretrained(tmp_path, like=state, model=MODEL)
    loaded, report = HALF.load_pretrained(tmp_path, like=state, model=MODEL, strict=False)
    assert report.mismatched == ["weight: finite numbers beyond float16's 65504"]
    assert torch.equal(loaded.params["weight"], state.params["weight"])
    assert torch.equal(loaded.params["bias"], load_file(tmp_path / "model.safetensors")["bias"].half())


def test_a_boosted_model_stays_as_it_was(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2).half()
    model, *_ = FULL.boost(module)
    before = {name: leaf.clone() for name, leaf in model.state_dict().items()}
    save_file({"bias": torch.zeros(2), "weight": torch.full((2, 3), 1e5)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=LARGE):
        booster_io.load_model(model, tmp_path / "x.safetensors")
    assert all(torch.equal(leaf, before[name]) for name, leaf in model.state_dict().items())


def test_an_export_in_float16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FULL.save_pretrained(tmp_path / "hf", state_with(1.0), model=MODEL)
    with pytest.raises(ValueError, match=rf"do not fit the dtype:\n  {LARGE}"):
        FULL.save_pretrained(tmp_path / "hf", state_with(1e5), model=MODEL, dtype=torch.float16)
    assert {file.name for file in (tmp_path / "hf").iterdir()} == {"model.safetensors"}  # as it was
    assert load_file(tmp_path / "hf" / "model.safetensors")["weight"][1, 2] == 1
    FULL.save(tmp_path / "native", state_with(1e5))
    arguments = ["convert", str(tmp_path / "native"), str(tmp_path / "x"), "--to", "native", "--dtype"]
    assert cli.main([*arguments, "fp16"]) == 2
    assert f"params.{LARGE}" in capsys.readouterr().err and not (tmp_path / "x").exists()
    assert cli.main([*arguments, "bf16"]) == 0


@pytest.mark.parametrize(
    ("kind", "given", "wanted"),
    [
        (torch.int32, "torch.int32", "torch.int64"),
        (torch.bool, "torch.bool", "torch.int64"),
        (torch.float32, "torch.float32", "torch.int64"),
    ],
)
def test_what_counts_is_not_converted(kind: torch.dtype, given: str, wanted: str, tmp_path: Path) -> None:
    model = fb.functionalize(torch.nn.BatchNorm1d(2))
    state = FULL.init(model, TX, key=fb.random.key(0))
    FULL.save_pretrained(tmp_path, state, model=model)
    tensors: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    tensors["num_batches_tracked"] = tensors["num_batches_tracked"].to(kind)
    tensors["weight"] = tensors["weight"].to(torch.complex64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        hf_checkpoint.load(tmp_path, state, model)
    assert f"num_batches_tracked: {given}, expected {wanted}" in str(caught.value)
    assert "weight: torch.complex64, expected torch.float32" in str(caught.value)
    loaded, report = hf_checkpoint.load(tmp_path, state, model, strict=False)
    assert len(report.mismatched) == 2
    assert torch.equal(loaded.params["weight"], state.params["weight"])
