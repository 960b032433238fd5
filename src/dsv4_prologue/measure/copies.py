"""A bare copy and a bare read-modify-write: what no kernel that moves as many bytes can beat."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constexpr arguments are UPPER_CASE, as everywhere in Triton)

import triton
import triton.language as tl


@triton.jit
def copy_kernel(out_ptr, in_ptr, num_words, WORDS: tl.constexpr):
    """out = in, int32 [num_words], WORDS a program."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    live = word < num_words
    tl.store(out_ptr + word, tl.load(in_ptr + word, mask=live), mask=live)


@triton.jit
def change_kernel(ptr, num_words, WORDS: tl.constexpr):
    """Flip every bit in place, int32 [num_words], WORDS a program."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    live = word < num_words
    tl.store(ptr + word, tl.load(ptr + word, mask=live) ^ -1, mask=live)
