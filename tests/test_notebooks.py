"""Every notebook is a pair, script and notebook with the same cells; pytest runs the notebooks themselves (nbmake)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jupytext
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def disagreements(folder: Path) -> list[str]:
    """The stems that are not a .py and an .ipynb of equal cells."""
    stems = sorted({path.stem for pattern in ("*.py", "*.ipynb") for path in folder.glob(pattern)})
    return [stem for stem in stems if cells(folder / f"{stem}.py") != cells(folder / f"{stem}.ipynb")]


def cells(path: Path) -> list[tuple[str, str]] | str:
    """(kind, source) of each cell; the path itself where there is no such file."""
    if not path.exists():
        return str(path)
    notebook: Any = jupytext.read(path)
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_every_notebook_agrees_with_its_script() -> None:
    assert disagreements(NOTEBOOKS) == []


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    script = tmp_path / "demo.py"
    script.write_text("# %% [markdown]\n# # Title\n\n# %%\nx = 1\n")
    jupytext.write(jupytext.read(script), tmp_path / "demo.ipynb")
    return tmp_path


def test_a_true_pair_passes(pair: Path) -> None:
    assert disagreements(pair) == []


def test_a_changed_script_is_found(pair: Path) -> None:
    (pair / "demo.py").write_text("# %% [markdown]\n# # Title\n\n# %%\nx = 2\n")
    assert disagreements(pair) == ["demo"]


@pytest.mark.parametrize("missing", ["demo.py", "demo.ipynb"])
def test_a_missing_half_is_found(pair: Path, missing: str) -> None:
    os.remove(pair / missing)
    assert disagreements(pair) == ["demo"]
