"""Problems that bite, with canaries round everything a call may write.

`build_case` makes every argument of one call, on any device, from a seed. Data is made where it is
used and without a loop over tokens, so a case of 131072 tokens x 128 heads is built in seconds on
the card that runs it. What a call may write lies in a poisoned `Buffer`; what it may only read is
sealed with a digest. `canary_violations` asks both afterwards.

    case = build_case(777, 64, Variant(out="in place"), device="cuda")
    prologue(**case.arguments())
    assert not canary_violations(case)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4_prologue.contract import (
    GROUP,
    HEAD_DIM,
    NOPE_DIM,
    NUM_GROUPS,
    ROPE_DIM,
    TOKEN_BYTES,
    PageLayout,
)
from dsv4_prologue.verify.canary import Buffer, digest

#: bf16 bit patterns that are not finite: quiet and signalling NaNs of both signs, and both Infs.
NOT_FINITE = (0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80)

QForm = Literal["contiguous", "padded", "head-major", "unaligned"]


@dataclass(frozen=True)
class Variant:
    """The form of one call: which tensors there are, how they lie in memory, what they hold.

    Paddings are in elements, the cache's in bytes. `num_slots` is M; None means N, or with `short`
    two thirds of N.
    """

    q: bool = True
    kv: bool = True
    q_form: QForm = "contiguous"
    out: Literal["new", "in place", "buffer"] = "new"
    out_form: QForm = "padded"  # of a caller's buffer
    pad_heads: int = 0  # heads written after those of q, as zeros
    q_norm: bool = True
    q_rope: bool = True
    kv_padding: int = 0  # between rows
    kv_norm_weight: torch.dtype | None = None
    cache_block_size: int = 64
    cache_form: Literal["2d", "wide", "3d"] = "2d"  # wide: [pages, page stride]
    page_padding: int = 64  # 64 rounds a page of 64 tokens up to a multiple of 576; even
    cache_shift: int = 0  # bytes off a 64-byte boundary; even
    num_pages: int | None = None  # None: a quarter more slots than tokens, and two pages
    short: bool = False
    num_slots: int | None = None
    index_dtype: torch.dtype = torch.int64
    table_dtype: torch.dtype = torch.float32
    max_positions: int = 8192
    eps: float = 1e-6
    not_finite: bool = False  # NaN and Inf in some rows of q and kv
    out_of_range: bool = True  # slots past the cache's end, positions outside the table


@dataclass(frozen=True, eq=False)
class Case:
    """Every argument of one call, the buffers round what it writes, seals on what it reads.

    Tensors have the shapes and dtypes of `prologue`'s arguments. `buffers` are those the call may
    write in; `seals` holds (name, contiguous tensor, digest) of everything it may not.
    """

    num_tokens: int
    num_heads: int
    variant: Variant
    q: Tensor | None
    kv: Tensor | None
    k_cache: Tensor | None
    slot_mapping: Tensor | None
    position_ids: Tensor
    cos_sin_cache: Tensor
    q_out: Tensor | None
    num_heads_out: int | None
    kv_norm_weight: Tensor | None
    buffers: tuple[Buffer, ...]
    read_only: tuple[tuple[str, Tensor], ...]
    seals: tuple[int, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the call: the eight of every implementation, others if used."""
        v = self.variant
        always = {
            "q": self.q,
            "kv": self.kv,
            "k_cache": self.k_cache,
            "slot_mapping": self.slot_mapping,
            "position_ids": self.position_ids,
            "cos_sin_cache": self.cos_sin_cache,
            "eps": v.eps,
            "cache_block_size": v.cache_block_size,
        }
        others = (
            ("q_out", self.q_out, None),
            ("num_heads_out", self.num_heads_out, None),
            ("q_norm", v.q_norm, True),
            ("q_rope", v.q_rope, True),
            ("kv_norm_weight", self.kv_norm_weight, None),
        )
        return always | {name: value for name, value, unused in others if value is not unused}

    def written(self) -> tuple[Tensor, Tensor]:
        """The rows of kv that reach the cache and their slots, both int64 [n], in row order."""
        if self.slot_mapping is None or self.k_cache is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.position_ids.device)
            return nothing, nothing
        capacity = self.k_cache.shape[0] * self.variant.cache_block_size
        return live_rows(self.slot_mapping, capacity)


