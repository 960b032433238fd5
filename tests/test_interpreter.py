"""The exact interpreter: its casts against an oracle, its checker against planted faults."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
np = pytest.importorskip("numpy", reason="numpy is not installed")
triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: these are tests of it", allow_module_level=True)

import triton.language as tl  # noqa: E402 (after the skip)
import triton.runtime.interpreter as ti  # noqa: E402

from dsv4_prologue.verify import interpreter  # noqa: E402
from dsv4_prologue.verify.interpreter import Finding, MemoryFault, run  # noqa: E402


def faults(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> list[Finding]:
    """What a launch that must fail reports."""
    with pytest.raises(MemoryFault) as caught:
        run(kernel, grid, arguments)
    return list(caught.value.findings)


def int8s(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int8)


# ------------------------------------------------------------------------------------------ casts


class Format(NamedTuple):
    """A float of few bits, described independently of torch and of Triton."""

    dtype: torch.dtype
    mantissa: int
    bias: int
    finite: int  # number of finite codes that are not negative
    nan: int
    overflows: bool = False  # to Inf, where the others saturate
    fnuz: bool = False

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def value(self, code: np.ndarray) -> np.ndarray:
        """Values in f64 of codes that are not negative."""
        exponent, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        normal = (exponent > 0) << self.mantissa
        return np.ldexp(
            (normal + fraction).astype(np.float64),
            np.maximum(exponent, 1) - self.bias - self.mantissa,
        )

    def decode(self) -> np.ndarray:
        """All codes' values in f64."""
        half = 1 << (self.bits - 1)
        code = np.arange(half)
        values = self.value(code)
        if not self.fnuz:
            values[self.finite :] = np.nan
            if self.bits == 16 or self.mantissa == 2:  # IEEE: an Inf comes before the NaNs
                values[self.finite] = np.inf
        values = np.concatenate([values, -values])
        if self.fnuz:
            values[half] = np.nan
        return values

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Codes of f32 values: to nearest, ties to the even code, by search in the table."""
        table = self.value(np.arange(self.finite + 1))  # one more: where rounding overflows
        with np.errstate(invalid="ignore"):  # signalling NaNs
            magnitude = np.abs(values.astype(np.float64))
        low = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, self.finite - 1)
        middle = (table[low] + table[low + 1]) / 2
        up = (magnitude > middle) | ((magnitude == middle) & (low % 2 == 1))
        code = np.minimum(low + up, self.finite - (not self.overflows))
        sign = np.signbit(values) & ~(self.fnuz & (code == 0))
        return np.where(np.isnan(values), self.nan, code + (sign << (self.bits - 1)))


FORMATS = {
    "bf16": Format(torch.bfloat16, 7, 127, 0x7F80, 0x7FFF, overflows=True),
    "fp8e4nv": Format(torch.float8_e4m3fn, 3, 7, 0x7F, 0x7F),
    "fp8e5": Format(torch.float8_e5m2, 2, 15, 0x7C, 0x7F),
    "fp8e4b8": Format(torch.float8_e4m3fnuz, 3, 8, 0x80, 0x80, fnuz=True),
    "fp8e5b16": Format(torch.float8_e5m2fnuz, 2, 16, 0x80, 0x80, fnuz=True),
}
FP8 = [name for name in FORMATS if name != "bf16"]


@triton.jit
def cast_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty), mask=i < n)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    run(
        cast_kernel,
        (triton.cdiv(len(x), 65536),),
        {"x_ptr": x, "y_ptr": y, "n": len(x), "BLOCK": 65536},
    )
    return y


def codes(x: torch.Tensor) -> np.ndarray:
    """The bit patterns of 8- or 16-bit elements as integers that are not negative."""
    bits = 8 * x.itemsize
    return x.view({8: torch.uint8, 16: torch.int16}[bits]).numpy().astype(np.int64) & (
        (1 << bits) - 1
    )


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(65536).to(torch.int16).view(dtype)


def probes(form: Format) -> torch.Tensor:
    """f32: each value and tie of a format with its neighbours, the ends, NaNs, and at random."""
    table = form.value(np.arange(form.finite + 1))
    with np.errstate(over="ignore"):  # bf16's table ends in 2**128, which is Inf in f32
        points = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
    special = np.array(
        [
            448,
            464,
            465,
            480,
            57344,
            61440,
            65536,
            1e9,
            3.4e38,
            np.inf,
            np.nan,
            1e-45,
            1e-40,
            2**-126,
        ],
        dtype=np.float32,
    )
    payloads = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=np.uint32).view(np.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32)
    around = [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)]
    positive = np.concatenate([points, *around, special, payloads])
    return torch.from_numpy(np.concatenate([positive, -positive, bits.view(np.float32)]))


@pytest.mark.parametrize("name", FORMATS)
def test_f32_is_rounded_to_nearest_even(name: str) -> None:
    form = FORMATS[name]
    x = probes(form)
    np.testing.assert_array_equal(codes(cast(x, form.dtype)), form.encode(x.numpy()))


@pytest.mark.parametrize("source", ["bf16", "f16"])
@pytest.mark.parametrize("name", FP8)
def test_all_16_bit_patterns_to_fp8(name: str, source: str) -> None:
    form = FORMATS[name]
    x = all_codes(torch.bfloat16 if source == "bf16" else torch.float16)
    np.testing.assert_array_equal(codes(cast(x, form.dtype)), form.encode(x.float().numpy()))


def test_the_values_that_the_plain_interpreter_gets_wrong() -> None:
    x = torch.tensor([127.27, 464.0, 480.0, float("inf"), -float("inf"), float("nan"), -0.0])
    assert codes(cast(x, torch.float8_e4m3fn)).tolist() == [
        0x70,
        0x7E,
        0x7E,
        0x7E,
        0xFE,
        0x7F,
        0x80,
    ]
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    assert codes(cast(x, torch.bfloat16)).tolist() == [0x3F80, 0x3F82, 0x3F81]


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_exactly(name: str) -> None:
    form = FORMATS[name]
    decoded = cast(all_codes(form.dtype), torch.float32).numpy()
    np.testing.assert_array_equal(decoded, form.decode().astype(np.float32))
    finite = ~np.isnan(decoded)
    np.testing.assert_array_equal(np.signbit(decoded)[finite], np.signbit(form.decode())[finite])


@pytest.mark.parametrize("name", FP8)
def test_fp8_to_bf16_and_f16(name: str) -> None:
    form = FORMATS[name]
    for dtype in (torch.bfloat16, torch.float16):
        decoded = cast(all_codes(form.dtype), dtype).float().numpy()
        np.testing.assert_array_equal(decoded, form.decode().astype(np.float32))


def test_f16_and_bf16_either_way() -> None:
    halves = all_codes(torch.float16)
    expected = FORMATS["bf16"].encode(halves.float().numpy())
    np.testing.assert_array_equal(codes(cast(halves, torch.bfloat16)), expected)
    brains = all_codes(torch.bfloat16)
    with np.errstate(over="ignore"):
        expected = brains.float().numpy().astype(np.float16)
    np.testing.assert_array_equal(cast(brains, torch.float16).numpy(), expected)


def test_integers_to_bf16() -> None:
    x = torch.arange(-1000, 1000)
    assert torch.equal(cast(x, torch.bfloat16), x.float().to(torch.bfloat16))
    assert torch.equal(cast(x.to(torch.bfloat16), torch.int32), x.float().bfloat16().int())


def test_casts_that_would_not_be_exact_are_refused() -> None:
    with pytest.raises(ti.InterpreterError, match="no exact cast fp64 -> bf16"):
        cast(torch.zeros(1, dtype=torch.float64), torch.bfloat16)


@triton.jit
def toward_zero_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).to(tl.bfloat16, fp_downcast_rounding="rtz").to(tl.float32))


def test_other_rounding_modes_are_refused() -> None:
    with pytest.raises(ti.InterpreterError, match="only rounding to nearest even"):
        run(toward_zero_kernel, (1,), {"x_ptr": torch.ones(1)})


@triton.jit
def double_kernel(x_ptr):
    x = tl.load(x_ptr)
    tl.store(x_ptr, x + x)


def test_arithmetic_on_bf16_is_refused() -> None:
    with pytest.raises(ti.InterpreterError, match="arithmetic on bf16: cast to float32 first"):
        run(double_kernel, (1,), {"x_ptr": torch.ones(1).bfloat16()})


@triton.jit
def masked_kernel(x_ptr, y_ptr):
    i = tl.arange(0, 4)
    x = tl.load(x_ptr + i, mask=i < 2, other=0)  # an int32 constant made bf16
    nan = tl.load(x_ptr + i, mask=i < 2, other=float("nan"))
    tl.store(y_ptr + i, x)
    tl.store(y_ptr + 4 + i, nan)


def test_the_other_of_a_bf16_load() -> None:
    y = torch.ones(8).bfloat16()
    run(masked_kernel, (1,), {"x_ptr": torch.ones(2).bfloat16(), "y_ptr": y})
    assert y[:6].tolist() == [1, 1, 0, 0, 1, 1]
    assert y[6:].isnan().all()


@triton.jit
def square_kernel(x_ptr, factor, FACTOR: tl.constexpr):
    x = tl.load(x_ptr)
    tl.store(x_ptr, x * x * factor * FACTOR)


def test_overflow_to_inf_does_not_warn() -> None:
    x = torch.tensor([1e30])
    run(square_kernel, (1,), {"x_ptr": x, "factor": -1.0, "FACTOR": 0.5})
    assert x.item() == -float("inf")


@triton.jit
def float_kernel(x_ptr, factor):
    tl.store(x_ptr, factor * 3)


def test_a_float_argument_is_f32() -> None:
    x = torch.zeros(1, dtype=torch.float64)
    run(float_kernel, (1,), {"x_ptr": x, "factor": 0.1})
    assert x.item() == float(np.float32(0.1) * np.float32(3))


# -------------------------------------------------------------------------------- scope and lock


def hooks() -> list[dict[str, object]]:
    """Everything that a launch replaces; the program id is the interpreter's own to keep."""
    builder = {k: v for k, v in vars(ti.interpreter_builder).items() if not k.startswith("grid")}
    others = (ti, ti._interpreter, ti.InterpretedFunction, tl.semantic, tl.float8e4b8)
    return [builder, *(dict(vars(other)) for other in others)]


