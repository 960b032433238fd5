"""`bench` and `tune` on the command line, and their tables.

Everything that needs torch is imported when a command runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dsv4_prologue.options import (
    MAX_SEED,
    DeviceOption,
    JsonOption,
    RecordOption,
    present_device,
    require,
)

if TYPE_CHECKING:
    from dsv4_prologue.measure.bench import Options, Watcher
    from dsv4_prologue.measure.clock import Mode

Records = list[dict[str, Any]]

WIDTH = 240  # characters

ShapesOption = Annotated[
    str | None,
    typer.Option(
        help="Of core, decode, prefill, tp, quick and NxH (tokens x heads), joined by commas; "
        "without it, quick on a CPU and core on an accelerator."
    ),
]
ModeOption = Annotated[
    str, typer.Option(help="Of flushed, resident, graph, host and chain, joined by commas.")
]


SecondsOption = Annotated[
    float, typer.Option(min=0.01, help="Time for the rounds of a shape in a mode, at most.")
]
SeedOption = Annotated[
    int,
    typer.Option(min=0, max=MAX_SEED, help="Of the inputs, and of the order of the rounds."),
]


def bench(
    shapes: ShapesOption = None,
    mode: ModeOption = "flushed",
    against: Annotated[
        str,
        typer.Option(
            help="Of copy, parts (of our own call), eager, portable, vllm and "
            "library:PATH:namespace.op, joined by commas."
        ),
    ] = "copy,portable",
    form: Annotated[
        str,
        typer.Option(
            help="Of 'in place', 'buffer' and 'new tensor', joined by commas: what ours does with "
            "Q. The forms that baselines need are measured, too."
        ),
    ] = "in place",
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="REV|PATH|RECORD",
            help="Measure against another version of ours instead, in alternating rounds: a "
            "revision, a folder; or against a record of one, in units of each run's own limit.",
        ),
    ] = None,
    record: RecordOption = None,
    device: DeviceOption = None,
    seconds: SecondsOption = 5.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time the operator beside baselines, each checked against the oracle before it is timed.

    Holds if ours was timed, and is right and believable at every shape; with --compare, if it is
    slower than the other version at none.
    """
    require("torch")
    device = present_device(device)
    from dsv4_prologue.measure.bench import holds, run
    from dsv4_prologue.measure.versions import against_record, faster_or_same
    from dsv4_prologue.measure.versions import compare as compare_versions

    records: Records = []
    with _usage_errors():
        options = _options(shapes, mode, device, seconds, seed)
        options = replace(options, against=_words(against), forms=_words(form))
        file = Path(compare) if compare is not None and Path(compare).is_file() else None
        if file is not None:
            _check_records(file)
        if compare is None or file is not None:
            kept = record if file is None else None
            whole = _watched(lambda told: run(options, records, told), records, kept, device)
        else:
            version = compare
            whole = _watched(
                lambda told: compare_versions(options, version, records, told),
                records,
                record,
                device,
            )
        if file is not None:
            records = against_record(records, file)
            if record is not None:
                Log(record, device).write(records)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
    elif compare is None:
        print_bench(records)
    else:
        print_compare(records)
    good = holds(records) if compare is None else faster_or_same(records)
    raise typer.Exit(0 if whole and good else 1)


