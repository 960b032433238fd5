"""CONTRIBUTING's example: a card is added by one file and no other change."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent

ASK = """
import json
from dsv4_prologue import explain
from dsv4_prologue.cards import card_names, get_card, match_card
from dsv4_prologue.verify import launches
print(json.dumps({
    "names": card_names(),
    "matched": match_card("acme", "a1", "Acme A1").name,
    "plans": [explain(n, 64, card="acme-a1").to_dict() for n in (511, 512)],
    "proofs": [proof.to_dict() for proof in launches.prove(get_card("acme-a1"))],
}))
"""


def example() -> str:
    """The card file that CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return textwrap.dedent(block)


def test_one_file_of_few_lines_adds_a_card(tmp_path: Path) -> None:
    assert len(example().splitlines()) < 40
    package = tmp_path / "dsv4_prologue"
    shutil.copytree(
        ROOT / "src" / "dsv4_prologue", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "cards" / "acme_a1.py").write_text(example(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("DSV4_PROLOGUE_CARD", None)
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert "acme-a1" in seen["names"]
    assert seen["matched"] == "acme-a1"
    below, at = seen["plans"]
    assert (below["tokens_per_tile"], at["tokens_per_tile"]) == (1, 8)
    assert at["reason"] == "from 512 tokens: 16 elements a lane on 64 lanes"
    assert [proof["verdict"] for proof in seen["proofs"]] == ["proved"]