@triton.jit
def failing_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "on purpose")


def test_everything_is_put_back() -> None:
    before = hooks()
    cast(torch.ones(3), torch.bfloat16)
    assert hooks() == before
    with interpreter.exact_casts(), interpreter.exact_casts():
        assert hooks() != before
        cast(torch.ones(3), torch.bfloat16)
        assert hooks() != before
    assert hooks() == before
    with pytest.raises(ti.InterpreterError, match="on purpose"):
        run(failing_kernel, (1,), {"x_ptr": torch.zeros(1)})
    assert hooks() == before
    faults(cast_kernel, (1,), x_ptr=torch.ones(3), y_ptr=torch.ones(3), n=4, BLOCK=4)
    assert hooks() == before
    with pytest.raises(ZeroDivisionError), interpreter.exact_casts():
        _ = 1 // 0
    assert hooks() == before


def test_nothing_is_left_in_the_kernels_module() -> None:
    cast(torch.ones(3), torch.bfloat16)
    ours = [k for k, v in globals().items() if getattr(v, "__module__", "") == interpreter.__name__]
    assert sorted(ours) == ["Finding", "MemoryFault", "run"]


def test_a_launch_inside_exact_casts_needs_no_run() -> None:
    y = torch.empty(1).bfloat16()
    with interpreter.exact_casts():
        cast_kernel[(1,)](torch.tensor([1 + 3 * 2**-8]), y, 1, BLOCK=1)
    assert codes(y).tolist() == [0x3F82]


