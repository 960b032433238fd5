"""MetaX C550: 64 lanes, Triton's `maca` backend; torch knows it as `cuda` with capability 8.0."""

from dsv4_prologue.cards.card import Card, Match, Rule
from dsv4_prologue.planning import Launch

CARD = Card(
    name="metax-c550",
    title="MetaX C550",
    match=Match(("maca", "cuda"), ("80",), r"\bC550\b"),
    lanes=64,
    kernel="tiled",
    fp8_cast="compiler",
    why="below 512 tokens a wide tile is mostly masked off, and its launch costs 32 us, not 26",
    evidence=(
        "reported, not measured by us: at 256 tokens the tile is 0.96x and 0.99x of this "
        "(flagos-ai/FlagGems-vllm#684)"
    ),
    rules=(
        Rule(
            Launch(tokens_per_tile=8, heads_per_tile=1, num_warps=4),
            min_tokens=512,
            why="16 elements a lane on 64 lanes, in a program of four warps",
            evidence=(
                "reported, not measured by us: 95.7 % (131072 x 64) and 97.0 % (32768 x 128) of a "
                "ramped copy ceiling of 1397 GB/s, the default launch 83.2 % and 87.6 %; at 512 "
                "tokens 1.03x and 1.04x (flagos-ai/FlagGems-vllm#684)"
            ),
        ),
    ),
)
