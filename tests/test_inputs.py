"""The inputs bite: each kind of hard value is really there, and each canary really sings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_prologue import reference
from dsv4_prologue.verify import canary
from dsv4_prologue.verify.canary import Buffer, digest, poison
from dsv4_prologue.verify.conformance import VARIANTS
from dsv4_prologue.verify.inputs import (
    NOT_FINITE,
    Case,
    Variant,
    build_case,
    canary_violations,
    e4m3_lattice,
    rope_table,
    seal,
)

pytestmark = pytest.mark.once

# All 256 codes but the two NaNs, from torch's own decoder.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[~E4M3.isnan()].unique()


def bits(tensor: Tensor | None) -> Tensor:
    """int32 bit patterns, 0 to 0xFFFF."""
    assert tensor is not None
    return tensor.contiguous().view(torch.int16).int() & 0xFFFF


@pytest.fixture(scope="module")
def case() -> Case:
    return build_case(511, 4, Variant(q_norm=False))


@pytest.fixture(scope="module")
def groups(case: Case) -> Tensor:
    """The NoPE groups' bit patterns, [511 * 7, 64]."""
    return bits(case.kv)[:, :448].reshape(-1, 64)


@pytest.fixture(scope="module")
def scaled(case: Case) -> Tensor:
    """The NoPE groups divided by their scales, exactly: f64 [511 * 7, 64]."""
    x = case.kv[:, :448].reshape(-1, 64)  # type: ignore[index]
    _, scale = reference.quantize(x.float())
    return torch.ldexp(x.double(), 127 - scale[:, None].int())


def test_every_scale_byte_is_reached(case: Case) -> None:
    _, scale = reference.quantize(case.kv[:, :448].float().view(-1, 7, 64))  # type: ignore[index]
    assert scale.unique().tolist() == list(range(105, 248))


def test_the_absmax_walks_every_exponent(groups: Tensor) -> None:
    absmax = (groups & 0x7FFF).amax(dim=1)
    assert (absmax >> 7).unique().tolist() == list(range(255))
    assert absmax.max() == 0x7F7F


def test_every_edge_and_both_neighbours(groups: Tensor) -> None:
    """1.75 * 2**k, where a scale taken from log2 goes wrong."""
    absmax = set((groups & 0x7FFF).amax(dim=1).tolist())
    assert absmax >= {(e << 7 | 0x60) + d for e in range(255) for d in (-1, 0, 1)}


def test_the_lattice_is_e4m3_and_its_ties() -> None:
    points = e4m3_lattice().to(torch.int16).view(torch.bfloat16).double()
    codes = E4M3[E4M3 >= 0]
    assert torch.equal(points[0::2], codes[:-1])
    assert torch.equal(points[1::2], (codes[:-1] + codes[1:]) / 2)


def test_every_code_and_tie_and_their_neighbours(scaled: Tensor) -> None:
    seen = set(scaled.abs().flatten().tolist())
    for point in e4m3_lattice()[1:].tolist():  # 0 has no neighbour on one side
        near = torch.tensor([point - 1, point, point + 1], dtype=torch.int16)
        assert seen >= set(near.view(torch.bfloat16).double().tolist())
    assert seen >= {0.0, 448.0}


def test_ties_come_with_both_signs_and_many_scales(case: Case, scaled: Tensor) -> None:
    ties = e4m3_lattice()[1::2].to(torch.int16).view(torch.bfloat16).double()
    for sign in (1, -1):
        assert set((sign * ties).tolist()) <= set(scaled.flatten().tolist())
    _, scale = reference.quantize(case.kv[:, :448].float().reshape(-1, 64))  # type: ignore[index]
    with_ties = torch.isin(scaled.abs(), ties).sum(dim=1) > 8
    assert len(scale[with_ties].unique()) == 142


def test_subnormals_and_what_is_below_them(scaled: Tensor) -> None:
    magnitude = scaled.abs()
    assert ((magnitude > 0) & (magnitude < 2.0**-10)).any()  # rounds to 0
    assert {k * 2.0**-9 for k in range(1, 8)} <= set(magnitude.flatten().tolist())


