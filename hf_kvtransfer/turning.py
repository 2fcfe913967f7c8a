"""Taking RoPE off a chunk of keys, or putting it on, in three passes that end where the keys belong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .rope import RotaryCodec


@dataclass(frozen=True)
class _Factors:
    """
    A rotation as `out = keys · own + swap(keys) · partner`.

    Args:
        swap (`Callable`): puts each dimension in the place of the one it is turned with.
        own (`torch.Tensor` of shape `[batch or 1, 1, tokens, head_dim]`): the cosine of each dimension.
        partner (`torch.Tensor` of the same shape): its sine, with its sign.
    """

    swap: Callable[[Tensor], Tensor]
    own: Tensor
    partner: Tensor


class Turner:
    """
    Rotates keys of a range of tokens and writes the result.

    What a model's rotary function does is linear, and turns dimensions in pairs. So the function itself is asked once
    per range, on two probes of a single head, for the factors of all heads and all layers of a kind. A function that
    pairs dimensions in no known way is called on the keys themselves.

    Args:
        codec ([`RotaryCodec`]): of the model whose keys these are.
        positions (`torch.Tensor` of shape `[batch or 1, tokens]`): of the range.
        off (`bool`): whether RoPE is taken off; else it is put on.
    """

    def __init__(self, codec: RotaryCodec, positions: Tensor, *, off: bool) -> None:
        self._codec = codec
        self._positions = positions
        self._turn = codec.remove if off else codec.apply
        self._known: dict[tuple[object, ...], _Factors | None] = {}
        self._alike: dict[tuple[object, ...], _Factors | None] = {}

    def write(self, keys: Tensor, layer: int, out: Tensor) -> None:
        """
        Args:
            keys (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`): in any floating dtype.
            layer (`int`): index of the decoder layer that they belong to.
            out (`torch.Tensor` of the same shape): where they are written, rotated, in its dtype.
        """
        if self._codec.kind(layer) is None:
            out.copy_(keys)
            return
        keys = keys if keys.dtype == torch.float64 else keys.float()
        factors = self._factors(layer, keys)
        if factors is None or (keys.requires_grad and torch.is_grad_enabled()):
            out.copy_(self._turn(keys, self._codec.tables(self._positions, keys.device), layer))
            return
        turned = factors.swap(keys).mul_(factors.partner)
        if out.dtype == turned.dtype and out.device == turned.device and not out.requires_grad:
            torch.addcmul(turned, keys, factors.own, out=out)
        else:
            out.copy_(turned.addcmul_(keys, factors.own))

    def _factors(self, layer: int, keys: Tensor) -> _Factors | None:
        known = (layer, keys.dtype, keys.device)
        if known not in self._known:
            # Alike for all layers of a kind, which are mostly all.
            alike = (self._codec.kind(layer), keys.shape[-1], keys.dtype, keys.device)
            if alike not in self._alike:
                self._alike[alike] = self._measured(layer, keys)
            self._known[known] = self._alike[alike]
        return self._known[known]

    def _measured(self, layer: int, keys: Tensor) -> _Factors | None:
        head_dim = keys.shape[-1]
        partners = self._codec.partners(layer, head_dim)
        swap = _swap(partners)
        if swap is None:
            return None
        shape = (self._positions.shape[0], 1, self._positions.shape[1], head_dim)
        # One probe holds the first dimension of each pair, and what passes through; the other the rest.
        first = (torch.arange(head_dim) <= partners).to(keys.device)
        tables = self._codec.tables(self._positions, keys.device)
        ones, others = (self._turn(which.to(keys.dtype).expand(shape), tables, layer) for which in (first, ~first))
        return _Factors(swap, torch.where(first, ones, others), torch.where(first, others, ones))


def _swap(partners: Tensor) -> Callable[[Tensor], Tensor] | None:
    """A fast exchange of the dimensions of each pair, where they lie in halves or side by side."""
    own = torch.arange(len(partners))
    width = int((partners != own).sum())
    half = width // 2
    rest = width < len(partners)
    if torch.equal(partners, torch.cat([own[half:width], own[:half], own[width:]])):
        if not rest:
            return lambda keys: torch.cat(keys.chunk(2, dim=-1)[::-1], dim=-1)

        def halves(keys: Tensor) -> Tensor:
            return torch.cat((keys[..., half:width], keys[..., :half], keys[..., width:]), dim=-1)

        return halves
    if torch.equal(partners, torch.cat([own[:width].view(-1, 2).flip(-1).flatten(), own[width:]])):

        def neighbours(keys: Tensor) -> Tensor:
            turned = keys[..., :width].unflatten(-1, (half, 2)).flip(-1).flatten(-2)
            return torch.cat((turned, keys[..., width:]), dim=-1) if rest else turned

        return neighbours
    return None
