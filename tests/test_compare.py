"""The limits: each catches what it is for, and lets through what the contract allows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv4_prologue import reference
from dsv4_prologue.contract import DATA_BYTES, NOPE_DIM, SCALE_BYTES
from dsv4_prologue.verify import canary
from dsv4_prologue.verify.compare import (
    HONEST_SHARE,
    NAN_ULP,
    bias_limit,
    compare,
    compare_cache,
    compare_queries,
    ordered,
    ulp_distance,
)
from dsv4_prologue.verify.inputs import Case, Variant, build_case

pytestmark = pytest.mark.once


def bf16(bits: int | list[int]) -> Tensor:
    """int16 bits of bf16."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16)


def numbers(tokens: int, heads: int, seed: int = 0) -> Tensor:
    """bf16 [tokens, heads, 512]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 512, generator=generator).bfloat16()


# ---------------------------------------------------------------------------------- distances


def test_neighbours_are_one_apart_on_the_whole_line() -> None:
    line = bf16([0xFF80, *range(0xFF7F, 0x7FFF, -1), *range(0x7F81)])  # -Inf ... -0, 0 ... Inf
    place = ordered(line)
    steps = place[1:] - place[:-1]
    zeros = line[1:] == 0
    assert (steps[~zeros] == 1).all()
    assert (steps[zeros] == 0).all()  # both zeros are one place
    values = line.view(torch.bfloat16).float()
    assert (values[1:] >= values[:-1]).all()


def test_nans_are_equal_to_each_other_and_far_from_the_rest() -> None:
    nan, other, inf, largest = 0x7F81, 0xFFC0, 0x7F80, 0x7F7F
    assert ulp_distance(bf16(nan), bf16(other)) == 0
    assert ulp_distance(bf16(nan), bf16(inf)) == NAN_ULP
    assert ulp_distance(bf16(inf), bf16(nan)) == NAN_ULP
    assert ulp_distance(bf16(inf), bf16(largest)) == 1
    assert ulp_distance(bf16(0x7F80), bf16(0xFF80)) < NAN_ULP


# ------------------------------------------------------------------------------------------ Q


def changed(want: Tensor, place: tuple[int, int, int], bits: int) -> Tensor:
    got = want.clone()
    got.view(torch.int16)[place] = bf16(bits)
    return got


def raw(want: Tensor, place: tuple[int, int, int]) -> int:
    return int(want.view(torch.int16)[place]) & 0xFFFF


def test_equal_queries() -> None:
    want = numbers(5, 3)
    result = compare_queries(want.clone(), want)
    assert result.ok
    assert result.reason == ""
    assert (result.elements, result.elements_differing) == (5 * 3 * 512, 0)
    assert (result.max_ulp, result.bias_ulp, result.first) == (0, 0.0, None)


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("dim", [0, 447, 448, 511])
def test_one_ulp_is_allowed_and_two_are_not(step: int, dim: int) -> None:
    want = numbers(5, 3)
    place = (4, 1, dim)
    result = compare_queries(changed(want, place, raw(want, place) + step), want)
    assert result.ok
    assert (result.max_ulp, result.elements_differing) == (1, 1)
    result = compare_queries(changed(want, place, raw(want, place) + 2 * step), want)
    assert not result.ok
    assert result.max_ulp == 2
    assert result.reason.startswith("q: 1 elements beyond 1 ULP, up to 2; first at q, token 4, ")
    assert f"head 1, dim {dim}: expected " in result.reason
    assert f"0x{raw(want, place):04X}" in result.reason


def test_the_first_difference_is_the_first_broken_one() -> None:
    want = numbers(5, 3)
    got = changed(want, (0, 0, 0), raw(want, (0, 0, 0)) + 1)
    for place in ((3, 2, 9), (1, 1, 1)):
        got = changed(got, place, raw(want, place) + 5)
    result = compare_queries(got, want)
    assert result.elements_differing == 3
    assert result.first is not None
    assert result.first.where == "q, token 1, head 1, dim 1"


def test_not_finite_queries() -> None:
    want = numbers(2, 2)
    for bits in (0x7F80, 0xFF80, 0x7FC0):
        same = changed(want, (1, 1, 500), bits)
        assert compare_queries(same.clone(), same).ok
        assert not compare_queries(want, same).ok
        assert not compare_queries(same, want).ok
    assert compare_queries(
        changed(want, (1, 1, 500), 0xFFFF), changed(want, (1, 1, 500), 0x7F81)
    ).ok
    assert "nan" in compare_queries(changed(want, (0, 0, 0), 0x7FC0), want).reason


def test_zeros_of_either_sign_are_equal_in_a_head() -> None:
    want = changed(numbers(2, 2), (1, 1, 500), 0)
    result = compare_queries(changed(want, (1, 1, 500), 0x8000), want, num_heads=2)
    assert result.ok
    assert result.elements_differing == 0


@pytest.mark.parametrize("bits", [0x8000, 0x0001, 0x7FC0, 0x3F80])
def test_padding_heads_are_zero_to_the_bit(bits: int) -> None:
    want = numbers(3, 4)
    want[:, 3:] = 0.0
    assert compare_queries(want.clone(), want, num_heads=3).ok
    result = compare_queries(changed(want, (2, 3, 511), bits), want, num_heads=3)
    assert result.reason.startswith(
        "q: 1 elements of padding heads are not +0; first at q, token 2, head 3, dim 511: "
    )
    assert result.max_ulp == 0  # of the heads themselves
    assert result.elements == 3 * 3 * 512


def cancelling(norm: float) -> tuple[Tensor, tuple[int, int, int]]:
    """Q with one rotated pair of that norm whose second element all but cancelled."""
    want = numbers(2, 2)
    want[1, 1, 448:450] = torch.tensor([norm, 1e-9])
    return want, (1, 1, 449)


def test_a_cancelled_rotation_is_held_to_its_pair() -> None:
    want, place = cancelling(4.0)
    got = want.clone()
    got[place] = 1e-9 + 3.5 * 2.0**-20  # thousands of ULPs
    result = compare_queries(got, want)
    assert result.ok
    assert result.max_ulp == 0  # it is not judged in ULPs
    assert result.elements_differing == 1
    assert not compare_queries(got, want, rotated=False).ok
    got[place] = 4.5 * 2.0**-20
    assert not compare_queries(got, want).ok
    want, place = cancelling(1.0)
    got = want.clone()
    got[place] = 1e-9 + 3.5 * 2.0**-20
    assert not compare_queries(got, want).ok


def test_the_first_of_a_pair_may_cancel_too() -> None:
    want = numbers(2, 2)
    want[0, 0, 510:512] = torch.tensor([0.0, 4.0])
    got = want.clone()
    got[0, 0, 510] = -3.5 * 2.0**-20
    assert compare_queries(got, want).ok


def test_a_dim_that_is_not_rotated_has_no_pair() -> None:
    want = numbers(2, 2)
    want[1, 1, 446:448] = torch.tensor([4.0, 1e-9])
    got = want.clone()
    got[1, 1, 447] = 2.0**-20
    assert not compare_queries(got, want).ok


@pytest.mark.parametrize("partner", [math.inf, math.nan])
def test_a_pair_that_is_not_finite_excuses_nothing(partner: float) -> None:
    want, place = cancelling(partner)
    got = want.clone()
    got[place] = 1.0
    assert not compare_queries(got, want).ok


def test_the_largest_pair_has_a_limit() -> None:
    """Its norm is beyond f32, its limit is not."""
    want = numbers(2, 2)
    want[1, 1, 448:450] = torch.tensor([3e38, 3e38])
    got = want.clone()
    got[1, 1, 449] = 2.9e38
    assert not compare_queries(got, want).ok


def test_a_wrong_shape_or_dtype() -> None:
    want = numbers(2, 2)
    assert "expected torch.bfloat16 [2, 2, 512], got" in compare_queries(want[:1], want).reason
    assert not compare_queries(want.float(), want).ok


def test_strides_do_not_matter() -> None:
    want = numbers(6, 4)
    got = torch.full((4, 7, 515), math.nan, dtype=torch.bfloat16)
    view = got[:, :6, :512].transpose(0, 1)
    view.copy_(want)
    assert compare_queries(view, want).ok
    view[5, 3, 511] += 1
    result = compare_queries(view, want)
    assert result.first is not None
    assert result.first.where == "q, token 5, head 3, dim 511"


# --------------------------------------------------------------------------------------- bias


def exact(tokens: int, heads: int) -> Tensor:
    """f32 values that bf16 has to round."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, heads, 512, generator=generator)


