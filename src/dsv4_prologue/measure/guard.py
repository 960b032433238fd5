"""The checks around numbers: what a time must pass before anybody reads it.

`examine` runs the very call that is timed, on new inputs, and looks for the ways to be fast without
doing the work; `admit` lets no time through without such a check in this run; `known_answer` asks
whether the device computes at all; `figure_faults` and `handicapped` look at what a figure says of
itself. All of them give faults with a name and figures, never an exception, never a guess.

The names: "returned early" (the work was not done, or not yet), "stale" (an earlier call's answer),
"left the tail", "wrong" (any other wrong answer), "another stream" (the timed stream was through
before the work was), "device" (a known answer came out wrong), "above the ceiling", "timed idle"
and "throttled" (the clocks rose, or fell, while it was timed), "handicapped" (a baseline below half
of what the device does: its launch, or the kernel, is not what should be compared with).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dsv4_prologue.measure.ceilings import DRIFT_FLOOR, Ceiling
from dsv4_prologue.measure.clock import Call, Clock
from dsv4_prologue.measure.timing import HEADROOM, Samples
from dsv4_prologue.measure.verdict import drift_of

FaultName = Literal[
    "returned early",
    "stale",
    "left the tail",
    "wrong",
    "another stream",
    "device",
    "above the ceiling",
    "timed idle",
    "throttled",
    "handicapped",
]

#: How long the timed stream is held before what is looked at in its order, in us: longer than the
#: host takes to enqueue a fill, a call and a copy, so that whatever runs elsewhere runs before.
HOLD_US = 2000.0
#: How long a call may take to finish behind the device's back before it is plainly wrong, in s.
GRACE_S = 0.2
#: Calls whose work must be through when their stream is: as many as take this long, in us, and no
#: more than fit into a device's queue beside the flushes.
LEFT_RUNNING_US = 2000.0
LEFT_RUNNING_CALLS = 200
#: What waiting for an idle device takes a host, in us: seen below 20 us. A busy host can be kept
#: waiting for anything, and was for 130 us five times in a row after calls of 4 us, so one look in
#: LEFT_RUNNING_TRIES that finds an idle device is enough: who works elsewhere does so every time.
IDLE_WAIT_US = 100.0
#: And after long calls, as a share of one: waits of 100 to 160 us were seen on an H200 after calls
#: of 2 and 3 ms that were through. A call on another stream leaves most of itself.
IDLE_WAIT_SHARE = 0.1
LEFT_RUNNING_TRIES = 30
#: Data above so many caches cannot be read or written out of one to speak of.
CACHES = 4
#: A baseline below this share of the ceiling (or of the limit) is not compared with as it is.
HANDICAPPED = 0.5

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fault(NamedTuple):
    """What is wrong with a candidate or with a figure: a name, and the same in words."""

    name: FaultName
    text: str

    def __str__(self) -> str:
        """Both."""
        return f"{self.name}: {self.text}"


class Check(NamedTuple):
    """What a candidate's check in this run found; it passed if there are no faults."""

    candidate: str
    faults: tuple[Fault, ...]

    @property
    def passed(self) -> bool:
        """Whether its times may be shown."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """For a record."""
        faults = [fault._asdict() for fault in self.faults]
        return {"candidate": self.candidate, "passed": self.passed, "faults": faults}


def bits_differ(actual: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype have other bits: NaN is equal to itself here."""
    bits = _BITS[actual.element_size()]
    return actual.view(bits) != expected.view(bits)


