"""The oracle: the contract's numerics in plain torch, as literally as they are stated.

It changes nothing it is given, uses no kernel, and never slices its work to save memory: a device
that cannot hold it for a shape cannot verify that shape. Everything else is compared with it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dsv4_prologue.contract import (
    ABSMAX_FLOOR_BITS,
    DATA_BYTES,
    FP8_MAX,
    GROUP,
    HEAD_DIM,
    NOPE_DIM,
    NUM_GROUPS,
    ROPE_DIM,
    SCALE_BIAS,
    SCALE_BYTES,
    SCALE_NAN,
    check_gather,
    check_in_bounds,
    check_prologue,
)

_EXPONENT_MASK = 0x7F800000
_ABS_MASK = 0x7FFFFFFF


def _inverse_rms(squares: Tensor, eps: float) -> Tensor:
    """f32 squares [..., 512] -> rsqrt of their mean plus eps, f32 [..., 1]."""
    return torch.rsqrt(squares.mean(dim=-1, keepdim=True) + eps)


def _cos_sin(cos_sin_cache: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [N, 32] cosines and sines; NaN where the position lies outside the table."""
    num_positions = cos_sin_cache.shape[0]
    position = position_ids.long()
    inside = (position >= 0) & (position < num_positions)
    row = torch.full(
        (position.shape[0], ROPE_DIM), float("nan"), dtype=torch.float32, device=position.device
    )
    row[inside] = cos_sin_cache[position[inside]].float()
    return row[:, : ROPE_DIM // 2], row[:, ROPE_DIM // 2 :]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs: x f32 [..., 64], cos and sin f32 [..., 32] -> f32 [..., 64]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@functools.cache
def _has_e4m3(device_type: str) -> bool:
    """Whether a kind of device casts to E4M3; asked of one element."""
    try:
        torch.zeros(1, device=device_type).to(torch.float8_e4m3fn)
    except (RuntimeError, TypeError):
        return False
    return True


def encode_e4m3(x: Tensor) -> Tensor:
    """f32 -> E4M3 bit patterns (uint8), to nearest even, saturating at 448; NaN -> 0x7F."""
    clamped = x.clamp(-FP8_MAX, FP8_MAX)  # some builds' cast saturates, others' gives NaN
    where = x.device if _has_e4m3(x.device.type) else "cpu"
    code = clamped.to(where).to(torch.float8_e4m3fn).view(torch.uint8).to(x.device)
    return torch.where(x.isnan(), 0x7F, code)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [..., 64] groups -> E4M3 codes uint8 [..., 64] and scale bytes uint8 [...]."""
    absmax = x.contiguous().view(torch.int32).bitwise_and(_ABS_MASK).amax(dim=-1)
    finite = absmax < _EXPONENT_MASK
    a = absmax.clamp(ABSMAX_FLOOR_BITS, _EXPONENT_MASK)
    # a = m * 2**k with m in [1, 2), and 448 = 1.75 * 2**8: 2**e >= a / 448 needs k - 8, and one
    # more if m > 1.75, which is what the carry out of adding 0.25's bits less one does.
    exponent = ((a + 0x1FFFFF) >> 23) - 135
    inverse = ((SCALE_BIAS - exponent) << 23).view(torch.float32)
    codes = encode_e4m3(x * inverse[..., None])
    sign = torch.where(x.signbit(), 0x80, 0).to(torch.uint8)
    not_finite = torch.where(x.isnan(), 0x7F, torch.where(x.isinf(), sign | 0x7E, sign))
    codes = torch.where(finite[..., None], codes, not_finite.to(torch.uint8))
    scale = torch.where(finite, exponent + SCALE_BIAS, SCALE_NAN)
    return codes, scale.to(torch.uint8)


def _queries(
    q: Tensor, heads_out: int, cos: Tensor, sin: Tensor, eps: float, norm: bool, rope: bool
) -> Tensor:
    inverse = _inverse_rms(q.float().square_(), eps) if norm else 1.0
    x = q.float().mul_(inverse)
    if rope:
        x[..., NOPE_DIM:] = _rotate(x[..., NOPE_DIM:], cos[:, None], sin[:, None])
    out = torch.zeros(q.shape[0], heads_out, HEAD_DIM, dtype=q.dtype, device=q.device)
    out[:, : q.shape[1]] = x
    return out


def _insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    block_size: int,
) -> Tensor:
    cache = k_cache.clone(memory_format=torch.contiguous_format)
    slots = slot_mapping.long()
    live = (slots >= 0) & (slots < cache.shape[0] * block_size)
    slots, rows = slots[live], live.nonzero()[:, 0]
    x = kv[rows].float()
    if weight is not None:
        x = (x * _inverse_rms(x.square(), eps) * weight.float()).bfloat16().float()
    rope = _rotate(x[:, NOPE_DIM:], cos[rows], sin[rows]).bfloat16()
    codes, scale = quantize(x[:, :NOPE_DIM].reshape(-1, NUM_GROUPS, GROUP))

    page, offset = slots // block_size, slots % block_size
    payload = cache.flatten(1)
    data = torch.cat((codes.flatten(1), rope.view(torch.uint8)), dim=1)
    column = torch.arange(DATA_BYTES, device=cache.device)
    payload[page[:, None], offset[:, None] * DATA_BYTES + column] = data
    scales = torch.nn.functional.pad(scale, (0, SCALE_BYTES - NUM_GROUPS))
    column = torch.arange(SCALE_BYTES, device=cache.device) + block_size * DATA_BYTES
    payload[page[:, None], offset[:, None] * SCALE_BYTES + column] = scales
    return cache


def prologue(
    q: Tensor | None,
    kv: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float = 1e-6,
    cache_block_size: int = 64,
    q_out: Tensor | None = None,
    num_heads_out: int | None = None,
    q_norm: bool = True,
    q_rope: bool = True,
    q_layout: str = "heads",
    q_scale_inv: Tensor | None = None,
    kv_norm_weight: Tensor | None = None,
    cache_format: str | None = None,
    cache_scale: Tensor | None = None,
    fp8_format: str | None = None,
    check_bounds: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Take what `dsv4_prologue.prologue` takes and return what it would leave, as new tensors.

    Returns `(q_out, k_cache)`: bf16 `[N, heads out, 512]` or None without q, and uint8 of
    `k_cache`'s shape, contiguous, or None without kv. `q_out` is asked only for its shape.
    Raises what the operator raises.
    """
    layout = check_prologue(
        q,
        kv,
        k_cache,
        slot_mapping,
        position_ids,
        cos_sin_cache,
        eps=eps,
        cache_block_size=cache_block_size,
        q_out=q_out,
        num_heads_out=num_heads_out,
        q_layout=q_layout,
        q_scale_inv=q_scale_inv,
        kv_norm_weight=kv_norm_weight,
        cache_format=cache_format,
        cache_scale=cache_scale,
        fp8_format=fp8_format,
    )
    if check_bounds:
        check_in_bounds(slot_mapping, layout.capacity, position_ids, cos_sin_cache.shape[0])
    with torch.no_grad():
        cos, sin = _cos_sin(cos_sin_cache, position_ids)
        queries = cache = None
        if q is not None:
            queries = _queries(q, layout.num_heads_out, cos, sin, eps, q_norm, q_rope)
        if kv is not None and k_cache is not None and slot_mapping is not None:
            cache = _insert(
                kv, k_cache, slot_mapping, cos, sin, kv_norm_weight, eps, cache_block_size
            )
    return queries, cache


def gather_dequantize(
    k_cache: Tensor,
    slots: Tensor,
    *,
    cache_block_size: int = 64,
    cache_format: str | None = None,
    cache_scale: Tensor | None = None,
    fp8_format: str | None = None,
) -> Tensor:
    """Read rows back: bf16 `[*slots.shape, 512]`; NaN rows for slots outside the cache."""
    capacity = check_gather(
        k_cache,
        slots,
        cache_block_size=cache_block_size,
        cache_format=cache_format,
        cache_scale=cache_scale,
        fp8_format=fp8_format,
    )
    flat = slots.long().flatten()
    live = (flat >= 0) & (flat < capacity)
    page, offset = flat[live] // cache_block_size, flat[live] % cache_block_size
    payload = k_cache.flatten(1)
    column = torch.arange(DATA_BYTES, device=k_cache.device)
    data = payload[page[:, None], offset[:, None] * DATA_BYTES + column]
    column = torch.arange(NUM_GROUPS, device=k_cache.device) + cache_block_size * DATA_BYTES
    byte = payload[page[:, None], offset[:, None] * SCALE_BYTES + column].int()
    # 2**(byte - 127) from its bits: byte 0 is the subnormal 2**-127, byte 255 reads as NaN.
    scale = torch.where(byte == 0, 0x00400000, byte << 23).view(torch.float32)
    scale = torch.where(byte == SCALE_NAN, float("nan"), scale)

    value = _E4M3_VALUES.to(k_cache.device)[data[:, :NOPE_DIM].long()]
    # E4M3 has 4 significant bits: f32 holds the product exactly, and bf16 rounds it once.
    nope = (value.view(-1, NUM_GROUPS, GROUP) * scale[..., None]).bfloat16()
    out = torch.full(
        (flat.shape[0], HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=flat.device
    )
    rope = data[:, NOPE_DIM:].contiguous().view(torch.bfloat16)
    out[live] = torch.cat((nope.flatten(1), rope), dim=1)
    return out.view(*slots.shape, HEAD_DIM)


def _e4m3_values() -> Tensor:
    """The value of each of the 256 E4M3 codes, f32, from the format's definition."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    significand = torch.where(exponent == 0, mantissa, mantissa + 8).double()
    value = torch.ldexp(significand, torch.where(exponent == 0, 1, exponent) - 10)
    value = torch.where((code & 0x7F) == 0x7F, float("nan"), value)
    return torch.where(code >= 0x80, -value, value).float()


_E4M3_VALUES = _e4m3_values()
