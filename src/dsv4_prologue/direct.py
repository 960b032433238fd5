"""Launch again what Triton has launched before, with raw pointers and at the least host cost.

Triton's own launch looks at every argument anew at each call, and our checks read every tensor's
attributes. Eager decoding pays both in every layer, more than the kernel takes (`bench --mode host`
tells how much). Two memories save them:

* `launch` keeps compiled kernels under a key of all that their specialisation depends on, and
  launches through the very launcher that Triton would call;
* `repeat` keeps whole calls: tensors with the dtypes, devices, sizes and strides of a call that was
  checked before (one comparison, by the guard that torch.compile has for it) need no other check
  than that of their addresses.

Only upstream's NVIDIA backend is known here. Launch hooks, unaligned tensors, a device that is not
the current one, other vendors' builds and whatever else is not expected take the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

_MAX_KEYS = 4096  # compiled kernels kept; a stride that follows the token count makes many
_MAX_CALLS = 16  # calls kept: one a form and token count, and a step repeats its own in each layer

#: torch's guard is no public name; these minor versions of torch were seen to have it as used here.
_GUARD_VERSIONS = ("2.11", "2.13")

#: Looked up once, since a call pays for every attribute. CPU builds of torch have neither.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

Key = tuple[Any, ...]
_Guard: Any = None
_empty: Any = None  # of sizes, strides and a dtype, on the current device: what torch.compile calls
if ".".join(torch.__version__.split(".")[:2]) in _GUARD_VERSIONS:
    _Guard = torch._C._dynamo.guards.TensorGuards
    _empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

#: What becomes of Q: a tensor made by the call, q itself, or the caller's buffer.
NEW, IN_PLACE, BUFFER = range(3)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel, ready to be launched."""

    device: int
    run: Callable[..., None]
    head: tuple[Any, ...]  # what the launcher takes between the stream and the kernel's arguments
    strides_and_constants: tuple[Any, ...]
    runtime: Any  # Triton's knobs that hold the launch hooks
    enter: Any  # the hooks it was launched with, and what is hooked in: nothing, so far
    entered: Any
    leave: Any
    left: Any


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that was checked and launched."""

    form: int
    options: tuple[Any, ...]
    same: Callable[..., bool]
    reach: int  # bytes from the first of q to behind its last
    reach_out: int
    reach_kv: int
    may_coincide: bool  # q and q_out
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    programs: int
    kernel: Kernel
    fixed: tuple[Any, ...]  # the kernel's arguments behind its pointers


_kernels: dict[Key, Kernel] = {}
_calls: list[_Call] = []  # the one kept last comes first


def _ready(kernel: Kernel) -> bool:
    """Whether it can be launched here and now; where not, Triton has to."""
    runtime = kernel.runtime
    return not (
        kernel.entered
        or kernel.left
        or runtime.launch_enter_hook is not kernel.enter
        or runtime.launch_exit_hook is not kernel.leave
        or _current_device() != kernel.device
    )


def launch(key: Key, programs: int, pointers: tuple[int, ...], counts: tuple[Any, ...]) -> bool:
    """Launch the kernel kept under `key` on the current stream; False where Triton has to.

    `pointers` are those of the kernel's tensor arguments in its order, 0 for None, and `counts`
    what follows them up to the strides.
    """
    kernel = _kernels.get(key)
    if kernel is None or not _ready(kernel):
        return False
    stream, fixed = _current_stream(kernel.device), kernel.strides_and_constants
    kernel.run(programs, 1, 1, stream, *kernel.head, *pointers, *counts, *fixed)
    return True


def remember(key: Key, compiled: Any, arguments: Mapping[str, Any], fixed_from: str) -> None:
    """Keep a kernel that Triton just launched with these arguments, if it is one we can launch.

    The key begins with the device's index. The arguments are in the kernel's order; from
    `fixed_from` on they are the same for every call under this key.
    """
    launcher: Any = getattr(compiled, "run", None)
    if type(launcher).__module__ != "triton.backends.nvidia.driver":
        return
    import triton

    if not hasattr(triton, "knobs"):  # before 3.4
        return
    names = list(arguments)
    rest = tuple(arguments[name] for name in names[names.index(fixed_from) :])
    run: Callable[..., None] = launcher
    head: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
    # In this version the launcher does nothing more, for a kernel without scratch memory.
    if triton.__version__ == "3.6.0" and not (
        launcher.global_scratch_size or launcher.profile_scratch_size
    ):
        run = launcher.launch
        modes = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        head = (head[0], *modes, *head[1:])
    if len(_kernels) >= _MAX_KEYS:
        _kernels.clear()
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    entered, left = getattr(enter, "calls", enter), getattr(leave, "calls", leave)
    _kernels[key] = Kernel(key[0], run, head, rest, runtime, enter, entered, leave, left)


def remember_call(
    tensors: tuple[Tensor, ...],
    form: int,
    options: tuple[Any, ...],
    aliasing: tuple[int, int, int, bool],
    out: tuple[tuple[int, ...], tuple[int, ...]],
    key: Key,
    programs: int,
    counts: tuple[Any, ...],
) -> None:
    """Keep a call whose tensors were checked and whose kernel is kept under `key`.

    `tensors` are the six inputs, and q_out in a call of form BUFFER; `out` its sizes and strides.
    """
    kernel = _kernels.get(key)
    # The guard takes each tensor once, and knows a tensor by its object. It compares whether a
    # tensor requires a gradient, not whether gradients are on.
    if _Guard is None or kernel is None or len(set(map(id, tensors))) < len(tensors):
        return
    if any(tensor.requires_grad for tensor in tensors):
        return
    for call in _calls:
        if (call.form, call.options) == (form, options) and call.same(*tensors):
            return  # kept, and not repeated for where its tensors lie
    guard = _Guard(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    fixed = counts + kernel.strides_and_constants
    kept = _Call(form, options, guard.check, *aliasing, *out, programs, kernel, fixed)
    _calls.insert(0, kept)
    del _calls[_MAX_CALLS:]


def repeat(
    inputs: tuple[Any, ...], q_out: Tensor | None, options: tuple[Any, ...]
) -> Tensor | None:
    """Make a call as one before it was made; return its q_out, or None if it has to be checked.

    `inputs` are q, kv, k_cache, slot_mapping, position_ids and cos_sin_cache; q_out may be q, or
    None to have it made. Nothing is written unless q_out is returned. The guard also tells tensors
    of a subclass, and calls under a transform; not every mode that looks at what is called.
    """
    q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache = inputs
    form = NEW if q_out is None else IN_PLACE if q_out is q else BUFFER
    tensors = (*inputs, q_out) if form == BUFFER else inputs
    for call in _calls:
        # The form first: a guard takes only as many tensors as it was made for.
        if call.form != form or call.options != options or not call.same(*tensors):
            continue
        kernel = call.kernel
        if not _ready(kernel):
            return None
        at, kv_at, cache_at = q.data_ptr(), kv.data_ptr(), k_cache.data_ptr()
        slots_at, positions_at = slot_mapping.data_ptr(), position_ids.data_ptr()
        table_at, out_at = cos_sin_cache.data_ptr(), at
        if form != IN_PLACE:
            if q_out is None:
                q_out = _empty(call.out_shape, call.out_strides, torch.bfloat16)
            out_at = q_out.data_ptr()
            apart = out_at >= at + call.reach or at >= out_at + call.reach_out
            if not (apart or (at == out_at and call.may_coincide)):
                return None
        if not (out_at >= kv_at + call.reach_kv or kv_at >= out_at + call.reach_out):
            return None
        if (at | out_at | kv_at | cache_at | slots_at | positions_at | table_at) % 16:
            return None
        stream = _current_stream(kernel.device)
        # The bf16 view of the cache lies where the cache does; there is no weight.
        kernel.run(
            call.programs, 1, 1, stream, *kernel.head,
            at, out_at, kv_at, cache_at, cache_at, slots_at, positions_at, table_at, 0,
            *call.fixed,
        )  # fmt: skip
        return q_out
    return None


def parts(inputs: tuple[Tensor, ...]) -> dict[str, Callable[[], object]]:
    """What `repeat` does for a call in place, piece by piece, to be timed; nothing if none is kept.

    The launcher's is the very call that `repeat` makes: it launches the kernel.
    """
    call = next((one for one in _calls if one.form == IN_PLACE and one.same(*inputs)), None)
    if call is None:
        return {}
    kernel = call.kernel
    at, kv_at, cache_at, *others = (tensor.data_ptr() for tensor in inputs)
    pointers = (at, at, kv_at, cache_at, cache_at, *others, 0)
    front = (call.programs, 1, 1, _current_stream(kernel.device), *kernel.head)
    return {
        "Triton's launcher": partial(kernel.run, *front, *pointers, *call.fixed),
        "the comparison of six tensors": partial(call.same, *inputs),
        "their addresses": lambda: [tensor.data_ptr() for tensor in inputs],
        "hooks, device, stream": lambda: _ready(kernel) and _current_stream(kernel.device),
        "all of these, as they are repeated": partial(repeat, inputs, inputs[0], call.options),
    }
