"""What the cache given as `into=` holds already, whether the source can go on from there, and appending to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .cache import TransferredCache, TransferredLayer, TransferredSlidingWindowLayer
from .errors import ConversionError
from .geometry import ModelGeometry
from .positions import Positions, told_by_padding
from .rope import RotaryCodec


def length_of(into: Any, geometry: ModelGeometry, rows: int, tokens: int) -> int:
    """
    The number of tokens that `into` holds already, after checking that a source of `rows` × `tokens` can go on from it.

    Args:
        into (`DynamicCache`): what was given as `into=`.
        geometry ([`ModelGeometry`]): of the target.
        rows (`int`): the batch size of the source cache.
        tokens (`int`): how many tokens the source cache holds.

    Raises:
        [`ConversionError`]: if it is no cache of the target, or of another batch, or ahead of the source.
    """
    if not isinstance(into, DynamicCache):
        raise ConversionError(
            f"`into` is a {type(into).__name__}; expected a `DynamicCache` of the target (native or converted), "
            "which can grow."
        )
    if not into.layers:
        return 0
    lengths = cached_lengths(into.layers)
    if len(lengths) != len(geometry.layers) or len(set(lengths)) > 1:
        raise ConversionError(
            f"`into` holds {sorted(set(lengths))} tokens in its {len(lengths)} layers; expected the same number in "
            f"each of the target's {len(geometry.layers)} layers. Pass a cache that the target or this mapper made."
        )
    if lengths[0] > tokens:
        raise ConversionError(
            f"`into` already holds {lengths[0]} tokens, the source cache only {tokens}; expected a source that has "
            "read at least as far. Pass the source cache of the whole conversation, in the same order."
        )
    for index, (layer, expected) in enumerate(zip(into.layers, geometry.layers, strict=True)):
        for name in ("keys", "values"):
            held = getattr(layer, name, None)
            if isinstance(held, Tensor) and held.dim() == 4 and lengths[0]:
                _check_held(index, held, (rows, expected.kv_heads, expected.head_dim))
    return lengths[0]


def _check_held(index: int, held: Tensor, expected: tuple[int, int, int]) -> None:
    if held.shape[0] != expected[0]:
        raise ConversionError(
            f"`into` holds {held.shape[0]} rows, the source cache {expected[0]}; expected the same batch in both. "
            "Convert the source cache of the same prompts, before beams or return sequences multiply the rows."
        )
    if (held.shape[1], held.shape[3]) != expected[1:]:
        raise ConversionError(
            f"Layer {index} of `into` has {held.shape[1]} KV heads × {held.shape[3]}, the target {expected[1]} × "
            f"{expected[2]}; expected a cache of the target. Pass one that the target or this mapper made."
        )


def check_positions_meet(into: DynamicCache, start: int, positions: Positions, codec: RotaryCodec) -> None:
    """
    Refuses to append where what `into` holds was put at other positions than the new tokens go on from.

    A converted cache has noted its positions. A native one shows, by the keys of its own left padding, whether its
    positions count the padding.

    Args:
        into (`DynamicCache`): the cache to append to.
        start (`int`): how many tokens it holds.
        positions ([`Positions`]): of all tokens of the source cache.
        codec ([`RotaryCodec`]): the target's rotary code.

    Raises:
        [`ConversionError`]: if the two don't meet.
    """
    if not start:
        return
    target, mask = positions.target[:, :start], positions.mask
    if isinstance(into, TransferredCache):
        noted, noted_mask = into.recorded
        if noted is None:
            return
        known = min(noted.shape[1], start)
        one, other = (_real(mask, target, known), _real(noted_mask, noted.to(target.device), known))
        if not torch.equal(*torch.broadcast_tensors(one, other)):
            raise ConversionError(
                f"`into` holds {start} tokens that were converted with other positions or another `attention_mask` "
                "than those given now; expected them to meet. Pass the mask and the positions of the whole "
                "conversation, from its first token, in every call."
            )
        return
    first = into.layers[0]
    keys = getattr(first, "keys", None)
    if mask is None or not isinstance(keys, Tensor) or keys.dim() != 4 or keys.shape[2] != start:
        return
    row = int((mask == 0).sum(-1).argmax())
    counted, from_mask = torch.arange(start, device=target.device)[None], (mask.cumsum(-1) - 1).clamp(min=0)[:, :start]
    told = told_by_padding(keys.to(target.device), codec, mask[:, :start], counted, from_mask)
    real = mask[row, :start] != 0
    if told is not None and not torch.equal(
        told.expand_as(mask[:, :start])[row][real], target.expand_as(mask[:, :start])[row][real]
    ):
        raise ConversionError(
            f"Row {row} of `into` is left-padded, and its keys show that the target numbered its positions the other "
            "way; expected `target_position_ids` that go on from them. If it was run by a plain forward pass without "
            "`position_ids`, pass `torch.arange(tokens)[None]`; if by `generate`, leave them out."
        )


def _real(mask: Tensor | None, positions: Tensor, known: int) -> Tensor:
    """The positions of real tokens, and −1 for padding."""
    positions = positions[:, :known]
    if mask is None:
        return positions
    return positions.expand(mask.shape[0], -1).where(mask[:, :known].to(positions.device) != 0, -1)


@contextmanager
def all_or_nothing(cache: DynamicCache) -> Iterator[None]:
    """
    Puts a cache back as it was when the block fails, so that no conversion leaves layers of unequal length. Growing
    never writes into the tensors of a dynamic layer, so remembering them is enough.
    """
    layers = list(cache.layers)
    before = [dict(layer.__dict__) for layer in layers]
    try:
        yield
    except BaseException:
        cache.layers[:] = layers
        for layer, state in zip(layers, before, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(state)
        raise


def extend_cache(cache: DynamicCache, layer: int, keys: Tensor, values: Tensor) -> None:
    """Appends entries `[batch, kv_heads, tokens, head_dim]` to one layer of a target cache, native or converted."""
    target = cache.layers[layer] if layer < len(cache.layers) else None
    if isinstance(target, TransferredLayer | TransferredSlidingWindowLayer):
        target.extend(keys, values)
        return
    held = getattr(target, "keys", None)
    if held is not None and held.dim() == 4:
        keys, values = keys.to(held.device, held.dtype), values.to(held.device, held.dtype)
    cache.update(keys, values, layer)


def cached_lengths(layers: Sequence[Any]) -> list[int]:
    """The number of tokens that each layer has seen."""
    return [int(layer.get_seq_length()) for layer in layers]
