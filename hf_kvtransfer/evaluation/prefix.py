"""The published perplexity protocol: score the second half of each chunk on a cache of the first half."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import KVTransferError
from .continuation import score_continuation
from .controls import Condition


@dataclass
class PrefixResult:
    """
    Args:
        nll (`list[float]`): mean negative log-likelihood of each chunk's scored part, in nats per token.
        seconds (`list[float]`): what it took to have the prefix's cache on the answering side, per chunk.
    """

    nll: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def mean_nll(self) -> float:
        """Mean over chunks, in nats per token."""
        return statistics.fmean(self.nll)

    def median_seconds(self) -> float:
        """Median over chunks."""
        return statistics.median(self.seconds)


def prefix_nll(
    conditions: Sequence[Condition],
    texts: str | Sequence[str],
    tokenizer: Any,
    *,
    prefix: int = 1024,
    scored: int | None = None,
    max_chunks: int | None = None,
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
        progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.

    Returns:
        `dict[str, PrefixResult]`: by the condition's name.

    Raises:
        [`KVTransferError`]: if the text is too short for two chunks.
    """
    scored = prefix if scored is None else scored
    for name, value, least in (("prefix", prefix, 2), ("scored", scored, 1), ("max_chunks", max_chunks or 1, 1)):
        if not isinstance(value, int) or value < least:
            raise KVTransferError(f"`{name}` is {value!r}; expected a whole number of at least {least}.")
    length = prefix + scored
    chunks = _chunks([texts] if isinstance(texts, str) else texts, tokenizer, length)
    results = {condition.name: PrefixResult() for condition in conditions}
    asked = chunks[:max_chunks]
    for index, chunk in enumerate(tqdm(asked, desc="Prefix NLL", disable=None if progress else True)):
        context, other = chunk[:, :prefix], chunks[(index + 1) % len(chunks)][:, :prefix]
        for condition in conditions:
            cache, seconds = condition.read(context, other)
            fed = torch.cat([context[:, -1:], chunk[:, prefix:]], dim=1)
            score = score_continuation(condition.model, fed, cache, scored=scored)
            results[condition.name].nll.append(float(score.nll.mean()))
            results[condition.name].seconds.append(seconds)
    return results


def _chunks(texts: Sequence[str], tokenizer: Any, length: int) -> list[torch.Tensor]:
    """Chunks of shape `[1, length]`, in turn from each text until the first has no more."""
    columns = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids
        columns.append(ids.split(length, dim=1)[: ids.shape[1] // length])
    chunks = [chunk for row in zip(*columns, strict=False) for chunk in row]
    if len(chunks) < 2:
        raise KVTransferError(
            f"The text gives {len(chunks)} chunks of {length} tokens; expected at least two. Give more text, or a "
            "shorter prefix."
        )
    return chunks
