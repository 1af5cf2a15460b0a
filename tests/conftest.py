"""What holds for the whole test run: hypothesis profiles, threads, no network, GPU tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # models in tests are built from configs: nothing is ever fetched
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers share the cores; read by torch at import, and by child processes

import pytest
import torch
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=25, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