def live_rows(slot_mapping: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The rows whose slot lies in the cache, and those slots, both int64 [n]."""
    slots = slot_mapping.long()
    rows = ((slots >= 0) & (slots < capacity)).nonzero()[:, 0]
    return rows, slots[rows]


def seal(case: Case) -> Case:
    """The case with new digests of its read-only inputs, for whoever changed them on purpose."""
    return replace(case, seals=tuple(digest(tensor) for _, tensor in case.read_only))


def canary_violations(case: Case) -> list[str]:
    """What a call changed and should not have, in words; empty if nothing.

    Looks at every byte before, between and after what may be written (guards, row and page
    padding, other slots), and at every input that may only be read.
    """
    found = []
    for buffer in case.buffers:
        written = None
        if buffer.name == "k_cache":
            slots = case.written()[1]
            page_size = case.variant.cache_block_size
            written = torch.zeros(
                buffer.outer[0] * page_size, dtype=torch.bool, device=slots.device
            )
            written[slots] = True
            written = written.view(-1, page_size)
        count, first = buffer.stray_writes(written)
        if first is not None:
            place = first - buffer.front
            row = buffer.outer[1] * buffer.outer[2]
            unit = "byte" if buffer.flat.dtype == torch.uint8 else "element"
            found.append(
                f"{buffer.name}: {count} {unit}s outside the call's own changed, the first "
                f"at {unit} {place % row} of row {place // row} of {buffer.outer[0]}"
            )
    for (name, tensor), before in zip(case.read_only, case.seals, strict=True):
        if digest(tensor) != before:
            found.append(f"{name}: a read-only input changed")
    return found


def rope_table(
    max_positions: int, *, theta: float = 10000.0, first: int = 0, dtype: torch.dtype
) -> Tensor:
    """[max_positions, 64] on the CPU: 32 cosines then 32 sines of pos * theta**(-2i/64).

    10000 is DeepSeek-V4's base for layers that are not compressed. Computed in f64.
    """
    rate = theta ** (-torch.arange(0, ROPE_DIM, 2, dtype=torch.float64) / ROPE_DIM)
    position = torch.arange(first, first + max_positions, dtype=torch.float64)
    angle = position[:, None] * rate
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(dtype)


class _Maker:
    """Random tensors from one seed on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 in [low, high)."""
        return torch.randint(
            low, high, shape, generator=self.generator, device=self.device, dtype=torch.int32
        )

    def normal(self, *shape: int) -> Tensor:
        """f32 of mean 0 and variance 1."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)

    def values(self, values: Sequence[int], count: int) -> Tensor:
        """int64 [count]: the values in turn, starting at another one for another seed."""
        turn = (torch.arange(count, device=self.device) + self.seed) % len(values)
        return torch.tensor(values, device=self.device)[turn]


def e4m3_lattice() -> Tensor:
    """bf16 bits, int32 [252]: the E4M3 values from 0 to 416 and after each the tie to the next.

    448 is missing: it is what the group is scaled by.
    """
    code = torch.arange(127)
    exponent, mantissa = code >> 3, code & 7
    significand = torch.where(exponent == 0, mantissa, mantissa + 8).double()
    value = torch.ldexp(significand, exponent.clamp(min=1) - 10)
    tie = (value[:-1] + value[1:]) / 2
    points = torch.stack((value[:-1], tie), dim=1).flatten()
    return points.bfloat16().view(torch.int16).int()


def fill_kv(kv: Tensor, make: _Maker, *, not_finite: bool) -> None:
    """Fill kv, bf16 [N, 512]: 8 groups of 64 a row (the last is RoPE's), each of one kind.

    Of 8 groups two are normal numbers times 2**-4 to 2**4. The others are bit patterns under an
    absmax that walks from group to group: one through all 255 exponents bf16 has, two through
    1.75*2**k and its two neighbours for all k (all 765 of them from 467 rows on), two through the
    scales, with every E4M3 value and tie and their bf16 neighbours under each; one is an outlier
    or all zeros. Every 16th row is all zeros, of both signs.
    """
    num_tokens = kv.shape[0]
    order = make.permutation(num_tokens)
    rows = order[num_tokens // 16 :]  # the others stay zero
    ranks = [make.permutation(len(rows) * n).view(-1, n) for n in (NUM_GROUPS, 1)]
    rank = torch.cat(ranks, dim=1).flatten().int()
    groups = len(rank)
    kind, turn = rank % 8, rank // 8 + int(make.integers(0, 765, 1))
    edges, lattice, outlier = (kind == 3) | (kind == 4), (kind == 5) | (kind == 6), kind == 7
    step = turn * 2 + (kind & 1)  # of the kinds that take two groups in eight

    scale = (make.integers(123, 132, groups, 1) << 23).view(torch.float32)
    bits = (make.normal(groups, GROUP) * scale).bfloat16().view(torch.int16).int() & 0x7FFF

    edge = (step // 3 % 255 << 7 | 0x60) + step % 3 - 1
    exponent = step % 142 - 22  # 448 * 2**exponent: from the absmax floor's scale to the largest
    absmax = (turn % 255 << 7) | make.integers(0, 128, groups)
    absmax = torch.where(turn % 255 == 254, 0x7F7F, absmax)  # the largest number bf16 has
    absmax = torch.where(edges, edge, absmax)
    absmax = torch.where(lattice, (exponent << 7) + 0x43E0, absmax)
    # Log-uniform over 18 octaves below the absmax, an octave being 128 bit patterns; beside an
    # outlier over the 8th to the 26th, where E4M3 has subnormals and then nothing.
    below = make.integers(0, 18 * 128, groups, GROUP) + (outlier.int() * (8 * 128))[:, None]
    walked = (absmax[:, None] - below).clamp_(min=0)
    point = e4m3_lattice().to(kv.device)[make.integers(0, 252, groups, GROUP).long()]
    point = torch.where(point > 0, point + (exponent << 7)[:, None], 0)
    point = (point + make.integers(-1, 2, groups, GROUP)).clamp_(min=0)
    walked = torch.where(lattice[:, None], point, walked)
    walked.scatter_(1, make.integers(0, GROUP, groups, 1).long(), absmax[:, None])
    bits = torch.where((kind < 2)[:, None], bits, walked)
    bits.masked_fill_((outlier & (turn % 2 == 0))[:, None], 0)

    whole = torch.zeros(num_tokens, HEAD_DIM, dtype=torch.int32, device=kv.device)
    whole[rows] = bits.view(-1, HEAD_DIM)
    whole |= make.integers(0, 2, num_tokens, HEAD_DIM) << 15
    if not_finite:  # three elements of every fourth row, the last of them RoPE's
        odd = rows[: -(-num_tokens // 4)]
        dims = torch.tensor([[0, 224, 448], [224, 224, ROPE_DIM]], device=kv.device)
        dims = dims[0] + make.integers(0, NOPE_DIM, len(odd), 3) % dims[1]
        # Beside the first, the largest number, which is to become a zero.
        whole[odd, dims[:, 0] ^ 1] = whole[odd, dims[:, 0] ^ 1] & 0x8000 | 0x7F7F
        whole[odd[:, None], dims] = make.values(NOT_FINITE, 3 * len(odd)).view(-1, 3).int()
    kv.copy_(whole.to(torch.int16).view(torch.bfloat16))


def fill_q(q: Tensor, make: _Maker, *, not_finite: bool) -> None:
    """Fill q, bf16 [N, H, 512]: normal rows, each times a power of two by its kind.

    Of 16 rows one is all zeros (of both signs), one so small that bf16 is subnormal, one so large
    that the squares overflow, one large that do not, one where eps rules, one with an outlier; the
    rest 2**-3 to 2**3. Mean squares between 2**119 and 2**128 are left out: whether their sum
    overflows is not the contract's to say.
    """
    q.normal_(generator=make.generator)
    rows = tuple(q.shape[:2])
    kind = make.integers(0, 16, *rows)
    if not_finite:
        kind[:1, :1] = 7
    exponent = make.integers(-3, 4, *rows)
    for number, fixed in ((1, -126), (2, 100), (3, 56), (4, -12)):
        exponent = torch.where(kind == number, fixed, exponent)
    scale = (exponent + 127 << 23).view(torch.float32).masked_fill(kind == 0, 0.0)
    q.mul_(scale[..., None].bfloat16())
    token, head = (kind == 5).nonzero(as_tuple=True)
    q[token, head, make.integers(0, HEAD_DIM, len(token)).long()] = 1024.0
    if not_finite:
        token, head = (kind == 6).nonzero(as_tuple=True)
        dims = make.integers(0, HEAD_DIM, len(token)).long()
        special = make.values(NOT_FINITE, len(token)).to(torch.int16)
        q.view(torch.int16)[token, head, dims] = special
        # The first row has two Infs, at one side and the other of pairs that are not rotated: what
        # is beside them stays a number.
        sides = make.integers(0, NOPE_DIM // 2, 2).long() * 2
        q[:1, :1, sides + sides.new_tensor([0, 1])] = float("inf")


def _positions(num_tokens: int, variant: Variant, make: _Maker) -> Tensor:
    """Random positions but 0, then 0 and the last, then one in eight outside the table."""
    high = variant.max_positions
    positions = make.integers(1, high, num_tokens).long()
    if num_tokens >= 8:
        rows = make.permutation(num_tokens - 1) + 1  # the first token's stays in range and not 0
        positions[rows[:2]] = torch.tensor([0, high - 1], device=make.device)
        if variant.out_of_range:
            bound = torch.iinfo(variant.index_dtype)
            outside = [-1, high, high + 1, -high, bound.min, bound.max]
            if variant.index_dtype == torch.int64:
                outside.append(2**32 + 1)  # truncated to 32 bits it would be a position
            count = num_tokens // 8
            positions[rows[2 : 2 + count]] = make.values(outside, count)
    return positions.to(variant.index_dtype)


def _slots(num_slots: int, capacity: int, variant: Variant, make: _Maker) -> Tensor:
    """Shuffled slots, no two equal, with the first and the last; one in eight negative, and one
    in eight past the end.
    """
    if capacity < num_slots or capacity < 2:
        raise ValueError(f"num_pages: expected {max(2, num_slots)} slots or more, got {capacity}")
    inside = make.permutation(capacity - 2) + 1
    ends = torch.tensor([capacity - 1, 0], device=make.device)
    slots = torch.cat((ends, inside))[:num_slots]
    bound = torch.iinfo(variant.index_dtype)
    count = num_slots // 8
    negative = [-1, -2, -variant.cache_block_size, -capacity, bound.min]
    slots[2 : 2 + count] = make.values(negative, count)
    if variant.out_of_range:
        past = [capacity, capacity + 1, capacity + variant.cache_block_size, bound.max]
        if variant.index_dtype == torch.int64:
            free = int(inside[-1]) if capacity > 2 else 0
            past += [2**32 + free, 2**40]  # truncated to 32 bits they would be slots
        slots[2 + count : 2 + 2 * count] = make.values(past, count)
    return slots[make.permutation(num_slots)].to(variant.index_dtype)


def _rows(
    name: str, num_tokens: int, num_heads: int, form: QForm, device: torch.device, *, filled: bool
) -> tuple[Buffer, Tensor]:
    """A buffer for bf16 rows of 512 in the given form, and the [N, H, 512] tensor in it."""
    inner = (num_tokens, num_heads, HEAD_DIM)
    outer, front = inner, 64  # 128 bytes: as aligned as the allocator's own
    if form == "padded":  # rows stay 16-byte aligned
        outer = (num_tokens, num_heads + 1, HEAD_DIM + 8)
    elif form == "unaligned":  # and here only as aligned as bf16 is
        outer, front = (num_tokens, num_heads + 1, HEAD_DIM + 3), 65
    elif form == "head-major":
        inner = (num_heads, num_tokens, HEAD_DIM)
        outer = (num_heads, num_tokens + 1, HEAD_DIM)
    buffer = Buffer.make(name, torch.bfloat16, device, inner, outer, front, HEAD_DIM, filled=filled)
    view = buffer.view
    return buffer, view.transpose(0, 1) if form == "head-major" else view


def _cache(num_tokens: int, variant: Variant, device: torch.device) -> tuple[Buffer, Tensor]:
    """A poisoned buffer for the pages, a page's guard before and after, and the cache in it."""
    page_size = variant.cache_block_size
    payload = PageLayout(page_size).payload_bytes
    stride = payload + variant.page_padding
    pages = variant.num_pages
    if pages is None:
        pages = -(-5 * num_tokens // (4 * page_size)) + 2
    front = -(-stride // 64) * 64 + variant.cache_shift
    inner, outer = (pages, 1, payload), (pages, 1, stride)
    buffer = Buffer.make("k_cache", torch.uint8, device, inner, outer, front, stride)
    if variant.cache_form == "wide":
        return buffer, buffer.box[:, 0]
    cache = buffer.view[:, 0]
    if variant.cache_form == "3d":
        cache = cache.unflatten(1, (page_size, TOKEN_BYTES))
    return buffer, cache


def _num_slots(num_tokens: int, variant: Variant) -> int:
    if variant.num_slots is not None:
        return variant.num_slots
    return num_tokens - -(-num_tokens // 3) if variant.short else num_tokens


def build_case(
    num_tokens: int,
    num_heads: int,
    variant: Variant | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """Build one call's arguments on `device` from `seed`; sealed, and every output poisoned.

    Memory, besides the arguments themselves: KV's making takes about 16 kB a token, and for a
    moment only. Raises ValueError for a variant with neither q nor kv, or too few pages.
    """
    v = variant if variant is not None else Variant()
    if not (v.q or v.kv):
        raise ValueError("variant: expected q or kv or both, got neither")
    device = torch.device(device)
    make = _Maker(device, seed)
    buffers: list[Buffer] = []
    read_only: list[tuple[str, Tensor]] = []

    q = q_out = None
    in_place = v.out == "in place"
    if v.q:
        rows = num_heads + v.pad_heads if in_place else num_heads
        buffer, whole = _rows(
            "q", num_tokens, rows, v.q_form, device, filled=not in_place or not v.pad_heads
        )
        q = whole[:, :num_heads]
        fill_q(q, make, not_finite=v.not_finite)
        if in_place:
            q_out = whole
            buffers.append(buffer)
        else:
            read_only.append(("q", buffer.flat))
        if v.out == "buffer":
            rows = num_heads + v.pad_heads
            buffer, q_out = _rows("q_out", num_tokens, rows, v.out_form, device, filled=False)
            buffers.append(buffer)

    kv = k_cache = slot_mapping = weight = None
    if v.kv:
        outer = (num_tokens, 1, HEAD_DIM + v.kv_padding)
        inner = (num_tokens, 1, HEAD_DIM)
        buffer = Buffer.make("kv", torch.bfloat16, device, inner, outer, 64, HEAD_DIM, filled=True)
        kv = buffer.view[:, 0]
        fill_kv(kv, make, not_finite=v.not_finite)
        read_only.append(("kv", buffer.flat))
        buffer, k_cache = _cache(num_tokens, v, device)
        buffers.append(buffer)
        capacity = k_cache.shape[0] * v.cache_block_size
        slot_mapping = _slots(_num_slots(num_tokens, v), capacity, v, make)
        read_only.append(("slot_mapping", slot_mapping))
        if v.kv_norm_weight is not None:
            weight = make.normal(HEAD_DIM) * 0.3 + 1.0
            weight[:2] = torch.tensor([0.0, -1.0], device=device)
            weight = weight.to(v.kv_norm_weight)
            read_only.append(("kv_norm_weight", weight))

    position_ids = _positions(num_tokens, v, make)
    # Eight rows more at either end: a position outside the table that is read gives a number
    # there, where the contract wants NaN.
    table = rope_table(v.max_positions + 16, first=-8, dtype=v.table_dtype).to(device)
    read_only += [("position_ids", position_ids), ("cos_sin_cache", table)]
    padded = v.q and v.out == "new" and v.pad_heads > 0
    return seal(
        Case(
            num_tokens=num_tokens,
            num_heads=num_heads if v.q else 0,
            variant=v,
            q=q,
            kv=kv,
            k_cache=k_cache,
            slot_mapping=slot_mapping,
            position_ids=position_ids,
            cos_sin_cache=table[8:-8],
            q_out=q_out,
            num_heads_out=num_heads + v.pad_heads if padded else None,
            kv_norm_weight=weight,
            buffers=tuple(buffers),
            read_only=tuple(read_only),
        )
    )
