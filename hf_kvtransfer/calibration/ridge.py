"""Ridge regression in closed form, solved from statistics alone (arXiv 2608.03893; weighted rows: arXiv 2609.00891)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import CalibrationError, SingularSystemError
from ..features import KINDS, LayerSupport, Support, as_json, as_supports
from .statistics import CalibrationStatistics
from .weighted import System


@dataclass
class RidgeSolution:
    """
    Affine maps from the features of each target layer's supports to its KV heads, `ŷ = weight @ x + bias`.

    Attributes:
        support (`list`):
            What each target layer reads, in the short form of [`~hf_kvtransfer.KVMapperConfig`]; `None` for layers
            without maps.
        ridge_lambda (`float` or `dict`): The λ they were solved with, or the λ of each (target layer, kind).
        weight_keys (`list[torch.Tensor]`):
            Per target layer `[target width, features]` for RoPE-free keys, the layout of `nn.Linear`, or
            `[kv_heads, head_dim, features]` if each head reads its own; `None` for layers without maps.
        bias_keys (`list[torch.Tensor]`): Per target layer `[target width]`.
        weight_values (`list[torch.Tensor]`): As `weight_keys`, for values.
        bias_values (`list[torch.Tensor]`): As `bias_keys`, for values.
        anchor_depth (`int`, *optional*): At which depth of the target lies the stream that supports read.
        row_weights (`dict`): Per (target layer, kind) the shrinkage α of its rows' weights, per KV head.
    """

    support: list[Any]
    ridge_lambda: float | dict[tuple[int, str], float]
    weight_keys: list[Any]
    bias_keys: list[Any]
    weight_values: list[Any]
    bias_values: list[Any]
    anchor_depth: int | None = None
    row_weights: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def weights(self, kind: str) -> list[Any]:
        """`weight_keys` or `weight_values`."""
        return self.weight_keys if kind == "keys" else self.weight_values

    def biases(self, kind: str) -> list[Any]:
        """`bias_keys` or `bias_values`."""
        return self.bias_keys if kind == "keys" else self.bias_values


@dataclass(frozen=True)
class _Part:
    """One group of one map: where its features and its outputs lie, and its λ."""

    layer: int
    group: int
    features: tuple[tuple[int, int], ...]
    outputs: slice
    ridge_lambda: float


def solve_ridge(
    statistics: CalibrationStatistics,
    support: Sequence[Any],
    ridge_lambda: float | dict[tuple[int, str], float] = 0.01,
    dtype: torch.dtype = torch.float64,
    *,
    anchor_depth: int | None = None,
    weighted: bool = False,
    kinds: Sequence[str] = KINDS,
    progress: bool = True,
) -> RidgeSolution:
    """
    Solve `W = (XᵀX + λI)⁻¹ XᵀY`, `b = ȳ − x̄W` with X and Y centred (arXiv 2608.03893, full-head mapping).

    λ is added to the unnormalised Gram matrix, a sum over tokens. One Cholesky factorisation in float64 serves all
    heads of all target layers that read the same features.

    Args:
        statistics (`CalibrationStatistics`): Their `"fit"` split is used.
        support (`Sequence`):
            For each target layer what it reads: source layers, a [`Support`], one by kind, or `None` for no maps.
        ridge_lambda (`float` or `dict`, *optional*, defaults to 0.01): λ, or one for each (target layer, kind).
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`):
            What weights and biases are rounded to. The bias makes up for the rounding of the weights at the mean.
        anchor_depth (`int`, *optional*): At which depth of the target lies the stream that supports read.
        weighted (`bool`, *optional*, defaults to `False`):
            Weigh rows by attention (arXiv 2609.00891, attention-weighted rows), which needs head-local supports and
            statistics with weighted sums.
        kinds (`Sequence[str]`, *optional*): Solve for keys or values alone; the lists of the other stay empty.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar, if standard error is a terminal.

    Returns:
        `RidgeSolution`

    Raises:
        CalibrationError: If the support or λ is impossible, or the split holds no tokens.
        SingularSystemError: If a system isn't positive definite in float64.
    """
    supports = _checked_supports(statistics, support)
    solution = RidgeSolution(
        [as_json(entry) if entry is not None else None for entry in supports],
        ridge_lambda,
        *([], [], [], []),
        anchor_depth,
    )
    with tqdm(
        total=len(supports) * len(kinds), desc="Solving ridge", disable=None if progress else True, leave=False
    ) as bar:
        for kind in kinds:
            parts = _parts(statistics, supports, kind, ridge_lambda, anchor_depth)
            solve = _solve_weighted if weighted else _solve_plain
            solved = solve(statistics, parts, kind, dtype, solution, bar.update)
            for t in range(len(supports)):
                groups = [solved[t, group] for group in range(sum(part.layer == t for part in parts))]
                weights, biases = [weight for weight, _ in groups], [bias for _, bias in groups]
                entry = supports[t]
                whole = entry is not None and entry[kind].heads == "full"
                solution.weights(kind).append(
                    None if not groups else weights[0] if whole else torch.stack(weights).contiguous()
                )
                solution.biases(kind).append(torch.cat(biases) if groups else None)
    return solution


def _solve_plain(
    statistics: CalibrationStatistics,
    parts: Sequence[_Part],
    kind: str,
    dtype: torch.dtype,
    solution: RidgeSolution,
    done: Callable[[float], Any],
) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    moments = statistics.moments("fit", kind)
    solved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    # What reads the same features is solved together, so that each Gram matrix is gathered and factored once.
    together: dict[Any, list[_Part]] = {}
    for part in parts:
        together.setdefault((part.features, part.ridge_lambda), []).append(part)
    for (features, ridge_lambda), members in together.items():
        columns = [slice(*bounds) for bounds in features]
        gram = block(moments.sxx, columns, columns)
        where = f"the {kind} of target layer {', '.join(map(str, dict.fromkeys(part.layer for part in members)))}"
        factor = _cholesky(gram, ridge_lambda, where, moments.count)
        del gram
        mean_x = torch.cat([moments.mean_x[part] for part in columns])
        for part in members:
            weight = torch.cholesky_solve(block(moments.sxy, columns, [part.outputs]), factor).T
            if not bool(torch.isfinite(weight).all()):
                raise _singular(f"the {kind} of target layer {part.layer}", len(factor), moments.count, ridge_lambda)
            weight = weight.to(dtype).contiguous()
            bias = (moments.mean_y[part.outputs] - weight.double() @ mean_x).to(dtype)
            solved[part.layer, part.group] = weight, bias
            done(part.group == 0)
    return solved


def _solve_weighted(
    statistics: CalibrationStatistics,
    parts: Sequence[_Part],
    kind: str,
    dtype: torch.dtype,
    solution: RidgeSolution,
    done: Callable[[float], Any],
) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Every head of every layer has rows of its own weight, so that nothing is shared."""
    solved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in dict.fromkeys(part.layer for part in parts):
        members = [part for part in parts if part.layer == layer]
        support = as_supports(solution.support[layer])[kind]
        if (layer, kind) not in statistics.weighted or support != Support(support.layers, "local"):
            raise CalibrationError(
                f"The {kind} of target layer {layer} can't be solved with attention-weighted rows: expected statistics "
                "collected with `attention_rows=True`, and a head-local support of the same kind and token, without an "
                "anchor. Collect them with the preset `cachebridge2026`, or solve without weights."
            )
        moments, plain = statistics.weighted[layer, kind], statistics.moments("fit", kind)
        own, start = [], 0
        for index, source in enumerate(statistics.source.layers):
            stop = start + support.heads_read(source, statistics.target.layers[layer])[0][1] * source.head_dim
            if index in support.layers:
                own.append(slice(start, stop))
            start = stop
        strengths = moments.largest_alpha(sum(column.stop - column.start for column in own)).tolist()
        solution.row_weights[layer, kind] = strengths
        for part, alpha in zip(members, strengths, strict=True):
            columns = [slice(*bounds) for bounds in part.features]
            unweighted = System(
                block(plain.sxx, columns, columns),
                block(plain.sxy, columns, [part.outputs]),
                torch.cat([plain.mean_x[column] for column in columns]),
                plain.mean_y[part.outputs],
                plain.syy[part.outputs],
            )
            gram, cross, mean_x, mean_y, _ = moments.system(part.group, alpha, unweighted, own)
            where = f"the {kind} of head {part.group} of target layer {layer}"
            factor = _cholesky(gram, part.ridge_lambda, where, plain.count)
            weight = torch.cholesky_solve(cross, factor).T.to(dtype).contiguous()
            bias = (mean_y - weight.double() @ mean_x).to(dtype)
            solved[layer, part.group] = weight, bias
        done(1)
    return solved


def solve_entry(
    statistics: CalibrationStatistics, depth: int, support: Support, ridge_lambda: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """
    Solve the prediction of the target's residual stream from the source's cache, by the same ridge.

    Args:
        statistics (`CalibrationStatistics`): With the stream at this depth among their features.
        depth (`int`): The layer that the stream enters.
        support ([`Support`]): What is read; all heads.
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, float]`: weight `[hidden_size + 1, features]` and bias, in float32, and the
        held-out R², pooled over the stream's direction.
    """
    fit, columns = statistics.moments("fit", KINDS[0]), statistics.features(support, KINDS[0], 0)[0]
    outputs = statistics.layout.stream(statistics.source, statistics.target, depth)
    factor = _cholesky(block(fit.sxx, columns, columns), ridge_lambda, f"what enters target layer {depth}", fit.count)
    weight = torch.cholesky_solve(block(fit.sxx, columns, [outputs]), factor).T.float().contiguous()
    wide, mean_x = weight.double().T, torch.cat([fit.mean_x[part] for part in columns])
    bias = (fit.mean_x[outputs] - mean_x @ wide).float()
    heldout = statistics.moments("heldout", KINDS[0])
    shift = heldout.mean_x[outputs] - torch.cat([heldout.mean_x[part] for part in columns]) @ wide - bias.double()
    total = heldout.sxx[outputs, outputs].diagonal().double()
    gram, cross = block(heldout.sxx, columns, columns), block(heldout.sxx, columns, [outputs])
    error = squared_error(total, heldout.count, gram, cross, wide, shift)
    return weight, bias, float(pooled_r2(error[None, :-1], total[None, :-1]))


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
        all of it. Layers without maps are exact and count as 1.

    Raises:
        CalibrationError: If the split holds no tokens.
    """
    supports = _checked_supports(statistics, solution.support)
    result: dict[str, list] = {}
    for kind in KINDS:
        moments = statistics.moments(split, kind)
        error = {t: torch.zeros_like(moments.syy[rows]) for t, rows in enumerate(statistics.outputs(kind))}
        grams: dict[Any, torch.Tensor] = {}
        # Layers that read the same features come one after the other, so that one Gram matrix is kept at a time.
        parts = _parts(statistics, supports, kind, 0.0, solution.anchor_depth)
        for part in sorted(parts, key=lambda part: part.features):
            columns = [slice(*bounds) for bounds in part.features]
            if part.features not in grams:
                grams = {part.features: block(moments.sxx, columns, columns)}
            gram = grams[part.features]
            rows = statistics.outputs(kind)[part.layer]
            here = slice(part.outputs.start - rows.start, part.outputs.stop - rows.start)
            weight = solution.weights(kind)[part.layer]
            weight = (weight if weight.dim() == 2 else weight[part.group]).to(gram).T
            mean_x = torch.cat([moments.mean_x[column] for column in columns])
            bias = solution.biases(kind)[part.layer][here].to(gram)
            shift = moments.mean_y[part.outputs] - mean_x @ weight - bias
            cross = block(moments.sxy, columns, [part.outputs])
            error[part.layer][here] = squared_error(
                moments.syy[part.outputs], moments.count, gram, cross, weight, shift
            )
        heads, whole = [], []
        for t, rows in enumerate(statistics.outputs(kind)):
            total, kv_heads = moments.syy[rows], statistics.target.layers[t].kv_heads
            heads.append(pooled_r2(error[t].view(kv_heads, -1), total.view(kv_heads, -1)).tolist())
            whole.append(float(pooled_r2(error[t].view(1, -1), total.view(1, -1))))
        result[kind], result[f"{kind}_per_layer"] = heads, whole
    return result


