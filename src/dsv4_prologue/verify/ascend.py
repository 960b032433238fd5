"""What Ascend's own compiler makes of the vector-core kernel, with neither CANN nor an NPU.

triton-ascend's frontend and adapter and AscendNPU-IR's `bishengir-compile` are on PyPI and run
anywhere; only the code generator behind them is closed. They run in `_ascend_worker`, in a Python
of their own, for triton-ascend is a package named triton too. What this compiler cannot make a
vector instruction of, it makes a scalar loop of in silence, and a pointer cast it gets wrong and
exits with 0; so a form is proved by what is read from the last open IR, not by its acceptance
(`Lowering`, `faults`).

Also here: what the card does to a grid (`vector_core_order`).
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dsv4_prologue.cards.card import Card
from dsv4_prologue.launch import TILED_ONLY
from dsv4_prologue.planning import Launch
from dsv4_prologue.verify.compilers import Form, GatherForm
from dsv4_prologue.verify.proof import Proof

PYTHON_VARIABLE: Final = "DSV4_PROLOGUE_ASCEND_PYTHON"
REQUIREMENTS: Final = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11", "numpy")
#: The chips of the name, as the compiler calls them; the first is what forms are compiled for.
CHIPS: Final = tuple(f"Ascend910B{n}" for n in ("4", "1", "2", "2C", "3", "4-1"))
PACKAGE: Final = Path(__file__).resolve().parents[1]

# -------------------------------------------------------------------------------- environment


class NotHereError(RuntimeError):
    """The compiler cannot be had here; the message says why."""


def _folders() -> list[Path]:
    """Where an environment may be: below the repository this package is in, and here."""
    repository = PACKAGE.parents[1]
    roots = [repository] if (repository / "pyproject.toml").exists() else []
    return [root / ".nox" / "ascend" for root in (*roots, Path.cwd())]


def find_environment() -> Path | None:
    """The Python that has Ascend's compiler, or None.

    It is the one that DSV4_PROLOGUE_ASCEND_PYTHON names, or `.nox/ascend/bin/python` below the
    repository or the current directory. Raises NotHereError if the variable names no file.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not Path(named).exists():
            raise NotHereError(f"{PYTHON_VARIABLE} names a file that does not exist")
        return Path(named)
    return next((p for folder in _folders() if (p := folder / "bin" / "python").exists()), None)


