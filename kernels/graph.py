"""Graphs: trace a function over flat tensors, cut a joint graph in two, compile one. All private torch API stands here.

A graph is a torch.fx.GraphModule of ATen ops that takes tensors and returns a list of tensors. Tracing runs the Python
once on fake tensors (make_fx), so that any Python goes.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import operator
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .gelu import gelu, gelu_backward

T = TypeVar("T")
_tapes: ContextVar[tuple[str, ...]] = ContextVar("gradients_on_the_tape", default=())

Runnable = Callable[..., list[torch.Tensor]]


def trace(
    fn: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor], decompose: bool = False
) -> GraphModule:
    """The ATen graph of ``fn(*examples)``, on fake tensors: nothing is computed, examples give shapes and dtypes alone.

    ``decompose`` breaks composite ops into the compiler's own, as the partitioner expects.
    """
    table: Any = decompositions() if decompose else None
    with torch.no_grad():
        traced = make_fx(
            lambda *leaves: list(fn(*leaves)),
            decomposition_table=table,
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*examples)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """How composite ops are written for the compiler: Inductor's table, with a cheaper GELU."""
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    ours = {aten.gelu.default: gelu, aten.gelu_backward.default: gelu_backward, aten.addmm.default: _addmm}
    return {**select_decomp_table(), **ours}


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """The bias of a linear layer joins the elementwise kernel that follows; the library would write it out first."""
    if left.device.type != "cpu" or bias.dim() != 1 or (beta, alpha) != (1, 1) or not left.is_floating_point():
        return NotImplemented
    return torch.mm(left, right) + bias


def empty_like_outside(tensor: torch.Tensor) -> torch.Tensor:
    """A meta description of a (wrapped, fake or real) tensor that can leave every transform: shape, strides, dtype."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def outside_transforms(fn: Callable[[], T]) -> T:
    """``fn()`` outside every active transform and mode, in the present context variables.

    torch keeps vmap and grad levels and dispatch modes by thread, so a fresh thread is outside all of them.
    """
    context = contextvars.copy_context()
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        context.run(_tapes.set, ())
        try:
            result.append(context.run(fn))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="trace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def transforms() -> tuple[str, ...]:
    """The active transforms, outermost first: "Grad", "Vmap", "Jvp", "Functionalize" (torch.func's, and
    ``on_the_tape``)."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return (*_tapes.get(), *(interpreter.key().name for interpreter in stack))


@contextlib.contextmanager
def on_the_tape() -> Generator[None]:
    """Count as a "Grad" what is computed inside: its gradient is taken by autograd's tape."""
    token = _tapes.set((*_tapes.get(), "Grad"))
    try:
        yield
    finally:
        _tapes.reset(token)


def static_key(value: Any) -> Any:
    """What tells a static value from another one: 1, 1.0 and True differ, 0.0 and -0.0 do, a NaN equals itself."""
    return (type(value), value.hex() if isinstance(value, float) else value)


def is_tracing() -> bool:
    """Whether a dispatch mode (a trace on fake tensors) is active."""
    return torch._C._len_torch_dispatch_stack() > 0


def shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the tensors are views of one storage (right for fake tensors, too)."""
    return torch._C._is_alias_of(first, second)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Cut:
    """The two halves of a joint graph ``(primals, tangents) -> (outputs, grads)``.

    ``forward``: primals -> outputs + more residuals; ``backward``: kept primals + residuals + tangents -> grads.
    ``kept`` indexes the primals, ``residuals`` the forward's results. No result of the forward aliases an input or
    another result.
    """

    forward: GraphModule
    backward: GraphModule
    kept: tuple[int, ...]
    residuals: tuple[int, ...]


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A context outside of fake tensors and traces, for what must be made of real tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def cut(joint: GraphModule, primals: int, outputs: int, saveable: Callable[[Node], bool]) -> Cut:
    """Cut a joint graph in two. A value of the forward that the backward needs is saved where ``saveable(node)``.

    Everything else that it needs is computed again from what is saved. Of a view, its base is saved.
    """
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    tangents = placeholders[primals:]
    results = list(next(node for node in joint.graph.nodes if node.op == "output").args[0])
    later = set(tangents)
    for node in joint.graph.nodes:
        if any(parent in later for parent in node.all_input_nodes):
            later.add(node)
    wanted = {_base(node) for node in joint.graph.nodes if node not in later and _is_tensor(node) and saveable(node)}
    saved: set[Node] = set()
    seen: set[Node] = set()
    pending = [node for node in results[outputs:] if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in later and (node in wanted or node.op == "placeholder"):
            saved.add(node)
        else:
            pending.extend(node.all_input_nodes)
    kept = [node for node in placeholders[:primals] if node in saved]
    residuals = [node for node in joint.graph.nodes if node in saved and node.op != "placeholder"]
    returned = [*results[:outputs], *(node for node in residuals if node not in results[:outputs])]
    return Cut(
        own_results(extract(joint, placeholders[:primals], returned)),
        own_results(extract(joint, [*kept, *residuals, *tangents], results[outputs:])),
        tuple(placeholders.index(node) for node in kept),
        tuple(returned.index(node) for node in residuals),
    )


def own_results(graph: GraphModule) -> GraphModule:
    """The graph with no result that shares storage with an input or another result, as an opaque op must have it."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    owners: set[Node] = set()
    results = list(output.args[0])
    for place, node in enumerate(results):
        if not isinstance(node, Node):
            continue
        if (base := _base(node)).op == "placeholder" or base in owners:
            with graph.graph.inserting_before(output):
                results[place] = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            results[place].meta = dict(node.meta)
        owners.add(base)
    output.args = (results,)
    graph.recompile()
    return graph


