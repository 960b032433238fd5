"""What a proof says: of which card, what was tried, whether it holds, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Verdict = Literal["proved", "refused", "not provable here"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Proof:
    """One verdict. `detail` holds the figures behind it, as JSON values."""

    card: str
    proof: str
    verdict: Verdict
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The proof as JSON values."""
        return asdict(self)
