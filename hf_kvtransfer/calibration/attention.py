"""What a model's queries read of its cache: recorded queries, attention over them, and CacheBridge's row weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..errors import CalibrationError, UnsupportedModelError
from ..modules import attention_of, decoder_of, forward_of


_IMPLEMENTATIONS = ("sdpa", "eager")
_PREFIX = "hf_kvtransfer_"


@dataclass(frozen=True)
class QueryRecord:
    """
    The queries of one layer as its attention function received them, and what that function was told.

    Args:
        queries (`torch.Tensor` of shape `[batch, query_heads, n, head_dim]`, float32): Queries after RoPE.
        positions (`torch.Tensor` of shape `[n]`): The index of each among the keys, ascending or not; the same in all
            rows of the batch.
        scaling (`float`): What the products of queries and keys are multiplied by.
        sliding_window (`int`, *optional*): How many tokens a query sees, itself included; all if `None`.
        softcap (`float`, *optional*): Scores are bounded to this size by a tanh.
        sinks (`torch.Tensor` of shape `[query_heads]`, *optional*):
            Scores of a token that every query sees and whose value is zero (the `s_aux` of gpt-oss).
    """

    queries: torch.Tensor
    positions: torch.Tensor
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def at(self, positions: torch.Tensor, rows: Sequence[int] | None = None) -> QueryRecord:
        """The queries at some of its positions, of all rows of the batch or of some."""
        index = torch.searchsorted(self.positions, positions.to(self.positions.device))
        queries = self.queries if rows is None else self.queries[list(rows)]
        return replace(self, queries=queries[:, :, index], positions=self.positions[index])


class _Recorder:
    """Keeps, of the latest pass of one decoder, the queries at some positions."""

    def __init__(self, layers: dict[nn.Module, int], positions: torch.Tensor | None) -> None:
        self.layers = layers
        self.positions = positions
        self.records: dict[int, QueryRecord] = {}

    def note(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, told: dict[str, Any]) -> None:
        tokens = key.shape[2]
        first = tokens - query.shape[2]
        positions = torch.arange(first, tokens) if self.positions is None else self.positions
        if positions.numel() and (int(positions.min()) < first or int(positions.max()) >= tokens):
            raise CalibrationError(
                f"Queries were asked for at positions {int(positions.min())} to {int(positions.max())}, expected some "
                f"of {first} to {tokens - 1}, which this pass computes: ask for others, or pass more tokens."
            )
        positions = positions.to(query.device)
        # Copied, so that the pass's own tensors are let go; and outside inference mode, so that a loss can read them.
        with torch.inference_mode(False), torch.no_grad():
            queries = query.index_select(2, positions - first).float()
            sinks = told.get("s_aux")
            self.records[self.layers[module]] = QueryRecord(
                queries=queries,
                positions=positions,
                scaling=query.shape[-1] ** -0.5 if (scaling := told.get("scaling")) is None else float(scaling),
                sliding_window=told.get("sliding_window"),
                softcap=told.get("softcap"),
                sinks=None if sinks is None else sinks.detach().float().clone(),
            )


_recorders: list[_Recorder] = []


def _recording(implementation: str) -> Callable[..., Any]:
    """An attention function that notes its arguments for whoever records, and then calls `implementation`."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **told: Any,
    ) -> Any:
        # sdpa knows neither; a release that doesn't refuse them leaves them out of its scores.
        ignored = ("softcap", "s_aux") if implementation == "sdpa" else ()
        for recorder in tuple(_recorders):
            if module in recorder.layers:
                recorder.note(module, query, key, {name: told[name] for name in told if name not in ignored})
        # A mask that a model makes by itself may be one column too long under a name that it doesn't know. Remove when
        # the oldest supported release has no `_update_causal_mask` in StableLM.
        if attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[2]]
        return _function(module, implementation)(module, query, key, value, attention_mask, **told)

    return attention