def tune(
    shapes: ShapesOption = None,
    mode: ModeOption = "flushed",
    stages: Annotated[
        str,
        typer.Option(
            help="Of num_stages, joined by commas: only a loop in a kernel makes use of it."
        ),
    ] = "1",
    record: RecordOption = None,
    device: DeviceOption = None,
    seconds: SecondsOption = 5.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Sweep the launches of this card, and print the patch of its file that the times speak for.

    Holds if no launch is faster than the card's own at any shape.
    """
    require("torch")
    device = present_device(device)
    from dsv4_prologue.measure.tune import Tuned, Tuner

    records: Records = []
    found: list[Tuned] = []
    evidence = str(record) if record is not None and not record.is_absolute() else "not recorded"
    with _usage_errors():
        options = _options(shapes, mode, device, seconds, seed)
        numbers = _numbers("stages", stages)

        def work(watcher: Watcher) -> None:
            tuner = Tuner(options, records, watcher, stages=numbers, evidence=evidence)
            found.append(tuner.tune())

        _watched(work, records, record, device)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
    elif found and found[0].faster:
        for name, where in (("Faster", found[0].faster), ("Slower", found[0].slower)):
            typer.echo(f"{name} than the card's own launch: {'' if where else 'nowhere'}")
            typer.echo("".join(f"  {one}\n" for one in where))
        typer.echo(found[0].patch, nl=False)
    elif found:
        typer.echo("No launch is faster than the card's own at any of these shapes.")
    raise typer.Exit(0 if found and not found[0].faster else 1)


# -------------------------------------------------------------------------------- what they share


def _words(text: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",") if one.strip())


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers joined by commas."""
    try:
        return [int(one) for one in _words(text)]
    except ValueError:
        raise typer.BadParameter(
            f"{name}: expected numbers, joined by commas, got {text!r}"
        ) from None


def _options(shapes: str | None, mode: str, device: str, seconds: float, seed: int) -> Options:
    from dsv4_prologue.measure.bench import Options, parse_shapes

    sizes = parse_shapes(shapes or ("quick" if device.startswith("cpu") else "core"))
    return Options(
        device, sizes, cast("tuple[Mode, ...]", _words(mode)), seconds=seconds, seed=seed
    )


def _check_records(file: Path) -> None:
    """Refuse what is no file of records, before anything is measured."""
    from dsv4_prologue.measure.record import read

    try:
        read(file)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--compare") from error


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """What cannot be measured is wrong usage: exit with 2."""
    from dsv4_prologue.measure.baselines import RequestError

    try:
        yield
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


class Log:
    """A file of records that is whole after each shape: what a run adds is written anew."""

    def __init__(self, path: Path, device: str) -> None:
        self._path, self._device = path, device
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, records: Records) -> None:
        """Write this run's records behind what was there before it."""
        from dsv4_prologue.measure.record import append

        if self._path.exists():
            os.truncate(self._path, self._size)
        append(self._path, records, device=self._device)


def _watched(
    work: Callable[[Watcher], None], records: Records, path: Path | None, device: str
) -> bool:
    """Run under a progress bar, and keep the file of records whole; False if Ctrl-C ended it."""
    from dsv4_prologue.measure.bench import Watcher

    log = Log(path, device) if path is not None else None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=1.0)

        class Told(Watcher):
            def progress(self, share: float, text: str) -> None:
                bar.update(task, completed=share, description=text)

            def remark(self, text: str) -> None:
                bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

            def flush(self) -> None:
                if log is not None and records:
                    log.write(records)

        told = Told()
        try:
            work(told)
            bar.update(task, completed=1.0, description="done")
        except KeyboardInterrupt:
            told.remark(f"broken off, with {len(records)} records of what was done")
            told.flush()
            return False
    return True


# ------------------------------------------------------------------------------------- tables


def print_bench(records: Sequence[Mapping[str, Any]]) -> None:
    """A table a mode and process: ours at each shape, then each baseline's time, ratio, verdict."""
    console = _console()
    for process, mode in dict.fromkeys((one["process"], one["mode"]) for one in records):
        of_mode = [one for one in records if (one["process"], one["mode"]) == (process, mode)]
        _print_mode(console, f"{mode}" + f", process {process}" * (process > 1), of_mode)
        _print_parts(console, mode, of_mode)
    for line in _notes(records):
        console.print(line)


