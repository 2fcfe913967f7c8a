"""What is done with each batch of a calibration: both models read it, and its sums are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..conversion import anchor_output
from ..features import KINDS
from ..rope import RotaryCodec
from .attention import QueryRecord, boundaries, record_queries
from .capture import Content, capture_content, embedding_weight
from .rows import AttentionRows
from .sample import SAMPLE_QUERIES, sample_of
from .statistics import SPLITS, CalibrationStatistics


if TYPE_CHECKING:
    from ..mapper import KVMapper


@dataclass
class Passes:
    """
    Args:
        source (`torch.nn.Module`): Model whose cache is read.
        target (`torch.nn.Module`): Model whose cache is predicted. On other devices than the source it runs beside it.
        codecs (`tuple[RotaryCodec, RotaryCodec]`): Of both.
        stride (`int`): One token in so many is summed.
        heldout_fraction (`float`): Share of the sequences that isn't for fitting.
        attention_rows (`bool`): Whether rows weighted by attention are summed too.
        sample_tokens (`int`): About so many held-out tokens are kept.
        anchored_by ([`~hf_kvtransfer.KVMapper`], *optional*): Whose anchor stands in for the target's own stream.
        kinds (`Sequence[str]`, *optional*): Whether keys, values or, by default, both are summed.
    """

    source: nn.Module
    target: nn.Module
    codecs: tuple[RotaryCodec, RotaryCodec]
    stride: int
    heldout_fraction: float
    attention_rows: bool
    sample_tokens: int
    anchored_by: KVMapper | None
    kinds: Sequence[str] = KINDS

    def is_sampled(self, index: int, tokens: int) -> bool:
        """Whether a sequence of the collection is one of the first held-out ones, which are kept whole."""
        if not is_heldout(index, self.heldout_fraction):
            return False
        before = math.ceil(index * Fraction(str(self.heldout_fraction))) - 1
        return before < math.ceil(self.sample_tokens / tokens)

    def add(self, statistics: CalibrationStatistics, ids: torch.Tensor, indices: Sequence[int]) -> None:
        """
        Adds a batch, each row to its split.

        Args:
            statistics (`CalibrationStatistics`): What it is added to.
            ids (`torch.Tensor` of shape `[rows, tokens]`): Token ids without padding.
            indices (`Sequence[int]`): Which sequence of the collection each row is.
        """
        rows, tokens = ids.shape
        heldout = [row for row, index in enumerate(indices) if is_heldout(index, self.heldout_fraction)]
        fit = [row for row in range(rows) if row not in heldout]
        sampled = [row for row in heldout if self.is_sampled(indices[row], tokens)]
        kept = slice(statistics.layout.skip, None, self.stride)
        weights = AttentionRows(tokens, kept) if self.attention_rows and fit else None
        read, predicted, records, stream = self._captured(statistics, ids, sampled, weights)
        if stream is not None:
            predicted.hidden[-1] = stream[:, :: self.stride].to(predicted.hidden[-1]).flatten(0, 1)
        for split, chosen in zip(SPLITS, (fit, heldout), strict=True):
            if chosen:
                # Without a copy where all rows are of one split.
                x, y = (c if len(chosen) == rows else c.rows(chosen, rows) for c in (read, predicted))
                statistics.update_content(split, x, y, self.kinds)
        if weights is not None:
            weights.add_to(statistics, read.rows(fit, rows), predicted.rows(fit, rows), fit, self.kinds)
        if read.whole is not None and predicted.whole is not None:
            skip, chosen_stream = statistics.layout.skip, None if stream is None else stream[sampled]
            taken = sample_of(read.whole, predicted.whole, records, len(sampled), skip, chosen_stream)
            statistics.sample = taken if statistics.sample is None else statistics.sample.extended(taken)

    def _captured(
        self, statistics: CalibrationStatistics, ids: torch.Tensor, sampled: list[int], weights: AttentionRows | None
    ) -> tuple[Content, Content, list[QueryRecord], torch.Tensor | None]:
        """
        What both models make of a batch; the sample's records per layer; and the stream that an anchor makes of what
        the source read.
        """
        layout = statistics.layout
        streams: list[torch.Tensor] = []

        def follow(mapper: KVMapper, cache: Any) -> None:
            streams.append(anchor_output(mapper, cache, self.target, ids.to(embedding_weight(self.target).device)))

        read = partial(
            capture_content,
            self.source,
            self.codecs[0],
            ids,
            stride=self.stride,
            skip=layout.skip,
            window=layout.window,
            whole_rows=sampled,
            on_cache=None if self.anchored_by is None else partial(follow, self.anchored_by),
        )
        wanted = [*([] if weights is None else [weights.positions])]
        wanted += [boundaries(ids.shape[1], SAMPLE_QUERIES)] if sampled else []
        positions = torch.cat(wanted).unique() if wanted else None
        records: dict[int, QueryRecord] = {}

        def note(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            if weights is not None:
                weights.note(layer, records[layer].at(weights.positions), keys, values)

        def write() -> Content:
            nonlocal records
            with nullcontext(records) if positions is None else record_queries(self.target, positions) as records:
                return capture_content(
                    self.target,
                    self.codecs[1],
                    ids,
                    stride=self.stride,
                    skip=layout.skip,
                    hidden_at=layout.anchors,
                    whole_rows=sampled,
                    on_layer=note,
                )

        if self.anchored_by is None and not _devices(self.source) & _devices(self.target):
            # Each waits for its own device, and not for the other.
            with ThreadPoolExecutor(1) as other:
                reading = other.submit(read)
                predicted, content = write(), reading.result()
        else:
            content, predicted = read(), write()
        recorded = [records[layer].at(wanted[-1], sampled) for layer in sorted(records)] if sampled else []
        return content, predicted, recorded, streams[0] if streams else None


def is_heldout(index: int, fraction: float) -> bool:
    """Evenly spread from the second sequence on: two sequences already give one of each split."""
    share = Fraction(str(fraction))
    return index > 0 and math.ceil(index * share) > math.ceil((index - 1) * share)


def _devices(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters()}
