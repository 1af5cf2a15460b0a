"""A step with a fused optimizer is the step with its chain: the bits on a CPU, on every mesh and in every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_booster as fb
from functional_booster.kernels import flat

SIZES: dict[str, Any] = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
DECAY: dict[str, Any] = {"weight_decay": 0.1, "mask": fb.optim.matrices}
OPTIMIZERS: dict[str, Callable[[bool], fb.optim.GradientTransformation]] = {
    "adamw": lambda fused: fb.optim.adamw(fb.schedules.cosine_warmup(1e-2, 9, 2), fused=fused, **DECAY),
    "lion": lambda fused: fb.optim.lion(1e-3, fused=fused, **DECAY),
    "sgd": lambda fused: fb.optim.sgd(1e-2, 0.9, fused=fused, **DECAY),
}
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "fp16": lambda: {"mixed_precision": "fp16"},
    "LowLevelZero": lambda: {"plugin": fb.LowLevelZeroPlugin(stage=2, precision="fp32"), "mesh": fb.virtual_mesh(2)},
}


def train(
    tx: fb.optim.GradientTransformation, accumulate: int = 1, jit: bool = False, device: str = "cpu", **options: Any
) -> tuple[Any, list[float]]:
    """The state after three steps, the second of which is skipped, and the losses."""
    model = fb.models.gpt2(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    booster = fb.Booster(device, **options)
    state = booster.init(model, tx, key=fb.random.key(0))

    def loss_fn(params: Any, batch: Any, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, weight = model.loss(params, {"input_ids": batch["input_ids"]}, key)
        return loss * batch["poison"].sum(), weight

    step = booster.train_step(loss_fn, tx, max_norm=0.5, jit=jit, accumulate=accumulate)
    losses = []
    for index in range(3):
        ids = fb.random.randint(fb.random.key(index), (4, 16), 0, 96).long().to(device)
        poison = torch.full((4,), float("inf") if index == 1 else 1.0, device=device)
        state, metrics = step(state, {"input_ids": ids, "poison": poison})
        losses.append(float(metrics["loss"]))
        assert bool(metrics["skipped"]) == (index == 1)
    return state, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bits_are_those_of_the_chain(name: str, setting: str) -> None:
    options = SETTINGS[setting]()
    expected, losses = train(OPTIMIZERS[name](False), **options)
    state, mine = train(OPTIMIZERS[name](True), **options)
    assert mine[::2] == losses[::2]
    assert fb.tree.structure(state.opt_state) == fb.tree.structure(expected.opt_state)
    for leaf, name, other in zip(fb.tree.leaves(state), fb.tree.names(state), fb.tree.leaves(expected), strict=True):
        assert not isinstance(leaf, torch.Tensor) or torch.equal(leaf, other), name


def test_what_a_fused_form_cannot_do_is_refused_and_compositions_drop_it() -> None:
    with pytest.raises(ValueError, match="fused: got True with amsgrad=True"):
        fb.optim.adamw(1e-3, amsgrad=True, fused=True)
    with pytest.raises(ValueError, match="fused: got True with momentum=0"):
        fb.optim.sgd(1e-3, fused=True)
    assert fb.optim.chain(fb.optim.clip(1.0), fb.optim.adamw(1e-3, fused=True)).fused is None


def test_rounding_by_chance_is_by_the_same_words() -> None:
    """In one update from the same state a parameter is rounded from one number, to rounding, by one word."""
    precision = fb.BF16MixedPrecision(master_weights=False, stochastic_rounding=True)
    model = fb.models.gpt2(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = fb.random.randint(fb.random.key(0), (4, 16), 0, 96).long()
    found = []
    for fused in (False, True):
        tx = fb.optim.sgd(1e-3, 0.9, fused=fused)
        booster = fb.Booster("cpu", precision)
        state = booster.init(model, tx, key=fb.random.key(0))
        state, _ = booster.train_step(model.loss, tx, jit=False)(state, {"input_ids": ids})
        found.append(torch.cat([leaf.flatten() for leaf in fb.tree.leaves(booster.full_params(state))]))
    assert float((found[0] != found[1]).double().mean()) < 0.01


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own warnings are not ours to judge
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_the_compiled_step_on_a_gpu_is_that_of_the_chain_and_in_place(name: str, precision: str | None) -> None:
    options: dict[str, Any] = {"device": "cuda", "jit": True, "mixed_precision": precision}
    expected, losses = train(OPTIMIZERS[name](False), **options)
    state, mine = train(OPTIMIZERS[name](True), **options)
    torch.testing.assert_close(mine[::2], losses[::2], rtol=0.02, atol=0.02)
    for key, leaf in state.storage.buffers.items():
        difference = (leaf - expected.storage.buffers[key]).abs().float()
        assert float(difference.mean()) < 2e-3, key  # Lion's signs, and Adam's first steps, turn on small gradients
    model = fb.models.gpt2(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    tx, booster = OPTIMIZERS[name](True), fb.Booster("cuda", precision)
    state = booster.init(model, tx, key=fb.random.key(0))
    lowered = booster.train_step(model.loss, tx).lower(state, {"input_ids": torch.zeros(4, 16).long().cuda()})
    ops = [str(node.target) for node in lowered.graph.nodes]
    kernel = {"sgd": "sgd_momentum"}.get(name, name)
    assert isinstance(state.storage, flat.Flat)
    assert ops.count(f"functional_booster.{kernel}_.default") == len(state.storage.buffers)
    assert f"functional_booster.{kernel}.default" not in ops
