"""Keys and draws: known answers, the same bits however they are drawn, and that they look random."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from functional_booster.kernels import random, threefry
from functional_booster.sharding import initializers
from functional_booster.sharding.abstract import ArrayInfo, initialize

KEY = random.key(2024)
WORD = 0xFFFFFFFF

# Every kind of draw, as (key, shape, keywords) -> tensor.
DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "bits": random.bits,
    "uniform": random.uniform,
    "uniform64": lambda key, shape, **at: random.uniform(key, shape, torch.float64, -3.0, 5.0, **at),
    "normal": random.normal,
    "normal64": lambda key, shape, **at: random.normal(key, shape, torch.float64, **at),
    "normal16": lambda key, shape, **at: random.normal(key, shape, torch.bfloat16, **at),
    "truncated_normal": lambda key, shape, **at: random.truncated_normal(key, -1.0, 2.0, shape, **at),
    "bernoulli": lambda key, shape, **at: random.bernoulli(key, 0.3, shape, **at),
    "randint": lambda key, shape, **at: random.randint(key, shape, -7, 1000, **at),
    "dropout": lambda key, shape, **at: random.dropout(torch.ones(shape, device=key.device), 0.4, key, **at),
}


def words(key0: int, key1: int) -> torch.Tensor:
    return torch.tensor([key0 - (key0 >> 31 << 32), key1 - (key1 >> 31 << 32)], dtype=torch.int32)


def unsigned(bits: torch.Tensor) -> list[int]:
    return [word & WORD for word in bits.flatten().tolist()]


class TestKnownAnswers:
    """The vectors that the Random123 distribution tests threefry2x32 with 20 rounds against (kat_vectors)."""

    VECTORS = (
        ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    )
    PLACED = ((0, VECTORS[0]), (-2, VECTORS[1]))  # where the words lie in a stream: in the blocks 0 and -1

    @pytest.mark.parametrize(("key", "counter", "expected"), VECTORS)
    def test_one_block(self, key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]) -> None:
        assert threefry.threefry(*key, *counter) == expected

    @pytest.mark.parametrize(("start", "vector"), PLACED)
    @pytest.mark.parametrize("size", [2, 200])  # Python integers, and torch arithmetic
    def test_the_op(self, size: int, start: int, vector: tuple[tuple[int, int], ...]) -> None:
        key, _, expected = vector
        assert unsigned(threefry.bits(words(*key), None, start, (size,), (1,), 32)[:2]) == list(expected)

    @given(st.integers(0, WORD), st.integers(0, WORD), st.integers(-(2**62), 2**62 - 100), st.sampled_from([1, 33, 70]))
    def test_torch_arithmetic_equals_integers(self, key0: int, key1: int, start: int, size: int) -> None:
        drawn = threefry.bits(words(key0, key1), None, start, (size,), (1,), 32)
        places = [(start + i >> 1, (start + i) % 2) for i in range(size)]
        assert unsigned(drawn) == [threefry.threefry(key0, key1, b & WORD, b >> 32 & WORD)[w] for b, w in places]

    def test_narrow_elements_are_the_halves_of_the_words(self) -> None:
        for size in (3, 10, 1001, 300_000):
            narrow = threefry.bits(KEY, None, 0, (2 * size,), (1,), 16)
            assert torch.equal(narrow.view(torch.int32), threefry.bits(KEY, None, 0, (size,), (1,), 32))

    def test_long_draws_do_not_depend_on_the_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = [random.bits(KEY, (70_001,)), random.bits(KEY, (301, 40), global_shape=(301, 99), start=(0, 7))]
        monkeypatch.setattr(threefry, "_CHUNK", 5001)
        chunked = [random.bits(KEY, (70_001,)), random.bits(KEY, (301, 40), global_shape=(301, 99), start=(0, 7))]
        torch.testing.assert_close(whole, chunked, rtol=0, atol=0)


class TestKeys:
    @given(st.integers())
    def test_seed_is_taken_modulo_two_to_the_64(self, seed: int) -> None:
        key = random.key(seed)
        low, high = unsigned(key)
        assert key.dtype == torch.int32 and high << 32 | low == seed % 2**64

    @pytest.mark.parametrize("seed", [1.0, "1", None, True, [1]])
    def test_seed_of_another_type(self, seed: Any) -> None:
        with pytest.raises(TypeError, match="seed: expected an integer"):
            random.key(seed)

    @given(st.integers(-(2**61), 2**61 - 1))
    def test_fold_in_of_int_and_of_tensor(self, data: int) -> None:
        expected = random.fold_in(KEY, data)
        assert torch.equal(random.fold_in(KEY, torch.tensor(data)), expected)
        assert torch.equal(random.fold_in(KEY, data + 2**62), expected)
        if -(2**31) <= data < 2**31:
            assert torch.equal(random.fold_in(KEY, torch.tensor(data, dtype=torch.int32)), expected)

    def test_children_differ_from_each_other_and_from_draws(self) -> None:
        children = [*random.split(KEY, 3000), *(random.fold_in(KEY, data) for data in range(-500, 500))]
        pairs = [tuple(pair) for pair in random.bits(KEY, (3000, 2)).tolist()]
        assert len({tuple(key.tolist()) for key in children} | {*pairs, tuple(KEY.tolist())}) == 7001

    def test_a_split_into_more_starts_with_the_split_into_fewer(self) -> None:
        assert torch.equal(random.split(KEY, 9)[:4], random.split(KEY, 4))

    @pytest.mark.parametrize("data", [1.5, True, None, torch.tensor([1]), torch.tensor(1.0), torch.tensor(True)])
    def test_fold_in_of_something_else(self, data: Any) -> None:
        with pytest.raises(TypeError, match="data: expected an int or an integer 0-d tensor"):
            random.fold_in(KEY, data)

    @pytest.mark.parametrize("key", [0, torch.zeros(2), torch.zeros(3, 2, dtype=torch.int32), None])
    def test_what_is_no_key(self, key: Any) -> None:
        for use in (random.split, random.bits, random.normal, lambda key: random.fold_in(key, 1)):
            with pytest.raises(TypeError, match="key: expected int32 of shape"):
                use(key)


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(global shape, start, shape) of a slice."""
    whole = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in whole)
    return whole, start, tuple(draw(st.integers(0, size - begin)) for size, begin in zip(whole, start, strict=True))


