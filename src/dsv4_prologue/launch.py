"""From a plan to a running kernel.

The one place that knows how each kernel is launched: its grid, its arguments, its options, the
device it runs on. A launch that was made before is made again by `direct`, past Triton's own
launch path; without a compiler (TRITON_INTERPRET=1) it goes through the exact interpreter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_prologue import direct
from dsv4_prologue.cards import get_card
from dsv4_prologue.contract import HEAD_DIM, Layout, reach
from dsv4_prologue.planning import Plan, tile_width
from dsv4_prologue.selection import asked, asked_for, interpreting

GATHER_ROWS = 4  # slots a program of the reader decodes
GATHER_WARPS = 4
#: Arguments of `tiled` that `vector_core` lacks: one token a program, and one encoder.
TILED_ONLY = ("num_tokens", "num_slots", "TOKENS", "KV_TOKENS", "WIDTH", "FP8_CAST", "DEPENDENT")


class Launched(NamedTuple):
    """One launch as it was asked for."""

    kernel: str
    programs: int
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]


class _Operands(NamedTuple):
    """The tensors in the order of the kernels' pointers; None: the call has none."""

    q: Tensor | None
    q_out: Tensor | None
    kv: Tensor | None
    cache: Tensor | None
    slots: Tensor | None
    positions: Tensor
    table: Tensor
    weight: Tensor | None


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launched]]:
    """Keep the launches of the block in a list, and launch none. Needs no Triton."""
    launches: list[Launched] = []
    with asked_for(launches=launches):
        yield launches


@functools.cache
def _kernel(name: str) -> Any:
    """The Triton kernel of that name; loads Triton when the first one is asked for."""
    from dsv4_prologue.kernels import gather, tiled, vector_core

    return {
        "tiled": tiled.prologue_kernel,
        "vector_core": vector_core.prologue_kernel,
        "gather": gather.gather_kernel,
    }[name]


