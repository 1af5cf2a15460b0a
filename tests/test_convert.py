"""``functional-booster inspect`` and ``convert``: what they show is there, and what they write opens elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import functional_booster as fb
from functional_booster import checkpoint, cli, models
from functional_booster.checkpoint import reader

TINY = ("--n-layer 1 --n-embd 16 --n-head 2 --length 16 --batch-size 4 --steps 2 --warmup 1 --eval-every 4 "
        "--sample 0 --no-jit --device cpu").split()  # fmt: skip
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each family."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(300)))
    for model in ("llama", "gpt2"):
        options = ["--data", folder / "text.txt", *TINY, "--model", model, "--out", folder / model]
        assert cli.main(["train", *map(str, options)]) == 0
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    capsys.readouterr()
    assert cli.main(["inspect", *map(str, args)]) == 0
    return capsys.readouterr().out


def convert(*args: object) -> int:
    return cli.main(["convert", *map(str, args)])


def params(path: Any) -> dict[str, torch.Tensor]:
    return {name: leaf for name, leaf in checkpoint.read_tensors(path).items() if name.startswith("params.")}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def logits_of_ours(run: Path, family: str, dtype: torch.dtype) -> torch.Tensor:
    """Of the model that the run has trained, from its checkpoint, rounded to the dtype."""
    config = json.loads((run / "config.json").read_text())["config"]
    assert (config["n_embd"], config["n_layer"], config["n_head"]) == (16, 1, 2)
    if family == "gpt2":
        model = models.gpt2(vocab_size=256, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    else:
        model = models.llama(
            vocab_size=256,
            max_position_embeddings=16,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            tie_word_embeddings=True,
        )
    named = {name.removeprefix("params."): leaf.to(dtype).float() for name, leaf in params(run / "checkpoint").items()}
    leaves = [named[name] for name in fb.tree.names(model.abstract)]
    return model.apply(fb.tree.unflatten(fb.tree.structure(model.abstract), leaves), TOKENS)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("dtype", "kind"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_transformers_opens_what_was_a_run(family: str, dtype: str | None, kind: torch.dtype, runs: Path) -> None:
    """Equal logits; in files of the size that was asked for; and back, bit for bit."""
    chosen = () if dtype is None else ("--dtype", dtype)
    assert convert(runs / family, "hf", "--size-per-shard", 0.01, *chosen) == 0
    files = list(Path("hf").glob("*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_size < 0.02 * 2**20 for file in files)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("hf", dtype="auto").eval()
    assert theirs.dtype == kind
    with torch.no_grad():
        found = theirs.float()(TOKENS).logits
    rounded = {name: leaf.to(kind) for name, leaf in params(runs / family / "checkpoint").items()}
    torch.testing.assert_close(found, logits_of_ours(runs / family, family, kind), rtol=1e-4, atol=1e-5)
    assert convert("hf", "back") == 0
    assert equal(checkpoint.read_tensors("back"), rounded)


def test_what_transformers_has_saved_becomes_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """Which a state takes its parameters from, and which is converted again with the config that stands beside."""
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained("theirs")
    assert convert("theirs", "native", "--to", "native") == 0
    model, expected = fb.models.from_hf(theirs)
    booster = fb.Booster(device="cpu")
    state = booster.init(model, fb.optim.sgd(0.1), key=fb.random.key(0))
    loaded, report = checkpoint.load("native", state, "cpu", strict=False)
    assert report.unexpected == () and not any(name.startswith("params.") for name in report.missing)
    assert fb.tree.all(bool, fb.tree.map(torch.equal, loaded.params, expected))
    assert convert("native", "again", "--config", "theirs/config.json") == 0
    again = load_file("again/model.safetensors")
    assert equal(again, load_file("theirs/model.safetensors"))
    assert convert("theirs", "small", "--to", "hf", "--dtype", "bf16") == 0
    halved = load_file("small/model.safetensors")
    assert equal(halved, {name: leaf.bfloat16() for name, leaf in again.items()})
    assert "gpt2" in shown(capsys, "small")


def test_native_to_native(runs: Path) -> None:
    """Parameters in another dtype; optimizer, counters and keys as they were; pieces of many ranks in one file."""
    booster = fb.Booster(device="cpu", plugin=fb.TorchFSDPPlugin(), mesh=fb.virtual_mesh(4))
    model, tx = fb.models.gpt2(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2), fb.optim.adamw(0.1)
    checkpoint.save("split", booster.init(model, tx, key=fb.random.key(0)), metrics={"loss": 2.5})
    before = checkpoint.read_tensors("split")
    assert max(len(leaf["pieces"]) for leaf in checkpoint.read_manifest("split")["leaves"].values()) > 1
    assert convert("split", "one", "--to", "native", "--dtype", "fp16") == 0
    after, manifest = checkpoint.read_tensors("one"), checkpoint.read_manifest("one")
    expected = {name: leaf.half() if name.startswith("params.") else leaf for name, leaf in before.items()}
    assert equal(after, expected)
    assert [len(leaf["pieces"]) for leaf in manifest["leaves"].values()] == [1] * len(after)
    assert manifest["metrics"] == {"loss": 2.5}
    assert convert(runs / "llama", "same", "--to", "native") == 0
    assert equal(checkpoint.read_tensors("same"), checkpoint.read_tensors(runs / "llama" / "checkpoint"))
    same, origin = checkpoint.read_manifest("same"), checkpoint.read_manifest(runs / "llama" / "checkpoint")
    assert (same["step"], same["position"]) == (origin["step"], origin["position"]) == (2, 2)


def test_inspect_shows_what_is_there(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table and as JSON, of a run, of its checkpoint, of the newest of numbered ones; no weights are read."""
    path = runs / "gpt2" / "checkpoint"
    tensors, manifest = checkpoint.read_tensors(path), checkpoint.read_manifest(path)
    monkeypatch.setattr(reader.Reader, "fill", None)
    for of in (path, runs / "gpt2"):
        found = json.loads(shown(capsys, of, "--json"))
        rows = {row["name"]: (tuple(row["shape"]), row["dtype"], row["bytes"]) for row in found["leaves"]}
        assert rows == {n: (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes) for n, t in tensors.items()}
        assert found["totals"] == {
            "leaves": len(tensors),
            "parameters": sum(leaf.numel() for name, leaf in tensors.items() if name.startswith("params.")),
            "bytes": sum(leaf.nbytes for leaf in tensors.values()),
            "files": 1,
        }
        assert {key: manifest[key] for key in ("format", "step", "position", "layout", "versions")} == found["facts"]
        table = shown(capsys, of)
        assert all(name in table for name in tensors) and "256 x 16" in table
        assert manifest["files"][0]["name"] in table and f"{found['totals']['bytes']:,} bytes in 1 files" in table
    shutil.copytree(path, "many/step-1")
    shutil.copytree(path, "many/step-10")
    assert "many/step-10" in shown(capsys, "many")


