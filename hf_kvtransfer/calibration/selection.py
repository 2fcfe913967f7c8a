"""Choosing what each map reads, on held-out data, by what the target's own attention would have read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from ..errors import CalibrationError
from ..features import KINDS, LayerSupport, Support, depth_below, gather, stream_width
from .attention import attention_output, attention_probabilities
from .probes import greedy_layers, layer_scores, layers_by_gain, select_layers
from .ridge import solve_ridge
from .statistics import CalibrationStatistics


if TYPE_CHECKING:
    from ..rope import RotaryCodec


K_GRID = (1, 2, 4, 8, 16)
LAMBDA_GRID = (0.01, 100.0)
# A cheaper map is taken when it is worse by less than this share of its error: below it lies the noise of the sample.
_TIE = 0.005
# Multiplications of greedy forward selection for one map; beyond it, it is done only where it is asked for.
_QUICK = 5e10


@dataclass(frozen=True)
class Candidate:
    """
    One way to make the keys or the values of one target layer.

    Args:
        support (`Support`): what it reads.
        ridge_lambda (`float`): λ.
        order (`str`): how the layers were found: `"ranked"`, `"greedy"` or `"all"`.
        multiplications (`int`): per token.
        error (`float`):
            `Σ ‖ô − o‖² / Σ ‖o‖²` over held-out queries, where `o` is the output of the target's attention and `ô` the
            same with this map's keys (or values) in place of the native ones.
    """

    support: Support
    ridge_lambda: float
    order: str
    multiplications: int
    error: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            **self.support.to_dict(),
            "ridge_lambda": self.ridge_lambda,
            "order": self.order,
            "multiplications": self.multiplications,
            "error": round(self.error, 6),
        }


Key = tuple[int, str]
"""A target layer and a kind."""


class AttentionScorer:
    """
    Scores maps by the attention output of held-out queries.

    Args:
        statistics (`CalibrationStatistics`): with a sample.
        codec (`RotaryCodec`): of the target.
        exact_prefix (`int`, *optional*, defaults to 0):
            How many of the first tokens the target reads itself, whatever a map makes of them. Attention falls back on
            them, so that an error there would count more than all others.

    Raises:
        CalibrationError: If the statistics hold no sample.
    """

    def __init__(self, statistics: CalibrationStatistics, codec: RotaryCodec, exact_prefix: int = 0) -> None:
        if statistics.sample is None:
            raise CalibrationError(
                "These statistics hold no sample of held-out sequences, on which recipes are compared; expected some. "
                'Collect them with the preset "auto" and a `heldout_fraction` above zero, on more than one sequence.'
            )
        self._statistics, self._sample, self._codec = statistics, statistics.sample, codec
        self._exact_prefix = exact_prefix
        # Where maps are solved; the sample itself may be larger than what is left there.
        self._device = statistics.splits["fit"][statistics.layout.names[0]].mean_x.device
        positions = torch.arange(self._sample.tokens, device=self._device)[None]
        self._tables = codec.tables(positions, self._device)
        self._native: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def error(
        self, key: Key, support: Support, weight: torch.Tensor, bias: torch.Tensor, anchor_depth: int | None
    ) -> float:
        """
        The relative error of the attention output with one map's keys or values.

        Args:
            key (`tuple[int, str]`): target layer and kind.
            support (`Support`): what the map reads.
            weight (`torch.Tensor`): as in [`RidgeSolution`].
            bias (`torch.Tensor` of shape `[target width]`): likewise.
            anchor_depth (`int`, *optional*): which anchor it reads.
        """
        # Recipes differ by less than the rounding of what the caller may compute in.
        with torch.autocast(self._device.type, enabled=False):
            return self._error(key, support, weight, bias, anchor_depth)

    def _error(
        self, key: Key, support: Support, weight: torch.Tensor, bias: torch.Tensor, anchor_depth: int | None
    ) -> float:
        layer, kind = key
        content = self.predict(key, support, weight, bias, anchor_depth)
        if layer not in self._native:
            keys, values = (self._heads(part, layer) for part in self._native_content(layer))
            keys = self._codec.apply(keys, self._tables, layer)
            probabilities = attention_probabilities(self._sample.records[layer], keys)
            # Small beside the sums: some queries of a few sequences.
            self._native[layer] = probabilities, values, attention_output(probabilities, values)
        probabilities, values, output = self._native[layer]
        states, exact = self._heads(content, layer), self._native_content(layer)[KINDS.index(kind)]
        states[:, :, : self._exact_prefix] = self._heads(exact, layer)[:, :, : self._exact_prefix]
        if (others := self._first_by_others(key, content)) is not None:
            states[:, :, 0] = others.view(states[:, :, 0].shape)
        if kind == "keys":
            rotated = self._codec.apply(states, self._tables, layer)
            changed = attention_output(attention_probabilities(self._sample.records[layer], rotated), values)
        else:
            changed = attention_output(probabilities, states)
        return float((changed - output).double().square().sum() / output.double().square().sum())

    def first_token(
        self, key: Key, support: Support, weight: torch.Tensor, bias: torch.Tensor, anchor_depth: int | None
    ) -> torch.Tensor | None:
        """
        The mean content of the first token of a sequence, `[target width]`, if that predicts it better than the map.

        Where attention has nothing to read it falls back on the first token, which models make much the same whatever
        the text, and far from everything that a map is fitted on.

        Args:
            key, support, weight, bias, anchor_depth: as in [`~AttentionScorer.error`].
        """
        if not self._maps_first:
            return None
        content = self.predict(key, support, weight, bias, anchor_depth).to(self._device)
        return None if self._first_by_others(key, content) is None else self._first(key).mean(0)

    @property
    def _maps_first(self) -> bool:
        """Whether maps make the first token, and there are other sequences to tell what it is elsewhere."""
        return not self._exact_prefix and self._sample.sequences > 1

    def _first(self, key: Key) -> torch.Tensor:
        content = self._native_content(key[0])[KINDS.index(key[1])]
        return content.view(self._sample.sequences, self._sample.tokens, -1)[:, 0].float().to(self._device)

    def _first_by_others(self, key: Key, content: torch.Tensor) -> torch.Tensor | None:
        """
        The first token of each sequence as the mean over the others has it, `[sequences, target width]`, if that is
        nearer than what a map has made of all tokens.
        """
        if not self._maps_first:
            return None
        sequences, first = self._sample.sequences, self._first(key)
        others = (first.sum(0) - first) / (sequences - 1)
        mapped = content.view(sequences, self._sample.tokens, -1)[:, 0].to(first)
        return others if (others - first).square().sum() < (mapped - first).square().sum() else None

    def predict(
        self, key: Key, support: Support, weight: torch.Tensor, bias: torch.Tensor, anchor_depth: int | None
    ) -> torch.Tensor:
        """The content that a map makes of the sample, `[sequences · tokens, target width]`."""
        layer, kind = key
        source, target = self._statistics.source, self._statistics.target
        read = self._sample.source
        tokens = [(read.keys, read.values), *read.previous]

        def content(lag: int, kind_read: str, index: int) -> torch.Tensor:
            start = source.offsets[index]
            return tokens[lag][KINDS.index(kind_read)][:, start : source.offsets[index + 1]]

        anchor = None
        if support.anchor:
            anchor = self._sample.target.hidden[self._statistics.layout.anchors.index(anchor_depth or 0)]
        pieces = gather(support, kind, source, target.layers[layer], content, anchor)
        weights = weight.float() if support.heads == "local" else weight.float()[None]
        outputs = [torch.cat(group, -1).to(weight.device) @ one.T for group, one in zip(pieces, weights, strict=True)]
        return torch.cat(outputs, -1) + bias.float()

    def _native_content(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        offsets, content = self._statistics.target.offsets, self._sample.target
        columns = slice(offsets[layer], offsets[layer + 1])
        return content.keys[:, columns], content.values[:, columns]

    def _heads(self, content: torch.Tensor, layer: int) -> torch.Tensor:
        geometry = self._statistics.target.layers[layer]
        shape = (self._sample.sequences, self._sample.tokens, geometry.kv_heads, geometry.head_dim)
        return content.to(self._device).reshape(shape).transpose(1, 2)


@dataclass(frozen=True)
class Space:
    """
    What is tried.

    Args:
        ks (`tuple[int, ...]`): numbers of source layers.
        lambdas (`tuple[float, ...]`): λ, the first for all comparisons of supports.
        heads (`tuple[str, ...]`): `"full"`, `"local"`.
        joint (`tuple[bool, ...]`): own kind, or both.
        window (`tuple[int, ...]`): previous tokens.
        orders (`tuple[str, ...]`):
            `"ranked"`, by probes of one layer or, above an anchor, by what a layer adds to it; `"greedy"`, which is
            left out beside the other where it takes long.
        native (`range`, *optional*): target layers that need no maps, as the target runs them itself.
        anchor_depth (`int`, *optional*): where the residual stream is that the maps of later layers read.
        largest (`int`, *optional*): most multiplications per token of one map; no limit by default.
    """

    ks: tuple[int, ...]
    lambdas: tuple[float, ...] = LAMBDA_GRID
    heads: tuple[Any, ...] = ("full", "local")
    joint: tuple[bool, ...] = (False, True)
    window: tuple[int, ...] = (0,)
    orders: tuple[str, ...] = ("ranked", "greedy")
    native: range = range(0)
    anchor_depth: int | None = None
    largest: int | None = None

    def depth(self, layer: int) -> int | None:
        """The depth of the residual stream that this target layer can read, if there is one below it."""
        return depth_below(self.anchor_depth, layer)


def candidates(
    statistics: CalibrationStatistics, scorer: AttentionScorer, space: Space, progress: bool = True
) -> dict[Key, list[Candidate]]:
    """
    Every way of the space for every target layer and kind that needs maps, with its held-out error.

    Supports are compared at the first λ; [`refined`] tries the others on what was chosen.

    Args:
        statistics (`CalibrationStatistics`): their `"fit"` split is solved.
        scorer ([`AttentionScorer`]): what compares them.
        space ([`Space`]): what is tried.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar, if standard error is a terminal.
    """
    layers = [layer for layer in range(statistics.target.num_layers) if layer not in space.native]
    keys = [(layer, kind) for layer in layers for kind in KINDS]
    found: dict[Key, list[Candidate]] = {key: [] for key in keys}
    ways: dict[Key, dict[Support, str]] = {}
    ranked = layer_scores(statistics) if "ranked" in space.orders else None
    bar = partial(tqdm, unit="map", disable=None if progress else True)
    for key in bar(keys, desc="Choosing layers"):
        ways[key] = {}
        for support, order in _supports(statistics, space, key, ranked):
            ways[key].setdefault(support, order)
    # What many target layers read in common is solved for all of them at once, from one factorisation.
    shared = Counter((support, key[1]) for key, ways_of_key in ways.items() for support in ways_of_key)
    for support, kind in bar([way for way, count in shared.items() if count > 1], desc="Comparing common supports"):
        members = [key for key in keys if key[1] == kind and support in ways[key]]
        for key, candidate in _tried(statistics, scorer, space, members, support, space.lambdas[0], ways):
            found[key].append(candidate)
            del ways[key][support]
    for key in bar(keys, desc="Comparing recipes"):
        for support in list(ways[key]):
            found[key] += [way for _, way in _tried(statistics, scorer, space, [key], support, space.lambdas[0], ways)]
    return found


def refined(
    statistics: CalibrationStatistics,
    scorer: AttentionScorer,
    space: Space,
    found: dict[Key, list[Candidate]],
    chosen: dict[Key, Candidate],
) -> dict[Key, Candidate]:
    """
    The same supports, each with the best λ of the space.

    Args:
        statistics (`CalibrationStatistics`): their `"fit"` split is solved.
        scorer ([`AttentionScorer`]): what compares.
        space ([`Space`]): whose λ are tried.
        found (`dict`): to which what is tried is added.
        chosen (`dict`): from [`choose`].
    """
    members: dict[tuple[Support, str], list[Key]] = {}
    for key, way in chosen.items():
        members.setdefault((way.support, key[1]), []).append(key)
    best = dict(chosen)
    for (support, _), keys in tqdm(members.items(), desc="Choosing λ", unit="support", disable=None):
        orders = {key: {support: chosen[key].order} for key in keys}
        for value in space.lambdas[1:]:
            for key, way in _tried(statistics, scorer, space, keys, support, value, orders):
                found[key].append(way)
                best[key] = min(best[key], way, key=lambda way: way.error)
    return best


def _supports(
    statistics: CalibrationStatistics, space: Space, key: Key, ranked: torch.Tensor | None
) -> Iterable[tuple[Support, str]]:
    layer, kind = key
    layers = statistics.source.num_layers
    depth = space.depth(layer)
    anchored = depth is not None
    if anchored:
        yield Support((), anchor=True), "all"
    # Greedy choice looks at no more layers than the dearest map that is allowed can read.
    ks = [k for k in space.ks if 0 < k < layers and _fits(statistics, space, layer, k)]
    for joint in space.joint:
        orders: list[tuple[str, Callable[[int], Sequence[int]]]] = []
        if ranked is not None and depth is None:
            orders.append(("ranked", partial(_ranked, ranked, layer)))
        elif "ranked" in space.orders and depth is not None and ks:
            by_gain = layers_by_gain(statistics, layer, kind, joint=joint, anchor_depth=depth)
            orders.append(("ranked", partial(_first, by_gain)))
        if "greedy" in space.orders and ks and (space.orders == ("greedy",) or _is_quick(statistics, max(ks), joint)):
            greedy = greedy_layers(statistics, layer, kind, max(ks), joint=joint, anchor_depth=depth)
            orders.append(("greedy", partial(_first, greedy)))
        chosen = [(tuple(choose(k)), name) for name, choose in orders for k in ks]
        if any(k >= layers for k in space.ks):
            chosen.append((tuple(range(layers)), "all"))
        for (read, order), heads, window in product(chosen, space.heads, space.window):
            support = Support(read, heads, joint, window, anchored)
            if space.largest is None or _multiplications(statistics, support, layer) <= space.largest:
                yield support, order


def _fits(statistics: CalibrationStatistics, space: Space, layer: int, k: int) -> bool:
    """Whether any support of so many layers is cheap enough."""
    if space.largest is None:
        return True
    narrowest = [
        Support(tuple(range(k)), heads, joint, anchor=space.depth(layer) is not None)
        for heads, joint in product(space.heads, space.joint)
    ]
    return min(_multiplications(statistics, support, layer) for support in narrowest) <= space.largest


def _ranked(scores: torch.Tensor, layer: int, k: int) -> list[int]:
    return select_layers(scores, k)[layer]


def _first(order: list[int], k: int) -> list[int]:
    return sorted(order[:k])


def _is_quick(statistics: CalibrationStatistics, k: int, joint: bool) -> bool:
    """Whether greedy choice for one map takes no longer than a few solutions."""
    layers = statistics.source.layers
    width = max(layer.width for layer in layers) * (2 if joint else 1)
    return len(layers) * k**2 * width**3 <= _QUICK


def _tried(
    statistics: CalibrationStatistics,
    scorer: AttentionScorer,
    space: Space,
    keys: Sequence[Key],
    support: Support,
    ridge_lambda: float,
    orders: Mapping[Key, Mapping[Support, str]],
) -> Iterator[tuple[Key, Candidate]]:
    """One support and λ for some target layers of one kind."""
    by_depth: dict[int | None, list[Key]] = {}
    for key in keys:
        by_depth.setdefault(space.depth(key[0]), []).append(key)
    for depth, members in by_depth.items():
        kind = members[0][1]
        entries: list[Any] = [None] * statistics.target.num_layers
        for layer, _ in members:
            entries[layer] = support
        solution = solve_ridge(
            statistics, entries, ridge_lambda, torch.float32, anchor_depth=depth, kinds=(kind,), progress=False
        )
        for key in members:
            layer = key[0]
            weight, bias = solution.weights(kind)[layer], solution.biases(kind)[layer]
            error = scorer.error(key, support, weight, bias, depth)
            cost = _multiplications(statistics, support, layer)
            yield key, Candidate(support, ridge_lambda, orders[key][support], cost, error)


def _multiplications(statistics: CalibrationStatistics, support: Support, layer: int) -> int:
    target = statistics.target.layers[layer]
    return support.width(statistics.source, target, stream_width(statistics.target)) * target.width


def pareto(ways: Sequence[Candidate]) -> list[Candidate]:
    """Those that no cheaper or equally dear one matches, from the cheapest to the dearest."""
    front: list[Candidate] = []
    for way in sorted(ways, key=lambda way: (way.multiplications, way.error)):
        if not front or way.error < front[-1].error:
            front.append(way)
    return front


def affordable(found: dict[Key, list[Candidate]], budget: int | None) -> bool:
    """Whether a budget, in multiplications per token, allows one way per target layer and kind."""
    if not all(found.values()):
        return False
    return budget is None or sum(min(way.multiplications for way in ways) for ways in found.values()) <= budget


def choose(found: dict[Key, list[Candidate]], budget: int | None = None) -> dict[Key, Candidate]:
    """
    One way per target layer and kind, with the smallest summed error that the budget allows.

    Without a budget each is the best of its own, or a cheaper one that is as good to within the noise. With one, all
    start as cheap as they come, and the multiplications go, step by step, where they take most error away.

    Args:
        found (`dict`): from [`candidates`].
        budget (`int`, *optional*): multiplications per token of all maps together.

    Raises:
        CalibrationError: If not even the cheapest maps fit into the budget.
    """
    if not affordable(found, budget):
        raise CalibrationError(
            f"The cheapest maps take more than the {budget or 0:,} multiplications per token that are left for them; "
            "expected room for one map of each layer and kind. Allow a higher `max_cost`, or use fewer anchor layers "
            "or a shorter suffix."
        )
    fronts = {key: pareto(ways) for key, ways in found.items()}
    if budget is None:
        return {
            key: next(way for way in front if way.error <= front[-1].error * (1 + _TIE))
            for key, front in fronts.items()
        }
    chosen = {key: front[0] for key, front in fronts.items()}
    spent = sum(way.multiplications for way in chosen.values())
    while True:
        steps = []
        for key, front in fronts.items():
            now = chosen[key]
            for way in front[front.index(now) + 1 :]:
                more = way.multiplications - now.multiplications
                if spent + more <= budget:
                    steps.append(((now.error - way.error) / more, key, way))
        if not steps:
            return chosen
        _, key, way = max(steps, key=lambda step: step[0])
        spent += way.multiplications - chosen[key].multiplications
        chosen[key] = way


def total_error(chosen: dict[Key, Candidate]) -> float:
    """The summed error of what was chosen; layers that the target runs itself add none."""
    return sum(way.error for way in chosen.values())


def supports_of(chosen: dict[Key, Candidate], layers: int) -> tuple[list[LayerSupport | None], dict[Key, float]]:
    """What was chosen, as the support of each target layer and the λ of each map."""
    supports: list[LayerSupport | None] = [None] * layers
    for (layer, kind), way in chosen.items():
        supports[layer] = {**(supports[layer] or {}), kind: way.support}
    return supports, {key: way.ridge_lambda for key, way in chosen.items()}
