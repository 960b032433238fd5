"""Baselines: recognised by their schema, checked as ours is, or not there for a reason."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_prologue import reference, use_card
from dsv4_prologue.measure import baselines
from dsv4_prologue.measure.baselines import (
    BUFFER,
    IN_PLACE,
    NEW,
    OPERATOR,
    Baseline,
    RequestError,
    Unavailable,
    find,
    make_inputs,
    probe,
)
from dsv4_prologue.measure.candidates import candidate_of, check
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Variant, build_case, canary_violations

once = pytest.mark.once

CPU = torch.device("cpu")
SIX = (
    "Tensor kv, Tensor({cache}!) k_cache, Tensor slot_mapping, Tensor position_ids, "
    "Tensor cos_sin_cache"
)
EIGHT = f"(Tensor(a!) q, {SIX.format(cache='c')}, float eps, int cache_block_size) -> ()"
NINE = (
    f"(Tensor q_in, {SIX.format(cache='c')}, int q_head_padded, float eps, "
    "int cache_block_size) -> Tensor"
)
# Without the defaults that real ones have: torch hands an implementation no argument that has its
# default, and here they are looked at.
FLAGS = ("bool apply_q_norm", "bool kv_mxfp8", "bool apply_q_rope", "bool is_q_interleaved")
THIRTEEN = NINE.replace(") -> Tensor", f", {', '.join(FLAGS)}) -> Tensor")


def oracle(six: tuple[Any, ...], eps: float, page_tokens: int) -> Tensor:
    """Does what an operator does with the cache; returns the new Q."""
    q, cache = reference.prologue(*six, eps=eps, cache_block_size=page_tokens)
    assert q is not None
    six[2].copy_(cache)
    return q


def in_place(*arguments: Any) -> None:
    assert len(arguments) == 8
    arguments[0].copy_(oracle(arguments[:6], *arguments[6:]))


def out_of_place(*arguments: Any) -> Tensor:
    assert len(arguments) in (9, 13)
    assert arguments[9:] in ((), (True, False, True, False))
    assert arguments[6] == arguments[0].shape[1]
    return oracle(arguments[:6], *arguments[7:9])


Load = Callable[[str, Callable[..., Any]], Baseline | Unavailable]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Finds an operator of a given schema in a library that registers it when it is loaded."""
    libraries: list[torch.library.Library] = []
    file = tmp_path / "theirs.so"
    file.write_bytes(b"not a library")

    def found(schema: str, operator: Callable[..., Any]) -> Baseline | Unavailable:
        def register(path: str) -> None:
            assert Path(path) == file.resolve()
            library = torch.library.Library("dsv4_scratch", "DEF")
            library.define(f"{OPERATOR}{schema}")
            library.impl(OPERATOR, operator, "CompositeExplicitAutograd")
            libraries.append(library)

        monkeypatch.setattr(torch.ops, "load_library", register)
        return find(f"library:{file}:dsv4_scratch.{OPERATOR}", CPU)

    yield found
    for library in libraries:
        library._destroy()
    vars(torch.ops).pop("dsv4_scratch", None)


@once
@pytest.mark.parametrize(
    ("schema", "operator", "forms"),
    [
        (EIGHT, in_place, (IN_PLACE,)),
        (NINE, out_of_place, (BUFFER, NEW)),
        (THIRTEEN, out_of_place, (BUFFER, NEW)),
    ],
    ids=["8", "9", "13"],
)
def test_three_schemas_are_known(
    load: Load, schema: str, operator: Callable[..., Any], forms: tuple[str, ...]
) -> None:
    baseline = load(schema, operator)
    assert isinstance(baseline, Baseline)
    assert baseline.forms == forms
    assert baseline.provenance["sha256"] == hashlib.sha256(b"not a library").hexdigest()
    assert baseline.provenance["file"] == "theirs.so"
    assert OPERATOR in baseline.provenance["schema"]
    assert probe(baseline, CPU) == ""
    seen = check(candidate_of(baseline), (17, 8), CPU, 3)
    assert (seen["verdict"], seen["reason"]) == ("ok", "")


@once
@pytest.mark.parametrize(
    "schema",
    [
        EIGHT.replace("float eps, ", ""),
        EIGHT.replace("Tensor(a!) q", "Tensor q"),
        EIGHT.replace("-> ()", "-> Tensor"),
        NINE.replace("-> Tensor", "-> ()"),
        THIRTEEN.replace("kv_mxfp8", "kv_other"),
        THIRTEEN.replace(", bool is_q_interleaved", ""),
        "() -> ()",
    ],
)
def test_another_schema_is_a_reason(load: Load, schema: str) -> None:
    found = load(schema, lambda *_: None)
    assert isinstance(found, Unavailable)
    assert found.reason.startswith("its schema is none of the 8, 9 and 13 arguments known: dsv4_")


@once
def test_flags_are_given_by_name(load: Load) -> None:
    turned = THIRTEEN.replace(", ".join(FLAGS), ", ".join(FLAGS[::-1]))
    seen: list[tuple[Any, ...]] = []

    def look(*arguments: Any) -> Tensor:
        seen.append(arguments[9:])
        return oracle(arguments[:6], *arguments[7:9])

    baseline = load(turned, look)
    assert isinstance(baseline, Baseline)
    assert probe(baseline, CPU) == ""
    assert seen == [(False, True, False, True)]


@once
def test_a_namespace_that_is_taken(load: Load) -> None:
    assert isinstance(load(EIGHT, in_place), Baseline)
    found = load(EIGHT, in_place)
    assert isinstance(found, Unavailable)
    assert found.reason == f"torch.ops.dsv4_scratch.{OPERATOR} is somebody else's in this process"