def toward_zero(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


def away_from_zero(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()


def down(x: Tensor) -> Tensor:
    return torch.where(x < 0, away_from_zero(x), toward_zero(x))


@pytest.mark.parametrize("rounding", [toward_zero, away_from_zero, down])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 64), (17, 5)])
def test_truncation_does_not_pass_as_rounding(rounding, tokens: int, heads: int) -> None:  # type: ignore[no-untyped-def]
    x = exact(tokens, heads)
    result = compare_queries(rounding(x), x.bfloat16())
    assert result.max_ulp == 1
    assert "biased by" in result.reason
    assert 0.4 < abs(result.bias_ulp) < 0.6


@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (17, 5)])
@pytest.mark.parametrize("part", [slice(0, 448), slice(448, 512)])
def test_truncation_of_one_part_is_seen(tokens: int, heads: int, part: slice) -> None:
    x = exact(tokens, heads)
    want = x.bfloat16()
    got = want.clone()
    got[..., part] = toward_zero(x)[..., part]
    result = compare_queries(got, want)
    assert ("RoPE" if part.start else "NoPE") in result.reason


@pytest.mark.parametrize("ulps", [1, 8])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 64), (777, 5)])
def test_an_honest_error_is_no_bias(tokens: int, heads: int, ulps: int) -> None:
    """Every f32 too large by some ULPs, as one rsqrt makes a whole row."""
    x = exact(tokens, heads)
    result = compare_queries(
        (x.view(torch.int32) + ulps).view(torch.float32).bfloat16(), x.bfloat16()
    )
    assert result.ok, result.reason
    if tokens == 777:
        assert 0 < result.bias_ulp < HONEST_SHARE / 4


