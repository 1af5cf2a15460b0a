"""Checkpoints between layouts: what any plugin saves, on whatever ranks, any other one loads; in any precision; from
every format that there was, and from URLs."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import functional_booster as fb
from functional_booster import checkpoint, testing
from functional_booster.checkpoint import leaves, loading, reader
from functional_booster.checkpoint.folders import folder
from functional_booster.plugins import GeminiPlugin, Plan
from functional_booster.sharding.mesh import Mesh

CHUNKS = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 1}  # the smallest chunks: one a block
LAYOUTS: dict[str, tuple[Any, int]] = {  # a plugin, and the ranks that it lays out
    "alone": (None, 1),
    "ddp": (fb.TorchDDPPlugin(bucket_cap_mb=0.0002), 3),
    "zero1": (fb.LowLevelZeroPlugin(reduce_bucket_size_in_m=0.00005), 4),
    "zero2, replicas, host": (fb.LowLevelZeroPlugin(stage=2, extra_dp_size=2, cpu_offload=True), 4),
    "fsdp": (fb.TorchFSDPPlugin(), 5),
    "fsdp, hybrid": (fb.TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD"), 4),
    "fsdp, some ignored": (fb.TorchFSDPPlugin(ignored_modules=["*.w"]), 2),
    "gemini": (GeminiPlugin(**CHUNKS, shard_param_frac=0.5, offload_optim_frac=0.4), 2),
}
GOLDEN = Path(__file__).parent / "golden"


def booster_of(name: str, precision: str = "fp32") -> fb.Booster:
    plugin, ranks = LAYOUTS[name]
    if plugin is None:
        return fb.Booster("cpu", precision)
    return fb.Booster("cpu", precision, plugin, fb.virtual_mesh(**plugin.axes(ranks)))


def same(left: Any, right: Any) -> bool:
    equal = fb.tree.map(lambda a, b: a.dtype == b.dtype and torch.equal(a, b), left, right)
    return fb.tree.all(bool, equal)


def with_other_values(state: fb.TrainState, seed: int) -> fb.TrainState:
    """Every element of every leaf is one of its own."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point():
            return torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype) + 0.5
        return torch.randint(1, 1000, leaf.shape, generator=generator, dtype=leaf.dtype)

    return fb.tree.map(drawn, state)


def processes(state: fb.TrainState) -> list[fb.TrainState]:
    """What each process of a real mesh holds, where a virtual one has the values of all."""
    axes = state.plan.mesh.axes
    groups = ("",) * len(axes)

    def of(place: tuple[int, ...]) -> fb.TrainState:
        parts = {
            name: fb.tree.map(lambda leaf: leaf[place].clone(), getattr(state, name))
            for name in ("storage", "frozen", "opt_state")
        }
        return replace(state, **parts, plan=Plan(state.plan.plugin, Mesh(axes, groups, place)))

    return [of(tuple(place)) for place in torch.ones(state.plan.mesh.shape).nonzero().tolist()]