def make_environment() -> Path:
    """Make the environment, 0.8 GB, where `find_environment` finds it; return its Python.

    Raises NotHereError if this is not Linux, or there is no Python that triton-ascend has a wheel
    for, or pip cannot get it.
    """
    if sys.platform != "linux":
        raise NotHereError(f"Ascend's compiler is built for Linux, and this is {sys.platform}")
    python = sys.executable if sys.version_info < (3, 12) else shutil.which("python3.11")
    if python is None:
        raise NotHereError("triton-ascend 3.2.0 needs Python 3.11 or older, and there is none")
    folder = _folders()[0]
    partial = folder.with_name("ascend-partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"installing {', '.join(REQUIREMENTS)} in {folder}", file=sys.stderr)
    for command in (
        [python, "-m", "venv", str(partial)],
        [str(partial / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", *REQUIREMENTS],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
            raise NotHereError(f"{' '.join(command[1:4])} failed: {said[-1]}")
    partial.rename(folder)
    return folder / "bin" / "python"


# ------------------------------------------------------------------------- what comes out of it

#: Arguments of which a program may load a scalar.
SCALARS: Final = ("slot_ptr", "position_ptr")
_BYTES: Final = {"i1": 1 / 8, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}


@dataclass(frozen=True)
class Lowering:
    """What became of a kernel: the stage that refused it, or figures of the last open IR."""

    stage: str  # "frontend", "adapter", "middle end", or "accepted"
    refusal: str = ""
    ub_bytes: int = 0  # of the Unified Buffer, to the end of the last tile in it
    ub_limit: int = 0  # the chip's
    vector_cores: int = 0  # the chip's
    loops: tuple[str, ...] = ()  # scalar loops, by their trips
    scalar_loads: Mapping[str, int] = field(default_factory=dict)  # of SCALARS, as they should be
    scalar_accesses: tuple[str, ...] = ()  # all other loads and stores of one element
    float_to_int: int = 0  # of scalars
    pointer_casts: int = 0
    unrealized_casts: int = 0
    contractions: int = 0  # a*b+c as one instruction, which rounds once
    roundings: int = 0  # casts f32 -> bf16 that are not to nearest even
    loads_after_stores: int = 0  # in one role: what in place would read its own result
    vector_calls: int = 0  # as they stand, in both roles

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return asdict(self)


def _ub_bytes(hivm: str) -> int:
    address = dict(re.findall(r"(%\w+) = arith\.constant (\d+) : i64", hivm))
    tile = r"pointer_cast\((%\w+)\) : memref<((?:\d+x)*)(\w+), #hivm\.address_space<ub>>"
    tiles = re.findall(tile, hivm)
    if len(tiles) != hivm.count("hivm.hir.pointer_cast("):
        raise ValueError("a tile of the Unified Buffer is written in a form that is not known here")
    return max(
        int(address[at]) + math.ceil(math.prod(map(int, shape.split("x")[:-1])) * _BYTES[element])
        for at, shape, element in tiles
    )


def _trips(hivm: str) -> tuple[str, ...]:
    value = dict(re.findall(r"(%\w+) = arith\.constant (-?\d+) : (?:index|i32|i64)", hivm))
    bounds = re.findall(r"scf\.for %\w+ = (%\w+) to (%\w+) step (%\w+)", hivm)
    trips = [
        str(len(range(*(int(value[name]) for name in bound)))) if value.keys() >= {*bound} else "?"
        for bound in bounds
    ]
    return (*trips, *["?"] * hivm.count("scf.while"))


def _scalar_accesses(hivm: str, names: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Loads of SCALARS by name, and all other accesses of one element, in words."""
    # The kernel's own arguments stand behind those that the compiler adds.
    head = next(line for line in hivm.splitlines() if re.search(r"func\.func @\w+\(%arg0", line))
    added = head.count("hacc.arg_type = ")
    loads: Counter[str] = Counter()
    others = []
    source: dict[str, str] = {}  # of a name, which another branch may give to something else
    line = r"(%\w+) = memref\.reinterpret_cast %arg(\d+) |memref\.(load|store) .*?(%\w+)\[.* : (.*)"
    for made, argument, kind, memref, what in re.findall(line, hivm):
        if made:
            place = int(argument) - added
            source[made] = names[place] if 0 <= place < len(names) else ""
        elif kind == "load" and source.get(memref) in SCALARS:
            loads[source[memref]] += 1
        else:
            others.append(f"{kind} in {source.get(memref) or 'the buffer'}, {what.split(',')[0]}")
    return dict(loads), tuple(others)


def _loads_after_stores(hivm: str) -> int:
    """Vector loads behind the first vector store of their role, each a branch of the body."""
    late = 0
    for role in re.findall(r"^    scf\.if .*?^    }", hivm, re.DOTALL | re.MULTILINE):
        moves = re.findall(r"call @(load_gm|store_ubuf)_", role)
        if "store_ubuf" in moves:
            late += moves[moves.index("store_ubuf") :].count("load_gm")
    return late


def read_lowering(result: Mapping[str, Any]) -> Lowering:
    """Read one result of the worker."""
    hivm = result["hivm"]
    if result["stage"] != "accepted":
        return Lowering(result["stage"], result["refusal"])
    scalar_loads, scalar_accesses = _scalar_accesses(hivm, result["names"])
    chip = dict(re.findall(r'"(UB_SIZE|VECTOR_CORE_COUNT)", (\d+)', hivm))
    return Lowering(
        stage="accepted",
        ub_bytes=_ub_bytes(hivm),
        ub_limit=int(chip["UB_SIZE"]) // 8,
        vector_cores=int(chip["VECTOR_CORE_COUNT"]),
        loops=_trips(hivm),
        scalar_loads=scalar_loads,
        scalar_accesses=scalar_accesses,
        float_to_int=len(re.findall(r"arith\.fpto[su]i", hivm)),
        pointer_casts=len(re.findall(r"tt\.(?:bitcast|int_to_ptr)[^\n]*!tt\.ptr", result["ttir"])),
        unrealized_casts=hivm.count("unrealized_conversion_cast"),
        contractions=len(re.findall(r"call @v?(?:fma|mla|madd|axpy)\w*", hivm)),
        # The last operand is the mode, of which 0 is "to nearest even".
        roundings=len(re.findall(r"call @vcast_float_to_bf\w*\((?![^)]*%c0_i32\))", hivm)),
        loads_after_stores=_loads_after_stores(hivm),
        vector_calls=len(re.findall(r"call @\w+", hivm)),
    )


def faults(lowering: Lowering, *, slow: bool = True) -> list[str]:
    """What is wrong with a lowering, in words; empty if nothing. `slow`: scalar code is, too."""
    if lowering.stage != "accepted":
        return [f"refused by the {lowering.stage}: {lowering.refusal}"]
    found = []
    if lowering.ub_bytes > lowering.ub_limit:
        found.append(f"{lowering.ub_bytes} bytes of a buffer of {lowering.ub_limit}")
    if slow and lowering.loops:
        found.append(f"scalar loops, of {', '.join(lowering.loops)} trips")
    if slow and lowering.scalar_accesses:
        found.append(f"scalar memory access: {lowering.scalar_accesses[0]}")
    for count, what in (
        (lowering.float_to_int, "conversions of a scalar float to an integer"),
        (lowering.pointer_casts, "pointer casts"),
        (lowering.unrealized_casts, "casts that nothing carries out"),
        (lowering.contractions, "multiplications contracted with an addition"),
        (lowering.roundings, "casts to bf16 that are not to nearest even"),
        (lowering.loads_after_stores, "loads behind a store"),
    ):
        if count:
            found.append(f"{count} {what}")
    return found


def lower(
    jobs: Sequence[Mapping[str, Any]], *, python: Path, path: Iterable[Path] = ()
) -> list[Lowering]:
    """Compile each job with the Python of `find_environment`; see `job` and `_ascend_worker`.

    `path` are folders to import kernels from. Raises NotHereError if that Python does not have the
    compiler, RuntimeError with all it said if it ends in another way.
    """
    request = {"package": str(PACKAGE), "path": [*map(str, path)], "jobs": jobs}
    # Isolated: neither its folder nor this process's settings lead it to another triton.
    done = subprocess.run(
        [str(python), "-I", str(Path(__file__).with_name("_ascend_worker.py"))],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("TRITON_")},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        if last.startswith(("ImportError", "ModuleNotFoundError")):
            raise NotHereError(f"that Python does not have the compiler: {last}")
        raise RuntimeError(f"Ascend's compiler ended with {done.returncode}: {done.stderr}")
    return [read_lowering(result) for result in json.loads(done.stdout)]


# ------------------------------------------------------------------------------------- proofs


def job(form: Form, *, chip: str = CHIPS[0], **types: str) -> dict[str, Any]:
    """A form of the vector-core kernel for the worker.

    `types` are Triton's names of arguments' types, `strides` that of all strides.
    """
    tiled = form.job(32)  # which does not matter here
    constants = {k: v for k, v in tiled["constants"].items() if k not in TILED_ONLY}
    absent = [] if form.has_q else ["q_ptr", "q_out_ptr"]
    absent += [] if form.has_kv else ["kv_ptr", "cache_ptr", "cache_bf16_ptr", "slot_ptr"]
    absent += [] if form.kv_norm else ["kv_weight_ptr"]
    return {
        "kernel": "dsv4_prologue.kernels.vector_core:prologue_kernel",
        "types": tiled["types"] | types,
        "constants": constants | dict.fromkeys(absent),
        "target": chip,
    }


def tile_jobs(largest: int) -> dict[str, dict[str, Any]]:
    """A job for each number of heads a program that a plan can choose."""
    tiles = [1 << power for power in range(largest.bit_length())]
    return {f"{n} heads a program": job(Form(Launch(1, n), heads=3 * n)) for n in tiles}


def form_jobs(largest: int) -> dict[str, dict[str, Any]]:
    """A job for each role and flag that changes the code. Being in place does not."""
    whole = Launch(1, largest)
    padded = Form(whole, heads=largest + 8, heads_out=2 * largest)
    everything = replace(padded, kv_norm=True, index_dtype="i32", table_dtype="bf16")
    return {
        "q only": job(Form(whole, has_kv=False)),
        "kv only": job(Form(whole, has_q=False)),
        "no norm": job(Form(whole, q_norm=False)),
        "no rope": job(Form(whole, q_rope=False)),
        "no norm, no rope": job(Form(whole, q_norm=False, q_rope=False)),
        "kv norm": job(Form(whole, kv_norm=True)),
        "kv norm, f32": job(Form(whole, kv_norm=True), kv_weight_ptr="*fp32"),
        "padded heads": job(padded),
        "padded heads, no norm": job(replace(padded, q_norm=False)),
        "padded heads, no rope": job(replace(padded, q_rope=False)),
        "padded heads, one a program": job(Form(heads=5, heads_out=7)),
        "one head": job(Form(heads=1)),
        "int32 indices": job(Form(whole, index_dtype="i32")),
        "bf16 table": job(Form(whole, table_dtype="bf16")),
        "strides beyond 2**31": job(Form(whole), strides="i64"),
        "pages of 1": job(Form(whole, page_tokens=1)),
        "pages of 3": job(Form(whole, page_tokens=3)),
        "everything at once": job(everything, strides="i64"),
    }


def reader_jobs() -> dict[str, dict[str, Any]]:
    """A job for each kind of slots that the reader takes."""
    jobs = {f"{dtype} slots": GatherForm(index_dtype=dtype).job(32) for dtype in ("i64", "i32")}
    return {
        name: {key: one[key] for key in ("kernel", "types", "constants")} | {"target": CHIPS[0]}
        for name, one in jobs.items()
    }


def chip_jobs() -> dict[str, dict[str, Any]]:
    """A job for each chip of the name, to learn how many vector cores it has."""
    return {chip: job(Form(heads=1, has_kv=False), chip=chip) for chip in CHIPS}


def _lowered_proof(
    card: Card, name: str, lowerings: Mapping[str, Lowering], reason: str, *, slow: bool
) -> Proof:
    """That nothing is wrong with any form; `slow` as `faults` takes it."""
    detail = {form: lowering.to_dict() for form, lowering in lowerings.items()}
    wrong = {form: said for form, one in lowerings.items() if (said := faults(one, slow=slow))}
    if wrong:
        refused = "; ".join(f"{form}: {', '.join(said)}" for form, said in wrong.items())
        return Proof(card.name, name, "refused", refused, detail)
    most = max(lowerings.values(), key=lambda lowering: lowering.ub_bytes)
    accepted = (
        f"{len(lowerings)} forms accepted without a word by triton-ascend 3.2.0 and "
        f"ascendnpu-ir 1.2.0; at most {most.ub_bytes} of {most.ub_limit} bytes of Unified Buffer"
    )
    return Proof(card.name, name, "proved", f"{accepted}; {reason}", detail)


def _forms_proof(card: Card, name: str, lowerings: Mapping[str, Lowering]) -> Proof:
    reason = (
        "no scalar loop, no scalar access but to slot and position, no pointer cast, every "
        "rounding to nearest even; what the closed code generator makes of it is not proved"
    )
    return _lowered_proof(card, name, lowerings, reason, slow=True)


def _reader_proof(card: Card, name: str, lowerings: Mapping[str, Lowering]) -> Proof:
    loops = max(len(lowering.loops) for lowering in lowerings.values())
    reason = f"{loops} scalar loops make it slow: it is for checks, not for serving"
    return _lowered_proof(card, name, lowerings, reason, slow=False)


def _chips_proof(card: Card, name: str, lowerings: Mapping[str, Lowering]) -> Proof:
    multiple_of = card.limits.multiple_of if card.limits is not None else 1
    cores = {chip: lowering.vector_cores for chip, lowering in lowerings.items()}
    wrong = [f"{chip} has {n}" for chip, n in cores.items() if not n or multiple_of % n]
    if wrong:
        reason = f"grids are multiples of {multiple_of}, and of vector cores {', '.join(wrong)}"
        return Proof(card.name, name, "refused", reason, cores)
    counts = " or ".join(map(str, sorted({*cores.values()})))
    reason = f"grids are multiples of {multiple_of}, and the chips have {counts} vector cores"
    return Proof(card.name, name, "proved", reason, cores)


def prove(card: Card) -> list[Proof]:
    """Prove what can be of a card that runs the vector-core kernel: four proofs.

    Makes the environment if there is none. Where that fails, the proofs are not provable here.
    """
    largest = max(rule.launch.heads_per_tile for rule in card.rules)
    proofs = {
        "Ascend's compiler, every tile": (_forms_proof, tile_jobs(largest)),
        "Ascend's compiler, every form": (_forms_proof, form_jobs(largest)),
        "Ascend's compiler, the reader": (_reader_proof, reader_jobs()),
        "grids, every chip": (_chips_proof, chip_jobs()),
    }
    jobs = [one for _, named in proofs.values() for one in named.values()]
    try:
        lowerings = iter(lower(jobs, python=find_environment() or make_environment()))
    except NotHereError as error:
        return [Proof(card.name, name, "not provable here", str(error)) for name in proofs]
    return [
        proof(card, name, {form: next(lowerings) for form in named})
        for name, (proof, named) in proofs.items()
    ]


# --------------------------------------------------------------------------------------- grids


def vector_core_order(
    num_cores: int, *, repeats: int = 0, seed: int = 0
) -> Callable[[int], list[int]]:
    """How the card may run a grid: in any order, and program 0 `repeats` times more.

    The latter it does to a grid that exceeds its cores and is no multiple of them. For
    `interpreter.program_order`.
    """

    def order(grid: int) -> list[int]:
        again = repeats if grid > num_cores and grid % num_cores else 0
        programs = [*range(grid), *[0] * again]
        random.Random(seed).shuffle(programs)
        return programs

    return order
