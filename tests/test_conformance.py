"""The check is checked: with operators that are right, and with operators that should fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_prologue import reference, use_card
from dsv4_prologue.contract import CORE_NUM_HEADS, CORE_NUM_TOKENS
from dsv4_prologue.measure.record import kernel_hash
from dsv4_prologue.verify import conformance
from dsv4_prologue.verify.conformance import (
    SHAPES,
    VARIANTS,
    footprint_bytes,
    free_bytes,
    parse_shapes,
    run_check,
    variants_for,
)
from dsv4_prologue.verify.inputs import Variant


def honest(**arguments: Any) -> Tensor | None:
    """An operator made of the oracle."""
    q, cache = reference.prologue(**arguments)
    if cache is not None:
        arguments["k_cache"].copy_(cache)
    q_out: Tensor | None = arguments.get("q_out")
    if q is None or q_out is None:
        return q
    return q_out.copy_(q)


def truncates(**a: Any) -> Tensor | None:
    """Q rounded toward zero: half of it a step too small."""
    q = honest(**a)
    assert q is not None
    rounded_up = (torch.arange(512) % 2 == 0) & (q != 0) & q.isfinite()
    q.view(torch.int16)[rounded_up] -= 1
    return q


def forgets_the_last_token(**a: Any) -> Tensor | None:
    short = {"q": a["q"][:-1], "kv": a["kv"][:-1], "position_ids": a["position_ids"][:-1]}
    short["slot_mapping"] = a["slot_mapping"][:-1]
    return torch.cat((honest(**a | short), torch.zeros_like(a["q"][-1:])))  # type: ignore[arg-type]


def takes_negative_slots_for_slots(**a: Any) -> Tensor | None:
    slots = a["slot_mapping"].clone()
    capacity = a["k_cache"].shape[0] * 64
    slots[(slots < 0) & (slots >= -capacity)] += capacity
    return honest(**a | {"slot_mapping": slots})


def writes_page_padding(**a: Any) -> Tensor | None:
    cache = a["k_cache"]
    cache.as_strided((1,), (1,), cache.storage_offset() + 64 * 584).fill_(0)
    return honest(**a)


def writes_no_pad_byte(**a: Any) -> Tensor | None:
    pad = a["k_cache"].clone()
    q = honest(**a)
    columns = 64 * 576 + 7 + 8 * torch.arange(64)
    a["k_cache"][:, columns] = pad[:, columns]
    return q


def does_not_rotate_kv(**a: Any) -> Tensor | None:
    q = honest(**a | {"kv": None, "k_cache": None, "slot_mapping": None})
    still = torch.zeros_like(a["position_ids"])
    honest(**a | {"q": None, "position_ids": still})
    return q


def normalises_its_input(**a: Any) -> Tensor | None:
    q = honest(**a)
    a["q"].zero_()
    return q


def makes_heads_of_ulp_noise(**a: Any) -> Tensor | None:
    q = honest(**a)
    if q is not None:
        q[..., :448].view(torch.int16)[..., ::7] += 2
    return q


FAULTS: list[tuple[Callable[..., Tensor | None], str]] = [
    (truncates, "biased by"),
    (forgets_the_last_token, "beyond 1 ULP"),
    (takes_negative_slots_for_slots, "k_cache: .* bytes outside the call's own changed"),
    (writes_page_padding, "k_cache: 1 bytes outside .* at byte 37376 of row 0 of"),
    (writes_no_pad_byte, "bytes differ; first at .*, pad byte: expected 0x00"),
    (does_not_rotate_kv, "bytes differ; first at .*, RoPE dim"),
    (normalises_its_input, "q: a read-only input changed"),
    (makes_heads_of_ulp_noise, "beyond 1 ULP, up to 2"),
]


@pytest.mark.once
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_faulty_operator_differs(fault: Callable[..., Tensor | None], reason: str) -> None:
    (record,) = run_check("cpu", "33x3", variants=["new tensor"], operator=fault)
    assert record["verdict"] == "differs"
    assert re.search(reason, record["reason"]), record["reason"]


@pytest.mark.once
def test_an_honest_operator_is_ok_in_every_form() -> None:
    for foreign in (False, True):
        records = run_check(
            "cpu", "1x1,17x3", variants=list(VARIANTS), operator=honest, foreign=foreign
        )
        assert {record["verdict"] for record in records} == {"ok"}
        assert len(records) == 2 * len(VARIANTS)


@pytest.mark.once
def test_the_fused_name_returns_nothing_and_a_foreign_one_may() -> None:
    def quiet(**a: Any) -> None:
        honest(**a)

    (record,) = run_check("cpu", "4x2", variants=["in place"], operator=quiet)
    assert record["reason"] == "the call did not return its q_out"
    (record,) = run_check("cpu", "4x2", variants=["in place"], operator=quiet, foreign=True)
    assert record["verdict"] == "ok"


@pytest.mark.once
def test_a_foreign_operator_gets_nothing_out_of_range() -> None:
    def look(**a: Any) -> Tensor | None:
        assert a["slot_mapping"].max() < a["k_cache"].shape[0] * 64
        assert a["position_ids"].min() >= 0
        return honest(**a)

    (record,) = run_check("cpu", "99x1", variants=["new tensor"], operator=look, foreign=True)
    assert record["verdict"] == "ok"


def test_the_operator_on_the_device_at_hand(device: str) -> None:
    seen: list[dict[str, Any]] = []
    records = run_check(device, "9x2", on_result=seen.append)
    assert records == seen
    assert [r for r in records if r["verdict"] != "ok"] == []
    assert {r["variant"] for r in records} == set(VARIANTS)
    assert all(r["time_us"] > 0 and r["kernel_hash"] == kernel_hash(r["card"]) for r in records)


@pytest.mark.once
def test_a_record() -> None:
    with use_card("cpu"):
        (record,) = run_check("cpu", "9x2", 5, variants=["in place"])
    assert record.pop("time_us") > 0
    assert record.pop("footprint_bytes") > 0
    written = record.pop("bytes_written")
    assert written > 0
    assert written % 584 == 0
    assert record == {
        "record": "check",
        "num_tokens": 9,
        "num_heads": 2,
        "variant": "in place",
        "seed": 5,
        "card": "cpu",
        "forced": True,
        "kernel": "torch",
        "launch": record["launch"],
        "kernel_hash": kernel_hash("cpu"),
        "verdict": "ok",
        "reason": "",
        "bytes_differing": 0,
        "elements_differing": 0,
        "max_ulp": 0,
        "bias_ulp": 0.0,
    }


def must_not_run(**_: Any) -> None:
    raise AssertionError


@pytest.mark.once
def test_what_does_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "free_bytes", lambda _: 10**9)
    records = run_check("cpu", "131072x128", operator=must_not_run, max_units=2**40)
    assert [r["variant"] for r in records] == ["in place", "new tensor"]
    for record in records:
        assert record["verdict"] == "not verified"
        assert record["reason"].endswith("GB with the oracle, 1.0 GB are free")
        assert record["footprint_bytes"] > 60e9
        assert "time_us" not in record


@pytest.mark.once
def test_what_takes_too_long_is_not_tried() -> None:
    records = run_check("cpu", "131072x64", operator=must_not_run)
    records += run_check("cpu", "9x9", operator=must_not_run, max_units=89, variants=["q only"])
    assert {r["verdict"] for r in records} == {"not verified"}
    assert records[-1]["reason"].startswith("90 units (token x role) are more than the 89 ")


@pytest.mark.once
def test_what_the_operator_raises_is_not_caught() -> None:
    with pytest.raises(AssertionError):
        run_check("cpu", "1x1", operator=must_not_run)


@pytest.mark.once
def test_shapes() -> None:
    core = parse_shapes("core")
    assert set(core) == {(n, h) for n in CORE_NUM_TOKENS for h in CORE_NUM_HEADS}
    assert core[0] == (1, 64)
    assert core[-1] == (131072, 128)
    everything = set(parse_shapes("all"))
    assert everything > set(core)
    assert everything >= {(n, h) for n in (511, 512, 777, 1000, 4096) for h in (1, 8, 16, 32, 40)}
    assert len(everything) == len(set(SHAPES["core"])) + len(set(SHAPES["extra"]))
    assert parse_shapes("17x64, 0x8,17x64") == ((0, 8), (17, 64))
    assert set(parse_shapes("core, 3x5")) == {*core, (3, 5)}


@pytest.mark.once
@pytest.mark.parametrize("shapes", ["", "17", "17x", "17x64x2", "17x0", "-1x4", "most", "17x64,"])
def test_no_shapes(shapes: str) -> None:
    with pytest.raises(ValueError, match="shapes: expected quick, core, extra, all or NxH, joined"):
        parse_shapes(shapes)


@pytest.mark.once
def test_no_variant() -> None:
    with pytest.raises(ValueError, match=r"variants: expected .*, got \['sideways'\]"):
        run_check("cpu", "1x1", variants=["sideways"])


@pytest.mark.once
def test_every_form_is_checked_where_it_is_cheap() -> None:
    assert variants_for(1, 1) == variants_for(64, 128) == tuple(VARIANTS)
    assert len(variants_for(2048, 128)) == 6
    assert len(variants_for(131072, 128)) == 2
    for units in (1, 2**14 + 1, 2**30):
        assert set(variants_for(units, 1)) <= set(VARIANTS)


@pytest.mark.once
def test_footprint() -> None:
    """Of 131072 x 128 in place: q, the oracle's f32 and its output, and a few GB for KV."""
    element = 131072 * 128 * 512
    in_place = footprint_bytes(131072, 128, Variant(out="in place"))
    assert 8 * element < in_place < 8.7 * element
    assert footprint_bytes(131072, 128, Variant()) < 1.05 * in_place
    assert footprint_bytes(131072, 128, Variant(out="buffer")) > 10 * element
    assert footprint_bytes(131072, 128, Variant(q=False)) == 131072 * 32_000
    assert footprint_bytes(1, 1, Variant()) < 1e6
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 1e8
