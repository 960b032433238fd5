"""Ascend 910B: vector cores, no lanes, no E4M3 type; Triton's `npu` backend."""

from dsv4_prologue.cards.card import Card, Limits, Match, Rule
from dsv4_prologue.planning import Launch

CARD = Card(
    name="ascend-910b",
    title="Ascend 910B",
    match=Match(("npu",), ("Ascend910B*",)),
    kernel="vector_core",
    fp8_cast="integer",
    why="no plain form compiles here",
    evidence=(
        "reported, not measured by us: the operator could not be built here "
        "(flagos-ai/FlagGems-vllm#684)"
    ),
    rules=(
        Rule(
            Launch(tokens_per_tile=1, heads_per_tile=32, num_warps=1),
            why="heads of one token share a scalar position; more than 32 overflow the buffer",
            evidence=(
                "reported, not measured by us: 14.6 % (32768 x 64) and 21.6 % (32768 x 128) of a "
                "copy ceiling of 1229 GB/s, 6.7x and 9.9x the first form that ran "
                "(flagos-ai/FlagGems-vllm#684)"
            ),
        ),
    ),
    heads_divide=True,
    # 40 vector cores on 910B3 and B4, 48 on B1 and B2: a grid that is larger and no multiple of
    # them may run program 0 again, which in place must not happen. 240 is a multiple of both.
    limits=Limits(max_programs=65535, multiple_of=240),
    can_disable_fp_fusion=False,
)
