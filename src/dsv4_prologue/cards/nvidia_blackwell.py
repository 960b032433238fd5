"""NVIDIA Blackwell (B200: sm_100; B300: sm_103; RTX 50, PRO 6000: sm_120; GB10: sm_121)."""

from dsv4_prologue.cards.card import Card, Match

CARD = Card(
    name="nvidia-blackwell",
    title="NVIDIA Blackwell",
    match=Match(("cuda",), ("100", "103", "120", "121"), r"NVIDIA|GeForce|RTX|\bG?B[123]\d{1,2}\b"),
    lanes=32,
    kernel="tiled",
    fp8_cast="compiler",
    why="no launch was measured here, so the plain form runs",
    evidence="not measured on this card",
)
