"""The checks, one session each. `make test` runs them all, in this order, and stops at the first
that fails.

A session runs in the Python that nox runs in, which `make test` makes (`.venv`: CPU torch, no
Triton); so there is one torch on disk, not five. What a session needs on top comes from a folder
of its own, put before everything else on the path.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import nox

#: The ends of the range of Triton versions whose interpreter the kernels are tested on.
TRITONS = ["3.9.0", "3.6.0"]

#: The lower end of the range that the demo supports; `unit` has the upper one.
TRANSFORMERS = ["5.8.1"]

nox.options.default_venv_backend = "none"
nox.options.stop_on_first_error = True

NOX = Path(__file__).resolve().parent / ".nox"


def python(session: nox.Session, *arguments: str, **env: str) -> None:
    """Run a module of this Python."""
    session.run(sys.executable, "-m", *arguments, env=env)


def pytest(session: nox.Session, report: str, *arguments: str, **env: str) -> None:
    """Run pytest on all cores, leaving a report for tools/tally.py."""
    arguments = ("-n", "auto", "-q", f"--junitxml={NOX / 'junit' / report}.xml", *arguments)
    python(session, "pytest", *arguments, *session.posargs, OMP_NUM_THREADS="1", **env)


def beside(session: nox.Session, requirement: str, *options: str) -> str:
    """Return a folder with another version of a package in it, installed if need be."""
    folder, partial = NOX / requirement, NOX / "partial"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        python(session, "pip", "install", "-qq", *options, f"--target={partial}", requirement)
        partial.rename(folder)
    return str(folder)


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its format."""
    python(session, "ruff", "check")
    python(session, "ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict."""
    python(session, "mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """Everything that needs no Triton, where there is none: oracle, plans, cpu card, CLI, demo."""
    if importlib.util.find_spec("triton") is not None:
        session.error("this Python has a Triton, so it cannot show that none is needed: make test")
    pytest(session, "unit")


@nox.session
@nox.parametrize("triton", TRITONS, ids=TRITONS)
def interpreter(session: nox.Session, triton: str) -> None:
    """The kernels, in Triton's interpreter."""
    path = beside(session, f"triton=={triton}", "--no-deps")
    report = f"interpreter-{triton}"
    pytest(session, report, "-m", "not once", PYTHONPATH=path, TRITON_INTERPRET="1")


@nox.session
@nox.parametrize("version", TRANSFORMERS, ids=TRANSFORMERS)
def transformers(session: nox.Session, version: str) -> None:
    """The demo and its integration, with another version of transformers."""
    path = beside(session, f"transformers=={version}")
    pytest(session, f"transformers-{version}", "tests/test_transformers.py", PYTHONPATH=path)


@nox.session
def ascend(session: nox.Session) -> None:
    """The vector-core kernel, through Ascend's own compiler, in an environment of its own."""
    make = (
        "from dsv4_prologue.verify import ascend; "
        "ascend.find_environment() or ascend.make_environment()"
    )
    session.run(sys.executable, "-c", make, env={"PYTHONPATH": "src"})
    pytest(session, "ascend", "tests/test_ascend.py")
