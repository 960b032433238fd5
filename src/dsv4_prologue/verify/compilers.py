"""What real compilers make of the kernels, with no card: cubin and hsaco, read back.

Upstream Triton compiles to the end for NVIDIA and AMD on any machine. Compiled are the kernels as
`launch` would launch them (`Form`), in a process of their own (`_compile_worker`); read from what
comes out are registers, spills, shared memory, barriers and the widths of loads and stores
(`Artefact`). A compiler that refuses is a `Refusal`, with its own words.

`prove` does this for a card: on the target that is its own, or on those that stand for it. Where a
vendor's own LLVM begins, nothing is proved here. Neither torch nor a GPU is needed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from dsv4_prologue.cards.card import Card
from dsv4_prologue.planning import DEFAULT_LAUNCH, Launch, tile_width
from dsv4_prologue.verify.proof import Proof, Verdict

# ---------------------------------------------------------------------------- what is compiled


class Target(NamedTuple):
    """What upstream Triton compiles for: "cuda" and a capability, or "hip" and a gfx name."""

    backend: str
    arch: int | str

    @property
    def lanes(self) -> int:
        """Lanes of a warp: upstream decides it by the target, whatever it is asked for."""
        return 64 if str(self.arch).startswith("gfx9") else 32

    def __str__(self) -> str:
        return {"cuda": f"sm_{self.arch}", "hip": f"{self.arch}"}.get(
            self.backend, f"{self.backend}:{self.arch}"
        )


def _unusual(form: Form | GatherForm) -> list[str]:
    """The fields that are not the usual ones, in words; `launch` is left out."""
    values = {one.name: getattr(form, one.name) for one in fields(form) if one.name != "launch"}
    usual = {one.name: one.default for one in fields(form)}
    return [f"{name}={value}" for name, value in values.items() if value != usual[name]]


@dataclass(frozen=True)
class Form:
    """What a launch specialises the prologue's kernel on. In place or not is the same code.

    `index_dtype` (of slots and positions) and `table_dtype` (of cosines and sines) are Triton's
    names. `aligned`: pointers and strides divisible by 16, as those of any allocator's tensors are.
    """

    launch: Launch = DEFAULT_LAUNCH
    heads: int = 64
    heads_out: int | None = None  # None: as many as heads
    fp8_cast: str = "compiler"
    has_q: bool = True
    has_kv: bool = True
    q_norm: bool = True
    q_rope: bool = True
    kv_norm: bool = False
    page_tokens: int = 64
    index_dtype: str = "i64"
    table_dtype: str = "fp32"
    aligned: bool = True

    def __str__(self) -> str:
        return ", ".join([str(self.launch), *_unusual(self)])

    def job(self, lanes: int) -> dict[str, Any]:
        """The form on warps of so many lanes, as the worker takes it."""
        heads_out = self.heads if self.heads_out is None else self.heads_out
        types = {
            "position_ptr": f"*{self.index_dtype}",
            "cos_sin_ptr": f"*{self.table_dtype}",
            "eps": "fp32",
        }
        if self.has_q:
            types |= {"q_ptr": "*bf16", "q_out_ptr": "*bf16"}
        if self.has_kv:
            types |= {"kv_ptr": "*bf16", "slot_ptr": f"*{self.index_dtype}"}
            types |= {"cache_ptr": "*u8", "cache_bf16_ptr": "*bf16"}
        if self.kv_norm:
            types["kv_weight_ptr"] = "*bf16"
        constants = {
            "HEADS": self.heads if self.has_q else 0,
            "HEADS_OUT": heads_out if self.has_q else 0,
            "PAGE_TOKENS": self.page_tokens,
            "TOKENS": self.launch.tokens_per_tile,
            "HEADS_PER_TILE": self.launch.heads_per_tile,
            "KV_TOKENS": self.launch.kv_tokens_per_tile,
            "WIDTH": tile_width(lanes),
            "HAS_Q": self.has_q,
            "HAS_KV": self.has_kv,
            "Q_NORM": self.q_norm,
            "Q_ROPE": self.q_rope,
            "KV_NORM": self.kv_norm,
            "FP8_CAST": self.fp8_cast,
            "DEPENDENT": self.launch.dependent,
        }
        options = {
            "num_warps": self.launch.num_warps,
            "num_stages": self.launch.num_stages,
            "enable_fp_fusion": False,
        }
        if self.launch.dependent != "no":
            options["launch_pdl"] = True
        return {
            "kernel": "dsv4_prologue.kernels.tiled:prologue_kernel",
            "types": types,
            "constants": constants,
            "aligned": self.aligned,
            "options": options,
        }


@dataclass(frozen=True)
class GatherForm:
    """What a launch specialises the reader's kernel on; the defaults are `launch`'s."""

    rows_per_tile: int = 4
    num_warps: int = 4
    page_tokens: int = 64
    index_dtype: str = "i64"
    aligned: bool = True

    def __str__(self) -> str:
        return ", ".join(["reader", *_unusual(self)])

    def job(self, lanes: int) -> dict[str, Any]:
        """The form as the worker takes it, the same on any lanes."""
        del lanes
        return {
            "kernel": "dsv4_prologue.kernels.gather:gather_kernel",
            "types": {
                "out_ptr": "*bf16",
                "cache_ptr": "*u8",
                "cache_bf16_ptr": "*bf16",
                "slot_ptr": f"*{self.index_dtype}",
            },
            "constants": {"PAGE_TOKENS": self.page_tokens, "ROWS": self.rows_per_tile},
            "aligned": self.aligned,
            "options": {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False},
        }


# ------------------------------------------------------------------------------ what comes out


@dataclass(frozen=True)
class Artefact:
    """Figures read from machine code. Instructions are counted as they stand, not as executed."""

    target: Target
    registers: int  # of a lane, 32 bits each; AMD's vector registers
    spills: int  # NVIDIA: instructions that touch local memory; AMD: vector registers spilled
    local_bytes: int  # of a lane: its stack, and what was spilled to memory
    shared_bytes: int  # of a program
    instructions: int
    loads: Mapping[int, int]  # from global memory: bits of an access -> instructions
    stores: Mapping[int, int]
    shared_accesses: int  # loads from and stores to shared memory
    shuffles: int  # exchanges between lanes that are instructions of their own
    barriers: int
    atomics: int
    fp8_casts: int
    dependent: str  # as `Launch.dependent`, but "late" if memory is touched before the wait
    occupancy: int | None  # warps a SIMD unit holds at once, where the compiler tells (AMD)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {**asdict(self), "target": str(self.target)}


@dataclass(frozen=True)
class Refusal:
    """A compiler that would not, in its own words."""

    target: Target
    reason: str


def _count(mnemonics: Sequence[str], pattern: str) -> int:
    return sum(re.match(pattern, mnemonic) is not None for mnemonic in mnemonics)


def _sass_widths(mnemonics: Sequence[str], pattern: str) -> Mapping[int, int]:
    widths: Counter[int] = Counter()
    for mnemonic in mnemonics:
        if re.match(pattern, mnemonic):
            width = re.search(r"\.[US]?(8|16|64|128|256)\b", mnemonic)
            widths[int(width[1]) if width else 32] += 1
    return dict(widths)


def _sass_dependent(mnemonics: Sequence[str]) -> str:
    """How the code takes part in a dependent launch: ACQBULK waits, PREEXIT lets the next go."""
    order = [name for name in mnemonics if re.match(r"(ACQBULK|PREEXIT|LDG?|STG?)\b", name)]
    if "ACQBULK" not in order and "PREEXIT" not in order:
        return "no"
    if order[0] != "ACQBULK":
        return "late"
    return "early" if "PREEXIT" in order else "wait"


def read_sass(target: Target, text: str, shared_bytes: int) -> Artefact:
    """Read the figures from what `cuobjdump -res-usage -sass` printed."""
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([A-Z][\w.]*)"
    mnemonics = [name for name in re.findall(line, text, re.MULTILINE) if name != "NOP"]
    return Artefact(
        target=target,
        registers=int(used["REG"]),
        spills=_count(mnemonics, r"(LDL|STL)\b"),
        local_bytes=int(used["STACK"]) + int(used["LOCAL"]),
        shared_bytes=shared_bytes,
        instructions=len(mnemonics),
        loads=_sass_widths(mnemonics, r"LDG?\b"),
        stores=_sass_widths(mnemonics, r"STG?\b"),
        shared_accesses=_count(mnemonics, r"(LDS|STS|LDSM|STSM)\b"),
        shuffles=_count(mnemonics, r"SHFL\b"),
        barriers=_count(mnemonics, r"BAR\b"),
        atomics=_count(mnemonics, r"(ATOM|RED(?!UX))"),
        fp8_casts=_count(mnemonics, r"F2FP\..*E4M3"),
        dependent=_sass_dependent(mnemonics),
        occupancy=None,
    )


def _amdgcn_widths(mnemonics: Sequence[str], kind: str) -> Mapping[int, int]:
    widths: Counter[int] = Counter()
    for mnemonic in mnemonics:
        if access := re.fullmatch(rf"(?:global|flat|buffer)_{kind}_(\w+)", mnemonic):
            if words := re.fullmatch(r"dword(?:x(\d))?", access[1]):
                widths[32 * int(words[1] or 1)] += 1
            else:
                widths[16 if "short" in access[1] else 8] += 1
    return dict(widths)


def read_amdgcn(target: Target, text: str, shared_bytes: int) -> Artefact:
    """Read the figures from AMD's assembly, of the gfx9 line."""
    used = dict(re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", text, re.MULTILINE))
    mnemonics = re.findall(r"^\t((?:s|v|ds|global|flat|buffer|scratch)_\w+)", text, re.MULTILINE)
    occupancy = re.search(r"^; Occupancy: (\d+)", text, re.MULTILINE)
    return Artefact(
        target=target,
        registers=int(used["vgpr_count"]),  # those for accumulation are among them
        spills=int(used["vgpr_spill_count"]),  # scalar ones spill to vector ones, not to memory
        local_bytes=int(used["private_segment_fixed_size"]),
        shared_bytes=shared_bytes,
        instructions=len(mnemonics),
        loads=_amdgcn_widths(mnemonics, "load"),
        stores=_amdgcn_widths(mnemonics, "store"),
        shared_accesses=_count(mnemonics, r"ds_(read|write|load|store)"),
        shuffles=_count(mnemonics, r"ds_\w*(permute|swizzle)"),
        barriers=_count(mnemonics, r"s_barrier"),
        atomics=_count(mnemonics, r"\w+_atomic"),
        fp8_casts=_count(mnemonics, r"v_cvt_\w*fp8"),
        dependent="no",
        occupancy=int(occupancy[1]) if occupancy else None,
    )


# --------------------------------------------------------------------------------- compiling

WORKERS = 2  # processes that compile at once
_done: dict[str, dict[str, Any]] = {}  # results by job, so that cards with one target share them


def _diagnosis(log: str) -> str | None:
    """The compiler's first complaint in what it wrote to standard error."""
    found = re.search(r"(LLVM ERROR: .*)|(?:error|fatal) *: (.*)", log)
    return found[1] or found[2] if found else None


def _worker(jobs: Sequence[str]) -> list[dict[str, Any]]:
    """Give the jobs to one process after another, each taking over where the last one aborted."""
    # The child finds what this process finds, and is not told to interpret.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("a+") as log:
        environment["TRITON_CACHE_DIR"] = folder
        while len(results) < len(jobs):
            done = subprocess.run(
                [sys.executable, "-m", "dsv4_prologue.verify._compile_worker"],
                input="".join(f"{job}\n" for job in jobs[len(results) :]),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=environment,
                check=False,
            )
            results += [json.loads(line) for line in done.stdout.splitlines()]
            if not done.returncode:
                break
            log.seek(0)
            said = log.read()
            complaint = _diagnosis(said)
            if done.returncode > 0 or complaint is None:  # an exception, or a crash without a word
                raise RuntimeError(f"the compile worker ended with {done.returncode}: {said}")
            results.append({"refusal": complaint, "log": said})
    return results


def run_jobs(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Have the worker do each job, none of them twice in a process. Raises what is no refusal."""
    keys = [json.dumps(job, sort_keys=True) for job in jobs]
    todo = [key for key in dict.fromkeys(keys) if key not in _done]
    # A process takes a second to start: one of its own is for a handful of jobs at least.
    workers = min(WORKERS, os.cpu_count() or 1, -(-len(todo) // 8))
    if workers:
        shares = [todo[start::workers] for start in range(workers)]
        with ThreadPoolExecutor(workers) as pool:
            for share, results in zip(shares, pool.map(_worker, shares), strict=True):
                _done.update(zip(share, results, strict=True))
    return [_done[key] for key in keys]


def compile_forms(
    forms: Sequence[tuple[Form | GatherForm, Target]], **options: Any
) -> list[Artefact | Refusal]:
    """Compile each form for its target, to machine code; `options` go to Triton's backend."""
    jobs = []
    for form, target in forms:
        job = form.job(target.lanes)
        job["options"] |= options
        jobs.append({**job, "target": (*target, target.lanes)})
    outcomes: list[Artefact | Refusal] = []
    for (_, target), result in zip(forms, run_jobs(jobs), strict=True):
        if "refusal" in result:
            outcomes.append(Refusal(target, _diagnosis(result["log"]) or result["refusal"]))
        else:
            read = read_sass if target.backend == "cuda" else read_amdgcn
            outcomes.append(read(target, result["text"], result["shared"]))
    return outcomes


def compile_form(form: Form | GatherForm, target: Target, **options: Any) -> Artefact | Refusal:
    """Compile one form for one target: see `compile_forms`, which is quicker for several."""
    return compile_forms([(form, target)], **options)[0]


# ------------------------------------------------------------------------------------ proofs


@dataclass(frozen=True)
class StandIn:
    """Targets that stand for a card whose own no upstream Triton compiles for, and why they do."""

    targets: tuple[Target, ...]
    why: str
    refused: Target | None = None  # the card's own, whose refusal is what makes a stand-in needed


#: By card. A card that is not here is compiled for the targets its `match` names.
STAND_INS: Final[Mapping[str, StandIn]] = {
    "hygon-bw1000": StandIn(
        (Target("hip", "gfx90a"), Target("hip", "gfx942")),
        "gfx9 too: 64 lanes and the same kinds of instructions",
        refused=Target("hip", "gfx936"),
    ),
    "metax-c550": StandIn(
        (), "upstream's cuda has 32 lanes, MACA's 64: its lanes are proved apart"
    ),
    "mthreads-s5000": StandIn(
        (Target("cuda", 90),), "32 lanes and an E4M3 cast: the tile and its layouts, not the llc"
    ),
    "thead-zw810e": StandIn(
        (Target("cuda", 80),), "its compiler gives NVIDIA's two refusals of the E4M3 cast for sm_80"
    ),
}

#: What sm_80 says to the compiler's cast: Triton by its policy, and LLVM where that is overridden.
#: Both are what ZW810E's compiler was reported to say.
REFUSED_BY_POLICY: Final = (
    "type fp8e4nv not supported in this architecture. "
    "The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')"
)
REFUSED_BY_LLVM: Final = (
    "LLVM ERROR: Conversion from/to f8e4m3nv is only supported on compute capability >= 89"
)


class Core(NamedTuple):
    """What one multiprocessor (compute unit) holds at once."""

    registers: int  # 32 bits each
    programs: int
    warps: int


#: NVIDIA: CUDA programming guide, table of technical specifications per compute capability.
#: AMD: four SIMD units of 512 registers x 64 lanes, 8 waves each (CDNA instruction set guides).
_CDNA: Final = Core(4 * 512 * 64, 32, 32)
CORES: Final[Mapping[Target, Core]] = {
    Target("cuda", 80): Core(65536, 32, 64),
    Target("cuda", 86): Core(65536, 16, 48),
    Target("cuda", 89): Core(65536, 24, 48),
    Target("cuda", 90): Core(65536, 32, 64),
    Target("cuda", 100): Core(65536, 32, 64),
    Target("cuda", 120): Core(65536, 24, 48),
    Target("hip", "gfx90a"): _CDNA,
    Target("hip", "gfx942"): _CDNA,
    Target("hip", "gfx950"): _CDNA,
}

#: Rows of 1 KiB that a multiprocessor must be able to hold at once, so that memory is kept busy.
#: Little's law with round numbers, not a measurement: 4.8 TB/s x 0.8 us / 132 is 29 KB on an H200.
ROWS_IN_FLIGHT = 32


class Ceiling(NamedTuple):
    """The most registers a lane may use, and the arithmetic behind it."""

    registers: int
    reason: str


def register_ceiling(target: Target, launch: Launch) -> Ceiling | None:
    """The most registers a lane may use for ROWS_IN_FLIGHT rows to be resident; None: not known.

    Or for as many rows as the limits on programs and warps let be resident at all.
    """
    core = CORES.get(target)
    if core is None:
        return None
    rows = launch.tokens_per_tile * launch.heads_per_tile
    programs = min(-(-ROWS_IN_FLIGHT // rows), core.programs, core.warps // launch.num_warps)
    lanes = launch.num_warps * target.lanes
    # Given out by eights; 255 is the most an instruction can name.
    registers = min(core.registers // (programs * lanes) // 8 * 8, 255)
    reason = f"{programs} programs x {lanes} lanes share {core.registers} registers"
    return Ceiling(registers, reason)


def row_width(rows: int, lanes: int, lanes_of_warp: int) -> int:
    """Bits of one access of a lane to parts of rows of bf16, spread evenly over a program's lanes.

    `lanes_of_warp` decides how wide the parts are.
    """
    return min(128, rows * 16 * tile_width(lanes_of_warp) // lanes)


def shared_ceiling(rows: int, num_warps: int) -> int:
    """Bytes of shared memory a tile may take, at most.

    None where each warp has a row of its own; else what a warp tells the others of a shared row, a
    sum or eight scale bytes.
    """
    return 0 if rows >= num_warps else 8 * num_warps


def _faults_in_rows(form: Form, artefact: Artefact) -> list[str]:
    """What is wrong with the accesses of a form of one role, Q or KV."""
    loads, stores, launch = artefact.loads, artefact.stores, form.launch
    warp = artefact.target.lanes
    lanes = launch.num_warps * warp
    rows = launch.tokens_per_tile * launch.heads_per_tile
    if form.has_kv:
        rows = launch.kv_tokens_per_tile
    width = 128 if form.has_q else row_width(rows, lanes, warp)
    expected = max(1, rows * 8192 // (width * lanes))
    faults = []
    # Besides rows, Q loads cosines and sines, as widely, and a position a row.
    narrow = sum(loads.values()) - loads.get(width, 0)
    if loads.get(width, 0) < expected or (form.has_q and narrow > rows):
        faults.append(f"rows are not loaded {width} bits at once: {loads}")
    if form.has_q and stores != {128: expected}:
        faults.append(f"not {expected} 128-bit stores of Q and nothing else: {stores}")
    if artefact.shared_bytes > shared_ceiling(rows, launch.num_warps):
        faults.append(f"{artefact.shared_bytes} B of shared memory")
    # Of KV the part with the rotated dims once, and all of it as codes, of half the bits.
    tails = max(1, expected * tile_width(warp) // 512)
    if form.has_kv and stores != {width: tails, width // 2: expected}:
        faults.append(
            f"not {tails} {width}-bit and {expected} {width // 2}-bit stores of KV: {stores}"
        )
    return faults


def _faults(form: Form | GatherForm, artefact: Artefact) -> list[str]:
    """What is wrong with one artefact, in words."""
    faults = []
    if artefact.spills or artefact.local_bytes:
        faults.append(f"spills: {artefact.spills}, {artefact.local_bytes} B of local memory")
    if artefact.atomics:
        faults.append(f"{artefact.atomics} atomic operations")
    if isinstance(form, GatherForm):
        return faults
    if artefact.dependent != form.launch.dependent:
        faults.append(f"dependent launch: {artefact.dependent}, not {form.launch.dependent}")
    # Of rarer forms no more is asked.
    if form == Form(form.launch, fp8_cast=form.fp8_cast, has_q=form.has_q, has_kv=form.has_kv):
        ceiling = register_ceiling(artefact.target, form.launch)
        if ceiling is not None and artefact.registers > ceiling.registers:
            faults.append(
                f"{artefact.registers} registers a lane, more than {ceiling.registers}: "
                f"{ceiling.reason}"
            )
        if not (form.has_q and form.has_kv):
            faults += _faults_in_rows(form, artefact)
    return faults


#: What the tools say who know no such target: then nothing is shown, for or against.
CANNOT: Final = re.compile(
    r"unsupported target|compatible backends for target|is not defined for option 'gpu-name'"
    r"|Cannot decode architecture|needs Triton 3\.6"
)


def _targets(card: Card) -> list[Target]:
    """The targets that the card's `match` names, patterns by those of them we know."""
    if card.match is None:
        return []
    found = []
    for backend in card.match.backends:
        for arch in card.match.arches:
            known = [t for t in CORES if t.backend == backend and fnmatchcase(str(t.arch), arch)]
            if not known and backend in {"cuda", "hip"} and "*" not in arch:
                known = [Target(backend, int(arch) if backend == "cuda" else arch)]
            found += known
    return found


def _forms(card: Card) -> list[Form | GatherForm]:
    """All a card's launches, whole and by role; and what else a call can ask of the kernels."""
    forms: list[Form | GatherForm] = []
    for launch in card.launches:
        whole = Form(launch, fp8_cast=card.fp8_cast)
        forms += [whole, replace(whole, has_kv=False), replace(whole, has_q=False)]
    whole = Form(card.launches[-1], fp8_cast=card.fp8_cast)
    return [
        *forms,
        replace(whole, heads=128, kv_norm=True, index_dtype="i32", table_dtype="bf16"),
        replace(whole, heads=5, heads_out=8, q_norm=False, aligned=False),
        replace(whole, q_rope=False, page_tokens=1),
        GatherForm(),
        GatherForm(index_dtype="i32", aligned=False),
    ]


def _summary(form: Form, artefact: Artefact) -> str:
    ceiling = register_ceiling(artefact.target, form.launch)
    most = f" (at most {ceiling.registers}: {ceiling.reason})" if ceiling else ""
    return (
        f"{form.launch}: {artefact.registers} registers a lane{most}, {artefact.shared_bytes} B of "
        f"shared memory, {artefact.barriers} barriers"
    )


def _prove_target(card: Card, target: Target, why: str) -> Proof:
    """Compile all forms of a card for one target, and read them back."""
    forms = _forms(card)
    outcomes = compile_forms([(form, target) for form in forms])
    artefacts: dict[Form | GatherForm, Artefact] = {}
    faults: list[str] = []
    for form, outcome in zip(forms, outcomes, strict=True):
        if isinstance(outcome, Artefact):
            artefacts[form] = outcome
            faults += [f"{form}: {fault}" for fault in _faults(form, outcome)]
        elif CANNOT.search(outcome.reason):
            return Proof(card.name, f"compiler {target}", "not provable here", outcome.reason)
        else:
            faults.append(f"{form}: {outcome.reason}")
    detail = {
        "why_this_target": why,
        "forms": {str(form): artefact.to_dict() for form, artefact in artefacts.items()},
    }
    if faults:
        return Proof(card.name, f"compiler {target}", "refused", "; ".join(faults), detail)
    whole = [Form(launch, fp8_cast=card.fp8_cast) for launch in card.launches]
    reason = (
        f"{len(forms)} forms compile without spills and atomics, rows in whole accesses; "
        + "; ".join(_summary(form, artefacts[form]) for form in whole)
    )
    return Proof(card.name, f"compiler {target}", "proved", reason, detail)


def _prove_cast_refused(card: Card, target: Target) -> Proof:
    """The compiler's E4M3 cast must be refused where a card's file says that it has none."""
    native = Form(fp8_cast="compiler")
    by_policy = compile_form(native, target)
    by_llvm = compile_form(native, target, supported_fp8_dtypes=["fp8e5", "fp8e4b15", "fp8e4nv"])
    said = [o.reason if isinstance(o, Refusal) else "it compiles" for o in (by_policy, by_llvm)]
    held = said == [REFUSED_BY_POLICY, REFUSED_BY_LLVM]
    reason = f"the compiler's cast: {said[0]}; with that policy overridden: {said[1]}"
    return Proof(card.name, f"cast {target}", "proved" if held else "refused", reason)


def _prove_target_refused(card: Card, target: Target) -> Proof:
    """Upstream must still refuse the card's own target, or nothing should stand for it."""
    outcome = compile_form(Form(), target)
    if isinstance(outcome, Artefact):
        reason = "upstream compiles for it now: it needs nothing to stand for it"
        return Proof(card.name, f"target {target}", "refused", reason)
    verdict: Verdict = "proved" if "unsupported target" in outcome.reason else "not provable here"
    return Proof(card.name, f"target {target}", verdict, f"upstream says {outcome.reason}")


def prove(card: Card) -> list[Proof]:
    """Prove what upstream's compilers can about a card's launches of the tiled kernel.

    Takes half a second and more a form, some ten forms a target. Raises what is no refusal.
    """
    if card.kernel != "tiled":
        return []
    stand_in = STAND_INS.get(card.name) or StandIn(tuple(_targets(card)), "the card's own target")
    targets = [t for t in stand_in.targets if card.lanes in (None, t.lanes)]
    if importlib.util.find_spec("triton") is None:
        return [Proof(card.name, "compiler", "not provable here", "Triton is not installed")]
    if not targets:
        why = stand_in.why if card.name in STAND_INS else "upstream Triton has no target for it"
        return [Proof(card.name, "compiler", "not provable here", why)]
    proofs = []
    for target in targets:
        proof = _prove_target(card, target, stand_in.why)
        proofs.append(proof)
        known = proof.verdict != "not provable here"
        if known and target.backend == "cuda" and card.fp8_cast == "integer":
            proofs.append(_prove_cast_refused(card, target))
    if stand_in.refused is not None:
        proofs.append(_prove_target_refused(card, stand_in.refused))
    return proofs
