"""Aligned caches of one model: its RoPE-free keys and its values, all layers side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache

from .._compat import cache_keyword
from ..errors import CalibrationError
from ..geometry import decoder_of
from ..modules import evaluation_mode


if TYPE_CHECKING:
    from ..rope import RotaryCodec


def embedding_weight(model: nn.Module) -> torch.Tensor:
    """The token embedding of the text decoder: its rows are the vocabulary, its device is where token ids go."""
    decoder: Any = decoder_of(model)
    weight: torch.Tensor = decoder.get_input_embeddings().weight
    return weight


def capture(
    model: nn.Module, codec: RotaryCodec, input_ids: torch.Tensor, *, stride: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Run a model on full rows of tokens and read its cache, with RoPE taken off the keys.

    The text decoder runs without the LM head, with a plain cache that keeps every token of sliding-window layers too.

    Args:
        model (`torch.nn.Module`): A causal language model, on any device and in any dtype.
        codec (`RotaryCodec`): The model's own, from `RotaryCodec.from_model`.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): Token ids without padding, on any device.
        stride (`int`, *optional*, defaults to 4): Tokens 0, `stride`, 2 · `stride`, … of every row are kept.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Keys and values of shape `[kept tokens, width]` in float32, the tokens row
        by row, the width by layer, then KV head, then dimension. On the device of the first layer.

    Raises:
        CalibrationError: If the cache has values that aren't finite.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0 or stride < 1:
        raise CalibrationError(
            f"Got input_ids of shape {list(input_ids.shape)} and stride {stride}, expected [batch, tokens] with at "
            "least one token, and a stride of at least 1."
        )
    decoder = decoder_of(model)
    ids = input_ids.to(embedding_weight(model).device)
    # No config: with one, sliding-window layers would forget all but their window.
    cache = DynamicCache()
    # A model's own precision is what its caches will have, whatever the caller computes in.
    with torch.inference_mode(), evaluation_mode(model), torch.autocast(ids.device.type, enabled=False):
        decoder(input_ids=ids, use_cache=True, **{cache_keyword(decoder): cache})
    # Outside inference mode, so that what is returned can be trained on.
    return _flattened(cache, codec, ids.shape, stride)


@torch.no_grad()
def _flattened(
    cache: DynamicCache, codec: RotaryCodec, shape: torch.Size, stride: int
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens = shape
    # The same for every row.
    positions = torch.arange(0, tokens, stride)[None]
    widths = [layer.keys.shape[1] * layer.keys.shape[3] for layer in cache.layers]
    keys = torch.empty(batch * positions.shape[1], sum(widths), dtype=torch.float32, device=cache.layers[0].keys.device)
    values = torch.empty_like(keys)
    tables = {}
    pieces = zip(keys.split(widths, dim=1), values.split(widths, dim=1), cache.layers, strict=True)
    for index, (key_columns, value_columns, layer) in enumerate(pieces):
        device = layer.keys.device
        if device not in tables:
            # Once per device the model is spread over.
            tables[device] = codec.tables(positions.to(device), device)
        content = codec.remove(layer.keys[:, :, ::stride], tables[device], index)
        key_columns.copy_(content.transpose(1, 2).reshape(key_columns.shape))
        value_columns.copy_(layer.values[:, :, ::stride].transpose(1, 2).reshape(value_columns.shape))
        # Large: the layer has been read, let go of it.
        layer.keys = layer.values = None
    _check_finite(keys, values, widths)
    return keys, values


def _check_finite(keys: torch.Tensor, values: torch.Tensor, widths: list[int]) -> None:
    for kind, content in (("keys", keys), ("values", values)):
        # One number per kind has to come back from the accelerator; which layer it was is only asked for afterwards.
        if bool(torch.isfinite(content).all()):
            continue
        bad = [i for i, part in enumerate(content.split(widths, dim=1)) if not bool(torch.isfinite(part).all())]
        raise CalibrationError(
            f"The {kind} of layer {bad[0]} aren't finite ({len(bad)} of {len(widths)} layers are affected). Load the "
            "model in bfloat16 or float32 if it is in float16, and check that its weights are intact."
        )
