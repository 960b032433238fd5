"""Pictures of what the records say, as SVG: the same bytes for the same records and matplotlib.

One a card: how much faster ours is than each baseline, and how near the limit, over tokens. And one
over cards: the share of the ceiling, measured or reported.
"""

from __future__ import annotations

import importlib
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from dsv4_prologue.cards import get_card
from dsv4_prologue.measure.evidence import Evidence, Place, Row
from dsv4_prologue.measure.reported import LABEL, REPORTED
from dsv4_prologue.measure.tables import size

#: The name of the picture over cards.
CARDS = "cards"
CARDS_TITLE = "Useful bytes a second, as a share of the best copy on the same card"
#: Modes that are drawn, and what they are like.
MODES = {
    "flushed": "flushed: nothing in the cache",
    "graph": "graph: replayed, data in the cache if it fits",
}
#: Head counts that are drawn, and how.
HEADS = {64: ("-", "full"), 128: (":", "none")}
#: A baseline that is nowhere nearer than this many times is in the tables, not in the picture.
FAR = 3.0
#: Of the picture over cards: large enough for bandwidth alone to matter.
LARGE = 32768
#: Colours that people who see no red or no green can tell apart (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#666666"
OURS = "ours"

_STYLE = {
    "svg.hashsalt": "dsv4-prologue",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


class Point(NamedTuple):
    """A ratio at so many tokens, and its interval."""

    num_tokens: int
    value: float
    low: float
    high: float


#: By what is drawn, and heads.
Curves = dict[tuple[str, int], list[Point]]


class Bar(NamedTuple):
    """Utilisation of one shape on one card."""

    label: str
    utilisation: float
    measured: bool


def _places(evidence: Evidence) -> dict[str, Place]:
    """By card, the device that was measured last in a mode that is drawn."""
    benches = evidence.benches().items()
    newest_last = sorted(benches, key=lambda one: str(one[1][-1]["run"]["date"]))
    return {
        place.card: place
        for place, _ in newest_last
        if not place.forced and MODES.keys() & evidence.rows(place).keys()
    }


def _drawn(rows: Sequence[Row]) -> list[str]:
    """The baselines that are near enough to be drawn."""
    nearest: dict[str, float] = {}
    for row in rows:
        for name, one in row.against.items():
            nearest[name] = min(nearest.get(name, math.inf), one.ratio)
    return [name for name, ratio in nearest.items() if ratio < FAR]


def title(device: str, modes: dict[str, list[Row]]) -> str:
    """What the picture of a card says, in a sentence: losses counted, and what is stale apart."""
    rows = [row for mode in MODES for row in modes.get(mode, [])]
    today, stale = (
        Counter(one.verdict for row in some for one in row.against.values())
        for some in ([r for r in rows if not r.stale], [r for r in rows if r.stale])
    )
    if not today and not stale:
        return f"{device}: compared with nothing but a copy"
    verdicts = today or stale
    parts = [f"{verdicts[v]} {v}" for v in ("same", "unclear", "slower") if verdicts[v]]
    said = f"{device}, time on the device: faster in {verdicts['faster']} of {verdicts.total()}"
    said += f" comparisons ({', '.join(parts)})" if parts else " comparisons"
    if not today:
        return f"{said}, all of them stale"
    return f"{said}; {stale.total()} more are stale" if stale else said


def titles(evidence: Evidence) -> dict[str, str]:
    """The pictures there are, each with its title."""
    found = {
        card: title(place.device, evidence.rows(place)) for card, place in _places(evidence).items()
    }
    return {**found, CARDS: CARDS_TITLE}


# ------------------------------------------------------------------------------------ drawing


def draw(evidence: Evidence) -> dict[str, str]:
    """Every picture, by name, as SVG. Needs matplotlib."""
    matplotlib: Any = importlib.import_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        found = {
            card: _svg(_draw_card(place.device, evidence.rows(place)))
            for card, place in _places(evidence).items()
        }
        return {**found, CARDS: _svg(_draw_cards(_bars(evidence)))}


def drawn_with() -> str:
    """What a picture says of the matplotlib that drew it: another one draws other bytes."""
    return f"matplotlib {importlib.import_module('matplotlib').__version__}"


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": drawn_with()})
    return file.getvalue()


def _title(figure: Any, text: str) -> None:
    figure.suptitle(text, fontsize=13, fontweight="bold", x=0.012, y=0.985, ha="left", va="top")


def _figure(width: float, height: float) -> Any:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height))
    figure.patch.set_facecolor("white")
    return figure


