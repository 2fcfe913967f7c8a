"""The conditions under which the same questions are asked: the two models alone, the transfer, and its controls."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..calibration import CalibrationStatistics
from ..mapper import KVMapper
from ..recipes import PRESETS
from .continuation import beside, prefill


@dataclass(frozen=True)
class Condition:
    """
    One way of having read a context.

    Args:
        name (`str`): as tables show it.
        model (`PreTrainedModel`): the model that goes on after the context.
        read (`Callable`):
            `read(context, other) -> (cache or None, seconds)`: from the token ids of the context, `[1, tokens]`, and
            those of another document, the cache of all but the last token of the context, and the time of what the
            target side had to do to get it.
    """

    name: str
    model: nn.Module
    read: Callable[[Tensor, Tensor], tuple[Any, float]]


Convert = Callable[[KVMapper, Any, Tensor], Any]
"""`convert(mapper, source_cache, input_ids)`: a target cache of all but the last of the tokens `[1, tokens]`."""


class SharedPrefill:
    """
    The source's cache of a context, made once for all conditions that use it, `shared(input_ids) -> DynamicCache`.
    Those of the last two contexts are kept: of a document, and of the one that is "a different document" to it.

    Args:
        source (`PreTrainedModel`): the model that reads.
    """

    def __init__(self, source: nn.Module) -> None:
        self._source = source
        self._held: list[tuple[Tensor, DynamicCache]] = []

    def __call__(self, input_ids: Tensor) -> DynamicCache:
        for ids, cache in self._held:
            if torch.equal(ids, input_ids):
                return cache
        self._held = [*self._held[-1:], (input_ids, prefill(self._source, input_ids))]
        return self._held[-1][1]


def conditions(
    source: nn.Module,
    target: nn.Module,
    mapper: KVMapper,
    seed: int = 0,
    convert: Convert | None = None,
    read_source: Callable[[Tensor], Any] | None = None,
) -> list[Condition]:
    """
    The source alone, the target native, the transfer, and the controls of a believable result: the source cache used
    raw (where the shapes of its layers allow it; each target layer gets the one at its relative depth), a random mapper
    of equal size, the converted cache of a different document, and no context at all.

    Args:
        source (`PreTrainedModel`): the model that has read the context.
        target (`PreTrainedModel`): the model that goes on.
        mapper ([`KVMapper`]): of this pair.
        seed (`int`, *optional*, defaults to 0): of the random mapper.
        convert (`Callable`, *optional*):
            How a source cache is converted, where `mapper.convert(source_cache)` isn't enough: called with the mapper,
            the cache and the token ids that the source has read.
        read_source (`Callable`, *optional*):
            `read_source(input_ids)`, the source's cache of token ids, which is left as it is. By default each condition
            has the source read; a [`SharedPrefill`] lets it read once for all of them, after which the time of the
            source alone means nothing.

    Returns:
        `list[Condition]`
    """
    read = read_source or (lambda input_ids: prefill(source, input_ids))

    def of_source(context: Tensor, other: Tensor, layers: Sequence[int] | None = None) -> tuple[Any, float]:
        return _timed(lambda: _without_last(read(context), layers))

    def native(context: Tensor, other: Tensor) -> tuple[Any, float]:
        return _timed(lambda: prefill(target, context[:, :-1]))

    result = [
        Condition("source alone", source, of_source),
        Condition("target native", target, native),
        transfer("transferred", source, target, mapper, convert, read_source=read),
        transfer("random mapper", source, target, random_mapper(mapper, seed), convert, read_source=read),
        transfer("different document", source, target, mapper, convert, different=True, read_source=read),
        Condition("no context", target, lambda context, other: (None, 0.0)),
    ]
    layers = raw_layers(mapper)
    if layers is not None:
        raw = Condition("source cache raw", target, lambda context, other: of_source(context, other, layers))
        result.insert(3, raw)
    return result


def transfer(
    name: str,
    source: nn.Module,
    target: nn.Module,
    mapper: KVMapper,
    convert: Convert | None = None,
    different: bool = False,
    read_source: Callable[[Tensor], Any] | None = None,
) -> Condition:
    """
    One way of going on from a source cache.

    Args:
        name (`str`): as tables show it.
        source (`PreTrainedModel`): the model that reads.
        target (`PreTrainedModel`): the model that goes on.
        mapper ([`KVMapper`]): of this pair.
        convert (`Callable`, *optional*): as in [`conditions`].
        different (`bool`, *optional*, defaults to `False`): whether another document is read and converted.
        read_source (`Callable`, *optional*): as in [`conditions`].
    """

    def read(context: Tensor, other: Tensor) -> tuple[Any, float]:
        ids = other if different else context
        cache = prefill(source, ids) if read_source is None else read_source(ids)
        if convert is not None:
            return _timed(lambda: convert(mapper, cache, ids))
        given: dict[str, Any] = {"input_ids": beside(target, ids), "target": target}
        return _timed(lambda: mapper.convert(cache, **(given if mapper.config.needs_target else {})))

    return Condition(name, target, read)


def anchor_alone(mapper: KVMapper, statistics: CalibrationStatistics | str | os.PathLike[str]) -> KVMapper | None:
    """
    The control of a mapper with an anchor: the same anchor, with maps that read nothing of the source (`k = 0`). What
    it keeps needs no source at all.

    Its maps have to be solved, from the statistics that the mapper itself was solved from. They are not what is left
    of the mapper's own maps when the part that reads the source is set to zero: those were fitted beside that part, and
    would make the control worse than it is.

    Args:
        mapper ([`KVMapper`]): of the pair.
        statistics ([`CalibrationStatistics`] or `str`): of its calibration, or the folder that they are in.

    Returns:
        [`KVMapper`]: or `None` if the mapper has no anchor, or one whose stream is predicted from the source, which
        without the source there isn't.

    Raises:
        [`CalibrationError`]: if the statistics hold nothing of such an anchor.
        [`MapperFileError`]: if they can't be read.
    """
    config = mapper.config
    if config.anchor_layers is None or config.anchor_start:
        return None
    return KVMapper.from_statistics(
        statistics,
        preset=config.preset if config.preset in PRESETS else "auto",
        anchor_layers=config.anchor_layers,
        exact_prefix=config.exact_prefix,
        exact_suffix=config.exact_suffix,
        k=0,
    )


@torch.no_grad()
def random_mapper(mapper: KVMapper, seed: int = 0) -> KVMapper:
    """
    A mapper of equal size whose weights are drawn at random, at the scale of the fitted ones, with the fitted biases:
    it knows the average entry and nothing about the context.
    """
    random = KVMapper(mapper.config)
    generator = torch.Generator().manual_seed(seed)
    for fitted, drawn in zip(mapper.parameters(), random.parameters(), strict=True):
        if fitted.dim() < 2:
            drawn.copy_(fitted)
        else:
            noise = torch.randn(fitted.shape, generator=generator)
            drawn.copy_(noise.to(fitted.device) * fitted.float().std())
    # Where the target runs all of its layers there are no maps, and nothing to be random.
    like = next(mapper.parameters(), None)
    return (random if like is None else random.to(device=like.device, dtype=like.dtype)).eval()


def raw_layers(mapper: KVMapper) -> list[int] | None:
    """
    Which source layer stands for each target layer when the source's cache is used raw: the one at the same relative
    depth, which is the same layer where both sides have as many. `None` where KV heads or head_dim don't fit.
    """
    source, target = (mapper.config.geometry(side).layers for side in ("source", "target"))
    steps = max(len(target) - 1, 1)
    chosen = [round(index * (len(source) - 1) / steps) for index in range(len(target))]
    pairs = [(source[chosen[index]], layer) for index, layer in enumerate(target)]
    fits = all((one.kv_heads, one.head_dim) == (other.kv_heads, other.head_dim) for one, other in pairs)
    return chosen if fits else None


def _without_last(cache: Any, layers: Sequence[int] | None = None) -> DynamicCache:
    """All tokens but the last of some layers of a cache, or of all, in a cache of their own that can grow."""
    held = DynamicCache()
    for index, layer in enumerate(range(len(cache.layers)) if layers is None else layers):
        states = cache.layers[layer]
        held.update(states.keys[:, :, :-1], states.values[:, :, :-1], index)
    return held


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = make()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return made, time.perf_counter() - start
