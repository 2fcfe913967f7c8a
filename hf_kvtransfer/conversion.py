"""One conversion: which tokens are mapped, which the target reads itself, and putting both together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .blocks import run_block, stream_features
from .contents import chunk_length, chunks
from .entries import Entries, EntryStorage
from .errors import ConversionError
from .native import NativeRun, run_native
from .placement import layer_devices
from .positions import Positions
from .rope import RotaryCodec
from .source import SourceCache, all_finite, check_finite, read_source_cache
from .turning import Turner


if TYPE_CHECKING:
    from .mapper import KVMapper


# Mean distance of first-layer keys from those of the same id, relative to their size: 0.005 in bfloat16, 0.2 or more
# for another text.
_OTHER_TEXT = 0.1


@dataclass(frozen=True)
class TargetSide:
    """
    What the target itself does in a conversion.

    Args:
        model (`PreTrainedModel`): the target.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): of the whole context.
        exact_prefix (`int`): how many of the first tokens it reads.
        exact_suffix (`int`): how many of the last tokens it reads on top of what was converted.
    """

    model: nn.Module
    input_ids: Tensor
    exact_prefix: int
    exact_suffix: int


def target_side(
    mapper: "KVMapper",
    source: SourceCache,
    target: nn.Module | None,
    input_ids: Any,
    exact_prefix: int | None,
    exact_suffix: int | None,
) -> TargetSide | None:
    """
    What the target has to do itself; `None` if nothing.

    Raises:
        [`ConversionError`]: if it has to do something, and model or ids are missing or don't fit the source cache.
    """
    numbers = {
        "exact_prefix": mapper.config.exact_prefix if exact_prefix is None else exact_prefix,
        "exact_suffix": mapper.config.exact_suffix if exact_suffix is None else exact_suffix,
    }
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConversionError(
                f"`{name}` is {value!r}; expected a whole number of tokens, 0 or more: so many are read by the target "
                "itself."
            )
    if mapper.config.anchor_layers is None and not any(numbers.values()):
        return None
    if target is None or input_ids is None:
        why = [f"{name}={value}" for name, value in numbers.items() if value]
        if mapper.config.anchor_layers is not None:
            why.insert(0, f"anchor_layers={mapper.config.anchor_layers}")
        missing = [name for name, given in (("target", target), ("input_ids", input_ids)) if given is None]
        raise ConversionError(
            f"With {', '.join(why)} the target reads a part of the context itself, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; expected `convert(source_cache, target=…, input_ids=…)` "
            "with the token ids of the context. A mapper fitted without anchors converts the cache alone, with "
            "`exact_prefix=0, exact_suffix=0`."
        )
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.shape[0] != source.batch_size:
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ConversionError(
            f"`input_ids` is {shape}; expected the ids that the source has read, [{source.batch_size}, "
            f"{source.num_tokens}] or longer."
        )
    if input_ids.shape[1] < source.num_tokens:
        raise ConversionError(
            f"`input_ids` holds {input_ids.shape[1]} tokens, the source cache {source.num_tokens}; expected the ids of "
            "everything that the source has read, from the first token on."
        )
    return TargetSide(target, input_ids[:, : source.num_tokens], **numbers)


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
    geometry = mapper.config.geometry("target")
    model, dtype = (target, source.keys[0].dtype) if side is None else (side.model, _dtype_of(side.model, source))
    places = layer_devices(model, len(geometry.layers))
    storage = EntryStorage(geometry, source.batch_size, start, stop, dtype, places)
    begin, end, hidden, native = start, stop, None, range(0)
    reader = None if side is None else _NativeReader(side, positions, _held_entries(held, start), storage, validate)
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
    source = read_source_cache(source_cache, mapper.config.geometry("source"))
    counted = torch.arange(source.num_tokens, device=input_ids.device)[None]
    prefix = mapper.config.exact_prefix
    side = TargetSide(target, input_ids, prefix, 0)
    geometry = mapper.config.geometry("target")
    storage = EntryStorage(
        geometry, source.batch_size, 0, source.num_tokens, _dtype_of(target, source), [None] * len(geometry.layers)
    )
    reader = _NativeReader(side, Positions(counted, counted, None), None, storage, validate=True)
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


class _NativeReader:
    """Runs the target over ranges of the context, on top of what there is."""

    def __init__(
        self,
        side: TargetSide,
        positions: Positions,
        held: Entries | None,
        storage: EntryStorage,
        validate: bool,
    ) -> None:
        self._side, self._positions, self._held, self._storage = side, positions, held, storage
        self._validate = validate

    def read(self, start: int, stop: int) -> None:
        """All layers."""
        run = run_native(self._side.model, *self._ids(start, stop), **self._given(start, stop))
        self._put(run, range(len(run.keys)), start, stop)

    def anchor(self, mapper: "KVMapper", source: SourceCache, start: int, stop: int) -> Tensor | None:
        """The layers that the mapper leaves to the target. Returns the features of what they put out."""
        config, model = mapper.config, self._side.model
        if config.anchor_layers is None:
            return None
        layers = config.native_layers(len(config.support))
        given = self._given(start, stop, layers)
        if config.anchor_start:
            entry = mapper.predicted_stream(source, self._positions, start, stop)
            mask = self._positions.mask
            if mask is not None:
                # What padding holds would reach real tokens, as zero times NaN.
                entry = entry.where(mask[:, start:stop, None].to(entry.device) != 0, 0)
            if self._validate and not all_finite([entry]) and not bool(torch.isfinite(entry).all()):
                check_finite(source, mask)
                raise ConversionError(
                    f"The residual stream that is predicted for target layer {config.anchor_start} has NaN or infinite "
                    "numbers, from a finite source cache; expected finite ones. The mapper's weights are damaged: load "
                    "them again."
                )
            run = run_block(
                model,
                *self._ids(start, stop),
                entry,
                start=config.anchor_start,
                layers=config.anchor_layers,
                **given,
            )
        else:
            run = run_native(model, *self._ids(start, stop), layers=config.anchor_layers, **given)
        self._put(run, layers, start, stop)
        return None if run.hidden is None else stream_features(run.hidden)

    def _put(self, run: NativeRun, layers: range, start: int, stop: int) -> None:
        made = list(zip(run.keys, run.values, strict=True))
        if self._validate:
            mask = None if self._positions.mask is None else self._positions.mask[:, start:stop, None] != 0
            states = [state.transpose(1, 2).flatten(2) for entry in made for state in entry]
            states += [] if run.hidden is None else [run.hidden]
            for state in [] if all_finite(states) else states:
                finite = torch.isfinite(state)
                if not bool((finite if mask is None else finite | ~mask.to(state.device)).all()):
                    raise ConversionError(
                        "The target's own layers give NaN or infinite numbers over the context; expected finite ones. "
                        "The target itself overflows (common in float16), or its weights are damaged: run it in "
                        "bfloat16 or float32, or load it again."
                    )
        self._storage.put(layers, start, made)

    def _ids(self, start: int, stop: int) -> tuple[Tensor]:
        return (self._side.input_ids[:, start:stop],)

    def _given(self, start: int, stop: int, layers: range | None = None) -> dict[str, Any]:
        chosen = range(self._storage.depth) if layers is None else layers
        past: Entries = []
        if start > self._storage.start:
            past = self._storage.filled(chosen, self._storage.start, start)
        if self._held is not None:
            past = _joined([self._held[i] for i in chosen], past)
        lengths = {keys.shape[2] for keys, _ in past}
        if past and lengths != {start}:
            raise ConversionError(
                f"`into` holds the last {min(lengths)} of {start} tokens in a sliding-window layer, and the target has "
                "to read on from all of them; expected a cache that has kept every token. Convert the whole context "
                "again without `into`, or with a mapper without anchors."
            )
        return {
            "past": past or None,
            "attention_mask": None if self._positions.mask is None else self._positions.mask[:, :stop],
            "position_ids": self._positions.target[:, start:stop],
        }


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
    """Writes the entries that maps make: content from [`KVMapper.contents`], rotated, zero where there is padding."""
    length = chunk or stop - start
    if chunk is None and not torch.is_grad_enabled():
        supports, geometry = mapper.config.supports(), mapper.config.geometry("source")
        length = chunk_length(supports, geometry, source.batch_size, source.keys[0].device)
    for begin, end in chunks(start, stop, length):
        here = positions.narrow(begin, end - begin)
        turner = Turner(mapper.codec("target"), here.target, off=False)
        read = None if hidden is None else hidden[:, begin - start : end - start]
        for index, keys, values in mapper.contents(source, positions, read, begin, end):
            rooms = storage.room(index, begin, end, keys.device)
            turner.write(keys, index, rooms[0])
            rooms[1].copy_(values)
            if here.mask is not None:
                # Padding may hold anything in the source; the target masks it out, and zeros stay harmless there.
                padding = here.mask[:, None, :, None] == 0
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


def check_token_ids(source: SourceCache, positions: Positions, codec: RotaryCodec, input_ids: Tensor) -> None:
    """
    Refuses token ids that can't be those that the source has read: keys of the first layer without RoPE depend on the
    token alone, so that equal ids must have equal keys. Ids that occur once can't be told.

    Args:
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
        codec ([`RotaryCodec`]): of the source.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): what is said to have been read.

    Raises:
        [`ConversionError`]: if one and the same id has different keys.
    """
    keys = source.keys[0]
    content = codec.remove(keys, codec.tables(positions.source, keys.device), 0).float().transpose(1, 2).flatten(2)
    real = None if positions.mask is None else positions.mask.to(keys.device).flatten() != 0
    ids, rows = input_ids.to(keys.device).flatten(), content.flatten(0, 1)
    if real is not None:
        ids, rows = ids[real], rows[real]
    _, kind, count = ids.unique(return_inverse=True, return_counts=True)
    again = count[kind] > 1
    if not bool(again.any()):
        return
    means = torch.zeros(len(count), rows.shape[1], device=rows.device).index_add_(0, kind, rows) / count[:, None]
    # On average: a quantised cache is off by a little everywhere.
    apart = float((rows - means[kind])[again].norm(dim=1).mean() / rows.norm(dim=1).mean().clamp(min=1e-12))
    if apart > _OTHER_TEXT:
        raise ConversionError(
            "`input_ids` gives the same id to tokens whose keys differ in the source's first layer, where they depend "
            "on the token alone; expected the ids that the source has read, in the same order and rows. Pass those "
            "that its cache was made from."
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


def _joined(held: Entries, new: Entries) -> Entries:
    """What the target holds, and what was made after it, if anything."""
    if not new:
        return held
    joined: Entries = []
    for before, after in zip(held, new, strict=True):
        keys, values = (torch.cat([one.to(other), other], dim=2) for one, other in zip(before, after, strict=True))
        joined.append((keys, values))
    return joined
