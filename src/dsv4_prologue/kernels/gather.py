"""The reader: rows of the paged FP8 cache, decoded to bf16."""

import triton
import triton.language as tl

from dsv4_prologue.kernels.numerics import (
    GROUP,
    HEAD_DIM,
    NOPE_DIM,
    e4m3_value,
    places,
    scale_value,
)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def gather_kernel(
    out_ptr,
    cache_ptr,
    cache_bf16_ptr,
    slot_ptr,
    num_rows,
    capacity,
    page_stride,
    page_stride_bf16,
    PAGE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS slots a program -> out bf16 [num_rows, 512]; a slot outside the cache -> a NaN row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slot_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < capacity)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    nope = live[:, None] & (dim < NOPE_DIM)
    rope = live[:, None] & (dim >= NOPE_DIM)

    slot = tl.where(live, slot, 0)
    at_codes, at_scales, at_rotated = places(slot, page_stride, page_stride_bf16, PAGE_TOKENS)
    code = tl.load(cache_ptr + at_codes[:, None] + dim, mask=nope, other=0).to(tl.int32)
    scale_rows = cache_ptr + at_scales[:, None] + dim // GROUP
    scale = tl.load(scale_rows, mask=nope, other=255).to(tl.int32)
    rotated_rows = cache_bf16_ptr + at_rotated[:, None] + (dim - NOPE_DIM)
    rotated = tl.load(rotated_rows, mask=rope, other=float("nan"))

    value = (e4m3_value(code) * scale_value(scale)).to(tl.bfloat16)
    value = tl.where(dim < NOPE_DIM, value, rotated)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dim, value, mask=(row < num_rows)[:, None])
