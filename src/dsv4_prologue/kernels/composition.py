"""The prologue and the reader as compositions of torch operations: what the `cpu` card runs.

Right on every device that torch serves, memory bounded (it works on a few tokens at a time), and
written apart from the oracle, with other means, so that the two can check each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_prologue.contract import (
    ABSMAX_FLOOR,
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
    PageLayout,
)

#: Elements at a time: 8 MiB of f32 stay in a CPU's cache; on a device, which pays for each launch,
#: 1 GiB.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 21, 1 << 28


def _chunks(num_rows: int, row_elements: int, device: torch.device) -> Iterator[slice]:
    elements = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, elements // row_elements)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def _rotate_(x: Tensor, position_ids: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the last 64 dims of x f32 [N, heads, 512] in place."""
    inside = (position_ids >= 0) & (position_ids < cos_sin_cache.shape[0])
    if not cos_sin_cache.shape[0]:
        x[..., NOPE_DIM:] = float("nan")
        return
    table = cos_sin_cache[torch.where(inside, position_ids, 0)].float()
    table = torch.where(inside[:, None], table, float("nan"))
    cos, sin = table[:, None, :].chunk(2, dim=-1)
    pairs = x[..., NOPE_DIM:].unflatten(-1, (ROPE_DIM // 2, 2))
    even, odd = (part.clone() for part in pairs.unbind(-1))
    pairs[..., 0] = (even * cos).sub_(odd * sin)
    pairs[..., 1] = (even * sin).add_(odd * cos)


def _normalize_(x: Tensor, eps: float) -> Tensor:
    mean = torch.linalg.vecdot(x, x).div_(HEAD_DIM)
    return x.mul_(mean.add_(eps).rsqrt_()[..., None])


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [n, 7, 64] -> uint8 codes [n, 7, 64] and scale bytes [n, 7]."""
    absmax = x.abs().amax(dim=-1)
    finite = absmax.isfinite()
    # absmax = m * 2**k with m in [0.5, 1), and 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(absmax.where(finite, FP8_MAX).clamp(min=ABSMAX_FLOOR))
    exponent = exponent - 9 + (mantissa > 0.875).int()
    inverse = ((SCALE_BIAS - exponent) << 23).view(torch.float32)
    codes = (x * inverse[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    bytes_ = codes.view(torch.uint8)
    special = torch.where(x.isinf(), 0x7E, 0).to(torch.uint8) | (x.signbit().to(torch.uint8) << 7)
    special = torch.where(x.isnan(), 0x7F, special)
    scale = torch.where(finite, exponent + SCALE_BIAS, SCALE_NAN).to(torch.uint8)
    return torch.where(finite[..., None], bytes_, special), scale


def _token_bytes(
    k_cache: Tensor, slots: Tensor, layout: PageLayout
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The pages as uint8 [pages, payload], and the indices of each slot's data and scale bytes."""
    pages = k_cache.as_strided(
        (k_cache.shape[0], layout.payload_bytes), (k_cache.stride(0), 1), k_cache.storage_offset()
    )
    page, offset = slots // layout.cache_block_size, slots % layout.cache_block_size
    data = torch.arange(DATA_BYTES, device=slots.device)
    scales = torch.arange(SCALE_BYTES, device=slots.device) + layout.scale_offset(0)
    return (
        pages,
        (page[:, None], offset[:, None] * DATA_BYTES + data),
        (page[:, None], offset[:, None] * SCALE_BYTES + scales),
    )


def queries(
    q: Tensor,
    q_out: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    q_norm: bool,
    q_rope: bool,
) -> None:
    """q bf16 [N, H, 512] -> q_out bf16 [N, heads out, 512]; q_out may be q, or hold it."""
    for rows in _chunks(q.shape[0], q.shape[1] * HEAD_DIM, q.device):
        x = q[rows].float()
        if q_norm:
            _normalize_(x, eps)
        if q_rope:
            _rotate_(x, position_ids[rows], cos_sin_cache)
        q_out[rows, : q.shape[1]] = x
        q_out[rows, q.shape[1] :] = 0


def insert(
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    cache_block_size: int,
    kv_norm_weight: Tensor | None,
    capacity: int,
) -> None:
    """Insert the rows of kv bf16 [N, 512] whose slot lies in the cache."""
    layout = PageLayout(cache_block_size)
    for rows in _chunks(slot_mapping.shape[0], HEAD_DIM * 8, kv.device):
        live = ((slot_mapping[rows] >= 0) & (slot_mapping[rows] < capacity)).nonzero()[:, 0]
        live += rows.start
        x = kv[live].float()
        if kv_norm_weight is not None:
            x = _normalize_(x, eps).mul_(kv_norm_weight.float()).bfloat16().float()
        _rotate_(x[:, None], position_ids[live], cos_sin_cache)
        codes, scale = _quantize(x[:, :NOPE_DIM].unflatten(-1, (NUM_GROUPS, GROUP)))
        pages, data, scales = _token_bytes(k_cache, slot_mapping[live].long(), layout)
        rope = x[:, NOPE_DIM:].bfloat16().view(torch.uint8)
        pages[data] = torch.cat((codes.flatten(1), rope), dim=1)
        pages[scales] = torch.cat((scale, scale.new_zeros(scale.shape[0], 1)), dim=1)


def gather(
    k_cache: Tensor, slots: Tensor, out: Tensor, *, cache_block_size: int, capacity: int
) -> None:
    """Decode slots [R] into out bf16 [R, 512]."""
    layout = PageLayout(cache_block_size)
    for rows in _chunks(slots.shape[0], HEAD_DIM * 8, out.device):
        wanted = slots[rows].long()
        inside = (wanted >= 0) & (wanted < capacity)
        out[rows] = float("nan")
        live = inside.nonzero()[:, 0]
        pages, data, scales = _token_bytes(k_cache, wanted[live], layout)
        token, scale = pages[data], pages[scales][:, :NUM_GROUPS].int()
        value = token[:, :NOPE_DIM].view(torch.float8_e4m3fn).float()
        # A step of at most 2**126 at a time: f32 holds no 2**-127 as a normal number.
        half = scale // 2
        first = (half + 64).bitwise_left_shift(23).view(torch.float32)  # 2**(half - 63)
        second = (scale - half + 63).bitwise_left_shift(23).view(torch.float32)
        value = value.unflatten(-1, (NUM_GROUPS, GROUP)) * first[..., None] * second[..., None]
        value[scale == SCALE_NAN] = float("nan")
        out[rows][live, :NOPE_DIM] = value.flatten(1).bfloat16()
        out[rows][live, NOPE_DIM:] = token[:, NOPE_DIM:].contiguous().view(torch.bfloat16)
