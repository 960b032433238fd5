"""The runner: ours and the baselines side by side, each checked before it is timed.

    records: list[dict[str, Any]] = []
    run(Options("cuda", parse_shapes("core"), against=("copy", "portable")), records)

A record is one candidate at one shape in one mode. Beside the fields of `timing.Samples`, times
rounded to a nanosecond (none of them, if it was not timed), it has

    record            "bench"
    num_tokens, num_heads, mode
    candidate, form   "ours", "copy" or a baseline's name; what the call does with Q. "part":
                      a part of ours in place, and which
    card, forced, kernel, plan_reason     of ours at this shape, in every record
    launch            ours: the plan's; a baseline's: the arguments it was given; the best copy
    kernel_hash, card_hash, host_hash
    check             verdict ("ok", "differs", "not verified", "none"), reason, figures
    reason            why it was not timed; empty if it was
    useful_bytes      each input read once and each output written once
    gbps              useful bytes over the median time, in GB/s (1e9 bytes a second)
    utilisation       the same over the ceiling before the run; only of flushed data
    limit_us, limit_ratio                 time of the best bare copy of as many bytes, and over
                      ours; of what is done in place, of the read-modify-writes too
    rest_us, share    in mode chain: a layer without the call, and the call's share of a layer
    q_rank            in mode chain: the inner size of the product that makes q
    ceilings          before, after (None if the run was broken off), mark (empty if all is well)
    device_faults     before, after: what the device got wrong in work of known answer
    clock             cache, flush, resolution
    provenance        of a baseline
    verdicts          of ours: one for each baseline it can be compared with
    left_out          of ours: baselines that are not there or not timed, and why
    faults            what a figure's own size says against it
    process           1, or more where baselines could not live in one
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import dsv4_prologue
from dsv4_prologue.contract import CORE_NUM_HEADS, CORE_NUM_TOKENS, HEAD_DIM, bytes_moved
from dsv4_prologue.measure.baselines import (
    IN_PLACE,
    NEW,
    NO_OPERATORS,
    Baseline,
    Call,
    RequestError,
    Unavailable,
    check_name,
    find,
    namespace_of,
    probe,
)
from dsv4_prologue.measure.candidates import (
    FORMS,
    Q_RANK,
    Candidate,
    Timed,
    candidate_of,
    check,
    examine_timed,
    forms_of,
    no_room,
    registered_forms,
)
from dsv4_prologue.measure.ceilings import (
    Ceiling,
    best_copy,
    copy_candidates,
    drift_mark,
    measure_ceiling,
)
from dsv4_prologue.measure.guard import figure_faults, handicapped, known_answer
from dsv4_prologue.measure.record import card_hash, host_hash, kernel_hash
from dsv4_prologue.measure.timing import (
    GRAPHS,
    HOST_CALLS,
    MODES,
    Mode,
    Samples,
    clock_for,
    measure,
)
from dsv4_prologue.measure.verdict import Verdict, verdict
from dsv4_prologue.selection import interpreting, plan_for
from dsv4_prologue.verify import conformance
from dsv4_prologue.verify.conformance import Shape

Records = list[dict[str, Any]]

#: "core" is the standard 22, "decode" and "prefill" its two ends, "tp" what tensor parallelism
#: leaves of the heads.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "quick": ((1, 64), (64, 64), (1024, 64)),
    "core": conformance.SHAPES["core"],
    "decode": tuple((n, h) for n in CORE_NUM_TOKENS if n < 1024 for h in CORE_NUM_HEADS),
    "prefill": tuple((n, h) for n in CORE_NUM_TOKENS if n >= 1024 for h in CORE_NUM_HEADS),
    "tp": tuple((n, h) for n in (1, 64, 1024, 32768) for h in (8, 16, 32)),
}
OPTIMUM = " at optimum"
#: In mode chain, a layer without any call between its two matrix products.
REST = "rest of the layer"
#: How the labels of parts of our call begin.
PART = "part, "
#: The share of a shape's time that a sweep of a baseline's launch arguments gets.
SWEEP_SHARE = 0.2
#: A baseline that takes so many times as long as ours would leave everybody else too few rounds:
#: it is timed after them, beside ours, for so many rounds at least.
SLOW = 5.0
SLOW_ROUNDS = 16
#: Flushes that hold a device until a call is enqueued, so that its time is not its host's.
LOOK_FLUSHES = 8


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Names of SHAPES and sizes like 17x64, joined by commas, as (num_tokens, num_heads), small
    first. Raises RequestError for anything else.
    """
    try:
        return conformance.parse_shapes(text, SHAPES, fewest_tokens=1)
    except ValueError as error:
        raise RequestError(str(error)) from error


