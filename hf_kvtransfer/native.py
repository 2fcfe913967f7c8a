"""Running the target's own layers: all of them over some tokens, or the first few, which are exact and cheap."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ._compat import cache_keyword
from .errors import ConversionError
from .modules import decoder_of, evaluation_mode


# So small that it only matters for rows of zeros.
NORM_EPS = 1e-6

# What a config may ask the decoder to collect. Nothing of it is wanted here, and the oldest supported releases leave
# wrappers around the layers when a pass that collects is stopped.
_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")

# Keys and values of one layer, each `[batch, kv_heads, tokens, head_dim]`.
Entry = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class NativeRun:
    """
    What the target's own layers made of new tokens.

    Args:
        keys (`tuple[torch.Tensor, ...]`):
            One tensor per layer that is exact, `[batch, kv_heads, tokens, head_dim]`, rotated, in the model's dtype and
            on the layer's device, as the model caches them; of the new tokens only.
        values (`tuple[torch.Tensor, ...]`):
            The same for the values.
        hidden (`torch.Tensor` of shape `[batch, tokens, hidden_size]`, *optional*):
            The raw residual stream that enters the first layer that was not run; `None` when all were.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    hidden: Tensor | None


def rms_normalised(hidden: Tensor) -> Tensor:
    """
    A residual stream as features: `h / sqrt(mean(h²) + 1e-6)`, without weights, so that it is alike for every
    architecture.

    Args:
        hidden (`torch.Tensor` of shape `[..., hidden_size]`): in any floating-point dtype.

    Returns:
        `torch.Tensor` of the same shape, in float32.
    """
    hidden = hidden.float()
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + NORM_EPS)


@torch.no_grad()
def run_native(
    target: nn.Module,
    input_ids: Tensor,
    *,
    layers: int | None = None,
    past: Sequence[Entry] | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    chunk: int | None = None,
) -> NativeRun:
    """
    Runs the target's text decoder, without LM head, over new tokens: all of its layers, or exactly the first few.

    By causality, keys and values of layer `m` need no more than the layers before it and one projection, so those of
    layers 0 … m come back when `layers=m`. The model's own `forward` runs; it is left by an exception from the cache
    once layer m has written to it. Nothing of the model is changed. Sliding-window layers keep every token, too.

    Args:
        target (`torch.nn.Module`):
            The target model, possibly multimodal or wrapped by PEFT or `torch.compile`, on any device. Layers that are
            themselves compiled with `fullgraph=True` run only when all of them do.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`):
            The new tokens, one or more.
        layers (`int`, *optional*):
            How many layers run, from 0 to the model's number of layers, which is the default. 0 is the embedding alone.
        past (sequence of `(keys, values)`, *optional*):
            Rotated entries of all preceding tokens, `[batch, kv_heads, past, head_dim]`, of the layers that come back
            or more, in any dtype. They are read, never written to.
        attention_mask (`torch.Tensor` of shape `[batch, past + tokens]`, *optional*):
            1 for real tokens, 0 for padding. What comes back for padding is finite and means nothing.
        position_ids (`torch.Tensor` of shape `[batch or 1, tokens]`, *optional*):
            Positions of the new tokens. By default those that `generate` derives from the mask; counting on from
            `past` without one.
        chunk (`int`, *optional*):
            Reads this many tokens at a time, each piece on top of those before, so that attention takes less memory;
            the result is the same. By default all at once.

    Returns:
        [`NativeRun`]: keys and values of all layers, or of layers 0 … `layers`; they carry no gradients.

    Raises:
        [`ConversionError`]: if an argument has another shape than it should, or tokens, layers or past aren't the
            model's, or its weights aren't loaded.
        [`UnsupportedModelError`]: if the model has no text decoder.
    """
    decoder = decoder_of(target)
    embedding = decoder.get_input_embeddings()
    device, depth = _input_device(embedding), len(decoder.layers)
    layers = depth if layers is None else _counted("layers", layers, 0, depth)
    # The layer that only projects its keys and values, if any; the last one whose entries come back.
    last = min(layers, depth - 1)
    ids = _checked_ids(input_ids, embedding.weight.shape[0]).to(device)
    rows, tokens = ids.shape
    before = _checked_past(past, rows, last + 1)
    start = before[0][0].shape[2] if before else 0
    chunk = tokens if chunk is None else _counted("chunk", chunk, 1, None)
    mask = _checked_mask(attention_mask, rows, start, tokens, device)
    positions = _checked_positions(position_ids, rows, tokens, device)
    if positions is None:
        counted = torch.arange(start + tokens, device=device)[None] if mask is None else mask.cumsum(-1) - 1
        positions = counted[:, start:].clamp(min=0)

    pieces: list[NativeRun] = []
    # A model's own precision is what its caches have, whatever the caller computes in.
    with evaluation_mode(decoder), torch.autocast(device.type, enabled=False):
        for first in range(0, tokens, chunk):
            stop = min(first + chunk, tokens)
            piece = _run_piece(
                decoder,
                None if layers == depth else layers,
                before,
                input_ids=ids[:, first:stop],
                attention_mask=_mask_up_to(start + stop, mask, rows, device) if mask is not None or before else None,
                position_ids=positions[:, first:stop],
            )
            pieces.append(piece)
            if stop < tokens:
                new = zip(piece.keys, piece.values, strict=True)
                before = [_appended(*pair) for pair in zip(before, new, strict=True)] if before else list(new)
    return pieces[0] if len(pieces) == 1 else _joined(pieces)