def test_the_bias_limit_is_below_truncation_and_above_honesty() -> None:
    for count in range(16, 100):
        assert HONEST_SHARE < bias_limit(count) < 0.5
    assert bias_limit(448) < 0.05
    assert bias_limit(10**9) < 1.01 * HONEST_SHARE


# -------------------------------------------------------------------------------------- cache


@pytest.fixture
def kv_case() -> Case:
    return build_case(99, 1, Variant(q=False, not_finite=True))


def token(cache: Tensor, slot: int) -> tuple[Tensor, Tensor]:
    """The data bytes and the scale bytes of a slot, as views. Pages of 64."""
    page, offset = divmod(slot, 64)
    scales = 64 * DATA_BYTES + offset * SCALE_BYTES
    return (
        cache[page, offset * DATA_BYTES : (offset + 1) * DATA_BYTES],
        cache[page, scales : scales + SCALE_BYTES],
    )


def inserted(case: Case) -> tuple[Tensor, Tensor]:
    """The oracle's cache, twice."""
    want = reference.prologue(**case.arguments())[1]
    assert want is not None
    return want.clone(), want


def test_equal_caches(kv_case: Case) -> None:
    got, want = inserted(kv_case)
    result = compare_cache(got, want, kv_case.slot_mapping, 64)  # type: ignore[arg-type]
    assert result.ok
    written = len(kv_case.written()[0])
    assert (result.bytes_written, result.bytes_differing) == (584 * written, 0)
    assert result.fraction == 0.0


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize(("byte", "name"), [
    (0, "group 0, dim 0"), (447, "group 6, dim 447"), (449, "RoPE dim 448, byte 1"),
    (575, "RoPE dim 511, byte 1"), (576, "scale byte of group 0"), (582, "scale byte of group 6"),
    (583, "pad byte"),
])  # fmt: skip
def test_one_flipped_bit_is_seen(kv_case: Case, byte: int, name: str, foreign: bool) -> None:
    got, want = inserted(kv_case)
    rows, slots = kv_case.written()
    finite = [i for i, row in enumerate(rows) if kv_case.kv[row].isfinite().all()]  # type: ignore[index]
    row, slot = int(rows[finite[7]]), int(slots[finite[7]])
    data, scales = token(got, slot)
    place = data[byte : byte + 1] if byte < 576 else scales[byte - 576 : byte - 575]
    before = int(place)
    place ^= 0x40
    result = compare_cache(got, want, kv_case.slot_mapping, 64, foreign=foreign)  # type: ignore[arg-type]
    assert result.bytes_differing == 1
    assert result.reason == (
        f"k_cache: 1 of {result.bytes_written} bytes differ; first at k_cache, token {row}, slot "
        f"{slot} (page {slot // 64}, offset {slot % 64}), {name}: expected 0x{before:02X}, got "
        f"0x{before ^ 0x40:02X}"
    )


