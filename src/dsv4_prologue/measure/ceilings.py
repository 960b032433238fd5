"""Ceilings and limits: what this device moves at best, measured in this run.

The ceiling is the best of several bare copies and read-modify-writes at several program widths, on
data far larger than the cache, taken once the clocks are up; a run takes it before and after. The
limit is the best of the same for one shape's useful bytes, whatever their size: there launch and
latency bound everybody. GB are 1e9 bytes; bytes moved are bytes read + bytes written.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_prologue.measure.clock import Call, Clock, Mode
from dsv4_prologue.measure.timing import Samples, measure
from dsv4_prologue.selection import select

#: Bytes a program reads, and its warps. The first measurements on an H200 had their best copy at
#: 2048 bytes and 1 warp, and 5 to 20 % less at half and at four times that; a few tokens want more
#: warps. Which is best elsewhere is measured there, each time.
WIDTHS = ((1024, 1), (2048, 1), (4096, 2), (4096, 4), (8192, 4))
COPY, CHANGE = "copy ", "rmw "
#: Of the ceiling's copies: 4 GiB read and 4 GiB written. The same H200 read 4283 GB/s with torch's
#: 4 GiB copy and 4153 to 4181 with its 1 GiB copy.
CEILING_BYTES = 8 << 30
#: How well a ceiling is known, by the 95 % interval of its median.
CEILING_ERROR = 0.002
#: On a CPU this many of its last-level caches, which may be 300 MiB and more: 8 GiB would take
#: seconds a copy, and four caches are what the guard calls large.
CPU_CACHES = 4

#: The clocks are up when the medians of three windows in a row, of so many seconds each, differ by
#: no more than this.
RAMP_WINDOW_S = 0.1
RAMP_STABLE = 0.003
#: A drift up to the relative error that `measure` stops at is not told from none.
DRIFT_FLOOR = 0.005


class Ramp(NamedTuple):
    """How the clocks came up: the first sample, copies until they were, seconds, whether they did.

    Times in us.
    """

    idle_us: float
    iterations: int
    seconds: float
    stable: bool


@dataclass(frozen=True)
class Ceiling:
    """The best bandwidth of a device, in GB/s.

    gbps: the best one's median. `spread`: of its samples. `best`: its name.
    figures: GB/s of every copy and read-modify-write.
    bytes_moved: read + written by each.
    ramped: the clocks were up when it was taken. A ceiling that is not ramped is none.
    idle_gbps: the very first figure, of torch's copy.
    ramp_iterations, ramp_seconds: such copies, and time, until the figure was stable.
    """

    gbps: float
    spread: float
    best: str
    figures: Mapping[str, float]
    bytes_moved: int
    ramped: bool
    idle_gbps: float
    ramp_iterations: int
    ramp_seconds: float

    def time_us(self, useful_bytes: int) -> float:
        """The time, in us, that so many bytes take at this ceiling."""
        return useful_bytes / self.gbps / 1e3

    def to_dict(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


def ramp(call: Call, clock: Clock, max_seconds: float = 5.0) -> Ramp:
    """Call until the time of a call is stable, or the time is up. The call has run before."""
    start = clock.now()
    windows: list[float] = []
    idle_us, iterations, stable = 0.0, 0, False
    while not stable and clock.now() - start < max_seconds:
        times: list[float] = []
        begun = clock.now()
        while not times or clock.now() - begun < RAMP_WINDOW_S:
            times.append(clock.interval(call).time_us)
        idle_us = idle_us or times[0]
        iterations += len(times)
        windows.append(statistics.median(times))
        last = windows[-3:]
        stable = len(last) == 3 and max(last) <= (1 + RAMP_STABLE) * min(last)
    return Ramp(idle_us, iterations, clock.now() - start, stable)


def _words(count: int, device: torch.device) -> Tensor:
    """int32 [count] of random bits: what is all zeros may be moved faster than data is."""
    return torch.empty(count, dtype=torch.float32, device=device).uniform_().view(torch.int32)


def _launch(kernel: Any, width: int, num_warps: int, *data: Tensor) -> Call:
    """A call of one of the kernels, so many bytes a program."""
    count, words = data[0].numel(), width // 4
    options: dict[str, Any] = {"WORDS": words, "num_warps": num_warps}
    if select(data[0].device).card.can_disable_fp_fusion:  # there is none, but Triton would warn
        options["enable_fp_fusion"] = False
    return lambda: kernel[(-(-count // words),)](*data, count, **options)


def copy_candidates(
    useful_bytes: int, device: torch.device | str
) -> dict[str, Callable[[], object]]:
    """Bare copies and read-modify-writes that read half of `useful_bytes` and write as many.

    Names start with "copy " and "rmw ": add them to the candidates of a `measure`, and ask
    `best_copy` which was the limit. They hold their buffers: `useful_bytes` of memory, or half
    where no more is free, and then there are no copies. Each half is rounded up to 64 bytes: Triton
    reads 16 bytes a lane only where it knows that the end is a multiple of that. On the CPU, and
    where there is no Triton, torch's own alone.
    """
    from dsv4_prologue.verify.conformance import free_bytes

    where = torch.device(device)
    count = max(16, -(-useful_bytes // 128) * 16)
    source = _words(count, where)
    free = free_bytes(where)
    out = torch.empty_like(source) if free is None or 4 * count < 0.9 * free else None
    found: dict[str, Call] = {}
    if out is not None:
        found[f"{COPY}torch"] = lambda: out.copy_(source)
    found[f"{CHANGE}torch"] = source.bitwise_not_
    if where.type != "cpu" and importlib.util.find_spec("triton") is not None:
        from dsv4_prologue.measure.copies import change_kernel, copy_kernel

        for width, num_warps in WIDTHS:
            name = f"{width} B, {num_warps} warps"
            found[f"{CHANGE}{name}"] = _launch(change_kernel, width, num_warps, source)
            if out is not None:
                found[f"{COPY}{name}"] = _launch(copy_kernel, width, num_warps, out, source)
    return found


def best_copy(samples: Mapping[str, Samples], *, out_of_place: bool = False) -> str:
    """The name of the fastest of `copy_candidates` among these; empty if there is none.

    `out_of_place`: of the copies alone. A read-modify-write touches half as many lines of a cache:
    no work out of place can do that.
    """
    kinds = (COPY,) if out_of_place else (COPY, CHANGE)
    copies = [name for name in samples if name.startswith(kinds)]
    return min(copies, key=lambda name: samples[name].median_us, default="")


def limit(useful_bytes: int, clock: Clock, mode: Mode, **options: Any) -> tuple[str, Samples]:
    """The best copy of so many useful bytes, by itself: its name and its samples.

    `options` are those of `measure`. A limit ratio wants both measured in one call: use
    `copy_candidates` for that.
    """
    samples = measure(copy_candidates(useful_bytes, clock.device), clock, mode, **options)
    best = best_copy(samples)
    return best, samples[best]


def _ceiling_bytes(clock: Clock) -> int:
    """What the ceiling's copies move: CEILING_BYTES, less where memory is short or slow."""
    from dsv4_prologue.verify.conformance import free_bytes

    size = CEILING_BYTES
    if clock.device.type == "cpu":
        size = min(size, CPU_CACHES * clock.cache.size)
    free = free_bytes(clock.device)
    return size if free is None else min(size, free // 2)


def measure_ceiling(
    clock: Clock,
    *,
    candidates: Mapping[str, Call] | None = None,
    bytes_moved: int | None = None,
    seed: int = 0,
    max_ramp_seconds: float = 5.0,
    max_seconds: float = 3.0,
) -> Ceiling:
    """Bring the clocks up, then take the best of the copies and read-modify-writes.

    Args:
        clock: of the device.
        candidates: None: `copy_candidates` of `bytes_moved`; the first of them is what ramps.
        bytes_moved: by each, read + written; None: CEILING_BYTES where that is possible.
        seed: of the rounds' orders.
        max_ramp_seconds: give the clocks up after this; the ceiling then says it is not ramped.
        max_seconds: of the measurement after that.
    """
    moved = bytes_moved if bytes_moved is not None else _ceiling_bytes(clock)
    found = candidates if candidates is not None else copy_candidates(moved, clock.device)
    first = next(iter(found.values()))
    first()
    clock.synchronize()
    came_up = ramp(first, clock, max_ramp_seconds)
    samples = measure(
        found,
        clock,
        "flushed",
        seed=seed,
        relative_error=CEILING_ERROR,
        max_rounds=60,
        max_seconds=max_seconds,
    )
    best = min(samples, key=lambda name: samples[name].median_us)
    return Ceiling(
        gbps=samples[best].gbps(moved),
        spread=samples[best].spread,
        best=best,
        figures={name: one.gbps(moved) for name, one in samples.items()},
        bytes_moved=moved,
        ramped=came_up.stable,
        idle_gbps=moved / came_up.idle_us / 1e3,
        ramp_iterations=came_up.iterations,
        ramp_seconds=came_up.seconds,
    )


def drift(before: Ceiling, after: Ceiling) -> float:
    """How much the ceiling moved over a run, relative: after / before - 1."""
    return after.gbps / before.gbps - 1


def drift_mark(before: Ceiling, after: Ceiling) -> str:
    """What a run is marked with: its drift in words where that exceeds the spread, else nothing.

    The spread is the larger of the two ceilings' own, and DRIFT_FLOOR at least. A ceiling that was
    not ramped marks the run, too.
    """
    if not (before.ramped and after.ramped):
        which = "before" if not before.ramped else "after"
        return f"the clocks were still moving when the ceiling {which} was taken"
    moved, allowed = drift(before, after), max(before.spread, after.spread, DRIFT_FLOOR)
    if abs(moved) <= allowed:
        return ""
    return (
        f"the ceiling moved by {moved:+.2%} over the run, from {before.gbps:.0f} to "
        f"{after.gbps:.0f} GB/s; its spread is {allowed:.2%}"
    )
