"""What the maps read of one source cache: the content of a chunk of its tokens, packed once for all target layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .features import KINDS, LayerSupport, Support, head_map
from .geometry import LayerGeometry, ModelGeometry
from .positions import Positions
from .rope import RotaryCodec
from .source import SourceCache
from .turning import Turner


class ContentReader:
    """
    RoPE-free keys and values of a range of tokens of a source cache, as features for maps.

    Source layers lie side by side in one buffer for each kind (and each way of dealing out heads), filled when it is
    first read. So features of neighbouring source layers are views, and nothing is computed or copied twice.

    Args:
        codec ([`RotaryCodec`]): of the source.
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
        supports (`Sequence`): what the maps of each target layer read; `None` for layers without maps.
        start (`int`): the first token of the range.
        stop (`int`): the token after its last.
    """

    def __init__(
        self,
        codec: RotaryCodec,
        source: SourceCache,
        positions: Positions,
        supports: Sequence[LayerSupport | None],
        start: int,
        stop: int,
    ) -> None:
        self.layers = layers_read(supports)
        self._window = max((s.window for layer in supports for s in (layer or {}).values()), default=0)
        first = max(start - self._window, 0)
        self._tokens, self._missing = stop - start, self._window - (start - first)
        self._codec = codec
        self._source = source.narrow(first, stop - first)
        here = positions.narrow(first, stop - first)
        self._turner = Turner(codec, here.source, off=True)
        # Nothing precedes the first token, so it stands in for what would: after left padding, the first real one.
        self._padding = None
        if self._window and positions.mask is not None:
            self._padding = (positions.mask.cumsum(-1) == 0).sum(-1) - first
        self._buffers: dict[tuple[str, int | None, torch.device, torch.dtype], Tensor] = {}

    def features(
        self,
        supports: LayerSupport,
        kind: str,
        target: LayerGeometry,
        anchor: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """
        The features of one map.

        Args:
            supports (`dict`): of the target layer.
            kind (`str`): `"keys"` or `"values"`.
            target ([`LayerGeometry`]): of the target layer.
            anchor (`torch.Tensor` of shape `[batch, tokens, hidden_size + 1]`, *optional*):
                The anchor's output, as features.
            device (`torch.device`): where the map is.
            dtype (`torch.dtype`): of the map.

        Returns:
            `torch.Tensor` of shape `[groups, batch · tokens, features]`.
        """
        pieces = self.pieces(supports[kind], kind, target, anchor, device, dtype)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def pieces(
        self,
        support: Support,
        kind: str,
        target: LayerGeometry,
        anchor: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The same as several tensors, one for each run of neighbouring source layers, to be read one after another."""
        groups = support.groups(target) if support.heads == "local" else None
        pieces = []
        for lag in range(support.window + 1):
            for read in KINDS if support.joint else (kind,):
                begin = self._window - lag
                for left, right in self._runs(support, read, groups):
                    buffer = self._buffer(read, groups, device, dtype)
                    pieces.append(buffer[:, :, begin : begin + self._tokens, left:right].flatten(1, 2))
        if support.anchor and anchor is not None:
            pieces.append(anchor.to(device, dtype).flatten(0, 1).expand(groups or 1, -1, -1))
        return pieces

    @property
    def geometry(self) -> ModelGeometry:
        """Of the source."""
        return self._codec.geometry

    def _width(self, layer: int, groups: int | None) -> int:
        """Numbers of one source layer in a row of a buffer, for each group."""
        shape = self.geometry.layers[layer]
        return shape.head_dim * (shape.kv_heads if groups is None else -(-shape.kv_heads // groups))

    def _runs(self, support: Support, read: str, groups: int | None) -> list[tuple[int, int]]:
        """The columns that a support reads of a buffer, in its own order, as few runs as there are."""
        offsets, offset = {}, 0
        for layer in self.layers[read, support.heads]:
            offsets[layer] = offset
            offset += self._width(layer, groups)
        runs: list[tuple[int, int]] = []
        for layer in support.layers:
            begin, end = offsets[layer], offsets[layer] + self._width(layer, groups)
            if runs and runs[-1][1] == begin:
                begin = runs.pop()[0]
            runs.append((begin, end))
        return runs

    def _buffer(self, read: str, groups: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (read, groups, device, dtype)
        if key not in self._buffers:
            self._buffers[key] = self._filled(read, groups, device, dtype)
        return self._buffers[key]

    def _filled(self, read: str, groups: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All source layers of one kind, `[groups or 1, batch, window + tokens, numbers]`."""
        layers = self.layers[read, "full" if groups is None else "local"]
        width, batch = sum(self._width(layer, groups) for layer in layers), self._source.batch_size
        rows = self._window + self._tokens
        buffer = torch.empty(groups or 1, batch, rows, width, dtype=dtype, device=device)
        offset = 0
        for layer in layers:
            shape, wide = self.geometry.layers[layer], self._width(layer, groups)
            room = buffer[:, :, self._missing :, offset : offset + wide].unflatten(-1, (-1, shape.head_dim))
            states = (self._source.keys if read == "keys" else self._source.values)[layer]
            if groups is None:
                self._write(states, read, layer, room[0].transpose(1, 2))
            elif groups == shape.kv_heads:
                self._write(states, read, layer, room[..., 0, :].transpose(0, 1))
            else:
                content = torch.empty(states.shape, dtype=dtype, device=states.device)
                self._write(states, read, layer, content)
                heads = [first + i for first, number in head_map(shape.kv_heads, groups) for i in range(number)]
                dealt = content[:, heads].unflatten(1, (groups, -1))
                room.copy_(dealt.permute(1, 0, 3, 2, 4))
            offset += wide
        if self._missing:
            buffer[:, :, : self._missing] = buffer[:, :, self._missing : self._missing + 1]
        if self._padding is not None:
            first = (self._padding + self._missing).to(device)[:, None]
            index = torch.arange(rows, device=device)[None].maximum(first).clamp(max=rows - 1)
            buffer = buffer.gather(2, index[None, :, :, None].expand(buffer.shape))
        return buffer

    def _write(self, states: Tensor, read: str, layer: int, out: Tensor) -> None:
        if read == "keys":
            self._turner.write(states, layer, out)
        else:
            out.copy_(states)


def layers_read(supports: Sequence[LayerSupport | None]) -> dict[tuple[str, str], list[int]]:
    """
    The source layers that any map reads, ascending, by kind and by `Support.heads`.

    Args:
        supports (`Sequence`): what the maps of each target layer read; `None` for layers without maps.
    """
    found: dict[tuple[str, str], set[int]] = {}
    for layer in supports:
        for kind, support in (layer or {}).items():
            for read in KINDS if support.joint else (kind,):
                found.setdefault((read, support.heads), set()).update(support.layers)
    return {key: sorted(layers) for key, layers in found.items()}


def with_first(content: Tensor, constant: Tensor, positions: Positions, start: int) -> Tensor:
    """
    Content with a constant in place of the first token of each row's text, where that is among its tokens.

    Args:
        content (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): may be written to.
        constant (`torch.Tensor` of shape `[kv_heads · head_dim]`): what it is.
        positions ([`Positions`]): of the whole context.
        start (`int`): the first token of the content.
    """
    _, heads, tokens, head_dim = content.shape
    made = constant.to(content.dtype).view(1, heads, 1, head_dim)
    if positions.mask is not None:
        real = positions.mask != 0
        first = (real & (real.cumsum(-1) == 1))[:, start : start + tokens]
        return torch.where(first.to(content.device)[:, None, :, None], made, content)
    if start == 0:
        content[:, :, :1] = made
    return content
