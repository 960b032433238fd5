"""The operator against the oracle: every form of call, every tile, both casts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import Launch, reference, selection, use_card, use_launch
from dsv4_prologue.cards import card_names, get_card
from dsv4_prologue.launch import Launched, record_launches
from dsv4_prologue.planning import DEFAULT_LAUNCH, Floor, tile_width
from dsv4_prologue.selection import interpreting
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Case, Variant, build_case, canary_violations


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int16)


def check(case: Case, operator: Any = dsv4_prologue.prologue) -> None:
    """Run one call and hold it to the contract: bytes, limits, canaries, inputs."""
    # The oracle first: what is called in place changes its input.
    expected = reference.prologue(**case.arguments())
    result = compare(case, operator(**case.arguments()), expected)
    assert result.ok, result.reason
    assert not canary_violations(case)


VARIANTS = {
    "new": Variant(),
    "in place": Variant(out="in place"),
    "in place, padded heads": Variant(out="in place", pad_heads=3, q_form="padded"),
    "buffer": Variant(out="buffer", pad_heads=2),
    "head-major": Variant(q_form="head-major", out="buffer", out_form="head-major"),
    "unaligned": Variant(q_form="unaligned", out="buffer", out_form="unaligned", kv_padding=3),
    "padded heads": Variant(pad_heads=3),
    "q only": Variant(kv=False),
    "kv only": Variant(q=False),
    "no norm": Variant(q_norm=False),
    "no rope": Variant(q_rope=False),
    "no norm, no rope, in place": Variant(q_norm=False, q_rope=False, out="in place"),
    "kv norm bf16": Variant(kv_norm_weight=torch.bfloat16),
    "kv norm f32": Variant(kv_norm_weight=torch.float32),
    "int32": Variant(index_dtype=torch.int32),
    "bf16 table": Variant(table_dtype=torch.bfloat16),
    "strided kv": Variant(kv_padding=8),
    "small pages": Variant(cache_block_size=4, page_padding=6),
    "odd pages": Variant(cache_block_size=3, page_padding=0),
    "pages of one": Variant(cache_block_size=1, page_padding=2),
    "3-d cache": Variant(cache_form="3d", page_padding=0),
    "wide cache": Variant(cache_form="wide", page_padding=1000),
    "packed, shifted": Variant(page_padding=112320, cache_shift=2, num_pages=3),
    "short": Variant(short=True),
    "M = 0": Variant(num_slots=0),
    "M = 1": Variant(num_slots=1),
    "not finite": Variant(not_finite=True),
    "not finite, in place": Variant(not_finite=True, out="in place"),
    "eps 0": Variant(eps=0.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_form(device: str, name: str) -> None:
    check(build_case(17, 5, VARIANTS[name], device=device, seed=3))


TILES = [
    Launch(1, 1, 1),
    Launch(8, 1, 4),
    Launch(4, 1, 4),
    Launch(1, 2, 1),
    Launch(1, 4, 2),
    Launch(2, 2, 1),
    Launch(1, 4, 4, kv_tokens_per_tile=4),
    Launch(4, 1, 4, kv_tokens_per_tile=2),
]
#: By cast and width of the tile, a card that has them.
CARDS = {
    ("compiler", 512): "interpreter",
    ("compiler", 256): "nvidia-ada",
    ("integer", 512): "unknown",
    ("integer", 256): "nvidia-ampere",
}


@pytest.mark.parametrize(("cast", "width"), CARDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.usefixtures("kernels")
def test_every_tile_and_cast(device: str, tile: Launch, cast: str, width: int) -> None:
    """Odd N and H: every tile but 1x1 has a tail on one side."""
    card = CARDS[cast, width]
    assert (get_card(card).fp8_cast, tile_width(get_card(card).lanes)) == (cast, width)
    with use_card(card), use_launch(tile):
        variant = Variant(pad_heads=2, out="in place", not_finite=True, short=True)
        check(build_case(11, 3, variant, device=device, seed=tile.heads_per_tile))
        check(build_case(9, 5, Variant(cache_block_size=4), device=device, seed=3))


#: What the cards run: each way once, by the first card that runs so. The plain form with the
#: compiler's cast is what `test_every_form` runs, and vector_core has a file of its own.
WAYS = {
    (card.fp8_cast, tile_width(card.lanes), replace(launch, dependent="no")): name
    for name, card in ((name, get_card(name)) for name in reversed(card_names()))
    if card.kernel == "tiled"
    for launch in card.launches
}


@pytest.mark.parametrize("form", VARIANTS)
@pytest.mark.parametrize(
    ("card", "launch"),
    [
        pytest.param(card, launch, id=f"{card}, {launch}")
        for (cast, width, launch), card in WAYS.items()
        if (cast, width, launch) != ("compiler", 512, DEFAULT_LAUNCH)
    ],
)
@pytest.mark.usefixtures("kernels")
def test_every_form_as_every_card_runs_it(
    device: str, card: str, launch: Launch, form: str
) -> None:
    with use_card(card), use_launch(launch):
        check(build_case(17, 5, VARIANTS[form], device=device, seed=3))


@pytest.mark.parametrize(("cast", "width"), CARDS)
@pytest.mark.usefixtures("kernels")
def test_bytes_that_bite(device: str, cast: str, width: int) -> None:
    """Many tokens in wide tiles: every scale byte, edge and tie that the inputs walk."""
    card = CARDS[cast, width]
    with use_card(card), use_launch(Launch(64, 1, 4)):
        check(build_case(509, 1, Variant(not_finite=True), device=device, seed=1))


@pytest.mark.parametrize("num_tokens", [1, 4, 17, 65])
@pytest.mark.parametrize("num_heads", [1, 2, 7])
def test_sizes(device: str, num_tokens: int, num_heads: int) -> None:
    with use_launch(Launch(8, 2, 4)):
        check(build_case(num_tokens, num_heads, device=device, seed=num_tokens))


@pytest.mark.parametrize(("num_heads", "pad_heads"), [(5, 3), (40, 24), (1, 7)])
def test_padded_heads_are_zero(device: str, num_heads: int, pad_heads: int) -> None:
    with use_launch(Launch(1, 4, 1)):
        check(
            build_case(3, num_heads, Variant(pad_heads=pad_heads, not_finite=True), device=device)
        )


@pytest.mark.parametrize("out", ["new", "buffer", "in place"])
def test_no_tokens(device: str, out: Any) -> None:
    q = torch.zeros(0, 3, 512, dtype=torch.bfloat16, device=device)
    kv = torch.zeros(0, 512, dtype=torch.bfloat16, device=device)
    cache = torch.full((2, 64 * 584), 0xA5, dtype=torch.uint8, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    table = torch.zeros(4, 64, device=device)
    q_out = {"new": None, "buffer": torch.empty_like(q), "in place": q}[out]
    result = dsv4_prologue.prologue(q, kv, cache, none, none, table, q_out=q_out)
    assert result is not None
    assert list(result.shape) == [0, 3, 512]
    assert (cache == 0xA5).all()
    assert reference.prologue(q, kv, cache, none, none, table)[0].shape == (0, 3, 512)  # type: ignore[union-attr]


def test_a_cache_without_pages(device: str) -> None:
    case = build_case(3, 2, Variant(kv=True), device=device)
    arguments = case.arguments() | {
        "k_cache": torch.zeros(0, 64 * 584, dtype=torch.uint8, device=device)
    }
    want, _ = reference.prologue(**arguments)
    got = dsv4_prologue.prologue(**arguments)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))  # type: ignore[union-attr]
    slots = torch.tensor([0, -1], device=device)
    assert dsv4_prologue.gather_dequantize(arguments["k_cache"], slots).isnan().all()


def test_an_empty_table(device: str) -> None:
    case = build_case(3, 2, device=device)
    arguments = case.arguments() | {"cos_sin_cache": torch.zeros(0, 64, device=device)}
    got = dsv4_prologue.prologue(**arguments)
    assert got is not None
    assert got[..., 448:].isnan().all()
    assert not got[..., :448].isnan().any()


def test_the_field_name_works_in_place(device: str) -> None:
    case = build_case(9, 3, Variant(out="in place"), device=device)
    expected = reference.prologue(**case.arguments())
    a = case.arguments()
    names = ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache")
    returned = dsv4_prologue.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        *(a[name] for name in names), a["eps"], a["cache_block_size"]
    )
    assert returned is None
    result = compare(case, case.q, expected)
    assert result.ok, result.reason
    assert not canary_violations(case)


def test_one_slot_twice_harms_nothing_else(device: str) -> None:
    case = build_case(9, 1, Variant(out_of_range=False), device=device)
    slots = case.slot_mapping
    assert slots is not None
    live = (slots >= 0).nonzero()[:, 0]
    slots[live[1]] = slots[live[0]]
    with use_launch(Launch(1, 1)) as _:
        if interpreting():
            from dsv4_prologue.verify.interpreter import allow_races

            with allow_races():
                dsv4_prologue.prologue(**case.arguments())
        else:
            dsv4_prologue.prologue(**case.arguments())
    expected = reference.prologue(**case.arguments())[1]
    assert expected is not None
    others = torch.ones_like(slots, dtype=torch.bool)
    others[live[:2]] = False
    from dsv4_prologue.verify.compare import compare_cache

    assert compare_cache(case.k_cache, expected, slots[others], 64).ok  # type: ignore[arg-type]


def test_the_same_bits_from_run_to_run(device: str) -> None:
    runs = []
    for _ in range(3):
        case = build_case(33, 4, Variant(not_finite=True), device=device)
        q_out = dsv4_prologue.prologue(**case.arguments())
        runs.append((q_out.view(torch.int16), case.k_cache.contiguous()))  # type: ignore[union-attr]
    assert all(torch.equal(q, runs[0][0]) and torch.equal(c, runs[0][1]) for q, c in runs[1:])


def test_the_same_bits_in_every_form(device: str) -> None:
    """In place, out of place, strided, int32 or int64, either tile: one result."""
    forms = [
        Variant(),
        Variant(out="in place"),
        Variant(q_form="padded", out="buffer"),
        Variant(index_dtype=torch.int32, out_of_range=False),
        Variant(page_padding=640),
    ]
    base = build_case(13, 3, Variant(out_of_range=False), device=device)
    results = []
    for form in forms:
        case = build_case(13, 3, form, device=device)
        assert case.q is not None
        assert base.q is not None
        case.q.copy_(base.q)
        arguments = case.arguments() | {
            "kv": base.kv,
            "slot_mapping": base.slot_mapping.to(form.index_dtype),  # type: ignore[union-attr]
            "position_ids": base.position_ids.to(form.index_dtype),
        }
        q_out = dsv4_prologue.prologue(**arguments)
        rows = dsv4_prologue.gather_dequantize(arguments["k_cache"], arguments["slot_mapping"])
        results.append((q_out.contiguous().view(torch.int16), rows.view(torch.int16)))  # type: ignore[union-attr]
    for q_out, rows in results[1:]:
        assert torch.equal(q_out, results[0][0])
        assert torch.equal(rows, results[0][1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page", [{}, {"cache_block_size": 3, "page_padding": 10}])
def test_reading_back(device: str, index_dtype: torch.dtype, page: dict[str, int]) -> None:
    """Random bytes in the cache: every code and scale; slots of any shape, some outside."""
    variant = Variant(**page, num_pages=7)  # type: ignore[arg-type]
    case = build_case(1, 1, variant, device=device)
    cache = case.k_cache
    assert cache is not None
    generator = torch.Generator().manual_seed(5)
    cache.copy_(torch.randint(0, 256, cache.shape, generator=generator).to(torch.uint8))
    capacity = 7 * variant.cache_block_size
    slots = torch.randint(-3, capacity + 4, (3, 11), generator=generator).to(device, index_dtype)
    want = reference.gather_dequantize(cache, slots, cache_block_size=variant.cache_block_size)
    got = dsv4_prologue.gather_dequantize(cache, slots, cache_block_size=variant.cache_block_size)
    nan = want.isnan()
    assert nan[(slots < 0) | (slots >= capacity)].all()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.int16)[~nan], want.view(torch.int16)[~nan])


@pytest.mark.parametrize("form", ["column", "expanded", "every other", "int32 column"])
def test_reading_strided_slots(device: str, form: str) -> None:
    """Of one dim, too, where a reshape is a view that keeps its stride."""
    cache = torch.zeros(4, 64 * 584, dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(6)
    cache.copy_(torch.randint(0, 127, cache.shape, generator=generator).to(torch.uint8))
    table = torch.tensor([[5, 40], [6, 141], [7, 42], [8, 243]], device=device)
    slots = {
        "column": table[:, 1],
        "expanded": table[0, :1].expand(7),
        "every other": table.flatten()[::2],
        "int32 column": table.int()[:, 1],
    }[form]
    assert not slots.is_contiguous()
    want = dsv4_prologue.gather_dequantize(cache, slots.contiguous())
    assert torch.equal(bits(dsv4_prologue.gather_dequantize(cache, slots)), bits(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["new", "kv norm f32"])
def test_autocast_changes_nothing(device: str, dtype: torch.dtype, name: str) -> None:
    case = build_case(33, 3, VARIANTS[name], device=device)
    with torch.autocast(device, dtype=dtype):
        check(case)


def test_reading_nothing(device: str) -> None:
    cache = torch.zeros(1, 64 * 584, dtype=torch.uint8, device=device)
    slots = torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert dsv4_prologue.gather_dequantize(cache, slots).shape == (0, 2, 512)


@pytest.mark.usefixtures("kernels")
def test_arguments_come_in_the_kernels_order(device: str) -> None:
    """A launch by `direct` passes them without their names."""
    from dsv4_prologue import launch

    case = build_case(3, 2, device=device)
    with use_card("unknown"), launch.record_launches() as launches:
        dsv4_prologue.prologue(**case.arguments())
    (one,) = launches
    assert list(one.arguments) == launch._kernel("tiled").arg_names


def test_warmup_runs(device: str) -> None:
    dsv4_prologue.warmup(4, device=device)
    dsv4_prologue.warmup(
        2, num_heads_out=4, kv_norm_dtype=torch.float32, index_dtype=torch.int32, device=device
    )
    dsv4_prologue.warmup(2, in_place=True, q_only=True, device=device)
    dsv4_prologue.warmup(2, kv_only=True, device=device)


def specialised(launches: list[Launched]) -> set[tuple[object, ...]]:
    """What Triton compiles a launch for: options, constants, dtypes, which strides 16 divides."""

    def seen(name: str, value: object) -> object:
        if name.isupper() or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype
        return isinstance(value, int) and "stride" in name and value % 16 == 0

    return {
        (one.kernel, *one.options.items(), *((k, seen(k, v)) for k, v in one.arguments.items()))
        for one in launches
    }


@pytest.mark.parametrize("card", ["unknown", "nvidia-hopper", "mthreads-s5000", "ascend-910b"])
def test_warmup_launches_what_calls_will(card: str, device: str) -> None:
    forms: tuple[tuple[dict[str, Any], Variant], ...] = (
        ({}, Variant()),
        (
            {"in_place": True, "index_dtype": torch.int32},
            Variant(out="in place", index_dtype=torch.int32),
        ),
    )
    for options, variant in forms:
        with use_card(card), record_launches() as warmed:
            dsv4_prologue.warmup(6, device=device, **options)
        with use_card(card), record_launches() as called:
            for num_tokens in (1, 7, 100, 300):
                case = build_case(num_tokens, 6, variant, device=device)
                dsv4_prologue.prologue(**case.arguments())
        assert called
        assert specialised(called) <= specialised(warmed)


def test_warmup_leaves_out_what_a_toolchain_below_the_floor_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    below = Floor(met=False, reason="flagtree 0.1 is below 0.6.1")
    monkeypatch.setattr(selection, "_floor", lambda *_: below)
    with use_card("mthreads-s5000"), record_launches() as warmed:
        dsv4_prologue.warmup(4, device=device)
    tiles = {(one.arguments["TOKENS"], one.options["num_warps"]) for one in warmed[:-1]}
    assert tiles == {(DEFAULT_LAUNCH.tokens_per_tile, DEFAULT_LAUNCH.num_warps)}


def test_a_kernel_card_on_cpu_needs_the_interpreter() -> None:
    if interpreting():
        pytest.skip("this is the case without TRITON_INTERPRET=1")
    case = build_case(1, 1)
    with use_card("nvidia-hopper"), pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"):
        dsv4_prologue.prologue(**case.arguments())


def test_the_composition_serves_any_device(device: str) -> None:
    with use_card("cpu"):
        check(build_case(17, 5, Variant(not_finite=True, pad_heads=3), device=device))
