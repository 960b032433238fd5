"""The runner, the comparison of versions and the tuner: on the CPU, where no speed is asserted."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import dsv4_prologue
from dsv4_prologue import Launch
from dsv4_prologue.cards import Rule, get_card
from dsv4_prologue.contract import CORE_NUM_HEADS, CORE_NUM_TOKENS, bytes_moved
from dsv4_prologue.measure import bench, commands, tune, versions
from dsv4_prologue.measure.baselines import (
    BUFFER,
    IN_PLACE,
    NEW,
    OPERATOR,
    Baseline,
    Call,
    Inputs,
    RequestError,
)
from dsv4_prologue.measure.bench import Options, Records, Watcher, groups, holds, parse_shapes
from dsv4_prologue.measure.candidates import Shape
from dsv4_prologue.measure.ceilings import Ceiling
from dsv4_prologue.measure.clock import MODES, HostClock, Mode
from dsv4_prologue.measure.record import kernel_hash, read
from dsv4_prologue.measure.timing import LAYERS, Samples
from dsv4_prologue.measure.verdict import verdict
from dsv4_prologue.op import prologue
from dsv4_prologue.planning import DEFAULT_LAUNCH, Problem, plan

pytestmark = pytest.mark.once

PACKAGE = Path(dsv4_prologue.__file__).parent
SMALL: tuple[Shape, ...] = ((1, 2), (3, 2))


@pytest.fixture(autouse=True)
def around_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before and after a run takes seconds, and is tested elsewhere."""
    ceiling = Ceiling(10.0, 0.01, "copy torch", {"copy torch": 10.0}, 1 << 20, True, 9.0, 3, 0.3)
    monkeypatch.setattr(bench, "measure_ceiling", lambda *_, **__: ceiling)
    monkeypatch.setattr(bench, "known_answer", lambda _: ())


def options(**changes: Any) -> Options:
    given: dict[str, Any] = {"modes": ("resident",), "seconds": 0.05, "shapes": SMALL}
    return Options(**{"device": "cpu", **given, **changes})


def measured(**changes: Any) -> Records:
    records: Records = []
    bench.run(options(**changes), records)
    return records


def right(inputs: Inputs) -> Call:
    def call() -> None:
        prologue(*inputs[:6], q_out=inputs.q)

    return call


def right_and_new(inputs: Inputs) -> Call:
    return lambda: prologue(*inputs[:6])


def does_nothing(_: Inputs) -> Call:
    return lambda: None


def works_once(inputs: Inputs) -> Call:
    """Right whenever it is checked, since each check binds it anew; and then it does no more."""
    calls: list[bool] = []

    def call() -> None:
        if not calls:
            right(inputs)()
        calls.append(True)

    return call


def baselines(
    monkeypatch: pytest.MonkeyPatch, *found: Baseline, not_there: dict[str, str] | None = None
) -> None:
    monkeypatch.setattr(bench, "find_all", lambda *_: (list(found), not_there or {}))


def theirs(bind: Callable[..., Call], *forms: str, **more: Any) -> Baseline:
    return Baseline("theirs", forms or (IN_PLACE,), bind, {"package": "theirs"}, **more)


def of(records: Records, candidate: str) -> Records:
    return [one for one in records if one["candidate"] == candidate]


# -------------------------------------------------------------------------------------- options


def test_shapes() -> None:
    assert set(parse_shapes("core")) == {(n, h) for n in CORE_NUM_TOKENS for h in CORE_NUM_HEADS}
    assert len(parse_shapes("core")) == 22
    assert set(parse_shapes("decode,prefill")) == set(parse_shapes("core"))
    assert {h for _, h in parse_shapes("tp")} == {8, 16, 32}
    assert parse_shapes("5x8, 1x4,5x8") == ((1, 4), (5, 8))


@pytest.mark.parametrize("text", ["", "most", "1x", "0x4", "4x0", "1x4,"])
def test_no_shapes(text: str) -> None:
    with pytest.raises(RequestError, match=r"shapes: expected quick, core, .*, got"):
        parse_shapes(text)


