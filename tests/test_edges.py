"""Offsets beyond 2**31: one program of a huge launch, and pages far into a cache."""

from __future__ import annotations

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import Launch, reference, use_card, use_launch
from dsv4_prologue.selection import interpreting
from dsv4_prologue.verify.inputs import rope_table


def one_row(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(1, 512, generator=generator).to(device, torch.bfloat16)
    return kv, rope_table(64, dtype=torch.float32).to(device)


def token_bytes(cache: torch.Tensor, page: int, offset: int, block_size: int) -> torch.Tensor:
    row = cache[page]
    scales = block_size * 576 + offset * 8
    return torch.cat((row[offset * 576 : offset * 576 + 576], row[scales : scales + 8]))


@pytest.mark.parametrize(
    ("page_stride", "page"),
    [(1_039_680, 3031), (1_315_008, 1634), (708_608, 3031)],
)
def test_a_page_beyond_2_31_bytes(device: str, page_stride: int, page: int) -> None:
    """A single token of a packed cache of some GB, of which only one page is ever touched."""
    flat = torch.empty((page + 1) * page_stride, dtype=torch.uint8, device=device)
    cache = flat.as_strided((page + 1, 64 * 584), (page_stride, 1))
    last = cache[page]
    last.fill_(0xA5)
    assert page * page_stride > 2**31
    kv, table = one_row(device)
    slot = torch.tensor([page * 64 + 61], device=device)
    position = torch.tensor([13], device=device)
    dsv4_prologue.prologue(None, kv, cache, slot, position, table)
    small = torch.full((1, 64 * 584), 0xA5, dtype=torch.uint8, device=device)
    _, want = reference.prologue(None, kv, small, slot - page * 64, position, table)
    assert want is not None
    assert torch.equal(last, want[0])
    rows = dsv4_prologue.gather_dequantize(cache, slot)
    assert torch.equal(rows, reference.gather_dequantize(want, slot - page * 64))


@pytest.mark.parametrize("card", ["interpreter", "unknown", "nvidia-hopper"])
@pytest.mark.parametrize("tile", [Launch(1, 1), Launch(8, 1), Launch(1, 4)])
@pytest.mark.parametrize("head_major", [False, True])
def test_the_last_program_of_a_huge_launch(card: str, tile: Launch, head_major: bool) -> None:
    """66600 x 64: q alone is 4 GiB, which is reserved and never touched but for the last rows."""
    if not interpreting():
        pytest.skip("runs one program of a grid, which only the interpreter can")
    from dsv4_prologue.verify.interpreter import only_program

    num_tokens, num_heads = 66600, 64
    if head_major:
        q = torch.empty(num_heads, num_tokens, 512, dtype=torch.bfloat16).transpose(0, 1)
    else:
        q = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16)
    tokens, heads = tile.tokens_per_tile, tile.heads_per_tile
    q[-tokens:, -heads:] = torch.randn(tokens, heads, 512).to(torch.bfloat16)
    before = q[-tokens:, -heads:].clone()
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    positions[-tokens:] = torch.arange(tokens) + 7
    table = rope_table(64, dtype=torch.float32)
    with use_card(card), use_launch(tile), only_program(tile.q_programs(num_tokens, num_heads) - 1):
        dsv4_prologue.prologue(q, None, None, None, positions, table, q_out=q)
    want, _ = reference.prologue(before, None, None, None, positions[-tokens:], table)
    assert want is not None
    distance = q[-tokens:, -heads:].view(torch.int16).int() - want.view(torch.int16).int()
    assert distance.abs().max() <= 1


@pytest.mark.parametrize("tile", [Launch(1, 1), Launch(1, 4, kv_tokens_per_tile=4)])
def test_the_last_rows_of_a_huge_kv(tile: Launch) -> None:
    """2**22 + 8 rows of 512: the last ones lie past 2**31 elements, in kv and read back."""
    if not interpreting():
        pytest.skip("runs one program of a grid, which only the interpreter can")
    from dsv4_prologue.launch import GATHER_ROWS
    from dsv4_prologue.verify.interpreter import only_program

    num_tokens, last = 2**22 + 8, tile.kv_tokens_per_tile
    kv = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
    kv[-last:] = torch.randn(last, 512).to(torch.bfloat16)
    slots = torch.full((num_tokens,), -1)
    slots[-last:] = torch.arange(last) + 9
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    positions[-last:] = torch.arange(last) + 7
    table, cache = rope_table(64, dtype=torch.float32), torch.zeros(1, 64 * 584, dtype=torch.uint8)
    _, want = reference.prologue(
        None, kv[-last:], cache, slots[-last:], positions[-last:], table
    )  # fmt: skip
    with use_card("unknown"), use_launch(tile), only_program(tile.kv_programs(num_tokens) - 1):
        dsv4_prologue.prologue(None, kv, cache, slots, positions, table)
    assert want is not None
    assert torch.equal(cache, want)
    out = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
    with use_card("unknown"), only_program(num_tokens // GATHER_ROWS - 1):
        dsv4_prologue.gather_dequantize(cache, slots, out=out)
    rows = reference.gather_dequantize(want, slots[-last:])
    assert torch.equal(out[-last:], rows)


def test_a_tiny_q_with_a_huge_row_stride(device: str) -> None:
    """Two tokens 2**31 elements apart: 4 GiB that are reserved and not touched between."""
    stride = 2**31 + 512
    flat = torch.empty(stride + 1024, dtype=torch.bfloat16, device=device)
    q = flat.as_strided((2, 1, 512), (stride, 512, 1))
    generator = torch.Generator().manual_seed(4)
    q.copy_(torch.randn(2, 1, 512, generator=generator))
    positions = torch.tensor([5, 9], device=device)
    table = rope_table(64, dtype=torch.float32).to(device)
    want, _ = reference.prologue(q, None, None, None, positions, table)
    dsv4_prologue.prologue(q, None, None, None, positions, table, q_out=q)
    assert want is not None
    distance = q.view(torch.int16).int() - want.view(torch.int16).int()
    assert distance.abs().max() <= 1
