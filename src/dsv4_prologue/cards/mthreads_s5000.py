"""Moore Threads MTT S5000: 32 lanes, Triton's `musa` backend, capability 3.1."""

from dsv4_prologue.cards.card import Card, Match, Rule, Toolchain
from dsv4_prologue.planning import Launch

CARD = Card(
    name="mthreads-s5000",
    title="Moore Threads MTT S5000",
    match=Match(("musa",), ("31",), r"\bS5000\b"),
    lanes=32,
    kernel="tiled",
    fp8_cast="compiler",  # from capability 3.1
    why="one warp a row has 16 elements a lane already; below 512 tokens times are noise",
    evidence=(
        "reported, not measured by us: 93.6 % of a copy ceiling of 1332 GB/s at 32768 x 128, where "
        "no tile was better than 0.94x; 87.4 % at 32768 x 64 (flagos-ai/FlagGems-vllm#684)"
    ),
    rules=(
        Rule(
            Launch(tokens_per_tile=4, heads_per_tile=1, num_warps=4),
            min_tokens=512,
            max_heads=64,
            why="a wider program; measured to help at 64 heads only, and why is not known",
            evidence=(
                "reported, not measured by us: 91.6 % of 1332 GB/s at 32768 x 64; 1.03x at 512 "
                "tokens, 1.00x at 256 (flagos-ai/FlagGems-vllm#684)"
            ),
        ),
    ),
    toolchain=Toolchain(
        distribution="flagtree",
        floor="0.6.1+mthreads3.6",
        binary="backends/mthreads/bin/llc",
        md5="cec9ff66714e311670b9412ec760e4aa",
        why="an older llc aborts on the tile: it cannot select the store of eight bf16",
    ),
)
