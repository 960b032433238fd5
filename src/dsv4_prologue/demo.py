"""The demo: a real text through the DeepSeek-V4 of `transformers`, with our prologue in it.

A small model with seeded weights (its heads and its RoPE as large as the real one's) reads a text
byte by byte: a prefill, then one token at a time, each the text's own next byte (teacher-forced).
Every number the prologue wrote meanwhile is held against a truth that nobody here wrote:

* Q: the model's own `q_b_norm` and `apply_rotary_pos_emb`, computed in f32 and rounded once.
* The cache's RoPE dims: the same rotation, equal to the bit.
* The cache's NoPE dims: decoded by torch's own E4M3, within half a spacing of E4M3 of what went in,
  under the smallest scale that holds the group.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import rich.box
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from dsv4_prologue.contract import (
    ABSMAX_FLOOR,
    DATA_BYTES,
    FP8_MAX,
    GROUP,
    HEAD_DIM,
    NOPE_DIM,
    NUM_GROUPS,
    SCALE_BIAS,
    SCALE_BYTES,
    TOKEN_BYTES,
)
from dsv4_prologue.planning import Plan
from dsv4_prologue.selection import default_device, plan_for

if TYPE_CHECKING:
    from dsv4_prologue.integrations.transformers import Call, Swap

#: Herman Melville, Moby-Dick (1851), the opening.
DEFAULT_TEXT = """\
Call me Ishmael. Some years ago—never mind how long precisely—having little or no money in my
purse, and nothing particular to interest me on shore, I thought I would sail about a little and
see the watery part of the world. It is a way I have of driving off the spleen and regulating
the circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp,
drizzly November in my soul; whenever I find myself involuntarily pausing before coffin
warehouses, and bringing up the rear of every funeral I meet; then, I account it high time to
get to sea as soon as I can.
"""
MAX_BYTES = 2048  # of a longer text only the first so many are read: attention here is quadratic
MAX_DECODE = 64  # tokens that go one at a time; those before them are the prefill

LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
NUM_HEADS = 8
CANARY = 0xA5  # fills the pages beforehand; must survive wherever no token was put

Q_MAX_ULP = 1  # summation order differs between layouts
Q_MAX_BIAS = 0.05  # ULPs; rounding leaves 0.3 / sqrt(elements), truncation 0.5
Q_ROPE_SLACK = 2.0**-20  # times the pair's norm: the rotation can cancel


@dataclass(frozen=True)
class LayerReport:
    """What one layer's prologue wrote, against the truth. Counts are of elements."""

    layer: int
    kind: str
    rope: str
    q_elements: int
    q_max_ulp: int  # see `ulps_apart`
    q_bias: float  # mean error away from zero, in ULPs
    q_differing: int  # not the truth's bits
    model_differing: int  # the same of the model's own bf16 norm and rotation
    model_beyond: int  # and those of its elements that leave our limit
    nope_error: float  # largest, as a fraction of half an E4M3 spacing; at most 1
    scale_wrong: int  # groups whose scale is not the smallest that holds them
    rope_wrong: int  # RoPE dims of the cache that are not the truth's bits
    read_wrong: int  # elements that attention read and the cache does not hold
    stray_bytes: int  # bytes of the pages changed that belong to no token

    @property
    def q_passed(self) -> bool:
        return self.q_max_ulp <= Q_MAX_ULP and abs(self.q_bias) <= Q_MAX_BIAS

    @property
    def cache_passed(self) -> bool:
        wrong = self.scale_wrong + self.rope_wrong + self.read_wrong + self.stray_bytes
        return self.nope_error <= 1 and wrong == 0

    @property
    def passed(self) -> bool:
        return self.q_passed and self.cache_passed


@dataclass(frozen=True)
class RunReport:
    """Logits of one teacher-forced run, against the f32 model that saw the whole text at once."""

    run: str
    agreement: float  # share of positions whose likeliest next byte is the same
    logit_rms: float  # root mean square error, relative to the reference's root mean square
    logit_max: float  # largest error, in the same unit
    distinct: int  # different bytes among the likeliest ones


