"""Losses, against torch's cross entropy and against definitions written out, over random batches in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from functional_booster import losses
from functional_booster.kernels import graph, tree
from functional_booster.losses import cross_entropy, labels_from, linear_next_token, mse, next_token

IGNORED = -100


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def batches(data: st.DrawFn) -> dict[str, Any]:
    """hidden (B, T, D), head (V, D), labels (B, T) with some ignored, weights (B, T) or None, and options."""
    batch, size, width, vocabulary = (data(st.integers(1, high)) for high in (3, 7, 5, 9))
    seed = data(st.integers(0, 1000))
    label = st.one_of(st.just(IGNORED), st.integers(0, vocabulary - 1))
    labels = data(st.lists(st.lists(label, min_size=size, max_size=size), min_size=batch, max_size=batch))
    return {
        "hidden": draw(batch, size, width, seed=seed),
        "head": draw(vocabulary, width, seed=seed + 1),
        "labels": torch.tensor(labels),
        "weights": draw(batch, size, seed=seed + 2).abs() if data(st.booleans()) else None,
        "options": {
            "label_smoothing": data(st.sampled_from([0.0, 0.1, 1.0])),
            "z_loss": data(st.sampled_from([0.0, 0.01])),
        },
        "softcap": data(st.sampled_from([None, 2.0])),
        "chunk_size": data(st.one_of(st.none(), st.integers(1, 25))),
    }


def written_out(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over (B, T) token by token, from the definition."""
    total, weight = logits.sum() * 0, torch.zeros((), dtype=logits.dtype)
    for b in range(labels.shape[0]):
        for t in range(labels.shape[1] - 1):
            label = int(labels[b, t + 1])
            if label == IGNORED:
                continue
            probabilities = logits[b, t].exp() / logits[b, t].exp().sum()
            target = torch.full_like(probabilities, label_smoothing / len(probabilities))
            target[label] += 1 - label_smoothing
            factor = 1.0 if weights is None else weights[b, t + 1]
            normalizer = logits[b, t].exp().sum().log()
            total = total + factor * (-(target * probabilities.log()).sum() + z_loss * normalizer**2)
            weight = weight + factor
    return total, weight


@given(batches())
def test_next_token_is_the_definition(case: dict[str, Any]) -> None:
    logits = F.linear(case["hidden"], case["head"])
    actual = next_token(logits, case["labels"], weights=case["weights"], **case["options"])
    torch.testing.assert_close(actual, written_out(logits, case["labels"], case["weights"], **case["options"]))


@given(batches(), st.sampled_from([IGNORED, 0]))
def test_cross_entropy_is_that_of_torch(case: dict[str, Any], ignore_index: int) -> None:
    logits, smoothing = F.linear(case["hidden"], case["head"]), case["options"]["label_smoothing"]
    labels = case["labels"].clamp(min=0) if ignore_index == 0 else case["labels"]
    total, weight = cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=smoothing)
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )
    torch.testing.assert_close(total, expected)
    assert weight == (labels != ignore_index).sum()


