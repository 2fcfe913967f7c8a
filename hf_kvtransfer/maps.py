"""The functional forms of a map from source features to the keys or values of one target layer."""

import torch
from torch import Tensor, nn
from transformers import initialization


class LinearMap(nn.Module):
    """
    An affine map `y = x Wᵀ + b` for all KV heads of one target layer at once.

    Args:
        in_features (`int`): width of the source features, `Σ kv_heads × head_dim` over the supporting layers.
        out_features (`int`): width of the target layer, `kv_heads × head_dim`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def reset_parameters(self) -> None:
        """Zeroes the map: until it is fitted, it predicts nothing."""
        initialization.zeros_(self.weight)
        initialization.zeros_(self.bias)

    def forward(self, features: Tensor) -> Tensor:
        """`features` of shape `[..., in_features]` to `[..., out_features]`."""
        return nn.functional.linear(features, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


MAPS: dict[str, type[LinearMap]] = {"linear": LinearMap}
