"""Tables and charts say what the records say, losses and age included, and say it every time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dsv4_prologue import explain
from dsv4_prologue.cards import card_names, get_card
from dsv4_prologue.measure import charts, tables
from dsv4_prologue.measure.evidence import Evidence, Place
from dsv4_prologue.measure.record import SCHEMA_VERSION, card_hash, host_hash, kernel_hash
from dsv4_prologue.measure.report import _charts_left, block, changes, report
from dsv4_prologue.measure.reported import LABEL, REPORTED

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent
CARD = "nvidia-hopper"
ENVIRONMENT = {
    "device": "NVIDIA H200",
    "device_type": "cuda",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "host_cpu": "a CPU",
}
DAYS = ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00")
Record = dict[str, Any]


def write(folder: Path, records: list[Record], day: str = DAYS[0], **environment: Any) -> Path:
    """A file with one run."""
    run = {
        "record": "run",
        "schema_version": SCHEMA_VERSION,
        "date": day,
        "commit": "0123456789abcdef",
        "dirty": False,
        "command": "dsv4-prologue bench",
        "environment": ENVIRONMENT | environment,
    }
    path = folder / f"{len(list(folder.glob('*')))}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (run, *records)))
    return folder


def bench(candidate: str, time_us: float, shape: tuple[int, int], **changed: Any) -> Record:
    """A record of one candidate, flushed and in place."""
    useful = 100_000_000
    ceiling = {"gbps": 4000.0, "best": "copy torch", "idle_gbps": 3500.0}
    return {
        "record": "bench",
        "num_tokens": shape[0],
        "num_heads": shape[1],
        "mode": "flushed",
        "candidate": candidate,
        "form": "in place",
        "card": CARD,
        "forced": False,
        "kernel": "tiled",
        "launch": str(explain(*shape, card=CARD).launch),
        "kernel_hash": kernel_hash(CARD),
        "card_hash": card_hash(CARD),
        "host_hash": host_hash(),
        "check": {"verdict": "ok", "reason": "", "bytes_differing": 0, "max_ulp": 1},
        "reason": "",
        "median_us": time_us,
        "spread": 0.004,
        "gbps": useful / time_us / 1e3,
        "utilisation": useful / time_us / 1e3 / 4000.0,
        "limit_us": 24.0,
        "limit_ratio": 24.0 / time_us,
        "faults": [],
        "ceilings": {"before": ceiling, "after": ceiling, "mark": ""},
        "device_faults": {"before": [], "after": []},
        "process": 1,
        **changed,
    }


def pair(
    ours_us: float, theirs_us: float, shape: tuple[int, int], verdict: str, **changed: Any
) -> list[Record]:
    """Ours beside a baseline, as a run leaves them."""
    ratio = theirs_us / ours_us
    against = {
        "baseline": "rival",
        "form": "in place",
        "verdict": verdict,
        "ratio": ratio,
        "low": 0.99 * ratio,
        "high": None,
        "reason": "",
    }
    provenance = {"package": "rival", "version": "1.2", "patches": ["a mask"]}
    return [
        bench("rival", theirs_us, shape, provenance=provenance, **changed),
        bench("ours", ours_us, shape, verdicts=[against], left_out={}, **changed),
    ]


def of(folder: Path, name: str, page: str = "README.md") -> str:
    return block(Evidence.of(folder), name, Path(page))


def row_of(text: str, first_cell: str) -> list[str]:
    """The cells of the first row that begins with a cell."""
    line, *_ = [line for line in text.splitlines() if line.startswith(f"| {first_cell} |")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


# --------------------------------------------------------------------------------- benchmarks


def test_a_benchmark_is_shown_row_by_row(tmp_path: Path) -> None:
    write(tmp_path, pair(25.0, 30.0, (1024, 64), "faster"))
    text = of(tmp_path, f"bench:{CARD}")
    shown = ["1024 x 64", "25.0", "0.4 %", "4000", "100.0 %", "0.960", "30.0 us, 1.20x faster"]
    assert row_of(text, "1024 x 64") == shown
    assert "rival: rival 1.2; patched: a mask" in text
    assert "Ceiling 4000 GB/s before (copy torch; 3500 before the clocks rose), 4000" in text
    assert "2026-01-01, commit 0123456789, NVIDIA H200, driver 580.1" in text


def test_parts_of_the_newest_run_are_shown(tmp_path: Path) -> None:
    assert "Parts of the call" not in of(tmp_path, f"bench:{CARD}")
    shape = (1024, 64)
    parts = [
        bench("part", time_us, shape, form=form) for form, time_us in (("Q", 20.0), ("KV", 4.0))
    ]
    write(tmp_path, [*pair(25.0, 30.0, shape, "faster"), *parts])
    text = of(tmp_path, f"bench:{CARD}")
    shown = text[text.index("Parts of the call by themselves, Q in place, us:") :]
    assert row_of(shown, "tokens x heads") == ["tokens x heads", "mode", "Q", "KV"]
    assert row_of(shown, "1024 x 64") == ["1024 x 64", "flushed", "20.0", "4.00"]


def test_a_ratio_stands_beside_the_times_it_is_of(tmp_path: Path) -> None:
    """Ours of another process of the run is another time."""
    first = pair(20.0, 30.0, (1, 64), "faster")
    second = pair(25.0, 50.0, (1, 64), "faster", process=2)
    second[0]["candidate"] = second[1]["verdicts"][0]["baseline"] = "other"
    write(tmp_path, [*first, *second])
    cells = row_of(of(tmp_path, f"bench:{CARD}"), "1 x 64")
    assert cells[1] == "25.0"
    assert cells[-2:] == ["30.0 us, 1.50x faster, ours 20.0 us beside it", "50.0 us, 2.00x faster"]


def test_a_loss_is_shown_as_a_loss(tmp_path: Path) -> None:
    write(tmp_path, [*pair(25.0, 30.0, (1, 64), "faster"), *pair(25.0, 24.0, (4, 64), "slower")])
    assert "**24.0 us, 0.960x slower**" in of(tmp_path, f"bench:{CARD}")
    mean = f"{math.sqrt(1.2 * 0.96):.3f}x"
    line = ["flushed", "rival, Q in place", "2", mean, "0.960x", "4 x 64, in place"]
    text = of(tmp_path, "bench-summary")
    assert f"| {' | '.join(line)} | 1 faster, **1 slower** |" in text
    said = "NVIDIA H200, time on the device: faster in 1 of 2 comparisons (1 slower)"
    assert of(tmp_path, f"chart:{CARD}") == f"![{said}](docs/charts/{CARD}.svg)"
    assert of(tmp_path, f"chart:{CARD}", "docs/cards/x.md").endswith(f"(../charts/{CARD}.svg)")


def test_a_stale_loss_stands_beside_todays_rows_and_not_among_them(tmp_path: Path) -> None:
    old = pair(25.0, 24.0, (4, 64), "slower", kernel_hash="of old")
    write(tmp_path, [*pair(25.0, 30.0, (1, 64), "faster"), *old])
    text = of(tmp_path, "bench-summary")
    assert row_of(text, "flushed")[2:] == ["1", "1.20x", "1.20x", "1 x 64, in place", "1 faster"]
    stale = row_of(text, "flushed (stale: another kernel)")
    assert stale[2:] == ["1", "0.960x", "0.960x", "4 x 64, in place", "**1 slower**"]
    said = "faster in 1 of 1 comparisons; 1 more are stale"
    assert said in of(tmp_path, f"chart:{CARD}")


def test_the_limit_has_a_line_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster"))
    summary = of(tmp_path, "bench-summary")
    assert "| the limit (a bare copy), Q in place | 1 | 0.960x | 0.960x |" in summary


def test_the_newest_run_counts_and_the_one_before_tells_how_far_off_it_was(tmp_path: Path) -> None:
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster"), DAYS[1])
    write(tmp_path, pair(20.0, 24.48, (1, 64), "faster"), DAYS[0])
    assert row_of(of(tmp_path, f"bench:{CARD}"), "1 x 64")[1] == "25.0"
    assert row_of(of(tmp_path, "bench-summary"), "flushed")[-1] == "2.0 %"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kernel_hash": "of old"}, "another kernel"),
        ({"launch": "16x1 (tokens x heads), 8 warps"}, "another launch"),
    ],
)
def test_what_speaks_of_other_code_is_stale(
    tmp_path: Path, changed: dict[str, str], why: str
) -> None:
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster", **changed))
    assert row_of(of(tmp_path, f"bench:{CARD}"), rf"1 x 64 (stale: {why})")
    assert row_of(of(tmp_path, "bench-summary"), f"flushed (stale: {why})")
    assert "stale" in of(tmp_path, f"chart:{CARD}")
    write(tmp_path, pair(26.0, 30.0, (1, 64), "faster"))  # the same day: but of today's code
    assert row_of(of(tmp_path, f"bench:{CARD}"), "1 x 64")[1] == "26.0"


def test_what_was_refused_has_no_time(tmp_path: Path) -> None:
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster"), DAYS[0])
    refused = bench("ours", 99.0, (1, 64), verdicts=[], left_out={"rival": "no room"})
    for name in ("median_us", "spread", "gbps", "utilisation", "limit_us", "limit_ratio"):
        del refused[name]
    refused["reason"] = "differs: byte 3"
    write(tmp_path, [refused], DAYS[1])
    text = of(tmp_path, f"bench:{CARD}")
    assert "not timed: differs: byte 3" in text
    assert "25.0" not in text
    assert "- flushed: rival is left out: no room" in text


def test_marks_of_a_run_are_shown(tmp_path: Path) -> None:
    records = pair(25.0, 30.0, (1, 64), "unclear")
    records += pair(25.0, 30.0, (4, 64), "faster")
    records[0]["faults"] = ["handicapped: 30 us, where 10 are possible"]
    records[0]["rounds"] = records[0]["late"] = records[1]["rounds"] = 20
    records[1]["late"] = 19
    for one in records:
        one["ceilings"] = {**one["ceilings"], "after": None, "mark": "the ceiling moved"}
        one["device_faults"] = {"before": [], "after": ["device: 3 places"]}
    text = of(write(tmp_path, records), f"bench:{CARD}")
    assert "the run was broken off" in text
    assert "- Marked: the ceiling moved." in text
    assert "- **Device: device: 3 places**" in text
    assert "- flushed: rival is marked: handicapped (1 x 64)" in text
    assert "- flushed: rival is marked: late: each sample waited for the host" in text
    assert "ours is marked" not in text
    assert "1.20x unclear" in text


def test_a_card_that_was_only_named_is_no_evidence_of_that_card(tmp_path: Path) -> None:
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster", forced=True))
    assert "**NVIDIA H200, the card named**" in of(tmp_path, f"bench:{CARD}")
    for name in ("bench-summary", f"chart:{CARD}"):
        assert of(tmp_path, name) == tables.NOTHING


# --------------------------------------------------------------------------- proofs and checks


def proof(name: str, verdict: str = "proved", **changed: Any) -> Record:
    found = {"card": CARD, "proof": name, "verdict": verdict, "reason": f"of {name}", "detail": {}}
    card = changed.get("card", CARD)
    hashes = {"kernel_hash": kernel_hash(card), "card_hash": card_hash(card)}
    return {"record": "proof", **found, **hashes, **changed}


def test_proofs_are_a_row_a_card(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            proof("numerics"),
            proof("memory", "refused"),
            proof("compiler sm_90"),
            proof("32 lanes", "not provable here"),
            proof("compiler sm_80", card="thead-zw810e"),
        ],
    )
    text = of(tmp_path, "verify")
    cells = [CARD, "proved", "**refused**", "proved (sm_90)", "not provable here (32 lanes)"]
    assert row_of(text, CARD) == cells
    assert "proved (sm_80 in its stead)" in text
    assert f"- {CARD}, memory: refused: of memory" in text
    assert row_of(of(tmp_path, f"verify:{CARD}"), "memory") == ["memory", "refused", "of memory"]
    assert of(tmp_path, "verify:cpu") == tables.NOTHING


def test_only_the_newest_proofs_of_a_card_are_shown(tmp_path: Path) -> None:
    write(tmp_path, [proof("numerics"), proof("memory")], DAYS[0])
    write(tmp_path, [proof("numerics", "refused")], DAYS[1])
    assert row_of(of(tmp_path, "verify"), CARD) == [CARD, "**refused**"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"kernel_hash": "old"}, "another kernel"),
        ({"kernel_hash": None}, "its kernel is not told"),
        ({"card_hash": "old"}, "another card file"),
        ({"detail": {"launches": ["16x1 (tokens x heads), 8 warps"]}}, "other launches"),
        ({"card": "abacus", "card_hash": ""}, "no such card"),
    ],
)
def test_old_proofs_are_stale(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    line = proof("numerics") | changed
    text = of(write(tmp_path, [line]), "verify")
    assert row_of(text, f"{line['card']} (stale: {why})")


def check(verdict: str = "ok", **changed: Any) -> Record:
    return {
        "record": "check",
        "num_tokens": 17,
        "num_heads": 40,
        "variant": "in place",
        "seed": 0,
        "verdict": verdict,
        "reason": "byte 3",
        "bytes_differing": 0,
        "max_ulp": 1,
        "card": CARD,
        "forced": False,
        "kernel": "tiled",
        "kernel_hash": kernel_hash(changed.get("card", CARD)),
        **changed,
    }


def test_checks_are_a_row_a_card_and_device(tmp_path: Path) -> None:
    differs = check("differs", variant="new tensor", bytes_differing=7, max_ulp=3)
    unseen = check("not verified", variant="strided")
    del unseen["max_ulp"], unseen["bytes_differing"]
    write(tmp_path, [check(), check(), differs, unseen])
    write(tmp_path, [check(card="metax-c550", forced=True)], device_type="cpu", device="a CPU")
    text = of(tmp_path, "check")
    day = "2026-01-01, 0123456789"
    assert row_of(text, CARD) == [CARD, "NVIDIA H200", "1", "1", "1", "7", "3", day]
    named = row_of(text, "metax-c550 (named)")
    assert named[1:3] == ["Triton 3.6.0's interpreter", "1"]
    assert "17 x 40, new tensor: **differs**: byte 3" in text
    assert CARD not in of(tmp_path, "check:metax-c550")


def test_of_old_kernels_the_newest_is_shown(tmp_path: Path) -> None:
    write(tmp_path, [check(kernel_hash="older", variant="gone")])
    write(tmp_path, [check(kernel_hash="old")])
    assert row_of(of(tmp_path, "check"), f"{CARD} (stale: another kernel)")[2] == "1"


def test_what_bench_compared_before_it_timed_is_a_row(tmp_path: Path) -> None:
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster", kernel_hash="of old"))
    assert of(tmp_path, "check") == tables.NOTHING
    differs = {"verdict": "differs", "reason": "byte 3", "bytes_differing": 2, "max_ulp": 0}
    write(tmp_path, pair(25.0, 30.0, (1, 64), "faster"))
    write(tmp_path, [bench("ours", 25.0, (4, 64), check=differs)])
    row = row_of(of(tmp_path, "check"), f"{CARD}, calls that `bench` timed")
    assert row[1:] == ["NVIDIA H200", "1", "1", "0", "2", "1", "2026-01-01, 0123456789"]


def test_old_checks_are_stale_until_there_are_new_ones(tmp_path: Path) -> None:
    write(tmp_path, [check(kernel_hash="old"), check(kernel_hash="old", variant="gone")])
    assert row_of(of(tmp_path, "check"), f"{CARD} (stale: another kernel)")[2] == "2"
    write(tmp_path, [check()])
    assert row_of(of(tmp_path, "check"), CARD)[2] == "1"


# -------------------------------------------------------------------------- cards and reports


@pytest.mark.parametrize(
    ("card", "heads", "tokens", "launch"),
    [
        ("metax-c550", "any", "1 to 511", "1x1"),
        ("metax-c550", "any", "from 512", "8x1"),
        ("hygon-bw1000", "64", "1 to 252", "1x1"),
        ("hygon-bw1000", "64", "from 253", "8x1"),
        ("hygon-bw1000", "128", "1 to 127", "1x1"),
        ("hygon-bw1000", "128", "from 128", "8x1"),
        ("mthreads-s5000", "64", "1 to 511", "1x1"),
        ("mthreads-s5000", "64", "from 512", "4x1"),
        ("mthreads-s5000", "65, 128", "any", "1x1"),
        ("thead-zw810e", "any", "any", "1x1"),
        ("ascend-910b", "any", "any", "1x32"),
    ],
)
def test_a_card_s_boundaries_are_in_its_table(
    card: str, heads: str, tokens: str, launch: str
) -> None:
    text = tables.plan_text(Evidence(()), get_card(card))
    assert re.search(rf"^\| {heads} \| {tokens} \| {launch} \(tokens x heads\)", text, re.MULTILINE)


def test_the_host_s_cost_is_of_the_host_path(tmp_path: Path) -> None:
    """And a kernel's time is not."""
    for mode in ("flushed", "host"):
        write(tmp_path, pair(25.0, 30.0, (1, 64), "faster", mode=mode, host_hash="of old"))
    text = of(tmp_path, "bench-summary")
    assert row_of(text, "host (stale: another host path)")
    assert row_of(text, "flushed")


