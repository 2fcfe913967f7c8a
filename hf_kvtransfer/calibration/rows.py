"""Adding a batch to the sums of attention-weighted rows (arXiv 2609.00891)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..features import KINDS, Support, gather
from .attention import QueryRecord, boundaries, row_weights
from .capture import Content
from .statistics import CalibrationStatistics


class AttentionRows:
    """
    The weights that the target's attention gives the rows of one batch.

    Args:
        tokens (`int`): Of each row.
        kept (`slice`): Which of them are summed.

    Attributes:
        positions (`torch.Tensor` of shape `[n]`): Where the queries are needed.
    """

    def __init__(self, tokens: int, kept: slice) -> None:
        self.positions = boundaries(tokens)
        self._kept = kept
        # Per layer and kind `[batch, kv_heads, kept tokens]`.
        self._weights: dict[tuple[int, str], torch.Tensor] = {}

    def note(self, layer: int, record: QueryRecord, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Takes the weights of one layer.

        Args:
            layer (`int`): The target layer.
            record ([`QueryRecord`]): Its queries at `positions`.
            keys (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): Native keys after RoPE.
            values (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): Native values.
        """
        for kind, weights in zip(KINDS, row_weights(record, keys, values), strict=True):
            self._weights[layer, kind] = weights[:, :, self._kept]

    def add_to(
        self,
        statistics: CalibrationStatistics,
        source: Content,
        target: Content,
        rows: Sequence[int],
        summed: Sequence[str] = KINDS,
    ) -> None:
        """
        Adds some rows of the batch to the weighted sums.

        Args:
            statistics (`CalibrationStatistics`): With sums of weighted rows.
            source (`Content`): Of these rows.
            target (`Content`): Of these rows.
            rows (`Sequence[int]`): Which rows of the batch they are.
            summed (`Sequence[str]`, *optional*): Which kinds; both by default.
        """
        every = Support(tuple(range(statistics.source.num_layers)), heads="local")
        content = {"keys": source.keys, "values": source.values}
        predicted = {"keys": target.keys, "values": target.values}
        offsets = statistics.source.offsets
        for layer, geometry in enumerate(statistics.target.layers):
            columns = slice(*statistics.target.offsets[layer : layer + 2])
            for kind in summed:

                def read(lag: int, read_kind: str, index: int) -> torch.Tensor:
                    return content[read_kind][:, offsets[index] : offsets[index + 1]]

                pieces = gather(every, kind, statistics.source, geometry, read, None)
                x = torch.stack([torch.cat(group, 1) for group in pieces])
                y = predicted[kind][:, columns].unflatten(1, (geometry.kv_heads, -1)).transpose(0, 1)
                weights = self._weights[layer, kind][list(rows)].transpose(0, 1).flatten(1)
                statistics.weighted[layer, kind].update(x, y, weights)
