"""Running a model on top of a cache, native or converted, and scoring what follows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .._compat import cache_keyword
from ..geometry import decoder_of


@dataclass(frozen=True)
class ContinuationScore:
    """
    Args:
        nll (`torch.Tensor` of shape `[batch, scored]`): negative log-likelihood of each scored token, in nats.
        greedy (`torch.Tensor` of shape `[batch, scored]`): whether each scored token was the most likely one.
    """

    nll: Tensor
    greedy: Tensor


@torch.inference_mode()
def prefill(model: nn.Module, input_ids: Tensor) -> DynamicCache:
    """
    The model's own cache of a context, without its LM head: `[batch, tokens]` to one entry per token and layer.

    The cache keeps every token, also where the model attends within a sliding window only.
    """
    cache = DynamicCache()
    decoder = decoder_of(model)
    decoder(input_ids=input_ids, use_cache=True, **{cache_keyword(decoder): cache})
    return cache


@torch.inference_mode()
def score_continuation(model: nn.Module, input_ids: Tensor, cache: Any = None, *, scored: int) -> ContinuationScore:
    """
    Feeds tokens on top of a cache and scores the last of them. The cache grows.

    Args:
        model (`PreTrainedModel`): the model that goes on.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): everything that is not in the cache, up to the end.
        cache (`Cache`, *optional*): what went before; without it, nothing did.
        scored (`int`): how many of the last tokens are scored, fewer than there are tokens.

    Returns:
        [`ContinuationScore`]
    """
    call: Any = model
    keywords = {} if cache is None else {cache_keyword(model): cache}
    logits = call(input_ids=input_ids, use_cache=cache is not None, logits_to_keep=scored + 1, **keywords).logits
    logits = logits[:, -scored - 1 : -1].float()
    labels = input_ids[:, -scored:]
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return ContinuationScore(nll=nll, greedy=logits.argmax(-1) == labels)