@triton.jit
def where_am_i_kernel(x_ptr, value):
    tl.store(x_ptr + tl.program_id(0), value + tl.num_programs(0))


def test_threads_take_turns() -> None:
    start = threading.Barrier(2)
    wrong: list[int] = []

    def work(programs: int) -> None:
        start.wait()
        for value in range(20):
            x = torch.zeros(programs, dtype=torch.int32)
            run(where_am_i_kernel, (programs,), {"x_ptr": x, "value": value})
            wrong.extend(entry for entry in x.tolist() if entry != value + programs)

    before = hooks()
    threads = [threading.Thread(target=work, args=(programs,)) for programs in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert hooks() == before


def test_settings_stay_in_their_thread() -> None:
    seen = int8s(4)

    def work() -> None:
        run(number_kernel, (4,), {"x_ptr": seen, "n": 4})

    with interpreter.only_program(1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen.tolist() == [1, 2, 3, 4]


# ----------------------------------------------------------------------------------- the launch


def test_compiler_options_are_ignored_and_arguments_are_not() -> None:
    x = torch.zeros(2, dtype=torch.int32)
    run(where_am_i_kernel, (2,), {"x_ptr": x, "value": 5, "num_warps": 4, "launch_pdl": True})
    assert x.tolist() == [7, 7]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
        run(where_am_i_kernel, (2,), {"x_ptr": x})


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        run(object(), (1,), {})
    with pytest.raises(TypeError, match="x_ptr: the interpreter takes CPU tensors, got meta"):
        run(where_am_i_kernel, (1,), {"x_ptr": torch.empty(1, device="meta"), "value": 0})


@pytest.mark.parametrize("versions", [("3.1.0", "2.1.0"), ("2.3.1", "2.1.0"), ("3.2.0", "1.26.4")])
def test_old_versions_are_refused(versions: tuple[str, str]) -> None:
    with pytest.raises(ImportError, match="or newer is needed"):
        interpreter._require(*versions)


def test_an_empty_grid_runs_nothing() -> None:
    run(where_am_i_kernel, (0,), {"x_ptr": torch.zeros(0, dtype=torch.int32), "value": 0})


# ----------------------------------------------------------------------------------------- memory


@triton.jit
def copy_kernel(x_ptr, y_ptr, shift, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i + shift, mask=i < n, other=-1), mask=i < n)


def test_a_correct_launch_gives_no_report() -> None:
    x, y = torch.randn(100), torch.zeros(100)
    run(copy_kernel, (4,), {"x_ptr": x, "y_ptr": y, "shift": 0, "n": 100, "BLOCK": 32})
    assert torch.equal(x, y)
    run(copy_kernel, (4,), {"x_ptr": x, "y_ptr": x, "shift": 0, "n": 100, "BLOCK": 32})


def test_a_load_past_the_end_is_masked_off() -> None:
    buffer = torch.arange(12, dtype=torch.int16)
    y = torch.zeros(8, dtype=torch.int16)
    found = faults(copy_kernel, (2,), x_ptr=buffer[:8], y_ptr=y, shift=3, n=8, BLOCK=4)
    assert found == [Finding("load out of bounds", "x_ptr", 1, 6, 16)]
    assert y.tolist() == [3, 4, 5, 6, 7, -1, -1, -1]


def test_a_load_before_the_start() -> None:
    found = faults(copy_kernel, (2,), x_ptr=int8s(8), y_ptr=int8s(8), shift=-2, n=8, BLOCK=4)
    assert found == [Finding("load out of bounds", "x_ptr", 0, 2, -2)]


def test_a_store_past_the_end_is_dropped() -> None:
    buffer = int8s(12)
    found = faults(
        copy_kernel,
        (3,),
        x_ptr=torch.ones(12, dtype=torch.int8),
        y_ptr=buffer[:6],
        shift=0,
        n=12,
        BLOCK=4,
    )
    assert found == [
        Finding("store out of bounds", "y_ptr", 1, 2, 6),
        Finding("store out of bounds", "y_ptr", 2, 4, 8),
    ]
    assert buffer.tolist() == [1] * 6 + [0] * 6


def test_an_element_that_is_half_inside_is_outside() -> None:
    buffer = torch.zeros(7, dtype=torch.uint8)
    found = faults(recast_kernel, (1,), x_ptr=buffer, start=0, BLOCK=4)
    assert found == [Finding("store out of bounds", "x_ptr", 0, 2, 6)]


def test_another_argument_does_not_make_room() -> None:
    """Two neighbours in one storage: the pointer of one must not reach the other."""
    buffer = int8s(16)
    found = faults(copy_kernel, (1,), x_ptr=buffer[:8], y_ptr=buffer[8:], shift=4, n=8, BLOCK=8)
    assert found == [Finding("load out of bounds", "x_ptr", 0, 4, 8)]


@triton.jit
def grid_kernel(x_ptr, stride, WIDTH: tl.constexpr):
    i = tl.arange(0, 4)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(x_ptr + i, i.to(tl.int8))


def test_the_gaps_of_a_view_are_out_of_bounds() -> None:
    """Padding at the end of a page belongs to somebody else."""
    pages = int8s(4 * 10).view(4, 10)
    run(grid_kernel, (1,), {"x_ptr": pages[:, 1:9], "stride": 10, "WIDTH": 8})
    pages.zero_()
    found = faults(grid_kernel, (1,), x_ptr=pages[:, 1:8], stride=10, WIDTH=8)
    assert found == [Finding("store out of bounds", "x_ptr", 0, 4, 7)]
    assert not pages[:, 8].any()
    heads = int8s(4 * 3 * 8).view(4, 3, 8)
    run(grid_kernel, (1,), {"x_ptr": heads[:, :2, 2:6], "stride": 24, "WIDTH": 4})
    found = faults(grid_kernel, (1,), x_ptr=heads[:, :2, 2:6], stride=8, WIDTH=4)
    assert found == [Finding("store out of bounds", "x_ptr", 0, 4, 16)]


def test_a_transposed_and_an_overlapping_view_have_no_gaps() -> None:
    run(grid_kernel, (1,), {"x_ptr": int8s(32).view(4, 8).T, "stride": 8, "WIDTH": 8})
    run(
        grid_kernel, (1,), {"x_ptr": int8s(32).as_strided((25, 8), (1, 1)), "stride": 8, "WIDTH": 8}
    )
    run(grid_kernel, (1,), {"x_ptr": int8s(32).expand(5, 32), "stride": 8, "WIDTH": 8})


def test_an_empty_tensor_has_no_bytes() -> None:
    found = faults(copy_kernel, (1,), x_ptr=int8s(0), y_ptr=int8s(4), shift=0, n=4, BLOCK=4)
    assert found == [Finding("load out of bounds", "x_ptr", 0, 4, 0)]


@triton.jit
def recast_kernel(x_ptr, start, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pointer = (x_ptr + start).to(tl.pointer_type(tl.int16))
    tl.store(pointer + i, i.to(tl.int16))


@triton.jit
def recast_load_kernel(x_ptr, y_ptr, start):
    tl.store(y_ptr, tl.load((x_ptr + start).to(tl.pointer_type(tl.int32))))


def test_misaligned_accesses() -> None:
    buffer = torch.zeros(16, dtype=torch.uint8)
    run(recast_kernel, (1,), {"x_ptr": buffer, "start": 2, "BLOCK": 4})
    found = faults(recast_kernel, (1,), x_ptr=buffer, start=1, BLOCK=4)
    assert found == [Finding("misaligned store", "x_ptr", 0, 8, 1)]
    y = torch.zeros(1, dtype=torch.int32)
    found = faults(recast_load_kernel, (1,), x_ptr=buffer, y_ptr=y, start=6)
    assert found == [Finding("misaligned load", "x_ptr", 0, 4, 6)]


@triton.jit
def integer_pointer_kernel(address, y_ptr):
    # An address below 2**31 is passed as an int32.
    tl.store(y_ptr, tl.load(address.to(tl.int64).to(tl.pointer_type(tl.int32))))


def test_a_pointer_that_comes_from_no_argument() -> None:
    x, y = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    found = faults(integer_pointer_kernel, (1,), address=x.data_ptr(), y_ptr=y)
    assert [(f.kind, f.argument) for f in found] == [
        ("load out of bounds", "(not a tensor argument)")
    ]
    assert y.item() == 0


@triton.jit
def select_kernel(x_ptr, y_ptr, z_ptr):
    i = tl.arange(0, 8)
    tl.store(tl.where(i < 4, x_ptr + i, y_ptr + i), tl.load(z_ptr + i))


def test_one_store_to_two_arguments() -> None:
    x, y, z = int8s(4), int8s(8), torch.arange(8, dtype=torch.int8)
    run(select_kernel, (1,), {"x_ptr": x, "y_ptr": y, "z_ptr": z})
    assert x.tolist() == [0, 1, 2, 3]
    assert y.tolist() == [0, 0, 0, 0, 4, 5, 6, 7]
    found = faults(select_kernel, (1,), x_ptr=x[:3], y_ptr=y[:7], z_ptr=z)
    assert found == [
        Finding("store out of bounds", "x_ptr", 0, 1, 3),
        Finding("store out of bounds", "y_ptr", 0, 1, 7),
    ]


@triton.jit
def scalar_mask_kernel(x_ptr, limit):
    i = tl.arange(0, 4)
    tl.store(x_ptr + i, (i + 1).to(tl.int8), mask=(i < 3) & (tl.program_id(0) < limit))


def test_a_mask_made_of_a_block_and_a_scalar() -> None:
    x = int8s(4)
    run(scalar_mask_kernel, (2,), {"x_ptr": x, "limit": 1})
    assert x.tolist() == [1, 2, 3, 0]


@triton.jit
def one_lane_kernel(x_ptr, n):
    program = tl.program_id(0)
    i = program + tl.arange(0, 1)
    tl.store(x_ptr + i, (i + 1).to(tl.int8), mask=i < n)
    tl.store(x_ptr + 4 + program, (program + 1).to(tl.int8), mask=program < n)


def test_a_mask_of_one_element() -> None:
    x = int8s(8)
    run(one_lane_kernel, (4,), {"x_ptr": x, "n": 2})
    assert x.tolist() == [1, 2, 0, 0, 1, 2, 0, 0]


@triton.jit
def atomic_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1)


def test_atomics_are_refused() -> None:
    with pytest.raises(ti.InterpreterError, match="does not know atomics"):
        run(atomic_kernel, (1,), {"x_ptr": torch.zeros(1, dtype=torch.int32)})


@triton.jit
def block_pointer_kernel(x_ptr, n):
    block = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (8,), (0,))
    tl.store(block, tl.zeros((8,), tl.int8), boundary_check=(0,))


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9),
    reason="Triton 3.9 has no block pointers",
)
def test_block_pointers_are_checked() -> None:
    run(block_pointer_kernel, (1,), {"x_ptr": int8s(6), "n": 6})
    found = faults(block_pointer_kernel, (1,), x_ptr=int8s(6), n=7)
    assert found == [Finding("store out of bounds", "x_ptr", 0, 1, 6)]


