"""Figures of cards that we could not measure, as somebody else reported them.

All are from the description of flagos-ai/FlagGems-vllm's pull request 684: of its own kernels, an
earlier form of ours, with the tiles and warps that our card files took over. They say where to
look, not how fast our kernel is; wherever one is shown, `LABEL` is beside it.
"""

from __future__ import annotations

from typing import NamedTuple

LABEL = "reported, not measured by us"


class Reported(NamedTuple):
    """Bandwidth of useful bytes, in GB/s (1e9 bytes a second), of one shape on one card."""

    card: str
    num_tokens: int
    num_heads: int
    ceiling_gbps: float  # of a copy, clocks ramped
    plain_gbps: float | None  # one program a unit, the compiler's cast; None: could not be built
    gbps: float  # with the tile and the cast of our card file

    @property
    def utilisation(self) -> float:
        """The share of the ceiling; 1.0 is all of it."""
        return self.gbps / self.ceiling_gbps


REPORTED = (
    Reported("metax-c550", 131072, 64, 1397, 1162.8, 1337.6),
    Reported("metax-c550", 32768, 128, 1397, 1224.2, 1355.5),
    Reported("hygon-bw1000", 32768, 64, 1350, 609.9, 1197.8),
    Reported("hygon-bw1000", 32768, 128, 1350, 611.6, 1209.6),
    Reported("hygon-bw1000", 131072, 128, 1350, 612.3, 1213.8),
    Reported("mthreads-s5000", 32768, 64, 1332, 1162.5, 1220.3),
    Reported("mthreads-s5000", 32768, 128, 1332, 1245.0, 1245.0),
    Reported("thead-zw810e", 32768, 64, 2097, None, 2013.3),
    Reported("thead-zw810e", 131072, 128, 2097, None, 2014.1),
    Reported("ascend-910b", 32768, 64, 1229, None, 179.2),
    Reported("ascend-910b", 32768, 128, 1229, None, 265.1),
)
