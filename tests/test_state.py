"""TrainState: other values in the same layout, or one error that lists what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functional_booster import optim
from functional_booster.booster import Booster
from functional_booster.kernels import random, tree
from functional_booster.models import gpt2
from functional_booster.state import TrainState

SIZES = {"vocab_size": 11, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}


def state_of(model: Any) -> TrainState:
    return Booster(device="cpu").init(model, optim.adamw(0.1), key=random.key(0))


def test_replaced_params_are_those_given_and_nothing_else_changes() -> None:
    state = state_of(gpt2(**SIZES))
    doubled = tree.map(lambda leaf: 2 * leaf, state.params)
    new = state.replace(params=doubled)
    torch.testing.assert_close(tree.named_leaves(new.params), tree.named_leaves(doubled), rtol=0, atol=0)
    assert new.opt_state is state.opt_state and new.key is state.key
    assert tree.structure(new) == tree.structure(state)


def test_params_of_another_tree_are_refused_with_the_whole_list() -> None:
    state = state_of(gpt2(**SIZES))
    with pytest.raises(ValueError, match="params do not fit the model:") as raised:
        state.replace(params={"a": torch.ones(2), **state.params, "wte": {"weight": torch.ones(3)}, "wpe": {}})
    assert str(raised.value).splitlines()[1:] == [
        "  a: unexpected",
        "  wpe.weight: missing",
        "  wte.weight: shape (3,), expected (11, 8)",
    ]
    with pytest.raises(ValueError, match=r"h\.1\.attn\.k\.bias: unexpected"):
        state.replace(params=state_of(gpt2(**{**SIZES, "n_layer": 2})).params)
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_proj\.bias: torch\.float64, expected torch\.float32"):
        state.replace(params=tree.map(torch.Tensor.double, state.params))
    with pytest.raises(TypeError, match="TrainState has no field 'parameters'"):
        state.replace(parameters=state.params)
