"""Flash attention: the plain-torch form is attention written out, in float64; the Triton kernels equal that form."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_booster as fb
from functional_booster.kernels import attention, graph
from functional_booster.kernels.flash_attention import documents_of, flash_attention, spans_of


@st.composite
def cases(draw: Callable[..., Any]) -> dict[str, Any]:
    """Sizes and options, the odd ones first."""
    shared, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    packed = draw(st.booleans())
    tokens = draw(st.integers(1, 13))
    return {
        "batch": draw(st.integers(1, 2)),
        "heads": shared * group,
        "shared": shared,
        "rows": tokens,
        "columns": tokens if packed else draw(st.integers(1, 13)),
        "size": draw(st.integers(1, 5)),
        "is_causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 2, 5])),
        "offset": 0 if packed else draw(st.integers(-4, 4)),
        "packed": packed,
        "bias": draw(st.sampled_from([None, (1, 1, 1, 1), (1, 1), (1, 0), (0, 1), (1,)])),
        "dropout": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "seed": draw(st.integers(0, 99)),
    }


def inputs(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Query, key, value, as views of one fused product, and the keywords of ``flash_attention``; on CPU."""
    generator = torch.Generator().manual_seed(case["seed"])
    tensors = []
    for heads, tokens in ((case["heads"], case["rows"]), *((case["shared"], case["columns"]),) * 2):
        x = torch.randn(case["batch"], tokens, heads, case["size"], generator=generator, dtype=torch.float64)
        tensors.append(x.to(dtype).transpose(1, 2))
    options: dict[str, Any] = {name: case[name] for name in ("is_causal", "window", "offset")}
    if case["packed"]:
        documents = torch.randint(0, 3, (case["batch"], case["rows"]), generator=generator).sort(1).values
        documents[0, -2:] = -1
        options["documents"] = documents
    if case["bias"] is not None:
        whole = (case["batch"], case["heads"], case["rows"], case["columns"])[-len(case["bias"]) :]
        shape = [size if kept else 1 for size, kept in zip(whole, case["bias"], strict=True)]
        options["bias"] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if case["dropout"]:
        options |= {"dropout_rate": case["dropout"], "dropout_key": fb.random.key(case["seed"])}
    return tensors, options


def visible(case: dict[str, Any], documents: torch.Tensor | None) -> torch.Tensor:
    """(B, 1, Tq, Tk), place by place as the docstring has it."""
    mask = torch.zeros(case["batch"], 1, case["rows"], case["columns"], dtype=torch.bool)
    for b, i, j in torch.cartesian_prod(*(torch.arange(mask.shape[dim]) for dim in (0, 2, 3))).tolist():
        place = i + case["offset"]
        seen = not case["is_causal"] or j <= place
        if case["window"] is not None:
            seen = seen and abs(place - j) < case["window"]
        if documents is not None:
            seen = seen and bool(documents[b, i] == documents[b, j]) and bool(documents[b, i] >= 0)
        mask[b, 0, i, j] = seen
    return mask


