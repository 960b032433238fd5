"""Whether the compiler at hand reaches a card's floor."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from packaging.version import Version

from dsv4_prologue.cards.card import Toolchain
from dsv4_prologue.planning import Floor


def reaches(toolchain: Toolchain, version: str) -> Floor:
    """Whether a version of the toolchain's distribution reaches the floor.

    Raises packaging's InvalidVersion, a ValueError, for what is no version.
    """
    relation = "reaches" if Version(version) >= Version(toolchain.floor) else "is below"
    met = relation == "reaches"
    return Floor(met, f"{toolchain.distribution} {version} {relation} {toolchain.floor}")


def _identify(toolchain: Toolchain, version: str | None, binary: Path | None) -> Floor:
    """Know the toolchain by its version, or without one by its binary's hash, or not at all."""
    if version is not None:
        return reaches(toolchain, version)
    name = f"{toolchain.distribution}'s version is not known"
    if binary is None or not binary.is_file():
        return Floor(False, f"{name} and there is no {toolchain.binary}")
    digest = hashlib.md5(binary.read_bytes(), usedforsecurity=False).hexdigest()
    if digest == toolchain.md5:
        return Floor(True, f"{name}, its {binary.name} is the validated build of {toolchain.floor}")
    return Floor(False, f"{name} and its {binary.name} is not the validated build")


@functools.cache
def at_hand(toolchain: Toolchain) -> Floor:
    """Whether the toolchain installed beside this Python reaches the floor."""
    try:
        version = importlib.metadata.version(toolchain.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent if triton is not None and triton.origin else None
    return _identify(toolchain, version, folder / toolchain.binary if folder else None)
