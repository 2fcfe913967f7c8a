"""The cache that the target goes on from, for a left-padded batch of contexts that the source reads."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .._compat import cache_keyword
from ..appending import extend_cache
from ..cache import TransferredCache
from ..errors import PairMismatchError
from ..evaluation.controls import raw_layers
from ..geometry import decoder_of
from ..mapper import KVMapper


Entries = list[tuple[Tensor, Tensor]]


class Handover:
    """
    How contexts come from the source to the target.

    Args:
        source (`PreTrainedModel`): the model that reads.
        target (`PreTrainedModel`): the model that goes on.
        mapper ([`KVMapper`]): of this pair.
        exact_prefix (`int`, *optional*): as in [`KVMapper.convert`].
        exact_suffix (`int`, *optional*): as in [`KVMapper.convert`].
        is_raw (`bool`, *optional*, defaults to `False`):
            Whether the target is given the source's cache as it is, each layer the one at its relative depth.

    Raises:
        [`PairMismatchError`]: if the cache is to be given as it is, and the shapes of layers differ.
    """

    def __init__(
        self,
        source: nn.Module,
        target: nn.Module,
        mapper: KVMapper,
        exact_prefix: int | None = None,
        exact_suffix: int | None = None,
        is_raw: bool = False,
    ) -> None:
        self.source, self.target, self.mapper = source, target, mapper
        self.exact: dict[str, Any] = {"exact_prefix": exact_prefix, "exact_suffix": exact_suffix}
        self.geometry = mapper.config.geometry("target")
        self.raw = raw_layers(mapper) if is_raw else None
        if is_raw and self.raw is None:
            difference = "; ".join(mapper.config.geometry("source").differences(self.geometry))
            raise PairMismatchError(
                f"The target can't be given the source's cache as it is, since the two differ: {difference}; expected "
                "the same KV heads and head_dim. Leave the condition 'raw' out for this pair."
            )

    @torch.no_grad()
    def cache_of(self, context: Tensor, mask: Tensor) -> TransferredCache:
        """
        The target's cache of all tokens but the last.

        The source reads the batch at once. Rows of one length are then converted without their padding, so that a row
        comes out the same in every batch: the target reads an exact prefix of every row up to the same column.

        Args:
            context (`torch.Tensor` of shape `[batch, tokens]`): ids, two columns or more.
            mask (`torch.Tensor` of shape `[batch, tokens]`): 1 for real tokens, 0 for padding at the left.
        """
        entries = self._read(context, mask)
        lengths = mask.sum(-1)
        width, cache = context.shape[1], TransferredCache.for_geometry(self.geometry)
        columns: list[list[Tensor]] = []
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero().flatten()
            if length < 2:
                continue  # the target reads its only token, or the padding of an empty prompt
            part = [
                (keys[rows.to(keys.device), :, -length:], values[rows.to(keys.device), :, -length:])
                for keys, values in entries
            ]
            converted = self._convert(part, context[rows, -length:])
            for index, pair in enumerate(converted):
                if len(columns) == index:
                    columns.append([_zeros(tensor, len(lengths), width - 1) for tensor in pair])
                for whole, tensor in zip(columns[index], pair, strict=True):
                    # Where the target slides, what its windows have dropped stays zero and is dropped again.
                    whole[rows.to(whole.device), :, width - 1 - tensor.shape[2] :] = tensor.to(whole.device)
        for index, (keys, values) in enumerate(columns):
            extend_cache(cache, index, keys, values)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache.record_positions(positions[:, :-1], None if bool(mask.all()) else mask[:, :-1])
        return cache

    def _read(self, context: Tensor, mask: Tensor) -> Entries:
        """The source's keys and values of the batch."""
        decoder, cache = decoder_of(self.source), DynamicCache()
        device = next(self.source.parameters()).device
        given: dict[str, Any] = {cache_keyword(decoder): cache}
        if not bool(mask.all()):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            given |= {"attention_mask": mask.to(device), "position_ids": positions.to(device)}
        decoder(input_ids=context.to(device), use_cache=True, **given)
        layers: list[Any] = list(cache.layers)
        return [(layer.keys, layer.values) for layer in layers]

    def _convert(self, part: Entries, ids: Tensor) -> Entries:
        """Keys and values for the target of all tokens but the last, from those of rows without padding."""
        if self.raw is not None:
            return [(part[layer][0][:, :, :-1], part[layer][1][:, :, :-1]) for layer in self.raw]
        given: dict[str, Any] = {}
        if self.mapper.config.needs_target or any(self.exact.values()):
            given = {"input_ids": ids, "target": self.target}
        cache = self.mapper.convert(
            part,
            # A multimodal model can't be told from its cache to have read text alone.
            position_ids=torch.arange(ids.shape[1])[None],
            **self.exact,
            **given,
        )
        return [(layer.keys, layer.values) for layer in cache.layers]


def _zeros(like: Tensor, rows: int, tokens: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], tokens, like.shape[3])
