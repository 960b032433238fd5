"""The house's own promises: what the README says runs, what the docs point at is there."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that match, ignored ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_readme_has_a_python_block() -> None:
    assert PYTHON_BLOCKS


def test_python_of_the_readme_runs_in_its_order() -> None:
    pytest.importorskip("torch")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in PYTHON_BLOCKS:
        exec(compile(block, "README.md", "exec"), names)


def test_commands_of_the_readme_are_in_the_makefile() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets


def test_environment_variables_are_in_the_readme() -> None:
    used = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"DSV4_PROLOGUE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    assert used <= set(re.findall(r"`(DSV4_PROLOGUE_[A-Z_]+)`", README))


def text_of(path: Path) -> str:
    """A tracked file's text, unpacked."""
    packed = path.read_bytes()
    return (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()


def test_no_path_of_somebody_s_machine() -> None:
    pattern = re.compile("/(" + "|".join(["work", "root", "tmp", "home", "Users"]) + ")/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_links_between_documents_lead_somewhere() -> None:
    dead = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked("*.md")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert dead == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    notes = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert notes == sorted(set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", index)))
    assert [name[:4] for name in notes] == [f"{number:04}" for number in range(len(notes))]
