"""Compute primitives equal torch's, in float64, on odd shapes."""

from __future__ import annotations

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from functional_booster.kernels import attention, gelu


@hypothesis.given(
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    queries=st.integers(1, 5),
    keys=st.integers(1, 5),
    kind=st.sampled_from(["none", "causal", "bool", "additive"]),
    scale=st.sampled_from([None, 0.3]),
)
def test_explicit_attention_is_torchs(
    groups: int, repeats: int, queries: int, keys: int, kind: str, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(queries * 31 + keys)
    q, k, v = (
        torch.randn(2, heads, length, 3, dtype=torch.float64, generator=generator)
        for heads, length in ((groups * repeats, queries), (groups, keys), (groups, keys))
    )
    mask = None
    if kind == "bool":
        mask = torch.rand(2, 1, queries, keys, generator=generator) > 0.4  # rows without any True among them
    elif kind == "additive":
        mask = torch.randn(2, 1, queries, keys, dtype=torch.float64, generator=generator)
    options = {"attn_mask": mask, "is_causal": kind == "causal", "scale": scale}
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    torch.testing.assert_close(attention.explicit(q, k, v, **options), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@hypothesis.given(seed=st.integers(0, 99), size=st.integers(0, 33), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_gelu_and_its_pullback_are_torchs(approximate: str, seed: int, size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, cotangent = (scale * torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(2))
    torch.testing.assert_close(gelu.gelu(x, approximate), F.gelu(x, approximate=approximate), rtol=1e-12, atol=1e-12)
    expected = torch.ops.aten.gelu_backward(cotangent, x, approximate=approximate)
    torch.testing.assert_close(gelu.gelu_backward(cotangent, x, approximate), expected, rtol=1e-10, atol=1e-12)


def test_gelu_in_half_precision_is_computed_in_float32() -> None:
    x = torch.linspace(-4, 4, 101).bfloat16()
    assert torch.equal(gelu.gelu(x, "tanh"), F.gelu(x.float(), approximate="tanh").bfloat16())
