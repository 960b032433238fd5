"""Bad input: the error names the argument, what was expected and what came; nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsv4_prologue
from dsv4_prologue import reference

N, H, PAGES, BS = 5, 3, 4, 4
PAYLOAD = BS * 584


def good(device: str) -> dict[str, Any]:
    """A correct call, as keyword arguments, on poisoned outputs."""
    generator = torch.Generator().manual_seed(7)
    bf16 = {"dtype": torch.bfloat16}
    return {
        "q": torch.randn(N, H, 512, generator=generator).to(device, **bf16),
        "kv": torch.randn(N, 512, generator=generator).to(device, **bf16),
        "k_cache": torch.full((PAGES, PAYLOAD + 8), 0xA5, dtype=torch.uint8, device=device),
        "slot_mapping": torch.tensor([3, 9, 0, -1, 15], device=device),
        "position_ids": torch.tensor([7, 1, 30, 2, 11], device=device),
        "cos_sin_cache": torch.randn(32, 64, generator=generator).to(device),
        "cache_block_size": BS,
        "q_out": torch.full((N, H, 512), float("nan"), device=device, **bf16),
    }


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself."""
    return tensor.detach().contiguous().view(torch.uint8)


def odd_address(cache: torch.Tensor) -> torch.Tensor:
    flat = torch.full((cache.numel() + 2,), 0xA5, dtype=torch.uint8, device=cache.device)
    return flat[1 : 1 + cache.numel()].view(cache.shape)


def strided(cache: torch.Tensor, page_stride: int) -> torch.Tensor:
    flat = torch.full((PAGES * PAYLOAD * 2,), 0xA5, dtype=torch.uint8, device=cache.device)
    return flat.as_strided((PAGES, PAYLOAD), (page_stride, 1))


def overlapping_rows(q: torch.Tensor) -> torch.Tensor:
    flat = torch.full((N * H * 512,), float("nan"), dtype=q.dtype, device=q.device)
    return flat.as_strided((N, H, 512), (256, 512, 1))


def room(q: torch.Tensor) -> torch.Tensor:
    """Room for 40 rows of a Q, to lay tensors out in."""
    return torch.full((40 * 512,), 0.5, dtype=q.dtype, device=q.device)


