"""Run a launch on the CPU, round as a GPU does, and report every fault in its use of memory.

Triton's interpreter (`TRITON_INTERPRET=1`, set before Triton is imported) runs a kernel with numpy,
one program after another. Out of the box it truncates f32 to bf16, misrounds fp8, wraps int32 in
silence and touches whatever a pointer points at. `run` launches a kernel on it with

* **exact casts**: to nearest even; fp8 saturates; NaN stays NaN; every code decodes exactly.
  Elementwise arithmetic on bf16 or fp8, which would be done on bit patterns, is refused;
* **the overflow check** of Triton's own debug mode (`int32 overflow detected for operation mul`);
* **a memory check**, exact to the byte and per argument. The top 16 bits of a pointer name the
  tensor argument it was made from, so running off one tensor cannot land unseen in the next, and
  the gaps of a strided view are out of bounds too. Who stored and who read each byte is kept in a
  shadow that overlapping arguments share (`q` and `q_out` in place, two views of one cache).

What it cannot see: concurrency itself, and a program's own loads and stores of one byte out of
order across warps (a load is taken to come before a later store).

The interpreter is one global object of Triton's. Its hooks are replaced only while a launch of ours
runs, under a lock, and put back whatever happens: launches from several threads take turns. Other
people's interpreted kernels must not run at that time; they could not anyway, for the interpreter
keeps the program id in that object too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as ti
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Finding",
    "Kind",
    "MemoryFault",
    "allow_races",
    "exact_casts",
    "only_program",
    "program_order",
    "run",
]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _require(triton_version: str, numpy_version: str) -> None:
    if _version(triton_version) < (3, 2):
        raise ImportError(
            f"the interpreter of Triton {triton_version} computes wrongly with numpy 2: "
            "Triton 3.2 or newer is needed"
        )
    if _version(numpy_version) < (2, 0):
        raise ImportError(f"numpy 2 or newer is needed, found {numpy_version}")


_require(triton.__version__, np.__version__)

_LOCK = threading.RLock()


@contextlib.contextmanager
def _replaced(target: object, **attributes: object) -> Iterator[None]:
    """Set attributes of one object for a while; those that it did not own are deleted again."""
    own = dict(vars(target))
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(target, name, own[name])
            else:
                delattr(target, name)


# ------------------------------------------------------------------------------------------ casts


class _Format(NamedTuple):
    """A float that numpy lacks: the interpreter holds it as an unsigned integer."""

    dtype: torch.dtype
    largest: float  # what exceeds it saturates
    nan: int  # the one NaN that a cast makes


#: NaNs are those of NVIDIA's cvt; FNUZ formats have a single one.
_FORMATS: Final[dict[Any, _Format]] = {
    tl.bfloat16: _Format(torch.bfloat16, math.inf, 0x7FFF),
    tl.float8e4nv: _Format(torch.float8_e4m3fn, 448.0, 0x7F),
    tl.float8e5: _Format(torch.float8_e5m2, 57344.0, 0x7F),
    tl.float8e4b8: _Format(torch.float8_e4m3fnuz, 240.0, 0x80),
    tl.float8e5b16: _Format(torch.float8_e5m2fnuz, 57344.0, 0x80),
}
#: Through f32 these would be rounded twice, or are not implemented at all.
_NOT_EXACT: Final = (tl.float64, tl.float8e4b15)


def _convert(data: NDArray[Any], source: Any, target: Any) -> NDArray[Any]:
    """`data` of Triton's type `source` as the interpreter holds `target`; one of them is a _Format.

    Both directions pass through f32, which holds every value of every format. An integer beyond
    2**24 is rounded to f32 first, as GPUs without a direct cast do.
    """
    if source in _NOT_EXACT or target in _NOT_EXACT:
        raise NotImplementedError(f"no exact cast {source} -> {target}: cast to float32 first")
    if source in _FORMATS:
        # A copy, since torch takes no read-only array, and broadcasts are read-only.
        bits = torch.from_numpy(np.array(data, order="C").view(f"i{data.itemsize}"))
        values = bits.view(_FORMATS[source].dtype).float().numpy()
    else:
        values = np.array(data, dtype=np.float32, order="C")
    if target not in _FORMATS:
        return values.astype(ti._get_np_dtype(target))
    dtype, largest, nan = _FORMATS[target]
    # torch saturates in some builds and gives NaN in others; the clamp makes it the same.
    rounded = torch.from_numpy(values).clamp(-largest, largest).to(dtype)
    codes: NDArray[Any] = rounded.view(getattr(torch, f"int{8 * rounded.itemsize}")).numpy()
    codes = codes.view(f"u{rounded.itemsize}")
    codes[np.isnan(values)] = nan
    return codes


@contextlib.contextmanager
def exact_casts() -> Iterator[None]:
    """Give the interpreter the GPU's casts while the block runs. `run` does this by itself.

    Casts between f32, f16 or integers and bf16, fp8e4nv, fp8e5, fp8e4b8 (FNUZ) and fp8e5b16 (FNUZ)
    are exact, but for integers beyond 2**24. Launches of other threads wait for the block's end.

    Raises, wrapped by Triton in its `InterpreterError`: `NotImplementedError` for other casts of
    these types and other rounding modes, `TypeError` for arithmetic on bf16 or fp8.
    """
    with _LOCK:
        builder = ti.interpreter_builder
        plain_cast, plain_binary_op = builder.cast_impl, builder.binary_op

        def cast_impl(value: Any, target: Any) -> Any:
            source, target = value.dtype.scalar, target.scalar
            if source in _FORMATS or target in _FORMATS:
                return ti.TensorHandle(_convert(value.data, source, target), target)
            return plain_cast(value, target)

        def create_fp_to_fp(value: Any, target: Any, rounding_mode: Any) -> Any:
            if rounding_mode not in (None, ti._ir.ROUNDING_MODE.RTNE):
                raise NotImplementedError(f"only rounding to nearest even, not {rounding_mode}")
            return cast_impl(value, target)

        def binary_op(lhs: Any, rhs: Any, op: Any) -> Any:
            if lhs.dtype.scalar in _FORMATS:
                raise TypeError(f"arithmetic on {lhs.dtype.scalar}: cast to float32 first")
            return plain_binary_op(lhs, rhs, op)

        # Triton before 3.9 refuses the FNUZ types when it makes them types of the interpreter.
        with (
            _replaced(tl.float8e4b8, to_ir=lambda _: tl.float8e4b8),
            _replaced(tl.float8e5b16, to_ir=lambda _: tl.float8e5b16),
            _replaced(
                builder, cast_impl=cast_impl, create_fp_to_fp=create_fp_to_fp, binary_op=binary_op
            ),
        ):
            yield


# ----------------------------------------------------------------------------------------- memory

Kind = Literal[
    "load out of bounds",
    "store out of bounds",
    "misaligned load",
    "misaligned store",
    "two lanes store one byte",
    "stored twice by one program",
    "stored by two programs",
    "read back without a barrier",
    "read of another program's store",
    "store over another program's read",
]


class Finding(NamedTuple):
    """One kind of fault of one program in one argument."""

    kind: Kind
    argument: str  # the kernel's tensor argument whose pointer was used
    program: int  # x + y * grid_x + z * grid_x * grid_y
    num_bytes: int
    first_byte: int  # lowest faulty byte, counted from the argument's first; negative is before it
    other_program: int | None = None  # the other side of a race, where it is known

    def __str__(self) -> str:
        other = "" if self.other_program is None else f" and program {self.other_program}"
        return (
            f"{self.kind}: argument {self.argument!r}, program {self.program}{other}, "
            f"{self.num_bytes} bytes, the first at byte {self.first_byte}"
        )


class MemoryFault(RuntimeError):  # noqa: N818 - a finding about a kernel, not an error of ours
    """A launch used memory wrongly; `findings` holds all, the message the first ten."""

    def __init__(self, kernel: str, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        lines = [f"memory faults in {kernel}:", *(f"  {finding}" for finding in findings[:10])]
        if len(findings) > 10:
            lines.append(f"  and {len(findings) - 10} more")
        super().__init__("\n".join(lines))


_TAG_SHIFT = 48  # addresses of user space are below 2**48, so the bits from here on are free
_ADDRESS = np.uint64((1 << _TAG_SHIFT) - 1)
_NO_ARGUMENT = "(not a tensor argument)"
_SEVERAL = -1  # in a shadow of readers: more than one program


def _lazy_zeros(count: int) -> NDArray[np.int32]:
    """Zeros that take memory only where they are written, and reserve none before."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, 4 * count, flags=flags)
    pages.madvise(mmap.MADV_NOHUGEPAGE)  # a byte would take 2 MiB
    return np.frombuffer(pages, dtype=np.int32)