@dataclass(frozen=True)
class Report:
    """All that the demo has to say."""

    num_tokens: int
    prefill: int  # tokens that went at once, before the others one at a time
    num_heads: int
    device: str
    torch: str
    transformers: str
    seconds: float
    plans: dict[int, Plan]  # by the tokens of a call
    layers: list[LayerReport]
    runs: list[RunReport]

    @property
    def passed(self) -> bool:
        return all(layer.passed for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, verdicts included."""
        return {
            **vars(self),
            "passed": self.passed,
            "plans": {str(n): plan.to_dict() for n, plan in self.plans.items()},
            "layers": [_json_values(x) | {"passed": x.passed} for x in self.layers],
            "runs": [_json_values(x) for x in self.runs],
        }


def _json_values(report: LayerReport | RunReport) -> dict[str, Any]:
    """The fields; a float that is not finite becomes null, since JSON has none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in vars(report).items()
    }


def run(*, text: str | None = None, device: str | None = None, as_json: bool = False) -> int:
    """Run the demo: tables (or one JSON object) to stdout, progress to stderr.

    Args:
        text: what the model reads, as UTF-8; None = `DEFAULT_TEXT`. At least two bytes.
        device: a torch device; None = the accelerator if there is one, else the CPU.
        as_json: print one JSON object in place of the tables.

    Returns:
        0 if Q and the cache are within their bounds on every layer; 1 if not; 2 if it cannot run
        (no `transformers` with this model, a text too short).
    """
    try:
        import transformers
        import transformers.models.deepseek_v4
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise  # it is there, and misses something else
        print(f"demo: {error}: pip install 'dsv4-prologue[demo]'", file=sys.stderr)
        return 2
    data = (DEFAULT_TEXT if text is None else text).encode()[:MAX_BYTES]
    if len(data) < 2:
        print(f"demo: text: expected at least 2 bytes, got {len(data)}", file=sys.stderr)
        return 2
    target = torch.device(device or default_device())
    start = time.perf_counter()
    tokens = torch.tensor(list(data), device=target)
    prefill = len(data) - min(MAX_DECODE, len(data) // 3)
    with torch.no_grad(), _one_thread():
        layers, runs = measure(tokens, prefill)
    report = Report(
        num_tokens=len(data),
        prefill=prefill,
        num_heads=NUM_HEADS,
        device=str(target),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seconds=round(time.perf_counter() - start, 1),
        plans={n: plan_for(target, n, NUM_HEADS) for n in (prefill, 1)},
        layers=layers,
        runs=runs,
    )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _render(report)
    return 0 if report.passed else 1


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Operations here are small: waiting for a second thread can take longer than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(tokens: Tensor, prefill: int) -> tuple[list[LayerReport], list[RunReport]]:
    """Run the text (int64 [N]) through the model, unpatched and patched, and compare."""
    from dsv4_prologue.integrations.transformers import Swap

    num_tokens = tokens.shape[0]
    calls: list[Call] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("building the model", total=3 * (num_tokens - prefill) + 4)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        exact, model = build_models(tokens.device)
        reference = exact(tokens[None]).logits[0].float()
        step("f32, whole text")
        logits = {
            "model in f32": teacher_forced(exact, tokens, prefill, step, "f32"),
            "model in bf16": teacher_forced(model, tokens, prefill, step, "bf16"),
        }
        with Swap(model, max_tokens=num_tokens, observe=calls.append) as swap:
            for k_cache in swap.k_caches:
                k_cache.fill_(CANARY)
            logits["with our prologue"] = teacher_forced(model, tokens, prefill, step, "prologue")
    layers = [
        check_layer(model, swap, [c for c in calls if c.layer_idx == i])
        for i in range(len(LAYER_TYPES))
    ]
    return layers, [_compare(name, got, reference) for name, got in logits.items()]


def build_models(device: torch.device, seed: int = 0) -> tuple[Any, Any]:
    """The same small DeepSeek-V4 twice, in f32 and in bf16, with the same (bf16) weights."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    def config() -> Any:
        return DeepseekV4Config(
            vocab_size=256,
            hidden_size=256,
            moe_intermediate_size=128,
            num_hidden_layers=len(LAYER_TYPES),
            num_attention_heads=NUM_HEADS,
            q_lora_rank=128,
            num_experts_per_tok=2,
            n_routed_experts=4,
            layer_types=list(LAYER_TYPES),
            mlp_layer_types=["hash_moe", *["moe"] * (len(LAYER_TYPES) - 1)],
            o_groups=4,
            o_lora_rank=64,
            index_n_heads=16,
            index_topk=16,
            hc_mult=2,
            max_position_embeddings=65536 * 16,
            # As DeepSeek-V4 is shipped; it applies to the `compress` rope alone.
            rope_parameters={
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 65536,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        )

    # By the dtype argument: model.to(bfloat16) would truncate the rotary frequencies too.
    exact = DeepseekV4ForCausalLM._from_config(config(), dtype=torch.float32).eval()
    model = DeepseekV4ForCausalLM._from_config(config(), dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in exact.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise = (noise / 2).exp()  # a spread of sizes, for the cache's scales
        elif weight.dim() > 1 and "embed" not in name:
            noise /= weight.shape[-1] ** 0.5
        if name.endswith(("o_b_proj.weight", "down_proj.weight", "down_proj")):
            noise /= (2 * len(LAYER_TYPES)) ** 0.5  # a residual stream steady over depth
        weight.data.copy_(noise.bfloat16())
    for name, buffer in exact.named_buffers():
        if name.endswith("tid2eid"):
            buffer.random_(0, 4, generator=generator)
    model.load_state_dict(exact.state_dict())
    return exact.to(device), model.to(device)


def teacher_forced(
    model: Any, tokens: Tensor, prefill: int, step: Callable[[str], None], name: str
) -> Tensor:
    """Logits of every position, f32 [N, vocabulary]: a prefill, then one token at a time."""
    cache = new_cache(model)
    logits = [model(tokens[None, :prefill], **cache).logits[0]]
    step(f"{name}, prefill")
    for i in range(prefill, tokens.shape[0]):
        logits.append(model(tokens[None, i : i + 1], **cache).logits[0])
        step(f"{name}, decode")
    return torch.cat(logits).float()


def new_cache(model: Any) -> dict[str, Any]:
    """An empty `Cache` for the model, as the keyword argument of its forward."""
    from transformers import DynamicCache

    renamed = "cache" in inspect.signature(model.forward).parameters  # in a later release
    return {"cache" if renamed else "past_key_values": DynamicCache(config=model.config)}


def check_layer(model: Any, swap: Swap, calls: list[Call]) -> LayerReport:
    """Hold everything one layer's prologue wrote in `calls` (in order) against the truth."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

    index = calls[0].layer_idx
    attn = model.model.layers[index].self_attn
    q, kv, q_out, positions, slots = (
        torch.cat([getattr(call, name) for call in calls])
        for name in ("q", "kv", "q_out", "position_ids", "slots")
    )
    cos, sin = (
        part[0]
        for part in model.model.rotary_emb(
            q.new_empty(0, dtype=torch.float32),
            position_ids=positions[None],
            layer_type=attn.rope_layer_type,
        )
    )
    truth = apply_rotary_pos_emb(attn.q_b_norm(q.float()), cos, sin)  # f32 [N, H, 512]
    own = apply_rotary_pos_emb(attn.q_b_norm(q), cos.bfloat16(), sin.bfloat16())
    rotated = apply_rotary_pos_emb(kv[:, None].float(), cos, sin)[:, 0, NOPE_DIM:].bfloat16()

    k_cache = swap.k_caches[index]
    codes, rope, scales, stray = read_pages(k_cache, slots)
    values = codes.float().view(-1, NUM_GROUPS, GROUP)
    x = kv[:, :NOPE_DIM].float().view(-1, NUM_GROUPS, GROUP)
    scale = torch.ldexp(torch.ones_like(x[..., 0]), scales.int() - SCALE_BIAS)[..., None]
    error = (values - x / scale).abs() / (e4m3_spacing(x / scale) / 2)
    absmax = x.abs().amax(dim=-1, keepdim=True).clamp(min=ABSMAX_FLOOR)
    tightest = (absmax <= FP8_MAX * scale) & (absmax > FP8_MAX / 2 * scale)

    held = torch.cat(((values * scale).flatten(1).bfloat16(), rope), dim=1)  # [N, 512]
    read_wrong, stop = 0, 0
    for call in calls:
        stop += call.slots.shape[0]
        read = call.kv_read[0]
        read_wrong += count_differing(read, held[stop - read.shape[0] : stop])
    return LayerReport(
        layer=index,
        kind=attn.layer_type.removesuffix("_attention").replace("_", " "),
        rope=attn.rope_layer_type,
        q_elements=q.numel(),
        q_max_ulp=int(ulps_apart(q_out, truth).max()),
        q_bias=bias(q_out, truth),
        q_differing=count_differing(q_out, truth.bfloat16()),
        model_differing=count_differing(own, truth.bfloat16()),
        model_beyond=int((ulps_apart(own, truth) > Q_MAX_ULP).sum()),
        nope_error=float(error.max()),
        scale_wrong=int((~tightest).sum()),
        rope_wrong=count_differing(rope, rotated),
        read_wrong=read_wrong,
        stray_bytes=stray,
    )


def read_pages(k_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Take the tokens at `slots` (int64 [N]) out of the pages byte by byte, with no code of ours.

    Returns E4M3 `[N, 448]`, bf16 `[N, 64]`, the scale bytes uint8 `[N, 7]`, and how many bytes that
    belong to none of the tokens have lost the canary. A pad byte that is not 0 counts among these.
    """
    from dsv4_prologue.integrations.transformers import PAGE_TOKENS

    page, offset = slots[:, None] // PAGE_TOKENS, slots[:, None] % PAGE_TOKENS
    column = torch.arange(TOKEN_BYTES, device=k_cache.device)
    scale_start = PAGE_TOKENS * DATA_BYTES
    column = torch.where(
        column < DATA_BYTES,
        offset * DATA_BYTES + column,
        scale_start + offset * SCALE_BYTES + column - DATA_BYTES,
    )
    token = k_cache[page, column]  # [N, 584]
    rest = k_cache.clone()
    rest[page, column] = CANARY
    stray = int((rest != CANARY).sum()) + int((token[:, -1] != 0).sum())
    return (
        token[:, :NOPE_DIM].view(torch.float8_e4m3fn),
        token[:, NOPE_DIM:DATA_BYTES].contiguous().view(torch.bfloat16),
        token[:, DATA_BYTES:-1],
        stray,
    )


def e4m3_spacing(x: Tensor) -> Tensor:
    """Distance between the E4M3 values about `x` (f32, at most 448); 2^-9 below 2^-6."""
    exponent = torch.where(x == 0, -6, torch.frexp(x).exponent - 1).clamp(min=-6)
    return torch.ldexp(torch.ones_like(x), exponent - 3)


def ulps_apart(got: Tensor, truth: Tensor) -> Tensor:
    """How many bf16 values `got` is from f32 `truth` rounded once; both are `[N, H, 512]`.

    0 for RoPE dims within `Q_ROPE_SLACK` of their pair's norm, and 65535 for what is not finite.
    """
    steps = (_ordinal(got) - _ordinal(truth.bfloat16())).abs()
    pairs = truth[..., NOPE_DIM:].unflatten(-1, (-1, 2))
    slack = Q_ROPE_SLACK * pairs.norm(dim=-1).repeat_interleave(2, dim=-1)
    near = (got[..., NOPE_DIM:].float() - truth[..., NOPE_DIM:]).abs() <= slack
    steps[..., NOPE_DIM:].masked_fill_(near, 0)
    return steps.masked_fill_(~(got.isfinite() & truth.isfinite()), 0xFFFF)


def bias(got: Tensor, truth: Tensor) -> float:
    """Mean error of bf16 `got` away from zero, in ULPs of f32 `truth`, none counted as over 1."""
    ulp = torch.ldexp(torch.ones_like(truth), torch.frexp(truth).exponent - 8)
    return float(((got.float() - truth) / ulp * truth.sign()).clamp(-1, 1).mean())


def _ordinal(x: Tensor) -> Tensor:
    """bf16 -> int32 that counts bf16 values from zero; both zeros are 0."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def count_differing(a: Tensor, b: Tensor) -> int:
    """How many bf16 elements do not have the same bits."""
    return int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())


def _compare(name: str, logits: Tensor, reference: Tensor) -> RunReport:
    error, size = logits - reference, float(reference.square().mean().sqrt())
    best = logits.argmax(dim=-1)
    return RunReport(
        run=name,
        agreement=float((best == reference.argmax(dim=-1)).float().mean()),
        logit_rms=float(error.square().mean().sqrt()) / size,
        logit_max=float(error.abs().max()) / size,
        distinct=int(best.unique().numel()),
    )


def _render(report: Report) -> None:
    console = Console(highlight=False)
    say = functools.partial(console.print, soft_wrap=True)
    decoded = report.num_tokens - report.prefill
    say(f"{report.num_tokens} bytes of text, {report.prefill} at once and {decoded} one at a time;")
    say(f"{len(report.layers)} layers, {report.num_heads} heads of {HEAD_DIM}, on {report.device};")
    say(f"torch {report.torch}, transformers {report.transformers}\n")
    queries = _table(
        "Q, against the model's own code in f32, rounded once",
        *("worst\nULP", "mean\nULP", "\ndiffering", "bf16 model\nbeyond"),
    )
    cache = _table(
        "The paged FP8 cache, against what went in",
        *("NoPE\nerror", "scales\nwrong", "RoPE\nwrong", "read\nwrong", "stray\nbytes"),
    )
    for x in report.layers:
        layer = f"{x.layer} {x.kind} ({x.rope})"
        queries.add_row(
            layer,
            str(x.q_max_ulp),
            f"{x.q_bias:+.4f}",
            f"{x.q_differing / x.q_elements:.4%}",
            f"{x.model_beyond / x.q_elements:.1%}",
            _verdict(x.q_passed),
        )
        wrong = (x.scale_wrong, x.rope_wrong, x.read_wrong, x.stray_bytes)
        cache.add_row(layer, f"{x.nope_error:.5g}", *map(str, wrong), _verdict(x.cache_passed))
    console.print(queries)
    say(f"Limits: {Q_MAX_ULP} ULP of bf16, or in RoPE dims 2^-20 of the pair's norm if more;")
    say(f"{Q_MAX_BIAS} ULP on average. Right, for information: how much of the bf16 model's own Q")
    say("is beyond the first of these.\n")
    console.print(cache)
    say("NoPE error: the largest, in halves of an E4M3 spacing; limit 1. The others: limit 0.\n")
    runs = _table(
        "The whole model, against itself in f32 reading all at once",
        *("same\nnext byte", "logit error:\nrms", "\nlargest", "different\nnext bytes"),
    )
    for y in report.runs:
        figures = (f"{y.agreement:.1%}", f"{y.logit_rms:.1e}", f"{y.logit_max:.1e}")
        runs.add_row(y.run, *figures, str(y.distinct))
    console.print(runs)
    say("Logit errors are relative to the logits' rms. All for information: ours is an FP8 cache,")
    say("the model's own holds bf16.\n")
    for num_tokens, plan in report.plans.items():
        line = f"{num_tokens} tokens x {report.num_heads} heads ran on {plan}"
        console.print(line, markup=False, soft_wrap=True)
    where = "within" if report.passed else "beyond"
    verdict = _verdict(report.passed)
    say(f"\n{verdict}: Q and the cache are {where} their limits ({report.seconds} s)")


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("", no_wrap=True)
    return table


def _verdict(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[bold red]FAIL[/]"
