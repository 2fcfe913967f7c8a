"""The tensors that a conversion fills: of their final size from the start, and written once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .geometry import ModelGeometry


Entries = list[tuple[Tensor, Tensor]]
"""Keys and values per layer, each `[batch, kv_heads, tokens, head_dim]`, rotated as the target caches them."""


class EntryStorage:
    """
    The target's entries of a range of tokens.

    Args:
        geometry ([`ModelGeometry`]): of the target.
        batch (`int`): rows of the source cache.
        start (`int`): the first token of the range.
        stop (`int`): the token after its last.
        dtype (`torch.dtype`): of the entries.
        places (`Sequence[torch.device | None]`):
            Where the entries of each layer belong; `None` for where they are made.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        batch: int,
        start: int,
        stop: int,
        dtype: torch.dtype,
        places: Sequence[torch.device | None],
    ) -> None:
        self.start, self.stop, self.depth = start, stop, len(geometry.layers)
        self._geometry, self._batch, self._dtype, self._places = geometry, batch, dtype, places
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def room(self, layer: int, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """
        Where the keys and values of some tokens of one layer belong.

        Args:
            layer (`int`): the target layer.
            start (`int`): the first token.
            stop (`int`): the token after the last one.
            device (`torch.device`): where they are made.
        """
        if layer not in self._layers:
            shape = self._geometry.layers[layer]
            size = (self._batch, shape.kv_heads, self.stop - self.start, shape.head_dim)
            place = self._places[layer] or device
            self._layers[layer] = (
                torch.empty(size, dtype=self._dtype, device=place),
                torch.empty(size, dtype=self._dtype, device=place),
            )
        keys, values = self._layers[layer]
        if stop - start == self.stop - self.start:
            return keys, values
        return keys.narrow(2, start - self.start, stop - start), values.narrow(2, start - self.start, stop - start)

    def put(self, layers: Iterable[int], start: int, entries: Entries) -> None:
        """
        Writes what the target has made itself.

        Args:
            layers (`Iterable[int]`): the target layers.
            start (`int`): the first token.
            entries (`list`): of these layers.
        """
        for layer, states in zip(layers, entries, strict=True):
            rooms = self.room(layer, start, start + states[0].shape[2], states[0].device)
            for room, made in zip(rooms, states, strict=True):
                room.copy_(made)

    def filled(self, layers: Iterable[int], start: int, stop: int) -> Entries:
        """The entries of some tokens of layers that have been written, without copying."""
        return [self.room(layer, start, stop, self._layers[layer][0].device) for layer in layers]
