"""What the maps read of one source cache: content of each source layer, computed once and let go after its last use."""

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from .features import LayerSupport, gather
from .geometry import LayerGeometry, ModelGeometry
from .positions import Positions
from .rope import RotaryCodec
from .source import SourceCache


class ContentReader:
    """
    RoPE-free keys and values of a range of tokens of a source cache, as features for maps.

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
        read = [support for layer in supports for support in (layer or {}).values()]
        window = max((support.window for support in read), default=0)
        self._first = max(start - window, 0)
        self._codec = codec
        self._source = source.narrow(self._first, stop - self._first)
        self._positions = positions.narrow(self._first, stop - self._first)
        self._start, self._stop = start, stop
        # Once per device: either model may be spread over several.
        self._tables = cache(partial(codec.tables, self._positions.source))
        self._content: dict[tuple[str, int], Tensor] = {}
        self._last_use = {
            layer: index
            for index, entry in enumerate(supports)
            for support in (entry or {}).values()
            for layer in support.layers
        }
        # Nothing precedes the first token, so it stands in for what would: after left padding, the first real one.
        self._before = [] if positions.mask is None else (positions.mask.cumsum(-1) == 0).sum(-1).tolist()

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
        pieces = gather(supports[kind], kind, self.geometry, target, self._read, anchor)
        groups = [torch.cat([piece.to(device, dtype) for piece in group], dim=-1).flatten(0, 1) for group in pieces]
        # The features are the largest tensor of a conversion: no second copy where all heads read the same.
        return groups[0][None] if len(groups) == 1 else torch.stack(groups)

    @property
    def geometry(self) -> ModelGeometry:
        """Of the source."""
        return self._codec.geometry

    def forget(self, target_layer: int) -> None:
        """Lets go of what no target layer after this one reads."""
        for kind, layer in list(self._content):
            if self._last_use[layer] <= target_layer:
                del self._content[kind, layer]

    def _read(self, lag: int, kind: str, layer: int) -> Tensor:
        if (kind, layer) not in self._content:
            states = (self._source.keys if kind == "keys" else self._source.values)[layer]
            if kind == "keys":
                states = self._codec.remove(states, self._tables(states.device), layer)
            self._content[kind, layer] = states.transpose(1, 2).flatten(2)
        content = self._content[kind, layer]
        tokens, offset = self._stop - self._start, self._start - self._first
        if lag == 0:
            return content.narrow(1, offset, tokens)
        wanted = torch.arange(self._start - lag, self._stop - lag, device=content.device)[None]
        floor = torch.tensor(self._before or [0], device=content.device)[:, None]
        index = (wanted.maximum(floor) - self._first).clamp(min=0, max=content.shape[1] - 1)
        return content.gather(1, index[:, :, None].expand(content.shape[0], -1, content.shape[2]))


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
