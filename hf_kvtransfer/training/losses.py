"""The losses, one number a row each, so that batches of any size average to the same."""

from typing import Any

import torch
from torch import Tensor, nn

from .._compat import cache_keyword
from ..appending import extend_cache
from ..cache import TransferredCache
from ..calibration.attention import QueryRecord, attention_output, attention_probabilities
from ..conversion import TargetSide, convert_entries
from ..mapper import KVMapper
from ..source import SourceCache
from .batches import counted_positions
from .handover import HandOver


def content_error(mapped: Tensor, native: Tensor) -> Tensor:
    """
    Mean squared error of one layer's content-space keys, or values.

    Args:
        mapped (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): what the maps give.
        native (`torch.Tensor` of the same shape): the target's own.

    Returns:
        `torch.Tensor` of shape `[batch]`, in float32.
    """
    return (mapped.float() - native.float()).square().mean(dim=(1, 2, 3))


def attention_error(record: QueryRecord, mapped: tuple[Tensor, Tensor], native: tuple[Tensor, Tensor]) -> Tensor:
    """
    Relative squared error of one layer's attention output under the target's own queries, `Σ ‖ô − o‖² / Σ ‖o‖²`.

    Args:
        record ([`QueryRecord`]): the queries.
        mapped (`tuple[torch.Tensor, torch.Tensor]`):
            Rotated keys, and values, of shape `[batch, kv_heads, tokens, head_dim]`.
        native (`tuple[torch.Tensor, torch.Tensor]`): the target's own.

    Returns:
        `torch.Tensor` of shape `[batch]`, in float32.
    """
    with torch.autocast(record.queries.device.type, enabled=False):
        given, expected = (
            attention_output(attention_probabilities(record, keys.float()), values.float())
            for keys, values in (mapped, native)
        )
    return (given - expected).square().flatten(1).sum(-1) / expected.square().flatten(1).sum(-1)


def next_token_divergence(
    mapper: KVMapper,
    target: nn.Module,
    input_ids: Tensor,
    source: SourceCache,
    native: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    handover: HandOver,
) -> tuple[Tensor, Tensor]:
    """
    How far the target's next-token distributions on a converted context are from those on its own. Gradients flow into
    what is mapped; what the target reads itself, as an exact suffix, carries none.

    Args:
        mapper ([`KVMapper`]): the maps.
        target (`PreTrainedModel`): frozen, in evaluation mode.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): the rows.
        source ([`SourceCache`]): of the rows.
        native (`tuple`): the target's own keys and values of the rows, per layer.
        handover ([`HandOver`]): how many tokens are converted, and how many are then scored.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: per row, the mean of `KL(native ‖ transferred)` in nats a token, and the
        share of tokens with the same most likely next one.
    """
    context, continuation = handover
    fed = input_ids[:, context : context + continuation]
    config = mapper.config
    side = None
    if config.needs_target:
        side = TargetSide(target, input_ids[:, :context], config.exact_prefix, config.exact_suffix)
    before, positions = source.narrow(0, context), counted_positions(context, input_ids.device)
    # What `convert` does, without checking the target again in every step.
    converted = TransferredCache.for_geometry(config.geometry("target"))
    entries = convert_entries(mapper, before, positions, 0, context, converted, side, validate=False)
    # Both caches take on the dtype and devices of the target, whatever the features were stored in.
    own = TransferredCache.for_geometry(config.geometry("target"))
    for index, (mapped, keys, values) in enumerate(zip(entries, *native, strict=True)):
        extend_cache(converted, index, *mapped)
        extend_cache(own, index, keys[:, :, :context], values[:, :, :context])
    # A frozen model computes in its own precision; mixed precision is for the maps.
    with torch.autocast(fed.device.type, enabled=False):
        with torch.no_grad():
            expected = _log_probabilities(target, fed, own)
        given = _log_probabilities(target, fed, converted)
    divergence = nn.functional.kl_div(given, expected, log_target=True, reduction="none").sum(-1).mean(-1)
    agreement = (given.detach().argmax(-1) == expected.argmax(-1)).float().mean(-1)
    return divergence, agreement


def _log_probabilities(target: Any, fed: Tensor, cache: Any) -> Tensor:
    logits = target(input_ids=fed, use_cache=True, **{cache_keyword(target): cache}).logits
    return nn.functional.log_softmax(logits.float(), dim=-1)
