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
from ..features import KINDS
from ..rope import RotaryCodec
from .checks import check_whole
from .continuation import check_scores, continuation_logits, divergence, prefill, score_logits
from .prefix import split_chunks


@dataclass
class Fidelity:
    """
    Args:
        r2_keys (`list[float]`): per target layer R² of the content keys, pooled over heads and dimensions.
        r2_values (`list[float]`): per target layer R² of the values.
        r2_keys_by_head (`list[list[float]]`): per target layer and KV head R² of the content keys.
        r2_values_by_head (`list[list[float]]`): likewise of the values.
        cosine (`list[list[float]]`):
            Per target layer and query head the mean cosine of attention outputs, converted to native; `nan` where a
            sliding window no longer holds what a query reads.
        chunk_cosine (`list[float]`): per chunk their mean over all layers, heads and queries that count.
        kl (`list[float]`): per chunk the mean `KL(native ‖ transferred)` of next-token distributions, in nats.
        agreement (`list[float]`): per chunk the share of tokens for which the most likely next token is the same.
    """

    r2_keys: list[float] = field(default_factory=list)
    r2_values: list[float] = field(default_factory=list)
    r2_keys_by_head: list[list[float]] = field(default_factory=list)
    r2_values_by_head: list[list[float]] = field(default_factory=list)
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
    queries: int | None = None,
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
        queries (`int`, *optional*):
            At how many positions attention is compared: no more than the prefix has; 32 or all of them by default.
        progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.

    Returns:
        [`Fidelity`]

    Raises:
        [`KVTransferError`]: if a number is out of range, the text too short for two chunks, or a likelihood not finite.
    """
    scored = prefix if scored is None else scored
    chunks = split_chunks(texts, tokenizer, prefix, scored, max_chunks)[:max_chunks]
    queries = min(32, prefix) if queries is None else queries
    check_whole("queries", queries, 1, prefix)
    comparison = Comparison(target, convert, prefix, queries)
    sums = FidelitySums()
    result = Fidelity()
    for chunk in tqdm(chunks, desc="Fidelity", disable=None if progress else True):
        measured, native, cache = comparison.compare(chunk[:, :prefix])
        sums.add(measured)
        result.chunk_cosine += measured["chunk_cosine"]
        seen = int(cache.get_seq_length())
        if seen < prefix:
            native.crop(seen - prefix)
        logits, predicted = (
            continuation_logits(target, chunk[:, seen:], held, scored=scored) for held in (native, cache)
        )
        for name, found in (("target native", logits), ("transferred", predicted)):
            # A cache of the whole prefix leaves the first scored token to no one.
            check_scores(score_logits(found, chunk[:, -found.shape[1] :]).nll, name)
        kl, agreement = divergence(logits, predicted)
        result.kl.append(float(kl.mean()))
        result.agreement.append(float(agreement.mean()))
    result.r2_keys, result.r2_values = (sums.r2(kind) for kind in KINDS)
    result.r2_keys_by_head, result.r2_values_by_head = (sums.r2_by_head(kind) for kind in KINDS)
    result.cosine = sums.cosine()
    return result


class Comparison:
    """
    Compares converted caches of contexts with native ones.

    Args:
        target (`PreTrainedModel`): the model that goes on.
        convert (`Callable`): as in [`measure_fidelity`], for contexts of `[batch, prefix]`.
        prefix (`int`): tokens of context.
        queries (`int`, *optional*, defaults to 32): at how many positions attention is compared.
    """

    def __init__(self, target: nn.Module, convert: Callable[[Tensor], Any], prefix: int, queries: int = 32) -> None:
        self._target, self._convert = target, convert
        self._every = torch.arange(prefix)[None]
        self._codec = RotaryCodec.from_model(target)
        self._positions = boundaries(prefix, queries)

    @torch.no_grad()
    def compare(self, context: Tensor) -> tuple[dict[str, Any], Any, Any]:
        """
        Args:
            context (`torch.Tensor` of shape `[batch, prefix]`): token ids.

        Returns:
            `tuple`: the sums of this batch for [`FidelitySums`], as JSON values; the native cache, of all tokens; and
            the converted one.
        """
        with record_queries(self._target, positions=self._positions) as records:
            native = prefill(self._target, context)
        cache = self._convert(context)
        seen = int(cache.get_seq_length())
        layers, cosines = [], []
        for index, (own, made) in enumerate(zip(native.layers, cache.layers, strict=True)):
            first = seen - made.keys.shape[2]  # a sliding window has let go of the tokens before
            keys, values = (_replaced(*pair, first) for pair in ((own.keys, made.keys), (own.values, made.values)))
            tables = self._codec.tables(self._every, own.keys.device)
            content = [self._codec.remove(states, tables, index) for states in (own.keys, keys)]
            window = self._codec.geometry.layers[index].sliding_window
            cosine = _cosines(records[index], (own.keys, own.values), (keys, values), first, window)
            cosines.append(cosine.flatten(1).cpu())
            layers.append(
                {
                    "keys": squared_errors(*(each[:, :, first:seen] for each in content)),
                    "values": squared_errors(*(each[:, :, first:seen] for each in (own.values, values))),
                    "cosine": cosine.sum(dim=(0, 2)).tolist(),
                    "queries": cosine.shape[0] * cosine.shape[2],
                }
            )
        return {"layers": layers, "chunk_cosine": torch.cat(cosines, dim=1).mean(1).tolist()}, native, cache


class FidelitySums:
    """R² and cosines over many batches, from what [`Comparison`] gives of each."""

    def __init__(self) -> None:
        self._layers: list[dict[str, Any]] = []

    def add(self, found: dict[str, Any]) -> None:
        """The sums of one batch."""
        layers = [
            {
                **{kind: {name: _double(sums) for name, sums in layer[kind].items()} for kind in KINDS},
                "cosine": _double(layer["cosine"]),
                "queries": layer["queries"],
            }
            for layer in found["layers"]
        ]
        for held, new in zip(self._layers, layers, strict=bool(self._layers)):
            for kind in KINDS:
                held[kind] = {name: sums + new[kind][name] for name, sums in held[kind].items()}
            held["cosine"], held["queries"] = held["cosine"] + new["cosine"], held["queries"] + new["queries"]
        self._layers = self._layers or layers

    def r2(self, kind: str) -> list[float]:
        """Per target layer, pooled over heads and dimensions; of a constant 1 if it is met, 0 if not."""
        return [float(_share(*(part.sum() for part in _parts(layer[kind])))) for layer in self._layers]

    def r2_by_head(self, kind: str) -> list[list[float]]:
        """Per target layer and KV head, pooled over dimensions."""
        return [_share(*_parts(layer[kind])).tolist() for layer in self._layers]

    def cosine(self) -> list[list[float]]:
        """Per target layer and query head, the mean over queries."""
        return [(layer["cosine"] / layer["queries"]).tolist() for layer in self._layers]


def squared_errors(actual: Tensor, predicted: Tensor) -> dict[str, Any]:
    """Both `[batch, kv_heads, tokens, head_dim]`: what R² per head is made of, of tokens that come bit by bit."""
    actual, predicted = actual.double(), predicted.double()
    return {
        "tokens": actual.shape[0] * actual.shape[2],
        "total": actual.sum(dim=(0, 2)).tolist(),
        "squares": actual.square().sum(dim=(0, 2, 3)).tolist(),
        "error": (actual - predicted).square().sum(dim=(0, 2, 3)).tolist(),
    }


def _parts(sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Per head, how far predictions are off, and how far the mean is."""
    return sums["error"], sums["squares"] - (sums["total"] ** 2 / sums["tokens"]).sum(-1)


def _share(error: Tensor, spread: Tensor) -> Tensor:
    return torch.where(spread > 0, 1 - error / spread, (error == 0).double())


def _double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _cosines(
    record: QueryRecord, native: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor], first: int, window: int | None
) -> Tensor:
    """The cosine of outputs, `[batch, query_heads, queries]`, for queries that read no token before `first`."""
    own, other = (
        attention_output(attention_probabilities(record, keys, before=True), values) for keys, values in (native, made)
    )
    cosine = nn.functional.cosine_similarity(own, other, dim=-1)
    if first and window is not None:
        cosine = cosine[:, :, record.positions.to(cosine.device) - window + 1 >= first]
    return cosine


def _replaced(native: Tensor, made: Tensor, first: int) -> Tensor:
    """Native entries with the converted ones in their place, from token `first` on."""
    merged = native.clone()
    merged[:, :, first : first + made.shape[2]] = made.to(native.device, native.dtype)
    return merged
