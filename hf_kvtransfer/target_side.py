"""What the target itself reads in a conversion: which tokens, whether the ids can be right, and its own layers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .blocks import run_block, stream_features
from .contents import predicted_stream
from .entries import Entries, EntryStorage
from .errors import ConversionError
from .native import NativeRun, run_native
from .positions import Positions
from .rope import RotaryCodec
from .source import SourceCache, all_finite, check_finite


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


class NativeReader:
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
            entry = predicted_stream(mapper, source, self._positions, start, stop)
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


def _joined(held: Entries, new: Entries) -> Entries:
    """What the target holds, and what was made after it, if anything."""
    if not new:
        return held
    joined: Entries = []
    for before, after in zip(held, new, strict=True):
        keys, values = (torch.cat([one.to(other), other], dim=2) for one, other in zip(before, after, strict=True))
        joined.append((keys, values))
    return joined
