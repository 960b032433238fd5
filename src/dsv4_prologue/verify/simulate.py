"""Proofs in the exact interpreter: the bytes, the use of memory, and any order of programs.

Needs TRITON_INTERPRET=1. `python -m dsv4_prologue.verify.simulate NAME ...` prints the proofs of
cards as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from triton.runtime.interpreter import InterpreterError

from dsv4_prologue import reference
from dsv4_prologue.cards import Card, get_card
from dsv4_prologue.op import prologue
from dsv4_prologue.planning import Launch, tile_width
from dsv4_prologue.selection import use_card, use_launch
from dsv4_prologue.verify.ascend import vector_core_order
from dsv4_prologue.verify.compare import compare
from dsv4_prologue.verify.inputs import Case, Variant, build_case, canary_violations
from dsv4_prologue.verify.interpreter import MemoryFault, program_order
from dsv4_prologue.verify.proof import Proof, Verdict

#: A tile's tail on either side, whatever the card's rules say of so few tokens.
TOKENS = (1, 4, 17)
HEADS = (5, 8)
FORMS = {
    "in place": Variant(out="in place", not_finite=True, short=True),
    "padded": Variant(
        q_form="padded",
        pad_heads=3,
        cache_block_size=4,
        page_padding=6,
        kv_norm_weight=torch.bfloat16,
        index_dtype=torch.int32,
    ),
}
REPEATS = range(1, 8)  # how often program 0 was seen to run again

#: From the number of programs to those that run, in order.
Order = Callable[[int], Iterable[int]]


def _cases() -> Iterator[tuple[str, Case]]:
    for form, variant in FORMS.items():
        for num_tokens in TOKENS:
            for num_heads in HEADS:
                case = build_case(num_tokens, num_heads, variant, seed=num_tokens + num_heads)
                yield f"{form}, {num_tokens}x{num_heads}", case


def _numerics(card: Card, launch: Launch) -> tuple[list[str], list[str], int]:
    """Faults of the bytes, faults of the memory, and the number of calls."""
    wrong: list[str] = []
    faults: list[str] = []
    calls = 0
    with use_card(card.name), use_launch(launch):
        for name, case in _cases():
            calls += 1
            expected = reference.prologue(**case.arguments())
            try:
                q_out = prologue(**case.arguments())
            except (MemoryFault, InterpreterError) as error:
                faults.append(f"{launch}, {name}: {error}")
                continue
            seen = compare(case, q_out, expected)
            found = [seen.reason] if seen.reason else []
            wrong += [f"{launch}, {name}: {one}" for one in (*found, *canary_violations(case))]
    return wrong, faults, calls


def _left(case: Case) -> bytes:
    """Everything a call may have written, as bytes."""
    return b"".join(bytes(b.flat.view(torch.uint8).numpy()) for b in case.buffers)


def _same_in_any_order(
    card: Card, launch: Launch, form: Variant, orders: Mapping[str, Order]
) -> list[str]:
    """Orders of the programs that leave other bytes than the first order did."""
    with use_card(card.name), use_launch(launch):
        left = {}
        for name, order in {"in order": range, **orders}.items():
            case = build_case(17, 8, form, seed=3)
            with program_order(order, races=False):
                prologue(**case.arguments())
            left[name] = _left(case)
    return [f"{launch}, {name}" for name, bytes_ in left.items() if bytes_ != left["in order"]]


def shuffled(count: int) -> list[int]:
    """All programs once, in another order."""
    return random.Random(count).sample(range(count), count)


def repeated(times: int) -> Order:
    """Program 0 so many times more, whatever the grid, and then all in order."""
    return lambda count: [0] * times + list(range(count))


def _order(card: Card) -> Proof:
    """Shuffled programs, and program 0 again and again, leave the same bytes where they may.

    Each with KV, whose programs come first, and for Q alone, whose program 0 is one of Q's.
    """
    faults = []
    again = {f"program 0 {n} times more": repeated(n) for n in REPEATS}
    for launch in card.launches:
        for kv in (True, False):
            out, in_place = Variant(out="buffer", kv=kv), Variant(out="in place", kv=kv)
            faults += _same_in_any_order(card, launch, in_place, {"shuffled": shuffled})
            faults += _same_in_any_order(card, launch, out, {"shuffled": shuffled, **again})
            if card.limits is not None:
                cores = card.limits.multiple_of
                on_card = {
                    f"{cores} cores, {n} times more": vector_core_order(cores, repeats=n, seed=n)
                    for n in REPEATS
                }
                faults += _same_in_any_order(card, launch, in_place, on_card)
    reason = "shuffled in place and out of place; program 0 up to 7 times more out of place"
    if card.limits is not None:
        reason += f", and in place where grids are multiples of {card.limits.multiple_of}"
    verdict: Verdict = "refused" if faults else "proved"
    return Proof(card.name, "order of programs", verdict, "; ".join(faults) or reason)


def prove(card: Card) -> list[Proof]:
    """Numerics, memory and order of programs, with the card's kernel, cast and launches."""
    if card.kernel == "torch":
        reason = "it runs no kernel of ours; the tests compare it with the oracle"
        return [Proof(card.name, "numerics", "not provable here", reason)]
    wrong: list[str] = []
    faults: list[str] = []
    calls = 0
    for launch in card.launches:
        more_wrong, more_faults, more_calls = _numerics(card, launch)
        wrong, faults, calls = wrong + more_wrong, faults + more_faults, calls + more_calls
    detail = {"launches": [str(launch) for launch in card.launches], "calls": calls}
    numerics: Verdict = "refused" if wrong or faults else "proved"
    memory: Verdict = "refused" if faults else "proved"
    exact = (
        f"{calls} calls: cache bytes equal the oracle's (where KV is normalised first, all but two "
        "in 10000), Q within its limit, canaries intact"
    )
    clean = f"{calls} calls: in bounds, aligned, no byte stored twice, no race, no int32 overflow"
    return [
        Proof(card.name, "numerics", numerics, "; ".join(wrong + faults) or exact, detail),
        Proof(card.name, "memory", memory, "; ".join(faults) or clean, detail),
        _order(card),
    ]


def prove_all(names: Iterable[str]) -> list[Proof]:
    """The proofs of several cards. Cards that run the same kernel the same way share them."""
    known: dict[object, list[Proof]] = {}
    found = []
    for name in names:
        card = get_card(name)
        width = tile_width(card.lanes)
        alike = (card.kernel, width, card.fp8_cast, card.launches, card.limits, card.heads_divide)
        if alike not in known:
            known[alike] = prove(card)
        found += [dataclasses.replace(proof, card=name) for proof in known[alike]]
    return found


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        proofs = prove_all(sys.argv[1:])
    json.dump([proof.to_dict() for proof in proofs], sys.stdout)
