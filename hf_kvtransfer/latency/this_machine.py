"""How long prefill and conversion would take on this machine: a few layers of the models are run, with random weights,
and what they take is scaled to the whole."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..config import KVMapperConfig
from ..costs import conversion_flops, layer_costs
from ..evaluation import prefill
from ..geometry import ModelGeometry
from ..mapper import KVMapper
from ..modules import text_config
from .measure import convert_arguments
from .random_pair import pair_config, random_model, shallow, with_random_weights
from .rates import matmul_rate
from .timing import interleaved, now


# From their times overhead, work per token and work per pair of tokens are told apart.
_LENGTHS = (64, 512, 2048)
_TRIALS = 3
# So much of a pass is affordable; longer contexts are left out and extrapolated to.
_MOST_SECONDS = 4.0
# So many layers are run: one, and a few more, or fewer of them if their weights are too large.
_FEW, _MORE, _FEWEST_MORE = 1, 6, 3
_MOST_BYTES = 2**30


@dataclass(frozen=True)
class _Part:
    """Something that is timed with few and with more layers, and what it counts for these and for the whole."""

    calls: tuple[Callable[[int], Any], Callable[[int], Any]]
    flops: tuple[Callable[[int], int], Callable[[int], int], Callable[[int], int]]


class ThisMachine:
    """
    Times of a pair on this machine, by tokens of context, predicted from one and from up to six layers of it.

    Args:
        source (`PreTrainedConfig`): of the source.
        target (`PreTrainedConfig`): of the target.
        fields (`dict`): the recipe, from [`~hf_kvtransfer.planning.uniform_support`].
        dtype (`torch.dtype`): of models and mapper.
        device (`torch.device`): where they run.
        batch_size (`int`, *optional*, defaults to 1): contexts at a time.
    """

    def __init__(
        self,
        source: PreTrainedConfig,
        target: PreTrainedConfig,
        fields: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int = 1,
    ) -> None:
        self._dtype, self._device, self._batch = dtype, device, batch_size
        self._most = min(
            getattr(text_config(config), "max_position_embeddings", None) or _LENGTHS[-1] for config in (source, target)
        )
        weights = max(layer.weights for config in (source, target) for layer in layer_costs(config)) * dtype.itemsize
        self._more = min(max(_MOST_BYTES // max(weights, 1), _FEWEST_MORE), _MORE)
        parts = {
            "source_prefill": self._prefill(source),
            "target_prefill": self._prefill(target),
            "conversion": self._conversion(source, target, fields),
        }
        affordable = _MOST_SECONDS * matmul_rate(512, 1024, 1024, device, dtype)
        totals: dict[str, dict[int, float]] = {name: {} for name in parts}
        for tokens in _LENGTHS:
            needed = batch_size * max(part.flops[1](tokens) for part in parts.values())
            if tokens == _LENGTHS[0] or (tokens <= self._most and needed <= affordable):
                for name, seconds in self._totals(parts, min(tokens, self._most)).items():
                    totals[name][min(tokens, self._most)] = seconds
        self._growth = {name: growth(times) for name, times in totals.items()}

    def source_prefill(self, tokens: int) -> float:
        """Seconds of the source's prefill."""
        return self._growth["source_prefill"](tokens)

    def target_prefill(self, tokens: int) -> float:
        """Seconds of the target's prefill, without its LM head."""
        return self._growth["target_prefill"](tokens)

    def conversion(self, tokens: int) -> float:
        """Seconds of a conversion, the target's own layers included."""
        return self._growth["conversion"](tokens)

    def _totals(self, parts: Mapping[str, _Part], tokens: int) -> dict[str, float]:
        """
        The times of the whole at one length. All parts take turns, so that each finds the processor's caches as full of
        something else as it would in use.
        """

        def timed(name: str, call: Callable[[int], Any]) -> dict[str, float]:
            start = now(self._device)
            call(tokens)
            return {name: now(self._device) - start}

        calls = {f"{name} {depth}": part.calls[depth] for depth in (0, 1) for name, part in parts.items()}
        times = interleaved({name: partial(timed, name, call) for name, call in calls.items()}, _TRIALS)
        totals = {}
        for name, part in parts.items():
            less, more = median(times[f"{name} 0"]), median(times[f"{name} 1"])
            few, some, whole = (count(tokens) for count in part.flops)
            totals[name] = less + (max(more - less, 0) * (whole - few) / (some - few) if some > few else 0)
        return totals

    def _prefill(self, config: PreTrainedConfig) -> _Part:
        costs = layer_costs(config)

        def flops(layers: int) -> Callable[[int], int]:
            return lambda tokens: sum(layer.flops(0, tokens) for layer in costs[:layers])

        def run(layers: int) -> Callable[[int], Any]:
            model = random_model(small(config, layers, self._vocabulary), self._dtype, self._device)
            return lambda tokens: prefill(model, self._ids(tokens))

        few, more = (min(number, len(costs)) for number in (_FEW, self._more))
        return _Part((run(few), run(more)), (flops(few), flops(more), flops(len(costs))))

    def _conversion(self, source: PreTrainedConfig, target: PreTrainedConfig, fields: dict[str, Any]) -> _Part:
        whole, depth = pair_config(source, target, fields), ModelGeometry.from_config(target).num_layers
        layers = ModelGeometry.from_config(source).layers
        # Random keys and values, as many as a context may have here; of those a call takes the first.
        shapes = [(self._batch, layer.kv_heads, self._vocabulary, layer.head_dim) for layer in layers]
        cache = [[torch.randn(shape, device=self._device).to(self._dtype) for _ in range(2)] for shape in shapes]

        def flops(config: KVMapperConfig) -> Callable[[int], int]:
            return lambda tokens: conversion_flops(config, tokens).total

        def run(config: KVMapperConfig, few: PreTrainedConfig) -> Callable[[int], Any]:
            mapper = with_random_weights(KVMapper(config).to(device=self._device, dtype=self._dtype))
            model = random_model(few, self._dtype, self._device) if config.needs_target else None

            def convert(tokens: int) -> Any:
                given = convert_arguments(config, model, self._ids(tokens))
                return mapper.convert([[states[:, :, :tokens] for states in pair] for pair in cache], **given)

            return convert

        recipes = [some_layers(whole, depth, number) for number in (_FEW, self._more)]
        targets = [small(target, len(recipe["support"]), self._vocabulary) for recipe in recipes]
        configs = [pair_config(source, few, recipe) for few, recipe in zip(targets, recipes, strict=True)]
        runs = [run(config, few) for config, few in zip(configs, targets, strict=True)]
        return _Part((runs[0], runs[1]), (flops(configs[0]), flops(configs[1]), flops(whole)))

    @property
    def _vocabulary(self) -> int:
        return max(min(_LENGTHS[-1], self._most), 2)

    def _ids(self, tokens: int) -> torch.Tensor:
        # All different: the cache is random, and equal tokens would have to have equal keys.
        return torch.arange(tokens, device=self._device).expand(self._batch, -1)


