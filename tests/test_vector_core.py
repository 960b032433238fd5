"""The vector-core kernel against the oracle, in the interpreter: forms, tiles, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import Launch, launch, reference, use_card, use_launch
from dsv4_prologue.cards import get_card
from dsv4_prologue.cards.card import Limits
from dsv4_prologue.selection import interpreting
from dsv4_prologue.verify.ascend import vector_core_order
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Case, Variant, build_case, canary_violations

if not interpreting():
    pytest.skip(
        "runs Ascend's kernel in the interpreter: needs TRITON_INTERPRET=1", allow_module_level=True
    )

from dsv4_prologue.verify import interpreter

CARD = "ascend-910b"
CORES = 4  # of the card the launches are tried on: the fewer, the fewer programs it takes


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """The test runs on the card; the fixture is a function that gives it other limits."""

    def limit(max_programs: int, multiple_of: int) -> None:
        limits = Limits(max_programs, multiple_of)
        monkeypatch.setattr(launch, "get_card", lambda name: replace(get_card(name), limits=limits))

    with use_card(CARD):
        yield limit


def check(case: Case) -> None:
    """Run one call and hold it to the contract: bytes, limits, canaries, inputs."""
    expected = reference.prologue(**case.arguments())
    result = compare(case, dsv4_prologue.prologue(**case.arguments()), expected)
    assert result.ok, result.reason
    assert not canary_violations(case)


VARIANTS = {
    "new": Variant(),
    "in place": Variant(out="in place"),
    "in place, padded heads": Variant(out="in place", pad_heads=2, q_form="padded"),
    "buffer": Variant(out="buffer", pad_heads=2),
    "head-major": Variant(q_form="head-major", out="buffer", out_form="head-major"),
    "unaligned": Variant(q_form="unaligned", out="buffer", out_form="unaligned", kv_padding=3),
    "padded heads, one a program": Variant(pad_heads=3),
    "q only": Variant(kv=False),
    "kv only": Variant(q=False),
    "no norm": Variant(q_norm=False),
    "no rope": Variant(q_rope=False),
    "no norm, no rope, in place": Variant(q_norm=False, q_rope=False, out="in place"),
    "no norm, padded heads": Variant(q_norm=False, pad_heads=2, not_finite=True),
    "kv norm bf16": Variant(kv_norm_weight=torch.bfloat16),
    "kv norm f32": Variant(kv_norm_weight=torch.float32),
    "int32": Variant(index_dtype=torch.int32),
    "bf16 table": Variant(table_dtype=torch.bfloat16),
    "small pages": Variant(cache_block_size=4, page_padding=6),
    "odd pages": Variant(cache_block_size=3, page_padding=0),
    "pages of one": Variant(cache_block_size=1, page_padding=2),
    "3-d cache": Variant(cache_form="3d", page_padding=0),
    "wide cache": Variant(cache_form="wide", page_padding=1000),
    "packed, shifted": Variant(page_padding=112320, cache_shift=2, num_pages=3),
    "short": Variant(short=True),
    "M = 0": Variant(num_slots=0),
    "M = 1": Variant(num_slots=1),
    "not finite": Variant(not_finite=True),
    "not finite, in place": Variant(not_finite=True, out="in place"),
    "eps 0": Variant(eps=0.0, pad_heads=2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_form(name: str) -> None:
    check(build_case(17, 6, VARIANTS[name], seed=3))


TILES = [
    (1, 0, 1),
    (5, 2, 1),
    (6, 0, 2),
    (3, 1, 4),
    (8, 0, 8),
    (16, 0, 16),
    (20, 12, 32),
    (64, 0, 32),
]


@pytest.mark.parametrize(("num_heads", "pad_heads", "tile"), TILES)
def test_every_tile(num_heads: int, pad_heads: int, tile: int) -> None:
    """The plan's: the largest power of two up to 32 that divides the heads written."""
    plan = dsv4_prologue.explain(1, num_heads + pad_heads)
    assert (plan.kernel, plan.launch.heads_per_tile) == ("vector_core", tile)
    variant = Variant(pad_heads=pad_heads, not_finite=True, short=True, out="in place")
    check(build_case(9, num_heads, variant, seed=tile))


def test_bytes_that_bite() -> None:
    """Many tokens of KV: every scale byte, edge and tie that the inputs walk."""
    check(build_case(509, 1, Variant(q=False, not_finite=True), seed=1))


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_sizes(num_tokens: int) -> None:
    check(build_case(num_tokens, 2, seed=num_tokens))