def test_evidence_of_another_kernel_is_marked(tmp_path: Path) -> None:
    (rule, *_) = get_card(CARD).rules
    path, _, said = rule.evidence.partition(": ")
    for changed, mark in (({"kernel_hash": "of old"}, " (stale: another kernel)"), ({}, "")):
        folder = write(tmp_path / (mark or "today"), pair(25.0, 30.0, (1, 64), "faster", **changed))
        (folder / "0.jsonl").rename(folder / Path(path).name.removesuffix(".gz"))
        evidence = Evidence.of(folder)
        for one in evidence.records:  # as if it had been gzipped
            one["file"] = Path(path).name
        assert f"{path}{mark}: {said}" in tables.plan_text(evidence, get_card(CARD))


def test_a_floor_and_limits_are_told() -> None:
    s5000 = tables.plan_text(Evidence(()), get_card("mthreads-s5000"))
    assert "| any | any | 1x1 (tokens x heads), 1 warp | the toolchain is below 0.6.1" in s5000
    assert "so 65520 at most" in tables.plan_text(Evidence(()), get_card("ascend-910b"))
    assert "torch operations" in tables.plan_text(Evidence(()), get_card("cpu"))


@pytest.mark.parametrize("card", sorted({one.card for one in REPORTED}))
def test_what_others_reported_says_so(card: str, tmp_path: Path) -> None:
    text = of(tmp_path, f"bench:{card}")
    assert text.startswith(tables.NOTHING)
    assert LABEL.capitalize() in text
    assert LABEL in get_card(card).evidence + "".join(one.evidence for one in get_card(card).rules)