def min_cut(joint: GraphModule, primals: int, outputs: int) -> Cut:
    """``cut`` at the least memory traffic: cheap elementwise values are computed again inside the backward's kernels.

    The values to save are those of torch's min-cut partitioner (the one of AOTAutograd).
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    examples = examples_of(joint)
    forward, _ = min_cut_rematerialization_partition(
        _with_partitioner_names(joint, primals), (examples[:primals], examples[primals:]), num_fwd_outputs=outputs
    )
    results = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    chosen = {node.name for node in results[outputs:] if isinstance(node, Node) and node.op != "placeholder"}
    return cut(joint, primals, outputs, lambda node: node.name in chosen)


def fingerprint(graph: GraphModule) -> str:
    """A name for what the graph computes: its code, the shapes and devices it was traced for, and its constants."""
    digest = hashlib.sha256(graph.code.encode())
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            digest.update(repr((tuple(value.shape), value.stride(), value.dtype, value.device)).encode())
        elif node.op == "get_attr" and isinstance(constant := getattr(graph, str(node.target), None), torch.Tensor):
            digest.update(repr((constant.dtype, tuple(constant.shape))).encode())
            raw = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return digest.hexdigest()[:24]


def compile(graph: GraphModule, examples: Sequence[torch.Tensor], options: dict[str, Any] | None = None) -> Runnable:
    """The graph compiled by Inductor: called on flat tensors with no guards. Inputs that the graph mutates are mutated.

    Where no C++ compiler is found the graph itself is returned, after one warning: the same numbers, slower.
    """
    from torch._inductor.compile_fx import compile_fx

    if any(example.device.type == "cpu" for example in examples) and not has_cpp_compiler():
        return graph
    with torch.no_grad():
        compiled: Any = compile_fx(graph, list(examples), config_patches=options, decompositions=decompositions())
    return compiled


@functools.cache
def has_cpp_compiler() -> bool:
    """Whether Inductor finds a C++ compiler for CPU code; warns, once, when it does not."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        warnings.warn(
            "jit: no C++ compiler was found, so traced graphs run uncompiled on CPU (the same numbers, slower); "
            "install g++ or set CXX",
            stacklevel=2,
        )
        return False
    return True


def examples_of(graph: GraphModule) -> list[torch.Tensor]:
    """The fake tensors that a graph was traced on."""
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def results_of(graph: GraphModule) -> list[Any]:
    """The fake tensors that a graph returns, None where it returns None."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    return [node.meta["val"] if isinstance(node, Node) else node for node in output.args[0]]


def _base(node: Node) -> Node:
    """The value that a chain of views looks at; a part of a split is a view, too."""
    while node.op == "call_function":
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if not (_is_view(node) or (node.target is operator.getitem and _is_view(source))):
            break
        node = source
    return node


def _is_view(node: Node) -> bool:
    """Whether the compiler gives no storage of its own to what the node returns."""
    return getattr(node.target, "is_view", False) or node.target is torch.ops.aten._unsafe_view.default


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def extract(joint: GraphModule, inputs: Iterable[Node], results: Sequence[Any]) -> GraphModule:
    """The part of a graph that computes ``results`` from ``inputs``."""
    needed: set[Node] = set()
    inputs = list(inputs)
    pending = [node for node in results if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            if node not in inputs:
                pending.extend(node.all_input_nodes)
    graph, copies = Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] if isinstance(node, Node) else node for node in results])
    return GraphModule(joint, graph)


def _with_partitioner_names(joint: GraphModule, primals: int) -> GraphModule:
    """A copy whose placeholders bear the names that torch's partitioners look for."""
    graph, copies = Graph(), {}
    for place, node in enumerate(n for n in joint.graph.nodes if n.op == "placeholder"):
        name = f"primals_{place + 1}" if place < primals else f"tangents_{place - primals + 1}"
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node.op == "output":
            graph.output([copies[arg] if isinstance(arg, Node) else arg for arg in node.args[0]])
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].name = node.name
    return GraphModule(joint, graph)
