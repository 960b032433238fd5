"""The numbers of the contract, and the oracle against exact arithmetic."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from dsv4_prologue import contract, reference
from dsv4_prologue.contract import PageLayout, bytes_moved

pytestmark = pytest.mark.once

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_numbers() -> None:
    assert contract.HEAD_DIM == contract.NOPE_DIM + contract.ROPE_DIM == 512
    assert contract.NUM_GROUPS * contract.GROUP == contract.NOPE_DIM
    assert (contract.DATA_BYTES, contract.TOKEN_BYTES) == (576, 584)
    floor = torch.tensor(contract.ABSMAX_FLOOR).view(torch.int32)
    assert int(floor) == contract.ABSMAX_FLOOR_BITS == 0x38D1B717
    assert len(contract.CORE_NUM_TOKENS) * len(contract.CORE_NUM_HEADS) == 22


def test_page_layout() -> None:
    layout = PageLayout(64)
    assert layout.payload_bytes == 37376
    assert layout.usual_stride == 37440
    assert PageLayout(1).usual_stride == 1152
    assert layout.scale_offset(0) == 36864
    assert layout.scale_offset(63) + 8 == layout.payload_bytes


def test_bytes_moved() -> None:
    assert bytes_moved(1, 64) == 64 * 2048 + 1024 + 584 + 256
    assert bytes_moved(32768, 128) == 32768 * (128 * 2048 + 1864)


FLOOR = Fraction(float(torch.tensor(1e-4)))


def is_scale_byte(byte: int, absmax: float) -> bool:
    """Whether byte - 127 is the smallest e with 2**e >= max(absmax, f32(1e-4)) / 448."""
    scale, wanted = Fraction(2) ** (byte - 127), max(Fraction(absmax), FLOOR) / 448
    return scale >= wanted > scale / 2


def groups_of(absmax: torch.Tensor) -> torch.Tensor:
    """Groups f32 [n, 64] whose absmax is given; it stands anywhere, with either sign."""
    generator = torch.Generator().manual_seed(1)
    n = absmax.shape[0]
    rows = torch.rand(n, 64, generator=generator) * absmax[:, None] * 0.5
    where = torch.randint(0, 64, (n,), generator=generator)
    sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    rows[torch.arange(n), where] = absmax * sign
    return rows


def test_scale_byte_of_every_bf16_absmax() -> None:
    absmax = ALL_BF16[ALL_BF16.float().isfinite() & ~ALL_BF16.float().signbit()].float()
    _, scale = reference.quantize(groups_of(absmax))
    assert set(scale.tolist()) == set(range(105, 248))
    edges = 0
    for a, byte in zip(absmax.tolist(), scale.tolist(), strict=True):
        assert is_scale_byte(byte, a), a
        edges += byte < 247 and Fraction(a) == 448 * Fraction(2) ** (byte - 127)
    assert edges > 120


def near_edges() -> torch.Tensor:
    """f32 within 64 ULP of 1.75 * 2**k, for all k that f32 has."""
    k = torch.arange(-126, 128)
    edge = torch.ldexp(torch.full(k.shape, 1.75, dtype=torch.float64), k).float().view(torch.int32)
    near = (edge[:, None] + torch.arange(-64, 65)[None, :]).flatten().to(torch.int32)
    return near.view(torch.float32)


def test_scale_byte_near_every_edge_in_f32() -> None:
    absmax = near_edges()
    assert absmax.numel() == 254 * 129
    _, scale = reference.quantize(groups_of(absmax))
    for a, byte in zip(absmax.tolist(), scale.tolist(), strict=True):
        assert is_scale_byte(byte, a), a


def is_e4m3(code: int, x: float) -> bool:
    """Whether code is the nearest finite value to x clamped to 448, ties to the even code."""
    if x != x:
        return code == 0x7F
    magnitude, negative = code & 0x7F, code >= 0x80
    if magnitude == 0x7F or negative != (math.copysign(1.0, x) < 0):
        return False
    a = min(abs(Fraction(x)), Fraction(448))
    here = Fraction(float(reference._E4M3_VALUES[magnitude]))
    for other in (magnitude - 1, magnitude + 1):
        if 0 <= other < 127:
            there = Fraction(float(reference._E4M3_VALUES[other]))
            if abs(there - a) < abs(here - a):
                return False
            if abs(there - a) == abs(here - a) and magnitude % 2:
                return False
    return True


def e4m3_probes() -> torch.Tensor:
    """f32: every E4M3 value and every tie between two, with f32 neighbours on both sides."""
    values = reference._E4M3_VALUES[:127].double()
    ties = (values[1:] + values[:-1]) / 2
    points = torch.cat((values, ties, torch.tensor([464.0, 480.0, 512.0, 1e9]).double())).float()
    bits = points.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    probes = bits[bits >= 0].view(torch.float32)
    return torch.cat((probes, -probes))


def test_the_oracles_e4m3_is_exact() -> None:
    probes = e4m3_probes()
    for x, code in zip(probes.tolist(), reference.encode_e4m3(probes).tolist(), strict=True):
        assert is_e4m3(code, x), x


def test_the_oracles_e4m3_on_every_bf16() -> None:
    x = ALL_BF16.float()
    code = reference.encode_e4m3(x)
    assert (code[x.isnan()] == 0x7F).all()
    value = reference._E4M3_VALUES[code.long()]
    kept = x[~x.isnan()].clamp(-448, 448)
    spacing = torch.exp2(torch.frexp(kept.abs().clamp(min=2**-6)).exponent - 4.0)
    assert ((value[~x.isnan()] - kept).abs() <= spacing / 2).all()


@pytest.mark.parametrize(
    ("value", "code", "byte"),
    [(0.0, 0x00, 105), (-0.0, 0x80, 105), (448.0, 0x7E, 127), (450.0, 0x76, 128)],
)
def test_fixed_points(value: float, code: int, byte: int) -> None:
    codes, scale = reference.quantize(torch.full((1, 64), value))
    assert set(codes.flatten().tolist()) == {code}
    assert scale.tolist() == [byte]


def test_bf16_max() -> None:
    _, scale = reference.quantize(torch.full((1, 64), torch.finfo(torch.bfloat16).max))
    assert scale.tolist() == [247]


def test_a_group_that_is_not_finite() -> None:
    group = torch.ones(3, 64)
    group[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0])
    group[1, 5] = -torch.tensor(float("nan"))
    codes, scale = reference.quantize(group)
    assert scale.tolist() == [255, 255, 119]
    assert codes[0, :5].tolist() == [0x7F, 0x7E, 0xFE, 0x80, 0x00]
    assert codes[1, 5] == 0x7F
    assert set(codes[1].tolist()) == {0x7F, 0x00}


def test_the_oracle_loads_no_kernel() -> None:
    import ast
    from pathlib import Path

    tree = ast.parse(Path(str(reference.__file__)).read_text())
    imported = {
        f"{'.' * node.level}{node.module or ''}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    } | {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"__future__", "functools", "torch", "dsv4_prologue.contract"}


def test_reading_back_every_code_and_scale() -> None:
    """Every E4M3 code under every scale byte, against exact arithmetic."""
    cache = torch.zeros(256, 1, 584, dtype=torch.uint8)
    codes = torch.arange(448) % 256
    cache[:, 0, :448] = codes.to(torch.uint8)
    cache[:, 0, 576:583] = torch.arange(256, dtype=torch.uint8)[:, None]
    rows = reference.gather_dequantize(cache, torch.arange(256), cache_block_size=1)
    values = reference._E4M3_VALUES.double()[codes]
    for byte in range(256):
        exact = values * 2.0 ** (byte - 127) if byte < 255 else values * float("nan")
        want = exact.to(torch.bfloat16)  # f64 to bf16 rounds once
        assert torch.equal(
            rows[byte, :448].view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()]
        ), byte
        assert rows[byte, :448][want.isnan()].isnan().all()


PEAK = r"""
import pathlib, re, torch
from dsv4_prologue import reference

def run(q):
    positions = torch.arange(len(q)) % 8
    return reference.prologue(q, None, None, None, positions, torch.ones(8, 64))

def peak():
    status = pathlib.Path("/proc/self/status").read_text()  # getrusage's knows the parent's, too
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])

run(torch.ones(1, 1, 512, dtype=torch.bfloat16))  # loads what the first call loads
q = torch.ones(2048, 128, 512, dtype=torch.bfloat16)  # made without a larger copy
before = peak()
kept = run(q)
print((peak() - before) / (q.numel() * 2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux tells it")
def test_the_oracles_memory() -> None:
    """Above its inputs at most four times q, unsliced.

    At 131072 x 128 q is 16 GiB: with q and the operator's result beside, below 100 GiB.
    """
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 2 < float(done.stdout) < 4  # less than q's f32 copy would be no measurement
