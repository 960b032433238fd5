"""What is measured: ours in each form, and baselines; and how each is checked before it is timed.

Two checks. `check` holds a candidate against the oracle on inputs that bite, by the contract's
limits. `examine_timed` runs the very call that is timed, on the tensors it is timed on, and looks
for ways to be fast without doing the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dsv4_prologue import direct, reference
from dsv4_prologue.contract import DATA_BYTES, NOPE_DIM, TOKEN_BYTES
from dsv4_prologue.measure.baselines import (
    BUFFER,
    IN_PLACE,
    NEW,
    OPERATOR,
    Baseline,
    Call,
    Inputs,
    fill_inputs,
    make_inputs,
)
from dsv4_prologue.measure.guard import Work, examine
from dsv4_prologue.measure.timing import GRAPHS, Clock, Mode
from dsv4_prologue.op import prologue
from dsv4_prologue.selection import plan_for, use_launch
from dsv4_prologue.verify import conformance
from dsv4_prologue.verify.canary import slices
from dsv4_prologue.verify.conformance import Shape
from dsv4_prologue.verify.inputs import Variant, build_case

#: How a call of some form is bound to its inputs and, where it wants one, to a buffer for Q.
Bind = Callable[[Inputs, Tensor | None], Call]

FORMS = (IN_PLACE, BUFFER, NEW)
THROUGH_OPS = "torch.ops, "
#: Of the low-rank projection that makes Q: `q_lora_rank` of transformers' DeepseekV4Config.
Q_RANK = 1024
#: What the cache is filled with before an examination.
POISON = 0xA5


def options_of(inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments that `prologue` takes of them."""
    return {"eps": inputs.eps, "cache_block_size": inputs.cache_block_size}


def forms_of(package: Any) -> dict[str, Bind]:
    """The public operator of a version of ours, by form."""
    return {
        IN_PLACE: lambda inputs, _: partial(getattr(package, OPERATOR), *inputs),
        BUFFER: lambda inputs, out: partial(
            package.prologue, *inputs[:6], **options_of(inputs), q_out=out
        ),
        NEW: lambda inputs, _: partial(package.prologue, *inputs[:6], **options_of(inputs)),
    }


def registered_forms() -> dict[str, Bind]:
    """Ours as registered operators of torch, for what the host pays for a call."""
    ops: Any = torch.ops.dsv4_prologue
    return {
        THROUGH_OPS + IN_PLACE: lambda inputs, _: partial(getattr(ops, OPERATOR), *inputs),
        THROUGH_OPS + NEW: lambda inputs, _: partial(
            ops.prologue, *inputs[:6], **options_of(inputs)
        ),
    }


@dataclass(frozen=True)
class Candidate:
    """Something to be checked, then timed."""

    name: str  # "ours", or a baseline's
    form: str
    bind: Bind
    baseline: Baseline | None = None  # None: ours
    launch: Mapping[str, int] = field(default_factory=dict)
    host_only: bool = False  # timed in mode host alone

    @property
    def label(self) -> str:
        """Its name in a measurement."""
        return f"{self.name}, {self.form}"

    @property
    def kind(self) -> str:
        """Its form, whichever way it is called."""
        return self.form.removeprefix(THROUGH_OPS)

    @property
    def launch_text(self) -> str:
        """A baseline's launch arguments in words."""
        given = ", ".join(f"{name}={value}" for name, value in self.launch.items())
        return given or "as shipped"

    def does_as(self, ours: Candidate, mode: Mode) -> bool:
        """Whether ours is to be compared with it.

        Of one form; for the host's cost in any, but not what makes a tensor with what makes none.
        """
        if self.baseline is None:
            return False
        if mode == "host":
            return (self.kind == NEW) == (ours.kind == NEW)
        return ours.form in self.baseline.forms


def candidate_of(baseline: Baseline, suffix: str = "", **launch: int) -> Candidate:
    """A baseline, given these launch arguments, as a candidate."""
    return Candidate(
        baseline.name + suffix,
        IN_PLACE if baseline.in_place else NEW,
        lambda inputs, _: baseline.bind(inputs, **launch),
        baseline,
        launch,
    )


