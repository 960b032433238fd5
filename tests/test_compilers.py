"""What upstream's compilers make of the kernels, read back with no card.

Pinned numbers are of Triton 3.6 and 3.9, with an eighth or so to spare for registers: one that is
exceeded is news, not yet a fault. Everything is compiled in another process, so that it does not
matter whether this one interprets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="compiles with Triton, which is not installed")

import dsv4_prologue
from dsv4_prologue import Launch, use_card, use_launch
from dsv4_prologue.cards import Card, Match, get_card
from dsv4_prologue.launch import record_launches
from dsv4_prologue.verify import compilers
from dsv4_prologue.verify.compilers import Artefact, Form, GatherForm, Refusal, Target
from dsv4_prologue.verify.inputs import Variant, build_case

HOPPER = Target("cuda", 90)
AMPERE = Target("cuda", 80)
CDNA3 = Target("hip", "gfx942")


def compiled(form: Form | GatherForm, target: Target) -> Artefact:
    outcome = compilers.compile_form(form, target)
    assert isinstance(outcome, Artefact), outcome
    return outcome


def with_and_without_kv(form: Form, target: Target) -> tuple[Artefact, Artefact]:
    """The form as it is, and its Q alone; neither spills nor has atomics."""
    forms = form, replace(form, has_kv=False)
    outcomes = compilers.compile_forms([(form, target) for form in forms])
    whole, queries = (outcome for outcome in outcomes if isinstance(outcome, Artefact))
    for artefact in (whole, queries):
        assert (artefact.spills, artefact.local_bytes, artefact.atomics) == (0, 0, 0)
    return whole, queries


# ------------------------------------------------------------------------ the tiles, on Hopper


@pytest.mark.parametrize(
    ("launch", "registers", "q_stores", "kv_stores"),
    [
        (Launch(1, 1, 1), 64, {128: 2}, {128: 1, 64: 2}),
        (Launch(1, 2, 1), 70, {128: 4}, {128: 1, 64: 2}),
        (Launch(1, 4, 2, kv_tokens_per_tile=2), 64, {128: 4}, {128: 1, 64: 2}),
        (Launch(1, 4, 4, kv_tokens_per_tile=4), 48, {128: 2}, {128: 1, 64: 2}),
        (Launch(1, 4, 4), 48, {128: 2}, {32: 1, 16: 2}),
        (Launch(4, 1, 4), 48, {128: 2}, {128: 1, 64: 2}),
        (Launch(8, 1, 4), 104, {128: 4}, {128: 2, 64: 4}),
    ],
    ids=str,
)
def test_tiles_on_hopper(
    launch: Launch, registers: int, q_stores: dict[int, int], kv_stores: dict[int, int]
) -> None:
    whole, queries = with_and_without_kv(Form(launch), HOPPER)
    assert max(whole.registers, queries.registers) <= registers
    # Each byte once: Q's rows in halves; of KV the rotated dims, and codes in halves, scale bytes
    # behind the second. A program has either role: the two sums are over different programs.
    assert queries.stores == q_stores
    assert whole.stores == Counter(q_stores) + Counter(kv_stores)
    assert set(queries.loads) == {64, 128}  # positions; rows, cosines and sines
    assert queries.loads[128] >= q_stores[128]
    assert whole.fp8_casts > queries.fp8_casts == 0
    own_rows = launch.kv_tokens_per_tile >= launch.num_warps
    for artefact in (whole, queries) if own_rows else (queries,):
        # A row in one warp: nothing to hand over.
        assert artefact.shared_bytes == artefact.shared_accesses == artefact.barriers == 0
    assert whole.shared_bytes <= 32  # the scale bytes of a token of several warps


@pytest.mark.parametrize("launch", get_card("nvidia-hopper").launches, ids=str)
def test_instructions_of_the_launches_that_hopper_chooses(launch: Launch) -> None:
    """With 5 % to spare. They are what calls on resident data are made of: decision 0010."""
    queries = compiled(Form(launch, has_kv=False), HOPPER)
    tokens = compiled(Form(launch, has_q=False), HOPPER)
    assert queries.instructions <= 213
    assert tokens.instructions <= {1: 222, 4: 360}[launch.kv_tokens_per_tile]


OLDER = """
import importlib, json, sys
from triton.language.extra import cuda
for module in (cuda, importlib.import_module("triton.language.extra.cuda")):  # may be two
    for name in ("gdc_wait", "gdc_launch_dependents"):
        if hasattr(module, name):
            delattr(module, name)
