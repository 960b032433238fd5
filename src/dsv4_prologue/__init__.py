"""The DeepSeek-V4 attention prologue: one operator, one contract, every card.

Importing this package loads neither torch nor Triton; the operator loads them when it is first
touched, or at once where torch is already loaded, so that `torch.ops.dsv4_prologue` is there.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from dsv4_prologue._version import __version__
from dsv4_prologue.planning import Launch, Plan, Problem, plan
from dsv4_prologue.selection import explain, use_card, use_launch

if TYPE_CHECKING:
    from dsv4_prologue.op import (
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
        gather_dequantize,
        prologue,
        warmup,
    )

__all__ = [
    "Launch",
    "Plan",
    "Problem",
    "__version__",
    "explain",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "gather_dequantize",
    "plan",
    "prologue",
    "use_card",
    "use_launch",
    "warmup",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        value = getattr(importlib.import_module(".op", __name__), name)
        globals()[name] = value  # the next look-up finds it without coming here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if sys.modules.get("torch") is not None:
    importlib.import_module(".op", __name__)