@pytest.mark.parametrize(
    "wrong", [{"modes": ("fast",)}, {"forms": ("sideways",)}, {"against": ("nobody",)}]
)
def test_no_options(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(RequestError, match=f"{name}: expected"):
        options(**wrong)


def test_options_survive_json() -> None:
    given = options(against=("copy", "eager"), forms=(IN_PLACE, NEW))
    assert Options(**json.loads(json.dumps(vars(given)))) == given


def test_baselines_that_share_a_namespace_are_kept_apart() -> None:
    one, other = "library:a.so:_C.op", "library:b.so:_C.op"
    assert groups(("copy", "portable", one)) == [("copy", "portable", one)]
    assert groups(("copy", one, "eager", other)) == [("copy", one, "eager"), ("copy", other)]
    assert groups(("vllm", one, other)) == [("vllm",), (one,), (other,)]
    assert groups((one, "library:c.so:ns.op")) == [(one, "library:c.so:ns.op")]


# ---------------------------------------------------------------------------------------- a run


def test_the_records_of_a_run() -> None:
    records = measured(modes=("flushed", "resident"))
    assert holds(records)
    json.dumps(records)
    shapes = [(one["num_tokens"], one["num_heads"], one["mode"]) for one in of(records, "ours")]
    assert shapes == [(*shape, mode) for shape in SMALL for mode in ("flushed", "resident")]
    for one in records:
        assert one["record"] == "bench"
        assert (one["card"], one["forced"], one["kernel"]) == ("cpu", False, "torch")
        assert one["plan_reason"]
        assert one["kernel_hash"] == kernel_hash(one["card"])
        assert one["useful_bytes"] == bytes_moved(one["num_tokens"], one["num_heads"])
        assert one["ceilings"]["after"] == one["ceilings"]["before"]
        assert one["ceilings"]["mark"] == ""
        assert one["device_faults"] == {"before": [], "after": []}
        assert one["clock"]["cache_bytes"] > 0
        assert ("utilisation" in one) == (one["mode"] == "flushed")
        assert one["limit_ratio"] == pytest.approx(one["limit_us"] / one["median_us"])
        samples = Samples.from_dict(one)
        assert samples.mode == one["mode"]
        assert len(samples.times_us) == samples.rounds - samples.dropped
        assert all(round(value, 3) == value for value in samples.times_us)
    for one in of(records, "ours"):
        assert (one["form"], one["check"]["verdict"], one["reason"]) == (IN_PLACE, "ok", "")
        assert one["check"]["bytes_differing"] == 0
        assert (one["verdicts"], one["left_out"]) == ([], {})
    for one in of(records, "copy"):
        assert one["launch"].startswith(("copy ", "rmw "))
        assert one["median_us"] == one["limit_us"]


def test_what_this_device_cannot_measure_is_said() -> None:
    remarks: list[str] = []

    class Listener(Watcher):
        def remark(self, text: str) -> None:
            remarks.append(text)

    records: Records = []
    bench.run(
        options(shapes=SMALL[:1], modes=("graph", "resident"), against=("portable",)),
        records,
        Listener(),
    )
    told = "\n".join(remarks)
    assert "no accelerator" in told
    assert "mode graph is left out: the CPU has no graphs" in told
    assert "portable is left out: Triton compiles for no CPU" in told
    (ours,) = records
    assert ours["left_out"] == {"portable": "Triton compiles for no CPU"}
    assert "limit_ratio" not in ours
    with pytest.raises(RequestError, match="modes: expected one this device has"):
        measured(modes=("graph", "host"))


def test_no_time_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RequestError, match="interpreter proves bytes, not speed"):
        measured()


def test_a_device_that_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_prologue.measure.guard import Fault

    fault = (Fault("device", "7 of 8 places"),)
    monkeypatch.setattr(bench, "known_answer", lambda _: fault)
    with pytest.raises(RuntimeError, match="the device computes wrongly: 7 of 8 places"):
        measured()
    answers = iter([(), fault])
    monkeypatch.setattr(bench, "known_answer", lambda _: next(answers))
    records = measured()
    assert records[0]["device_faults"]["after"] == ["7 of 8 places"]
    assert not holds(records)


