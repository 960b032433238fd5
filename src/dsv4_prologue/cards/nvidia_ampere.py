"""NVIDIA Ampere (A100, A800, A30: sm_80; A10, A40, RTX 30: sm_86; Orin: sm_87)."""

from dsv4_prologue.cards.card import Card, Match

CARD = Card(
    name="nvidia-ampere",
    title="NVIDIA Ampere",
    # Other vendors' cards report cuda:80 too, under names of their own.
    match=Match(
        ("cuda",), ("80", "86", "87"), r"NVIDIA|GeForce|RTX|\bA(2|10|16|30|40|100|800)\b|\bOrin\b"
    ),
    lanes=32,
    kernel="tiled",
    fp8_cast="integer",  # Triton refuses fp8e4nv below sm_89
    why="no launch was measured here, so the plain form runs",
    evidence="not measured on this card",
)