def no_room(need: int, device: torch.device, what: str) -> str:
    """Why so many bytes cannot be had; empty if they can."""
    free = conformance.free_bytes(device)
    if free is None or need <= 0.95 * free:
        return ""
    return f"needs {need / 1e9:.1f} GB {what}, {free / 1e9:.1f} GB are free"


def check(candidate: Candidate, shape: Shape, device: torch.device, seed: int) -> dict[str, Any]:
    """Compare a candidate with the oracle on inputs that bite; a baseline by foreign limits.

    The verdict is "ok", "differs", or "not verified" where memory or time does not allow it.
    """
    num_tokens, num_heads = shape
    variant = Variant(out_form="contiguous", out_of_range=False)
    if candidate.kind != NEW:
        variant = replace(variant, out="in place" if candidate.kind == IN_PLACE else "buffer")
    need = conformance.footprint_bytes(num_tokens, num_heads, variant)
    reason = no_room(need, device, "with the oracle")
    budget = conformance.work_budget(device, plan_for(device, num_tokens, num_heads))
    units = num_tokens * (num_heads + 1)
    if budget is not None and units > budget:
        reason = f"{units} units (token x role) are more than the {budget} this device does in time"
    if reason:
        return {"verdict": "not verified", "reason": reason}

    def operator(**arguments: Any) -> Tensor | None:
        inputs = Inputs(*(arguments[name] for name in Inputs._fields))
        q_out: Tensor | None = arguments.get("q_out")
        result = candidate.bind(inputs, q_out)()
        return result if isinstance(result, Tensor) else q_out

    case = build_case(num_tokens, num_heads, variant, device=device, seed=seed)
    seen, _ = conformance.check_case(case, operator, foreign=candidate.baseline is not None)
    return {
        "verdict": "ok" if seen.ok else "differs",
        "reason": seen.reason,
        "bytes_differing": seen.bytes_differing,
        "elements_differing": seen.elements_differing,
        "max_ulp": seen.max_ulp,
    }


# ---------------------------------------------------------------------------- where it is timed


