"""The suite is tested too: a fault planted in a copy of the kernel must be caught, by name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import Launch, launch, reference, use_card, use_launch
from dsv4_prologue.selection import interpreting
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Variant, build_case, canary_violations

if not interpreting():
    pytest.skip(
        "plants faults in interpreted kernels: needs TRITON_INTERPRET=1", allow_module_level=True
    )

from triton.runtime.interpreter import InterpreterError

from dsv4_prologue.verify.interpreter import MemoryFault, only_program

KERNELS = Path(launch.__file__).parent / "kernels"

#: (fault, file, text, what it becomes, what the verdict must say)
FAULTS = [
    (
        "the wide store writes the RoPE bytes too, unrotated",
        "tiled",
        "mask=write & (rotated >= 0)",
        "mask=write",
        "stored twice by one program",
    ),
    (
        "the cast of Q truncates",
        "tiled",
        "tail.to(tl.bfloat16), mask=write",
        "(tail.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16),"
        " mask=write",
        "q: biased",
    ),
    (
        "the cast of the lead truncates",
        "tiled",
        "lead.to(tl.bfloat16), mask=write",
        "(lead.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16),"
        " mask=write",
        "q: biased",
    ),
    (
        "the lead is not in the norm",
        "tiled",
        "squares = tl.fma(lead, lead, squares)",
        "squares += 0",
        "q: ",
    ),
    (
        "the lead's scales are taken for the tail's",
        "tiled",
        "scale += lead_scale << (8 * group)",
        "scale += lead_scale << (8 + 8 * group)",
        "k_cache: ",
    ),
    (
        "codes take the place of scale bytes",
        "tiled",
        "codes = tl.where(rotated < 0, codes, (packed >> (8 * (dim % GROUPS))).to(tl.uint8))",
        "codes = codes",
        "k_cache: ",
    ),
    (
        "heads past the last are written",
        "tiled",
        "& (head < HEADS_OUT)",
        "& (head >= 0)",
        "two lanes store one byte: argument 'q_out_ptr'",
    ),
    (
        "the tail of tokens is skipped",
        "tiled",
        "live = (token < num_tokens)",
        "live = (token < num_tokens // TOKENS * TOKENS)",
        "q: ",
    ),
    (
        "the tail of slots is skipped",
        "tiled",
        "given = token < num_slots",
        "given = token < num_slots // TOKENS * TOKENS",
        "k_cache: ",
    ),
    (
        "no tail is masked",
        "tiled",
        "live = (token < num_tokens)",
        "live = (token >= 0)",
        "out of bounds",
    ),
    (
        "the pad byte is not 0",
        "tiled",
        "scale = tl.where(group + LEAD // GROUP < NUM_SCALES, scale, 0)",
        "scale = scale",
        "pad byte",
    ),
    (
        "a slot past the end is written",
        "tiled",
        "live = (slot >= 0) & (slot < capacity)",
        "live = slot >= 0",
        "out of bounds",
    ),
    (
        "a slot is cut to 32 bits before the range check",
        "tiled",
        "slot = tl.load(slot_ptr + token, mask=given, other=-1).to(tl.int64)",
        "slot = tl.load(slot_ptr + token, mask=given, other=-1).to(tl.int32)",
        "stored by two programs",
    ),
    (
        "a position past the table is read",
        "numerics",
        "inside = live & (position >= 0) & (position < num_positions)",
        "inside = live & (position >= 0)",
        "out of bounds",
    ),
    (
        "a position outside the table is clamped, not NaN",
        "numerics",
        "position = position.to(tl.int64)",
        "position = tl.minimum(tl.maximum(position.to(tl.int64), 0), num_positions - 1)",
        "q: ",
    ),
    (
        "NoPE dims pass through the rotation",
        "numerics",
        "even_out = tl.where(rope, even * cos - odd * sin, even)",
        "even_out = even * tl.where(rope, cos, 1.0) - odd * tl.where(rope, sin, 0.0)",
        "q: ",
    ),
    (
        "the rotation has the wrong sign",
        "numerics",
        "even * cos - odd * sin",
        "even * cos + odd * sin",
        "q: ",
    ),
    (
        "padding heads are not zeroed",
        "tiled",
        "if HEADS_OUT > HEADS:",
        "if HEADS_OUT < HEADS:",
        "padding heads",
    ),
    (
        "an edge at 1.75 * 2**k rounds up",
        "numerics",
        "+ 0x1FFFFF) >> 23",
        "+ 0x200000) >> 23",
        "k_cache: ",
    ),
    (
        "the absmax has no floor",
        "numerics",
        "tl.maximum(tl.max(magnitude, axis=2), ABSMAX_FLOOR_BITS)",
        "tl.maximum(tl.max(magnitude, axis=2), 0)",
        "k_cache: ",
    ),
    (
        "a group that is not finite is quantised as if it were",
        "numerics",
        "not_finite = absmax >= INF_BITS",
        "not_finite = absmax > ABS_MASK - 1",
        "k_cache: ",
    ),
    (
        "the largest bf16 beside an Inf keeps a code",
        "numerics",
        "3.814697265625e-06",
        "7.62939453125e-06",
        "k_cache: ",
    ),
    (
        "E4M3 subnormals are flushed",
        "numerics",
        "code = tl.where(a < 0x3C800000, subnormal, normal)",
        "code = tl.where(a < 0x3C800000, 0, normal)",
        "k_cache: ",
    ),
    (
        "E4M3 ties go up",
        "numerics",
        "a - 0x3BF80001 + ((a >> 20) & 1)",
        "a - 0x3BF80001 + 1",
        "k_cache: ",
    ),
    (
        "-0 is lost",
        "numerics",
        "code = code | ((bits >> 24) & 0x80)",
        "code = tl.where(code > 0, code | ((bits >> 24) & 0x80), 0)",
        "k_cache: ",
    ),
    (
        "the page stride is taken for the payload",
        "numerics",
        "codes = page * page_stride + offset * 576",
        "codes = page * PAGE_TOKENS * 584 + offset * 576",
        "k_cache: ",
    ),
    (
        "rows of q are taken for contiguous",
        "tiled",
        "token * q_token_stride + head.to(tl.int64) * q_head_stride",
        "token * HEADS * 512 + head.to(tl.int64) * q_head_stride",
        "out of bounds",
    ),
    (
        "a KV token's offset is 32 bits wide",
        "numerics",
        "page = (slot32 // PAGE_TOKENS).to(tl.int64)",
        "page = slot32 // PAGE_TOKENS",
        "overflow",
    ),
    (
        "a query's offset is 32 bits wide",
        "tiled",
        "token = (program // HEAD_TILES).to(tl.int64) * TOKENS",
        "token = (program // HEAD_TILES) * TOKENS",
        "overflow",
    ),
]


def mutant(folder: Path, file: str, text: str, becomes: str) -> Any:
    """A copy of the two kernel files with one text changed, loaded under names of their own."""
    sources = {name: (KERNELS / f"{name}.py").read_text() for name in ("numerics", "tiled")}
    assert sources[file].count(text) >= 1, f"{file}.py no longer says {text!r}"
    sources[file] = sources[file].replace(text, becomes)
    unique = f"mutant_{folder.name}"
    sources["tiled"] = sources["tiled"].replace(
        "dsv4_prologue.kernels.numerics", f"{unique}_numerics"
    )
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(f"{unique}_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module.prologue_kernel


def verdict() -> str:
    """What the conformance kit and the memory check say of the kernel at hand; empty if nothing."""
    said = []
    cases = [
        build_case(
            11, 3, Variant(not_finite=True, q_form="padded", pad_heads=2, short=True), seed=1
        ),
        build_case(43, 1, Variant(out="in place", cache_block_size=4), seed=2),
    ]
    try:
        # Whole rows in one access, then halves; tiles of tokens, then of heads too.
        forms = [("unknown", Launch(8, 1)), ("nvidia-ampere", Launch(4, 2, kv_tokens_per_tile=8))]
        for case, (card, tile) in zip(cases, forms, strict=True):
            with use_card(card), use_launch(tile):
                expected = reference.prologue(**case.arguments())
                q_out = dsv4_prologue.prologue(**case.arguments())
                said += [compare(case, q_out, expected).reason, *canary_violations(case)]
        with use_card("unknown"), use_launch(Launch(8, 1)):
            far = torch.empty(3032 * 1_039_680, dtype=torch.uint8)
            cache = far.as_strided((3032, 64 * 584), (1_039_680, 1))
            row, table = cases[1].kv[:1], cases[1].cos_sin_cache  # type: ignore[index]
            one = torch.tensor([3031 * 64])
            dsv4_prologue.prologue(None, row, cache, one, torch.tensor([5]), table)
            q = torch.empty(65544, 64, 512, dtype=torch.bfloat16)
            positions = torch.zeros(65544, dtype=torch.int64)
            with only_program(65544 // 8 * 64 - 1):
                dsv4_prologue.prologue(q, None, None, None, positions, table, q_out=q)
    except (MemoryFault, InterpreterError) as error:
        said.append(f"{type(error).__name__}: {error}: {error.__cause__ or ''}")
    return "; ".join(reason for reason in said if reason)


def test_an_unchanged_copy_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = mutant(tmp_path, "tiled", "num_tokens", "num_tokens")
    monkeypatch.setattr(launch, "_kernel", lambda _: kernel)
    assert verdict() == ""


@pytest.mark.parametrize(
    ("file", "text", "becomes", "says"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    text: str,
    becomes: str,
    says: str,
) -> None:
    kernel = mutant(tmp_path, file, text, becomes)
    monkeypatch.setattr(launch, "_kernel", lambda _: kernel)
    assert says in verdict()
