"""What a card file says: how the card is recognised, what its compiler can do, what launch wins."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dsv4_prologue.planning import DEFAULT_LAUNCH, Launch, Problem

#: What a card may run, and its files of kernels/: the prologue's and the reader's.
KERNELS = {
    "tiled": ("tiled", "gather"),
    "vector_core": ("vector_core", "gather"),
    "torch": ("composition",),
}
FP8_CASTS = ("compiler", "integer")
ALWAYS = "always"


@dataclass(frozen=True)
class Match:
    """Recognises a card by Triton's target first and the device's name second.

    `backends` are names of Triton's backends, `arches` patterns of the target's arch ("90",
    "gfx94*"); empty means any. `device_name` is a regular expression searched, ignoring case, in
    the name torch gives the device.
    """

    backends: tuple[str, ...]
    arches: tuple[str, ...] = ()
    device_name: str = ""

    def holds(self, backend: str, arch: int | str, device_name: str) -> bool:
        """Whether a target and a device name are this card's."""
        return (
            backend in self.backends
            and (not self.arches or any(fnmatchcase(str(arch), one) for one in self.arches))
            and re.search(self.device_name, device_name, re.IGNORECASE) is not None
        )


@dataclass(frozen=True)
class Toolchain:
    """The oldest compiler a card's rules may be used with; below it the default launch runs.

    Known by the version of `distribution`; where that is not installed under its name, by the hash
    of the compiler's own binary, which proves that it *is* the build that was validated, and
    nothing about other builds.
    """

    distribution: str
    floor: str  # the least version
    binary: str  # below Triton's package folder
    md5: str  # of the validated build's binary
    why: str

    def __str__(self) -> str:
        return f"{self.distribution} >= {self.floor}"


@dataclass(frozen=True)
class Limits:
    """What a launch of the card may be: programs at most, and a multiple they must be of."""

    max_programs: int
    multiple_of: int = 1

    @property
    def chunk(self) -> int:
        """The most programs one launch has."""
        return self.max_programs // self.multiple_of * self.multiple_of


@dataclass(frozen=True)
class Rule:
    """A launch, the problems it wins for, why, and the measurement behind it."""

    launch: Launch
    why: str
    evidence: str
    min_tokens: int = 0
    min_units: int = 0
    max_heads: int | None = None

    def holds(self, problem: Problem) -> bool:
        return (
            problem.num_tokens >= self.min_tokens
            and problem.num_units >= self.min_units
            and (self.max_heads is None or problem.num_heads <= self.max_heads)
        )

    @property
    def condition(self) -> str:
        """The rule's condition in words."""
        parts = []
        if self.min_tokens:
            parts.append(f"from {self.min_tokens} tokens")
        if self.min_units:
            parts.append(f"from {self.min_units} units")
        if self.max_heads is not None:
            parts.append(f"up to {self.max_heads} heads")
        return ", ".join(parts) or ALWAYS


@dataclass(frozen=True)
class Card:
    """One card. Its rules are tried in order; `why` and `evidence` speak of the default launch."""

    name: str
    title: str
    kernel: str
    fp8_cast: str  # the compiler's E4M3 cast, or integer arithmetic where it has none
    why: str
    evidence: str
    match: Match | None = None  # None: never recognised, only chosen by name or as a fallback
    lanes: int | None = None  # lanes of a warp; None where there are none
    rules: tuple[Rule, ...] = ()
    toolchain: Toolchain | None = None  # the floor of the rules
    limits: Limits | None = None  # None: a launch has as many programs as it needs
    heads_divide: bool = False  # a tile of heads must divide the heads written
    # Whether the compiler can be told not to contract a*b+c; where not, RoPE may differ by an ULP.
    can_disable_fp_fusion: bool = True

    @property
    def launches(self) -> tuple[Launch, ...]:
        """What a plan may choose: the rules' launches, and the default if no rule always holds."""
        always = any(rule.condition == ALWAYS for rule in self.rules)
        default = () if always and self.toolchain is None else (DEFAULT_LAUNCH,)
        return tuple(dict.fromkeys((*default, *(rule.launch for rule in self.rules))))

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"name: expected words of a-z, 0-9 joined by '-', got {self.name!r}")
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel: expected one of {tuple(KERNELS)}, got {self.kernel!r}")
        if self.fp8_cast not in FP8_CASTS:
            raise ValueError(f"fp8_cast: expected one of {FP8_CASTS}, got {self.fp8_cast!r}")
        if self.kernel == "vector_core" and self.fp8_cast != "integer":
            raise ValueError(
                f"fp8_cast: expected 'integer', all that vector_core has, in {self.name}"
            )
        if self.lanes not in (None, 16, 32, 64):
            raise ValueError(f"{self.name}: expected lanes of 16, 32, 64 or None, got {self.lanes}")
        entries: tuple[Card | Rule, ...] = (self, *self.rules)
        for entry in entries:
            if not (entry.why and entry.evidence):
                raise ValueError(f"{self.name}: expected a why and an evidence, got an empty one")
