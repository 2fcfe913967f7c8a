"""`LinearMap`, the affine map of the published closed forms."""

import torch
from torch import Tensor, nn
from transformers import initialization

from .base import MapForm, affine


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

    def forward(self, features: Tensor) -> Tensor:
        return affine(features, self.weight, self.bias, self.heads)
