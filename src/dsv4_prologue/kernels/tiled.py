"""The prologue for SIMT cards: one launch, each program a tile of query heads or of KV tokens.

A tile of Q has two sides, TOKENS x HEADS_PER_TILE rows; one of KV has KV_TOKENS; 1x1 is the plain
form. Programs below `kv_programs` work on KV, the others on query heads. A row is read and written
as its last WIDTH dims, the tail, and those before it, if any, the lead. With WIDTH eight times the
lanes of a warp, aligned tensors and as many rows as warps, each warp has rows of its own, and
nothing goes through shared memory. Every byte is stored once, and Q only after its whole row was
loaded, so that Q may be changed in place.
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
    places,
    quantize,
    rotate,
)

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before 3.4, and vendors' builds, which would look them up in a dead branch
    gdc_launch_dependents = gdc_wait = None


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
    WIDTH: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_ROPE: tl.constexpr,
):
    ROWS: tl.constexpr = TOKENS * HEADS_PER_TILE
    HEAD_TILES: tl.constexpr = (HEADS_OUT + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    LEAD: tl.constexpr = HEAD_DIM - WIDTH
    row = tl.arange(0, ROWS)
    token = (program // HEAD_TILES).to(tl.int64) * TOKENS + row // HEADS_PER_TILE
    head = (program % HEAD_TILES) * HEADS_PER_TILE + row % HEADS_PER_TILE
    dim = tl.arange(0, WIDTH)[None, :]
    live = (token < num_tokens) & (head < HEADS_OUT)
    write = live[:, None]
    read = (live & (head < HEADS))[:, None]

    # Every load is issued before anything waits for one: position, row, then what needs a position.
    # Rows of one token load its position and cosines each, so that no warp waits for another.
    position = tl.load(position_ptr + token, mask=live, other=0)
    rows = q_ptr + (token * q_token_stride + head.to(tl.int64) * q_head_stride)[:, None] + dim
    if LEAD > 0:
        lead = tl.load(rows, mask=read, other=0.0).to(tl.float32)
    tail = tl.load(rows + LEAD, mask=read, other=0.0).to(tl.float32)
    if Q_ROPE:
        cos, sin = load_cos_sin(
            cos_sin_ptr, cos_sin_stride, position, live, num_positions, WIDTH // 2
        )
    if Q_NORM:
        squares = tail * tail
        if LEAD > 0:
            squares = tl.fma(lead, lead, squares)
        inverse = inverse_rms(tl.sum(squares, axis=1), eps)
        tail = tail * inverse
        if LEAD > 0:
            lead = lead * inverse
    if Q_ROPE:
        tail = rotate(tail, cos, sin, ROWS, WIDTH // 2)
    if HEADS_OUT > HEADS:  # exact +0, whatever eps and the rotation make of a zero row
        tail = tl.where(read, tail, 0.0)
        if LEAD > 0:
            lead = tl.where(read, lead, 0.0)
    rows = q_out_ptr + (token * out_token_stride + head.to(tl.int64) * out_head_stride)[:, None]
    rows += dim
    if LEAD > 0:
        tl.store(rows, lead.to(tl.bfloat16), mask=write)
    tl.store(rows + LEAD, tail.to(tl.bfloat16), mask=write)


@triton.jit
def _quantize_rows(y, ROWS: tl.constexpr, WIDTH: tl.constexpr, FP8_CAST: tl.constexpr):
    """f32 [ROWS, WIDTH] -> E4M3 codes uint8 [ROWS, WIDTH], scale bytes int64 [ROWS, WIDTH / 64]."""
    codes, scale = quantize(tl.reshape(y, (ROWS, WIDTH // GROUP, GROUP)), FP8_CAST)
    return tl.reshape(codes, (ROWS, WIDTH)), scale.to(tl.int64)


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
    WIDTH: tl.constexpr,
    KV_NORM: tl.constexpr,
    FP8_CAST: tl.constexpr,
):
    LEAD: tl.constexpr = HEAD_DIM - WIDTH
    token = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    given = token < num_slots
    dim = tl.arange(0, WIDTH)[None, :]

    # Only the stores wait for the slot: a row without a slot is read in vain, but no load is late.
    slot = tl.load(slot_ptr + token, mask=given, other=-1).to(tl.int64)
    position = tl.load(position_ptr + token, mask=given, other=0)
    rows = kv_ptr + (token * kv_token_stride)[:, None] + dim
    if LEAD > 0:
        lead = tl.load(rows, mask=given[:, None], other=0.0).to(tl.float32)
    tail = tl.load(rows + LEAD, mask=given[:, None], other=0.0).to(tl.float32)
    cos, sin = load_cos_sin(cos_sin_ptr, cos_sin_stride, position, given, num_positions, WIDTH // 2)
    if KV_NORM:
        squares = tail * tail
        if LEAD > 0:
            squares += lead * lead
        inverse = inverse_rms(tl.sum(squares, axis=1), eps)
        weight = tl.load(kv_weight_ptr + (dim + LEAD)).to(tl.float32)
        tail = (tail * inverse * weight).to(tl.bfloat16).to(tl.float32)
        if LEAD > 0:
            weight = tl.load(kv_weight_ptr + dim).to(tl.float32)
            lead = (lead * inverse * weight).to(tl.bfloat16).to(tl.float32)

    live = (slot >= 0) & (slot < capacity)
    write = live[:, None]
    slot = tl.where(live, slot, 0)
    at_codes, at_scales, at_rotated = places(slot, page_stride, page_stride_bf16, PAGE_TOKENS)
    rotated = dim + (LEAD - NOPE_DIM)  # a dim's number among those that RoPE rotates
    # The rotated dims have no codes, so that these need not wait for the cosines.
    codes, scale = _quantize_rows(tail, TOKENS, WIDTH, FP8_CAST)
    group = tl.arange(0, WIDTH // GROUP)[None, :]
    scale = tl.where(group + LEAD // GROUP < NUM_SCALES, scale, 0) << (8 * group + LEAD // 8)
    codes_rows = cache_ptr + at_codes[:, None] + dim
    if LEAD > 0:
        lead_codes, lead_scale = _quantize_rows(lead, TOKENS, WIDTH, FP8_CAST)
        scale += lead_scale << (8 * group)
        # Eight codes a store, as many as a lane has: more would be gathered from other lanes first.
        tl.store(tl.max_contiguous(codes_rows, [1, 8]), lead_codes, mask=write)
    # The eight scale bytes, packed in every lane, are stored in the place of the first rotated
    # dims: one store less, and none of single bytes.
    packed = tl.sum(scale, axis=1)[:, None]
    codes = tl.where(rotated < 0, codes, (packed >> (8 * (dim % GROUPS))).to(tl.uint8))
    scale_rows = cache_ptr + at_scales[:, None] + rotated
    rows = tl.where(rotated < 0, codes_rows + LEAD, scale_rows)
    tl.store(tl.max_contiguous(rows, [1, 8]), codes, mask=write & (rotated < GROUPS))

    rope = rotate(tail, cos, sin, TOKENS, WIDTH // 2).to(tl.bfloat16)
    tl.store(cache_bf16_ptr + at_rotated[:, None] + rotated, rope, mask=write & (rotated >= 0))


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
    KV_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_Q: tl.constexpr,
    HAS_KV: tl.constexpr,
    Q_NORM: tl.constexpr,
    Q_ROPE: tl.constexpr,
    KV_NORM: tl.constexpr,
    FP8_CAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All strides in elements of their tensor; `page_stride` in bytes; `capacity` in slots.

    TOKENS, HEADS_PER_TILE and KV_TOKENS are powers of two; WIDTH is 256 or 512. A pointer of a role
    that the call does not have (HAS_Q, HAS_KV, KV_NORM) is None. DEPENDENT is not "no" only in a
    dependent launch: nothing is read before the kernel before this one is done, and what comes next
    is let go only after that.
    """
    if DEPENDENT != "no":
        gdc_wait()
    if DEPENDENT == "early":
        gdc_launch_dependents()
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
                KV_TOKENS,
                WIDTH,
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
                WIDTH,
                Q_NORM,
                Q_ROPE,
            )