def test_bytes_that_are_not_written_are_not_compared(kv_case: Case) -> None:
    """They are the canaries' business."""
    got, want = inserted(kv_case)
    free = (set(range(got.shape[0] * 64)) - set(kv_case.written()[1].tolist())).pop()
    token(got, free)[0].fill_(1)
    assert compare_cache(got, want, kv_case.slot_mapping, 64).ok  # type: ignore[arg-type]


def test_any_nan_is_the_nan_in_rope_dims(kv_case: Case) -> None:
    got, want = inserted(kv_case)
    assert kv_case.slot_mapping is not None
    nans = 0
    for slot in kv_case.written()[1].tolist():
        rope = token(got, slot)[0][NOPE_DIM:].view(torch.int16)
        nan = rope.view(torch.bfloat16).isnan()
        nans += int(nan.sum())
        rope[nan] = bf16(0xFFA5)
    assert nans > 64
    result = compare_cache(got, want, kv_case.slot_mapping, 64)
    assert result.ok
    assert result.bytes_differing == 0
    rope[nan.nonzero()[:1]] = 0  # a number for a NaN; the last slot may hold none
    token(got, slot)[0][NOPE_DIM:].view(torch.int16)[0] ^= 0x7F80
    assert not compare_cache(got, want, kv_case.slot_mapping, 64).ok


def test_a_nan_code_of_another_sign_is_a_difference(kv_case: Case) -> None:
    """In the NoPE dims the contract says 0x7F."""
    got, want = inserted(kv_case)
    for slot in kv_case.written()[1].tolist():
        codes = token(got, slot)[0][:NOPE_DIM]
        if (codes == 0x7F).any():
            codes[codes == 0x7F] = 0xFF
            break
    assert not compare_cache(got, want, kv_case.slot_mapping, 64).ok  # type: ignore[arg-type]


def test_kv_norm_allows_a_share_and_no_more() -> None:
    case = build_case(99, 1, Variant(q=False, kv_norm_weight=torch.bfloat16, out_of_range=False))
    got, want = inserted(case)
    slots = case.written()[1].tolist()
    allowed = int(2e-4 * 584 * len(slots))
    assert allowed == 10
    assert case.slot_mapping is not None
    for slot in slots[:allowed]:
        token(got, slot)[0][5] ^= 1
    result = compare_cache(got, want, case.slot_mapping, 64, kv_norm=True)
    assert result.ok
    assert result.bytes_differing == allowed
    assert result.fraction <= 2e-4
    assert not compare_cache(got, want, case.slot_mapping, 64).ok
    token(got, slots[allowed])[0][5] ^= 1
    result = compare_cache(got, want, case.slot_mapping, 64, kv_norm=True)
    assert "11 of " in result.reason
    assert "more than 10" in result.reason


def test_a_foreign_operator_may_be_an_ulp_off_in_rope_dims_alone() -> None:
    case = build_case(99, 1, Variant(q=False, out_of_range=False))
    got, want = inserted(case)
    assert case.slot_mapping is not None
    data = token(got, int(case.written()[1][3]))[0]
    data[NOPE_DIM:].view(torch.int16)[10] += 1
    assert not compare_cache(got, want, case.slot_mapping, 64).ok
    result = compare_cache(got, want, case.slot_mapping, 64, foreign=True)
    assert result.ok
    assert result.bytes_differing >= 1  # told, though allowed
    data[NOPE_DIM:].view(torch.int16)[10] += 1
    assert not compare_cache(got, want, case.slot_mapping, 64, foreign=True).ok
    data[NOPE_DIM:].view(torch.int16)[10] -= 2
    data[3] ^= 1
    assert not compare_cache(got, want, case.slot_mapping, 64, foreign=True).ok


