"""Ascend's own compiler: every form of the kernel is proved, every planted fault refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import Launch, launch, use_card
from dsv4_prologue.cards import get_card
from dsv4_prologue.cards.card import Limits
from dsv4_prologue.verify import ascend
from dsv4_prologue.verify.compilers import Form
from dsv4_prologue.verify.launches import grid_faults

pytestmark = pytest.mark.once

CARD = get_card("ascend-910b")
KERNELS = ascend.PACKAGE / "kernels"


@pytest.fixture(scope="session")
def python() -> Path:
    found = ascend.find_environment()
    if found is None:
        pytest.skip("needs Ascend's compiler: `nox -s ascend` makes the environment that has it")
    return found


# --------------------------------------------------------------------------------------- proofs


@pytest.mark.slow
@pytest.mark.usefixtures("python")
def test_every_tile_form_and_chip_is_proved() -> None:
    card = replace(CARD, limits=Limits(65535, 240))  # the least multiple of 40 and of 48
    proofs = ascend.prove(card)
    assert [(proof.verdict, proof.card) for proof in proofs] == [("proved", CARD.name)] * 4
    tiles, forms, reader, chips = (proof.detail for proof in proofs)
    assert set(reader) == {"i64 slots", "i32 slots"}
    assert list(tiles) == [f"{n} heads a program" for n in (1, 2, 4, 8, 16, 32)]
    for figures in [*tiles.values(), *forms.values()]:
        assert 0 < figures["ub_bytes"] <= figures["ub_limit"] == 192 * 1024
        assert figures["vector_calls"] > 0
    whole = tiles["32 heads a program"]
    assert whole["scalar_loads"] == {"slot_ptr": 1, "position_ptr": 2}  # one position a role
    assert forms["no norm, no rope"]["scalar_loads"] == {"slot_ptr": 1, "position_ptr": 1}
    assert chips["Ascend910B4"] == 40


def test_a_reader_of_too_many_rows_is_refused(python: Path) -> None:
    jobs = {
        name: one | {"constants": one["constants"] | {"ROWS": 16}}
        for name, one in ascend.reader_jobs().items()
    }
    lowerings = dict(zip(jobs, ascend.lower([*jobs.values()], python=python), strict=True))
    proof = ascend._reader_proof(CARD, "the reader", lowerings)
    assert proof.verdict == "refused"
    assert "ub overflow" in proof.reason


def test_a_grid_that_is_no_multiple_on_some_chip_is_refused(python: Path) -> None:
    jobs = ascend.chip_jobs()
    lowerings = dict(zip(jobs, ascend.lower([*jobs.values()], python=python), strict=True))
    proof = ascend._chips_proof(replace(CARD, limits=Limits(65535, 40)), "grids", lowerings)
    assert proof.verdict == "refused"
    assert "Ascend910B1 has 48" in proof.reason
    assert "Ascend910B4 " not in proof.reason


@pytest.mark.parametrize(
    ("named", "says"),
    [("nowhere", "does not exist"), ("other", "ModuleNotFoundError: No module named 'triton'")],
)
def test_without_the_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, says: str
) -> None:
    other = tmp_path / "other"
    other.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'triton'\" >&2\nexit 1\n"
    )
    other.chmod(0o755)
    monkeypatch.setenv(ascend.PYTHON_VARIABLE, str(tmp_path / named))
    for proof in ascend.prove(CARD):
        assert proof.verdict == "not provable here"
        assert says in proof.reason


def test_a_compiler_that_ends_unexpectedly_is_an_exception(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho 'KeyError: 1' >&2\nexit 1\n")
    other.chmod(0o755)
    with pytest.raises(RuntimeError, match="ended with 1: KeyError: 1"):
        ascend.lower([], python=other)


def test_an_environment_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ascend, "_folders", lambda: [tmp_path / "ascend"])
    monkeypatch.setattr(ascend, "REQUIREMENTS", (str(tmp_path / "no-such-wheel.whl"),))
    monkeypatch.delenv(ascend.PYTHON_VARIABLE, raising=False)
    for proof in ascend.prove(CARD):
        assert proof.verdict == "not provable here"
        assert "-m pip install failed" in proof.reason
    assert ascend.find_environment() is None


# ------------------------------------------------------------------------------- planted faults

WHOLE = ascend.job(Form(Launch(1, 32)))
Q_ONLY = ascend.job(Form(Launch(1, 32), has_kv=False))
KV_ONLY = ascend.job(Form(has_q=False))
ONE_HEAD = ascend.job(Form(heads=1))
KV_NORM = ascend.job(Form(has_q=False, kv_norm=True))

#: (fault, job, file, text, what it becomes, what the verdict must say)
FAULTS: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    ("none", WHOLE, "vector_core", "GROUPS", "GROUPS", ""),
    (
        "64 heads a program",
        ascend.job(Form(Launch(1, 64))),
        "vector_core",
        "GROUPS",
        "GROUPS",
        "ub overflow, requires 3145728 bits while 1572864 bits available",
    ),
    (
        "the compiler's cast to E4M3",
        KV_ONLY,
        "vector_core",
        '"integer")',
        '"compiler")',
        "refused by the frontend: unexpected type fp8",
    ),
    (
        "a pointer cast",
        KV_ONLY,
        "vector_core",
        "tl.store(cache_bf16_ptr + at_rotated + rope_dim, rotated)",
        "data = (cache_ptr + at_codes).to(tl.pointer_type(tl.bfloat16))\n"
        "        tl.store(data + 224 + rope_dim, rotated)",
        "refused by the adapter: Casting pointers with unmatched bitwidth! (exit status 0)",
    ),
    (
        "return in an arm",
        WHOLE,
        "vector_core",
        "    if HAS_Q:\n        if (program >= kv_programs) & (program < num_programs):\n",
        "        else:\n            if program >= num_programs:\n                return\n",
        "refused by the adapter: Assertion",
    ),
    (
        "a shift by a lane's own amount",
        KV_ONLY,
        "numerics",
        "code = code | ((bits >> 24) & 0x80)",
        "code = (code << (a >> 31)) | ((bits >> 24) & 0x80)",
        "scalar loops, of 512 trips",
    ),
    (
        "a gather",
        KV_ONLY,
        "vector_core",
        "tl.load(row + NOPE_DIM + rope_dim), 1)",
        "tl.load(row + NOPE_DIM + (rope_dim ^ 1)), 1)",
        "scalar loops",
    ),
    (
        "pairs scaled before they are split",
        ascend.job(Form(Launch(1, 8), has_kv=False)),
        "vector_core",
        "            even = even * inverse\n            odd = odd * inverse\n",
        "            pairs = tl.load(rows + rope_dim).to(tl.float32)\n"
        "            pairs = tl.reshape(pairs, (ROWS, ROPE_PAIRS, 2)) * inverse[:, :, None]\n"
        "            even, odd = tl.split(pairs)\n",
        "scalar loops, of 256, 256, 256 trips",
    ),
    (
        "a tile of one row",
        ONE_HEAD,
        "vector_core",
        "ROWS: tl.constexpr = 2 if LONE",
        "ROWS: tl.constexpr = 1 if LONE",
        "scalar memory access: load in the buffer, memref<1x1xf32",
    ),
    (
        "a sum to a scalar",
        KV_NORM,
        "vector_core",
        "inverse_rms(_total(parts, GROUPS), eps) * weight",
        "tl.rsqrt(tl.sum(parts, axis=0) * 0.001953125 + eps) * weight",
        "scalar memory access",
    ),
    (
        "a scalar float made an integer",
        KV_ONLY,
        "numerics",
        "slot32 = slot.to(tl.int32)",
        "slot32 = slot.to(tl.float32).to(tl.int32)",
        "1 conversions of a scalar float to an integer",
    ),
    (
        "a row read again behind a store",
        Q_ONLY,
        "vector_core",
        "    written = dim <",
        "    x += tl.load(q_ptr + row * 512 + dim).to(tl.float32)\n    written = dim <",
        "1 loads behind a store",
    ),
]


@pytest.fixture(scope="session")
def lowered(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ascend.Lowering]:
    """What the compiler makes of each faulty copy of the two kernel files; all at once."""
    folder = tmp_path_factory.mktemp("mutants")
    jobs = []
    for number, (_, job, file, text, becomes, _) in enumerate(FAULTS):
        sources = {
            name: (KERNELS / f"{name}.py").read_text() for name in ("numerics", "vector_core")
        }
        assert text in sources[file], f"{file}.py no longer says {text!r}"
        sources[file] = sources[file].replace(text, becomes)
        names = {name: f"mutant_{number}_{name}" for name in sources}
        for name, source in sources.items():
            copy = source.replace("dsv4_prologue.kernels.numerics", names["numerics"])
            (folder / f"{names[name]}.py").write_text(copy)
        jobs.append(job | {"kernel": f"{names['vector_core']}:prologue_kernel"})
    lowerings = ascend.lower(jobs, python=python, path=[folder])
    shutil.rmtree(folder)
    return {fault[0]: one for fault, one in zip(FAULTS, lowerings, strict=True)}


@pytest.mark.parametrize(("fault", "says"), [(f[0], f[-1]) for f in FAULTS])
def test_a_planted_fault_is_refused(
    lowered: dict[str, ascend.Lowering], fault: str, says: str
) -> None:
    found = "; ".join(ascend.faults(lowered[fault]))
    assert says in found
    assert bool(found) == (fault != "none")


#: A body in the last IR's form, of one role.
IR = """\
module attributes {"VECTOR_CORE_COUNT", 40 : i32, "UB_SIZE", 1572864 : i32}
  func.func @kernel(%arg0: i64 {hacc.arg_type = 1}, %arg1: memref<?xi64>, %arg2: memref<?xbf16>) {
    %c64_i64 = arith.constant 64 : i64
    scf.if %1 {
      %reinterpret_cast = memref.reinterpret_cast %arg1 to offset: [%9], sizes: [1] : memref<?xi64>
      %2 = memref.load %reinterpret_cast[%c0] {a = 0 : i32} : memref<1xi64, strided<[1]>>
      %3 = hivm.hir.pointer_cast(%c64_i64) : memref<8x3xbf16, #hivm.address_space<ub>>
      func.call @load_gm_to_ubuf_1d_bfloat16_t(%4, %3)
      func.call @vcast_float_to_bfloat16_t_1d_with_mode(%5, %6, %c0_i32) : (memref<?xf32>)
      func.call @store_ubuf_to_gm_1d_bfloat16_t(%6, %7)
    }
  }
