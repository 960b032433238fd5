"""What the tests run on: the accelerator at hand, Triton's interpreter, or the CPU's torch card."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dsv4_prologue.selection import default_device, interpreting  # noqa: E402 (after the skip)


@pytest.fixture(scope="session")
def device() -> str:
    return default_device()


@pytest.fixture(scope="session")
def runs_kernels(device: str) -> bool:
    """Whether calls reach a Triton kernel: on an accelerator, or in the interpreter."""
    return device != "cpu" or interpreting()


@pytest.fixture
def kernels(runs_kernels: bool) -> None:
    """For tests of the kernels themselves."""
    if not runs_kernels:
        pytest.skip("needs an accelerator or TRITON_INTERPRET=1: these are tests of the kernels")


@pytest.fixture
def accelerator(device: str) -> str:
    """For tests of what only a device has: streams, graphs, its allocator."""
    if device == "cpu":
        pytest.skip("needs an accelerator")
    return device