def test_a_cache_without_pages() -> None:
    arguments = build_case(3, 2).arguments() | {
        "k_cache": torch.zeros(0, 64 * 584, dtype=torch.uint8)
    }
    want, got = reference.prologue(**arguments)[0], dsv4_prologue.prologue(**arguments)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))  # type: ignore[union-attr]


def test_an_empty_table() -> None:
    arguments = build_case(3, 2).arguments() | {"cos_sin_cache": torch.zeros(0, 64)}
    got = dsv4_prologue.prologue(**arguments)
    assert got is not None
    assert got[..., 448:].isnan().all()
    assert not got[..., :448].isnan().any()


# ------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize("variant", [Variant(), Variant(out="in place", short=True)])
@pytest.mark.parametrize(("max_programs", "multiple_of"), [(7, 1), (23, 4)])
def test_a_call_in_several_launches(
    limit: Callable[[int, int], None], variant: Variant, max_programs: int, multiple_of: int
) -> None:
    limit(max_programs, multiple_of)
    check(build_case(9, 6, variant, seed=4))


FORMS = {
    "out of place": Variant(not_finite=True),
    "in place": Variant(out="in place"),
    "in place, q only": Variant(out="in place", kv=False),
    "kv only": Variant(q=False),
}


def survives(form: str, repeats: int) -> bool:
    """Whether a card that runs programs in any order, and program 0 again, leaves right bytes."""
    case = build_case(7, 3, FORMS[form], seed=2)  # whose first row is not of zeros
    expected = reference.prologue(**case.arguments())
    order = vector_core_order(CORES, repeats=repeats, seed=repeats)
    with interpreter.program_order(order, races=not repeats):
        got = dsv4_prologue.prologue(**case.arguments())
    return compare(case, got, expected).ok and not canary_violations(case)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("repeats", [0, 1, 7])
@pytest.mark.parametrize("max_programs", [1000, 12])
def test_order_and_repetition_change_nothing(
    limit: Callable[[int, int], None], form: str, repeats: int, max_programs: int
) -> None:
    """A launch that is a multiple of the cores leaves nothing to run again."""
    limit(max_programs, CORES)
    assert survives(form, repeats)


@pytest.mark.parametrize("repeats", range(1, 8))
def test_an_unpadded_launch_in_place_is_caught(
    limit: Callable[[int, int], None], repeats: int
) -> None:
    limit(1000, 1)
    assert not survives("in place, q only", repeats)
    assert survives("out of place", repeats)
    assert survives("kv only", repeats)


def test_an_unpadded_second_launch_in_place_is_caught(limit: Callable[[int, int], None]) -> None:
    """With KV in front, program 0 of the first launch is harmless, that of the second is not."""
    limit(1000, 1)
    assert survives("in place", 1)
    limit(10, 1)
    assert not survives("in place", 1)


# ------------------------------------------------------------------------------------- 64 bits


def test_the_last_program_of_the_largest_call() -> None:
    """Offsets beyond 2**31 elements, of which virtual memory holds none but the last."""
    q = torch.empty(65544, 128, 512, dtype=torch.bfloat16)
    q[-1] = 3.0
    positions = torch.zeros(65544, dtype=torch.int64)
    table = build_case(1, 1).cos_sin_cache
    last = 65544 * 4 - 1
    first = last // 65520 * 65520

    def only_last(grid: int) -> tuple[int, ...]:
        return (last - first,) if grid < 65520 else ()

    with use_launch(Launch(1, 32)), interpreter.program_order(only_last):
        dsv4_prologue.prologue(q, None, None, None, positions, table, q_out=q)
    assert (q[-1, :96, :448] == 3.0).all()
    assert (q[-1, 96:, :448] == 1.0).all()


def test_a_page_far_away() -> None:
    far = torch.empty(3032 * 1_039_680, dtype=torch.uint8)
    cache = far.as_strided((3032, 64 * 584), (1_039_680, 1))
    row, table = torch.ones(1, 512, dtype=torch.bfloat16), build_case(1, 1).cos_sin_cache
    slot, position = torch.tensor([3031 * 64 + 63]), torch.tensor([0])
    dsv4_prologue.prologue(None, row, cache, slot, position, table)
    want = reference.prologue(None, row, cache[-1:], torch.tensor([63]), position, table)[1]
    assert want is not None
    assert torch.equal(cache[-1, 63 * 576 : 64 * 576], want[0, 63 * 576 : 64 * 576])