@triton.jit
def descriptor_kernel(x_ptr, n):
    rows = tl.make_tensor_descriptor(x_ptr, [n, 16], [16, 1], [2, 16])
    rows.store([0, 0], tl.zeros((2, 16), tl.int8))


@pytest.mark.skipif(
    not hasattr(tl, "make_tensor_descriptor"), reason="this Triton has no tensor descriptors"
)
def test_tensor_descriptors_are_checked() -> None:
    buffer = int8s(48)
    start = -buffer.data_ptr() % 16
    one_row = buffer[start : start + 16]
    run(descriptor_kernel, (1,), {"x_ptr": one_row, "n": 1})
    found = faults(descriptor_kernel, (1,), x_ptr=one_row, n=2)
    assert found == [Finding("store out of bounds", "x_ptr", 0, 16, 16)]


def test_the_message_names_kernel_and_faults() -> None:
    with pytest.raises(MemoryFault) as caught:
        run(
            copy_kernel,
            (40,),
            {"x_ptr": int8s(40), "y_ptr": int8s(16), "shift": 0, "n": 40, "BLOCK": 1},
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "memory faults in copy_kernel:"
    assert lines[1] == (
        "  store out of bounds: argument 'y_ptr', program 16, 1 bytes, the first at byte 16"
    )
    assert lines[-1] == "  and 14 more"
    assert len(lines) == 12
    assert len(caught.value.findings) == 24


@triton.jit
def load_then_assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr + 1) == 1, "read garbage")


