"""Checkpoints on a GPU: bytes through pinned memory, saves in the background, layouts of two ranks and of one."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import functional_booster as fb
from functional_booster import checkpoint, testing
from functional_booster.checkpoint import saving
from functional_booster.checkpoint.manifest import CHUNK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
PROBLEM = testing.small(8)
DROPOUT = fb.models.gpt2(n_layer=3, n_head=2, n_embd=64, vocab_size=101, n_positions=16, resid_pdrop=0.1)
TX = fb.optim.adamw(1e-2, eps=1e-3, weight_decay=0.1)
PLUGINS: dict[str, Any] = {
    "ddp": fb.TorchDDPPlugin(),
    "zero-2": fb.LowLevelZeroPlugin(stage=2),
    "fsdp": fb.TorchFSDPPlugin(),
    "gemini, offloaded": fb.GeminiPlugin(offload_optim_frac=1.0),
}


def fresh() -> fb.TrainState:
    return fb.Booster(DEVICE).init(PROBLEM.model, PROBLEM.tx, key=fb.random.key(0))


def on_host(state: fb.TrainState) -> dict[str, torch.Tensor]:
    return {name: leaf.to("cpu", copy=True) for name, leaf in checkpoint.named_tensors(state).items()}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bitwise."""
    assert got.keys() == expected.keys()
    assert [name for name in got if not torch.equal(got[name].cpu(), expected[name])] == []


def odd(seed: int) -> fb.TrainState:
    """A state with leaves of less than a chunk, of exactly some, and of a few bytes more; some with odd strides."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    each = CHUNK // 4
    whole = torch.randn(5, each // 2, generator=generator, device=DEVICE)
    leaves = {
        str(n): torch.randn(n, generator=generator, device=DEVICE) for n in (1, each - 1, each, each + 1, 3 * each + 7)
    }
    leaves |= {
        "rows": whole[1:3],
        "columns": whole[:, 1:].T,
        "conjugate": torch.view_as_complex(whole[:, :6].reshape(5, 3, 2)).conj(),
    }
    leaves |= {"bool": whole[0] > 0, "half": whole.bfloat16(), "int": (whole * 99).long()}
    return fresh().replace(buffers=leaves)


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_every_byte_goes_there_and_back(use_async: bool, inference: bool, tmp_path: Path) -> None:
    with torch.inference_mode(inference):
        state = odd(0)
        expected = on_host(state)
        if use_async:
            checkpoint.save_async(tmp_path, state).result()
        else:
            checkpoint.save(tmp_path, state)
    (name,) = (file["name"] for file in checkpoint.read_manifest(tmp_path)["files"])
    assert_same(load_file(tmp_path / name), expected)
    loaded = checkpoint.load(tmp_path, state, DEVICE)
    assert all(leaf.device.type == DEVICE for leaf in fb.tree.leaves(loaded))
    assert_same(checkpoint.named_tensors(loaded), expected)


@pytest.mark.parametrize("use_async", [False, True])
def test_a_save_waits_for_the_work_before_it(use_async: bool, tmp_path: Path) -> None:
    """What is still being computed, on a stream of its own, is saved as it will be."""
    state, name = odd(0), str(CHUNK // 4 + 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        state.buffers[name].fill_(7)
        saved = checkpoint.save_async(tmp_path, state) if use_async else checkpoint.save(tmp_path, state)
    if saved is not None:
        saved.result()
    (found,) = checkpoint.read_tensors(tmp_path, [f"buffers.{name}"]).values()
    assert bool((found == 7).all())


def test_the_state_may_be_donated_at_once_and_memory_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    booster, taken = fb.Booster(DEVICE), list[checkpoint.Snapshot]()
    step = booster.train_step(PROBLEM.loss_fn, PROBLEM.tx, jit=False)
    batch = fb.tree.map(lambda leaf: leaf.to(DEVICE), PROBLEM.batch)
    write = saving.data_files.write

    def noting(place: Any, name: str, given: checkpoint.Snapshot) -> Any:
        taken.append(given)
        return write(place, name, given)

    monkeypatch.setattr(saving.data_files, "write", noting)
    state = fresh()
    for number in range(3):
        expected = on_host(state)
        saved = checkpoint.save_async(tmp_path / str(number), state)
        old, (state, _) = state, step(state, batch)
        with pytest.raises(fb.DonatedError):
            checkpoint.save(tmp_path / "old", old)
        saved.result()
        assert_same(checkpoint.read_tensors(tmp_path / str(number)), expected)
    places = [{piece.values.data_ptr() for piece in each.pieces} for each in taken]
    assert all(piece.values.is_pinned() for each in taken for piece in each.pieces)
    assert places[0] == places[1] == places[2]


@pytest.fixture
def deterministic() -> Generator[None]:
    """What a GPU sums in an order of its own otherwise; what has no other way is no part of the steps here."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*eterminis")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("plugin", PLUGINS)
def test_from_two_ranks_to_one_and_back(plugin: str, tmp_path: Path) -> None:
    """Two virtual ranks save, and go on; one device reads that, writes it, and goes on; two go on, bitwise as before.

    Dropout is another one on one device, whose rows have other keys.
    """
    alone = fb.Booster(DEVICE, mixed_precision="bf16")
    two = fb.Booster(DEVICE, "bf16", PLUGINS[plugin], fb.virtual_mesh(**PLUGINS[plugin].axes(2)))
    steps = [each.train_step(DROPOUT.loss, TX, accumulate=2, max_norm=0.5, jit=False) for each in (two, alone)]
    batch = {"input_ids": torch.randint(101, (8, 16), generator=torch.Generator().manual_seed(0)).to(DEVICE)}

    def trained(step: Any, state: fb.TrainState) -> tuple[fb.TrainState, list[float]]:
        losses = []
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return state, losses

    state, _ = trained(steps[0], two.init(DROPOUT, TX, key=fb.random.key(0)))
    expected = on_host(state)
    two.save(tmp_path / "two", state)
    saved = two.save(tmp_path / "later", state, use_async=True)
    state, losses = trained(steps[0], state)
    assert saved is not None
    saved.result()
    for name in ("two", "later"):
        one = alone.load(tmp_path / name, like=alone.abstract(DROPOUT, TX))
        assert_same(checkpoint.named_tensors(one), expected)
    alone.save(tmp_path / "one", one)
    ends = {"two": (state, losses), "one": trained(steps[1], one)}
    for name, booster, step in (("two", two, steps[0]), ("one", alone, steps[1])):
        end, again = trained(step, booster.load(tmp_path / "one", like=booster.abstract(DROPOUT, TX)))
        assert again == ends[name][1]
        assert_same(checkpoint.named_tensors(end), on_host(ends[name][0]))
