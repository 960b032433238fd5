"""NVIDIA Hopper (H100, H200, H800, H20): sm_90."""

from dsv4_prologue.cards.card import Card, Match
from dsv4_prologue.planning import Launch

CARD = Card(
    name="nvidia-hopper",
    title="NVIDIA Hopper",
    match=Match(backends=("cuda",), arches=(90,), device_name=r"\b(H100|H200|H800|H20|GH200)\b"),
    lanes=32,
    kernel="tiled",
    fp8_cast="compiler",
    default=Launch(tokens_per_tile=1, heads_per_tile=2, num_warps=1),
    why="two heads of one token share its position and are 2 KB of contiguous rows",
    evidence="a sweep is still to be recorded",
)
