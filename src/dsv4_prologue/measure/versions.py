"""Two versions of ours side by side, each in a process of its own, in alternating rounds.

One harness measures both: this package travels to the workers as a copy under another name, so that
there `dsv4_prologue` is the version under test, whatever that has of its own, and a version is
nothing but a package with `prologue` in it.

Two processes of one version differ, too: in where their memory lies, and in what the system makes
of them. So this version runs in two, and what they differ by is no difference between versions.

A record (`record` is "compare") is one shape in one mode and form. Its samples, check, plan and
hashes are this version's; `again` and `other` hold the same of its second process and of the other
version, `noise` is this version's verdict against itself, and `verdict` that against the other:
"faster" is a gain, "slower" what a change cost here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsv4_prologue.contract import bytes_moved
from dsv4_prologue.measure.baselines import IN_PLACE, RequestError
from dsv4_prologue.measure.bench import Options, Records, Watcher, rounded
from dsv4_prologue.measure.candidates import (
    Candidate,
    Timed,
    check,
    examine_timed,
    forms_of,
    no_room,
)
from dsv4_prologue.measure.record import read
from dsv4_prologue.measure.timing import Clock, Mode, Rounds, Samples, clock_for, order
from dsv4_prologue.measure.verdict import SAME_WITHIN, verdict
from dsv4_prologue.measure.worker import Channel, Worker
from dsv4_prologue.verify.conformance import Shape

PACKAGE = "dsv4_prologue"
HARNESS = "dsv4_harness"
THIS, AGAIN, OTHER = "this", "again", "other"
#: So many times as much as this version from itself must the other differ from it.
NOISE = 2.0
MIN_ROUNDS, MAX_ROUNDS, LOOK_EVERY = 20, 200, 10
RELATIVE_ERROR = 0.005

_HERE = Path(__file__).resolve().parent.parent


def _git(*arguments: str) -> bytes:
    """Run git on the work tree of this package; RequestError with its complaint if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_HERE), *arguments], capture_output=True, check=False
        )
    except FileNotFoundError:
        raise RequestError("compare: a revision needs git, which is not installed") from None
    if done.returncode:
        raise RequestError(f"compare: {done.stderr.decode().strip()}")
    return done.stdout


@contextlib.contextmanager
def folder_of(version: str) -> Iterator[Path]:
    """The folder that holds the package of a version.

    `version` is a path to it, to the package or to a checkout; or a revision that git knows, which
    is exported to a temporary folder. Raises RequestError for anything else.
    """
    path = Path(version)
    if path.is_dir():
        for folder in (path, path / "src", path.resolve().parent):
            if (folder / PACKAGE / "__init__.py").is_file():
                yield folder.resolve()
                return
        raise RequestError(f"compare: there is no {PACKAGE} in {version!r}")
    root = _git("rev-parse", "--show-toplevel").decode().strip()
    exported = _git("-C", root, "archive", version, "--", f"src/{PACKAGE}")
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(fileobj=io.BytesIO(exported)) as archive:
            archive.extractall(temporary, filter="data")
        yield Path(temporary) / "src"


