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


def conditions(source: nn.Module, target: nn.Module, mapper: KVMapper, seed: int = 0) -> list[Condition]:
    """
    The source alone, the target native, the transfer, and the controls of a believable result: the source cache used
    raw (where the shapes allow it), a random mapper of equal size, the converted cache of a different document, and no
    context at all.

    Args:
        source (`PreTrainedModel`): the model that has read the context.
        target (`PreTrainedModel`): the model that goes on.
        mapper ([`KVMapper`]): of this pair.
        seed (`int`, *optional*, defaults to 0): of the random mapper.

    Returns:
        `list[Condition]`
    """
    random = random_mapper(mapper, seed)

    def native(model: nn.Module) -> Callable[[Tensor, Tensor], tuple[Any, float]]:
        return lambda context, other: _timed(lambda: prefill(model, context[:, :-1]))

    def converted(by: KVMapper, different: bool = False) -> Callable[[Tensor, Tensor], tuple[Any, float]]:
        def read(context: Tensor, other: Tensor) -> tuple[Any, float]:
            cache = prefill(source, other if different else context)
            return _timed(lambda: by.convert(cache))

        return read

    def raw(context: Tensor, other: Tensor) -> tuple[Any, float]:
        return _timed(lambda: prefill(source, context[:, :-1]))

    result = [
        Condition("source alone", source, native(source)),
        Condition("target native", target, native(target)),
        Condition("transferred", target, converted(mapper)),
        Condition("random mapper", target, converted(random)),
        Condition("different document", target, converted(mapper, different=True)),
        Condition("no context", target, lambda context, other: (None, 0.0)),
    ]
    if _same_shapes(mapper):
        result.insert(3, Condition("source cache raw", target, raw))
    return result


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
    return random.to(device=mapper.device, dtype=mapper.dtype).eval()


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
