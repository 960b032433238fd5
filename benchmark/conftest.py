"""The benchmark as a pytest run: `pytest benchmark/ --mode kernel --level core --record log`.

The same code as `dsv4-prologue bench`. `--record log` appends to results/<card>/<date>.jsonl,
`--record none` to nothing, and anything else is a path.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dsv4_prologue.measure.bench import Options, Watcher, parse_shapes, run  # noqa: E402
from dsv4_prologue.measure.commands import Log, print_bench  # noqa: E402
from dsv4_prologue.selection import default_device, select  # noqa: E402

#: As benchmarks of operators name what they time.
MODES = {"kernel": "flushed", "operator": "resident", "wrapper": "host"}
LEVELS = {"core": "core", "comprehensive": "core,tp"}

RECORDS: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, by the names the field is used to."""
    group = parser.getgroup("dsv4-prologue")
    modes = f"{', '.join(MODES)}; or flushed, resident, graph, host, chain, joined by commas"
    group.addoption("--mode", default="kernel", help=modes)
    levels = f"{', '.join(LEVELS)}; or shapes as `dsv4-prologue bench` takes them"
    group.addoption("--level", default="quick", help=levels)
    group.addoption("--against", default="copy,portable,vllm", help="baselines, joined by commas")
    group.addoption("--record", default="none", help="log, none, or a file")
    group.addoption("--seconds", default=5.0, type=float, help="of a shape in a mode, at most")


def _options(config: pytest.Config) -> Options:
    modes = [MODES.get(one, one) for one in config.getoption("mode").split(",")]
    level = config.getoption("level")
    return Options(
        default_device(),
        parse_shapes(LEVELS.get(level, level)),
        tuple(modes),
        tuple(config.getoption("against").split(",")),
        seconds=config.getoption("seconds"),
    )


def _log(config: pytest.Config, device: str) -> Log | None:
    where = config.getoption("record")
    if where == "none":
        return None
    card = select(torch.device(device)).card.name
    path = config.rootpath / "results" / card / f"{date.today()}.jsonl"
    return Log(path if where == "log" else Path(where), device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a shape."""
    if "shape" in metafunc.fixturenames:
        shapes = _options(metafunc.config).shapes
        metafunc.parametrize("shape", shapes, ids=[f"{n}x{h}" for n, h in shapes])


@pytest.fixture(scope="session")
def records(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Every record of the run, all shapes measured when the first is asked for."""
    options = _options(request.config)
    log = _log(request.config, options.device)

    class Writer(Watcher):
        def flush(self) -> None:
            if log is not None:
                log.write(RECORDS)

    run(options, RECORDS, Writer())
    return RECORDS


def pytest_terminal_summary() -> None:
    """Print the tables below pytest's own lines."""
    if RECORDS:
        print_bench(RECORDS)
