"""How near converted entries come to native ones: in content space, in attention, and in what is predicted next."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..calibration.attention import (
    QueryRecord,
    attention_output,
    attention_probabilities,
    boundaries,
    record_queries,
)
from ..rope import RotaryCodec
from .continuation import continuation_logits, divergence, prefill
from .prefix import split_chunks


@dataclass
class Fidelity:
    """
    Args:
        r2_keys (`list[float]`): per target layer R² of the content keys, pooled over heads and dimensions.
        r2_values (`list[float]`): per target layer R² of the values.
        cosine (`list[list[float]]`):
            Per target layer and query head the mean cosine of attention outputs, converted to native; `nan` where a
            sliding window no longer holds what a query reads.
        chunk_cosine (`list[float]`): per chunk their mean over all layers, heads and queries that count.
        kl (`list[float]`): per chunk the mean `KL(native ‖ transferred)` of next-token distributions, in nats.
        agreement (`list[float]`): per chunk the share of tokens for which the most likely next token is the same.
    """

    r2_keys: list[float] = field(default_factory=list)
    r2_values: list[float] = field(default_factory=list)
    cosine: list[list[float]] = field(default_factory=list)
    chunk_cosine: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)

    def means(self) -> dict[str, float]:
        """One number of each sort: R² over layers, the others over chunks."""
        return {
            name: statistics.fmean(getattr(self, name))
            for name in ("r2_keys", "r2_values", "chunk_cosine", "kl", "agreement")
        }


def measure_fidelity(
    convert: Callable[[Tensor], Any],
    target: nn.Module,
    texts: str | Sequence[str],
    tokenizer: Any,
    *,
    prefix: int = 1024,
    scored: int | None = None,
    max_chunks: int | None = None,
    queries: int = 32,
    progress: bool = True,
) -> Fidelity:
    """
    Compares converted caches with native ones over non-overlapping chunks of text, one at a time.

    Attention outputs are those of the target's own queries at some log-spaced positions of the context, over the keys
    and values of the tokens before them (arXiv 2608.03893: what predicts quality). What the cache doesn't hold, as a
    rule the last token, is native on both sides.

    Args:
        convert (`Callable`):
            From the token ids of a context, `[1, tokens]`, to a cache of the target that holds all of them, or all but
            the last few: `lambda ids: mapper.convert(prefill(source, ids))`.
        target (`PreTrainedModel`): the model that goes on.
        texts (`str` or `Sequence[str]`): held-out text, or several that take turns.
        tokenizer (`PreTrainedTokenizerBase`): of both models.
        prefix (`int`, *optional*, defaults to 1024): tokens of context.
        scored (`int`, *optional*): tokens that are predicted after it; as many as the prefix by default.
        max_chunks (`int`, *optional*): at most so many chunks.
        queries (`int`, *optional*, defaults to 32): at how many positions attention is compared.
        progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.

    Returns:
        [`Fidelity`]

    Raises:
        [`KVTransferError`]: if the text is too short for two chunks.
    """
    scored = prefix if scored is None else scored
    chunks = split_chunks(texts, tokenizer, prefix, scored, max_chunks)[:max_chunks]
    codec = RotaryCodec.from_model(target)
    sums = [_LayerSums(layer.sliding_window) for layer in codec.geometry.layers]
    positions = boundaries(prefix, queries)
    tables = codec.tables(torch.arange(prefix)[None])
    result = Fidelity()
    for chunk in tqdm(chunks, desc="Fidelity", disable=None if progress else True):
        with record_queries(target, positions=positions) as records:
            native = prefill(target, chunk[:, :prefix])
        cache = convert(chunk[:, :prefix])
        seen = int(cache.get_seq_length())
        cosines = []
        for index, (layer, own, made) in enumerate(zip(sums, native.layers, cache.layers, strict=True)):
            first = seen - made.keys.shape[2]  # a sliding window has let go of the tokens before
            keys, values = (_replaced(*pair, first) for pair in ((own.keys, made.keys), (own.values, made.values)))
            for sum_, states in (
                (layer.keys, [codec.remove(states, tables, index) for states in (own.keys, keys)]),
                (layer.values, [own.values, values]),
            ):
                sum_.add(*(each[:, :, first:seen] for each in states))
            cosines.append(layer.compare(records[index], (own.keys, own.values), (keys, values), first))
        result.chunk_cosine.append(float(torch.cat([cosine.flatten() for cosine in cosines]).mean()))
        if seen < prefix:
            native.crop(seen - prefix)
        logits, predicted = (
            continuation_logits(target, chunk[:, seen:], held, scored=scored) for held in (native, cache)
        )
        kl, agreement = divergence(logits, predicted)
        result.kl.append(float(kl.mean()))
        result.agreement.append(float(agreement.mean()))
    result.r2_keys, result.r2_values = ([getattr(layer, kind).r2() for layer in sums] for kind in ("keys", "values"))
    result.cosine = [(layer.cosine / layer.queries).tolist() for layer in sums]
    return result


class _Error:
    """R² over many tokens, streamed: how far predictions are off, and how far the mean is."""

    def __init__(self) -> None:
        self.tokens = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.error = 0.0

    def add(self, actual: Tensor, predicted: Tensor) -> None:
        """Both `[1, kv_heads, tokens, head_dim]`."""
        actual, predicted = actual.double(), predicted.double()
        self.tokens += actual.shape[2]
        self.total = self.total + actual.sum(dim=(0, 2))
        self.squares = self.squares + actual.square().sum(dim=(0, 2))
        self.error += float((actual - predicted).square().sum())

    def r2(self) -> float:
        """Pooled over heads and dimensions; of a constant 1 if it is met, 0 if not."""
        spread = float((self.squares - self.total**2 / self.tokens).sum())  # type: ignore[union-attr]
        return 1 - self.error / spread if spread > 0 else float(self.error == 0)


class _LayerSums:
    """What is summed up over the chunks for one layer."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys, self.values = _Error(), _Error()
        self.cosine = torch.zeros(())
        self.queries = 0

    def compare(
        self, record: QueryRecord, native: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor], first: int
    ) -> Tensor:
        """The cosine of outputs, `[query_heads, queries]`, for those queries that read no token before `first`."""
        own, other = (
            attention_output(attention_probabilities(record, keys, before=True), values)[0]
            for keys, values in (native, made)
        )
        cosine = nn.functional.cosine_similarity(own, other, dim=-1)
        if first and self.window is not None:
            cosine = cosine[:, record.positions.to(cosine.device) - self.window + 1 >= first]
        self.queries += cosine.shape[1]
        self.cosine = self.cosine + cosine.sum(-1)
        return cosine


def _replaced(native: Tensor, made: Tensor, first: int) -> Tensor:
    """Native entries with the converted ones in their place, from token `first` on."""
    merged = native.clone()
    merged[:, :, first : first + made.shape[2]] = made.to(native.device, native.dtype)
    return merged