def shifted_onto(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A q, and a q_out one row behind it in the same memory."""
    flat = torch.full((N * H + 1, 512), 0.5, dtype=q.dtype, device=q.device)
    return flat[:-1].view(N, H, 512), flat[1:].view(N, H, 512)


# (what is wrong, how the call is changed, error, argument, expected, got)
Change = Any
ROWS: list[tuple[str, Change, type[Exception], str, str, str]] = [
    ("q float16", lambda a: {"q": a["q"].half()}, TypeError, "q", "dtype bfloat16", "float16"),
    ("q float32", lambda a: {"q": a["q"].float()}, TypeError, "q", "dtype bfloat16", "float32"),
    ("q a list", lambda a: {"q": [1.0]}, TypeError, "q", "bfloat16", "list"),
    ("q rank", lambda a: {"q": a["q"][0]}, ValueError, "q", "[N, H >= 1, 512]", "[3, 512]"),
    ("q head dim", lambda a: {"q": a["q"][..., :256]}, ValueError, "q", "512", "[5, 3, 256]"),
    (
        "q no heads",
        lambda a: {"q": a["q"][:, :0], "q_out": None},
        ValueError,
        "q",
        "H >= 1",
        "[5, 0, 512]",
    ),
    (
        "q last stride",
        lambda a: {"q": a["q"].repeat_interleave(2, -1)[..., ::2]},
        ValueError,
        "q",
        "contiguous last dim",
        "stride 2",
    ),
    ("kv float16", lambda a: {"kv": a["kv"].half()}, TypeError, "kv", "bfloat16", "float16"),
    ("kv rank", lambda a: {"kv": a["kv"][:, None]}, ValueError, "kv", "[5, 512]", "[5, 1, 512]"),
    ("kv rows", lambda a: {"kv": a["kv"][:4]}, ValueError, "kv", "[5, 512]", "[4, 512]"),
    (
        "kv last stride",
        lambda a: {"kv": a["kv"].repeat_interleave(2, -1)[..., ::2]},
        ValueError,
        "kv",
        "contiguous last dim",
        "stride 2",
    ),
    ("no q, no kv", lambda a: {"q": None, "kv": None}, ValueError, "q, kv", "at least one", "None"),
    (
        "cache float",
        lambda a: {"k_cache": a["k_cache"].float()},
        TypeError,
        "k_cache",
        "uint8",
        "float32",
    ),
    ("cache missing", lambda a: {"k_cache": None}, TypeError, "k_cache", "uint8", "NoneType"),
    (
        "cache rank",
        lambda a: {"k_cache": a["k_cache"][0]},
        ValueError,
        "k_cache",
        "[pages, bytes >= 2336]",
        "[2344]",
    ),
    (
        "cache too narrow",
        lambda a: {"k_cache": a["k_cache"][:, : PAYLOAD - 1]},
        ValueError,
        "k_cache",
        "bytes >= 2336",
        "2335",
    ),
    (
        "cache second size",
        lambda a: {"k_cache": a["k_cache"][:, : 2 * 584].reshape(PAGES, 2, 584)},
        ValueError,
        "k_cache",
        "[pages, 4, 584]",
        "[4, 2, 584]",
    ),
    (
        "cache second stride",
        lambda a: {"k_cache": strided(a["k_cache"], 5000).as_strided((4, 4, 584), (5000, 600, 1))},
        ValueError,
        "k_cache",
        "second stride 584",
        "600",
    ),
    (
        "page stride below the payload",
        lambda a: {"k_cache": strided(a["k_cache"], PAYLOAD - 2)},
        ValueError,
        "k_cache",
        "at least 2336",
        "2334",
    ),
    (
        "page stride odd",
        lambda a: {"k_cache": strided(a["k_cache"], PAYLOAD + 1)},
        ValueError,
        "k_cache",
        "even page stride",
        "2337",
    ),
    (
        "cache at an odd address",
        lambda a: {"k_cache": odd_address(a["k_cache"])},
        ValueError,
        "k_cache",
        "even address",
        "0x",
    ),
    (
        "block size kind",
        lambda _: {"cache_block_size": 4.0},
        TypeError,
        "cache_block_size",
        "int",
        "float",
    ),
    (
        "block size 0",
        lambda _: {"cache_block_size": 0},
        ValueError,
        "cache_block_size",
        "1 to",
        "0",
    ),
    (
        "slots float",
        lambda a: {"slot_mapping": a["slot_mapping"].float()},
        TypeError,
        "slot_mapping",
        "int32 or int64",
        "float32",
    ),
    (
        "slots missing",
        lambda _: {"slot_mapping": None},
        TypeError,
        "slot_mapping",
        "int32 or int64",
        "NoneType",
    ),
    (
        "slots rank",
        lambda a: {"slot_mapping": a["slot_mapping"][:, None]},
        ValueError,
        "slot_mapping",
        "[M <= 5]",
        "[5, 1]",
    ),
    (
        "more slots than rows",
        lambda a: {"slot_mapping": a["slot_mapping"].repeat(2)},
        ValueError,
        "slot_mapping",
        "[M <= 5]",
        "[10]",
    ),
    (
        "slots strided",
        lambda a: {"slot_mapping": a["slot_mapping"].repeat(2)[::2]},
        ValueError,
        "slot_mapping",
        "contiguous",
        "stride 2",
    ),
    (
        "positions int16",
        lambda a: {"position_ids": a["position_ids"].short()},
        TypeError,
        "position_ids",
        "int32 or int64",
        "int16",
    ),
    (
        "positions rows",
        lambda a: {"position_ids": a["position_ids"][:3]},
        ValueError,
        "position_ids",
        "[5]",
        "[3]",
    ),
    (
        "table float16",
        lambda a: {"cos_sin_cache": a["cos_sin_cache"].half()},
        TypeError,
        "cos_sin_cache",
        "float32 or bfloat16",
        "float16",
    ),
    (
        "table width",
        lambda a: {"cos_sin_cache": a["cos_sin_cache"][:, :32]},
        ValueError,
        "cos_sin_cache",
        "[max_pos, 64]",
        "[32, 32]",
    ),
    ("eps", lambda _: {"eps": "small"}, TypeError, "eps", "float", "str"),
    ("eps bool", lambda _: {"eps": True}, TypeError, "eps", "a float", "bool"),
    ("eps negative", lambda _: {"eps": -1e-6}, ValueError, "eps", "from 0 on", "-1e-06"),
    ("eps too large", lambda _: {"eps": 1e39}, ValueError, "eps", "f32 holds", "1e+39"),
    ("eps nan", lambda _: {"eps": float("nan")}, ValueError, "eps", "f32 holds", "nan"),
    (
        "cache at an odd offset",
        lambda a: {
            "k_cache": torch.zeros(20000, dtype=torch.uint8, device=a["q"].device)[1:][
                : PAGES * PAYLOAD
            ].view(PAGES, PAYLOAD)
        },
        ValueError,
        "k_cache",
        "even address",
        "0x",
    ),
    (
        "q sparse",
        lambda a: {"q": a["q"].float().to_sparse().to(torch.bfloat16)},
        TypeError,
        "q",
        "strided tensor",
        "sparse",
    ),
    (
        "fewer heads out",
        lambda _: {"num_heads_out": H - 1, "q_out": None},
        ValueError,
        "num_heads_out",
        "at least q's 3 heads",
        "2",
    ),
    (
        "heads out kind",
        lambda _: {"num_heads_out": 4.0, "q_out": None},
        TypeError,
        "num_heads_out",
        "int",
        "float",
    ),
    (
        "q_out float32",
        lambda a: {"q_out": a["q_out"].float()},
        TypeError,
        "q_out",
        "bfloat16",
        "float32",
    ),
    (
        "q_out rows",
        lambda a: {"q_out": a["q_out"][:4]},
        ValueError,
        "q_out",
        "[5, heads >= 3",
        "[4, 3, 512]",
    ),
    (
        "q_out heads",
        lambda a: {"q_out": a["q_out"][:, :2]},
        ValueError,
        "q_out",
        "heads >= 3",
        "[5, 2, 512]",
    ),
    (
        "q_out not as announced",
        lambda _: {"num_heads_out": 4},
        ValueError,
        "q_out",
        "[5, 4, 512]",
        "[5, 3, 512]",
    ),
    (
        "q_out rows share bytes",
        lambda a: {"q_out": overlapping_rows(a["q"])},
        ValueError,
        "q_out",
        "rows that do not overlap",
        "[256, 512, 1]",
    ),
    (
        "q_out overlaps q",
        lambda a: dict(zip(("q", "q_out"), shifted_onto(a["q"]), strict=True)),
        ValueError,
        "q_out",
        "q itself",
        "overlaps q otherwise",
    ),
    (
        "q_out overlaps kv",
        lambda a: {"kv": a["q_out"][:, 1]},
        ValueError,
        "q_out",
        "no byte of kv",
        "overlaps kv",
    ),
    (
        "q_out's tokens share bytes",
        lambda a: {"q_out": room(a["q"]).as_strided((N, H, 512), (1280, 512, 1))},
        ValueError,
        "q_out",
        "rows that do not overlap",
        "[1280, 512, 1]",
    ),
    (
        "q_out's heads share bytes",
        lambda a: {"q_out": room(a["q"]).as_strided((N, H, 512), (512, 2304, 1))},
        ValueError,
        "q_out",
        "rows that do not overlap",
        "[512, 2304, 1]",
    ),
    (
        "q_out at q with its heads apart",
        lambda a: {
            "q": (flat := room(a["q"])).as_strided((N, H, 512), (4096, 512, 1)),
            "q_out": flat.as_strided((N, H, 512), (4096, 1024, 1)),
        },
        ValueError,
        "q_out",
        "q itself",
        "overlaps q otherwise",
    ),
    (
        "q_out overlaps q's last row",
        lambda a: {
            "q": (rows := room(a["q"]).view(-1, 512))[: N * H].view(N, H, 512),
            "q_out": rows[N * H - 1 : 2 * N * H - 1].view(N, H, 512),
        },
        ValueError,
        "q_out",
        "q itself",
        "overlaps q otherwise",
    ),
    (
        "q_out overlaps kv's last row",
        lambda a: {
            "kv": (rows := room(a["q"]).view(-1, 512))[:N],
            "q_out": rows[N - 1 : N - 1 + N * H].view(N, H, 512),
        },
        ValueError,
        "q_out",
        "no byte of kv",
        "overlaps kv",
    ),
    (
        "block size too large",
        lambda _: {"cache_block_size": 2**31},
        ValueError,
        "cache_block_size",
        "1 to",
        str(2**31),
    ),
    (
        "weight strided",
        lambda a: {"kv_norm_weight": a["q"].view(-1)[:1024:2]},
        ValueError,
        "kv_norm_weight",
        "contiguous",
        "stride 2",
    ),
    (
        "table strided",
        lambda a: {"cos_sin_cache": a["cos_sin_cache"].repeat(1, 2)[:, ::2]},
        ValueError,
        "cos_sin_cache",
        "contiguous",
        "stride 2",
    ),
    (
        "weight float16",
        lambda a: {"kv_norm_weight": a["kv"][0].half()},
        TypeError,
        "kv_norm_weight",
        "float32 or bfloat16",
        "float16",
    ),
    (
        "weight size",
        lambda a: {"kv_norm_weight": a["kv"][0, :448]},
        ValueError,
        "kv_norm_weight",
        "[512]",
        "[448]",
    ),
    (
        "weight without kv",
        lambda a: {"kv": None, "k_cache": None, "slot_mapping": None, "kv_norm_weight": a["kv"][0]},
        ValueError,
        "kv_norm_weight",
        "None without kv",
        "a tensor",
    ),
    (
        "cache without kv",
        lambda _: {"kv": None, "slot_mapping": None},
        ValueError,
        "k_cache",
        "None without kv",
        "a tensor",
    ),
    ("q_out without q", lambda _: {"q": None}, ValueError, "q_out", "None without q", "a value"),
    (
        "two devices",
        lambda a: {"kv": a["kv"].to("meta")},
        ValueError,
        "kv",
        "a tensor on",
        "meta",
    ),
    (
        "requires grad",
        lambda a: {"q": a["q"].clone().requires_grad_()},
        ValueError,
        "q",
        "inference only",
        "requires_grad",
    ),
    ("layout kind", lambda _: {"q_layout": 1}, TypeError, "q_layout", "a str", "int"),
    (
        "format kind",
        lambda _: {"cache_format": b"bf16"},
        TypeError,
        "cache_format",
        "a str",
        "bytes",
    ),
    ("layout unknown", lambda _: {"q_layout": "rows"}, ValueError, "q_layout", "one of", "'rows'"),
    (
        "layout to come",
        lambda _: {"q_layout": "interleaved"},
        ValueError,
        "q_layout",
        "'heads'",
        "'interleaved'",
    ),
    (
        "format to come",
        lambda _: {"cache_format": "mxfp8"},
        ValueError,
        "cache_format",
        "'fp8_ds_mla'",
        "'mxfp8'",
    ),
    (
        "fp8 to come",
        lambda _: {"fp8_format": "e4m3fnuz"},
        ValueError,
        "fp8_format",
        "'e4m3fn'",
        "'e4m3fnuz'",
    ),
    (
        "scale to come",
        lambda a: {"cache_scale": a["kv"][0, :1].float()},
        ValueError,
        "cache_scale",
        "None",
        "Tensor",
    ),
    (
        "q scale to come",
        lambda a: {"q_scale_inv": a["kv"][0, :1].float()},
        ValueError,
        "q_scale_inv",
        "None",
        "Tensor",
    ),
    (
        "slot past the end",
        lambda a: {"slot_mapping": a["slot_mapping"] + 1, "check_bounds": True},
        IndexError,
        "slot_mapping",
        "below 16",
        "16",
    ),
    (
        "position past the end",
        lambda a: {"position_ids": a["position_ids"] + 2, "check_bounds": True},
        IndexError,
        "position_ids",
        "position < 32",
        "32",
    ),
    (
        "position negative",
        lambda a: {"position_ids": a["position_ids"] - 2, "check_bounds": True},
        IndexError,
        "position_ids",
        "0 <=",
        "-1",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "name", "expected", "got"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
@pytest.mark.parametrize("function", [dsv4_prologue.prologue, reference.prologue])
def test_error_names_argument_expected_and_got_and_writes_nothing(
    device: str,
    function: Any,
    change: Change,
    error: type[Exception],
    name: str,
    expected: str,
    got: str,
) -> None:
    arguments = good(device)
    with torch.no_grad() if error is IndexError else torch.enable_grad():
        arguments.update(change(arguments))
        tensors = {k: t for k, t in arguments.items() if isinstance(t, torch.Tensor)}
        before = {
            k: t.detach().clone()
            for k, t in tensors.items()
            if t.device.type != "meta" and t.layout is torch.strided
        }
        with pytest.raises(error) as caught:
            function(**arguments)
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.startswith(f"{name}: expected ")
    wanted, _, came = text.partition(", got ")
    assert expected in wanted
    assert got in came
    for key, value in before.items():
        assert torch.equal(raw(tensors[key]), raw(value)), key


def test_a_call_on_meta_tensors_is_checked_and_computes_nothing() -> None:
    """In every form; addresses are all 0 there, and nothing can be looked up."""
    arguments = {
        k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in good("cpu").items()
    }
    for q_out in (None, arguments["q"], arguments["q_out"]):
        result = dsv4_prologue.prologue(**arguments | {"q_out": q_out, "check_bounds": True})
        assert result is not None
        assert (result.is_meta, list(result.shape)) == (True, [N, H, 512])
        assert q_out is None or result is q_out
    wide = torch.empty(2**29 + 1, PAYLOAD, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="k_cache: expected at most 2147483647 slots"):
        dsv4_prologue.prologue(**arguments | {"k_cache": wide})


def test_the_engines_name_wants_a_q(device: str) -> None:
    *inputs, block_size, _ = good(device).values()
    with pytest.raises(TypeError, match="q: expected a bfloat16 tensor, got NoneType"):
        dsv4_prologue.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            None,  # type: ignore[arg-type]
            *inputs[1:],
            1e-6,
            block_size,
        )


@pytest.mark.parametrize("name", ["q_norm", "q_rope", "check_bounds"])
def test_a_flag_is_a_bool(device: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected a bool, got str"):
        dsv4_prologue.prologue(**good(device), **{name: "no"})


def test_rows_that_interleave_without_overlapping_are_fine(device: str) -> None:
    arguments = good(device)
    q_out = torch.empty(9 * 512, dtype=torch.bfloat16, device=device)
    q_out = q_out.as_strided((3, 2, 512), (1024, 1536, 1))  # rows at 0, 1024, 1536, 2048, ...
    arguments |= {name: arguments[name][:3] for name in ("kv", "slot_mapping", "position_ids")}
    arguments |= {"q": arguments["q"][:3, :2], "q_out": None}
    wanted = dsv4_prologue.prologue(**arguments)
    arguments |= {"q_out": q_out, "k_cache": arguments["k_cache"].clone()}
    assert torch.equal(dsv4_prologue.prologue(**arguments), wanted)  # type: ignore[arg-type]


def test_one_page_may_have_any_stride(device: str) -> None:
    arguments = good(device)
    flat = torch.full((20000,), 0xA5, dtype=torch.uint8, device=device)
    arguments["k_cache"] = flat.as_strided((1, PAYLOAD), (PAYLOAD + 1, 1))
    arguments["slot_mapping"] = torch.tensor([3, 1, 0, -1, 2], device=device)
    _, wanted = reference.prologue(**arguments)
    dsv4_prologue.prologue(**arguments)
    assert torch.equal(arguments["k_cache"], wanted)


def test_inference_tensors_are_fine_anywhere(device: str) -> None:
    with torch.inference_mode():
        arguments = good(device)
    expected, cache = reference.prologue(**arguments)
    with torch.no_grad():
        q_out = dsv4_prologue.prologue(**arguments)
    assert q_out is not None
    assert torch.equal(arguments["k_cache"], cache)
    assert (q_out.float() - expected.float()).abs().max() < 0.1  # type: ignore[union-attr]


def test_meta_tensors_give_sizes(device: str) -> None:
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in good(device).items()
    }
    arguments["q_out"] = None
    q_out = dsv4_prologue.prologue(**arguments, num_heads_out=7)
    assert q_out is not None
    assert (q_out.device.type, list(q_out.shape)) == ("meta", [N, 7, 512])
    slots = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    rows = dsv4_prologue.gather_dequantize(arguments["k_cache"], slots, cache_block_size=BS)
    assert list(rows.shape) == [2, 3, 512]


def test_the_good_call_is_good(device: str) -> None:
    arguments = good(device)
    q_out = dsv4_prologue.prologue(**arguments)
    assert q_out is arguments["q_out"]
    assert not q_out.isnan().any()


def test_a_gradient_is_fine_under_no_grad(device: str) -> None:
    arguments = good(device)
    arguments["q"].requires_grad_()
    with torch.no_grad():
        assert dsv4_prologue.prologue(**arguments) is arguments["q_out"]


def test_disjoint_interleaved_rows_are_no_overlap(device: str) -> None:
    arguments = good(device)
    both = torch.zeros(N, 2 * H, 512, dtype=torch.bfloat16, device=device)
    both[:, :H] = arguments["q"]
    wanted = dsv4_prologue.prologue(**arguments).clone()
    arguments |= {"q": both[:, :H], "q_out": both[:, H:], "k_cache": arguments["k_cache"].clone()}
    assert torch.equal(dsv4_prologue.prologue(**arguments), wanted)


def test_q_and_kv_of_one_projection(device: str) -> None:
    """Rows of q, a row of kv behind them, token by token: in place on q touches no byte of kv."""
    arguments = good(device)
    both = torch.zeros(N, H + 1, 512, dtype=torch.bfloat16, device=device)
    both[:, :H], both[:, H] = arguments["q"], arguments["kv"]
    wanted = dsv4_prologue.prologue(**arguments).clone()
    cache = torch.full_like(arguments["k_cache"], 0xA5)
    q, kv = both[:, :H], both[:, H]
    made = dsv4_prologue.prologue(**arguments | {"q": q, "q_out": q, "kv": kv, "k_cache": cache})
    assert made is q
    assert torch.equal(q, wanted)
    assert torch.equal(kv, arguments["kv"])
    assert torch.equal(cache, arguments["k_cache"])


def test_rows_of_other_strides_in_one_buffer(device: str) -> None:
    """q in the even rows, token-major, and q_out in the odd ones, head-major: the spans meet, the
    rows do not. Head-major in the even rows, they do."""
    arguments = good(device)
    flat = torch.zeros(8 * N * H, 512, dtype=torch.bfloat16, device=device)
    even = flat.as_strided((N, H, 512), (2 * 512 * H, 2 * 512, 1))
    even.copy_(arguments["q"])
    odd = flat.as_strided((N, H, 512), (2 * 512, 2 * 512 * N, 1), 512)
    wanted = dsv4_prologue.prologue(**arguments).clone()
    arguments |= {"q": even, "q_out": odd, "k_cache": arguments["k_cache"].clone()}
    assert torch.equal(dsv4_prologue.prologue(**arguments), wanted)
    arguments["q_out"] = flat.as_strided((N, H, 512), (2 * 512, 2 * 512 * N, 1))
    with pytest.raises(ValueError, match="overlaps q otherwise"):
        dsv4_prologue.prologue(**arguments)


def gather_good(device: str) -> dict[str, Any]:
    return {
        "k_cache": torch.full((PAGES, PAYLOAD), 0x38, dtype=torch.uint8, device=device),
        "slots": torch.tensor([[3, -1], [15, 16]], device=device),
        "cache_block_size": BS,
        "out": torch.zeros(2, 2, 512, dtype=torch.bfloat16, device=device),
    }


@pytest.mark.parametrize(
    ("change", "error", "name", "expected", "got"),
    [
        (lambda a: {"k_cache": 3}, TypeError, "k_cache", "uint8 tensor", "int"),
        (lambda a: {"k_cache": a["k_cache"].int()}, TypeError, "k_cache", "uint8", "int32"),
        (lambda a: {"slots": a["slots"].float()}, TypeError, "slots", "int32 or int64", "float32"),
        (lambda a: {"out": a["out"].float()}, TypeError, "out", "bfloat16", "float32"),
        (lambda a: {"out": a["out"][0]}, ValueError, "out", "[2, 2, 512]", "[2, 512]"),
        (
            lambda a: {"out": a["out"].transpose(0, 1)},
            ValueError,
            "out",
            "contiguous",
            "[512, 1024, 1]",
        ),
        (lambda a: {"slots": a["slots"].to_sparse()}, TypeError, "slots", "strided", "sparse"),
        (lambda a: {"out": a["out"].to("meta")}, ValueError, "out", "a tensor on", "meta"),
        (
            lambda a: {"out": a["k_cache"].view(-1)[:4096].view(torch.bfloat16).view(2, 2, 512)},
            ValueError,
            "out",
            "no byte of k_cache",
            "overlaps k_cache",
        ),
        (
            lambda a: {"slots": a["out"].view(torch.int64).flatten()[:4].view(2, 2)},
            ValueError,
            "out",
            "no byte of slots",
            "overlaps slots",
        ),
        (lambda a: {"cache_format": "bf16"}, ValueError, "cache_format", "'fp8_ds_mla'", "'bf16'"),
    ],
)
def test_gather_errors(
    device: str, change: Change, error: type[Exception], name: str, expected: str, got: str
) -> None:
    arguments = gather_good(device)
    arguments.update(change(arguments))
    with pytest.raises(error) as caught:
        dsv4_prologue.gather_dequantize(**arguments)
    text = str(caught.value)
    assert text.startswith(f"{name}: expected ")
    assert expected in text.partition(", got ")[0]
    assert got in text.partition(", got ")[2]


def test_gather_good(device: str) -> None:
    arguments = gather_good(device)
    out = dsv4_prologue.gather_dequantize(**arguments)
    assert out is arguments["out"]
    assert out.isnan().all(-1).tolist() == [[False, True], [False, True]]
