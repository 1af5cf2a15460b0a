"""Replaying a tape: values of what was recorded, one tensor after the other, bitwise those of eager initialization.

Only what the values need is computed, in order. Draws that nobody needs are drawn all the same, one at a time, since
those that follow them depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from .lazy_tape import Cell, Op, Tape, View, paused, views

Memory = dict[Cell, torch.UntypedStorage]
States = dict[int, tuple[torch.Generator, torch.Tensor]]  # of generators, by id


def replay(tape: Tape, wanted: Mapping[str, View], shared: bool = False) -> Iterator[tuple[str, Any]]:
    """(name, value) of what is wanted, each as soon as it is final, in memory of its own, or ``shared`` as recorded.

    What is read from a file, and then left as it is, comes as the op's ``stored``, not yet read. Generators are left as
    they are.
    """
    by_cell: dict[Cell, list[str]] = {}
    for name, view in wanted.items():
        by_cell.setdefault(view.cell, []).append(name)
    live, drawn = _needed(tape.ops, set(by_cell))
    last = {cell: number for number in sorted(live) for cell in _cells(tape.ops[number])}
    memory: Memory = {}
    states: States = {}
    for cell in by_cell.keys() - last.keys():  # values that were there before
        yield from _finished({name: wanted[name] for name in by_cell[cell]}, memory, shared)
    for number in sorted(live | drawn):
        op = tape.ops[number]
        names = [name for cell in _cells(op) if last.get(cell) == number for name in by_cell.get(cell, ())]
        if number in drawn:
            _run(op, {}, states)
        elif op.stored is not None and names and all(_is_all_of(wanted[name], op) for name in names):
            yield from [(name, op.stored) for name in names]
        else:
            _run(op, memory, states)
            yield from _finished({name: wanted[name] for name in names}, memory, shared)
            for cell in [cell for cell in _cells(op) if last[cell] == number]:
                memory.pop(cell, None)


def evaluate(view: View) -> torch.Tensor:
    """The present value of a tensor."""
    ((_, value),) = replay(view.cell.tape, {"": view})
    return value if isinstance(value, torch.Tensor) else value.read()


def draw(tape: Tape) -> None:
    """Bring the generators to the states in which eager initialization has them at the end of the tape."""
    states: States = {}
    live, drawn = _needed(tape.ops, set(), everything=True)
    memory: Memory = {}
    for number in sorted(live | drawn):
        _run(tape.ops[number], memory if number in live else {}, states)
    for generator, state in states.values():
        generator.set_state(state)


def _needed(ops: list[Op], needed: set[Cell], everything: bool = False) -> tuple[set[int], set[int]]:
    """(ops that what is needed at the end depends on, ops that draw before them): numbers."""
    live, drawn = set(), set()
    streams = {id(op.draws) for op in ops if everything and op.draws is not None}
    for number in range(len(ops) - 1, -1, -1):
        op = ops[number]
        made = {view.cell for view in op.made if view is not None}
        draws = op.draws is not None and id(op.draws) in streams
        if not needed.isdisjoint(op.writes | made) or (draws and op.operands):
            live.add(number)
            needed = (needed - made - op.covers) | op.reads
            streams |= set() if op.draws is None else {id(op.draws)}
        elif draws:
            drawn.add(number)
        if op.seed is not None:  # what was drawn before does not matter
            streams.discard(id(op.draws))
    return live, drawn


def _cells(op: Op) -> list[Cell]:
    found = [*views((op.args, op.kwargs)), *(view for view in op.made if view is not None)]
    return list(dict.fromkeys(view.cell for view in found))


def _is_all_of(view: View, op: Op) -> bool:
    """Whether a view is the tensor that the op writes."""
    (written,) = views(op.args)
    return (view.cell, view.dtype, view.shape, view.stride) == (
        written.cell,
        written.dtype,
        written.shape,
        written.stride,
    )


def _finished(wanted: Mapping[str, View], memory: Memory, shared: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """What is final: copies, but for what is all of a cell, and alone in it."""
    for name, view in wanted.items():
        with paused(), torch.no_grad():
            value = _tensor(view, memory)
            alone = len(wanted) == 1 and view.covers
            yielded = value if (alone or shared) and view.cell.constant is None else value.clone()
        yield name, yielded


def _run(op: Op, memory: Memory, states: States) -> None:
    with paused(), torch.no_grad(), _drawing(op, states):
        args, kwargs = torch_pytree.tree_map_only(View, lambda view: _tensor(view, memory), (op.args, op.kwargs))
        out = op.run(*args, **kwargs)
    results = [leaf for leaf in torch_pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    for view, result in zip(op.made, results, strict=False):
        if view is not None:
            memory[view.cell] = _laid_out(result, view)


@contextlib.contextmanager
def _drawing(op: Op, states: States) -> Generator[None]:
    """The op's generator as eager initialization has it at this op; then it is as before."""
    generator = op.draws
    if generator is None:
        yield
        return
    outside = generator.get_state()
    try:
        generator.set_state(states[id(generator)][1] if op.seed is None else op.seed)
        yield
        states[id(generator)] = generator, generator.get_state()
    finally:
        generator.set_state(outside)


def _tensor(view: View, memory: Memory) -> torch.Tensor:
    """A view's tensor; of memory that is not there yet, what will be overwritten."""
    cell = view.cell
    if cell.constant is not None:
        memory[cell] = cell.constant.untyped_storage()
    elif cell not in memory:
        memory[cell] = torch.empty(cell.nbytes, dtype=torch.uint8, device=cell.device).untyped_storage()
    empty = torch.empty(0, dtype=view.dtype, device=cell.device)
    tensor = empty.set_(memory[cell], view.offset, view.shape, view.stride)  # type: ignore[call-overload]
    return tensor.conj() if view.conj else tensor


def _laid_out(result: torch.Tensor, view: View) -> torch.UntypedStorage:
    """The memory of an op's result, with the strides that were recorded."""
    same = result.stride() == view.stride and result.storage_offset() == view.offset
    if same and result.untyped_storage().nbytes() >= view.cell.nbytes:
        return result.untyped_storage()
    with paused():
        memory: Memory = {}
        _tensor(view, memory).copy_(result)
    return memory[view.cell]
