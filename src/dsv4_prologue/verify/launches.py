"""Proof of what would be launched: grids, chunks and options, recorded in place of a launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dsv4_prologue.cards import Card
from dsv4_prologue.cards.card import Limits
from dsv4_prologue.launch import Launched, record_launches
from dsv4_prologue.op import prologue
from dsv4_prologue.planning import Launch, Problem, plan, tile_width
from dsv4_prologue.selection import use_card, use_launch
from dsv4_prologue.verify.proof import Proof

#: CUDA's and HIP's limit of a grid's first side.
MAX_PROGRAMS = 2**31 - 1
#: Below, at and past a chunk, a core count and a tile; the largest of the benchmark.
SIZES = ((0, 5), (1, 1), (41, 1), (1009, 64), (1023, 64), (17, 40), (131072, 128))
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"}


def record(num_tokens: int, num_heads: int) -> list[Launched]:
    """The launches of one call in place, on memory that is reserved and never touched."""
    q = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16)
    kv = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
    cache = torch.empty(num_tokens // 64 + 1, 64 * 584, dtype=torch.uint8)
    index = torch.empty(num_tokens, dtype=torch.int64)
    with record_launches() as launches:
        prologue(q, kv, cache, index, index, torch.empty(8, 64), q_out=q)
    return launches


def expected_programs(launch: Launch, num_tokens: int, num_heads: int) -> int:
    """The programs with work to do, for a launch that was planned."""
    return launch.kv_programs(num_tokens) + launch.q_programs(num_tokens, num_heads)


def grid_faults(grids: Sequence[tuple[int, int]], num_programs: int, limits: Limits) -> list[str]:
    """What is wrong with a call's launches, each (first program, programs); empty if nothing."""
    found = []
    for _, programs in grids:
        if not 0 < programs <= limits.max_programs:
            found.append(f"{programs} programs in one launch, which takes {limits.max_programs}")
        if programs % limits.multiple_of:
            found.append(f"{programs} programs are no multiple of {limits.multiple_of}")
    ends = [0, *(first + programs for first, programs in grids)]
    idle = ends[-1] - num_programs
    if [first for first, _ in grids] != ends[:-1] or not 0 <= idle < limits.multiple_of:
        found.append(f"launches {list(grids)} are not {num_programs} programs, each once")
    return found


def _faults(card: Card, launch: Launch, size: tuple[int, int]) -> Iterator[str]:
    """What is wrong with the launches of one call."""
    limits = card.limits if card.limits is not None else Limits(MAX_PROGRAMS)
    launches = record(*size)
    for one in launches:
        if one.kernel != card.kernel:
            yield f"{size}: the kernel {one.kernel}"
        if one.options.get("num_warps") != launch.num_warps:
            yield f"{size}: {one.options.get('num_warps')} warps, planned {launch.num_warps}"
        if one.options.get("launch_pdl", False) is not (launch.dependent != "no"):
            yield f"{size}: a dependent launch where none is planned, or none where one is"
        if set(one.options) - OPTIONS:
            yield f"{size}: options {sorted(set(one.options) - OPTIONS)} that no plan asks for"
        if card.can_disable_fp_fusion and one.options.get("enable_fp_fusion") is not False:
            yield f"{size}: multiply and add may be contracted"
    if launches:
        tile = launches[0].arguments
        seen = tile.get("TOKENS", 1), tile["HEADS_PER_TILE"], tile.get("KV_TOKENS", 1)
        planned = plan(card, Problem(*size), launch=launch).launch
        sides = planned.tokens_per_tile, planned.heads_per_tile, planned.kv_tokens_per_tile
        if seen != sides:
            yield f"{size}: the tile {seen}, planned {sides}"
        if tile.get("WIDTH", 512) != tile_width(card.lanes):
            yield f"{size}: tiles {tile['WIDTH']} dims wide, on {card.lanes} lanes"
        grids = [(one.arguments.get("first_program", 0), one.programs) for one in launches]
        for fault in grid_faults(grids, expected_programs(planned, *size), limits):
            yield f"{size}: {fault}"
    elif size[0]:
        yield f"{size}: nothing was launched"


def prove(card: Card) -> list[Proof]:
    """Whether every launch the card may choose has the grid, chunks and options it should."""
    if card.kernel == "torch":
        return [Proof(card.name, "launches", "not provable here", "it launches no kernel of ours")]
    faults = []
    for launch in card.launches:
        with use_card(card.name), use_launch(launch):
            faults += [fault for size in SIZES for fault in _faults(card, launch, size)]
    detail = {"sizes": [list(size) for size in SIZES], "launches": [str(x) for x in card.launches]}
    if faults:
        return [Proof(card.name, "launches", "refused", "; ".join(faults), detail)]
    limits = card.limits
    reason = "every unit in one launch"
    if limits is not None:
        reason = f"chunks of at most {limits.chunk} programs, multiples of {limits.multiple_of}"
    return [Proof(card.name, "launches", "proved", reason, detail)]
