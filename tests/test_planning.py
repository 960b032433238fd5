"""Plans, cards and selection: pure values, decided without torch or Triton."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_prologue import (
    Launch,
    Problem,
    explain,
    plan,
    selection,
    toolchain,
    use_card,
    use_launch,
)
from dsv4_prologue.cards import Card, Match, Rule, Toolchain, card_names, get_card, match_card
from dsv4_prologue.planning import DEFAULT_LAUNCH, Floor
from dsv4_prologue.selection import plan_for

pytestmark = pytest.mark.once

WIDE = Launch(8, 1, 4)


def card(**changes: object) -> Card:
    values: dict[str, object] = {
        "name": "some-card",
        "title": "a card for tests",
        "kernel": "tiled",
        "fp8_cast": "integer",
        "why": "it is the plain form",
        "evidence": "not measured on this card",
    }
    return Card(**{**values, **changes})  # type: ignore[arg-type]


def test_dependent_launch_is_one_of_three() -> None:
    assert str(Launch(dependent="wait")) == "1x1 (tokens x heads), 1 warp, dependent launch (wait)"
    with pytest.raises(ValueError, match="dependent: expected one of"):
        Launch(dependent="yes")


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
        (511, 8, DEFAULT_LAUNCH, "default launch, since no rule holds"),
        (512, 64, WIDE, "from 512 tokens, up to 64 heads: it is wide"),
        (512, 65, Launch(2, 1, 2), "from 16384 units: it is wider"),
        (251, 64, DEFAULT_LAUNCH, "default launch"),
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


def test_lanes_are_of_a_size_that_tiles_have() -> None:
    with pytest.raises(
        ValueError, match=r"some-card: expected lanes of 16, 32, 64 or None, got 48"
    ):
        replace(RULED, lanes=48)


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
        "dependent": "no",
        "kv_tokens_per_tile": 8,
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


def test_vector_core_has_one_cast() -> None:
    with pytest.raises(ValueError, match=r"fp8_cast: expected 'integer'.*in some-card"):
        card(kernel="vector_core", fp8_cast="compiler")


def test_cards_of_the_package() -> None:
    assert {"nvidia-hopper", "cpu", "interpreter", "unknown"} <= set(card_names())
    for name in card_names():
        assert get_card(name).name == name
    with pytest.raises(ValueError, match=r"card: expected one of .*nvidia-hopper.*, got 'tpu'"):
        get_card("tpu")


@pytest.mark.parametrize(
    ("backend", "arch", "device_name", "card_name"),
    [
        ("cuda", 90, "NVIDIA H200", "nvidia-hopper"),
        ("cuda", 90, "NVIDIA H100 80GB HBM3", "nvidia-hopper"),
        ("cuda", 90, "NVIDIA GH200 480GB", "nvidia-hopper"),
        ("cuda", 80, "NVIDIA A100-SXM4-80GB", "nvidia-ampere"),
        ("cuda", 80, "A100-SXM4-40GB", "nvidia-ampere"),
        ("cuda", 86, "NVIDIA GeForce RTX 3090", "nvidia-ampere"),
        ("cuda", 87, "Orin", "nvidia-ampere"),
        ("cuda", 89, "NVIDIA L4", "nvidia-ada"),
        ("cuda", 100, "NVIDIA B200", "nvidia-blackwell"),
        ("cuda", 120, "NVIDIA GeForce RTX 5090", "nvidia-blackwell"),
        ("hip", "gfx942", "AMD Instinct MI300X", "amd-cdna3"),
        ("hip", "gfx950", "AMD Instinct MI355X", "amd-cdna3"),
        ("maca", 80, "MetaX C550", "metax-c550"),
        ("cuda", 80, "MetaX C550", "metax-c550"),
        ("hip", "gfx936", "BW1000", "hygon-bw1000"),
        ("musa", 31, "MTT S5000", "mthreads-s5000"),
        ("ppu", 80, "PPU-ZW810E", "thead-zw810e"),
        ("cuda", 80, "PPU-ZW810E", "thead-zw810e"),
        ("npu", "Ascend910B4", "Ascend910B4", "ascend-910b"),
        ("npu", "Ascend910B3", "Ascend910B3", "ascend-910b"),
        # Near misses.
        ("cuda", 80, "MetaX C500", "unknown"),
        ("hip", "gfx90a", "AMD Instinct MI250X", "unknown"),
        ("npu", "Ascend910_9362", "Ascend910_9362", "unknown"),
        ("musa", 22, "MTT S4000", "unknown"),
        ("cuda", 75, "Tesla T4", "unknown"),
        ("xpu", "bmg", "Intel Arc", "unknown"),
    ],
)
def test_a_card_is_recognised(
    backend: str, arch: int | str, device_name: str, card_name: str
) -> None:
    assert match_card(backend, arch, device_name).name == card_name


def test_two_matches_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_prologue import cards

    match = Match(backends=("cuda",), arches=("90",))
    two = {n: card(name=n, match=match) for n in ("one-card", "other-card")}
    monkeypatch.setattr(cards, "_cards", lambda: two)
    with pytest.raises(
        ValueError, match=r"'X' .*cuda:90.* more than one card: one-card, other-card"
    ):
        match_card("cuda", 90, "X")


def test_match_looks_at_target_then_name() -> None:
    match = Match(backends=("maca", "cuda"), arches=("80",), device_name="C550")
    assert match.holds("cuda", 80, "MetaX c550")
    assert not match.holds("cuda", 80, "NVIDIA A100")
    assert not match.holds("cuda", 90, "MetaX C550")
    assert not match.holds("hip", 80, "MetaX C550")


TILE_8 = Launch(8, 1, 4)
TILE_4 = Launch(4, 1, 4)


@pytest.mark.parametrize(
    ("card_name", "num_tokens", "num_heads", "launch", "reason"),
    [
        ("metax-c550", 511, 64, DEFAULT_LAUNCH, "no rule holds (from 512 tokens)"),
        ("metax-c550", 512, 64, TILE_8, "from 512 tokens: 16 elements a lane"),
        ("metax-c550", 511, 128, DEFAULT_LAUNCH, "no rule holds"),
        ("metax-c550", 512, 128, TILE_8, "from 512 tokens"),
        ("hygon-bw1000", 252, 64, DEFAULT_LAUNCH, "no rule holds (from 16384 units)"),
        ("hygon-bw1000", 253, 64, TILE_8, "from 16384 units: 16 elements a lane"),
        ("hygon-bw1000", 127, 128, DEFAULT_LAUNCH, "no rule holds"),
        ("hygon-bw1000", 128, 128, TILE_8, "from 16384 units"),
        ("mthreads-s5000", 512, 64, TILE_4, "from 512 tokens, up to 64 heads: a wider program"),
        ("mthreads-s5000", 512, 65, DEFAULT_LAUNCH, "no rule holds"),
        ("mthreads-s5000", 511, 64, DEFAULT_LAUNCH, "no rule holds"),
        ("thead-zw810e", 1, 64, DEFAULT_LAUNCH, "default launch: the plain form"),
        ("thead-zw810e", 131072, 128, DEFAULT_LAUNCH, "default launch: the plain form"),
        ("ascend-910b", 1, 64, Launch(1, 32), "always: heads of one token"),
        ("ascend-910b", 1, 40, Launch(1, 8), "always"),
        ("ascend-910b", 1, 5, Launch(1, 1), "always"),
        ("ascend-910b", 1, 128, Launch(1, 32), "always"),
        ("nvidia-hopper", 7, 64, Launch(1, 4, 4, dependent="early"), "always: so few programs"),
        ("nvidia-hopper", 8, 64, Launch(1, 4, 4, dependent="wait"), "from 512 units: so few tok"),
        ("nvidia-hopper", 255, 64, Launch(1, 4, 4, dependent="wait"), "from 512 units"),
        (
            "nvidia-hopper",
            256,
            64,
            Launch(1, 4, 4, kv_tokens_per_tile=4, dependent="wait"),
            "from 256 tokens: a row a warp",
        ),
        ("nvidia-ampere", 4096, 64, DEFAULT_LAUNCH, "default launch: no launch was measured"),
    ],
)
def test_both_sides_of_each_boundary(
    card_name: str, num_tokens: int, num_heads: int, launch: Launch, reason: str
) -> None:
    made = explain(num_tokens, num_heads, card=card_name)
    assert made.launch == launch
    assert reason in made.reason


def test_a_toolchain_below_its_floor_falls_through_to_the_default() -> None:
    below = explain(512, 64, card="mthreads-s5000", toolchain="0.6.0+mthreads3.6")
    assert below.launch == DEFAULT_LAUNCH
    assert "flagtree 0.6.0+mthreads3.6 is below 0.6.1+mthreads3.6" in below.reason
    at = explain(512, 64, card="mthreads-s5000", toolchain="0.6.1+mthreads3.6")
    assert at.launch == TILE_4
    assert "flagtree 0.6.1+mthreads3.6 reaches" in at.reason
    assert "is taken to be there" in explain(512, 64, card="mthreads-s5000").reason


@pytest.mark.parametrize(
    ("version", "met"),
    [
        ("0.6.1+mthreads3.6", True),
        ("0.6.1+mthreads3.7", True),
        ("0.7.0+mthreads3.6", True),
        ("0.10.0+mthreads3.6", True),
        ("0.6.1rc1+mthreads3.6", False),
        ("0.6.1+mthreads3.5", False),
        ("0.6.1", False),
        ("0.5.1+mthreads3.1", False),
    ],
)
def test_versions_of_a_toolchain(version: str, met: bool) -> None:
    made = explain(512, 64, card="mthreads-s5000", toolchain=version)
    assert (made.launch == TILE_4) is met


def test_a_toolchain_is_asked_only_of_cards_that_have_a_floor() -> None:
    with pytest.raises(ValueError, match="metax-c550 has no floor"):
        explain(512, 64, card="metax-c550", toolchain="0.6.1")
    with pytest.raises(ValueError, match="toolchain: expected None without a card"):
        explain(512, 64, toolchain="0.6.1")


def test_a_toolchain_without_a_version_is_known_by_its_binary(tmp_path: Path) -> None:
    binary = tmp_path / "llc"
    binary.write_bytes(b"a compiler")
    validated = hashlib.md5(b"a compiler", usedforsecurity=False).hexdigest()
    known = Toolchain("flagtree", "0.6.1", "bin/llc", validated, "why")
    assert toolchain._identify(known, None, binary).met
    assert not toolchain._identify(known, None, None).met
    assert "there is no bin/llc" in toolchain._identify(known, None, tmp_path / "none").reason
    binary.write_bytes(b"another")
    other = toolchain._identify(known, None, binary)
    assert not other.met
    assert "not the validated build" in other.reason
    assert toolchain._identify(known, "0.6.1", binary).met  # the version comes first


def test_the_toolchain_at_hand_is_no_flagtree() -> None:
    floor = get_card("mthreads-s5000").toolchain
    assert floor is not None
    assert not toolchain.at_hand(floor).met


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
    # A process keeps to the variable it started with.
    monkeypatch.setattr(selection, "_plan_at_hand", selection._plan_at_hand.__wrapped__)
    monkeypatch.setattr(selection, "_NAMED", "unknown")
    assert explain(1, 1).card == "unknown"
    assert explain(1, 1).forced
    with use_card("nvidia-hopper"):  # the nearer one wins
        assert explain(1, 1).card == "nvidia-hopper"
    monkeypatch.setattr(selection, "_NAMED", "tpu")
    with pytest.raises(ValueError, match=r"^DSV4_PROLOGUE_CARD: expected one of .*, got 'tpu'$"):
        explain(1, 1)


def test_below_a_floor_only_the_default_launch_may_be_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    card = get_card("mthreads-s5000")
    device = torch.device("meta")  # anything but the CPU, where there is no toolchain to look at
    with use_card(card.name):
        assert selection.planned_launches(device) == (DEFAULT_LAUNCH,)
        assert plan_for(device, 32768, 64).launch == DEFAULT_LAUNCH
        monkeypatch.setattr(selection, "at_hand", lambda _: Floor(met=True, reason="it does"))
        assert selection.planned_launches(device) == card.launches
        assert plan_for(device, 32768, 64).launch in card.launches[1:]


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module = SimpleNamespace()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    names = {0: "metax-c550", 1: "nvidia-ampere"}
    monkeypatch.setattr(selection, "_recognise", lambda _, index: get_card(names[index]))
    for index, name in names.items():
        module.current_device = partial(int, index)
        assert plan_for(torch.device("cuda"), 3, 5).card == name


@pytest.mark.parametrize(("num_tokens", "num_heads"), [(-1, 1), (1, -1), (1.5, 2), ("a", 1)])
def test_a_plan_is_of_whole_numbers(num_tokens: Any, num_heads: Any) -> None:
    with pytest.raises(ValueError, match=r"num_(tokens|heads): expected a whole number from 0 on"):
        explain(num_tokens, num_heads, card="nvidia-hopper")


@pytest.mark.parametrize("value", [1.0, "1", True, None])
def test_a_launch_is_of_ints(value: Any) -> None:
    with pytest.raises(TypeError, match="tokens_per_tile: expected an int, got"):
        Launch(tokens_per_tile=value)
    with pytest.raises(TypeError, match="launch: expected a Launch, got"), use_launch(value):
        pass


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
