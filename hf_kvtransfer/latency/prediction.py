"""How long prefill and conversion would take on named hardware, from counts alone.

A kernel takes as long as its arithmetic or its memory traffic does, whichever is longer, and all of them together no
less than the host takes to start them (the roofline of Williams, Waterman and Patterson, 2009, with a floor of
launches). What that leaves out, such as idle units in small products, makes real machines slower on short contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..costs import LayerCost, MapShape
from .hardware import Hardware


if TYPE_CHECKING:
    from ..planning import PairPlan, RecipePlan


# How often a number that a matrix of a layer puts out is read or written by what isn't a product: norms, rotary code,
# activations, residual sums. Counted in the code of Llama and Qwen3, where it is 5.5 and 5.8.
_TOUCHED = 6
# Operations that the host starts per decoder layer; Llama takes 40, Qwen3 in bfloat16 60.
_OPERATIONS_PER_LAYER = 50
# Per map: the product, and what turns its output into a layer of the cache. Per source layer: undoing the rotary code.
_OPERATIONS_PER_MAP = 8
_OPERATIONS_PER_SOURCE_LAYER = 10
# How often a number of the source cache, and of the converted one, is read or written: checked, un-rotated, laid side
# by side for the products; rotated, checked, put into the cache.
_SOURCE_TOUCHED = 6
_RESULT_TOUCHED = 6


@dataclass(frozen=True)
class Work:
    """
    What a call takes, by what limits it.

    Args:
        products (`tuple[tuple[float, float], ...]`): floating-point operations and bytes of weights, per kernel or
            layer.
        attention (`float`): operations of attention.
        traffic (`float`): bytes read and written by everything else.
        operations (`int`): operations that the host starts.
    """

    products: tuple[tuple[float, float], ...]
    attention: float
    traffic: float
    operations: int

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.products + other.products,
            self.attention + other.attention,
            self.traffic + other.traffic,
            self.operations + other.operations,
        )

    def seconds(self, hardware: Hardware) -> float:
        """
        How long it takes on some hardware.

        Args:
            hardware ([`Hardware`]): which one.
        """
        bandwidth = hardware.bandwidth * hardware.copies
        products = sum(
            max(flops / (hardware.flops * hardware.products), weights / bandwidth) for flops, weights in self.products
        )
        device = products + self.attention / (hardware.flops * hardware.attention) + self.traffic / bandwidth
        return max(device, self.operations * hardware.operation)


def layers_work(layers: Sequence[LayerCost], tokens: int, *, batch_size: int = 1, number: int = 2) -> Work:
    """
    Some of a model's layers, over a context from its first token on.

    Args:
        layers (`Sequence[LayerCost]`): from [`~hf_kvtransfer.costs.layer_costs`].
        tokens (`int`): length of the context.
        batch_size (`int`, *optional*, defaults to 1): contexts at a time.
        number (`int`, *optional*, defaults to 2): bytes of a number; two in bfloat16.
    """
    return Work(
        products=tuple((batch_size * tokens * layer.matrices, number * layer.weights) for layer in layers),
        attention=batch_size * sum(layer.flops(0, tokens) - tokens * layer.matrices for layer in layers),
        traffic=batch_size * tokens * number * _TOUCHED * sum(layer.outputs for layer in layers),
        operations=_OPERATIONS_PER_LAYER * len(layers),
    )


def maps_work(
    maps: Sequence[MapShape],
    source_widths: Sequence[int],
    tokens: int,
    *,
    batch_size: int = 1,
    number: int = 2,
) -> Work:
    """
    The maps of a mapper over a context.

    Args:
        maps (`Sequence[MapShape]`): all of them.
        source_widths (`Sequence[int]`): numbers per token in the keys of each source layer that is read.
        tokens (`int`): how many are mapped.
        batch_size (`int`, *optional*, defaults to 1): contexts at a time.
        number (`int`, *optional*, defaults to 2): bytes of a number.
    """
    rows = batch_size * tokens
    made = sum(shape.heads * shape.head_dim for shape in maps)
    return Work(
        # Two operations per weight and token, so half of those of one token are the weights.
        products=tuple((rows * shape.flops_per_token(), number * shape.flops_per_token() / 2) for shape in maps),
        attention=0,
        traffic=rows * number * (2 * sum(source_widths) * _SOURCE_TOUCHED + made * _RESULT_TOUCHED),
        operations=_OPERATIONS_PER_MAP * len(maps) + _OPERATIONS_PER_SOURCE_LAYER * len(source_widths),
    )


class Roofline:
    """
    Times of a pair on named hardware, by tokens of context, in bfloat16.

    Args:
        pair ([`~hf_kvtransfer.planning.PairPlan`]): the two models.
        recipe ([`~hf_kvtransfer.planning.RecipePlan`]): the mapper.
        hardware ([`Hardware`]): where.
        batch_size (`int`, *optional*, defaults to 1): contexts at a time.
    """

    def __init__(self, pair: "PairPlan", recipe: "RecipePlan", hardware: Hardware, *, batch_size: int = 1) -> None:
        self._source, self._target = pair.source_layers, pair.target_layers
        self._read = [pair.source.layers[layer].width for layer in recipe.layers_read] if pair.source else []
        self._recipe, self._hardware, self._batch = recipe, hardware, batch_size

    def source_prefill(self, tokens: int) -> float:
        """Seconds of the source's prefill."""
        return layers_work(self._source, tokens, batch_size=self._batch).seconds(self._hardware)

    def target_prefill(self, tokens: int) -> float:
        """Seconds of the target's prefill, without its LM head."""
        return layers_work(self._target, tokens, batch_size=self._batch).seconds(self._hardware)

    def conversion(self, tokens: int) -> float:
        """Seconds of a conversion, the target's own layers included."""
        work = maps_work(self._recipe.maps, self._read, tokens, batch_size=self._batch)
        if self._recipe.anchor_layers is not None:
            start = self._recipe.anchor_start
            end = start + self._recipe.anchor_layers
            work += layers_work(self._target[start:end], tokens, batch_size=self._batch)
            # Of the layer above only what makes its keys and values.
            above = [
                replace(layer, matrices=layer.projection, attention=0, weights=layer.projection // 2, outputs=0)
                for layer in self._target[end : end + 1]
            ]
            work += layers_work(above, tokens, batch_size=self._batch)
        return work.seconds(self._hardware)
