"""The operator against the oracle, over shapes and forms, on the device at hand.

    records = run_check(device="cuda", shapes="core", on_result=print)
    assert all(record["verdict"] != "differs" for record in records)

Any callable with `prologue`'s signature can be checked in place of ours.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4_prologue import reference
from dsv4_prologue.contract import CORE_NUM_HEADS, CORE_NUM_TOKENS, HEAD_DIM
from dsv4_prologue.measure.record import kernel_hash
from dsv4_prologue.op import prologue
from dsv4_prologue.planning import Plan
from dsv4_prologue.selection import default_device, plan_for
from dsv4_prologue.verify.canary import SLICE
from dsv4_prologue.verify.compare import Comparison, compare
from dsv4_prologue.verify.inputs import Case, Variant, build_case, canary_violations

Operator = Callable[..., Tensor | None]

_EXTRA_TOKENS = (511, 512, 777, 1000, 4096)
_EXTRA_HEADS = (1, 8, 16, 32, 40)

Shape = tuple[int, int]  # num_tokens, num_heads

#: What can be checked, by name. "extra" crosses tails and head counts with moderate sizes, and
#: the decode sizes with the same head counts. "quick" is small enough for Triton's interpreter: its
#: 41 x 1 is one program more than a card of 40 cores has, its 511 rows hold all that `fill_kv` has.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "quick": ((1, 1), (4, 64), (5, 128), (17, 40), (41, 1), (511, 1)),
    "core": tuple((n, h) for n in CORE_NUM_TOKENS for h in CORE_NUM_HEADS),
    "extra": tuple(
        (n, h)
        for tokens, heads in (
            (CORE_NUM_TOKENS[:4], _EXTRA_HEADS),
            (_EXTRA_TOKENS, _EXTRA_HEADS + CORE_NUM_HEADS),
        )
        for n in tokens
        for h in heads
    ),
}
SHAPES["all"] = SHAPES["core"] + SHAPES["extra"]

#: Every form of call that is checked. The names stand in records.
VARIANTS: dict[str, Variant] = {
    "in place": Variant(out="in place"),
    "new tensor": Variant(),
    "not finite": Variant(not_finite=True),
    "strided": Variant(
        q_form="padded", out="buffer", kv_padding=8, cache_form="3d", index_dtype=torch.int32
    ),
    "kv norm": Variant(kv_norm_weight=torch.bfloat16),
    "kv only": Variant(q=False),
    "kv norm f32": Variant(kv_norm_weight=torch.float32, q=False),
    "q only": Variant(kv=False),
    "padded heads": Variant(pad_heads=24),
    "padded in place": Variant(out="in place", pad_heads=3),
    "head-major": Variant(q_form="head-major", out="in place", page_padding=0),
    "head-major buffer": Variant(out="buffer", out_form="head-major", pad_heads=1),
    "unaligned": Variant(
        q_form="unaligned",
        out="buffer",
        out_form="unaligned",
        kv_padding=3,
        cache_form="wide",
        page_padding=6,
        cache_shift=2,
    ),
    "short slots": Variant(short=True, index_dtype=torch.int32, table_dtype=torch.bfloat16),
    "no slots": Variant(num_slots=0, out="in place"),
    "pages of 5": Variant(cache_block_size=5, page_padding=22),
    "no norm": Variant(q_norm=False),
    "no rotation": Variant(q_rope=False, not_finite=True),
}
_MEDIUM = ("in place", "new tensor", "not finite", "strided", "kv norm", "kv only")
_LARGE = ("in place", "new tensor")
#: What an operator of this name has, whoever wrote it: six contiguous tensors, eps, a page size.
FOREIGN = ("new tensor", "not finite", "short slots", "no slots", "pages of 5")

#: Units (token x role) a case may have. The oracle and the torch composition do about 10**5 units
#: a second on a core, Triton's interpreter about 10**3; either bound is a few seconds a case.
CPU_UNITS = 1 << 20
INTERPRETER_UNITS = 1 << 11


class RefusedError(Exception):
    """What somebody else's operator raises for a call that it does not have."""


