"""The limits of the contract, each with its reason, and the comparison that applies them.

What was computed is compared with the oracle's bits, in slices, so that tensors of any size can be
compared; the oracle itself is never sliced. The limits are the same everywhere: in a unit test, in
the interpreter and on a card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv4_prologue.contract import (
    DATA_BYTES,
    GROUP,
    HEAD_DIM,
    NOPE_DIM,
    SCALE_BYTES,
    PageLayout,
)
from dsv4_prologue.verify.canary import slices
from dsv4_prologue.verify.inputs import Case, live_rows

#: Q, in bf16 ULPs: the order of a sum differs between layouts, so the f32 before the one rounding
#: does in its last bits, and where it lies at a tie it rounds to the other neighbour.
MAX_ULP = 1
#: Q's RoPE dims, times the norm of the rotated pair, where that is more than an ULP: a rotation
#: can cancel, and then an f32 error of the products (2**-24 of the norm, a few of them) is many
#: ULPs of what is left.
PAIR_LIMIT = 2.0**-20
#: Cache bytes that may differ, as a share of those written, with `kv_norm_weight`; none otherwise.
#: One ULP in rsqrt can flip a rounding to bf16 and, at a group's absmax, all of the group.
KV_NORM_SHARE = 2e-4
#: The share of Q an honest implementation has one ULP away. An f32 error of k ULPs (k * 2**-24)
#: straddles a rounding boundary of bf16, which lie at least 2**-8 apart, with a probability of
#: k * 2**-16; 2**-10 allows k = 64. Truncation has a half of all elements one ULP away.
HONEST_SHARE = 2.0**-10
#: The distance of NaN from any number: more than any two numbers are apart.
NAN_ULP = 1 << 16


def bias_limit(count: int) -> float:
    """The most the mean signed error of `count` elements may be from 0, in ULPs.

    If a share p = HONEST_SHARE is an ULP off, all to one side in the worst case (one row shares one
    rsqrt), the sum of signs is at most n*p, with a scatter of sqrt(n*p); six of those, and six
    whole flips for counts where n*p is no number to have a scatter, leave no false alarm. From 16
    elements on it is below the half an ULP that truncation gives.
    """
    n = max(1, count)
    return HONEST_SHARE + 6 * (math.sqrt(HONEST_SHARE * n) + 1) / n


@dataclass(frozen=True)
class Difference:
    """One element that breaks a limit. `expected` and `got` are values or bytes in words."""

    where: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class Comparison:
    """What a comparison saw. `reason` is empty if every limit holds.

    `bytes_written` and `bytes_differing` speak of the cache (NaNs of another payload in its RoPE
    dims do not count), `elements`, `elements_differing`, `max_ulp` and `bias_ulp` of Q. `max_ulp`
    leaves out RoPE dims within PAIR_LIMIT; `bias_ulp` is the mean signed error, toward larger
    numbers or toward larger magnitudes, whichever is further from 0. `first` is the first
    difference that breaks a limit, or the first of all if the limits are on shares.
    """

    bytes_written: int = 0
    bytes_differing: int = 0
    elements: int = 0
    elements_differing: int = 0
    max_ulp: int = 0
    bias_ulp: float = 0.0
    first: Difference | None = None
    reasons: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether every limit holds."""
        return not self.reasons

    @property
    def reason(self) -> str:
        """Which limits do not hold, and where first; empty if all do."""
        where = f"; first at {self.first}" if self.first is not None and self.reasons else ""
        return "; ".join(self.reasons) + where

    @property
    def fraction(self) -> float:
        """The share of the cache bytes written that differ."""
        return self.bytes_differing / max(1, self.bytes_written)


def ordered(bits: Tensor) -> Tensor:
    """bf16 as int16 bits -> int32 places on a line where neighbours are 1 apart; both zeros are 0.

    Infinity is one step past the largest number. NaNs have places too, which mean nothing.
    """
    magnitude = bits.int() & 0x7FFF
    return torch.where(bits < 0, -magnitude, magnitude)


def _is_nan(bits: Tensor) -> Tensor:
    return (bits.int() & 0x7FFF) > 0x7F80


def ulp_distance(got: Tensor, want: Tensor) -> Tensor:
    """int32 distances of bf16 numbers given as int16 bits: 0 between NaNs, NAN_ULP to one."""
    distance = (ordered(got) - ordered(want)).abs()
    got_nan, want_nan = _is_nan(got), _is_nan(want)
    return torch.where(got_nan | want_nan, (got_nan != want_nan) * NAN_ULP, distance)


