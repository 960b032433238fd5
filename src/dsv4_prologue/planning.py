"""From a card and a problem to a launch, and the sentence that explains it. No torch, no Triton."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4_prologue.cards.card import Card


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Problem:
    """What a launch is chosen by: rows of q (or kv), and query heads written (0 without q)."""

    num_tokens: int
    num_heads: int

    @property
    def num_units(self) -> int:
        """One unit is one token times one role: each query head, and KV."""
        return self.num_tokens * (self.num_heads + 1)


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: the tile's two sides, and Triton's two options.

    A tile is `tokens_per_tile` x `heads_per_tile` rows of 512; a KV program takes
    `tokens_per_tile` tokens. Both sides are powers of two.
    """

    tokens_per_tile: int = 1
    heads_per_tile: int = 1
    num_warps: int = 1
    num_stages: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two, got {value}")

    def kv_programs(self, num_slots: int) -> int:
        return _ceil_div(num_slots, self.tokens_per_tile)

    def q_programs(self, num_tokens: int, num_heads: int) -> int:
        return _ceil_div(num_tokens, self.tokens_per_tile) * _ceil_div(
            num_heads, self.heads_per_tile
        )

    def __str__(self) -> str:
        warps = "1 warp" if self.num_warps == 1 else f"{self.num_warps} warps"
        return f"{self.tokens_per_tile}x{self.heads_per_tile} (tokens x heads), {warps}"


@dataclass(frozen=True)
class Plan:
    """What will run, and why."""

    card: str
    kernel: str  # "tiled", or "torch" for the composition
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
    card: Card, problem: Problem, *, launch: Launch | None = None, forced: bool = False
) -> Plan:
    """Choose the launch for a problem: the card's first rule that holds, or its default.

    `launch` overrides the choice; `forced` records that somebody named the card.
    """
    default = card.default
    if launch is not None:
        chosen, reason, evidence = launch, "launch given by use_launch", "none: given by hand"
    else:
        rule = next((rule for rule in card.rules if rule.holds(problem)), None)
        if rule is not None:
            chosen, reason, evidence = rule.launch, f"{rule.condition}: {rule.why}", rule.evidence
        else:
            unmet = "; ".join(rule.condition for rule in card.rules)
            prefix = f"default launch, since no rule holds ({unmet}): " if unmet else ""
            chosen, reason, evidence = default, prefix + card.why, card.evidence
    return Plan(card.name, card.kernel, chosen, card.fp8_cast, reason, evidence, forced)
