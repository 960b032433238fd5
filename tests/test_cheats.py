"""The harness is tested with cheats: ways to look fast without doing the work, each by its name.

Every one is a call as somebody could write it, on a rig: the synthetic device, where it happens
the same way every time; the host's own clock; and an accelerator, where there is one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dsv4_prologue.measure import ceilings, guard
from dsv4_prologue.measure.ceilings import Ceiling, copy_candidates, measure_ceiling
from dsv4_prologue.measure.clock import Call, Clock, DeviceClock, HostClock
from dsv4_prologue.measure.guard import (
    Check,
    Fault,
    Work,
    admit,
    examine,
    figure_faults,
    handicapped,
    known_answer,
)
from dsv4_prologue.measure.synthetic import SyntheticClock
from dsv4_prologue.measure.timing import Rounds, Samples, measure
from dsv4_prologue.selection import default_device

ONCE = pytest.mark.once


class Rig:
    """A device and its clock: how a kernel runs there, in order or not. This one is the host."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.released = threading.Event()
        self.threads: list[threading.Thread] = []

    def kernel(self, effect: Call) -> None:
        """Run a kernel on the timed stream."""
        effect()

    def aside(self, effect: Call, *, waits: bool, first: bool = False) -> None:
        """Run a kernel on another stream, which `waits` for the timed one or not, and long work:
        before it, or with `first` after it.
        """
        raise NotImplementedError

    def join(self) -> None:
        """Let the timed stream wait for the other."""
        raise NotImplementedError

    def later(self, effect: Call) -> None:
        """Have an effect after the call returned, on no stream: when somebody waits for nothing."""
        self.threads.append(threading.Thread(target=lambda: self.released.wait() and effect()))
        self.threads[-1].start()
        self.clock.wait = self.release

    def release(self, seconds: float = 0.0) -> None:
        """Let the threads have their effects; a clock's `wait` of fixed outcome."""
        del seconds
        self.released.set()
        for thread in self.threads:
            thread.join()
        self.clock.synchronize()


class SyntheticRig(Rig):
    clock: SyntheticClock

    def kernel(self, effect: Call) -> None:
        self.clock.launch(10.0, effect)

    def aside(self, effect: Call, *, waits: bool, first: bool = False) -> None:
        if waits:
            self.clock.wait_stream("aside", "timed")
        self.clock.launch(1.0 if first else 500.0, effect, stream="aside")
        if first:
            self.clock.launch(500.0, stream="aside")

    def join(self) -> None:
        self.clock.wait_stream("timed", "aside")

    def later(self, effect: Call) -> None:
        self.clock.later(20_000.0, effect)


class DeviceRig(Rig):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.module = torch.get_device_module(clock.device)
        self.stream = self.module.Stream()
        self.busy = torch.zeros(1 << 28, dtype=torch.uint8, device=clock.device)

    def aside(self, effect: Call, *, waits: bool, first: bool = False) -> None:
        if waits:
            self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            for step in (effect, self._work) if first else (self._work, effect):
                step()

    def _work(self) -> None:
        for _ in range(8):
            self.busy.fill_(1)

    def join(self) -> None:
        self.module.current_stream().wait_stream(self.stream)


SYNTHETIC, HOST = pytest.param("synthetic", marks=ONCE), pytest.param("host", marks=ONCE)
RIGS = (SYNTHETIC, HOST, "accelerator")
STREAMS = (SYNTHETIC, "accelerator")  # rigs with more than one, and a speed that can be relied on


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "accelerator" and default_device() == "cpu":
        pytest.skip("needs an accelerator")
    made = {
        "synthetic": lambda: SyntheticRig(SyntheticClock()),
        "host": lambda: Rig(HostClock()),
        "accelerator": lambda: DeviceRig(DeviceClock(torch.device(default_device()))),
    }[request.param]()
    yield made
    made.release()


