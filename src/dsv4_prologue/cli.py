"""The command line: `dsv4-prologue`, or `python -m dsv4_prologue`.

Every command exits with 0 where what it was asked holds, 1 where it does not, 2 where it was used
wrongly. Tables (or, with `--json`, JSON) go to stdout, progress to stderr. torch is imported only
by the commands that need it: `explain --card` needs none.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dsv4_prologue._version import __version__
from dsv4_prologue.cards import card_names
from dsv4_prologue.measure.commands import bench, tune
from dsv4_prologue.measure.report import report
from dsv4_prologue.options import (
    MAX_SEED,
    DeviceOption,
    JsonOption,
    RecordOption,
    present_device,
    require,
)
from dsv4_prologue.selection import CARD_VARIABLE, default_device, explain, interpreting, select
from dsv4_prologue.verify.proof import VERDICTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dsv4_prologue.verify.conformance import Operator

One = TypeVar("One")

app = typer.Typer(
    name="dsv4-prologue",
    help="The DeepSeek-V4 attention prologue: what it does, and why, on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # an unexpected exception stays one
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


def _known_card(name: str | None) -> str | None:
    if name is not None and name not in card_names():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(card_names())}")
    return name


def _print(values: Mapping[str, Any], as_json: bool) -> None:
    """Print names and values: as JSON, or as a table of two columns."""
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in values.items():
        lines = value if isinstance(value, list) else [value]
        table.add_row(name, "\n".join("none" if line is None else str(line) for line in lines))
    Console(markup=False, highlight=False).print(table)


CardOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        envvar=CARD_VARIABLE,
        callback=_known_card,
        help="A card by name; without it, the card of this machine.",
    ),
]


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options that belong to no command."""
    named = os.environ.get(CARD_VARIABLE)
    if named:
        try:
            _known_card(named)
        except typer.BadParameter as error:
            raise typer.BadParameter(str(error), param_hint=CARD_VARIABLE) from error


@app.command()
def info(as_json: JsonOption = False) -> None:
    """Show versions, the device, Triton's target, the card that serves it, and why."""
    require("torch")
    import torch

    from dsv4_prologue.measure.record import environment

    device = torch.device(default_device())
    seen = environment(str(device))
    target = None
    if device.type != "cpu":
        from triton.runtime import driver

        found = driver.active.get_current_target()
        target = f"{found.backend}:{found.arch}, {found.warp_size} lanes a warp"
    card, forced = select(device)
    if forced:
        why = f"named by {CARD_VARIABLE}"
    elif device.type == "cpu":
        why = card.why
    elif card.name == "unknown":
        why = f"no card file matches {seen['device']!r} with Triton target {target}"
    else:
        why = f"its file matches {seen['device']!r} with Triton target {target}"
    values = {"dsv4_prologue": __version__, **seen, "target": target}
    values |= {"card": card.name, "title": card.title, "forced": forced, "why": why}
    _print(values, as_json)


