"""The conditions under which the same questions are asked: the two models alone, the transfer, and its controls."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..mapper import KVMapper
from .continuation import prefill


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


def conditions(
    source: nn.Module, target: nn.Module, mapper: KVMapper, seed: int = 0, convert: Convert | None = None
) -> list[Condition]:
    """
    The source alone, the target native, the transfer, and the controls of a believable result: the source cache used
    raw (where the shapes allow it), a random mapper of equal size, the converted cache of a different document, and no
    context at all.

    Args:
        source (`PreTrainedModel`): the model that has read the context.
        target (`PreTrainedModel`): the model that goes on.
        mapper ([`KVMapper`]): of this pair.
        seed (`int`, *optional*, defaults to 0): of the random mapper.
        convert (`Callable`, *optional*):
            How a source cache is converted, where `mapper.convert(source_cache)` isn't enough: called with the mapper,
            the cache and the token ids that the source has read.

    Returns:
        `list[Condition]`
    """

    def native(model: nn.Module) -> Callable[[Tensor, Tensor], tuple[Any, float]]:
        return lambda context, other: _timed(lambda: prefill(model, context[:, :-1]))

    def raw(context: Tensor, other: Tensor) -> tuple[Any, float]:
        return _timed(lambda: prefill(source, context[:, :-1]))

    result = [
        Condition("source alone", source, native(source)),
        Condition("target native", target, native(target)),
        transfer("transferred", source, target, mapper, convert),
        transfer("random mapper", source, target, random_mapper(mapper, seed), convert),
        transfer("different document", source, target, mapper, convert, different=True),
        Condition("no context", target, lambda context, other: (None, 0.0)),
    ]
    if _same_shapes(mapper):
        result.insert(3, Condition("source cache raw", target, raw))
    return result


def transfer(
    name: str,
    source: nn.Module,
    target: nn.Module,
    mapper: KVMapper,
    convert: Convert | None = None,
    different: bool = False,
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
    """

    def read(context: Tensor, other: Tensor) -> tuple[Any, float]:
        ids = other if different else context
        cache = prefill(source, ids)
        if convert is not None:
            return _timed(lambda: convert(mapper, cache, ids))
        given: dict[str, Any] = {"input_ids": ids, "target": target} if mapper.config.needs_target else {}
        return _timed(lambda: mapper.convert(cache, **given))

    return Condition(name, target, read)


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


def _same_shapes(mapper: KVMapper) -> bool:
    sides = [
        [(layer.kv_heads, layer.head_dim) for layer in mapper.config.geometry(side).layers]
        for side in ("source", "target")
    ]
    return sides[0] == sides[1]


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    made = make()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return made, time.perf_counter() - start
