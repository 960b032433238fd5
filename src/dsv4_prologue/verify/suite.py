"""Every proof of a card that needs no card."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

from dsv4_prologue.cards import get_card
from dsv4_prologue.verify.proof import Proof


def _interpreted(names: Iterable[str]) -> list[Proof]:
    """The proofs of `simulate`, from a process in which Triton interprets."""
    command = [sys.executable, "-m", "dsv4_prologue.verify.simulate", *names]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Proof(**one) for one in json.loads(done.stdout)]


def prove(names: list[str], on_proof: Callable[[Proof], None] | None = None) -> list[Proof]:
    """All proofs of these cards, a card after another. `on_proof` is called with each.

    Raises ValueError for a name that is no card's. What needs Triton, where there is none, is
    "not provable here".
    """
    from dsv4_prologue.verify import ascend, compilers, lanes, launches

    cards = [get_card(name) for name in names]
    if importlib.util.find_spec("triton") is None:
        simulated = [
            Proof(name, "numerics", "not provable here", "Triton is not installed")
            for name in names
        ]
    else:
        simulated = _interpreted(names)
    found = []
    for card in cards:
        proofs = launches.prove(card)
        proofs += [proof for proof in simulated if proof.card == card.name]
        for module in (compilers, lanes, ascend):
            proofs += module.prove(card)
        for proof in proofs:
            found.append(proof)
            if on_proof is not None:
                on_proof(proof)
    return found
