"""Where a mapper's source layers lie side by side in memory, and which columns of them each of its maps reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from .features import KINDS, LayerSupport, Support, head_map, stream_width
from .geometry import ModelGeometry


@dataclass(frozen=True)
class Buffer:
    """
    Source layers of one kind that are packed together, `[groups or 1, batch, tokens, width]`.

    Args:
        read (`str`): `"keys"` or `"values"`.
        groups (`int`, *optional*): into how many parts heads are dealt out; `None` where all are read together.
        layers (`tuple[int, ...]`): ascending.
        offsets (`tuple[int, ...]`): the first column of each, and the number of all columns.
        heads (`tuple[tuple[int, ...] | None, ...]`):
            Of each layer the heads of all groups, one group after another; `None` where that is their order anyway.
    """

    read: str
    groups: int | None
    layers: tuple[int, ...]
    offsets: tuple[int, ...]
    heads: tuple[tuple[int, ...] | None, ...]

    @property
    def width(self) -> int:
        """Numbers of a token, for each group."""
        return self.offsets[-1]


@dataclass(frozen=True)
class Columns:
    """
    What one map reads.

    Args:
        groups (`int`, *optional*): how many different feature vectors a token has; `None` where all heads read one.
        runs (`tuple`): lag in tokens, buffer, first column and the column after the last; in the features' order.
        anchor (`bool`): whether the anchor's output comes after them.
    """

    groups: int | None
    runs: tuple[tuple[int, Buffer, int, int], ...]
    anchor: bool


class Packing:
    """
    The layout of everything that the maps of a mapper read.

    Args:
        supports (`Sequence`): what the maps of each target layer read; `None` for layers without maps.
        source ([`ModelGeometry`]): of the source.
        target ([`ModelGeometry`]): of the target.
    """

    def __init__(self, supports: Sequence[LayerSupport | None], source: ModelGeometry, target: ModelGeometry) -> None:
        self.source, self.target = source, target
        self.window = max((s.window for layer in supports for s in (layer or {}).values()), default=0)
        self.mapped = tuple(index for index, support in enumerate(supports) if support is not None)
        read: dict[tuple[str, int | None], set[int]] = {}
        maps = [(i, kind, support) for i, layer in enumerate(supports) for kind, support in (layer or {}).items()]
        for index, kind, support in maps:
            for kind_read in KINDS if support.joint else (kind,):
                read.setdefault((kind_read, self._groups(support, index)), set()).update(support.layers)
        self.buffers = {key: self._buffer(*key, tuple(sorted(layers))) for key, layers in read.items()}
        self.columns = {(index, kind): self._columns(index, kind, support) for index, kind, support in maps}

    def widths(self, index: int, kind: str) -> list[int]:
        """How many features each piece of a map holds, the anchor's output included."""
        columns = self.columns[index, kind]
        widths = [right - left for _, _, left, right in columns.runs]
        return [*widths, stream_width(self.target)] if columns.anchor else widths

    @property
    def width(self) -> int:
        """Numbers of a token in all buffers."""
        return sum(buffer.width * (buffer.groups or 1) for buffer in self.buffers.values())

    def _groups(self, support: Support, index: int) -> int | None:
        return support.groups(self.target.layers[index]) if support.heads == "local" else None

    def _buffer(self, read: str, groups: int | None, layers: tuple[int, ...]) -> Buffer:
        offsets, heads = [0], []
        for layer in layers:
            shape = self.source.layers[layer]
            dealt = [(0, shape.kv_heads)] if groups is None else head_map(shape.kv_heads, groups)
            order = tuple(first + i for first, number in dealt for i in range(number))
            is_plain = order == tuple(range(shape.kv_heads)) and (groups is None or groups == shape.kv_heads)
            heads.append(None if is_plain else order)
            offsets.append(offsets[-1] + dealt[0][1] * shape.head_dim)
        return Buffer(read, groups, layers, tuple(offsets), tuple(heads))

    def _columns(self, index: int, kind: str, support: Support) -> Columns:
        runs: list[tuple[int, Buffer, int, int]] = []
        for lag, read, layer in support.blocks(kind):
            buffer = self.buffers[read, self._groups(support, index)]
            place = buffer.layers.index(layer)
            begin, end = buffer.offsets[place : place + 2]
            # Neighbours in memory are read in one product.
            if runs and runs[-1][:2] == (lag, buffer) and runs[-1][3] == begin:
                begin = runs.pop()[2]
            runs.append((lag, buffer, begin, end))
        return Columns(self._groups(support, index), tuple(runs), support.anchor)