def parse_shapes(
    text: str, named: Mapping[str, Iterable[Shape]] = SHAPES, *, fewest_tokens: int = 0
) -> tuple[Shape, ...]:
    """Names, and sizes like 17x64, joined by commas, as (num_tokens, num_heads), small first.

    Raises ValueError for anything else.
    """
    found: set[Shape] = set()
    for part in (one.strip() for one in text.split(",")):
        size = re.fullmatch(r"(\d+)x([1-9]\d*)", part)
        if part in named:
            found.update(named[part])
        elif size is not None and int(size[1]) >= fewest_tokens:
            found.add((int(size[1]), int(size[2])))
        else:
            known = ", ".join(named)
            raise ValueError(f"shapes: expected {known} or NxH, joined by commas, got {part!r}")
    return tuple(sorted(found, key=lambda shape: (shape[0] * shape[1], shape)))


def variants_for(num_tokens: int, num_heads: int, *, foreign: bool = False) -> tuple[str, ...]:
    """The forms a shape is checked in: all of them, or where it is larger six, or two.

    `foreign`: those of them that somebody else's operator has, too.
    """
    units = num_tokens * (num_heads + 1)
    small = tuple(VARIANTS) if units <= 1 << 14 else _MEDIUM
    found = small if units <= 1 << 19 else _LARGE
    return tuple(one for one in found if one in FOREIGN) if foreign else found