# ------------------------------------------------------------------------------------ command

PAGE = "# A page\n\n<!-- generated: bench-summary -->\nold\n<!-- end generated -->\n\nAnd more.\n"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A checkout with one page in docs/, and a record."""
    (tmp_path / "docs" / "cards").mkdir(parents=True)
    (tmp_path / "README.md").write_text(PAGE)
    plan = "<!-- generated: plan:cpu -->\n<!-- end generated -->\n"
    (tmp_path / "docs" / "cards" / "cpu.md").write_text(plan)
    graph = pair(2.5, 3.0, (1, 8), "faster", mode="graph", utilisation=None)
    write(tmp_path / "results" / CARD, [*pair(25.0, 30.0, (1, 64), "faster"), *graph])
    return tmp_path


@pytest.fixture
def run(house: Path) -> Callable[..., tuple[int, str]]:
    """The command, on that checkout: its exit code and what it said."""
    app = typer.Typer()
    app.command()(report)

    def invoke(*arguments: str) -> tuple[int, str]:
        wide = {"COLUMNS": "400"}  # so that no path is broken in two
        done = CliRunner().invoke(app, ["--root", str(house), *arguments], env=wide)
        return done.exit_code, done.output

    return invoke


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_report_is_written_once(house: Path, run: Callable[..., tuple[int, str]]) -> None:
    assert run()[0] == 0
    text = (house / "README.md").read_text()
    assert text.startswith("# A page\n\n<!-- generated: bench-summary -->\n**nvidia-hopper, NVIDIA")
    assert text.endswith("|\n<!-- end generated -->\n\nAnd more.\n")
    assert "torch operations" in (house / "docs" / "cards" / "cpu.md").read_text()
    before = files(house)
    for arguments in ((), ("--check",)):
        code, said = run(*arguments)
        assert code == 0
        assert said.endswith("nothing changes\n")
    assert files(house) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", b"[1]\n"),
        ("x.jsonl", b"prose\n"),
        ("x.jsonl.gz", b"no gzip"),
        ("x.jsonl", b'{"record": "check"}\n'),
    ],
)
def test_what_is_no_record_is_named_and_nothing_is_written(
    house: Path, run: Callable[..., tuple[int, str]], name: str, content: bytes
) -> None:
    before = files(house)
    (house / "results" / name).write_bytes(content)
    code, said = run()
    assert code == 2
    assert name in said
    assert "--results" in said
    (house / "results" / name).unlink()
    assert run("--results", str(house / "elsewhere"))[0] == 2
    assert files(house) == before


def test_check_tells_what_would_change_and_changes_nothing(
    house: Path, run: Callable[..., tuple[int, str]]
) -> None:
    before = files(house)
    code, said = run("--check")
    assert code == 1
    assert "README.md would change" in said
    assert files(house) == before
    run()
    assert run("--check")[0] == 0
    write(house / "results" / CARD, pair(24.0, 30.0, (1, 64), "faster"), DAYS[1])
    assert run("--check")[0] == 1


def test_a_picture_shows_the_worst_of_several_forms() -> None:
    points = [charts.Point(4, 1.2, 1.1, 1.3), charts.Point(1, 2, 2, 2), charts.Point(4, 1.1, 1, 1)]
    assert [point.value for point in charts._worst(points)] == [2, 1.1]


def test_charts_are_the_same_bytes_each_time(
    house: Path, run: Callable[..., tuple[int, str]]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run()
    drawn = files(house / "docs" / "charts")
    assert {path.name for path in drawn} == {f"{CARD}.svg", "cards.svg"}
    assert all(text.startswith(b"<?xml") for text in drawn.values())
    assert LABEL in (house / "docs" / "charts" / "cards.svg").read_text()
    again = charts.draw(Evidence.of(house / "results"))
    assert {f"{name}.svg": text.encode() for name, text in again.items()} == {
        path.name: text for path, text in drawn.items()
    }
    chart = house / "docs" / "charts" / "cards.svg"
    chart.write_text(chart.read_text().replace("measured by us", "measured"))
    assert run("--check")[0] == 1
    chart.write_text("drawn with matplotlib 0.1")
    code, said = run("--check")
    assert code == 0
    assert "charts are not compared: cards.svg was drawn with another version" in said


def test_without_matplotlib_charts_are_left_alone(
    house: Path, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = run()
    assert code == 0
    assert "charts are left as they are: matplotlib is not installed" in said
    assert not (house / "docs" / "charts").exists()
    code, said = run("--check")
    assert code == 0
    assert "charts are not compared" in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<!-- generated: bench:abacus -->\n<!-- end generated -->\n", "no block 'bench:abacus'"),
        ("<!-- generated: tea -->\n<!-- end generated -->\n", "there is no block 'tea'"),
        ("<!-- generated: verify -->\nand no end\n", "has no end"),
    ],
)
def test_a_wrong_block_is_named(
    house: Path, run: Callable[..., tuple[int, str]], text: str, why: str
) -> None:
    (house / "docs" / "cards" / "cpu.md").write_text(text)
    with pytest.raises(ValueError, match=f"cpu.md.*{why}"):
        changes(house, Evidence(()), with_charts=False)
    assert run()[0] == 2
    (house / "README.md").unlink()
    assert run()[0] == 2


# ------------------------------------------------------------------------------ the repository


def test_the_documents_are_what_the_records_say() -> None:
    if not (ROOT / "results").is_dir():
        pytest.skip("not a checkout: there are no records")
    left = _charts_left(ROOT, check=True)
    found = changes(ROOT, Evidence.of(ROOT / "results"), with_charts=not left)
    assert [str(path) for path in found] == [], f"run: dsv4-prologue report ({left})"


def test_a_report_needs_no_torch_and_no_triton(house: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from dsv4_prologue.measure.evidence import Evidence\n"
        "from dsv4_prologue.measure.report import changes\n"
        f"root = Path({str(house)!r})\n"
        "print(len(changes(root, Evidence.of(root / 'results'), with_charts=False)))\n"
        "print(Evidence.of(root / 'nowhere').records)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "[]"]


def test_every_picture_that_a_document_shows_is_there() -> None:
    for card in (*card_names(), charts.CARDS):
        shown = [
            page.name
            for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
            if f"charts/{card}.svg)" in page.read_text(encoding="utf-8")
        ]
        assert not shown or (ROOT / "docs" / "charts" / f"{card}.svg").is_file()


@pytest.mark.parametrize("card", [name for name in card_names() if "-" in name])
def test_every_card_has_a_page(card: str) -> None:
    text = (ROOT / "docs" / "cards" / f"{card}.md").read_text(encoding="utf-8")
    for kind in ("plan", "verify", "check", "bench"):
        assert f"<!-- generated: {kind}:{card} -->" in text
    index = (ROOT / "docs" / "cards" / "README.md").read_text(encoding="utf-8")
    assert f"]({card}.md)" in index


def test_places_know_the_interpreter_from_the_cpu() -> None:
    run = {"environment": {"device": "a CPU", "device_type": "cpu", "triton": "3.9.0"}}
    torch_card = {"run": run, "card": "cpu", "forced": False, "kernel": "torch"}
    assert Place.of(torch_card).device == "a CPU"
    assert Place.of(torch_card | {"kernel": "tiled"}).device == "Triton 3.9.0's interpreter"
