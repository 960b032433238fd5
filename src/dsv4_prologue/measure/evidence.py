"""What the records say today: the newest of each kind, and whether it still speaks of our code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dsv4_prologue.cards import card_names, get_card
from dsv4_prologue.measure.record import (
    SCHEMA_VERSION,
    card_hash,
    host_hash,
    kernel_hash,
    read,
)
from dsv4_prologue.planning import Floor, Problem, plan

Record = dict[str, Any]

#: The order in which the modes of a benchmark are shown.
MODES = ("flushed", "resident", "graph", "host", "chain")


class Against(NamedTuple):
    """Ours against one baseline at one shape. `ratio` = theirs / ours; above 1 ours is faster."""

    verdict: str  # faster, slower, same or unclear
    ratio: float
    low: float  # of the ratio's interval; not finite where there were too few rounds
    high: float
    time_us: float | None  # theirs
    ours_us: float | None  # ours, of the same run and process
    before: float | None  # the ratio of the run before, if there was one


@dataclass
class Row:
    """Ours at one shape, in one form and mode: the newest record, and who it was compared with."""

    ours: Record
    stale: str  # why it speaks of something else than today's code; empty if it does not
    against: dict[str, Against] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Tokens and heads."""
        return self.ours["num_tokens"], self.ours["num_heads"]


class Place(NamedTuple):
    """Where a card's plan was run: on which device, and whether the card was only named."""

    card: str
    forced: bool
    device: str

    @classmethod
    def of(cls, record: Record) -> Place:
        """The place of a record of a check or a benchmark."""
        seen = record["run"]["environment"]
        device = seen["device"]
        if seen["device_type"] == "cpu" and record["kernel"] != "torch":
            device = f"Triton {seen['triton']}'s interpreter"
        return cls(record["card"], record["forced"], device)


def _launches_now(name: str, problem: Problem) -> set[str]:
    """The launches a card may choose for a problem, whatever its toolchain."""
    card = get_card(name)
    floors = [Floor(met=True, reason="")]
    if card.toolchain is not None:
        floors.append(Floor(met=False, reason=""))
    return {str(plan(card, problem, floor=floor).launch) for floor in floors}


def _stale_proof(record: Record) -> str:
    name = record["card"]
    if record.get("card_hash", card_hash(name)) != card_hash(name):
        return "another card file"
    launches = [str(launch) for launch in get_card(name).launches]
    if record["detail"].get("launches", launches) != launches:
        return "other launches"
    return ""


