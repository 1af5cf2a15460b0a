"""Adapters of weights that the mesh axis "tp" splits: a factor is split as the side of the weight that it meets.

Beside a column-parallel weight, B's rows are split, and A is whole; beside a row-parallel one, or a table whose rows
are split, A's columns are, and B, whose products are summed with the weight's, is whole. A whole factor meets another
part on each rank, so that its gradient is a sum over ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from functional_booster.sharding import sequence, tensor
from functional_booster.sharding.abstract import ArrayInfo
from functional_booster.sharding.collectives import axis_size, enter
from functional_booster.sharding.partition import part_of
from functional_booster.sharding.spec import P

from .plan import Places, Site

AXIS = "tp"


def require_whole_rows() -> None:
    """Raise ValueError where ranks share the tokens of a row: what passes for one leaf there has adapters' in it."""
    if axes := sequence.token_axes():
        raise ValueError(f"adapters do not work with sequence parallelism, here over {' x '.join(axes)}")


def described(site: Site, role: str, base: ArrayInfo, dtype: torch.dtype) -> ArrayInfo:
    """A tensor of an adapter beside the leaf ``base``, split as that is."""
    out, into = (_entry(base, dim) for dim in _sides(site))
    spec = {"A": P(None, into), "B": P(out, None), "magnitude": P(out)}[role]
    if len(site.places) > 1 and role != "A":  # leaves side by side, each of which is split
        spec = P()
    return ArrayInfo(site.shapes[role], dtype, spec=spec, grain=base.grain, uneven=base.uneven)


def copied(places: Places, base: ArrayInfo, dtype: torch.dtype) -> ArrayInfo:
    """An adapter's own copy of a tensor of the base."""
    _, source = places[0]
    entries = tuple(_entry(base, dim) for dim in range(len(base.shape)))
    spec = P() if len(places) > 1 else P(*(entries[::-1] if source.transposed else entries))
    return ArrayInfo(source.shape(base.shape), dtype, spec=spec, grain=base.grain, uneven=base.uneven)


def split_side(site: Site, base: ArrayInfo) -> str | None:
    """Which side of a site's weight is split here: "out", "into" or neither."""
    dim = split_dim(base)
    return None if dim is None else ("out", "into")[_sides(site).index(dim)]


def split_dim(base: ArrayInfo) -> int | None:
    """The dim of a leaf that is split here. Runs inside a step."""
    dims = [dim for dim in range(len(base.spec)) if _entry(base, dim) is not None]
    if not dims or not tensor.splits(AXIS):
        return None
    is_uneven = base.shape[dims[0]] // base.grain % axis_size(AXIS)
    return None if is_uneven and base.uneven == "replicate" else dims[0]


def own_part(whole: torch.Tensor, base: ArrayInfo) -> torch.Tensor:
    """This rank's part of a tensor (rows, ...) beside the leaf ``base``, whose rows are split: invariant -> varying.

    Backward: the sum of the ranks' cotangents, each in its place.
    """
    ranks, rows = axis_size(AXIS), whole.shape[0]
    padded = -(-(rows // base.grain) // ranks) * base.grain * ranks
    whole = enter(whole, AXIS)
    return part_of(F.pad(whole, (*(0, 0) * (whole.dim() - 1), 0, padded - rows)), P(AXIS))


def _sides(site: Site) -> tuple[int, int]:
    """(dim of the outputs, dim of the inputs) in the site's leaves."""
    return (1, 0) if site.is_transposed or site.is_embedding else (0, 1)


def _entry(base: ArrayInfo, dim: int) -> str | None:
    return AXIS if dim < len(base.spec) and base.spec[dim] in (AXIS, (AXIS,)) else None
