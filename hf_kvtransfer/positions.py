"""Which position each token of a converted cache has, on the source's side and on the target's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ConversionError
from .rope import RotaryCodec
from .source import SourceCache


# A bfloat16 key differs by up to 2⁻⁸ of its size from the same key computed in another batch row.
_SAME = 2e-2


@dataclass(frozen=True)
class Positions:
    """
    Args:
        source (`torch.Tensor` of shape `[batch or 1, tokens]`): positions with which the source rotated its keys.
        target (`torch.Tensor` of shape `[batch or 1, tokens]`): positions at which the target expects them.
        mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*): 1 for real tokens; `None` without padding.
    """

    source: Tensor
    target: Tensor
    mask: Tensor | None

    def narrow(self, start: int, length: int) -> "Positions":
        """The positions of `length` tokens from `start`."""
        mask = None if self.mask is None else self.mask.narrow(1, start, length)
        return Positions(self.source.narrow(1, start, length), self.target.narrow(1, start, length), mask)


def resolve_positions(
    source: SourceCache,
    codec: RotaryCodec,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    target_position_ids: Tensor | None = None,
) -> Positions:
    """
    Works out the positions of every cached token, per row.

    The target's are those that `generate` derives from the attention mask. The source's are `position_ids` where
    given. A left-padded source without them may have been run either way, by `generate` (positions from the mask) or
    by a plain `forward` (positions count the padding too); which of the two shows in the first layer's keys of the
    padding itself, which are all keys of one token.

    Args:
        source ([`SourceCache`]): the cache that was read.
        codec ([`RotaryCodec`]): the source's rotary code.
        attention_mask (`torch.Tensor` of shape `[batch, ≥ tokens]`, *optional*): 1 for real tokens, 0 for padding.
        position_ids (`torch.Tensor` of shape `[batch or 1, ≥ tokens]`, *optional*): the source's own positions.
        target_position_ids (`torch.Tensor` of the same shape, *optional*): the target's, if not those of the mask.

    Raises:
        [`ConversionError`]: on shapes that don't fit, right padding, or positions that can't be told.
    """
    batch, tokens, device = source.batch_size, source.num_tokens, source.keys[0].device
    mask = _checked_mask(attention_mask, batch, tokens, device)
    counted = torch.arange(tokens, device=device)[None]
    from_mask = counted if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)

    given = _checked_ids("position_ids", position_ids, batch, tokens, device)
    if given is None:
        given = counted if mask is None else _source_positions(source, codec, mask, counted, from_mask)
    target = _checked_ids("target_position_ids", target_position_ids, batch, tokens, device)
    if target is None:
        target = given if mask is None else from_mask
    return Positions(given, target, mask)


def _checked_mask(attention_mask: Any, batch: int, tokens: int, device: torch.device) -> Tensor | None:
    if attention_mask is None:
        return None
    _check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < tokens:
        raise ConversionError(
            f"`attention_mask` has shape {list(attention_mask.shape)}; expected [{batch}, {tokens}] or longer, one "
            "number per cached token. Pass the mask that the source model was given."
        )
    held = attention_mask[:, :tokens].to(device)
    if not bool(((held == 0) | (held == 1)).all()):
        raise ConversionError(
            f"`attention_mask` ({attention_mask.dtype}) holds other numbers than 0 and 1; expected 1 for real tokens "
            "and 0 for padding, as tokenizers give it, not a mask that is added to attention scores."
        )
    mask = (held != 0).to(torch.long)
    if bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise ConversionError(
            f"Row {row} of `attention_mask` ends in padding; expected left padding, so that every row's context ends "
            'where the target goes on. Tokenise with `padding_side="left"` and run the source model again.'
        )
    return None if bool(mask.all()) else mask


def _checked_ids(name: str, ids: Any, batch: int, tokens: int, device: torch.device) -> Tensor | None:
    if ids is None:
        return None
    _check_tensor(name, ids)
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] < tokens or not whole:
        raise ConversionError(
            f"`{name}` has shape {list(ids.shape)} and dtype {ids.dtype}; expected whole numbers of shape [{batch}, "
            f"{tokens}] (or [1, {tokens}]), one position per cached token."
        )
    ids = ids[:, :tokens].to(device=device, dtype=torch.long)
    if bool((ids < 0).any()):
        raise ConversionError(
            f"`{name}` holds negative positions; expected 0 or more. For left padding use "
            "`(attention_mask.cumsum(-1) - 1).clamp(min=0)`."
        )
    return ids


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.device.type == "meta" or value.layout != torch.strided:
        kind = f"tensor ({value.layout}, {value.device})" if isinstance(value, Tensor) else type(value).__name__
        raise ConversionError(
            f"`{name}` is a {kind}; expected a dense `torch.Tensor` with data, [batch, tokens]. Use "
            '`tokenizer(..., return_tensors="pt")`, or `torch.tensor(...)`.'
        )


def _source_positions(
    source: SourceCache, codec: RotaryCodec, mask: Tensor, counted: Tensor, from_mask: Tensor
) -> Tensor:
    told = told_by_padding(source.keys[0], codec, mask, counted, from_mask)
    if told is None:
        raise ConversionError(
            "The batch is left-padded and the cache doesn't tell how the source numbered its positions; expected "
            "`position_ids`. If the source was run by `generate`, pass `(attention_mask.cumsum(-1) - 1).clamp(min=0)`; "
            "if by a plain forward pass without `position_ids`, pass `torch.arange(tokens)[None]`."
        )
    return told


def told_by_padding(
    keys: Tensor, codec: RotaryCodec, mask: Tensor, counted: Tensor, from_mask: Tensor
) -> Tensor | None:
    """
    Tells the two ways of numbering a left-padded batch apart by the first layer's keys of the padding, which are all
    keys of one token.

    Args:
        keys (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): the first layer's.
        codec ([`RotaryCodec`]): the rotary code of the model that made them.
        mask (`torch.Tensor` of shape `[batch, tokens]`): 1 for real tokens, 0 for padding.
        counted (`torch.Tensor` of shape `[1, tokens]`): the positions that count the padding.
        from_mask (`torch.Tensor` of shape `[batch, tokens]`): the positions that don't.

    Returns:
        `torch.Tensor`: one of the two, or `None` where it can't be told.
    """
    # Only the padding at the left: gaps further on may be any token.
    leading = (mask.cumsum(-1) == 0).sum(-1)
    row = int(leading.argmax())
    pads = int(leading[row])
    if pads < 2:
        return None
    padding = keys[row : row + 1, :, :pads]
    content = codec.remove(padding, codec.tables(counted[:, :pads], keys.device), 0)
    if_mask, if_counted = _spread(padding), _spread(content)
    if if_mask < _SAME and if_mask * 3 < if_counted:
        return from_mask
    if if_counted < _SAME and if_counted * 3 < if_mask:
        return counted
    return None


def _spread(keys: Tensor) -> float:
    """How much keys of one token, `[1, heads, tokens, head_dim]`, differ between tokens, relative to their size."""
    keys = keys.float()
    keys = keys.detach()
    difference = (keys - keys[:, :, :1]).abs().amax()
    return float(difference / keys.abs().amax().clamp(min=torch.finfo(torch.float32).tiny))
