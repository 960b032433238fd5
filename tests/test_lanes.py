"""How tiles lie on 32 and 64 lanes, by upstream's own passes. Compiled in another process."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="runs Triton's passes, and it is not installed")

from dsv4_prologue import Launch
from dsv4_prologue.cards import Card, Match, get_card
from dsv4_prologue.verify import lanes
from dsv4_prologue.verify.compilers import Form, Target
from dsv4_prologue.verify.lanes import Layout

MUSA = Target("musa", "31")
MACA = Target("maca", "80")


def laid_out(launch: Launch, target: Target, num_lanes: int) -> tuple[Layout, Layout]:
    forms = Form(launch, has_kv=False), Form(launch, has_q=False)
    layouts = lanes.lay_out(forms, target, num_lanes)
    assert isinstance(layouts, list), layouts
    return layouts[0], layouts[1]


@pytest.mark.parametrize(
    ("target", "num_lanes", "launch", "elements"),
    [
        (MACA, 64, Launch(1, 1, 1), 8),
        (MACA, 64, Launch(1, 2, 1), 16),
        (MACA, 64, Launch(8, 1, 4), 16),
        (MUSA, 32, Launch(1, 1, 1), 16),
        (MUSA, 32, Launch(1, 2, 1), 32),
        (MUSA, 32, Launch(4, 1, 4), 16),
        (MUSA, 32, Launch(8, 1, 4), 32),
        (MUSA, 32, Launch(1, 4, 4, kv_tokens_per_tile=4), 16),
    ],
)
def test_a_row_lies_in_one_warp(
    target: Target, num_lanes: int, launch: Launch, elements: int
) -> None:
    queries, kv = laid_out(launch, target, num_lanes)
    for kind in ("load", "store"):
        rows = queries.rows(kind)
        assert len(rows) == 64 // num_lanes  # a row's two halves on 32 lanes
        assert sum(access.elements_per_lane for access in rows) == elements
        assert {access.bits for access in rows} == {128}
    assert queries.warps_per_row == 1
    assert {access.bits for access in kv.rows("load")} == {128}
    assert (queries.shared_bytes, kv.shared_bytes) == (0, 0)


@pytest.mark.parametrize("name", ["metax-c550", "hygon-bw1000", "mthreads-s5000", "thead-zw810e"])
def test_cards_of_the_seed(name: str) -> None:
    (proof,) = lanes.prove(get_card(name))
    assert proof.verdict == "proved", proof.reason
    assert "16 elements a lane, 128-bit accesses" in proof.reason


def test_planted_a_launch_of_too_many_lanes() -> None:
    match = Match(("maca",))
    card = Card("made-up", "Made up", "tiled", "compiler", "why", "evidence", match, lanes=64)
    rule = replace(get_card("metax-c550").rules[0], launch=Launch(1, 1, 4))
    (proof,) = lanes.prove(replace(card, rules=(rule,)))
    assert proof.verdict == "refused"
    assert "a row of Q has loads of 32 bits, not 128" in proof.reason


def test_cards_without_lanes_are_not_asked_about_them() -> None:
    assert lanes.prove(get_card("ascend-910b")) == []
    assert lanes.prove(get_card("cpu")) == []
