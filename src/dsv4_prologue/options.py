"""Options that several commands take, and what they need: torch, a device that is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from dsv4_prologue.selection import default_device

MAX_SEED = 2**63 - 1  # what torch's generators take
INSTALLING = "the README says how, under Installing"


def require(module: str, remedy: str = INSTALLING) -> None:
    """Exit with 2 where a module is not installed."""
    if importlib.util.find_spec(module) is None:
        typer.echo(f"This needs {module}, which is not installed; {remedy}", err=True)
        raise typer.Exit(2)


def present_device(name: str | None) -> str:
    """The name of a device that is there: None is the accelerator at hand, or the CPU.

    Exits with 2 where it is not there.
    """
    if name is None:
        return default_device()
    import torch

    try:
        present = torch.get_device_module(torch.device(name)).is_available()
    except RuntimeError as error:  # what torch raises for a device it has no name for
        raise typer.BadParameter(str(error), param_hint="--device") from error
    if not present:
        raise typer.BadParameter(f"{name!r} is not available here", param_hint="--device")
    return name


def _records_file(path: Path | None) -> Path | None:
    """Refuse a file that holds something else than records, before anything is done."""
    from dsv4_prologue.measure.record import check_appendable

    if path is not None:
        try:
            check_appendable(path)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return path


RecordOption = Annotated[
    Path | None,
    typer.Option(dir_okay=False, callback=_records_file, help="Append the records to this file."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="A torch device; without it, the accelerator if there is one, or the CPU."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
