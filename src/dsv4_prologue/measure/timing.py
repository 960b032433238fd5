"""Timing: interleaved samples of several candidates, on whatever device torch has.

    clock = clock_for("cuda")
    samples = measure({"ours": ours, "theirs": theirs}, clock, "flushed")
    print(samples["ours"].median_us, samples["ours"].spread, samples["ours"].stopped)

All candidates run once a round, in a random order of that round, so that what drifts drifts for
all of them, and two candidates can be compared round by round. A sample that the device began
before all of it was enqueued is taken again behind a longer flush; one that still was is counted
as `late`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from dsv4_prologue.measure.clock import GRAPHS, MODES, Call, Clock, Interval, Mode, clock_for

__all__ = [
    "GRAPHS",
    "MODES",
    "Call",
    "Clock",
    "Mode",
    "Rounds",
    "Samples",
    "clock_for",
    "measure",
    "order",
]

Stopped = Literal["relative error", "rounds", "time"]

#: A round is disturbed (throttled, or the machine was at something else) if half of its samples or
#: more exceed their candidate's median by a tenth and by five spreads. Disturbed rounds are left
#: out and counted; if they were more than one in ten it is no disturbance, and none is left out.
DISTURBED = 0.1
DISTURBED_SPREADS = 5
DISTURBED_AT_MOST = 0.1

#: Untimed rounds before the first, in seconds: caches of every kind fill, and the clocks rise from
#: where preparing the candidates left them. Whether they rose enough is seen in the samples.
WARM_SECONDS = 0.1
#: Wanted length of a sample of several calls, in us and in steps of the clock: the 1 or 2 us that
#: the two events and the start of a graph add are 1 % of it.
SAMPLE_US = 200.0
SAMPLE_STEPS = 500
#: Calls in a sample, at most. A captured chain is launched at once, so it may be longer.
MAX_CALLS = 64
MAX_CHAIN = 200
#: Layers in a chain: `num_hidden_layers` of transformers' DeepseekV4Config.
LAYERS = 43
#: Calls between two looks at the host's clock. The queue of a device holds some 1024 launches, and
#: no candidate launches more than about 60 kernels, so that none of these calls waits for room.
HOST_CALLS = 16
#: Rounds that no limit on time cuts short: fewer give no verdict.
FEWEST_ROUNDS = 10
#: Rounds between two looks at whether enough is known: a look takes the host some milliseconds.
LOOK_EVERY = 5
#: The flush lasts this many times as long as the host takes to enqueue what follows it.
HEADROOM = 2.0
#: And no longer than this in us: what is still not enqueued by then waits for the device itself.
MAX_HOLD_US = 20_000.0


@lru_cache(maxsize=1 << 12)
def _rank(count: int, confidence: float) -> int:
    """How many order statistics to leave out on either side of a median's interval; -1: too few."""
    allowed, whole = ((1 - confidence) / 2).as_integer_ratio()
    tail, rank = 0, -1  # of 2**count outcomes, those with at most `rank` values below the median
    while (tail + math.comb(count, rank + 1)) * whole <= allowed << count:
        rank += 1
        tail += math.comb(count, rank)
    return rank


def median_interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval that holds the true median with this confidence, whatever the distribution.

    Two order statistics, by the binomial distribution of how many of the values lie below the
    median. (-inf, inf) where there are too few values: below 6 for 95 %, below 8 for 99 %.
    """
    ordered = sorted(values)
    rank = _rank(len(ordered), confidence)
    if rank < 0:
        return -math.inf, math.inf
    return ordered[rank], ordered[-1 - rank]


def spread(values: Sequence[float]) -> float:
    """Half of the interquartile range over the median; 0 below two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / (2 * middle)