@dataclass(frozen=True)
class Evidence:
    """All records of a folder, the oldest run first."""

    records: Sequence[Record]

    @classmethod
    def of(cls, folder: Path) -> Evidence:
        """Read every record below a folder. Raises ValueError for a file that holds others."""
        files = sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.gz")])
        found = [{**record, "file": file.name} for file in files for record in read(file)]
        usable = [one for one in found if one["run"].get("schema_version") == SCHEMA_VERSION]
        return cls(sorted(usable, key=lambda one: one["run"]["date"]))

    @cached_property
    def _kernel_hashes(self) -> dict[str, str]:
        return {name: kernel_hash(name) for name in card_names()}

    @cached_property
    def _host_hash(self) -> str:
        return host_hash()

    def stale(self, record: Record) -> str:
        """Why a record speaks of something else than today's code; empty if it does not."""
        name = record["card"]
        if name not in card_names():
            return "no such card"
        if record.get("kernel_hash") != self._kernel_hashes[name]:
            return "another kernel" if record.get("kernel_hash") else "its kernel is not told"
        if record["record"] == "proof":
            return _stale_proof(record)
        return self._stale_bench(record) if record["record"] == "bench" else ""

    def _stale_bench(self, record: Record) -> str:
        if record["mode"] == "host" and record.get("host_hash") != self._host_hash:
            return "another host path"
        if record["candidate"] == "ours":
            problem = Problem(record["num_tokens"], record["num_heads"])
            if record["launch"] not in _launches_now(record["card"], problem):
                return "another launch"
        return ""

    def stale_file(self, name: str, card: str) -> str:
        """Why no record of the file of that name speaks of a card's code; empty if one does."""
        found = [one for one in self.records if one["file"] == name and one.get("card") == card]
        told = list(dict.fromkeys(map(self.stale, found)))
        return "" if not told or "" in told else told[-1]

    def _of(self, kind: str) -> Iterator[Record]:
        return (one for one in self.records if one["record"] == kind)

    def _current(self, records: Iterable[Record]) -> list[Record]:
        """Those of today's code; where none is, those of the newest one's kernel."""
        found = list(records)
        today = [one for one in found if not self.stale(one)]
        newest = found[-1].get("kernel_hash") if found else None
        return today or [one for one in found if one.get("kernel_hash") == newest]

    def proofs(self) -> dict[str, list[Record]]:
        """By card, the proofs of the newest run that proved anything of it."""
        found: dict[str, list[Record]] = {}
        for one in self._of("proof"):
            of_card = found.setdefault(one["card"], [])
            if of_card and of_card[0]["run"] is not one["run"]:
                of_card.clear()
            of_card.append(one)
        return found

    def checks(self) -> dict[Place, list[Record]]:
        """By place, the newest record of each case; somebody else's operator is left out."""
        places: dict[Place, list[Record]] = {}
        for one in self._of("check"):
            if "operator" in one:
                continue
            places.setdefault(Place.of(one), []).append(one)
        return {
            place: list(
                {
                    (one["num_tokens"], one["num_heads"], one["variant"], one["seed"]): one
                    for one in self._current(records)
                }.values()
            )
            for place, records in places.items()
        }

    def benches(self) -> dict[Place, list[Record]]:
        """By place, every record of a benchmark."""
        places: dict[Place, list[Record]] = {}
        for one in self._of("bench"):
            places.setdefault(Place.of(one), []).append(one)
        return places

    def parts(self, place: Place) -> dict[tuple[str, int, int], list[Record]]:
        """By mode and shape, small first, what parts of our call took in the newest run."""
        found: dict[tuple[str, int, int], list[Record]] = {}
        for one in self.benches().get(place, []):
            if one["candidate"] != "part":
                continue
            of_shape = found.setdefault((one["mode"], one["num_heads"], one["num_tokens"]), [])
            if of_shape and of_shape[0]["run"] is not one["run"]:
                of_shape.clear()
            of_shape.append(one)
        return dict(sorted(found.items()))

    def rows(self, place: Place) -> dict[str, list[Row]]:
        """By mode, what a benchmark says: of each shape and form the newest, small first."""
        records = self.benches().get(place, [])
        times = {_key(one, one["candidate"], one["form"]): one for one in records}
        groups: dict[tuple[str, str, int, int], list[Record]] = {}
        for one in records:
            if one["candidate"] == "ours":
                key = (one["mode"], one["form"], one["num_heads"], one["num_tokens"])
                groups.setdefault(key, []).append(one)
        found: dict[str, list[Row]] = {}
        for key in sorted(groups):
            current = self._current(groups[key])
            row = Row(current[-1], self.stale(current[-1]))
            for ours in current:
                if "median_us" not in ours:
                    row.against.clear()  # refused in a newer run
                for verdict in ours.get("verdicts", ()):
                    theirs = times[_key(ours, verdict["baseline"], verdict["form"])]
                    _compare(row, ours, theirs, verdict)
            found.setdefault(key[0], []).append(row)
        return {mode: found[mode] for mode in MODES if mode in found}


def _key(record: Record, candidate: str, form: str) -> tuple[object, ...]:
    """What names one record of one run."""
    shape = record["num_tokens"], record["num_heads"]
    return id(record["run"]), record["process"], record["mode"], *shape, candidate, form


def _compare(row: Row, ours: Record, theirs: Record, verdict: Record) -> None:
    """Take a verdict of a newer run into a row."""
    known = row.against.get(verdict["baseline"])
    low, high = (math.nan if verdict[end] is None else verdict[end] for end in ("low", "high"))
    row.against[verdict["baseline"]] = Against(
        verdict["verdict"],
        verdict["ratio"],
        low,
        high,
        theirs.get("median_us"),
        ours.get("median_us"),
        known.ratio if known is not None else None,
    )
