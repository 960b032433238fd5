"""CPU tensors, without a kernel: a composition of torch operations."""

from dsv4_prologue.cards.card import Card

CARD = Card(
    name="cpu",
    title="CPU, torch composition",
    kernel="torch",
    fp8_cast="compiler",
    why="CPU tensors take the torch composition: Triton compiles for no CPU",
    evidence="none: not a question of speed",
)
