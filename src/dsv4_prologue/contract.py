"""The contract in code: the numbers, the page layout, and every argument check, in one place.

The operator's *numerics* are stated by `dsv4_prologue.reference`, its *interface* here. Sizes are
in elements unless the name says bytes. Names of arguments are those of `prologue()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

HEAD_DIM = 512  # elements of one head of Q, and of one row of KV
NOPE_DIM = 448  # the first dims: not rotated, stored as E4M3
ROPE_DIM = 64  # the last dims: rotated, stored as bf16
GROUP = 64  # consecutive NoPE dims that share one scale byte
NUM_GROUPS = NOPE_DIM // GROUP  # 7 scale bytes a token

DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM  # 576 data bytes a token: 448 E4M3, then 64 bf16
SCALE_BYTES = NUM_GROUPS + 1  # 8: seven scale bytes and a pad byte of 0
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES  # 584 bytes of a page belong to one token

FP8_MAX = 448.0  # the largest finite E4M3 ("fn") value
ABSMAX_FLOOR_BITS = 0x38D1B717  # f32(1e-4), the least absmax a group is scaled by
ABSMAX_FLOOR = 1e-4
SCALE_BIAS = 127  # scale byte = exponent + 127
SCALE_NAN = 255  # E8M0's NaN: the scale byte of a group that is not finite

#: The token and head counts of the standard benchmark: 11 x 2 shapes, pages of 64.
CORE_NUM_TOKENS = (1, 4, 17, 64, 1024, 2048, 8192, 32768, 65536, 98304, 131072)
CORE_NUM_HEADS = (64, 128)

F32_MAX = torch.finfo(torch.float32).max
_BF16 = (torch.bfloat16,)
_UINT8 = (torch.uint8,)
INDEX_DTYPES = (torch.int32, torch.int64)
TABLE_DTYPES = (torch.float32, torch.bfloat16)
CACHE_FORMATS = ("fp8_ds_mla", "mxfp8", "bf16", "fp8")
FP8_FORMATS = ("e4m3fn", "e4m3fnuz")
Q_LAYOUTS = ("heads", "interleaved")
#: Slots are divided by the page size in 32 bits.
MAX_SLOTS = 2**31 - 1
#: Offsets within a page are 32 bits wide, those of pages 64.
MAX_BLOCK_SIZE = (2**31 - 1) // TOKEN_BYTES


@dataclass(frozen=True)
class PageLayout:
    """Where the bytes of a page of `cache_block_size` tokens are. All offsets in bytes.

    `[0, bs*576)` holds the tokens' data, `[bs*576, bs*584)` their scale bytes; what follows, up to
    the page stride, is padding that belongs to somebody else.
    """

    cache_block_size: int

    @property
    def payload_bytes(self) -> int:
        return self.cache_block_size * TOKEN_BYTES

    @property
    def usual_stride(self) -> int:
        """From one page to the next where an engine shares pages between layers, as vLLM does: the
        payload, rounded up to a multiple of a token's data bytes. 37440 for 64 tokens.
        """
        return -(-self.payload_bytes // DATA_BYTES) * DATA_BYTES

    def scale_offset(self, offset: int) -> int:
        """First of the 8 scale bytes of the page's token number `offset`."""
        return self.cache_block_size * DATA_BYTES + offset * SCALE_BYTES


def bytes_moved(num_tokens: int, num_heads: int) -> int:
    """Useful bytes of one call: each input read once and each output written once, in bytes.

    Per token and head 1024 read and 1024 written; per token 1024 of KV read, 584 of cache written
    and 256 of cosines and sines read. Slots and positions (at most 16 bytes a token) are left out.
    """
    return num_tokens * (num_heads * 2048 + 1024 + TOKEN_BYTES + 256)


class Layout(NamedTuple):
    """The sizes and strides of a checked call. Strides in elements of their tensor."""

    num_tokens: int  # rows of q, kv and position_ids
    num_heads: int  # heads of q; 0 without q
    num_heads_out: int  # heads written; 0 without q
    num_slots: int  # rows that may write to the cache (M); 0 without kv
    capacity: int  # slots the cache has; 0 without kv
    q_strides: tuple[int, ...]
    out_strides: tuple[int, ...]  # of q_out; empty if it is still to be made
    kv_stride: int
    page_stride: int  # bytes
    table_stride: int