def test_a_baseline_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    baselines(monkeypatch, theirs(right), not_there={"vllm": "not installed"})
    records = measured(shapes=SMALL[:1], seconds=0.2)
    (ours,), (other,) = of(records, "ours"), of(records, "theirs")
    assert ours["left_out"] == {"vllm": "not installed"}
    (told,) = ours["verdicts"]
    assert (told["baseline"], told["form"]) == ("theirs", IN_PLACE)
    assert told["verdict"] in ("faster", "slower", "same", "unclear")
    assert told["ratio"] == pytest.approx(
        verdict(Samples.from_dict(ours), Samples.from_dict(other)).ratio, rel=1e-3
    )
    assert (other["launch"], other["provenance"]) == ("as shipped", {"package": "theirs"})
    assert other["check"]["verdict"] == "ok"


def test_a_baseline_out_of_place_is_compared_with_both_such_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    baselines(monkeypatch, theirs(right_and_new, BUFFER, NEW))
    records = measured(shapes=SMALL[:1])
    compared = {
        one["form"]: [told["baseline"] for told in one["verdicts"]] for one in of(records, "ours")
    }
    assert compared == {IN_PLACE: [], BUFFER: ["theirs"], NEW: ["theirs"]}
    assert of(records, "theirs")[0]["form"] == NEW


class EveryMode(HostClock):
    """The host's clock, in the stead of a device that has graphs."""

    def unavailable(self, mode: Mode) -> str:
        return "" if mode in MODES else "no such mode"

    def captured(self, call: Call, calls: int) -> Call:
        return lambda: [call() for _ in range(calls)]


def test_graphs_and_the_cost_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "clock_for", lambda _: EveryMode())
    waits = replace(theirs(right, capturable=False), name="waits")
    baselines(monkeypatch, theirs(right), waits)
    records = measured(modes=("graph", "host"), seconds=0.1)
    graph, host = ([one for one in records if one["mode"] == mode] for mode in ("graph", "host"))
    assert [one["num_tokens"] for one in of(graph, "ours")] == [1, 3]
    for one in of(graph, "waits"):
        assert one["reason"] == "it synchronises, which no graph can hold"
        assert "median_us" not in one
    for one in of(graph, "ours"):
        assert one["left_out"] == {"waits": "it synchronises, which no graph can hold"}
        assert [told["baseline"] for told in one["verdicts"]] == ["theirs"]
    # Every form against every baseline, at the fewest tokens alone, and without a limit.
    assert {one["num_tokens"] for one in host} == {1}
    assert of(host, "copy") == []
    forms = [IN_PLACE, BUFFER, NEW, "torch.ops, in place", "torch.ops, new tensor"]
    assert [one["form"] for one in of(host, "ours")] == forms
    for one in of(host, "ours"):
        compared = [told["baseline"] for told in one["verdicts"]]
        assert compared == ([] if NEW in one["form"] else ["theirs", "waits"])  # both in place
        assert not {"gbps", "limit_us", "utilisation"} & one.keys()
    assert holds(records)
    commands.print_bench(records)


def test_the_limit_of_what_is_out_of_place_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-modify-write, however fast, does not bound work that writes elsewhere."""
    read, write = torch.zeros(1 << 20), torch.zeros(1 << 20)
    fast = {"rmw torch": lambda: None, "copy torch": lambda: write.copy_(read)}
    monkeypatch.setattr(bench, "copy_candidates", lambda *_: fast)
    baselines(monkeypatch, theirs(right_and_new, BUFFER, NEW))
    records = measured(shapes=SMALL[:1])
    limits = {one["form"]: one for one in of(records, "copy")}
    assert {form: one["launch"] for form, one in limits.items()} == {
        IN_PLACE: "rmw torch",
        NEW: "copy torch",
    }
    for one in of(records, "ours"):
        limit = limits[IN_PLACE if one["form"] == IN_PLACE else NEW]
        assert one["limit_us"] == limit["median_us"]
        assert one["limit_ratio"] == limit["median_us"] / one["median_us"]


def test_the_share_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chain the call stands between two products, and what it takes of them is told."""
    monkeypatch.setattr(bench, "clock_for", lambda _: EveryMode())
    elsewhere = replace(theirs(right_and_new, BUFFER, NEW), name="elsewhere")
    baselines(monkeypatch, theirs(right), elsewhere)
    records = measured(shapes=SMALL[:1], modes=("chain",), seconds=0.1)
    (rest,) = of(records, bench.REST)
    (ours,), (other,) = of(records, "ours"), of(records, "theirs")
    assert of(records, "copy") == of(records, "elsewhere") == []
    assert rest["calls"] == ours["calls"] == LAYERS
    for one in (ours, other):
        assert one["rest_us"] == rest["median_us"]
        assert one["share"] == pytest.approx(1 - rest["median_us"] / one["median_us"])
        assert not {"gbps", "limit_us"} & one.keys()
    assert [told["baseline"] for told in ours["verdicts"]] == ["theirs"]
    assert holds(records)
    commands.print_bench(records)