def saved_by_processes(path: str, states: list[fb.TrainState]) -> None:
    """Each in a thread of its own; they meet as ranks do."""
    barrier = threading.Barrier(len(states))

    @contextlib.contextmanager
    def together() -> Generator[None]:
        try:
            yield
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise
        barrier.wait()

    errors: list[BaseException] = []
    work = [(checkpoint.snapshot(state), together) for state in states]
    threads = [threading.Thread(target=checkpoint.write, args=(path, *each)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


LAYOUT = st.sampled_from(sorted(LAYOUTS))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(testing.problems(rows=8), LAYOUT, LAYOUT, st.booleans(), st.integers(0, 99))
def test_what_one_layout_saves_any_other_loads(
    problem: testing.Problem, writer: str, target: str, apart: bool, seed: int
) -> None:
    """``load(save(s)) == s``, on one process that has the values of all ranks, and on processes that have their own."""
    alone, there, here = booster_of("alone"), booster_of(writer), booster_of(target)
    state = with_other_values(alone.init(problem.model, problem.tx, key=problem.key), seed)
    expected = checkpoint.named_tensors(state)
    with tempfile.TemporaryDirectory() as path:
        alone.save(f"{path}/alone", state)
        state = checkpoint.load(f"{path}/alone", there.abstract(problem.model, problem.tx), "cpu")
        if apart and state.plan.mesh.size > 1:
            saved_by_processes(f"{path}/there", processes(state))
        else:
            there.save(f"{path}/there", state)
        loaded = checkpoint.load(f"{path}/there", here.abstract(problem.model, problem.tx), "cpu")
        assert same(checkpoint.named_tensors(loaded), expected)
        assert same(checkpoint.read_tensors(f"{path}/there"), expected)
        for mine in processes(loaded) if loaded.plan.mesh.size > 1 else ():
            assert same(checkpoint.load(f"{path}/there", mine, "cpu"), mine)


def test_padding_is_zero_whatever_the_memory_held(tmp_path: Path) -> None:
    problem, alone = testing.small(8), booster_of("alone")
    alone.save(tmp_path, alone.init(problem.model, problem.tx, key=problem.key))
    for name in LAYOUTS:
        here = booster_of(name)
        expected = here.init(problem.model, problem.tx, key=problem.key)
        torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
        try:
            loaded = checkpoint.load(tmp_path, here.abstract(problem.model, problem.tx), "cpu")
        finally:
            torch.use_deterministic_algorithms(False)
        assert same(loaded, expected)


def test_one_part_of_the_work_each() -> None:
    """Every element is written by exactly one of the ranks that hold it; shares of what many hold are even."""
    problem = testing.small(8)
    for name in LAYOUTS.keys() - {"alone"}:
        here = booster_of(name)
        states = processes(here.init(problem.model, problem.tx, key=problem.key))
        counts: dict[str, torch.Tensor] = {}
        shares = []
        for state in states:
            found = leaves.of_state(state)
            for name_of_leaf, leaf in found.items():
                counts.setdefault(name_of_leaf, torch.zeros(leaf.shape, dtype=torch.int64))
            written = leaves.to_write(found, state.plan.mesh, grain=16)
            shares.append(sum((piece.stop - piece.start) * found[leaf].dtype.itemsize for leaf, piece in written))
            for leaf, piece in written:
                counts[leaf].view(-1)[piece.start : piece.stop] += 1
                (mine,) = leaves.held(found[leaf])
                assert mine.start <= piece.start and piece.stop <= mine.stop
                assert piece.at - mine.at == piece.start - mine.start
        assert all(bool((count == 1).all()) for count in counts.values())
        if name == "ddp":  # everything is everybody's
            assert max(shares) - min(shares) <= 2 * 16


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in fb.tree.leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("precision", ["fp32", fb.BF16MixedPrecision(master_weights=False)], ids=["fp32", "bf16"])
def test_a_rank_reads_its_own_and_no_more(precision: Any, tmp_path: Path) -> None:
    """A rank of 8 reads an eighth, and a chunk for each cut; no tensor is larger than its part, or than a chunk."""
    plugin = fb.TorchFSDPPlugin()
    model, tx = fb.functionalize(torch.nn.Linear(2048, 2048)), fb.optim.adamw(0.1)
    alone = fb.Booster("cpu")
    alone.save(tmp_path, alone.init(model, tx, key=fb.random.key(0)))
    here = fb.Booster("cpu", precision, plugin, fb.virtual_mesh(fsdp=8))
    abstract = here.abstract(model, tx)
    parts = {
        name: fb.tree.map(lambda info: replace(info, shape=info.shape[2:]), getattr(abstract, name))
        for name in ("storage", "frozen", "opt_state")
    }
    mesh = Mesh(abstract.plan.mesh.axes, ("", ""), place=(0, 3))
    like = replace(abstract, **parts, plan=Plan(plugin, mesh))
    whole = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    place = folder(tmp_path)
    with reader.reader(place, checkpoint.read_manifest(tmp_path)) as source, Largest() as largest:
        mine = sum(info.nbytes for info in fb.tree.leaves(like))
        state = loading._filled(source, like, {}, torch.device("cpu"))
        assert source.bytes_read <= whole / 8 + 3 * 2 * source.chunk
    assert mine <= whole / 7
    assert largest.nbytes <= max(2049 * 2048 * 4 / 8 + 4096, source.chunk)
    expected = checkpoint.read_tensors(tmp_path)["params.weight"].view(-1)
    buffer = state.storage.buffers[state.storage.layout.slots[-1].bucket]
    assert torch.equal(buffer, expected[3 * len(buffer) : 4 * len(buffer)].to(buffer.dtype))


class TestPrecision:
    def test_floats_take_the_dtype_of_the_target(self, tmp_path: Path) -> None:
        """fp32 into bf16 storage without masters, and back; integers do not become floats."""
        problem = testing.small(8)
        full = fb.Booster("cpu", "fp32", fb.TorchFSDPPlugin(), fb.virtual_mesh(fsdp=2))
        half = fb.Booster("cpu", fb.BF16MixedPrecision(master_weights=False), GeminiPlugin(), fb.virtual_mesh(2))
        state = full.init(problem.model, problem.tx, key=problem.key)
        full.save(tmp_path, state)
        like = half.abstract(problem.model, problem.tx)
        loaded, report = checkpoint.load(tmp_path, like, "cpu", strict=False)
        named, expected = checkpoint.named_tensors(loaded), checkpoint.named_tensors(state)
        for name, info in checkpoint.named_tensors(like).items():
            assert named[name].dtype == info.dtype
            assert torch.equal(named[name], expected[name].to(info.dtype))
            assert (name in report.cast) == (info.dtype != expected[name].dtype)
        assert {"params.scale", "opt_state.0.mu.scale"} < set(report.cast)
        half.save(tmp_path, loaded)
        back = checkpoint.named_tensors(full.load(tmp_path, like=state))
        assert all(torch.equal(leaf, named[name].to(leaf.dtype)) for name, leaf in back.items())
        other = state.replace(step=state.step.float())
        with pytest.raises(ValueError, match=r"step: int64\[\], expected float32\[\]"):
            full.load(tmp_path, like=other)


class TestStrict:
    def test_what_is_missing_stays_and_what_is_too_much_is_left_out(self, tmp_path: Path) -> None:
        small = fb.functionalize(torch.nn.Sequential(torch.nn.Linear(3, 4)))
        large = fb.functionalize(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
        here = fb.Booster("cpu", "fp32", fb.TorchFSDPPlugin(), fb.virtual_mesh(fsdp=2))
        saved = with_other_values(fb.Booster("cpu").init(small, fb.optim.adamw(0.1), key=fb.random.key(0)), 0)
        fb.Booster("cpu").save(tmp_path, saved)
        like = here.init(large, fb.optim.sgd(0.1), key=fb.random.key(0))
        loaded, report = checkpoint.load(tmp_path, like, "cpu", strict=False)
        assert {name for name in report.missing if "params" in name} == {"params.1.bias", "params.1.weight"}
        assert {name.rsplit(".", 2)[0] for name in report.unexpected} >= {"opt_state.0.mu", "opt_state.0.nu"}
        named, old, new = (checkpoint.named_tensors(each) for each in (loaded, like, saved))
        for name, leaf in named.items():
            assert torch.equal(leaf, old[name] if name in report.missing else new[name])
        with pytest.raises(ValueError, match=r"(?s)1\.bias: not in the checkpoint.*1\.weight: not in the ch"):
            checkpoint.load(tmp_path, like, "cpu")
        with pytest.raises(ValueError, match="an abstract `like` has no value to keep"):
            checkpoint.load(tmp_path, here.abstract(large, fb.optim.sgd(0.1)), "cpu", strict=False)

    def test_shapes_must_fit(self, tmp_path: Path) -> None:
        alone, tx = fb.Booster("cpu"), fb.optim.sgd(0.1)
        alone.save(tmp_path, alone.init(fb.functionalize(torch.nn.Linear(3, 4)), tx, key=fb.random.key(0)))
        like = alone.init(fb.functionalize(torch.nn.Linear(3, 5)), tx, key=fb.random.key(0))
        with pytest.raises(ValueError, match=r"bias: float32\[4\], expected float32\[5\]"):
            checkpoint.load(tmp_path, like, "cpu", strict=False)


@pytest.mark.parametrize(("version", "width"), [("v1", 3), ("v1-scale-without-counters", 3), ("v2", 30)])
@pytest.mark.parametrize("layout", ["alone", "fsdp", "zero2, replicas, host"])
def test_checkpoints_of_every_format_are_read(version: str, width: int, layout: str) -> None:
    """Written when they were new: after three steps, on one device, and (v2) by two processes under FSDP."""
    module = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.BatchNorm1d(4))
    module[0].bias.requires_grad_(False)
    here, path = booster_of(layout), GOLDEN / version
    like = here.abstract(fb.functionalize(module), fb.optim.adamw(fb.schedules.linear(0.1, 0.0, 10)))
    named = checkpoint.named_tensors(here.load(path, like=like))
    assert checkpoint.read_manifest(path)["step"] == named["step"].item() == 3
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    for name, leaf in named.items():
        if version == "v1-scale-without-counters" and name.startswith("loss_scale."):
            assert leaf.item() == (1 if name == "loss_scale.factor" else 0)
            continue
        pieces = sorted(
            (int(key.partition("[")[2].partition(":")[0] or 0), key) for key in stored if key.partition("[")[0] == name
        )
        assert torch.equal(leaf.view(-1), torch.cat([stored[key].view(-1) for _, key in pieces]))


class TestFirstFormat:
    def test_damage_is_found(self, tmp_path: Path) -> None:
        for file in (GOLDEN / "v1").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (data,) = tmp_path.glob("*.safetensors")
        raw = bytearray(data.read_bytes())
        raw[-3] ^= 1
        data.write_bytes(raw)
        with pytest.raises(ValueError, match="is damaged: its checksum does not match"):
            checkpoint.read_tensors(tmp_path)
        data.unlink()
        with pytest.raises(ValueError, match="is missing"):
            checkpoint.read_tensors(tmp_path)

    def test_it_is_replaced_like_any_other(self, tmp_path: Path) -> None:
        for file in (GOLDEN / "v1").iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        alone, model = fb.Booster("cpu"), fb.functionalize(torch.nn.Linear(3, 4))
        state = alone.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
        alone.save(tmp_path, state)
        assert same(alone.load(tmp_path, like=state), state)
        assert len(list(tmp_path.iterdir())) == 2


class TestUrls:
    @pytest.fixture(params=["memory", "file"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> Generator[str]:
        yield "memory://runs/ckpt" if request.param == "memory" else f"file://{tmp_path}/ckpt"
        if request.param == "memory":
            fsspec.filesystem("memory").store.clear()

    def test_any_file_system(self, url: str) -> None:
        problem, here = testing.small(8), booster_of("fsdp, hybrid")
        first = here.init(problem.model, problem.tx, key=problem.key)
        second = with_other_values(first, 1)
        saved_by_processes(url, processes(first))
        assert same(here.load(url, like=here.abstract(problem.model, problem.tx)), first)
        alone = fb.Booster("cpu")
        alone.save(url, second := alone.load(url, like=alone.abstract(problem.model, problem.tx)))
        assert same(alone.load(url, like=second), second)
        assert len(folder(url).names()) == 2
        assert checkpoint.read_manifest(url)["step"] == 0

    def test_errors(self, url: str) -> None:
        alone, model = fb.Booster("cpu"), fb.functionalize(torch.nn.Linear(3, 4))
        state = alone.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
        with pytest.raises(FileNotFoundError, match=r"ckpt is no checkpoint: it has no manifest\.json"):
            alone.load(url, like=state)
        place = folder(url)
        place.make()
        place.put("thesis.txt", b"precious")
        with pytest.raises(FileExistsError, match=r"holds other files \(thesis\.txt\)"):
            alone.save(url, state)
        assert place.names() == ["thesis.txt"]
        with pytest.raises(FileExistsError, match="is a file, expected a directory"):
            alone.save(f"{url}/thesis.txt", state)
        with pytest.raises(ValueError, match="Protocol not known: nowhere"):
            alone.save("nowhere://x", state)

    def test_a_failed_write_leaves_the_old_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alone, model = fb.Booster("cpu"), fb.functionalize(torch.nn.Linear(3, 4))
        state = alone.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
        url = "memory://broken/ckpt"
        alone.save(url, state)

        def lost(*args: Any) -> None:
            raise OSError("the connection is lost")

        with monkeypatch.context() as patched:
            patched.setattr(type(fsspec.filesystem("memory")), "pipe_file", lost)
            with pytest.raises(OSError, match=r"could not be written \(the connection is lost"):
                alone.save(url, with_other_values(state, 0))
        assert same(alone.load(url, like=state), state)
        assert len(folder(url).names()) == 2
        fsspec.filesystem("memory").store.clear()
