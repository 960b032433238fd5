"""Records: what was measured or checked, with all that is needed to believe it.

A file holds JSON lines. A line whose `record` is "run" says when, where, from which commit and by
which command the lines that follow it were made; `read` puts the two together again.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from dsv4_prologue.cards import get_card
from dsv4_prologue.cards.card import KERNELS
from dsv4_prologue.planning import tile_width

#: Counts up when a field changes its meaning or goes; a new field does not count it up.
SCHEMA_VERSION = 1
#: Where Linux tells the version of NVIDIA's driver; torch has no public name for it.
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
#: The commit, for where no work tree tells it, or the wrong one.
COMMIT_VARIABLE = "DSV4_PROLOGUE_COMMIT"

#: The numbers of a kernel's release; what follows them names a machine's build.
_KERNEL_RELEASE = re.compile(r"[\d.]*")

_PACKAGE = Path(__file__).resolve().parent.parent


class Commit(NamedTuple):
    """The commit the package is from, "unknown" if nothing tells, and whether files differ."""

    commit: str
    dirty: bool


def _sha256(files: Iterable[Path], more: str = "") -> str:
    total = hashlib.sha256(more.encode())
    for file in files:
        total.update(f"{file.name}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def kernel_hash(name: str) -> str:
    """SHA-256 of the kernels' sources that a card runs, names included, and of its tiles' width: a
    measurement speaks of these alone. Raises ValueError for a name that is no card's.
    """
    files = [_PACKAGE / "kernels" / f"{one}.py" for one in KERNELS[get_card(name).kernel]]
    for file in files:
        imported = re.findall(
            r"^from dsv4_prologue\.kernels\.(\w+)", file.read_text(), re.MULTILINE
        )
        paths = (file.with_name(f"{one}.py") for one in imported)
        files += [path for path in paths if path not in files]
    return _sha256(sorted(files), f"tiles of {tile_width(get_card(name).lanes)} dims")


def host_hash() -> str:
    """SHA-256 of what a call goes through before its kernel is launched: a host's cost speaks of
    this.
    """
    return _sha256(_PACKAGE / f"{one}.py" for one in ("op", "launch", "direct"))


def card_hash(name: str) -> str:
    """SHA-256 of the card's file. Raises ValueError for a name that is no card's."""
    get_card(name)
    return _sha256([_PACKAGE / "cards" / f"{name.replace('-', '_')}.py"])


def commit() -> Commit:
    """What DSV4_PROLOGUE_COMMIT says, or else the commit of the work tree that tracks this package.

    The variable comes first: a copy of the tree may carry another one's git folder. Whether files
    differ is told only of the work tree's own commit. A package that only happens to lie inside
    somebody's work tree (a virtual environment in a checkout, say) is not tracked there, and that
    tree's commit says nothing about it.
    """
    told = os.environ.get(COMMIT_VARIABLE)
    git = shutil.which("git")
    if git is not None:

        def ask(*arguments: str) -> str | None:
            command = [git, "-C", str(_PACKAGE), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stdout.strip() if done.returncode == 0 else None

        tracked = ask("ls-files", "--error-unmatch", "__init__.py")
        head = ask("rev-parse", "HEAD") if tracked else None
        if head and told in (None, "", head):
            return Commit(head, bool(ask("status", "--porcelain", "--", ".")))
    return Commit(told or "unknown", False)


def _host_cpu() -> str:
    """The processor's name as the kernel tells it on Linux, else as Python does."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver, like "580.159.04"."""
    if not _DRIVER_FILE.exists():
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text())
    return found[0] if found is not None else None


def environment(device: str | None = None) -> dict[str, Any]:
    """What a figure depends on beside our sources: device, driver, torch, Triton, Python, host.

    `device` is a torch device; None: the accelerator at hand, else the CPU. `driver` is None where
    nothing tells it.
    """
    import torch

    from dsv4_prologue.selection import default_device

    name = device if device is not None else default_device()
    kind = torch.device(name).type
    cpu = _host_cpu()
    triton_version = None
    if importlib.util.find_spec("triton") is not None:
        import triton

        triton_version = triton.__version__
    return {
        "device": cpu if kind == "cpu" else torch.get_device_module(kind).get_device_name(name),
        "device_type": kind,
        "driver": _driver() if kind == "cuda" else None,
        "torch": torch.__version__,
        "torch_runtime": torch.version.cuda or torch.version.hip,
        "triton": triton_version,
        "python": platform.python_version(),
        "host_cpu": cpu,
        "host_cores": os.cpu_count(),
        "platform": f"{platform.system()} {_KERNEL_RELEASE.match(platform.release())[0]}",  # type: ignore[index]
    }


def _command() -> str:
    """The command line, its program and its files by name only."""
    program, *arguments = sys.argv
    short = [re.sub(r"(^|=)/\S*/", r"\1", one) for one in arguments]
    return shlex.join([Path(program).name, *short])


def append(
    path: Path | str, records: Iterable[Mapping[str, Any]], *, device: str | None = None
) -> None:
    """Append a run to a file: a line about it, then a line for each of its records."""
    run: dict[str, Any] = {
        "record": "run",
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **commit()._asdict(),
        "command": _command(),
        "environment": environment(device),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in (run, *records))


def check_appendable(path: Path | str) -> None:
    """Raise ValueError where records would be appended to a file that holds something else."""
    path = Path(path)
    if path.suffix == ".gz":
        raise ValueError(f"{path}: expected a file of text; gzip it once the run is over")
    if path.exists() and path.stat().st_size:
        try:
            read(path)
        except ValueError as error:
            raise ValueError(f"expected a file of records, or none: {error}") from error
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be written: {error.strerror}"
        ) from error
    if not there:
        path.unlink()


def read(path: Path | str) -> list[dict[str, Any]]:
    """The records of a file (gzipped or not), each with its run under `run`.

    Raises ValueError for what is no record, and for a record without a run.
    """
    run: dict[str, Any] | None = None
    found = []
    packed = Path(path).read_bytes()
    try:
        text = (gzip.decompress(packed) if Path(path).suffix == ".gz" else packed).decode()
        lines = [json.loads(line) for line in text.splitlines()]
    except (ValueError, OSError, EOFError) as error:  # no JSON; no gzip, or its half
        raise ValueError(f"{path}: {error}") from error
    for one in lines:
        if not isinstance(one, dict):
            raise ValueError(f"{path}: expected a record, got {str(one)[:80]}")
        if one.get("record") == "run":
            run = one
        elif run is None:
            raise ValueError(f"{path}: expected a run before the first record, got {str(one)[:80]}")
        else:
            found.append({**one, "run": run})
    return found
