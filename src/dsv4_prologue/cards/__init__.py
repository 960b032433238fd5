"""One file a card, each holding a value named CARD. Adding a card is adding a file."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from dsv4_prologue.cards.card import Card, Limits, Match, Rule, Toolchain

__all__ = ["Card", "Limits", "Match", "Rule", "Toolchain", "card_names", "get_card", "match_card"]


@functools.cache
def _cards() -> dict[str, Card]:
    found: dict[str, Card] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name == "card":
            continue
        card: Card = importlib.import_module(f"{__name__}.{module.name}").CARD
        if card.name in found:
            raise ValueError(f"two card files are named {card.name!r}")
        found[card.name] = card
    return found


def card_names() -> tuple[str, ...]:
    """The names of all cards, in the order of their files."""
    return tuple(_cards())


def get_card(name: str, argument: str = "card") -> Card:
    """The card of that name. Raises ValueError, naming the argument and the cards, if none is."""
    try:
        return _cards()[name]
    except KeyError:
        known = ", ".join(_cards())
        raise ValueError(f"{argument}: expected one of {known}, got {name!r}") from None


def match_card(backend: str, arch: int | str, device_name: str) -> Card:
    """The one card that matches a Triton target and a device name, or `unknown`.

    Raises ValueError if more than one matches.
    """
    matching = [
        card
        for card in _cards().values()
        if card.match is not None and card.match.holds(backend, arch, device_name)
    ]
    if len(matching) > 1:
        names = ", ".join(card.name for card in matching)
        raise ValueError(
            f"{device_name!r} (Triton target {backend}:{arch}) matches more than one card: {names}"
        )
    return matching[0] if matching else get_card("unknown")
