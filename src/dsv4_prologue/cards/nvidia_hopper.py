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
    why="one program a unit reaches 80 % of what four heads a program reach",
    evidence="results/nvidia-hopper/2026-11-30-tiles.jsonl: 1305 us at 32768 x 64",
    rules=(
        Rule(
            Launch(1, 4, 4, kv_tokens_per_tile=4, dependent="wait"),
            min_tokens=256,
            why=(
                "a row a warp, so that little of it waits at once; four warps a program, so that "
                "few programs are to be started; the launch overlaps the end of the kernel before"
            ),
            evidence=(
                "results/nvidia-hopper/2026-12-01-466046d-tune.jsonl.gz: flushed, no launch is "
                "faster at any shape from 727 tokens on, and one token of KV is 0.9 to 2.2 % "
                "slower from 8192 tokens on; between 64 and 727 it was not measured"
            ),
        ),
        Rule(
            Launch(1, 4, 4, dependent="wait"),
            min_units=512,
            why="so few tokens leave room: four warps share each token of KV, which is done sooner",
            evidence=(
                "results/nvidia-hopper/2026-12-01-466046d-tune.jsonl.gz: flushed, 5 % faster than "
                "four tokens of KV at 64 x 128, the same at 17 x 64 and 64 x 64. In a graph 10 % "
                "faster at 17 x 64, with the kernel before: "
                "results/nvidia-hopper/2026-11-30-tune.jsonl.gz"
            ),
        ),
        Rule(
            Launch(1, 4, 4, dependent="early"),
            why="so few programs leave room for the next kernel, too, to start on the device",
            evidence=(
                "results/nvidia-hopper/2026-12-01-466046d-tune.jsonl.gz: flushed, the same as "
                "waiting. In a graph 15 % faster at 1 x 64, the same at 6 x 64, 12 % slower at "
                "17 x 64, with the kernel before: results/nvidia-hopper/2026-11-30-tune.jsonl.gz"
            ),
        ),
    ),
)
