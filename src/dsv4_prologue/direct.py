"""Launch again what Triton has launched before, with raw pointers and at the least host cost.

Triton's own launch looks at every argument anew, some 20 us of Python at each call. Here the
compiled kernel is kept under a key of all that its specialisation depends on, and launched through
the very launcher that Triton would call. Only upstream's NVIDIA backend is known here. Launch
hooks, unaligned tensors, a device that is not the current one, other vendors' builds and whatever
else is not expected take Triton's own path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

_MAX_KEYS = 4096  # a stride that follows the token count makes a key a count

Key = tuple[Any, ...]


class _Known(NamedTuple):
    """A compiled kernel, ready to be launched."""

    run: Callable[..., None]
    function: int
    metadata: Any
    strides_and_constants: tuple[Any, ...]
    runtime: Any  # Triton's knobs that hold the launch hooks


_known: dict[Key, _Known] = {}


def launch(key: Key, programs: int, pointers: tuple[int, ...], counts: tuple[Any, ...]) -> bool:
    """Launch the kernel kept under `key` on the current stream; False where Triton has to.

    `pointers` are those of the kernel's tensor arguments in its order, 0 for None, and `counts`
    what follows them up to the strides.
    """
    known = _known.get(key)
    if known is None:
        return False
    run, function, metadata, rest, runtime = known
    device = key[0]
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if (
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or torch._C._cuda_getDevice() != device
    ):
        return False
    stream = torch._C._cuda_getCurrentRawStream(device)
    run(
        programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *counts, *rest
    )  # fmt: skip
    return True


def remember(key: Key, compiled: Any, arguments: Mapping[str, Any], fixed_from: str) -> None:
    """Keep a kernel that Triton just launched with these arguments, if it is one we can launch.

    The arguments are in the kernel's order; from `fixed_from` on they are the same for every call
    under this key.
    """
    launcher: Any = getattr(compiled, "run", None)
    if type(launcher).__module__ != "triton.backends.nvidia.driver":
        return
    from triton import knobs

    if len(_known) >= _MAX_KEYS:
        _known.clear()
    names = list(arguments)
    rest = tuple(arguments[name] for name in names[names.index(fixed_from) :])
    _known[key] = _Known(launcher, compiled.function, compiled.packed_metadata, rest, knobs.runtime)