def _function(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that this module would call, which its own file may have replaced."""
    names = _globals(module)
    chosen: Callable[..., Any] = (
        names["eager_attention_forward"] if implementation == "eager" else names["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
    )
    return chosen


def _globals(module: nn.Module) -> dict[str, Any]:
    """The global names of an attention module's `forward` if it goes through the interface, else nothing."""
    forward = code[0] if (code := forward_of(module)) else None
    used = {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"}
    return forward.__globals__ if forward is not None and used.issubset(forward.__code__.co_names) else {}


for _name in _IMPLEMENTATIONS:
    AttentionInterface.register(_PREFIX + _name, _recording(_name))
    AttentionMaskInterface.register(_PREFIX + _name, AttentionMaskInterface()[_name])


@contextmanager
def record_queries(model: nn.Module, positions: torch.Tensor | None = None) -> Iterator[dict[int, QueryRecord]]:
    """
    Records the queries of each pass of a model's text decoder, through the attention interface of Transformers.

    While it lasts, the decoder runs with the implementation it had if that is sdpa or eager, else with eager. Rows must
    be without padding, and a cache that they go on from a dynamic one that keeps all tokens.

    Args:
        model (`torch.nn.Module`): A causal language model, possibly wrapped.
        positions (`torch.Tensor` of shape `[n]`, *optional*):
            The indices of the tokens whose queries are kept, counted from the first token in the cache. Defaults to
            all tokens of a pass.

    Yields:
        `dict[int, QueryRecord]`: the records of the latest pass by decoder layer, each on the device of its layer.

    Raises:
        UnsupportedModelError: A layer of the model doesn't attend through that interface.
        CalibrationError: During a pass: one of `positions` is not among its tokens.
    """
    decoder = decoder_of(model)
    layers: dict[nn.Module, int] = {}
    for index, layer in enumerate(decoder.layers):
        attention = attention_of(layer)
        if attention is None or not _globals(attention):
            raise _not_through_the_interface(decoder, index)
        layers[attention] = index
    before = decoder.config._attn_implementation
    base = before.removeprefix(_PREFIX)
    name = _PREFIX + (base if base in _IMPLEMENTATIONS else "eager")
    recorder = _Recorder(layers, None if positions is None else positions.cpu())
    try:
        decoder.set_attn_implementation(name)
        if decoder.config._attn_implementation != name:
            raise _not_through_the_interface(decoder, 0)
        _recorders.append(recorder)
        yield recorder.records
    finally:
        if recorder in _recorders:
            _recorders.remove(recorder)
        decoder.set_attn_implementation(before)


def _not_through_the_interface(decoder: nn.Module, layer: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Layer {layer} of {type(decoder).__name__} doesn't attend through the AttentionInterface of Transformers, so "
        "its queries can't be recorded; use a recipe without attention weights, or another model."
    )


def attention_probabilities(record: QueryRecord, keys: torch.Tensor, *, before: bool = False) -> torch.Tensor:
    """
    How much each recorded query reads of each token.

    Args:
        record ([`QueryRecord`]): Queries, and how they attend.
        keys (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`):
            Keys after RoPE, from the first token on. Computed in their precision, in float32 at least; differentiable.
        before (`bool`, *optional*, defaults to `False`):
            Whether a query sees only the tokens before its own, as if it were not in the cache itself: its
            probabilities over them are normalised anew (together with the sink, where the model has one).

    Returns:
        `torch.Tensor` of shape `[batch, query_heads, n, tokens]`: causal, zero where a query sees nothing. Rows sum to
        one, or to less where the model has sinks; to zero for the first token with `before`.

    Raises:
        CalibrationError: The shapes don't fit.
    """
    batch, query_heads, count, head_dim = record.queries.shape
    if keys.dim() != 4 or keys.shape[0] != batch or keys.shape[3] != head_dim or query_heads % keys.shape[1]:
        raise CalibrationError(
            f"Got keys of shape {list(keys.shape)} for queries of shape {list(record.queries.shape)}; expected "
            "[batch, kv_heads, tokens, head_dim] of the same rows and layer: record and cache must be of one pass."
        )
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    tokens = keys.shape[2]
    # The query heads of a KV head are neighbours, so they can share one product with its keys.
    queries = record.queries.to(keys).reshape(batch, keys.shape[1], -1, head_dim)
    scores = (queries @ keys.mT * record.scaling).view(batch, query_heads, count, tokens)
    if record.softcap is not None:
        scores = torch.tanh(scores / record.softcap) * record.softcap
    distance = record.positions.to(keys.device)[:, None] - torch.arange(tokens, device=keys.device)
    hidden = distance < (1 if before else 0)
    if record.sliding_window is not None:
        hidden |= distance >= record.sliding_window
    # Not minus infinity, from which a query that sees nothing would get NaN.
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if record.sinks is not None:
        scores = torch.cat([scores, record.sinks.to(scores).view(1, -1, 1, 1).expand(batch, -1, count, 1)], dim=-1)
    return scores.softmax(-1)[..., :tokens].masked_fill(hidden, 0.0)


def attention_output(probabilities: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """
    What the queries read: the values, averaged by probability.

    Args:
        probabilities (`torch.Tensor` of shape `[batch, query_heads, n, tokens]`): From [`attention_probabilities`].
        values (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): The values of the same tokens.

    Returns:
        `torch.Tensor` of shape `[batch, query_heads, n, head_dim]`, in the precision of `probabilities`.
    """
    batch, query_heads, count, tokens = probabilities.shape
    shared = probabilities.reshape(batch, values.shape[1], -1, tokens)
    return (shared @ values.to(probabilities)).view(batch, query_heads, count, values.shape[3])


def boundaries(length: int, count: int = 32, first: int = 12) -> torch.Tensor:
    """
    Positions at which a row of tokens is cut into a past and a future, evenly spaced on a logarithmic scale
    (arXiv 2609.00891, attention-weighted rows).

    Args:
        length (`int`): Tokens of a row, at least 2.
        count (`int`, *optional*, defaults to 32): How many there are, fewer where some would coincide.
        first (`int`, *optional*, defaults to 12): The smallest; less in rows that are too short for it.

    Returns:
        `torch.Tensor` of shape `[count or fewer]`, int64: ascending, from `first` to `length - 1`. A boundary is the
        index of the first token after it.

    Raises:
        CalibrationError: There is no such position.
    """
    if length < 2 or count < 1 or first < 1:
        raise CalibrationError(
            f"There is no boundary in {length} tokens with {count} boundaries from {first} on; expected two tokens or "
            "more, one boundary or more, and at least one token before the first."
        )
    last = length - 1
    ends = (math.log10(min(first, last)), math.log10(last))
    return torch.logspace(*ends, count, dtype=torch.float64).round().long().unique()


@torch.no_grad()
def row_weights(
    record: QueryRecord, keys: torch.Tensor, values: torch.Tensor, *, before: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    How much a deviation in each token's key or value would matter to the recorded queries (arXiv 2609.00891,
    attention-weighted rows).

    With the query of the first token after each boundary, for each earlier token `i` and KV head, over the query heads
    `u` that share it: `r_V(i) = Σ_u a_ui²` and `r_K(i) = Σ_u a_ui² ‖v_i − o_u‖² ‖q_u‖² / d`. They are brought to a sum
    over `i` of one for each boundary and KV head, and summed over the boundaries. They are not yet rescaled to mean
    one, nor shrunk: see [`WeightedMoments`].

    The paper speaks of *the* attention probability `a` and output `o`, and the formulas are the first-order effect of a
    deviation on that output. So by default both are the native ones, in whose softmax the query's own token takes
    part, though only earlier tokens get a weight.

    Args:
        record ([`QueryRecord`]): Queries at [`boundaries`].
        keys (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): Native keys after RoPE.
        values (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): Native values.
        before (`bool`, *optional*, defaults to `False`):
            Whether `a` and `o` are instead those of a softmax over the earlier tokens alone.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `r_K` and `r_V` of shape `[batch, kv_heads, tokens]`, float64. Where a
        query reads nothing that counts, its boundary adds nothing.
    """
    # Distances are differences of squares here, which float32 would blur for a token that is read almost alone.
    keys, values = keys.double(), values.double()
    batch, kv_heads, tokens, _ = keys.shape
    positions = record.positions.to(keys.device)
    probabilities = attention_probabilities(record, keys, before=before)
    outputs = attention_output(probabilities, values)
    earlier = torch.arange(tokens, device=keys.device) < positions[:, None]
    by_value = probabilities.square() * earlier
    # ‖v_i − o_u‖², for all query heads of a KV head in one product.
    products = outputs.view(batch, kv_heads, -1, values.shape[3]) @ values.mT
    distances = outputs.square().sum(-1, keepdim=True) - 2 * products.view_as(by_value)
    distances = distances.unflatten(1, (kv_heads, -1)) + values.square().sum(-1)[:, :, None, None]
    lengths = record.queries.to(keys).square().sum(-1, keepdim=True)
    # The division by d is left out, as it doesn't outlive the division by the sum.
    by_key = by_value * lengths * distances.flatten(1, 2).clamp_(min=0)
    r_keys, r_values = (_unit_mass(each.unflatten(1, (kv_heads, -1)).sum(2)).sum(2) for each in (by_key, by_value))
    return r_keys, r_values


def _unit_mass(weights: torch.Tensor) -> torch.Tensor:
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, 0.0)
