"""What maps make of a range of tokens: content of the target's layers, and the stream that enters an anchor."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import stream_from
from .errors import ConversionError
from .features import KINDS, LayerSupport
from .maps import MapForm
from .placement import forms_at, place_of
from .positions import Positions
from .reading import ContentReader, layers_read, with_first
from .source import SourceCache


if TYPE_CHECKING:
    from .mapper import KVMapper


# Packed features of so many bytes stay near the cores that made them; wide models still get enough rows that reading
# the weights again for each chunk doesn't show.
_BYTES_PER_THREAD = 16 * 2**20
_BYTES_ON_ACCELERATOR = 2**30
_FEWEST_ROWS, _MOST_ROWS_PER_THREAD = 128, 512


def chunk_length(supports: Sequence[LayerSupport | None], source: Any, batch: int, device: torch.device) -> int:
    """
    How many tokens a conversion takes at once, from the width of what they are packed into: keys and values of every
    source layer that is read. Extra memory is about twice that of a chunk's features.

    Args:
        supports (`Sequence`): what the maps of each target layer read; `None` for layers without maps.
        source ([`ModelGeometry`]): of the source.
        batch (`int`): rows of the source cache.
        device (`torch.device`): where maps are computed.

    Returns:
        `int`: on a CPU so many that features take 16 MiB for each thread, but 128 to 512 rows; on an accelerator as
        many as take 1 GiB.
    """
    width = sum(source.layers[layer].width for layers in layers_read(supports).values() for layer in layers)
    threads = torch.get_num_threads()
    on_cpu = device.type == "cpu"
    rows = (_BYTES_PER_THREAD * threads if on_cpu else _BYTES_ON_ACCELERATOR) // (4 * max(width, 1))
    rows = max(rows, _FEWEST_ROWS)
    return max((min(rows, _MOST_ROWS_PER_THREAD * threads) if on_cpu else rows) // batch, 1)


def chunks(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """The range from `start` to `stop` in pieces of at most `length` tokens, as even as can be."""
    number = -(-(stop - start) // length)
    for index in range(number):
        yield start + (stop - start) * index // number, start + (stop - start) * (index + 1) // number


def layer_contents(
    mapper: "KVMapper",
    source: SourceCache,
    positions: Positions,
    hidden: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """
    RoPE-free keys, and values, of the target layers that have maps. Gradients flow through them into the maps where
    they are enabled.

    Args:
        mapper ([`KVMapper`]): the maps.
        source ([`SourceCache`]): of the whole context.
        positions ([`Positions`]): of the whole context.
        hidden (`torch.Tensor` of shape `[batch, stop − start, hidden_size + 1]`, *optional*):
            The anchor's output as features ([`~hf_kvtransfer.blocks.stream_features`]); needed where maps read it.
        start (`int`, *optional*, defaults to 0): the first wanted token.
        stop (`int`, *optional*): the token after the last one; all by default.

    Yields:
        `tuple[int, torch.Tensor, torch.Tensor]`: a target layer and its keys and values, each `[batch, kv_heads,
        stop − start, head_dim]`, in the maps' dtype and on their device.
    """
    stop = source.num_tokens if stop is None else stop
    supports, geometry = mapper.config.supports(), mapper.config.geometry("target")
    reader = ContentReader(mapper.codec("source"), source, positions, supports, start, stop)
    mapped = [index for index, support in enumerate(supports) if support is not None]
    forms: list[MapForm] = [getattr(mapper.layers[index], kind) for index in mapped for kind in KINDS]
    made: list[Tensor] = []
    for number, (form, call, device) in enumerate(forms_at(forms, source.keys[0].device)):
        index, kind = mapped[number // len(KINDS)], KINDS[number % len(KINDS)]
        support: Any = supports[index]
        pieces = reader.pieces(support[kind], kind, geometry.layers[index], hidden, device, form.weight_like.dtype)
        content = call(pieces).unflatten(1, (source.batch_size, stop - start)).transpose(0, 1)
        maps: Any = mapper.layers[index]
        constant = maps.first_token(kind)
        if constant is not None:
            content = with_first(content, constant.to(content.device), positions, start)
        made.append(content)
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
    supports: list[LayerSupport | None] = [{"keys": support}]
    layer, place = mapper.config.geometry("target").layers[0], place_of(form, source.keys[0].device)
    length = stop - start
    if not torch.is_grad_enabled():
        length = chunk_length(supports, mapper.config.geometry("source"), source.batch_size, place)
    parts = []
    for begin, end in chunks(start, stop, length):
        reader = ContentReader(mapper.codec("source"), source, positions, supports, begin, end)
        for _, call, device in forms_at([form], source.keys[0].device):
            pieces = reader.pieces(support, "keys", layer, None, device, form.weight_like.dtype)
            parts.append(stream_from(call(pieces)[0].unflatten(0, (source.batch_size, end - begin))))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
