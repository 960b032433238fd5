"""Which cards a change touches."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv4_prologue.affected import affected, changed_since, import_graph
from dsv4_prologue.cards import card_names, get_card

pytestmark = pytest.mark.once

ALL = sorted(card_names())
PACKAGE = "src/dsv4_prologue"


def with_kernel(*kernels: str) -> list[str]:
    return sorted(name for name in ALL if get_card(name).kernel in kernels)


@pytest.mark.parametrize(
    ("paths", "cards"),
    [
        ([], []),
        (["README.md", "docs/cards/metax-c550.md", "results/x.jsonl"], []),
        (["tests/test_op.py"], []),
        ([f"{PACKAGE}/measure/record.py", f"{PACKAGE}/cli.py"], []),
        ([f"{PACKAGE}/cards/metax_c550.py"], ["metax-c550"]),
        (
            [f"{PACKAGE}/cards/metax_c550.py", f"{PACKAGE}/cards/cpu.py"],
            ["cpu", "metax-c550"],
        ),
        ([f"{PACKAGE}/kernels/tiled.py"], with_kernel("tiled")),
        ([f"{PACKAGE}/kernels/vector_core.py"], ["ascend-910b"]),
        ([f"{PACKAGE}/kernels/composition.py"], ["cpu"]),
        ([f"{PACKAGE}/kernels/numerics.py"], with_kernel("tiled", "vector_core")),
        ([f"{PACKAGE}/kernels/gather.py"], with_kernel("tiled", "vector_core")),
        ([f"{PACKAGE}/cards/card.py"], ALL),
        ([f"{PACKAGE}/planning.py"], ALL),
        ([f"{PACKAGE}/launch.py"], ALL),
        ([f"{PACKAGE}/contract.py"], ALL),
        ([f"{PACKAGE}/verify/interpreter.py"], ALL),
        (["pyproject.toml"], ALL),
    ],
)
def test_a_change_touches(paths: list[str], cards: list[str]) -> None:
    assert affected(paths) == cards


def test_the_graph_sees_imports_inside_functions() -> None:
    graph = import_graph()
    assert "dsv4_prologue.kernels.tiled" in graph["dsv4_prologue.launch"]
    assert "dsv4_prologue.kernels.numerics" in graph["dsv4_prologue.kernels.tiled"]


def test_modules_import_what_the_architecture_allows() -> None:
    """The table of docs/architecture.md: what a module is, and in its last column what it takes."""
    page = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|$", page.read_text(), re.MULTILINE)
    allowed: dict[str, set[str]] = {}
    for first, last in rows[: [first for first, _ in rows].index("`demo.py`, `cli.py`") + 1]:
        own = {one.removesuffix(".py").rstrip("/") for one in re.findall(r"`([\w./]+)`", first)}
        taken = own | set(re.findall(r"`(\w+)`", last))
        taken |= allowed.keys() if "all of these" in last else set()
        allowed |= dict.fromkeys(own, taken)
    seen = set()
    for module, imported in import_graph().items():
        part, *_ = module.removeprefix("dsv4_prologue").lstrip(".").split(".")
        if part in ("", "__main__", "_version"):
            continue
        parts = {one.split(".")[1] for one in imported if "." in one} - {"_version"}
        assert parts <= allowed[part], module
        seen.add(part)
    assert seen == allowed.keys()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_work_tree_is_the_current_folder_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that in which the package happens to be installed."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(ValueError, match="base: "):
        changed_since("HEAD")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    (tmp_path / "new").write_text("new\n")
    assert changed_since("HEAD") == ["new"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_an_unknown_revision_is_an_error() -> None:
    with pytest.raises(ValueError, match="base: "):
        changed_since("no-such-revision")
