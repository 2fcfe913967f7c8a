"""`MLPMap`, two hidden layers for each head."""

import torch
from torch import Tensor, nn
from transformers import initialization

from .base import MapForm, product


class MLPMap(MapForm):
    """
    Two hidden layers of ReLU units for each KV head (arXiv 2608.03893, the MLP variant), computed for all heads in a
    few large products. Features are standardised on the way in and outputs on the way out, with means and scales
    that are saved beside the weights; they are 0 and 1 until [`~MapForm.set_scales`].

    Args:
        in_features (`int`): number of features that one group reads.
        heads (`int`): KV heads of the target layer.
        head_dim (`int`): their width.
        groups (`int`, *optional*, defaults to 1):
            1 if all heads read the same features, `heads` if each reads its own.
        hidden (`int`, *optional*, defaults to 1024): units in each hidden layer of one head.
    """

    def __init__(self, in_features: int, heads: int, head_dim: int, groups: int = 1, hidden: int = 1024) -> None:
        super().__init__(in_features, heads, head_dim, groups)
        self.hidden = hidden
        self.weight_in = nn.Parameter(torch.empty(heads, hidden, in_features))
        self.bias_in = nn.Parameter(torch.empty(heads, hidden))
        self.weight_hidden = nn.Parameter(torch.empty(heads, hidden, hidden))
        self.bias_hidden = nn.Parameter(torch.empty(heads, hidden))
        self.weight_out = nn.Parameter(torch.empty(heads, head_dim, hidden))
        self.bias_out = nn.Parameter(torch.empty(heads, head_dim))
        self.register_buffer("feature_mean", torch.empty(groups, in_features))
        self.register_buffer("feature_scale", torch.empty(groups, in_features))
        self.register_buffer("output_mean", torch.empty(self.out_features))
        self.register_buffer("output_scale", torch.empty(self.out_features))

    feature_mean: Tensor
    feature_scale: Tensor
    output_mean: Tensor
    output_scale: Tensor

    @property
    def weight_like(self) -> Tensor:
        return self.weight_in

    @property
    def needs_scales(self) -> bool:
        return not bool(self.feature_mean.any()) and bool((self.feature_scale == 1).all())

    def reset_parameters(self) -> None:
        """Draws weights as `torch.nn.Linear` does, from torch's own generator, and forgets means and scales."""
        for weight, bias in (
            (self.weight_in, self.bias_in),
            (self.weight_hidden, self.bias_hidden),
            (self.weight_out, self.bias_out),
        ):
            bound = weight.shape[-1] ** -0.5
            initialization.uniform_(weight, -bound, bound)
            initialization.uniform_(bias, -bound, bound)
        for mean, scale in ((self.feature_mean, self.feature_scale), (self.output_mean, self.output_scale)):
            initialization.zeros_(mean)
            initialization.ones_(scale)

    @torch.no_grad()
    def set_scales(
        self, feature_mean: Tensor, feature_scale: Tensor, output_mean: Tensor, output_scale: Tensor
    ) -> None:
        self.feature_mean.copy_(feature_mean)
        self.feature_scale.copy_(feature_scale)
        self.output_mean.copy_(output_mean)
        self.output_scale.copy_(output_scale)

    def forward(self, features: Tensor) -> Tensor:
        features = features.to(self.weight_in.dtype)
        features = (features - self.feature_mean[:, None]) / self.feature_scale[:, None]
        states = nn.functional.relu(product(features, self.weight_in, self.bias_in))
        states = nn.functional.relu(product(states, self.weight_hidden, self.bias_hidden))
        states = product(states, self.weight_out, self.bias_out)
        return states.transpose(0, 1).flatten(1) * self.output_scale + self.output_mean

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.hidden}"
