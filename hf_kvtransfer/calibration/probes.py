"""Which source layers a target layer should read, by probes of one layer each (Heo et al., arXiv 2608.03893)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tqdm.auto import tqdm

from ..errors import CalibrationError
from ..features import KINDS, Support
from .ridge import block, pooled_r2, squared_error
from .statistics import CalibrationStatistics


def layer_scores(statistics: CalibrationStatistics, split: str = "fit", kinds: Sequence[str] = KINDS) -> torch.Tensor:
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
        kinds (`Sequence[str]`, *optional*, defaults to both): `"keys"`, `"values"` or both.

    Returns:
        `torch.Tensor` of shape `[target_layers, source_layers]`, float64 on the CPU.

    Raises:
        CalibrationError: If a split holds no tokens.
    """
    sources, targets = statistics.source.num_layers, statistics.target.num_layers
    scores = torch.zeros(targets, sources, dtype=torch.float64)
    for kind in kinds:
        fit, scored = statistics.moments("fit", kind), statistics.moments(split, kind)
        outputs = statistics.outputs(kind)
        every = slice(outputs[0].start, outputs[-1].stop)
        for s in tqdm(range(sources), desc=f"Scoring source layers ({kind})", disable=None):
            (columns,) = statistics.features(Support((s,)), kind, 0)[0]
            weight = _ols(fit.sxx[columns, columns], fit.sxy[columns, every])
            # A probe's bias makes it exact at the mean it was fitted on; only elsewhere does a shift remain.
            shift = (scored.mean_y - fit.mean_y)[every] - (scored.mean_x - fit.mean_x)[columns] @ weight
            gram, cross = scored.sxx[columns, columns].double(), scored.sxy[columns, every].double()
            sse = squared_error(scored.syy[every], scored.count, gram, cross, weight, shift).cpu()
            sst = scored.syy[every].cpu()
            for t, (rows, layer) in enumerate(zip(outputs, statistics.target.layers, strict=True)):
                here = slice(rows.start - every.start, rows.stop - every.start)
                heads = pooled_r2(sse[here].view(layer.kv_heads, -1), sst[here].view(layer.kv_heads, -1))
                scores[t, s] += heads.mean() / len(kinds)
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


