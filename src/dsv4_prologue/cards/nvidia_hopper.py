"""NVIDIA Hopper (H100, H200, H800, H20, GH200): sm_90."""

from dsv4_prologue.cards.card import Card, Match, Rule
from dsv4_prologue.planning import Launch

CARD = Card(
    name="nvidia-hopper",
    title="NVIDIA Hopper",
    match=Match(("cuda",), ("90",), r"NVIDIA|\b(H100|H200|H800|H20)\b"),
    lanes=32,
    kernel="tiled",
    fp8_cast="compiler",
    why="one program a unit reaches 80 % of what two heads a program reach",
    evidence="results/nvidia-hopper/2026-11-30-tiles.jsonl: 1305 us at 32768 x 64, not 1044",
    rules=(
        Rule(
            Launch(tokens_per_tile=1, heads_per_tile=2, num_warps=1, dependent="wait"),
            min_units=2048,
            why=(
                "two heads of one token share its position and are 2 KB of contiguous rows; the "
                "launch overlaps the end of the kernel before it"
            ),
            evidence=(
                "results/nvidia-hopper/2026-11-30-tiles.jsonl (tiles) and -variants.jsonl (loads, "
                "dependent launch), before there was a harness"
            ),
        ),
        Rule(
            Launch(tokens_per_tile=1, heads_per_tile=2, num_warps=1, dependent="early"),
            why=(
                "so few programs leave room on the device for the next kernel to start on: 0.3 us "
                "a call in a chain"
            ),
            evidence="results/nvidia-hopper/2026-11-30-variants.jsonl, before there was a harness",
        ),
    ),
)
