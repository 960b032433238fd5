"""Canaries: buffers whose stray writes show, and digests of what may only be read.

A `Buffer` is filled with poison whose value depends on its place, so that a stray write is found
without a copy of what was there; a digest finds a changed input without one. Both work in slices,
at any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_prologue.contract import DATA_BYTES, SCALE_BYTES

#: Elements looked at in one step, which bounds the memory of everything here and in `compare`.
SLICE = 1 << 24


def poison(start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Poison for elements `[start, stop)` of a buffer: `[stop - start]`, bf16 NaNs or bytes.

    Each place has its own value (127 NaN payloads, 251 bytes; both primes, so no two rows look
    alike), and bf16 poison that is read makes the result NaN.
    """
    place = torch.arange(start, stop, device=device)
    if dtype == torch.bfloat16:
        return (place % 127 + 0x7F81).to(torch.int16).view(torch.bfloat16)
    return ((place % 251 + 0xA5) & 0xFF).to(dtype)


def slices(count: int, row: int = 1) -> Iterator[tuple[int, int]]:
    """The ranges that cut `count` rows of `row` elements into steps of about SLICE elements."""
    step = max(1, SLICE // max(1, row))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: NaN compares equal to itself there."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


@dataclass(frozen=True, eq=False)
class Buffer:
    """A poisoned buffer `flat` that holds a tensor: the box `inner` within the box `outer`.

    `outer` starts `front` elements in; what lies before it, after it, and between the boxes is
    canary. Shapes are 3-D: [tokens, heads, dims], [heads, tokens, dims] or [pages, 1, bytes].
    """

    name: str
    flat: Tensor
    front: int
    outer: tuple[int, int, int]
    inner: tuple[int, int, int]

    @classmethod
    def make(
        cls,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        inner: tuple[int, int, int],
        outer: tuple[int, int, int],
        front: int,
        tail: int,
        *,
        filled: bool = False,
    ) -> Buffer:
        """Allocate and poison at least `front` + `outer` + `tail` elements, a multiple of 8.

        `filled`: the caller fills the tensor, so a box without gaps is not poisoned first.
        """
        size = -(-(front + math.prod(outer) + tail) // 8) * 8
        buffer = cls(name, torch.empty(size, dtype=dtype, device=device), front, outer, inner)
        for start, stop, row in buffer._ranges():
            if row is None or inner != outer or not filled:
                buffer.flat[start:stop] = poison(start, stop, dtype, device)
        return buffer

    def _ranges(self) -> Iterator[tuple[int, int, int | None]]:
        """All of `flat` in steps: start, stop, and the outer box's row there, None outside it."""
        row = self.outer[1] * self.outer[2]
        end = self.front + self.outer[0] * row
        yield 0, self.front, None
        for i, j in slices(self.outer[0], row):
            yield self.front + i * row, self.front + j * row, i
        yield end, self.flat.numel(), None

    @property
    def box(self) -> Tensor:
        """The outer box, `outer`."""
        end = self.front + math.prod(self.outer)
        return self.flat[self.front : end].view(self.outer)

    @property
    def view(self) -> Tensor:
        """The tensor, `inner`."""
        a, b, c = self.inner
        return self.box[:a, :b, :c]

    def stray_writes(self, written: Tensor | None = None) -> tuple[int, int | None]:
        """Elements that changed and may not have: how many, and where the first is in `flat`.

        `written` bool [pages, page size]: the buffer is a cache, and of it only these slots' bytes
        may change. Without it the whole inner box may.
        """
        count, first = 0, None
        for start, stop, row in self._ranges():
            if row is not None and written is None and self.inner == self.outer:
                continue
            expected = poison(start, stop, self.flat.dtype, self.flat.device)
            changed = bits(self.flat[start:stop]) != bits(expected)
            if row is not None:
                self._forgive(changed.view(-1, *self.outer[1:]), row, written)
            here = int(changed.sum())
            if here and first is None:
                first = start + int(changed.nonzero()[0])
            count += here
        return count, first

    def _forgive(self, changed: Tensor, row: int, written: Tensor | None) -> None:
        """Clear, in rows from `row` on of the outer box, the marks of what may change."""
        a, b, c = self.inner
        if written is None:
            changed[: max(0, a - row), :b, :c] = False
            return
        page_size = written.shape[1]
        kept = ~written[row : row + changed.shape[0], :, None]
        data, scales = changed[:, 0, :c].split((page_size * DATA_BYTES, page_size * SCALE_BYTES), 1)
        data.unflatten(1, (page_size, DATA_BYTES)).logical_and_(kept)
        scales.unflatten(1, (page_size, SCALE_BYTES)).logical_and_(kept)


def digest(flat: Tensor) -> int:
    """A 64-bit digest of a contiguous tensor's bytes.

    The sum of odd weights times words modulo 2**64: any single changed word changes it for
    certain, since an odd number has an inverse; several changes cancel once in 2**64.
    """
    flat = flat.flatten()
    bytes_ = flat.numel() * flat.element_size()
    words = flat.view(torch.int64 if bytes_ % 8 == 0 else torch.uint8)
    total = 0
    for start, stop in slices(words.numel()):
        weight = torch.arange(start, stop, device=flat.device) * 2 + 1
        total += int((words[start:stop] * weight).sum())
    return total % 2**64
