"""How a tile lies on a warp of 32 or 64 lanes, with no card and no vendor's compiler.

MetaX's, Hygon's, Moore Threads' and T-Head's compilers are forks of Triton that decide on layouts
with upstream's own passes, given their own number of lanes. Upstream's wheel runs these passes for
any number of lanes, so what they decide can be read here (`Layout`): elements a lane, bits of each
access, layout conversions, and what must go through shared memory.

It shows nothing below that: instructions and registers are the vendor's own. Nor what another
version of the passes would do; a fork starts from one version, upstream's here is another.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, NamedTuple

from dsv4_prologue.cards.card import Card
from dsv4_prologue.planning import Launch
from dsv4_prologue.verify.compilers import (
    CANNOT,
    Form,
    Refusal,
    Target,
    row_width,
    run_jobs,
    shared_ceiling,
)
from dsv4_prologue.verify.proof import Proof, Verdict

#: Bits of the element types that the kernels load and store, by their names in Triton's IR.
_BITS: Final = {"i8": 8, "bf16": 16, "f32": 32, "i32": 32, "i64": 64}


class _Blocked(NamedTuple):
    """A blocked layout: by dimension, what a lane, a warp's lanes and a program's warps hold."""

    elements: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]

    def elements_per_lane(self, shape: Sequence[int]) -> int:
        """Elements of a tensor that one lane holds, copies of what other lanes hold among them."""
        dims = zip(shape, self.elements, self.lanes, self.warps, strict=True)
        return math.prod(e * math.ceil(n / (e * lanes * warps)) for n, e, lanes, warps in dims)

    def warps_along(self, axis: int, shape: Sequence[int]) -> int:
        """How many warps hold different parts of one line along the axis."""
        return min(
            self.warps[axis], math.ceil(shape[axis] / (self.elements[axis] * self.lanes[axis]))
        )


@dataclass(frozen=True)
class Access:
    """A load or store of a tensor: its shape, its type in Triton's IR, what a lane does at once."""

    kind: str  # "load" or "store"
    shape: tuple[int, ...]
    element: str
    elements_per_lane: int
    bits: int  # of one access of one lane


@dataclass(frozen=True)
class Layout:
    """What upstream's passes decide about a form."""

    accesses: tuple[Access, ...]
    conversions: int  # from one layout to another, some of which cost nothing
    warps_per_row: int  # that share a row of 512 in the sum of its squares; 0: no such sum
    shared_bytes: int  # of a program, to hand values from warp to warp

    def rows(self, kind: str) -> tuple[Access, ...]:
        """The accesses of that kind to rows of 512 bf16, or to parts of them."""
        return tuple(
            access
            for access in self.accesses
            if access.kind == kind and access.element == "bf16" and access.shape[-1] >= 256
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def read_ttgir(text: str, shared_bytes: int) -> Layout:
    """Read the layouts of loads, stores and reductions from Triton's GPU IR.

    Raises KeyError where one of them is of an unknown type or has no blocked layout.
    """
    blocked = (
        r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], "
        r"warpsPerCTA = \[(.*?)\]"
    )
    layouts = {
        name: _Blocked(_numbers(elements), _numbers(lanes), _numbers(warps))
        for name, elements, lanes, warps in re.findall(blocked, text, re.MULTILINE)
    }
    accesses = []
    pointers = r"tt\.(load|store) .*: tensor<([\dx]+)x!tt\.ptr<(\w+)>, (#\w+)>"
    for kind, sizes, element, name in re.findall(pointers, text):
        shape = _numbers(sizes.replace("x", ","))
        layout = layouts[name]
        bits = min(128, layout.elements[-1] * _BITS[element])
        accesses.append(Access(kind, shape, element, layout.elements_per_lane(shape), bits))
    warps_per_row = 0
    sums = r"\"tt\.reduce\".*?axis = (\d+).*?: \(tensor<([\dx]+)x(\w+), (#\w+)>\)"
    for axis, sizes, element, name in re.findall(sums, text, re.DOTALL):
        shape = _numbers(sizes.replace("x", ","))
        if element == "f32":  # the other reduction is the integer maximum of a group
            warps_per_row = max(warps_per_row, layouts[name].warps_along(int(axis), shape))
    conversions = text.count("ttg.convert_layout")
    return Layout(tuple(accesses), conversions, warps_per_row, shared_bytes)