@given(batches())
def test_the_fused_loss_and_its_gradients_are_those_of_the_logits(case: dict[str, Any]) -> None:
    arguments = [case["hidden"], case["head"]] + ([] if case["weights"] is None else [case["weights"]])

    def fused(hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
        return linear_next_token(
            hidden,
            head,
            case["labels"],
            weights=weights,
            softcap=case["softcap"],
            chunk_size=case["chunk_size"],
            **case["options"],
        )

    def plain(hidden: torch.Tensor, head: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
        logits, cap = F.linear(hidden, head), case["softcap"]
        capped = logits if cap is None else cap * torch.tanh(logits / cap)
        return next_token(capped, case["labels"], weights=weights, **case["options"])

    torch.testing.assert_close(fused(*arguments), plain(*arguments))
    wrt = tuple(range(len(arguments)))
    torch.testing.assert_close(
        torch.func.grad_and_value(fused, argnums=wrt, has_aux=True)(*arguments),
        torch.func.grad_and_value(plain, argnums=wrt, has_aux=True)(*arguments),
    )


@given(batches(), st.data())
def test_any_split_of_the_rows_gives_the_same_sums(case: dict[str, Any], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, case["labels"].shape[0]))
    weights = case["weights"]

    def part(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_next_token(
            case["hidden"][rows],
            case["head"],
            case["labels"][rows],
            weights=None if weights is None else weights[rows],
            **case["options"],
        )

    whole = part(slice(None))
    parts = [part(rows) for rows in (slice(cut), slice(cut, None)) if len(case["labels"][rows])]
    torch.testing.assert_close(whole, tuple(sum(values) for values in zip(*parts, strict=True)))


# --- the fused loss under every transform, against the logits ---------------------------------------------------------

OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}
HIDDEN, HEAD, WEIGHTS = draw(3, 2, 5, 4, seed=0), draw(3, 7, 4, seed=1), draw(3, 2, 5, seed=2).abs()
LABELS = torch.randint(7, (3, 2, 5), generator=torch.Generator().manual_seed(3))
LABELS[0, 0, 2] = IGNORED
Loss = Callable[..., torch.Tensor]


def fused_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return linear_next_token(hidden, head, labels, weights=weights, chunk_size=3, softcap=3.0, **OPTIONS)[0]


def plain_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return next_token(3 * torch.tanh(F.linear(hidden, head) / 3), labels, weights=weights, **OPTIONS)[0]


def ignoring_nan(loss: Loss) -> Loss:
    """The loss of hidden states of which the last token's, which predict nothing, are NaN."""

    def spoilt(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return loss(torch.cat([hidden[:, :-1], torch.full_like(hidden[:, -1:], torch.nan)], dim=1), *rest)

    return spoilt


def gradient(loss: Loss) -> Callable[..., Any]:
    return torch.func.grad(loss, argnums=(0, 1, 3))


def ensemble(loss: Loss) -> Any:
    return torch.func.vmap(gradient(loss))(HIDDEN, HEAD, LABELS, WEIGHTS)


def per_sample(loss: Loss) -> Any:
    return torch.func.vmap(gradient(loss), in_dims=(0, None, 0, None))(HIDDEN, HEAD[0], LABELS, WEIGHTS[0])


def over_labels_alone(loss: Loss) -> Any:
    return torch.func.vmap(gradient(loss), in_dims=(None, None, 0, None))(HIDDEN[0], HEAD[0], LABELS, WEIGHTS[0])


def gradient_through_vmap(loss: Loss) -> Any:
    def total(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(loss)(hidden, head, LABELS, WEIGHTS).sum()

    return torch.func.grad(total, argnums=(0, 1))(HIDDEN, HEAD)


def _of_floats(loss: Loss) -> Callable[..., Any]:
    return lambda hidden, head, weights: gradient(loss)(hidden, head, LABELS[0], weights)


def reverse_over_reverse(loss: Loss) -> Any:
    primals, cotangents = ((values[index] for values in (HIDDEN, HEAD, WEIGHTS)) for index in (0, 1))
    return torch.func.vjp(_of_floats(loss), *primals)[1](tuple(cotangents))


def forward_over_reverse(loss: Loss) -> Any:
    primals, tangents = (tuple(values[index] for values in (HIDDEN, HEAD, WEIGHTS)) for index in (0, 1))
    return torch.func.jvp(_of_floats(loss), primals, tangents)


def autograd(loss: Loss) -> Any:
    wanted = [HIDDEN[0].clone().requires_grad_(), HEAD[0].clone().requires_grad_()]
    loss(*wanted, LABELS[0], WEIGHTS[0]).backward()
    return [tensor.grad for tensor in wanted]


def autograd_of_autograd(loss: Loss) -> Any:
    wanted = [HIDDEN[0].clone().requires_grad_(), HEAD[0].clone().requires_grad_()]
    first = torch.autograd.grad(loss(*wanted, LABELS[0], WEIGHTS[0]), wanted, create_graph=True)
    return torch.autograd.grad(first[0].square().sum() + first[1].sin().sum(), wanted)


def used_twice(loss: Loss) -> Any:
    def total(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return loss(hidden, head, LABELS[0], WEIGHTS[0]) * loss(hidden.cos(), head, LABELS[1], WEIGHTS[0])

    return torch.func.grad(total, argnums=(0, 1))(HIDDEN[0], HEAD[0])


def traced(loss: Loss) -> Any:
    arguments = [HIDDEN[0], HEAD[0], LABELS[0], WEIGHTS[0]]
    return graph.trace(gradient(loss), arguments)(*arguments)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode calls it
@pytest.mark.parametrize("loss", [fused_loss, ignoring_nan(fused_loss)], ids=["clean", "spoilt"])
@pytest.mark.parametrize(
    "transform",
    [
        ensemble,
        per_sample,
        over_labels_alone,
        gradient_through_vmap,
        reverse_over_reverse,
        forward_over_reverse,
        autograd,
        autograd_of_autograd,
        used_twice,
        traced,
    ],
)
def test_the_fused_loss_is_right_under(transform: Callable[[Loss], Any], loss: Loss) -> None:
    torch.testing.assert_close(transform(loss), transform(plain_loss))


def largest(graph_module: torch.fx.GraphModule) -> int:
    values = [value for node in graph_module.graph.nodes for value in tree.leaves(node.meta.get("val"))]
    return max(value.numel() for value in values if isinstance(value, torch.Tensor))


def test_the_fused_loss_never_holds_the_logits() -> None:
    """Nothing in the traced gradient is as large as the logits: a chunk of them, or the head, is the most."""
    tokens, width, vocabulary, chunk = 64, 4, 50, 8
    hidden, head = draw(1, tokens, width, seed=0), draw(vocabulary, width, seed=1)
    labels = torch.zeros(1, tokens, dtype=torch.int64)

    def loss(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return linear_next_token(hidden, head, labels.to(hidden.device), chunk_size=chunk)[0]

    gradients = graph.trace(torch.func.grad(loss, argnums=(0, 1)), [hidden, head])
    assert largest(gradients) == chunk * vocabulary
    forward = graph.trace(lambda *arguments: [loss(*arguments)], [hidden, head])
    assert sum(node.target is torch.ops.aten.mm.default for node in forward.graph.nodes) == tokens // chunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    hidden, head = draw(2, 300, 8, seed=0).to(dtype), (0.3 * draw(30, 8, seed=1)).to(dtype)
    labels = torch.randint(30, (2, 300), generator=torch.Generator().manual_seed(2))
    grads, (total, weight) = torch.func.grad_and_value(linear_next_token, argnums=(0, 1), has_aux=True)(
        hidden, head, labels, chunk_size=16
    )
    exact_grads, (exact, _) = torch.func.grad_and_value(linear_next_token, argnums=(0, 1), has_aux=True)(
        hidden.double(), head.double(), labels
    )
    assert (total.dtype, weight.dtype, grads[0].dtype, grads[1].dtype) == (torch.float32, torch.float32, dtype, dtype)
    assert weight == 2 * 299
    assert abs(total - exact) < 1e-3 * exact
    for gradient_, expected in zip(grads, exact_grads, strict=True):
        assert (gradient_ - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("weights", [None, torch.ones(2, 5, dtype=torch.float64)])
def test_a_batch_of_ignored_labels_has_loss_weight_and_gradient_zero(weights: torch.Tensor | None) -> None:
    labels = torch.full((2, 5), IGNORED)
    for loss in (
        lambda hidden, head: linear_next_token(hidden, head, labels, weights=weights, **OPTIONS),
        lambda hidden, head: next_token(F.linear(hidden, head), labels, weights=weights, **OPTIONS),
    ):
        grads, (total, weight) = torch.func.grad_and_value(loss, argnums=(0, 1), has_aux=True)(HIDDEN[0], HEAD[0])
        assert total == 0
        assert weight == 0
        assert all((gradient_ == 0).all() for gradient_ in grads)


@given(batches(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.booleans())
def test_ignored_tokens_count_nothing_whatever_their_logits(
    case: dict[str, Any], spoilt: float, all_of_it: bool
) -> None:
    """Loss, weight and gradients are those of a batch where the ignored tokens are ordinary ones, to the last bit."""
    labels = torch.full_like(case["labels"], IGNORED) if all_of_it else case["labels"]
    hidden, head, weights = case["hidden"], case["head"], case["weights"]
    logits, vocabulary = F.linear(hidden, head), head.shape[0]
    ignored = labels == IGNORED
    unpredicted = F.pad(ignored[:, 1:], (0, 1), value=True)  # the tokens whose next one is ignored
    spoilt_weights = None if weights is None else weights.masked_fill(ignored, spoilt)

    def of_logits(loss: Any, weights: torch.Tensor | None) -> Any:
        def call(logits: torch.Tensor) -> Any:
            return loss(logits, labels, weights=weights, **case["options"])

        return torch.func.grad_and_value(call, has_aux=True)

    for loss, rows in ((cross_entropy, ignored), (next_token, unpredicted)):
        clean = of_logits(loss, weights)(logits)
        for spoilt_logits in (  # all of a row, or one class of it
            logits.masked_fill(rows[..., None], spoilt),
            logits.masked_fill(rows[..., None] & (torch.arange(vocabulary) == 0), spoilt),
        ):
            torch.testing.assert_close(of_logits(loss, spoilt_weights)(spoilt_logits), clean, rtol=0, atol=0)
        assert (clean[0][rows] == 0).all()

    def fused(weights: torch.Tensor | None) -> Any:
        def call(hidden: torch.Tensor, head: torch.Tensor) -> Any:
            options = case["options"] | {"softcap": case["softcap"], "chunk_size": case["chunk_size"]}
            return linear_next_token(hidden, head, labels, weights=weights, **options)

        return torch.func.grad_and_value(call, argnums=(0, 1), has_aux=True)

    clean = fused(weights)(hidden, head)
    spoilt_hidden = hidden.masked_fill(unpredicted[..., None], spoilt)
    torch.testing.assert_close(fused(spoilt_weights)(spoilt_hidden, head), clean, rtol=0, atol=0)
    assert (clean[0][0][unpredicted] == 0).all()
    if unpredicted.all():  # then even a head of NaN is multiplied with nothing
        grads, (total, weight) = fused(spoilt_weights)(spoilt_hidden, torch.full_like(head, spoilt))
        assert total == 0 and weight == 0 and not any(gradient_.any() for gradient_ in grads)


def test_an_impossible_class_does_not_spoil_ignored_tokens() -> None:
    logits = draw(1, 3, 5, seed=0)
    logits[..., 0] = -torch.inf
    labels = torch.tensor([[1, IGNORED, 2]])
    grads, (total, weight) = torch.func.grad_and_value(next_token, has_aux=True)(logits, labels)
    assert weight == 1
    torch.testing.assert_close(total, F.cross_entropy(logits[0, 1:2], labels[0, 2:]))
    assert grads.isfinite().all()


@given(st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_mse_is_that_of_torch(rows: int, columns: int, weighted: bool) -> None:
    prediction, target = draw(rows, columns, seed=0), draw(rows, columns, seed=1)
    weights = draw(rows, 1, seed=2).abs() if weighted else None
    total, weight = mse(prediction, target, weights)
    squares = F.mse_loss(prediction, target, reduction="none")
    counted = torch.ones_like(squares) if weights is None else weights.expand_as(squares)
    torch.testing.assert_close(total, (squares * counted).sum())
    torch.testing.assert_close(weight, counted.sum())


untyped: Any = losses  # arguments of wrong types on purpose


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: next_token(HIDDEN[0], LABELS[0][:, :4]), ValueError, r"labels: shape \(2, 4\), expected \(2, 5\)"),
        (lambda: next_token(HIDDEN[0], LABELS[0].int()), TypeError, "labels: torch.int32, expected torch.int64"),
        (lambda: next_token(HIDDEN[0, 0], LABELS[0, 0]), ValueError, r"logits: shape \(5, 4\), expected 3 dims"),
        (lambda: next_token(LABELS, LABELS[..., 0]), TypeError, "logits: torch.int64, expected a floating-point"),
        (lambda: untyped.next_token(HIDDEN[0], LABELS[0].tolist()), TypeError, "labels: list, expected a torch.Tensor"),
        (lambda: untyped.next_token(HIDDEN[0].tolist(), LABELS[0]), TypeError, "logits: list, expected a torch.Tensor"),
        (lambda: cross_entropy(HIDDEN[0], LABELS[0].double()), TypeError, "labels: torch.float64, expected torch.int"),
        (lambda: cross_entropy(HIDDEN[0], LABELS), ValueError, r"labels: shape \(3, 2, 5\), expected \(2, 5\)"),
        (lambda: untyped.cross_entropy(HIDDEN[0], LABELS[0], weights=[1.0]), TypeError, "weights: list, expected a t"),
        (
            lambda: untyped.linear_next_token(HIDDEN[0], HEAD[0], [1]),
            TypeError,
            "labels: list, expected a torch.Tensor",
        ),
        (lambda: untyped.linear_next_token(HIDDEN[0], None, LABELS[0]), TypeError, "head: NoneType, expected a torch"),
        (lambda: untyped.labels_from([[1]]), TypeError, "input_ids: list, expected a torch.Tensor"),
        (lambda: untyped.labels_from(LABELS[0], [1]), TypeError, "attention_mask: list, expected a torch.Tensor"),
        (lambda: untyped.mse(HIDDEN, 0.0), TypeError, "target: float, expected a torch.Tensor"),
        (lambda: cross_entropy(HIDDEN[0], LABELS[0] + 7), IndexError, "out of bounds"),
        (lambda: linear_next_token(HIDDEN[0], HEAD[0], LABELS[0] + 7), IndexError, "out of bounds"),
        (lambda: next_token(HIDDEN[0], LABELS[0], label_smoothing=1.5), ValueError, "label_smoothing: 1.5"),
        (lambda: next_token(HIDDEN[0], LABELS[0], z_loss=-1.0), ValueError, "z_loss: -1.0"),
        (lambda: next_token(HIDDEN[0], LABELS[0], weights=WEIGHTS), ValueError, r"weights: shape \(3, 2, 5\)"),
        (lambda: linear_next_token(HIDDEN[0], HEAD[0].mT, LABELS[0]), ValueError, r"head: shape \(4, 7\)"),
        (lambda: linear_next_token(HIDDEN[0], HEAD[0].float(), LABELS[0]), TypeError, "head: torch.float32"),
        (lambda: linear_next_token(HIDDEN[0], HEAD[0], LABELS[0], chunk_size=0), ValueError, "chunk_size: 0"),
        (lambda: linear_next_token(HIDDEN[0], HEAD[0], LABELS[0], softcap=0.0), ValueError, "softcap: 0.0"),
        (lambda: mse(HIDDEN, HEAD), ValueError, "target: shape"),
        (lambda: mse(HIDDEN, HIDDEN, HEAD), ValueError, r"weights: shape \(3, 7, 4\) does not broadcast"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_labels_from_a_text_leave_padding_out() -> None:
    """What counts is each pair (token, next token) of two real tokens."""
    tokens = torch.arange(1, 19).view(3, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
    labels = labels_from(tokens, mask)
    pairs = (mask[:, :-1] * mask[:, 1:]).bool()
    assert torch.equal(labels[:, 1:] != IGNORED, pairs)
    assert torch.equal(labels[:, 1:][pairs], tokens[:, 1:][pairs])
    assert next_token(torch.randn(3, 6, 20), labels)[1] == 3 + 3 + 2
    assert labels_from(tokens) is tokens
    assert torch.equal(labels_from(tokens, mask.bool(), ignore_index=-1), labels.where(labels != IGNORED, -1))
    with pytest.raises(ValueError, match=r"attention_mask: shape \(3, 1, 6, 6\), expected \(3, 6\), as input_ids"):
        labels_from(tokens, torch.ones(3, 1, 6, 6))
