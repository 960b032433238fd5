"""From a plan to a running kernel.

The one place that knows how each kernel is launched: its grid, its arguments, its options, the
device it runs on. A launch that was made before is made again by `direct`, past Triton's own
launch path; without a compiler (TRITON_INTERPRET=1) it goes through the exact interpreter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4_prologue import direct
from dsv4_prologue.cards import get_card
from dsv4_prologue.contract import HEAD_DIM, Layout
from dsv4_prologue.planning import Plan, tile_width
from dsv4_prologue.selection import interpreting

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


_recorder: ContextVar[list[Launched] | None] = ContextVar("dsv4_prologue_recorder", default=None)


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launched]]:
    """Keep the launches of the block in a list, and launch none. Needs no Triton."""
    launches: list[Launched] = []
    token = _recorder.set(launches)
    try:
        yield launches
    finally:
        _recorder.reset(token)


def recording() -> bool:
    """Whether launches are recorded, not made."""
    return _recorder.get() is not None


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
    launches = _recorder.get()
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
    if plan.kernel == "torch":
        operands = (q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, q_out)
        with torch.inference_mode():  # as a kernel, it may change an inference tensor anywhere
            _compose(layout, (*operands, kv_norm_weight), eps, cache_block_size, q_norm, q_rope)
        return
    num_tokens, num_heads, heads_out, num_slots, capacity, *_ = layout
    launch = plan.launch
    kv_programs = launch.kv_programs(num_slots) if capacity and num_slots else 0
    programs = kv_programs + (launch.q_programs(num_tokens, heads_out) if heads_out else 0)
    if not programs:
        return

    key: direct.Key | None = None
    tensors: tuple[Any, ...] = (q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache)
    if q_out is not q and layout.out_strides:
        tensors += (q_out,)
    if position_ids.is_cuda and plan.kernel == "tiled" and not recording():
        q_at = q.data_ptr() if q is not None else 0
        out_at = q_out.data_ptr() if q_out is not None else 0
        kv_at = kv.data_ptr() if kv is not None else 0
        cache_at = k_cache.data_ptr() if k_cache is not None else 0
        slots_at = slot_mapping.data_ptr() if slot_mapping is not None else 0
        weight_at = kv_norm_weight.data_ptr() if kv_norm_weight is not None else 0
        positions_at, table_at = position_ids.data_ptr(), cos_sin_cache.data_ptr()
        places = q_at | out_at | kv_at | cache_at | slots_at | positions_at | table_at | weight_at
        if places % 16 == 0:
            key = (
                position_ids.get_device(),
                layout[5:],
                num_heads,
                heads_out,
                cache_block_size,
                q is None,
                kv is None,
                q_norm,
                q_rope,
                slot_mapping.dtype if slot_mapping is not None else None,
                position_ids.dtype,
                cos_sin_cache.dtype,
                kv_norm_weight.dtype if kv_norm_weight is not None else None,
                launch.tokens_per_tile,
                launch.kv_tokens_per_tile,
                launch.heads_per_tile,
                launch.num_warps,
                launch.num_stages,
                launch.dependent,
                plan.fp8_cast,
                plan.card,
            )
            counts = (eps, num_tokens, num_slots, capacity, cos_sin_cache.shape[0], kv_programs)
            # The bf16 view of the cache lies where the cache does.
            pointers = (
                q_at,
                out_at,
                kv_at,
                cache_at,
                cache_at,
                slots_at,
                positions_at,
                table_at,
                weight_at,
            )
            if direct.launch(key, programs, pointers, counts):
                if repeatable is not None:
                    _remember_call(layout, tensors, repeatable, key, programs, counts)
                return

    out_strides = layout.out_strides or (heads_out * HEAD_DIM, HEAD_DIM)
    arguments = {
        "q_ptr": q,
        "q_out_ptr": q_out,
        "kv_ptr": kv,
        "cache_ptr": k_cache,
        "cache_bf16_ptr": _as_bf16(k_cache) if k_cache is not None else None,
        "slot_ptr": slot_mapping,
        "position_ptr": position_ids,
        "cos_sin_ptr": cos_sin_cache,
        "kv_weight_ptr": kv_norm_weight,
        "eps": eps,
        "num_tokens": num_tokens,
        "num_slots": num_slots,
        "capacity": capacity,
        "num_positions": cos_sin_cache.shape[0],
        "kv_programs": kv_programs,
        "q_token_stride": layout.q_strides[0] if q is not None else 0,
        "q_head_stride": layout.q_strides[1] if q is not None else 0,
        "out_token_stride": out_strides[0],
        "out_head_stride": out_strides[1],
        "kv_token_stride": layout.kv_stride,
        "cos_sin_stride": layout.table_stride,
        "page_stride": layout.page_stride,
        "page_stride_bf16": layout.page_stride // 2,
        "HEADS": num_heads,
        "HEADS_OUT": heads_out,
        "PAGE_TOKENS": cache_block_size,
        "TOKENS": launch.tokens_per_tile,
        "HEADS_PER_TILE": launch.heads_per_tile,
        "KV_TOKENS": launch.kv_tokens_per_tile,
        "WIDTH": tile_width(get_card(plan.card).lanes),
        "HAS_Q": q is not None,
        "HAS_KV": kv is not None,
        "Q_NORM": q_norm,
        "Q_ROPE": q_rope,
        "KV_NORM": kv_norm_weight is not None,
        "FP8_CAST": plan.fp8_cast,
        "DEPENDENT": launch.dependent,
    }
    options = _options(plan, launch.num_warps, launch.num_stages)
    if launch.dependent != "no":
        options["launch_pdl"] = True
    if plan.kernel == "vector_core":
        _launch_in_chunks(plan, programs, arguments, options, position_ids.device)
        return
    compiled = _launch(plan.kernel, programs, arguments, options, position_ids.device)
    if key is not None:
        direct.remember(key, key[0], compiled, arguments, fixed_from="q_token_stride")


def _remember_call(
    layout: Layout,
    tensors: tuple[Tensor, ...],
    options: tuple[Any, ...],
    key: direct.Key,
    programs: int,
    counts: tuple[Any, ...],
) -> None:
    """Keep a call that was just launched, for `direct.repeat`."""
    n, heads, heads_out = layout.num_tokens, layout.num_heads, layout.num_heads_out
    out_strides = layout.out_strides or (heads_out * HEAD_DIM, HEAD_DIM)

    def reach(heads: int, by_token: int, by_head: int) -> int:
        return 2 * ((n - 1) * by_token + (heads - 1) * by_head + HEAD_DIM)

    aliasing = (
        reach(heads, *layout.q_strides[:2]),
        reach(heads_out, *out_strides[:2]),
        layout.q_strides[:2] == out_strides[:2],
    )
    out_shape, new = (n, heads_out, HEAD_DIM), not layout.out_strides
    direct.remember_call(tensors, options, aliasing, out_shape, new, key, programs, counts)


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


def _compose(
    layout: Layout,
    tensors: tuple[Any, ...],
    eps: float,
    cache_block_size: int,
    q_norm: bool,
    q_rope: bool,
) -> None:
    """Run a call as a composition of torch operations."""
    from dsv4_prologue.kernels import composition

    q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, q_out, weight = tensors
    if q is not None:
        composition.queries(
            q, q_out, position_ids, cos_sin_cache, eps=eps, q_norm=q_norm, q_rope=q_rope
        )
    if kv is not None:
        composition.insert(
            kv,
            k_cache,
            slot_mapping,
            position_ids,
            cos_sin_cache,
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