def test_a_layer_makes_q_anew() -> None:
    """The call gets the product's q each time, and the next product what the call left."""
    timed = bench.Timed.make((3, 2), torch.device("cpu"), 0, in_place=True)
    seen: list[torch.Tensor] = []
    layer = timed.layer(lambda: seen.append(timed.inputs.q.clone()) or timed.inputs.q.zero_())
    layer()
    layer()
    assert torch.equal(seen[0], seen[1])
    assert seen[0].count_nonzero() > 0
    assert timed._projection[2].count_nonzero() == 0


def test_parts_are_timed_beside_the_whole() -> None:
    records = measured(shapes=SMALL[:1], against=("copy", "parts"))
    parts = of(records, "part")
    names = list(bench.Timed.make(SMALL[0], torch.device("cpu"), 0, in_place=True).parts("flushed"))
    assert [one["form"] for one in parts] == names
    assert all(one["median_us"] > 0 and one["check"] == {"verdict": "none"} for one in parts)
    assert "parts" not in of(records, "ours")[0]["left_out"]
    assert holds(records)
    assert of(measured(shapes=SMALL[:1], against=("copy",)), "part") == []
    commands.print_bench(records)


def test_parts_do_their_part() -> None:
    """What is left out is not done, and the rest is what the whole does."""
    whole = bench.Timed.make((3, 2), torch.device("cpu"), 0, in_place=True)
    prologue(*whole.inputs[:6], q_out=whole.inputs.q)
    before = bench.Timed.make((3, 2), torch.device("cpu"), 0, in_place=True).inputs
    norm, rope = slice(0, 448), slice(448, 512)
    changed = {}
    for name in bench.Timed.make((3, 2), torch.device("cpu"), 0, in_place=True).parts("flushed"):
        timed = bench.Timed.make((3, 2), torch.device("cpu"), 0, in_place=True)
        timed.parts("flushed")[name]()
        now = timed.inputs
        changed[name] = tuple(
            not torch.equal(after, since)
            for after, since in (
                (now.q[..., norm], before.q[..., norm]),
                (now.q[..., rope], before.q[..., rope]),
                (now.k_cache, before.k_cache),
            )
        )
        if name == "Q alone":
            assert torch.equal(now.q, whole.inputs.q)
        if name == "KV alone":
            assert torch.equal(now.k_cache, whole.inputs.k_cache)
    assert changed == {
        "Q alone, neither normalised nor rotated": (False, False, False),
        "Q alone, not normalised": (False, True, False),
        "Q alone, not rotated": (True, True, False),
        "Q alone": (True, True, False),
        "KV alone": (False, False, True),
    }


def test_no_time_without_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    baselines(monkeypatch, theirs(right_and_new, BUFFER, NEW, padded_heads=(64,)))
    records = measured(shapes=SMALL[:1])
    (ours,) = of(records, "ours")
    assert ours["left_out"] == {"theirs": "writes one of (64,) heads, not 2"}
    assert of(records, "theirs") == []


@pytest.mark.parametrize(
    ("bind", "reason"), [(does_nothing, "differs: q: "), (works_once, "returned early: ")]
)
def test_no_time_for_a_candidate_that_failed(
    monkeypatch: pytest.MonkeyPatch, bind: Callable[..., Call], reason: str
) -> None:
    baselines(monkeypatch, theirs(bind))
    records = measured(shapes=SMALL[:1])
    (ours,), (other,) = of(records, "ours"), of(records, "theirs")
    assert "median_us" in ours
    assert ours["verdicts"] == []
    assert other["reason"].startswith(reason)
    assert ours["left_out"] == {"theirs": other["reason"]}
    assert "times_us" not in other
    assert holds(records)


def test_ours_that_fails_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "forms_of", lambda _: {IN_PLACE: lambda *_: lambda: None})
    records = measured(shapes=SMALL[:1])
    (ours,) = records
    assert ours["check"]["verdict"] == "differs"
    assert ours["reason"].startswith("differs: ")
    assert "times_us" not in ours
    assert not holds(records)


