"""Reading keys and values out of any source cache: dynamic, sliding, static, quantised, offloaded, or an output."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import ModelOutput

from ._compat import output_cache
from .errors import SourceCacheError
from .geometry import ModelGeometry


@dataclass(frozen=True)
class SourceCache:
    """
    The tensors of a source cache, read without copying where the layer's storage allows it.

    Args:
        keys (`tuple[torch.Tensor, ...]`):
            One tensor per decoder layer, `[batch, kv_heads, tokens, head_dim]`, with RoPE as the model wrote it.
        values (`tuple[torch.Tensor, ...]`):
            The same for the values.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def batch_size(self) -> int:
        return self.keys[0].shape[0]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[2]

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    def narrow(self, start: int, length: int) -> "SourceCache":
        """The same cache restricted to `length` tokens from `start`, without copying."""
        return SourceCache(
            tuple(k.narrow(2, start, length) for k in self.keys),
            tuple(v.narrow(2, start, length) for v in self.values),
        )


def read_source_cache(cache: Any, geometry: ModelGeometry | None = None) -> SourceCache:
    """
    Reads a cache of any class, or the output of a model that carries one.

    Args:
        cache (`Cache`, `ModelOutput` or sequence of `(key, value)` pairs):
            What the source model left behind. Sliding-window layers must still hold every token: a source prefilled
            past its window needs a bare `DynamicCache()`.
        geometry (`ModelGeometry`, *optional*):
            What the cache is expected to look like; without it only its inner consistency is checked.

    Returns:
        [`SourceCache`]: tensors of shape `[batch, kv_heads, tokens, head_dim]`, one pair per decoder layer.

    Raises:
        [`SourceCacheError`]: if the cache is empty, ragged, truncated, recurrent, or of another geometry.
    """
    if isinstance(cache, ModelOutput | dict) and not isinstance(cache, Cache):
        found = output_cache(cache)
        if found is None:
            raise SourceCacheError(
                f"Got a {type(cache).__name__} without a cache in it; expected one made with `use_cache=True` "
                "(for `generate`: `return_dict_in_generate=True`). Run the source model with its cache switched on."
            )
        cache = found
    if isinstance(cache, EncoderDecoderCache):
        raise SourceCacheError(
            "Got an EncoderDecoderCache; expected the cache of a decoder-only model. Encoder-decoder models are not "
            "supported, since cross-attention entries depend on the encoder."
        )
    if isinstance(cache, Cache):
        pairs = [_read_layer(layer, index) for index, layer in enumerate(cache.layers)]
    elif isinstance(cache, list | tuple):
        pairs = [_read_pair(pair, index) for index, pair in enumerate(cache)]
    else:
        raise SourceCacheError(
            f"Got {type(cache).__name__} as source cache; expected a transformers `Cache`, a model output that "
            "carries one, or a list of (key, value) tensors per layer."
        )
    if not pairs:
        raise SourceCacheError(
            "The source cache is empty; expected one that has seen the context. Run the source model over the "
            "context first, with `use_cache=True`."
        )
    source = SourceCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))
    _check_consistent(source)
    if geometry is not None:
        _check_geometry(source, geometry)
    return source


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """
    Whether no number is NaN or infinite, by one sum of each tensor and one look at all sums. `False` may also mean
    that a sum overflows.

    Args:
        tensors (`Sequence[torch.Tensor]`): of any floating dtypes, on any devices.
    """
    with torch.no_grad():
        sums = [tensor.sum(dtype=torch.float32) for tensor in tensors]
        return not sums or bool(torch.isfinite(torch.stack([total.to(sums[0].device) for total in sums])).all())


def check_finite(source: SourceCache, attention_mask: Tensor | None = None) -> None:
    """
    Raises [`SourceCacheError`] if any real token's key or value is NaN or infinite.

    Args:
        source ([`SourceCache`]): the tensors to look at.
        attention_mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*):
            Padded tokens (0) may hold anything and are not looked at.
    """
    if all_finite([*source.keys, *source.values]):
        return
    for index, (key, value) in enumerate(zip(source.keys, source.values, strict=True)):
        for kind, tensor in (("key", key), ("value", value)):
            finite = torch.isfinite(tensor)
            if attention_mask is not None:
                finite = finite | (attention_mask.to(tensor.device) == 0)[:, None, :, None]
            if not bool(finite.all()):
                row, _, token, _ = (int(i) for i in (~finite).nonzero()[0])
                raise SourceCacheError(
                    f"The source cache holds a NaN or infinite {kind} in layer {index}, batch row {row}, token "
                    f"{token}; expected finite numbers. The source model itself overflowed (common in float16): run "
                    "it in bfloat16 or float32, or pass the `attention_mask` if the token is padding."
                )


def _read_pair(pair: Any, index: int) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, Sequence) or len(pair) < 2 or not all(isinstance(t, Tensor) for t in pair[:2]):
        raise SourceCacheError(
            f"Layer {index} of the source cache is {type(pair).__name__}; expected a (key, value) pair of tensors of "
            "shape [batch, kv_heads, tokens, head_dim]."
        )
    return pair[0], pair[1]