def test_outliers_and_zeros(case: Case, scaled: Tensor, groups: Tensor) -> None:
    two = scaled.abs().topk(2, dim=1).values
    assert ((two[:, 0] > 200) & (two[:, 1] < 2)).sum() > 50
    zero_rows = ((bits(case.kv) & 0x7FFF) == 0).all(dim=1)
    assert zero_rows.sum() >= 511 // 16
    assert (((groups & 0x7FFF) == 0).all(dim=1)).sum() > 7 * zero_rows.sum()
    for part in (bits(case.kv)[:, :448], bits(case.kv)[:, 448:], bits(case.kv)[zero_rows]):
        assert (part == 0).any()
        assert (part == 0x8000).any()


def test_rope_dims_hold_every_magnitude(case: Case) -> None:
    rope = bits(case.kv)[:, 448:] & 0x7FFF
    assert ((rope > 0) & (rope < 0x80)).any()  # subnormal
    assert (rope >= 0x7E80).any()  # from 2**126: two of them can overflow


def test_what_is_not_finite_is_asked_for(case: Case) -> None:
    assert case.kv is not None
    assert case.kv.isfinite().all()
    assert case.q is not None
    assert case.q.isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 8, 200])
def test_not_finite(num_tokens: int) -> None:
    case = build_case(num_tokens, 2, Variant(not_finite=True))
    kv, q = bits(case.kv), bits(case.q)
    assert ((kv & 0x7FFF) >= 0x7F80).any()
    assert ((kv & 0x7FFF) < 0x7F80).any(dim=1).all()  # never a whole row
    assert ((q & 0x7FFF) >= 0x7F80).any()
    if num_tokens == 200:
        for part in (kv[:, :448], kv[:, 448:], q):
            assert set(NOT_FINITE) <= set(part.flatten().tolist())
        assert ((kv & 0x7FFF) < 0x7F80).all(dim=1).sum() >= 150  # most rows stay finite


def test_rows_of_q(case: Case) -> None:
    assert case.q is not None
    rows = case.q.double().flatten(0, 1)
    mean = rows.square().mean(dim=1)
    largest = rows.abs().amax(dim=1)
    assert (largest == 0).any()
    assert ((bits(case.q).flatten(0, 1) == 0x8000).any(dim=1) & (largest == 0)).any()
    assert ((largest > 0) & (mean < 2.0**-240)).any()  # subnormal
    assert (mean > 2.0**128).any()  # overflows
    assert ((mean > 2.0**100) & (mean < 2.0**119)).any()
    assert ((mean > 0) & (mean > 1e-9) & (mean < 1e-6)).any()  # eps rules
    assert (largest == 1024).any()
    assert not ((mean > 2.0**119) & (mean < 2.0**128)).any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions(dtype: torch.dtype) -> None:
    p = build_case(200, 1, Variant(index_dtype=dtype)).position_ids
    bound = torch.iinfo(dtype)
    assert p.dtype == dtype
    assert p[0] != 0
    inside = p[(p >= 0) & (p < 8192)].tolist()
    assert len(set(inside)) > 150
    assert sorted(inside) != inside
    assert {0, 8191, -1, 8192, bound.min, bound.max} <= set(p.tolist())
    p = build_case(200, 1, Variant(index_dtype=dtype, out_of_range=False)).position_ids
    assert ((p >= 0) & (p < 8192)).all()


