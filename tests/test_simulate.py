"""The proofs of order can fail: what must not be repeated shows, and what may be does not."""

from __future__ import annotations

import pytest

from dsv4_prologue import Launch
from dsv4_prologue.cards import Card, get_card
from dsv4_prologue.selection import interpreting
from dsv4_prologue.verify.inputs import Variant

if not interpreting():
    pytest.skip("runs interpreted kernels: needs TRITON_INTERPRET=1", allow_module_level=True)

from dsv4_prologue.verify import simulate
from dsv4_prologue.verify.proof import Proof


def faults(variant: Variant, times: int) -> list[str]:
    orders = {"again": simulate.repeated(times)}
    return simulate._same_in_any_order(get_card("unknown"), Launch(), variant, orders)


@pytest.mark.parametrize("times", [1, 7])
def test_q_in_place_must_not_be_done_twice(times: int) -> None:
    assert faults(Variant(out="in place", kv=False), times) == [f"{Launch()}, again"]


@pytest.mark.parametrize("kv", [True, False])
def test_out_of_place_may_be_done_again(kv: bool) -> None:
    assert faults(Variant(out="buffer", kv=kv), 2) == []


def test_cards_share_proofs_only_if_they_run_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []

    def prove(card: Card) -> list[Proof]:
        proved.append(card.name)
        return [Proof(card.name, "numerics", "proved", "")]

    monkeypatch.setattr(simulate, "prove", prove)
    names = ["amd-cdna3", "nvidia-ada", "nvidia-blackwell", "unknown", "nvidia-ampere"]
    found = simulate.prove_all(names)
    # Blackwell runs what Ada does; the others differ in the cast or in the width of their tiles.
    assert proved == ["amd-cdna3", "nvidia-ada", "unknown", "nvidia-ampere"]
    assert [proof.card for proof in found] == names


def test_orders_are_what_they_say() -> None:
    assert simulate.repeated(2)(3) == [0, 0, 0, 1, 2]
    assert sorted(simulate.shuffled(9)) == list(range(9)) != simulate.shuffled(9)
