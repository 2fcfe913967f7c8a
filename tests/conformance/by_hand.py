"""The reference of the conformance suite: a model without any cache, whose attention is read and rewritten by hand.

Nothing here goes through a cache class or through this package. Keys are taken before the model rotates them, mapped
with a mapper's bare weights, and rotated by the model's own forward pass.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn


Entries = tuple[Tensor, Tensor]
"""Keys without RoPE and values of one layer, both `[batch, kv_heads, tokens, head_dim]`."""


def attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules, in the order of their layers."""
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__]
    assert [m.layer_idx for m in found] == list(range(model.config.get_text_config().num_hidden_layers))
    return found


class Hands:
    """What stands between a model's modules and its attention function while [`by_hand`] is active."""

    def __init__(self, injected: Sequence[Entries] | None) -> None:
        self.injected = injected
        self.seen: dict[int, Entries] = {}
        self.layer = -1
        self.rotated: tuple[Tensor, Tensor] | None = None
        self.rotated_by_hand: Tensor | None = None

    def enter(self, module: nn.Module, *_) -> None:
        self.layer, self.rotated, self.rotated_by_hand = module.layer_idx, None, None

    def for_rows(self, rows: int) -> Entries:
        """The injected entries of this layer, repeated for beams and return sequences."""
        return tuple(part.repeat_interleave(rows // part.shape[0], dim=0) for part in self.injected[self.layer])

    def rope(self, original, query, key, cos, sin, *args, **kwargs):
        """The model's own RoPE, which is also put on the injected keys at the positions that the model gives them."""
        result = original(query, key, cos, sin, *args, **kwargs)
        self.rotated = (key, result[1])
        if self.injected is not None:
            keys, _ = self.for_rows(key.shape[0])
            replaced = torch.cat([keys[..., : key.shape[-1]], key[:, :, keys.shape[2] :]], dim=2)
            self.rotated_by_hand = original(query, replaced, cos, sin, *args, **kwargs)[1][:, :, : keys.shape[2]]
        return result

    def attend(self, original, module, query, key, value, *args, **kwargs):
        """The model's own eager attention, on injected keys and values where there are some."""
        self.seen[self.layer] = (self.without_rope(key), value)
        if self.injected is not None:
            keys, values = self.for_rows(key.shape[0])
            if self.rotated_by_hand is not None:
                width = self.rotated_by_hand.shape[-1]
                keys = torch.cat([self.rotated_by_hand, keys[..., width:]], dim=-1)
            tokens = keys.shape[2]
            key = torch.cat([keys, key[:, :, tokens:]], dim=2)
            value = torch.cat([values, value[:, :, tokens:]], dim=2)
        return original(module, query, key, value, *args, **kwargs)

    def without_rope(self, key: Tensor) -> Tensor:
        if self.rotated is None:  # a layer without RoPE
            return key
        before, after = self.rotated
        final = key[..., : after.shape[-1]]
        # Some models divide the rotated key by its length; a rotation doesn't mind in which order.
        scale = final.norm(dim=-1, keepdim=True) / after.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(final, after * scale, rtol=1e-4, atol=1e-4)
        return torch.cat([before * scale, key[..., after.shape[-1] :]], dim=-1)


@contextmanager
def by_hand(model: nn.Module, injected: Sequence[Entries] | None = None) -> Iterator[Hands]:
    """
    Reads each layer's entries in `Hands.seen`, and replaces those of the first tokens by `injected` where given.

    Args:
        model (`PreTrainedModel`): with eager attention. It must be run without a cache.
        injected (`Sequence[Entries]`, *optional*): one pair per layer.
    """
    assert model.config.get_text_config()._attn_implementation == "eager"
    hands, modules = Hands(injected), attentions(model)
    code = sys.modules[type(modules[0]).__module__]
    rope, attend = code.apply_rotary_pos_emb, code.eager_attention_forward
    hooks = [module.register_forward_pre_hook(hands.enter) for module in modules]
    with (
        mock.patch.object(code, "apply_rotary_pos_emb", lambda *a, **k: hands.rope(rope, *a, **k)),
        mock.patch.object(code, "eager_attention_forward", lambda *a, **k: hands.attend(attend, *a, **k)),
    ):
        try:
            yield hands
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def read_entries(model: nn.Module, **inputs: Tensor) -> list[Entries]:
    """The entries of every layer of a model that runs without a cache."""
    with by_hand(model) as hands:
        model(**inputs, use_cache=False)
    return [hands.seen[layer] for layer in range(len(hands.seen))]


@torch.no_grad()
def map_entries(mapper: nn.Module, entries: Sequence[Entries], heads: Sequence[int]) -> list[Entries]:
    """`K̂ = K W_K + b_K` and `V̂ = V W_V + b_V`, all heads of the supporting layers side by side."""
    mapped = []
    for maps, support, kv_heads in zip(mapper.layers, mapper.config.support, heads, strict=True):
        pair = []
        for part, linear in enumerate((maps.keys, maps.values)):
            rows = torch.cat([entries[layer][part].transpose(1, 2).flatten(2) for layer in support], dim=-1)
            pair.append((rows @ linear.weight.T + linear.bias).unflatten(2, (kv_heads, -1)).transpose(1, 2))
        mapped.append(tuple(pair))
    return mapped
