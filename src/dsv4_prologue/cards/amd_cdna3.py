"""AMD CDNA3 (MI300, MI325: gfx942) and CDNA4 (MI350, MI355: gfx950)."""

from dsv4_prologue.cards.card import Card, Match

CARD = Card(
    name="amd-cdna3",
    title="AMD CDNA3 and CDNA4",
    match=Match(("hip",), ("gfx942*", "gfx950*")),
    lanes=64,
    kernel="tiled",
    fp8_cast="compiler",  # E4M3 "fn": in software on gfx942, whose hardware has FNUZ
    why="no launch was measured here, so the plain form runs",
    evidence="not measured on this card",
)