def test_a_fault_explains_the_error_that_follows_from_it() -> None:
    with pytest.raises(MemoryFault) as caught:
        run(load_then_assert_kernel, (1,), {"x_ptr": int8s(1)})
    assert "read garbage" in str(caught.value.__cause__)


# ------------------------------------------------------------------------------------------ races


@triton.jit
def lanes_kernel(x_ptr, DIVISOR: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(x_ptr + i // DIVISOR, i.to(tl.int16))


def test_two_lanes_store_one_byte() -> None:
    x = torch.zeros(8, dtype=torch.int16)
    run(lanes_kernel, (1,), {"x_ptr": x, "DIVISOR": 1})
    found = faults(lanes_kernel, (1,), x_ptr=x, DIVISOR=4)
    assert found == [Finding("two lanes store one byte", "x_ptr", 0, 12, 0)]


@triton.jit
def number_kernel(x_ptr, n):
    """Program i stores i + 1 at i % n."""
    program = tl.program_id(0)
    tl.store(x_ptr + program % n, (program + 1).to(tl.int8))


def test_two_programs_store_one_byte() -> None:
    found = faults(number_kernel, (5,), x_ptr=int8s(3), n=3)
    assert found == [
        Finding("stored by two programs", "x_ptr", 3, 1, 0, other_program=0),
        Finding("stored by two programs", "x_ptr", 4, 1, 1, other_program=1),
    ]


@triton.jit
def twice_kernel(x_ptr, BARRIER: tl.constexpr):
    i = tl.arange(0, 8)
    tl.store(x_ptr + i, i.to(tl.int8))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + i, i.to(tl.int8), mask=i >= 6)


def test_a_byte_stored_twice_by_one_program() -> None:
    found = faults(twice_kernel, (1,), x_ptr=int8s(8), BARRIER=False)
    assert found == [Finding("stored twice by one program", "x_ptr", 0, 2, 6)]
    run(twice_kernel, (1,), {"x_ptr": int8s(8), "BARRIER": True})


@triton.jit
def read_back_kernel(x_ptr, y_ptr, BARRIER: tl.constexpr):
    i = tl.program_id(0) * 8 + tl.arange(0, 8)
    tl.store(x_ptr + i, i.to(tl.int16))
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + i, tl.load(x_ptr + (i ^ 1)))


