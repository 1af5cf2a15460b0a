"""Adapters on processes: the steps of one device, frozen weights split over the ranks, and the imperative loop."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lora_cases import adapted, config, tiny, tokens
from processes import run_on_ranks

import functional_booster as fb
from functional_booster import lora
from functional_booster.kernels import tree

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes
PLUGINS: dict[str, Any] = {
    "ddp": fb.TorchDDPPlugin(),
    "fsdp": fb.TorchFSDPPlugin(),
    "zero2": fb.LowLevelZeroPlugin(stage=2),
    "gemini": fb.GeminiPlugin(),
}
RANKS, STEPS = 2, 3


def batch(number: int, plugin: Any) -> torch.Tensor:
    """The global batch without a plugin, with one this process's rows."""
    ids = tokens(4, number)
    return ids if plugin is None else ids.chunk(dist.get_world_size())[dist.get_rank()]


def trained(name: str | None, own: bool, quantize: bool | str) -> tuple[Any, list[Any], int]:
    """(parameters, metrics of each step, bytes of codes that this process stores) after some functional steps."""
    plugin = None if name is None else PLUGINS[name]
    chosen = config(target_modules="all-linear", init_lora_weights=False)
    model, base = adapted(tiny("llama", torch.float32 if quantize else torch.float64), chosen, own, quantize=quantize)
    booster, tx = fb.Booster("cpu", "fp32", plugin), fb.optim.adamw(1e-2, eps=1e-4)
    state = booster.init(model, tx, key=fb.random.key(0), params=lora.init(model, base, fb.random.key(1)))
    step, history = booster.train_step(model.loss, tx, max_norm=0.1, jit=False), []
    for number in range(STEPS):
        state, metrics = step(state, {"input_ids": batch(number, plugin)})
        history.append({name: metrics[name] for name in ("loss", "grad_norm", "tokens")})
    assert state.frozen is not None
    stored = sum(buffer.numel() for buffer in state.frozen.buffers.values() if buffer.dtype == torch.uint8)
    return booster.full_params(state), history, stored


@functools.cache
def trained_alone(own: bool, quantize: bool | str) -> tuple[Any, list[Any], int]:
    return trained(None, own, quantize)


def close(got: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance if one.is_floating_point() else 0)


@pytest.mark.parametrize("quantize", [False, "nf4", "int8"])
@pytest.mark.parametrize(("name", "own"), [("fsdp", True), ("fsdp", False), ("zero2", True)])
def test_steps_equal_one_device(name: str, own: bool, quantize: bool | str) -> None:
    expected = trained_alone(own, quantize)
    for params, metrics, _ in run_on_ranks(RANKS, trained, name, own, quantize):
        # Hugging Face's norms, and what multiplies with NF4 here, are in float32
        close((params, metrics), expected[:2], 1e-4 if quantize else 1e-6)


@pytest.mark.parametrize(("name", "parts"), [("fsdp", RANKS), ("zero2", RANKS), ("ddp", 1)])
def test_quantized_weights_are_split_as_others_are(name: str, parts: int) -> None:
    *_, whole = trained_alone(True, True)
    assert [stored * parts for *_, stored in run_on_ranks(RANKS, trained, name, True, True)] == [whole] * RANKS


def looped(name: str | None, quantize: bool | str) -> dict[str, torch.Tensor]:
    """The tensors of a module with adapters after some steps of the imperative loop."""
    plugin = None if name is None else PLUGINS[name]
    booster = fb.Booster("cpu", "fp32", plugin)
    chosen = config(target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    model = booster.enable_lora(copy.deepcopy(tiny("llama")), lora_config=chosen, quantize=quantize)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for number in range(STEPS):
        ids = batch(number, plugin)
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(("name", "quantize"), [("ddp", False), ("gemini", True)])
def test_the_imperative_loop_equals_one_device(name: str, quantize: bool | str) -> None:
    expected = looped(None, quantize)
    for found in run_on_ranks(RANKS, looped, name, quantize):
        assert found.keys() == expected.keys()
        for tensor, value in found.items():
            tolerance = 1e-5 if "lora_" in tensor else 0.0
            torch.testing.assert_close(value, expected[tensor], rtol=tolerance, atol=tolerance)