from dsv4_prologue.kernels import tiled
from dsv4_prologue.verify import _compile_worker
assert tiled.gdc_wait is None
print(_compile_worker._assembly(json.loads(sys.argv[1]))["shared"])
"""


def test_a_triton_without_dependent_launches_compiles_the_kernel() -> None:
    """Before 3.4 Triton looks up every name of a kernel, those in branches not taken, too."""
    job = {**Form().job(32), "target": ["cuda", 90, 32]}
    command = [sys.executable, "-c", OLDER, json.dumps(job)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_ceiling_of_registers() -> None:
    ceiling = compilers.register_ceiling(HOPPER, Launch(1, 1, 1))
    assert ceiling == (64, "32 programs x 32 lanes share 65536 registers")
    limited_by_programs = compilers.register_ceiling(Target("cuda", 86), Launch(1, 1, 1))
    assert limited_by_programs is not None
    assert limited_by_programs.registers == 128
    assert compilers.register_ceiling(Target("cuda", 77), Launch()) is None


# ------------------------------------------------------------------------------ other targets


def test_wide_tile_on_cdna3() -> None:
    whole, queries = with_and_without_kv(Form(Launch(8, 1, 4)), CDNA3)
    assert whole.registers <= 80
    assert queries.registers <= 64  # eight waves a SIMD unit, which is all there can be
    assert queries.stores == {128: 2}  # dwordx4
    assert queries.loads[128] >= 2
    assert queries.shared_bytes == queries.shared_accesses == queries.barriers == 0
    assert queries.occupancy == 8


def test_ampere_refuses_the_cast_and_takes_the_integers() -> None:
    policy = compilers.compile_form(Form(), AMPERE)
    assert policy == Refusal(AMPERE, compilers.REFUSED_BY_POLICY)
    dtypes = ["fp8e5", "fp8e4b15", "fp8e4nv"]
    llvm = compilers.compile_form(Form(), AMPERE, supported_fp8_dtypes=dtypes)
    assert llvm == Refusal(AMPERE, compilers.REFUSED_BY_LLVM)
    integer = compiled(Form(fp8_cast="integer"), AMPERE)
    assert integer.fp8_casts == 0
    assert integer.stores == {128: 3, 64: 2}


@pytest.mark.parametrize("dependent", ["wait", "early"])
def test_dependent_launch_waits_before_it_reads(dependent: str) -> None:
    form = Form(Launch(1, 2, 1, dependent=dependent), has_kv=False)
    hopper, ampere = compilers.compile_forms([(form, HOPPER), (form, AMPERE)])
    assert isinstance(hopper, Artefact)
    assert hopper.dependent == dependent
    message = "Modifier '.wait' requires .target sm_90 or higher"
    assert ampere == Refusal(AMPERE, message)


def test_reader() -> None:
    reader = compiled(GatherForm(), HOPPER)
    assert reader.stores == {128: 2}  # 4 rows of 1 KiB by 128 lanes
    assert reader.local_bytes == 0
    assert reader.shared_bytes <= 4096  # codes are read sixteen a lane, rows written eight a lane


def test_an_abort_of_the_compiler_is_a_refusal_and_no_end() -> None:
    forms = [(Form(fp8_cast="integer", has_kv=False), target) for target in (("cuda", 77), HOPPER)]
    aborted, after = compilers.compile_forms([(form, Target(*target)) for form, target in forms])
    assert isinstance(aborted, Refusal)
    assert aborted.reason.startswith("LLVM ERROR: Cannot select")
    assert isinstance(after, Artefact)


def test_what_is_no_refusal_is_raised() -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'HEADS'"):
        compilers.run_jobs([{**Form().job(32), "constants": {}, "target": ("cuda", 90, 32)}])


# -------------------------------------------------------------------------------- what is read

SASS = """
 Function prologue_kernel:
  REG:40 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:1032
        /*0000*/                   PREEXIT ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0030*/             @!UP0 LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0040*/                   STL [R1], R4 ;
        /*0050*/                   LDS.128 R4, [R8] ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R6, RZ ;
        /*0080*/                   RED.E.ADD.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*0090*/                   REDUX.SUM UR6, R4 ;
        /*00a0*/                   STG.E.U8 desc[UR4][R2.64], R5 ;
        /*00b0*/                   NOP;
"""


def test_figures_of_sass() -> None:
    artefact = compilers.read_sass(HOPPER, SASS, shared_bytes=32)
    assert artefact.registers == 40
    assert (artefact.spills, artefact.local_bytes) == (1, 24)
    assert artefact.loads == {128: 1, 32: 1, 16: 1}
    assert artefact.stores == {8: 1}
    assert (artefact.shared_accesses, artefact.shared_bytes, artefact.barriers) == (1, 32, 1)
    assert (artefact.atomics, artefact.fp8_casts, artefact.instructions) == (1, 1, 11)
    assert compilers._faults(Form(), replace(artefact, registers=72)) == [
        "spills: 1, 24 B of local memory",
        "1 atomic operations",
        "dependent launch: late, not no",
        "72 registers a lane, more than 64: 32 programs x 32 lanes share 65536 registers",
    ]


AMDGCN = """
\tglobal_load_dwordx4 v[2:5], v[0:1], off
\tbuffer_load_dword v2, v0, s[0:3], 0 offen
\tglobal_load_ushort v2, v[0:1], off
\tglobal_store_byte v[0:1], v2, off
\tglobal_atomic_add_f32 v[0:1], v2, off
\tds_write_b128 v0, v[2:5]
\tds_bpermute_b32 v1, v2, v3
\ts_barrier
; Occupancy: 5
    .private_segment_fixed_size: 12
    .vgpr_count:     70
    .vgpr_spill_count: 3
