"""`LinearMap`, the affine map of the published closed forms."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization

from .base import MapForm, affine, is_wrapped


_EXACT_SUMS = (torch.float32, torch.float64)


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

    def from_pieces(self, pieces: Sequence[Tensor]) -> Tensor:
        """
        As in [`MapForm`]. Without gradients and in full precision each piece is multiplied where it lies, and added to
        what the pieces before it gave: features are never put together. Lower precisions would round each sum.
        """
        if torch.is_grad_enabled() or self.weight.dtype not in _EXACT_SUMS or is_wrapped(self):
            return super().from_pieces(pieces)
        first, *others = zip(pieces, self.weight.split([piece.shape[-1] for piece in pieces], dim=-1), strict=True)
        if self.weight.dim() == 3:
            made = torch.baddbmm(self.bias.view(self.heads, 1, -1), first[0], first[1].transpose(1, 2))
            for piece, weight in others:
                made.baddbmm_(piece, weight.transpose(1, 2))
            return made
        made = torch.addmm(self.bias, first[0][0], first[1].t())
        for piece, weight in others:
            made.addmm_(piece[0], weight.t())
        return made.unflatten(-1, (self.heads, self.head_dim)).transpose(0, 1)

    def forward(self, features: Tensor) -> Tensor:
        return affine(features, self.weight, self.bias, self.heads)
