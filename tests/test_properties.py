"""Properties over random forms of call: bytes, limits, canaries, inputs, whatever the sizes."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dsv4_prologue
from dsv4_prologue import Launch, reference, use_card, use_launch
from dsv4_prologue.selection import default_device, interpreting
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Variant, build_case, canary_violations

DEVICE = default_device()
RUNS_KERNELS = DEVICE != "cpu" or interpreting()

settings.register_profile(
    "suite",
    max_examples=40 if RUNS_KERNELS else 80,
    deadline=None,  # the interpreter is slow, and speed is no property
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")

forms = st.builds(
    Variant,
    q_form=st.sampled_from(["contiguous", "padded", "head-major", "unaligned"]),
    out=st.sampled_from(["new", "in place", "buffer"]),
    out_form=st.sampled_from(["contiguous", "padded", "head-major", "unaligned"]),
    pad_heads=st.sampled_from([0, 0, 1, 3]),
    q_norm=st.booleans(),
    q_rope=st.booleans(),
    kv_padding=st.sampled_from([0, 1, 8]),
    kv_norm_weight=st.sampled_from([None, None, torch.bfloat16, torch.float32]),
    cache_block_size=st.sampled_from([1, 2, 3, 16, 64]),
    cache_form=st.sampled_from(["2d", "wide"]),
    page_padding=st.sampled_from([0, 2, 64, 1000]),
    cache_shift=st.sampled_from([0, 2, 16]),
    short=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    table_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    max_positions=st.sampled_from([2, 64, 8192]),
    eps=st.sampled_from([0.0, 1e-6, 1e-2]),
    not_finite=st.booleans(),
    out_of_range=st.booleans(),
)
tiles = st.builds(
    Launch,
    tokens_per_tile=st.sampled_from([1, 2, 4, 8]),
    heads_per_tile=st.sampled_from([1, 2, 4]),
    num_warps=st.sampled_from([1, 2, 4]),
    kv_tokens_per_tile=st.sampled_from([0, 1, 2, 4, 8]),
)


@given(
    num_tokens=st.integers(1, 19),
    num_heads=st.integers(1, 5),
    form=forms,
    tile=tiles,
    card=st.sampled_from(["unknown", "nvidia-hopper"] if RUNS_KERNELS else ["cpu"]),
    seed=st.integers(0, 2**31),
)
def test_every_call_keeps_the_contract(
    num_tokens: int, num_heads: int, form: Variant, tile: Launch, card: str, seed: int
) -> None:
    case = build_case(num_tokens, num_heads, form, device=DEVICE, seed=seed)
    expected = reference.prologue(**case.arguments())
    with use_card(card), use_launch(tile):
        q_out = dsv4_prologue.prologue(**case.arguments())
    result = compare(case, q_out, expected)
    assert result.ok, result.reason
    violations = canary_violations(case)
    assert not violations, violations


@given(
    num_rows=st.integers(0, 9),
    block_size=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 2**31),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_every_read_equals_the_oracles(
    num_rows: int, block_size: int, seed: int, index_dtype: torch.dtype
) -> None:
    form = Variant(cache_block_size=block_size, num_pages=3, page_padding=6)
    case = build_case(1, 1, form, device=DEVICE, seed=seed)
    cache = case.k_cache
    assert cache is not None
    generator = torch.Generator().manual_seed(seed)
    cache.copy_(torch.randint(0, 256, cache.shape, generator=generator).to(torch.uint8))
    slots = torch.randint(-2, 3 * block_size + 2, (num_rows,), generator=generator)
    slots = slots.to(DEVICE, index_dtype)
    want = reference.gather_dequantize(cache, slots, cache_block_size=block_size)
    got = dsv4_prologue.gather_dequantize(cache, slots, cache_block_size=block_size)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
