"""The public operator: the Python functions, and the `torch.ops.dsv4_prologue` behind them.

There is one way in: each function checks its arguments, asks for a plan and launches it. Under
torch.compile, under a dispatch mode and for tensor subclasses, the same function goes through its
registered op, whose implementation is that very function, so that a call traces as one operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsv4_prologue import direct, launch
from dsv4_prologue.contract import (
    HEAD_DIM,
    Layout,
    check_flags,
    check_gather,
    check_in_bounds,
    check_prologue,
)
from dsv4_prologue.selection import NOTHING, asked, plan_for, planned_launches, use_launch

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OPTIONS = (
    "float eps=1e-6, int cache_block_size=64, int? num_heads_out=None, bool q_norm=True, "
    "bool q_rope=True, str q_layout='heads', Tensor? q_scale_inv=None, "
    "Tensor? kv_norm_weight=None, str? cache_format=None, Tensor? cache_scale=None, "
    "str? fp8_format=None, bool check_bounds=False"
)
_CACHE_OPTIONS = (
    "int cache_block_size=64, str? cache_format=None, Tensor? cache_scale=None, "
    "str? fp8_format=None"
)
_KV = (
    "Tensor? kv, Tensor(c!)? k_cache, Tensor? slot_mapping, Tensor position_ids, "
    "Tensor cos_sin_cache"
)
# A mutating op returns nothing: an op must not return what it was given to change.
_library = torch.library.Library("dsv4_prologue", "DEF")
_library.define(
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor(a!) q, Tensor kv, "
    "Tensor(c!) k_cache, Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache, "
    "float eps, int cache_block_size) -> ()"
)
_library.define(f"prologue(Tensor q, {_KV}, *, {_OPTIONS}) -> Tensor")
_library.define(f"prologue_(Tensor(a!) q, {_KV}, *, {_OPTIONS}) -> ()")
_library.define(f"prologue_out(Tensor? q, {_KV}, *, Tensor(a!)? q_out, {_OPTIONS}) -> ()")
_library.define(f"gather_dequantize(Tensor k_cache, Tensor slots, *, {_CACHE_OPTIONS}) -> Tensor")
_library.define(
    f"gather_dequantize_out(Tensor k_cache, Tensor slots, *, {_CACHE_OPTIONS}, Tensor(a!) out)"
    " -> ()"
)
_ops: Any = torch.ops.dsv4_prologue


#: How many modes look at every operator that is called (`TorchDispatchMode`, `make_fx`'s).
_watching: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def _traced(rows: object) -> bool:
    """Whether a call must go through its registered op: compiled, watched, or on a subclass."""
    return (
        (type(rows) is not Tensor and isinstance(rows, Tensor)) or is_compiling() or _watching() > 0
    )


def _new_q_out(q: Tensor, layout: Layout) -> Tensor:
    return q.new_empty((layout.num_tokens, layout.num_heads_out, HEAD_DIM))


#: q, kv, k_cache, slot_mapping, position_ids and cos_sin_cache.
_Inputs = tuple[Any, Any, Any, Any, Any, Any]


class _Options(NamedTuple):
    """What a call says beside its tensors, in the order of `prologue`'s arguments."""

    eps: float = 1e-6
    cache_block_size: int = 64
    num_heads_out: int | None = None
    q_norm: bool = True
    q_rope: bool = True
    q_layout: str = "heads"
    q_scale_inv: Tensor | None = None
    kv_norm_weight: Tensor | None = None
    cache_format: str | None = None
    cache_scale: Tensor | None = None
    fp8_format: str | None = None
    check_bounds: bool = False


_USUAL = _Options()
_REST = tuple(_USUAL)[2:]


def _run(inputs: _Inputs, q_out: Tensor | None, options: tuple[Any, ...]) -> Tensor | None:
    """Check, plan, launch. Returns q_out, made here if it was not given, or None without q.

    `options` are those of `_Options`, which is made of them only where a call has to be checked.
    """
    (
        eps,
        cache_block_size,
        num_heads_out,
        q_norm,
        q_rope,
        _,
        q_scale_inv,
        kv_norm_weight,
        _,
        cache_scale,
        _,
        check_bounds,
    ) = options
    # A repeated call's options equal those of one that was checked, so that 64.0 must not pass for
    # 64 nor 1 for True; and tensors are not to be compared.
    repeatable = (
        type(eps) is float
        and type(cache_block_size) is int
        and (num_heads_out is None or type(num_heads_out) is int)
        and type(q_norm) is type(q_rope) is type(check_bounds) is bool
        and q_scale_inv is kv_norm_weight is cache_scale is None
        and not check_bounds
        and asked() is NOTHING
    )
    if repeatable:
        done = direct.repeat(inputs, q_out, options)
        if done is not None:
            return done
    return _run_checked(inputs, q_out, _Options(*options), repeatable)


