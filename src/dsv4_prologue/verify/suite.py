"""Every proof of a card that needs no card."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

from dsv4_prologue.cards import Card, get_card
from dsv4_prologue.verify import ascend, compilers, lanes, launches
from dsv4_prologue.verify.proof import Proof


@contextlib.contextmanager
def _interpreted(names: Iterable[str]) -> Iterator[Callable[[], list[Proof]]]:
    """Start a process in which Triton interprets, for the proofs of `simulate`; give the waiter."""
    command = [sys.executable, "-m", "dsv4_prologue.verify.simulate", *names]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:

        def proofs() -> list[Proof]:
            printed, _ = process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
            return [Proof(**one) for one in json.loads(printed)]

        yield proofs


def _static(card: Card) -> list[Proof]:
    """The proofs that run no program: launches, compilers, lanes, Ascend's middle end."""
    found = launches.prove(card) + compilers.prove(card) + lanes.prove(card)
    return found + (ascend.prove(card) if card.kernel == "vector_core" else [])


def prove(names: list[str], on_proof: Callable[[Proof], object] = lambda _: None) -> list[Proof]:
    """All proofs of these cards, a card after another. `on_proof` is called with each once it is
    there, in another order.

    Raises ValueError for a name that is no card's. What needs Triton, where there is none, is
    "not provable here".
    """
    cards = [get_card(name) for name in names]
    if importlib.util.find_spec("triton") is None:
        absent = "Triton is not installed (the README says how, under Installing)"
        return [Proof(name, "all", "not provable here", absent) for name in names]
    found: dict[str, list[Proof]] = {}
    with _interpreted(names) as simulated:
        for card in cards:
            found[card.name] = _static(card)
            for proof in found[card.name]:
                on_proof(proof)
        for proof in simulated():
            found[proof.card].append(proof)
            on_proof(proof)
    return [proof for name in names for proof in found[name]]
