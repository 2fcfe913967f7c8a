"""Streamed second moments of weighted rows, for ridge with weights whose strength is chosen afterwards."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..errors import CalibrationError
from ..memory import zeros
from .moments import BLOCK_ROWS, centred, check_precision, panels


_NAMES = ("mass", "squares", "mean_x", "mean_y", "gram", "cross", "syy")


class System(NamedTuple):
    """
    Centred sums of one KV head, ready for a ridge solve.

    Attributes:
        gram (`torch.Tensor` of shape `[features, features]`): `Σ w (x − x̄)(x − x̄)ᵀ`.
        cross (`torch.Tensor` of shape `[features, head_dim]`): `Σ w (x − x̄)(y − ȳ)ᵀ`.
        mean_x (`torch.Tensor` of shape `[features]`, float64): `x̄ = Σ w x / Σ w`.
        mean_y (`torch.Tensor` of shape `[head_dim]`, float64): `ȳ`.
        syy (`torch.Tensor` of shape `[head_dim]`, float64): `Σ w (y − ȳ)²`.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    mean_x: torch.Tensor
    mean_y: torch.Tensor
    syy: torch.Tensor


class WeightedMoments:
    """
    Centred second moments of rows weighted by `r`, between the features and the outputs of all KV heads of one target
    layer and kind, for ridge with rows weighted by `w = 1 + α (r / r̄ − 1)` (arXiv 2609.00891, attention-weighted rows).

    Every sum over `w` is a combination of the `r`-weighted one, which is kept here, and the plain one, which
    [`Moments`] hold already. So `α` and the features are chosen afterwards. Blocks are merged with the pairwise formula
    of Chan, Golub and LeVeque, as there.

    Args:
        heads (`int`): KV heads, each with features, outputs and weights of its own.
        features (`int`): Features of one head.
        head_dim (`int`): Outputs of one head.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`):
            Precision of the large sums, `torch.float64` or `torch.float32`. Means and `syy` are always float64.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where the sums live.
        disk (`str` or `os.PathLike`, *optional*): A folder whose disk holds the large sums, as in [`Moments`].

    Attributes:
        count (`int`): Number `n` of rows (tokens) seen.
        mass (`torch.Tensor` of shape `[heads]`, float64): `Σ r`.

    Raises:
        CalibrationError: `dtype` is another one.
    """

    def __init__(
        self,
        heads: int,
        features: int,
        head_dim: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        check_precision(dtype)
        self.count = 0
        small = [(heads,), (heads,), (heads, features), (heads, head_dim), (heads, head_dim)]
        self.mass, self._squares, self._mean_x, self._mean_y, self._syy = (
            torch.zeros(shape, dtype=torch.float64, device=device) for shape in small
        )
        self._gram, self._cross = (
            zeros((heads, features, width), dtype, device, disk) for width in (features, head_dim)
        )
        # Only the upper panels are summed; the rest is filled in when somebody reads.
        self._mirrored = True

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the large sums."""
        return self._gram.dtype

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self._gram.device

    def update(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> None:
        """
        Add rows.

        Args:
            x (`torch.Tensor` of shape `[heads, rows, features]`): Features, any floating dtype and device.
            y (`torch.Tensor` of shape `[heads, rows, head_dim]`): Outputs of the same tokens.
            weights (`torch.Tensor` of shape `[heads, rows]`):
                `r`, at least 0, on any scale as long as it is the same in all updates.

        Raises:
            CalibrationError: The shapes don't fit these moments or each other, or a weight is negative or not finite.
        """
        heads, features, head_dim = self._cross.shape
        rows = x.shape[1] if x.dim() == 3 else -1
        expected = ((heads, rows, features), (heads, rows, head_dim), (heads, rows))
        if (x.shape, y.shape, weights.shape) != expected:
            raise CalibrationError(
                f"Got features {list(x.shape)}, outputs {list(y.shape)} and weights {list(weights.shape)}, expected "
                f"[{heads}, rows, {features}], [{heads}, rows, {head_dim}] and [{heads}, rows] for the same tokens."
            )
        weights = weights.to(device=self.device, dtype=torch.float64)
        if not bool(((weights >= 0) & weights.isfinite()).all()):
            raise CalibrationError(
                "Some row weights are negative or not finite; expected numbers of at least 0: check that the model "
                "they come from is in bfloat16 or float32, and its weights intact."
            )
        for head in range(heads):
            for start in range(0, rows, BLOCK_ROWS):
                block = slice(start, start + BLOCK_ROWS)
                self._update_block(head, x[head, block], y[head, block], weights[head, block])
        self._squares.add_(weights.square().sum(1))
        self.count += rows

    def _update_block(self, head: int, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> None:
        # What nobody reads, such as the last token of a text, adds nothing.
        counted = weights > 0
        if not bool(counted.all()):
            weights, x, y = weights[counted], x[counted.to(x.device)], y[counted.to(y.device)]
        if len(weights) == 0:
            return
        mass = weights.sum()
        share = mass / (self.mass[head] + mass)
        scale = self.mass[head] * share
        x, shift_x = centred(x, self._mean_x[head], scale, self.dtype, weights)
        y, shift_y = centred(y, self._mean_y[head], scale, self.dtype, weights)
        for start, stop in panels(x.shape[1]):
            self._gram[head, start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])
        self._mirrored = False
        self._cross[head].addmm_(x.T, y)
        self._syy[head].add_(y.to(torch.float64).square_().sum(0))
        self._mean_x[head].add_(shift_x * share)
        self._mean_y[head].add_(shift_y * share)
        self.mass[head] += mass

    def merge(self, other: WeightedMoments) -> None:
        """
        Add what another process has summed, in place; the order doesn't matter beyond rounding.

        Args:
            other (`WeightedMoments`): Of the same shape, over other rows weighted on the same scale; left unchanged.

        Raises:
            CalibrationError: The shapes differ.
        """
        if other._cross.shape != self._cross.shape:
            raise CalibrationError(
                f"Weighted moments of shape {list(other._cross.shape)} can't be merged into moments of shape "
                f"{list(self._cross.shape)}: merge statistics of the same pair of models only."
            )
        mass = other.mass.to(self.mass)
        # Heads of which no row has a weight yet have no mean to move.
        share = torch.where(mass > 0, mass / (self.mass + mass), 0.0)[:, None]
        scale = self.mass[:, None] * share
        shift_x, shift_y = other._mean_x.to(self.mass) - self._mean_x, other._mean_y.to(self.mass) - self._mean_y
        left = (shift_x * scale).to(self.dtype)[:, :, None]
        self._gram.add_(other._gram.to(self._gram)).baddbmm_(left, shift_x.to(left)[:, None])
        self._cross.add_(other._cross.to(self._cross)).baddbmm_(left, shift_y.to(left)[:, None])
        self._syy.add_(other._syy.to(self._syy)).add_(shift_y.square() * scale)
        self._mean_x.add_(shift_x * share)
        self._mean_y.add_(shift_y * share)
        self.mass.add_(mass)
        self._squares.add_(other._squares.to(self._squares))
        self._mirrored = self._mirrored and other._mirrored
        self.count += other.count

    def pool(self, add: Callable[[torch.Tensor], None]) -> None:
        """Put together what several processes have summed, in place, as in [`Moments`]."""
        count = torch.tensor([self.count], dtype=torch.float64, device=self.device)
        add(count)
        self.count = int(count)
        own = self.mass.clone()
        add(self.mass)
        # Heads that nobody reads stay without a mean.
        share = torch.where(self.mass > 0, own / self.mass, 0.0)[:, None]
        shifts = []
        for mean in (self._mean_x, self._mean_y):
            before = mean.clone()
            add(mean.mul_(share))
            shifts.append(before.sub_(mean))
        shift_x, shift_y = shifts
        left = (shift_x * own[:, None]).to(self.dtype)[:, :, None]
        self._gram.baddbmm_(left, shift_x.to(left)[:, None])
        self._cross.baddbmm_(left, shift_y.to(left)[:, None])
        self._syy.add_(shift_y.square() * own[:, None])
        for sums in (self._gram, self._cross, self._syy, self._squares):
            add(sums)
        self._mirrored = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, not copied; with `count` they are the whole state."""
        self._mirror()
        return {name: getattr(self, name if name == "mass" else f"_{name}") for name in _NAMES}

    @classmethod
    def from_tensors(cls, count: int, tensors: dict[str, torch.Tensor]) -> WeightedMoments:
        """The inverse of [`~WeightedMoments.tensors`]: takes the tensors over, without copying them."""
        moments = cls.__new__(cls)
        moments.count = count
        for name in _NAMES:
            setattr(moments, name if name == "mass" else f"_{name}", tensors[name])
        moments._mirrored = True
        return moments

    def _mirror(self) -> None:
        if not self._mirrored:
            for start, stop in panels(self._gram.shape[1]):
                self._gram[:, stop:, start:stop] = self._gram[:, start:stop, stop:].mT
            self._mirrored = True

    def largest_alpha(self, features_used: int) -> torch.Tensor:
        """
        The largest `α ≤ 1` that leaves an effective sample size (Kish) `n / (1 + α² CV²(r)) ≥ min(n, 2p)`.

        Args:
            features_used (`int`): `p`, how many features of a head the ridge will read.

        Returns:
            `torch.Tensor` of shape `[heads]`, float64: 0 for a head whose weights are all 0.
        """
        mass = self.mass
        variation = torch.where(mass > 0, self.count * self._squares / mass.square() - 1, math.inf).clamp_(min=0)
        # What CV² times α² may be. Without variation any α will do.
        room = max(0.0, self.count / max(2 * features_used, 1) - 1)
        return torch.where(variation > room, (room / variation).sqrt(), 1.0)

    def system(self, head: int, alpha: float, plain: System, columns: Sequence[slice]) -> System:
        """
        The centred sums over rows weighted by `w = 1 + α (r / r̄ − 1)`, which sum to `n`, of one head.

        Args:
            head (`int`): The KV head.
            alpha (`float`): From 0, where all rows count the same, to 1, where `r` alone decides.
            plain ([`System`]): The same sums over the same rows with `w = 1`, of these features alone.
            columns (`Sequence[slice]`): Which features of the head, in the order of `plain`.

        Returns:
            [`System`]: `plain` itself for a head that nobody reads, which has no weights to go by.
        """
        mass = float(self.mass[head])
        if mass == 0 or alpha == 0:
            return plain
        self._mirror()
        chosen = torch.cat([torch.arange(part.start, part.stop, device=self.device) for part in columns])
        # r / r̄ as a factor of r. The two weighted means differ, which adds the product of their difference.
        rest, factor = 1 - alpha, alpha * self.count / mass
        between = self.count * alpha * rest
        mean_x, mean_y = self._mean_x[head, chosen], self._mean_y[head]
        gap_x, gap_y = plain.mean_x - mean_x, plain.mean_y - mean_y
        gram = torch.add(plain.gram * rest, self._gram[head, chosen[:, None], chosen].to(plain.gram), alpha=factor)
        cross = torch.add(plain.cross * rest, self._cross[head, chosen].to(plain.cross), alpha=factor)
        narrow_x, narrow_y = gap_x.to(gram), gap_y.to(cross)
        return System(
            gram.addr_(narrow_x, narrow_x, alpha=between),
            cross.addr_(narrow_x, narrow_y, alpha=between),
            plain.mean_x.lerp(mean_x, alpha),
            plain.mean_y.lerp(mean_y, alpha),
            (plain.syy * rest).add_(self._syy[head], alpha=factor).add_(gap_y.square(), alpha=between),
        )
