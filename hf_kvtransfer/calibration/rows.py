"""Adding a batch to the sums of attention-weighted rows (arXiv 2609.00891)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..features import KINDS, Support, gather
from .attention import boundaries, record_queries, row_weights
from .capture import Content
from .statistics import CalibrationStatistics
from .weighted import WeightedMoments


class AttentionRows:
    """
    The weights that the target's attention gives the rows of one batch.

    Args:
        target (`torch.nn.Module`): The model whose attention it is.
        tokens (`int`): Of each row.
        kept (`slice`): Which of them are summed.
    """

    def __init__(self, target: nn.Module, tokens: int, kept: slice) -> None:
        self._target, self._kept = target, kept
        self._positions = boundaries(tokens)
        # Per layer and kind `[batch, kv_heads, kept tokens]`.
        self._weights: dict[tuple[int, str], torch.Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[Callable[[int, torch.Tensor, torch.Tensor], None]]:
        """While it lasts, the target's queries are recorded; yields what to call with each layer's rotated entries."""
        with record_queries(self._target, positions=self._positions) as records:

            def on_layer(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
                for kind, weights in zip(KINDS, row_weights(records[layer], keys, values), strict=True):
                    self._weights[layer, kind] = weights[:, :, self._kept].cpu()

            yield on_layer

    def add_to(self, statistics: CalibrationStatistics, source: Content, target: Content, rows: Sequence[int]) -> None:
        """
        Adds some rows of the batch to the weighted sums.

        Args:
            statistics (`CalibrationStatistics`): Its sums of weighted rows are made if there are none yet.
            source (`Content`): Of these rows.
            target (`Content`): Of these rows.
            rows (`Sequence[int]`): Which rows of the batch they are.
        """
        every = Support(tuple(range(statistics.source.num_layers)), heads="local")
        content = {"keys": source.keys, "values": source.values}
        predicted = {"keys": target.keys, "values": target.values}
        offsets = statistics.source.offsets
        for layer, geometry in enumerate(statistics.target.layers):
            columns = slice(*statistics.target.offsets[layer : layer + 2])
            for kind in KINDS:

                def read(lag: int, read_kind: str, index: int) -> torch.Tensor:
                    return content[read_kind][:, offsets[index] : offsets[index + 1]]

                pieces = gather(every, kind, statistics.source, geometry, read, None)
                x = torch.stack([torch.cat(group, 1) for group in pieces])
                y = predicted[kind][:, columns].unflatten(1, (geometry.kv_heads, -1)).transpose(0, 1)
                weights = self._weights[layer, kind][list(rows)].transpose(0, 1).flatten(1)
                key = layer, kind
                if key not in statistics.weighted:
                    statistics.weighted[key] = WeightedMoments(
                        geometry.kv_heads, x.shape[2], geometry.head_dim, statistics.dtype
                    )
                device = statistics.weighted[key].device
                statistics.weighted[key].update(x.to(device), y.to(device), weights.to(device))