@once
def test_a_library_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    name = f"library:{tmp_path / 'a.so'}:dsv4_scratch.op"
    with pytest.raises(
        RequestError, match=r"^against: expected the file of a library, got .*/a\.so"
    ):
        find(name, CPU)
    (tmp_path / "a.so").write_text("text")
    found = find(name, CPU)
    assert isinstance(found, Unavailable)
    assert found.reason.startswith("loading it: OSError")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package vllm that can be imported; `_custom_ops.py` is to be written."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in ("vllm", "vllm._custom_ops"):
        sys.modules.pop(name, None)


@once
@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "OSError", "RuntimeError"])
def test_an_import_that_fails_is_a_reason(vllm: Path, error: str) -> None:
    (vllm / "_custom_ops.py").write_text(f"raise {error}('two plugins\\nmore')\n")
    reason = f"importing vllm._custom_ops: {error}: two plugins"
    assert find("vllm", CPU) == Unavailable("vllm", reason)


@once
def test_an_import_that_fails_otherwise_is_not_caught(vllm: Path) -> None:
    (vllm / "_custom_ops.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        find("vllm", CPU)


@once
def test_an_import_without_the_operator_is_a_reason(vllm: Path) -> None:
    (vllm / "_custom_ops.py").touch()
    (vllm / "_C.abi3.so").write_bytes(b"library")
    found = find("vllm", CPU)
    assert isinstance(found, Unavailable)
    assert found.reason == f"torch.ops._C has no {OPERATOR}"
    assert found.provenance["version"] == "unknown"
    assert [file["file"] for file in found.provenance["files"]] == ["_C.abi3.so"]


def baseline_of(call: Callable[[], object]) -> Baseline:
    return Baseline("theirs", (IN_PLACE,), lambda _: call, {})


@once
def test_a_probe_that_fails_at_the_call() -> None:
    def fail() -> None:
        raise RuntimeError("invalid value\nat some place")

    reason = probe(baseline_of(fail), CPU)
    assert reason == "it cannot be launched: RuntimeError: invalid value"


@once
def test_a_probe_that_fails_at_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    launch = baselines._launch_and_wait

    def launch_later(device: torch.device) -> None:
        if errors:
            raise RuntimeError(errors.pop())
        launch(device)

    monkeypatch.setattr(baselines, "_launch_and_wait", launch_later)
    reason = probe(baseline_of(lambda: errors.append("invalid value")), CPU)
    assert reason == "it cannot be launched: RuntimeError: invalid value"
    with pytest.raises(RuntimeError, match=r"left the device unusable: .*one; then .*two"):
        probe(baseline_of(lambda: errors.extend(["two", "one"])), CPU)


@once
def test_what_a_probe_does_not_expect_is_not_caught() -> None:
    with pytest.raises(ZeroDivisionError):
        probe(baseline_of(lambda: 1 / 0), CPU)


@once
def test_heads_that_it_does_not_write(load: Load) -> None:
    baseline = load(NINE, out_of_place)
    assert isinstance(baseline, Baseline)
    assert baseline.refusal(64) == ""
    assert baseline.refusal(40) == "writes one of (8, 16, 32, 64, 128) heads, not 40"


@once
@pytest.mark.parametrize(
    "name", ["", "VLLM", "library:", "library:a.so", "library:a.so:op", "library::ns.op"]
)
def test_no_name(name: str) -> None:
    with pytest.raises(RequestError, match="against: expected"):
        find(name, CPU)


@once
def test_eager_is_the_composition() -> None:
    found = find("eager", CPU)
    assert found == Unavailable("eager", "it is what ours is on the card cpu")
    with use_card("unknown"):
        baseline = find("eager", CPU)
    assert isinstance(baseline, Baseline)
    assert not baseline.capturable
    assert check(candidate_of(baseline), (9, 3), CPU, 0)["verdict"] == "ok"


@once
def test_portable_needs_a_compiler() -> None:
    assert find("portable", CPU) == Unavailable("portable", "Triton compiles for no CPU")


@once
def test_inputs_are_of_a_seed() -> None:
    one, same, other = (make_inputs(5, 3, CPU, seed=seed) for seed in (1, 1, 2))
    for mine, alike, unlike in zip(one[:6], same[:6], other[:6], strict=True):
        assert torch.equal(mine, alike)
        assert mine is one.k_cache or not torch.equal(mine, unlike)
    assert one.slot_mapping.unique().numel() == 5
    assert 0 <= int(one.slot_mapping.min()) <= int(one.slot_mapping.max()) < 128
    assert one.k_cache.stride(0) == 37440


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("launch", [{}, {"num_warps": 1}], ids=["as shipped", "1 warp"])
@pytest.mark.parametrize("cast", ["compiler", "integer"])
def test_portable_is_right_to_the_byte(device: str, launch: dict[str, int], cast: str) -> None:
    assert importlib.util.find_spec("triton") is not None
    from dsv4_prologue.measure import portable

    case = build_case(19, 3, Variant(out="in place", out_of_range=False), device=device)
    expected = reference.prologue(**case.arguments())
    arguments = case.arguments()
    del arguments["q_out"]
    portable.run(**arguments, fp8_cast=cast, **launch)
    seen = compare(case, case.q, expected, foreign=device != "cpu")
    assert seen.ok, seen.reason
    assert not canary_violations(case)
    if device == "cpu":
        assert (seen.bytes_differing, seen.elements_differing) == (0, 0)
