"""A card that no file describes: the form that asks least of a compiler."""

from dsv4_prologue.cards.card import Card
from dsv4_prologue.planning import Launch

CARD = Card(
    name="unknown",
    title="a card without a file",
    kernel="tiled",
    fp8_cast="integer",
    default=Launch(),
    why="no card file matches this device: one program a unit and the integer E4M3 encoder",
    evidence="not measured on this card",
)
