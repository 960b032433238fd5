"""The contract's arithmetic as Triton functions: RoPE pairs, UE8M0 scales, E4M3 codes.

Only constructs that every Triton from 3.2 takes, vendors' builds included: no log2 or exp2, no
pointer casts, and for Ascend no shift by a per-lane amount.
"""

import triton
import triton.language as tl

HEAD_DIM = tl.constexpr(512)
NOPE_DIM = tl.constexpr(448)
ROPE_DIM = tl.constexpr(64)
ROPE_PAIRS = tl.constexpr(32)  # (x[2i], x[2i+1]) of the RoPE dims
GROUPS = tl.constexpr(8)  # a row as groups of 64: seven with a scale, and the RoPE dims
GROUP = tl.constexpr(64)
NUM_SCALES = tl.constexpr(7)

ABS_MASK = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)
ABSMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # f32(1e-4)


@triton.jit
def load_cos_sin(cos_sin_ptr, cos_sin_stride, position, live, num_positions, PAIRS: tl.constexpr):
    """Cosines and sines of each position [R], laid along a row's last PAIRS: two f32 [R, PAIRS].

    Only the last 32 pairs are loaded. A position outside the table is not read and gives NaN.
    """
    position = position.to(tl.int64)
    inside = live & (position >= 0) & (position < num_positions)
    pair = tl.arange(0, PAIRS)[None, :] - (PAIRS - ROPE_PAIRS)
    read = inside[:, None] & (pair >= 0)
    row = cos_sin_ptr + (position * cos_sin_stride)[:, None]
    cos = tl.load(row + pair, mask=read, other=float("nan"))
    sin = tl.load(row + (pair + ROPE_PAIRS), mask=read, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate the last 32 pairs of each row: x f32 [ROWS, 2 * PAIRS], cos and sin [ROWS, PAIRS].

    The other pairs are selected, not multiplied by one: Inf and -0 must pass as they are.
    """
    even, odd = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    rope = (tl.arange(0, PAIRS) >= PAIRS - ROPE_PAIRS)[None, :]
    even_out = tl.where(rope, even * cos - odd * sin, even)
    odd_out = tl.where(rope, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(even_out, odd_out), (ROWS, 2 * PAIRS))


@triton.jit
def inverse_rms(sum_of_squares, eps):
    """Of rows of 512: f32 [R] -> rsqrt(mean of squares + eps), f32 [R, 1]."""
    return tl.rsqrt(sum_of_squares * 0.001953125 + eps)[:, None]  # 1 / 512, exact


@triton.jit
def places(slot, page_stride, page_stride_bf16, PAGE_TOKENS: tl.constexpr):
    """Where the parts of a slot inside the cache lie, from its start.

    In bytes, int64: codes, and scale bytes behind the data of all the page's tokens; in bf16
    elements: the rotated dims, behind 448 of a token's 576 bytes.
    """
    # The slot's range was checked in 64 bits; the division is done in 32.
    slot32 = slot.to(tl.int32)
    page = (slot32 // PAGE_TOKENS).to(tl.int64)
    offset = slot32 % PAGE_TOKENS
    codes = page * page_stride + offset * 576
    scales = page * page_stride + PAGE_TOKENS * 576 + offset * 8
    rotated = page * page_stride_bf16 + offset * 288 + 224
    return codes, scales, rotated


@triton.jit
def e4m3_bits(x):
    """f32 -> E4M3 code (int32 0..255): to nearest even, saturating at 448, NaN -> 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    a = bits & ABS_MASK
    # Normal: rebias the exponent from 127 to 7 (120 << 23 is 0x3C000000) and keep 3 mantissa bits,
    # rounding by a carry of half a unit less one, plus the last bit kept.
    normal = (a - 0x3BF80001 + ((a >> 20) & 1)) >> 20
    # Subnormal: in [2**14, 2**15) an f32's last place is 2**-9, so the addition itself rounds.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(a < 0x3C800000, subnormal, normal)  # below 2**-6
    code = tl.where(a > 0x43E00000, 0x7E, code)  # above 448
    code = code | ((bits >> 24) & 0x80)
    return tl.where(a > INF_BITS, 0x7F, code)


@triton.jit
def e4m3(x, FP8_CAST: tl.constexpr):
    """f32 -> E4M3 code (uint8), by the compiler's cast or by integer arithmetic; both saturate."""
    if FP8_CAST == "compiler":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return e4m3_bits(x).to(tl.uint8)


@triton.jit
def quantize(x, FP8_CAST: tl.constexpr):
    """Groups f32 [T, G, 64] -> E4M3 codes uint8 [T, G, 64] and scale bytes int32 [T, G].

    One integer max finds absmax, NaN and Inf at once. After the scaling nothing finite exceeds
    448, so the contract's clamp has nothing left to do.
    """
    magnitude = x.to(tl.int32, bitcast=True) & ABS_MASK
    absmax = tl.maximum(tl.max(magnitude, axis=2), ABSMAX_FLOOR_BITS)
    not_finite = absmax >= INF_BITS
    # The f32 exponent of the scale times 2**8: 448 = 1.75 * 2**8, and only a mantissa above 1.75
    # carries. The minimum keeps a NaN's bits from overflowing the sum.
    biased = (tl.minimum(absmax, INF_BITS) + 0x1FFFFF) >> 23
    inverse = ((262 - biased) << 23).to(tl.float32, bitcast=True)  # 2**(135 - biased), exact
    # In a group that is not finite, everything finite becomes zero: its scaled value is below 2**8,
    # 2**-18 times that is below 2**-10, and the cast rounds that to zero and keeps the sign.
    # Of NaN the cast makes 0x7F, of Inf its sign and 0x7E.
    fade = tl.where(not_finite, 3.814697265625e-06, 1.0)
    codes = e4m3(x * inverse[:, :, None] * fade[:, :, None], FP8_CAST)
    return codes, tl.where(not_finite, 255, biased - 8)


@triton.jit
def e4m3_value(code):
    """E4M3 code (int32 0..255) -> f32, exactly; 0x7F and 0xFF -> NaN."""
    a = code & 0x7F
    normal = ((a << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    subnormal = a.to(tl.float32) * 0.001953125  # times 2**-9
    value = tl.where(a < 8, subnormal, normal)
    value = tl.where(a == 0x7F, float("nan"), value)
    # The sign as a bit: Triton's unary minus may be 0 - x, which loses -0.
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_value(byte):
    """Scale byte (int32 0..255) -> 2**(byte - 127) as f32, exactly; 255 -> NaN."""
    value = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), value)
