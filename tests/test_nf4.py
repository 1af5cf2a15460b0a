"""NF4 against the paper's construction of its table, and a reference that loops over blocks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import nf4
from functional_booster.lora import QuantizedWeight


def test_the_table_is_the_papers() -> None:
    """Section 3: quantiles of N(0, 1) of 2^3 negative and 2^3 + 1 positive places, scaled to [-1, 1], one zero."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    offset = 0.9677083  # 1 - (1 / 30 + 1 / 32) / 2, so that the ends are finite
    positive = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64))[:-1]
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64))[:-1]
    table = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    torch.testing.assert_close(torch.tensor(nf4.CODE, dtype=torch.float64), table / table.max(), rtol=0, atol=2e-7)


def reference(x: torch.Tensor) -> torch.Tensor:
    """Quantized and dequantized block by block, with Python's numbers."""
    flat = x.reshape(-1).tolist()
    blocks = [flat[start : start + 64] for start in range(0, len(flat), 64)]
    largest = torch.tensor([max(map(abs, block)) for block in blocks])
    mean = largest.mean()
    values: list[float] = []
    for number, block in enumerate(blocks):
        group = largest[number // 256 * 256 : number // 256 * 256 + 256] - mean
        step = group.abs().max() / 448
        relative = (largest[number] - mean) / step if step > 0 else torch.zeros(())
        scale = float(relative.to(torch.float8_e4m3fn).float() * step + mean)
        for value in block:
            nearest = min(nf4.CODE, key=lambda code: abs(code * scale - value)) if scale > 0 else 0.0
            values.append(nearest * scale)
    return torch.tensor(values).view(x.shape)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(1,), (63,), (64,), (65,), (7, 33), (64, 300)]),
    seed=st.integers(0, 99),
    magnitude=st.sampled_from([1e-4, 1.0, 1e3]),
)
def test_each_value_is_the_nearest_of_its_block(shape: tuple[int, ...], seed: int, magnitude: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    got = nf4.dequantize(nf4.quantize(x), shape, torch.float32)
    # A value halfway between two codes may go to either: errors are compared, not the values.
    expected = reference(x)
    torch.testing.assert_close((got - x).abs(), (expected - x).abs(), rtol=1e-4, atol=1e-6 * magnitude)


def test_constants_zeros_and_what_was_quantized_stay() -> None:
    for x in (torch.zeros(130), torch.full((130,), 2.5), torch.full((3, 64), -0.5)):
        assert torch.equal(nf4.dequantize(nf4.quantize(x), tuple(x.shape), x.dtype), x)


def test_memory_is_four_bits_and_an_eighth() -> None:
    parts = nf4.quantize(torch.randn(512, 512))
    bits = 8 * sum(part.numel() * part.element_size() for part in parts) / 512**2
    assert bits == pytest.approx(4.127, abs=1e-3)
    assert tuple((tuple(part.shape), part.dtype) for part in parts) == nf4.described((512, 512))


def test_members_of_a_batch_are_dequantized_as_each_alone() -> None:
    several = [nf4.quantize(torch.randn(7, 33)) for _ in range(3)]
    together = torch.vmap(lambda *parts: nf4.dequantize(nf4.Quantized(*parts), (7, 33), torch.float32))(
        *map(torch.stack, zip(*several, strict=True))
    )
    for one, parts in zip(together, several, strict=True):
        assert torch.equal(one, nf4.dequantize(parts, (7, 33), torch.float32))


def test_what_has_no_scale_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        nf4.quantize(torch.arange(3))
    for bad in (torch.empty(0), torch.tensor([float("nan")])):
        with pytest.raises(ValueError, match="finite"):
            nf4.quantize(bad)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_product_and_its_gradient_are_the_dense_ones(is_transposed: bool) -> None:
    weight = QuantizedWeight.of(torch.randn(33, 20, dtype=torch.float64))
    weight = weight.t() if is_transposed else weight
    x = torch.randn(4, weight.shape[1], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(weight.linear(x), x @ weight.dense().t())
    assert torch.autograd.gradcheck(weight.linear, (x,))
    several = torch.randn(2, 4, weight.shape[1], dtype=torch.float64)
    grads = torch.func.vmap(torch.func.grad(lambda x: weight.linear(x).pow(2).sum()))(several)
    torch.testing.assert_close(grads, 2 * (several @ weight.dense().t()) @ weight.dense())


INTERPRETED = """
import contextlib
import torch
from functional_booster.kernels import nf4, nf4_triton
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
nf4_triton._TILE = 256
table, generator = torch.tensor(nf4.CODE), torch.Generator().manual_seed(0)
for size in (1, 2, 63, 64, 65, 512, 513, 17000):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        members = [nf4.quantize(torch.randn(size, generator=generator) * 10.0**power) for power in (-6, 0, 2)]
        codes, scales, steps = map(torch.stack, zip(*members))
        out = torch.full((3, size + 1), 7.0, dtype=dtype)[:, :size].contiguous()
        nf4_triton.dequantize(out, codes, scales, steps.view(torch.float32), table)
        rounding = 2**-7 if dtype == torch.bfloat16 else 0.0  # to which the interpreter truncates
        for one, parts in zip(out, members):
            torch.testing.assert_close(one, nf4.dequantize(parts, (size,), dtype), rtol=rounding, atol=0)
every = torch.arange(256, dtype=torch.uint8)
every = every[(every & 127) != 127].repeat(2)  # each e4m3 but the NaNs
codes = torch.full((len(every) * 32,), 0xF0, dtype=torch.uint8)
steps = torch.tensor([0.5, 0.25, 0.75]).view(torch.int32)
out = torch.empty(1, len(every) * 64)
nf4_triton.dequantize(out, codes[None], every[None], steps.view(torch.float32)[None], table)
assert torch.equal(out[0], nf4.dequantize(nf4.Quantized(codes, every, steps), out.shape[1:], torch.float32))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernel_interpreted_on_cpu() -> None:
    command = [sys.executable, "-W", "error", "-c", INTERPRETED]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (63,), (257, 129), (2048, 8192)], ids=str)
def test_the_gpu_gives_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = nf4.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    on_gpu = nf4.Quantized(*(part.cuda() for part in parts))
    expected = nf4.dequantize(parts, shape, dtype)
    assert torch.equal(nf4.dequantize(on_gpu, shape, dtype).cpu(), expected)
    several = [torch.stack([part, part]) for part in on_gpu]
    for one in torch.vmap(lambda *each: nf4.dequantize(nf4.Quantized(*each), shape, dtype))(*several):
        assert torch.equal(one.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler's own warnings are not ours to judge
def test_compiled_products_on_the_gpu_keep_no_dense_weight() -> None:
    weight = QuantizedWeight.of(torch.randn(512, 512, device="cuda"))
    step = fb.jit(fb.grad(lambda x, weight: weight.linear(weight.linear(x)).square().sum()))
    x = torch.randn(64, 512, device="cuda")
    dense = weight.dense()
    expected = 2 * (x @ dense.t() @ dense.t()) @ dense @ dense
    torch.testing.assert_close(step(x, weight), expected, rtol=1e-3, atol=1e-2)
    graph = step.lower(x, weight).graph
    found = [node for node in graph.nodes if node.target is torch.ops.functional_booster.nf4_dequantize.default]
    assert len(found) == 4  # forward and backward of each: none is kept
