"""The tuner: which launch wins where, and the rules of a card file that say so.

    tuned = Tuner(Options("cuda", parse_shapes("core")), records).tune()
    print(tuned.patch)

Tokens and heads of a tile, tokens of a KV tile, warps and stages are swept jointly, all launches
interleaved at each shape: first a short look at all of them, then, at length, at the few that
together are about as good as all; these also in each form of dependent launch that the card uses.
From them the rules follow by splitting the shapes in two, by tokens, units or heads, as long as
the verdicts say that each half has a launch of its own which is faster there than the other's, and
slower nowhere; a threshold is then moved by bisection until it is unclear or known to a third.

A record whose `record` is "look" has, of a shape in a mode, the median time of every launch in the
first look; one of "tune" is one launch at one shape in one mode, with its samples. The tuner prints
a patch; a person applies it.
"""

from __future__ import annotations

import ast
import difflib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dsv4_prologue
from dsv4_prologue import cards
from dsv4_prologue.cards import Card, Rule
from dsv4_prologue.contract import bytes_moved
from dsv4_prologue.measure.baselines import (
    IN_PLACE,
    Call,
    Inputs,
    RequestError,
    first_line,
    launch_errors,
)
from dsv4_prologue.measure.bench import Options, Records, Watcher, rounded
from dsv4_prologue.measure.candidates import Candidate, Timed, check, forms_of, no_room
from dsv4_prologue.measure.record import card_hash, kernel_hash
from dsv4_prologue.measure.timing import Clock, Mode, Samples, clock_for, measure
from dsv4_prologue.measure.verdict import VerdictName, verdict
from dsv4_prologue.planning import DEFAULT_LAUNCH, Launch, Problem, plan
from dsv4_prologue.selection import select, use_launch
from dsv4_prologue.verify.conformance import Shape

TILE_SIDES = (1, 2, 4, 8, 16)
WARPS = (1, 2, 4, 8)
#: Rows of a tile, at most.
MAX_ROWS = 16
#: Elements of a tile that a lane holds: below, a warp has too little to do; above, it spills.
LANE_ELEMENTS = (4, 64)
#: Tiles that are measured at length, at most, and what another must gain on average.
FINALISTS = 8
FINALIST_GAIN = 0.002
#: Launches so near to each other on average are as good: the card's own stand first.
NEAR = 0.001
#: The share of a shape's time that the first look at all launches gets.
LOOK_SHARE = 0.4
#: Rounds of a look, and of a measurement at length: at least, at most.
LOOK_ROUNDS = (5, 15)
ROUNDS = (20, 200)
#: A threshold is known well enough when the sizes on both sides of it are this close.
THRESHOLD_RATIO = 1.33

Cell = tuple[Shape, Mode]


def launches_for(card: Card, stages: Sequence[int] = (1,)) -> tuple[Launch, ...]:
    """The launches to be swept on a card, its own among them."""
    lanes = card.lanes or 32
    low, high = LANE_ELEMENTS
    found = dict.fromkeys(card.launches)
    for tokens in TILE_SIDES if card.kernel == "tiled" else (1,):
        for heads in TILE_SIDES if card.kernel == "tiled" else (*TILE_SIDES, 32):
            for warps in WARPS if card.kernel == "tiled" else (1,):
                elements = tokens * heads * 512 // (warps * lanes)
                fits = tokens * heads <= MAX_ROWS and low <= elements <= high
                if not fits and card.kernel == "tiled":
                    continue
                for kv in dict.fromkeys((tokens, max(tokens, warps))):  # or a row a warp
                    found |= dict.fromkeys(
                        Launch(tokens, heads, warps, one, kv_tokens_per_tile=kv) for one in stages
                    )
    return tuple(found)


@dataclass(frozen=True)
class Region:
    """Problems a rule is for, in a rule's own words."""

    min_tokens: int = 0
    min_units: int = 0
    max_heads: int | None = None