def _run_checked(
    inputs: _Inputs, q_out: Tensor | None, options: _Options, repeatable: bool
) -> Tensor | None:
    """`_run` for a call that cannot be repeated; it is remembered if it may be `repeatable`."""
    layout = _check(inputs, q_out, options)
    check_flags(q_norm=options.q_norm, q_rope=options.q_rope, check_bounds=options.check_bounds)
    q, kv, _, slot_mapping, position_ids, cos_sin_cache = inputs
    if options.check_bounds and not position_ids.is_meta:
        check_in_bounds(slot_mapping, layout.capacity, position_ids, cos_sin_cache.shape[0])
    if q is not None and q_out is None:
        q_out = _new_q_out(q, layout)
    if position_ids.is_meta:  # sizes without memory: nothing to compute
        return q_out
    plan = plan_for(position_ids.device, layout.num_tokens, layout.num_heads_out)
    launch.run_prologue(
        plan,
        layout,
        *inputs,
        q_out,
        options.kv_norm_weight,
        float(options.eps),
        options.cache_block_size,
        options.q_norm,
        options.q_rope,
        tuple(options) if repeatable and q is not None and kv is not None else None,
    )
    return q_out


def _check(
    inputs: _Inputs, q_out: Tensor | None, options: _Options, addresses: bool = True
) -> Layout:
    named = options._asdict() | {"q_out": q_out, "addresses": addresses}
    for flag in ("q_norm", "q_rope", "check_bounds"):  # no layout depends on them
        del named[flag]
    return check_prologue(*inputs, **named)


def prologue(
    q: Tensor | None,
    kv: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float = 1e-6,
    cache_block_size: int = 64,
    q_out: Tensor | None = None,
    num_heads_out: int | None = None,
    q_norm: bool = True,
    q_rope: bool = True,
    q_layout: str = "heads",
    q_scale_inv: Tensor | None = None,
    kv_norm_weight: Tensor | None = None,
    cache_format: str | None = None,
    cache_scale: Tensor | None = None,
    fp8_format: str | None = None,
    check_bounds: bool = False,
) -> Tensor | None:
    """Normalise and rotate Q; rotate, quantise and insert KV into the paged cache.

    Args:
        q: bf16 `[N, H, 512]`, any H >= 1, last dim contiguous. None: KV only.
        kv: bf16 `[N, 512]`, last dim contiguous; read only. None: Q only, and then `k_cache` and
            `slot_mapping` are None too.
        k_cache: uint8 `[pages, bytes]` or `[pages, cache_block_size, 584]`, changed in place: only
            the bytes of the tokens inserted. The page stride is even and at least 584 bytes a
            token of the page; the first byte lies at an even address.
        slot_mapping: int32 or int64 `[M]`, M <= N: page * cache_block_size + offset. Negative, or
            past the cache's end: nothing is written. Rows from M on get Q work only.
        position_ids: int32 or int64 `[N]`, rows of `cos_sin_cache`. A position outside the table
            gives NaN in the RoPE dims.
        cos_sin_cache: f32 or bf16 `[max_pos, 64]`: 32 cosines, then 32 sines.
        eps: added to the mean of squares; not negative.
        cache_block_size: tokens a page.
        q_out: bf16 `[N, heads out, 512]`, or q itself, or a buffer that holds q as exactly its
            first heads. It shares no byte with kv, nor with any other argument, which only for
            q and kv is checked. None: a new tensor.
        num_heads_out: heads of the output, at least H; those from H on are written as +0.
        q_norm, q_rope: whether Q is normalised, and rotated.
        kv_norm_weight: bf16 or f32 `[512]`: KV gets a weighted RMSNorm, rounded to bf16, first.
        q_layout, q_scale_inv, cache_format, cache_scale, fp8_format: only "heads", None,
            "fp8_ds_mla", None and "e4m3fn" so far; others are refused by name.
        check_bounds: also raise IndexError, before anything is written, for a slot past the end
            or a position outside the table. Synchronises.

    Returns:
        `q_out`, or None without q.

    Raises:
        TypeError: an argument of a wrong kind (type or dtype).
        ValueError: an argument of a wrong value (shape, stride, device, overlap, form).
        IndexError: with `check_bounds`, a slot or position out of range.
    """
    inputs = (q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache)
    options = (
        eps,
        cache_block_size,
        num_heads_out,
        q_norm,
        q_rope,
        q_layout,
        q_scale_inv,
        kv_norm_weight,
        cache_format,
        cache_scale,
        fp8_format,
        check_bounds,
    )
    if not _traced(q if q is not None else kv):
        return _run(inputs, q_out, options)
    named = dict(zip(_Options._fields, options, strict=True))
    if q is not None and q_out is None:
        return _ops.prologue(*inputs, **named)  # type: ignore[no-any-return]
    if q is not None and q_out is q:
        _ops.prologue_(*inputs, **named)
    else:
        _ops.prologue_out(*inputs, q_out=q_out, **named)
    return q_out