def test_the_table_goes_on_past_its_ends() -> None:
    """So that a read past an end gives a number, where the contract wants NaN."""
    table = build_case(1, 1).cos_sin_cache
    assert list(table.shape) == [8192, 64]
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    one = torch.tensor([math.cos(1), math.sin(1)])
    assert torch.equal(table[1, [0, 32]], one)
    around = table.as_strided((8208, 64), (64, 1), table.storage_offset() - 8 * 64)
    assert torch.equal(around, rope_table(8208, first=-8, dtype=torch.float32))
    assert (
        build_case(1, 1, Variant(table_dtype=torch.bfloat16)).cos_sin_cache.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_slots(dtype: torch.dtype, page_size: int) -> None:
    case = build_case(200, 1, Variant(index_dtype=dtype, cache_block_size=page_size))
    assert case.k_cache is not None
    assert case.slot_mapping is not None
    assert case.slot_mapping.dtype == dtype
    capacity, slots = case.k_cache.shape[0] * page_size, case.slot_mapping.tolist()
    inside = [s for s in slots if 0 <= s < capacity]
    assert len(slots) == 200
    assert len(inside) == len(set(inside)) == 150
    assert {0, capacity - 1} <= set(inside)
    assert sorted(inside) != inside
    bound = torch.iinfo(dtype)
    assert {-1, -2, -page_size, -capacity, bound.min, capacity, bound.max} <= set(slots)
    if dtype == torch.int64:
        low = [s % 2**32 for s in slots if 2**32 <= s < 2**33]
        assert low
        assert not set(low) & set(inside)
    rows, live = case.written()
    assert rows.tolist() == [row for row, s in enumerate(slots) if 0 <= s < capacity]
    assert live.tolist() == inside


def test_slots_in_range_only_when_asked() -> None:
    slots = build_case(200, 1, Variant(out_of_range=False)).slot_mapping
    assert slots is not None
    assert slots.max() == 6 * 64 - 1
    assert (slots < 0).sum() == 25


@pytest.mark.parametrize(("variant", "expected"), [
    (Variant(), 17), (Variant(short=True), 11), (Variant(num_slots=0), 0),
    (Variant(num_slots=1), 1),
])  # fmt: skip
def test_number_of_slots(variant: Variant, expected: int) -> None:
    slots = build_case(17, 1, variant).slot_mapping
    assert slots is not None
    assert len(slots) == expected


def test_too_few_pages() -> None:
    with pytest.raises(ValueError, match="num_pages: expected 17 slots or more, got 5"):
        build_case(17, 1, Variant(cache_block_size=5, num_pages=1))


def test_neither_q_nor_kv() -> None:
    with pytest.raises(ValueError, match="expected q or kv or both"):
        build_case(1, 1, Variant(q=False, kv=False))


def test_forms_in_memory() -> None:
    def forms(**options: Any) -> Case:
        return build_case(9, 5, Variant(**options))

    assert forms().q.is_contiguous()  # type: ignore[union-attr]
    case = forms(q_form="padded", out="buffer", out_form="unaligned", kv_padding=3)
    assert case.q is not None
    assert case.q.stride() == (6 * 520, 520, 1)
    assert case.q_out is not None
    assert case.q_out.stride() == (6 * 515, 515, 1)
    assert case.q_out.data_ptr() % 4 == 2
    assert case.kv is not None
    assert case.kv.stride() == (515, 1)
    case = forms(q_form="head-major", out="in place")
    assert case.q is not None
    assert case.q.shape == (9, 5, 512)
    assert case.q.stride() == (512, 10 * 512, 1)
    assert case.q_out is not None
    assert case.q_out.data_ptr() == case.q.data_ptr()
    case = forms(out="in place", pad_heads=3)
    assert case.q_out is not None
    assert case.q is not None
    assert case.q_out.shape == (9, 8, 512)
    assert case.q.data_ptr() == case.q_out.data_ptr()
    assert case.q_out[:, 5:].isnan().all()
    assert forms(pad_heads=3).num_heads_out == 8
    case = forms(q=False)
    assert (case.q, case.num_heads, case.q_out) == (None, 0, None)
    case = forms(kv=False)
    assert (case.kv, case.k_cache, case.slot_mapping) == (None, None, None)


@pytest.mark.parametrize(("form", "shape"), [
    ("2d", (3, 37376)), ("wide", (3, 37440)), ("3d", (3, 64, 584)),
])  # fmt: skip
def test_forms_of_the_cache(form: Any, shape: tuple[int, ...]) -> None:
    cache = build_case(9, 1, Variant(kv=True, q=False, cache_form=form, cache_shift=2)).k_cache
    assert cache is not None
    assert tuple(cache.shape) == shape
    assert cache.stride(0) == 37440
    assert cache.data_ptr() % 4 == 2


def test_weight() -> None:
    weight = build_case(1, 1, Variant(kv_norm_weight=torch.bfloat16)).kv_norm_weight
    assert weight is not None
    assert weight.dtype == torch.bfloat16
    assert weight[:2].tolist() == [0.0, -1.0]
    assert weight.unique().numel() > 50


def test_arguments_name_only_what_is_used() -> None:
    eight = {
        "q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "eps",
        "cache_block_size",
    }  # fmt: skip
    assert set(build_case(1, 1).arguments()) == eight
    more = build_case(1, 1, Variant(out="buffer", q_norm=False, kv_norm_weight=torch.float32))
    assert set(more.arguments()) == eight | {"q_out", "q_norm", "kv_norm_weight"}


def test_a_seed_is_a_case() -> None:
    first, again, other = (build_case(33, 2, seed=seed) for seed in (7, 7, 8))
    assert first.seals == again.seals
    assert not set(first.seals[:3]) & set(other.seals[:3])  # q, kv and the slots


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_no_false_alarm_and_the_oracle_changes_nothing(name: str, num_tokens: int) -> None:
    case = build_case(num_tokens, 3, VARIANTS[name])
    assert canary_violations(case) == []
    before = [digest(buffer.flat) for buffer in case.buffers]
    reference.prologue(**case.arguments())
    assert canary_violations(case) == []
    assert [digest(buffer.flat) for buffer in case.buffers] == before


def test_outputs_are_poisoned() -> None:
    case = build_case(33, 3, Variant(out="buffer", out_form="contiguous"))
    assert case.q_out is not None
    assert case.q_out.isnan().all()
    assert case.q_out.view(torch.int16).unique().numel() == 127
    assert case.k_cache is not None
    assert case.k_cache.unique().numel() == 251


FULL = Variant(
    q_form="padded", out="buffer", out_form="padded", kv_padding=8, kv_norm_weight=torch.float32
)


@pytest.mark.parametrize(
    "name", ["q", "kv", "slot_mapping", "position_ids", "cos_sin_cache", "kv_norm_weight"]
)
def test_a_changed_input_is_seen(name: str) -> None:
    case = build_case(9, 2, FULL)
    tensor = case.arguments()[name]
    if tensor.dtype == torch.bfloat16:
        tensor.view(torch.int16)[-1] ^= 1
    else:
        tensor[-1] += 1
    assert canary_violations(case) == [f"{name}: a read-only input changed"]
    assert canary_violations(seal(case)) == []


@pytest.mark.parametrize("name", ["q", "kv"])
def test_a_write_between_input_rows_is_seen(name: str) -> None:
    case = build_case(9, 2, FULL)
    flat = dict(case.read_only)[name]
    flat[64 + 515] = 0.0
    assert canary_violations(case) == [f"{name}: a read-only input changed"]


@pytest.mark.parametrize("out_form", ["contiguous", "padded", "head-major", "unaligned"])
@pytest.mark.parametrize("place", [0, "before", "after", -1])
def test_a_write_round_q_out_is_seen(out_form: Any, place: Any) -> None:
    case = build_case(9, 2, Variant(out="buffer", out_form=out_form, kv=False))
    (buffer,) = case.buffers
    assert buffer.name == "q_out"
    end = buffer.front + buffer.box.numel()
    at = {"before": buffer.front - 1, "after": end}.get(place, place)
    buffer.view.zero_()  # the call's own
    assert canary_violations(case) == []
    buffer.flat[at] = 0.0
    (found,) = canary_violations(case)
    assert found.startswith("q_out: 1 elements outside the call's own changed")


def test_a_write_between_rows_of_q_out_is_seen() -> None:
    case = build_case(9, 2, Variant(out="buffer", out_form="padded", kv=False))
    (buffer,) = case.buffers
    buffer.box[4, 1, 512] = 0.0
    (found,) = canary_violations(case)
    assert "at element 1032 of row 4 of 9" in found


@pytest.mark.parametrize("form", ["2d", "wide", "3d"])
def test_a_write_round_the_cache_is_seen(form: Any) -> None:
    for place in ("guard before", "guard after", "padding", "another slot", "its scales"):
        case = build_case(99, 1, Variant(q=False, cache_form=form, cache_shift=2))
        buffer = next(b for b in case.buffers if b.name == "k_cache")
        free = (set(range(case.k_cache.shape[0] * 64)) - set(case.written()[1].tolist())).pop()  # type: ignore[union-attr]
        page, offset = divmod(free, 64)
        column = {
            "padding": 64 * 584,
            "another slot": offset * 576 + 575,
            "its scales": 64 * 576 + offset * 8 + 7,
        }.get(place)
        if column is not None:
            buffer.box[page, 0, column] ^= 0xFF
        else:
            buffer.flat[0 if place == "guard before" else -1] ^= 0xFF
        (found,) = canary_violations(case)
        assert found.startswith("k_cache: 1 bytes outside the call's own changed")
        if column is not None:
            assert f"at byte {column} of row {page} " in found


def test_a_write_to_an_own_slot_is_fine() -> None:
    case = build_case(99, 1, Variant(q=False))
    buffer = next(b for b in case.buffers if b.name == "k_cache")
    for slot in case.written()[1].tolist():
        page, offset = divmod(slot, 64)
        buffer.box[page, 0, offset * 576 : offset * 576 + 576] ^= 0xFF
        buffer.box[page, 0, 64 * 576 + offset * 8 : 64 * 576 + offset * 8 + 8] ^= 0xFF
    assert canary_violations(case) == []


def test_slicing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_case(99, 2, FULL)
    monkeypatch.setattr(canary, "SLICE", 1000)
    sliced = build_case(99, 2, FULL)
    assert sliced.seals == whole.seals
    for a, b in zip(whole.buffers, sliced.buffers, strict=True):
        assert torch.equal(a.flat.view(torch.uint8), b.flat.view(torch.uint8))
    assert canary_violations(sliced) == []
    for buffer in sliced.buffers:
        buffer.flat[buffer.front + buffer.inner[2]] = 0  # the first padding element
    assert len(canary_violations(sliced)) == len(sliced.buffers)


def test_poison_depends_on_its_place_alone() -> None:
    for dtype in (torch.bfloat16, torch.uint8):
        whole = poison(0, 5000, dtype, torch.device("cpu"))
        part = poison(1234, 2345, dtype, torch.device("cpu"))
        assert torch.equal(whole[1234:2345].view(torch.uint8), part.view(torch.uint8))
    for distance in (8, 64, 512, 576, 584, 37376, 37440):  # a row moved by one shows
        assert distance % 127
        assert distance % 251


def test_a_digest_sees_one_bit_and_an_exchange() -> None:
    x = torch.arange(1000, dtype=torch.int32)
    exchanged, flipped = x.clone(), x.clone()
    exchanged[[3, 4]] = x[[4, 3]]
    flipped[3] ^= 1
    assert len({digest(x), digest(exchanged), digest(flipped)}) == 3
    assert digest(x[:999]) != digest(x)
    assert digest(torch.empty(0)) == 0


def test_a_buffer_is_a_box_in_a_box() -> None:
    device = torch.device("cpu")
    buffer = Buffer.make("x", torch.uint8, device, (2, 1, 3), (2, 2, 4), 5, 6)
    assert buffer.flat.numel() == 32  # 5 + 16 + 6, rounded up to a multiple of 8
    assert buffer.box.shape == (2, 2, 4)
    assert buffer.view.shape == (2, 1, 3)
    assert buffer.view.data_ptr() == buffer.flat.data_ptr() + 5
    buffer.view.zero_()
    assert buffer.stray_writes() == (0, None)
    buffer.box[1, 1, 0] ^= 1
    assert buffer.stray_writes() == (1, 5 + 8 + 4)
