"""A device in virtual time: streams, a cache to flush, clocks that ramp, noise from a seed.

What measures is tested on it, and with it the cheats that it must catch: each is a kernel of this
device, and happens the same way every time. A call under test launches kernels:

    clock = SyntheticClock()
    samples = measure({"ours": lambda: clock.launch(12.0)}, clock, "flushed")
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict

import torch

from dsv4_prologue.measure.clock import Cache, Call, Clock, Interval, Mode


class SyntheticClock(Clock):
    """See the module. All times are in us of virtual time.

    launch_us: what a launch costs the host.
    noise: relative standard deviation of a kernel's duration.
    idle_speed: the speed of a device that has been idle; it is 1 after `ramp_us` of work.
    gap_us: what lies between two events with nothing between them.
    """

    def __init__(
        self,
        *,
        launch_us: float = 5.0,
        noise: float = 0.003,
        seed: int = 0,
        idle_speed: float = 1.0,
        ramp_us: float = 50_000.0,
        resolution_us: float = 0.032,
        gap_us: float = 1.0,
    ) -> None:
        self.device = torch.device("cpu")
        self.cache = Cache(64 << 20, "synthetic")
        self.flush_bytes = 4 * self.cache.size
        self.flush_us = 60.0
        self.resolution_us = resolution_us
        self.empty_us = gap_us
        self._launch_us, self._noise = launch_us, noise
        self._idle_speed, self._ramp_us = idle_speed, ramp_us
        self._random = random.Random(seed)
        self._host = 0.0  # the host's time
        self._busy = 0.0  # work the device has done
        self._free: dict[str, float] = defaultdict(float)  # when each stream is through
        self._effects: list[tuple[float, int, Call]] = []  # of kernels not yet waited for
        self._serial = itertools.count()
        self._capturing: list[Call] | None = None

    # What kernels and their callers do.

    def launch(self, time_us: float, effect: Call | None = None, *, stream: str = "timed") -> None:
        """Enqueue a kernel that takes so long at full speed, and at its end has this effect."""
        if self._capturing is not None:
            self._capturing.append(lambda: self._enqueue(time_us, effect, stream))
            return
        self._host += self._launch_us
        self._enqueue(time_us, effect, stream)

    def later(self, time_us: float, effect: Call) -> None:
        """Have an effect so much later than now, on no stream: work of a thread of the host."""
        heapq.heappush(self._effects, (self._host + time_us, next(self._serial), effect))

    def wait_stream(self, waiting: str, awaited: str) -> None:
        """What is enqueued on one stream from now on waits for what is on the other."""
        self._free[waiting] = max(self._free[waiting], self._free[awaited])

    def pause(self, time_us: float) -> None:
        """The host does something else; the device, meanwhile, cools down if it has nothing."""
        if self._host + time_us > max(self._free.values(), default=0.0):
            self._busy = 0.0
        self._advance(self._host + time_us)

    def _enqueue(self, time_us: float, effect: Call | None, stream: str) -> None:
        speed = 1.0
        if self._busy < self._ramp_us:
            speed -= (1 - self._idle_speed) * (1 - self._busy / self._ramp_us)
        took = time_us / speed * max(0.5, self._random.gauss(1.0, self._noise))
        self._busy += took
        self._free[stream] = max(self._host, self._free[stream]) + took
        if effect is not None:
            heapq.heappush(self._effects, (self._free[stream], next(self._serial), effect))

    def _advance(self, until: float) -> None:
        """Let the host's time pass, and what kernels did by then happen in its order."""
        self._host = max(self._host, until)
        while self._effects and self._effects[0][0] <= self._host:
            heapq.heappop(self._effects)[2]()

    # What measures it.

    def unavailable(self, mode: Mode) -> str:
        """Everything can be timed."""
        del mode
        return ""

    def _flush(self, flushes: int) -> None:
        for _ in range(flushes):
            self.launch(self.flush_us)

    def _event(self) -> float:
        """When an event recorded now will have come."""
        return max(self._host, self._free["timed"])

    def interval(self, call: Call, *, flushes: int = 0, warm: int = 0, calls: int = 1) -> Interval:
        """Flush, call `warm` times, then time `calls` calls by two events on the timed stream."""
        self._flush(flushes)
        for _ in range(warm):
            call()
        start = self._event()
        for _ in range(calls):
            call()
        end, enqueued = self._event(), self._host
        self._advance(end)
        steps = round((end - start + self.empty_us) / self.resolution_us)
        return Interval(steps * self.resolution_us, start > enqueued)

    def host_us(self, call: Call, calls: int) -> float:
        """How long the host is busy with one of so many calls that nothing waits for."""
        self.synchronize()
        start = self._host
        for _ in range(calls):
            call()
        busy = self._host - start
        self.synchronize()
        return busy / calls * max(0.5, self._random.gauss(1.0, self._noise))

    def captured(self, call: Call, calls: int) -> Call:
        """A graph of so many calls, as a function that replays it."""
        captured: list[Call] = []
        self._capturing = captured
        for _ in range(calls):
            call()
        self._capturing = None

        def replay() -> None:
            self._host += self._launch_us
            for node in captured:
                node()

        return replay

    def in_order(self, step: Call) -> None:
        """Run a step in its turn on the timed stream."""
        self.launch(0.0, step)

    def left_running_us(self, call: Call, *, flushes: int, calls: int) -> float:
        """How long the device still works once the timed stream is through with the calls."""
        self._flush(flushes)
        for _ in range(calls):
            call()
        self._advance(self._event())
        return max(0.0, max(self._free.values()) - self._host)

    def synchronize(self) -> None:
        """Wait until the whole device is idle, all of its streams."""
        self._advance(max(self._free.values(), default=0.0))

    def wait(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.pause(1e6 * seconds)

    def now(self) -> float:
        """The virtual host's clock, in seconds."""
        return self._host / 1e6
