"""The published closed form, solved from statistics alone (Heo et al., arXiv 2608.03893)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tqdm.auto import tqdm

from ..errors import CalibrationError, SingularSystemError
from .moments import Moments
from .statistics import KINDS, CalibrationStatistics, layer_slices


@dataclass
class RidgeSolution:
    """
    Affine maps from the concatenated KV heads of a layer's support to all KV heads of that target layer.

    Attributes:
        support (`list[list[int]]`): Source layers read by each target layer, in the order of the features.
        ridge_lambda (`float`): The λ they were solved with.
        weight_keys (`list[torch.Tensor]`):
            Per target layer `[target width, features]`, the layout of `nn.Linear`: `ŷ = weight @ x + bias` for
            RoPE-free keys. `features` is the summed width of the support's layers.
        bias_keys (`list[torch.Tensor]`): Per target layer `[target width]`.
        weight_values (`list[torch.Tensor]`): As `weight_keys`, for values.
        bias_values (`list[torch.Tensor]`): As `bias_keys`, for values.
    """

    support: list[list[int]]
    ridge_lambda: float
    weight_keys: list[torch.Tensor]
    bias_keys: list[torch.Tensor]
    weight_values: list[torch.Tensor]
    bias_values: list[torch.Tensor]

    def weights(self, kind: str) -> list[torch.Tensor]:
        """`weight_keys` or `weight_values`."""
        return self.weight_keys if kind == "keys" else self.weight_values

    def biases(self, kind: str) -> list[torch.Tensor]:
        """`bias_keys` or `bias_values`."""
        return self.bias_keys if kind == "keys" else self.bias_values


def layer_scores(statistics: CalibrationStatistics, split: str = "fit") -> torch.Tensor:
    """
    How well each source layer alone predicts each target layer (arXiv 2608.03893, layer selection).

    For every (source layer, target layer, KV head) an OLS probe reads all KV heads of that one source layer. Its R² is
    pooled over the head's dimensions, `1 − Σ SSE / Σ SST`, and averaged over heads and over keys and values. A dead
    feature makes the probe's Gram matrix singular; the probe is then the one of least norm, from the eigenvectors
    whose eigenvalues stand out of the rounding error.

    Args:
        statistics (`CalibrationStatistics`): The probes are always fitted on their `"fit"` split.
        split (`str`, *optional*, defaults to `"fit"`):
            Where the probes are scored. `"fit"` is the published score; `"heldout"` is the honest one.

    Returns:
        `torch.Tensor` of shape `[target_layers, source_layers]`, float64 on the CPU.

    Raises:
        CalibrationError: If a split holds no tokens.
    """
    sources, targets = layer_slices(statistics.source), layer_slices(statistics.target)
    scores = torch.zeros(len(targets), len(sources), dtype=torch.float64)
    for kind in KINDS:
        fit, scored = statistics.moments("fit", kind), statistics.moments(split, kind)
        for s, columns in enumerate(tqdm(sources, desc=f"Scoring source layers ({kind})", disable=None)):
            weight = _ols(fit.sxx[columns, columns], fit.sxy[columns])
            # A probe's bias makes it exact at the mean it was fitted on; only elsewhere does a shift remain.
            shift = scored.mean_y - fit.mean_y - (scored.mean_x - fit.mean_x)[columns] @ weight
            gram, cross = scored.sxx[columns, columns].double(), scored.sxy[columns].double()
            sse = _sse(scored, slice(None), gram, cross, weight, shift).cpu()
            sst = scored.syy.cpu()
            for t, (rows, layer) in enumerate(zip(targets, statistics.target.layers, strict=True)):
                heads = _pooled_r2(sse[rows].view(layer.kv_heads, -1), sst[rows].view(layer.kv_heads, -1))
                scores[t, s] += heads.mean() / len(KINDS)
    return scores


def select_layers(scores: torch.Tensor, k: int | Literal["all"]) -> list[list[int]]:
    """
    The k best source layers of every target layer; keys, values and all heads share them.

    Args:
        scores (`torch.Tensor` of shape `[target_layers, source_layers]`): From [`layer_scores`].
        k (`int` or `"all"`): How many. Of layers that score alike the lower one is taken.

    Returns:
        `list[list[int]]`: Per target layer the chosen source layers, ascending.

    Raises:
        CalibrationError: If `k` isn't a number of layers the source has, or a score isn't a number.
    """
    available = scores.shape[1]
    count = available if k == "all" else k
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= available:
        raise CalibrationError(
            f'k is {k!r}, expected "all" or a whole number from 1 to {available}, the number of source layers.'
        )
    if not bool(torch.isfinite(scores).all()):
        raise CalibrationError("Some layer scores aren't finite: the statistics are damaged, collect them again.")
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    return [sorted(row) for row in order.tolist()]


def solve_ridge(
    statistics: CalibrationStatistics,
    support: Sequence[Sequence[int]],
    ridge_lambda: float = 0.01,
    dtype: torch.dtype = torch.float64,
) -> RidgeSolution:
    """
    Solve `W = (XᵀX + λI)⁻¹ XᵀY`, `b = ȳ − x̄W` with X and Y centred (arXiv 2608.03893, full-head mapping).

    λ is added to the unnormalised Gram matrix, a sum over tokens. One Cholesky factorisation in float64 serves all
    heads of all target layers that have the same support.

    Args:
        statistics (`CalibrationStatistics`): Their `"fit"` split is used.
        support (`Sequence[Sequence[int]]`): For each target layer the source layers it reads.
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`):
            What weights and biases are rounded to. The bias makes up for the rounding of the weights at the mean.

    Returns:
        `RidgeSolution`

    Raises:
        CalibrationError: If the support or λ is impossible, or the split holds no tokens.
        SingularSystemError: If a system isn't positive definite in float64.
    """
    if not ridge_lambda >= 0 or not math.isfinite(ridge_lambda):
        raise CalibrationError(f"ridge_lambda is {ridge_lambda}, expected a finite number of at least 0.")
    groups = _by_support(statistics, support)
    targets = layer_slices(statistics.target)
    maps: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with tqdm(total=len(targets) * len(KINDS), desc="Solving ridge", disable=None) as progress:
        for kind in KINDS:
            moments = statistics.moments("fit", kind)
            solved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for layers, members in groups.items():
                features = _columns(statistics, layers)
                gram = _block(moments.sxx, features, features)
                where = f"the {kind} of target layer {', '.join(map(str, members))}"
                factor = _cholesky(gram, ridge_lambda, where, moments.count)
                del gram
                for t in members:
                    weight = torch.cholesky_solve(_block(moments.sxy, features, [targets[t]]), factor).T
                    if not bool(torch.isfinite(weight).all()):
                        raise _singular(f"the {kind} of target layer {t}", len(factor), moments.count, ridge_lambda)
                    weight = weight.to(dtype).contiguous()
                    mean_x = torch.cat([moments.mean_x[part] for part in features])
                    solved[t] = weight, (moments.mean_y[targets[t]] - weight.double() @ mean_x).to(dtype)
                    progress.update()
            maps[kind] = [solved[t] for t in range(len(targets))]
    return RidgeSolution(
        support=[list(layers) for layers in support],
        ridge_lambda=ridge_lambda,
        weight_keys=[weight for weight, _ in maps["keys"]],
        bias_keys=[bias for _, bias in maps["keys"]],
        weight_values=[weight for weight, _ in maps["values"]],
        bias_values=[bias for _, bias in maps["values"]],
    )


def r2(statistics: CalibrationStatistics, solution: RidgeSolution, split: str = "heldout") -> dict[str, list]:
    """
    R² of a solution on a split, from moments alone; nothing is refitted, so off the fit split the bias is off too and
    `n (ȳ − W x̄ − b)²` counts as error.

    Args:
        statistics (`CalibrationStatistics`): Of the pair that the solution belongs to.
        solution (`RidgeSolution`): Any affine maps in that form.
        split (`str`, *optional*, defaults to `"heldout"`): `"fit"` or `"heldout"`.

    Returns:
        `dict[str, list]`: `"keys"` and `"values"` hold per target layer a list with the R² of each KV head, pooled
        over its dimensions; `"keys_per_layer"` and `"values_per_layer"` one R² per target layer, pooled over
        all of it.

    Raises:
        CalibrationError: If the split holds no tokens.
    """
    groups = _by_support(statistics, solution.support)
    targets = layer_slices(statistics.target)
    result: dict[str, list] = {}
    for kind in KINDS:
        moments = statistics.moments(split, kind)
        heads: dict[int, list[float]] = {}
        whole: dict[int, float] = {}
        for layers, members in groups.items():
            features = _columns(statistics, layers)
            gram = _block(moments.sxx, features, features)
            mean_x = torch.cat([moments.mean_x[part] for part in features])
            for t in members:
                weight = solution.weights(kind)[t].to(gram).T
                shift = moments.mean_y[targets[t]] - mean_x @ weight - solution.biases(kind)[t].to(gram)
                cross = _block(moments.sxy, features, [targets[t]])
                sse = _sse(moments, targets[t], gram, cross, weight, shift)
                sst, kv_heads = moments.syy[targets[t]], statistics.target.layers[t].kv_heads
                heads[t] = _pooled_r2(sse.view(kv_heads, -1), sst.view(kv_heads, -1)).tolist()
                whole[t] = float(_pooled_r2(sse.view(1, -1), sst.view(1, -1)))
        result[kind] = [heads[t] for t in range(len(targets))]
        result[f"{kind}_per_layer"] = [whole[t] for t in range(len(targets))]
    return result


def _by_support(
    statistics: CalibrationStatistics, support: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], list[int]]:
    """Target layers grouped by what they read, so that each Gram matrix is gathered and factored once."""
    sources, targets = len(statistics.source.layers), len(statistics.target.layers)
    if len(support) != targets:
        raise CalibrationError(f"The support has {len(support)} entries, expected one per target layer: {targets}.")
    groups: dict[tuple[int, ...], list[int]] = {}
    for t, layers in enumerate(support):
        if not layers or len(set(layers)) != len(layers) or not all(0 <= s < sources for s in layers):
            raise CalibrationError(
                f"The support of target layer {t} is {list(layers)}, expected different source layers from 0 to "
                f"{sources - 1}, at least one."
            )
        groups.setdefault(tuple(layers), []).append(t)
    return groups


def _columns(statistics: CalibrationStatistics, layers: Sequence[int]) -> list[slice]:
    slices = layer_slices(statistics.source)
    return [slices[s] for s in layers]


def _block(matrix: torch.Tensor, rows: list[slice], columns: list[slice]) -> torch.Tensor:
    """A copy in float64 of the given rows and columns, layer by layer: no index tensors, no second copy."""
    heights, widths = ([part.stop - part.start for part in parts] for parts in (rows, columns))
    block = torch.empty(sum(heights), sum(widths), dtype=torch.float64, device=matrix.device)
    for destination, row in zip(block.split(heights), rows, strict=True):
        for piece, column in zip(destination.split(widths, dim=1), columns, strict=True):
            piece.copy_(matrix[row, column])
    return block


def _cholesky(gram: torch.Tensor, ridge_lambda: float, where: str, tokens: int) -> torch.Tensor:
    """Factor `gram + λI`, overwriting `gram`."""
    gram.diagonal().add_(ridge_lambda)
    diagonal = gram.diagonal().clone()
    factor, info = torch.linalg.cholesky_ex(gram)
    # A pivot is what a feature adds to those before it. When rounding alone can explain it, a factorisation that went
    # through by luck solves for noise.
    size = len(diagonal)
    floor = 10 * math.sqrt(size) * torch.finfo(torch.float64).eps
    if int(info) != 0 or not bool((factor.diagonal().square() > floor * diagonal).all()):
        raise _singular(where, size, tokens, ridge_lambda)
    return factor


def _singular(where: str, features: int, tokens: int, ridge_lambda: float) -> SingularSystemError:
    return SingularSystemError(
        f"The ridge system for {where} is singular: {features} features, {tokens} tokens, λ = {ridge_lambda:g}. Some "
        "features are copies or combinations of others, or constant. Use more calibration tokens, a larger λ or a "
        "smaller k."
    )


def _ols(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """Least squares of least norm: `gram⁺ @ cross`, in float64."""
    values, vectors = torch.linalg.eigh(gram.double())
    # Below this an eigenvalue is rounding error of the sums it was made from.
    keep = values > values[-1].clamp(min=0) * len(values) * torch.finfo(gram.dtype).eps
    vectors = vectors[:, keep]
    return vectors @ ((vectors.T @ cross.double()) / values[keep, None])


def _sse(
    moments: Moments,
    rows: slice,
    gram: torch.Tensor,
    cross: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    """`Σ (y − xW − b)²` per output: `syy − 2 w·sxy + w·sxx·w + n · shift²`, with `shift` the error at the means."""
    explained = (weight * (2 * cross - gram @ weight)).sum(0)
    # Rounding can take a perfect fit below zero.
    return (moments.syy[rows] - explained + moments.count * shift.square()).clamp(min=0)


def _pooled_r2(sse: torch.Tensor, sst: torch.Tensor) -> torch.Tensor:
    """`1 − Σ SSE / Σ SST` over the last dimension. Of a constant: 1 if it is met, 0 if not, as scikit-learn has it."""
    sse, sst = sse.sum(-1), sst.sum(-1)
    constant = sst == 0
    return torch.where(constant, (sse == 0).double(), 1 - sse / torch.where(constant, 1, sst))
