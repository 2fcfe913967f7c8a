"""Running a model on top of a cache, native or converted, and scoring what follows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .._compat import cache_keyword
from ..errors import KVTransferError
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
    decoder: Any = decoder_of(model)
    decoder(input_ids=beside(decoder, input_ids), use_cache=True, **{cache_keyword(decoder): cache})
    return cache


def beside(model: Any, input_ids: Tensor) -> Tensor:
    """Token ids on the device on which a model embeds them."""
    return input_ids.to(model.get_input_embeddings().weight.device)


@torch.inference_mode()
def continuation_logits(model: nn.Module, input_ids: Tensor, cache: Any = None, *, scored: int) -> Tensor:
    """
    Feeds tokens on top of a cache and gives the logits that predict the last of them. The cache grows.

    Args:
        model (`PreTrainedModel`): the model that goes on.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): everything that is not in the cache, up to the end.
        cache (`Cache`, *optional*): what went before; without it, nothing did.
        scored (`int`): how many of the last tokens are predicted, fewer than there are tokens.

    Returns:
        `torch.Tensor` of shape `[batch, scored, vocabulary]`, in float32.
    """
    call: Any = model
    keywords = {} if cache is None else {cache_keyword(model): cache}
    fed = beside(call, input_ids)
    logits = call(input_ids=fed, use_cache=cache is not None, logits_to_keep=scored + 1, **keywords).logits
    kept: Tensor = logits[:, -scored - 1 : -1].float()
    return kept


def score_logits(logits: Tensor, labels: Tensor) -> ContinuationScore:
    """
    Scores tokens by the logits that predict them.

    Args:
        logits (`torch.Tensor` of shape `[batch, scored, vocabulary]`): from [`continuation_logits`].
        labels (`torch.Tensor` of shape `[batch, scored]`): the tokens that came.

    Returns:
        [`ContinuationScore`]
    """
    labels = labels.to(logits.device)
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return ContinuationScore(nll=nll, greedy=logits.argmax(-1) == labels)


def score_continuation(model: nn.Module, input_ids: Tensor, cache: Any = None, *, scored: int) -> ContinuationScore:
    """
    Feeds tokens on top of a cache and scores the last of them. The cache grows. Arguments as in
    [`continuation_logits`].

    Returns:
        [`ContinuationScore`]
    """
    return score_logits(continuation_logits(model, input_ids, cache, scored=scored), input_ids[:, -scored:])


def check_scores(nll: Tensor, condition: str) -> None:
    """
    Raises [`KVTransferError`] unless every likelihood is a number, of which figures could be made.

    Args:
        nll (`torch.Tensor` of any shape): negative log-likelihoods of what counts.
        condition (`str`): whose they are.
    """
    if not nll.isfinite().all():
        raise KVTransferError(
            f"Under the condition {condition!r} the model predicts NaN or infinite likelihoods; expected finite ones. "
            "Look for NaN in the weights of the model or the mapper, or compute in float32."
        )


def divergence(native: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    How far predictions are from the target's native ones.

    Args:
        native (`torch.Tensor` of shape `[batch, scored, vocabulary]`): logits of the target on its own cache.
        logits (`torch.Tensor` of shape `[batch, scored, vocabulary]`): those to compare.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`, both `[batch, scored]`: `KL(native ‖ other)` of the next-token
        distributions in nats, and 1 where the most likely token is the same, else 0. `nan` where the vocabularies
        differ in size.
    """
    if native.shape != logits.shape:
        undefined = torch.full(native.shape[:2], float("nan"))
        return undefined, undefined
    divergences = []
    # A few tokens at a time: vocabularies are large.
    for mine, other in zip(native.split(64, dim=1), logits.split(64, dim=1), strict=True):
        mine, other = mine.log_softmax(-1), other.log_softmax(-1)
        divergences.append(nn.functional.kl_div(other, mine, log_target=True, reduction="none").sum(-1))
    return torch.cat(divergences, dim=1), (native.argmax(-1) == logits.argmax(-1)).float()
