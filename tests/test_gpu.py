"""The train step on a GPU: compiled equals eager equals CPU, dropout draws the same bits, remat saves memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_booster as fb

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the compiler's own warnings are not ours to judge
]

SIZES = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def train(
    device: str, jit: bool, steps: int = 4, precision: str | None = None, **options: Any
) -> tuple[Any, list[float]]:
    model, tx = fb.models.gpt2(**SIZES, **options), fb.optim.adamw(1e-2, weight_decay=0.1)
    booster = fb.Booster(device=device, mixed_precision=precision)
    state = booster.init(model, tx, key=fb.random.key(0))
    step = booster.train_step(model.loss, tx, accumulate=2, max_norm=0.5, jit=jit)
    losses = []
    for index in range(steps):
        ids = fb.random.randint(fb.random.key(index), (8, 32), 0, 96).long().to(device)
        state, metrics = step(state, {"input_ids": ids})
        losses.append(metrics["loss"].item())
    return fb.tree.map(lambda leaf: leaf.cpu(), booster.full_params(state)), losses


@pytest.mark.parametrize("options", [dict.fromkeys(DROPOUT, 0.0), DROPOUT])
def test_gpu_equals_cpu_and_jit_equals_eager(options: dict[str, Any]) -> None:
    expected, expected_losses = train("cpu", jit=False, **options)
    for jit in (False, True):
        params, losses = train("cuda", jit=jit, **options)
        torch.testing.assert_close(losses, expected_losses, rtol=2e-4, atol=2e-4)
        for name, leaf in fb.tree.named_leaves(params).items():
            torch.testing.assert_close(leaf, fb.tree.named_leaves(expected)[name], rtol=0.05, atol=5e-3, msg=name)


def test_bf16_learns_as_float32_does() -> None:
    options: dict[str, Any] = dict.fromkeys(DROPOUT, 0.0)
    _, low = train("cuda", jit=True, steps=8, precision="bf16", **options)
    _, full = train("cuda", jit=True, steps=8, **options)
    torch.testing.assert_close(low, full, rtol=0.02, atol=0.02)


def test_llama_and_a_hugging_face_module() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    module = transformers.LlamaForCausalLM(config)
    own, weights = fb.models.from_hf(module)
    ids = fb.random.randint(fb.random.key(0), (4, 16), 0, 96).long().cuda()
    losses = {}
    for name, model, params in (("own", own, weights), ("theirs", fb.functionalize(module), None)):
        booster, tx = fb.Booster(device="cuda"), fb.optim.sgd(0.1)
        state = booster.init(model, tx, key=fb.random.key(0), params=params)
        step = booster.train_step(model.loss, tx, max_norm=1.0)
        losses[name] = []
        for _ in range(3):
            state, metrics = step(state, {"input_ids": ids})
            losses[name].append(metrics["loss"].item())
    torch.testing.assert_close(losses["own"], losses["theirs"], rtol=1e-4, atol=1e-4)


def test_remat_saves_memory() -> None:
    def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x @ w)
        return x

    def peak(layer: Any, jit: bool) -> int:
        def loss(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            for w in ws:
                x = layer(w, x)
            return x.square().mean()

        fn = fb.jit(fb.grad(loss)) if jit else fb.grad(loss)
        ws = [torch.randn(256, 256, device="cuda") / 16 for _ in range(8)]
        x = torch.randn(32768, 256, device="cuda")
        fn(ws, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        fn(ws, x)
        return torch.cuda.max_memory_allocated()

    for jit in (False, True):
        assert peak(fb.remat(block), jit) < 0.6 * peak(block, jit)


def test_a_batch_on_the_cpu_is_refused() -> None:
    model, tx = fb.models.gpt2(**SIZES), fb.optim.sgd(0.1)
    booster = fb.Booster()
    assert booster.device.type == "cuda"
    state = booster.init(model, tx, key=fb.random.key(0))
    with pytest.raises(ValueError, match=r"batch\.input_ids is on cpu, the state on cuda:0"):
        booster.train_step(model.loss, tx)(state, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_plugins_on_two_gpus() -> None:
    """Every plugin over NCCL equals one device; offloaded ones too."""
    run("nccl_plugins.py", processes=2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_checkpoints_go_from_two_gpus_to_one_and_back(tmp_path: Path) -> None:
    for phase, processes in (("first", 2), ("alone", 1), ("back", 2)):
        run("nccl_checkpoints.py", phase, str(tmp_path), processes=processes)


def run(worker: str, *arguments: str, processes: int) -> None:
    """A script of ``workers``, by torchrun where there are several processes."""
    script = str(Path(__file__).parent / "workers" / worker)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
