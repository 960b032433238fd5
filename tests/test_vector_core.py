"""The vector-core kernel against the oracle, in the interpreter: forms, tiles, launches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_op
import torch
from test_op import check

import dsv4_prologue
from dsv4_prologue import Launch, launch, reference, use_card, use_launch
from dsv4_prologue.cards import get_card
from dsv4_prologue.cards.card import Limits
from dsv4_prologue.selection import interpreting
from dsv4_prologue.verify.ascend import vector_core_order
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Variant, build_case, canary_violations

if not interpreting():
    pytest.skip(
        "runs Ascend's kernel in the interpreter: needs TRITON_INTERPRET=1", allow_module_level=True
    )

from triton.runtime.interpreter import InterpreterError

from dsv4_prologue.kernels import vector_core
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


#: With six heads: two more make eight, a tile of eight; three more nine, tiles of one.
VARIANTS = {
    **test_op.VARIANTS,
    "in place, eight heads out": Variant(out="in place", pad_heads=2, q_form="padded"),
    "no norm, padded heads": Variant(q_norm=False, pad_heads=2, not_finite=True),
    "eps 0, padded heads": Variant(eps=0.0, pad_heads=2),
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
    last = [65544 * 4 - 1]  # counted from the next launch's first program

    def only_last(grid: int) -> tuple[int, ...]:
        here = last[0]
        last[0] -= grid
        return (here,) if 0 <= here < grid else ()

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


# ------------------------------------------------------------------------------- planted faults

#: (fault, text, what it becomes, what the verdict must say)
FAULTS = [
    ("a slot past the end", "if (slot >= 0) & (slot < capacity)", "if slot >= 0", "out of bounds"),
    (
        "a negative slot",
        "if (slot >= 0) & (slot < capacity)",
        "if slot < capacity",
        "out of bounds",
    ),
    (
        "a position past the table",
        "inside = (position >= 0) & (position < num_positions)",
        "inside = position >= 0",
        "out of bounds",
    ),
    (
        "a position outside that is clamped",
        "read = pair < tl.where(inside, ROPE_PAIRS, 0)",
        "read = pair < ROPE_PAIRS",
        "q: ",
    ),
    ("the second row of a lone head", "(row < 1)", "(row < 2)", "stored by two programs"),
    (
        "RoPE dims stored unrotated too",
        "(NOPE_DIM if Q_ROPE else HEAD_DIM)",
        "HEAD_DIM",
        "stored twice by one program",
    ),
    (
        "padding that the rotation touched",
        "even_out = tl.where(real, even_out, 0.0)",
        "even_out = even_out",
        "padding heads are not +0",
    ),
    (
        "padding that the norm touched",
        "inverse = tl.where(real, inverse, 0.0)",
        "inverse = inverse",
        "padding heads are not +0",
    ),
    (
        "the RoPE dims as a group of their own",
        "mask=group < NUM_SCALES",
        "mask=group < GROUPS",
        "stored twice by one program",
    ),
    (
        "a pad byte that is not 0",
        "tl.where(number < NUM_SCALES, scale, 0)",
        "tl.where(number < GROUPS, scale, 0)",
        "pad byte",
    ),
    (
        "a weighted norm that is not rounded",
        "x = x.to(tl.bfloat16).to(tl.float32)",
        "x = x.to(tl.float32)",
        "k_cache: ",
    ),
    (
        "idle programs that work",
        "(program >= kv_programs) & (program < num_programs)",
        "program >= kv_programs",
        "out of bounds",
    ),
    ("every launch is the first", "first_program + tl.program_id", "tl.program_id", "q: "),
    (
        "a query's offset in 32 bits",
        "token = (program // HEAD_TILES).to(tl.int64)",
        "token = program // HEAD_TILES",
        "overflow",
    ),
]


def mutant(path: Path, text: str, becomes: str) -> Any:
    """The kernel of a copy of its file with one text changed."""
    source = Path(vector_core.__file__).read_text()
    assert text in source, f"vector_core.py no longer says {text!r}"
    path.write_text(source.replace(text, becomes))
    spec = importlib.util.spec_from_file_location(f"mutant_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.prologue_kernel


def verdict(limit: Callable[[int, int], None]) -> str:
    """What the conformance kit and the memory check say of the kernel at hand; empty if nothing."""
    said = []
    limit(20, CORES)
    try:
        for case in (
            build_case(9, 3, Variant(pad_heads=1, eps=0.0, not_finite=True, short=True), seed=1),
            build_case(9, 3, Variant(out="in place", cache_block_size=4), seed=2),
            build_case(40, 1, Variant(q=False, kv_norm_weight=torch.float32), seed=3),
        ):
            expected = reference.prologue(**case.arguments())
            q_out = dsv4_prologue.prologue(**case.arguments())
            said += [compare(case, q_out, expected).reason, *canary_violations(case)]
        if not any(said):
            limit(65535, CORES)
            test_the_last_program_of_the_largest_call()
            test_a_page_far_away()
    except (interpreter.MemoryFault, InterpreterError) as error:
        said.append(f"{error}: {error.__cause__ or ''}")
    return "; ".join(reason for reason in said if reason)


def test_an_unchanged_copy_passes(
    limit: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = mutant(tmp_path / "kernel.py", "eps", "eps")
    monkeypatch.setattr(launch, "_kernel", lambda _: kernel)
    assert verdict(limit) == ""


@pytest.mark.parametrize(
    ("text", "becomes", "says"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_caught(
    limit: Callable[[int, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    becomes: str,
    says: str,
) -> None:
    kernel = mutant(tmp_path / "kernel.py", text, becomes)
    monkeypatch.setattr(launch, "_kernel", lambda _: kernel)
    assert says in verdict(limit)