def _speed_curves(rows: Sequence[Row], names: Sequence[str]) -> Curves:
    """The ratio to each baseline, and its interval."""
    found: Curves = {}
    for row in rows:
        num_tokens, num_heads = row.shape
        for name, one in row.against.items():
            if name in names and num_heads in HEADS and math.isfinite(one.ratio):
                ends = [x if math.isfinite(x) else one.ratio for x in (one.low, one.high)]
                point = Point(num_tokens, one.ratio, *ends)
                found.setdefault((name, num_heads), []).append(point)
    return found


def _limit_curves(rows: Sequence[Row]) -> Curves:
    """The limit ratio, as wide as our spread."""
    found: Curves = {}
    for row in rows:
        num_tokens, num_heads = row.shape
        if "limit_ratio" in row.ours and num_heads in HEADS:
            ratio, spread = row.ours["limit_ratio"], row.ours["spread"]
            point = Point(num_tokens, ratio, ratio * (1 - spread), ratio * (1 + spread))
            found.setdefault((OURS, num_heads), []).append(point)
    return found


def _worst(points: Sequence[Point]) -> list[Point]:
    """The lowest point at each number of tokens: ours may have been called in several forms."""
    by_value = sorted(points, key=lambda point: point.value, reverse=True)
    return sorted({point.num_tokens: point for point in by_value}.values())


def _plot(axes: Any, curves: Curves, places: dict[int, int], colours: dict[str, str]) -> None:
    """Curves over tokens, each point with its interval."""
    for (name, num_heads), found in sorted(curves.items()):
        points = _worst(found)
        line, fill = HEADS[num_heads]
        values = [point.value for point in points]
        below = [max(0.0, point.value - point.low) for point in points]
        above = [max(0.0, point.high - point.value) for point in points]
        axes.errorbar(
            [places[point.num_tokens] for point in points],
            values,
            yerr=[below, above],
            color=colours[name],
            linestyle=line,
            marker="o",
            markersize=5,
            fillstyle=fill,
            label=name,
        )


