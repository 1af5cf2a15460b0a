"""Rotary positions of queries and keys in one pass, against the models' formula and Hugging Face's."""

from __future__ import annotations

import kernel_conformance as conformance
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_conformance import Case, Draw
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from functional_booster.kernels import rotary


def arguments(draw: Draw, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    batch, tokens, half = (draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 3, 17], [1, 4, 24]))
    heads, keys = draw(st.sampled_from([(1, 1), (2, 1), (6, 2), (5, 5)]))
    wide = torch.promote_types(dtype, torch.float32)
    q, k = fused(batch, tokens, heads, keys, 2 * half, draw(st.integers(0, 99)), dtype)
    if draw(st.booleans()):
        q, k = q.contiguous(), k.contiguous()
    angles = torch.rand(draw(st.sampled_from([1, batch])), 1, tokens, half, dtype=torch.float64) * 6
    return q, k, angles.cos().to(wide), angles.sin().to(wide)


def fused(
    batch: int, tokens: int, heads: int, keys: int, size: int, seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as a model has them: views of one product (B, T, (H + 2K) d)."""
    generator = torch.Generator().manual_seed(seed)
    product = torch.randn(batch, tokens, (heads + 2 * keys) * size, dtype=torch.float64, generator=generator).to(dtype)
    parts = product.split([heads * size, keys * size, keys * size], dim=-1)
    q, k = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts[:2])
    return q, k


def hugging_face(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.cat([table, table], -1).squeeze(1) for table in (cos, sin))
    turned = apply_rotary_pos_emb(q, k, cos, sin)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


CASES = {
    "rotary": Case(
        lambda q, k, cos, sin: rotary.by_triton(q, k, cos, sin, False),
        hugging_face,
        arguments,
        {"rotary": rotary._on_cuda},
        (0, 1),
    )
}


@settings(max_examples=10)
@given(data=st.data())
def test_the_primitive_in_plain_torch(data: st.DataObject) -> None:
    conformance.check(CASES["rotary"], data.draw, torch.float64)


def test_the_triton_kernel_interpreted() -> None:
    conformance.interpreted("test_rotary", examples=6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.FLOATS, ids=str)
def test_the_triton_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    conformance.on_gpu(CASES["rotary"], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "keys", "size"), [(32, 8, 64), (32, 8, 128), (96, 1, 256)])
def test_models_shapes_on_a_gpu(heads: int, keys: int, size: int, dtype: torch.dtype) -> None:
    q, k = fused(2, 500, heads, keys, size, 0, dtype)
    angles = torch.rand(1, 1, 500, size // 2, device="cuda") * 6
    args = (q.cuda(), k.cuda(), angles.cos(), angles.sin())
    conformance.compare_sums(CASES["rotary"], args, dtype)


def test_it_is_hugging_faces() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = fused(2, 5, 4, 2, 8, 0, torch.float32)
    angles = torch.rand(2, 1, 5, 4)
    twice = torch.cat([angles, angles], -1).squeeze(1)
    expected = modeling.apply_rotary_pos_emb(q, k, twice.cos(), twice.sin())
    torch.testing.assert_close(rotary.rotary(q, k, angles.cos(), angles.sin()), expected)


def test_learned_tables_have_gradients() -> None:
    q, k = fused(1, 3, 2, 1, 4, 0, torch.float64)
    angles = torch.rand(1, 1, 3, 2, dtype=torch.float64)

    def turned(angles: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten() for part in rotary.rotary(q, k, angles.cos(), angles.sin())])

    assert torch.autograd.gradcheck(turned, (angles.requires_grad_(),))
    assert rotary._lacks(q, k, angles, angles) == "it gives no gradients of cos and sin"


def test_shapes_that_do_not_fit() -> None:
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"q, k, cos and sin: shapes .* expected \(B, H, T, d\), \(B, K, T, d\)"):
        rotary.rotary(q, k, torch.ones(1, 1, 4, 2), torch.ones(1, 1, 3, 2))
