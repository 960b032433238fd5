"""Records carry what is needed to believe them."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import dsv4_prologue
from dsv4_prologue.cards import card_names
from dsv4_prologue.measure import record
from dsv4_prologue.measure.record import (
    COMMIT_VARIABLE,
    append,
    card_hash,
    commit,
    environment,
    host_hash,
    kernel_hash,
)

pytestmark = pytest.mark.once


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own, not in any work tree."""
    folder = tmp_path / "tree" / "package"
    for name in ("__init__.py", "cards/unknown.py"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name}\n")
    shutil.copytree(Path(dsv4_prologue.__file__).parent / "kernels", folder / "kernels")
    monkeypatch.setattr(record, "_PACKAGE", folder)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    return folder


def test_kernel_hash_is_of_what_a_card_runs(package: Path) -> None:
    cards = ("unknown", "ascend-910b", "cpu")  # tiled, vector_core, torch
    before = {card: kernel_hash(card) for card in cards}
    assert len(set(before.values())) == 3
    assert all(len(one) == 64 for one in before.values())

    def changed(name: str) -> set[str]:
        file = package / name
        text = file.read_text()
        file.write_text(text + "#\n")
        found = {card for card in cards if kernel_hash(card) != before[card]}
        file.write_text(text)
        return found

    assert changed("cards/unknown.py") == set()
    assert changed("kernels/tiled.py") == {"unknown"}
    assert changed("kernels/vector_core.py") == {"ascend-910b"}
    assert changed("kernels/composition.py") == {"cpu"}
    # Both kernels import it; the reader stands beside both.
    assert changed("kernels/numerics.py") == changed("kernels/gather.py") == set(cards[:2])
    with pytest.raises(ValueError, match="card: expected one of"):
        kernel_hash("abacus")


def test_host_hash_is_of_what_a_call_goes_through(package: Path) -> None:
    names = ("op", "launch", "direct")
    for name in names:
        (package / f"{name}.py").write_text("as it was\n")
    before = host_hash()
    (package / "contract.py").write_text("changed\n")
    assert host_hash() == before
    for name in names:
        before = host_hash()
        (package / f"{name}.py").write_text("changed\n")
        assert host_hash() != before


def test_card_hash() -> None:
    hashes = {card_hash(name) for name in card_names()}
    assert len(hashes) == len(card_names())
    with pytest.raises(ValueError, match="card: expected one of"):
        card_hash("abacus")


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(tree), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_of_a_work_tree(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = package.parent
    git(tree, "init", "-q")
    assert commit() == ("unknown", False)  # in a work tree, not tracked there
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "first")
    assert commit() == (git(tree, "rev-parse", "HEAD"), False)
    (tree / "elsewhere").write_text("not ours\n")
    assert not commit().dirty
    (package / "__init__.py").write_text("changed\n")
    assert commit() == (git(tree, "rev-parse", "HEAD"), True)
    monkeypatch.setenv(COMMIT_VARIABLE, git(tree, "rev-parse", "HEAD"))
    assert commit() == (git(tree, "rev-parse", "HEAD"), True)  # no way to hide the change
    monkeypatch.setenv(COMMIT_VARIABLE, "told")
    assert commit() == ("told", False)


def test_commit_without_git(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert package.is_dir()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert commit() == ("unknown", False)


def test_environment() -> None:
    found = environment("cpu")
    assert found["device"] == found["host_cpu"]
    assert found["device_type"] == "cpu"
    assert found["torch"]
    assert found["host_cores"] >= 1
    json.dumps(found)


def test_records_are_not_appended_to_a_gzipped_file(tmp_path: Path) -> None:
    """Text behind a gzip stream would be the end of both."""
    for name in ("there.jsonl.gz", "not-there.jsonl.gz"):
        with pytest.raises(ValueError, match=r"expected a file of text; gzip it once"):
            record.check_appendable(tmp_path / name)


def test_append_and_read(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert package.is_dir()
    monkeypatch.setattr(
        "sys.argv", [str(tmp_path / "bin" / "dsv4-prologue"), "check", "--a", "b c", "/some/file"]
    )
    file = tmp_path / "results" / "cpu" / "day.jsonl"
    append(file, [{"num_tokens": 1}, {"num_tokens": 2}], device="cpu")
    append(file, [{"num_tokens": 3}], device="cpu")
    assert len(file.read_text().splitlines()) == 5
    records = record.read(file)
    assert [one["num_tokens"] for one in records] == [1, 2, 3]
    run = records[0]["run"]
    assert run["schema_version"] == record.SCHEMA_VERSION
    assert run["date"].endswith("+00:00")
    assert run["command"] == "dsv4-prologue check --a 'b c' file"
    assert (run["commit"], run["dirty"]) == ("unknown", False)
    assert run["environment"] == environment("cpu")


def test_a_packed_file_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    append(file, [{"num_tokens": 1}], device="cpu")
    packed = file.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert record.read(packed) == record.read(file)


def test_a_record_without_a_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "stray.jsonl"
    file.write_text('{"num_tokens": 1}\n')
    with pytest.raises(ValueError, match="expected a run before the first record"):
        record.read(file)


def test_the_driver_is_read_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "version"
    monkeypatch.setattr(record, "_DRIVER_FILE", told)
    assert record._driver() is None
    told.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release\n"
    )
    assert record._driver() == "580.159.04"