def _cancelled(got: Tensor, want: Tensor, partner: Tensor) -> Tensor:
    """Whether an element is within PAIR_LIMIT of its pair's norm. All int16 bits of bf16.

    The pair is the oracle's as stored, whose norm is within 2**-8 of what it was in f32. It is
    scaled before it is squared, so that a finite pair has a finite limit.
    """
    x, y, other = (b.view(torch.bfloat16).float() for b in (got, want, partner))
    limit = torch.hypot(y * PAIR_LIMIT, other * PAIR_LIMIT)
    return ((x - y).abs() <= limit) & limit.isfinite()


def _value(bits: Tensor) -> str:
    number = float(bits.view(torch.bfloat16))
    return f"{number:.6g} (0x{int(bits) & 0xFFFF:04X})"


def compare_queries(
    got: Tensor, want: Tensor, *, num_heads: int | None = None, rotated: bool = True
) -> Comparison:
    """Compare Q with the oracle's: both bf16 `[N, heads out, 512]`, any strides.

    Heads from `num_heads` on are padding and must be +0, bit for bit. `rotated=False`: RoPE dims
    have the limit of the others.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        shapes = f"{want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}"
        return Comparison(reasons=(f"q: expected {shapes}",))
    tokens, heads_out, _ = want.shape
    heads = heads_out if num_heads is None else num_heads
    row = heads_out * HEAD_DIM
    # Sums of signed errors in ULPs: [NoPE, RoPE] x [toward larger numbers, larger magnitudes].
    drift = torch.zeros(2, 2, dtype=torch.int64, device=want.device)
    differing = broken = pads = max_ulp = 0
    first = None
    for start, stop in slices(tokens, row):
        g_all = got[start:stop].view(torch.int16).flatten()
        w_all = want[start:stop].view(torch.int16).flatten()
        index = (g_all != w_all).nonzero()[:, 0]  # few, unless something is wrong
        if not len(index):
            continue
        g, w = g_all[index], w_all[index]
        dim, head = index % HEAD_DIM, index // HEAD_DIM % heads_out
        ulp, pad, rope = ulp_distance(g, w), head >= heads, dim >= NOPE_DIM
        counted = ~pad
        if rotated:
            counted &= ~(rope & _cancelled(g, w, w_all[index ^ 1]))
        bad = (pad & (g != 0)) | (counted & (ulp > MAX_ULP))
        differing += int((~pad & (ulp > 0)).sum())
        pads += int((pad & bad).sum())
        broken += int(bad.sum())
        max_ulp = max(max_ulp, int((ulp * counted).max()))
        larger, outward = ordered(g) - ordered(w), ordered(g).abs() - ordered(w).abs()
        counted &= ~(_is_nan(g) | _is_nan(w))
        for part, inside in enumerate((counted & ~rope, counted & rope)):
            drift[part, 0] += (larger * inside).sum()
            drift[part, 1] += (outward * inside).sum()
        if first is None and bool(bad.any()):
            at = int(bad.nonzero()[0])
            where = (
                f"q, token {start + int(index[at]) // row}, head {int(head[at])}, "
                f"dim {int(dim[at])}"
            )
            first = Difference(where, _value(w[at]), _value(g[at]))
    result = Comparison(
        elements=tokens * heads * HEAD_DIM,
        elements_differing=differing,
        max_ulp=max_ulp,
        first=first,
    )
    reasons = []
    if broken > pads:
        reasons.append(f"q: {broken - pads} elements beyond {MAX_ULP} ULP, up to {max_ulp}")
    if pads:
        reasons.append(f"q: {pads} elements of padding heads are not +0")
    bias, told = 0.0, ""
    for part, dims in enumerate((NOPE_DIM, HEAD_DIM - NOPE_DIM)):
        count = tokens * heads * dims
        mean = max(drift[part].tolist(), key=abs) / max(1, count)
        bias = max(bias, mean, key=abs)
        if abs(mean) > bias_limit(count):
            region = "RoPE" if part else "NoPE"
            told = f"q: biased by {mean:+.3g} ULP in the {region} dims, as truncation is"
    if told:
        reasons.append(told)
    return replace(result, bias_ulp=bias, reasons=tuple(reasons))


def _token_bytes(cache: Tensor, slots: Tensor, cache_block_size: int) -> Tensor:
    """The bytes of each slot's token: uint8 [n, 584], data then scales."""
    payload = PageLayout(cache_block_size).payload_bytes
    pages = cache.as_strided((cache.shape[0], payload), (cache.stride(0), 1))
    data, scales = pages.split(
        (cache_block_size * DATA_BYTES, cache_block_size * SCALE_BYTES), dim=1
    )
    page, offset = slots // cache_block_size, slots % cache_block_size
    return torch.cat(
        (
            data.unflatten(1, (cache_block_size, DATA_BYTES))[page, offset],
            scales.unflatten(1, (cache_block_size, SCALE_BYTES))[page, offset],
        ),
        dim=1,
    )