def test_inspect_shows_the_first_format_and_weights_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parent / "golden"
    manifests = sorted(golden.rglob(checkpoint.MANIFEST))
    assert {checkpoint.read_manifest(manifest.parent)["format"][-2:] for manifest in manifests} >= {"/1"}
    for manifest in manifests:
        found = json.loads(shown(capsys, manifest.parent, "--json"))
        assert {row["name"] for row in found["leaves"]} == set(checkpoint.read_tensors(manifest.parent))
    save_file({"[red]a": torch.zeros(2, 3, dtype=torch.float8_e4m3fn)}, "some.safetensors")
    assert json.loads(shown(capsys, "some.safetensors", "--json"))["leaves"] == [
        {
            "name": "[red]a",
            "shape": [2, 3],
            "dtype": "float8_e4m3fn",
            "bytes": 6,
            "pieces": 1,
            "files": ["some.safetensors"],
        }
    ]
    assert "[red]a" in shown(capsys, "some.safetensors")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (lambda runs: ["inspect", "nowhere"], "nowhere does not exist"),
        (lambda runs: ["inspect", runs], "is no checkpoint: expected manifest.json, or safetensors, in it"),
        (lambda runs: ["inspect", "cut"], "is damaged"),
        (lambda runs: ["convert", "nowhere", "x"], "nowhere does not exist"),
        (lambda runs: ["convert", runs / "gpt2", "held"], "dst: held holds a native checkpoint"),
        (lambda runs: ["convert", runs / "gpt2", "nowhere://x"], "Protocol not known: nowhere"),
        (lambda runs: ["convert", runs / "gpt2", "x", "--size-per-shard", "0"], "size_per_shard: 0.0, expected"),
        (lambda runs: ["convert", "held", "x"], "--config: missing; held is of no run"),
        (lambda runs: ["convert", "held", "x", "--config", "bert.json"], "model_type 'bert', expected one of"),
        (lambda runs: ["convert", "held", "x", "--config", "no.json"], "--config: no.json does not exist"),
        (lambda runs: ["convert", "held", "x", "--config", "large.json"], "held is of another model"),
        (lambda runs: ["convert", "held", "held", "--to", "hf"], "held holds a native checkpoint, expected another"),
        (lambda runs: ["convert", runs / "gpt2", runs / "gpt2"], "gpt2 is the folder of a run, expected another one"),
        (lambda runs: ["convert", "held", "text", "--to", "native"], "text is a file, expected a directory"),
    ],
)
def test_bad_input_is_one_clear_error(
    command: Callable[[Path], list[Any]], error: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "gpt2" / "checkpoint", "held")
    Path("text").write_text("hello")
    Path("bert.json").write_text('{"model_type": "bert"}')
    Path("large.json").write_text('{"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}')
    Path("cut").mkdir()
    Path("cut/model.safetensors").write_bytes(b"half")
    before = checkpoint.read_tensors("held")
    capsys.readouterr()
    assert cli.main([str(word) for word in command(runs)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and error in said.err
    assert not Path("x").exists() and equal(checkpoint.read_tensors("held"), before)
