"""A few held-out sequences with the target's queries: what maps are scored on, by what attention reads of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .attention import QueryRecord, boundaries, record_queries
from .capture import Content, capture_content
from .layout import FeatureLayout


if TYPE_CHECKING:
    from ..rope import RotaryCodec


SAMPLE_QUERIES = 32
"""At how many log-spaced positions of a sequence its queries are kept."""


@dataclass
class AttentionSample:
    """
    Every token of a few held-out sequences.

    Attributes:
        sequences (`int`): How many; all have the same length.
        source (`Content`): Of the source, with the previous tokens that the layout asks for, `[sequences · tokens, …]`.
        target (`Content`): Of the target, with the hidden states that the layout asks for.
        records (`list[QueryRecord]`): Per target layer its queries at some positions, and how it attends.
    """

    sequences: int
    source: Content
    target: Content
    records: list[QueryRecord]

    @property
    def tokens(self) -> int:
        """Tokens of each sequence."""
        return self.source.keys.shape[0] // self.sequences

    def extended(self, other: AttentionSample) -> AttentionSample:
        """This sample and the sequences of another of the same length."""
        records = [
            QueryRecord(**{**vars(mine), "queries": torch.cat([mine.queries, theirs.queries])})
            for mine, theirs in zip(self.records, other.records, strict=True)
        ]
        source, target = (
            Content(
                torch.cat([mine.keys, theirs.keys]),
                torch.cat([mine.values, theirs.values]),
                [
                    (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]))
                    for a, b in zip(mine.previous, theirs.previous, strict=True)
                ],
                [torch.cat(pair) for pair in zip(mine.hidden, theirs.hidden, strict=True)],
            )
            for mine, theirs in ((self.source, other.source), (self.target, other.target))
        )
        return AttentionSample(self.sequences + other.sequences, source, target, records)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name; with [`~AttentionSample.description`] they are the whole state."""
        result: dict[str, torch.Tensor] = {}
        for side, content in (("source", self.source), ("target", self.target)):
            result |= {f"{side}.keys": content.keys, f"{side}.values": content.values}
            for lag, (keys, values) in enumerate(content.previous):
                result |= {f"{side}.previous.{lag}.keys": keys, f"{side}.previous.{lag}.values": values}
            result |= {f"{side}.hidden.{index}": hidden for index, hidden in enumerate(content.hidden)}
        for layer, record in enumerate(self.records):
            result |= {
                f"records.{layer}.{name}": value
                for name, value in vars(record).items()
                if isinstance(value, torch.Tensor)
            }
        return result

    def description(self) -> dict[str, Any]:
        """What is no tensor, as JSON types."""
        return {
            "sequences": self.sequences,
            "records": [
                {name: value for name, value in vars(record).items() if not isinstance(value, torch.Tensor)}
                for record in self.records
            ],
        }

    @classmethod
    def from_tensors(cls, description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> AttentionSample:
        """The inverse of [`~AttentionSample.tensors`] and [`~AttentionSample.description`]."""

        def content(side: str) -> Content:
            lags = sum(name.startswith(f"{side}.previous.") for name in tensors) // 2
            depths = sum(name.startswith(f"{side}.hidden.") for name in tensors)
            return Content(
                tensors[f"{side}.keys"],
                tensors[f"{side}.values"],
                [
                    (tensors[f"{side}.previous.{lag}.keys"], tensors[f"{side}.previous.{lag}.values"])
                    for lag in range(lags)
                ],
                [tensors[f"{side}.hidden.{index}"] for index in range(depths)],
            )

        records = [
            QueryRecord(
                **{
                    **values,
                    **{
                        name.removeprefix(f"records.{layer}."): tensor
                        for name, tensor in tensors.items()
                        if name.startswith(f"records.{layer}.")
                    },
                }
            )
            for layer, values in enumerate(description["records"])
        ]
        return cls(int(description["sequences"]), content("source"), content("target"), records)


def take_sample(
    source: nn.Module,
    target: nn.Module,
    codecs: Sequence[RotaryCodec],
    input_ids: torch.Tensor,
    layout: FeatureLayout,
    queries: int = SAMPLE_QUERIES,
    stream: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
) -> AttentionSample:
    """
    Reads full sequences with both models.

    Args:
        source (`torch.nn.Module`): The model whose cache is read.
        target (`torch.nn.Module`): The model whose cache is predicted, and whose queries are.
        codecs (`Sequence[RotaryCodec]`): Of source and target.
        input_ids (`torch.Tensor` of shape `[sequences, tokens]`): Token ids without padding.
        layout ([`FeatureLayout`]): Which features are wanted.
        queries (`int`, *optional*, defaults to 32): At how many log-spaced positions of a sequence.
        stream (`Callable`, *optional*):
            `stream(source_cache, input_ids)`: what stands in for the target's own stream at the layout's last depth,
            `[sequences, tokens − skip, hidden_size + 1]`.
    """
    streams: list[torch.Tensor] = []
    read = capture_content(
        source,
        codecs[0],
        input_ids,
        stride=1,
        window=layout.window,
        on_cache=None if stream is None else lambda cache: streams.append(stream(cache, input_ids)),
    )
    with record_queries(target, positions=boundaries(input_ids.shape[1], queries)) as records:
        predicted = capture_content(target, codecs[1], input_ids, stride=1, hidden_at=layout.anchors)
    recorded = [records[layer] for layer in range(codecs[1].geometry.num_layers)]
    return sample_of(read, predicted, recorded, input_ids.shape[0], layout.skip, *streams)


def sample_of(
    source: Content,
    target: Content,
    records: Sequence[QueryRecord],
    sequences: int,
    skip: int = 0,
    stream: torch.Tensor | None = None,
) -> AttentionSample:
    """
    A sample, on the CPU, from what was captured of every token of some sequences.

    Args:
        source (`Content`): Of the source.
        target (`Content`): Of the target.
        records (`Sequence[QueryRecord]`): Per target layer its queries in these sequences.
        sequences (`int`): How many.
        skip (`int`, *optional*, defaults to 0): Tokens before the first that `stream` holds.
        stream (`torch.Tensor` of shape `[sequences, tokens − skip, hidden_size + 1]`, *optional*):
            What stands in for the target's own stream at the last depth.
    """
    if stream is not None:
        own = target.hidden[-1].view(sequences, -1, stream.shape[-1])
        target.hidden[-1] = torch.cat([own[:, :skip], stream.to(own)], dim=1).flatten(0, 1)
    return AttentionSample(sequences, _on_cpu(source), _on_cpu(target), [_record_on_cpu(each) for each in records])


def _record_on_cpu(record: QueryRecord) -> QueryRecord:
    # Copies: layers share the tensor of positions, and a file holds each tensor once.
    values: dict[str, Any] = {
        name: value.cpu().clone() if isinstance(value, torch.Tensor) else value for name, value in vars(record).items()
    }
    return QueryRecord(**values)


def _on_cpu(content: Content) -> Content:
    return Content(
        content.keys.cpu(),
        content.values.cpu(),
        [(keys.cpu(), values.cpu()) for keys, values in content.previous],
        [hidden.cpu() for hidden in content.hidden],
    )
