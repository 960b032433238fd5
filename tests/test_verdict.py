"""What samples allow to be said: shifted, equal, bimodal, drifting, too few, paired and not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest

from dsv4_prologue.measure.timing import Samples, median_interval
from dsv4_prologue.measure.verdict import Verdict, drift_of, modes_of, verdict

pytestmark = pytest.mark.once

ROUNDS = 60


def samples(
    time_us: Callable[[int, random.Random], float], *, seed: int = 0, rounds: int = ROUNDS
) -> Samples:
    """Samples drawn round by round from a distribution that may change with the round."""
    make = random.Random(seed)
    return Samples(tuple(time_us(number, make) for number in range(rounds)))


def steady(mean: float, deviation: float = 0.5, *, seed: int = 0, rounds: int = ROUNDS) -> Samples:
    return samples(lambda _, make: make.gauss(mean, deviation), seed=seed, rounds=rounds)


def bimodal(low: float, high: float, *, share: float = 0.4, seed: int = 0) -> Samples:
    return samples(
        lambda _, make: make.gauss(high if make.random() < share else low, 0.5), seed=seed
    )


def drifting(first: float, last: float, *, seed: int = 0) -> Samples:
    return samples(
        lambda number, make: make.gauss(first + (last - first) * number / ROUNDS, 0.5), seed=seed
    )


def test_shifted_is_faster_and_the_other_way_slower() -> None:
    ours, theirs = steady(100, seed=1), steady(110, seed=2)
    seen = verdict(ours, theirs)
    assert seen.name == "faster"
    assert seen.low <= seen.ratio <= seen.high
    assert seen.ratio == pytest.approx(1.1, rel=0.005)
    assert "above 1.01" in seen.reason
    back = verdict(theirs, ours)
    assert back.name == "slower"
    assert back.ratio == pytest.approx(1 / seen.ratio, rel=1e-6)


def test_a_tie_is_a_tie() -> None:
    assert verdict(steady(100, seed=1), steady(100.2, seed=2)).name == "same"


def test_equal_sets_are_never_told_apart() -> None:
    names = [
        verdict(steady(100, 3, seed=n), steady(100, 3, seed=1000 + n)).name for n in range(300)
    ]
    assert set(names) <= {"same", "unclear"}


def test_noise_that_hides_the_answer_is_unclear() -> None:
    seen = verdict(steady(100, 15, seed=1), steady(102, 15, seed=2))
    assert seen.name == "unclear"
    assert "reaches over" in seen.reason


def test_a_difference_at_the_edge_is_unclear_not_rounded() -> None:
    assert verdict(steady(100, seed=1), steady(101, seed=2)).name == "unclear"


def test_same_within_is_the_caller_s() -> None:
    ours, theirs = steady(100, seed=1), steady(103, seed=2)
    assert verdict(ours, theirs).name == "faster"
    assert verdict(ours, theirs, same_within=0.05).name == "same"


@pytest.mark.parametrize("rounds", [1, 5, 9])
def test_too_few(rounds: int) -> None:
    seen = verdict(steady(100, rounds=rounds), steady(200, seed=1, rounds=rounds))
    assert seen.name == "unclear"
    assert "fewer than 10" in seen.reason
    assert json.loads(json.dumps(seen.to_dict(), allow_nan=False))["verdict"] == "unclear"


@pytest.mark.parametrize("swap", [False, True])
def test_bimodal_is_recognised_and_unclear(swap: bool) -> None:
    pair = bimodal(100, 120), steady(110, seed=1)
    seen = verdict(*(reversed(pair) if swap else pair))
    assert seen.name == "unclear"
    assert ("theirs" if swap else "ours") in seen.reason
    assert "bimodal, at 99.87 and 119.7 us" in seen.reason


@pytest.mark.parametrize("swap", [False, True])
def test_drifting_is_recognised_and_unclear(swap: bool) -> None:
    pair = drifting(100, 120), steady(108, seed=1)
    seen = verdict(*(reversed(pair) if swap else pair))
    assert seen.name == "unclear"
    assert "drifting, the last third +1" in seen.reason


@pytest.mark.parametrize("odd", [bimodal(100, 120), drifting(120, 100)])
def test_no_mode_and_no_moment_can_turn_sets_that_lie_apart(odd: Samples) -> None:
    assert verdict(odd, steady(200, seed=1)).name == "faster"
    assert verdict(steady(200, seed=1), odd).name == "slower"


def test_late_samples_make_it_unclear_where_the_sets_overlap() -> None:
    ours = steady(100, 3, seed=1)
    late = Samples(steady(103, 3, seed=2).times_us, late=30)
    seen = verdict(ours, late)
    assert seen.name == "unclear"
    assert "30 of 60 samples may hold launch cost" in seen.reason
    assert verdict(ours, Samples(steady(300, seed=2).times_us, late=60)).name == "faster"


def test_what_both_suffer_in_a_round_cancels() -> None:
    make = random.Random(5)
    slow = [make.choice((1.0, 1.0, 1.0, 1.04)) for _ in range(ROUNDS)]
    ours = Samples(tuple(make.gauss(100, 0.2) * factor for factor in slow))
    theirs = Samples(tuple(make.gauss(102, 0.2) * factor for factor in slow))
    seen = verdict(ours, theirs)
    assert seen.name == "faster"
    assert seen.ratio == pytest.approx(1.02, abs=0.002)


def test_pairs_are_of_one_round() -> None:
    ours = Samples((1.0, 2.0, 3.0) * 10, kept=tuple(range(30)))
    theirs = Samples((6.0, 2.0, 4.0) * 10, kept=tuple(range(2, 32)))
    seen = verdict(ours, theirs)  # shifted by two rounds: twice as long in each
    assert seen.ratio == 2.0


def test_no_round_in_common() -> None:
    seen = verdict(Samples((1.0,) * 20), Samples((2.0,) * 20, kept=tuple(range(20, 40))))
    assert (seen.name, seen.reason) == ("unclear", "no round in common")


def test_the_clock_s_step_is_in_the_interval() -> None:
    """Two that read 2 and 3 steps may be 2.49 and 2.51."""
    ours = Samples((2.0,) * 30, resolution_us=1.0)
    theirs = Samples((3.0,) * 30, resolution_us=1.0)
    assert verdict(ours, theirs).name == "unclear"
    fine = [Samples(one.times_us, resolution_us=0.01) for one in (ours, theirs)]
    assert verdict(*fine).name == "faster"


def test_modes_are_not_compared() -> None:
    with pytest.raises(ValueError, match="expected samples of mode resident, got graph"):
        verdict(steady(1), Samples((1.0,), mode="graph"))


DISTRIBUTIONS: dict[str, Callable[[int, random.Random], float]] = {
    "normal": lambda _, make: make.gauss(100, 3),
    "uniform": lambda _, make: make.uniform(95, 105),
    "one-sided": lambda _, make: 100 + make.expovariate(0.3),
    "steps of the clock": lambda _, make: round(make.gauss(100, 1.5)),
    "a few outliers": lambda _, make: 150 if make.random() < 0.03 else make.gauss(100, 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_has_one_mode_is_rarely_called_bimodal(name: str) -> None:
    drawn = [samples(DISTRIBUTIONS[name], seed=seed) for seed in range(200)]
    stepped = [Samples(one.times_us, resolution_us=1.0 if "step" in name else 0.0) for one in drawn]
    assert sum(modes_of(one) is not None for one in stepped) <= 2


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_stays_is_rarely_called_drifting(name: str) -> None:
    drawn = [samples(DISTRIBUTIONS[name], seed=seed) for seed in range(200)]
    assert sum(drift_of(one) != 0 for one in drawn) <= 6


def test_two_modes_and_a_wild_outlier() -> None:
    odd = bimodal(100, 120)
    assert modes_of(Samples((*odd.times_us[1:], 5000.0))) == pytest.approx((100, 120), rel=0.01)


def test_drift_has_a_sign() -> None:
    assert drift_of(drifting(100, 120)) == pytest.approx(0.125, abs=0.02)
    assert drift_of(drifting(120, 100)) == pytest.approx(-0.11, abs=0.02)


def test_interval_of_the_median_covers_it() -> None:
    """The distribution is skewed, so that its mean would not do."""
    inside = 0
    for seed in range(400):
        make = random.Random(seed)
        low, high = median_interval([make.expovariate(1.0) for _ in range(25)])
        inside += low <= math.log(2) <= high
    assert inside >= 0.95 * 400 - 10  # at least what it says, less two deviations


@pytest.mark.parametrize(("count", "confidence"), [(5, 0.95), (7, 0.99), (0, 0.95)])
def test_interval_of_too_few_is_everything(count: int, confidence: float) -> None:
    assert median_interval([1.0] * count, confidence) == (-math.inf, math.inf)


def test_interval_leaves_out_what_the_binomial_distribution_allows() -> None:
    # 20 values: 5 or fewer below the median in 2.07 % of all cases, 6 or fewer in 5.8 %.
    assert median_interval(range(20)) == (5, 14)
    assert median_interval(range(3000)) == (1445, 1554)  # mean 1500, deviation 27.4


def test_verdict_for_a_record() -> None:
    seen = Verdict("same", 1.0, 0.99, 1.01, "why")
    assert seen.to_dict() == {
        "verdict": "same",
        "ratio": 1.0,
        "low": 0.99,
        "high": 1.01,
        "reason": "why",
    }
