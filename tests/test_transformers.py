"""The prologue inside DeepSeek-V4 of `transformers`, and the demo that shows it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'dsv4-prologue[demo]'")

import dsv4_prologue
from dsv4_prologue import demo
from dsv4_prologue.integrations.transformers import PAGE_TOKENS, Call, Swap

pytestmark = pytest.mark.once

TEXT = demo.DEFAULT_TEXT.encode()[:140]
TOKENS = torch.tensor(list(TEXT))
PREFILL = 120  # decoding passes 128, where windows close and slide


def ignore(_: str) -> None:
    pass


build_models = functools.cache(demo.build_models)


@pytest.fixture(autouse=True)
def _inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(demo, "build_models", build_models)  # once for all tests
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations: a second thread only waits
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> Any:
    return demo.build_models(torch.device("cpu"))[1]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).float().norm() / want.float().norm())


def test_everything_written_is_within_its_bound() -> None:
    layers, runs = demo.measure(TOKENS, PREFILL)
    assert [layer.kind for layer in layers] == [
        "sliding",
        "compressed sparse",
        "heavily compressed",
        "compressed sparse",
        "heavily compressed",
    ]
    assert {layer.rope for layer in layers} == {"main", "compress"}
    assert all(layer.passed for layer in layers)
    exact, plain, swapped = runs
    assert exact.agreement == 1.0
    assert exact.logit_rms < 1e-4
    assert 0 < plain.logit_rms < 0.2
    assert 0 < swapped.logit_rms < 0.2
    assert swapped.distinct > 10  # not one token over and over


def test_undo_gives_the_model_its_own_attention_back(model: Any) -> None:
    before = model(TOKENS[None]).logits
    with Swap(model, max_tokens=len(TEXT)) as swap:
        assert not torch.equal(model(TOKENS[None]).logits, before)
    assert torch.equal(model(TOKENS[None]).logits, before)
    assert all("forward" not in vars(layer.self_attn) for layer in model.model.layers)
    swap.undo()  # once more changes nothing
    assert torch.equal(model(TOKENS[None]).logits, before)


def test_undo_after_an_error_and_over_somebody_elses_forward(model: Any) -> None:
    attn = model.model.layers[0].self_attn
    attn.forward = theirs = attn.forward
    with pytest.raises(ValueError, match="tokens"), Swap(model, max_tokens=len(TEXT) - 1):
        model(TOKENS[None])
    assert attn.forward is theirs
    del attn.forward


@pytest.mark.parametrize("prefill", [1, 127, 128])
def test_decoding_goes_on_where_the_prefill_ended(model: Any, prefill: int) -> None:
    with Swap(model, max_tokens=len(TEXT)):
        whole = demo.teacher_forced(model, TOKENS, len(TEXT), ignore, "")
        parts = demo.teacher_forced(model, TOKENS[: prefill + 12], prefill, ignore, "")
    # Other matrix shapes round differently, now and then into another expert; a lost or misplaced
    # token would change every logit by about its own size.
    assert relative_error(parts, whole[: prefill + 12]) < 0.15


def test_attention_reads_the_window_from_shuffled_pages(model: Any) -> None:
    calls: list[Call] = []
    with Swap(model, max_tokens=256, seed=1, observe=calls.append) as swap:
        demo.teacher_forced(model, TOKENS, PREFILL, ignore, "")
    assert swap.page_table[0].tolist() != sorted(swap.page_table[0].tolist())
    assert calls[-1].kv_read.shape == (1, model.config.sliding_window, 512)
    token = torch.arange(len(TEXT) - model.config.sliding_window, len(TEXT))
    slots = swap.page_table[0][token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS
    held = dsv4_prologue.gather_dequantize(swap.k_caches[calls[-1].layer_idx], slots)
    assert torch.equal(calls[-1].kv_read[0], held)


def test_a_padded_batch_and_generate(model: Any) -> None:
    short = TOKENS[:40]
    batch = torch.stack((TOKENS[:60], torch.cat((torch.zeros(20, dtype=torch.long), short))))
    mask = torch.ones_like(batch)
    mask[1, :20] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
    with Swap(model, max_tokens=64, batch_size=2):
        got = model(batch, **arguments).logits
        answer = model.generate(batch[:1].repeat(2, 1), max_new_tokens=4, do_sample=False)
    assert relative_error(got, model(batch, **arguments).logits) < 0.15
    assert torch.equal(answer[0], answer[1])
    assert answer.shape == (2, 64)


def test_errors_name_what_was_expected(model: Any) -> None:
    exact = demo.build_models(torch.device("cpu"))[0]
    with pytest.raises(TypeError, match=r"model: expected bfloat16, got torch\.float32"):
        Swap(exact, max_tokens=8)
    with pytest.raises(TypeError, match="model: expected DeepSeek-V4, got Linear"):
        Swap(torch.nn.Linear(1, 1), max_tokens=8)
    truncated = copy.deepcopy(exact).to(torch.bfloat16)
    with pytest.raises(TypeError, match="main_inv_freq: expected float32"):
        Swap(truncated, max_tokens=8)
    with Swap(model, max_tokens=8) as swap:
        with pytest.raises(ValueError, match="tokens: expected at most 8 a sequence, got 9"):
            model(TOKENS[None, :9])
        with pytest.raises(ValueError, match="batch: expected 1 sequences, got 2"):
            model(TOKENS[None, :4].repeat(2, 1))
        first = demo.new_cache(model)
        model(TOKENS[None, :4], **first)
        model(TOKENS[None, :4], **demo.new_cache(model))
        with pytest.raises(RuntimeError, match="cache: expected the one the pages hold"):
            model(TOKENS[None, 4:5], **first)
        assert len(swap.k_caches) == model.config.num_hidden_layers


Prologue = Callable[..., Tensor]


def turned_backwards(prologue: Prologue, *arguments: Any, **options: Any) -> Tensor:
    *inputs, table = arguments
    return prologue(*inputs, torch.cat((table[:, :32], -table[:, 32:]), dim=1), **options)


def one_position_late(prologue: Prologue, *arguments: Any, **options: Any) -> Tensor:
    *inputs, positions, table = arguments
    return prologue(*inputs, (positions - 1).clamp(min=0), table, **options)


def kv_not_rotated(prologue: Prologue, q: Tensor, kv: Tensor, *rest: Any, **options: Any) -> Tensor:
    out = prologue(q, kv, *rest, **options)
    k_cache, slots = rest[:2]
    for row, slot in zip(kv, slots.tolist(), strict=True):
        start = slot % PAGE_TOKENS * 576
        k_cache[slot // PAGE_TOKENS, start + 448 : start + 576] = row[448:].view(torch.uint8)
    return out


def q_truncated(prologue: Prologue, q: Tensor, *rest: Any, **options: Any) -> Tensor:
    out = prologue(q, *rest, **options)
    x = q.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + options["eps"])
    out[..., :448] = (y.view(torch.int32) & -65536).view(torch.float32)[..., :448]
    return out


def codes_truncated(
    prologue: Prologue, q: Tensor, kv: Tensor, *rest: Any, **options: Any
) -> Tensor:
    out = prologue(q, kv, *rest, **options)
    k_cache, slots = rest[:2]
    for row, slot in zip(kv, slots.tolist(), strict=True):
        page, start = k_cache[slot // PAGE_TOKENS], slot % PAGE_TOKENS * 576
        codes = page[start : start + 448]
        held = dsv4_prologue.gather_dequantize(k_cache, torch.tensor([slot]))[0, :448]
        codes -= (held.abs() > row[:448].abs()).to(torch.uint8)  # towards zero
    return out


def scale_too_large(
    prologue: Prologue, q: Tensor, kv: Tensor, *rest: Any, **options: Any
) -> Tensor:
    # What a scale from a rounded-up logarithm would leave: twice the scale, half the code.
    out = prologue(q, kv, *rest, **options)
    k_cache, slots = rest[:2]
    slot = int(slots[0])
    page, start = k_cache[slot // PAGE_TOKENS], slot % PAGE_TOKENS * 576
    page[PAGE_TOKENS * 576 + slot % PAGE_TOKENS * 8] += 1
    values = page[start : start + 64].view(torch.float8_e4m3fn).float() / 2
    page[start : start + 64] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return out


def writes_too_far(prologue: Prologue, *arguments: Any, **options: Any) -> Tensor:
    arguments[2][-1, -1] = 0
    return prologue(*arguments, **options)


def pad_byte_wrong(prologue: Prologue, *arguments: Any, **options: Any) -> Tensor:
    out = prologue(*arguments, **options)
    slot = int(arguments[3][0])
    arguments[2][slot // PAGE_TOKENS, PAGE_TOKENS * 576 + slot % PAGE_TOKENS * 8 + 7] = 1
    return out


def not_a_number(prologue: Prologue, *arguments: Any, **options: Any) -> Tensor:
    out = prologue(*arguments, **options)
    out[0, 0, 0] = torch.nan
    return out


@pytest.mark.parametrize(
    ("fault", "seen_in"),
    [
        (turned_backwards, {"q_max_ulp", "rope_wrong"}),
        (one_position_late, {"q_max_ulp", "rope_wrong"}),
        (kv_not_rotated, {"rope_wrong"}),
        (q_truncated, {"q_bias"}),
        (codes_truncated, {"nope_error"}),
        (scale_too_large, {"scale_wrong"}),
        (writes_too_far, {"stray_bytes"}),
        (pad_byte_wrong, {"stray_bytes"}),
        (not_a_number, {"q_max_ulp"}),
    ],
)
def test_the_demo_exits_1_on(
    fault: Callable[..., Tensor],
    seen_in: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = dsv4_prologue.prologue

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        return fault(right, *arguments, **options)

    monkeypatch.setattr(dsv4_prologue, "prologue", wrong)
    assert demo.run(text="a few bytes", device="cpu", as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False
    layer = report["layers"][0]
    assert layer["passed"] is False
    limits = {"q_max_ulp": demo.Q_MAX_ULP, "q_bias": demo.Q_MAX_BIAS, "nope_error": 1}
    counts = dict.fromkeys(("scale_wrong", "rope_wrong", "read_wrong", "stray_bytes"), 0)
    beyond = {
        name
        for name, limit in {**limits, **counts}.items()
        if layer[name] is None or abs(layer[name]) > limit
    }
    assert seen_in <= beyond


def test_the_demo_exits_1_on_a_misread_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = dsv4_prologue.gather_dequantize
    monkeypatch.setattr(
        dsv4_prologue, "gather_dequantize", lambda *a, **k: right(*a, **k).roll(1, dims=1)
    )
    assert demo.run(text="a few bytes", device="cpu") == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_demo_exits_0_and_says_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(text="a few bytes", device="cpu", as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["num_tokens"] == 11
    assert {plan["card"] for plan in report["plans"].values()} == {"cpu"}
    assert demo.run(text="a few bytes", device="cpu") == 0
    out = capsys.readouterr().out
    assert "ok: Q and the cache are within their limits" in out
    assert "FAIL" not in out


def test_a_text_too_short_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(text="a", device="cpu") == 2
    assert "expected at least 2 bytes, got 1" in capsys.readouterr().err


def test_the_spacing_of_e4m3_is_that_of_its_values() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8)  # 0 to 448
    values = codes.view(torch.float8_e4m3fn).float()
    between = (values[1:] + values[:-1]) / 2
    assert torch.equal(demo.e4m3_spacing(between), values.diff())
    assert torch.equal(demo.e4m3_spacing(-values[:-1]), values.diff())  # towards larger sizes


@pytest.mark.parametrize(
    ("got", "truth", "apart"),
    [(1.0, 1.0, 0), (1.0, 1.001, 0), (1.0, 1.0078125, 1), (-0.0, 0.0, 0), (1e-40, -1e-40, 2)],
)
def test_ulps_are_counted_in_bf16_values(got: float, truth: float, apart: int) -> None:
    a = torch.full((1, 1, 512), got).bfloat16()
    b = torch.full((1, 1, 512), truth)
    assert int(demo.ulps_apart(a, b)[0, 0, 0]) == apart


def test_rope_dims_may_cancel_and_not_a_number_never_passes() -> None:
    truth = torch.zeros(1, 1, 512)
    truth[..., 448] = 1.0
    got = truth.bfloat16()
    got[..., 449] = 2.0**-21  # a sliver beside a pair of norm 1
    got[..., 3] = torch.nan
    apart = demo.ulps_apart(got, truth)[0, 0]
    assert apart[449] == 0
    assert apart[3] == 0xFFFF
