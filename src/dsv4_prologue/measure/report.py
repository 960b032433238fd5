"""`report`: tables and charts for people, made of the records and the cards.

In README.md and below docs/, what stands between a line `<!-- generated: NAME -->` and the next
line `<!-- end generated -->` is written here, and so are the pictures in docs/charts/. The names:

    verify, verify:CARD    what was proved without a card; of one card, with every reason
    check, check:CARD      the operator against the oracle, wherever it ran
    bench-summary          ours against each baseline: the mean ratio, the worst, how often faster
    bench:CARD             every shape, and what others reported of the card
    chart:CARD, chart:cards    a picture of that; utilisation, card by card
    plan:CARD              what the card's file decides, on both sides of each boundary, and why
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dsv4_prologue.cards import Card, card_names, get_card
from dsv4_prologue.measure import charts, tables
from dsv4_prologue.measure.evidence import Evidence

CHARTS = Path("docs", "charts")

_OF_ALL: dict[str, Callable[[Evidence], str]] = {
    "verify": tables.verify,
    "check": tables.check,
    "bench-summary": tables.bench_summary,
}
_OF_CARD: dict[str, Callable[[Evidence, Card], str]] = {
    "verify": tables.verify_card,
    "check": tables.check,
    "bench": tables.bench,
    "plan": tables.plan_text,
}
_BEGIN = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
_BLOCK = re.compile(rf"({_BEGIN.pattern}\n).*?^(<!-- end generated -->)$", re.MULTILINE | re.DOTALL)


def _picture(evidence: Evidence, name: str, page: Path) -> str:
    """A link from a page to a picture, with its words for who cannot see it."""
    title = charts.titles(evidence).get(name)
    if title is None:
        return tables.NOTHING
    path = Path(os.path.relpath(CHARTS / f"{name}.svg", page.parent)).as_posix()
    return f"![{title}]({path})"


def block(evidence: Evidence, name: str, page: Path) -> str:
    """A block's text for a page, whose path is from the root. Raises ValueError for no block."""
    kind, _, of = name.partition(":")
    if kind == "chart" and of in (*card_names(), charts.CARDS):
        return _picture(evidence, of, page)
    if not of and kind in _OF_ALL:
        return _OF_ALL[kind](evidence)
    if of in card_names() and kind in _OF_CARD:
        return _OF_CARD[kind](evidence, get_card(of))
    raise ValueError(f"{page}: there is no block {name!r}")


def rewritten(evidence: Evidence, text: str, page: Path) -> str:
    """A page with its blocks as they should be. Raises ValueError for one without an end."""
    if len(_BLOCK.findall(text)) != len(_BEGIN.findall(text)):
        raise ValueError(f"{page}: a generated block has no end")
    return _BLOCK.sub(lambda one: f"{one[1]}{block(evidence, one[2], page)}\n{one[3]}", text)


def changes(root: Path, evidence: Evidence, *, with_charts: bool = True) -> dict[Path, str]:
    """What would change below a root: paths from there, and the new texts."""
    made = {}
    for file in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        page = file.relative_to(root)
        made[page] = rewritten(evidence, file.read_text(encoding="utf-8"), page)
    if with_charts:
        for name, picture in charts.draw(evidence).items():
            made[CHARTS / f"{name}.svg"] = picture
    return {
        path: text
        for path, text in made.items()
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text
    }


def _charts_left(root: Path, *, check: bool) -> str:
    """Why charts are left alone; empty if they are not."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (the extra `bench` brings it)"
    for file in sorted((root / CHARTS).glob("*.svg")) if check else ():
        if charts.drawn_with() not in file.read_text(encoding="utf-8"):
            return f"{file.name} was drawn with another version than {charts.drawn_with()}"
    return ""


def report(
    root: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The checkout, with README.md.")
    ] = Path(),
    results: Annotated[
        Path | None, typer.Option(file_okay=False, help="The records; without it, ROOT/results.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if something would.")
    ] = False,
) -> None:
    """Write the tables and charts of README.md and docs/ anew, from the records and the cards."""
    if not (root / "README.md").is_file():
        raise typer.BadParameter("there is no README.md in it", param_hint="--root")
    left = _charts_left(root, check=check)
    if left:
        typer.echo(
            f"charts are {'not compared' if check else 'left as they are'}: {left}", err=True
        )
    folder = results or root / "results"
    if not folder.is_dir():  # and no table to be emptied for that
        raise typer.BadParameter(f"there is no folder {folder}", param_hint="--results")
    try:
        evidence = Evidence.of(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--results") from error
    try:
        found = changes(root, evidence, with_charts=not left)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--root") from error
    for path, text in found.items():
        typer.echo(f"{path} {'would change' if check else 'written'}")
        if not check:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    if not found:
        typer.echo("nothing changes")
    raise typer.Exit(1 if check and found else 0)
