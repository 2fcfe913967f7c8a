"""Floating-point operations of a target's prefill and of a conversion, from configurations alone.

A product of matrices counts two operations per weight and token. What is done number by number (norms, activations,
rotary code, softmax) isn't counted, nor are the embedding and the LM head, which prefill and conversion share.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from .mapper import KVMapper
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
        outputs (`int`, *optional*, defaults to 0): numbers that the layer's matrices put out per token.
        weights (`int`, *optional*, defaults to 0): numbers in its matrices, all experts included.
    """

    matrices: int
    projection: int
    attention: int
    window: int | None = None
    is_chunked: bool = False
    outputs: int = 0
    weights: int = 0

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
        matrices = list(_matrices(module, section))
        costs.append(
            LayerCost(
                matrices=2 * sum(active for _, active in matrices),
                projection=2 * geometry.hidden_size * (queries + 2 * layer.kv_heads) * layer.head_dim,
                attention=4 * queries * layer.head_dim,
                window=layer.sliding_window,
                is_chunked=layer.layer_type == "chunked_attention",
                outputs=sum(active // weight.shape[-1] for weight, active in matrices),
                weights=sum(weight.numel() for weight, _ in matrices),
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
    return sum(active for _, active in _matrices(layer, section))


def _matrices(layer: nn.Module, section: PreTrainedConfig) -> Iterator[tuple[nn.Parameter, int]]:
    """Each matrix of a layer, and how many of its weights one token is multiplied with."""
    for name, parameter in layer.named_parameters():
        owner = type(layer.get_submodule(name.rpartition(".")[0])).__name__
        if parameter.dim() < 2 or name.endswith("bias") or "norm" in owner.lower():
            continue  # added, or multiplied number by number
        in_list = re.match(r"(.*\bexperts)\.\d+\.", name)
        experts: Any = layer.get_submodule(in_list[1]) if in_list else parameter if parameter.dim() > 2 else None
        active = parameter.numel()
        yield parameter, active if experts is None else active * _active_experts(section) // len(experts)


def prefill_flops(config: PreTrainedConfig, tokens: int) -> int:
    """
    Operations of a model's prefill: the body of the decoder over a context, `2 × weights × tokens` and attention over
    what each token sees.

    Args:
        config (`PreTrainedConfig`): of the whole model.
        tokens (`int`): length of the context.
    """
    return sum(layer.flops(0, tokens) for layer in layer_costs(config))


def anchor_flops(layers: Sequence[LayerCost], anchor_layers: int, start: int, stop: int, anchor_start: int = 0) -> int:
    """
    Operations of `anchor_layers` layers over tokens `start` to `stop`, on top of all those before, and of the next
    one's projection, which makes its keys and values.

    Args:
        layers (`Sequence[LayerCost]`): of the whole model.
        anchor_layers (`int`): how many of them run.
        start (`int`): the first token.
        stop (`int`): the token after the last one.
        anchor_start (`int`, *optional*, defaults to 0): the first layer that runs.
    """
    end = anchor_start + anchor_layers
    run = sum(layer.flops(start, stop) for layer in layers[anchor_start:end])
    return run + sum(layer.projection for layer in layers[end : end + 1]) * (stop - start)


def conversion_cost(
    target: Sequence[LayerCost],
    maps: Sequence[MapShape],
    tokens: int,
    *,
    anchor_layers: int | None = None,
    anchor_start: int = 0,
    exact_prefix: int = 0,
    exact_suffix: int = 0,
) -> ConversionCost:
    """
    Operations of a conversion of given parts.

    Args:
        target (`Sequence[LayerCost]`): of the target's layers, from [`layer_costs`].
        maps (`Sequence[MapShape]`): of all target layers and kinds that are mapped, and of what enters an anchor.
        tokens (`int`): length of the context.
        anchor_layers (`int`, *optional*): how many of the target's layers run over what is mapped.
        anchor_start (`int`, *optional*, defaults to 0): the first of these.
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
        anchor=0 if anchor_layers is None else anchor_flops(target, anchor_layers, begin, end, anchor_start),
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
    return conversion_cost(
        layer_costs(config.model_config("target")),
        map_shapes(config),
        tokens,
        anchor_layers=config.anchor_layers,
        anchor_start=config.anchor_start,
        **{"exact_prefix": config.exact_prefix, "exact_suffix": config.exact_suffix, **exact},
    )


def map_shapes(config: KVMapperConfig) -> list[MapShape]:
    """The shapes of all maps that a mapper of this configuration has."""
    with torch.device("meta"):
        mapper = KVMapper(config)
    forms: list[Any] = [form for layer in mapper.layers for form in layer.children()]
    options = tuple(sorted(config.map_options.items()))
    shapes = [MapShape(m.in_features, m.heads, m.head_dim, m.groups, config.map_type, options) for m in forms]
    if (entry := mapper.entry) is not None:
        shapes.append(MapShape(entry.in_features, entry.heads, entry.head_dim, entry.groups))
    return shapes


def recipe_flops(
    config: KVMapperConfig,
    source: PreTrainedConfig,
    target: PreTrainedConfig,
    tokens: int,
    *,
    k: int | None = None,
    anchor_layers: int | None = None,
    anchor_start: int | None = None,
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
        k (`int`, *optional*): source layers that each map reads, except those that read the anchor alone.
        anchor_layers (`int`, *optional*): layers of the anchor; of no effect for a mapper without one.
        anchor_start (`int`, *optional*): the first of these; of no effect where the embedding enters.
        **exact: `exact_prefix` and `exact_suffix`, where they differ from the mapper's.
    """
    here, there = config.geometry("target"), ModelGeometry.from_config(target)
    of, to = config.geometry("source").num_layers, ModelGeometry.from_config(source).num_layers

    def scaled(support: Support) -> Support:
        number = len(support.layers)
        number = _scaled(number, of, to) if k is None or not number else min(k, to)
        return replace(support, layers=tuple(range(number)))

    old, run, start = config.native_layers(here.num_layers), config.anchor_layers, config.anchor_start
    if run is not None:
        run = _scaled(run, here.num_layers, there.num_layers) if anchor_layers is None else anchor_layers
    if start:
        start = there.num_layers * start // here.num_layers if anchor_start is None else anchor_start
    entry = config.entry_support()
    other = KVMapperConfig(
        source_config=text_config(source).to_dict(),
        target_config=text_config(target).to_dict(),
        source_geometry=ModelGeometry.from_config(source).to_dict(),
        target_geometry=there.to_dict(),
        map_type=config.map_type,
        map_options=config.map_options,
        anchor_layers=run,
        anchor_start=start,
        entry=scaled(entry).to_dict() if entry is not None else None,
        exact_prefix=config.exact_prefix,
        exact_suffix=config.exact_suffix,
    )
    new, supports = other.native_layers(there.num_layers), config.supports()
    # Where the mapper's anchor reaches to the last layer and the other doesn't, its first layers are the model.
    before = _stretched(supports[: old.start], new.start)
    after = _stretched(supports[old.stop :] or supports[: old.start], there.num_layers - new.stop)
    other.support = [
        {kind: scaled(support).to_dict() for kind, support in layer.items()} if layer is not None else None
        for layer in [*before, *[None] * len(new), *after]
    ]
    return conversion_flops(other, tokens, **exact)


def _scaled(number: int, of: int, to: int) -> int:
    return -(-number * to // of)


def _stretched(layers: Sequence[LayerSupport | None], number: int) -> list[LayerSupport | None]:
    """As many layers as wanted, each like the one at the same depth."""
    return [layers[index * len(layers) // number] if layers else None for index in range(number)]


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
