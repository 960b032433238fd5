"""A baseline in Triton, written from the contract the way an engine writes it by hand.

Two launches, one for Q and one for KV, one program a unit; the rotated dims are loaded and stored
apart from the others, and no launch argument is given, so that Triton's default of four warps
holds. Negative slots are skipped. Not-finite values, slots past the cache's end and positions
outside the table are not looked after, as they are not in engines.
"""

# A Triton kernel's arguments have no Python types, and `triton.jit` is Any to mypy.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: N803 (constexprs are UPPER_CASE, as everywhere in Triton)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4_prologue.kernels.numerics import e4m3
from dsv4_prologue.selection import interpreting


@triton.jit
def query_kernel(q_ptr, position_ptr, cos_sin_ptr, eps, HEADS: tl.constexpr):
    """One head of one token, in place: q bf16 [N, HEADS, 512] contiguous, grid (N, HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = q_ptr + (token * HEADS + tl.program_id(1)) * 512
    dim, pair = tl.arange(0, 512), tl.arange(0, 32)
    # Before the sum, which is a barrier: no thread stores a pair that another has yet to load.
    even = tl.load(row_ptr + 448 + 2 * pair).to(tl.float32)
    odd = tl.load(row_ptr + 449 + 2 * pair).to(tl.float32)
    x = tl.load(row_ptr + dim).to(tl.float32)
    table_ptr = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * 64
    cos, sin = tl.load(table_ptr + pair), tl.load(table_ptr + 32 + pair)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) * 0.001953125 + eps)  # 1 / 512
    even, odd = even * inverse, odd * inverse
    tl.store(row_ptr + dim, (x * inverse).to(tl.bfloat16), mask=dim < 448)
    tl.store(row_ptr + 448 + 2 * pair, (even * cos - odd * sin).to(tl.bfloat16))
    tl.store(row_ptr + 449 + 2 * pair, (even * sin + odd * cos).to(tl.bfloat16))


@triton.jit
def insert_kernel(
    kv_ptr,
    cache_ptr,
    cache_bf16_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    page_stride,
    PAGE_TOKENS: tl.constexpr,
    FP8_CAST: tl.constexpr,
):
    """One token: kv bf16 [N, 512] contiguous into the paged cache, grid (slots,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        offset = slot % PAGE_TOKENS
        page = (slot // PAGE_TOKENS) * page_stride
        row_ptr = kv_ptr + token * 512

        dim, group = tl.arange(0, 512), tl.arange(0, 8)
        x = tl.reshape(tl.load(row_ptr + dim).to(tl.float32), (8, 64))
        absmax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
        biased = (absmax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
        inverse = ((262 - biased) << 23).to(tl.float32, bitcast=True)
        codes = e4m3(tl.clamp(x * inverse[:, None], -448.0, 448.0), FP8_CAST)
        data_ptr = cache_ptr + page + offset * 576
        tl.store(data_ptr + dim, tl.reshape(codes, (512,)), mask=dim < 448)
        scale = tl.where(group < 7, biased - 8, 0).to(tl.uint8)
        tl.store(cache_ptr + page + PAGE_TOKENS * 576 + offset * 8 + group, scale)

        pair = tl.arange(0, 32)
        even = tl.load(row_ptr + 448 + 2 * pair).to(tl.float32)
        odd = tl.load(row_ptr + 449 + 2 * pair).to(tl.float32)
        table_ptr = cos_sin_ptr + tl.load(position_ptr + token).to(tl.int64) * 64
        cos, sin = tl.load(table_ptr + pair), tl.load(table_ptr + 32 + pair)
        rope_ptr = cache_bf16_ptr + page // 2 + offset * 288 + 224
        tl.store(rope_ptr + 2 * pair, (even * cos - odd * sin).to(tl.bfloat16))
        tl.store(rope_ptr + 2 * pair + 1, (even * sin + odd * cos).to(tl.bfloat16))


def _launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
    if device.type == "cpu":
        if not interpreting():
            raise RuntimeError("on CPU tensors it needs TRITON_INTERPRET=1")
        from dsv4_prologue.verify import interpreter

        interpreter.run(kernel, grid, arguments)
    else:
        kernel[grid](**arguments)


def run(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    *,
    fp8_cast: str = "compiler",
    **launch: int,
) -> None:
    """The operator's eight arguments, q in place; q, kv and the table contiguous, the table f32.

    `launch` are launch arguments of both kernels; none: as shipped.
    """
    tokens, heads, _ = q.shape
    common = {"position_ptr": position_ids, "cos_sin_ptr": cos_sin_cache, **launch}
    if q.numel():
        _launch(query_kernel, (tokens, heads), q.device, q_ptr=q, eps=eps, HEADS=heads, **common)
    if slot_mapping.numel():
        pages = k_cache.as_strided((k_cache.shape[0], k_cache[0].numel()), (k_cache.stride(0), 1))
        _launch(
            insert_kernel,
            (slot_mapping.numel(),),
            q.device,
            kv_ptr=kv,
            cache_ptr=pages,
            cache_bf16_ptr=pages.view(torch.bfloat16),
            slot_ptr=slot_mapping,
            page_stride=k_cache.stride(0),
            PAGE_TOKENS=cache_block_size,
            FP8_CAST=fp8_cast,
            **common,
        )
