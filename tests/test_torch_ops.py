"""torch.ops.dsv4_prologue: schemas, fakes, functionalisation, torch.compile."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4_prologue
from dsv4_prologue import direct, reference
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Variant, build_case

ops: Any = torch.ops.dsv4_prologue
SMALL = Variant(cache_block_size=4, num_pages=4, out_of_range=False, max_positions=64)


def tensors(device: str, **changes: Any) -> dict[str, Any]:
    from dataclasses import replace

    return build_case(3, 2, replace(SMALL, **changes), device=device).arguments()


INPUTS = ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache")


def split(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(arguments.pop(name) for name in INPUTS), arguments


OPCHECK = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "changes",
    [{}, {"pad_heads": 2}, {"kv_norm_weight": torch.bfloat16}, {"index_dtype": torch.int32}],
)
def test_opcheck_functional(device: str, changes: dict[str, Any]) -> None:
    inputs, options = split(tensors(device, **changes))
    torch.library.opcheck(ops.prologue.default, inputs, options, test_utils=OPCHECK)


def test_opcheck_q_only(device: str) -> None:
    inputs, options = split(tensors(device, kv=False))
    torch.library.opcheck(ops.prologue.default, inputs, options, test_utils=OPCHECK)


def test_opcheck_in_place(device: str) -> None:
    inputs, options = split(tensors(device))
    torch.library.opcheck(ops.prologue_.default, inputs, options, test_utils=OPCHECK)


def test_opcheck_out(device: str) -> None:
    inputs, options = split(tensors(device, out="buffer", pad_heads=1))
    torch.library.opcheck(ops.prologue_out.default, inputs, options, test_utils=OPCHECK)


def test_opcheck_kv_only(device: str) -> None:
    inputs, options = split(tensors(device, q=False))
    torch.library.opcheck(
        ops.prologue_out.default, inputs, {**options, "q_out": None}, test_utils=OPCHECK
    )


def test_opcheck_field_name(device: str) -> None:
    inputs, _ = split(tensors(device))
    op = ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.default
    torch.library.opcheck(op, (*inputs, 1e-6, 4), test_utils=OPCHECK)


def test_opcheck_gather(device: str) -> None:
    cache = torch.zeros(4, 4, 584, dtype=torch.uint8, device=device)  # no NaN: opcheck compares
    inputs = (cache, torch.tensor([[0, 1], [5, 15]], device=device))
    torch.library.opcheck(
        ops.gather_dequantize.default, inputs, {"cache_block_size": 4}, test_utils=OPCHECK
    )
    out = torch.zeros(2, 2, 512, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(
        ops.gather_dequantize_out.default,
        inputs,
        {"cache_block_size": 4, "out": out},
        test_utils=OPCHECK,
    )


def test_mutating_ops_return_nothing() -> None:
    for name in dir(ops):
        op = getattr(ops, name)
        if name.startswith("_") or not hasattr(op, "default"):
            continue
        schema = op.default._schema
        mutates = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        if mutates - {"k_cache"} or name.endswith(("_out", "_insert")):
            assert not schema.returns, name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("form", ["new", "buffer", "in place", "in place padded", "kv only"])
def test_compile_traces_whole_and_gives_the_same_bytes(device: str, form: str) -> None:
    torch._dynamo.reset()

    def call(arguments: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor]:
        arguments = dict(arguments)
        if form == "in place":
            arguments["q_out"] = arguments["q"] = arguments["q"] * 2
        elif form == "in place padded":
            whole = arguments.pop("whole") * 2
            arguments |= {"q": whole[:, :2], "q_out": whole}
        elif form == "kv only":
            arguments["q"] = None
        q_out = dsv4_prologue.prologue(**arguments)
        rows = dsv4_prologue.gather_dequantize(
            arguments["k_cache"], arguments["slot_mapping"], cache_block_size=4
        )
        return q_out, rows + 1

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        arguments = tensors(device, out="buffer" if form == "buffer" else "new")
        if form == "in place padded":
            arguments["whole"] = torch.nn.functional.pad(arguments["q"], (0, 0, 0, 3))
        with torch.no_grad():
            q_out, rows = function(arguments)
        results.append((q_out, rows, arguments["k_cache"]))
    (q_a, rows_a, cache_a), (q_b, rows_b, cache_b) = results
    assert torch.equal(bits(cache_a), bits(cache_b))
    assert torch.equal(bits(rows_a), bits(rows_b))
    if form == "kv only":
        assert q_a is None
        assert q_b is None
    else:
        assert torch.equal(bits(q_a), bits(q_b))


def test_compile_does_not_recompile_when_n_changes(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def call(
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
    ) -> torch.Tensor | None:
        return dsv4_prologue.prologue(q, kv, cache, slots, positions, table, cache_block_size=4)

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for n in (3, 5, 7):
        a = build_case(n, 2, SMALL, device=device).arguments()
        compiled(*(a[name] for name in INPUTS))
    assert counter.frame_count == 1


def test_a_compiled_call_refuses_bad_input_when_traced(device: str) -> None:
    torch._dynamo.reset()
    arguments = tensors(device)
    arguments["kv"] = arguments["kv"][:2]
    compiled = torch.compile(dsv4_prologue.prologue, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"kv: expected shape \[3, 512\], got \[2, 512\]"):
        compiled(**arguments)


def test_ops_check_bounds_before_anything_is_written(device: str) -> None:
    inputs, options = split(tensors(device))
    inputs[3][0] = 16
    before = inputs[2].clone()
    with pytest.raises(IndexError, match="slot_mapping: expected slots below 16, got 16"):
        ops.prologue(*inputs, check_bounds=True, **options)
    assert torch.equal(inputs[2], before)


def test_fake_tensors_go_through_the_op(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = tensors(device, pad_heads=3)
    with FakeTensorMode() as mode:
        fake = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
            for k, v in arguments.items()
        }
        q_out = dsv4_prologue.prologue(**fake)
        assert q_out is not None
        assert list(q_out.shape) == [3, 5, 512]


def test_ops_equal_the_functions(device: str) -> None:
    """Bit for bit, and each within the contract; under a mode the function is the operator, too."""
    case = build_case(3, 2, SMALL, device=device)
    seen = []
    for call in (dsv4_prologue.prologue, ops.prologue):
        arguments = case.arguments() | {"k_cache": case.k_cache.clone()}
        inputs, options = split(arguments)
        q_out = call(*inputs, **options)
        seen.append((bits(q_out), bits(inputs[2])))
    want = reference.prologue(**case.arguments())
    result = compare(case, dsv4_prologue.prologue(**case.arguments()), want)
    assert result.ok, result.reason
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


class Watch(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["new", "buffer", "in place", "drop-in", "reader"])
def test_a_dispatch_mode_sees_one_operator(device: str, form: str) -> None:
    arguments = tensors(device, out="buffer" if form == "buffer" else "new")
    inputs, options = split(dict(arguments))
    with Watch() as watch:
        if form == "drop-in":
            dsv4_prologue.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*inputs, 1e-6, 4)
        elif form == "reader":
            dsv4_prologue.gather_dequantize(inputs[2], inputs[3], cache_block_size=4)
        else:
            dsv4_prologue.prologue(
                *inputs, **options, **({"q_out": inputs[0]} if form == "in place" else {})
            )
    names = {
        "new": "prologue",
        "buffer": "prologue_out",
        "in place": "prologue_",
        "drop-in": "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
        "reader": "gather_dequantize",
    }
    assert watch.seen[0] == f"dsv4_prologue.{names[form]}.default"
    assert not [name for name in watch.seen[1:] if name.startswith("dsv4_prologue.")]


def test_make_fx_traces_one_operator(device: str) -> None:
    inputs, options = split(tensors(device))
    traced = make_fx(lambda *given: dsv4_prologue.prologue(*given, **options))(*inputs)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [ops.prologue.default]


@pytest.mark.parametrize("drop_in", [True, False], ids=["drop-in", "prologue"])
def test_no_call_is_repeated_under_a_mode(
    device: str, monkeypatch: pytest.MonkeyPatch, drop_in: bool
) -> None:
    """Not even under a mode that the guard of `direct` does not see, as make_fx's."""
    modes: list[int] = []
    repeat = direct.repeat

    def ask(*call: Any) -> Any:
        modes.append(torch._C._len_torch_dispatch_stack())
        return repeat(*call)

    monkeypatch.setattr(direct, "repeat", ask)
    inputs, options = split(tensors(device))

    def call(*given: Any) -> None:
        if drop_in:
            dsv4_prologue.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*given, 1e-6, 4)
        else:
            dsv4_prologue.prologue(*given, **options)

    with Watch():
        call(*inputs)
    make_fx(call)(*inputs)
    assert modes
    assert not any(modes)


@pytest.mark.parametrize(
    "order", ["import torch, dsv4_prologue", "import dsv4_prologue, torch; dsv4_prologue.prologue"]
)
def test_ops_are_registered(order: str) -> None:
    code = f"{order}; print(torch.ops.dsv4_prologue.prologue_out.default._schema.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "dsv4_prologue::prologue_out", done.stderr
