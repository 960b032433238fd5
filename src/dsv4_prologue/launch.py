"""From a plan to a running kernel.

The one place that knows how each kernel is launched: its grid, its arguments, its options, the
device it runs on. Without a compiler (TRITON_INTERPRET=1) it goes through the exact interpreter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4_prologue.cards import get_card
from dsv4_prologue.contract import HEAD_DIM, Shape
from dsv4_prologue.planning import Plan
from dsv4_prologue.selection import interpreting

GATHER_ROWS = 4  # slots a program of the reader decodes
GATHER_WARPS = 4


@functools.cache
def _kernel(name: str) -> Any:
    """The Triton kernel of that name; loads Triton when the first one is asked for."""
    from dsv4_prologue.kernels import gather, tiled

    return {"tiled": tiled.prologue_kernel, "gather": gather.gather_kernel}[name]


def _launch(
    kernel: Any,
    programs: int,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    device: torch.device,
) -> None:
    if device.type == "cpu":
        if not interpreting():
            raise RuntimeError(
                "a kernel card on CPU tensors runs in Triton's interpreter: set TRITON_INTERPRET=1 "
                "before Triton is first imported"
            )
        from dsv4_prologue.verify import interpreter

        interpreter.run(kernel, (programs,), {**arguments, **options})
        return
    module = torch.get_device_module(device)
    elsewhere = device.index is not None and device.index != module.current_device()
    with module.device(device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](**arguments, **options)


def _as_bf16(k_cache: Tensor) -> Tensor:
    """The cache's bytes as bf16 elements of the same pages: the kernels cast no pointer."""
    pages, page_stride = k_cache.shape[0], k_cache.stride(0)
    width = k_cache[0].numel() // 2 * 2 if pages else 0
    return k_cache.as_strided((pages, width), (page_stride, 1)).view(torch.bfloat16)


def _options(plan: Plan, num_warps: int, num_stages: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if get_card(plan.card).can_disable_fp_fusion:
        options["enable_fp_fusion"] = False
    return options


def run_prologue(
    plan: Plan,
    shape: Shape,
    q: Tensor | None,
    kv: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    q_out: Tensor | None,
    *,
    eps: float,
    cache_block_size: int,
    q_norm: bool,
    q_rope: bool,
    kv_norm_weight: Tensor | None,
) -> None:
    """Run a checked call. Launches nothing where there is nothing to do."""
    if plan.kernel == "torch":
        from dsv4_prologue.kernels import composition

        if q is not None and q_out is not None:
            composition.queries(
                q, q_out, position_ids, cos_sin_cache, eps=eps, q_norm=q_norm, q_rope=q_rope
            )
        if kv is not None and k_cache is not None and slot_mapping is not None:
            composition.insert(
                kv,
                k_cache,
                slot_mapping,
                position_ids,
                cos_sin_cache,
                eps=eps,
                cache_block_size=cache_block_size,
                kv_norm_weight=kv_norm_weight,
                capacity=shape.capacity,
            )
        return

    launch = plan.launch
    kv_programs = launch.kv_programs(shape.num_slots if shape.capacity else 0)
    programs = kv_programs + launch.q_programs(shape.num_tokens, shape.num_heads_out)
    if not programs:
        return
    q_strides = q.stride() if q is not None else (0, 0)
    out_strides = q_out.stride() if q_out is not None else (0, 0)
    page_stride = k_cache.stride(0) if k_cache is not None else 0
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
        "num_tokens": shape.num_tokens,
        "num_slots": shape.num_slots,
        "capacity": shape.capacity,
        "num_positions": cos_sin_cache.shape[0],
        "kv_programs": kv_programs,
        "q_token_stride": q_strides[0],
        "q_head_stride": q_strides[1],
        "out_token_stride": out_strides[0],
        "out_head_stride": out_strides[1],
        "kv_token_stride": kv.stride(0) if kv is not None else 0,
        "cos_sin_stride": cos_sin_cache.stride(0),
        "page_stride": page_stride,
        "page_stride_bf16": page_stride // 2,
        "HEADS": shape.num_heads,
        "HEADS_OUT": shape.num_heads_out,
        "PAGE_TOKENS": cache_block_size,
        "TOKENS": launch.tokens_per_tile,
        "HEADS_PER_TILE": launch.heads_per_tile,
        "HAS_Q": q is not None,
        "HAS_KV": kv is not None,
        "Q_NORM": q_norm,
        "Q_ROPE": q_rope,
        "KV_NORM": kv_norm_weight is not None,
        "FP8_CAST": plan.fp8_cast,
    }
    options = _options(plan, launch.num_warps, launch.num_stages)
    _launch(_kernel("tiled"), programs, arguments, options, position_ids.device)


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
    num_rows = slots.numel()
    if not num_rows:
        return
    page_stride = k_cache.stride(0)
    arguments = {
        "out_ptr": out.view(num_rows, HEAD_DIM),
        "cache_ptr": k_cache,
        "cache_bf16_ptr": _as_bf16(k_cache),
        "slot_ptr": slots,
        "num_rows": num_rows,
        "capacity": capacity,
        "page_stride": page_stride,
        "page_stride_bf16": page_stride // 2,
        "PAGE_TOKENS": cache_block_size,
        "ROWS": GATHER_ROWS,
    }
    programs = -(-num_rows // GATHER_ROWS)
    _launch(_kernel("gather"), programs, arguments, _options(plan, GATHER_WARPS, 1), slots.device)
