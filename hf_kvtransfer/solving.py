"""From statistics and a recipe to solved maps: as published, or chosen map by map on held-out data."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.utils import logging

from .calibration import CalibrationStatistics, layer_scores, r2, select_layers, solve_ridge
from .calibration.probes import greedy_entry_layers, greedy_layers
from .calibration.ridge import RidgeSolution, solve_entry
from .calibration.selection import (
    K_GRID,
    LAMBDA_GRID,
    AttentionScorer,
    Candidate,
    Key,
    Space,
    affordable,
    candidates,
    choose,
    refined,
    supports_of,
    total_error,
)
from .config import KVMapperConfig
from .costs import LayerCost, conversion_cost, layer_costs
from .errors import CalibrationError
from .features import KINDS, Support, depth_below, native_layers
from .recipes import CONTEXT_LENGTH, MAX_COST, Recipe
from .rope import RotaryCodec


logger = logging.get_logger(__name__)

# arXiv 2608.03893 chooses k per pair among these and "all layers".
K_CANDIDATES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
# Numbers of source layers among which the prediction of the stream that enters an anchor chooses. The stream is needed
# for every token, and all that the target makes of it inherits its error.
_ENTRY_KS = (1, 2, 4, 8)
_MOST_ENTRY_LAYERS = 12
_ENTRY_TIE = 0.02
_LARGEST_SHARE = 4


def mean(figures: list[float]) -> float:
    """Of one figure per layer."""
    return sum(figures) / len(figures)


@dataclass(frozen=True)
class Entry:
    """The prediction of what enters the anchor."""

    support: Support
    weight: torch.Tensor
    bias: torch.Tensor
    r2: float


@dataclass(frozen=True)
class Solved:
    solution: RidgeSolution
    ridge_lambda: float | None
    anchor: tuple[int, int] | None = None
    entry: Entry | None = None
    k_candidates: dict[str, float] = field(default_factory=dict)
    first_token: dict[Key, torch.Tensor] = field(default_factory=dict)
    selection: dict[str, Any] = field(default_factory=dict)


def _native_layers(anchor: tuple[int, int] | None, depth: int) -> range:
    start, layers = (0, None) if anchor is None else anchor
    return native_layers(start, layers, depth)


def _depth_read(anchor: tuple[int, int] | None, depth: int) -> int | None:
    return None if anchor is None or sum(anchor) >= depth else sum(anchor)


def _solved_entry(statistics: CalibrationStatistics, start: int) -> Entry | None:
    """Of as few source layers as predict the stream that enters layer `start` as well as more of them would."""
    if not start:
        return None
    layers, joint = statistics.source.num_layers, statistics.layout.joint
    ks = [*(k for k in _ENTRY_KS if k < layers), min(layers, _MOST_ENTRY_LAYERS)]
    order = greedy_entry_layers(statistics, start, ks[-1], joint=joint)
    tried = []
    for k in ks:
        support = Support(tuple(sorted(order[:k])), joint=joint)
        tried.append(Entry(support, *solve_entry(statistics, start, support)))
    best = max(entry.r2 for entry in tried)
    return next(entry for entry in tried if 1 - entry.r2 <= (1 - best) * (1 + _ENTRY_TIE))


def solve_published(
    statistics: CalibrationStatistics, chosen: Recipe, config: KVMapperConfig, entry: Entry | None = None
) -> Solved:
    """One support of the same shape for all layers; a k that is left open is chosen by held-out R²."""
    ridge_lambda = 0.01 if chosen.ridge_lambda is None else chosen.ridge_lambda
    scores, layers = layer_scores(statistics), statistics.source.num_layers
    depth = statistics.target.num_layers
    anchor = next(iter(chosen.anchors(depth)), None)
    native, read_at = _native_layers(anchor, depth), _depth_read(anchor, depth)

    ks = [*(k for k in K_CANDIDATES if k < layers), layers] if chosen.k == "auto" else [chosen.k]
    most = max((k for k in ks if k != "all"), default=0)
    order = _greedy_order(statistics, chosen, most, ridge_lambda, native, read_at) if chosen.order == "greedy" else {}

    def support(index: int, kind: str, ranked: list[int], k: Any) -> Support:
        read = sorted(order[index, kind][:k]) if order and k not in (0, "all") else ranked
        anchored = depth_below(read_at, index) is not None
        return Support(tuple(read), chosen.heads or "full", bool(chosen.joint), chosen.window, anchored)

    def solve(k: Any, weighted: bool) -> RidgeSolution:
        supports = [
            {kind: support(index, kind, ranked, k) for kind in KINDS} if index not in native else None
            for index, ranked in enumerate(select_layers(scores, k) if k else [[]] * depth)
        ]
        return solve_ridge(
            statistics,
            supports,
            ridge_lambda,
            torch.float32,
            anchor_depth=read_at,
            weighted=weighted,
        )

    entry = entry or _solved_entry(statistics, anchor[0] if anchor is not None else 0)
    if chosen.k != "auto":
        return Solved(solve(chosen.k, chosen.weighted), ridge_lambda, anchor, entry)
    tried: dict[str, float] = {}

    def scored(k: int) -> RidgeSolution:
        solution = solve(k, False)
        figures = r2(statistics, solution, "heldout")
        tried[str(k)] = mean([*figures["keys_per_layer"], *figures["values_per_layer"]])
        return solution

    best, solution = ks[0], scored(ks[0])
    for k in ks[1:]:
        other = scored(k)
        if tried[str(k)] > tried[str(best)]:
            best, solution = k, other
    logger.info(f"k = {best} has the highest held-out R² ({tried[str(best)]:.3f}) among {tried}")
    if chosen.weighted:
        solution = solve(best, True)
    return Solved(solution, ridge_lambda, anchor, entry, k_candidates=tried)


def _greedy_order(
    statistics: CalibrationStatistics,
    chosen: Recipe,
    k: int,
    ridge_lambda: float,
    native: range,
    read_at: int | None,
) -> dict[tuple[int, str], list[int]]:
    """The first k source layers of every map, in the order of what each adds."""
    return {
        (layer, kind): greedy_layers(
            statistics,
            layer,
            kind,
            k,
            joint=bool(chosen.joint),
            anchor_depth=depth_below(read_at, layer),
            ridge_lambda=ridge_lambda,
        )
        for layer in range(statistics.target.num_layers)
        if layer not in native
        for kind in KINDS
    }


def solve_selected(
    statistics: CalibrationStatistics, chosen: Recipe, config: KVMapperConfig, given: Entry | None = None
) -> Solved:
    """Every map its own support and λ, chosen by held-out attention-output error; the anchor by the sum of them."""
    layers, depth = statistics.source.num_layers, statistics.target.num_layers
    codec = RotaryCodec.from_config(config.model_config("target"))
    scorer = AttentionScorer(statistics, codec, chosen.tokens_before)
    costs = layer_costs(config.model_config("target"))
    max_cost = MAX_COST if chosen.max_cost is None and chosen.chooses_anchor else chosen.max_cost
    ks = {"auto": (*(k for k in K_GRID if k < layers), layers), "all": (layers,)}.get(chosen.k, (chosen.k,))
    compared: list[dict[str, Any]] = []
    best: tuple[float, Any, Any, dict[Key, Candidate], dict[Key, list[Candidate]]] | None = None
    tried: list[tuple[int, int] | None] = [*chosen.anchors(depth)] or [None]
    for anchor in tried:
        native = _native_layers(anchor, depth)
        entry = given or _solved_entry(statistics, anchor[0] if anchor is not None else 0)
        space = Space(
            ks,
            LAMBDA_GRID if chosen.ridge_lambda is None else (chosen.ridge_lambda,),
            ("full", "local") if chosen.heads is None else (chosen.heads,),
            ((False, True) if statistics.layout.joint else (False,)) if chosen.joint is None else (chosen.joint,),
            tuple(range(chosen.window + 1)),
            ("ranked", "greedy") if chosen.order is None else (chosen.order,),
            native,
            _depth_read(anchor, depth),
        )
        fixed = _Fixed.of(costs, chosen, anchor, entry)
        budget = None if max_cost is None else fixed.budget(max_cost)
        if budget is not None and budget < 0 and chosen.chooses_anchor:
            continue
        if budget is not None:
            # No map may take more than a few times its share, or most of the time would go to maps that can't be had.
            mapped = 2 * (depth - len(native))
            space = replace(space, largest=_LARGEST_SHARE * budget // max(mapped, 1))
        found = candidates(statistics, scorer, space)
        if chosen.chooses_anchor and not affordable(found, budget):
            continue
        picked = refined(statistics, scorer, space, found, choose(found, budget))
        # A predicted stream leaves its own error in everything that the target makes of it.
        error = total_error(picked) + (0 if entry is None else (1 - entry.r2) * 2 * len(native))
        cost = fixed.share(sum(way.multiplications for way in picked.values()))
        compared.append(
            {
                "anchor_start": None if anchor is None else anchor[0],
                "anchor_layers": None if anchor is None else anchor[1],
                "error": round(error, 6),
                "cost": round(cost, 4),
            }
        )
        if best is None or error < best[0]:
            best = error, anchor, entry, picked, found
    if best is None:
        raise CalibrationError(
            f"No anchor fits into {max_cost:.0%} of the prefill beside the exact prefix and suffix; expected room for "
            "one. Allow a higher `max_cost`, or leave `anchor_layers` out."
        )
    _, anchor, entry, picked, found = best
    if chosen.chooses_anchor and anchor is not None and not anchor[1]:
        logger.warning(
            f"Of the anchors that were tried the embedding alone is chosen: no layer of the target itself is worth its "
            f"cost within {max_cost:.0%} of a prefill by attention-output error, which says little of look-ups into "
            "the context. Ask for one with `anchor_layers=1`, allow a higher `max_cost`, and measure look-ups."
        )
    supports, lambdas = supports_of(picked, depth)
    read_at = _depth_read(anchor, depth)
    solution = solve_ridge(statistics, supports, lambdas, torch.float32, anchor_depth=read_at)
    selection = {
        "criterion": "held-out attention-output error",
        "max_cost": max_cost,
        "anchors": compared,
        "chosen": [{"layer": key[0], "kind": key[1], **way.to_dict()} for key, way in picked.items()],
        "rejected": [
            {"layer": key[0], "kind": key[1], **way.to_dict()}
            for key, ways in found.items()
            for way in ways
            if way != picked[key]
        ],
    }
    one = set(lambdas.values())
    constants = {
        (layer, kind): scorer.first_token(
            (layer, kind),
            way.support,
            solution.weights(kind)[layer],
            solution.biases(kind)[layer],
            depth_below(read_at, layer),
        )
        for (layer, kind), way in picked.items()
    }
    return Solved(
        solution,
        one.pop() if len(one) == 1 else None,
        anchor,
        entry,
        selection=selection,
        first_token={key: constant for key, constant in constants.items() if constant is not None},
    )


@dataclass(frozen=True)
class _Fixed:
    """What a conversion costs apart from its maps, at the context length at which costs are counted."""

    flops: int
    prefill: int
    mapped_tokens: int

    @classmethod
    def of(
        cls, costs: tuple[LayerCost, ...], chosen: Recipe, anchor: tuple[int, int] | None, entry: Entry | None
    ) -> "_Fixed":
        start, layers = (0, None) if anchor is None else anchor
        cost = conversion_cost(
            costs,
            (),
            CONTEXT_LENGTH,
            anchor_layers=layers,
            anchor_start=start,
            exact_prefix=chosen.tokens_before,
            exact_suffix=chosen.exact_suffix,
        )
        mapped = max(CONTEXT_LENGTH - chosen.tokens_before - chosen.exact_suffix, 0)
        flops = cost.total + (0 if entry is None else 2 * entry.weight.numel() * mapped)
        return cls(flops, cost.prefill, mapped)

    def budget(self, max_cost: float) -> int:
        """Multiplications per token that are left to the maps."""
        return int((max_cost * self.prefill - self.flops) / (2 * max(self.mapped_tokens, 1)))

    def share(self, multiplications: int) -> float:
        """Of the prefill, with so many multiplications of the maps per token."""
        return (self.flops + 2 * multiplications * self.mapped_tokens) / self.prefill