@contextlib.contextmanager
def _harness() -> Iterator[Path]:
    """A folder that holds this package under its other name."""
    with tempfile.TemporaryDirectory() as temporary:
        for source in _HERE.rglob("*.py"):
            copy = Path(temporary) / HARNESS / source.relative_to(_HERE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8").replace(PACKAGE, HARNESS)
            copy.write_text(text, encoding="utf-8")
        yield Path(temporary)


# ----------------------------------------------------------------------------- the worker's end


class _Subject:
    """The version under test, in its worker."""

    def __init__(self, package: str, device: str, seed: int) -> None:
        self._package = importlib.import_module(package)
        self._device, self._seed = torch.device(device), seed
        self._clock: Clock = clock_for(self._device)
        self._rounds: Rounds | None = None

    def _kernel_hash(self, card: str) -> str:
        try:
            record = importlib.import_module(f"{self._package.__name__}.measure.record")
            of_a_card = inspect.signature(record.kernel_hash).parameters
        except (ImportError, AttributeError):  # a version from before there were records
            return "unknown"
        return str(record.kernel_hash(card) if of_a_card else record.kernel_hash())

    def prepare(self, shape: Shape, form: str, mode: Mode) -> dict[str, Any]:
        """Check the form at a shape, then be ready for rounds; the check, the plan, the hash."""
        self._rounds = None
        plan = self._package.explain(*shape)
        candidate = Candidate("ours", form, forms_of(self._package)[form])
        seen = check(candidate, shape, self._device, self._seed)
        reason = "" if seen["verdict"] == "ok" else f"{seen['verdict']}: {seen['reason']}"
        if not reason:
            reason = no_room(3 * bytes_moved(*shape), self._device, "to be timed")
        if not reason:
            timed = Timed.make(shape, self._device, self._seed, in_place=form == IN_PLACE)
            reason = examine_timed(candidate, timed, self._clock, mode)
            if not reason:
                call = {candidate.label: timed.call(candidate)}
                self._rounds = Rounds(call, self._clock, mode, seed=self._seed)
                self._rounds.warm_up()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()  # the other worker needs it
        return {
            "card": plan.card,
            "forced": plan.forced,
            "launch": str(plan.launch),
            "plan_reason": plan.reason,
            "kernel_hash": self._kernel_hash(plan.card),
            "check": seen,
            "reason": reason,
        }

    def round(self) -> dict[str, Any]:
        """Run a round."""
        assert self._rounds is not None
        self._rounds.run()
        return {}

    def result(self) -> dict[str, Any]:
        """The samples so far."""
        assert self._rounds is not None
        (samples,) = self._rounds.result().values()
        return rounded(samples)


def serve_version(channel: Channel, job: Mapping[str, Any]) -> None:
    """Do as the other end says, until it says no more."""
    subject = _Subject(job["package"], job["device"], job["seed"])
    while (line := channel.read()) is not None:
        do = line.pop("do")
        channel.send(**getattr(subject, do)(**line))


# ------------------------------------------------------------------------------- the other end


def compare(
    options: Options, version: str, records: Records, watcher: Watcher | None = None
) -> None:
    """Measure this version and another in alternating rounds; append a record a shape and mode.

    Of the options, `against` says nothing here. Raises RequestError for a version that is none.
    """
    watcher = watcher if watcher is not None else Watcher()
    clock = clock_for(options.device)
    modes = [mode for mode in options.modes if not clock.unavailable(mode)]
    for mode in options.modes:
        if mode not in modes:
            watcher.remark(f"mode {mode} is left out: {clock.unavailable(mode)}")
    del clock
    steps = [
        (shape, form, mode) for shape in options.shapes for form in options.forms for mode in modes
    ]
    job = {"job": "version", "package": PACKAGE, "device": options.device, "seed": options.seed}
    module = f"{HARNESS}.measure.worker"
    with contextlib.ExitStack() as stack:
        harness = stack.enter_context(_harness())
        there = stack.enter_context(folder_of(version))
        folders = {THIS: _HERE.parent, OTHER: there, AGAIN: _HERE.parent}
        workers = {
            name: stack.enter_context(Worker(module, job, harness, folder))
            for name, folder in folders.items()
        }
        for number, step in enumerate(steps):
            watcher.progress(number / len(steps), _text(*step))
            records.append(_compare_one(workers, options, *step, version))
            watcher.flush()


def _text(shape: Shape, form: str, mode: Mode) -> str:
    return f"{shape[0]}x{shape[1]}, {mode}, {form}"


def _compare_one(
    workers: Mapping[str, Worker],
    options: Options,
    shape: Shape,
    form: str,
    mode: Mode,
    version: str,
) -> dict[str, Any]:
    """One shape in one form and mode."""
    prepare = {"do": "prepare", "shape": shape, "form": form, "mode": mode}
    sides = {name: worker.ask(prepare) for name, worker in workers.items()}
    seen: Mapping[str, Mapping[str, Any]] = {name: {} for name in sides}
    told: dict[str, Any] = {}
    if not any(side["reason"] for side in sides.values()):
        seen = _alternate(workers, options)
        this, again, other = (Samples.from_dict(seen[name]) for name in (THIS, AGAIN, OTHER))
        noise = verdict(this, again)
        beyond = max(SAME_WITHIN, NOISE * abs(noise.ratio - 1))
        against = verdict(this, other, same_within=beyond)
        told = {"noise": noise.to_dict(), "verdict": against.to_dict()}
    return {
        "record": "compare",
        "num_tokens": shape[0],
        "num_heads": shape[1],
        "mode": mode,
        "form": form,
        "useful_bytes": bytes_moved(*shape),
        **sides[THIS],
        **seen[THIS],
        AGAIN: {**sides[AGAIN], **seen[AGAIN]},
        OTHER: {"version": version, **sides[OTHER], **seen[OTHER]},
        **told,
    }


def _alternate(workers: Mapping[str, Worker], options: Options) -> dict[str, dict[str, Any]]:
    """Rounds in turn, until all medians are known well enough or the time is up."""
    start, count = time.monotonic(), 0
    while True:
        for name in order(workers, options.seed, count):
            workers[name].ask({"do": "round"})
        count += 1
        over = time.monotonic() - start >= options.seconds or count >= MAX_ROUNDS
        if not over and (count < MIN_ROUNDS or count % LOOK_EVERY):
            continue
        seen = {name: worker.ask({"do": "result"}) for name, worker in workers.items()}
        if over or max(one["relative_error"] for one in seen.values()) <= RELATIVE_ERROR:
            return seen


def against_record(records: Records, file: Path) -> Records:
    """Records of this run's ours against those of a file, shape by shape: `compare`'s records.

    Two runs, maybe of two days: both are taken in units of their own run's limit, the best copy of
    the same bytes, and what has no limit is not compared. Raises RequestError where nothing is.
    """
    earlier = {
        _key(one): one
        for one in read(file)
        if one.get("candidate") == "ours" and "limit_us" in one and "times_us" in one
    }
    found = []
    for one in records:
        other = earlier.get(_key(one))
        if one["candidate"] != "ours" or other is None or "times_us" not in one:
            continue
        if "limit_us" in one:
            mine, theirs = (_in_limits(Samples.from_dict(each), each) for each in (one, other))
            told = {"other": {**other, "version": file.name}}
            found.append(
                one | told | {"record": "compare", "verdict": verdict(mine, theirs).to_dict()}
            )
    if not found:
        raise RequestError(f"compare: {file.name} has no shape, mode and limit in common with this")
    return found


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("num_tokens", "num_heads", "mode", "form", "card")
    return tuple(record.get(name) for name in names)


def _in_limits(samples: Samples, record: Mapping[str, Any]) -> Samples:
    """Times as multiples of the limit, in thousandths."""
    scale = 1e3 / record["limit_us"]
    return replace(
        samples,
        times_us=tuple(time_us * scale for time_us in samples.times_us),
        resolution_us=samples.resolution_us * scale,
    )


def faster_or_same(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether both versions were timed everywhere, and this one is slower nowhere."""
    return bool(records) and all(
        one.get("verdict", {"verdict": "slower"})["verdict"] != "slower" for one in records
    )