class Split(NamedTuple):
    """Shapes cut in two: `first` is asked first, since a rule speaks of it."""

    gain: float
    axis: str  # a field of Region
    at: int
    first: tuple[Shape, ...]
    rest: tuple[Shape, ...]


@dataclass(frozen=True)
class Tuned:
    """What a tuner found: the rules, in their order; where they are faster and slower than the
    card's; and the patch of its file, empty if they are faster nowhere.
    """

    rules: tuple[Rule, ...]
    faster: tuple[str, ...]
    slower: tuple[str, ...]
    patch: str


class Tuner:
    """See the module. Raises RequestError for a card that has no launch to choose."""

    def __init__(
        self,
        options: Options,
        records: Records,
        watcher: Watcher | None = None,
        *,
        card: Card | None = None,
        stages: Sequence[int] = (1,),
        evidence: str = "not recorded",
    ) -> None:
        self.options, self.records = options, records
        self.watcher = watcher if watcher is not None else Watcher()
        self.device = torch.device(options.device)
        self.card = card if card is not None else select(self.device).card
        if self.card.kernel == "torch":
            raise RequestError(f"tune: the card {self.card.name} has no launch to choose")
        self.launches = launches_for(self.card, stages)
        self.evidence = evidence
        self.seen: dict[Cell, dict[Launch, Samples]] = {}  # of the measurement at length
        self._clock: Clock | None = None

    def tune(self) -> Tuned:
        """Measure, choose rules, and compare them with the card's."""
        shapes = self._shapes_that_fit()
        heads = sorted({h for _, h in shapes})
        launches = [one for one in self.launches if all(self._sound(one, h) for h in heads)]
        if not launches or not shapes:
            raise RequestError("tune: nothing to sweep: no launch, or no shape, is left")
        looks: dict[Cell, dict[Launch, Samples]] = {}
        cells = [(shape, mode) for shape in shapes for mode in self.options.modes]
        for number, cell in enumerate(cells):
            self._progress(0.5 * number / len(cells), cell, f"a look at {len(launches)} launches")
            seconds = LOOK_SHARE * self.options.seconds
            looks[cell] = self.measure(cell, launches, seconds, LOOK_ROUNDS)
            medians = {text(one): round(seen.median_us, 3) for one, seen in looks[cell].items()}
            self.records.append({**self._of(cell), "record": "look", "median_us": medians})
        few = [
            one
            for one in self._finalists(looks, launches)
            if one in launches or all(self._sound(one, h) for h in heads)
        ]
        for number, cell in enumerate(cells):
            self._progress(0.5 + 0.4 * number / len(cells), cell, f"{len(few)} launches")
            self._at_length(cell, few)
        leaves = self._split(tuple(shapes), Region(), few)
        rules = tuple(self._rule(region, launch, of) for region, launch, of in leaves)
        if leaves[-1][0] == Region() and leaves[-1][1] == DEFAULT_LAUNCH:
            rules = rules[:-1]  # it runs where no rule holds
        faster, slower = (tuple(self._where(name, rules, cells)) for name in ("faster", "slower"))
        return Tuned(rules, faster, slower, card_patch(self.card, rules) if faster else "")

    # What is measured.

    def _shapes_that_fit(self) -> list[Shape]:
        fit = []
        for shape in self.options.shapes:
            reason = no_room(2 * bytes_moved(*shape), self.device, "to be timed")
            if reason:
                self.watcher.remark(f"{shape[0]}x{shape[1]} is left out: {reason}")
            else:
                fit.append(shape)
        return fit

    def _candidate(self, launch: Launch) -> Candidate:
        bind = forms_of(dsv4_prologue)[IN_PLACE]

        def bind_with_launch(inputs: Inputs, out: torch.Tensor | None) -> Call:
            call = bind(inputs, out)

            def launched() -> None:
                with use_launch(launch):
                    call()

            return launched

        return Candidate(text(launch), IN_PLACE, bind_with_launch)

    def _sound(self, launch: Launch, num_heads: int) -> bool:
        """Whether a launch compiles and is right; a remark says why not."""
        self.watcher.progress(0, f"checking {text(launch)} at {num_heads} heads")
        try:
            seen = check(self._candidate(launch), (17, num_heads), self.device, self.options.seed)
            reason = "" if seen["verdict"] == "ok" else f"{seen['verdict']}: {seen['reason']}"
        except launch_errors() as error:
            reason = first_line(error)
        if reason:
            self.watcher.remark(f"{text(launch)} is left out: {reason}")
        return not reason

    def measure(
        self, cell: Cell, launches: Sequence[Launch], seconds: float, rounds: tuple[int, int]
    ) -> dict[Launch, Samples]:
        """Samples of the launches at a shape in a mode, interleaved."""
        shape, mode = cell
        if self._clock is None:
            self._clock = clock_for(self.device)
        timed = Timed.make(shape, self.device, self.options.seed, in_place=True)
        calls = {text(one): timed.call(self._candidate(one)) for one in launches}
        samples = measure(
            calls,
            self._clock,
            mode,
            seed=self.options.seed,
            min_rounds=rounds[0],
            max_rounds=rounds[1],
            max_seconds=seconds,
        )
        return {one: samples[text(one)] for one in launches}

    def _of(self, cell: Cell) -> dict[str, Any]:
        """What the records of a shape in a mode share."""
        (num_tokens, num_heads), mode = cell
        return {
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "mode": mode,
            "card": self.card.name,
            "kernel_hash": kernel_hash(self.card.name),
            "card_hash": card_hash(self.card.name),
            "useful_bytes": bytes_moved(num_tokens, num_heads),
        }

    def _at_length(self, cell: Cell, launches: Sequence[Launch]) -> None:
        """Measure, and keep the samples as evidence."""
        found = self.measure(cell, launches, self.options.seconds, ROUNDS)
        self.seen[cell] = found
        own = self._planned(self.card, cell[0])
        for launch, samples in found.items():
            record = {
                **self._of(cell),
                "record": "tune",
                "launch": text(launch),
                **asdict(launch),
                "of_the_card": launch == own,
                **rounded(samples),
            }
            if own in found:
                record["verdict"] = verdict(samples, found[own]).to_dict()
            self.records.append(record)
        self.watcher.flush()

    def _progress(self, share: float, cell: Cell, what: str) -> None:
        (num_tokens, num_heads), mode = cell
        self.watcher.progress(share, f"{num_tokens}x{num_heads}, {mode}, {what}")

    # What is chosen.

    @staticmethod
    def _planned(card: Card, shape: Shape) -> Launch:
        return plan(card, Problem(*shape)).launch

    def _finalists(
        self, looks: Mapping[Cell, Mapping[Launch, Samples]], launches: Sequence[Launch]
    ) -> list[Launch]:
        """The card's own, and those that bring the best of them nearest to the best of all."""

        def total(chosen: Sequence[Launch]) -> float:
            return sum(
                math.log(min(seen[one].median_us for one in chosen)) for seen in looks.values()
            )

        own = [one for one in self.card.launches if one in launches]
        few = [min(launches, key=lambda one: total([one]))]
        while len(few) < FINALISTS:
            best = min(launches, key=lambda one: total([*few, one]))
            if total(few) - total([*few, best]) < FINALIST_GAIN * len(looks):
                break
            few.append(best)
        dependents = dict.fromkeys(one.dependent for one in self.card.launches)
        few = [replace(one, dependent=how) for one in few for how in dependents]
        return list(dict.fromkeys((*own, *few)))

    def _cells(self, shapes: Sequence[Shape]) -> list[Cell]:
        return [cell for cell in self.seen if cell[0] in shapes]

    def _best(self, shapes: Sequence[Shape], launches: Sequence[Launch]) -> tuple[Launch, float]:
        """The first launch that is near the least geometric mean; its times' logarithms' sum."""
        cells = self._cells(shapes)
        costs = {
            one: sum(math.log(self.seen[cell][one].median_us) for cell in cells) for one in launches
        }
        least = min(costs.values()) + NEAR * len(cells)
        best = next(one for one in launches if costs[one] <= least)
        return best, costs[best]

    def _wins(self, shapes: Sequence[Shape], launch: Launch, other: Launch) -> bool:
        """Whether a launch is faster than another somewhere on these shapes, and slower nowhere."""
        names = {
            verdict(self.seen[cell][launch], self.seen[cell][other]).name
            for cell in self._cells(shapes)
        }
        return "faster" in names and "slower" not in names

    def _split(
        self, shapes: tuple[Shape, ...], region: Region, launches: Sequence[Launch]
    ) -> list[tuple[Region, Launch, tuple[Shape, ...]]]:
        """Regions, in the order they are to be asked for, and the launch of each."""
        whole, cost = self._best(shapes, launches)
        splits = []
        for axis, at, first, rest in _cuts(shapes):
            (one, cost_first), (other, cost_rest) = (
                self._best(part, launches) for part in (first, rest)
            )
            gain = cost - cost_first - cost_rest
            if one != other and self._wins(first, one, other) and self._wins(rest, other, one):
                splits.append((Split(gain, axis, at, first, rest), one, other))
        if not splits:
            return [(region, whole, shapes)]
        split, one, other = max(splits, key=lambda found: found[0].gain)
        at = split.at if split.axis == "max_heads" else self._refine(split, one, other)
        inner = replace(region, **{split.axis: at})
        return [
            *self._split(split.first, inner, launches),
            *self._split(split.rest, region, launches),
        ]

    def _refine(self, split: Split, launch: Launch, other: Launch) -> int:
        """Move a threshold down by bisection, as far as the launch above it is faster for sure."""
        size = _SIZES[split.axis]
        high = min(map(size, split.first))
        low = max((size(one) for one in split.rest if size(one) < high), default=1)
        heads = sorted({h for _, h in split.first})
        while high > low * THRESHOLD_RATIO:
            middle = round(math.sqrt(low * high))
            names = set()
            for num_heads in heads:
                tokens = middle if split.axis == "min_tokens" else -(-middle // (num_heads + 1))
                for mode in self.options.modes:
                    cell = ((tokens, num_heads), mode)
                    self._progress(0.95, cell, f"a threshold of {split.axis}")
                    self._at_length(cell, (launch, other))
                    found = self.seen.pop(cell)  # evidence, but not a shape that was asked for
                    names.add(verdict(found[launch], found[other]).name)
            if "faster" in names and "slower" not in names:
                high = middle
            elif "slower" in names and "faster" not in names:
                low = middle
            else:
                break
        return high

    def _rule(self, region: Region, launch: Launch, shapes: Sequence[Shape]) -> Rule:
        """A rule, with what the measurement says of it."""
        cells = self._cells(shapes)
        worst = max(
            self.seen[cell][launch].median_us
            / min(one.median_us for one in self.seen[cell].values())
            for cell in cells
        )
        gains = [
            math.log(self.seen[cell][DEFAULT_LAUNCH].median_us / self.seen[cell][launch].median_us)
            for cell in cells
            if DEFAULT_LAUNCH in self.seen[cell]
        ]
        gain = ""
        if gains and launch != DEFAULT_LAUNCH:
            gain = f"; {math.exp(sum(gains) / len(gains)):.2f}x the default launch on average"
        return Rule(
            launch,
            why=f"of {len(self.launches)} launches the least geometric mean where it holds",
            evidence=(
                f"{self.evidence}: over {len(cells)} shapes and modes at most {worst - 1:.1%} "
                f"slower than the best launch of each{gain}"
            ),
            **asdict(region),
        )

    def _where(
        self, name: VerdictName, rules: tuple[Rule, ...], cells: Sequence[Cell]
    ) -> Iterator[str]:
        """Where this is the verdict of the rules' launch against the card's."""
        tuned = replace(self.card, rules=rules)
        for cell in cells:
            shape, mode = cell
            new, own = self._planned(tuned, shape), self._planned(self.card, shape)
            found = self.seen[cell]
            if new in found and own in found and new != own:
                told = verdict(found[new], found[own])
                if told.name == name:
                    yield f"{shape[0]}x{shape[1]}, {mode}: {told.ratio:.3f}x with {text(new)}"


_SIZES: dict[str, Callable[[Shape], int]] = {
    "min_tokens": lambda shape: shape[0],
    "min_units": lambda shape: Problem(*shape).num_units,
    "max_heads": lambda shape: shape[1],
}


def _cuts(
    shapes: Sequence[Shape],
) -> Iterator[tuple[str, int, tuple[Shape, ...], tuple[Shape, ...]]]:
    """Every way to cut shapes in two by one condition of a rule: axis, value, those that meet it
    and the rest.
    """
    for axis, size in _SIZES.items():
        for value in sorted({size(shape) for shape in shapes}):
            meets = partial(_meets, axis, value)
            first = tuple(shape for shape in shapes if meets(size(shape)))
            rest = tuple(shape for shape in shapes if not meets(size(shape)))
            if first and rest:
                yield axis, value, first, rest


def _meets(axis: str, value: int, size: int) -> bool:
    return size <= value if axis == "max_heads" else size >= value


def text(launch: Launch) -> str:
    """A launch in words, its stages too where they are not one."""
    stages = f", {launch.num_stages} stages" if launch.num_stages != 1 else ""
    return f"{launch}{stages}"


# ------------------------------------------------------------------------------ the card's file


def card_file(card: Card, rules: Sequence[Rule] | None = None) -> str:
    """The text of a card's file; with these rules in it, if there are any."""
    path = Path(cards.__file__).parent / _file_name(card)
    text = path.read_text(encoding="utf-8")
    if rules is None:
        return text
    value = next(
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    lines = text.splitlines(keepends=True)
    written = ["    rules=(\n", *map(_rule_text, rules), "    ),\n"] if rules else []
    old = next((one.value for one in value.keywords if one.arg == "rules"), None)
    end = (old if old is not None else value).end_lineno
    assert end is not None  # ast.parse gives each node one
    first, last = (old.lineno - 1, end) if old is not None else (end - 1, end - 1)
    return "".join([*lines[:first], *written, *lines[last:]])


def card_patch(card: Card, rules: Sequence[Rule]) -> str:
    """A unified diff that gives the card's file these rules, for a person to read and apply."""
    before, after = (
        one.splitlines(keepends=True) for one in (card_file(card), card_file(card, rules))
    )
    name = f"src/dsv4_prologue/cards/{_file_name(card)}"
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))


