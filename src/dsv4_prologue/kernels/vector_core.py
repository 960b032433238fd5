"""The prologue for vector cores (Ascend 910B): one launch, whose program ids choose the role.

Programs below `kv_programs` insert one KV token each, as one [8, 64] tile; the others take
HEADS_PER_TILE query heads of one token. The unit works on whole vectors in 192 KB of Unified
Buffer, and what its compiler cannot make a vector of becomes a loop of scalar code. Hence:

* slot and position are scalars, and every pointer is a scalar plus a range;
* RoPE pairs are split straight after their load, and scaled after the split;
* no tile has one row, and no sum ends in a scalar;
* every load of a program comes before its first store, so that Q may be changed in place.

A launch may be a part of the call: programs `first_program` and up. The card may run program 0 of
a grid again unless the grid is a multiple of its cores, so launches are padded to one; programs
from `num_programs` on do nothing.
"""

import triton
import triton.language as tl

from dsv4_prologue.kernels.numerics import (
    GROUP,
    GROUPS,
    HEAD_DIM,
    NOPE_DIM,
    NUM_SCALES,
    ROPE_DIM,
    ROPE_PAIRS,
    inverse_rms,
    places,
    quantize,
)


@triton.jit
def _load_rows(pointers, rows, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=rows, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_rows(pointers, x, row, LONE: tl.constexpr):
    if LONE:
        tl.store(pointers, x, mask=row < 1)
    else:
        tl.store(pointers, x)


@triton.jit
def _split_pairs(x, ROWS: tl.constexpr):
    """bf16 [ROWS, 64] -> its even and its odd elements, two f32 [ROWS, 32]."""
    even, odd = tl.split(tl.reshape(x, (ROWS * ROPE_PAIRS, 2)))
    even = tl.reshape(even, (ROWS, ROPE_PAIRS)).to(tl.float32)
    return even, tl.reshape(odd, (ROWS, ROPE_PAIRS)).to(tl.float32)


@triton.jit
def _join_pairs(even, odd, ROWS: tl.constexpr):
    """Two f32 [ROWS, 32] -> bf16 [ROWS, 64]."""
    even = tl.reshape(even.to(tl.bfloat16), (ROWS * ROPE_PAIRS,))
    odd = tl.reshape(odd.to(tl.bfloat16), (ROWS * ROPE_PAIRS,))
    return tl.reshape(tl.join(even, odd), (ROWS, ROPE_DIM))


@triton.jit
def _cos_sin(cos_sin_ptr, cos_sin_stride, position_ptr, token, num_positions):
    """A token's cosines and sines, two f32 [1, 32]; a position outside the table gives NaN.

    It is not read: the mask is a range of length 0, the one form that stays a plain copy.
    """
    position = tl.load(position_ptr + token).to(tl.int64)
    inside = (position >= 0) & (position < num_positions)
    pair = tl.arange(0, ROPE_PAIRS)[None, :]
    read = pair < tl.where(inside, ROPE_PAIRS, 0)
    row = cos_sin_ptr + tl.where(inside, position, 0) * cos_sin_stride
    cos = tl.load(row + pair, mask=read, other=float("nan"))
    sin = tl.load(row + ROPE_PAIRS + pair, mask=read, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _total(parts, COPIES: tl.constexpr):
    """The sum of f32 [8], COPIES times: as a vector, for a scalar sum becomes scalar code."""
    return tl.sum(tl.broadcast_to(parts[None, :], (COPIES, GROUPS)), axis=1)


@triton.jit
def _query_heads(
    program,
    q_ptr,
    q_out_ptr,
    position_ptr,
    cos_sin_ptr,
    eps,
    num_positions,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    cos_sin_stride,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_ROPE: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = HEADS_OUT // HEADS_PER_TILE
    LONE: tl.constexpr = HEADS_PER_TILE == 1  # a tile of two rows, one of them masked off
    ROWS: tl.constexpr = 2 if LONE else HEADS_PER_TILE
    PADDED: tl.constexpr = HEADS_OUT > HEADS
    MASKED: tl.constexpr = PADDED or LONE
    token = (program // HEAD_TILES).to(tl.int64)
    first_head = program % HEAD_TILES * HEADS_PER_TILE
    row = tl.arange(0, ROWS)[:, None]
    real = row < tl.minimum(HEADS - first_head, HEADS_PER_TILE)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    rope_dim = tl.arange(0, ROPE_DIM)[None, :] + NOPE_DIM

    head = first_head.to(tl.int64)
    rows = q_ptr + token * q_token_stride + head * q_head_stride + row.to(tl.int64) * q_head_stride
    x = _load_rows(rows + dim, real, MASKED).to(tl.float32)
    if Q_ROPE:
        even, odd = _split_pairs(_load_rows(rows + rope_dim, real, MASKED), ROWS)
        cos, sin = _cos_sin(cos_sin_ptr, cos_sin_stride, position_ptr, token, num_positions)
    if Q_NORM:
        inverse = inverse_rms(tl.sum(x * x, axis=1), eps)
        if PADDED:
            inverse = tl.where(real, inverse, 0.0)  # rsqrt(eps) of a zero row may be Inf
        x = x * inverse
        if Q_ROPE:
            even = even * inverse
            odd = odd * inverse

    rows = q_out_ptr + token * out_token_stride + head * out_head_stride
    rows = rows + row.to(tl.int64) * out_head_stride
    if Q_ROPE:
        even_out = even * cos - odd * sin
        odd_out = even * sin + odd * cos
        if PADDED:  # exact +0, whatever the rotation makes of a zero row
            even_out = tl.where(real, even_out, 0.0)
            odd_out = tl.where(real, odd_out, 0.0)
        _store_rows(rows + rope_dim, _join_pairs(even_out, odd_out, ROWS), row, LONE)
    written = dim < (NOPE_DIM if Q_ROPE else HEAD_DIM)
    if LONE:
        written = written & (row < 1)
    tl.store(rows + dim, x.to(tl.bfloat16), mask=written)


@triton.jit
def _kv_token(
    token,
    kv_ptr,
    cache_ptr,
    cache_bf16_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    kv_weight_ptr,
    eps,
    capacity,
    num_positions,
    kv_token_stride,
    cos_sin_stride,
    page_stride,
    page_stride_bf16,
    PAGE_TOKENS: tl.constexpr,
    KV_NORM: tl.constexpr,
):
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < capacity):
        group = tl.arange(0, GROUPS)[:, None]
        dim = group * GROUP + tl.arange(0, GROUP)[None, :]
        rope_dim = tl.arange(0, ROPE_DIM)[None, :]
        row = kv_ptr + token.to(tl.int64) * kv_token_stride
        x = tl.load(row + dim).to(tl.float32)
        even, odd = _split_pairs(tl.load(row + NOPE_DIM + rope_dim), 1)
        cos, sin = _cos_sin(cos_sin_ptr, cos_sin_stride, position_ptr, token, num_positions)
        if KV_NORM:
            parts = tl.sum(x * x, axis=1)
            weight = tl.load(kv_weight_ptr + dim).to(tl.float32)
            x = x * inverse_rms(_total(parts, GROUPS), eps) * weight
            x = x.to(tl.bfloat16).to(tl.float32)
            inverse = tl.reshape(inverse_rms(_total(parts, ROPE_PAIRS), eps), (1, ROPE_PAIRS))
            weight = tl.load(kv_weight_ptr + NOPE_DIM + rope_dim)
            even_weight, odd_weight = _split_pairs(weight, 1)
            even = (even * inverse * even_weight).to(tl.bfloat16).to(tl.float32)
            odd = (odd * inverse * odd_weight).to(tl.bfloat16).to(tl.float32)

        at_codes, at_scales, at_rotated = places(slot, page_stride, page_stride_bf16, PAGE_TOKENS)
        rotated = _join_pairs(even * cos - odd * sin, even * sin + odd * cos, 1)
        tl.store(cache_bf16_ptr + at_rotated + rope_dim, rotated)
        codes, scale = quantize(tl.reshape(x, (1, GROUPS, GROUP)), "integer")
        codes = tl.reshape(codes, (GROUPS, GROUP))
        tl.store(cache_ptr + at_codes + dim, codes, mask=group < NUM_SCALES)
        number = tl.arange(0, GROUPS)[None, :]
        scale = tl.where(number < NUM_SCALES, scale, 0).to(tl.uint8)
        tl.store(cache_ptr + at_scales + number, scale)


# What changes from call to call is not specialised on: no recompilation when it does.
@triton.jit(
    do_not_specialize=[
        "eps",
        "capacity",
        "num_positions",
        "kv_programs",
        "first_program",
        "num_programs",
    ]
)
def prologue_kernel(
    q_ptr,
    q_out_ptr,
    kv_ptr,
    cache_ptr,
    cache_bf16_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    kv_weight_ptr,
    eps,
    capacity,
    num_positions,
    kv_programs,
    first_program,
    num_programs,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_token_stride,
    cos_sin_stride,
    page_stride,
    page_stride_bf16,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_KV: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_ROPE: tl.constexpr,
    KV_NORM: tl.constexpr,
):
    """All strides in elements of their tensor; `page_stride` in bytes; `capacity` in slots.

    A pointer of a role that the call does not have (HAS_Q, HAS_KV, KV_NORM) is None.
    HEADS_PER_TILE is a power of two that divides HEADS_OUT; more than 32 overflow the buffer.
    """
    program = first_program + tl.program_id(0)
    if HAS_KV:
        if program < kv_programs:
            _kv_token(
                program,
                kv_ptr,
                cache_ptr,
                cache_bf16_ptr,
                slot_ptr,
                position_ptr,
                cos_sin_ptr,
                kv_weight_ptr,
                eps,
                capacity,
                num_positions,
                kv_token_stride,
                cos_sin_stride,
                page_stride,
                page_stride_bf16,
                PAGE_TOKENS,
                KV_NORM,
            )
    if HAS_Q:
        if (program >= kv_programs) & (program < num_programs):
            _query_heads(
                program - kv_programs,
                q_ptr,
                q_out_ptr,
                position_ptr,
                cos_sin_ptr,
                eps,
                num_positions,
                q_token_stride,
                q_head_stride,
                out_token_stride,
                out_head_stride,
                cos_sin_stride,
                HEADS,
                HEADS_OUT,
                HEADS_PER_TILE,
                Q_NORM,
                Q_ROPE,
            )