def _mask_up_to(end: int, mask: Tensor | None, rows: int, device: torch.device) -> Tensor:
    # On the oldest supported releases StableLM can't go on from a cache without being given a mask. Remove when those
    # have `create_causal_mask` in it.
    return torch.ones(rows, end, dtype=torch.long, device=device) if mask is None else mask[:, :end]


def _run_piece(decoder: Any, stop: int | None, past: list[Entry], **inputs: Any) -> NativeRun:
    cache = _NewEntries(past, stop)
    quiet = {name: False for name in _COLLECTED if getattr(decoder.config, name, False)}
    with _noted_input(decoder, stop) as noted, suppress(_LastLayerWrittenError):
        decoder(**inputs, **quiet, use_cache=True, **{cache_keyword(decoder): cache})
    new = [cache.new[layer] for layer in sorted(cache.new)]
    return NativeRun(tuple(keys for keys, _ in new), tuple(values for _, values in new), noted.get("hidden"))


class _LastLayerWrittenError(Exception):
    """Leaves the model's `forward` once the last layer whose keys and values are wanted has written them."""


class _NewEntries(DynamicCache):
    """
    Gives attention the past and the new entries of each layer, and holds on to the new ones only, so that a long past
    is never there twice for more than one layer. Without a config, sliding-window layers attend to their window by
    the mask, and no token is dropped.
    """

    def __init__(self, past: Sequence[Entry], stop: int | None) -> None:
        super().__init__()
        self.new: dict[int, Entry] = {}
        self._stop = stop
        # From these the model reads how many tokens there are; they stay as they are during the pass.
        for keys, values in past:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            self.layers.append(layer)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Entry:
        # Copies, as in any cache: what comes in are views, of queries, keys and values in one for some models.
        key_states, value_states = key_states.contiguous(), value_states.contiguous()
        new = self.new[layer_idx] = (key_states, value_states)
        held: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        past = None if held is None else (held.keys, held.values)
        if past is not None and _heads(past) != _heads(new):
            raise ConversionError(
                f"Layer {layer_idx} of `past` has keys and values of KV heads × head_dim {_heads(past)}, the target "
                f"{_heads(new)}; expected entries of the target. Pass what it cached itself, or what was converted for "
                "it."
            )
        if layer_idx == self._stop:
            raise _LastLayerWrittenError
        return new if past is None else _appended(past, new)


def _heads(entry: Entry) -> list[tuple[int, int]]:
    return [(tensor.shape[1], tensor.shape[3]) for tensor in entry]


def _appended(past: Entry, new: Entry) -> Entry:
    """Both after one another, in the dtype and on the device of the new ones."""
    keys, values = (torch.cat([old.to(add.device, add.dtype), add], dim=2) for old, add in zip(past, new, strict=True))
    return keys, values