def test_what_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "no_room", lambda *_: "needs 3 GB")
    records = measured(shapes=SMALL[:1])
    (ours,) = records
    assert ours["reason"] == "not verified: needs 3 GB"
    assert not holds(records)


def test_what_takes_too_long_is_not_tried() -> None:
    (ours,) = measured(shapes=((20000, 64),))
    assert ours["reason"].startswith("not verified: 1300000 units")


def test_a_baseline_at_its_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped with a launch that is slow: both columns are there, and the handicap is named."""

    def bind(inputs: Inputs, wait: int = 1) -> Call:
        def call() -> None:
            time.sleep(0.02 * wait)
            right(inputs)()

        return call

    baselines(monkeypatch, theirs(bind, launches=({}, {"wait": 2}, {"wait": 0})))
    records = measured(shapes=SMALL[:1], seconds=0.5)
    (shipped,), (best,) = of(records, "theirs"), of(records, "theirs at optimum")
    assert (shipped["launch"], best["launch"]) == ("as shipped", "wait=0")
    assert any(fault.startswith("handicapped") for fault in shipped["faults"])
    (ours,) = of(records, "ours")
    assert [told["baseline"] for told in ours["verdicts"]] == ["theirs", "theirs at optimum"]


def test_a_slow_baseline_takes_no_rounds_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(inputs: Inputs) -> Call:
        def call() -> None:
            time.sleep(0.03)
            right(inputs)()

        return call

    baselines(monkeypatch, replace(theirs(bind), name="slow"), theirs(right))
    records = measured(shapes=SMALL[:1], seconds=0.2)
    (ours,), (slow,) = of(records, "ours"), of(records, "slow")
    assert [told["baseline"] for told in ours["verdicts"]] == ["slow", "theirs"]
    assert ours["verdicts"][0]["verdict"] == "faster"
    assert ours["rounds"] > slow["rounds"] >= 10


def test_a_figure_above_the_ceiling_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4_prologue.measure.guard import Fault

    fault = (Fault("above the ceiling", "11 GB/s"),)
    monkeypatch.setattr(bench, "figure_faults", lambda *_: fault)
    records = measured(shapes=SMALL[:1], against=())
    (ours,) = records
    assert ours["reason"] == "after the rounds: above the ceiling: 11 GB/s"
    assert "times_us" not in ours
    assert not holds(records)


# ------------------------------------------------------------------------------ the command line

app = typer.Typer()
app.command()(commands.bench)
app.command("tune")(commands.tune)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


def bench_command(*arguments: str) -> Result:
    few = ("bench", "--device", "cpu", "--mode", "resident", "--seconds", "0.05")
    return invoke(*few, *arguments)


def test_a_table_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "record.jsonl"
    for _ in range(2):
        result = bench_command("--shapes", "1x2,3x2", "--record", str(file))
        assert result.exit_code == 0, result.output
    assert "1x2" in result.stdout
    assert "3x2" in result.stdout
    assert "portable is left out: Triton compiles for no CPU\n" in result.stdout
    assert "no accelerator" not in result.stdout
    assert "no accelerator" in result.stderr
    records = read(file)
    assert len(records) == 2 * 2 * 2
    assert len({one["run"]["date"] for one in records}) <= 2
    assert records[0]["run"]["command"]


def test_json_is_the_records() -> None:
    result = bench_command("--shapes", "1x2", "--json")
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    assert {"num_tokens", "num_heads", "card", "kernel_hash"} <= records[0].keys()


def test_what_was_done_is_kept_when_it_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "record.jsonl"
    measure, calls = bench.measure, []

    def broken_off(*arguments: Any, **more: Any) -> dict[str, Samples]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments, **more)

    monkeypatch.setattr(bench, "measure", broken_off)
    result = bench_command("--shapes", "1x2,3x2", "--record", str(file))
    assert result.exit_code == 1, result.output
    assert "broken off, with 2 records" in result.stderr
    assert "1x2" in result.stdout
    records = read(file)
    assert {(one["num_tokens"], one["candidate"]) for one in records} == {(1, "ours"), (1, "copy")}
    assert {one["ceilings"]["after"] for one in records} == {None}

    calls[:] = [()]
    result = bench_command("--shapes", "1x2,3x2")
    assert result.exit_code == 1
    assert "broken off, with 0 records" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("bench", "--shapes", "17"), "NxH"),
        (("bench", "--mode", "fast"), "modes"),
        (("bench", "--against", "nobody"), "against"),
        (("bench", "--form", "sideways"), "forms"),
        (("bench", "--device", "no-such-device"), "--device"),
        (("bench", "--device", "cpu", "--mode", "graph"), "modes"),
        (("bench", "--device", "cpu", "--compare", "no-such-revision"), "compare"),
        (("bench", "--device", "cpu", "--compare", str(Path(__file__).parent)), "dsv4_prologue"),
        (("tune", "--device", "cpu"), "no launch to choose"),
    ],
)
def test_wrong_usage_is_2_and_says_why(arguments: tuple[str, ...], word: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert word in result.output


# ------------------------------------------------------------------------- processes of their own

VLLM = f'''
import torch
from dsv4_prologue import reference

library = torch.library.Library("_C", "DEF")
library.define(
    "{OPERATOR}(Tensor q_in, Tensor kv, Tensor(c!) k_cache, Tensor slot_mapping, "
    "Tensor position_ids, Tensor cos_sin_cache, int q_head_padded, float eps, "
    "int cache_block_size) -> Tensor"
)


def operator(q, kv, k_cache, slots, positions, table, heads, eps, page_tokens):
    print("printed by somebody else")
    q, cache = reference.prologue(
        q, kv, k_cache, slots, positions, table, eps=eps, cache_block_size=page_tokens
    )
    k_cache.copy_(cache)
    return q


library.impl("{OPERATOR}", operator, "CompositeExplicitAutograd")
'''


def test_two_of_one_namespace_each_get_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_custom_ops.py").write_text(VLLM)
    (tmp_path / "b.so").write_text("no library")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    remarks: list[str] = []

    class Listener(Watcher):
        def remark(self, text: str) -> None:
            remarks.append(text)

    records: Records = []
    name = f"library:{tmp_path / 'b.so'}:_C.{OPERATOR}"
    # 8 heads: what the operator may be given.
    given = options(shapes=((1, 8),), against=("copy", "vllm", name))
    bench.run(given, records, Listener())
    assert {one["process"] for one in records} == {1, 2}
    first, second = ([one for one in records if one["process"] == n] for n in (1, 2))
    (other,) = of(first, "vllm")
    assert other["check"]["verdict"] == "ok"
    assert {one["form"] for one in of(first, "ours")} == {IN_PLACE, BUFFER, NEW}
    (ours,) = of(second, "ours")
    assert ours["left_out"]["library:b.so"].startswith("loading it: OSError")
    assert all(one["ceilings"]["after"] for one in records)
    assert any(remark.startswith("process 2 of 2: ours beside library:") for remark in remarks)
    assert holds(records)


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """A folder with a version of ours that takes its time."""
    copy = tmp_path / "src" / "dsv4_prologue"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "op.py").open("a", encoding="utf-8") as file:
        file.write(f"""
