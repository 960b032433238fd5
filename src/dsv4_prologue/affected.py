"""The cards a change touches, from its paths and the import graph: for CI to choose its jobs.

A card's file touches that card, a kernel's file every card that runs it, whatever the operator or
the proofs import every card, and anything else (documents, tests, measurements) none.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv4_prologue.cards import card_names, get_card
from dsv4_prologue.cards.card import KERNELS

PACKAGE = "dsv4_prologue"
_FOLDER = Path(__file__).resolve().parent
#: What every card's job starts from.
_ROOTS = tuple(
    f"{PACKAGE}.{module}"
    for module in (
        "op",
        "verify.suite",
        # These are started as programs, not imported.
        "verify.simulate",
        "verify._compile_worker",
        "verify._ascend_worker",
    )
)
#: Files outside the package that decide what the jobs run with.
_SHARED = ("pyproject.toml", "constraints.txt", "noxfile.py", "Makefile")


def _module(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(_FOLDER).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Each module of the package, and those of the package it imports anywhere in its file."""
    files = {_module(path): path for path in _FOLDER.rglob("*.py")}
    graph = {}
    for module, path in files.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[module] = imported & files.keys()
    return graph


def _reachable(graph: Mapping[str, set[str]], roots: Iterable[str]) -> set[str]:
    """The roots and all they import."""
    seen: set[str] = set()
    todo = list(roots)
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += graph.get(module, ())
    return seen


def affected(changed: Iterable[str]) -> list[str]:
    """The names of the cards that a change of these paths (from the work tree's top) touches."""
    graph = import_graph()
    kernels = f"{PACKAGE}.kernels."
    common = {one for one in _reachable(graph, _ROOTS) if not one.startswith(kernels)}
    own = {
        name: _reachable(graph, [kernels + kernel for kernel in KERNELS[get_card(name).kernel]])
        | {f"{PACKAGE}.cards.{name.replace('-', '_')}"}
        for name in card_names()
    }
    touched: set[str] = set()
    prefix = f"src/{PACKAGE}/"
    for path in changed:
        if path in _SHARED:
            touched.update(own)
        elif path.startswith(prefix) and path.endswith(".py"):
            module = _module(_FOLDER / path.removeprefix(prefix))
            if module in common:
                touched.update(own)
            else:
                touched.update(name for name, modules in own.items() if module in modules)
    return sorted(touched)


def changed_since(revision: str) -> list[str]:
    """Paths that differ from a revision, in commits or in the work tree, new files included.

    Of the work tree that the current folder lies in. Raises ValueError for a revision git does not
    know, or outside a work tree.
    """

    def git(*arguments: str) -> list[str]:
        command = ["git", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"base: {done.stderr.strip()}")
        return done.stdout.splitlines()

    top = git("rev-parse", "--show-toplevel")[0]
    (commit,) = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    new = git("-C", top, "ls-files", "--others", "--exclude-standard")
    return git("-C", top, "diff", "--name-only", commit, "--") + new