def _checked_supports(statistics: CalibrationStatistics, support: Sequence[Any]) -> list[LayerSupport | None]:
    sources, targets = statistics.source.num_layers, statistics.target.num_layers
    if len(support) != targets:
        raise CalibrationError(f"The support has {len(support)} entries, expected one per target layer: {targets}.")
    supports: list[LayerSupport | None] = []
    for t, entry in enumerate(support):
        try:
            given = None if entry is None else as_supports(entry)
        except (ValueError, TypeError):
            given = {}
        layers = [one.layers for one in (given or {}).values()]
        read = [bool(one.layers) or one.anchor for one in (given or {}).values()]
        if given is not None and not (
            all(read) and read and all(len(set(x)) == len(x) and all(s < sources for s in x) for x in layers)
        ):
            raise CalibrationError(
                f"The support of target layer {t} is {entry}, expected different source layers from 0 to "
                f"{sources - 1}, at least one."
            )
        supports.append(given)
    return supports


def _parts(
    statistics: CalibrationStatistics,
    supports: Sequence[LayerSupport | None],
    kind: str,
    ridge_lambda: float | dict[tuple[int, str], float],
    anchor_depth: int | None,
) -> list[_Part]:
    parts = []
    for t, (entry, rows) in enumerate(zip(supports, statistics.outputs(kind), strict=True)):
        if entry is None:
            continue
        value = ridge_lambda[t, kind] if isinstance(ridge_lambda, dict) else ridge_lambda
        if not value >= 0 or not math.isfinite(value):
            raise CalibrationError(f"ridge_lambda is {value}, expected a finite number of at least 0.")
        groups = statistics.features(entry[kind], kind, t, anchor_depth)
        step = (rows.stop - rows.start) // len(groups)
        for group, columns in enumerate(groups):
            outputs = slice(rows.start + group * step, rows.start + (group + 1) * step)
            bounds = tuple((column.start, column.stop) for column in columns)
            parts.append(_Part(t, group, bounds, outputs, value))
    return parts


def block(matrix: torch.Tensor, rows: list[slice], columns: list[slice]) -> torch.Tensor:
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


def squared_error(
    syy: torch.Tensor,
    count: int,
    gram: torch.Tensor,
    cross: torch.Tensor,
    weight: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    """`Σ (y − xW − b)²` per output: `syy − 2 w·sxy + w·sxx·w + n · shift²`, with `shift` the error at the means."""
    explained = (weight * (2 * cross - gram @ weight)).sum(0)
    # Rounding can take a perfect fit below zero.
    return (syy - explained + count * shift.square()).clamp(min=0)


def pooled_r2(sse: torch.Tensor, sst: torch.Tensor) -> torch.Tensor:
    """`1 − Σ SSE / Σ SST` over the last dimension. Of a constant: 1 if it is met, 0 if not, as scikit-learn has it."""
    sse, sst = sse.sum(-1), sst.sum(-1)
    constant = sst == 0
    return torch.where(constant, (sse == 0).double(), 1 - sse / torch.where(constant, 1, sst))
