"""Running some of the target's layers from a residual stream that was predicted, not computed from the embedding."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .modules import decoder_of
from .native import NORM_EPS, NativeRun, rms_normalised, run_native


def stream_features(hidden: Tensor) -> Tensor:
    """
    A residual stream as features: its direction, normalised to a mean square of one, and the logarithm of its size.

    Args:
        hidden (`torch.Tensor` of shape `[..., hidden_size]`): in any floating-point dtype.

    Returns:
        `torch.Tensor` of shape `[..., hidden_size + 1]`, in float32.
    """
    # The size by which `rms_normalised` divides, so that the two together are the stream.
    size = (hidden.float().square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return torch.cat([rms_normalised(hidden), size.log()], dim=-1)


def stream_from(features: Tensor) -> Tensor:
    """The inverse of [`stream_features`], in float32; also of features that a map predicts."""
    features = features.float()
    return features[..., :-1] * features[..., -1:].exp()


def run_block(
    target: nn.Module,
    input_ids: Tensor,
    entry: Tensor,
    *,
    start: int,
    layers: int,
    past: Sequence[tuple[Tensor, Tensor]] | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> NativeRun:
    """
    Runs layers `start` to `start + layers − 1` of the target over new tokens, from a given residual stream.

    The model's own `forward` runs, on a shallow copy of the decoder in which the layers before are stood in for; the
    model itself is not touched.

    Args:
        target (`torch.nn.Module`): the target model.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): the new tokens.
        entry (`torch.Tensor` of shape `[batch, tokens, hidden_size]`): what enters layer `start`.
        start (`int`): the first layer that runs, 1 or more.
        layers (`int`): how many run, 1 or more.
        past (sequence of `(keys, values)`, *optional*): of the layers that come back, for all preceding tokens.
        attention_mask (`torch.Tensor` of shape `[batch, past + tokens]`, *optional*): 1 for real tokens.
        position_ids (`torch.Tensor` of shape `[batch or 1, tokens]`, *optional*): of the new tokens.

    Returns:
        [`NativeRun`]: keys and values of layers `start` to `start + layers`, the last by its projection alone, and the
        residual stream that enters that one.
    """
    decoder = decoder_of(target)
    view = copy.copy(decoder)
    view.__dict__["_modules"] = dict(decoder._modules)
    # accelerate's wrapper around `forward` is bound to the decoder itself; those of the layers stay in place.
    view.__dict__.pop("forward", None)
    layer = decoder.layers[start]
    like = next(layer.parameters())
    entering = _StandIn(layer, entry.to(like.dtype if like.is_floating_point() else entry.dtype))
    view.layers = nn.ModuleList(
        [*(_StandIn(skipped) for skipped in decoder.layers[:start]), entering, *decoder.layers[start + 1 :]]
    )
    # Of the layers that don't run only the number of tokens is asked.
    held = [past[0]] * start + list(past) if past else None
    return run_native(
        view,
        input_ids,
        layers=start + layers,
        past=held,
        attention_mask=attention_mask,
        position_ids=position_ids,
    )


class _StandIn(nn.Module):
    """In the place of a layer: hands its input on, or runs the layer on another one."""

    def __init__(self, layer: nn.Module, entry: Tensor | None = None) -> None:
        super().__init__()
        # Not as submodules: only what runs belongs to the view.
        self.__dict__["_layer"], self.__dict__["_entry"] = layer, entry
        if entry is not None:
            self.layer = layer

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        layer, entry = self.__dict__["_layer"], self.__dict__["_entry"]
        return hidden_states if entry is None else layer(entry.to(hidden_states.device), *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"], name)