@contextmanager
def _noted_input(decoder: Any, layer: int | None) -> Iterator[dict[str, Tensor]]:
    """Notes, as `"hidden"`, what enters a layer in this thread; another may be running the same model."""
    noted: dict[str, Tensor] = {}
    if layer is None:
        yield noted
        return
    thread = threading.get_ident()

    # A compiled layer would have to compile its hooks too, and can't ask for the thread.
    @torch.compiler.disable
    def note(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            noted["hidden"] = arguments[0] if arguments else keywords["hidden_states"]

    handle = decoder.layers[layer].register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield noted
    finally:
        handle.remove()


def _joined(pieces: Sequence[NativeRun]) -> NativeRun:
    keys, values = (
        tuple(torch.cat(parts, dim=2) for parts in zip(*side, strict=True))
        for side in ([piece.keys for piece in pieces], [piece.values for piece in pieces])
    )
    hidden = [piece.hidden for piece in pieces if piece.hidden is not None]
    return NativeRun(keys, values, torch.cat(hidden, dim=1) if hidden else None)


def _input_device(embedding: Any) -> torch.device:
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    # Offloaded weights are there while their module runs, on the device that accelerate has noted.
    execution = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if execution is None:
        raise ConversionError(
            "The target's weights lie on the meta device, without numbers; expected a loaded model, since its own "
            "layers are to run. Load it with `from_pretrained`."
        )
    return torch.device(execution)


def _counted(name: str, value: Any, least: int, most: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limit = f"{least} or more" if most is None else f"from {least} to {most}, the number of the target's layers"
        raise ConversionError(
            f"`{name}` is {value!r}; expected a whole number, {limit}. Leave it out to run all at once."
        )
    return value


def _is_whole(value: Any) -> bool:
    """Whether something is a matrix of whole numbers that can be read."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 2
        and value.device.type != "meta"
        and value.layout == torch.strided
        and value.dtype != torch.bool
        and not value.is_floating_point()
        and not value.is_complex()
    )


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _checked_ids(input_ids: Any, vocabulary: int) -> Tensor:
    if not _is_whole(input_ids) or input_ids.numel() == 0:
        raise ConversionError(
            f"`input_ids` is {_described(input_ids)}; expected the target's new tokens, whole numbers of shape "
            '[batch, tokens] with at least one token. Use `tokenizer(..., return_tensors="pt")`.'
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocabulary:
        raise ConversionError(
            f"`input_ids` goes from {low} to {high}; expected ids from 0 to {vocabulary - 1}, the rows of the target's "
            "embedding. Use the tokenizer that source and target share."
        )
    return input_ids.long()


def _checked_past(past: Any, rows: int, layers: int) -> list[Entry]:
    if past is None:
        return []
    pairs = (
        [tuple(pair[:2]) if isinstance(pair, list | tuple) else () for pair in past]
        if isinstance(past, list | tuple)
        else []
    )
    if len(pairs) < layers or not all(len(pair) == 2 and all(_is_entry(t) for t in pair) for pair in pairs):
        raise ConversionError(
            f"`past` is {type(past).__name__} of {len(pairs)} layers; expected a list of (keys, values) for the first "
            f"{layers} layers of the target or more, each [batch, kv_heads, tokens, head_dim]. Pass "
            "`[(layer.keys, layer.values) for layer in cache.layers]`, or leave it out when nothing precedes."
        )
    sizes = {(tensor.shape[0], tensor.shape[2]) for pair in pairs[:layers] for tensor in pair}
    if len(sizes) > 1 or next(iter(sizes))[0] != rows:
        raise ConversionError(
            f"`past` has rows × tokens of {sorted(sizes)} in its layers, `input_ids` {rows} rows; expected the same "
            "rows, and the same number of tokens in each layer. Pass entries of every preceding token, some of which a "
            "cache with a sliding window drops."
        )
    return pairs[:layers]


def _is_entry(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point() and value.device.type != "meta"


def _checked_mask(attention_mask: Any, rows: int, start: int, tokens: int, device: torch.device) -> Tensor | None:
    if attention_mask is None:
        return None
    if (
        not isinstance(attention_mask, Tensor)
        or attention_mask.device.type == "meta"
        or list(attention_mask.shape) != [rows, start + tokens]
        or not bool(((attention_mask == 0) | (attention_mask == 1)).all())
    ):
        raise ConversionError(
            f"`attention_mask` is {_described(attention_mask)}; expected 1 for real tokens and 0 for padding, of shape "
            f"[{rows}, {start + tokens}], over the past and the new tokens."
        )
    mask = attention_mask.to(device=device, dtype=torch.long)
    # Without padding attention is faster without a mask.
    return None if bool(mask.all()) else mask


def _checked_positions(position_ids: Any, rows: int, tokens: int, device: torch.device) -> Tensor | None:
    if position_ids is None:
        return None
    if not _is_whole(position_ids) or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != tokens:
        raise ConversionError(
            f"`position_ids` is {_described(position_ids)}; expected whole numbers of shape [{rows}, {tokens}] or "
            f"[1, {tokens}], one position for each new token."
        )
    if bool((position_ids < 0).any()):
        raise ConversionError(
            "`position_ids` holds negative positions; expected 0 or more for each new token. For left padding use "
            "`(attention_mask.cumsum(-1) - 1).clamp(min=0)`."
        )
    return position_ids.to(device=device, dtype=torch.long)
