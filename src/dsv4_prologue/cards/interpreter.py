"""CPU tensors under TRITON_INTERPRET=1: the tiled kernel in Triton's interpreter, for proofs."""

from dsv4_prologue.cards.card import Card

CARD = Card(
    name="interpreter",
    title="Triton's interpreter on the CPU",
    kernel="tiled",
    fp8_cast="compiler",
    why="the plain form, one program a unit, is the one every card falls back to",
    evidence="none: the interpreter proves bytes, not speed",
)
