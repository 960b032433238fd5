"""T-Head PPU-ZW810E: 32 lanes, Triton target `ppu` or `cuda` with capability 8.0."""

from dsv4_prologue.cards.card import Card, Match

CARD = Card(
    name="thead-zw810e",
    title="T-Head PPU-ZW810E",
    match=Match(("ppu", "cuda"), ("80",), r"ZW810E"),
    lanes=32,
    kernel="tiled",
    # Refused by a policy inherited from NVIDIA's backend, not shown to be unsupported; later
    # FlagTree builds allow it.
    fp8_cast="integer",
    why="the plain form is all this card needs; the encoder is what lets it compile at all",
    evidence=(
        "reported, not measured by us: 96.0 % of a ramped copy ceiling of 2097 GB/s at 32768 x 64 "
        "and 131072 x 128; before, the operator could not be built here "
        "(flagos-ai/FlagGems-vllm#684)"
    ),
)