class Task:
    """y = 3 x + 1 over int32, and every way not to compute it."""

    COUNT = 10_007

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.x = torch.zeros(self.COUNT, dtype=torch.int32, device=rig.clock.device)
        self.y = torch.zeros_like(self.x)
        self.work = Work((self.y,), self.fill, self.expected)
        self.kept: Tensor | None = None

    def source(self, seed: int) -> Tensor:
        place = torch.arange(self.COUNT, dtype=torch.int32, device=self.rig.clock.device)
        return place * 7 + 1000 * seed

    def fill(self, seed: int) -> None:
        self.x.copy_(self.source(seed))
        self.y.fill_(-1)

    def expected(self, seed: int) -> tuple[Tensor, ...]:
        return (self.source(seed) * 3 + 1,)

    def compute(self) -> None:
        self.y.copy_(self.x * 3 + 1)

    # Calls.

    def honest(self) -> None:
        self.rig.kernel(self.compute)

    def does_nothing(self) -> None:
        self.rig.kernel(lambda: None)

    def does_every_other(self) -> None:
        self.rig.kernel(lambda: self.y[::2].copy_(self.x[::2] * 3 + 1))

    def leaves_the_tail(self) -> None:
        count = self.COUNT // 256 * 256
        self.rig.kernel(lambda: self.y[:count].copy_(self.x[:count] * 3 + 1))

    def computes_something_else(self) -> None:
        self.rig.kernel(lambda: self.y.copy_(self.x * 3 + (self.x % 5 == 0)))

    def answers_from_memory(self) -> None:
        def effect() -> None:
            if self.kept is None:
                self.kept = self.x * 3 + 1
            self.y.copy_(self.kept)

        self.rig.kernel(effect)

    def works_once(self) -> None:
        """Works for the first inputs only, for as long as they are there."""

        def effect() -> None:
            if self.kept is None:
                self.kept = self.x.clone()
            if torch.equal(self.x, self.kept):
                self.compute()

        self.rig.kernel(effect)

    def writes_an_old_buffer(self) -> None:
        """Keeps writing where it wrote while the first inputs were there."""

        def effect() -> None:
            if self.kept is None:
                self.kept = self.x.clone()
            where = self.y if torch.equal(self.x, self.kept) else torch.empty_like(self.y)
            where.copy_(self.x * 3 + 1)

        self.rig.kernel(effect)

    def returns_before_it_is_done(self) -> None:
        self.rig.later(self.compute)

    def runs_aside(self) -> None:
        self.rig.aside(self.compute, waits=False)

    def runs_aside_and_does_not_join(self) -> None:
        self.rig.aside(self.compute, waits=True)

    def answers_first_and_works_on_aside(self) -> None:
        self.rig.aside(self.compute, waits=True, first=True)

    def runs_aside_and_joins(self) -> None:
        self.rig.aside(self.compute, waits=True)
        self.rig.join()


CHEATS: dict[str, tuple[Callable[[Task], None], str, str]] = {
    "returns at once": (Task.does_nothing, "returned early", "nothing was written"),
    "skips half": (Task.does_every_other, "returned early", "5003 of 10007 elements were not"),
    "leaves the tail": (Task.leaves_the_tail, "left the tail", "the last 23 of 10007"),
    "is wrong": (Task.computes_something_else, "wrong", "of 10007 elements are wrong"),
    "stale answer": (Task.answers_from_memory, "stale", "that to the inputs before"),
    "works once": (Task.works_once, "stale", "it worked once"),
    "stale buffer": (Task.writes_an_old_buffer, "stale", "it worked once"),
    "not done yet": (Task.returns_before_it_is_done, "returned early", "right only 0.2 s after"),
}
ASIDE: dict[str, tuple[Callable[[Task], None], str]] = {
    "unordered": (Task.runs_aside, "wrong in the order of the timed stream"),
    "not joined": (Task.runs_aside_and_does_not_join, "the timed stream"),
    "answer first": (Task.answers_first_and_works_on_aside, "the timed stream"),
}


