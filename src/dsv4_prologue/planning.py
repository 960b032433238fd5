"""From a card and a problem to a launch, and the sentence that explains it. No torch, no Triton."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dsv4_prologue.cards.card import Card


@dataclass(frozen=True)
class Problem:
    """What a launch is chosen by: rows of q (or kv), and query heads written (0 without q)."""

    num_tokens: int
    num_heads: int

    @property
    def num_units(self) -> int:
        """One unit is one token times one role: each query head, and KV."""
        return self.num_tokens * (self.num_heads + 1)


#: Dependent launch: "wait" lets the launch overlap the end of the kernel before it, and waits for
#: that kernel's results before anything is read; "early" also lets the next such launch overlap
#: this kernel from its start.
DEPENDENT = ("no", "wait", "early")


#: The fields of a launch that are powers of two.
SIZES = ("tokens_per_tile", "heads_per_tile", "num_warps", "num_stages", "kv_tokens_per_tile")


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: the tile's two sides, and Triton's two options.

    A tile is `tokens_per_tile` x `heads_per_tile` rows of 512 of Q, or `kv_tokens_per_tile` rows of
    KV (0: as many as `tokens_per_tile`). All are powers of two.
    """

    tokens_per_tile: int = 1
    heads_per_tile: int = 1
    num_warps: int = 1
    num_stages: int = 1
    dependent: str = "no"  # "wait" or "early" on NVIDIA from sm_90 on: see DEPENDENT
    kv_tokens_per_tile: int = 0

    def __post_init__(self) -> None:
        if self.kv_tokens_per_tile == 0:
            object.__setattr__(self, "kv_tokens_per_tile", self.tokens_per_tile)
        for name in SIZES:
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, got {value}")
        if self.dependent not in DEPENDENT:
            raise ValueError(f"dependent: expected one of {DEPENDENT}, got {self.dependent!r}")

    def kv_programs(self, num_slots: int) -> int:
        """Programs that work on KV."""
        return -(-num_slots // self.kv_tokens_per_tile)

    def q_programs(self, num_tokens: int, num_heads: int) -> int:
        """Programs that work on query heads."""
        return -(-num_tokens // self.tokens_per_tile) * -(-num_heads // self.heads_per_tile)

    def __str__(self) -> str:
        warps = "1 warp" if self.num_warps == 1 else f"{self.num_warps} warps"
        dependent = "" if self.dependent == "no" else f", dependent launch ({self.dependent})"
        tile = f"{self.tokens_per_tile}x{self.heads_per_tile} (tokens x heads)"
        if self.kv_tokens_per_tile != self.tokens_per_tile:
            tile += f", {self.kv_tokens_per_tile} tokens of KV"
        return f"{tile}, {warps}{dependent}"


def tile_width(lanes: int | None) -> int:
    """Dims that `tiled` reads and writes a row by: what a warp's lanes hold at eight each.

    Half a row (256) or a whole one (512); a whole one where the lanes are not known.
    """
    return 512 if lanes is None else min(max(8 * lanes, 256), 512)


#: What runs where no rule holds: one program a unit, one warp. Every compiler takes it.
DEFAULT_LAUNCH = Launch()


class Floor(NamedTuple):
    """Whether the toolchain at hand reaches a card's floor, and how that is known."""

    met: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """What will run, and why."""

    card: str
    kernel: str  # "tiled", "vector_core", or "torch" for the composition
    launch: Launch
    fp8_cast: str  # "compiler" or "integer"
    reason: str
    evidence: str
    forced: bool

    def to_dict(self) -> dict[str, Any]:
        """The plan as flat JSON values, the launch's fields among the others."""
        flat = asdict(self)
        flat.update(flat.pop("launch"))
        return flat

    def __str__(self) -> str:
        forced = " (forced)" if self.forced else ""
        if self.kernel == "torch":
            return f"{self.card}{forced}: torch composition; {self.reason}"
        return f"{self.card}{forced}: {self.kernel} {self.launch}; {self.reason}"


def plan(
    card: Card,
    problem: Problem,
    *,
    launch: Launch | None = None,
    forced: bool = False,
    floor: Floor | None = None,
) -> Plan:
    """Choose the launch for a problem: the card's first rule that holds, or the default.

    `launch` overrides the choice; `forced` records that somebody named the card. `floor` says
    whether the toolchain reaches the card's floor: below it no rule holds. None takes a card that
    has a floor to be at it, and says so.
    """
    reason, evidence, chosen = f"default launch: {card.why}", card.evidence, DEFAULT_LAUNCH
    rule = next((rule for rule in card.rules if rule.holds(problem)), None)
    if launch is not None:
        reason, evidence, chosen = "launch given by use_launch", "none: given by hand", launch
    elif floor is not None and not floor.met:
        reason = f"default launch, since {floor.reason}: {card.why}"
    elif rule is not None:
        reason, evidence, chosen = f"{rule.condition}: {rule.why}", rule.evidence, rule.launch
        if card.toolchain is not None:
            known = floor.reason if floor is not None else "the toolchain is taken to be there"
            reason += f" (needs {card.toolchain}; {known})"
    elif card.rules:
        unmet = "; ".join(rule.condition for rule in card.rules)
        reason = f"default launch, since no rule holds ({unmet}): {card.why}"
    if card.kernel == "vector_core":  # one token a program, whatever was asked for
        chosen = replace(chosen, tokens_per_tile=1, kv_tokens_per_tile=1)
    if card.heads_divide and problem.num_heads:
        # The largest power of two that divides both: a tile of heads has no tail.
        heads = math.gcd(chosen.heads_per_tile, problem.num_heads)
        chosen = replace(chosen, heads_per_tile=heads)
    return Plan(card.name, card.kernel, chosen, card.fp8_cast, reason, evidence, forced)
