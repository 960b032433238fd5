"""What only a device has: graphs, streams, its allocator, its compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import Launch, launch, reference, use_card, use_launch
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Case, Variant, build_case, canary_violations

pytestmark = pytest.mark.usefixtures("accelerator")


def device_module(device: str) -> Any:
    return torch.get_device_module(device)


def verify(case: Case, q_out: torch.Tensor | None, expected: Any) -> None:
    result = compare(case, q_out, expected)
    assert result.ok, result.reason
    assert not canary_violations(case)


def test_a_callers_buffer_allocates_nothing(device: str) -> None:
    case = build_case(65, 8, Variant(out="buffer"), device=device)
    dsv4_prologue.prologue(**case.arguments())
    module = device_module(device)
    module.synchronize()
    before = module.memory_stats()["allocation.all.allocated"]
    dsv4_prologue.prologue(**case.arguments())
    assert module.memory_stats()["allocation.all.allocated"] == before


def test_a_new_tensor_is_the_only_allocation(device: str) -> None:
    case = build_case(65, 8, Variant(), device=device)
    dsv4_prologue.prologue(**case.arguments())
    module = device_module(device)
    before = module.memory_stats()["allocation.all.allocated"]
    dsv4_prologue.prologue(**case.arguments())
    assert module.memory_stats()["allocation.all.allocated"] == before + 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_synchronisation(device: str) -> None:
    if device != "cuda":
        pytest.skip("only torch.cuda can make a synchronisation an error")
    case = build_case(65, 8, Variant(out="buffer"), device=device)
    dsv4_prologue.prologue(**case.arguments())
    try:
        torch.cuda.set_sync_debug_mode("error")
        dsv4_prologue.prologue(**case.arguments())
        dsv4_prologue.gather_dequantize(case.k_cache, case.slot_mapping)  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_replay_follows_new_data(device: str) -> None:
    """Capture after warmup, then change every input in place: the replay uses the new ones."""
    module = device_module(device)
    dsv4_prologue.warmup(8, page_stride=37440, device=device)
    shown = build_case(65, 8, Variant(out="buffer", out_form="contiguous"), device=device)
    other = build_case(65, 8, Variant(out="buffer", out_form="contiguous"), device=device, seed=9)
    graph = module.CUDAGraph()
    with module.graph(graph):
        dsv4_prologue.prologue(**shown.arguments())
    for name in ("q", "kv", "slot_mapping", "position_ids"):
        getattr(shown, name).copy_(getattr(other, name))
    graph.replay()
    module.synchronize()
    expected = reference.prologue(**other.arguments())
    result = compare(shown, shown.q_out, expected)
    assert result.ok, result.reason


def compiled_variants() -> int:
    """How many variants of the prologue kernel are compiled on the current device."""
    kernel = launch._kernel("tiled")
    index = torch.cuda.current_device()
    return len(kernel.device_caches[index][0])


def test_warmup_compiles_what_calls_need(device: str) -> None:
    if device != "cuda":
        pytest.skip("counts variants in Triton's cache of a CUDA device")
    dsv4_prologue.warmup(24, device=device)
    dsv4_prologue.warmup(24, in_place=True, index_dtype=torch.int32, device=device)
    before = compiled_variants()
    for n in (1, 2, 16, 17, 33, 1000):
        q = torch.zeros(n, 24, 512, dtype=torch.bfloat16, device=device)
        kv = torch.zeros(n, 512, dtype=torch.bfloat16, device=device)
        cache = torch.zeros(20, 37440, dtype=torch.uint8, device=device)[:, :37376]
        table = torch.zeros(50, 64, device=device)
        index = torch.zeros(n, dtype=torch.int64, device=device)
        dsv4_prologue.prologue(q, kv, cache, index - 1, index, table)
        dsv4_prologue.prologue(q, kv, cache, (index - 1).int(), index.int(), table, q_out=q)
    assert compiled_variants() == before


def test_a_side_stream(device: str) -> None:
    module = device_module(device)
    case = build_case(129, 8, Variant(), device=device)
    expected = reference.prologue(**case.arguments())
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        q_out = dsv4_prologue.prologue(**case.arguments())
    module.current_stream().wait_stream(stream)
    verify(case, q_out, expected)


def test_several_threads_each_with_a_launch_of_its_own(device: str) -> None:
    module = device_module(device)

    def work(tile: Launch, seed: int) -> None:
        with module.stream(module.Stream()), use_launch(tile):
            for i in range(5):
                case = build_case(33, 4, Variant(), device=device, seed=seed + i)
                expected = reference.prologue(**case.arguments())
                q_out = dsv4_prologue.prologue(**case.arguments())
                module.current_stream().synchronize()
                verify(case, q_out, expected)

    tiles = [Launch(1, 1), Launch(1, 2), Launch(2, 1), Launch(1, 4, 2)]
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(work, tile, 100 * i) for i, tile in enumerate(tiles)]
    for future in done:
        future.result()  # raises what the thread raised


@pytest.mark.parametrize("card", ["nvidia-hopper", "unknown"])
def test_many_tokens_ten_times(device: str, card: str) -> None:
    """Unordered stores to one byte would show as a difference in one of ten runs."""
    with use_card(card):
        for seed in range(10):
            case = build_case(4096, 8, Variant(not_finite=True), device=device, seed=seed)
            expected = reference.prologue(**case.arguments())
            verify(case, dsv4_prologue.prologue(**case.arguments()), expected)


def test_launches_that_differ_in_tokens_of_kv_alone(device: str) -> None:
    """By turns, on the same tensors: neither may be launched with the other's grid."""
    case = build_case(37, 8, Variant(out="in place"), device=device)
    arguments = case.arguments()
    few, many = (Launch(1, 4, 4, kv_tokens_per_tile=tokens) for tokens in (1, 4))
    for tile in (few, many, few, many):
        assert case.k_cache is not None
        case.k_cache.fill_(0xA5)
        _, expected = reference.prologue(**arguments)
        with use_launch(tile):
            dsv4_prologue.prologue(**arguments)
        assert torch.equal(case.k_cache, expected)
