"""The repository as a product: one package out of four folders, pinned constraints, versions that agree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import functional_booster

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = ("kernels", "precision", "sharding")


def python(*arguments: str, cwd: Path) -> str:
    """What a fresh interpreter prints, started in ``cwd`` with no extra paths."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def build(kind: str, source: Path, into: Path) -> Path:
    """Build a wheel or sdist of ``source``, with the setuptools that is installed; nothing is fetched."""
    call = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    return into / python("-c", call, cwd=source).splitlines()[-1]


def modules_of_the_repository() -> set[str]:
    """Every module by the path that it has in the installed package."""
    floors = {f"functional_booster/{path.relative_to(ROOT)}" for floor in FLOORS for path in modules_in(ROOT / floor)}
    top = {str(path.relative_to(ROOT)) for path in modules_in(ROOT / "functional_booster")}
    return floors | {name for name in top if name.split("/")[1] not in FLOORS}


def modules_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*.py") if "__pycache__" not in path.parts}


def modules_in_wheel(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as files:
        return [name for name in files.namelist() if name.endswith(".py")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the package is built from: building in the work tree would leave files there."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("functional_booster", *FLOORS):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


class TestPackage:
    @pytest.mark.parametrize("floor", FLOORS)
    def test_the_floors_are_relative_links_inside_the_package(self, floor: str) -> None:
        link = ROOT / "functional_booster" / floor
        assert link.is_symlink()
        assert os.readlink(link) == f"../{floor}"
        assert (ROOT / floor / "__init__.py").is_file()

    def test_the_wheel_holds_every_module_once_under_one_name(self, wheel: Path) -> None:
        modules = modules_in_wheel(wheel)
        assert sorted(modules) == sorted(modules_of_the_repository())
        assert "functional_booster/kernels/tree.py" in modules

    def test_the_wheel_installs_one_package_its_types_licence_and_command(self, wheel: Path) -> None:
        files = zipfile.ZipFile(wheel)
        info = f"functional_booster-{PROJECT['version']}.dist-info"
        assert {name.split("/")[0] for name in files.namelist()} == {"functional_booster", info}
        assert "functional_booster/py.typed" in files.namelist()
        assert files.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "functional-booster = functional_booster.cli:main" in files.read(f"{info}/entry_points.txt").decode()

    def test_the_wheel_works_by_itself(self, wheel: Path, tmp_path: Path) -> None:
        zipfile.ZipFile(wheel).extractall(tmp_path)
        where = python("-c", "import functional_booster.kernels.tree as t; print(t.__file__)", cwd=tmp_path)
        assert Path(where) == tmp_path / "functional_booster" / "kernels" / "tree.py"

    def test_the_sdist_builds_the_same_wheel(self, source: Path, wheel: Path, tmp_path: Path) -> None:
        sdist = build("sdist", source, tmp_path)
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path, filter="data")
        (again := tmp_path / "again").mkdir()
        rebuilt = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), again)
        assert sorted(modules_in_wheel(rebuilt)) == sorted(modules_in_wheel(wheel))

    def test_the_floors_are_no_packages_of_their_own(self, tmp_path: Path) -> None:
        specs = python(
            "-c",
            f"import importlib.util as u; print([s.origin for f in {FLOORS} if (s := u.find_spec(f)) is not None])",
            cwd=tmp_path,
        )
        assert str(ROOT) not in specs
        assert "functional_booster" not in specs

    def test_a_bare_import_at_the_root_runs_none_of_our_modules(self) -> None:
        """transformers imports a package named kernels if it finds one: at the root that is ours, and must be inert."""
        loaded = "import sys, kernels; print([name for name in sys.modules if name.startswith('kernels.')])"
        assert python("-c", loaded, cwd=ROOT) == "[]"


class TestVersions:
    def test_the_version_is_the_same_everywhere(self) -> None:
        assert metadata.version("functional-booster") == functional_booster.__version__ == PROJECT["version"]
        headings = re.findall(r"^## \[?([^\] \n]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        assert PROJECT["version"] in headings

    def test_no_requirement_has_an_upper_bound(self) -> None:
        extras = PROJECT["optional-dependencies"].values()
        requirements = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
        assert {clause.operator for requirement in requirements for clause in requirement.specifier} == {">="}

    def test_constraints_pin_every_requirement_to_a_version_that_it_admits(self) -> None:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
        versions = {}
        for pin in pins:
            (clause,) = pin.specifier
            assert clause.operator == "=="
            assert "+" not in clause.version
            assert canonicalize_name(pin.name) not in versions
            versions[canonicalize_name(pin.name)] = clause.version
        extras = PROJECT["optional-dependencies"].values()
        for requirement in [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]:
            if requirement.name != PROJECT["name"]:
                assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    python("-c", "\n".join(blocks), cwd=tmp_path)