@dataclass(frozen=True)
class Timed:
    """The tensors of one shape that everything is timed on."""

    inputs: Inputs
    out: Tensor  # bf16 [N, H, 512], what a call out of place writes, or is copied to

    @classmethod
    def make(cls, shape: Shape, device: torch.device, seed: int, *, in_place: bool) -> Timed:
        """`in_place`: nothing is out of place, and q is in the buffer's stead."""
        inputs = make_inputs(*shape, device, seed=seed)
        return cls(inputs, inputs.q if in_place else torch.empty_like(inputs.q))

    def call(self, candidate: Candidate) -> Call:
        """The call that is timed."""
        return candidate.bind(self.inputs, self.out)

    def examined(self, candidate: Candidate) -> Call:
        """The same call, with a new Q copied to the buffer, where it can be looked at."""
        call = self.call(candidate)
        if candidate.kind != NEW:
            return call
        return lambda: self.out.copy_(call())  # type: ignore[arg-type]

    def parts(self, mode: Mode) -> dict[str, Call]:
        """Parts of the call in place, by name: each the operator itself, launched as the whole.

        What a part saves is what the rest of the call costs beside it. For the host's cost, what
        Python does in a call that repeats one made before.
        """
        if mode == "host":
            return direct.parts(self.inputs[:6])
        q, kv, k_cache, slots, positions, table, *_ = self.inputs
        options = options_of(self.inputs)
        of_q = partial(prologue, q, None, None, None, positions, table, q_out=q, **options)
        of_kv = partial(prologue, None, kv, k_cache, slots, positions, table, **options)
        launch = plan_for(q.device, *q.shape[:2]).launch

        def as_the_whole(call: Call) -> Call:
            def launched() -> None:
                with use_launch(launch):
                    call()

            return launched

        calls: dict[str, Call] = {
            "Q alone, neither normalised nor rotated": partial(of_q, q_norm=False, q_rope=False),
            "Q alone, not normalised": partial(of_q, q_norm=False),
            "Q alone, not rotated": partial(of_q, q_rope=False),
            "Q alone": of_q,
            "KV alone": of_kv,
        }
        return {name: as_the_whole(call) for name, call in calls.items()}

    @cached_property
    def _projection(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer's products need: rows of the low rank, a weight, room for their like."""
        num_tokens, num_heads, head_dim = self.inputs.q.shape
        hidden = self.inputs.q.new_empty(num_tokens, Q_RANK).normal_()
        weight = self.inputs.q.new_empty(Q_RANK, num_heads * head_dim).normal_(std=Q_RANK**-0.5)
        return hidden, weight, torch.empty_like(hidden)

    def layer(self, call: Call) -> Call:
        """The call on q, between a matrix product that makes q and one that reads it."""
        hidden, weight, result = self._projection
        q = self.inputs.q.flatten(1)

        def whole() -> None:
            torch.mm(hidden, weight, out=q)
            call()
            torch.mm(q, weight.T, out=result)

        return whole

    def work(self, candidate: Candidate) -> Work:
        """What the call must leave."""
        inputs, out = self.inputs, self.inputs.q if candidate.kind == IN_PLACE else self.out

        def fill(seed: int) -> None:
            fill_inputs(inputs, seed)
            inputs.k_cache.fill_(POISON)
            if out is not inputs.q:
                out.fill_(float("nan"))

        def expected(seed: int) -> tuple[Tensor, ...]:
            num_tokens, num_heads, _ = inputs.q.shape
            fresh = make_inputs(num_tokens, num_heads, inputs.q.device, seed=seed)
            fresh.k_cache.fill_(POISON)
            q_out, cache = reference.prologue(*fresh[:6], **options_of(fresh))
            assert q_out is not None
            assert cache is not None
            return q_out, cache

        return Work((out, inputs.k_cache), fill, expected, far_off)

    @property
    def examination_bytes(self) -> int:
        """Memory that an examination takes beside the tensors, in bytes, predicted.

        The oracle's fresh inputs, its f32 and its output; or later the answer, a copy of what was
        left, and masks of a byte an element.
        """
        q = self.inputs.q
        return 5 * 2 * q.numel() + 40_000 * q.shape[0]


def far_off(actual: Tensor, expected: Tensor) -> Tensor:
    """Where a result is not the answer: far off in Q, other in any byte of the cache but RoPE's.

    The contract's limits are for `check`; this tells whether a call did its work at all.
    """
    wrong = torch.empty(actual.shape, dtype=torch.bool, device=actual.device)
    for start, stop in slices(actual.shape[0], actual[0].numel()):
        got, want = actual[start:stop], expected[start:stop]
        if actual.dtype == torch.uint8:
            wrong[start:stop] = got != want
        else:
            far = (got.float() - want.float()).abs() <= 2**-6 * (1 + want.float().abs())
            wrong[start:stop] = far.logical_not_()
    if actual.dtype == torch.uint8:
        column = torch.arange(actual.shape[1], device=actual.device)
        data = column < actual.shape[1] // TOKEN_BYTES * DATA_BYTES
        wrong &= ~(data & (column % DATA_BYTES >= NOPE_DIM))
    return wrong


def examine_timed(candidate: Candidate, timed: Timed, clock: Clock, mode: Mode) -> str:
    """Why a candidate's times in this mode cannot be believed; empty if nothing was found.

    Where there is no room for it, nothing is looked for: the candidate has passed its `check`.
    """
    if no_room(timed.examination_bytes, clock.device, ""):
        return ""
    call = timed.examined(candidate)
    call()
    if mode in GRAPHS:
        call = clock.captured(call, 1)
    found = examine(candidate.label, call, timed.work(candidate), clock)
    return "; ".join(map(str, found.faults))