class TestPositions:
    @pytest.mark.parametrize("name", sorted(DRAWS))
    @given(slices(), st.sampled_from(["ints", "tensors", "mixed"]))
    def test_the_draw_of_a_slice_is_the_slice_of_the_draw(self, name: str, where: Any, form: str) -> None:
        whole, start, shape = where
        window = tuple(slice(begin, begin + size) for begin, size in zip(start, shape, strict=True))
        given_start = [
            torch.tensor(begin) if form == "tensors" or (form == "mixed" and dim % 2) else begin
            for dim, begin in enumerate(start)
        ]
        drawn = DRAWS[name](KEY, shape, global_shape=whole, start=given_start)
        assert torch.equal(drawn, DRAWS[name](KEY, whole)[window])

    @given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.booleans())
    def test_shards_under_vmap(self, rows: int, shards: int, width: int, batch_keys: bool) -> None:
        """A virtual mesh: key replicated or batched, start batched, nested; the shards are those of the whole."""
        keys = random.split(KEY, rows)
        whole = torch.stack([random.bits(key, (3, shards * width)) for key in keys])

        def shard(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return random.bits(key, (3, width), global_shape=(3, shards * width), start=(0, index * width))

        index = torch.arange(shards)
        expected = whole.view(rows, 3, shards, width).movedim(2, 1)
        if batch_keys:
            drawn = vmap(lambda key: vmap(lambda i: shard(key, i))(index))(keys)
            crossed = vmap(lambda i: vmap(lambda key: shard(key, i))(keys))(index)
            assert torch.equal(crossed.movedim(0, 1), expected)
        else:
            drawn = torch.stack([vmap(lambda i, key=key: shard(key, i))(index) for key in keys])
        assert torch.equal(drawn, expected)

    def test_where_it_cannot_lie(self) -> None:
        size: Any = 3
        with pytest.raises(ValueError, match="start: needs global_shape"):
            random.bits(KEY, (3,), start=(0,))
        with pytest.raises(ValueError, match=r"dim 1: a draw of 3 from 2 on does not lie in global_shape \(4, 4\)"):
            random.bits(KEY, (1, 3), global_shape=(4, 4), start=(0, 2))
        with pytest.raises(ValueError, match="a draw of 1 dims needs as many in global_shape and start, got 2 and 1"):
            random.bits(KEY, (3,), global_shape=(4, 4), start=(0,))
        with pytest.raises(TypeError, match=r"start\[0\]: expected an int or an integer 0-d tensor"):
            random.bits(KEY, (3,), global_shape=(4,), start=(torch.tensor(0.5),))
        with pytest.raises(TypeError, match="shape: expected a tuple of sizes, got int"):
            random.bits(KEY, size)
        with pytest.raises(ValueError, match="shape: a size is negative"):
            random.bits(KEY, (3, -1))


class TestTransforms:
    @pytest.mark.parametrize("name", sorted(DRAWS))
    def test_vmap_over_keys_equals_a_loop(self, name: str) -> None:
        keys = random.split(KEY, 5)
        for shape in ((), (3,), (2, 33)):
            batched = vmap(lambda key, shape=shape: DRAWS[name](key, shape))(keys)
            assert torch.equal(batched, torch.stack([DRAWS[name](key, shape) for key in keys]))
            last = vmap(lambda key, shape=shape: DRAWS[name](key, shape), in_dims=1)(keys.T)
            assert torch.equal(last, batched)

    @pytest.mark.parametrize("name", sorted(DRAWS))
    def test_traced_on_fake_tensors(self, name: str) -> None:
        traced = make_fx(lambda key: DRAWS[name](key, (5, 7)), tracing_mode="fake")(KEY)
        drawn = [node for node in traced.graph.nodes if "threefry" in str(node.target)]
        assert len(drawn) == (2 if name.endswith("64") or name == "randint" else 1)
        assert len(traced.graph.nodes) < 25
        for key in (KEY, random.key(3)):
            assert torch.equal(traced(key), DRAWS[name](key, (5, 7)))

    def test_keys_under_vmap_and_traced(self) -> None:
        def children(key: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
            one, two = random.split(key)
            return torch.stack([random.fold_in(one, step), random.fold_in(two, 7), *random.split(two, 3)])

        keys, steps = random.split(KEY, 4), torch.arange(4)
        expected = torch.stack([children(key, step) for key, step in zip(keys, steps, strict=True)])
        assert torch.equal(vmap(children)(keys, steps), expected)
        assert torch.equal(vmap(children, (None, 0))(KEY, steps)[2], children(KEY, steps[2]))
        traced = make_fx(vmap(children), tracing_mode="fake")(keys, steps)
        assert torch.equal(traced(keys, steps), expected)

    def test_permutation_and_categorical_under_vmap_and_traced(self) -> None:
        logits = random.normal(KEY, (4, 9))

        def both(key: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return random.permutation(key, logits), random.categorical(key, logits)

        keys = random.split(KEY, 4)
        expected = [torch.stack(parts) for parts in zip(*map(both, keys, logits), strict=True)]
        assert all(map(torch.equal, vmap(both)(keys, logits), expected))
        assert all(map(torch.equal, make_fx(vmap(both), tracing_mode="fake")(keys, logits)(keys, logits), expected))

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what Dynamo itself does
    def test_under_dynamo(self) -> None:
        compiled = torch.compile(
            lambda key: random.normal(random.fold_in(key, 3), (5,)), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(KEY), random.normal(random.fold_in(KEY, 3), (5,)))


class TestDtypes:
    def test_all_dtypes_share_the_leading_digits(self) -> None:
        fine = random.uniform(KEY, (1000,), torch.float64)
        for dtype, digits in ((torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)):
            coarse = random.uniform(KEY, (1000,), dtype)
            assert coarse.dtype == dtype
            assert torch.equal(coarse.double(), (fine * 2.0**digits).floor() * 2.0**-digits)
        fine = random.normal(KEY, (1000,), torch.float64)
        torch.testing.assert_close(random.normal(KEY, (1000,)).double(), fine, rtol=0, atol=1e-3)
        assert torch.equal(random.normal(KEY, (1000,), torch.bfloat16), random.normal(KEY, (1000,)).bfloat16())

    def test_masks_do_not_depend_on_the_dtype(self) -> None:
        masks = [
            random.dropout(torch.ones(999, dtype=dtype), 0.5, KEY) != 0
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        ]
        assert all(torch.equal(mask, masks[0]) for mask in masks)

    @given(
        st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
        st.floats(-100, 100, width=16),
        st.floats(2**-6, 100, width=16),
    )
    def test_uniform_stays_in_the_half_open_interval(self, dtype: torch.dtype, minval: float, length: float) -> None:
        maxval = minval + length
        drawn = random.uniform(KEY, (4096,), dtype, minval, maxval)
        low, high = (torch.tensor(bound, dtype=dtype) for bound in (minval, maxval))
        assert drawn.dtype == dtype and drawn.ge(low).all() and drawn.lt(high).logical_or(low == high).all()

    def test_bad_arguments(self) -> None:
        with pytest.raises(TypeError, match=r"dtype: expected float64, .* got torch.int32"):
            random.normal(KEY, (2,), torch.int32)
        with pytest.raises(ValueError, match=r"uniform: minval 1.0 is not below maxval 1.0"):
            random.uniform(KEY, (2,), minval=1.0)
        with pytest.raises(ValueError, match=r"truncated_normal: lower 2.0 is not below upper -2.0"):
            random.truncated_normal(KEY, 2.0, -2.0)
        with pytest.raises(ValueError, match=r"randint: \[3, 3\) is empty"):
            random.randint(KEY, (2,), 3, 3)
        with pytest.raises(ValueError, match=r"randint: \[0, 129\) is empty or does not fit torch.int8"):
            random.randint(KEY, (2,), 0, 129, torch.int8)
        with pytest.raises(ValueError, match="permutation: x has no dim to permute"):
            random.permutation(KEY, torch.tensor(3))
        with pytest.raises(TypeError, match=r"dropout: x must be floating-point, got torch\.int64"):
            random.dropout(torch.ones(2, dtype=torch.int64), 0.5, KEY)
        wrong: list[Any] = [-0.1, 1.1, math.nan, True, "half"]
        for given_p in wrong:
            with pytest.raises(ValueError, match=r"dropout: p must be a number in \[0, 1\]"):
                random.dropout(torch.ones(2), given_p, KEY)
            with pytest.raises(ValueError, match=r"bernoulli: p must be a number in \[0, 1\]"):
                random.bernoulli(KEY, given_p)


class TestDropout:
    @given(st.integers(0, 2**16), st.lists(st.integers(0, 5), max_size=3))
    def test_forward_and_backward_are_one_mask_and_one_scale(self, dropped: int, shape: list[int]) -> None:
        p = dropped / 2**16
        x = random.normal(random.fold_in(KEY, 1), tuple(shape), torch.float64)
        ones = random.dropout(torch.ones_like(x), p, KEY)
        values = {0.0, 1.0 / (1.0 - p)} if 0 < p < 1 else {1.0 - p}
        assert set(ones.flatten().tolist()) <= values
        torch.testing.assert_close(random.dropout(x, p, KEY), x * ones, rtol=1e-15, atol=0)
        torch.testing.assert_close(grad(lambda x: random.dropout(x, p, KEY).sum())(x), ones, rtol=0, atol=0)
        leaf = x.clone().requires_grad_()
        random.dropout(leaf, p, KEY).sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, ones)

    def test_ends(self) -> None:
        x = random.normal(KEY, (100,))
        assert random.dropout(x, 0.0, KEY) is x
        assert torch.equal(random.dropout(x, 1.0, KEY), torch.zeros(100))

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_mean_stays(self, p: float) -> None:
        count = 400_000
        kept = random.dropout(torch.ones(count), p, KEY)
        assert abs(kept.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / count)

    def test_per_example_gradients(self) -> None:
        keys, x = random.split(KEY, 3), random.normal(KEY, (3, 50))
        each = vmap(grad(lambda x, key: random.dropout(x, 0.5, key).square().sum()))(x, keys)
        loop = [
            grad(lambda x, key: random.dropout(x, 0.5, key).square().sum())(*pair) for pair in zip(x, keys, strict=True)
        ]
        assert torch.equal(each, torch.stack(loop))


def p_of_chi_square(statistic: float, freedom: int) -> float:
    """The upper tail: P(chi-square with ``freedom`` degrees > statistic) = Q(freedom / 2, statistic / 2)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def p_of_counts(counts: torch.Tensor, expected: torch.Tensor | float) -> float:
    """Pearson's test of counts against what is expected."""
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    return p_of_chi_square(statistic, counts.numel() - 1)


def p_of_kolmogorov(draws: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The Kolmogorov-Smirnov test of draws against a continuous distribution (Stephens' correction)."""
    count = draws.numel()
    heights = cdf(draws.double().flatten().sort().values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max((steps[1:] - heights).max().item(), (heights - steps[:-1]).max().item())
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    return max(0.0, min(1.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * j * j * scaled**2) for j in range(1, 101))))


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's coefficient times the square root of the count: standard normal where x and y are independent."""
    x, y = x.double().flatten(), y.double().flatten()
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item() * math.sqrt(x.numel())


# Seeds are fixed, so that a test passes or fails for good; a good generator fails each of them once in 10,000 seeds.
LEVEL = 1e-4
SIGMAS = 3.9  # the two-sided quantile of the normal at that level


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 17])
class TestStatistics:
    COUNT = 100_000

    def test_uniform(self, seed: int) -> None:
        for dtype in (torch.float32, torch.float64):
            draws = random.uniform(random.key(seed), (self.COUNT,), dtype)
            assert p_of_kolmogorov(draws, lambda u: u) > LEVEL
            assert p_of_counts((draws * 1000).long().bincount(minlength=1000), self.COUNT / 1000) > LEVEL

    def test_every_bit(self, seed: int) -> None:
        draws = random.bits(random.key(seed), (self.COUNT,))
        ones = torch.stack([(draws >> bit & 1) for bit in range(32)]).double()
        scores = (ones.mean(1) - 0.5) * 2 * math.sqrt(self.COUNT)
        assert p_of_chi_square(scores.square().sum().item(), 32) > LEVEL
        pairs = torch.corrcoef(ones)[torch.triu_indices(32, 32, 1).unbind()] * math.sqrt(self.COUNT)
        assert p_of_chi_square(pairs.square().sum().item(), 32 * 31 // 2) > LEVEL

    def test_normal(self, seed: int) -> None:
        for dtype in (torch.float32, torch.float64):
            draws = random.normal(random.key(seed), (self.COUNT,), dtype).double()
            assert p_of_kolmogorov(draws, torch.special.ndtr) > LEVEL
            # The k-th moment of a standard normal is 0 or (k - 1)!!, that of its square (2k - 1)!!.
            for k, (mean, square) in {1: (0, 1), 2: (1, 3), 3: (0, 15), 4: (3, 105)}.items():
                score = (draws**k - mean).mean().item() * math.sqrt(self.COUNT / (square - mean**2))
                assert abs(score) < SIGMAS, f"moment {k}"

    def test_truncated_normal(self, seed: int) -> None:
        for lower, upper in ((-2.0, 2.0), (0.5, 3.0), (-math.inf, 0.0)):
            draws = random.truncated_normal(random.key(seed), lower, upper, (self.COUNT,))
            low, high = (torch.special.ndtr(torch.tensor(end, dtype=torch.float64)) for end in (lower, upper))
            assert draws.min() >= lower and draws.max() <= upper
            assert (
                p_of_kolmogorov(draws, lambda x, low=low, high=high: (torch.special.ndtr(x) - low) / (high - low))
                > LEVEL
            )

    def test_bernoulli(self, seed: int) -> None:
        for p in (0.001, 0.3, 0.5, 0.97):
            rate = random.bernoulli(random.key(seed), p, (self.COUNT,)).double().mean().item()
            assert abs(rate - p) < SIGMAS * math.sqrt(p * (1 - p) / self.COUNT)
        p = torch.tensor([0.0, 0.2, 1.0])
        draws = random.bernoulli(random.key(seed), p, (self.COUNT, 3)).double().mean(0)
        assert draws[0] == 0 and draws[2] == 1
        assert abs(draws[1].item() - 0.2) < SIGMAS * math.sqrt(0.16 / self.COUNT)

    def test_randint(self, seed: int) -> None:
        draws = random.randint(random.key(seed), (self.COUNT,), -3, 94)
        assert p_of_counts((draws + 3).bincount(minlength=97), self.COUNT / 97) > LEVEL
        wide = random.randint(random.key(seed), (self.COUNT,), -(2**62), 2**62 - 1).double()
        assert p_of_kolmogorov(wide, lambda x: x / 2**63 + 0.5) > LEVEL

    def test_categorical(self, seed: int) -> None:
        logits = torch.tensor([0.0, 1.0, -math.inf, -3.0, 2.0])
        for given_logits in (logits, logits.double(), logits.bfloat16()):
            counts = random.categorical(random.key(seed), given_logits.expand(self.COUNT, 5)).bincount(minlength=5)
            assert counts[2] == 0
            seen = torch.tensor([0, 1, 3, 4])
            assert p_of_counts(counts[seen], logits.double().softmax(0)[seen] * self.COUNT) > LEVEL

    def test_permutation(self, seed: int) -> None:
        """All 24 orders of four things, each as often."""
        orders = vmap(lambda key: random.permutation(key, 4))(random.split(random.key(seed), self.COUNT))
        assert torch.equal(orders.sort(1).values, torch.arange(4).expand(self.COUNT, 4))
        codes = (orders * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
        assert codes.numel() == 24 and p_of_counts(codes, self.COUNT / 24) > LEVEL

    def test_serial_correlation(self, seed: int) -> None:
        draws = random.uniform(random.key(seed), (self.COUNT,))
        for lag in (1, 2, 3, 4, 64, 1024):
            assert abs(correlation(draws[lag:], draws[:-lag])) < SIGMAS

    def test_streams_are_independent(self, seed: int) -> None:
        """Of neighbouring seeds, of a split's keys, of folded numbers, and of a key and its children."""
        key = random.key(seed)
        keys = [key, random.key(seed + 1), *random.split(key, 3), *(random.fold_in(key, data) for data in (0, 1, 2))]
        streams = torch.stack([random.normal(key, (self.COUNT,)) for key in keys]).double()
        pairs = torch.corrcoef(streams)[torch.triu_indices(len(keys), len(keys), 1).unbind()] * math.sqrt(self.COUNT)
        assert p_of_chi_square(pairs.square().sum().item(), pairs.numel()) > LEVEL

    def test_the_first_draws_of_folded_keys_are_uniform(self, seed: int) -> None:
        """As a training run uses them: one draw a step."""
        steps = torch.arange(20_000)
        draws = vmap(lambda step: random.uniform(random.fold_in(random.key(seed), step)))(steps)
        assert p_of_kolmogorov(draws, lambda u: u) > LEVEL
        assert abs(correlation(draws[1:], draws[:-1])) < SIGMAS


class TestPermutationAndCategorical:
    def test_a_tensor_is_permuted_along_its_first_dim(self) -> None:
        x = torch.arange(12).view(6, 2)
        assert torch.equal(random.permutation(KEY, x), x[random.permutation(KEY, 6)])

    def test_categorical_along_another_dim_and_of_a_shard(self) -> None:
        logits = random.normal(KEY, (6, 4))
        taken = random.categorical(KEY, logits)
        assert taken.shape == (6,) and taken.dtype == torch.int64
        assert torch.equal(random.categorical(KEY, logits[2:5], global_shape=(6, 4), start=(2, 0)), taken[2:5])
        assert random.categorical(KEY, logits, dim=0).shape == (4,)


INFOS = {
    "b": ArrayInfo((4, 3), initializer=initializers.normal(0.5)),
    "a": {"c": ArrayInfo((5,), torch.bfloat16, initializer=initializers.ones)},
}


class TestInitialize:
    def test_a_leaf_depends_on_key_and_name_alone(self) -> None:
        params = initialize(INFOS, KEY)
        other = initialize({"b": INFOS["b"], "z": ArrayInfo((2,), initializer=initializers.zeros)}, KEY)
        assert torch.equal(params["b"], other["b"])
        assert torch.equal(params["a"]["c"], torch.ones(5, dtype=torch.bfloat16))
        assert not torch.equal(params["b"], initialize({"c": INFOS["b"]}, KEY)["c"])
        assert not torch.equal(params["b"], initialize(INFOS, random.key(1))["b"])

    def test_errors_name_the_leaves(self) -> None:
        with pytest.raises(ValueError, match=r"no initializer for a\.w, v: "):
            initialize({"a": {"w": ArrayInfo((2,))}, "v": ArrayInfo(()), **INFOS | {"a": {"w": ArrayInfo((2,))}}}, KEY)
        with pytest.raises(TypeError, match="w: expected an ArrayInfo, got Tensor"):
            initialize({"w": torch.ones(2)}, KEY)
        wrong = ArrayInfo((2,), initializer=lambda key, shape, dtype: torch.zeros(3))
        with pytest.raises(
            ValueError, match=r"w: the initializer made \(3,\) torch.float32, expected \(2,\) torch.float32"
        ):
            initialize({"w": wrong}, KEY)

    def test_traced(self) -> None:
        traced = make_fx(lambda key: initialize(INFOS, key)["b"], tracing_mode="fake")(KEY)
        assert torch.equal(traced(random.key(5)), initialize(INFOS, random.key(5))["b"])

    def test_initializers_are_values(self) -> None:
        made = [
            initializers.normal(0.1),
            initializers.normal(0.2),
            initializers.truncated_normal(0.1),
            initializers.uniform(0.1),
        ]
        assert len({*made, initializers.normal(0.1), initializers.zeros, initializers.ones}) == 6
        with pytest.raises(ValueError, match="normal: the scale must not be negative, got -1"):
            initializers.normal(-1)

    @pytest.mark.parametrize(
        ("initializer", "std", "bound"),
        [
            (initializers.normal(0.02), 0.02, math.inf),
            (
                initializers.truncated_normal(0.02),
                0.02 * 0.8796256610342398,
                0.04,
            ),  # that of a normal cut at two sigmas
            (initializers.uniform(0.3), 0.3 / math.sqrt(3), 0.3),
        ],
    )
    def test_moments(self, initializer: Callable[..., torch.Tensor], std: float, bound: float) -> None:
        count = 200_000
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            values = initializer(KEY, (count,), dtype)
            assert values.dtype == dtype and values.abs().max() <= torch.tensor(bound).to(dtype)
            assert abs(values.double().mean().item()) < SIGMAS * std / math.sqrt(count)
            assert abs(values.double().std().item() / std - 1) < SIGMAS / math.sqrt(count)


# A process of its own, since triton reads TRITON_INTERPRET when a kernel is defined.
INTERPRETED = """
import json, sys, torch
from functional_booster.kernels import random, threefry, threefry_triton

for words, start, expected in json.loads(sys.argv[1]):
    for starts in (None, torch.tensor([start])):
        out = torch.empty(2, dtype=torch.int32)
        threefry_triton.bits(out, torch.tensor(words, dtype=torch.int32), starts, start, 2, 32)
        assert out.tolist() == expected, (words, starts, out)

keys = random.split(random.key(7), 3)
for width in (16, 32):
    for shape, strides, base in (((1001,), (1,), 5), ((7, 3), (11, 1), 5), ((2, 3, 6), (28, 7, 1), 2**40 + 3)):
        for key, offset in ((keys[0], None), (keys, torch.tensor([0, 3, 2**33]))):
            args = (key, offset, base, shape, strides, width)
            expected, out = threefry._reference(*args), threefry._empty(*args).fill_(77)
            starts, length = threefry.run_starts(*args[:5])
            threefry_triton.bits(out, key, starts, base, length, width)
            assert torch.equal(out, expected), args
            if offset is None and starts.numel() == 1:
                threefry_triton.bits(out.fill_(77), key, None, base, length, width)
                assert torch.equal(out, expected), args
"""


@pytest.mark.skipif(sys.platform != "linux", reason="triton is made for Linux alone")
def test_the_triton_kernel_interpreted_on_cpu() -> None:
    placed = TestKnownAnswers.PLACED
    known = [(words(*key).tolist(), start, words(*expected).tolist()) for start, (key, _, expected) in placed]
    command = [sys.executable, "-W", "error", "-c", INTERPRETED, json.dumps(known)]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.gpu
class TestGpu:
    """The bits of a key are those of the CPU; normals to rounding."""

    @pytest.mark.parametrize("name", sorted(DRAWS))
    def test_draws(self, name: str) -> None:
        cases: list[tuple[tuple[int, ...], dict[str, Any]]] = [
            ((), {}),
            ((33,), {}),
            ((1_000_003,), {}),
            ((5, 4, 6), {"global_shape": (9, 4, 7), "start": (3, 0, 1)}),
            ((2, 300), {"global_shape": (4, 1001), "start": (1, torch.tensor(503))}),
        ]
        for shape, where in cases:
            host, device = DRAWS[name](KEY, shape, **where), DRAWS[name](KEY.cuda(), shape, **where)
            assert device.is_cuda
            rounding = {"normal16": 2.0**-7, "normal64": 1e-12}.get(name, 1e-5) if "normal" in name else 0.0
            torch.testing.assert_close(device.cpu(), host, rtol=rounding, atol=rounding)

    @pytest.mark.parametrize("name", sorted(DRAWS))
    @pytest.mark.parametrize("where", [{}, {"global_shape": (4, 1001), "start": (1, 503)}], ids=["whole", "part"])
    @pytest.mark.parametrize("shape", [(33,), (2, 300)], ids=str)
    def test_a_batch_of_keys(self, name: str, where: dict[str, Any], shape: tuple[int, ...]) -> None:
        if where and len(shape) == 1:
            where = {"global_shape": (1001,), "start": (503,)}

        def draw(key: torch.Tensor) -> torch.Tensor:
            return DRAWS[name](key, shape, **where)

        keys = random.split(KEY, 5)
        rounding = {"normal16": 2.0**-7, "normal64": 1e-12}.get(name, 1e-5) if "normal" in name else 0.0
        torch.testing.assert_close(
            vmap(draw)(keys.cuda()).cpu(), torch.stack([draw(key) for key in keys]), rtol=rounding, atol=rounding
        )

    def test_keys_and_batches(self) -> None:
        keys = random.split(KEY.cuda(), 300)
        assert torch.equal(keys.cpu(), random.split(KEY, 300))
        assert torch.equal(random.fold_in(KEY.cuda(), torch.tensor(-5)).cpu(), random.fold_in(KEY, -5))

        def shard(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return random.bits(key, (3, 5), global_shape=(3, 1500), start=(0, index * 5))

        host = vmap(shard)(keys.cpu(), torch.arange(300))
        assert torch.equal(vmap(shard)(keys, torch.arange(300, device="cuda")).cpu(), host)

    def test_permutation(self) -> None:
        assert torch.equal(random.permutation(KEY.cuda(), 10_000).cpu(), random.permutation(KEY, 10_000))