def _file_name(card: Card) -> str:
    return f"{card.name.replace('-', '_')}.py"


def _rule_text(rule: Rule) -> str:
    """A rule as it stands in a card's file."""
    default = Launch(rule.launch.tokens_per_tile)
    launch = ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        for name, value in asdict(rule.launch).items()
        if name in ("tokens_per_tile", "heads_per_tile", "num_warps")
        or value != getattr(default, name)
    )
    fields = [f"Launch({launch}),"]
    if len(fields[0]) > 88:
        fields = [f"Launch(\n    {launch}\n),"]
    fields += [
        f"{name}={value},"
        for name, value in (
            ("min_tokens", rule.min_tokens),
            ("min_units", rule.min_units),
            ("max_heads", rule.max_heads),
        )
        if value
    ]
    fields += [_string("why", rule.why), _string("evidence", rule.evidence)]
    body = textwrap.indent("\n".join(fields), " " * 12)
    return f"        Rule(\n{body}\n        ),\n"


def _string(name: str, value: str) -> str:
    """`name="value",`, over several lines if it is long."""
    if len(value) < 70:
        return f'{name}="{value}",'
    parts = textwrap.wrap(value, 76, drop_whitespace=False, break_on_hyphens=False)
    return f"{name}=(\n" + "\n".join(f'    "{part}"' for part in parts) + "\n),"