@dataclass(frozen=True, eq=False)
class Work:
    """What a timed call is given and what it must leave, so that it is checked where it is timed.

    outputs: the tensors that the timed call writes, in place ones too. A call that returns a new
        one is examined as a call that copies it into one of ours.
    fill: of a seed; enqueues on the current stream, and does not wait: new inputs in the buffers
        that the timed call reads, poison in those it only writes.
    expected: of a seed; what the outputs must hold after `fill` and one call. Two seeds' differ.
    differs: of an output and what is expected of it; a bool tensor, true where it is wrong.
    """

    outputs: tuple[Tensor, ...]
    fill: Callable[[int], object]
    expected: Callable[[int], tuple[Tensor, ...]]
    differs: Callable[[Tensor, Tensor], Tensor] = bits_differ

    def wrong(self, seen: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        """Whether outputs are not what is expected of them."""
        pairs = zip(seen, expected, strict=True)
        return any(bool(self.differs(one, other).any()) for one, other in pairs)


Differs = Callable[[Tensor, Tensor], Tensor]


def _mask(differs: Differs, some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Where they differ, all of them in one row."""
    pairs = zip(some, others, strict=True)
    return torch.cat([differs(one, other).flatten() for one, other in pairs])


def _name(work: Work, clock: Clock, seed: int, earlier: int | None) -> Fault:
    """Name the wrong answer that the outputs hold to a seed by how it is wrong.

    `earlier` is the seed before, if there was one; its answer was right.
    """
    expected = work.expected(seed)
    if earlier is not None and not work.wrong(work.outputs, work.expected(earlier)):
        return Fault("stale", "the answer is that to the inputs before these")
    actual = [tensor.clone() for tensor in work.outputs]
    clock.in_order(lambda: work.fill(seed))
    clock.synchronize()
    wrong = _mask(work.differs, actual, expected)
    changed = _mask(bits_differ, actual, work.outputs)
    due = _mask(bits_differ, expected, work.outputs)
    total, count = wrong.numel(), int(wrong.sum())
    if not count:
        return Fault("returned early", "it became right while it was looked at")
    first = int(wrong.nonzero()[0])
    if bool((wrong & changed).any()):
        return Fault("wrong", f"{count} of {total} elements are wrong, the first is {first}")
    if not bool(changed.any()):
        stale = Fault("stale", "it worked once, and then left its buffers as they were")
        return Fault("returned early", "nothing was written") if earlier is None else stale
    if bool(wrong[first:][due[first:]].all()):
        return Fault("left the tail", f"the last {total - first} of {total} elements: unwritten")
    text = f"{count} of {total} elements were not written, the first is {first}"
    return Fault("returned early", text)


def _flushes(clock: Clock, time_us: float) -> int:
    return max(1, math.ceil(time_us / clock.flush_us)) if clock.asynchronous else 1


def _check_answer(
    call: Call, work: Work, clock: Clock, seed: int, earlier: int | None
) -> Fault | None:
    """Look at an answer once all was waited for, and again in the order of the timed stream."""
    expected = work.expected(seed)
    clock.in_order(lambda: work.fill(seed))
    clock.synchronize()
    call()
    clock.synchronize()
    if work.wrong(work.outputs, expected):
        clock.wait(GRACE_S)
        clock.synchronize()
        if work.wrong(work.outputs, expected):
            return _name(work, clock, seed, earlier)
        return Fault("returned early", f"right only {GRACE_S} s after the device was waited for")

    seen = [torch.empty_like(tensor) for tensor in work.outputs]

    def look() -> None:
        for copy, tensor in zip(seen, work.outputs, strict=True):
            copy.copy_(tensor)

    def step() -> None:
        clock.in_order(lambda: work.fill(seed))
        call()
        clock.in_order(look)

    clock.interval(step, flushes=_flushes(clock, HOLD_US))
    clock.synchronize()
    if work.wrong(seen, expected):
        return Fault(
            "another stream",
            "right once the whole device was waited for, wrong in the order of the timed stream",
        )
    return None


def _check_stream(call: Call, clock: Clock) -> Fault | None:
    """Look whether the device is through with many calls when the timed stream is."""
    times = []
    for _ in range(3):
        start = clock.now()
        call()
        clock.synchronize()
        times.append(1e6 * (clock.now() - start))
    calls = min(LEFT_RUNNING_CALLS, max(4, math.ceil(LEFT_RUNNING_US / max(min(times), 0.1))))
    flushes = _flushes(clock, HEADROOM * calls * clock.host_us(call, 4))
    allowed_us = max(IDLE_WAIT_US, min(times) * IDLE_WAIT_SHARE)
    left = []
    for _ in range(LEFT_RUNNING_TRIES):
        left.append(clock.left_running_us(call, flushes=flushes, calls=calls))
        if left[-1] <= allowed_us:
            return None
    text = f"the device worked on for {min(left):.0f} us when the timed stream was through"
    return Fault("another stream", f"{text} with {calls} calls")


def examine(
    candidate: str, call: Call, work: Work, clock: Clock, *, seeds: tuple[int, int] = (1, 2)
) -> Check:
    """Run a call as it is timed, and look for every cheat that shows in what it leaves, or when.

    Twice, on new inputs in the same buffers: the answer is compared once the whole device was
    waited for, and once more as the timed stream sees it, with the stream held until everything is
    enqueued, so that what runs elsewhere runs too early, on what was there before. Then many calls
    are enqueued, and the device must be idle when the timed stream is.

    What is timed in a graph is examined as `clock.captured(call, 1)`. Before a sweep and after it:
    a call may change its ways. Needs the outputs' memory once more, beside what `work` holds.
    """
    fault = None
    for earlier, seed in zip((None, *seeds), seeds, strict=False):
        fault = fault or _check_answer(call, work, clock, seed, earlier)
    if clock.asynchronous:
        fault = fault or _check_stream(call, clock)
    return Check(candidate, () if fault is None else (fault,))


def admit(
    samples: Mapping[str, Samples], checks: Mapping[str, Check]
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Split samples in those that may be shown, and the reasons why the others may not.

    `checks` are those made in this run, each under its candidate's name.
    """
    shown, withheld = {}, {}
    for name, one in samples.items():
        check = checks.get(name)
        if check is None:
            withheld[name] = "not checked in this run"
        elif check.faults:
            withheld[name] = "; ".join(map(str, check.faults))
        else:
            shown[name] = one
    return shown, withheld


def known_answer(device: torch.device | str) -> tuple[Fault, ...]:
    """Work whose answer is known exactly, done on the device; no faults if it was right.

    Before and after a run. An odd multiplier permutes the residues of a power of two, and its
    inverse undoes that: 4 Mi places are written in that order and read back in the other. And sums
    of squares of 0 to 255 are whole in f32 in any order: 255 * 256 * 511 / 6.
    """
    count, step = 1 << 22, 2654435761 % (1 << 22)
    index = torch.arange(count, dtype=torch.int64, device=device)
    buffer = torch.full_like(index, -1)
    buffer[index * step % count] = index
    places = int((buffer != index * pow(step, -1, count) % count).sum())
    rows = torch.arange(256, dtype=torch.float32, device=device).expand(4096, 256).contiguous()
    sums = int((rows.square().sum(dim=1) != 255 * 256 * 511 // 6).sum())
    faults = []
    if places:
        faults.append(Fault("device", f"{places} of {count} places hold another index than theirs"))
    if sums:
        faults.append(Fault("device", f"{sums} of 4096 sums of squares are not 5559680"))
    return tuple(faults)


def figure_faults(
    samples: Samples, useful_bytes: int, ceiling: Ceiling, clock: Clock
) -> tuple[Fault, ...]:
    """What a figure says against itself.

    "above the ceiling" is an error: such a time is not shown. A flushed call cannot move data
    above four caches faster than the best copy does, but for the spread of the two; resident data
    can, and there the limit ratio speaks. "timed idle" of the ceiling is one, too: nothing can be
    said against it. "timed idle" and "throttled" of the samples are marks: their verdicts are
    unclear.
    """
    faults = []
    if not ceiling.ramped:
        text = f"the ceiling still moved after {ceiling.ramp_iterations} copies, from "
        faults.append(Fault("timed idle", f"{text}{ceiling.idle_gbps:.0f} GB/s on"))
    gbps = samples.gbps(useful_bytes)
    allowed = max(samples.spread + ceiling.spread, DRIFT_FLOOR)
    large = useful_bytes > CACHES * clock.cache.size
    if samples.mode == "flushed" and large and gbps > (1 + allowed) * ceiling.gbps:
        text = f"{gbps:.0f} GB/s flushed, {gbps / ceiling.gbps:.1%} of {ceiling.gbps:.0f} GB/s"
        why = "work was left out, or the ceiling was taken with idle clocks"
        faults.append(Fault("above the ceiling", f"{text} (spread {allowed:.1%}): {why}"))
    change = drift_of(samples)
    if change:
        name: FaultName = "timed idle" if change < 0 else "throttled"
        faults.append(Fault(name, f"its last third took {change:+.1%} against its first"))
    return tuple(faults)


def handicapped(samples: Samples, bound_us: float) -> tuple[Fault, ...]:
    """Whether a baseline is below half of what the device does, so that its launch must be swept.

    `bound_us` is the time of the same useful bytes at the ceiling (`Ceiling.time_us`), or of the
    best copy of them at the same size. A ratio against such a baseline says nothing of ours.
    """
    share = bound_us / samples.median_us
    if share >= HANDICAPPED:
        return ()
    text = f"{samples.median_us:.1f} us, where {bound_us:.1f} us are possible"
    return (Fault("handicapped", f"{text} ({share:.0%}): sweep its launch before comparing"),)
