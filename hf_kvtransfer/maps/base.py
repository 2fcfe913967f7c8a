"""`MapForm`, what all functional forms share, and the product that they are made of."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


Prepared = Callable[[Sequence[Tensor]], Tensor]
"""What [`MapForm.prepared`] returns."""


class MapForm(nn.Module, ABC):
    """
    A map from features of the source to the keys or values of one target layer, all its KV heads at once.

    Args:
        in_features (`int`): number of features that one group reads.
        heads (`int`): KV heads of the target layer.
        head_dim (`int`): their width.
        groups (`int`, *optional*, defaults to 1):
            1 if all heads read the same features, `heads` if each reads its own.
    """

    has_linear_part = False
    """Whether a closed-form solution can be written into it, with [`~MapForm.set_linear`]."""

    def __init__(self, in_features: int, heads: int, head_dim: int, groups: int = 1) -> None:
        super().__init__()
        self.in_features = in_features
        self.heads = heads
        self.head_dim = head_dim
        self.groups = groups
        self.out_features = heads * head_dim

    @property
    @abstractmethod
    def weight_like(self) -> Tensor:
        """A weight whose dtype and device are those in which the form computes."""

    @property
    def needs_scales(self) -> bool:
        """Whether [`~MapForm.set_scales`] would do something, and hasn't been called yet."""
        return False

    @abstractmethod
    def reset_parameters(self) -> None:
        """Gives all weights their initial values, through `transformers.initialization`."""

    @abstractmethod
    def forward(self, features: Tensor) -> Tensor:
        """`features` of shape `[groups, rows, in_features]`, of any dtype, to `[rows, heads · head_dim]`."""

    def prepared(self, widths: Sequence[int]) -> "Prepared":
        """
        The map as a function of features that come in several pieces, to be called again and again with the weights
        that it has now.

        Args:
            widths (`Sequence[int]`): how many features each piece holds, in their order; `in_features` in total.

        Returns:
            `Callable`: from pieces, each `[rows, width]` with one group and `[groups, rows, width]` with more, to
            `[rows, heads · head_dim]` or `[heads, rows, head_dim]`.
        """

        def called(pieces: Sequence[Tensor]) -> Tensor:
            features = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=-1)
            made: Tensor = self(features if features.dim() == 3 else features[None])
            return made

        return called

    @property
    def linear_shape(self) -> tuple[int, ...]:
        """Of the weight of an affine map of this shape, as [`affine`] reads it."""
        if self.groups == 1:
            return self.out_features, self.in_features
        return self.heads, self.head_dim, self.in_features

    @torch.no_grad()
    def set_linear(self, weight: Tensor, bias: Tensor) -> None:
        """
        Writes a closed-form solution into the linear part. Forms without one keep their weights.

        Args:
            weight (`torch.Tensor`):
                `[heads · head_dim, in_features]`, or the same numbers as `[heads, head_dim, in_features]`.
            bias (`torch.Tensor`): `[heads · head_dim]`, or the same numbers as `[heads, head_dim]`.
        """
        if self.has_linear_part:
            own: Any = self
            own.weight.copy_(weight.reshape(self.linear_shape))
            own.bias.copy_(bias.flatten())

    def set_scales(
        self, feature_mean: Tensor, feature_scale: Tensor, output_mean: Tensor, output_scale: Tensor
    ) -> None:
        """
        Tells what is mapped, so that the part that is trained reads and writes numbers of mean 0 and variance 1.
        Forms without such a part have no use for it.

        Args:
            feature_mean (`torch.Tensor` of shape `[groups, in_features]`): mean of each feature.
            feature_scale (`torch.Tensor` of shape `[groups, in_features]`): its standard deviation, above zero.
            output_mean (`torch.Tensor` of shape `[heads · head_dim]`): mean of each number that is mapped to.
            output_scale (`torch.Tensor` of shape `[heads · head_dim]`): its standard deviation.
        """

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, heads={self.heads}, head_dim={self.head_dim}"
            f"{f', groups={self.groups}' if self.groups > 1 else ''}"
        )


def is_wrapped(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says: hooks, a compiled or replaced forward, other weights."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
        or any(type(parameter) is not nn.Parameter for parameter in module._parameters.values())
    )


def affine(features: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
    """
    The affine map of all heads of a layer.

    Args:
        features (`torch.Tensor` of shape `[groups, rows, in]`): shared by all heads, or one set for each.
        weight (`torch.Tensor`): `[heads · head_dim, in]` with one group, `[heads, head_dim, in]` with more.
        bias (`torch.Tensor` of shape `[heads · head_dim]`): of all heads.
        heads (`int`): how many.

    Returns:
        `torch.Tensor` of shape `[rows, heads · head_dim]`, computed in the dtype of `weight`.
    """
    features = features.to(weight.dtype)
    if weight.dim() == 2:
        return nn.functional.linear(features[0], weight, bias)
    return product(features, weight, bias.unflatten(0, (heads, -1))).transpose(0, 1).flatten(1)


def product(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """
    One affine product per head, in a single large or batched one.

    Args:
        features (`torch.Tensor` of shape `[1 or heads, rows, in]`): shared by all heads, or one set for each.
        weight (`torch.Tensor` of shape `[heads, out, in]`): of each head.
        bias (`torch.Tensor` of shape `[heads, out]`): of each head.

    Returns:
        `torch.Tensor` of shape `[heads, rows, out]`.
    """
    if features.shape[0] == 1:
        flat = nn.functional.linear(features[0], weight.flatten(0, 1), bias.flatten())
        return flat.unflatten(-1, weight.shape[:2]).transpose(0, 1)
    return torch.baddbmm(bias[:, None], features, weight.transpose(1, 2))
