"""Clocks: a device that can be timed, by its own events, whatever device torch has.

Nothing here knows a vendor: events, streams and graphs are those of `torch.get_device_module`, and
what a device does not tell of itself is measured, or assumed and said so.

An interval on a device is enqueued as a whole before the device begins it: flush, event, calls,
event. The flush keeps the device busy meanwhile, so that no launch cost of the host gets between
the events; whether it did is asked of the first event each time, and told with the time.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], object]
Mode = Literal["flushed", "resident", "graph", "host", "chain"]

MODES: tuple[Mode, ...] = ("flushed", "resident", "graph", "host", "chain")
#: Those that replay a graph.
GRAPHS: tuple[Mode, ...] = ("graph", "chain")

#: A flush on a device: a fill of four caches, and no less than this; some 60 us on an H200, whose
#: L2 has 60 MB. It leaves the cache full of lines to be written back, as a kernel before ours does.
FLUSH_BYTES = 256 << 20
#: Taken for the last-level cache where nothing tells it: no card known here has a larger one.
ASSUMED_CACHE_BYTES = 256 << 20


class Cache(NamedTuple):
    """The last-level cache of a device, in bytes, and how its size was come by."""

    size: int
    source: str


class Interval(NamedTuple):
    """A time between two events, in us, and whether all of it was enqueued before it began."""

    time_us: float
    ahead: bool


class Clock(ABC):
    """A device that can be timed. `clock_for` makes one.

    device: what it times.
    cache: its last-level cache.
    flush_bytes: the size of a flush, read or written.
    flush_us: how long one flush keeps the device busy.
    resolution_us: the smallest step the clock was seen to make.
    empty_us: what it shows between two events with nothing between them; in every sample, and not
        taken off.
    asynchronous: whether a call returns before its work is done.
    """

    device: torch.device
    cache: Cache
    flush_bytes: int
    flush_us: float
    resolution_us: float
    empty_us: float
    asynchronous: bool = True

    @abstractmethod
    def unavailable(self, mode: Mode) -> str:
        """Why nothing can be timed in this mode; empty if it can."""

    @abstractmethod
    def interval(self, call: Call, *, flushes: int = 0, warm: int = 0, calls: int = 1) -> Interval:
        """Flush, call `warm` times, then time `calls` calls by two events on the current stream."""

    @abstractmethod
    def host_us(self, call: Call, calls: int) -> float:
        """How long the host is busy with one of so many calls that nothing waits for, in us."""

    @abstractmethod
    def captured(self, call: Call, calls: int) -> Call:
        """A graph of so many calls, as a function that replays it. The call has run before.

        What the device module raises for a call that cannot be captured is not caught.
        """

    @abstractmethod
    def in_order(self, step: Call) -> None:
        """Run a step whose device work takes its turn on the current stream."""

    @abstractmethod
    def left_running_us(self, call: Call, *, flushes: int, calls: int) -> float:
        """How long the device still works once the current stream is through with the calls.

        A flush before them holds the stream until all is enqueued.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the whole device is idle, all of its streams."""

    def wait(self, seconds: float) -> None:
        """Do nothing for a while."""
        time.sleep(seconds)

    def now(self) -> float:
        """The host's clock, in seconds."""
        return time.perf_counter()

    def describe(self) -> dict[str, Any]:
        """For a record: what every figure of this clock depends on."""
        return {
            "clock": type(self).__name__,
            "cache_bytes": self.cache.size,
            "cache_source": self.cache.source,
            "flush_bytes": self.flush_bytes,
            "flush_us": self.flush_us,
            "resolution_us": self.resolution_us,
            "empty_us": self.empty_us,
        }


def smallest_step(values: Iterable[float]) -> float:
    """The smallest difference between two of the values that differ; 0 if none do."""
    ordered = sorted(set(values))
    return min((b - a for a, b in itertools.pairwise(ordered)), default=0.0)


def cache_knee(times_us: Mapping[int, float]) -> int | None:
    """The last-level cache, in bytes, from times of read-modify-writes in place of so many bytes.

    Up to twice the largest size that runs at 1.25 times the largest's bandwidth or more: the next
    step up, since a cache that just holds the data is not seen to. None where no size does.
    """
    largest = max(times_us)
    slow = largest / times_us[largest]
    fast = [size for size, time_us in times_us.items() if size / time_us >= 1.25 * slow]
    return 2 * max(fast) if fast else None