@dataclass(frozen=True)
class Samples:
    """What `measure` saw of one candidate in one mode.

    times_us: time of one call in each kept round, in the order of the rounds.
    mode: "flushed", "resident", "graph", "host" or "chain".
    stopped: what ended it: this candidate's median was known to the relative error asked for, or
        the limit on rounds or on time came first.
    rounds: how many were run. `kept`: the numbers of those in `times_us`.
    disturbed_us: the times of the rounds left out (see DISTURBED).
    seed: of the rounds' orders (see `order`).
    calls: calls in one sample, whose time was divided by this.
    late: samples into which the host's launch cost may have leaked: the device began them before
        all was enqueued. Not known, and 0, in mode "host".
    resolution_us: the clock's smallest step, over `calls`.
    """

    times_us: tuple[float, ...]
    mode: Mode = "resident"
    stopped: Stopped = "rounds"
    rounds: int = 0
    kept: tuple[int, ...] = ()
    disturbed_us: tuple[float, ...] = ()
    seed: int = 0
    calls: int = 1
    late: int = 0
    resolution_us: float = 0.0

    def __post_init__(self) -> None:
        """Number the rounds where nobody did."""
        if not self.kept:
            object.__setattr__(self, "kept", tuple(range(len(self.times_us))))
        if not self.rounds:
            object.__setattr__(self, "rounds", len(self.times_us) + self.dropped)

    @cached_property
    def median_us(self) -> float:
        """The median time of a call."""
        return statistics.median(self.times_us)

    @cached_property
    def spread(self) -> float:
        """Half of the interquartile range, relative to the median."""
        return spread(self.times_us)

    @cached_property
    def relative_error(self) -> float:
        """Half of the 95 % interval of the median, or of the clock's step, over the median."""
        low, high = median_interval(self.times_us)
        return max(high - low, self.resolution_us) / (2 * self.median_us)

    @property
    def dropped(self) -> int:
        """How many rounds were left out as disturbed."""
        return len(self.disturbed_us)

    def gbps(self, useful_bytes: int) -> float:
        """Bandwidth in GB/s (1e9 bytes a second) of a call that moves so many bytes."""
        return useful_bytes / self.median_us / 1e3

    def to_dict(self) -> dict[str, Any]:
        """For a record: every field, and the figures drawn from them.

        The relative error is None where there are too few samples to tell.
        """
        error = self.relative_error if math.isfinite(self.relative_error) else None
        return asdict(self) | {
            "median_us": self.median_us,
            "spread": self.spread,
            "relative_error": error,
            "dropped": self.dropped,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Samples:
        """The samples of a record; what is drawn from them is drawn anew."""
        kept = {one.name: record[one.name] for one in fields(cls) if one.name in record}
        lists = ("times_us", "kept", "disturbed_us")
        return cls(**kept | {name: tuple(kept[name]) for name in lists if name in kept})


def order(names: Iterable[str], seed: int, number: int) -> list[str]:
    """The candidates in the order they run in, in the round of this number."""
    shuffled = sorted(names)
    random.Random(f"{seed}/{number}").shuffle(shuffled)
    return shuffled


@dataclass
class _Timer:
    """One candidate, ready to be sampled in one mode."""

    clock: Clock
    mode: Mode
    call: Call
    flushes: int = 0
    warm: int = 0
    calls: int = 1  # calls of `call` in a sample
    chain: int = 1  # calls of the candidate in a `call`
    late: int = 0
    waits: bool = False  # the call itself waits for the device, so the host is never ahead
    times_us: list[float] = field(default_factory=list)

    @classmethod
    def make(cls, call: Call, clock: Clock, mode: Mode) -> _Timer:
        """Compile the candidate and look how long it takes, then choose how to sample it."""
        call()
        clock.synchronize()
        timer = cls(clock, mode, call)
        if mode == "host":
            timer.calls = HOST_CALLS
            return timer
        host_us = min(clock.host_us(call, 2) for _ in range(2)) if clock.asynchronous else 0.0

        def ahead(calls: int) -> int:
            """Flushes that last until so many calls, two events and a replay are enqueued.

            Each of those costs the host about as much as a call does.
            """
            enqueued = min(HEADROOM * host_us * (calls + 2), MAX_HOLD_US)
            return max(1, math.ceil(enqueued / clock.flush_us)) if clock.asynchronous else 1

        # Behind too short a flush the device would wait for the host, and a sample would be taken
        # to be long enough that is not.
        wanted = max(SAMPLE_US, SAMPLE_STEPS * clock.resolution_us)
        one = min(clock.interval(call, flushes=ahead(2), warm=1).time_us for _ in range(3))
        needed = math.ceil(wanted / max(one - clock.empty_us, clock.resolution_us, 0.1))
        if mode == "resident":
            timer.warm, timer.calls = 1, min(needed, MAX_CALLS)
        elif mode in GRAPHS:
            timer.chain = LAYERS if mode == "chain" else min(needed, MAX_CHAIN)
            timer.call, timer.warm = clock.captured(call, timer.chain), 1
        if clock.asynchronous or mode == "flushed":
            timer.flushes = ahead(timer.warm + timer.calls)
        return timer

    def sample(self) -> float:
        """The time of one call of the candidate, in us."""
        if self.mode == "host":
            return self.clock.host_us(self.call, self.calls)
        seen = self._interval()
        while not (seen.ahead or self.waits):
            if 2 * self.flushes * self.clock.flush_us > MAX_HOLD_US:
                self.waits = True
            else:
                self.flushes *= 2
                seen = self._interval()
        self.late += not seen.ahead
        return max(seen.time_us, self.clock.resolution_us) / (self.calls * self.chain)

    def _interval(self) -> Interval:
        return self.clock.interval(
            self.call, flushes=self.flushes, warm=self.warm, calls=self.calls
        )  # fmt: skip


class Rounds:
    """Interleaved rounds over several candidates, one at a time, for whoever sets their pace.

    `measure` runs them until it knows enough. Two processes that each run a version of ours in
    turn run them by number, and their samples pair up by it.
    """

    def __init__(
        self, candidates: Mapping[str, Call], clock: Clock, mode: Mode, *, seed: int = 0
    ) -> None:
        reason = clock.unavailable(mode)
        if reason:
            raise ValueError(f"mode: expected one this device has, got {mode}: {reason}")
        self.clock, self.mode, self.seed, self.count = clock, mode, seed, 0
        self._timers = {name: _Timer.make(call, clock, mode) for name, call in candidates.items()}

    def warm_up(self, seconds: float = WARM_SECONDS) -> None:
        """Run rounds whose times are forgotten."""
        start = self.clock.now()
        while True:
            for timer in self._timers.values():
                timer.sample()
            if self.clock.now() - start >= seconds:
                break
        for timer in self._timers.values():
            timer.late = 0

    def run(self) -> None:
        """Run one round."""
        for name in order(self._timers, self.seed, self.count):
            timer = self._timers[name]
            timer.times_us.append(timer.sample())
        self.count += 1

    def result(
        self, limit: Literal["rounds", "time"] = "rounds", relative_error: float = 0.0
    ) -> dict[str, Samples]:
        """What was seen so far, disturbed rounds left out.

        `limit` is what ends it for the candidates not yet known to the relative error.
        """
        disturbed = set(self._disturbed())
        kept = tuple(number for number in range(self.count) if number not in disturbed)
        found = {
            name: Samples(
                times_us=tuple(timer.times_us[number] for number in kept),
                mode=self.mode,
                stopped=limit,
                rounds=self.count,
                kept=kept,
                disturbed_us=tuple(timer.times_us[number] for number in sorted(disturbed)),
                seed=self.seed,
                calls=timer.calls * timer.chain,
                late=timer.late,
                resolution_us=self.clock.resolution_us / (timer.calls * timer.chain),
            )
            for name, timer in self._timers.items()
        }
        return {
            name: replace(one, stopped="relative error")
            if one.relative_error <= relative_error
            else one
            for name, one in found.items()
        }

    def _disturbed(self) -> list[int]:
        """The rounds that are left out, by the rule of DISTURBED."""
        slow = [0] * self.count
        for timer in self._timers.values():
            allowed = 1 + max(DISTURBED, DISTURBED_SPREADS * spread(timer.times_us))
            bound = allowed * statistics.median(timer.times_us)
            for number, time_us in enumerate(timer.times_us):
                slow[number] += time_us > bound
        found = [number for number, count in enumerate(slow) if 2 * count >= len(self._timers)]
        return found if len(found) <= DISTURBED_AT_MOST * self.count else []


def measure(
    candidates: Mapping[str, Call],
    clock: Clock,
    mode: Mode,
    *,
    seed: int = 0,
    relative_error: float = 0.005,
    min_rounds: int = 20,
    max_rounds: int = 200,
    max_seconds: float = 10.0,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Samples]:
    """Time the candidates in interleaved rounds; return each one's samples, under its name.

    Args:
        candidates: what to call. Each has passed its check, and takes the current stream.
        clock: of their device.
        mode: "flushed": one call behind a flush of the last-level cache. "resident": calls back to
            back on data that may stay in the cache. "graph": the same, captured and replayed.
            "host": how long the host is busy with a call that it does not wait for. "chain": of
            calls that are layers of a model, LAYERS in one graph.
        seed: of the rounds' orders.
        relative_error: stop when every candidate's median is known to this, by the 95 % interval
            of `median_interval`. Not before `min_rounds`.
        max_rounds, max_seconds: stop in any case, but the time does not before FEWEST_ROUNDS, or
            `min_rounds` if that is less. It is counted from the first round that counts; compiling
            and warming up come before.
        progress: called after each round with its number from 1 and a guess of the share done.

    Raises ValueError for a mode that this device has not. What a candidate raises is not caught:
    try `clock.captured(call, 1)` first to learn whether one can be captured.
    """
    rounds = Rounds(candidates, clock, mode, seed=seed)
    if not candidates:
        return {}
    rounds.warm_up()
    start, worst = clock.now(), math.inf
    while True:
        rounds.run()
        count, share = rounds.count, (clock.now() - start) / max_seconds
        over = (share >= 1 and count >= min(FEWEST_ROUNDS, min_rounds)) or count >= max_rounds
        if over or count % LOOK_EVERY == 0:
            errors = [one.relative_error for one in rounds.result().values()]
            worst = max(errors, default=0.0)
            over = over or (count >= min_rounds and worst <= relative_error)
        if progress is not None:
            known = min(count / min_rounds, (relative_error / max(worst, 1e-9)) ** 2)
            progress(count, 1.0 if over else min(1.0, max(share, count / max_rounds, known)))
        if over:
            limit: Literal["rounds", "time"] = "time" if share >= 1 else "rounds"
            return rounds.result(limit, relative_error)
