"""`LinearMap`, the affine map of the published closed forms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization

from .base import MapForm, Prepared, affine, is_wrapped


_EXACT_SUMS = (torch.float32, torch.float64)
# Several products of fewer features each take longer (by 10 % at 192) than putting them together and one product.
_WORTH_A_PRODUCT = 512


class LinearMap(MapForm):
    """
    An affine map `y = x Wᵀ + b` (arXiv 2608.03893, §3; arXiv 2609.00891 with a group for each head).

    `weight` is `[heads · head_dim, in_features]` where all heads read the same features, and `[heads, head_dim,
    in_features]` where each reads its own; `bias` is `[heads · head_dim]`.

    Args:
        in_features (`int`): number of features that one group reads.
        heads (`int`): KV heads of the target layer.
        head_dim (`int`): their width.
        groups (`int`, *optional*, defaults to 1):
            1 if all heads read the same features, `heads` if each reads its own.
    """

    has_linear_part = True

    def __init__(self, in_features: int, heads: int, head_dim: int, groups: int = 1) -> None:
        super().__init__(in_features, heads, head_dim, groups)
        self.weight = nn.Parameter(torch.empty(self.linear_shape))
        self.bias = nn.Parameter(torch.empty(self.out_features))

    @property
    def weight_like(self) -> Tensor:
        return self.weight

    def reset_parameters(self) -> None:
        """Zeroes the map: until it is fitted, it predicts nothing."""
        initialization.zeros_(self.weight)
        initialization.zeros_(self.bias)

    def prepared(self, widths: Sequence[int]) -> Prepared:
        """
        As in [`MapForm`]. Without gradients and in full precision each wide piece is multiplied where it lies, and
        added to what the pieces before it gave, so that features are not put together. Lower precisions would round
        each sum.
        """
        if torch.is_grad_enabled() or self.weight.dtype not in _EXACT_SUMS or is_wrapped(self):
            return super().prepared(widths)
        if len(widths) > 1 and min(widths) < _WORTH_A_PRODUCT:
            whole = self.prepared([self.in_features])
            return lambda pieces: whole([torch.cat(list(pieces), dim=-1)])
        first, *others = [part.mT for part in self.weight.split(list(widths), dim=-1)]
        product: Any
        add: Any
        if self.weight.dim() == 3:
            bias, product, add = self.bias.view(self.heads, 1, -1), torch.baddbmm, Tensor.baddbmm_
        else:
            bias, product, add = self.bias, torch.addmm, Tensor.addmm_

        def summed(pieces: Sequence[Tensor]) -> Tensor:
            made = product(bias, pieces[0], first)
            for piece, weight in zip(pieces[1:], others, strict=True):
                add(made, piece, weight)
            return made

        return summed

    def forward(self, features: Tensor) -> Tensor:
        return affine(features, self.weight, self.bias, self.heads)