@pytest.mark.parametrize("rig", RIGS, indirect=True)
def test_who_does_the_work_passes(rig: Rig) -> None:
    task = Task(rig)
    seen = examine("honest", task.honest, task.work, rig.clock)
    assert seen == Check("honest", ())
    assert seen.passed


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("rig", RIGS, indirect=True)
def test_a_cheat_is_caught_and_named(rig: Rig, cheat: str) -> None:
    call, name, says = CHEATS[cheat]
    task = Task(rig)
    (fault,) = examine(cheat, lambda: call(task), task.work, rig.clock).faults
    assert fault.name == name
    assert says in fault.text


@pytest.mark.parametrize("rig", STREAMS, indirect=True)
def test_work_on_another_stream_that_is_joined_is_honest(rig: Rig) -> None:
    task = Task(rig)
    assert examine("joins", task.runs_aside_and_joins, task.work, rig.clock).faults == ()


@pytest.mark.parametrize("cheat", ASIDE)
@pytest.mark.parametrize("rig", STREAMS, indirect=True)
def test_work_on_another_stream_is_caught(rig: Rig, cheat: str) -> None:
    call, says = ASIDE[cheat]
    task = Task(rig)
    (fault,) = examine(cheat, lambda: call(task), task.work, rig.clock).faults
    assert fault.name == "another stream"
    assert says in fault.text


@ONCE
def test_answering_first_shows_in_what_is_left_running() -> None:
    """The answer itself was right and in order: only the device's being busy tells."""
    task = Task(SyntheticRig(SyntheticClock(noise=0.0)))
    call = task.answers_first_and_works_on_aside
    fault = guard._check_stream(call, task.rig.clock)
    assert fault is not None
    assert "the device worked on for" in fault.text


class BusyHost(SyntheticClock):
    """A host that is kept from seeing that its device is idle, the first ten times it looks."""

    looks = 0

    def left_running_us(self, call: Call, *, flushes: int, calls: int) -> float:
        self.looks += 1
        left_us = super().left_running_us(call, flushes=flushes, calls=calls)
        return max(left_us, 130.0 if self.looks <= 10 else 0.0)


@ONCE
def test_a_busy_host_is_not_taken_for_another_stream() -> None:
    """As seen on an H200: 130 us, five times in a row, after calls that were through."""
    clock = BusyHost(noise=0.0)
    assert guard._check_stream(Task(SyntheticRig(clock)).honest, clock) is None
    assert clock.looks == 11

    clock = BusyHost(noise=0.0)
    task = Task(SyntheticRig(clock))
    assert guard._check_stream(task.answers_first_and_works_on_aside, clock) is not None
    assert clock.looks == guard.LEFT_RUNNING_TRIES


@ONCE
def test_a_graph_is_examined_by_its_replays() -> None:
    task = Task(SyntheticRig(SyntheticClock()))
    replay = task.rig.clock.captured(task.honest, 1)
    assert examine("honest", replay, task.work, task.rig.clock).passed
    replay = task.rig.clock.captured(task.does_nothing, 1)
    assert not examine("idle", replay, task.work, task.rig.clock).passed


# ---------------------------------------------------------- what a figure says against itself

#: Of the synthetic device, in bytes a us: 1000 GB/s. Its copies move 512 MiB, two flushes' worth.
SPEED = 1e6
MOVED = 512 << 20


def copies(clock: SyntheticClock) -> dict[str, Call]:
    """The best reaches SPEED."""
    shares = {"copy torch": 0.98, "copy wide": 0.8, "rmw": 1.0}
    return {
        name: lambda share=share: clock.launch(MOVED / (share * SPEED))
        for name, share in shares.items()
    }


