"""Which card serves a device: recognised, or named by `use_card` or DSV4_PROLOGUE_CARD."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4_prologue.cards import Card, get_card, match_card
from dsv4_prologue.planning import DEFAULT_LAUNCH, Floor, Launch, Plan, Problem, plan
from dsv4_prologue.toolchain import at_hand, reaches

if TYPE_CHECKING:
    import torch

CARD_VARIABLE = "DSV4_PROLOGUE_CARD"
_NAMED = os.environ.get(CARD_VARIABLE)  # a process keeps to the card it was started with

_log = logging.getLogger("dsv4_prologue")


class Asked(NamedTuple):
    """What a block asked for its calls."""

    card: str | None = None
    launch: Launch | None = None
    launches: list[Any] | None = None  # where launches are recorded, not made


NOTHING = Asked()
_asked: ContextVar[Asked] = ContextVar("dsv4_prologue_asked", default=NOTHING)

#: What is asked for here: NOTHING itself outside every such block. One look, as a call pays for it.
asked = _asked.get


@contextlib.contextmanager
def asked_for(**what: Any) -> Iterator[None]:
    """Ask for this within the block, beside what the blocks round it ask for."""
    token = _asked.set(_asked.get()._replace(**what))
    try:
        yield
    finally:
        _asked.reset(token)


class Selection(NamedTuple):
    """A card, and how it was come by."""

    card: Card
    forced: bool  # named by somebody, not recognised


@contextlib.contextmanager
def use_card(name: str) -> Iterator[Card]:
    """Run calls within the block as on the card of that name. Safe under threads.

    Raises ValueError if there is no such card.
    """
    card = get_card(name)
    with asked_for(card=name):
        yield card


@contextlib.contextmanager
def use_launch(launch: Launch) -> Iterator[Launch]:
    """Use this launch within the block, whatever the card says. For tests and the tuner.

    Raises TypeError for what is no Launch.
    """
    if not isinstance(launch, Launch):
        raise TypeError(f"launch: expected a Launch, got {type(launch).__name__}")
    with asked_for(launch=launch):
        yield launch


def interpreting() -> bool:
    """Whether Triton was asked to interpret kernels (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def _recognise(device_type: str, index: int) -> Card:
    import torch
    from triton.runtime import driver

    module = torch.get_device_module(device_type)
    with module.device(index):
        target = driver.active.get_current_target()
    name = module.get_device_name(index)
    card = match_card(target.backend, target.arch, name)
    if card.name == "unknown":
        _log.warning(
            "no card file matches %r (Triton target %s:%s): running the default launch",
            name,
            target.backend,
            target.arch,
        )
    return card


def _current(device: torch.device) -> torch.device:
    """A device with its index: that of the current one of its type, where it says none."""
    if device.index is not None or device.type == "cpu":
        return device
    import torch

    return torch.device(device.type, torch.get_device_module(device).current_device())


def select(device: torch.device) -> Selection:
    """The card for a device. Raises ValueError if two match, or a forced name is unknown."""
    name = asked().card
    if name:
        return Selection(get_card(name), True)
    if _NAMED:
        return Selection(get_card(_NAMED, CARD_VARIABLE), True)
    if device.type == "cpu":
        return Selection(get_card("interpreter" if interpreting() else "cpu"), False)
    index = _current(device).index
    assert index is not None
    return Selection(_recognise(device.type, index), False)


def _floor(card: Card, device: torch.device) -> Floor | None:
    """Whether the toolchain at hand reaches the card's floor; None without one, and on a CPU."""
    if card.toolchain is None or device.type == "cpu":
        return None
    return at_hand(card.toolchain)


def planned_launches(device: torch.device) -> tuple[Launch, ...]:
    """Every launch that calls on this device may be planned; below a floor only the default."""
    card, _ = select(device)
    floor = _floor(card, device)
    return card.launches if floor is None or floor.met else (DEFAULT_LAUNCH,)


def _plan(device: torch.device, problem: Problem) -> Plan:
    card, forced = select(device)
    floor = _floor(card, device)
    made = plan(card, problem, launch=asked().launch, forced=forced, floor=floor)
    if made.launch.dependent != "no" and device.type != "cpu" and not _launches_dependently():
        launch = replace(made.launch, dependent="no")
        made = replace(made, launch=launch, reason=f"{made.reason} (this Triton has none of that)")
    return made


@functools.cache
def _launches_dependently() -> bool:
    """Whether this Triton has the waits of a dependent launch, as upstream has from 3.4 on."""
    import triton.language as tl

    return hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")


@functools.lru_cache(maxsize=1 << 16)
def _plan_at_hand(device: torch.device, num_tokens: int, num_heads: int) -> Plan:
    """What runs where nothing was asked for by `use_card` or `use_launch`: the same every time."""
    return _plan(device, Problem(num_tokens, num_heads))


def plan_for(device: torch.device, num_tokens: int, num_heads: int) -> Plan:
    """What a call on this device runs, `use_card` and `use_launch` honoured.

    A card on CPU tensors is interpreted, and there its toolchain is taken to be at its floor.
    """
    if asked() is NOTHING:
        return _plan_at_hand(_current(device), num_tokens, num_heads)
    return _plan(device, Problem(num_tokens, num_heads))


def default_device() -> str:
    """The device of a caller who names none: the current accelerator's type, or "cpu"."""
    import torch

    if torch.accelerator.is_available() and not interpreting():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator.type
    return "cpu"


def explain(
    num_tokens: int, num_heads: int, *, card: str | None = None, toolchain: str | None = None
) -> Plan:
    """What a call of this size runs and why: on the named card, or on the device at hand.

    `toolchain` is a version of the named card's toolchain; without it a card that has a floor is
    taken to be at it, and the reason says so. Needs torch only if no card is named. Raises
    ValueError for a count that is none, a name that is no card's, a version that is none, and a
    toolchain for a card that has no floor.
    """
    for name, count in (("num_tokens", num_tokens), ("num_heads", num_heads)):
        if type(count) is not int or count < 0:
            raise ValueError(f"{name}: expected a whole number from 0 on, got {count!r}")
    problem = Problem(num_tokens, num_heads)
    if card is None:
        if toolchain is not None:
            raise ValueError("toolchain: expected None without a card, got a version")
        import torch

        return plan_for(torch.device(default_device()), num_tokens, num_heads)
    named = get_card(card)
    floor = None
    if toolchain is not None:
        if named.toolchain is None:
            raise ValueError(f"toolchain: expected None, since {card} has no floor, got a version")
        floor = reaches(named.toolchain, toolchain)
    return plan(named, problem, launch=asked().launch, forced=True, floor=floor)
