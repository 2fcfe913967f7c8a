"""Aligned caches of one model: its RoPE-free keys and its values, all layers side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache

from .._compat import cache_keyword
from ..blocks import stream_features
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


@dataclass
class Content:
    """
    RoPE-free keys and values of kept tokens, all layers of one model side by side, in float32.

    Attributes:
        keys (`torch.Tensor` of shape `[tokens, width]`): By layer, then KV head, then dimension.
        values (`torch.Tensor` of shape `[tokens, width]`): Likewise.
        previous (`list[tuple[torch.Tensor, torch.Tensor]]`):
            The same of the tokens one, two, … before each; the first token of a row stands in for what precedes it.
        hidden (`list[torch.Tensor]`):
            `[tokens, hidden_size + 1]` per depth: the residual stream there as features
            ([`~hf_kvtransfer.blocks.stream_features`]).
    """

    keys: torch.Tensor
    values: torch.Tensor
    previous: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    def rows(self, chosen: Sequence[int], of: int) -> Content:
        """What belongs to some rows of a batch of `of` rows."""

        def take(content: torch.Tensor) -> torch.Tensor:
            return content.view(of, -1, content.shape[1])[list(chosen)].flatten(0, 1)

        return Content(
            take(self.keys),
            take(self.values),
            [(take(keys), take(values)) for keys, values in self.previous],
            [take(hidden) for hidden in self.hidden],
        )


def capture(
    model: nn.Module, codec: RotaryCodec, input_ids: torch.Tensor, *, stride: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`capture_content`] of one model, for callers that want its keys and values alone.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Keys and values of shape `[kept tokens, width]` in float32.
    """
    content = capture_content(model, codec, input_ids, stride=stride)
    return content.keys, content.values


def capture_content(
    model: nn.Module,
    codec: RotaryCodec,
    input_ids: torch.Tensor,
    *,
    stride: int = 4,
    skip: int = 0,
    window: int = 0,
    hidden_at: Sequence[int] = (),
    on_layer: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    on_cache: Callable[[DynamicCache], None] | None = None,
) -> Content:
    """
    Run a model on full rows of tokens and read its cache, with RoPE taken off the keys.

    The text decoder runs without the LM head, with a plain cache that keeps every token of sliding-window layers too.

    Args:
        model (`torch.nn.Module`): A causal language model, on any device and in any dtype.
        codec (`RotaryCodec`): The model's own, from `RotaryCodec.from_model`.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): Token ids without padding, on any device.
        stride (`int`, *optional*, defaults to 4): Tokens 0, `stride`, 2 · `stride`, … of every row are kept.
        skip (`int`, *optional*, defaults to 0): So many tokens at the start of every row are left out.
        window (`int`, *optional*, defaults to 0): How many previous tokens of each kept one are returned as well.
        hidden_at (`Sequence[int]`, *optional*): Layers whose input is returned as well, as features.
        on_layer (`Callable`, *optional*):
            Called with a layer's index and all its rotated keys and values, `[batch, kv_heads, tokens, head_dim]`.

        on_cache (`Callable`, *optional*): Called with the whole cache before it is taken apart.

    Returns:
        `Content`: The tokens row by row, on the device of the first layer.

    Raises:
        CalibrationError: If the cache has values that aren't finite.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0 or stride < 1 or input_ids.shape[1] <= skip:
        raise CalibrationError(
            f"Got input_ids of shape {list(input_ids.shape)} and stride {stride}, expected [batch, tokens] with at "
            f"least one token beyond the first {skip}, and a stride of at least 1."
        )
    decoder = decoder_of(model)
    ids = input_ids.to(embedding_weight(model).device)
    # No config: with one, sliding-window layers would forget all but their window.
    cache = DynamicCache()
    # A model's own precision is what its caches will have, whatever the caller computes in.
    with (
        torch.inference_mode(),
        evaluation_mode(model),
        torch.autocast(ids.device.type, enabled=False),
        _hidden_states(decoder, hidden_at, slice(skip, None, stride)) as hidden,
    ):
        decoder(input_ids=ids, use_cache=True, **{cache_keyword(decoder): cache})
    if on_cache is not None:
        on_cache(cache)
    # Outside inference mode, so that what is returned can be trained on.
    content = _flattened(cache, codec, ids.shape, slice(skip, None, stride), window, on_layer)
    with torch.no_grad():
        content.hidden = [hidden[layer].to(content.keys.device).flatten(0, 1).clone() for layer in hidden_at]
    return content


@contextmanager
def _hidden_states(decoder: Any, layers: Sequence[int], kept: slice) -> Iterator[dict[int, torch.Tensor]]:
    """Notes the input of some decoder layers during a forward pass, of the kept tokens, as features."""
    noted: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = arguments[0] if arguments else keywords["hidden_states"]
            noted[layer] = stream_features(states[:, kept])

        return hook

    handles = [decoder.layers[layer].register_forward_pre_hook(note(layer), with_kwargs=True) for layer in layers]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _flattened(
    cache: DynamicCache,
    codec: RotaryCodec,
    shape: torch.Size,
    every: slice,
    window: int,
    on_layer: Callable[[int, torch.Tensor, torch.Tensor], None] | None,
) -> Content:
    batch, tokens = shape
    # The same for every row; first the kept tokens, then those before each.
    kept = torch.arange(tokens)[every]
    wanted = [(kept - lag).clamp(min=0)[None] for lag in range(window + 1)]
    widths = [layer.keys.shape[1] * layer.keys.shape[3] for layer in cache.layers]
    rows, device = batch * len(kept), cache.layers[0].keys.device
    empty = partial(torch.empty, rows, sum(widths), dtype=torch.float32, device=device)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = [(empty(), empty()) for _ in wanted]
    tables: dict[torch.device, list[Any]] = {}
    start = 0
    for index, (width, layer) in enumerate(zip(widths, cache.layers, strict=True)):
        if on_layer is not None:
            on_layer(index, layer.keys, layer.values)
        here = layer.keys.device
        if here not in tables:
            # Once per device the model is spread over.
            tables[here] = [codec.tables(positions.to(here), here) for positions in wanted]
        for (keys, values), positions, table in zip(parts, wanted, tables[here], strict=True):
            chosen = every if positions is wanted[0] else positions[0].to(here)
            content = codec.remove(layer.keys[:, :, chosen], table, index)
            keys[:, start : start + width].copy_(content.transpose(1, 2).reshape(rows, width))
            values[:, start : start + width].copy_(layer.values[:, :, chosen].transpose(1, 2).reshape(rows, width))
        # Large: the layer has been read, let go of it.
        layer.keys = layer.values = None
        start += width
    _check_finite(*parts[0], widths)
    return Content(*parts[0], parts[1:])


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