def _launch(
    name: str,
    programs: int,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """Launch a kernel; return the compiled one, where there is one."""
    launches = asked().launches
    if launches is not None:
        launches.append(Launched(name, programs, arguments, options))
        return None
    if device.type == "cpu":
        if not interpreting():
            raise RuntimeError(
                "a kernel card on CPU tensors runs in Triton's interpreter: set TRITON_INTERPRET=1 "
                "before Triton is first imported"
            )
        from dsv4_prologue.verify import interpreter

        # Interpreted programs run after one another: there is nothing to wait for.
        interpreter.run(_kernel(name), (programs,), {**arguments, **options, "DEPENDENT": "no"})
        return None
    module = torch.get_device_module(device)
    elsewhere = device.index is not None and device.index != module.current_device()
    with module.device(device) if elsewhere else contextlib.nullcontext():
        return _kernel(name)[(programs,)](**arguments, **options)


def _as_bf16(k_cache: Tensor) -> Tensor:
    """The cache's bytes as bf16 elements of the same pages: the kernels cast no pointer."""
    pages, page_stride = k_cache.shape[0], k_cache.stride(0) // 2 * 2  # odd only of a single page
    width = k_cache[0].numel() // 2 * 2 if pages else 0
    return k_cache.as_strided((pages, width), (page_stride, 1)).view(torch.bfloat16)


def _options(plan: Plan, num_warps: int, num_stages: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if get_card(plan.card).can_disable_fp_fusion:
        options["enable_fp_fusion"] = False
    return options


def run_prologue(
    plan: Plan,
    layout: Layout,
    q: Tensor | None,
    kv: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    q_out: Tensor | None,
    kv_norm_weight: Tensor | None,
    eps: float,
    cache_block_size: int,
    q_norm: bool,
    q_rope: bool,
    repeatable: tuple[Any, ...] | None = None,
) -> None:
    """Run a checked call. Launches nothing where there is nothing to do.

    `repeatable` are the options of a call that `direct.repeat` may make again, None if it may not.
    """
    operands = _Operands(
        q, q_out, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, kv_norm_weight
    )
    if plan.kernel == "torch":
        # As a kernel: it may change an inference tensor anywhere, and autocast does not reach it.
        with torch.inference_mode(), _no_autocast(position_ids.device):
            _compose(layout, operands, eps, cache_block_size, q_norm, q_rope)
        return
    num_slots, heads_out, launch = layout.num_slots, layout.num_heads_out, plan.launch
    kv_programs = launch.kv_programs(num_slots) if layout.capacity and num_slots else 0
    programs = kv_programs + (launch.q_programs(layout.num_tokens, heads_out) if heads_out else 0)
    if not programs:
        return
    key: direct.Key | None = None
    if position_ids.is_cuda and plan.kernel == "tiled" and asked().launches is None:
        pointers = _pointers(operands)
        if not any(pointer % 16 for pointer in pointers):
            counts = (
                eps,
                layout.num_tokens,
                num_slots,
                layout.capacity,
                cos_sin_cache.shape[0],
                kv_programs,
            )
            key = _key(plan, layout, operands, cache_block_size, q_norm, q_rope)
            if direct.launch(key, programs, pointers, counts):
                if repeatable is not None:
                    _remember_call(layout, operands, repeatable, key, programs, counts)
                return
    arguments = _arguments(
        plan, layout, operands, eps, cache_block_size, q_norm, q_rope, kv_programs
    )
    options = _options(plan, launch.num_warps, launch.num_stages)
    if launch.dependent != "no":
        options["launch_pdl"] = True
    if plan.kernel == "vector_core":
        _launch_in_chunks(plan, programs, arguments, options, position_ids.device)
        return
    compiled = _launch(plan.kernel, programs, arguments, options, position_ids.device)
    if key is not None:
        direct.remember(key, compiled, arguments, fixed_from="q_token_stride")


def _pointers(operands: _Operands) -> tuple[int, ...]:
    """The kernel's pointers, in its order: it takes the cache twice, as bytes and as bf16."""
    places = [one.data_ptr() if one is not None else 0 for one in operands]
    return (*places[:4], *places[3:])


def _out_strides(layout: Layout) -> tuple[int, int]:
    """q_out's, of a token and a head; contiguous where the call makes it."""
    strides = layout.out_strides or (layout.num_heads_out * HEAD_DIM, HEAD_DIM)
    return strides[0], strides[1]


def _key(
    plan: Plan,
    layout: Layout,
    operands: _Operands,
    cache_block_size: int,
    q_norm: bool,
    q_rope: bool,
) -> direct.Key:
    """All that a compiled kernel and its fixed arguments depend on, where all is aligned."""
    q, _, kv, _, slots, positions, table, weight = operands
    launch = plan.launch
    return (
        positions.get_device(),
        layout[5:],
        layout.num_heads,
        layout.num_heads_out,
        cache_block_size,
        q is None,
        kv is None,
        q_norm,
        q_rope,
        slots.dtype if slots is not None else None,
        positions.dtype,
        table.dtype,
        weight.dtype if weight is not None else None,
        launch.tokens_per_tile,
        launch.kv_tokens_per_tile,
        launch.heads_per_tile,
        launch.num_warps,
        launch.num_stages,
        launch.dependent,
        plan.fp8_cast,
        plan.card,
    )


def _arguments(
    plan: Plan,
    layout: Layout,
    operands: _Operands,
    eps: float,
    cache_block_size: int,
    q_norm: bool,
    q_rope: bool,
    kv_programs: int,
) -> dict[str, Any]:
    """The kernel's arguments by name, in its order."""
    q, q_out, kv, k_cache, slots, positions, table, weight = operands
    out_strides, launch = _out_strides(layout), plan.launch
    return {
        "q_ptr": q,
        "q_out_ptr": q_out,
        "kv_ptr": kv,
        "cache_ptr": k_cache,
        "cache_bf16_ptr": _as_bf16(k_cache) if k_cache is not None else None,
        "slot_ptr": slots,
        "position_ptr": positions,
        "cos_sin_ptr": table,
        "kv_weight_ptr": weight,
        "eps": eps,
        "num_tokens": layout.num_tokens,
        "num_slots": layout.num_slots,
        "capacity": layout.capacity,
        "num_positions": table.shape[0],
        "kv_programs": kv_programs,
        "q_token_stride": layout.q_strides[0] if q is not None else 0,
        "q_head_stride": layout.q_strides[1] if q is not None else 0,
        "out_token_stride": out_strides[0],
        "out_head_stride": out_strides[1],
        "kv_token_stride": layout.kv_stride,
        "cos_sin_stride": layout.table_stride,
        "page_stride": layout.page_stride,
        "page_stride_bf16": layout.page_stride // 2,
        "HEADS": layout.num_heads,
        "HEADS_OUT": layout.num_heads_out,
        "PAGE_TOKENS": cache_block_size,
        "TOKENS": launch.tokens_per_tile,
        "HEADS_PER_TILE": launch.heads_per_tile,
        "KV_TOKENS": launch.kv_tokens_per_tile,
        "WIDTH": tile_width(get_card(plan.card).lanes),
        "HAS_Q": q is not None,
        "HAS_KV": kv is not None,
        "Q_NORM": q_norm,
        "Q_ROPE": q_rope,
        "KV_NORM": weight is not None,
        "FP8_CAST": plan.fp8_cast,
        "DEPENDENT": launch.dependent,
    }


def _remember_call(
    layout: Layout,
    operands: _Operands,
    options: tuple[Any, ...],
    key: direct.Key,
    programs: int,
    counts: tuple[Any, ...],
) -> None:
    """Keep a call that was just launched, for `direct.repeat`."""
    q, q_out, *others = operands[:-1]  # no weight: such a call is not repeated
    tensors: tuple[Any, ...] = (q, *others)
    form = direct.IN_PLACE if q_out is q else direct.BUFFER if layout.out_strides else direct.NEW
    if form == direct.BUFFER:
        tensors += (q_out,)
    n, heads, heads_out = layout.num_tokens, layout.num_heads, layout.num_heads_out
    out_strides = _out_strides(layout)
    aliasing = (
        reach(n, heads, *layout.q_strides[:2]),
        reach(n, heads_out, *out_strides),
        reach(n, 1, layout.kv_stride, 0),
        layout.q_strides[:2] == out_strides,
    )
    out = (n, heads_out, HEAD_DIM), (*out_strides, 1)
    direct.remember_call(tensors, form, options, aliasing, out, key, programs, counts)


def _launch_in_chunks(
    plan: Plan,
    programs: int,
    arguments: dict[str, Any],
    options: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Launch vector_core: at most as many programs at once as the card takes, rounded up.

    Programs past the end do nothing. Without the rounding a card may run program 0 again.
    """
    for name in TILED_ONLY:
        del arguments[name]
    limits = get_card(plan.card).limits
    chunk, multiple = (limits.chunk, limits.multiple_of) if limits is not None else (programs, 1)
    for first in range(0, programs, chunk):
        count = -(-min(chunk, programs - first) // multiple) * multiple
        part = {**arguments, "first_program": first, "num_programs": programs}
        _launch(plan.kernel, count, part, options, device)


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _compose(
    layout: Layout,
    operands: _Operands,
    eps: float,
    cache_block_size: int,
    q_norm: bool,
    q_rope: bool,
) -> None:
    """Run a call as a composition of torch operations."""
    from dsv4_prologue.kernels import composition

    q, q_out, kv, cache, slots, positions, table, weight = operands
    if q is not None and q_out is not None:
        composition.queries(q, q_out, positions, table, eps=eps, q_norm=q_norm, q_rope=q_rope)
    if kv is not None and cache is not None and slots is not None:
        composition.insert(
            kv,
            cache,
            slots,
            positions,
            table,
            eps=eps,
            cache_block_size=cache_block_size,
            kv_norm_weight=weight,
            capacity=layout.capacity,
        )


def run_gather(
    plan: Plan, k_cache: Tensor, slots: Tensor, out: Tensor, *, cache_block_size: int, capacity: int
) -> None:
    """Run a checked read: slots [R] contiguous, out bf16 [R, 512] contiguous."""
    if plan.kernel == "torch":
        from dsv4_prologue.kernels import composition

        composition.gather(
            k_cache, slots, out, cache_block_size=cache_block_size, capacity=capacity
        )
        return
    num_rows, page_stride = slots.numel(), k_cache.stride(0)
    limits = get_card(plan.card).limits
    step = max(1, num_rows) if limits is None else limits.chunk * GATHER_ROWS
    for first in range(0, num_rows, step):
        part = slots[first : first + step]
        arguments = {
            "out_ptr": out[first : first + step],
            "cache_ptr": k_cache,
            "cache_bf16_ptr": _as_bf16(k_cache),
            "slot_ptr": part,
            "num_rows": part.numel(),
            "capacity": capacity,
            "page_stride": page_stride,
            "page_stride_bf16": page_stride // 2,
            "PAGE_TOKENS": cache_block_size,
            "ROWS": GATHER_ROWS,
        }
        programs = -(-part.numel() // GATHER_ROWS)
        _launch("gather", programs, arguments, _options(plan, GATHER_WARPS, 1), slots.device)
