"""`ResidualMap`, a trained correction on top of a closed form that stays as it was solved."""

import torch
from torch import Tensor
from transformers import initialization

from .base import MapForm, affine
from .mlp import MLPMap


class ResidualMap(MapForm):
    """
    A frozen affine map plus an MLP whose last layer starts at zero, so that untrained it is its affine map to the last
    bit.

    `weight` and `bias` are as in [`LinearMap`], but as buffers: no optimiser sees them, before a save or after it.

    Args:
        in_features (`int`): number of features that one group reads.
        heads (`int`): KV heads of the target layer.
        head_dim (`int`): their width.
        groups (`int`, *optional*, defaults to 1):
            1 if all heads read the same features, `heads` if each reads its own.
        hidden (`int`, *optional*, defaults to 1024): units in each hidden layer of one head of the MLP.
    """

    has_linear_part = True

    def __init__(self, in_features: int, heads: int, head_dim: int, groups: int = 1, hidden: int = 1024) -> None:
        super().__init__(in_features, heads, head_dim, groups)
        self.register_buffer("weight", torch.empty(self.linear_shape))
        self.register_buffer("bias", torch.empty(self.out_features))
        self.correction = MLPMap(in_features, heads, head_dim, groups, hidden)

    weight: Tensor
    bias: Tensor

    @property
    def weight_like(self) -> Tensor:
        return self.weight

    @property
    def needs_scales(self) -> bool:
        return self.correction.needs_scales

    def reset_parameters(self) -> None:
        """Zeroes the affine map and the last layer of the MLP; its other layers start as in [`MLPMap`]."""
        self.correction.reset_parameters()
        for zeroed in (self.weight, self.bias, self.correction.weight_out, self.correction.bias_out):
            initialization.zeros_(zeroed)

    def set_scales(
        self, feature_mean: Tensor, feature_scale: Tensor, output_mean: Tensor, output_scale: Tensor
    ) -> None:
        # What the correction writes is an error of the affine map, whose mean is zero.
        self.correction.set_scales(feature_mean, feature_scale, torch.zeros_like(output_mean), output_scale)

    def forward(self, features: Tensor) -> Tensor:
        return affine(features, self.weight, self.bias, self.heads) + self.correction(features)