def test_a_foreign_operator_may_cancel() -> None:
    case = build_case(3, 1, Variant(q=False))
    got, want = inserted(case)
    slot = int(case.written()[1][0])
    for cache, first in ((got, 1e-9), (want, 1e-9 + 3.5 * 2.0**-20)):
        pair = token(cache, slot)[0][NOPE_DIM : NOPE_DIM + 4].view(torch.bfloat16)
        pair.copy_(torch.tensor([first, 4.0]))
    assert case.slot_mapping is not None
    assert compare_cache(got, want, case.slot_mapping, 64, foreign=True).ok
    assert not compare_cache(got, want, case.slot_mapping, 64).ok


@pytest.mark.parametrize("form", ["2d", "wide", "3d"])
def test_any_form_of_cache(form: str) -> None:
    case = build_case(30, 1, Variant(q=False, cache_form=form, cache_block_size=5))  # type: ignore[arg-type]
    want = inserted(case)[1]
    assert case.k_cache is not None
    assert case.slot_mapping is not None
    assert not compare_cache(case.k_cache, want, case.slot_mapping, 5).ok  # poison
    case.k_cache.copy_(want)
    assert compare_cache(case.k_cache, want, case.slot_mapping, 5).ok
    assert not compare_cache(case.k_cache[:-1], want, case.slot_mapping, 5).ok


def test_nothing_written_is_fine() -> None:
    case = build_case(9, 1, Variant(q=False, num_slots=0))
    got, want = inserted(case)
    result = compare_cache(got, want, case.slot_mapping, 64)  # type: ignore[arg-type]
    assert (result.ok, result.bytes_written, result.fraction) == (True, 0, 0.0)


# --------------------------------------------------------------------------------- both at once


def test_both_at_once() -> None:
    case = build_case(33, 2, Variant(pad_heads=1))
    q, cache = expected = reference.prologue(**case.arguments())
    assert q is not None
    assert cache is not None
    assert case.k_cache is not None
    assert not compare(case, q, expected).ok  # the cache is still poison
    case.k_cache.copy_(cache)
    result = compare(case, q.clone(), expected)
    assert result.ok
    assert result.bytes_written == 584 * len(case.written()[0])
    assert result.elements == 33 * 2 * 512
    assert "expected a tensor" in compare(case, None, expected).reason
    wrong = q.clone()
    wrong[3, 2, 0] = -0.0  # a padding head
    case.k_cache[:, :] ^= 0x10
    result = compare(case, wrong, expected)
    assert len(result.reasons) == 2
    assert "first at q, token 3, head 2, dim 0" in result.reason


def test_q_only_and_kv_only() -> None:
    case = build_case(9, 2, Variant(kv=False))
    expected = reference.prologue(**case.arguments())
    assert compare(case, expected[0], expected).ok
    case = build_case(9, 2, Variant(q=False))
    expected = reference.prologue(**case.arguments())
    assert not compare(case, None, expected).ok
    case.k_cache.copy_(expected[1])  # type: ignore[union-attr, arg-type]
    assert compare(case, None, expected).ok


# ----------------------------------------------------------------------------------------- size


def test_slicing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = exact(31, 3)
    want, got = x.bfloat16(), toward_zero(x)
    got[20, 1, 7] = 100.0
    got[25, 0, 0] = 100.0
    whole = compare_queries(got, want)
    monkeypatch.setattr(canary, "SLICE", 4 * 3 * 512)
    assert compare_queries(got, want) == whole
    monkeypatch.setattr(canary, "SLICE", 1)
    assert compare_queries(got, want) == whole
    assert whole.first is not None
    assert whole.first.where == "q, token 20, head 1, dim 7"


def test_more_than_2_to_the_31_elements() -> None:
    """65537 x 64, in rows that overlap so that they take 1 MB; the last element is its own."""
    want, got = (
        torch.zeros(65536 * 8 + 64 * 512, dtype=torch.bfloat16).as_strided(
            (65537, 64, 512), (8, 512, 1)
        )
        for _ in range(2)
    )
    got[65536, 63, 511] = 1.0
    result = compare_queries(got, want)
    assert result.elements == 65537 * 64 * 512 > 2**31
    assert result.elements_differing == 1
    assert result.first is not None
    assert result.first.where == "q, token 65536, head 63, dim 511"
