"""The Triton kernels of ``fp8_cast``: imported at their first use on a GPU, never before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LEAST = tl.constexpr(-100)  # as in fp8_cast
_INFINITE = tl.constexpr(0x7F800000)
_ROWS, _COLUMNS = 64, 128  # of the tile that a program casts
_SIDE = 128  # of a square tile, whose rows and columns a program compares
_CHUNK = 8192  # elements that a program compares at a time
_PARTS = 512  # programs that go over a tensor, each for the largest of its part


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitudes of the parts of a contiguous x of at most 32 bits, as the bits of float32: int32 (P,)."""
    chunks = -(-x.numel() // _CHUNK)
    out = torch.empty(min(chunks, _PARTS), dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _largest[(len(out),)](out, x, x.numel(), chunks, CHUNK=_CHUNK, num_warps=8)
    return out


def largest_by_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the rows and of the columns of a contiguous matrix (M, K): int32 (M,) and (K,)."""
    rows, columns = x.shape
    out = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
    across = -(-columns // _SIDE)
    grid = (-(-rows // _SIDE) * across,)
    with torch.cuda.device_of(x):
        _largest_by_both[grid](out, x, rows, columns, across, ROWS=_SIDE, COLUMNS=_SIDE, num_warps=8)
    return out[:rows], out[rows:]


def cast(
    values: torch.Tensor,
    scale: torch.Tensor,
    transposed: torch.Tensor,
    transposed_scale: torch.Tensor,
    x: torch.Tensor,
    by_rows: torch.Tensor,
    by_columns: torch.Tensor,
    exponent: int,
    limit: float,
    by_row: bool,
    native: bool,
) -> None:
    """Fill values (M, K), transposed (K, M) and their scales from a contiguous x (M, K) and its largest magnitudes.

    Those are one for each row and each column, or, not ``by_row``, some whose largest is that of all of x. ``native``:
    round by the GPU's instruction, else by integer arithmetic, to the same bits (the interpreter's own conversion to
    fp8 does not round to nearest).
    """
    rows, columns = x.shape
    across = -(-columns // _COLUMNS)
    with torch.cuda.device_of(x):
        _cast[(-(-rows // _ROWS) * across,)](
            values.view(torch.uint8),
            transposed.view(torch.uint8),
            scale,
            transposed_scale,
            x,
            by_rows,
            by_columns,
            rows,
            columns,
            across,
            len(by_rows),
            limit,
            BY_ROW=by_row,
            PARTS=1 if by_row else 1 << (len(by_rows) - 1).bit_length(),
            EXPONENT=exponent,
            MANTISSA=3 if exponent == 8 else 2,
            NATIVE=native,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=8,
        )


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(out_ptr, x_ptr, size, chunks, CHUNK: tl.constexpr):
    most = tl.zeros((CHUNK,), tl.int32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        place = tl.cast(chunk, tl.int64) * CHUNK + tl.arange(0, CHUNK)
        most = tl.maximum(most, _magnitude_bits(tl.load(x_ptr + place, mask=place < size, other=0.0)))
    tl.store(out_ptr + tl.program_id(0), tl.max(most, axis=0))


@triton.jit
def _tile(program, rows, columns, tiles_across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = program // tiles_across * ROWS + tl.arange(0, ROWS)
    column = program % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    return row, column, place, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _largest_by_both(out_ptr, x_ptr, rows, columns, tiles_across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, place, inside = _tile(tl.program_id(0), rows, columns, tiles_across, ROWS, COLUMNS)
    bits = _magnitude_bits(tl.load(x_ptr + place, mask=inside, other=0.0))
    # Of integers: in any order the same.
    tl.atomic_max(out_ptr + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
    tl.atomic_max(out_ptr + rows + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(bits, EXPONENT: tl.constexpr):
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - (127 + EXPONENT), _LEAST)


@triton.jit
def _scale(bits, EXPONENT: tl.constexpr):
    return tl.where(bits < _INFINITE, _power_of_two(_exponent(bits, EXPONENT)), float("nan"))


@triton.jit
def _rounded_by_integers(x, MANTISSA: tl.constexpr):
    BIAS: tl.constexpr = 2 ** (6 - MANTISSA) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    normal = ((bits + (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # A subnormal is a multiple of one quantum, to which the addition of 2^23 of them rounds.
    MAGIC: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    magic = tl.full(x.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(x) + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _rounded_by_instruction(x, MANTISSA: tl.constexpr):
    # Written out, four to a register: of Triton's own conversion, two to one, ptxas loses every fourth number where the
    # result is transposed.
    if MANTISSA == 3:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return code


@triton.jit
def _rounded(x, MANTISSA: tl.constexpr, NATIVE: tl.constexpr):
    """float32, no larger than fp8's largest -> the bits of fp8, to nearest with ties to even."""
    return _rounded_by_instruction(x, MANTISSA) if NATIVE else _rounded_by_integers(x, MANTISSA)


@triton.jit
def _cast(
    values_ptr,
    transposed_ptr,
    scale_ptr,
    transposed_scale_ptr,
    x_ptr,
    by_rows_ptr,
    by_columns_ptr,
    rows,
    columns,
    tiles_across,
    parts,
    limit,
    BY_ROW: tl.constexpr,
    PARTS: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Backwards: what the search for the largest read last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, place, inside = _tile(program, rows, columns, tiles_across, ROWS, COLUMNS)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -limit), limit)
    across = column[:, None].to(tl.int64) * rows + row[None, :]
    across_inside = (column < columns)[:, None] & (row < rows)[None, :]
    if BY_ROW:
        by_row = tl.load(by_rows_ptr + row, mask=row < rows, other=0)
        by_column = tl.load(by_columns_ptr + column, mask=column < columns, other=0)
        if program % tiles_across == 0:
            tl.store(scale_ptr + row, _scale(by_row, EXPONENT), mask=row < rows)
        if program < tiles_across:
            tl.store(transposed_scale_ptr + column, _scale(by_column, EXPONENT), mask=column < columns)
        down = x * _power_of_two(-_exponent(by_row, EXPONENT))[:, None]
        sideways = x * _power_of_two(-_exponent(by_column, EXPONENT))[None, :]
        tl.store(values_ptr + place, _rounded(down, MANTISSA, NATIVE), mask=inside)
        turned = tl.trans(_rounded(sideways, MANTISSA, NATIVE))
        tl.store(transposed_ptr + across, turned, mask=across_inside)
    else:
        part = tl.arange(0, PARTS)
        bits = tl.max(tl.load(by_rows_ptr + part, mask=part < parts, other=0), axis=0)
        if program == 0:
            tl.store(scale_ptr, _scale(bits, EXPONENT))
            tl.store(transposed_scale_ptr, _scale(bits, EXPONENT))
        code = _rounded(x * _power_of_two(-_exponent(bits, EXPONENT)), MANTISSA, NATIVE)
        tl.store(values_ptr + place, code, mask=inside)
        tl.store(transposed_ptr + across, tl.trans(code), mask=across_inside)
