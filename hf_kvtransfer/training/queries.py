"""The target's queries in a batch: one flat tensor for all layers, and a record a layer of how it attends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..calibration.attention import QueryRecord
from ..errors import CalibrationError


def flat_queries(records: Sequence[QueryRecord]) -> Tensor:
    """Per layer `[batch, heads, queries, head_dim]` to one tensor `[batch, queries, Σ heads · head_dim]`."""
    device = records[0].queries.device
    return torch.cat([record.queries.transpose(1, 2).flatten(2).to(device) for record in records], dim=-1)


def without_queries(records: Sequence[QueryRecord]) -> list[QueryRecord]:
    """What is the same for every batch: how each layer attends, and the shape of its queries."""
    return [replace(record, queries=record.queries[:0]) for record in records]


def with_queries(attention: Sequence[QueryRecord], queries: Tensor | None) -> list[QueryRecord]:
    """
    The records of a batch.

    Args:
        attention (`Sequence[QueryRecord]`): from [`without_queries`], one for each target layer.
        queries (`torch.Tensor` of shape `[batch, queries, width]`, *optional*): of the batch.

    Raises:
        [`CalibrationError`]: if either is missing.
    """
    if queries is None or not attention:
        raise CalibrationError(
            "The attention loss reads the target's queries, and the batch or the module has none; expected `queries` "
            "in the batch and `attention` for the module. Capture the features with `queries=32`, and pass "
            "`attention=features.attention`."
        )
    widths = [record.queries.shape[1] * record.queries.shape[3] for record in attention]
    return [
        _with(record, part.unflatten(-1, (record.queries.shape[1], -1)).transpose(1, 2))
        for record, part in zip(attention, queries.split(widths, dim=-1), strict=True)
    ]


def _with(record: QueryRecord, queries: Tensor) -> QueryRecord:
    sinks = None if record.sinks is None else record.sinks.to(queries.device)
    return replace(record, queries=queries, positions=record.positions.to(queries.device), sinks=sinks)


def attention_tensors(attention: Sequence[QueryRecord]) -> dict[str, Tensor]:
    """All tensors of records without queries, by name; with [`attention_settings`] they are the whole."""
    return {
        f"attention.{layer}.{name}": value.cpu().clone()  # layers may share one, which safetensors refuses
        for layer, record in enumerate(attention)
        for name, value in vars(record).items()
        if isinstance(value, Tensor)
    }


def attention_settings(attention: Sequence[QueryRecord]) -> list[dict[str, Any]]:
    """What of the records is no tensor, as JSON types."""
    return [
        {name: value for name, value in vars(record).items() if not isinstance(value, Tensor)} for record in attention
    ]


def read_attention(settings: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[QueryRecord]:
    """The inverse of [`attention_settings`] and [`attention_tensors`]."""
    records = []
    for layer, values in enumerate(settings):
        start = f"attention.{layer}."
        own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        records.append(QueryRecord(**{**values, **own}))
    return records