def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    """`prologue` under the name and with the arguments engines know: q is changed in place."""
    inputs = (q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache)
    if _traced(q):
        _ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*inputs, eps, cache_block_size)
    elif not (
        # What `_run` does first, without the options that such a call cannot have.
        type(eps) is float
        and type(cache_block_size) is int
        and asked() is NOTHING
        and direct.repeat(inputs, q, (eps, cache_block_size, *_REST)) is not None
    ):
        _fused(*inputs, eps, cache_block_size)


def _fused(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    if q is None:
        raise TypeError("q: expected a bfloat16 tensor, got NoneType")
    inputs = (q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache)
    _run(inputs, q, (eps, cache_block_size, *_REST))


def _gather(k_cache: Tensor, slots: Tensor, out: Tensor | None, **options: Any) -> Tensor:
    capacity = check_gather(k_cache, slots, out=out, **options)
    if out is None:
        out = k_cache.new_empty((*slots.shape, HEAD_DIM), dtype=torch.bfloat16)
    if slots.is_meta:
        return out
    block_size = options.get("cache_block_size", 64)
    plan = plan_for(slots.device, slots.numel(), 0)
    launch.run_gather(
        plan,
        k_cache,
        slots.reshape(-1).contiguous(),  # reshape alone leaves one dim as it is strided
        out.view(-1, HEAD_DIM),
        cache_block_size=block_size,
        capacity=capacity,
    )
    return out


def gather_dequantize(
    k_cache: Tensor,
    slots: Tensor,
    *,
    cache_block_size: int = 64,
    cache_format: str | None = None,
    cache_scale: Tensor | None = None,
    fp8_format: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Read rows of the cache back as bf16 `[*slots.shape, 512]`.

    Args:
        k_cache: as in `prologue`.
        slots: int32 or int64, any shape. A slot outside the cache reads as a row of NaN.
        cache_block_size: tokens a page.
        out: bf16 `[*slots.shape, 512]`, contiguous. None: a new tensor.

    Each NoPE value is E4M3 times 2**(scale byte - 127), rounded to bf16; scale byte 255 reads as
    NaN for its group, and what exceeds bf16 as Inf. The RoPE dims are read as they are stored.

    Raises TypeError and ValueError as `prologue` does.
    """
    options: dict[str, Any] = {
        "cache_block_size": cache_block_size,
        "cache_format": cache_format,
        "cache_scale": cache_scale,
        "fp8_format": fp8_format,
    }
    if not _traced(k_cache):
        return _gather(k_cache, slots, out, **options)
    if out is None:
        return _ops.gather_dequantize(k_cache, slots, **options)  # type: ignore[no-any-return]
    _ops.gather_dequantize_out(k_cache, slots, **options, out=out)
    return out


# What the registered ops run, and what they run on fake tensors: the checks, and an empty result.


def _prologue_impl(*inputs: Unpack[_Inputs], **options: Any) -> Tensor | None:
    return _run(inputs, None, _Options(**options) if options else _USUAL)


def _prologue_in_place_impl(*inputs: Unpack[_Inputs], **options: Any) -> None:
    _run(inputs, inputs[0], _Options(**options) if options else _USUAL)


def _prologue_out_impl(*inputs: Unpack[_Inputs], q_out: Tensor | None, **options: Any) -> None:
    _run(inputs, q_out, _Options(**options) if options else _USUAL)


def _gather_impl(k_cache: Tensor, slots: Tensor, **options: Any) -> Tensor:
    return _gather(k_cache, slots, None, **options)


def _gather_out_impl(k_cache: Tensor, slots: Tensor, *, out: Tensor, **options: Any) -> None:
    _gather(k_cache, slots, out, **options)


def _fused_fake(*arguments: Any) -> None:
    q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, *options = arguments
    inputs = (q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache)
    _check(inputs, q, _Options(*options), addresses=False)


def _prologue_fake(*inputs: Unpack[_Inputs], **options: Any) -> Tensor:
    return _new_q_out(inputs[0], _check(inputs, None, _Options(**options), addresses=False))


def _prologue_in_place_fake(*inputs: Unpack[_Inputs], **options: Any) -> None:
    _check(inputs, inputs[0], _Options(**options), addresses=False)


def _prologue_out_fake(*inputs: Unpack[_Inputs], q_out: Tensor | None, **options: Any) -> None:
    _check(inputs, q_out, _Options(**options), addresses=False)


def _gather_fake(k_cache: Tensor, slots: Tensor, **options: Any) -> Tensor:
    check_gather(k_cache, slots, addresses=False, **options)
    return k_cache.new_empty((*slots.shape, HEAD_DIM), dtype=torch.bfloat16)


def _gather_out_fake(k_cache: Tensor, slots: Tensor, *, out: Tensor, **options: Any) -> None:
    check_gather(k_cache, slots, out=out, addresses=False, **options)


for _name, _impl, _fake in (
    ("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", _fused, _fused_fake),
    ("prologue", _prologue_impl, _prologue_fake),
    ("prologue_", _prologue_in_place_impl, _prologue_in_place_fake),
    ("prologue_out", _prologue_out_impl, _prologue_out_fake),
    ("gather_dequantize", _gather_impl, _gather_fake),
    ("gather_dequantize_out", _gather_out_impl, _gather_out_fake),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4_prologue::{_name}", _fake, lib=_library)


def warmup(
    num_heads: int,
    *,
    num_heads_out: int | None = None,
    in_place: bool = False,
    cache_block_size: int = 64,
    page_stride: int | None = None,
    index_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype = torch.float32,
    kv_norm_dtype: torch.dtype | None = None,
    q_only: bool = False,
    kv_only: bool = False,
    q_norm: bool = True,
    q_rope: bool = True,
    device: torch.device | str | None = None,
) -> None:
    """Compile what later calls of this form need, so that none compiles inside a graph capture.

    Every launch that may be planned here is run once on one token whose slot is negative, so that
    nothing is written outside buffers made here; and the reader. Covers contiguous, 16-byte aligned
    tensors.

    Args:
        num_heads, num_heads_out, cache_block_size, q_norm, q_rope: as later calls have them.
        in_place: whether q is changed in place.
        page_stride: of the cache, in bytes; None: the payload rounded up to a multiple of 576,
            which is 37440 for pages of 64.
        index_dtype: of slots and positions.
        table_dtype: of the cosines and sines.
        kv_norm_dtype: of `kv_norm_weight`; None: without.
        q_only, kv_only: as later calls are.
        device: None: the current accelerator, or the CPU.
    """
    from dsv4_prologue.contract import PageLayout
    from dsv4_prologue.selection import default_device

    where = torch.device(device if device is not None else default_device())
    page = PageLayout(cache_block_size)
    stride = page_stride if page_stride is not None else page.usual_stride
    zeros = torch.zeros(1, dtype=index_dtype, device=where)
    heads_out = num_heads if num_heads_out is None else num_heads_out
    whole = torch.zeros(1, heads_out, HEAD_DIM, dtype=torch.bfloat16, device=where)
    q = whole[:, :num_heads] if in_place else whole.new_zeros(1, num_heads, HEAD_DIM)
    kv = torch.zeros(1, HEAD_DIM, dtype=torch.bfloat16, device=where)
    cache = torch.zeros(1, stride, dtype=torch.uint8, device=where)[:, : page.payload_bytes]
    weight = None
    if kv_norm_dtype is not None:
        weight = torch.ones(HEAD_DIM, dtype=kv_norm_dtype, device=where)
    for one in planned_launches(where):
        with use_launch(one):
            prologue(
                None if kv_only else q,
                None if q_only else kv,
                None if q_only else cache,
                None if q_only else zeros - 1,
                zeros,
                torch.zeros(1, 64, dtype=table_dtype, device=where),
                q_out=whole if in_place and not kv_only else None,
                num_heads_out=None if in_place or kv_only else num_heads_out,
                cache_block_size=cache_block_size,
                kv_norm_weight=weight,
                q_norm=q_norm,
                q_rope=q_rope,
            )
    if not q_only:
        gather_dequantize(cache, zeros - 1, cache_block_size=cache_block_size)
