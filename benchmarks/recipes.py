"""The recipes that are tried, pair by pair, and what each would cost on a pair of large models."""

from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import Any

from transformers import Qwen3Config

from hf_kvtransfer import KVMapperConfig
from hf_kvtransfer.costs import conversion_flops, recipe_flops


@dataclass(frozen=True)
class Way:
    """
    One way to make a mapper.

    Args:
        name (`str`): as tables show it.
        role (`str`): `"published"`, `"cache alone"` (nothing but the source cache is read), `"trained"`,
            `"anchored"`, `"ingredient"` (one thing changed, to see what it does) or `"control"`.
        recipe (`dict`): arguments of `KVMapper.from_statistics`.
        sums (`str`, *optional*, defaults to `"all"`): which statistics it is solved from.
        of (`str`, *optional*): the recipe whose maps are taken, with `recipe` as changes of their configuration.
        is_main (`bool`, *optional*, defaults to `True`):
            whether it takes part in what takes long: long contexts and multiple choice of real models.
        trained (`dict`, *optional*): how the maps of `of` are trained, see `training.trained`.
    """

    name: str
    role: str
    recipe: dict[str, Any] = field(default_factory=dict)
    sums: str = "all"
    of: str | None = None
    is_main: bool = True
    trained: dict[str, Any] | None = None


_FREE = {"exact_prefix": 0}

TINY_UP = (
    Way("heo2026", "published", {"preset": "heo2026"}),
    Way("cachebridge2026", "published", {"preset": "cachebridge2026"}),
    Way("auto", "cache alone"),
    Way("heo2026, all layers", "ingredient", {"preset": "heo2026", "k": "all"}),
    Way("… head-local", "ingredient", {"preset": "heo2026", "k": "all", "heads": "local"}),
    Way("… joint", "ingredient", {"preset": "heo2026", "k": "all", "joint": True}),
    Way("… joint, 1 token before", "ingredient", {"preset": "heo2026", "k": "all", "joint": True, "window": 1}),
    Way("… λ = 100", "ingredient", {"preset": "heo2026", "k": "all", "ridge_lambda": 100.0}),
    Way("auto, ranked only", "ingredient", {"order": "ranked"}),
    Way("auto, greedy only", "ingredient", {"order": "greedy"}),
    Way("auto, 1 token before", "cache alone", {"window": 1}),
    Way("auto, first token mapped, too", "ingredient", {"first_token": {}}, of="auto"),
    Way("auto, first 4 exact", "ingredient", {"exact_prefix": 4}, of="auto"),
    Way("auto, last 16 exact", "ingredient", {"exact_suffix": 16}, of="auto"),
    Way("auto, 1 anchor layer", "anchored", {"anchor_layers": 1, **_FREE, "max_cost": 0.5}),
    Way("… and last 16 exact", "ingredient", {"exact_suffix": 16}, of="auto, 1 anchor layer"),
    Way("auto, 2 anchor layers", "anchored", {"anchor_layers": 2, **_FREE, "max_cost": 0.42}),
    Way("auto, anchor auto", "anchored", {"anchor_layers": [1, 2], **_FREE, "max_cost": 0.42}),
    Way("anchor alone, 1 layer", "control", {"anchor_layers": 1, **_FREE, "k": 0}),
    Way("anchor alone, 2 layers", "control", {"anchor_layers": 2, **_FREE, "k": 0}),
)
_KL = {"content_weight": 0.0, "kl_weight": 1.0}
_TRAINED = (
    Way("auto, trained: linear, KL", "trained", of="auto", trained={"form": "linear", "max_steps": 150, **_KL}),
    Way(
        "auto, trained: residual, KL",
        "trained",
        of="auto",
        trained={"form": "residual", "options": {"hidden": 128}, "max_steps": 80, **_KL},
    ),
    Way(
        "auto, trained: MLP, content",
        "trained",
        of="auto",
        trained={"form": "mlp", "options": {"hidden": 128}, "max_steps": 150},
    ),
)
TINY_DOWN = tuple(way for way in TINY_UP if "2" not in way.name.replace("2026", "") and "anchor auto" not in way.name)
# Training is shown on one pair.
TINY_UP += _TRAINED

BLOCK = (12, 6)
"""Of SmolLM2's thirty layers: the first that runs on a predicted stream, and how many do."""

EMBEDDED = 5
"""Of SmolLM2's layers: how many run from the embedding on."""

# The search is narrowed to what a CPU solves in minutes; nothing else would win here (docs/quality.md).
_NARROW = {"heads": "full", "joint": True}
_BLOCK = {"anchor_start": BLOCK[0], "anchor_layers": BLOCK[1], "max_cost": 0.36, **_NARROW}
_EMBEDDED = {"anchor_layers": EMBEDDED, "max_cost": 0.4, "k": 4, **_NARROW}


def _side(name: str, recipe: dict[str, Any], of: str | None = None) -> Way:
    return Way(name, "ingredient", recipe, of=of, is_main=False)


SMOLLM2 = (
    Way("heo2026", "published", {"preset": "heo2026"}),
    Way("cachebridge2026", "published", {"preset": "cachebridge2026"}, sums="weighted"),
    Way("auto", "cache alone", {"max_cost": 0.4, "order": "ranked"}),
    _side("… first token mapped, too", {"first_token": {}}, of="auto"),
    _side("… first 4 exact", {"exact_prefix": 4}, of="auto"),
    _side("auto, head-local", {"k": "all", "heads": "local", "joint": False}),
    _side("heo2026, all layers", {"preset": "heo2026", "k": "all"}),
    Way("auto, 5 anchor layers", "anchored", _EMBEDDED),
    Way("anchor alone, 5 layers", "control", {"anchor_layers": EMBEDDED, "k": 0}),
    Way("auto, predicted anchor", "anchored", _BLOCK, sums="anchored"),
)


_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "hidden_size": 5120, "vocab_size": 151936}


def large_pair() -> tuple[Qwen3Config, Qwen3Config]:
    """The shapes of Qwen3-14B and Qwen3-32B, of which no weights are needed."""
    return (
        Qwen3Config(**_QWEN3, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17408),
        Qwen3Config(**_QWEN3, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600),
    )


def costs(config: KVMapperConfig, tokens: int) -> dict[str, float]:
    """
    Floating-point operations of a conversion as shares of the target's prefill.

    Args:
        config (`KVMapperConfig`): of the mapper.
        tokens (`int`): length of the context, here and there.

    Returns:
        `dict[str, float]`: `"here"`; and from Qwen3-14B to Qwen3-32B with the same *number* of anchor layers and (as a
        mean over maps, rounded up) source layers read, `"large_same_number"`, and with the same *shares* of both
        models' layers, rounded up, `"large_same_share"`.
    """
    large = large_pair()
    read = [len(one.layers) for layer in config.supports() for one in (layer or {}).values() if one.layers]
    number = ceil(fmean(read)) if read else None
    return {
        "here": conversion_flops(config, tokens).share_of_prefill,
        "large_same_number": recipe_flops(
            config, *large, tokens, k=number, anchor_layers=config.anchor_layers
        ).share_of_prefill,
        "large_same_share": recipe_flops(config, *large, tokens).share_of_prefill,
    }
