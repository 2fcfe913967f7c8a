"""Floating-point operations, counted from configurations, against those that real models and maps take."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, baddbmm_flop
from transformers import DynamicCache, Qwen3Config, Qwen3MoeConfig

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.config import KVMapperConfig
from hf_kvtransfer.costs import (
    LayerCost,
    MapShape,
    active_weights,
    anchor_flops,
    conversion_cost,
    conversion_flops,
    layer_costs,
    prefill_flops,
    recipe_flops,
)
from hf_kvtransfer.errors import KVTransferError, UnsupportedModelError
from hf_kvtransfer.evaluation import prefill
from hf_kvtransfer.features import KINDS, Support
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.maps import MAPS
from hf_kvtransfer.modules import decoder_of

from .architectures import ARCHITECTURES, build, missing


TOKENS = 9  # more than the tiny models' sliding windows

QWEN3_14B = Qwen3Config(
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
)
QWEN3_32B = Qwen3Config(
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=25600,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
)


def mapper_config(source, target, support, **settings):
    sides = {
        f"{side}_{what}": value
        for side, config in (("source", source), ("target", target))
        for what, value in (
            ("config", config.to_dict()),
            ("geometry", ModelGeometry.from_config(config).to_dict()),
        )
    }
    return KVMapperConfig(**sides, support=support, **settings)


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(missing())))
def test_reading_token_by_token_takes_what_is_counted(name):
    model = build(name)
    # Fused kernels aren't counted, or as if every token saw all others and passed through all experts.
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    decoder = decoder_of(model)
    cache = DynamicCache(config=decoder.config)
    ids = torch.randint(3, 100, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        for token in range(TOKENS):
            decoder(input_ids=ids[:, token : token + 1], use_cache=True, **{cache_keyword(decoder): cache})
    # By module: what rotary tables take in each step isn't counted, as it is shared by all layers.
    counts = counter.get_flop_counts()
    costs = layer_costs(model.config)
    for index, layer in enumerate(costs):
        measured = next(sum(ops.values()) for path, ops in counts.items() if path.endswith(f"layers.{index}"))
        assert layer.flops(0, TOKENS) == measured, f"layer {index}"
    assert prefill_flops(model.config, TOKENS) == sum(layer.flops(0, TOKENS) for layer in costs)


def test_the_projection_is_that_of_queries_keys_and_values():
    model = build("qwen3")
    attention = decoder_of(model).layers[0].self_attn
    weights = sum(getattr(attention, name).weight.numel() for name in ("q_proj", "k_proj", "v_proj"))
    assert layer_costs(model.config)[0].projection == 2 * weights


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_attention_counts_what_each_token_sees(window, is_chunked):
    layer = LayerCost(matrices=1000, projection=0, attention=1, window=window, is_chunked=is_chunked)
    seen = [
        1 + token if window is None else 1 + (token % window if is_chunked else min(token, window - 1))
        for token in range(15)
    ]
    for start in range(15):
        for stop in range(start, 15):
            assert layer.flops(start, stop) == 1000 * (stop - start) + sum(seen[start:stop])


def test_the_published_pair_costs_what_the_paper_says():
    """Qwen3 14B→32B at 32k tokens: prefill 3,171 TFLOP, full-head k = 8 70, head-local 8.8 (method, §4)."""
    layers = layer_costs(QWEN3_32B)
    full = conversion_cost(layers, 128 * [MapShape(8 * 8 * 128, 8, 128)], 32_768)
    local = conversion_cost(layers, 128 * [MapShape(8 * 128, 8, 128, groups=8)], 32_768)
    assert round(full.prefill / 1e12) == 3171
    assert round(full.total / 1e12) == 70
    assert round(local.total / 1e12, 1) == 8.8
    assert round(1 / full.share_of_prefill) == 45
    assert 1 / local.share_of_prefill == pytest.approx(360, rel=0.01)


@pytest.mark.parametrize("form", sorted(MAPS))
@pytest.mark.parametrize("groups", [1, 2])
def test_a_map_costs_two_operations_per_weight(form, groups):
    options = () if form == "linear" else (("hidden", 24),)
    shape = MapShape(10, 2, 8, groups, form, options)
    module = MAPS[form](10, 2, 8, groups, **dict(options))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    assert shape.flops_per_token() == 2 * sum(tensor.numel() for name, tensor in tensors if "weight" in name)


def test_reading_everything_natively_costs_a_prefill():
    layers = layer_costs(QWEN3_32B)
    maps = [MapShape(64, 8, 128)]
    for native in (
        {"exact_prefix": 1000},
        {"exact_suffix": 1000},
        {"exact_prefix": 400, "exact_suffix": 600},
        {"exact_prefix": 2000, "exact_suffix": 2000},
    ):
        cost = conversion_cost(layers, maps, 1000, anchor_layers=3, **native)
        assert cost.total == cost.prefill == prefill_flops(QWEN3_32B, 1000)
    assert conversion_cost(layers, [], 1000, anchor_layers=64).total == cost.prefill


def test_every_token_is_read_in_one_way():
    """What the target reads whole, neither anchor nor map reads."""
    layers = layer_costs(QWEN3_32B)
    cost = conversion_cost(layers, [MapShape(64, 8, 128)], 1000, anchor_layers=4, exact_prefix=10, exact_suffix=90)
    assert cost.map == 2 * 64 * 8 * 128 * 900
    assert cost.anchor == anchor_flops(layers, 4, 10, 910)
    assert cost.prefix == prefill_flops(QWEN3_32B, 10)
    assert cost.suffix == cost.prefill - prefill_flops(QWEN3_32B, 910)
    assert cost.total == cost.map + cost.anchor + cost.prefix + cost.suffix
    assert cost.anchor == sum(layer.flops(10, 910) for layer in layers[:4]) + 900 * layers[4].projection


def test_a_mapper_costs_what_its_configuration_says():
    supports = [None, None, *[{kind: Support((0, 2), "local", True, 1, True) for kind in ("keys", "values")}] * 62]
    config = mapper_config(QWEN3_14B, QWEN3_32B, supports, anchor_layers=1, exact_suffix=24)
    cost = conversion_flops(config, 1024)
    width = 2 * 2 * 2 * 128 + 5120 + 1  # the stream's direction and its size
    assert cost == conversion_cost(
        layer_costs(QWEN3_32B), 124 * [MapShape(width, 8, 128, 8)], 1024, anchor_layers=1, exact_suffix=24
    )
    assert conversion_flops(config, 1024, exact_suffix=0).suffix == 0


ANCHORS = [{}, {"anchor_layers": 0}, {"anchor_layers": 1}, {"anchor_layers": 1, "anchor_start": 1}]


def anchored(source, target, anchor, heads="full"):
    """A configuration for three target layers in which whatever may read the anchor does."""
    config = mapper_config(source, target, None, **anchor)
    native = config.native_layers(3)
    config.support = [
        None
        if index in native
        else {kind: vars(Support((0, 2), heads, True, 1, 0 < len(native) <= index)) for kind in KINDS}
        for index in range(3)
    ]
    config.entry = vars(Support((1, 2), joint=True)) if anchor.get("anchor_start") else None
    return config


@torch.no_grad()
@pytest.mark.parametrize("anchor", ANCHORS, ids=str)
@pytest.mark.parametrize("heads", ["full", "local"])
def test_a_conversion_takes_what_is_counted(anchor, heads):
    source, target = build("llama"), build("qwen3")
    target.set_attn_implementation("eager")
    mapper = KVMapper(anchored(source.config, target.config, anchor, heads)).eval()
    ids = torch.randint(3, 100, (1, TOKENS))
    cache = prefill(source, ids)
    # Products that add up in place count as others do.
    in_place = {torch.ops.aten.addmm_: addmm_flop, torch.ops.aten.baddbmm_: baddbmm_flop}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        mapper.convert(cache, target=target, input_ids=ids, hold_back=0, validate=False)
    counted = conversion_flops(mapper.config, TOKENS)
    # In one pass, attention multiplies what the mask then hides.
    hidden = TOKENS * (TOKENS - 1) // 2 * layer_costs(target.config)[0].attention * anchor.get("anchor_layers", 0)
    # Up to rotary tables.
    assert counter.get_total_flops() == pytest.approx(counted.total + hidden, rel=0.01)


@pytest.mark.parametrize("anchor", ANCHORS, ids=str)
def test_a_recipe_costs_the_same_at_its_own_pair(anchor):
    tiny = build("qwen3").config
    config = anchored(tiny, tiny, {**anchor, "exact_prefix": 4})
    assert recipe_flops(config, tiny, tiny, 64) == conversion_flops(config, 64)
    assert recipe_flops(config, tiny, tiny, 64, exact_prefix=0).prefix == 0


def test_a_recipe_keeps_its_shares_at_another_pair():
    tiny = build("qwen3").config  # three layers
    supports = [None, None, [0, 1, 2]]
    config = mapper_config(tiny, tiny, supports, anchor_layers=1)
    cost = recipe_flops(config, QWEN3_14B, QWEN3_32B, 2048)
    layers = layer_costs(QWEN3_32B)
    # A third of 64 layers, all of 40.
    assert cost == conversion_cost(layers, 2 * 41 * [MapShape(40 * 1024, 8, 128)], 2048, anchor_layers=22)
    cheap = recipe_flops(config, QWEN3_14B, QWEN3_32B, 2048, k=8, anchor_layers=4)
    assert cheap == conversion_cost(layers, 2 * 59 * [MapShape(8 * 1024, 8, 128)], 2048, anchor_layers=4)


def test_a_recipe_keeps_the_place_of_its_anchor():
    tiny = build("qwen3").config
    config = anchored(tiny, tiny, {"anchor_layers": 1, "anchor_start": 1})
    layers = layer_costs(QWEN3_32B)
    cost = recipe_flops(config, QWEN3_14B, QWEN3_32B, 2048)
    # Of the target the second third, and the next layer's projection. All others read two thirds of the source's 40
    # layers, keys and values of two tokens; what enters the anchor reads those of one.
    assert cost.anchor == anchor_flops(layers, 22, 0, 2048, anchor_start=21)
    width = 2 * 27 * 1024
    maps = [*2 * 41 * [MapShape(2 * width, 8, 128)], MapShape(width, 1, 5121)]
    assert cost.map == 2048 * sum(shape.flops_per_token() for shape in maps)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(KVTransferError, match="context has 0 tokens"):
        conversion_cost(layer_costs(QWEN3_32B), [], 0)
    experts = nn.ModuleDict({"experts": nn.ParameterList([nn.Parameter(torch.empty(4, 8, 8))])})
    with pytest.raises(UnsupportedModelError, match="mixes experts"):
        active_weights(experts, Qwen3Config())
    assert active_weights(experts, Qwen3MoeConfig(num_experts_per_tok=2)) == 2 * 64


def test_experts_may_be_modules_of_their_own():
    layer = nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.ModuleList(nn.Linear(8, 16) for _ in range(4))})
    assert active_weights(layer, Qwen3MoeConfig(num_experts_per_tok=2)) == 4 * 8 + 2 * 8 * 16