def written_out(
    tensors: list[torch.Tensor], options: dict[str, Any], mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and lse by ``attention.explicit`` and torch, in float64; dropout is that of ``fb.random``."""
    query, key, value = (x.double() for x in tensors)
    bias = options.get("bias", torch.zeros(())).double()
    added = (bias + torch.zeros(mask.shape)).masked_fill(~mask, -math.inf)
    dropout = None
    if "dropout_key" in options:

        def dropout(weights: torch.Tensor) -> torch.Tensor:
            return fb.random.dropout(weights, options["dropout_rate"], options["dropout_key"])

    out = attention.explicit(query, key, value, added, dropout=dropout)
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    dead = ~mask.any(-1, keepdim=True)
    scores = query @ repeated.transpose(-2, -1) * query.shape[-1] ** -0.5 + added.masked_fill(dead, 0.0)
    return out, scores.logsumexp(-1).masked_fill(dead[..., 0], -math.inf)


@settings(max_examples=60)
@given(case=cases())
def test_it_is_attention_written_out(case: dict[str, Any]) -> None:
    tensors, options = inputs(case)
    tensors = [x.requires_grad_() for x in tensors]
    expected_out, expected_lse = written_out(tensors, options, visible(case, options.get("documents")))
    out, lse = flash_attention(*tensors, **options)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    assert out.transpose(1, 2).is_contiguous()

    cotangent = torch.randn(out.shape, dtype=out.dtype)
    lse_cotangent = torch.randn(lse.shape, dtype=lse.dtype).masked_fill(lse == -math.inf, 0.0)
    grads = torch.autograd.grad([out, lse], tensors, [cotangent, lse_cotangent])
    theirs = torch.autograd.grad([expected_out, expected_lse], tensors, [cotangent, lse_cotangent])
    for mine, expected in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine, expected)


def test_partial_attentions_join_by_their_lse() -> None:
    query, key, value = (torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(3))
    whole, _ = flash_attention(query, key, value, is_causal=True)
    parts = [
        flash_attention(query, key[:, :, part], value[:, :, part], is_causal=True, offset=-part.start)
        for part in (slice(0, 3), slice(3, 7))
    ]
    shares = torch.stack([lse for _, lse in parts]).softmax(0)
    joined = sum(share[..., None] * out for share, (out, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(joined, whole)


def test_documents_are_runs_of_equal_numbers() -> None:
    spans = spans_of(torch.tensor([[4, 4, 2, 4, -1, -1, 0]]))
    assert spans.tolist() == [[[0, 0, 2, 3, 7, 7, 6], [2, 2, 3, 4, 0, 0, 7]]]
    assert documents_of(torch.tensor([0, 2, 2, 5]), 6).tolist() == [0, 0, 2, 2, 2, -1]


OPTIONS: list[dict[str, Any]] = [
    {"is_causal": True},
    {"is_causal": True, "window": 3, "documents": torch.tensor([0, 0, 0, 0, 1, 1, 1])},
    {"bias": torch.linspace(-1, 1, 7, dtype=torch.float64), "dropout_rate": 0.4, "dropout_key": fb.random.key(5)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_under_grad_vmap_jit_and_remat(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "compile", lambda traced, examples, options=None: traced)  # the graph runs uncompiled

    def loss(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attention(query, key, value, **options)
        return out.square().sum() + lse.sum()

    several = torch.randn(3, 1, 4, 7, 8, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 7, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (several[0], key, value)]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
    grads = fb.vmap(fb.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, None))(several, key, value)
    for index, query in enumerate(several):
        for mine, expected in zip(grads, fb.grad(loss, argnums=(0, 1, 2))(query, key, value), strict=True):
            torch.testing.assert_close(mine[index], expected)
    for changed in (fb.grad(fb.remat(loss), argnums=(0, 1, 2)), fb.jit(fb.grad(loss, argnums=(0, 1, 2)))):
        for mine, expected in zip(changed(several[0], key, value), grads, strict=True):
            torch.testing.assert_close(mine, expected[0])


def test_second_derivatives_and_forward_mode() -> None:
    query, key, value = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))
    documents = torch.tensor([0, 0, 1, -1])

    def loss(query: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attention(query, key, value, is_causal=True, documents=documents)
        return out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()

    gradient = fb.grad(loss)(query)
    direction = torch.randn_like(query)
    along = torch.func.jvp(loss, (query,), (direction,))[1]
    torch.testing.assert_close(along, (gradient * direction).sum())
    second = torch.func.grad(lambda x: (torch.func.grad(loss)(x) * direction).sum())(query)
    step = 1e-6 * direction
    expected = (fb.grad(loss)(query + step) - fb.grad(loss)(query - step)) / 2e-6
    torch.testing.assert_close(second, expected, rtol=1e-6, atol=1e-7)


def test_attention_hands_on_what_only_this_kernel_has() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    out, lse = attention.attention(query, key, value, is_causal=True, return_lse=True)
    torch.testing.assert_close(out, attention.attention(query, key, value, is_causal=True))
    assert torch.equal(lse, flash_attention(query, key, value, is_causal=True)[1])
    windowed = attention.attention(query, key, value, is_causal=True, window=2)
    assert torch.equal(windowed, flash_attention(query, key, value, is_causal=True, window=2)[0])
    with pytest.raises(ValueError, match="attn_mask: not together with window"):
        attention.attention(query, key, value, torch.ones(5, 5, dtype=torch.bool), window=2)


def test_keys_of_a_batch_drop_as_each_alone() -> None:
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    keys = fb.random.split(fb.random.key(0), 3)

    def drop(draw: torch.Tensor) -> torch.Tensor:
        return flash_attention(query, key, value, dropout_rate=0.5, dropout_key=draw)[0]

    for one, draw in zip(torch.vmap(drop)(keys), keys, strict=True):
        torch.testing.assert_close(one, drop(draw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(1, 3, 5, 4)}, "query heads in groups"),
        ({"value": torch.zeros(1, 2, 6, 4)}, r"value \(1, 2, 6, 4\)"),
        ({"window": 0}, "window: 0"),
        ({"scale": -1.0}, "scale: -1.0"),
        ({"bias": torch.zeros(3, 1, 5)}, r"bias: \(3, 1, 5\)"),
        ({"documents": torch.zeros(1, 4, dtype=torch.int32)}, r"documents \(1, 4\)"),
        ({"dropout_rate": 1.5, "dropout_key": fb.random.key(0)}, "1.5"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given: Any = {
        name: torch.zeros(1, heads, 5, 4) for name, heads in (("query", 4), ("key", 2), ("value", 2))
    } | change
    if "key" in change:
        given["value"] = given["key"]
    with pytest.raises(ValueError, match=message):
        flash_attention(**given)
    with pytest.raises(TypeError, match="expected one floating dtype"):
        flash_attention(torch.zeros(1, 4, 5, 4, dtype=torch.float64), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4))


def test_a_bias_to_be_learned_is_refused() -> None:
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(NotImplementedError, match="no gradient"):
        fb.grad(lambda bias: flash_attention(query, query, query, bias=bias)[0].sum())(torch.zeros(5, 5))


def check_kernels(
    case: dict[str, Any], dtype: torch.dtype, device: str = "cpu", blocks: Any = (None, None, None)
) -> None:
    """The Triton kernels, into poisoned outputs, against the plain form in float64; and once more, bit for bit."""
    from functional_booster.kernels import flash_attention as plain
    from functional_booster.kernels import flash_attention_backward_triton as backward
    from functional_booster.kernels import flash_attention_triton as forward

    tensors, options = inputs(case, dtype)
    shape = (case["batch"], case["heads"], case["rows"], case["columns"])
    bias = options["bias"].expand(shape) if "bias" in options else None
    spans = spans_of(options["documents"]) if "documents" in options else None
    draw, dropped = options.get("dropout_key"), round(case["dropout"] * 2**16)
    reach = None if case["window"] is None else case["window"] - 1
    numbers = (case["size"] ** -0.5, reach, 0 if case["is_causal"] else reach, case["offset"], dropped)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(shape[0], shape[2], shape[1], case["size"], generator=generator).to(dtype).transpose(1, 2)
    lse_cotangent = torch.randn(shape[:3], generator=generator)
    wide: Any = [x.double() for x in tensors]
    wide_bias = None if bias is None else bias.double()
    operands: Any = (*wide, spans, wide_bias, draw, *numbers)
    out, lse = plain.by_torch(*operands)
    grads = plain.backward_by_torch(cotangent.double(), lse_cotangent.double(), out, lse, *operands)

    scale, left, right, offset, _ = numbers
    on = [None if x is None else x.to(device) for x in (spans, bias, draw)]
    key = None if on[2] is None else on[2][None]
    mask = forward.Mask(left, right, offset, on[0], on[1], key, dropped, case["batch"])
    given: Any = [x.to(device) for x in tensors]
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    results = []
    for _ in range(1 if device == "cpu" else 2):
        found = [torch.full_like(x, math.nan) for x in given]
        found_out = torch.full_like(given[0], math.nan)
        found_lse = torch.full(shape[:3], math.nan, device=device)
        forward.forward(found_out, found_lse, *given, scale=scale, mask=mask, blocks=blocks[0])
        delta = backward.delta(found_out, cotangent.to(device), lse_cotangent.to(device))
        arguments: Any = (cotangent.to(device), found_lse, delta, *given, scale, mask)
        backward.grads_of_keys_and_values(found[1], found[2], *arguments, blocks=blocks[1])
        backward.grad_of_queries(found[0], *arguments, blocks=blocks[2])
        results.append([found_out, found_lse, *found])
    for mine, expected in zip(results[0], (out, lse, *grads), strict=True):
        torch.testing.assert_close(mine.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    for mine, again in zip(*results[:2], strict=True) if len(results) > 1 else ():
        assert torch.equal(mine, again)


PLAIN: dict[str, Any] = {
    "batch": 1,
    "heads": 2,
    "shared": 1,
    "rows": 21,
    "columns": 21,
    "size": 16,
    "is_causal": True,
    "window": None,
    "offset": 0,
    "packed": False,
    "bias": None,
    "dropout": 0.0,
    "seed": 0,
}
KERNEL_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full, odd head dim": {"is_causal": False, "size": 7, "columns": 35},
    "groups, offset": {"heads": 4, "shared": 2, "columns": 37, "offset": 16},
    "rows that see nothing": {"rows": 40, "columns": 19, "offset": -16},
    "window": {"window": 9, "heads": 1, "rows": 50, "columns": 50},
    "window on both sides": {"window": 6, "is_causal": False, "heads": 1, "rows": 40, "columns": 50},
    "documents": {"batch": 2, "packed": True, "heads": 1},
    "documents, full": {"packed": True, "is_causal": False},
    "documents, window, bias": {"packed": True, "window": 5, "bias": (1, 0, 1)},
    "bias": {"bias": (1, 1, 1), "rows": 17, "columns": 20},
    "dropout": {"dropout": 0.3, "batch": 2, "heads": 1, "rows": 17, "columns": 20},
    "dropout of odd rows": {"dropout": 0.3, "heads": 1, "rows": 17, "columns": 19},
}


def interpreted(name: str) -> None:
    """What the test below runs in a process of its own."""
    import contextlib

    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()  # type: ignore[assignment, misc]
    from functional_booster.kernels.flash_attention_triton import Blocks

    small, tall, wide = Blocks(16, 16, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1)
    case = PLAIN | KERNEL_CASES[name]
    check_kernels(case, torch.float32, blocks=(tall, wide, tall) if case["window"] else (small, small, small))
    if name == "causal":
        check_kernels(case, torch.float16, blocks=(small, tall, wide))


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernels_interpreted_on_cpu() -> None:
    program = (
        "from tests.test_flash_attention import KERNEL_CASES, interpreted\nfor name in KERNEL_CASES: interpreted(name)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (80, torch.float32)], ids=str
)
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_the_gpu_gives_them_to_rounding_and_always_the_same(name: str, size: int, dtype: torch.dtype) -> None:
    case = PLAIN | KERNEL_CASES[name] | {"size": size}
    for stretch in (1, 13):  # of one block, and of several
        longer = {
            "rows": case["rows"] * stretch,
            "columns": case["columns"] * stretch,
            "offset": case["offset"] * stretch,
        }
        check_kernels(case | longer, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_the_gpu_differentiates_and_batches(options: dict[str, Any]) -> None:
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    on_gpu |= {name: on_gpu[name].float() for name in ("bias",) if name in on_gpu}
    several = torch.randn(3, 1, 4, 7, 16)
    key, value = (torch.randn(1, 2, 7, 16) for _ in range(2))

    def loss(options: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attention(*tensors, **options)
        return out.square().sum() + lse.sum()

    def gradients(options: dict[str, Any], device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        grad = torch.func.grad(lambda *tensors: loss(options, *tensors), argnums=(0, 1, 2))
        return torch.vmap(grad, (0, None, None))(*(x.to(device, dtype) for x in (several, key, value)))

    expected = gradients(options, "cpu", torch.float64)
    for mine, theirs in zip(gradients(on_gpu, "cuda", torch.float32), expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-4, atol=1e-4)