def _read_layer(layer: Any, index: int) -> tuple[Tensor, Tensor]:
    name = type(layer).__name__
    if not hasattr(layer, "keys") or hasattr(layer, "recurrent_states") or hasattr(layer, "ssm_states"):
        raise SourceCacheError(
            f"Layer {index} of the source cache is a {name}, which holds a recurrent state or nothing; expected keys "
            "and values of every token. Only models whose every layer caches attention keys and values can be sources."
        )
    if not getattr(layer, "is_initialized", True) or layer.keys is None:
        raise SourceCacheError(
            f"Layer {index} of the source cache ({name}) is empty; expected keys and values. Run the source model "
            "over the context first; layers that share another layer's keys can't be converted."
        )
    if hasattr(layer, "_quantized_keys"):
        keys, values = _dequantise(layer)
    else:
        keys, values = layer.keys, layer.values
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        raise SourceCacheError(
            f"Layer {index} of the source cache ({name}) holds {type(keys).__name__} and {type(values).__name__}; "
            "expected tensors of keys and values. Pass the cache as the source model left it."
        )
    if keys.dim() != 4:
        return keys, values  # refused with its shape
    tokens, held = int(layer.get_seq_length()), keys.shape[-2]
    if tokens > held:
        raise SourceCacheError(
            f"Layer {index} of the source cache ({name}) has seen {tokens} tokens but holds only the last {held}: its "
            "sliding window dropped the others, so they can't be converted. Prefill the source with a bare "
            "`DynamicCache()` (no config), which keeps every token and gives the same logits."
        )
    if held > tokens:  # a static layer's unused tail
        keys, values = keys[..., :tokens, :], values[..., :tokens, :]
    return keys, values


def _dequantise(layer: Any) -> tuple[Tensor, Tensor]:
    parts = []
    for kind in ("keys", "values"):
        quantised = layer._dequantize(getattr(layer, f"_quantized_{kind}"))
        pending = getattr(layer, "_pending_beam_idx", None)  # a beam reorder that the next update would apply
        if pending is not None:
            quantised = quantised.index_select(0, pending.to(quantised.device))
        residual = getattr(layer, kind)
        if residual.dim() == 4 and residual.shape[-2] > 0:
            quantised = torch.cat([quantised, residual.to(quantised.dtype)], dim=-2)
        parts.append(quantised)
    return parts[0], parts[1]


def _check_consistent(source: SourceCache) -> None:
    first = source.keys[0]
    for index, (key, value) in enumerate(zip(source.keys, source.values, strict=True)):
        for kind, tensor in (("keys", key), ("values", value)):
            # Eight-bit numbers mean nothing without the scales that a quantised layer keeps beside them.
            if tensor.dim() != 4 or not tensor.is_floating_point() or tensor.element_size() < 2:
                raise SourceCacheError(
                    f"The {kind} of source layer {index} have shape {list(tensor.shape)} and dtype {tensor.dtype}; "
                    "expected floating-point [batch, kv_heads, tokens, head_dim] of 16 bits or more."
                )
            if tensor.shape[2] == 0 or tensor.shape[0] == 0:
                raise SourceCacheError(
                    f"The {kind} of source layer {index} are empty (shape {list(tensor.shape)}); expected at least "
                    "one token. Run the source model over the context first."
                )
            if tensor.shape[0] != first.shape[0] or tensor.shape[2] != first.shape[2]:
                raise SourceCacheError(
                    f"The source cache is ragged: layer 0 holds {first.shape[0]} rows × {first.shape[2]} tokens, the "
                    f"{kind} of layer {index} {tensor.shape[0]} × {tensor.shape[2]}; expected the same in every "
                    "layer. The forward pass was interrupted, or the cache cropped layer by layer: run the source "
                    "model again."
                )
            if tensor.device.type == "meta":
                raise SourceCacheError(
                    f"The {kind} of source layer {index} lie on the meta device, without data; expected real tensors. "
                    "Load the source model's weights before running it."
                )


def _check_geometry(source: SourceCache, geometry: ModelGeometry) -> None:
    name = geometry.checkpoint or geometry.model_type
    if source.num_layers != len(geometry.layers):
        raise SourceCacheError(
            f"The source cache has {source.num_layers} layers; the mapper's source model ({name}) has "
            f"{len(geometry.layers)}. Pass the cache of the source model that the mapper was fitted for."
        )
    for index, layer in enumerate(geometry.layers):
        expected = (layer.kv_heads, layer.head_dim)
        for kind, tensor in (("keys", source.keys[index]), ("values", source.values[index])):
            if (tensor.shape[1], tensor.shape[3]) != expected:
                raise SourceCacheError(
                    f"The {kind} of source layer {index} have {tensor.shape[1]} KV heads × {tensor.shape[3]}; the "
                    f"mapper's source model ({name}) has {expected[0]} × {expected[1]}. Pass the cache "
                    "of the source model that the mapper was fitted for."
                )
