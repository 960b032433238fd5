"""DeepSeek-V4 of the `transformers` package, with this prologue and its paged FP8 cache in it.

    with Swap(model, max_tokens=512):
        model(input_ids)

Replaces `DeepseekV4Attention.forward` on each attention module of one model; nothing of the
`transformers` package itself is changed. Q and KV go through `dsv4_prologue.prologue` into paged
FP8 caches, and attention reads KV back through `dsv4_prologue.gather_dequantize`. The model's own
cache object goes on counting tokens and holding the compressors' state, but holds no KV.

Supported: `transformers` 5.8.1 to 5.24, tested at 5.8.1, 5.17.0 and 5.24.0. 5.8.0, the first
release with this model, rotates every layer by the `main` angles and shows queries compressed
entries from their future.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

import dsv4_prologue
from dsv4_prologue.contract import HEAD_DIM, PageLayout

#: The lowest and the newest release of `transformers` this was tested with.
SUPPORTED = ("5.8.1", "5.24.0")

PAGE_TOKENS = 64  # tokens a page
PAGE_STRIDE = PageLayout(PAGE_TOKENS).usual_stride


@dataclass(frozen=True)
class Call:
    """One prologue call of one layer: the tensors themselves, no copies. N = batch * new tokens."""

    layer_idx: int
    q: Tensor  # bf16 [N, H, 512], as q_b_proj left it
    kv: Tensor  # bf16 [N, 512], after the model's own kv_norm
    position_ids: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]
    q_out: Tensor  # bf16 [N, H, 512], as attention takes it
    kv_read: Tensor  # bf16 [batch, L, 512], what attention reads: the window, the new tokens


class Swap:
    """Puts the prologue into `model` at construction; `undo()`, or leaving `with`, takes it out.

    Args:
        model: a `DeepseekV4ForCausalLM` or `DeepseekV4Model` in bf16, on one device.
        max_tokens: tokens the pages hold for each sequence, and rows of the cos/sin tables.
        batch_size: sequences at a time.
        seed: of the order of the pages, which is shuffled as in an engine long at work.
        observe: called with each `Call`, after its prologue and before its attention.

    The pages hold one batch at a time: a forward with an empty `Cache` starts a new one. Call under
    `torch.no_grad()`. Beam search, which would reorder what the pages hold, fails.

    Raises:
        RuntimeError: an older `transformers` than `SUPPORTED`; a forward that continues a `Cache`
            whose KV the pages no longer hold.
        TypeError: the model is not DeepSeek-V4, not in bf16, or its `inv_freq` is not in f32 (as
            after `model.to(torch.bfloat16)`; give the dtype when the model is built).
        ValueError: RoPE frequencies that change with the length; more tokens or sequences than
            asked for.
    """

    k_caches: list[Tensor]  # one a layer: uint8 [pages, PAGE_STRIDE]
    page_table: Tensor  # int64 [batch_size, pages a sequence]

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int,
        batch_size: int = 1,
        seed: int = 0,
        observe: Callable[[Call], None] | None = None,
    ) -> None:
        if Version(transformers.__version__) < Version(SUPPORTED[0]):
            raise RuntimeError(
                f"transformers: expected {SUPPORTED[0]} or newer, got {transformers.__version__}"
            )
        base: Any = getattr(model, "model", model)
        if not isinstance(base, modeling.DeepseekV4Model):
            raise TypeError(f"model: expected DeepSeek-V4, got {type(model).__name__}")
        if base.dtype != torch.bfloat16:
            raise TypeError(f"model: expected bfloat16, got {base.dtype}")
        self.max_tokens, self.batch_size, self.observe = max_tokens, batch_size, observe
        self.tables = {
            label: cos_sin_table(base.rotary_emb, label, max_tokens)
            for label in base.rotary_emb.layer_types
        }
        pages = -(-max_tokens // PAGE_TOKENS)
        shuffle = torch.Generator().manual_seed(seed)
        order = torch.randperm(batch_size * pages, generator=shuffle)
        self.page_table = order.view(batch_size, pages).to(base.device)
        attentions = [layer.self_attn for layer in base.layers]
        self.k_caches = [
            torch.empty(batch_size * pages, PAGE_STRIDE, dtype=torch.uint8, device=base.device)
            for _ in attentions
        ]
        #: The `Cache` whose KV each layer's pages hold.
        self._held: list[weakref.ref[Any] | None] = [None] * len(attentions)
        #: What to put back: a forward somebody else had set on the instance, or None.
        self._undo = [(attn, vars(attn).get("forward")) for attn in attentions]
        for attn in attentions:
            attn.forward = functools.partial(self._forward, attn)

    def undo(self) -> None:
        """Give the model its own attention back; a second call does nothing."""
        while self._undo:
            attn, forward = self._undo.pop()
            if forward is None:
                del attn.forward
            else:
                attn.forward = forward

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def slots(self, start: int, stop: int) -> Tensor:
        """Slots of each sequence's tokens start to stop - 1: int64 [batch_size, stop - start]."""
        token = torch.arange(start, stop, device=self.page_table.device)
        return self.page_table[:, token // PAGE_TOKENS] * PAGE_TOKENS + token % PAGE_TOKENS

    def _claim(self, layer_idx: int, cache: Any, batch: int, num_new: int) -> tuple[int, int]:
        """Count `num_new` tokens in the layer's part of `cache`; return their start and stop."""
        layer = None if cache is None else cache.layers[layer_idx]
        start = 0 if layer is None else int(layer.cumulative_length)
        stop = start + num_new
        if batch != self.batch_size:
            raise ValueError(f"batch: expected {self.batch_size} sequences, got {batch}")
        if stop > self.max_tokens:
            raise ValueError(f"tokens: expected at most {self.max_tokens} a sequence, got {stop}")
        if start == 0:
            self._held[layer_idx] = None if cache is None else weakref.ref(cache)
        else:
            held = self._held[layer_idx]
            if held is None or held() is not cache:
                raise RuntimeError("cache: expected the one the pages hold, got another")
        if layer is not None:
            layer.cumulative_length = stop  # masks and positions are made from it
        return start, stop

    def _forward(
        self,
        attn: Any,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        position_ids: Tensor,
        attention_mask: Tensor | None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`DeepseekV4Attention.forward`, from the projections to the read of the cache our way."""
        cache = past_key_values if cache is None else cache  # its earlier name
        layer_idx = attn.layer_idx
        batch, num_new, _ = hidden_states.shape
        start, stop = self._claim(layer_idx, cache, batch, num_new)

        q_residual = attn.q_a_norm(attn.q_a_proj(hidden_states))
        q = attn.q_b_proj(q_residual).view(batch * num_new, attn.num_heads, HEAD_DIM)
        # The weighted norm of KV stays in the model: releases round it differently, and without it
        # what the cache must hold follows from `kv` to the bit.
        kv = attn.kv_norm(attn.kv_proj(hidden_states)).view(batch * num_new, HEAD_DIM)
        positions = position_ids.expand(batch, num_new).reshape(-1)
        slots = self.slots(start, stop).view(-1)
        k_cache = self.k_caches[layer_idx]
        q_out = dsv4_prologue.prologue(
            q,
            kv,
            k_cache,
            slots,
            positions,
            self.tables[attn.rope_layer_type],
            eps=attn.q_b_norm.eps,
            cache_block_size=PAGE_TOKENS,
        )
        assert q_out is not None  # q was given
        visible = self.slots(max(0, start - attn.sliding_window + 1), stop)
        kv_read = dsv4_prologue.gather_dequantize(k_cache, visible, cache_block_size=PAGE_TOKENS)
        if self.observe is not None:
            self.observe(Call(layer_idx, q, kv, positions, slots, q_out, kv_read))

        # From here on as the model has it.
        query = q_out.view(batch, num_new, attn.num_heads, HEAD_DIM).transpose(1, 2)
        keys, bias = kv_read[:, None], None  # [B, 1, L, 512]
        if attn.compressor is not None:
            compressed, bias = attn.compressor(
                hidden_states, q_residual, position_ids, cache, layer_idx
            )
            keys = torch.cat([keys, compressed], dim=2)
        if isinstance(attention_mask, Tensor) and keys.shape[2] > attention_mask.shape[-1]:
            if bias is None:
                attention_mask = pad(attention_mask, (0, keys.shape[2] - attention_mask.shape[-1]))
            else:
                attention_mask = torch.cat([attention_mask, bias.to(attention_mask.dtype)], dim=-1)
        attend = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
            attn.config._attn_implementation, modeling.eager_attention_forward
        )
        output, weights = attend(
            attn,
            query,
            keys,
            keys,
            attention_mask,
            dropout=attn.attention_dropout if attn.training else 0.0,
            scaling=attn.scaling,
            sliding_window=attn.sliding_window,
            s_aux=attn.sinks,
            **kwargs,
        )
        # K is V, so the output comes rotated by its keys' positions: turn it back by the query's.
        cos, sin = position_embeddings[attn.rope_layer_type]
        output = modeling.apply_rotary_pos_emb(output.transpose(1, 2), cos, -sin).transpose(1, 2)
        grouped = output.reshape(batch, num_new, attn.config.o_groups, -1)
        return attn.o_b_proj(attn.o_a_proj(grouped).flatten(2)), weights


def cos_sin_table(rotary_emb: Any, label: str, num_positions: int) -> Tensor:
    """The model's cosines and sines in f32, as the operator takes them: f32 [num_positions, 64].

    `label` is the model's name of the rope type, `main` or `compress`.
    """
    inv_freq = getattr(rotary_emb, f"{label}_inv_freq")
    if inv_freq.dtype != torch.float32:
        raise TypeError(f"{label}_inv_freq: expected float32, got {inv_freq.dtype}")
    if rotary_emb.rope_type[label] in ("dynamic", "longrope"):
        raise ValueError(f"rope type: expected a fixed one, got {rotary_emb.rope_type[label]}")
    position_ids = torch.arange(num_positions, device=inv_freq.device)[None]
    like = inv_freq.new_empty(0)  # the rotary module answers in this tensor's dtype
    cos, sin = rotary_emb(like, position_ids=position_ids, layer_type=label)
    return torch.cat((cos, sin), dim=-1)[0]