def test_a_byte_read_back_without_a_barrier() -> None:
    x, y = torch.zeros(16, dtype=torch.int16), torch.zeros(16, dtype=torch.int16)
    found = faults(read_back_kernel, (2,), x_ptr=x, y_ptr=y, BARRIER=False)
    assert found == [
        Finding("read back without a barrier", "x_ptr", 0, 16, 0),
        Finding("read back without a barrier", "x_ptr", 1, 16, 16),
    ]
    run(read_back_kernel, (2,), {"x_ptr": x, "y_ptr": y, "BARRIER": True})
    assert y[:4].tolist() == [1, 0, 3, 2]


@triton.jit
def neighbour_kernel(x_ptr, y_ptr, z_ptr, step):
    """Program i reads y at i + step and stores x at i."""
    program = tl.program_id(0)
    source = program + step
    value = tl.load(y_ptr + source, mask=(source >= 0) & (source < tl.num_programs(0)), other=0)
    tl.store(z_ptr + program, value)
    tl.store(x_ptr + program, value)


def test_a_program_reads_what_another_stored() -> None:
    x = int8s(3)
    found = faults(neighbour_kernel, (3,), x_ptr=x, y_ptr=x, z_ptr=int8s(3), step=-1)
    assert found == [
        Finding("read of another program's store", "y_ptr", 1, 1, 0, other_program=0),
        Finding("read of another program's store", "y_ptr", 2, 1, 1, other_program=1),
    ]