"""


def test_figures_of_amdgcn() -> None:
    artefact = compilers.read_amdgcn(CDNA3, AMDGCN, shared_bytes=0)
    assert (artefact.registers, artefact.occupancy) == (70, 5)
    assert (artefact.spills, artefact.local_bytes) == (3, 12)
    assert artefact.loads == {128: 1, 32: 1, 16: 1}
    assert artefact.stores == {8: 1}
    assert (artefact.shared_accesses, artefact.shuffles, artefact.barriers) == (1, 1, 1)
    assert (artefact.atomics, artefact.instructions) == (1, 8)


# -------------------------------------------------------------------------------------- proofs


def test_a_card_needs_no_entry_to_be_proved() -> None:
    match = Match(("hip",), ("gfx94*",))
    card = Card("made-up", "Made up", "tiled", "compiler", "why", "evidence", match, lanes=64)
    (proof,) = compilers.prove(card)
    assert (proof.proof, proof.verdict) == ("compiler gfx942", "proved")
    assert "at most 64: 32 programs x 64 lanes share 131072 registers" in proof.reason


def test_a_card_of_other_lanes_is_not_provable_here() -> None:
    card = replace(get_card("nvidia-hopper"), lanes=64)
    (proof,) = compilers.prove(card)
    assert proof.verdict == "not provable here"


def test_without_triton_nothing_is_provable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (proof,) = compilers.prove(get_card("nvidia-hopper"))
    assert (proof.verdict, proof.reason) == ("not provable here", "Triton is not installed")


def test_hygon_needs_what_stands_for_it() -> None:
    stand_in = compilers.STAND_INS["hygon-bw1000"]
    assert stand_in.refused is not None
    proof = compilers._prove_target_refused(get_card("hygon-bw1000"), stand_in.refused)
    assert (proof.verdict, proof.reason) == ("proved", "upstream says unsupported target: 'gfx936'")


def test_planted_a_native_cast_where_there_is_none() -> None:
    card = replace(get_card("thead-zw810e"), fp8_cast="compiler")
    (proof,) = compilers.prove(card)
    assert proof.verdict == "refused"
    assert compilers.REFUSED_BY_POLICY in proof.reason


def test_planted_rows_in_pieces() -> None:
    form = Form(has_kv=False)
    pieces = compiled(replace(form, aligned=False), HOPPER)
    assert pieces.stores == {16: 16}
    assert len(compilers._faults(form, pieces)) == 2


# ------------------------------------------------------------- what is compiled is what is launched

DTYPES = {
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
}
FORMS = {
    "whole": (Variant(), Form()),
    "q": (Variant(kv=False, q_norm=False), Form(has_kv=False, q_norm=False)),
    "kv": (
        Variant(q=False, kv_norm_weight=torch.bfloat16, cache_block_size=16),
        Form(has_q=False, kv_norm=True, page_tokens=16),
    ),
    "padded": (
        Variant(pad_heads=2, q_rope=False, index_dtype=torch.int32, table_dtype=torch.bfloat16),
        Form(heads_out=5, q_rope=False, index_dtype="i32", table_dtype="bf16"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_what_is_launched(name: str) -> None:
    variant, form = FORMS[name]
    chosen = Launch(2, 2, 1)
    with use_card("nvidia-hopper"), use_launch(chosen), record_launches() as launches:
        dsv4_prologue.prologue(**build_case(5, 3, variant).arguments())
    (launched,) = launches
    tensors = {
        name: DTYPES[value.dtype]
        for name, value in launched.arguments.items()
        if isinstance(value, torch.Tensor)
    }
    constants = {name: value for name, value in launched.arguments.items() if name.isupper()}
    job = replace(form, launch=chosen, heads=3).job(32)
    assert job["kernel"].startswith(f"dsv4_prologue.kernels.{launched.kernel}:")
    assert job["types"] == tensors | {"eps": "fp32"}
    assert job["constants"] == constants
    assert job["options"] == launched.options


def test_the_reader_s_form_is_what_is_launched() -> None:
    cache = torch.zeros(2, 64 * 584, dtype=torch.uint8)
    with use_card("nvidia-hopper"), record_launches() as launches:
        dsv4_prologue.gather_dequantize(cache, torch.zeros(3, dtype=torch.int64))
    (launched,) = launches
    job = GatherForm().job(32)
    constants = {name: value for name, value in launched.arguments.items() if name.isupper()}
    assert job["constants"] == constants
    assert job["options"] == launched.options
