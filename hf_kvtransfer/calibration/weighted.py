"""Streamed second moments of weighted rows, for ridge with weights whose strength is chosen afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..errors import CalibrationError


_BLOCK_ROWS = 2048
"""Rows per product, as in `moments`."""

_PANELS = 8
"""Column panels of the symmetric product, as in `moments`."""

_NAMES = ("mass", "mean_x", "mean_y", "gram", "cross", "syy")


class _Sums:
    """
    Centred second moments of rows that each carry a weight, for several heads at once.

    Args:
        mass (`torch.Tensor` of shape `[heads]`, float64): `Σ w`.
        mean_x (`torch.Tensor` of shape `[heads, features]`, float64): `x̄ = Σ w x / Σ w`.
        mean_y (`torch.Tensor` of shape `[heads, head_dim]`, float64): `ȳ`.
        gram (`torch.Tensor` of shape `[heads, features, features]`): `Σ w (x − x̄)(x − x̄)ᵀ`, only its upper panels until
            [`~_Sums.mirror`].
        cross (`torch.Tensor` of shape `[heads, features, head_dim]`): `Σ w (x − x̄)(y − ȳ)ᵀ`.
        syy (`torch.Tensor` of shape `[heads, head_dim]`, float64): `Σ w (y − ȳ)²`.
    """

    def __init__(
        self,
        mass: torch.Tensor,
        mean_x: torch.Tensor,
        mean_y: torch.Tensor,
        gram: torch.Tensor,
        cross: torch.Tensor,
        syy: torch.Tensor,
    ) -> None:
        self.mass, self.mean_x, self.mean_y, self.gram, self.cross, self.syy = mass, mean_x, mean_y, gram, cross, syy

    @classmethod
    def zeros(cls, heads: int, features: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> _Sums:
        small = [(heads,), (heads, features), (heads, head_dim)]
        mass, mean_x, mean_y = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in small)
        gram, cross = (
            torch.zeros(heads, features, width, dtype=dtype, device=device) for width in (features, head_dim)
        )
        return cls(mass, mean_x, mean_y, gram, cross, torch.zeros_like(mean_y))

    def panels(self) -> list[tuple[int, int]]:
        width = self.gram.shape[1]
        step = max(256, math.ceil(width / _PANELS))
        return [(start, min(start + step, width)) for start in range(0, width, step)]

    def mirror(self) -> None:
        for start, stop in self.panels():
            self.gram[:, stop:, start:stop] = self.gram[:, start:stop, stop:].mT

    def update(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds a block of `x` `[heads, rows, features]` and `y` `[heads, rows, head_dim]`; all are float64."""
        mass = weights.sum(1)
        share, scale = self._shares(mass)
        roots = weights.sqrt()[:, :, None]
        x, shift_x = self._centred(x, weights, mass, roots, self.mean_x, scale)
        y, shift_y = self._centred(y, weights, mass, roots, self.mean_y, scale)
        panels = self.panels()
        # One head at a time: a batched product would copy the panel, which is no contiguous piece of the whole.
        for gram, rows in zip(self.gram, x, strict=True):
            for start, stop in panels:
                gram[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
        self.cross.baddbmm_(x.mT, y)
        self.syy.add_(y.double().square_().sum(1))
        self._move(mass, share, shift_x, shift_y)

    def _shares(self, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        What part of the whole mass is the new one, and the factor of the product of shifts (Chan, Golub and LeVeque),
        both of shape `[heads, 1]`.
        """
        # Heads of which no row has a weight yet have no mean to move.
        share = torch.where(mass > 0, mass / (self.mass + mass), 0.0)
        return share[:, None], (self.mass * share)[:, None]

    def _centred(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        mass: torch.Tensor,
        roots: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        `rows` minus their own mean, times the roots of their weights, with the shift of that mean from `mean` as one
        more row: a single product of the result is then the whole update. Returns it and the shift.
        """
        block_mean = (weights[:, None] @ rows)[:, 0] / torch.where(mass > 0, mass, 1.0)[:, None]
        shift = block_mean - mean
        block = torch.cat([(rows - block_mean[:, None]).mul_(roots), (shift * scale.sqrt())[:, None]], dim=1)
        return block.to(self.gram.dtype), shift

    def _move(self, mass: torch.Tensor, share: torch.Tensor, shift_x: torch.Tensor, shift_y: torch.Tensor) -> None:
        self.mean_x.add_(shift_x * share)
        self.mean_y.add_(shift_y * share)
        self.mass.add_(mass)

    def merge(self, other: _Sums) -> None:
        mass = other.mass.to(self.mass)
        share, scale = self._shares(mass)
        shift_x, shift_y = other.mean_x.to(self.mean_x) - self.mean_x, other.mean_y.to(self.mean_y) - self.mean_y
        left = (shift_x * scale).to(self.gram.dtype)[:, :, None]
        self.gram.add_(other.gram.to(self.gram)).baddbmm_(left, shift_x.to(left)[:, None])
        self.cross.add_(other.cross.to(self.cross)).baddbmm_(left, shift_y.to(left)[:, None])
        self.syy.add_(other.syy.to(self.syy)).add_(shift_y.square() * scale)
        self._move(mass, share, shift_x, shift_y)


class WeightedMoments:
    """
    Centred second moments between the features and the outputs of all KV heads of one target layer and kind, for ridge
    with rows weighted by `w = 1 + α (r / r̄ − 1)` (arXiv 2609.00891, attention-weighted rows).

    Every weighted sum is a combination of the plain and the `r`-weighted one, so both are kept, and `α` and the
    features are chosen afterwards. Blocks are merged with the pairwise formula of Chan, Golub and LeVeque, as in
    [`Moments`].

    Args:
        heads (`int`): KV heads, each with features, outputs and weights of its own.
        features (`int`): Features of one head.
        head_dim (`int`): Outputs of one head.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`):
            Precision of the large sums, `torch.float64` or `torch.float32`. Means and `syy` are always float64.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where the sums live.

    Attributes:
        count (`int`): Number `n` of rows (tokens) seen.

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
    ) -> None:
        if dtype not in (torch.float64, torch.float32):
            raise CalibrationError(
                f"Weighted moments can be summed in torch.float64 or torch.float32, not in {dtype}: half precision "
                "would lose the small eigenvalues that the map depends on."
            )
        self.count = 0
        self._plain = _Sums.zeros(heads, features, head_dim, dtype, device)
        self._weighted = _Sums.zeros(heads, features, head_dim, dtype, device)
        self._squares = torch.zeros(heads, dtype=torch.float64, device=device)
        # Only the upper panels are summed; the rest is filled in when somebody reads.
        self._mirrored = True

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the large sums."""
        return self._plain.gram.dtype

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self._plain.gram.device

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
        heads, features, head_dim = self._plain.cross.shape
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
        self._mirrored = self._mirrored and rows == 0
        for start in range(0, rows, _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            wide_x, wide_y = (each[:, block].to(device=self.device, dtype=torch.float64) for each in (x, y))
            self._plain.update(wide_x, wide_y, torch.ones_like(weights[:, block]))
            self._weighted.update(wide_x, wide_y, weights[:, block])
        self._squares.add_(weights.square().sum(1))
        self.count += rows

    def merge(self, other: WeightedMoments) -> None:
        """
        Add what another process has summed, in place; the order doesn't matter beyond rounding.

        Args:
            other (`WeightedMoments`): Of the same shape, over other rows weighted on the same scale; left unchanged.

        Raises:
            CalibrationError: The shapes differ.
        """
        if other._plain.cross.shape != self._plain.cross.shape:
            raise CalibrationError(
                f"Weighted moments of shape {list(other._plain.cross.shape)} can't be merged into moments of shape "
                f"{list(self._plain.cross.shape)}: merge statistics of the same pair of models only."
            )
        self._plain.merge(other._plain)
        self._weighted.merge(other._weighted)
        self._squares.add_(other._squares.to(self._squares))
        self._mirrored = False
        self.count += other.count

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, not copied; with `count` they are the whole state."""
        self._mirror()
        sums = {"plain": self._plain, "weighted": self._weighted}
        named = {f"{kind}_{name}": getattr(each, name) for kind, each in sums.items() for name in _NAMES}
        return {**named, "squares": self._squares}

    @classmethod
    def from_tensors(cls, count: int, tensors: dict[str, torch.Tensor]) -> WeightedMoments:
        """The inverse of [`~WeightedMoments.tensors`]: takes the tensors over, without copying them."""
        moments = cls.__new__(cls)
        moments.count = count
        moments._plain, moments._weighted = (
            _Sums(*(tensors[f"{kind}_{name}"] for name in _NAMES)) for kind in ("plain", "weighted")
        )
        moments._squares = tensors["squares"]
        moments._mirrored = True
        return moments

    def _mirror(self) -> None:
        if not self._mirrored:
            self._plain.mirror()
            self._weighted.mirror()
            self._mirrored = True

    def largest_alpha(self, features_used: int) -> torch.Tensor:
        """
        The largest `α ≤ 1` that leaves an effective sample size (Kish) `n / (1 + α² CV²(r)) ≥ min(n, 2p)`.

        Args:
            features_used (`int`): `p`, how many features of a head the ridge will read.

        Returns:
            `torch.Tensor` of shape `[heads]`, float64: 0 for a head whose weights are all 0.
        """
        mass = self._weighted.mass
        variation = torch.where(mass > 0, self.count * self._squares / mass.square() - 1, math.inf).clamp_(min=0)
        # What CV² times α² may be. Without variation any α will do.
        room = max(0.0, self.count / max(2 * features_used, 1) - 1)
        return torch.where(variation > room, (room / variation).sqrt(), 1.0)

    def system(
        self, alpha: torch.Tensor | float, columns: Sequence[slice] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        The centred sums over rows weighted by `w = 1 + α (r / r̄ − 1)`, which sum to `n`, ready for a ridge solve.

        Args:
            alpha (`torch.Tensor` of shape `[heads]` or `float`):
                From 0, where all rows count the same, to 1, where `r` alone decides.
            columns (`Sequence[slice]`, *optional*): Which features, in this order; all by default.

        Returns:
            `tuple` of the Gram matrix `[heads, p, p]`, the cross product `[heads, p, head_dim]` (both in the moments'
            dtype), the means of features `[heads, p]` and outputs `[heads, head_dim]`, and the diagonal
            `Σ w (y − ȳ)²` `[heads, head_dim]` (float64).
        """
        self._mirror()
        plain, weighted = self._plain, self._weighted
        chosen = torch.arange(plain.gram.shape[1], device=self.device)
        if columns is not None:
            chosen = torch.cat([chosen[part] for part in columns])
        # A head that nobody reads has no weights to go by.
        strength = torch.where(weighted.mass > 0, torch.as_tensor(alpha).to(plain.mass), 0.0)
        # r / r̄ as a factor of r. The two weighted means differ, which adds the product of their difference.
        factor = torch.where(weighted.mass > 0, strength * self.count / weighted.mass, 0.0)
        between = self.count * strength * (1 - strength)
        gap_x, gap_y = (plain.mean_x - weighted.mean_x)[:, chosen], plain.mean_y - weighted.mean_y

        def mixed(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            rest, part = (each.view(-1, *[1] * (first.dim() - 1)).to(first) for each in (1 - strength, factor))
            return first.mul(rest).add_(second.mul(part))

        left = (between[:, None] * gap_x).to(self.dtype)[:, :, None]
        square = (slice(None), chosen[:, None], chosen)
        gram = mixed(plain.gram[square], weighted.gram[square]).baddbmm_(left, gap_x.to(left)[:, None])
        cross = mixed(plain.cross[:, chosen], weighted.cross[:, chosen]).baddbmm_(left, gap_y.to(left)[:, None])
        syy = mixed(plain.syy, weighted.syy).add_(between[:, None] * gap_y.square())
        mean_x = plain.mean_x[:, chosen].lerp(weighted.mean_x[:, chosen], strength[:, None])
        mean_y = plain.mean_y.lerp(weighted.mean_y, strength[:, None])
        return gram, cross, mean_x, mean_y, syy
