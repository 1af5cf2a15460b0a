"""Laws that training must obey, and hypothesis strategies to try them on: for plugins, our own and yours.

    from functional_booster import testing

    def test_my_plugin():
        testing.check_plugin(MyPlugin())

Each law is a function of its own as well, on a mesh and a ``Problem`` of your choice. Needs hypothesis:
``pip install functional_booster[test]``.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401 (said here, once, how to get it)
except ImportError as error:
    raise ImportError("functional_booster.testing needs hypothesis: pip install 'functional_booster[test]'") from error

from .check import check_plugin
from .laws import (
    LAWS,
    accumulation_equals_whole_batch,
    jit_equals_eager,
    load_inverts_save,
    replicas_are_equal,
    resume_equals_never_stopped,
    step_equals_one_device,
    traced,
    uneven_batches_equal_one_device,
    unshard_inverts_shard,
    virtual_equals_real,
)
from .problem import Problem, small
from .strategies import (
    abstract_trees,
    arrays,
    batches,
    meshes,
    models,
    optimizers,
    problems,
    shapes,
    specs,
    splits,
    trees,
)

__all__ = [
    "LAWS",
    "Problem",
    "abstract_trees",
    "accumulation_equals_whole_batch",
    "arrays",
    "batches",
    "check_plugin",
    "jit_equals_eager",
    "load_inverts_save",
    "meshes",
    "models",
    "optimizers",
    "problems",
    "replicas_are_equal",
    "resume_equals_never_stopped",
    "shapes",
    "small",
    "specs",
    "splits",
    "step_equals_one_device",
    "traced",
    "trees",
    "uneven_batches_equal_one_device",
    "unshard_inverts_shard",
    "virtual_equals_real",
]