def _print_mode(console: Console, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    names = dict.fromkeys(told["baseline"] for one in records for told in one.get("verdicts", ()))
    times = {
        (one["num_tokens"], one["num_heads"], one["candidate"], one["form"]): one["median_us"]
        for one in records
        if "median_us" in one
    }
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for header in ("tokens x heads", "form"):
        table.add_column(header)
    ratios = {"utilisation": "of ceiling", "limit_ratio": "of limit", "share": "of a layer"}
    ratios = {name: told for name, told in ratios.items() if any(name in one for one in records)}
    for header in ("us", "spread", "GB/s", *ratios.values()):
        table.add_column(header, justify="right")
    for name in names:
        table.add_column(f"{name}: us, ratio")
    for one in records:
        if one["candidate"] != "ours":
            continue
        size = one["num_tokens"], one["num_heads"]
        row = ["x".join(map(str, size)), one["form"]]
        if "median_us" not in one:
            table.add_row(*row, "not timed")
            continue
        row += [_three(one["median_us"]), f"{one['spread']:.1%}"]
        row.append(_three(one["gbps"]) if "gbps" in one else "")
        row += [f"{one[name]:.3f}" if name in one else "" for name in ratios]
        told = {verdict["baseline"]: verdict for verdict in one["verdicts"]}
        for name in names:
            if name not in told:
                row.append("")
                continue
            theirs = times[one["num_tokens"], one["num_heads"], name, told[name]["form"]]
            row.append(f"{_three(theirs)}  {told[name]['ratio']:.3f} {told[name]['verdict']}")
        table.add_row(*row)
    console.print(table)


def _print_parts(console: Console, mode: str, records: Sequence[Mapping[str, Any]]) -> None:
    """What parts of our call take, a row a shape; nothing where none was timed."""
    names = dict.fromkeys(one["form"] for one in records if one["candidate"] == "part")
    if not names:
        return
    table = Table(title=f"{mode}, parts, us", title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("tokens x heads")
    for name in names:
        table.add_column(name, justify="right")
    rows: dict[str, list[str]] = {}
    for one in records:
        if one["candidate"] == "part":
            size = f"{one['num_tokens']}x{one['num_heads']}"
            rows.setdefault(size, []).append(_three(one["median_us"]))
    for row, times in rows.items():
        table.add_row(row, *times)
    console.print(table)


def _notes(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Below the tables: what was not timed and why, what speaks against a figure, and the sums."""
    why: dict[str, list[str]] = {}
    everywhere = len({(one["num_tokens"], one["num_heads"]) for one in records})
    for one in records:
        size = f"{one['num_tokens']}x{one['num_heads']}"
        if one["reason"] and one["candidate"] == "ours":
            why.setdefault(f"ours, {one['form']}, not timed: {one['reason']}", []).append(size)
        for name, reason in one.get("left_out", {}).items():
            why.setdefault(f"{name} is left out: {reason}", []).append(size)
        for fault in one["faults"]:
            kind = fault.partition(":")[0]
            why.setdefault(f"{one['candidate']}, {one['mode']}: {kind}", []).append(size)
    for text, sizes in why.items():
        where = dict.fromkeys(sizes)
        yield text if len(where) == everywhere else f"{text} ({', '.join(where)})"
    yield from dict.fromkeys(mark for one in records if (mark := one["ceilings"]["mark"]))
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in records:
        for told in one.get("verdicts", ()):
            key = f"{one['mode']}, {one['form']} against {told['baseline']}"
            groups.setdefault(key, []).append(told)
    for key, told in groups.items():
        yield f"{key}: {_sum(told)}"


def _sum(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """How often each verdict, the mean ratio, the worst."""
    counts = Counter(told["verdict"] for told in verdicts)
    ratios = [told["ratio"] for told in verdicts if math.isfinite(told["ratio"])]
    if not ratios:
        return "no ratio"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    names = ", ".join(f"{counts[name]} {name}" for name in ("faster", "same", "slower", "unclear"))
    return f"{names}; ratio {mean:.3f} in the geometric mean, {min(ratios):.3f} at worst"


def print_compare(records: Sequence[Mapping[str, Any]]) -> None:
    """A row a shape, mode and form: this version, the other one, the verdict."""
    console = _console()
    if not records:
        return
    table = Table(box=SIMPLE, pad_edge=False)
    for header in ("tokens x heads", "mode", "form"):
        table.add_column(header)
    for header in ("this, us", f"{records[0]['other']['version']}, us", "this again", "ratio"):
        table.add_column(header, justify="right")
    table.add_column("verdict")
    notes = []
    for one in records:
        row = [f"{one['num_tokens']}x{one['num_heads']}", one["mode"], one["form"]]
        if "verdict" in one:
            told = one["verdict"]
            row += [_three(one["median_us"]), _three(one["other"]["median_us"])]
            row.append(f"{one['noise']['ratio']:.3f}" if "noise" in one else "")
            row += [f"{told['ratio']:.3f}", told["verdict"]]
        else:
            row += ["", "", "", "", "not timed"]
            sides = (("this", one["reason"]), ("the other", one["other"]["reason"]))
            notes += [f"{row[0]}, {name}: {reason}" for name, reason in sides if reason]
        table.add_row(*row)
    console.print(table)
    for line in notes:
        console.print(line)
    console.print(_sum([one["verdict"] for one in records if "verdict" in one]))


def _console() -> Console:
    """As wide as a table needs: a terminal may wrap its lines, but no column is cut."""
    return Console(markup=False, highlight=False, soft_wrap=True, width=WIDTH)


def _three(value: float) -> str:
    """A number to three digits, or whole."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"
