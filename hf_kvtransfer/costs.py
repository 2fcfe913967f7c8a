"""Floating-point operations of a target's prefill and of a conversion, from configurations alone.

A product of matrices counts two operations per weight and token. What is done number by number (norms, activations,
rotary code, softmax) isn't counted, nor are the embedding and the LM head, which prefill and conversion share.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from .config import KVMapperConfig
from .errors import KVTransferError, UnsupportedModelError
from .features import LayerSupport, Support
from .geometry import ModelGeometry
from .maps import MAPS
from .modules import decoder_of, skeleton, text_config


# Under one of these names a mixture of experts says how many of them a token passes through.
_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
# Enough rows for the products of a map to be those that many tokens take.
_COUNTED_ROWS = 16


@dataclass(frozen=True)
class LayerCost:
    """
    What one decoder layer takes.

    Args:
        matrices (`int`): operations per token in the layer's matrices; of experts, those that a token passes through.
        projection (`int`): of these, the projection to queries, keys and values.
        attention (`int`): operations per token and token that it attends to, in both products of attention.
        window (`int`, *optional*): how many tokens a token attends to at most, itself included.
        is_chunked (`bool`, *optional*, defaults to `False`): whether attention starts anew every `window` tokens.
    """

    matrices: int
    projection: int
    attention: int
    window: int | None = None
    is_chunked: bool = False

    def flops(self, start: int, stop: int) -> int:
        """Operations of reading tokens `start` to `stop` on top of all those before."""
        return (stop - start) * self.matrices + self.attention * (self._visible(stop) - self._visible(start))

    def _visible(self, tokens: int) -> int:
        """How many tokens the first so many attend to, summed."""
        if self.window is None or tokens <= self.window:
            return tokens * (tokens + 1) // 2
        full = self.window * (self.window + 1) // 2
        if self.is_chunked:
            chunks, rest = divmod(tokens, self.window)
            return chunks * full + rest * (rest + 1) // 2
        return full + (tokens - self.window) * self.window


@dataclass(frozen=True)
class MapShape:
    """
    The shape of one map, of one target layer and one kind.

    Args:
        in_features (`int`): width of what each head reads.
        heads (`int`): KV heads of the target layer.
        head_dim (`int`): their width.
        groups (`int`, *optional*, defaults to 1): 1 if all heads read the same features, `heads` if each its own.
        form (`str`, *optional*, defaults to `"linear"`): the functional form, a key of `hf_kvtransfer.maps.MAPS`.
        options (`tuple[tuple[str, Any], ...]`, *optional*): further arguments of that form, such as
            `(("hidden", 1024),)`.
    """

    in_features: int
    heads: int
    head_dim: int
    groups: int = 1
    form: str = "linear"
    options: tuple[tuple[str, Any], ...] = field(default=())

    def flops_per_token(self) -> int:
        """Operations of mapping one token, counted while the form runs on tensors without data."""
        return _map_flops(self)


@dataclass(frozen=True)
class ConversionCost:
    """
    Operations of one conversion, by who does them. The source's own prefill is not among them.

    Args:
        map (`int`): the maps, over the tokens that the target doesn't read whole.
        anchor (`int`): the target's first layers over the same tokens.
        prefix (`int`): the whole target over the first tokens.
        suffix (`int`): the whole target over the last tokens.
        prefill (`int`): for comparison, the target over all tokens.
    """

    map: int
    anchor: int
    prefix: int
    suffix: int
    prefill: int

    @property
    def total(self) -> int:
        """All parts of the conversion together."""
        return self.map + self.anchor + self.prefix + self.suffix

    @property
    def share_of_prefill(self) -> float:
        """What the conversion takes, in prefills of the target."""
        return self.total / self.prefill


def layer_costs(config: PreTrainedConfig) -> tuple[LayerCost, ...]:
    """
    What each decoder layer of a model takes.

    Args:
        config (`PreTrainedConfig`): of the whole model; no weights are needed.

    Returns:
        `tuple[LayerCost, ...]`: one per decoder layer.

    Raises:
        [`UnsupportedModelError`]: if the model can't be mapped, or mixes experts and doesn't say how many at a time.
    """
    geometry, section = ModelGeometry.from_config(config), text_config(config)
    costs = []
    for index, (module, layer) in enumerate(zip(decoder_of(skeleton(config)).layers, geometry.layers, strict=True)):
        queries = geometry.query_heads(index)
        costs.append(
            LayerCost(
                matrices=2 * active_weights(module, section),
                projection=2 * geometry.hidden_size * (queries + 2 * layer.kv_heads) * layer.head_dim,
                attention=4 * queries * layer.head_dim,
                window=layer.sliding_window,
                is_chunked=layer.layer_type == "chunked_attention",
            )
        )
    return tuple(costs)


def active_weights(layer: nn.Module, section: PreTrainedConfig) -> int:
    """
    The number of weights in a decoder layer's matrices that one token is multiplied with.

    Args:
        layer (`torch.nn.Module`): a decoder layer, with or without data.
        section (`PreTrainedConfig`): the text config, for how many experts a token passes through.

    Raises:
        [`UnsupportedModelError`]: if there are experts and the config doesn't say.
    """
    total = 0
    for name, parameter in layer.named_parameters():
        owner = type(layer.get_submodule(name.rpartition(".")[0])).__name__
        if parameter.dim() < 2 or name.endswith("bias") or "norm" in owner.lower():
            continue  # added, or multiplied number by number
        in_list = re.match(r"(.*\bexperts)\.\d+\.", name)
        experts: Any = layer.get_submodule(in_list[1]) if in_list else parameter if parameter.dim() > 2 else None
        active = parameter.numel()
        total += active if experts is None else active * _active_experts(section) // len(experts)
    return total


def prefill_flops(config: PreTrainedConfig, tokens: int) -> int:
    """
    Operations of a model's prefill: the body of the decoder over a context, `2 × weights × tokens` and attention over
    what each token sees.

    Args:
        config (`PreTrainedConfig`): of the whole model.
        tokens (`int`): length of the context.
    """
    return sum(layer.flops(0, tokens) for layer in layer_costs(config))


def anchor_flops(layers: Sequence[LayerCost], anchor_layers: int, start: int, stop: int) -> int:
    """
    Operations of the first `anchor_layers` layers over tokens `start` to `stop`, on top of all those before, and of
    the next one's projection, which makes its keys and values.

    Args:
        layers (`Sequence[LayerCost]`): of the whole model.
        anchor_layers (`int`): how many of them run.
        start (`int`): the first token.
        stop (`int`): the token after the last one.
    """
    run = sum(layer.flops(start, stop) for layer in layers[:anchor_layers])
    return run + sum(layer.projection for layer in layers[anchor_layers : anchor_layers + 1]) * (stop - start)


def conversion_cost(
    target: Sequence[LayerCost],
    maps: Sequence[MapShape],
    tokens: int,
    *,
    anchor_layers: int | None = None,
    exact_prefix: int = 0,
    exact_suffix: int = 0,
) -> ConversionCost:
    """
    Operations of a conversion of given parts.

    Args:
        target (`Sequence[LayerCost]`): of the target's layers, from [`layer_costs`].
        maps (`Sequence[MapShape]`): of all target layers and kinds that are mapped.
        tokens (`int`): length of the context.
        anchor_layers (`int`, *optional*): how many of the target's first layers run over what is mapped.
        exact_prefix (`int`, *optional*, defaults to 0): how many of the first tokens the target reads itself.
        exact_suffix (`int`, *optional*, defaults to 0): how many of the last.

    Raises:
        [`KVTransferError`]: if there are no tokens.
    """
    if tokens < 1:
        raise KVTransferError(f"The context has {tokens} tokens; expected one or more to count the cost of.")
    begin = min(exact_prefix, tokens)
    end = max(tokens - exact_suffix, begin)
    return ConversionCost(
        map=sum(shape.flops_per_token() for shape in maps) * (end - begin),
        anchor=0 if anchor_layers is None else anchor_flops(target, anchor_layers, begin, end),
        prefix=sum(layer.flops(0, begin) for layer in target),
        suffix=sum(layer.flops(end, tokens) for layer in target),
        prefill=sum(layer.flops(0, tokens) for layer in target),
    )


def conversion_flops(config: KVMapperConfig, tokens: int, **exact: int) -> ConversionCost:
    """
    Operations of a mapper's conversion.

    Args:
        config ([`KVMapperConfig`]): of the mapper; weights aren't needed.
        tokens (`int`): length of the context.
        **exact: `exact_prefix` and `exact_suffix`, where `convert` is called with others than the mapper's.
    """
    maps = map_shapes(
        config.supports(), config.geometry("source"), config.geometry("target"), config.map_type, config.map_options
    )
    return conversion_cost(
        layer_costs(config.model_config("target")),
        maps,
        tokens,
        anchor_layers=config.anchor_layers,
        **{"exact_prefix": config.exact_prefix, "exact_suffix": config.exact_suffix, **exact},
    )


def recipe_flops(
    config: KVMapperConfig,
    source: PreTrainedConfig,
    target: PreTrainedConfig,
    tokens: int,
    *,
    k: int | None = None,
    anchor_layers: int | None = None,
    **exact: int,
) -> ConversionCost:
    """
    Operations that a mapper's recipe would take on another pair of models.

    Each layer of the other target is mapped as the mapper's layer at the same depth is. Unless told otherwise, it
    reads the same share of the source's layers, and the anchor is the same share of the target's, both rounded up.

    Args:
        config ([`KVMapperConfig`]): of the mapper.
        source (`PreTrainedConfig`): of the other source.
        target (`PreTrainedConfig`): of the other target.
        tokens (`int`): length of the context.
        k (`int`, *optional*): source layers that each map of more than none reads.
        anchor_layers (`int`, *optional*): layers of the anchor; of no effect for a mapper without one.
        **exact: `exact_prefix` and `exact_suffix`, where they differ from the mapper's.
    """
    here = config.geometry("source").num_layers, config.geometry("target").num_layers
    there = ModelGeometry.from_config(source), ModelGeometry.from_config(target)
    anchor = config.anchor_layers
    if anchor is not None:
        anchor = _scaled(anchor, here[1], there[1].num_layers) if anchor_layers is None else anchor_layers
    mapped = [entry for entry in config.supports() if entry is not None]
    first = 0 if anchor is None else anchor + 1
    left = max(there[1].num_layers - first, 0)
    supports: list[LayerSupport | None] = [None] * min(first, there[1].num_layers)
    for index in range(left if mapped else 0):
        entry = mapped[index * len(mapped) // left]
        supports.append({kind: _at(support, k, here[0], there[0].num_layers) for kind, support in entry.items()})
    return conversion_cost(
        layer_costs(target),
        map_shapes(supports, *there, config.map_type, config.map_options),
        tokens,
        anchor_layers=anchor,
        **{"exact_prefix": config.exact_prefix, "exact_suffix": config.exact_suffix, **exact},
    )


def map_shapes(
    supports: Sequence[LayerSupport | None],
    source: ModelGeometry,
    target: ModelGeometry,
    form: str = "linear",
    options: dict[str, Any] | None = None,
) -> list[MapShape]:
    """
    The shapes of all maps of a mapper.

    Args:
        supports (`Sequence`): what the maps of each target layer read; `None` for layers without maps.
        source ([`ModelGeometry`]): of the source.
        target ([`ModelGeometry`]): of the target.
        form (`str`, *optional*, defaults to `"linear"`): the functional form.
        options (`dict`, *optional*): its further arguments.
    """
    return [
        MapShape(
            support.width(source, layer, target.hidden_size),
            layer.kv_heads,
            layer.head_dim,
            support.groups(layer),
            form,
            tuple(sorted((options or {}).items())),
        )
        for entry, layer in zip(supports, target.layers, strict=True)
        for support in (entry or {}).values()
    ]


def _scaled(number: int, of: int, to: int) -> int:
    return -(-number * to // of)


def _at(support: Support, k: int | None, of: int, to: int) -> Support:
    number = len(support.layers)
    number = _scaled(number, of, to) if k is None or not number else min(k, to)
    return Support(tuple(range(number)), support.heads, support.joint, support.window, support.anchor)


@lru_cache(maxsize=1024)
def _map_flops(shape: MapShape) -> int:
    with torch.device("meta"):
        form = MAPS[shape.form](shape.in_features, shape.heads, shape.head_dim, shape.groups, **dict(shape.options))
        features = torch.empty(shape.groups, _COUNTED_ROWS, shape.in_features)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        form(features)
    return counter.get_total_flops() // _COUNTED_ROWS


def _active_experts(section: PreTrainedConfig) -> int:
    for name in _ACTIVE_EXPERTS:
        if isinstance(number := getattr(section, name, None), int):
            return number
    raise UnsupportedModelError(
        f"{section.model_type} mixes experts, and its config gives none of {', '.join(_ACTIVE_EXPERTS)}; expected one, "
        "to count the experts that a token passes through. Set it in the config."
    )
