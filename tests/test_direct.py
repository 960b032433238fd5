"""A call is repeated unchecked only if it is, to its last stride, one that was checked before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import direct

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(direct._Guard is None, reason="this torch's guard is not known to us"),
]

OPTIONS = (1e-6, (4, None), True)
ALIASING = (5 * 3 * 1024, 5 * 3 * 1024, 5 * 1024, True)
OUT = ((5, 3, 512), (1536, 512, 1))
HEAD, COUNTS, REST = ("function", None), (1, 2), (40, 8)
STREAM, PROGRAMS = 1234, 7
Started = list[tuple[int, ...]]


def good() -> dict[str, torch.Tensor]:
    return {
        "q": torch.zeros(5, 3, 512, dtype=torch.bfloat16),
        "kv": torch.zeros(5, 512, dtype=torch.bfloat16),
        "k_cache": torch.zeros(4, 2400, dtype=torch.uint8)[:, :2336],
        "slot_mapping": torch.zeros(5, dtype=torch.int64),
        "position_ids": torch.zeros(5, dtype=torch.int64),
        "cos_sin_cache": torch.zeros(8, 64),
        "q_out": torch.zeros(5, 3, 512, dtype=torch.bfloat16),
    }


def repeat(call: dict[str, Any], options: tuple[Any, ...] = OPTIONS) -> bool:
    *inputs, q_out = call.values()
    return direct.repeat(tuple(inputs), q_out, options) is not None


def keep(
    tensors: list[torch.Tensor],
    form: int = direct.IN_PLACE,
    options: tuple[Any, ...] = OPTIONS,
    key: tuple[str, ...] = ("key",),
) -> None:
    direct.remember_call(tuple(tensors), form, options, ALIASING, OUT, key, PROGRAMS, COUNTS)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """The pointers of what was launched, after a call of each form was kept."""
    seen: Started = []

    def run(*given: Any) -> None:
        assert given[:6] == (PROGRAMS, 1, 1, STREAM, *HEAD)
        assert given[-4:] == (*COUNTS, *REST)
        seen.append(given[6:-4])

    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    kernel = direct.Kernel(0, run, HEAD, REST, hooks, None, [], None, [])
    monkeypatch.setattr(direct, "_current_device", lambda: 0)
    monkeypatch.setattr(direct, "_current_stream", lambda _: STREAM)
    monkeypatch.setattr(direct, "_empty", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(direct, "_calls", [])
    monkeypatch.setattr(direct, "_kernels", {("key",): kernel})
    *inputs, q_out = good().values()
    keep(inputs, direct.IN_PLACE)
    keep([*inputs, q_out], direct.BUFFER)
    keep(inputs, direct.NEW)
    return seen


def test_the_same_call_on_other_memory_is_repeated(started: Started) -> None:
    call = good()
    assert repeat(call)
    at = {name: tensor.data_ptr() for name, tensor in call.items()}
    (pointers,) = started
    assert pointers == (
        at["q"],
        at["q_out"],
        at["kv"],
        at["k_cache"],
        at["k_cache"],
        at["slot_mapping"],
        at["position_ids"],
        at["cos_sin_cache"],
        0,
    )


def test_in_place_is_repeated_in_place(started: Started) -> None:
    call = good()
    call["q_out"] = call["q"]
    assert repeat(call)
    assert started[0][0] == started[0][1] == call["q"].data_ptr()


def test_a_new_output_is_made(started: Started) -> None:
    *inputs, _ = good().values()
    made = direct.repeat(tuple(inputs), None, OPTIONS)
    assert made is not None
    assert (list(made.shape), made.dtype) == ([5, 3, 512], torch.bfloat16)
    assert made.stride() == (1536, 512, 1)
    assert started[0][1] == made.data_ptr()


def one_row_apart() -> tuple[torch.Tensor, torch.Tensor]:
    """A q and a q_out of the right strides that share all rows but one."""
    flat = torch.zeros(16, 512, dtype=torch.bfloat16)
    return flat[:-1].view(5, 3, 512), flat[1:].view(5, 3, 512)


def kv_in_a_head() -> tuple[torch.Tensor, torch.Tensor]:
    """A kv and a q_out of the right strides that share a row."""
    flat = torch.zeros(20, 512, dtype=torch.bfloat16)
    return flat[14:19], flat[:15].view(5, 3, 512)


Change = Callable[[dict[str, torch.Tensor]], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "q dtype": lambda c: {"q": c["q"].half()},
    "q tokens": lambda c: {"q": c["q"][:4]},
    "q heads": lambda c: {"q": c["q"][:, :2]},
    "q strides": lambda c: {"q": c["q"].transpose(0, 1).contiguous().transpose(0, 1)},
    "q grad": lambda c: {"q": c["q"].clone().requires_grad_()},
    "q a list": lambda _: {"q": [1.0]},
    "q a subclass": lambda c: {"q": torch.nn.Parameter(c["q"], requires_grad=False)},
    "kv rows": lambda c: {"kv": c["kv"][:4]},
    "kv rank": lambda c: {"kv": c["kv"][None]},
    "kv device": lambda c: {"kv": c["kv"].to("meta")},
    "cache pages": lambda c: {"k_cache": c["k_cache"][:3]},
    "cache width": lambda c: {"k_cache": c["k_cache"][:, :2300]},
    "cache dtype": lambda c: {"k_cache": c["k_cache"].view(torch.int8)},
    "cache stride": lambda c: {"k_cache": c["k_cache"].contiguous()},
    "slots dtype": lambda c: {"slot_mapping": c["slot_mapping"].int()},
    "slots fewer": lambda c: {"slot_mapping": c["slot_mapping"][:4]},
    "slots missing": lambda _: {"slot_mapping": None},
    "positions dtype": lambda c: {"position_ids": c["position_ids"].int()},
    "positions are the slots": lambda c: {"position_ids": c["slot_mapping"]},
    "table rows": lambda c: {"cos_sin_cache": c["cos_sin_cache"][:7]},
    "table dtype": lambda c: {"cos_sin_cache": c["cos_sin_cache"].bfloat16()},
    "out heads": lambda c: {"q_out": torch.cat((c["q_out"], c["q_out"]), dim=1)},
    "out dtype": lambda c: {"q_out": c["q_out"].float()},
    "out overlaps q": lambda _: dict(zip(("q", "q_out"), one_row_apart(), strict=True)),
    "out overlaps kv": lambda _: dict(zip(("kv", "q_out"), kv_in_a_head(), strict=True)),
    "unaligned": lambda _: {"kv": torch.zeros(5 * 512 + 1).bfloat16()[1:].view(5, 512)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_call_is_not(started: Started, name: str) -> None:
    call: dict[str, Any] = good()
    call.update(CHANGES[name](call))
    assert not repeat(call)
    assert not started


@pytest.mark.parametrize("form", ["in place", "buffer", "new tensor"])
def test_a_call_under_a_transform_is_not(started: Started, form: str) -> None:
    call: dict[str, Any] = good()
    call["q_out"] = {"in place": call["q"], "buffer": call["q_out"], "new tensor": None}[form]
    seen: list[bool] = []

    def within(x: torch.Tensor) -> torch.Tensor:
        seen.append(repeat(call))
        return x

    torch.func.vmap(within)(torch.zeros(2))
    assert (seen, started) == ([False], [])
    assert repeat(call)


CANNOT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "another device": lambda patch: patch.setattr(direct, "_current_device", lambda: 1),
    "a hook": lambda patch: patch.setattr(kept_kernel().runtime, "launch_enter_hook", print),
    "a hook behind": lambda patch: patch.setattr(kept_kernel().runtime, "launch_exit_hook", print),
    "hooked in": lambda _: kept_kernel().entered.append(print),
    "hooked in behind": lambda _: kept_kernel().left.append(print),
}


def kept_kernel() -> direct.Kernel:
    return direct._kernels[("key",)]


@pytest.mark.parametrize("name", CANNOT)
def test_where_triton_has_to_launch_nothing_is_repeated(
    started: Started, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    CANNOT[name](monkeypatch)
    assert not repeat(good())
    assert not direct.launch(("key",), PROGRAMS, (0,) * 9, COUNTS)
    assert not started


def test_the_parts_of_a_call_are_those_it_is_made_of(started: Started) -> None:
    *inputs, _ = good().values()
    parts = direct.parts(tuple(inputs))
    seen = [part() for part in parts.values()]
    launched, same, addresses, ready, repeated = seen
    assert launched is None
    assert len(started) == 2
    assert started[0] == started[1]
    assert same is True
    assert addresses == [tensor.data_ptr() for tensor in inputs]
    assert ready == STREAM
    assert repeated is inputs[0]
    inputs[1] = inputs[1][:4]
    assert direct.parts(tuple(inputs)) == {}


@pytest.mark.parametrize(
    "options", [(1e-5, (4, None), True), (1e-6, (5, None), True), (1e-6, (4, 3), True), ()]
)
def test_other_options_are_not(started: Started, options: tuple[Any, ...]) -> None:
    assert not repeat(good(), options)
    assert not started


def test_a_call_with_a_gradient_is_not_kept(started: Started) -> None:
    kept = len(direct._calls)
    *inputs, _ = good().values()
    inputs[0].requires_grad_()
    keep(inputs)
    assert len(direct._calls) == kept
    assert not started


def test_a_call_is_kept_once(started: Started) -> None:
    """However often its tensors lie where it cannot be repeated."""
    kept = len(direct._calls)
    for _ in range(5):
        *inputs, _ = good().values()
        keep(inputs)
    assert len(direct._calls) == kept
    assert not started


def test_a_call_whose_kernel_is_not_known_is_not_kept(started: Started) -> None:
    kept = len(direct._calls)
    *inputs, _ = good().values()
    keep(inputs, key=("other",))
    assert len(direct._calls) == kept
    assert not started


def test_both_functions_name_a_usual_call_alike(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(direct, "repeat", lambda *call: asked.append(call[2]))
    call = {name: tensor.to(device) for name, tensor in good().items() if name != "q_out"}
    call |= {"slot_mapping": call["slot_mapping"] - 1}
    dsv4_prologue.prologue(**call, q_out=call["q"], cache_block_size=4)
    dsv4_prologue.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*call.values(), 1e-6, 4)
    assert len(set(asked)) == 1


@pytest.mark.parametrize(
    "option",
    [
        {"eps": 0},
        {"cache_block_size": 4.0},
        {"num_heads_out": 3.0},
        {"q_norm": 1},
        {"q_rope": 1},
        {"check_bounds": 0},
        {"kv_norm_weight": True},
    ],
    ids=lambda option: next(iter(option)),
)
def test_a_call_whose_options_only_compare_equal_is_checked(
    device: str, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any]
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(direct, "repeat", lambda *call: asked.append(call))
    call: dict[str, Any] = {name: tensor.to(device) for name, tensor in good().items()}
    call |= {"slot_mapping": call["slot_mapping"] - 1, "cache_block_size": 4}
    if "kv_norm_weight" in option:
        option = {"kv_norm_weight": torch.ones(512, device=device)}
    with contextlib.suppress(TypeError):
        dsv4_prologue.prologue(**call | option)
    assert not asked
    dsv4_prologue.prologue(**call)
    assert len(asked) == 1


def test_few_calls_are_kept(started: Started) -> None:
    for n in range(40):
        *inputs, _ = good().values()
        keep(inputs, options=(n,))
    assert len(direct._calls) == direct._MAX_CALLS
    assert not started


def test_threads_keep_and_repeat_calls_side_by_side(started: Started) -> None:
    """Each launch has its own call's pointers, while other calls are being kept."""
    calls = [good() for _ in range(64)]
    free = direct._MAX_CALLS - len(direct._calls)

    def keep_another(number: int) -> bool:
        *inputs, _ = good().values()
        keep(inputs, options=(number,))
        return True

    with ThreadPoolExecutor(8) as pool:
        keeping = [pool.submit(keep_another, number) for number in range(free)]
        repeating = [pool.submit(repeat, call) for call in calls]
        assert all(done.result() for done in (*keeping, *repeating))
    want = {(call["q"].data_ptr(), call["q_out"].data_ptr()) for call in calls}
    assert len(want) == len(started) == len(calls)
    assert {(q, q_out) for q, q_out, *_ in started} == want
    assert len(direct._calls) == direct._MAX_CALLS