_quick = {OPERATOR}


def {OPERATOR}(*arguments):
    __import__("time").sleep(5e-3)
    _quick(*arguments)
""")
    return tmp_path


def test_two_versions_side_by_side(slower: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    result = bench_command(
        *("--shapes", "1x2,3x2", "--compare", str(slower), "--seconds", "0.5"),
        *("--record", str(file), "--json"),
    )
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    assert [(one["num_tokens"], one["num_heads"]) for one in records] == list(SMALL)
    for one in records:
        assert one["record"] == "compare"
        assert one["kernel_hash"] == one["other"]["kernel_hash"] == kernel_hash(one["card"])
        assert {one[name]["check"]["verdict"] for name in ("again", "other")} == {"ok"}
        assert one["other"]["version"] == str(slower)
        assert one["verdict"]["verdict"] == "faster"
        assert one["noise"]["ratio"] == pytest.approx(1, abs=0.5)
        assert Samples.from_dict(one["other"]).median_us > 5000
    assert [one["verdict"] for one in read(file)] == [one["verdict"] for one in records]
    commands.print_compare(records)
    other_way = [one | {"verdict": one["verdict"] | {"verdict": "slower"}} for one in records]
    assert versions.faster_or_same(records)
    assert not versions.faster_or_same(other_way)


def test_a_version_is_found_in_a_folder(slower: Path) -> None:
    for path in (slower, slower / "src", slower / "src" / "dsv4_prologue"):
        with versions.folder_of(str(path)) as folder:
            assert folder == slower / "src"


def test_against_a_record(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    assert bench_command("--shapes", "1x2", "--record", str(file)).exit_code == 0
    records = measured()
    for one in records:
        if "limit_us" in one:
            one["limit_us"] /= 10  # ours is ten times the limit that it was
    (found,) = versions.against_record(records, file)
    assert found["record"] == "compare"
    assert found["verdict"]["verdict"] in ("slower", "unclear")
    assert found["verdict"]["ratio"] < 0.5
    with pytest.raises(RequestError, match="no shape, mode and limit in common"):
        versions.against_record(measured(shapes=((2, 2),)), file)


# --------------------------------------------------------------------------------------- the tuner

TALL, WIDE = Launch(8, 1, 4), Launch(1, 4, 2)
LADDER: tuple[Shape, ...] = tuple((n, h) for n in (1, 16, 256, 4096) for h in (8, 64))
Times = Callable[[Shape, Launch], float]


class Synthetic(tune.Tuner):
    """A tuner of a card whose times are a formula."""

    times: Times

    def _sound(self, launch: Launch, num_heads: int) -> bool:
        return launch.num_warps * launch.tokens_per_tile < 64 or num_heads < 0

    def measure(
        self,
        cell: tune.Cell,
        launches: Sequence[Launch],
        seconds: float,
        rounds: tuple[int, int],
    ) -> dict[Launch, Samples]:
        assert seconds > 0
        jitter = [1 + 0.001 * (number % 5) for number in range(rounds[1])]
        return {
            one: Samples(tuple(self.times(cell[0], one) * noise for noise in jitter), cell[1])
            for one in launches
        }


def tuned(times: Times, card: str = "nvidia-ada") -> tuple[tune.Tuned, Records]:
    records: Records = []
    tuner = Synthetic(
        options(shapes=LADDER, modes=("flushed",)),
        records,
        card=get_card(card),
        evidence="a record",
    )
    tuner.times = times
    return tuner.tune(), records


def by_units(shape: Shape, launch: Launch) -> float:
    """A launch of its own below and above 5000 units, others far behind."""
    units = Problem(*shape).num_units
    best = WIDE if units < 5000 else TALL
    second = {WIDE: TALL, TALL: WIDE}[best]
    return 10.0 + units / 100 * {best: 1.0, second: 1.3}.get(launch, 2.0)


def test_one_launch_for_everything() -> None:
    found, records = tuned(lambda shape, launch: 10.0 + (launch != TALL) + shape[0])
    (rule,) = found.rules
    assert (rule.launch, rule.condition) == (TALL, "always")
    assert len(found.faster) >= 4
    assert "a record" in rule.evidence
    looks = [one for one in records if one["record"] == "look"]
    kept = [one for one in records if one["record"] == "tune"]
    assert len(looks) + len(kept) == len(records)
    assert [(one["num_tokens"], one["num_heads"]) for one in looks] == list(LADDER)
    every = set(looks[0]["median_us"])  # but those left out
    assert every < {tune.text(one) for one in tune.launches_for(get_card("nvidia-ada"))}
    for one in looks:
        assert one["median_us"].keys() == every
        own = one["median_us"][tune.text(TALL)]
        assert own == pytest.approx(10.0 + one["num_tokens"], rel=0.01)
    assert {tune.text(TALL), tune.text(DEFAULT_LAUNCH)} <= {one["launch"] for one in kept} < every
    for one in kept:
        assert {"num_tokens", "num_heads", "card", "kernel_hash", "tokens_per_tile"} <= one.keys()
        Samples.from_dict(one)
    json.dumps(records)


def test_a_card_that_is_right_already() -> None:
    found, _ = tuned(lambda shape, launch: 10.0 + (launch != DEFAULT_LAUNCH) + shape[0])
    assert found == tune.Tuned((), (), (), "")


def test_a_threshold_is_found() -> None:
    found, _ = tuned(by_units)
    assert [rule.launch for rule in found.rules] == [TALL, WIDE]
    first, last = found.rules
    assert last.condition == "always"
    assert first.min_units
    assert 5000 <= first.min_units < 5000 * 1.34 * 1.1
    card = replace(get_card("nvidia-ada"), rules=found.rules)
    for shape in LADDER:
        best = min((WIDE, TALL), key=lambda one: by_units(shape, one))
        assert plan(card, Problem(*shape)).launch == best


def test_heads_are_told_apart() -> None:
    found, _ = tuned(
        lambda shape, launch: 10.0 * (1.0 if launch == (TALL if shape[1] <= 8 else WIDE) else 1.5)
    )
    assert [(rule.launch, rule.condition) for rule in found.rules] == [
        (TALL, "up to 8 heads"),
        (WIDE, "always"),
    ]


def test_a_gain_within_the_spread_makes_no_rule() -> None:
    found, _ = tuned(
        lambda shape, launch: 10.0 - 0.01 * (launch == (TALL if shape[0] > 9 else WIDE))
    )
    assert len(found.rules) <= 1
    assert (found.faster, found.patch) == ((), "")


@pytest.mark.parametrize("name", ["nvidia-ada", "nvidia-hopper", "mthreads-s5000", "unknown"])
def test_a_patch_gives_the_file_these_rules(name: str) -> None:
    rules = (
        Rule(Launch(1, 4, 2, 2), "a reason", "of a record " * 20, min_tokens=64, max_heads=32),
        Rule(Launch(2, 1, 1, dependent="wait"), "another " * 30, "evidence", min_units=7),
    )
    card = get_card(name)
    text = tune.card_file(card, rules)
    names: dict[str, Any] = {}
    header = "from dsv4_prologue.cards.card import *\nfrom dsv4_prologue.planning import Launch\n"
    exec(compile(header + text, name, "exec"), names)
    assert names["CARD"] == replace(card, rules=rules)
    assert max(map(len, text.splitlines())) <= 100
    patch = tune.card_patch(card, rules)
    assert patch.startswith(f"--- a/src/dsv4_prologue/cards/{name.replace('-', '_')}.py\n+++ b/")
    before = tune.card_file(card).splitlines()
    removed = [line[1:] for line in patch.splitlines()[2:] if line.startswith("-")]
    assert set(removed) <= set(before)


def test_tune_prints_the_patch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Hopper(Synthetic):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more, card=get_card("nvidia-hopper"))

        def times(self, shape: Shape, launch: Launch) -> float:
            return by_units(shape, replace(launch, dependent="no"))

    monkeypatch.setattr(tune, "Tuner", Hopper)
    file = tmp_path / "record.jsonl"
    result = invoke("tune", "--device", "cpu", "--shapes", "1x64,4096x64", "--record", str(file))
    assert result.exit_code == 1, result.output
    assert "+++ b/src/dsv4_prologue/cards/nvidia_hopper.py" in result.stdout
    assert "Faster than the card's own launch: \n  1x64, flushed: 1." in result.stdout
    assert "Slower than the card's own launch: nowhere\n" in result.stdout
    assert {one["record"] for one in read(file)} == {"look", "tune"}


def test_launches_of_a_card() -> None:
    found = tune.launches_for(get_card("metax-c550"))
    assert set(get_card("metax-c550").launches) <= set(found)
    assert all(one.tokens_per_tile * one.heads_per_tile <= 16 for one in found)
    staged = tune.launches_for(get_card("metax-c550"), (1, 2))
    assert len(staged) == 2 * len(found)
    assert {one.tokens_per_tile for one in tune.launches_for(get_card("ascend-910b"))} == {1}


def test_a_candidate_runs_the_launch_it_names() -> None:
    """Not on a CPU, where the composition has none; but it is asked for."""
    from dsv4_prologue.selection import plan_for

    tuner = tune.Tuner(options(), [], card=get_card("unknown"))
    inputs = bench.Timed.make((1, 2), torch.device("cpu"), 0, in_place=True).inputs
    seen: list[Launch] = []

    def look(*_: Any) -> None:
        seen.append(plan_for(torch.device("cpu"), 1, 2).launch)

    tune_forms = tune.forms_of
    try:
        tune.forms_of = lambda _: {IN_PLACE: lambda *_: look}
        tuner._candidate(WIDE).bind(inputs, None)()
    finally:
        tune.forms_of = tune_forms
    assert seen == [WIDE]
