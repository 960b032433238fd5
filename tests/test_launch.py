"""What a launch is known by, and what it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dsv4_prologue  # loads the operator
from dsv4_prologue import launch, selection
from dsv4_prologue.contract import check_prologue
from dsv4_prologue.planning import Plan
from dsv4_prologue.verify.inputs import build_case

pytestmark = pytest.mark.once

PLAN = dsv4_prologue.explain(64, 8, card="nvidia-hopper")


def tensors(**changed: Any) -> dict[str, Any]:
    """Of a call with everything that a call can have, in the order of the kernel's pointers."""
    given = build_case(3, 2).arguments()
    weight = torch.ones(512, dtype=torch.bfloat16)
    names = ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache")
    found = {name: given[name] for name in names}
    return found | {"q_out": torch.empty_like(found["q"]), "kv_norm_weight": weight} | changed


def key(
    plan: Plan = PLAN, block_size: int = 64, norm: bool = True, rope: bool = True, **of: Any
) -> Any:
    given = tensors(**of)
    layout = check_prologue(**given, cache_block_size=block_size)
    return launch._key(plan, layout, operands(given), block_size, norm, rope)


def operands(given: dict[str, Any]) -> launch._Operands:
    q, kv, cache, slots, positions, table, q_out, weight = given.values()
    return launch._Operands(q, q_out, kv, cache, slots, positions, table, weight)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens_per_tile": 2},
        {"heads_per_tile": 2},
        {"num_warps": 2},
        {"num_stages": 2},
        {"dependent": "no"},
        {"kv_tokens_per_tile": 4},  # in which alone two of Hopper's launches differ
    ],
    ids=str,
)
def test_each_field_of_a_launch_is_in_the_key(changed: dict[str, Any]) -> None:
    assert key() == key()
    assert key(replace(PLAN, launch=replace(PLAN.launch, **changed))) != key()


def test_what_else_a_kernel_is_compiled_for_is_in_the_key() -> None:
    given = tensors()
    wide = torch.empty(3, 2, 1024, dtype=torch.bfloat16)[..., :512]
    keys = [
        key(),
        key(replace(PLAN, card="metax-c550")),  # other lanes, so tiles of another width
        key(replace(PLAN, fp8_cast="integer")),
        key(block_size=4),
        key(norm=False),
        key(rope=False),
        key(q=None, q_out=None),
        key(kv=None, k_cache=None, slot_mapping=None, kv_norm_weight=None),
        key(q=wide),
        key(q_out=wide),
        key(kv=torch.empty(3, 1024, dtype=torch.bfloat16)[:, :512]),
        key(k_cache=torch.zeros(4, 40000, dtype=torch.uint8)[:, : 64 * 584]),
        key(slot_mapping=given["slot_mapping"].int()),
        key(position_ids=given["position_ids"].int()),
        key(cos_sin_cache=given["cos_sin_cache"].bfloat16()),
        key(kv_norm_weight=None),
        key(kv_norm_weight=torch.ones(512)),
    ]
    assert len(set(keys)) == len(keys)


def test_what_changes_from_call_to_call_is_not_in_the_key() -> None:
    """More tokens, slots, pages and positions launch the kernel that is there."""
    fewer = build_case(1, 2, seed=7).arguments()
    names = ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache")
    others = {name: fewer[name] for name in names}
    cache = tensors()["k_cache"]
    others["k_cache"] = torch.zeros(9, cache.stride(0), dtype=torch.uint8)[:, : cache.shape[1]]
    others["q_out"] = torch.empty_like(others["q"])
    assert key(**others) == key()


def test_pointers_are_in_the_order_of_the_kernel_s_arguments() -> None:
    given = tensors()
    layout = check_prologue(**given)
    named = launch._arguments(PLAN, layout, operands(given), 1e-6, 64, True, True, 1)
    pointers = [one.data_ptr() for name, one in named.items() if name.endswith("_ptr")]
    assert list(named)[: len(pointers)] == [name for name in named if name.endswith("_ptr")]
    assert list(launch._pointers(operands(given))) == pointers
    assert len(set(pointers)) == len(pointers) - 1  # the cache is taken twice


@pytest.mark.parametrize("known", [True, False])
def test_a_dependent_launch_is_an_ordinary_one_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(selection, "_launches_dependently", lambda: known)
    with dsv4_prologue.use_card("nvidia-hopper"):
        plan = selection.plan_for(torch.device("cuda"), 1, 64)
    assert plan.launch.dependent == ("early" if known else "no")
    assert ("this Triton has none of that" in plan.reason) is not known
