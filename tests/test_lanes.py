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
    ("launch", "elements"), [(Launch(1, 1, 1), 8), (Launch(1, 2, 1), 16), (Launch(8, 1, 4), 16)]
)
def test_64_lanes_hold_a_row_in_a_warp(launch: Launch, elements: int) -> None:
    queries, kv = laid_out(launch, MACA, 64)
    (load,), (store,) = queries.rows("load"), queries.rows("store")
    assert (load.elements_per_lane, load.bits) == (store.elements_per_lane, store.bits)
    assert (load.elements_per_lane, load.bits) == (elements, 128)
    assert (queries.warps_per_row, queries.shared_bytes) == (1, 0)
    assert {access.bits for access in kv.rows("load")} == {128}


@pytest.mark.parametrize(
    ("launch", "elements", "warps", "shared"),
    [
        (Launch(1, 1, 1), 16, 1, 0),
        (Launch(1, 2, 1), 32, 1, 0),
        (Launch(4, 1, 4), 16, 2, 32),  # two warps a row: their sums meet in shared memory
        (Launch(8, 1, 4), 32, 2, 64),
    ],
)
def test_32_lanes_need_two_warps_a_row_if_there_are(
    launch: Launch, elements: int, warps: int, shared: int
) -> None:
    queries, _ = laid_out(launch, MUSA, 32)
    (load,) = queries.rows("load")
    assert (load.elements_per_lane, load.bits) == (elements, 128)
    assert (queries.warps_per_row, queries.shared_bytes) == (warps, shared)


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
