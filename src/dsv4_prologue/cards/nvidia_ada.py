"""NVIDIA Ada Lovelace (L4, L20, L40, RTX 40): sm_89."""

from dsv4_prologue.cards.card import Card, Match

CARD = Card(
    name="nvidia-ada",
    title="NVIDIA Ada Lovelace",
    match=Match(("cuda",), ("89",), r"NVIDIA|GeForce|RTX|\bL(4|20|40S?)\b"),
    lanes=32,
    kernel="tiled",
    fp8_cast="compiler",
    why="no launch was measured here, so the plain form runs",
    evidence="not measured on this card",
)