def synthetic_ceiling(clock: SyntheticClock, max_ramp_seconds: float = 5.0) -> Ceiling:
    return measure_ceiling(
        clock, candidates=copies(clock), bytes_moved=MOVED, max_ramp_seconds=max_ramp_seconds
    )


@ONCE
def test_a_ceiling_is_taken_with_ramped_clocks() -> None:
    """The card of the seed: 1209.7 GB/s idle, 1397 ramped."""
    clock = SyntheticClock(idle_speed=1209.7 / 1397, ramp_us=400_000)
    seen = synthetic_ceiling(clock)
    assert seen.ramped
    assert seen.best == "rmw"
    assert seen.gbps == pytest.approx(1000, rel=0.01)
    assert seen.idle_gbps == pytest.approx(980 * 1209.7 / 1397, rel=0.01)
    assert seen.ramp_iterations > 500
    assert seen.figures["copy wide"] == pytest.approx(800, rel=0.01)


@ONCE
def test_timed_idle() -> None:
    """A ceiling taken at the top of a script, and then an operator above 100 % of it."""
    clock = SyntheticClock(idle_speed=0.8, ramp_us=3_000_000)
    ceiling = synthetic_ceiling(clock, max_ramp_seconds=0.05)
    assert not ceiling.ramped
    ceilings.ramp(lambda: clock.launch(500.0), clock)
    ours = measure({"ours": lambda: clock.launch(MOVED / (0.97 * SPEED))}, clock, "flushed")["ours"]
    faults = {fault.name: fault.text for fault in figure_faults(ours, MOVED, ceiling, clock)}
    assert "the ceiling still moved after" in faults["timed idle"]
    assert "the ceiling was taken with idle clocks" in faults["above the ceiling"]


@ONCE
def test_clocks_that_rise_while_it_is_timed() -> None:
    """The ceiling was fine, then the device idled."""
    clock = SyntheticClock(idle_speed=0.8, ramp_us=400_000)
    ceiling = synthetic_ceiling(clock)
    assert ceiling.ramped
    call = lambda: clock.launch(MOVED / (0.9 * SPEED))  # noqa: E731
    rounds = Rounds({"ours": call}, clock, "flushed")
    clock.pause(1e6)
    for _ in range(600):
        rounds.run()
    (fault,) = figure_faults(rounds.result()["ours"], MOVED, ceiling, clock)
    assert fault.name == "timed idle"
    assert "its last third took -" in fault.text


@pytest.mark.parametrize("rig", STREAMS, indirect=True)
def test_speed_that_changes_while_it_is_timed(rig: Rig) -> None:
    """As when the clocks change: the work grows less, or more, in the course of the rounds."""
    buffer = torch.zeros(1 << 24, dtype=torch.uint8, device=rig.clock.device)
    amount = 0

    def call() -> None:
        for _ in range(amount):
            rig.kernel(lambda: buffer.fill_(1))

    ceiling = Ceiling(math.inf, 0.0, "copy", {}, 1, True, 1.0, 1, 1.0)
    for amounts, name in (((9, 6, 3), "timed idle"), ((3, 6, 9), "throttled")):
        amount = amounts[0]
        rounds = Rounds({"ours": call}, rig.clock, "flushed")
        for amount in amounts:  # noqa: B007 (the call reads it)
            for _ in range(10):
                rounds.run()
        seen = [one.name for one in figure_faults(rounds.result()["ours"], 1, ceiling, rig.clock)]
        assert seen == [name]