def small(config: PreTrainedConfig, layers: int, tokens: int) -> PreTrainedConfig:
    """A configuration of few layers and of a vocabulary just large enough that a context has no token twice."""
    few = shallow(config, layers)
    few.vocab_size = max(tokens, 2)
    for name, value in list(vars(few).items()):
        if name.endswith("_token_id") and isinstance(value, int) and value >= few.vocab_size:
            setattr(few, name, 0)
    return few


def some_layers(config: KVMapperConfig, depth: int, number: int) -> dict[str, Any]:
    """
    A recipe for a target of fewer layers: those that the anchor makes, and so many on either side that are mapped.

    Args:
        config ([`KVMapperConfig`]): of the whole mapper.
        depth (`int`): number of target layers.
        number (`int`): of mapped layers before the anchor, if there are any, and after it.
    """
    native = config.native_layers(depth)
    before = config.support[: native.start][-number:]
    after = config.support[native.stop if config.anchor_layers is not None else 0 :][:number]
    support = [*before, *[None] * len(native), *after]
    return {
        "support": support,
        "anchor_layers": config.anchor_layers,
        "anchor_start": len(before) if config.anchor_start else 0,
        "entry": config.entry,
        "exact_prefix": config.exact_prefix,
        "k": config.k,
    }


def growth(seconds: dict[int, float]) -> Callable[[int], float]:
    """
    A time by the number of tokens: a constant, a part per token and a part per pair of tokens, none of them negative,
    that come nearest to measured times, each relative to itself.

    Args:
        seconds (`dict[int, float]`): measured, by number of tokens.
    """
    tokens = torch.tensor(list(seconds), dtype=torch.float64)
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    powers = torch.stack([tokens**0, tokens, tokens**2], dim=1) / times[:, None]
    best: tuple[float, list[float]] | None = None
    for number in range(1, min(len(seconds), 3) + 1):
        for chosen in itertools.combinations(range(3), number):
            part = powers[:, list(chosen)]
            solution = torch.linalg.lstsq(part, torch.ones(len(times), 1, dtype=torch.float64)).solution
            error = float((part @ solution - 1).norm())
            # Of two that fit alike, the one with fewer parts.
            if bool((solution >= 0).all()) and (best is None or error < best[0] - 1e-9):
                parts = [0.0, 0.0, 0.0]
                for power, value in zip(chosen, solution[:, 0].tolist(), strict=True):
                    parts[power] = value
                best = error, parts
    constant, linear, quadratic = (0.0, 0.0, 0.0) if best is None else best[1]
    return lambda n: constant + linear * n + quadratic * n * n