def lay_out(forms: Sequence[Form], target: Target, lanes: int) -> list[Layout] | Refusal:
    """Lay each form out on warps of that many lanes; the target's name is for messages only."""
    name = f"{target.backend}:{target.arch}"
    results = run_jobs([{**form.job(lanes), "lanes": lanes, "layouts_for": name} for form in forms])
    for result in results:
        if "refusal" in result:
            return Refusal(target, result["refusal"])
    return [read_ttgir(result["text"], result["shared"]) for result in results]


def _summary(launch: Launch, queries: Layout, kv: Layout) -> str:
    """What a launch's layouts are, in words."""
    rows = queries.rows("load")
    elements = sum(access.elements_per_lane for access in rows)
    warps = "one warp" if queries.warps_per_row == 1 else f"{queries.warps_per_row} warps"
    return (
        f"{launch}: {elements} elements a lane, {rows[0].bits}-bit accesses, {warps} a "
        f"row; shared memory {queries.shared_bytes} B for Q, {kv.shared_bytes} B for KV; "
        f"layout conversions {queries.conversions} and {kv.conversions}"
    )


def _faults(lanes: int, launch: Launch, queries: Layout, kv: Layout) -> list[str]:
    """Rows read or written in pieces smaller than they could be, or handed from warp to warp."""
    expected = row_width(launch.kv_tokens_per_tile, launch.num_warps * lanes, lanes)
    q_rows = launch.tokens_per_tile * launch.heads_per_tile
    found = []
    for role, layout, rows, bits in (
        ("Q", queries, q_rows, 128),
        ("KV", kv, launch.kv_tokens_per_tile, expected),
    ):
        if layout.shared_bytes > shared_ceiling(rows, launch.num_warps):
            found.append(f"{launch}: {role} takes {layout.shared_bytes} B of shared memory")
        found += [
            f"{launch}: a row of {role} has {access.kind}s of {access.bits} bits, not {bits}"
            for access in (*layout.rows("load"), *layout.rows("store"))
            if access.bits != bits
        ]
    return found


def prove(card: Card) -> list[Proof]:
    """Prove how a card's launches of the tiled kernel lie on its lanes."""
    if card.kernel != "tiled" or card.lanes is None or card.match is None:
        return []
    name = f"{card.lanes} lanes"
    if importlib.util.find_spec("triton") is None:
        return [Proof(card.name, name, "not provable here", "Triton is not installed")]
    arch = card.match.arches[0].rstrip("*") if card.match.arches else "any"
    target = Target(card.match.backends[0], arch)
    roles = Form(fp8_cast=card.fp8_cast, has_kv=False), Form(fp8_cast=card.fp8_cast, has_q=False)
    forms = [replace(role, launch=launch) for launch in card.launches for role in roles]
    layouts = lay_out(forms, target, card.lanes)
    if isinstance(layouts, Refusal):
        verdict: Verdict = "not provable here" if CANNOT.search(layouts.reason) else "refused"
        return [Proof(card.name, name, verdict, layouts.reason)]
    pairs = list(zip(card.launches, layouts[::2], layouts[1::2], strict=True))
    faults = [fault for pair in pairs for fault in _faults(card.lanes, *pair)]
    reason = "; ".join(faults or [_summary(*pair) for pair in pairs])
    detail = {str(form): asdict(layout) for form, layout in zip(forms, layouts, strict=True)}
    return [Proof(card.name, name, "refused" if faults else "proved", reason, {"forms": detail})]