@dataclass(frozen=True)
class Options:
    """What to measure. `seconds`: at most, for the rounds of a shape in a mode."""

    device: str
    shapes: tuple[Shape, ...]
    modes: tuple[Mode, ...] = ("flushed",)
    against: tuple[str, ...] = ("copy",)
    forms: tuple[str, ...] = (IN_PLACE,)  # of ours; those of the baselines come on top
    seconds: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Make tuples of the lists that JSON gives, and refuse what is not known: RequestError."""
        for name in ("modes", "against", "forms"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        object.__setattr__(self, "shapes", tuple((n, h) for n, h in self.shapes))
        for name, known in (("modes", MODES), ("forms", FORMS)):
            for one in getattr(self, name):
                if one not in known:
                    known_names = ", ".join(known)
                    raise RequestError(f"{name}: expected some of {known_names}, got {one!r}")
        for one in self.against:
            check_name(one)


class Watcher:
    """Is told what happens while a run goes on. This one does nothing."""

    def progress(self, share: float, text: str) -> None:
        """So much of it is done, from 0 to 1, and this is being done now."""

    def remark(self, text: str) -> None:
        """What can, or cannot, be measured here, or what the run has to be marked with."""

    def flush(self) -> None:
        """The records of another shape are there."""


class Part(Watcher):
    """Tells another one of a part of the whole."""

    def __init__(self, whole: Watcher, number: int, count: int) -> None:
        self._whole, self._number, self._count = whole, number, count

    def progress(self, share: float, text: str) -> None:
        """See Watcher."""
        self._whole.progress((self._number + share) / self._count, text)

    def remark(self, text: str) -> None:
        """See Watcher."""
        self._whole.remark(text)

    def flush(self) -> None:
        """See Watcher."""
        self._whole.flush()


def groups(against: Sequence[str]) -> list[tuple[str, ...]]:
    """Baselines that can live in one process together; `copy` is in every group."""
    found: list[list[str]] = [[]]
    for name in against:
        space = namespace_of(name)
        for group in found:
            if space is None or space not in map(namespace_of, group):
                group.append(name)
                break
        else:
            found.append([*(one for one in against if one == "copy"), name])
    return [tuple(group) for group in found]


def run(options: Options, records: Records, watcher: Watcher | None = None) -> None:
    """Measure what the options ask for, and append the records of each shape once it is done.

    A KeyboardInterrupt passes through, and leaves the records of what was done. Raises RequestError
    where nothing can be measured, and RuntimeError where the device computes wrongly.
    """
    watcher = watcher if watcher is not None else Watcher()
    parts = groups(options.against)
    if len(parts) == 1:
        _Run(options, records, watcher).run()
        return
    from dsv4_prologue.measure.worker import bench_in_process

    for number, against in enumerate(parts):
        names = " and ".join(one for one in against if one not in NO_OPERATORS)
        watcher.remark(f"process {number + 1} of {len(parts)}: ours beside {names}")
        part = Part(watcher, number, len(parts))
        bench_in_process(replace(options, against=against), records, part, process=number + 1)


def find_all(names: Sequence[str], device: torch.device) -> tuple[list[Baseline], dict[str, str]]:
    """The baselines that can be launched here, with those launches that can; and why others not."""
    there, not_there = [], {}
    for name in names:
        found = find(name, device)
        if isinstance(found, Unavailable):
            not_there[found.name] = found.reason
            continue
        reason = probe(found, device)
        if reason:
            not_there[found.name] = reason
            continue
        shipped, *others = found.launches
        fit = [one for one in others if not probe(found, device, **one)]
        there.append(replace(found, launches=(shipped, *fit)))
    return there, not_there


def rounded(samples: Samples) -> dict[str, Any]:
    """Samples for a record: to a nanosecond, and without numbers that say nothing."""
    found = samples.to_dict()
    for name in ("times_us", "disturbed_us"):
        found[name] = [round(value, 3) for value in found[name]]
    if not found["disturbed_us"]:
        del found["kept"]  # all of them
    return found


class Seen(NamedTuple):
    """Samples by label; and by the label of a slow one, those of the rounds it was timed in."""

    samples: dict[str, Samples]
    beside: Mapping[str, Mapping[str, Samples]]

    def verdict(self, ours: str, theirs: str) -> Verdict:
        """Ours against theirs, both of the same rounds."""
        mine = self.beside.get(theirs, self.samples)[ours]
        return verdict(mine, self.samples[theirs])


def _is_ours(candidate: Candidate, calls: Mapping[str, Call]) -> bool:
    return candidate.baseline is None and candidate.label in calls


class _Run:
    """One run in one process."""

    def __init__(self, options: Options, records: Records, watcher: Watcher) -> None:
        self.options, self.records, self.watcher = options, records, watcher
        self.device = torch.device(options.device)
        if self.device.type == "cpu":
            if interpreting():
                raise RequestError("Triton's interpreter proves bytes, not speed: not measured")
            watcher.remark(
                "no accelerator: timed is the composition of torch operations that CPU tensors "
                "take, by the host's clock; what the kernels do on a card is not"
            )
        self.clock = clock_for(self.device)
        self.modes = self._modes()
        self.steps = len(options.shapes) * len(self.modes)
        self.done = 0

    def _modes(self) -> tuple[Mode, ...]:
        """Those this device has; remarks on the others."""
        found = []
        for mode in self.options.modes:
            reason = self.clock.unavailable(mode)
            if reason:
                self.watcher.remark(f"mode {mode} is left out: {reason}")
            else:
                found.append(mode)
        if not found:
            raise RequestError(f"modes: expected one this device has, got {self.options.modes}")
        return tuple(found)

    def run(self) -> None:
        """Measure everything."""
        names = [name for name in self.options.against if name not in NO_OPERATORS]
        self.baselines, self.left_out = find_all(names, self.device)
        for name, reason in self.left_out.items():
            self.watcher.remark(f"{name} is left out: {reason}")
        faults = known_answer(self.device)
        if faults:
            raise RuntimeError(f"the device computes wrongly: {faults[0].text}")
        self.watcher.progress(0, "the ceiling")
        self.ceiling = self._ceiling()
        self.watcher.remark(
            f"the ceiling is {self.ceiling.gbps:.0f} GB/s ({self.ceiling.best}); the first copy, "
            f"before the clocks ramped, made {self.ceiling.idle_gbps:.0f}"
        )
        first = len(self.records)
        for shape in self.options.shapes:
            self._shape(shape)
            self.watcher.flush()
        self._close(self.records[first:])

    def _ceiling(self) -> Ceiling:
        """The best copy of much data, in about the time of a shape."""
        seconds = self.options.seconds
        return measure_ceiling(
            self.clock,
            seed=self.options.seed,
            max_ramp_seconds=min(5.0, 1.0 + seconds),
            max_seconds=min(3.0, seconds),
        )

    def _close(self, records: Records) -> None:
        """Take the ceiling and the known answers once more, for every record."""
        self.watcher.progress(1, "the ceiling")
        after = self._ceiling()
        mark = drift_mark(self.ceiling, after)
        faults = [fault.text for fault in known_answer(self.device)]
        for text in (mark, *faults):
            if text:
                self.watcher.remark(text)
        for record in records:
            record["ceilings"] |= {"after": after.to_dict(), "mark": mark}
            record["device_faults"]["after"] = faults
        self.watcher.flush()

    # One shape.

    def _shape(self, shape: Shape) -> None:
        """Check everything at one shape, then time what passed, mode by mode."""
        left_out = dict(self.left_out)
        candidates = self._candidates(shape, left_out)
        room = no_room(self._footprint(shape, candidates), self.device, "to be timed")
        checks: dict[str, dict[str, Any]] = {}
        for one in candidates:
            self._progress(0, shape, f"checking {one.label}")
            checks[one.label] = (
                {"verdict": "not verified", "reason": room}
                if room
                else check(one, shape, self.device, self.options.seed)
            )
        sound = [one for one in candidates if checks[one.label]["verdict"] == "ok"]
        timed: Timed | None = None
        if sound:
            in_place = all(one.kind == IN_PLACE for one in sound)
            timed = Timed.make(shape, self.device, self.options.seed, in_place=in_place)
            for one in sound:
                candidates += self._at_optimum(one, shape, timed, checks)
        for mode in self.modes:
            if mode != "host" or self._host_cost_at(shape):
                self._mode(mode, shape, timed, candidates, checks, dict(left_out))
            self.done += 1

    def _candidates(self, shape: Shape, left_out: dict[str, str]) -> list[Candidate]:
        """Ours in every form that is asked for, and the baselines that can do the same."""
        found, forms = [], set(self.options.forms)
        for baseline in self.baselines:
            reason = baseline.refusal(shape[1])
            if reason:
                left_out[baseline.name] = reason
            else:
                forms.update(baseline.forms)
                found.append(candidate_of(baseline))
        binds = forms_of(dsv4_prologue) | registered_forms()
        host = self._host_cost_at(shape)
        ours = [
            Candidate("ours", form, bind, host_only=form not in forms)
            for form, bind in binds.items()
            if form in forms or host
        ]
        return ours + found

    def _footprint(self, shape: Shape, candidates: Sequence[Candidate]) -> int:
        """Memory that timing a shape takes at once, in bytes, predicted.

        The inputs, a buffer for Q, the copies', and one new Q for each candidate that makes one,
        since a captured graph keeps its own.
        """
        kinds = [one.kind for one in candidates]
        rows = shape[0] * shape[1] * HEAD_DIM * 2
        extra = max((one.baseline.extra_bytes for one in candidates if one.baseline), default=0)
        copies = bytes_moved(*shape) if "copy" in self.options.against else 0
        return bytes_moved(*shape) + rows * (1 + kinds.count(NEW)) + copies + extra

    def _host_cost_at(self, shape: Shape) -> bool:
        """Whether to take the host's cost here: tokens do not change it, so at the fewest."""
        fewest = min(n for n, h in self.options.shapes if h == shape[1])
        return "host" in self.modes and shape[0] == fewest

    def _at_optimum(
        self,
        shipped: Candidate,
        shape: Shape,
        timed: Timed,
        checks: dict[str, dict[str, Any]],
    ) -> list[Candidate]:
        """The baseline with the launch arguments that suit this shape best, if it has any."""
        if shipped.baseline is None or len(shipped.baseline.launches) < 2:
            return []
        self._progress(0, shape, f"sweeping {shipped.name}")
        found = [
            candidate_of(shipped.baseline, OPTIMUM, **one) for one in shipped.baseline.launches
        ]
        samples = measure(
            {one.launch_text: timed.call(one) for one in found},
            self.clock,
            "flushed",
            seed=self.options.seed,
            max_seconds=SWEEP_SHARE * self.options.seconds,
        )
        best = min(found, key=lambda one: samples[one.launch_text].median_us)
        checks[best.label] = check(best, shape, self.device, self.options.seed)
        return [best]

    def _progress(self, share: float, shape: Shape, text: str) -> None:
        size = f"{shape[0]}x{shape[1]}"
        self.watcher.progress((self.done + share) / self.steps, f"{size}, {text}")

    # One shape in one mode.

    def _mode(
        self,
        mode: Mode,
        shape: Shape,
        timed: Timed | None,
        candidates: Sequence[Candidate],
        checks: Mapping[str, dict[str, Any]],
        left_out: dict[str, str],
    ) -> None:
        """Time everything that passes, and append the records."""
        if mode != "host":
            candidates = [one for one in candidates if not one.host_only]
        if mode == "chain":  # there q is made and read where it is
            candidates = [one for one in candidates if one.kind == IN_PLACE]
        withheld = {
            one.label: f"{told['verdict']}: {told['reason']}"
            for one in candidates
            if (told := checks[one.label])["verdict"] != "ok"
        }
        seen = Seen({}, {})
        if timed is not None:
            seen = self._times(mode, shape, timed, candidates, withheld)
        samples = seen.samples
        for one in candidates:
            if one.baseline is not None and one.label in withheld:
                left_out[one.name] = withheld[one.label]
        base = self._base(mode, shape)
        limits = {}
        for form in sorted({IN_PLACE if one.kind == IN_PLACE else NEW for one in candidates}):
            best = best_copy(samples, out_of_place=form == NEW)
            if best:
                limits[form] = {"limit_us": samples[best].median_us}
                copy = {"candidate": "copy", "form": form, "launch": best}
                record = base | limits[form] | copy | {"check": {"verdict": "none"}}
                self.records.append(self._timed(record, samples[best]))
        if REST in samples:
            base |= {"rest_us": samples[REST].median_us, "q_rank": Q_RANK}
            rest = {"candidate": REST, "form": "", "launch": "", "check": {"verdict": "none"}}
            self.records.append(self._timed(base | rest, samples[REST]))
        for label in samples:
            if label.startswith(PART):
                part = {"candidate": "part", "form": label.removeprefix(PART)}
                record = base | part | {"check": {"verdict": "none"}}
                self.records.append(record | rounded(samples[label]))
        for one in candidates:
            limit = limits.get(IN_PLACE if one.kind == IN_PLACE else NEW, {})
            record = (
                base
                | limit
                | {
                    "candidate": one.name,
                    "form": one.form,
                    "check": checks[one.label],
                    "reason": withheld.get(one.label, ""),
                }
            )
            if one.baseline is None:
                record |= {"left_out": left_out, "verdicts": []}
            else:
                record |= {"launch": one.launch_text, "provenance": dict(one.baseline.provenance)}
            mine = samples.get(one.label)
            if mine is not None:
                record = self._timed(record, mine)
                if one.baseline is not None and mode not in ("host", "chain"):
                    bound = limit.get("limit_us") or self.ceiling.time_us(record["useful_bytes"])
                    record["faults"] += [str(fault) for fault in handicapped(mine, bound)]
                if one.baseline is None:
                    record["verdicts"] = [
                        {
                            "baseline": other.name,
                            "form": other.form,
                            **seen.verdict(one.label, other.label).to_dict(),
                        }
                        for other in candidates
                        if other.does_as(one, mode) and other.label in samples
                    ]
            self.records.append(record)

    def _times(
        self,
        mode: Mode,
        shape: Shape,
        timed: Timed,
        candidates: Sequence[Candidate],
        withheld: dict[str, str],
    ) -> Seen:
        """Samples of what passes the examination before and after; reasons for the rest."""
        calls: dict[str, Call] = {}
        for one in candidates:
            if one.label in withheld:
                continue
            self._progress(0, shape, f"{mode}, examining {one.label}")
            if mode in GRAPHS and one.baseline is not None and not one.baseline.capturable:
                withheld[one.label] = "it synchronises, which no graph can hold"
            elif fault := examine_timed(one, timed, self.clock, mode):
                withheld[one.label] = fault
            else:
                call = timed.call(one)
                calls[one.label] = timed.layer(call) if mode == "chain" else call
        ours = {one.label: calls[one.label] for one in candidates if _is_ours(one, calls)}
        ahead = LOOK_FLUSHES if self.clock.asynchronous else 0
        looks = {
            name: self.clock.interval(call, flushes=ahead).time_us for name, call in calls.items()
        }
        usual = min((looks[name] for name in ours), default=math.inf)
        slow = {name: call for name, call in calls.items() if looks[name] > SLOW * usual}
        quick = {name: call for name, call in calls.items() if name not in slow}
        if not quick:
            return Seen({}, {})
        useful = bytes_moved(*shape)
        copies: Mapping[str, Call] = {}
        if mode == "chain":
            copies = {REST: timed.layer(lambda: None)}
        elif mode != "host" and "copy" in self.options.against:
            copies = copy_candidates(useful, self.device)
        if mode != "chain" and "parts" in self.options.against:
            parts = timed.parts(mode).items()
            copies = {**copies, **{PART + name: call for name, call in parts}}
        samples = self._measure(mode, shape, {**quick, **copies}, self.options.seconds)
        del copies  # their memory is needed
        for one in candidates:
            if one.label not in quick:
                continue
            found = figure_faults(samples[one.label], useful, self.ceiling, self.clock)
            errors = [str(fault) for fault in found if fault.name == "above the ceiling"]
            fault = "; ".join(errors) or examine_timed(one, timed, self.clock, mode)
            if fault:
                withheld[one.label] = f"after the rounds: {fault}"
                del samples[one.label]
        beside: dict[str, dict[str, Samples]] = {}
        if slow:
            together = {**ours, **slow}
            calls_a_sample = {"resident": 3, "host": HOST_CALLS}.get(mode, 1)
            round_us = calls_a_sample * sum(looks[name] for name in together)
            seconds = max(self.options.seconds, SLOW_ROUNDS * round_us / 1e6)
            later = self._measure(mode, shape, together, seconds)
            samples |= {name: later[name] for name in slow}
            beside = dict.fromkeys(slow, later)
        return Seen(samples, beside)

    def _measure(
        self, mode: Mode, shape: Shape, calls: Mapping[str, Call], seconds: float
    ) -> dict[str, Samples]:
        return measure(
            calls,
            self.clock,
            mode,
            seed=self.options.seed,
            max_seconds=seconds,
            progress=lambda _, share: self._progress(share, shape, mode),
        )

    def _base(self, mode: Mode, shape: Shape) -> dict[str, Any]:
        """What the records of a shape and mode share."""
        num_tokens, num_heads = shape
        plan = plan_for(self.device, num_tokens, num_heads)
        return {
            "record": "bench",
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "mode": mode,
            "card": plan.card,
            "forced": plan.forced,
            "kernel": plan.kernel,
            "plan_reason": plan.reason,
            "launch": str(plan.launch),
            "kernel_hash": kernel_hash(plan.card),
            "card_hash": card_hash(plan.card),
            "host_hash": host_hash(),
            "reason": "",
            "useful_bytes": bytes_moved(num_tokens, num_heads),
            "faults": [],
            "ceilings": {"before": self.ceiling.to_dict(), "after": None, "mark": ""},
            "device_faults": {"before": [], "after": None},
            "clock": self.clock.describe(),
            "process": 1,
        }

    def _timed(self, record: dict[str, Any], samples: Samples) -> dict[str, Any]:
        """A record with its samples, and what follows from them."""
        useful = record["useful_bytes"]
        record = record | rounded(samples)
        if samples.mode == "host":
            return record
        if samples.mode == "chain":
            return record | {"share": 1 - record["rest_us"] / samples.median_us}
        record["gbps"] = samples.gbps(useful)
        if samples.mode == "flushed":
            record["utilisation"] = samples.gbps(useful) / self.ceiling.gbps
        if "limit_us" in record:
            record["limit_ratio"] = record["limit_us"] / samples.median_us
        found = figure_faults(samples, useful, self.ceiling, self.clock)
        record["faults"] = [str(fault) for fault in found]
        return record


def holds(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ours was timed, and is right and believable wherever that could be asked."""
    ours = [one for one in records if one["candidate"] == "ours"]
    return (
        any("median_us" in one for one in ours)
        and all(not one["reason"] or one["check"]["verdict"] == "not verified" for one in ours)
        and not any(one["device_faults"]["after"] for one in records)
    )