def _note(axes: Any, text: str, at: float, *, above: bool) -> None:
    """Small words at the left, just above a value, or below it."""
    axes.annotate(
        text,
        (0, at),
        (4, 3 if above else -4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=9,
        color=GREY,
    )


def _labelled(axes: Any) -> list[tuple[Any, str]]:
    """What is drawn in it, and its names; of two of one name the solid one comes last."""
    return list(zip(*axes.get_legend_handles_labels(), strict=True))[::-1]


def _draw_card(device: str, modes: dict[str, list[Row]]) -> Any:
    """Two rows, speed-up and limit ratio; a column a mode."""
    shown = {mode: modes[mode] for mode in MODES if mode in modes}
    rows = [row for of_mode in shown.values() for row in of_mode]
    names = _drawn(rows)
    colours = {**dict(zip(names, cycle(COLOURS), strict=False)), OURS: "black"}
    figure = _figure(11, 7)
    _title(figure, title(device, modes))
    grid = figure.subplots(2, len(shown), squeeze=False, sharey="row", sharex="col")
    figure.subplots_adjust(left=0.07, right=0.99, top=0.80, bottom=0.11, hspace=0.1, wspace=0.04)
    worst = 1.0
    for (speed, limit), (mode, of_mode) in zip(grid.T, shown.items(), strict=True):
        tokens = sorted({row.shape[0] for row in of_mode if row.shape[1] in HEADS})
        places = {count: place for place, count in enumerate(tokens)}
        curves = _speed_curves(of_mode, names)
        worst = min([worst, *(point.low for points in curves.values() for point in points)])
        _plot(speed, curves, places, colours)
        _plot(limit, _limit_curves(of_mode), places, colours)
        speed.set_title(MODES[mode], loc="left", fontsize=10)
        speed.axhspan(0, 1, color="#D55E00", alpha=0.1, linewidth=0)
        for axes in (speed, limit):
            axes.axhline(1, color="black", linewidth=1)
        _note(speed, "below: ours is slower", 1, above=False)
        _note(limit, "at 1: as fast as a bare copy of the same bytes", 0, above=True)
        limit.set_xticks(list(places.values()), [str(count) for count in tokens], rotation=30)
        limit.set_xlabel("tokens")
    grid[0][0].set_ylabel("their time / ours")
    grid[1][0].set_ylabel("the copy's time / ours")
    grid[0][0].set_ylim(bottom=min(0.8, worst - 0.05))
    grid[1][0].set_ylim(0, 1.25)
    solid = {name: handle for axes in grid[0] for handle, name in _labelled(axes)}
    shown_names = [name for name in names if name in solid]
    figure.legend(
        [solid[name] for name in shown_names],
        [name.removeprefix("library:").removesuffix(".so") for name in shown_names],
        loc="upper left",
        bbox_to_anchor=(0.0, 0.94),
        ncols=max(1, len(shown_names)),
        frameon=False,
    )
    text = "Solid: 64 heads. Dotted: 128. Bars: the interval of the ratio; below, our spread."
    far = dict.fromkeys(one for row in rows for one in row.against if one not in names)
    if far:
        text += f" Not drawn, since {FAR:.0f} times and more slower everywhere: {', '.join(far)}."
    figure.text(0.012, 0.865, text, fontsize=9, color=GREY)
    return figure


def _bars(evidence: Evidence) -> Iterator[Bar]:
    """Large shapes: measured ones first, then what others reported."""
    for place in _places(evidence).values():
        for row in evidence.rows(place).get("flushed", []):
            share, (num_tokens, num_heads) = row.ours.get("utilisation"), row.shape
            if share is not None and num_tokens == LARGE and num_heads in HEADS:
                form = row.ours["form"]
                label = f"{place.device}, {size(row.shape)}, Q {form}"
                yield Bar(label + ", stale" * bool(row.stale), share, True)
    for one in REPORTED:
        label = f"{get_card(one.card).title}, {size((one.num_tokens, one.num_heads))}"
        yield Bar(label, one.utilisation, False)


def _draw_cards(found: Iterator[Bar]) -> Any:
    """A bar a card and shape; a reported one is pale and hatched."""
    bars = list(found)[::-1]
    height = 1.6 + 0.3 * len(bars)
    figure = _figure(9, height)
    _title(figure, CARDS_TITLE)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.42, right=0.97, top=1 - 0.9 / height, bottom=0.6 / height)
    kinds = {
        True: {"color": COLOURS[0], "label": "measured by us"},
        False: {"color": "#DDDDDD", "edgecolor": GREY, "hatch": "///", "label": LABEL},
    }
    for measured, style in kinds.items():
        places = [place for place, bar in enumerate(bars) if bar.measured is measured]
        if places:
            axes.barh(places, [100 * bars[place].utilisation for place in places], **style)
    for place, bar in enumerate(bars):
        share = 100 * bar.utilisation
        axes.annotate(
            f"{share:.0f} %", (share, place), (3, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_xlim(0, 110)
    axes.set_xlabel("% of the ceiling")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="upper left", bbox_to_anchor=(0.0, 1 - 0.4 / height), ncols=2, frameon=False)
    return figure
