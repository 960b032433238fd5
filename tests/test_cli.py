"""The command line: exit codes, JSON, and that a plan can be asked for without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import dsv4_prologue
from dsv4_prologue import cli, selection
from dsv4_prologue.cards import card_names
from dsv4_prologue.measure.evidence import Evidence

pytestmark = pytest.mark.once

SIZE = ("--num-tokens", "4096", "--num-heads", "64")
# Makes an import of torch or triton fail, as where they are not installed.
BLOCKED = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"


@pytest.fixture(autouse=True)
def nobody_names_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4_PROLOGUE_CARD", raising=False)


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env=env)


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"{BLOCKED}sys.argv[1:] = {list(arguments)!r}\nfrom dsv4_prologue.cli import main; main()"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_version_as_a_module() -> None:
    command = [sys.executable, "-m", "dsv4_prologue", "--version"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout == f"{dsv4_prologue.__version__}\n"


@pytest.mark.parametrize("card", card_names())
def test_explain_gives_the_plan_of_each_card(card: str) -> None:
    result = invoke("explain", *SIZE, "--card", card, "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    plan = dsv4_prologue.explain(4096, 64, card=card)
    assert values == {"num_tokens": 4096, "num_heads": 64, **plan.to_dict()}
    assert values["card"] == card
    assert values["forced"]
    assert values["reason"]
    assert values["evidence"]


def test_explain_as_a_table_says_the_reason() -> None:
    result = invoke("explain", *SIZE, "--card", "unknown", COLUMNS="400")
    assert result.exit_code == 0
    assert dsv4_prologue.explain(4096, 64, card="unknown").reason in result.stdout
    assert result.stderr == ""


def test_explain_takes_the_card_from_the_environment() -> None:
    result = invoke("explain", *SIZE, "--json", DSV4_PROLOGUE_CARD="unknown")
    assert json.loads(result.stdout)["card"] == "unknown"


def test_explain_needs_neither_torch_nor_triton() -> None:
    done = without_torch("explain", *SIZE, "--card", "nvidia-hopper", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernel"] == "tiled"


@pytest.mark.parametrize("arguments", [("explain", *SIZE), ("info",), ("check",), ("demo",)])
def test_what_needs_torch_says_so(arguments: tuple[str, ...]) -> None:
    done = without_torch(*arguments)
    assert done.returncode == 2
    assert "This needs torch" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "env", "word"),
    [
        ((), {}, "Usage"),
        (("explain", "--num-tokens", "1"), {}, "--num-heads"),
        (("explain", "--num-tokens", "-1", "--num-heads", "1"), {}, "--num-tokens"),
        (("explain", *SIZE, "--card", "nvidia-hoper"), {}, "nvidia-hopper"),
        (("explain", *SIZE), {"DSV4_PROLOGUE_CARD": "nvidia-hoper"}, "nvidia-hopper"),
        (("demo", "--text", "a", "--file", __file__), {}, "not both"),
        (("demo", "--file", "no-such-file"), {}, "no-such-file"),
        (("demo", "--file", sys.executable), {}, "is no text"),
        (("check", "--seed", "-1"), {}, "--seed"),
        (("bench", "--seed", str(2**63)), {}, "--seed"),
        (("check", "--record", "/dev/null/x.jsonl"), {}, "/dev/null/x.jsonl"),
        (("tune", "--device", "cpu", "--stages", "x"), {}, "stages"),
        (("bench", "--device", "cpu", "--compare", __file__), {}, "--compare"),
        (("report", "--results", "no-such-folder"), {}, "no-such-folder"),
        (("affected", "--base", "--output=no-such-file"), {}, "base"),
        (("check", "--shapes", "17"), {}, "quick"),
        (("check", "--variant", "no such form"), {}, "in place"),
        (("check", "--device", "no-such-device"), {}, "--device"),
        (("demo", "--device", "meta"), {}, "--device"),
        (("no-such-command",), {}, "no-such-command"),
    ],
)
def test_wrong_usage_is_2_and_says_why(
    arguments: tuple[str, ...], env: dict[str, str], word: str
) -> None:
    result = invoke(*arguments, **env)
    assert result.exit_code == 2
    assert word in result.output


def test_info_names_the_card_and_why() -> None:
    pytest.importorskip("torch")
    result = invoke("info", "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["card"] in card_names()
    assert values["why"]
    assert not values["forced"]
    assert values["device"]
    assert "torch" in invoke("info").stdout


def test_explain_takes_a_toolchain() -> None:
    asked = ("explain", "--num-tokens", "512", "--num-heads", "64", "--json")
    s5000 = (*asked, "--card", "mthreads-s5000")
    below = json.loads(invoke(*s5000, "--toolchain", "0.6.0+mthreads3.6").stdout)
    assert (below["tokens_per_tile"], below["num_warps"]) == (1, 1)
    assert "is below 0.6.1+mthreads3.6" in below["reason"]
    at = json.loads(invoke(*s5000, "--toolchain", "0.6.1+mthreads3.6").stdout)
    assert (at["tokens_per_tile"], at["num_warps"]) == (4, 4)
    assumed = json.loads(invoke(*s5000).stdout)
    assert "is taken to be there" in assumed["reason"]
    assert invoke(*s5000, "--toolchain", "new").exit_code == 2
    assert invoke(*asked, "--card", "metax-c550", "--toolchain", "0.6.1").exit_code == 2


def test_info_says_that_the_card_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(selection, "_NAMED", "unknown")  # what this process was started with
    values = json.loads(invoke("info", "--json", DSV4_PROLOGUE_CARD="unknown").stdout)
    assert values["card"] == "unknown"
    assert values["forced"]
    assert "DSV4_PROLOGUE_CARD" in values["why"]


@pytest.mark.parametrize("exit_code", [0, 1, 2])
def test_demo_hands_on_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exit_code: int
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from dsv4_prologue import demo

    seen: list[dict[str, Any]] = []

    def run(**arguments: Any) -> int:
        seen.append(arguments)
        return exit_code

    monkeypatch.setattr(demo, "run", run)
    file = tmp_path / "text"
    file.write_text("Grüße", encoding="utf-8")
    here = selection.default_device()
    assert invoke("demo").exit_code == exit_code
    assert invoke("demo", "--file", str(file), "--device", "cpu").exit_code == exit_code
    assert invoke("demo", "--text", "a text", "--json").exit_code == exit_code
    assert seen == [
        {"text": None, "device": here, "as_json": False},
        {"text": "Grüße", "device": "cpu", "as_json": False},
        {"text": "a text", "device": here, "as_json": True},
    ]


CHECK = ("check", "--device", "cpu", "--shapes", "3x2", "--variant", "in place")


def test_check_prints_its_records_and_stores_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dsv4_prologue.measure.record import read

    file = tmp_path / "new" / "record.jsonl"
    result = invoke(*CHECK, "--json", "--record", str(file))
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert (record["num_tokens"], record["num_heads"], record["card"]) == (3, 2, "cpu")
    assert (record["verdict"], record["bytes_differing"]) == ("ok", 0)
    (stored,) = read(file)
    assert stored.items() >= record.items()
    assert {"date", "commit", "command", "environment"} <= stored["run"].keys()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (CHECK, "# A page of prose\n"),
        (("verify", "--card", "cpu"), '{"record": "check"}\n'),  # without its run
        (("bench", "--device", "cpu", "--shapes", "1x1"), "[1, 2]\n"),
    ],
)
def test_a_file_of_something_else_is_not_appended_to(
    tmp_path: Path, command: tuple[str, ...], text: str
) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "precious.md"
    file.write_text(text)
    result = invoke(*command, "--record", str(file))
    assert result.exit_code == 2, result.output
    assert "expected a file of records" in " ".join(result.output.split())
    assert file.read_text() == text


def test_verify_does_not_hold_where_nothing_is_proved() -> None:
    pytest.importorskip("torch")
    result = invoke("verify", "--card", "cpu")
    assert result.exit_code == 1, result.output
    assert "0 proved, 0 refused" in result.stdout


@pytest.mark.parametrize("command", ["check", "verify"])
def test_ctrl_c_leaves_what_was_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    pytest.importorskip("torch")
    from dsv4_prologue.measure.record import read
    from dsv4_prologue.verify import conformance, suite
    from dsv4_prologue.verify.proof import Proof

    def check_one(*arguments: Any, on_result: Any, **options: Any) -> None:
        run_check(*arguments, on_result=on_result, **options)
        raise KeyboardInterrupt

    def prove_one(_: list[str], on_proof: Any) -> None:
        on_proof(Proof("cpu", "launches", "proved", "a reason"))
        raise KeyboardInterrupt

    run_check = conformance.run_check
    monkeypatch.setattr(conformance, "run_check", check_one)
    monkeypatch.setattr(suite, "prove", prove_one)
    file = tmp_path / "record.jsonl"
    arguments = CHECK if command == "check" else ("verify", "--card", "cpu")
    result = invoke(*arguments, "--record", str(file))
    assert result.exit_code == 1
    assert "broken off, with 1 of it done" in result.output
    (stored,) = read(file)
    assert stored["verdict"] in ("ok", "proved")


@pytest.mark.parametrize("planted", [False, True])
def test_check_of_somebody_else_s_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: bool
) -> None:
    """Each form it has, by the limits of a foreign one; a fault of it is found."""
    torch = pytest.importorskip("torch")
    from dsv4_prologue.measure import baselines
    from dsv4_prologue.verify.conformance import FOREIGN

    def bind(inputs: baselines.Inputs) -> baselines.Call:
        def call() -> None:
            if inputs.position_ids.dtype != torch.int64:
                raise RuntimeError("positions: int64 only\nand more")
            baselines.fused(*inputs)
            if planted:
                inputs.k_cache[:, 0] ^= 1

        return call

    theirs = baselines.Baseline("theirs", (baselines.IN_PLACE,), bind, {"version": "1"})
    monkeypatch.setattr(baselines, "find", lambda *_: theirs)
    file = tmp_path / "record.jsonl"
    chosen = ("check", "--device", "cpu", "--shapes", "99x2", "--against", "vllm")
    result = invoke(*chosen, "--json", "--record", str(file))
    assert result.exit_code == planted, result.output
    records = {one["variant"]: one for one in json.loads(result.stdout)}
    assert records.keys() == set(FOREIGN)
    refused = records.pop("short slots")
    assert (refused["verdict"], refused["operator"]) == ("not verified", "theirs")
    assert refused["reason"] == "refused: RuntimeError: positions: int64 only"
    assert {one["provenance"]["version"] for one in records.values()} == {"1"}
    assert {one["verdict"] for one in records.values()} == {"differs" if planted else "ok"}
    assert not Evidence.of(tmp_path).checks()
    assert invoke(*chosen).stdout.rstrip().endswith("on cpu, of theirs")


@pytest.mark.parametrize(
    ("name", "word"),
    [("copy", "expected an operator"), ("nope", "expected one of"), ("vllm", "is left out")],
)
def test_what_is_no_operator_is_not_checked(name: str, word: str) -> None:
    pytest.importorskip("torch")
    result = invoke("check", "--device", "cpu", "--shapes", "3x2", "--against", name)
    assert result.exit_code == 2
    assert word in " ".join(result.output.split())
    result = invoke(*CHECK, "--against", name)  # with a form that only ours has
    assert result.exit_code == 2
    assert "pages of 5" in result.output


def test_check_as_a_table_ends_in_a_sum() -> None:
    pytest.importorskip("torch")
    result = invoke(*CHECK)
    assert result.exit_code == 0, result.output
    assert "in place" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 ok, 0 differs, 0 not verified, on cpu"


@pytest.mark.parametrize(
    ("verdicts", "exit_code"),
    [
        (("ok", "ok"), 0),
        (("ok", "not verified"), 0),
        (("ok", "differs"), 1),
        (("not verified", "not verified"), 1),
    ],
)
def test_check_holds_if_something_was_verified_and_nothing_differs(
    monkeypatch: pytest.MonkeyPatch, verdicts: tuple[str, ...], exit_code: int
) -> None:
    pytest.importorskip("torch")
    from dsv4_prologue.verify import conformance

    records = [
        {
            "num_tokens": 131072,
            "num_heads": 128,
            "variant": "in place",
            "verdict": verdict,
            "reason": "" if verdict == "ok" else "a reason",
            "card": "cpu",
            "forced": True,
        }
        for verdict in verdicts
    ]
    monkeypatch.setattr(conformance, "run_check", lambda *_, **__: records)
    result = invoke("check")
    assert result.exit_code == exit_code
    assert ("a reason" in result.stdout) == (set(verdicts) != {"ok"})
    assert result.stdout.rstrip().endswith("on cpu (forced)")
