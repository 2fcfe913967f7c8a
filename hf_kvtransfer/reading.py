"""What the maps read of one source cache: the content of a chunk of its tokens, packed once for all target layers."""

import torch
from torch import Tensor

from .packing import Buffer, Columns, Packing
from .positions import Positions
from .rope import RotaryCodec
from .source import SourceCache
from .turning import Turner


class ContentReader:
    """
    RoPE-free keys and values of a range of tokens of a source cache, as features for maps.

    Source layers lie side by side in a few buffers, each filled when it is first read. So features of neighbouring
    source layers are views, and nothing is computed or copied twice.

    Args:
        codec ([`RotaryCodec`]): of the source.
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
        packing ([`Packing`]): what the maps read, and where it lies.
        start (`int`): the first token of the range.
        stop (`int`): the token after its last.
    """

    def __init__(
        self,
        codec: RotaryCodec,
        source: SourceCache,
        positions: Positions,
        packing: Packing,
        start: int,
        stop: int,
    ) -> None:
        self._packing, self._window = packing, packing.window
        self._first = max(start - self._window, 0)
        self._tokens, self._missing = stop - start, self._window - (start - self._first)
        self._source, self._length = source, stop - self._first
        here = positions.narrow(self._first, self._length)
        self._turner = Turner(codec, here.source, off=True)
        # Nothing precedes the first token, so it stands in for what would: after left padding, the first real one.
        self._padding = None
        if self._window and positions.mask is not None:
            self._padding = (positions.mask.cumsum(-1) == 0).sum(-1) - self._first
        self._rows: dict[tuple[int, str, int | None, torch.device, torch.dtype], Tensor] = {}
        self._filled: dict[tuple[str, int | None, torch.device, torch.dtype], Tensor] = {}

    def features(
        self, index: int, kind: str, anchor: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """
        The features of one map.

        Args:
            index (`int`): the target layer.
            kind (`str`): `"keys"` or `"values"`.
            anchor (`torch.Tensor` of shape `[batch, tokens, hidden_size + 1]`, *optional*):
                The anchor's output, as features.
            device (`torch.device`): where the map is.
            dtype (`torch.dtype`): of the map.

        Returns:
            `torch.Tensor` of shape `[groups, batch · tokens, features]`.
        """
        pieces = self.pieces(self._packing.columns[index, kind], anchor, device, dtype)
        features = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
        return features if features.dim() == 3 else features[None]

    def pieces(self, columns: Columns, anchor: Tensor | None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """
        The same as several tensors, one for each run of neighbouring source layers, to be read one after another:
        `[groups, batch · tokens, columns]`, without the first dimension where all heads read the same.
        """
        pieces = []
        for lag, buffer, left, right in columns.runs:
            key = (lag, buffer.read, buffer.groups, device, dtype)
            rows = self._rows.get(key)
            if rows is None:
                rows = self._rows[key] = self._lagged(lag, buffer, device, dtype)
            pieces.append(rows.narrow(-1, left, right - left))
        if columns.anchor and anchor is not None:
            rows = anchor.to(device, dtype).flatten(0, 1)
            pieces.append(rows if columns.groups is None else rows.expand(columns.groups, -1, -1))
        return pieces

    def _lagged(self, lag: int, buffer: Buffer, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All columns of a buffer as rows, each so many tokens back."""
        key = (buffer.read, buffer.groups, device, dtype)
        if key not in self._filled:
            self._filled[key] = self._packed(buffer, device, dtype)
        packed = self._filled[key].narrow(2, self._window - lag, self._tokens).flatten(1, 2)
        return packed[0] if buffer.groups is None else packed

    def _packed(self, buffer: Buffer, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`[groups or 1, batch, window + tokens, width]`."""
        rows, batch = self._window + self._tokens, self._source.batch_size
        packed = torch.empty(buffer.groups or 1, batch, rows, buffer.width, dtype=dtype, device=device)
        for layer, left, right, heads in zip(
            buffer.layers, buffer.offsets[:-1], buffer.offsets[1:], buffer.heads, strict=True
        ):
            states = (self._source.keys if buffer.read == "keys" else self._source.values)[layer]
            states = states.narrow(2, self._first, self._length)
            room = packed[:, :, self._missing :, left:right]
            if heads is None and buffer.groups is None:
                self._write(states, buffer.read, layer, room[0].unflatten(-1, (-1, states.shape[-1])).transpose(1, 2))
            elif heads is None:
                self._write(states, buffer.read, layer, room.transpose(0, 1))
            else:
                content = torch.empty(states.shape, dtype=dtype, device=states.device)
                self._write(states, buffer.read, layer, content)
                dealt = content[:, list(heads)].unflatten(1, (room.shape[0], -1))
                room.unflatten(-1, (-1, states.shape[-1])).copy_(dealt.permute(1, 0, 3, 2, 4))
        if self._missing:
            packed[:, :, : self._missing] = packed[:, :, self._missing : self._missing + 1]
        if self._padding is not None:
            first = (self._padding + self._missing).to(device)[:, None]
            index = torch.arange(rows, device=device)[None].maximum(first).clamp(max=rows - 1)
            packed = packed.gather(2, index[None, :, :, None].expand(packed.shape))
        return packed

    def _write(self, states: Tensor, read: str, layer: int, out: Tensor) -> None:
        if read == "keys":
            self._turner.write(states, layer, out)
        else:
            out.copy_(states)


def first_tokens(positions: Positions) -> Tensor | None:
    """`[batch, tokens]`: which token is the first of its row's text; `None` without padding, where it is the first."""
    if positions.mask is None:
        return None
    real = positions.mask != 0
    first: Tensor = real & (real.cumsum(-1) == 1)
    return first


def with_first(content: Tensor, constant: Tensor, first: Tensor | None, start: int) -> Tensor:
    """
    Content with a constant in place of the first token of each row's text, where that is among its tokens.

    Args:
        content (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): may be written to.
        constant (`torch.Tensor` of shape `[kv_heads · head_dim]`): what it is.
        first (`torch.Tensor` of shape `[batch, ≥ start + tokens]`, *optional*): from [`first_tokens`].
        start (`int`): the first token of the content.
    """
    _, heads, tokens, head_dim = content.shape
    made = constant.to(content.dtype).view(1, heads, 1, head_dim)
    if first is not None:
        here = first[:, start : start + tokens].to(content.device)
        return torch.where(here[:, None, :, None], made, content)
    if start == 0:
        content[:, :, :1] = made
    return content