def _byte_name(column: int) -> str:
    if column < NOPE_DIM:
        return f"group {column // GROUP}, dim {column}"
    if column < DATA_BYTES:
        return f"RoPE dim {NOPE_DIM + (column - NOPE_DIM) // 2}, byte {column % 2}"
    group = column - DATA_BYTES
    return "pad byte" if group == SCALE_BYTES - 1 else f"scale byte of group {group}"


def compare_cache(
    got: Tensor,
    want: Tensor,
    slot_mapping: Tensor,
    cache_block_size: int,
    *,
    kv_norm: bool = False,
    foreign: bool = False,
) -> Comparison:
    """Compare the bytes of the slots written with the oracle's, pad byte included.

    `got` and `want` are uint8 caches of one number of pages, each of its own page stride. NaNs in
    the RoPE dims are equal whatever their payload. `kv_norm` allows KV_NORM_SHARE; `foreign`
    gives the RoPE dims the limits of Q, for an operator that contracts multiply and add.
    """
    if got.shape[0] != want.shape[0]:
        return Comparison(reasons=(f"k_cache: expected {want.shape[0]} pages, got {got.shape[0]}",))
    rows, slots = live_rows(slot_mapping, want.shape[0] * cache_block_size)
    g_all = _token_bytes(got, slots, cache_block_size)
    w_all = _token_bytes(want, slots, cache_block_size)
    differs = g_all != w_all
    g = g_all[:, NOPE_DIM:DATA_BYTES].contiguous().view(torch.int16)
    w = w_all[:, NOPE_DIM:DATA_BYTES].contiguous().view(torch.int16)
    differs[:, NOPE_DIM:DATA_BYTES] &= ~(_is_nan(g) & _is_nan(w)).repeat_interleave(2, dim=1)
    broken = differs
    if foreign:
        partner = w.unflatten(1, (-1, 2)).flip(2).flatten(1)
        near = (ulp_distance(g, w) <= MAX_ULP) | _cancelled(g, w, partner)
        broken = differs.clone()
        broken[:, NOPE_DIM:DATA_BYTES] &= ~near.repeat_interleave(2, dim=1)

    written, differing, beyond = differs.numel(), int(differs.sum()), int(broken.sum())
    allowed = int(KV_NORM_SHARE * written) if kv_norm else 0
    reasons: tuple[str, ...] = ()
    if beyond > allowed:
        than = f", more than {allowed}" if kv_norm else ""
        reasons = (f"k_cache: {beyond} of {written} bytes differ{than}",)
    first = None
    if beyond:
        row, column = (int(i) for i in broken.nonzero()[0])
        slot = int(slots[row])
        page, offset = slot // cache_block_size, slot % cache_block_size
        where = (
            f"k_cache, token {int(rows[row])}, slot {slot} (page {page}, offset {offset}), "
            f"{_byte_name(column)}"
        )
        expected, found = int(w_all[row, column]), int(g_all[row, column])
        first = Difference(where, f"0x{expected:02X}", f"0x{found:02X}")
    return Comparison(
        bytes_written=written, bytes_differing=differing, first=first, reasons=reasons
    )


def compare(
    case: Case,
    q_out: Tensor | None,
    expected: tuple[Tensor | None, Tensor | None],
    *,
    foreign: bool = False,
) -> Comparison:
    """Compare what a call of `case` left with `expected`, the oracle's `(q_out, k_cache)`.

    `q_out` is the call's, the cache is looked up in the case. `foreign`: see `compare_cache`.
    """
    want_q, want_cache = expected
    result = Comparison()
    if want_q is not None:
        if q_out is None:
            return Comparison(reasons=("q_out: expected a tensor, got None",))
        result = compare_queries(
            q_out, want_q, num_heads=case.num_heads, rotated=case.variant.q_rope
        )
    if want_cache is not None and case.k_cache is not None and case.slot_mapping is not None:
        cache = compare_cache(
            case.k_cache,
            want_cache,
            case.slot_mapping,
            case.variant.cache_block_size,
            kv_norm=case.kv_norm_weight is not None,
            foreign=foreign,
        )
        # Of two first differences the one that belongs to a broken limit is worth telling.
        first = cache.first if cache.reasons or result.first is None else result.first
        result = replace(
            result,
            bytes_written=cache.bytes_written,
            bytes_differing=cache.bytes_differing,
            first=result.first if result.reasons else first,
            reasons=result.reasons + cache.reasons,
        )
    return result