@app.command(name="explain")
def explain_command(
    num_tokens: Annotated[int, typer.Option(min=0, help="Rows of q and kv.")],
    num_heads: Annotated[int, typer.Option(min=0, help="Query heads; 0 without q.")],
    card: CardOption = None,
    toolchain: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Of the card's toolchain, where it has a floor; without it, taken to be there.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which kernel and which launch a call of this size gets, and why. Runs nothing."""
    if card is None:
        require("torch", f"or name a card: --card {'|'.join(card_names())}")
    try:
        plan = explain(num_tokens, num_heads, card=card, toolchain=toolchain)
    except ValueError as error:  # of the toolchain: the rest was checked
        raise typer.BadParameter(str(error), param_hint="--toolchain") from error
    values = {"num_tokens": num_tokens, "num_heads": num_heads, **plan.to_dict()}
    _print(values, as_json)


@app.command()
def check(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="Of quick, core, extra, all and NxH (tokens x heads), joined by commas; without "
            "it, quick on a CPU and all on an accelerator."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="A form of call, may be given again; without it, each that fits."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the inputs.")] = 0,
    against: Annotated[
        str | None,
        typer.Option(
            help="Check somebody else's operator instead of ours: eager, portable, vllm or "
            "library:PATH:namespace.op."
        ),
    ] = None,
    record: RecordOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the operator with the oracle on this device, byte by byte.

    Holds if no case differs and at least one was verified. What memory or time does not allow is
    listed as not verified, with the reason; so is what somebody else's operator refuses.
    """
    require("torch")
    import torch

    from dsv4_prologue.measure.record import append
    from dsv4_prologue.verify import conformance

    device = present_device(device)
    where = torch.device(device)
    on_cpu = where.type == "cpu"
    if on_cpu and not interpreting() and select(where).card.kernel != "torch":
        raise typer.BadParameter(
            "a kernel card on CPU tensors needs TRITON_INTERPRET=1", param_hint=CARD_VARIABLE
        )
    shapes = shapes or ("quick" if on_cpu else "all")
    try:
        total = sum(
            len(variant or conformance.variants_for(*shape, foreign=bool(against)))
            for shape in conformance.parse_shapes(shapes)
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for name in variant or ():
        if name not in (known := conformance.FOREIGN if against else conformance.VARIANTS):
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(known)}", param_hint="--variant"
            )
    operator, told = _operator(against, device) if against else (None, {})
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{shapes} on {device}", total=total)
        records, whole = _until_ctrl_c(
            lambda seen: conformance.run_check(
                device,
                shapes,
                seed,
                variants=variant,
                operator=operator,
                foreign=bool(against),
                on_result=seen,
            ),
            lambda: progress.advance(task),
        )
    records = [one | told for one in records]
    if record is not None:
        append(record, records, device=device)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
    else:
        _print_records(records)
    verdicts = {seen["verdict"] for seen in records}
    raise typer.Exit(0 if whole and "ok" in verdicts and "differs" not in verdicts else 1)


def _until_ctrl_c(
    work: Callable[[Callable[[One], None]], list[One]], advance: Callable[[], object]
) -> tuple[list[One], bool]:
    """What work gives, or what it had told of when Ctrl-C ended it; and whether it was done."""
    seen: list[One] = []

    def tell(one: One) -> None:
        seen.append(one)
        advance()

    try:
        return work(tell), True
    except KeyboardInterrupt:
        typer.echo(f"broken off, with {len(seen)} of it done", err=True)
        return seen, False


def _operator(name: str, device: str) -> tuple[Operator, dict[str, Any]]:
    """Somebody else's operator, called as ours is, and what a record says of it."""
    import torch

    from dsv4_prologue.measure import baselines

    where = torch.device(device)
    try:
        if name in baselines.NO_OPERATORS:
            raise baselines.RequestError(f"against: expected an operator, got {name!r}")
        found = baselines.find(name, where)
    except baselines.RequestError as error:
        raise typer.BadParameter(str(error)) from error
    if isinstance(found, baselines.Unavailable):
        raise typer.BadParameter(f"against: {name} is left out: {found.reason}")
    if reason := baselines.probe(found, where):
        raise typer.BadParameter(f"against: {name} is left out: {reason}")
    told = {"operator": found.name, "provenance": dict(found.provenance)}
    return baselines.as_prologue(found), told


def _print_records(records: list[dict[str, Any]]) -> None:
    """Print a row a case, why some are not ok, and the sum."""
    table = Table(box=SIMPLE, pad_edge=False)
    for header in ("tokens", "heads"):
        table.add_column(header, justify="right")
    table.add_column("form")
    for header in ("bytes wrong", "Q: ULP", "time, ms"):
        table.add_column(header, justify="right")
    table.add_column("verdict")
    reasons = []
    for seen in records:
        size, form = (str(seen["num_tokens"]), str(seen["num_heads"])), seen["variant"]
        figures = ["", "", ""]
        if "time_us" in seen:
            figures = [str(seen[name]) for name in ("bytes_differing", "max_ulp")]
            figures.append(f"{seen['time_us'] / 1000:.1f}")
        table.add_row(*size, form, *figures, seen["verdict"])
        if seen["verdict"] != "ok":
            reasons.append(f"{'x'.join(size)}, {form}: {seen['verdict']}: {seen['reason']}")
    counts = Counter(seen["verdict"] for seen in records)
    sums = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in ("ok", "differs", "not verified")
    )
    cards = sorted({seen["card"] + " (forced)" * seen["forced"] for seen in records})
    whose = "".join(f", of {one}" for one in {seen.get("operator"): 0 for seen in records} if one)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(*reasons, f"{sums}, on {', '.join(cards)}{whose}", sep="\n")


@app.command()
def verify(
    card: Annotated[
        str,
        typer.Option(metavar="NAME|all", help="A card by name, or all of them."),
    ] = "all",
    record: RecordOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove of a card what can be proved without it: bytes, memory, compilers, launches.

    Holds if nothing is refused and something is proved. For ascend-910b it installs triton-ascend
    and ascendnpu-ir, 0.8 GB, into .nox/ascend, once; DSV4_PROLOGUE_ASCEND_PYTHON names a Python
    that has them.
    """
    require("torch")
    from dsv4_prologue.measure.record import append, card_hash, kernel_hash
    from dsv4_prologue.verify.suite import prove

    names = list(card_names()) if card == "all" else [str(_known_card(card))]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"proving {card}", total=None)
        proofs, whole = _until_ctrl_c(
            lambda seen: prove(names, seen), lambda: progress.advance(task)
        )
    values = [proof.to_dict() for proof in proofs]
    if record is not None:
        proved = [
            {
                "record": "proof",
                "kernel_hash": kernel_hash(value["card"]),
                "card_hash": card_hash(value["card"]),
                **value,
            }
            for value in values
        ]
        append(record, proved, device="cpu")
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        table = Table(box=SIMPLE, pad_edge=False)
        for header in ("card", "proof", "verdict", "reason"):
            table.add_column(header, overflow="fold")
        for proof in proofs:
            table.add_row(proof.card, proof.proof, proof.verdict, proof.reason)
        Console(markup=False, highlight=False).print(table)
        counts = Counter(proof.verdict for proof in proofs)
        typer.echo(", ".join(f"{counts[name]} {name}" for name in VERDICTS))
    verdicts = {proof.verdict for proof in proofs}
    holds = whole and "proved" in verdicts and "refused" not in verdicts
    raise typer.Exit(0 if holds else 1)


@app.command(name="affected")
def affected_command(
    base: Annotated[str, typer.Option(metavar="REV", help="What the change is compared with.")],
    as_json: JsonOption = False,
) -> None:
    """List the cards that a change touches, for CI to choose its jobs. Needs git."""
    from dsv4_prologue.affected import affected, changed_since

    try:
        cards = affected(changed_since(base))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--base") from error
    typer.echo(json.dumps(cards) if as_json else "\n".join(cards) or "none")


@app.command()
def demo(
    text: Annotated[str | None, typer.Option(help="What the model reads.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, readable=True, help="A file it reads."),
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a small DeepSeek-V4 on real text with the operator in it; compare with its own code."""
    if text is not None and file is not None:
        raise typer.BadParameter("give --text or --file, not both")
    require("torch")
    require("transformers", "pip install 'dsv4-prologue[demo]'")
    from dsv4_prologue import demo as demonstration

    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"{file} is no text: {error}", param_hint="--file") from error
    raise typer.Exit(demonstration.run(text=text, device=present_device(device), as_json=as_json))


for command in (bench, tune, report):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    app()
