"""Streamed second moments: everything a closed-form linear map needs, in memory that doesn't grow with the tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from ..errors import CalibrationError
from ..memory import zeros


BLOCK_ROWS = 1024
"""Rows per product. Enough for BLAS to be busy; the scratch is two blocks of this many rows in the moments' dtype."""

_PANELS = 8
"""Column panels of the symmetric product. Eight of them spare 44 % of its arithmetic, and more would spare little."""


def check_precision(dtype: torch.dtype) -> None:
    """
    Refuses dtypes that sums can't be kept in.

    Raises:
        CalibrationError: It is neither float64 nor float32.
    """
    if dtype not in (torch.float64, torch.float32):
        raise CalibrationError(
            f"Moments can be summed in torch.float64 or torch.float32, not in {dtype}: half precision would lose "
            "the small eigenvalues that the map depends on."
        )


def panels(width: int) -> list[tuple[int, int]]:
    """The column panels of a symmetric product: of each, only what lies on and right of the diagonal is computed."""
    step = max(256, math.ceil(width / _PANELS))
    return [(start, min(start + step, width)) for start in range(0, width, step)]


def centred(
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: float | torch.Tensor,
    dtype: torch.dtype,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `rows` minus their own mean, times the roots of their weights, with the shift of that mean from `mean` as one more
    row of weight `scale`: a single product of the result is then the whole update.

    Args:
        rows (`torch.Tensor` of shape `[rows, width]`): A block, any floating dtype and device.
        mean (`torch.Tensor` of shape `[width]`, float64): Of the rows before.
        scale (`float` or `torch.Tensor`): The factor of the product of shifts (Chan, Golub and LeVeque).
        dtype (`torch.dtype`): Of the sums.
        weights (`torch.Tensor` of shape `[rows]`, *optional*): Above zero; all one by default.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows + 1, width]`, on the device of `mean`, and the shift, float64.
    """
    # No wider than what comes in or what goes out: a difference of close numbers is exact in any precision.
    block = torch.empty(len(rows) + 1, rows.shape[1], dtype=torch.promote_types(dtype, rows.dtype), device=mean.device)
    content = block[:-1].copy_(rows)

    def averaged() -> torch.Tensor:
        return content.mean(0) if weights is None else (weights / weights.sum()).to(content) @ content

    reference = averaged()
    content.sub_(reference)
    # The first mean is rounded to the block's precision; what it missed belongs to the mean all the same.
    shift = reference.double() + averaged().double() - mean
    if weights is not None:
        content.mul_(weights.sqrt().to(content)[:, None])
    block[-1] = shift * scale**0.5
    return block.to(dtype), shift


class Moments:
    """
    Centred second moments of one kind of content (keys or values) between all source layers, the features `x`, and all
    target layers, the outputs `y`.

    Blocks of rows are merged with the pairwise formula of Chan, Golub and LeVeque: every block is centred by its own
    mean before it is multiplied, so a large common offset costs no digits, as it would with raw sums.

    Args:
        source_width (`int`): Width `Dx` of the features, summed over all source layers.
        target_width (`int`): Width `Dy` of the outputs, summed over all target layers.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`):
            Precision of the two large sums, `torch.float64` or `torch.float32`. Means and `syy` are always float64.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where the sums live.
        disk (`str` or `os.PathLike`, *optional*):
            A folder whose disk holds the two large sums instead, on the CPU; see [`~hf_kvtransfer.memory.zeros`].

    Attributes:
        count (`int`): Number `n` of rows (tokens) seen.
        mean_x (`torch.Tensor` of shape `[Dx]`, float64), mean_y (`torch.Tensor` of shape `[Dy]`, float64): Means.
        sxy (`torch.Tensor` of shape `[Dx, Dy]`): `Σ (x − x̄)(y − ȳ)ᵀ`, a sum and not a mean.
        syy (`torch.Tensor` of shape `[Dy]`, float64): `Σ (y − ȳ)²` per output.
    """

    def __init__(
        self,
        source_width: int,
        target_width: int,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        check_precision(dtype)
        self.count = 0
        self.mean_x = torch.zeros(source_width, dtype=torch.float64, device=device)
        self.mean_y = torch.zeros(target_width, dtype=torch.float64, device=device)
        self.syy = torch.zeros(target_width, dtype=torch.float64, device=device)
        self.sxy, self._sxx = (
            zeros((source_width, width), dtype, device, disk) for width in (target_width, source_width)
        )
        # Only the upper panels are summed; the rest is filled in when somebody reads.
        self._mirrored = True

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the two large sums."""
        return self.sxy.dtype

    @property
    def device(self) -> torch.device:
        """Where the sums live."""
        return self.sxy.device

    @property
    def sxx(self) -> torch.Tensor:
        """`torch.Tensor` of shape `[Dx, Dx]`: `Σ (x − x̄)(x − x̄)ᵀ`, the centred and unnormalised Gram matrix."""
        if not self._mirrored:
            for start, stop in panels(len(self._sxx)):
                self._sxx[stop:, start:stop].copy_(self._sxx[start:stop, stop:].T)
            self._mirrored = True
        return self._sxx

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """
        Add rows.

        Args:
            x (`torch.Tensor` of shape `[tokens, Dx]`): Source content of these tokens, any floating dtype and device.
            y (`torch.Tensor` of shape `[tokens, Dy]`): Target content of the same tokens.

        Raises:
            CalibrationError: If the shapes don't fit these moments or each other.
        """
        widths = (self.mean_x.shape[0], self.mean_y.shape[0])
        if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0] or (x.shape[1], y.shape[1]) != widths:
            raise CalibrationError(
                f"Got source rows {list(x.shape)} and target rows {list(y.shape)}, expected [tokens, {widths[0]}] and "
                f"[tokens, {widths[1]}] for the same tokens: capture both models on the same token ids."
            )
        for start in range(0, x.shape[0], BLOCK_ROWS):
            self._update_block(x[start : start + BLOCK_ROWS], y[start : start + BLOCK_ROWS])

    def _update_block(self, x: torch.Tensor, y: torch.Tensor) -> None:
        rows = x.shape[0]
        total = self.count + rows
        scale = self.count * rows / total
        x, shift_x = centred(x, self.mean_x, scale, self.dtype)
        y, shift_y = centred(y, self.mean_y, scale, self.dtype)
        for start, stop in panels(len(self._sxx)):
            self._sxx[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])
        self._mirrored = False
        self.sxy.addmm_(x.T, y)
        self.syy.add_(y.to(torch.float64).square_().sum(0))
        self.mean_x.add_(shift_x, alpha=rows / total)
        self.mean_y.add_(shift_y, alpha=rows / total)
        self.count = total

    def merge(self, other: Moments) -> None:
        """
        Add what another process has summed, in place; the order doesn't matter beyond rounding.

        Args:
            other (`Moments`): Moments of the same widths over other rows; left unchanged.

        Raises:
            CalibrationError: If the widths differ.
        """
        if other.sxy.shape != self.sxy.shape:
            raise CalibrationError(
                f"Moments between widths {list(other.sxy.shape)} can't be merged into moments between widths "
                f"{list(self.sxy.shape)}: merge statistics of the same pair of models only."
            )
        if other.count == 0:
            return
        total = self.count + other.count
        scale = self.count * other.count / total
        shift_x = other.mean_x.to(self.device) - self.mean_x
        shift_y = other.mean_y.to(self.device) - self.mean_y
        narrow_x, narrow_y = shift_x.to(self.dtype), shift_y.to(self.dtype)
        self._sxx.add_(other._sxx.to(self._sxx)).addr_(narrow_x, narrow_x, alpha=scale)
        self._mirrored = self._mirrored and other._mirrored
        self.sxy.add_(other.sxy.to(self.sxy)).addr_(narrow_x, narrow_y, alpha=scale)
        self.syy.add_(other.syy.to(self.device)).add_(shift_y.square(), alpha=scale)
        self.mean_x.add_(shift_x, alpha=other.count / total)
        self.mean_y.add_(shift_y, alpha=other.count / total)
        self.count = total

    def pool(self, add: Callable[[torch.Tensor], None]) -> None:
        """
        Put together what several processes have summed, in place; each ends up with the same.

        Args:
            add (`Callable`): Sums a tensor over all processes, in place; each calls it in the same order.
        """
        own = self.count
        count = torch.tensor([own], dtype=torch.float64, device=self.device)
        add(count)
        self.count = int(count)
        if self.count == 0:
            return
        shifts = []
        for mean in (self.mean_x, self.mean_y):
            before = mean.clone()
            add(mean.mul_(own / self.count))
            shifts.append(before.sub_(mean))
        shift_x, shift_y = shifts
        narrow_x, narrow_y = shift_x.to(self.dtype), shift_y.to(self.dtype)
        self._sxx.addr_(narrow_x, narrow_x, alpha=own)
        self.sxy.addr_(narrow_x, narrow_y, alpha=own)
        self.syy.add_(shift_y.square(), alpha=own)
        for sums in (self._sxx, self.sxy, self.syy):
            add(sums)
        self._mirrored = False

    def to(self, device: torch.device | str) -> Moments:
        """These moments on another device; itself if they are there already."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return self if tensors["sxx"] is self._sxx else Moments.from_tensors(self.count, tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The five tensors by name, not copied; with `count` they are the whole state."""
        return {"mean_x": self.mean_x, "mean_y": self.mean_y, "sxx": self.sxx, "sxy": self.sxy, "syy": self.syy}

    @classmethod
    def from_tensors(cls, count: int, tensors: dict[str, torch.Tensor]) -> Moments:
        """The inverse of [`~Moments.tensors`]: takes the tensors over, without copying them."""
        moments = cls.__new__(cls)
        moments.count = count
        moments.mean_x, moments.mean_y = tensors["mean_x"], tensors["mean_y"]
        moments._sxx, moments.sxy, moments.syy = tensors["sxx"], tensors["sxy"], tensors["syy"]
        moments._mirrored = True
        return moments