def _scalar(value: np.generic, dtype: Any) -> Any:
    """A scalar argument, as the interpreter itself makes one."""
    return tl.tensor(ti.TensorHandle(np.array([value]), dtype), dtype)


class _Shadow:
    """Who stored and who read each byte of a span of addresses (0 = nobody)."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.start = start
        self.writer = _lazy_zeros(num_bytes)
        self.reader = _lazy_zeros(num_bytes)


class _Argument:
    """The bytes of one tensor argument: runs of `run` bytes, repeated along `steps`."""

    def __init__(self, name: str, tag: int, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise TypeError(f"{name}: the interpreter takes CPU tensors, got {tensor.device}")
        item = tensor.element_size()
        sides = zip(tensor.stride(), tensor.shape, strict=True)
        steps = sorted((item * stride, size) for stride, size in sides if stride and size > 1)
        self.name = name
        self.start = tensor.data_ptr()
        self.address = np.uint64((tag << _TAG_SHIFT) + self.start)  # as the kernel sees it
        self.pointer = _scalar(self.address, ti._implicit_cvt(tensor).type)
        self.num_bytes = item + sum(step * (size - 1) for step, size in steps)
        if tensor.numel() == 0:
            self.num_bytes, steps = 0, []
        self.run = item
        while steps and steps[0][0] == self.run:
            self.run *= steps.pop(0)[1]
        reach = self.run
        for step, size in steps:
            if step < reach:  # rows that overlap one another: taken as one run, without gaps
                self.run, steps = self.num_bytes, []
                break
            reach += step * (size - 1)
        self.steps = steps[::-1]
        self.shadow: _Shadow | None = None

    def outside(self, offsets: NDArray[np.int64], width: int) -> NDArray[np.bool_]:
        """Which accesses of `width` bytes are not wholly inside; a view's gaps are outside."""
        outside: NDArray[np.bool_] = (offsets < 0) | (offsets > self.num_bytes - width)
        if self.steps:
            rest = offsets
            for step, size in self.steps:
                rest = rest - np.minimum(rest // step, size - 1) * step
            outside |= rest > self.run - width
        return outside


def _share_shadows(arguments: Iterable[_Argument]) -> None:
    """Give arguments whose spans overlap one shadow, whichever storage they say they have."""
    spans: list[list[_Argument]] = []
    end = -1
    for argument in sorted(arguments, key=lambda argument: argument.start):
        if argument.num_bytes:
            if argument.start >= end:
                spans.append([])
            spans[-1].append(argument)
            end = max(end, argument.start + argument.num_bytes)
    for span in spans:
        start = span[0].start
        shadow = _Shadow(start, max(one.start + one.num_bytes for one in span) - start)
        for argument in span:
            argument.shadow = shadow


def _bytes_at(starts: NDArray[np.int64], width: int) -> slice | NDArray[np.int64]:
    """The index of the bytes of accesses of `width` bytes: a slice where they are contiguous."""
    if (np.diff(starts) == width).all():
        return slice(int(starts[0]), int(starts[-1]) + width)
    return (starts[:, None] + np.arange(width)).ravel()


class _Memory:
    """Every load and store of a launch passes through here.

    Programs run one after another, so "who" is a number that grows: a program owns the numbers from
    `first` to `now`, and takes a new one at each barrier. A byte whose writer is `now` was stored
    by this program with no barrier since; one whose writer is below `first`, by another program.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, races: bool) -> None:
        self.arguments = {
            tag: _Argument(name, tag, tensor)
            for tag, (name, tensor) in enumerate(tensors.items(), start=1)
        }
        if races:
            _share_shadows(self.arguments.values())
        self.native_load, self.native_store = ti._interpreter.load, ti._interpreter.store
        self.program_of = [-1]  # from "who" to the program; nobody is 0
        self.first = self.now = 0
        self.found: dict[tuple[Kind, str, int], Finding] = {}

    def begin(self, program: int) -> None:
        self.first = self.now = len(self.program_of)
        self.program_of.append(program)

    def barrier(self) -> None:
        self.now = len(self.program_of)
        self.program_of.append(self.program_of[-1])

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        mask = self._permitted(pointers, mask, dtype.itemsize, store=False)
        return self.native_load(pointers & _ADDRESS, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        mask = self._permitted(pointers, mask, values.dtype.itemsize, store=True)
        return self.native_store(pointers & _ADDRESS, values, mask)

    def atomic(self, *_: object) -> Any:
        raise NotImplementedError("the memory check does not know atomics")

    def _permitted(
        self, pointers: NDArray[np.uint64], mask: Any, width: int, *, store: bool
    ) -> NDArray[np.bool_]:
        """Check the active lanes; the mask without the lanes that are out of bounds."""
        # Triton 3.9 broadcasts a scalar comparison to int32, and then refuses it as a mask.
        permitted = np.array(mask, dtype=np.bool_)
        active = pointers[permitted]
        outside = np.zeros(active.shape, dtype=np.bool_)
        tags = active >> np.uint64(_TAG_SHIFT)
        for tag in np.unique(tags).tolist():
            lanes = tags == tag
            outside[lanes] = self._check(tag, active[lanes], width, store=store)
        permitted[permitted] = ~outside
        return permitted

    def _check(
        self, tag: int, pointers: NDArray[np.uint64], width: int, *, store: bool
    ) -> NDArray[np.bool_]:
        """Record the faults of lanes that use one argument; which of them are out of bounds."""
        beyond: Kind = "store out of bounds" if store else "load out of bounds"
        argument = self.arguments.get(tag)
        if argument is None:  # an integer made into a pointer, or a tensor inside a tuple
            self._record(beyond, _NO_ARGUMENT, pointers.view(np.int64), width)
            return np.ones(pointers.shape, dtype=np.bool_)
        offsets = (pointers - argument.address).view(np.int64)
        outside = argument.outside(offsets, width)
        if outside.any():
            self._record(beyond, argument.name, offsets[outside], width)
            offsets = offsets[~outside]
        misaligned = (offsets + argument.start) % width != 0
        if misaligned.any():
            kind: Kind = "misaligned store" if store else "misaligned load"
            self._record(kind, argument.name, offsets[misaligned], width)
        if store:
            gaps = np.diff(offsets)
            if (gaps < width).any():
                offsets = np.sort(offsets)
                gaps = np.diff(offsets)
            if (gaps < width).any():
                twice = offsets[1:][gaps < width]
                self._record("two lanes store one byte", argument.name, twice, width)
        if argument.shadow is not None and offsets.size:
            self._check_races(argument, argument.shadow, offsets, width, store=store)
        return outside

    def _check_races(
        self,
        argument: _Argument,
        shadow: _Shadow,
        offsets: NDArray[np.int64],
        width: int,
        *,
        store: bool,
    ) -> None:
        shift = argument.start - shadow.start
        where = _bytes_at(offsets + shift, width)
        writer, reader = shadow.writer[where], shadow.reader[where]

        def report(kind: Kind, who: NDArray[np.int32], faulty: NDArray[np.bool_]) -> None:
            if faulty.any():
                places = np.arange(where.start, where.stop) if isinstance(where, slice) else where
                faulty_bytes = np.unique(places[faulty]) - shift
                self._record(kind, argument.name, faulty_bytes, 1, int(who[faulty][0]))

        if writer.any():
            kind: Kind = "stored twice by one program" if store else "read back without a barrier"
            report(kind, writer, writer == self.now)
            kind = "stored by two programs" if store else "read of another program's store"
            report(kind, writer, (writer > 0) & (writer < self.first))
        own = (reader == 0) | (reader == self.first)
        if store:
            report("store over another program's read", reader, ~own)
            shadow.writer[where] = self.now
        else:
            shadow.reader[where] = np.where(own, self.first, _SEVERAL)

    def _record(
        self, kind: Kind, argument: str, offsets: NDArray[np.int64], width: int, who: int = 0
    ) -> None:
        """Note a fault of the running program; `who` is the other side of a race."""
        program = self.program_of[-1]
        other = self.program_of[who] if 0 < who < self.first else None
        finding = Finding(kind, argument, program, width * offsets.size, int(offsets.min()), other)
        before = self.found.get((kind, argument, program))
        if before is not None:
            finding = before._replace(
                num_bytes=before.num_bytes + finding.num_bytes,
                first_byte=min(before.first_byte, finding.first_byte),
            )
        self.found[kind, argument, program] = finding


# --------------------------------------------------------------------------------- program order


@dataclasses.dataclass(frozen=True)
class _Settings:
    order: Callable[[int], Iterable[int]] = range  # from the number of programs to those to run
    num_programs: int | None = None  # in place of the launch's grid
    races: bool = True


_DEFAULT: Final = _Settings()
_SETTINGS: Final = ContextVar("interpreter settings", default=_DEFAULT)


@contextlib.contextmanager
def _settings(**changes: Any) -> Iterator[None]:
    token = _SETTINGS.set(dataclasses.replace(_SETTINGS.get(), **changes))
    try:
        yield
    finally:
        _SETTINGS.reset(token)


def only_program(
    pid: int, num_programs: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Launches in the block run one program of their grid, or of a grid of `num_programs`."""
    return _settings(order=lambda _: (pid,), num_programs=num_programs)


def program_order(
    order: Sequence[int] | Callable[[int], Iterable[int]], *, races: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Launches in the block run these programs, in this order; any may be left out or repeated.

    `order` is a sequence, or a function from the number of programs to one. A program that runs
    twice stores its bytes twice: give `races=False` then.
    """
    return _settings(order=order if callable(order) else lambda _: order, races=races)


def allow_races() -> contextlib.AbstractContextManager[None]:
    """Launches in the block are checked for bounds, alignment and lanes, but not for races."""
    return _settings(races=False)


# ---------------------------------------------------------------------------------------- launch


def _skipped_stores() -> contextlib.AbstractContextManager[None]:
    """Triton 3.2 takes a store whose mask is one false element for a store without a mask."""
    if _version(triton.__version__) >= (3, 3):
        return contextlib.nullcontext()
    plain_store = tl.semantic.store

    def store(pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return plain_store(pointer, value, mask, *rest) if mask is None or mask else None

    return _replaced(tl.semantic, store=store)


@contextlib.contextmanager
def _hooked(memory: _Memory, programs: Sequence[int], grid: tuple[int, int, int]) -> Iterator[None]:
    """While the block runs, step i of a launch is `programs[i]` of `grid`, and is checked."""
    builder, function = ti.interpreter_builder, ti.InterpretedFunction
    plain_call = function.__call__
    called = set()

    def set_grid_dim(*_: int) -> None:
        builder.grid_dim = grid

    def set_grid_idx(step: int, *_: int) -> None:
        program = programs[step]
        builder.grid_idx = (
            program % grid[0],
            program // grid[0] % grid[1],
            program // (grid[0] * grid[1]),
        )
        memory.begin(program)

    def call(device_function: Any, *args: Any, **kwargs: Any) -> Any:
        # Triton prepares its language anew at each call of a device function, which takes a third
        # of the run time; once in a launch is enough.
        if device_function in called:
            return device_function.rewrite()(*args, **kwargs)
        called.add(device_function)
        return plain_call(device_function, *args, **kwargs)

    with (
        _skipped_stores(),
        _replaced(function, __call__=call),
        _replaced(
            builder,
            options=dataclasses.replace(builder.options, debug=True),  # the overflow check
            set_grid_dim=set_grid_dim,
            set_grid_idx=set_grid_idx,
            create_barrier=memory.barrier,
        ),
        # Block pointers, descriptors and plain pointers all end in these four.
        _replaced(
            ti._interpreter,
            load=memory.load,
            store=memory.store,
            atomic_rmw=memory.atomic,
            atomic_cas=memory.atomic,
        ),
    ):
        yield


def run(kernel: Any, grid: Sequence[int], arguments: Mapping[str, object]) -> None:
    """Run `kernel[grid](**arguments)` on the interpreter, exactly and checked.

    `arguments` holds the kernel's arguments by name, constexprs included; names that the kernel
    does not have (`num_warps` and other options of a compiler) are ignored. Tensors are on the CPU
    and are used where they are. Floats become f32, as at a launch on a card.

    Raises `MemoryFault` if a fault was found, once all programs ran or one failed: a load out of
    bounds gave its `other`, or zero; a store out of bounds was dropped. What the kernel itself
    raises, an int32 overflow or an atomic among it, is Triton's `InterpreterError`.
    """
    if not isinstance(kernel, ti.InterpretedFunction):
        raise RuntimeError(
            f"{kernel} is not interpreted: set TRITON_INTERPRET=1 before Triton is imported"
        )
    settings = _SETTINGS.get()
    nx, ny, nz = (*(grid if settings.num_programs is None else (settings.num_programs,)), 1, 1)[:3]
    programs = tuple(settings.order(nx * ny * nz))
    for program in programs:
        if not 0 <= program < nx * ny * nz:
            raise ValueError(f"program {program} is not one of the grid {(nx, ny, nz)}")
    given = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with _LOCK, exact_casts(), np.errstate(all="ignore"):  # IEEE arithmetic does not warn
        executor = ti.GridExecutor(kernel.rewrite(), kernel.arg_names, (len(programs),))
        memory = _Memory(tensors, races=settings.races)
        values = given | {argument.name: argument.pointer for argument in memory.arguments.values()}
        for name, value in given.items():
            if isinstance(value, float) and name not in executor.constexprs:
                values[name] = _scalar(np.float32(value), tl.float32)
        try:
            with _hooked(memory, programs, (nx, ny, nz)):
                executor(**values)
        except ti.InterpreterError as error:
            if memory.found:  # the likelier cause
                raise MemoryFault(kernel.__name__, [*memory.found.values()]) from error
            raise
    if memory.found:
        raise MemoryFault(kernel.__name__, [*memory.found.values()])
