"""The published perplexity protocol: score the second half of each chunk on a cache of the first half."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..calibration.texts import starting_token
from ..errors import KVTransferError
from .checks import check_tokenizer, check_whole, is_unicode
from .continuation import check_scores, continuation_logits, divergence, score_logits
from .controls import Condition


@dataclass
class PrefixResult:
    """
    Args:
        nll (`list[float]`): mean negative log-likelihood of each chunk's scored part, in nats per token.
        seconds (`list[float]`): what it took to have the prefix's cache on the answering side, per chunk.
        kl (`list[float]`): mean `KL(reference ‖ this)` of each chunk's next-token distributions, in nats per token.
            Empty without a reference.
        agreement (`list[float]`): share of each chunk's scored tokens for which the most likely token is the
            reference's. Empty without a reference.
    """

    nll: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)

    def mean_nll(self) -> float:
        """Mean over chunks, in nats per token."""
        return statistics.fmean(self.nll)

    def median_seconds(self) -> float:
        """Median over chunks."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Reading:
    """
    What one condition makes of a batch of chunks.

    Args:
        nll (`torch.Tensor` of shape `[batch, scored]`): negative log-likelihood of each scored token, in nats.
        seconds (`float`): what it took to have the prefixes' cache on the answering side.
        kl (`torch.Tensor` of shape `[batch, scored]`, *optional*): `KL(reference ‖ this)` at each token, in nats.
        agreement (`torch.Tensor` of shape `[batch, scored]`, *optional*):
            1 where the most likely token is the reference's, else 0.
    """

    nll: Tensor
    seconds: float
    kl: Tensor | None = None
    agreement: Tensor | None = None


def read_chunks(
    conditions: Sequence[Condition], context: Tensor, following: Tensor, other: Tensor, reference: str | None = None
) -> dict[str, Reading]:
    """
    Scores what follows a context under every condition. The first scored token is predicted by the context's last
    token, which every condition reads itself.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        context (`torch.Tensor` of shape `[batch, prefix]`): what has been read.
        following (`torch.Tensor` of shape `[batch, scored]`): what is scored.
        other (`torch.Tensor` of shape `[batch, prefix]`): different documents.
        reference (`str`, *optional*): the condition that the others are compared with.

    Returns:
        `dict[str, Reading]`: by the condition's name.

    Raises:
        [`KVTransferError`]: if a likelihood is NaN or infinite.
    """
    results, expected, scored = {}, None, following.shape[1]
    # The reference first, so that the logits of one condition at a time are kept beside it.
    for condition in sorted(conditions, key=lambda condition: condition.name != reference):
        cache, seconds = condition.read(context, other)
        fed = torch.cat([context[:, -1:], following], dim=1)
        logits = continuation_logits(condition.model, fed, cache, scored=scored)
        nll = score_logits(logits, following).nll
        check_scores(nll, condition.name)
        if condition.name == reference:
            expected = logits
        compared = (None, None) if expected is None else divergence(expected, logits.to(expected.device))
        results[condition.name] = Reading(nll, seconds, *compared)
    return {condition.name: results[condition.name] for condition in conditions}


def prefix_nll(
    conditions: Sequence[Condition],
    texts: str | Sequence[str],
    tokenizer: Any,
    *,
    prefix: int = 1024,
    scored: int | None = None,
    max_chunks: int | None = None,
    reference: str | None = None,
    progress: bool = True,
) -> dict[str, PrefixResult]:
    """
    Scores non-overlapping chunks of text: the last `scored` tokens of each on a prefix cache of its first `prefix`
    tokens (arXiv 2608.03893, §4: 1,024 and 1,024). The first scored token is predicted by the prefix's last token,
    which every condition reads itself. The different document of a chunk is the next chunk; with several texts they
    take turns, so that it is of another text.

    Args:
        conditions (`Sequence[Condition]`): from [`conditions`].
        texts (`str` or `Sequence[str]`): held-out text, or several.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        prefix (`int`, *optional*, defaults to 1024): tokens of context.
        scored (`int`, *optional*): tokens that are scored; as many as the prefix by default.
        max_chunks (`int`, *optional*): at most so many chunks.
        reference (`str`, *optional*):
            The condition whose next-token distributions the others are compared with, as a rule `"target native"`.
            Models whose vocabulary has another size get `nan`.
        progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.

    Returns:
        `dict[str, PrefixResult]`: by the condition's name.

    Raises:
        [`KVTransferError`]: if the text is too short for two chunks.
    """
    named = [condition.name for condition in conditions]
    if reference is not None and reference not in named:
        raise KVTransferError(
            f"The reference {reference!r} is none of the conditions; expected one of {named}. Add it to them."
        )
    scored = prefix if scored is None else scored
    chunks = split_chunks(texts, tokenizer, prefix, scored, max_chunks)
    results = {condition.name: PrefixResult() for condition in conditions}
    asked = chunks[:max_chunks]
    for index, chunk in enumerate(tqdm(asked, desc="Prefix NLL", disable=None if progress else True)):
        context, other = chunk[:, :prefix], chunks[(index + 1) % len(chunks)][:, :prefix]
        for name, reading in read_chunks(conditions, context, chunk[:, prefix:], other, reference).items():
            result = results[name]
            result.nll.append(float(reading.nll.mean()))
            result.seconds.append(reading.seconds)
            if reading.kl is not None and reading.agreement is not None:
                result.kl.append(float(reading.kl.mean()))
                result.agreement.append(float(reading.agreement.mean()))
    return results


