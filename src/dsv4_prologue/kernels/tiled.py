"""The prologue for SIMT cards: one launch, each program a tile of query heads or of KV tokens.

A tile has two sides, TOKENS x HEADS_PER_TILE, of which a launch fixes both; 1x1 is the plain form.
Programs below `kv_programs` work on KV, the others on query heads. Every byte is stored once, and
Q only after its whole row was loaded, so that Q may be changed in place.
"""

import triton
import triton.language as tl

from dsv4_prologue.kernels.numerics import (
    GROUP,
    GROUPS,
    HEAD_DIM,
    NOPE_DIM,
    NUM_SCALES,
    inverse_rms,
    load_cos_sin,
    quantize,
    rotate,
)


@triton.jit
def _query_heads(
    program,
    q_ptr,
    q_out_ptr,
    position_ptr,
    cos_sin_ptr,
    eps,
    num_tokens,
    num_positions,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    cos_sin_stride,
    HEADS: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_ROPE: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (HEADS_OUT + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    token = (program // HEAD_TILES).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = (program % HEAD_TILES) * HEADS_PER_TILE + tl.arange(0, HEADS_PER_TILE).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, None, :]
    token_live = token < num_tokens
    read = (token_live[:, None] & (head < HEADS)[None, :])[:, :, None]
    write = (token_live[:, None] & (head < HEADS_OUT)[None, :])[:, :, None]

    # Every load is issued before anything waits for one: position, row, then what needs a position.
    position = tl.load(position_ptr + token, mask=token_live, other=0)
    rows = (token * q_token_stride)[:, None] + (head * q_head_stride)[None, :]
    x = tl.load(q_ptr + rows[:, :, None] + dim, mask=read, other=0.0).to(tl.float32)
    if Q_ROPE:
        cos, sin = load_cos_sin(cos_sin_ptr, cos_sin_stride, position, token_live, num_positions)
    if Q_NORM:
        x = x * inverse_rms(x, eps)
    if Q_ROPE:
        x = rotate(x, cos, sin, TOKENS, HEADS_PER_TILE)
    if HEADS_OUT > HEADS:
        x = tl.where(read, x, 0.0)  # exact +0, whatever eps and the rotation make of a zero row
    rows = (token * out_token_stride)[:, None] + (head * out_head_stride)[None, :]
    tl.store(q_out_ptr + rows[:, :, None] + dim, x.to(tl.bfloat16), mask=write)


@triton.jit
def _kv_tokens(
    program,
    kv_ptr,
    cache_ptr,
    cache_bf16_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    kv_weight_ptr,
    eps,
    num_slots,
    capacity,
    num_positions,
    kv_token_stride,
    cos_sin_stride,
    page_stride,
    page_stride_bf16,
    PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_NORM: tl.constexpr,
    FP8_CAST: tl.constexpr,
):
    token = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    given = token < num_slots
    dim = tl.arange(0, HEAD_DIM)[None, :]

    # Only the stores wait for the slot: a row without a slot is read in vain, but no load is late.
    slot = tl.load(slot_ptr + token, mask=given, other=-1).to(tl.int64)
    position = tl.load(position_ptr + token, mask=given, other=0)
    rows = kv_ptr + (token * kv_token_stride)[:, None] + dim
    x = tl.load(rows, mask=given[:, None], other=0.0).to(tl.float32)
    cos, sin = load_cos_sin(cos_sin_ptr, cos_sin_stride, position, given, num_positions)
    live = (slot >= 0) & (slot < capacity)
    x = tl.reshape(x, (TOKENS, 1, HEAD_DIM))
    if KV_NORM:
        weight = tl.load(kv_weight_ptr + dim).to(tl.float32)
        x = x * inverse_rms(x, eps) * tl.reshape(weight, (1, 1, HEAD_DIM))
        x = x.to(tl.bfloat16).to(tl.float32)
    y = tl.reshape(rotate(x, cos, sin, TOKENS, 1), (TOKENS, HEAD_DIM)).to(tl.bfloat16)

    # The range was checked in 64 bits; the division is done in 32.
    slot32 = tl.where(live, slot, 0).to(tl.int32)
    page = (slot32 // PAGE_TOKENS).to(tl.int64)
    offset = slot32 % PAGE_TOKENS
    # A token's data in bf16 units: 288 each, the rotated dims behind 224.
    data = page * page_stride_bf16 + offset * 288
    rope_rows = cache_bf16_ptr + data[:, None] + (dim - 224)
    tl.store(rope_rows, y, mask=live[:, None] & (dim >= NOPE_DIM))

    groups = tl.reshape(y.to(tl.float32), (TOKENS, GROUPS, GROUP))
    codes, scale = quantize(groups, FP8_CAST)
    data = page * page_stride + offset * 576
    codes_rows = cache_ptr + data[:, None] + dim
    codes = tl.reshape(codes, (TOKENS, HEAD_DIM))
    tl.store(codes_rows, codes, mask=live[:, None] & (dim < NOPE_DIM))
    group = tl.arange(0, GROUPS)[None, :]
    scale = tl.where(group < NUM_SCALES, scale, 0).to(tl.uint8)
    scale_rows = cache_ptr + (page * page_stride + PAGE_TOKENS * 576 + offset * 8)[:, None] + group
    tl.store(scale_rows, scale, mask=live[:, None])


# What changes from call to call is not specialised on: no recompilation when it does.
@triton.jit(
    do_not_specialize=["eps", "num_tokens", "num_slots", "capacity", "num_positions", "kv_programs"]
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
    num_tokens,
    num_slots,
    capacity,
    num_positions,
    kv_programs,
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
    TOKENS: tl.constexpr,
    HEADS_PER_TILE: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_KV: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_ROPE: tl.constexpr,
    KV_NORM: tl.constexpr,
    FP8_CAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All strides in elements of their tensor; `page_stride` in bytes; `capacity` in slots.

    A pointer of a role that the call does not have (HAS_Q, HAS_KV, KV_NORM) is None. DEPENDENT is
    not "no" only in a dependent launch: nothing is read before the kernel before this one is done,
    and what comes next is let go only after that.
    """
    if DEPENDENT != "no":
        tl.extra.cuda.gdc_wait()
    if DEPENDENT == "early":
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if HAS_KV:
        if program < kv_programs:
            _kv_tokens(
                program,
                kv_ptr,
                cache_ptr,
                cache_bf16_ptr,
                slot_ptr,
                position_ptr,
                cos_sin_ptr,
                kv_weight_ptr,
                eps,
                num_slots,
                capacity,
                num_positions,
                kv_token_stride,
                cos_sin_stride,
                page_stride,
                page_stride_bf16,
                PAGE_TOKENS,
                TOKENS,
                KV_NORM,
                FP8_CAST,
            )
    if HAS_Q:
        if program >= kv_programs:
            _query_heads(
                program - kv_programs,
                q_ptr,
                q_out_ptr,
                position_ptr,
                cos_sin_ptr,
                eps,
                num_tokens,
                num_positions,
                q_token_stride,
                q_head_stride,
                out_token_stride,
                out_head_stride,
                cos_sin_stride,
                HEADS,
                HEADS_OUT,
                TOKENS,
                HEADS_PER_TILE,
                Q_NORM,
                Q_ROPE,
            )