@ONCE
def test_what_does_not_move_all_its_bytes_is_above_the_ceiling() -> None:
    clock = SyntheticClock()
    ceiling = synthetic_ceiling(clock)
    calls = {
        "honest": lambda: clock.launch(MOVED / (0.99 * SPEED)),
        "skips a tenth": lambda: clock.launch(0.9 * MOVED / (0.99 * SPEED)),
    }
    seen = measure(calls, clock, "flushed")
    assert figure_faults(seen["honest"], MOVED, ceiling, clock) == ()
    (fault,) = figure_faults(seen["skips a tenth"], MOVED, ceiling, clock)
    assert fault.name == "above the ceiling"
    assert "110" in fault.text
    resident = measure(calls, clock, "resident")["skips a tenth"]
    assert figure_faults(resident, MOVED, ceiling, clock) == ()  # it may be resident
    small = measure({"small": lambda: clock.launch(1.0)}, clock, "flushed")["small"]
    assert figure_faults(small, 4 * clock.cache.size, ceiling, clock) == ()  # and so may it


def test_skipped_bytes_on_an_accelerator(accelerator: str) -> None:
    clock = DeviceClock(torch.device(accelerator))
    moved = max(1 << 30, 16 * clock.cache.size)
    ceiling = measure_ceiling(clock)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=accelerator).random_()
    out = torch.empty_like(source)
    part = moved // 2 * 3 // 4
    calls = {
        "honest": lambda: out.copy_(source),
        "skips a quarter": lambda: out[:part].copy_(source[:part]),
    }
    seen = measure(calls, clock, "flushed")
    names = {
        name: {fault.name for fault in figure_faults(one, moved, ceiling, clock)}
        for name, one in seen.items()
    }
    assert "above the ceiling" not in names["honest"]
    assert "above the ceiling" in names["skips a quarter"]


@pytest.mark.parametrize("rig", STREAMS, indirect=True)
def test_a_handicapped_baseline(rig: Rig) -> None:
    """Twice the time that its kernel needs, by its launch; on real devices 2.5 times, for sure."""
    clock = rig.clock
    if isinstance(clock, SyntheticClock):
        ceiling = synthetic_ceiling(clock)
        optimum = MOVED / (0.92 * SPEED)
        calls = {
            "shipped": lambda: clock.launch(2 * optimum),
            "optimum": lambda: clock.launch(optimum),
        }
        bound_us = ceiling.time_us(MOVED)
    else:
        calls = copy_candidates(MOVED, clock.device)
        copy = calls["copy torch"]
        source = torch.zeros(MOVED // 4, dtype=torch.uint8, device=clock.device)

        def shipped() -> None:
            for _ in range(2):
                copy()
            source.bitwise_not_()

        calls = {"shipped": shipped, "optimum": copy}
        bound_us = 0.0
    seen = measure(calls, clock, "flushed")
    bound_us = bound_us or seen["optimum"].median_us
    assert handicapped(seen["optimum"], bound_us) == ()
    (fault,) = handicapped(seen["shipped"], bound_us)
    assert fault.name == "handicapped"
    assert "sweep its launch" in fault.text


@ONCE
def test_no_time_without_a_check_in_this_run() -> None:
    some = Samples((1.0,) * 10)
    checks = {
        "honest": Check("honest", ()),
        "cheat": Check("cheat", (Fault("stale", "the answer is that to the inputs before these"),)),
    }
    shown, withheld = admit({"honest": some, "cheat": some, "stranger": some}, checks)
    assert shown == {"honest": some}
    assert withheld == {
        "cheat": "stale: the answer is that to the inputs before these",
        "stranger": "not checked in this run",
    }
    assert checks["cheat"].to_dict()["faults"][0]["name"] == "stale"


def test_known_answer(device: str) -> None:
    assert known_answer(device) == ()


@ONCE
def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.square
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "square", lambda x: real(x) + (x == 7))
        (fault,) = known_answer("cpu")
    assert (fault.name, fault.text) == ("device", "4096 of 4096 sums of squares are not 5559680")
    arange = torch.arange
    with monkeypatch.context() as patch:
        patch.setattr(torch, "arange", lambda *a, **k: arange(*a, **k).clamp_(max=(1 << 22) - 2))
        (fault,) = known_answer("cpu")
    assert fault.name == "device"
    assert "places hold another index than theirs" in fault.text
