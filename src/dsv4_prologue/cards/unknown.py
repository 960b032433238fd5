"""A card that no file describes: the form that asks least of a compiler."""

from dsv4_prologue.cards.card import Card

CARD = Card(
    name="unknown",
    title="a card without a file",
    kernel="tiled",
    fp8_cast="integer",
    why="no card file matches this device: one program a unit and the integer E4M3 encoder",
    evidence="not measured on this card",
)
