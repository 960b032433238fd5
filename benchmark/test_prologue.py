"""Ours at each shape: checked, timed, and beside the baselines. See conftest.py."""

from __future__ import annotations

from typing import Any

import pytest


def test_prologue(records: list[dict[str, Any]], shape: tuple[int, int]) -> None:
    """Ours was right and was timed; how fast it is, is told and not asserted."""
    ours = [
        one
        for one in records
        if (one["num_tokens"], one["num_heads"], one["candidate"]) == (*shape, "ours")
    ]
    if not ours:
        pytest.skip("the host's cost is taken at the fewest tokens of each head count")
    for one in ours:
        if one["check"]["verdict"] == "not verified":
            pytest.skip(one["reason"])
        assert one["reason"] == ""
        assert one["median_us"] > 0