def _ols(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """Least squares of least norm: `gram⁺ @ cross`, in float64."""
    values, vectors = torch.linalg.eigh(gram.double())
    # Below this an eigenvalue is rounding error of the sums it was made from.
    keep = values > values[-1].clamp(min=0) * len(values) * torch.finfo(gram.dtype).eps
    vectors = vectors[:, keep]
    return vectors @ ((vectors.T @ cross.double()) / values[keep, None])


def greedy_layers(
    statistics: CalibrationStatistics,
    layer: int,
    kind: str,
    k: int,
    *,
    joint: bool = False,
    anchor_depth: int | None = None,
    ridge_lambda: float = 0.01,
) -> list[int]:
    """
    Source layers by greedy forward selection: each next one explains most of what those before it leave unexplained.

    Args:
        statistics (`CalibrationStatistics`): Their `"fit"` split is used.
        layer (`int`): The target layer.
        kind (`str`): `"keys"` or `"values"`.
        k (`int`): How many source layers.
        joint (`bool`, *optional*, defaults to `False`): Whether keys and values of a source layer come together.
        anchor_depth (`int`, *optional*): The residual stream that is read in any case; by default none is.
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ of the systems whose residuals are compared.

    Returns:
        `list[int]`: The chosen source layers in the order of their choice.
    """
    moments = statistics.moments("fit", kind)
    given = [] if anchor_depth is None else statistics.features(Support((), anchor=True), kind, layer, anchor_depth)[0]
    blocks = _layer_blocks(statistics, kind, joint)
    return _greedy(moments.sxx, moments.sxy, statistics.outputs(kind)[layer], blocks, given, k, ridge_lambda)


def layers_by_gain(
    statistics: CalibrationStatistics,
    layer: int,
    kind: str,
    *,
    joint: bool,
    anchor_depth: int,
    ridge_lambda: float = 0.01,
) -> list[int]:
    """
    Source layers by what each explains alone of what an anchor leaves unexplained, the most first.

    Args:
        statistics (`CalibrationStatistics`): Their `"fit"` split is used.
        layer (`int`): The target layer.
        kind (`str`): `"keys"` or `"values"`.
        joint (`bool`): Whether keys and values of a source layer come together.
        anchor_depth (`int`): The residual stream that is read in any case.
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ of the systems whose residuals are compared.
    """
    moments = statistics.moments("fit", kind)
    given = statistics.features(Support((), anchor=True), kind, layer, anchor_depth)[0]
    forward = _Forward(
        moments.sxx, moments.sxy, statistics.outputs(kind)[layer], _layer_blocks(statistics, kind, joint), ridge_lambda
    )
    forward.give(given)
    gains = forward.gains()
    return sorted(gains, key=lambda index: (-gains[index], index))


def greedy_entry_layers(
    statistics: CalibrationStatistics, depth: int, k: int, *, joint: bool, ridge_lambda: float = 0.01
) -> list[int]:
    """
    Source layers for the prediction of the target's residual stream, as in [`greedy_layers`].

    Args:
        statistics (`CalibrationStatistics`): Their `"fit"` split is used.
        depth (`int`): The layer that the stream enters.
        k (`int`): How many source layers.
        joint (`bool`): Whether keys and values of a source layer come together, or keys alone.
        ridge_lambda (`float`, *optional*, defaults to 0.01): λ of the systems whose residuals are compared.
    """
    sxx = statistics.moments("fit", KINDS[0]).sxx
    outputs = statistics.layout.stream(statistics.source, statistics.target, depth)
    return _greedy(sxx, sxx, outputs, _layer_blocks(statistics, KINDS[0], joint), [], k, ridge_lambda)


def _layer_blocks(statistics: CalibrationStatistics, kind: str, joint: bool) -> dict[int, list[slice]]:
    return {
        index: statistics.features(Support((index,), joint=joint), kind, 0)[0]
        for index in range(statistics.source.num_layers)
    }


def _greedy(
    sxx: torch.Tensor,
    sxy: torch.Tensor,
    outputs: slice,
    blocks: dict[int, list[slice]],
    given: list[slice],
    k: int,
    ridge_lambda: float,
) -> list[int]:
    forward = _Forward(sxx, sxy, outputs, blocks, ridge_lambda)
    if given:
        forward.give(given)
    chosen: list[int] = []
    while forward.left and len(chosen) < k:
        gains = forward.gains()
        best = max(gains, key=lambda index: (gains[index], -index))
        forward.choose(best)
        chosen.append(best)
    return chosen


class _Forward:
    """
    Forward selection of blocks of columns. With the Cholesky factor L of the chosen Gram matrix, the part of any G_ij
    that the chosen explain is (L⁻¹ G_Si)ᵀ (L⁻¹ G_Sj). Each choice adds rows to those factors, and takes their part off
    what is left of each block's own Gram matrix and of its cross product with the outputs.
    """

    def __init__(
        self,
        sxx: torch.Tensor,
        sxy: torch.Tensor,
        outputs: slice,
        blocks: dict[int, list[slice]],
        ridge_lambda: float,
    ) -> None:
        self._sxx, self._sxy, self._outputs, self._ridge_lambda = sxx, sxy, outputs, ridge_lambda
        self._blocks = blocks
        self._explained: dict[int, list[torch.Tensor]] = {index: [] for index in blocks}
        self.left = {index: self._system(columns) for index, columns in blocks.items()}

    def _system(self, columns: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        gram, cross = block(self._sxx, columns, columns), block(self._sxy, columns, [self._outputs])
        gram.diagonal().add_(self._ridge_lambda)
        return gram, cross

    def gains(self) -> dict[int, float]:
        """What each block that is left would explain of the outputs."""
        return {
            index: float(torch.linalg.solve_triangular(_factor(gram), cross, upper=False).square().sum())
            for index, (gram, cross) in self.left.items()
        }

    def give(self, columns: list[slice]) -> None:
        """Columns that are read in any case."""
        self._take(columns, [], *self._system(columns))

    def choose(self, index: int) -> None:
        """Takes a block."""
        self._take(self._blocks[index], self._explained.pop(index), *self.left.pop(index))

    def _take(self, columns: list[slice], own: list[torch.Tensor], gram: torch.Tensor, cross: torch.Tensor) -> None:
        factor = _factor(gram)
        output = torch.linalg.solve_triangular(factor, cross, upper=False)
        for other, factors in self._explained.items():
            between = block(self._sxx, columns, self._blocks[other])
            for one, two in zip(own, factors, strict=True):
                between.addmm_(one.T, two, alpha=-1)
            rows = torch.linalg.solve_triangular(factor, between, upper=False)
            factors.append(rows)
            self.left[other][0].addmm_(rows.T, rows, alpha=-1)
            self.left[other][1].addmm_(rows.T, output, alpha=-1)


def _factor(gram: torch.Tensor) -> torch.Tensor:
    """The Cholesky factor of a residual Gram matrix, which rounding may have left slightly indefinite."""
    factor, info = torch.linalg.cholesky_ex(gram)
    scale = gram.diagonal().abs().max()
    while int(info) != 0 and bool(torch.isfinite(scale)):
        gram = gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * scale * 1e-10
        scale = scale * 10
        factor, info = torch.linalg.cholesky_ex(gram)
    return factor
