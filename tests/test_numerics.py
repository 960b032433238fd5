"""The kernels' arithmetic on its own: the encoder, the decoder, the scale byte."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

import torch  # noqa: E402 (after the skip)
import triton.language as tl  # noqa: E402
from test_contract import ALL_BF16, e4m3_probes, groups_of, near_edges  # noqa: E402

from dsv4_prologue import reference  # noqa: E402
from dsv4_prologue.kernels import numerics  # noqa: E402
from dsv4_prologue.selection import interpreting  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels")


@triton.jit
def encode_kernel(x_ptr, code_ptr, n, BLOCK: tl.constexpr, FP8_CAST: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(code_ptr + i, numerics.e4m3(x, FP8_CAST), mask=i < n)


@triton.jit
def quantize_kernel(x_ptr, code_ptr, scale_ptr, TOKENS: tl.constexpr, FP8_CAST: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    group = token * 8 + tl.arange(0, 8)[None, :]
    i = group[:, :, None] * 64 + tl.arange(0, 64)[None, None, :]
    codes, scale = numerics.quantize(tl.load(x_ptr + i), FP8_CAST)
    tl.store(code_ptr + i, codes)
    tl.store(scale_ptr + group, scale.to(tl.uint8))


@triton.jit
def decode_kernel(code_ptr, scale_ptr, x_ptr, factor_ptr):
    i = tl.arange(0, 256)
    tl.store(x_ptr + i, numerics.e4m3_value(tl.load(code_ptr + i).to(tl.int32)))
    tl.store(factor_ptr + i, numerics.scale_value(tl.load(scale_ptr + i).to(tl.int32)))


def launch(kernel: object, grid: int, **arguments: object) -> None:
    if interpreting():
        from dsv4_prologue.verify import interpreter

        interpreter.run(kernel, (grid,), arguments)
    else:
        kernel[(grid,)](**arguments, enable_fp_fusion=False)  # type: ignore[index]


def encode(x: torch.Tensor, device: str, cast: str) -> torch.Tensor:
    codes = torch.full(x.shape, 0xA5, dtype=torch.uint8, device=device)
    block = 16384
    grid = triton.cdiv(x.numel(), block)
    launch(
        encode_kernel,
        grid,
        x_ptr=x.to(device),
        code_ptr=codes,
        n=x.numel(),
        BLOCK=block,
        FP8_CAST=cast,
    )
    return codes.cpu()


def test_the_integer_encoder_on_every_bf16(device: str) -> None:
    x = ALL_BF16.float()
    codes = encode(x, device, "integer")
    nan = x.isnan()
    assert (codes[nan] == 0x7F).all()
    torch_codes = x[~nan].clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes[~nan], torch_codes)


def test_the_integer_encoder_on_ties_and_edges(device: str) -> None:
    probes = e4m3_probes()
    assert torch.equal(encode(probes, device, "integer"), reference.encode_e4m3(probes))


def test_the_integer_encoder_on_the_subnormal_range(device: str) -> None:
    x = torch.linspace(-(2**-6), 2**-6, 65537)
    assert torch.equal(encode(x, device, "integer"), reference.encode_e4m3(x))


def test_the_compilers_cast_within_range(device: str) -> None:
    x = torch.cat((e4m3_probes(), ALL_BF16.float()))
    x = x[x.abs() <= 448]
    assert torch.equal(encode(x, device, "compiler"), reference.encode_e4m3(x))


@pytest.mark.parametrize("cast", ["integer", "compiler"])
def test_scale_byte_and_codes_near_every_edge(device: str, cast: str) -> None:
    x = groups_of(near_edges())[::2]
    x = x[: x.shape[0] // 512 * 512].contiguous()
    codes = torch.full(x.shape, 0xA5, dtype=torch.uint8, device=device)
    scale = torch.full(x.shape[:1], 0xA5, dtype=torch.uint8, device=device)
    launch(
        quantize_kernel,
        x.shape[0] // 512,
        x_ptr=x.to(device),
        code_ptr=codes,
        scale_ptr=scale,
        TOKENS=64,
        FP8_CAST=cast,
    )
    want_codes, want_scale = reference.quantize(x)
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(codes.cpu(), want_codes)


def test_every_code_and_scale_byte_decodes_exactly(device: str) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=device)
    x, factor = torch.zeros(2, 256, device=device).unbind(0)
    launch(decode_kernel, 1, code_ptr=every, scale_ptr=every, x_ptr=x, factor_ptr=factor)
    nan = reference._E4M3_VALUES.isnan()
    assert torch.equal(x.cpu()[~nan], reference._E4M3_VALUES[~nan])
    assert x.cpu()[0x80].signbit()
    assert x.cpu()[nan].isnan().all()
    want = torch.exp2(torch.arange(255, dtype=torch.float64) - 127).float()
    assert torch.equal(factor.cpu()[:255], want)
    assert factor[255].isnan()