class DeviceClock(Clock):
    """A clock of device events, for any device whose torch module has them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._graph: Any = getattr(self._module, f"{device.type.upper()}Graph", None)
        with self._at_device():
            self.cache = self._find_cache()
            self.flush_bytes = max(FLUSH_BYTES, 4 * self.cache.size)
            self._buffer = torch.empty(self.flush_bytes, dtype=torch.uint8, device=device)
            flush = [self.interval(self._flush).time_us for _ in range(20)]
            empty = [self.interval(lambda: None, flushes=1).time_us for _ in range(50)]
        self.flush_us = statistics.median(flush)
        self.empty_us = statistics.median(empty)
        # elapsed_time is a float32 in ms, which tells nanoseconds apart up to some 16 ms.
        self.resolution_us = smallest_step(round(value, 3) for value in (*empty, *flush)) or 1e-3

    def _at_device(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.index is None:
            return contextlib.nullcontext()
        return self._module.device(self.device)  # type: ignore[no-any-return]

    def _flush(self) -> None:
        self._buffer.fill_(1)

    def _find_cache(self) -> Cache:
        """Ask torch; measure where it does not tell, or tells only of a cache before the last.

        HIP's L2_cache_size leaves out the memory-side cache of CDNA3 (256 MB).
        """
        properties = self._module.get_device_properties(self.device)
        asked = int(getattr(properties, "L2_cache_size", 0) or 0)
        if asked and torch.version.hip is None:
            return Cache(asked, "asked of torch: L2_cache_size")
        words = torch.zeros(1 << 28, dtype=torch.int32, device=self.device)
        times = {}
        for power in range(20, 31):
            part = words[: 1 << power >> 2]

            def change(part: Tensor = part) -> None:
                part.add_(1)

            calls = max(1, 1 << 28 >> power)
            seen = [self.interval(change, warm=2, calls=calls).time_us / calls for _ in range(5)]
            times[1 << power] = statistics.median(seen)
        measured = cache_knee(times)
        if measured is None:
            return Cache(max(asked, ASSUMED_CACHE_BYTES), "assumed: neither told nor seen")
        return Cache(max(asked, measured), "measured: read-modify-writes of 1 MiB to 1 GiB")

    def unavailable(self, mode: Mode) -> str:
        """Why nothing can be timed in this mode; empty if it can."""
        if mode in GRAPHS and (self._graph is None or not hasattr(self._module, "graph")):
            return f"torch.{self.device.type} has no graphs"
        return ""

    def interval(self, call: Call, *, flushes: int = 0, warm: int = 0, calls: int = 1) -> Interval:
        """Flush, call `warm` times, then time `calls` calls by two events on the current stream."""
        with self._at_device():
            start = self._module.Event(enable_timing=True)
            end = self._module.Event(enable_timing=True)
            for _ in range(flushes):
                self._flush()
            for _ in range(warm):
                call()
            start.record()
            for _ in range(calls):
                call()
            end.record()
            ahead = not start.query()
            end.synchronize()
            return Interval(1e3 * start.elapsed_time(end), ahead)

    def host_us(self, call: Call, calls: int) -> float:
        """How long the host is busy with one of so many calls that nothing waits for, in us."""
        with self._at_device():
            self.synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            busy = time.perf_counter_ns() - start
            self.synchronize()
        return busy / calls / 1e3

    def captured(self, call: Call, calls: int) -> Call:
        """A graph of so many calls, as a function that replays it. The call has run before."""
        with self._at_device():
            graph = self._graph()
            with self._module.graph(graph):
                for _ in range(calls):
                    call()
        return graph.replay  # type: ignore[no-any-return]

    def in_order(self, step: Call) -> None:
        """Run a step whose device work takes its turn on the current stream."""
        with self._at_device():
            step()

    def left_running_us(self, call: Call, *, flushes: int, calls: int) -> float:
        """How long the device still works once the current stream is through with the calls."""
        with self._at_device():
            end = self._module.Event()
            for _ in range(flushes):
                self._flush()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            start = time.perf_counter_ns()
            self.synchronize()
            return (time.perf_counter_ns() - start) / 1e3

    def synchronize(self) -> None:
        """Wait until the whole device is idle, all of its streams."""
        self._module.synchronize(self.device)


class HostClock(Clock):
    """The host's own clock, for the CPU: a call's work is done when it returns."""

    asynchronous = False
    #: Where Linux tells the size of the third-level cache, like "32768K".
    CACHE_FILE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        text = self.CACHE_FILE.read_text().strip() if self.CACHE_FILE.exists() else ""
        if text.endswith("K"):
            self.cache = Cache(int(text[:-1]) << 10, "asked of Linux: the third-level cache")
        else:
            self.cache = Cache(64 << 20, "assumed: nothing tells it")
        self.flush_bytes = 2 * self.cache.size
        self._buffer = torch.zeros(self.flush_bytes, dtype=torch.uint8)
        self.resolution_us = smallest_step(time.perf_counter_ns() for _ in range(1000)) / 1e3
        empty = [self.interval(lambda: None).time_us for _ in range(50)]
        self.empty_us = statistics.median(empty)
        self.flush_us = min(self.interval(self._flush).time_us for _ in range(3))

    def _flush(self) -> None:
        self._buffer.add_(1)

    def unavailable(self, mode: Mode) -> str:
        """Why nothing can be timed in this mode; empty if it can."""
        return {
            **dict.fromkeys(GRAPHS, "the CPU has no graphs"),
            "host": "on the CPU the host does the work itself: mode resident is its time",
        }.get(mode, "")

    def interval(self, call: Call, *, flushes: int = 0, warm: int = 0, calls: int = 1) -> Interval:
        """Flush, call `warm` times, then time `calls` calls."""
        for _ in range(flushes):
            self._flush()
        for _ in range(warm):
            call()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return Interval((time.perf_counter_ns() - start) / 1e3, True)

    def host_us(self, call: Call, calls: int) -> float:
        """The time of one call, in us."""
        return self.interval(call, calls=calls).time_us / calls

    def captured(self, call: Call, calls: int) -> Call:
        """There are no graphs here: raises ValueError."""
        del call, calls
        raise ValueError(self.unavailable("graph"))

    def in_order(self, step: Call) -> None:
        """Run a step."""
        step()

    def left_running_us(self, call: Call, *, flushes: int, calls: int) -> float:
        """0: there is nothing to wait for."""
        self.interval(call, flushes=flushes, calls=calls)
        return 0.0

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def clock_for(device: torch.device | str | None = None) -> Clock:
    """The clock of a device; None: the accelerator at hand, else the CPU."""
    from dsv4_prologue.selection import default_device

    where = torch.device(device if device is not None else default_device())
    return HostClock() if where.type == "cpu" else DeviceClock(where)