"""


def read(*changes: tuple[str, str], ttir: str = "") -> ascend.Lowering:
    hivm = IR
    for text, becomes in changes:
        assert text in hivm
        hivm = hivm.replace(text, becomes)
    names = ["slot_ptr", "q_ptr"]
    result = {"stage": "accepted", "refusal": "", "names": names, "ttir": ttir, "hivm": hivm}
    return ascend.read_lowering(result)


def test_the_ir_is_read() -> None:
    lowering = read()
    assert lowering == ascend.Lowering(
        stage="accepted",
        ub_bytes=64 + 8 * 3 * 2,
        ub_limit=196608,
        vector_cores=40,
        scalar_loads={"slot_ptr": 1},
        vector_calls=3,
    )
    assert ascend.faults(lowering) == []


@pytest.mark.parametrize(
    ("text", "becomes", "says"),
    [
        ("constant 64 :", "constant 196600 :", "196648 bytes of a buffer of 196608"),
        ("%arg1 to", "%arg2 to", "scalar memory access: load in q_ptr, memref<1xi64"),
        ("memref.load", "memref.store %2,", "scalar memory access: store in slot_ptr"),
        ("%c0_i32)", "%c4_i32)", "1 casts to bf16 that are not to nearest even"),
        ("@vcast_float", "@vmla_float", "1 multiplications contracted with an addition"),
        ("%2 = memref", "scf.while {}\n%2 = memref", "scalar loops, of ? trips"),
        ("%2 = memref", "%a = unrealized_conversion_cast\n%2 = memref", "that nothing carries out"),
        ("%2 = memref", "%a = arith.fptosi %8\n%2 = memref", "scalar float to an integer"),
    ],
)
def test_a_fault_in_the_ir_is_told(text: str, becomes: str, says: str) -> None:
    assert says in "; ".join(ascend.faults(read((text, becomes))))


def test_a_pointer_cast_in_triton_s_ir_is_told() -> None:
    cast = "%9 = tt.bitcast %8 : !tt.ptr<i8> -> !tt.ptr<bf16>\n"
    assert ascend.faults(read(ttir=cast)) == ["1 pointer casts"]
    assert ascend.faults(read(ttir="%9 = tt.bitcast %8 : tensor<8xf32> -> tensor<8xi32>\n")) == []


def test_a_tile_in_an_unknown_form_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="a form that is not known here"):
        read(("pointer_cast(%c64_i64)", "pointer_cast(%c64_i64, %c96_i64)"))


# ------------------------------------------------------------------------------------- launches


def launches(num_tokens: int, num_heads: int, *, kv: bool) -> tuple[list[tuple[int, int]], int]:
    """The launches of a call in place, and how many programs it has. Nothing is launched."""
    q = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16)
    positions = torch.empty(num_tokens, dtype=torch.int32)
    rest: tuple[Any, ...] = (None, None, None)
    if kv:
        cache = torch.empty(1, 64 * 584, dtype=torch.uint8)
        rest = (torch.empty(num_tokens, 512, dtype=torch.bfloat16), cache, positions)
    with use_card(CARD.name), launch.record_launches() as recorded:
        dsv4_prologue.prologue(q, *rest, positions, torch.empty(1, 64), q_out=q)
    tile = dsv4_prologue.explain(num_tokens, num_heads, card=CARD.name).launch.heads_per_tile
    grids = [(one.arguments["first_program"], one.programs) for one in recorded]
    return grids, num_tokens * (num_heads // tile + kv)


@pytest.mark.parametrize("num_tokens", [1, 4, 17, 64, 1024, 65536, 98304, 131072])
@pytest.mark.parametrize(("num_heads", "kv"), [(1, False), (8, True), (64, True), (128, True)])
def test_launches_are_within_the_limits(num_tokens: int, num_heads: int, kv: bool) -> None:
    assert CARD.limits is not None
    assert grid_faults(*launches(num_tokens, num_heads, kv=kv), CARD.limits) == []


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Limits], None]:
    def plant(limits: Limits) -> None:
        monkeypatch.setattr(launch, "get_card", lambda _: replace(CARD, limits=limits))

    return plant


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(65536, 1), "65536 programs in one launch, which takes 65535"),
        (Limits(65535, 1), "65535 programs are no multiple of "),
    ],
)
def test_a_planted_launch_is_refused(
    planted: Callable[[Limits], None], limits: Limits, says: str
) -> None:
    assert CARD.limits is not None
    planted(limits)
    assert says in "; ".join(grid_faults(*launches(65536, 1, kv=False), CARD.limits))


def test_launches_that_leave_out_or_repeat_programs_are_told() -> None:
    limits = Limits(80, 40)
    assert grid_faults([(0, 80), (80, 40)], 81, limits) == []
    for wrong in ([(0, 80)], [(0, 80), (40, 80)], [(0, 80), (120, 40)]):
        assert "each once" in grid_faults(wrong, 81, limits)[0]


def test_the_card_s_order() -> None:
    order = ascend.vector_core_order(40, repeats=3, seed=1)
    assert sorted(order(120)) == list(range(120))
    assert sorted(order(30)) == list(range(30))
    assert sorted(order(41)) == [0, 0, 0, *range(41)]
    assert order(120) != list(range(120))
