"""`make demo` never replaces a torch or a Triton that is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.once

FILE = Path(__file__).resolve().parent.parent / "tools" / "environment.py"
TORCH = "2.9.1+vendor.7"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, on a made-up machine: a vendor's torch, nothing else; a pip that only notes."""
    spec = importlib.util.spec_from_file_location("environment", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    installed = {"torch": TORCH, "triton": "3.1.0", "rich": "13.9.4", "packaging": "25.0"}
    monkeypatch.setattr(module, "version_of", installed.get)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "calls", [], raising=False)

    def make_venv(folder: Path, *options: str) -> Path:
        (folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages").mkdir(parents=True)
        module.calls.append(options)
        return folder / "bin" / "python"

    monkeypatch.setattr(module, "make_venv", make_venv)
    monkeypatch.setattr(module, "pip", lambda python, *arguments: module.calls.append(arguments))
    return module


def answer(environment: Any, capsys: pytest.CaptureFixture[str], purpose: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["environment.py", purpose])
        environment.main()
    return capsys.readouterr().out.strip()


def has_torch(environment: Any, monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    monkeypatch.setattr(
        environment.importlib.util, "find_spec", lambda name: object() if present else None
    )


@pytest.mark.parametrize(
    ("requirement", "is_met"),
    [
        ("rich>=13", True),
        ("rich>=13.9.4,<14", True),
        ("rich>=14", False),
        ("rich<13.9", False),
        ("rich", True),
        ("typer>=0.12", False),
    ],
)
def test_what_a_requirement_asks_for(environment: Any, requirement: str, is_met: bool) -> None:
    assert environment.satisfied(requirement) is is_met


def test_requirements_are_those_of_the_package(environment: Any) -> None:
    names = {need.split(">=")[0] for need in environment.requirements("dependencies", "demo")}
    assert names >= {"rich", "typer", "transformers"}
    assert not names & set(environment.HELD)


def test_a_vendors_torch_stays(
    environment: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_torch(environment, monkeypatch, present=True)
    folder = environment.ROOT / ".venv-host"
    assert answer(environment, capsys, "demo") == str(folder / "bin" / "python")
    options, (verb, flag, held, *wanted) = environment.calls
    assert options == ("--system-site-packages",)
    assert (verb, flag, held) == ("install", "--constraint", str(folder / "held.txt"))
    assert Path(held).read_text() == f"torch=={TORCH}\ntriton==3.1.0\n"
    assert [need.split(">=")[0] for need in wanted] == ["typer", "transformers"]
    # The second time nothing is installed.
    assert answer(environment, capsys, "demo") == str(folder / "bin" / "python")
    assert len(environment.calls) == 2


def test_where_all_is_there_nothing_is_installed(
    environment: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_torch(environment, monkeypatch, present=True)
    monkeypatch.setattr(environment, "satisfied", lambda need: True)
    assert answer(environment, capsys, "demo") == sys.executable
    assert environment.calls == []


@pytest.mark.parametrize(("purpose", "present"), [("demo", False), ("test", True), ("test", False)])
def test_a_bare_machine_and_the_tests_get_an_environment_apart(
    environment: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    purpose: str,
    present: bool,
) -> None:
    has_torch(environment, monkeypatch, present=present)
    python = str(environment.ROOT / ".venv" / "bin" / "python")
    assert answer(environment, capsys, purpose) == python
    options, (verb, flag, constraints, *wanted) = environment.calls
    assert options == ()
    assert (verb, flag) == ("install", "--constraint")
    assert constraints == str(environment.CONSTRAINTS)
    assert "torch" in wanted
    assert answer(environment, capsys, purpose) == python
    assert len(environment.calls) == 2


def test_a_triton_that_torch_brings_is_there_for_the_demo_and_away_for_the_tests(
    environment: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_torch(environment, monkeypatch, present=False)
    packages = f"lib/python3.{sys.version_info.minor}/site-packages"
    triton = environment.ROOT / ".venv" / packages / "triton"

    def pip(_: Path, verb: str, *arguments: str) -> None:
        environment.calls.append((verb, *arguments))
        if verb == "install":
            triton.mkdir(parents=True, exist_ok=True)
        else:
            triton.rmdir()

    monkeypatch.setattr(environment, "pip", pip)
    for purpose, there in (("demo", True), ("test", False), ("test", False), ("demo", True)):
        answer(environment, capsys, purpose)
        assert triton.exists() is there
    verbs = [call[0] for call in environment.calls if call]
    assert verbs == ["install", "install", "uninstall", "install"]
