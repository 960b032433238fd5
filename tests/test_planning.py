"""Plans, cards and selection: pure values, decided without torch or Triton."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from dsv4_prologue import Launch, Problem, explain, plan, use_card, use_launch
from dsv4_prologue.cards import Card, Match, Rule, card_names, get_card, match_card
from dsv4_prologue.selection import CARD_VARIABLE

pytestmark = pytest.mark.once

WIDE = Launch(8, 1, 4)


def card(**changes: object) -> Card:
    values: dict[str, object] = {
        "name": "some-card",
        "title": "a card for tests",
        "kernel": "tiled",
        "fp8_cast": "integer",
        "default": Launch(),
        "why": "it is the plain form",
        "evidence": "not measured on this card",
    }
    return Card(**{**values, **changes})  # type: ignore[arg-type]


def test_problem_counts_units() -> None:
    assert Problem(252, 64).num_units == 16380
    assert Problem(3, 0).num_units == 3


def test_launch_counts_programs() -> None:
    launch = Launch(tokens_per_tile=4, heads_per_tile=2)
    assert launch.kv_programs(0) == 0
    assert launch.kv_programs(5) == 2
    assert launch.q_programs(5, 3) == 4
    assert launch.q_programs(0, 3) == 0
    assert launch.q_programs(5, 0) == 0


@pytest.mark.parametrize("value", [0, 3, -1])
def test_launch_wants_powers_of_two(value: int) -> None:
    with pytest.raises(ValueError, match=f"num_warps: expected a power of two, got {value}"):
        Launch(num_warps=value)


RULED = card(
    rules=(
        Rule(WIDE, "it is wide", "a record", min_tokens=512, max_heads=64),
        Rule(Launch(2, 1, 2), "it is wider", "a record", min_units=16384),
    )
)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "launch", "reason"),
    [
        (511, 8, Launch(), "default launch, since no rule holds"),
        (512, 64, WIDE, "from 512 tokens, up to 64 heads: it is wide"),
        (512, 65, Launch(2, 1, 2), "from 16384 units: it is wider"),
        (251, 64, Launch(), "default launch"),
        (253, 64, Launch(2, 1, 2), "from 16384 units"),
    ],
)
def test_the_first_rule_that_holds_wins(
    num_tokens: int, num_heads: int, launch: Launch, reason: str
) -> None:
    made = plan(RULED, Problem(num_tokens, num_heads))
    assert made.launch == launch
    assert made.reason.startswith(reason)
    assert made.card == "some-card"
    assert not made.forced


def test_a_given_launch_says_so() -> None:
    made = plan(RULED, Problem(512, 64), launch=Launch(4, 1))
    assert made.launch == Launch(4, 1)
    assert made.reason == "launch given by use_launch"


def test_plan_as_json_is_flat() -> None:
    flat = plan(RULED, Problem(512, 64)).to_dict()
    assert flat == {
        "card": "some-card",
        "kernel": "tiled",
        "fp8_cast": "integer",
        "reason": "from 512 tokens, up to 64 heads: it is wide",
        "evidence": "a record",
        "forced": False,
        "tokens_per_tile": 8,
        "heads_per_tile": 1,
        "num_warps": 4,
        "num_stages": 1,
    }


def test_plan_speaks() -> None:
    assert str(plan(RULED, Problem(512, 64), forced=True)) == (
        "some-card (forced): tiled 8x1 (tokens x heads), 4 warps; "
        "from 512 tokens, up to 64 heads: it is wide"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Some Card"),
        ("kernel", "cuda"),
        ("fp8_cast", "none"),
        ("why", ""),
        ("evidence", ""),
    ],
)
def test_a_card_is_validated(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        card(**{field: value})


def test_cards_of_the_package() -> None:
    assert {"nvidia-hopper", "cpu", "interpreter", "unknown"} <= set(card_names())
    for name in card_names():
        assert get_card(name).name == name
    with pytest.raises(ValueError, match=r"card: expected one of .*nvidia-hopper.*, got 'tpu'"):
        get_card("tpu")


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H20"])
def test_hopper_is_recognised(name: str) -> None:
    assert match_card("cuda", 90, name).name == "nvidia-hopper"


def test_no_match_is_unknown() -> None:
    assert match_card("cuda", 75, "Tesla T4").name == "unknown"
    assert match_card("xpu", "bmg", "Intel").name == "unknown"


def test_two_matches_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_prologue import cards

    match = Match(backends=("cuda",), arches=(90,))
    two = {n: card(name=n, match=match) for n in ("one-card", "other-card")}
    monkeypatch.setattr(cards, "_cards", lambda: two)
    with pytest.raises(
        ValueError, match=r"'X' .*cuda:90.* more than one card: one-card, other-card"
    ):
        match_card("cuda", 90, "X")


def test_match_looks_at_target_then_name() -> None:
    match = Match(backends=("maca", "cuda"), arches=(80,), device_name="C550")
    assert match.holds("cuda", 80, "MetaX c550")
    assert not match.holds("cuda", 80, "NVIDIA A100")
    assert not match.holds("cuda", 90, "MetaX C550")
    assert not match.holds("hip", 80, "MetaX C550")


def test_use_card_forces_and_says_so() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with use_card("nvidia-hopper"):
        assert explain(1024, 64).forced
        assert explain(1024, 64).card == "nvidia-hopper"
        with use_card("unknown"):
            assert explain(1024, 64).card == "unknown"
        assert explain(1024, 64).card == "nvidia-hopper"
    assert not explain(1024, 64).forced
    with pytest.raises(ValueError, match="card: expected one of"), use_card("tpu"):
        pass


def test_the_variable_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setenv(CARD_VARIABLE, "unknown")
    assert explain(1, 1).card == "unknown"
    assert explain(1, 1).forced
    with use_card("nvidia-hopper"):  # the nearer one wins
        assert explain(1, 1).card == "nvidia-hopper"
    monkeypatch.setenv(CARD_VARIABLE, "tpu")
    with pytest.raises(ValueError, match="card: expected one of"):
        explain(1, 1)


def test_use_launch_gives_the_launch() -> None:
    with use_launch(WIDE):
        assert explain(1, 64, card="nvidia-hopper").launch == WIDE
    assert explain(1, 64, card="nvidia-hopper").launch != WIDE


def test_forcing_is_of_this_thread() -> None:
    seen = {}

    def other() -> None:
        seen["launch"] = explain(1, 64, card="unknown").launch

    with use_launch(WIDE):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen["launch"] == Launch()


def test_every_decision_is_made_without_torch_and_triton() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "import dsv4_prologue\n"
        "for name in dsv4_prologue.cards.card_names():\n"
        "    print(dsv4_prologue.explain(1024, 64, card=name))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(card_names())
