"""What maps make of a range of tokens: content of the target's layers, and the stream that enters an anchor."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import stream_from
from .errors import ConversionError
from .features import KINDS
from .packing import Columns, Packing
from .placement import Placed, place_of
from .positions import Positions
from .reading import ContentReader, first_tokens, with_first
from .source import SourceCache


if TYPE_CHECKING:
    from .mapper import KVMapper


# Packed features of so many bytes stay near the cores that made them; wide models still get enough rows that reading
# the weights again for each chunk doesn't show.
_BYTES_PER_THREAD = 16 * 2**20
_BYTES_ON_ACCELERATOR = 2**30
_FEWEST_ROWS, _MOST_ROWS_PER_THREAD = 128, 256


def chunk_length(packing: Packing, batch: int, device: torch.device) -> int:
    """
    How many tokens a conversion takes at once, from the width of what they are packed into: keys and values of every
    source layer that is read. Extra memory is that of a chunk's features, and a few layers more.

    Args:
        packing ([`Packing`]): what the maps read.
        batch (`int`): rows of the source cache.
        device (`torch.device`): where maps are computed.

    Returns:
        `int`: on a CPU so many that features take 16 MiB for each thread, but 128 to 256
        rows for each; on an accelerator as many as take 1 GiB.
    """
    threads = torch.get_num_threads()
    on_cpu = device.type == "cpu"
    rows = (_BYTES_PER_THREAD * threads if on_cpu else _BYTES_ON_ACCELERATOR) // (4 * max(packing.width, 1))
    rows = max(rows, _FEWEST_ROWS)
    return max((min(rows, _MOST_ROWS_PER_THREAD * threads) if on_cpu else rows) // batch, 1)


def chunks(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """The range from `start` to `stop` in pieces of at most `length` tokens, as even as can be."""
    number = -(-(stop - start) // length)
    for index in range(number):
        yield start + (stop - start) * index // number, start + (stop - start) * (index + 1) // number


class ContentMaker:
    """
    The maps of a mapper over one source cache. What doesn't depend on the tokens is worked out once.

    Args:
        mapper ([`KVMapper`]): the maps.
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
    """

    def __init__(self, mapper: "KVMapper", source: SourceCache, positions: Positions) -> None:
        self._codec, self._source, self._positions = mapper.codec("source"), source, positions
        self.packing, cache = mapper.packing(), source.keys[0].device
        self._first = first_tokens(positions) if mapper.config.first_token else None
        self._maps: list[tuple[int, Columns, Placed, Tensor | None]] = []
        for index, layer in enumerate(mapper.layers):
            for kind in KINDS if index in self.packing.mapped else ():
                maps: Any = layer
                placed = Placed(getattr(maps, kind), self.packing.widths(index, kind), cache)
                constant = maps.first_token(kind)
                constant = None if constant is None else constant.to(placed.device)
                self._maps.append((index, self.packing.columns[index, kind], placed, constant))

    def contents(self, start: int, stop: int, hidden: Tensor | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """
        Content of a range of tokens, layer by layer.

        Args:
            start (`int`): the first token.
            stop (`int`): the token after the last one.
            hidden (`torch.Tensor` of shape `[batch, stop − start, hidden_size + 1]`, *optional*):
                The anchor's output over these tokens, as features.

        Yields:
            `tuple[int, torch.Tensor, torch.Tensor]`: a target layer and its keys, without RoPE, and values, each
            `[batch, kv_heads, stop − start, head_dim]`, in the maps' dtype and where they are computed. Gradients flow
            through them into the maps where they are enabled.
        """
        batch, geometry = self._source.batch_size, self.packing.target
        reader = ContentReader(self._codec, self._source, self._positions, self.packing, start, stop)
        made: list[Tensor] = []
        for number, (index, columns, placed, constant) in enumerate(self._maps):
            if number == 0:
                placed.fetch()
            flat = placed(reader.pieces(columns, hidden, placed.device, placed.dtype))
            # This map has been started, and on an accelerator it runs while the next weights come.
            if number + 1 < len(self._maps):
                self._maps[number + 1][2].fetch()
            layer = geometry.layers[index]
            if flat.dim() == 2:
                content = flat.view(batch, stop - start, layer.kv_heads, layer.head_dim).transpose(1, 2)
            else:
                content = flat.view(layer.kv_heads, batch, stop - start, layer.head_dim).transpose(0, 1)
            made.append(content if constant is None else with_first(content, constant, self._first, start))
            if len(made) == len(KINDS):
                yield index, made[0], made[1]
                made = []


def predicted_stream(mapper: "KVMapper", source: SourceCache, positions: Positions, start: int, stop: int) -> Tensor:
    """
    The residual stream that enters the anchor, where it is predicted from the source cache.

    Args:
        mapper ([`KVMapper`]): the maps.
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
        start (`int`): the first wanted token.
        stop (`int`): the token after the last one.

    Returns:
        `torch.Tensor` of shape `[batch, stop − start, hidden_size]`, in float32.

    Raises:
        [`ConversionError`]: if this mapper predicts none.
    """
    support, form = mapper.config.entry_support(), mapper.entry
    if support is None or form is None:
        raise ConversionError(
            "This mapper predicts no residual stream; expected one with `anchor_start` above 0. Use `convert`."
        )
    geometries = mapper.geometry("source"), mapper.geometry("target")
    packing, cache = Packing([{"keys": support}], *geometries), source.keys[0].device
    length = stop - start
    if not torch.is_grad_enabled():
        length = chunk_length(packing, source.batch_size, place_of(form, cache))
    placed, columns, parts = Placed(form, packing.widths(0, "keys"), cache), packing.columns[0, "keys"], []
    for begin, end in chunks(start, stop, length):
        reader = ContentReader(mapper.codec("source"), source, positions, packing, begin, end)
        placed.fetch()
        features = placed(reader.pieces(columns, None, placed.device, placed.dtype))
        parts.append(stream_from(features.view(source.batch_size, end - begin, -1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
