"""Faster, slower, same or unclear: what the samples of two candidates allow to be said.

The rule. Ours and theirs are paired round by round: `ratio` is the median over the common rounds of
theirs / ours (above 1: ours is faster), and [low, high] the interval that holds the true median
with 99 % confidence whatever the distribution (two order statistics, by the binomial
distribution), half a step of either clock wider on both sides. Then, with 1 % for `same_within`:

- faster: the whole interval is above 1.01;
- slower: the whole interval is below 0.99;
- same: the whole interval is within 0.99 to 1.01;
- unclear: it reaches over one of these edges, or the rounds in common are fewer than 10.

The interval speaks of a distribution that stays what it is. Where a set of samples is bimodal,
drifts, or was overtaken by the device (`late`), it need not, and the verdict is unclear as long as
the two sets overlap: only if nine tenths of one lie wholly on one side of nine tenths of the other
can no choice of mode or moment turn the verdict, and it stands.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from dsv4_prologue.measure.timing import FEWEST_ROUNDS, Samples, median_interval

VerdictName = Literal["faster", "slower", "same", "unclear"]

SAME_WITHIN = 0.01
CONFIDENCE = 0.99
#: A set is bimodal if its best cut in two leaves means this many within-part deviations apart
#: (Ashman's D). Of simulated sets of 20 and more, normal and uniform ones reach 6 in 3 of 1000 at
#: most, and two equal normals 8 deviations apart nearly always.
BIMODAL = 6.0
BIMODAL_MIN_ROUNDS = 20
BIMODAL_MIN_SHARE = 0.15
LATE_AT_MOST = 0.1


class Verdict(NamedTuple):
    """What can be said of ours against theirs. `ratio` is theirs / ours, [low, high] its interval.

    `reason` says which rule held, with figures.
    """

    name: VerdictName
    ratio: float
    low: float
    high: float
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """For a record; an end of the interval that is not finite becomes None."""
        ends = {"low": self.low, "high": self.high}
        finite = {name: end if math.isfinite(end) else None for name, end in ends.items()}
        return {"verdict": self.name, "ratio": self.ratio, **finite, "reason": self.reason}


def drift_of(samples: Samples, at_least: float = SAME_WITHIN) -> float:
    """How much slower the last third of the rounds was than the first, relative; 0 if not for sure.

    For sure: the 95 % intervals of the two thirds' medians do not meet, and the medians differ by
    `at_least`.
    """
    third = len(samples.times_us) // 3
    if not third:
        return 0.0
    first, last = samples.times_us[:third], samples.times_us[-third:]
    (low, high), (low_last, high_last) = median_interval(first), median_interval(last)
    change = statistics.median(last) / statistics.median(first) - 1
    apart = high < low_last or high_last < low
    return change if apart and abs(change) > at_least else 0.0


def modes_of(samples: Samples, at_least: float = SAME_WITHIN) -> tuple[float, float] | None:
    """The two times, in us, that a bimodal set gathers at; None for any other set.

    The slowest twentieth is left out first. Less than 15 % of a set is no mode, and neither is
    what lies within `at_least` or three steps of the clock of the other.
    """
    ordered = sorted(samples.times_us)
    if len(ordered) < BIMODAL_MIN_ROUNDS:
        return None
    ordered = ordered[: len(ordered) - len(ordered) // 20]
    low, high = _best_cut(ordered)
    if min(len(low), len(high)) < BIMODAL_MIN_SHARE * len(ordered):
        return None
    first, second = statistics.mean(low), statistics.mean(high)
    within = math.hypot(statistics.pstdev(low), statistics.pstdev(high)) / math.sqrt(2)
    apart = second - first
    if apart > max(at_least * first, 3 * samples.resolution_us, BIMODAL * within):
        return first, second
    return None


def _best_cut(ordered: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Cut sorted values in two so that the variance between the parts is the largest."""
    total, count = math.fsum(ordered), len(ordered)
    best, place, below = -1.0, 1, 0.0
    for size in range(1, count):
        below += ordered[size - 1]
        between = (below / size - (total - below) / (count - size)) ** 2 * size * (count - size)
        if between > best:
            best, place = between, size
    return ordered[:place], ordered[place:]


def doubts(samples: Samples, at_least: float = SAME_WITHIN) -> str:
    """Why a median says little of these samples; empty if nothing speaks against it."""
    modes, drift = modes_of(samples, at_least), drift_of(samples, at_least)
    if modes is not None:
        return f"bimodal, at {modes[0]:.4g} and {modes[1]:.4g} us"
    if drift:
        return f"drifting, the last third {drift:+.1%} against the first"
    if samples.late > LATE_AT_MOST * samples.rounds:
        return f"late, {samples.late} of {samples.rounds} samples may hold launch cost of the host"
    return ""


def _apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether nine tenths of one lie wholly on one side of nine tenths of the other."""
    inner = [statistics.quantiles(values, n=20, method="inclusive") for values in (a, b)]
    return inner[0][-1] < inner[1][0] or inner[1][-1] < inner[0][0]


def verdict(ours: Samples, theirs: Samples, *, same_within: float = SAME_WITHIN) -> Verdict:
    """Compare two candidates of one `measure`, or of two whose rounds alternated.

    The rule is the module's docstring. Raises ValueError for samples of two modes.
    """
    if ours.mode != theirs.mode:
        raise ValueError(f"theirs: expected samples of mode {ours.mode}, got {theirs.mode}")
    by_round = dict(zip(theirs.kept, theirs.times_us, strict=True))
    pairs = [
        (mine, by_round[number])
        for number, mine in zip(ours.kept, ours.times_us, strict=True)
        if number in by_round
    ]
    if not pairs:
        return Verdict("unclear", math.nan, -math.inf, math.inf, "no round in common")
    ratios = [other / mine for mine, other in pairs]
    ratio = statistics.median(ratios)
    low, high = median_interval(ratios, CONFIDENCE)
    step = ours.resolution_us / ours.median_us + theirs.resolution_us / theirs.median_us
    low, high = low * (1 - step / 2), high * (1 + step / 2)
    if len(pairs) < FEWEST_ROUNDS:
        few = f"{len(pairs)} rounds in common, fewer than {FEWEST_ROUNDS}"
        return Verdict("unclear", ratio, low, high, few)
    for whose, samples in (("ours", ours), ("theirs", theirs)):
        doubt = doubts(samples, same_within)
        if doubt and not _apart(ours.times_us, theirs.times_us):
            return Verdict("unclear", ratio, low, high, f"{whose}: {doubt}; and the sets overlap")
    name, why = _rule(low, high, same_within)
    return Verdict(
        name, ratio, low, high, f"{CONFIDENCE:.0%} interval {low:.3f} to {high:.3f} {why}"
    )


def _rule(low: float, high: float, same_within: float) -> tuple[VerdictName, str]:
    """The verdict on an interval, and which side of which edge it lies on."""
    bottom, top = 1 - same_within, 1 + same_within
    if low > top:
        return "faster", f"above {top:.3g}"
    if high < bottom:
        return "slower", f"below {bottom:.3g}"
    if bottom <= low and high <= top:
        return "same", f"within {bottom:.3g} to {top:.3g}"
    return "unclear", f"reaches over {top if high > top else bottom:.3g}"
