"""Hygon BW1000: 64 lanes, Triton's `hip` backend with gfx936."""

from dsv4_prologue.cards.card import Card, Match, Rule
from dsv4_prologue.planning import Launch

CARD = Card(
    name="hygon-bw1000",
    title="Hygon BW1000",
    match=Match(("hip",), ("gfx936*",)),
    lanes=64,
    kernel="tiled",
    fp8_cast="compiler",
    why="below 16384 units a wide tile is mostly masked off, and its launch costs 90 us, not 80",
    evidence=(
        "reported, not measured by us: the crossover is at 256 tokens for 64 heads and at 128 for "
        "128, 16640 and 16512 units (flagos-ai/FlagGems-vllm#684)"
    ),
    rules=(
        Rule(
            Launch(tokens_per_tile=8, heads_per_tile=1, num_warps=4),
            min_units=16384,
            why="16 elements a lane on 64 lanes, in a program of four warps",
            evidence=(
                "reported, not measured by us: 88.7 to 89.9 % of a copy ceiling of 1350 GB/s at "
                "32768 tokens and more, the default launch 45 % (flagos-ai/FlagGems-vllm#684)"
            ),
        ),
    ),
)
