"""Sampling: rounds, orders, limits, disturbances; what a clock leaves out of a time."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_prologue.measure import ceilings, clock, timing
from dsv4_prologue.measure.ceilings import Ceiling, best_copy, copy_candidates, drift_mark, limit
from dsv4_prologue.measure.clock import Clock, DeviceClock, HostClock, cache_knee, smallest_step
from dsv4_prologue.measure.synthetic import SyntheticClock
from dsv4_prologue.measure.timing import MODES, Rounds, Samples, clock_for, measure, order

ONCE = pytest.mark.once


def kernels(clock: SyntheticClock, time_us: float, count: int = 1) -> Callable[[], None]:
    """A call of so many kernels, each of this time."""

    def call() -> None:
        for _ in range(count):
            clock.launch(time_us)

    return call


# ------------------------------------------------------------------------------------- rounds


@ONCE
def test_every_candidate_runs_once_a_round_in_an_order_of_the_seed() -> None:
    names = ["a", "b", "c", "d"]
    orders = [order(names, 7, number) for number in range(200)]
    assert all(sorted(one) == names for one in orders)
    assert orders == [order(reversed(names), 7, number) for number in range(200)]
    assert orders != [order(names, 8, number) for number in range(200)]
    first = Counter(one[0] for one in orders)
    assert all(30 < first[name] < 70 for name in names)


@ONCE
def test_rounds_run_in_that_order() -> None:
    device, ran = SyntheticClock(), []
    calls = {name: lambda name=name: (ran.append(name), device.launch(1.0)) for name in "abc"}
    rounds = Rounds(calls, device, "flushed", seed=3)
    ran.clear()
    for _ in range(20):
        rounds.run()
    assert ran == list(itertools.chain(*(order("abc", 3, number) for number in range(20))))


@ONCE
def test_stops_at_the_relative_error() -> None:
    device = SyntheticClock(noise=0.01)
    seen = measure({"a": kernels(device, 100.0)}, device, "flushed")["a"]
    assert seen.stopped == "relative error"
    assert 20 <= seen.rounds < 200
    assert seen.relative_error <= 0.005
    assert seen.median_us == pytest.approx(101, rel=0.01)


@ONCE
def test_stops_at_the_rounds_and_says_of_whom() -> None:
    device = SyntheticClock()
    noise = random.Random(1)
    calls = {
        "noisy": lambda: device.launch(100.0 * noise.uniform(0.8, 1.2)),
        "steady": kernels(device, 100.0),
    }
    seen = measure(calls, device, "flushed", max_rounds=40)
    assert (seen["noisy"].stopped, seen["noisy"].rounds) == ("rounds", 40)
    assert seen["noisy"].relative_error > 0.005
    assert (seen["steady"].stopped, seen["steady"].rounds) == ("relative error", 40)


@ONCE
def test_stops_at_the_time() -> None:
    device = SyntheticClock(noise=0.2)
    seen = measure({"slow": kernels(device, 50_000.0)}, device, "flushed", max_seconds=1.0)["slow"]
    assert seen.stopped == "time"
    assert 5 < seen.rounds < 25


@ONCE
def test_the_same_seed_gives_the_same_samples() -> None:
    def run(seed: int) -> dict[str, Samples]:
        device = SyntheticClock(seed=5)
        calls = {"a": kernels(device, 9.0), "b": kernels(device, 11.0)}
        return measure(calls, device, "flushed", seed=seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


@ONCE
def test_progress_grows_and_ends_at_1() -> None:
    device, told = SyntheticClock(), []
    measure(
        {"a": kernels(device, 9.0)}, device, "flushed", progress=lambda *seen: told.append(seen)
    )
    assert [count for count, _ in told] == list(range(1, len(told) + 1))
    assert all(0 < share <= 1 for _, share in told)
    assert told[-1][1] == 1


# ------------------------------------------------------------------------------- disturbances


def disturbed(share: float, factor: float, names: str = "ab") -> dict[str, Samples]:
    """Rounds of which a share takes longer, for everybody."""
    device, slow = SyntheticClock(), [False]
    calls = {
        name: lambda name=name: device.launch((10.0 + ord(name)) * (factor if slow[0] else 1.0))
        for name in names
    }
    rounds = Rounds(calls, device, "flushed")
    for number in range(100):
        slow[0] = number % round(1 / share) == 1
        rounds.run()
    return rounds.result()


@ONCE
def test_disturbed_rounds_are_left_out_and_counted() -> None:
    seen = disturbed(0.05, 1.5)
    assert {one.dropped for one in seen.values()} == {5}
    for one in seen.values():
        assert len(one.times_us) == 95
        assert one.rounds == 100
        assert 1 not in one.kept
        assert 2 in one.kept
        assert min(one.disturbed_us) > 1.4 * max(one.times_us)


@ONCE
@pytest.mark.parametrize(("share", "factor"), [(0.25, 1.5), (0.05, 1.05)])
def test_what_is_frequent_or_small_is_no_disturbance(share: float, factor: float) -> None:
    assert {one.dropped for one in disturbed(share, factor).values()} == {0}


@ONCE
def test_what_one_of_many_suffers_is_its_own() -> None:
    device, slow = SyntheticClock(), [False]
    calls = {name: kernels(device, 100.0) for name in "bcd"}
    calls["a"] = lambda: device.launch(300.0 if slow[0] else 100.0)
    rounds = Rounds(calls, device, "flushed")
    for number in range(100):
        slow[0] = number % 20 == 1
        rounds.run()
    assert rounds.result()["a"].dropped == 0


# -------------------------------------------------------------------------------------- modes


@ONCE
def test_flushed_leaves_the_launch_cost_out() -> None:
    """Eight kernels of 1 us that cost 5 us each to launch: the host is ahead of them."""
    device = SyntheticClock(noise=0.0)
    seen = measure({"a": kernels(device, 1.0, count=8)}, device, "flushed")["a"]
    assert seen.median_us == pytest.approx(8 + device.empty_us, abs=0.05)
    assert seen.calls == 1
    assert seen.late == 0


@ONCE
def test_a_flush_too_short_is_made_longer() -> None:
    device = SyntheticClock(noise=0.0)
    device.flush_us = 10.0
    timer = timing._Timer.make(kernels(device, 1.0, count=8), device, "flushed")
    timer.flushes = 1
    assert timer.sample() == pytest.approx(8 + device.empty_us, abs=0.05)
    assert timer.flushes > 1
    assert timer.late == 0


@ONCE
def test_a_call_that_waits_for_the_device_is_late_and_says_so() -> None:
    device = SyntheticClock()

    def waits() -> None:
        device.launch(5.0)
        device.synchronize()
        device.launch(5.0)

    calls = {"waits": waits, "does not": kernels(device, 10.0)}
    seen = measure(calls, device, "flushed", max_rounds=30)
    assert seen["waits"].late == seen["waits"].rounds
    assert seen["does not"].late == 0
    assert seen["waits"].median_us == pytest.approx(16, rel=0.05)  # the launch is in it


@ONCE
@pytest.mark.parametrize("mode", ["resident", "graph"])
def test_small_times_are_taken_many_at_a_time(mode: timing.Mode) -> None:
    device = SyntheticClock(resolution_us=1.0)
    calls = {"small": kernels(device, 2.0), "large": kernels(device, 5000.0)}
    seen = measure(calls, device, mode, max_rounds=20)
    assert seen["small"].calls == (timing.MAX_CALLS if mode == "resident" else timing.MAX_CHAIN)
    assert seen["small"].median_us == pytest.approx(2.0, rel=0.01)
    assert seen["small"].resolution_us == 1.0 / seen["small"].calls
    assert seen["large"].calls == 1
    assert {one.late for one in seen.values()} == {0}


@ONCE
@pytest.mark.parametrize("mode", ["resident", "graph"])
def test_a_slow_launch_makes_no_sample_shorter(mode: timing.Mode) -> None:
    """The host takes 40 us to launch 2 us of work: the device must not be timed waiting for it."""
    device = SyntheticClock(launch_us=5.0)
    small = kernels(device, 0.25, count=8)
    seen = measure({"small": small}, device, mode, max_rounds=20)["small"]
    assert seen.calls >= 0.9 * min(timing.SAMPLE_US / 2.0, timing.MAX_CALLS)
    assert seen.median_us == pytest.approx(2.0, rel=0.02)
    assert seen.late == 0


@ONCE
def test_a_coarse_clock_is_never_sure() -> None:
    device = SyntheticClock(resolution_us=1.0)
    seen = measure({"a": kernels(device, 7.0)}, device, "flushed", max_rounds=30)["a"]
    assert seen.stopped == "rounds"
    assert seen.relative_error == pytest.approx(1 / 16, rel=0.1)


@ONCE
def test_host_cost_is_the_launches_not_the_work() -> None:
    device = SyntheticClock(launch_us=5.0)
    seen = measure({"a": kernels(device, 90.0, count=3)}, device, "host")["a"]
    assert seen.median_us == pytest.approx(15, rel=0.01)
    assert seen.calls == timing.HOST_CALLS


@ONCE
def test_a_mode_that_a_device_has_not_has_a_reason() -> None:
    host = HostClock()
    assert host.unavailable("graph") == "the CPU has no graphs"
    assert [mode for mode in MODES if not host.unavailable(mode)] == ["flushed", "resident"]
    with pytest.raises(ValueError, match="got graph: the CPU has no graphs"):
        measure({"a": lambda: None}, host, "graph")
    with pytest.raises(ValueError, match="no graphs"):
        host.captured(lambda: None, 1)


@ONCE
def test_nobody_to_measure() -> None:
    assert measure({}, SyntheticClock(), "flushed") == {}


@ONCE
def test_what_a_candidate_raises_comes_through() -> None:
    def fails() -> None:
        raise OSError("no such kernel")

    with pytest.raises(OSError, match="no such kernel"):
        measure({"a": fails}, SyntheticClock(), "flushed")


# -------------------------------------------------------------------------------------- clocks


@ONCE
@pytest.mark.parametrize("mode", ["flushed", "resident"])
def test_the_host_s_clock(mode: timing.Mode) -> None:
    host = clock_for("cpu")
    assert isinstance(host, HostClock)
    assert 0 < host.resolution_us < 100
    x = torch.zeros(1 << 16)
    seen = measure({"a": lambda: x.add_(1)}, host, mode, max_rounds=10, max_seconds=0.5)["a"]
    assert min(seen.times_us) > 0
    assert seen.late == 0
    assert json.loads(json.dumps(host.describe()))["cache_bytes"] == host.cache.size


@ONCE
def test_the_host_s_cache_where_nothing_tells_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(HostClock, "CACHE_FILE", tmp_path / "size")
    assert HostClock().cache == (64 << 20, "assumed: nothing tells it")
    (tmp_path / "size").write_text("1024K\n")
    assert HostClock().cache.size == 1 << 20


class FakeModule:
    """A torch device module of no vendor, its tensors on the device "meta", in virtual time.

    Only what `DeviceClock` may use is there. `log` says what was done in which order.
    """

    def __init__(self, l2_cache_size: int | None) -> None:
        self.log: list[str] = []
        self.time_us = 0.0
        self.properties = SimpleNamespace()
        if l2_cache_size is not None:
            self.properties.L2_cache_size = l2_cache_size
        fake = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing, self.at = enable_timing, 0.0

            def record(self) -> None:
                fake.log.append("record")
                fake.time_us += 1.0
                self.at = fake.time_us

            def query(self) -> bool:
                fake.log.append("query")
                return False

            def synchronize(self) -> None:
                fake.log.append("wait")

            def elapsed_time(self, other: Event) -> float:
                assert self.timing
                return (other.at - self.at) / 1e3

        self.Event = Event

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        assert device.type == "meta"
        return self.properties

    def synchronize(self, device: torch.device) -> None:
        del device
        self.log.append("synchronize")


@ONCE
def test_a_device_of_no_known_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeModule(100 << 20)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    device = clock_for("meta")
    assert isinstance(device, DeviceClock)
    assert device.cache == (100 << 20, "asked of torch: L2_cache_size")
    assert device.flush_bytes == 400 << 20
    assert device.unavailable("graph") == "torch.meta has no graphs"
    module.log.clear()
    seen = device.interval(lambda: module.log.append("call"), flushes=1, warm=1, calls=2)
    assert module.log == ["call", "record", "call", "call", "record", "query", "wait"]
    assert seen == (pytest.approx(1.0), True)


@ONCE
def test_graphs_of_a_device_of_no_known_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = FakeModule(100 << 20)

    class METAGraph:
        def replay(self) -> None:
            module.log.append("replay")

    class Capture:
        def __init__(self, graph: METAGraph) -> None:
            assert isinstance(graph, METAGraph)

        def __enter__(self) -> None:
            module.log.append("begin")

        def __exit__(self, *_: object) -> None:
            module.log.append("end")

    module.METAGraph, module.graph = METAGraph, Capture
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    device = clock_for("meta")
    assert device.unavailable("graph") == ""
    module.log.clear()
    device.captured(lambda: module.log.append("call"), 3)()
    assert module.log == ["begin", "call", "call", "call", "end", "replay"]


@ONCE
def test_a_device_that_does_not_tell_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: FakeModule(None))
    device = clock_for("meta")
    assert device.cache.size in (2 << 30, clock.ASSUMED_CACHE_BYTES)
    assert device.flush_bytes >= 4 * device.cache.size


@ONCE
def test_a_cache_is_where_bandwidth_falls() -> None:
    """60 MB at twice the bandwidth of 4 TB/s; launches bound the small sizes."""
    times = {}
    for power in range(20, 31):
        size = 1 << power
        speed = 2.0 if size <= 60e6 else 1.0
        times[size] = size / (speed * 4e6) + 0.5
    assert cache_knee(times) == 64 << 20
    assert cache_knee({size: float(size) for size in times}) is None
    assert cache_knee({size: time_us + 5 for size, time_us in times.items()}) is None


@ONCE
def test_smallest_step() -> None:
    assert smallest_step([3.0, 1.0, 1.5, 3.0, 1.0]) == 0.5
    assert smallest_step([1.0, 1.0]) == 0.0


# ------------------------------------------------------------------------------------- samples


@ONCE
def test_samples_survive_a_record() -> None:
    one = disturbed(0.05, 1.5)["a"]
    record = json.loads(json.dumps(one.to_dict()))
    assert Samples.from_dict(record | {"more": 1}) == one
    assert record["median_us"] == one.median_us
    assert record["dropped"] == 5


@ONCE
def test_figures_of_samples() -> None:
    one = Samples(tuple(float(value) for value in range(1, 102)))
    assert one.median_us == 51
    assert one.spread == pytest.approx(25 / 51)
    assert one.gbps(51_000) == pytest.approx(1.0)
    assert (one.rounds, one.kept[-1]) == (101, 100)
    few = Samples((3.0, 5.0))
    assert few.relative_error == float("inf")
    assert few.to_dict()["relative_error"] is None


# ------------------------------------------------------------------------------------ ceilings


def ceiling(gbps: float, spread: float = 0.001, *, ramped: bool = True) -> Ceiling:
    return Ceiling(gbps, spread, "copy torch", {"copy torch": gbps}, 1, ramped, gbps, 30, 0.3)


@ONCE
def test_drift_above_the_spread_marks_a_run() -> None:
    before = ceiling(1000)
    assert drift_mark(before, ceiling(1004)) == ""
    assert drift_mark(before, ceiling(980, spread=0.03)) == ""
    assert "moved by -2.00% over the run, from 1000 to 980" in drift_mark(before, ceiling(980))
    assert "when the ceiling after was taken" in drift_mark(before, ceiling(1000, ramped=False))
    assert ceilings.drift(before, ceiling(1010)) == pytest.approx(0.01)
    assert before.time_us(1_000_000) == pytest.approx(1.0)
    json.dumps(before.to_dict())


@ONCE
def test_a_ceiling_that_never_stays_is_not_ramped() -> None:
    device = SyntheticClock(noise=0.0)
    growing = itertools.count(1000)
    seen = ceilings.ramp(lambda: device.launch(1000.0 + 20 * next(growing)), device, 1.0)
    assert not seen.stable
    assert seen.seconds >= 1.0


@ONCE
def test_copies_of_the_cpu_are_torch_s() -> None:
    calls = copy_candidates(1_001, "cpu")
    assert set(calls) == {"copy torch", "rmw torch"}
    for call in calls.values():
        call()
    name, seen = limit(1 << 16, HostClock(), "resident", max_rounds=20, max_seconds=0.5)
    assert name in calls
    assert seen.median_us > 0


@ONCE
def test_the_limit_is_the_best_of_the_copies() -> None:
    names = {"ours": 1.0, "copy torch": 3.0, "rmw torch": 2.0}
    samples = {name: Samples((time_us,)) for name, time_us in names.items()}
    assert best_copy(samples) == "rmw torch"
    assert best_copy({"ours": samples["ours"]}) == ""


@ONCE
def test_the_ceiling_of_a_cpu() -> None:
    seen = ceilings.measure_ceiling(
        HostClock(), bytes_moved=1 << 22, max_ramp_seconds=0.4, max_seconds=0.4
    )
    assert seen.gbps == max(seen.figures.values()) > 0
    assert seen.ramp_iterations > 0


# ---------------------------------------------------------------------------- on an accelerator


@pytest.fixture
def real(accelerator: str) -> Clock:
    return clock_for(accelerator)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_an_accelerator(real: Clock, mode: timing.Mode) -> None:
    if real.unavailable(mode):
        pytest.skip(real.unavailable(mode))
    x = torch.zeros(1 << 20, device=real.device)
    calls = {"one": lambda: x.add_(1), "ten": lambda: [x.add_(1) for _ in range(10)]}
    seen = measure(calls, real, mode)
    assert seen["one"].median_us < seen["ten"].median_us
    assert all(one.late <= 0.1 * one.rounds for one in seen.values())
    assert 0 < real.resolution_us < 10


def test_a_flush_costs_what_was_resident(real: Clock) -> None:
    x = torch.zeros(real.cache.size // 16, device=real.device)  # a quarter of the cache
    call = {"a": lambda: x.add_(1)}
    flushed, resident = (measure(call, real, mode)["a"] for mode in ("flushed", "resident"))
    assert flushed.median_us > resident.median_us


def test_copies_of_an_accelerator_are_right_and_of_several_widths(real: Clock) -> None:
    calls = copy_candidates(1 << 20, real.device)
    assert {"copy torch", "rmw torch"} < set(calls)
    seen = measure(calls, real, "flushed", max_rounds=20)
    assert best_copy(seen) in calls


@pytest.mark.usefixtures("kernels")
def test_copy_kernels() -> None:
    """In the interpreter, too: every word is moved, the tail included, and none beside it."""
    from dsv4_prologue.measure.copies import change_kernel, copy_kernel
    from dsv4_prologue.selection import default_device

    device = default_device()
    source = torch.arange(1003, dtype=torch.int32, device=device)
    out = torch.full((1010,), -7, dtype=torch.int32, device=device)
    copy_kernel[(4,)](out, source, 1003, WORDS=256)
    assert torch.equal(out[:1003], source)
    assert bool((out[1003:] == -7).all())
    change_kernel[(4,)](out, 1003, WORDS=256)
    assert torch.equal(out[:1003], ~source)
    assert bool((out[1003:] == -7).all())