def test_a_program_stores_over_what_another_read() -> None:
    x = int8s(3)
    found = faults(neighbour_kernel, (3,), x_ptr=x, y_ptr=x, z_ptr=int8s(3), step=1)
    assert found == [
        Finding("store over another program's read", "x_ptr", 1, 1, 1, other_program=0),
        Finding("store over another program's read", "x_ptr", 2, 1, 2, other_program=1),
    ]


@triton.jit
def all_read_one_stores_kernel(x_ptr, y_ptr):
    program = tl.program_id(0)
    tl.store(y_ptr + program, tl.load(x_ptr))
    tl.store(x_ptr, program.to(tl.int8), mask=program == 3)


def test_a_store_over_what_several_read() -> None:
    found = faults(all_read_one_stores_kernel, (4,), x_ptr=int8s(1), y_ptr=int8s(4))
    assert found == [Finding("store over another program's read", "x_ptr", 3, 1, 0)]
    run(copy_kernel, (4,), {"x_ptr": int8s(1), "y_ptr": int8s(4), "shift": 0, "n": 1, "BLOCK": 1})


def test_two_views_of_one_memory_share_what_is_known() -> None:
    """The cache as bytes and as bf16; and memory that torch does not know to be shared."""
    cache = torch.zeros(16, dtype=torch.uint8)
    array = np.zeros(16, dtype=np.uint8)
    for one, other in (
        (cache, cache.view(torch.int16)),
        (torch.from_numpy(array), torch.from_numpy(array[4:].view(np.int16))),
    ):
        shift = other.data_ptr() - one.data_ptr()
        found = faults(two_views_kernel, (1,), one_ptr=one, other_ptr=other, START=0)
        assert found == [Finding("stored twice by one program", "one_ptr", 0, 4, shift)]
        run(two_views_kernel, (1,), {"one_ptr": one, "other_ptr": other, "START": shift + 4})


@triton.jit
def two_views_kernel(one_ptr, other_ptr, START: tl.constexpr):
    tl.store(other_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int16))
    tl.store(one_ptr + START + tl.arange(0, 8), tl.zeros((8,), tl.uint8))


def test_races_may_be_allowed_and_nothing_else() -> None:
    with interpreter.allow_races():
        run(number_kernel, (5,), {"x_ptr": int8s(3), "n": 3})
        found = faults(number_kernel, (5,), x_ptr=int8s(3), n=5)
    assert [(f.kind, f.program) for f in found] == [
        ("store out of bounds", 3),
        ("store out of bounds", 4),
    ]


# --------------------------------------------------------------------------- programs and orders