def split_chunks(
    texts: str | Sequence[str], tokenizer: Any, prefix: int, scored: int, max_chunks: int | None = None
) -> list[torch.Tensor]:
    """
    Non-overlapping chunks of `prefix + scored` tokens, in turn from each text until the first has no more. Each begins
    with the BOS token if the tokenizer starts a text with it.

    Args:
        texts (`str` or `Sequence[str]`): held-out text, or several.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        prefix (`int`): tokens of context.
        scored (`int`): tokens after it.
        max_chunks (`int`, *optional*): how many are wanted; more are given, where there are more.

    Returns:
        `list[torch.Tensor]`: each `[1, prefix + scored]`.

    Raises:
        [`KVTransferError`]: if a number is out of range, or the text too short for two chunks.
    """
    for name, value, least in (("prefix", prefix, 2), ("scored", scored, 1), ("max_chunks", max_chunks, 1)):
        if name != "max_chunks" or value is not None:
            check_whole(name, value, least)
    check_tokenizer(tokenizer)
    length, first = prefix + scored, starting_token(tokenizer)
    columns = []
    for text in [texts] if isinstance(texts, str) else texts:
        ids = text_ids(text, tokenizer)
        columns.append(as_chunks(ids, length, first).split(1))
    chunks = [chunk for row in zip(*columns, strict=False) for chunk in row]
    if len(chunks) < 2:
        raise KVTransferError(
            f"The text gives {len(chunks)} chunks of {length} tokens; expected at least two. Give more text, or a "
            "shorter prefix."
        )
    return chunks


def text_ids(text: Any, tokenizer: Any) -> list[int]:
    """
    The tokens of a text and nothing else.

    Raises:
        [`KVTransferError`]: if it is no text.
    """
    if not isinstance(text, str):
        raise KVTransferError(f"A text to score is of type {type(text).__name__}; expected a string. Pass strings.")
    if not is_unicode(text):
        raise KVTransferError(
            f"A text to score ({text[:40]!r} …) has lone surrogates; expected valid Unicode. Clean the text, for "
            'example with `text.encode("utf-8", "replace").decode()`.'
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def as_chunks(ids: Sequence[int], length: int, first: int | None) -> Tensor:
    """
    Cuts tokens into chunks, and leaves the rest out.

    Args:
        ids (`Sequence[int]`): tokens of a text.
        length (`int`): tokens of a chunk.
        first (`int`, *optional*): what each chunk begins with, as every text does in use; nothing else is put in.

    Returns:
        `torch.Tensor` of shape `[chunks, length]`
    """
    own = length - (first is not None)
    count = len(ids) // own
    chunks = torch.tensor(ids[: count * own], dtype=torch.long).view(count, own)
    return chunks if first is None else nn.functional.pad(chunks, (1, 0), value=first)


def shortened(chunks: Tensor, tokens: int, first: int | None) -> Tensor:
    """The last tokens of chunks, beginning with what chunks begin with; arguments as in [`as_chunks`]."""
    kept = chunks[:, -tokens:]
    return kept if first is None else nn.functional.pad(kept[:, 1:], (1, 0), value=first)