def footprint_bytes(num_tokens: int, num_heads: int, variant: Variant) -> int:
    """The most memory checking a case takes at once, in bytes, predicted.

    Per element of Q: 2 of q, 2 of the operator's output where it is not q, 4 of the oracle's f32
    and 2 of its output; the last three are not there all at once if the operator makes its output.
    KV and its cache: 32 kB a token, mostly index and f32 tensors of the input's making and the
    oracle. Comparing: 100 bytes an element of a slice, if every element differs.
    """
    rows = 2 * HEAD_DIM * num_tokens if variant.q else 0  # bytes of bf16 rows, one head each
    q, out = rows * num_heads, rows * (num_heads + variant.pad_heads)
    gaps = 1 + 1 / num_heads + 8 / HEAD_DIM  # of forms that are not contiguous, at most
    held = gaps * {"in place": out, "new": q, "buffer": q + out}[variant.out]
    if variant.out != "buffer" and variant.q_form == "contiguous":
        held /= gaps
    oracle = 2 * q + out
    operator = out + (out if variant.out == "new" else 0) + 100 * min(SLICE, out // 2)
    kv = 32_000 * num_tokens if variant.kv else 0
    return int(held + max(oracle, operator) + kv)


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device free for us, in bytes; None where nothing tells."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return None
        module.empty_cache()
        return int(module.mem_get_info(device)[0])
    listing = Path("/proc/meminfo")  # counts what the page cache would give back
    if listing.exists():
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", listing.read_text(), re.MULTILINE)
        if match is not None:
            return int(match[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def work_budget(device: torch.device, plan: Plan) -> int | None:
    """The units a case may have on this device; None: any number."""
    if device.type != "cpu":
        return None
    return CPU_UNITS if plan.kernel == "torch" else INTERPRETER_UNITS


def _refusal(
    num_tokens: int, num_heads: int, variant: Variant, device: torch.device, budget: int | None
) -> str:
    """Why a case cannot be verified here; empty if it can."""
    units = num_tokens * (num_heads + 1)
    if budget is not None and units > budget:
        return f"{units} units (token x role) are more than the {budget} this device does in time"
    need, free = footprint_bytes(num_tokens, num_heads, variant), free_bytes(device)
    if free is not None and need > 0.95 * free:
        return f"needs {need / 1e9:.1f} GB with the oracle, {free / 1e9:.1f} GB are free"
    return ""


def _call(operator: Operator, case: Case, device: torch.device) -> tuple[Tensor | None, float]:
    """Call the operator; return its result and how long it took, in microseconds."""
    module = torch.get_device_module(device)
    module.synchronize()
    start = time.perf_counter()
    result = operator(**case.arguments())
    module.synchronize()
    return result, (time.perf_counter() - start) * 1e6


def check_case(
    case: Case, operator: Operator, *, foreign: bool = False
) -> tuple[Comparison, float]:
    """Run one case and compare everything it left; return what was seen and the time in us.

    The comparison's reasons also name canaries and inputs that changed, and a returned tensor that
    is not the one asked for.
    """
    expected = reference.prologue(**case.arguments())
    result, time_us = _call(operator, case, case.position_ids.device)
    q_out = result if case.q_out is None else case.q_out
    seen = compare(case, q_out, expected, foreign=foreign)
    reasons = [*seen.reasons, *canary_violations(case)]
    if not foreign and case.q_out is not None and result is not case.q_out:
        reasons.append("the call did not return its q_out")
    return replace(seen, reasons=tuple(reasons)), time_us


def run_check(
    device: str | None = None,
    shapes: str = "all",
    seed: int = 0,
    *,
    variants: Sequence[str] | None = None,
    operator: Operator | None = None,
    foreign: bool = False,
    max_units: int | None = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Check the operator against the oracle and return one record a case.

    Args:
        device: a torch device; None: the accelerator at hand, else the CPU.
        shapes: "all", "core", "extra", "quick", or like "17x64,1000x8".
        seed: of the inputs.
        variants: names of VARIANTS; None: those `variants_for` gives each shape.
        operator: a callable with `prologue`'s signature; None: `dsv4_prologue.prologue`.
        foreign: the operator is somebody else's. Its RoPE dims in the cache get the limit of Q, and
            it gets no slot past the end, no position outside the table. A case for which it raises
            RefusedError is not verified.
        max_units: units (token x role) a case may have; None: what this device does in time.
        on_result: called with each record as it comes.

    A record has `num_tokens`, `num_heads`, `variant`, `seed`, `verdict` ("ok", "differs", "not
    verified"), `reason`, `bytes_written` and `bytes_differing` of the cache, `elements_differing`,
    `max_ulp` and `bias_ulp` of Q, `time_us`, `footprint_bytes` (predicted), `card`, `forced`,
    `kernel`, `launch`, `kernel_hash`. `time_us` is the wall time of one call between two
    synchronisations, compilation included if it was the first of its kind: for information, not
    a measurement. Shapes that would not fit into memory or time are not verified, and not tried.

    Raises ValueError for an unknown name. What the operator raises is not caught.
    """
    checked = operator if operator is not None else prologue
    unknown = [name for name in variants or () if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variants: expected names of {list(VARIANTS)}, got {unknown}")
    where = torch.device(device if device is not None else default_device())
    records = []
    for num_tokens, num_heads in parse_shapes(shapes):
        usual = variants_for(num_tokens, num_heads, foreign=foreign)
        for name in variants if variants is not None else usual:
            variant = VARIANTS[name]
            if foreign:
                variant = replace(variant, out_of_range=False)
            heads_out = num_heads + variant.pad_heads if variant.q else 0
            plan = plan_for(where, num_tokens, heads_out)
            budget = max_units if max_units is not None else work_budget(where, plan)
            record: dict[str, Any] = {
                "record": "check",
                "num_tokens": num_tokens,
                "num_heads": num_heads,
                "variant": name,
                "seed": seed,
                "footprint_bytes": footprint_bytes(num_tokens, num_heads, variant),
                "card": plan.card,
                "forced": plan.forced,
                "kernel": plan.kernel,
                "launch": str(plan.launch),
                "kernel_hash": kernel_hash(plan.card),
            }
            refusal = _refusal(num_tokens, num_heads, variant, where, budget)
            if refusal:
                record |= {"verdict": "not verified", "reason": refusal}
            else:
                case = build_case(num_tokens, num_heads, variant, device=where, seed=seed)
                try:
                    seen, time_us = check_case(case, checked, foreign=foreign)
                except RefusedError as error:
                    record |= {"verdict": "not verified", "reason": f"refused: {error}"}
                else:
                    record |= {
                        "verdict": "ok" if seen.ok else "differs",
                        "reason": seen.reason,
                        "bytes_written": seen.bytes_written,
                        "bytes_differing": seen.bytes_differing,
                        "elements_differing": seen.elements_differing,
                        "max_ulp": seen.max_ulp,
                        "bias_ulp": seen.bias_ulp,
                        "time_us": time_us,
                    }
                del case  # before the next one's memory is asked for
            records.append(record)
            if on_result is not None:
                on_result(record)
    return records
