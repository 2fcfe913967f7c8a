"""What a training batch holds: token ids, and what both models made of them, as flat tensors that can be stacked."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import stream_features
from ..calibration.attention import QueryRecord, boundaries, record_queries
from ..conversion import anchor_output as mapped_anchor_output
from ..errors import CalibrationError
from ..geometry import ModelGeometry
from ..mapper import KVMapper
from ..native import run_native
from ..positions import Positions
from ..source import SourceCache
from .queries import flat_queries, without_queries


FEATURES = ("source_keys", "source_values", "target_keys", "target_values")
"""Names of the captured tensors, each `[batch, tokens, Σ kv_heads · head_dim]` over the layers of its side."""


def flatten(states: "tuple[Tensor, ...]") -> Tensor:
    """Per layer `[batch, kv_heads, tokens, head_dim]` to one tensor `[batch, tokens, width]`, layer by layer."""
    device, dtype = states[0].device, states[0].dtype
    return torch.cat([layer.transpose(1, 2).flatten(2).to(device, dtype) for layer in states], dim=-1)


def unflatten(flat: Tensor, geometry: ModelGeometry) -> tuple[Tensor, ...]:
    """The inverse of [`flatten`], without copying."""
    widths = [layer.width for layer in geometry.layers]
    if flat.dim() != 3 or flat.shape[-1] != sum(widths):
        raise CalibrationError(
            f"A batch holds captured keys or values of shape {list(flat.shape)}; expected [batch, tokens, "
            f"{sum(widths)}], all layers of the {geometry.model_type} model side by side. Capture the features with "
            "the models of this mapper."
        )
    return tuple(
        part.unflatten(-1, (layer.kv_heads, layer.head_dim)).transpose(1, 2)
        for part, layer in zip(flat.split(widths, dim=-1), geometry.layers, strict=True)
    )


@torch.no_grad()
def capture_batch(
    source: nn.Module, target: nn.Module, input_ids: Tensor, *, anchor_layers: int | None = None, queries: int = 0
) -> tuple[dict[str, Tensor], list[QueryRecord]]:
    """
    Runs both models over rows of tokens and returns what the losses read of them.

    Args:
        source (`PreTrainedModel`): the model whose caches are converted.
        target (`PreTrainedModel`): the model that uses them.
        input_ids (`torch.Tensor` of shape `[batch, tokens]`): rows without padding.
        anchor_layers (`int`, *optional*): how many of the target's first layers an anchor runs.
        queries (`int`, *optional*, defaults to 0): at how many log-spaced tokens the target's queries are kept.

    Returns:
        `tuple[dict[str, torch.Tensor], list[QueryRecord]]`: first the four of [`FEATURES`] in the models' dtypes, keys
        rotated as they were cached; with queries, `queries` of shape `[batch, queries, width]`; with an anchor,
        `hidden` of shape `[batch, tokens, hidden_size + 1]`, its output as features in float32. Then, with queries,
        how each layer of the target attends.
    """
    batch: dict[str, Tensor] = {}
    attention: list[QueryRecord] = []
    for side, model in (("source", source), ("target", target)):
        with ExitStack() as stack:
            records: Any = {}
            if side == "target" and queries:
                where = boundaries(input_ids.shape[1], queries)
                records = stack.enter_context(record_queries(model, positions=where))
            run = run_native(model, input_ids)
        if records:
            attention = [records[layer] for layer in range(len(run.keys))]
        batch[f"{side}_keys"], batch[f"{side}_values"] = flatten(run.keys), flatten(run.values)
    if attention:
        batch["queries"] = flat_queries(attention)
    if anchor_layers is not None:
        batch["hidden"] = anchor_output(target, input_ids, anchor_layers)
    return batch, without_queries(attention)


@torch.no_grad()
def anchor_output(target: nn.Module, input_ids: Tensor, layers: int) -> Tensor:
    """
    What the first layers of the target put out, as features, `[batch, tokens, hidden_size + 1]` in float32.

    Raises:
        [`CalibrationError`]: if these are all of its layers.
    """
    return _features(run_native(target, input_ids, layers=layers).hidden, layers)


def _features(hidden: Tensor | None, layers: int) -> Tensor:
    if hidden is None:
        raise CalibrationError(
            f"An anchor of {layers} layers reaches the end of the target, and leaves nothing after it to map; expected "
            "fewer. Lower `anchor_layers`."
        )
    return stream_features(hidden)


@torch.no_grad()
def anchor_output_of(mapper: KVMapper, target: nn.Module, input_ids: Tensor, source: SourceCache) -> Tensor:
    """
    The same of the layers that a mapper's anchor runs, which may be some in the middle that start from a prediction.
    """
    config = mapper.config
    if not config.anchor_start:
        return anchor_output(target, input_ids, config.anchor_layers or 0)
    hidden = mapped_anchor_output(mapper, list(zip(source.keys, source.values, strict=True)), target, input_ids)
    # The target reads the prefix in full, and no map is read there; any finite numbers will do.
    return torch.cat([hidden[:, :1].expand(-1, config.exact_prefix, -1), hidden], dim=1)


def source_cache(batch: dict[str, Any], geometry: ModelGeometry) -> SourceCache:
    """The source's side of a batch as a cache."""
    return SourceCache(unflatten(batch["source_keys"], geometry), unflatten(batch["source_values"], geometry))


def counted_positions(tokens: int, device: torch.device) -> Positions:
    """Those of rows without padding."""
    positions = torch.arange(tokens, device=device)[None]
    return Positions(positions, positions, None)
