"""Print the Python that `make demo` or `make test` runs in, after making it where there is none.

    python3 tools/environment.py demo        (or: test)

The Python that runs this file is "the Python at hand". What is printed is, in this order:

* demo, and the Python at hand has torch and everything else: itself. Nothing is installed.
* demo, and it has torch but misses something: `.venv-host`, which sees all of its packages and
  gets only the missing ones. A vendor's torch and Triton stay exactly what they are.
* else (a bare machine; `test` always): `.venv`, which sees nothing of the Python at hand and has
  the versions of `constraints.txt`; a torch, from wherever pip is set up to find it. Where that
  torch brings a Triton, `test` takes it away: the tests bring their own, and show none is needed.

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"
#: Tritons that a torch may bring.
TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm")
#: Distributions that carry torch or a Triton: those of the Python at hand are never touched.
HELD = ("torch", *TRITONS, "triton-ascend", "numpy")


def say(message: str) -> None:
    """Tell the person, on stderr: stdout carries the answer."""
    print(message, file=sys.stderr, flush=True)


def requirements(*tables: str) -> list[str]:
    """Return the requirements that pyproject.toml lists in these tables."""
    text = PYPROJECT.read_text(encoding="utf-8")
    found: list[str] = []
    for table in tables:
        block = re.search(rf"^{table} = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
        assert block, f"pyproject.toml has no table {table}"
        found += re.findall(r'"([^"]+)"', block.group(1))
    return found


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading release numbers of a version: "5.17.0.dev0" is (5, 17, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]


def satisfied(requirement: str) -> bool:
    """Tell whether the Python at hand has what a requirement like "rich>=13,<16" asks for."""
    name = re.split(r"[<>=]", requirement)[0]
    installed = version_of(name)
    if installed is None:
        return False
    return all(
        numbers(installed) >= numbers(bound) if op == ">=" else numbers(installed) < numbers(bound)
        for op, bound in re.findall(r"(>=|<)([\d.]+)", requirement)
    )


def make_venv(folder: Path, *options: str) -> Path:
    """Make a virtual environment of the Python at hand in `folder`; return its Python."""
    python = folder / "bin" / "python"
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"{sys.executable} has no ensurepip, so it cannot make a virtual environment.\n"
            "On Debian and Ubuntu: apt-get install python3-venv. Or name another: make PYTHON=..."
        )
    subprocess.run([sys.executable, "-m", "venv", "--clear", *options, str(folder)], check=True)
    return python


def pip(python: Path, verb: str, *arguments: str) -> None:
    """Install into a virtual environment, or uninstall from it, quietly."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", verb, "-qq"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"pip could not {verb} {' '.join(arguments)}")


def fingerprint() -> str:
    """Return what the content of an environment depends on: this Python, and what we ask for."""
    state = [sys.executable, sys.version, version_of("torch") or ""]
    state += [*requirements("dependencies", "demo", "dev"), CONSTRAINTS.read_text(encoding="utf-8")]
    return hashlib.sha256("\n".join(state).encode()).hexdigest()


def isolated(purpose: str) -> Path:
    """Return the Python of `.venv`, with what `purpose` ("demo" or "test") needs."""
    folder = ROOT / ".venv"
    python, ready = folder / "bin" / "python", f"{fingerprint()}\n"
    stamps = {name: folder / f".ready-for-{name}" for name in ("demo", "test")}
    fresh = {
        name for name, stamp in stamps.items() if stamp.exists() and stamp.read_text() == ready
    }
    if purpose in fresh:
        return python
    say(f"Installing into .venv what `make {purpose}` needs (once; about a minute) ...")
    if not fresh:
        make_venv(folder)
    if purpose == "demo":
        wanted = ["torch", *requirements("dependencies", "demo")]
    else:
        wanted = ["torch", "--editable", ".[bench,demo,dev]"]
    pip(python, "install", "--constraint", str(CONSTRAINTS), *wanted)
    if any(folder.glob("lib/python*/site-packages/triton")):
        if purpose == "test":
            pip(python, "uninstall", "--yes", *TRITONS)
        for name in stamps.keys() - {purpose}:  # it is there for one, and away for the other
            stamps[name].unlink(missing_ok=True)
    stamps[purpose].write_text(ready)
    return python


def beside_host(missing: list[str]) -> Path:
    """Return the Python of `.venv-host`: all that the Python at hand has, and what it misses."""
    folder = ROOT / ".venv-host"
    python, stamp, ready = folder / "bin" / "python", folder / ".ready", f"{fingerprint()}\n"
    if stamp.exists() and stamp.read_text() == ready:
        return python
    say(f"Installing into .venv-host, beside the torch of {sys.executable}: {', '.join(missing)}")
    make_venv(folder, "--system-site-packages")
    if sys.prefix != sys.base_prefix:  # itself a virtual environment: "system" is not its packages
        places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        lines = [f"import site; site.addsitedir({place!r})\n" for place in sorted(places)]
        library = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        (folder / library / "_python_at_hand.pth").write_text("".join(lines))
    held = folder / "held.txt"
    versions = {name: version_of(name) for name in HELD}
    held.write_text("".join(f"{name}=={at}\n" for name, at in versions.items() if at))
    pip(python, "install", "--constraint", str(held), *missing)
    stamp.write_text(ready)
    return python


def main() -> None:
    """Print the path of the Python to use."""
    if sys.version_info < (3, 10):
        sys.exit(f"dsv4-prologue needs Python 3.10; {sys.executable} is {sys.version.split()[0]}")
    if sys.argv[1:] not in (["demo"], ["test"]):
        sys.exit(__doc__)
    purpose = sys.argv[1]
    if purpose == "test" or importlib.util.find_spec("torch") is None:
        print(isolated(purpose))
        return
    missing = [need for need in requirements("dependencies", "demo") if not satisfied(need)]
    print(beside_host(missing) if missing else sys.executable)


if __name__ == "__main__":
    main()
