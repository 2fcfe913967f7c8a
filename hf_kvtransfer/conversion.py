"""One conversion: which tokens are mapped, which the target reads itself, and where both are written."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .appending import all_or_nothing, check_positions_meet, extend_cache, length_of
from .cache import TransferredCache
from .contents import ContentMaker, chunk_length, chunks
from .entries import Entries, EntryStorage
from .errors import ConversionError
from .placement import layer_devices
from .positions import Positions, resolve_positions
from .source import SourceCache, all_finite, check_finite, read_source_cache
from .target_side import NativeReader, TargetSide, check_token_ids, target_side
from .turning import Turner


if TYPE_CHECKING:
    from .mapper import KVMapper


def convert_cache(
    mapper: "KVMapper",
    source_cache: Any,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    target_position_ids: Tensor | None,
    hold_back: int,
    into: DynamicCache | None,
    target: nn.Module | None,
    validate: bool,
    input_ids: Tensor | None,
    exact_prefix: int | None,
    exact_suffix: int | None,
    chunk_tokens: int | None,
) -> DynamicCache:
    """Converts a source cache. Arguments, result and errors are those of [`KVMapper.convert`]."""
    if not isinstance(hold_back, int) or isinstance(hold_back, bool) or hold_back < 0:
        raise ConversionError(
            f"`hold_back` is {hold_back!r}; expected a whole number of tokens, 0 or more. The default of 1 leaves "
            "the last token to the target."
        )
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise ConversionError(
            f"`chunk_tokens` is {chunk_tokens!r}; expected a whole number of tokens, 1 or more, or `None` for as "
            "many as fit well."
        )
    if not len(mapper.layers):
        raise ConversionError(
            "This mapper has no maps yet; expected a fitted one. Use `KVMapper.fit`, `KVMapper.from_pretrained`, "
            "or `set_as_identity()` for a model and itself."
        )
    _ask_for_multimodal_positions(mapper, position_ids)
    read = read_source_cache(source_cache, mapper.geometry("source"))
    side = target_side(mapper, read, target, input_ids, exact_prefix, exact_suffix)
    positions = resolve_positions(read, mapper.codec("source"), attention_mask, position_ids, target_position_ids)

    geometry = mapper.geometry("target")
    result, start = TransferredCache.for_geometry(geometry) if into is None else into, 0
    if into is not None:
        start = length_of(into, geometry, read.batch_size, read.num_tokens)
        check_positions_meet(into, start, positions, mapper.codec("target"))
    stop = max(read.num_tokens - hold_back, start)
    # Gradients flow into the mapper while it trains; a converted cache that carried them at inference could not
    # even be copied.
    # Maps are solved and compared in their own precision, whatever the caller computes in; training has its own.
    device = read.keys[0].device.type
    with (
        torch.set_grad_enabled(mapper.training and torch.is_grad_enabled()),
        torch.autocast(device, enabled=mapper.training and torch.is_autocast_enabled(device)),
        all_or_nothing(result),
    ):
        if stop > start:
            new = read.narrow(start, read.num_tokens - start)
            # Affine maps pass on whatever isn't finite, and are asked about their output.
            if validate and mapper.config.map_type != "linear" and not all_finite([*new.keys, *new.values]):
                check_finite(read, positions.mask)
            entries = convert_entries(
                mapper, read, positions, start, stop, result, side, validate, target, chunk_tokens
            )
            if validate and side is not None:
                here = positions.narrow(start, read.num_tokens - start)
                check_token_ids(new, here, mapper.codec("source"), side.input_ids[:, start:])
            for index, (keys, values) in enumerate(entries):
                extend_cache(result, index, keys, values)
    if isinstance(result, TransferredCache) and (start == 0 or result.recorded[0] is not None):
        result.record_positions(positions.target[:, :stop], positions.mask)
    return result


def _ask_for_multimodal_positions(mapper: "KVMapper", position_ids: Tensor | None) -> None:
    sides = [side for side in ("source", "target") if mapper.geometry(side).multimodal_positions]
    if sides and position_ids is None:
        raise ConversionError(
            f"The {' and the '.join(sides)} of this mapper give images 3-D positions, and a cache doesn't show "
            "whether it holds any; expected `position_ids`. For a context of text alone pass "
            "`torch.arange(tokens)[None]`, or those of the mask; a context with images can't be converted."
        )


def convert_entries(
    mapper: "KVMapper",
    source: SourceCache,
    positions: Positions,
    start: int,
    stop: int,
    held: DynamicCache,
    side: TargetSide | None,
    validate: bool,
    target: nn.Module | None = None,
    chunk: int | None = None,
) -> Entries:
    """
    The target's entries of the tokens from `start` to `stop`.

    By causality what the target reads itself at the beginning is exact; what it reads at the end is as good as the
    converted tokens it attends to.

    Args:
        mapper ([`KVMapper`]): the maps.
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
        start (`int`): how many tokens `held` holds.
        stop (`int`): the token after the last one.
        held (`DynamicCache`): what the target has already.
        side ([`TargetSide`], *optional*): what the target does itself.
        validate (`bool`): whether to look for NaN and infinities.
        target (`PreTrainedModel`, *optional*): on whose devices the entries belong.
        chunk (`int`, *optional*): how many tokens are mapped at once; by default as [`chunk_length`] says.
    """
    geometry = mapper.geometry("target")
    model, dtype = (target, source.keys[0].dtype) if side is None else (side.model, _dtype_of(side.model, source))
    places = layer_devices(model, len(geometry.layers))
    storage = EntryStorage(geometry, source.batch_size, start, stop, dtype, places)
    begin, end, hidden, native = start, stop, None, range(0)
    reader = None if side is None else NativeReader(side, positions, _held_entries(held, start), storage, validate)
    if side is not None and reader is not None:
        prefix = side.exact_prefix + (0 if positions.mask is None else _left_padding(positions.mask))
        begin = min(max(prefix, start), stop) if side.exact_prefix else start
        end = max(stop - side.exact_suffix, begin)
        if begin > start:
            reader.read(start, begin)
        if end > begin:
            hidden = reader.anchor(mapper, source, begin, end)
            native = mapper.config.native_layers(len(mapper.config.support))
    if end > begin:
        _map(mapper, source, positions, storage, begin, end, hidden, chunk)
        mapped = [index for index in range(len(geometry.layers)) if index not in native]
        if validate:
            _check_mapped(mapper, source, positions, mapped, storage.filled(mapped, begin, end))
    if reader is not None and stop > end:
        reader.read(end, stop)
    return storage.filled(range(len(geometry.layers)), start, stop)


def anchor_output(mapper: "KVMapper", source_cache: Any, target: nn.Module, input_ids: Tensor) -> Tensor:
    """
    What the mapper's anchor puts out over a context, as the maps of later layers are given it.

    Args:
        mapper ([`KVMapper`]): with an anchor.
        source_cache (`Cache`): of the context, without padding.
        target (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): of the context.

    Returns:
        `torch.Tensor` of shape `[batch, tokens − exact_prefix, hidden_size + 1]`: features of the residual stream.
    """
    source = read_source_cache(source_cache, mapper.geometry("source"))
    counted = torch.arange(source.num_tokens, device=input_ids.device)[None]
    prefix = mapper.config.exact_prefix
    side = TargetSide(target, input_ids, prefix, 0)
    geometry = mapper.geometry("target")
    storage = EntryStorage(
        geometry, source.batch_size, 0, source.num_tokens, _dtype_of(target, source), [None] * len(geometry.layers)
    )
    reader = NativeReader(side, Positions(counted, counted, None), None, storage, validate=True)
    if prefix:
        reader.read(0, prefix)
    with torch.autocast(input_ids.device.type, enabled=False):
        hidden = reader.anchor(mapper, source, prefix, source.num_tokens)
    if hidden is None:
        raise ConversionError(
            "This mapper's anchor puts nothing out that a map could read; expected one that ends below the target's "
            "last layer. Use `convert`."
        )
    return hidden


def _map(
    mapper: "KVMapper",
    source: SourceCache,
    positions: Positions,
    storage: EntryStorage,
    start: int,
    stop: int,
    hidden: Tensor | None,
    chunk: int | None,
) -> None:
    """Writes the entries that maps make: content from [`ContentMaker`], rotated, zero where there is padding."""
    maker, length = ContentMaker(mapper, source, positions), chunk or stop - start
    if chunk is None and not torch.is_grad_enabled():
        length = chunk_length(maker.packing, source.batch_size, source.keys[0].device)
    for begin, end in chunks(start, stop, length):
        here = positions.narrow(begin, end - begin)
        turner = Turner(mapper.codec("target"), here.target, off=False)
        padding = None if here.mask is None else here.mask[:, None, :, None] == 0
        read = None if hidden is None else hidden[:, begin - start : end - start]
        for index, keys, values in maker.contents(begin, end, read):
            rooms = storage.room(index, begin, end, keys.device)
            turner.write(keys, index, rooms[0])
            rooms[1].copy_(values)
            # Padding may hold anything in the source; the target masks it out, and zeros stay harmless there.
            if padding is not None:
                for room in rooms:
                    room.masked_fill_(padding.to(room.device), 0)


def _check_mapped(
    mapper: "KVMapper", source: SourceCache, positions: Positions, layers: Sequence[int], entries: Entries
) -> None:
    """
    Refuses what isn't finite. Of a source cache that isn't, affine maps make nothing else, so that their sums tell it
    all at once, and it is only looked at if they do.
    """
    if all_finite([state for entry in entries for state in entry]):
        return
    check_finite(source, positions.mask)
    for index, entry in zip(layers, entries, strict=True):
        if not all(bool(torch.isfinite(state).all()) for state in entry):
            computed = next(mapper.layers[index].parameters()).dtype
            raise ConversionError(
                f"Target layer {index} comes out with NaN or infinite numbers ({entry[0].dtype}, mapper in {computed}) "
                "from a finite source cache; expected finite ones. If one of the two is float16, use bfloat16 or "
                "float32, which don't overflow; otherwise the mapper's weights are damaged: load them again."
            )


def _held_entries(cache: DynamicCache, start: int) -> Entries | None:
    if not start:
        return None
    layers: list[Any] = list(cache.layers)
    return [(layer.keys, layer.values) for layer in layers]


def _left_padding(mask: Tensor) -> int:
    return int((mask.cumsum(-1) == 0).sum(-1).max())


def _dtype_of(target: nn.Module, source: SourceCache) -> torch.dtype:
    """Of a target's cache: what it computes in."""
    dtype = getattr(target, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else source.keys[0].dtype