def _kind(name: str, expected: str, got: object) -> NoReturn:
    raise TypeError(f"{name}: expected {expected}, got {got}")


def _value(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, got {got}")


def _form(value: object) -> str:
    """What a value is: its type, and a tensor's layout."""
    layout = f" of layout {value.layout}" if isinstance(value, Tensor) else ""
    return type(value).__name__ + layout


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_tensor(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if not isinstance(tensor, Tensor):
        _kind(name, f"a tensor of {_names(dtypes)}", type(tensor).__name__)
    if tensor.dtype not in dtypes:
        _kind(name, f"dtype {_names(dtypes)}", str(tensor.dtype).removeprefix("torch."))
    if tensor.device != device:
        _value(name, f"a tensor on {device}", tensor.device)
    if tensor.requires_grad and torch.is_grad_enabled():
        _value(name, "no gradient (inference only: call under torch.no_grad())", "requires_grad")


def _check_tensor_at(
    name: str,
    tensor: Any,
    usual: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    where: int,
    grad: bool,
) -> None:
    """`_check_tensor`, without the cost of it where nothing can be wrong.

    `where` is the device's index, cheaper to compare than the device; the CPU's and meta's is -1.
    """
    if (
        type(tensor) is not Tensor
        or tensor.dtype is not usual
        or where < 0
        or tensor.get_device() != where
        or (grad and tensor.requires_grad)
    ):
        _check_tensor(name, tensor, dtypes, device)


def _check_rows(name: str, tensor: Tensor, shape: tuple[int | None, ...], form: str) -> None:
    """Check rank and sizes (None: any), and that the last dim is contiguous."""
    if tensor.layout is not torch.strided:
        _kind(name, "a strided tensor", _form(tensor))
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(w not in (None, g) for w, g in zip(shape, got, strict=True)):
        _value(name, f"shape {form}", list(got))
    if got[-1] > 1 and tensor.stride(-1) != 1:
        _value(name, "a contiguous last dim (stride 1)", f"stride {tensor.stride(-1)}")


def _check_index(
    name: str, index: object, device: torch.device, where: int, size: int, shorter: bool
) -> int:
    """Check a 1-D tensor of indices of that size, or `shorter` ones too; return its size."""
    _check_tensor_at(name, index, torch.int64, INDEX_DTYPES, device, where, False)
    assert isinstance(index, Tensor)
    shape = index.shape
    if len(shape) != 1 or index.stride() != (1,):
        _check_rows(name, index, (None,), f"[M <= {size}]" if shorter else f"[{size}]")
    if shape[0] > size or (shape[0] < size and not shorter):
        _value(name, f"shape [M <= {size}]" if shorter else f"shape [{size}]", list(shape))
    return shape[0]


def check_block_size(cache_block_size: object) -> None:
    """Check the number of tokens a page."""
    if not isinstance(cache_block_size, int) or isinstance(cache_block_size, bool):
        _kind("cache_block_size", "an int (tokens a page)", type(cache_block_size).__name__)
    if not 1 <= cache_block_size <= MAX_BLOCK_SIZE:
        _value("cache_block_size", f"1 to {MAX_BLOCK_SIZE}", cache_block_size)


def check_cache(
    k_cache: Tensor | None, cache_block_size: int, device: torch.device, where: int, addresses: bool
) -> tuple[int, int]:
    """Check a paged FP8 cache; return the slots it has, and its page stride in bytes."""
    if type(cache_block_size) is not int or not 1 <= cache_block_size <= MAX_BLOCK_SIZE:
        check_block_size(cache_block_size)
    _check_tensor_at("k_cache", k_cache, torch.uint8, _UINT8, device, where, False)
    assert k_cache is not None
    payload = cache_block_size * TOKEN_BYTES
    shape, strides = k_cache.shape, k_cache.stride()
    if len(shape) == 3:
        fits = shape[1:] == (cache_block_size, TOKEN_BYTES) and strides[1:] == (TOKEN_BYTES, 1)
    else:
        fits = len(shape) == 2 and shape[1] >= payload and strides[1] == 1
    if not fits:
        _check_pages(k_cache, cache_block_size)
    pages, page_stride = shape[0], strides[0]
    if pages > 1 and (page_stride < payload or page_stride % 2):
        _value("k_cache", f"an even page stride of at least {payload} bytes", page_stride)
    if pages * cache_block_size > MAX_SLOTS:
        _value("k_cache", f"at most {MAX_SLOTS} slots", pages * cache_block_size)
    if addresses and (k_cache.data_ptr() % 2 or k_cache.storage_offset() % 2):
        got = f"{k_cache.data_ptr():#x}, {k_cache.storage_offset()} bytes into its storage"
        _value("k_cache", "an even address", got)
    return pages * cache_block_size, page_stride


def _check_pages(k_cache: Tensor, cache_block_size: int) -> None:
    """Word what is wrong with a cache's shape or inner strides, if anything is."""
    payload = cache_block_size * TOKEN_BYTES
    form = f"[pages, bytes >= {payload}] or [pages, {cache_block_size}, {TOKEN_BYTES}]"
    if k_cache.dim() == 3:
        _check_rows("k_cache", k_cache, (None, cache_block_size, TOKEN_BYTES), form)
        if cache_block_size > 1 and k_cache.stride(1) != TOKEN_BYTES:
            _value("k_cache", f"second stride {TOKEN_BYTES}", k_cache.stride(1))
        return
    _check_rows("k_cache", k_cache, (None, None), form)
    if k_cache.shape[1] < payload:
        _value("k_cache", f"shape {form}", list(k_cache.shape))


def _check_formats(
    q_layout: str,
    q_scale_inv: Tensor | None,
    cache_format: str | None,
    cache_scale: Tensor | None,
    fp8_format: str | None,
) -> None:
    """Refuse, by name, a form that this version does not have."""
    for name, value, known, here in (
        ("q_layout", q_layout, Q_LAYOUTS, "heads"),
        ("cache_format", cache_format, (*CACHE_FORMATS, None), "fp8_ds_mla"),
        ("fp8_format", fp8_format, (*FP8_FORMATS, None), "e4m3fn"),
    ):
        if value is not None and not isinstance(value, str):
            _kind(name, "a str", type(value).__name__)
        if value not in known:
            _value(name, f"one of {known}", repr(value))
        if value not in (here, None):
            _value(name, f"{here!r} (this version has no other)", repr(value))
    for name, scale in (("q_scale_inv", q_scale_inv), ("cache_scale", cache_scale)):
        if scale is not None:
            _value(name, "None (this version has no per-tensor FP8)", type(scale).__name__)


def _check_output_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse a q_out two of whose rows share bytes."""
    tokens, heads, _ = shape
    by_token, by_head, _ = strides
    token_major = (heads <= 1 or by_head >= HEAD_DIM) and (
        tokens <= 1 or by_token >= (heads - 1) * by_head + HEAD_DIM
    )
    head_major = (tokens <= 1 or by_token >= HEAD_DIM) and (
        heads <= 1 or by_head >= (tokens - 1) * by_token + HEAD_DIM
    )
    if token_major or head_major:
        return
    rows = _row_starts(shape, strides)
    if bool((rows.diff() < HEAD_DIM).any()):
        _value("q_out", "rows that do not overlap", f"strides {list(strides)}")


def _row_starts(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Where the rows of a tensor [N, H, 512] start, in elements, in order; on the CPU."""
    tokens = torch.arange(shape[0], device="cpu") * strides[0]
    heads = torch.arange(shape[1], device="cpu") * strides[1]
    return (tokens[:, None] + heads[None, :]).flatten().sort().values


def _rows_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two sets of 512-element rows share a byte; exact, for tensors whose spans meet."""

    def starts(t: Tensor) -> Tensor:
        return t.data_ptr() + _row_starts(t.shape, t.stride()) * t.element_size()

    row_bytes = HEAD_DIM * a.element_size()
    first, other = starts(a), starts(b)
    # The last row of b that starts before a row of a ends reaches into it, or none does.
    before = torch.searchsorted(other, first + row_bytes) - 1
    return bool(((before >= 0) & (other[before.clamp(min=0)] + row_bytes > first)).any())


def reach(tokens: int, heads: int, by_token: int, by_head: int) -> int:
    """Bytes from the first to behind the last of [tokens, heads] bf16 rows of these strides."""
    return 2 * ((tokens - 1) * by_token + (heads - 1) * by_head + HEAD_DIM)


def check_aliasing(
    q: Tensor, q_out: Tensor, q_strides: tuple[int, ...], out_strides: tuple[int, ...]
) -> None:
    """Allow q_out to be q, or to hold q as exactly its first heads, or to share no byte with it.

    Both have at least one row.
    """
    tokens, heads, _ = q.shape
    first, first_out = q.data_ptr(), q_out.data_ptr()
    (by_token, by_head, _), (out_by_token, out_by_head, _) = q_strides, out_strides
    if (
        first == first_out
        and (by_token == out_by_token or tokens == 1)
        and (by_head == out_by_head or heads == 1)
    ):
        return
    end = first + reach(tokens, heads, by_token, by_head)
    end_out = first_out + reach(tokens, q_out.shape[1], out_by_token, out_by_head)
    if first < end_out and first_out < end and _rows_overlap(q, q_out):
        _value(
            "q_out",
            "q itself, a buffer that holds q as exactly its first heads, or no byte of q",
            "a buffer that overlaps q otherwise",
        )


def check_apart(q_out: Tensor, out_strides: tuple[int, ...], kv: Tensor) -> None:
    """Refuse a q_out that shares a byte with kv, which is only read. Both have at least one row."""
    tokens, heads, _ = q_out.shape
    first, first_kv = q_out.data_ptr(), kv.data_ptr()
    end = first + reach(tokens, heads, out_strides[0], out_strides[1])
    end_kv = first_kv + reach(tokens, 1, kv.stride(0), 0)
    if first < end_kv and first_kv < end and _rows_overlap(q_out, kv[:, None]):
        _value("q_out", "no byte of kv, which is only read", "a buffer that overlaps kv")


def check_prologue(  # noqa: PLR0912, PLR0915 (the whole contract, written out for speed)
    q: Tensor | None,
    kv: Tensor | None,
    k_cache: Tensor | None,
    slot_mapping: Tensor | None,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float = 1e-6,
    cache_block_size: int = 64,
    q_out: Tensor | None = None,
    num_heads_out: int | None = None,
    q_layout: str = "heads",
    q_scale_inv: Tensor | None = None,
    kv_norm_weight: Tensor | None = None,
    cache_format: str | None = None,
    cache_scale: Tensor | None = None,
    fp8_format: str | None = None,
    addresses: bool = True,
) -> Layout:
    """Check every argument of a call, without synchronising, and return its sizes and strides.

    `addresses=False` leaves out what needs real memory (alignment, aliasing): for fake tensors.
    Raises TypeError for a wrong kind and ValueError for a wrong value.

    Eager decoding pays for this in every layer, so each tensor's attributes are read once, and the
    functions that word an error are called only where something may be wrong.
    """
    if (
        q_layout != "heads"
        or q_scale_inv is not None
        or cache_format is not None
        or cache_scale is not None
        or fp8_format is not None
    ):
        _check_formats(q_layout, q_scale_inv, cache_format, cache_scale, fp8_format)
    if type(eps) is not float and (type(eps) is bool or not isinstance(eps, (int, float))):
        _kind("eps", "a float", type(eps).__name__)
    if not 0 <= eps <= F32_MAX:
        _value("eps", "a number that f32 holds, from 0 on", eps)
    rows = q if q is not None else kv
    if rows is None:
        _value("q, kv", "at least one of them", "None for both")
    if not isinstance(rows, Tensor):
        _kind("q" if q is not None else "kv", "a bfloat16 tensor", type(rows).__name__)
    device, where, grad = rows.device, rows.get_device(), torch.is_grad_enabled()
    addresses = addresses and not rows.is_meta

    num_heads = heads_out = num_slots = capacity = kv_stride = page_stride = 0
    q_strides: tuple[int, ...] = ()
    out_strides: tuple[int, ...] = ()
    if q is not None:
        if q.dtype is not torch.bfloat16 or (grad and q.requires_grad):
            _check_tensor("q", q, _BF16, device)
        shape, q_strides = q.shape, q.stride()
        if len(shape) != 3 or shape[2] != HEAD_DIM or q_strides[2] != 1 or shape[1] < 1:
            _check_q(q)
        num_tokens, num_heads, _ = shape
        heads_out, out_strides = _check_q_out(shape, q_strides, q, q_out, num_heads_out, grad)
        if q_out is not None and q_out is not q and addresses and num_tokens:
            check_aliasing(q, q_out, q_strides, out_strides)
    else:
        if q_out is not None or num_heads_out is not None:
            _value("q_out" if q_out is not None else "num_heads_out", "None without q", "a value")
        num_tokens = rows.shape[0] if rows.dim() else 0

    if kv is not None:
        _check_tensor_at("kv", kv, torch.bfloat16, _BF16, device, where, grad)
        kv_strides = kv.stride()
        if kv.shape != (num_tokens, HEAD_DIM) or kv_strides[1] != 1:
            _check_rows("kv", kv, (num_tokens, HEAD_DIM), f"[{num_tokens}, {HEAD_DIM}]")
        kv_stride = kv_strides[0]
        if q_out is not None and addresses and num_tokens:
            check_apart(q_out, out_strides, kv)
        capacity, page_stride = check_cache(k_cache, cache_block_size, device, where, addresses)
        num_slots = _check_index("slot_mapping", slot_mapping, device, where, num_tokens, True)
    else:
        if k_cache is not None or slot_mapping is not None:
            name = "k_cache" if k_cache is not None else "slot_mapping"
            _value(name, "None without kv", "a tensor")
        check_block_size(cache_block_size)

    _check_index("position_ids", position_ids, device, where, num_tokens, False)
    _check_tensor_at(
        "cos_sin_cache", cos_sin_cache, torch.float32, TABLE_DTYPES, device, where, grad
    )
    table, table_strides = cos_sin_cache.shape, cos_sin_cache.stride()
    if len(table) != 2 or table[1] != ROPE_DIM or table_strides[1] != 1:
        _check_rows("cos_sin_cache", cos_sin_cache, (None, ROPE_DIM), f"[max_pos, {ROPE_DIM}]")
    if kv_norm_weight is not None:
        if kv is None:
            _value("kv_norm_weight", "None without kv", "a tensor")
        _check_tensor("kv_norm_weight", kv_norm_weight, TABLE_DTYPES, device)
        _check_rows("kv_norm_weight", kv_norm_weight, (HEAD_DIM,), f"[{HEAD_DIM}]")
    sizes = (num_tokens, num_heads, heads_out, num_slots, capacity)
    strides = (q_strides, out_strides, kv_stride, page_stride, table_strides[0])
    return tuple.__new__(Layout, sizes + strides)  # a third of the cost of calling Layout


def _check_q(q: Tensor) -> None:
    """Word what is wrong with q's shape or strides, if anything is."""
    _check_rows("q", q, (None, None, HEAD_DIM), f"[N, H >= 1, {HEAD_DIM}]")
    if q.shape[1] < 1:
        _value("q", f"shape [N, H >= 1, {HEAD_DIM}]", list(q.shape))


def _check_q_out(
    q_shape: torch.Size,
    q_strides: tuple[int, ...],
    q: Tensor,
    q_out: Tensor | None,
    num_heads_out: int | None,
    grad: bool,
) -> tuple[int, tuple[int, ...]]:
    """Check the output form; return the number of heads written, and q_out's strides."""
    num_tokens, num_heads, _ = q_shape
    if num_heads_out is not None:
        if type(num_heads_out) is not int:
            _kind("num_heads_out", "an int", type(num_heads_out).__name__)
        if num_heads_out < num_heads:
            _value("num_heads_out", f"at least q's {num_heads} heads", num_heads_out)
    if q_out is None:
        return num_heads if num_heads_out is None else num_heads_out, ()
    if q_out is q:
        shape, strides = q_shape, q_strides
    else:
        _check_tensor_at("q_out", q_out, torch.bfloat16, _BF16, q.device, q.get_device(), grad)
        shape, strides = q_out.shape, q_out.stride()
    if (
        len(shape) != 3
        or shape[0] != num_tokens
        or shape[1] < num_heads
        or (num_heads_out is not None and shape[1] != num_heads_out)
        or shape[2] != HEAD_DIM
        or strides[2] != 1
    ):
        heads = f"heads >= {num_heads}" if num_heads_out is None else f"{num_heads_out}"
        form = f"[{num_tokens}, {heads}, {HEAD_DIM}]"
        _check_rows("q_out", q_out, (num_tokens, num_heads_out, HEAD_DIM), form)
        if shape[1] < num_heads:
            _value("q_out", f"shape {form}", list(shape))
    if strides[1] < HEAD_DIM or strides[0] < shape[1] * strides[1]:
        _check_output_rows(shape, strides)
    return shape[1], strides


def check_flags(**flags: object) -> None:
    """Check that each is a bool."""
    for name, flag in flags.items():
        if type(flag) is not bool:
            _kind(name, "a bool", type(flag).__name__)


def check_in_bounds(
    slot_mapping: Tensor | None, capacity: int, position_ids: Tensor, num_positions: int
) -> None:
    """Raise IndexError for a slot past the cache's end or a position outside the table.

    Synchronises. Negative slots are fine: they write nothing.
    """
    if slot_mapping is not None and slot_mapping.numel():
        last = int(slot_mapping.max())
        if last >= capacity:
            raise IndexError(f"slot_mapping: expected slots below {capacity}, got {last}")
    if position_ids.numel():
        low, high = (int(x) for x in position_ids.aminmax())
        if low < 0 or high >= num_positions:
            got = low if low < 0 else high
            raise IndexError(f"position_ids: expected 0 <= position < {num_positions}, got {got}")


def check_gather(
    k_cache: Tensor,
    slots: Tensor,
    *,
    cache_block_size: int = 64,
    cache_format: str | None = None,
    cache_scale: Tensor | None = None,
    fp8_format: str | None = None,
    out: Tensor | None = None,
    addresses: bool = True,
) -> int:
    """Check every argument of `gather_dequantize`; return the number of slots the cache has."""
    _check_formats("heads", None, cache_format, cache_scale, fp8_format)
    if not isinstance(k_cache, Tensor):
        _kind("k_cache", "a uint8 tensor", type(k_cache).__name__)
    device, where = k_cache.device, k_cache.get_device()
    addresses = addresses and not k_cache.is_meta
    capacity, _ = check_cache(k_cache, cache_block_size, device, where, addresses)
    _check_tensor("slots", slots, INDEX_DTYPES, device)
    if slots.layout is not torch.strided:
        _kind("slots", "a strided tensor", _form(slots))
    if out is not None:
        _check_tensor("out", out, _BF16, device)
        shape = [*slots.shape, HEAD_DIM]
        if list(out.shape) != shape:
            _value("out", f"shape {shape}", list(out.shape))
        if out.layout is not torch.strided:
            _kind("out", "a strided tensor", _form(out))
        if not out.is_contiguous():
            _value("out", "a contiguous tensor", f"strides {list(out.stride())}")
        for name, read in (("k_cache", k_cache), ("slots", slots)):
            if addresses and _spans_meet(out, read):
                _value("out", f"no byte of {name}, which is only read", f"one that overlaps {name}")
    return capacity


def _spans_meet(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes from a tensor's first to its last reach into those of another."""
    if not a.numel() or not b.numel():
        return False

    def ends(t: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    (first, end), (first_b, end_b) = ends(a), ends(b)
    return first < end_b and first_b < end