@triton.jit
def log_kernel(log_ptr, count_ptr, LEVELS: tl.constexpr):
    """Append this program's id to a log, as programs that run one after another can."""
    count = tl.load(count_ptr)
    for axis in tl.static_range(LEVELS):
        tl.store(log_ptr + count * LEVELS + axis, tl.program_id(axis))
    tl.store(count_ptr, count + 1)


def logged(grid: tuple[int, ...], levels: int = 1) -> list[Any]:
    log, count = torch.full((24, levels), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with interpreter.allow_races():
        run(log_kernel, grid, {"log_ptr": log, "count_ptr": count, "LEVELS": levels})
    entries = log[: count.item()].tolist()
    return [entry[0] for entry in entries] if levels == 1 else entries


def test_programs_run_in_the_order_asked_for() -> None:
    assert logged((4,)) == [0, 1, 2, 3]
    with interpreter.program_order(lambda n: reversed(range(n))):
        assert logged((4,)) == [3, 2, 1, 0]
    with interpreter.program_order([2, 0]):
        assert logged((4,)) == [2, 0]
    with interpreter.program_order([0, 0, 3, 0], races=False):
        assert logged((4,)) == [0, 0, 3, 0]
    assert logged((4,)) == [0, 1, 2, 3]


def test_programs_of_a_grid_of_three_axes() -> None:
    expected = [[x, y, z] for z, y, x in itertools.product(range(4), range(2), range(3))]
    assert logged((3, 2, 4), levels=3) == expected
    with interpreter.only_program(3 + 2):
        assert logged((3, 2, 4), levels=3) == [[2, 1, 0]]


def test_a_shuffled_order_finds_no_race_in_a_correct_kernel() -> None:
    x, y = torch.randn(64), torch.zeros(64)
    with interpreter.program_order([3, 1, 2, 0]):
        run(copy_kernel, (4,), {"x_ptr": x, "y_ptr": y, "shift": 0, "n": 64, "BLOCK": 16})
    assert torch.equal(x, y)


def test_a_repeated_program_races_unless_that_is_allowed() -> None:
    with interpreter.program_order([1, 1]):
        found = faults(number_kernel, (2,), x_ptr=int8s(2), n=2)
    assert found == [Finding("stored by two programs", "x_ptr", 1, 1, 1, other_program=1)]
    with interpreter.program_order([1, 1], races=False):
        run(number_kernel, (2,), {"x_ptr": int8s(2), "n": 2})


def test_only_one_program() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with interpreter.only_program(2):
        run(where_am_i_kernel, (4,), {"x_ptr": x, "value": 0})
    assert x.tolist() == [0, 0, 4, 0]
    with interpreter.only_program(3, num_programs=1000):
        run(where_am_i_kernel, (4,), {"x_ptr": x, "value": 0})
    assert x.tolist() == [0, 0, 4, 1000]
    with pytest.raises(ValueError, match="program 4 is not one of the grid"):  # noqa: SIM117
        with interpreter.only_program(4):
            run(where_am_i_kernel, (4,), {"x_ptr": x, "value": 0})


# ------------------------------------------------------------------------------------------- size


@triton.jit
def row_kernel(x_ptr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    pointer = x_ptr + row * 512 + tl.arange(0, 512)
    tl.store(pointer, tl.load(pointer))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_one_program_of_a_huge_launch_on_a_virtual_tensor() -> None:
    tokens, heads = 65537, 64
    q = torch.empty(tokens, heads, 512, dtype=torch.bfloat16)  # 4 GiB that nobody touches
    before = resident_bytes()
    with interpreter.only_program(tokens * heads - 1):
        run(row_kernel, (tokens * heads,), {"x_ptr": q, "WIDE": True})
        with pytest.raises(ti.InterpreterError, match="int32 overflow detected for operation mul"):
            run(row_kernel, (tokens * heads,), {"x_ptr": q, "WIDE": False})
    assert resident_bytes() - before < 256 * 2**20


@triton.jit
def overflow_kernel(x_ptr, a, ADD: tl.constexpr):
    tl.store(x_ptr, a + a if ADD else a * 65536)


@pytest.mark.parametrize("add", [False, True])
def test_int32_overflow_is_caught(add: bool) -> None:
    x = torch.zeros(1, dtype=torch.int32)
    run(overflow_kernel, (1,), {"x_ptr": x, "a": 2**14, "ADD": add})
    with pytest.raises(ti.InterpreterError, match="int32 overflow detected"):
        run(overflow_kernel, (1,), {"x_ptr": x, "a": 2**30, "ADD": add})
