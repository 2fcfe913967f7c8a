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
        whole (`Content`, *optional*): Every token of some rows, where that was asked for.
    """

    keys: torch.Tensor
    values: torch.Tensor
    previous: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    whole: Content | None = None

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
    whole_rows: Sequence[int] = (),
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
        whole_rows (`Sequence[int]`, *optional*): Rows of which every token is returned too, as `whole`.
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
    kept = [_Kept(None, slice(skip, None, stride), window)]
    if whole_rows:
        kept.append(_Kept(list(whole_rows), slice(None), window))
    # No config: with one, sliding-window layers would forget all but their window.
    cache = DynamicCache()
    # A model's own precision is what its caches will have, whatever the caller computes in.
    with (
        torch.inference_mode(),
        evaluation_mode(model),
        torch.autocast(ids.device.type, enabled=False),
        _hidden_states(decoder, hidden_at, kept) as hidden,
    ):
        decoder(input_ids=ids, use_cache=True, **{cache_keyword(decoder): cache})
    if on_cache is not None:
        on_cache(cache)
    # Outside inference mode, so that what is returned can be trained on.
    with torch.no_grad():
        contents = _flattened(cache, codec, ids.shape, kept, on_layer)
        for index, content in enumerate(contents):
            content.hidden = [hidden[layer][index].to(content.keys.device).flatten(0, 1).clone() for layer in hidden_at]
    contents[0].whole = contents[1] if whole_rows else None
    return contents[0]


@dataclass(frozen=True)
class _Kept:
    """Which rows (all if `None`) and which of their tokens are kept, with how many previous ones."""

    rows: list[int] | None
    every: slice
    window: int

    def of(self, batch: torch.Tensor) -> torch.Tensor:
        """The rows of `[batch, …]`."""
        return batch if self.rows is None else batch[self.rows]


@contextmanager
def _hidden_states(
    decoder: Any, layers: Sequence[int], kept: Sequence[_Kept]
) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Notes the input of some decoder layers during a forward pass, of the kept tokens, as features."""
    noted: dict[int, list[torch.Tensor]] = {}

    def note(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            states = arguments[0] if arguments else keywords["hidden_states"]
            noted[layer] = [stream_features(each.of(states)[:, each.every]) for each in kept]

        return hook

    handles = [decoder.layers[layer].register_forward_pre_hook(note(layer), with_kwargs=True) for layer in layers]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _flattened(
    cache: DynamicCache,
    codec: RotaryCodec,
    shape: torch.Size,
    kept: Sequence[_Kept],
    on_layer: Callable[[int, torch.Tensor, torch.Tensor], None] | None,
) -> list[Content]:
    batch, tokens = shape
    widths = [layer.keys.shape[1] * layer.keys.shape[3] for layer in cache.layers]
    device = cache.layers[0].keys.device
    # Of each what is kept: per token, and per token before it, where it lies in a row and what becomes of it.
    parts: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = []
    for each in kept:
        positions = torch.arange(tokens)[each.every]
        rows = (batch if each.rows is None else len(each.rows)) * len(positions)
        empty = partial(torch.empty, rows, sum(widths), dtype=torch.float32, device=device)
        parts.append([((positions - lag).clamp(min=0), empty(), empty()) for lag in range(each.window + 1)])
    tables: dict[torch.device, list[list[Any]]] = {}
    start = 0
    for index, (width, layer) in enumerate(zip(widths, cache.layers, strict=True)):
        if on_layer is not None:
            on_layer(index, layer.keys, layer.values)
        here = layer.keys.device
        if here not in tables:
            # Once per device the model is spread over.
            tables[here] = [[codec.tables(positions[None].to(here), here) for positions, *_ in lags] for lags in parts]
        for each, lags, tables_of_lags in zip(kept, parts, tables[here], strict=True):
            # One copy of the rows, or none, for all lags.
            states = each.of(layer.keys), each.of(layer.values)
            for lag, ((positions, keys, values), table) in enumerate(zip(lags, tables_of_lags, strict=True)):
                chosen = positions.to(here) if lag else each.every
                content = codec.remove(states[0][:, :, chosen], table, index), states[1][:, :, chosen]
                for flat, heads in zip((keys, values), content, strict=True):
                    rows_of_tokens = heads.transpose(1, 2)
                    flat.view(*rows_of_tokens.shape[:2], -1)[..., start : start + width].unflatten(
                        2, rows_of_tokens.shape[2:]
                    ).copy_(rows_of_tokens)
        # Large: the layer has been read, let go of it.
        layer.keys = layer.values = None
        start += width
    for lags in parts:
        _check_finite(*lags[0][1:], widths)
    return [Content(*lags[0][1:], [(keys, values) for _, keys, values in lags[1:]]) for lags in parts]


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
