"""What a mapper for a pair would cost, and whether there can be one, from configurations alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import KVTransferError
from .fitting import K_CANDIDATES
from .geometry import ModelGeometry, refusals


@dataclass(frozen=True)
class MapperSize:
    """
    Args:
        k (`int`): source layers per target layer.
        parameters (`int`): of all maps, biases included; the largest possible where layers differ in width.
    """

    k: int
    parameters: int

    def size_in_bytes(self, bytes_per_parameter: int = 2) -> int:
        """Bytes of the weights; two each in bfloat16."""
        return self.parameters * bytes_per_parameter


@dataclass(frozen=True)
class PairPlan:
    """
    Args:
        refusals (`dict[str, list[str]]`): per side, `"source"` and `"target"`, every reason against it.
        source (`ModelGeometry`, *optional*): of the source, unless it is refused.
        target (`ModelGeometry`, *optional*): of the target, unless it is refused.
        sizes (`tuple[MapperSize, ...]`): of the full-head mapper at each k.
        statistics_bytes (`int`): of the calibration statistics, both splits, in float64.
        notes (`tuple[str, ...]`): what is worth knowing of the pair and is no reason against it.
    """

    refusals: dict[str, list[str]]
    source: ModelGeometry | None = None
    target: ModelGeometry | None = None
    sizes: tuple[MapperSize, ...] = ()
    statistics_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_supported(self) -> bool:
        """Whether a mapper can be fitted."""
        return not any(self.refusals.values())


def plan_pair(source_config: Any, target_config: Any, ks: Sequence[int] | None = None) -> PairPlan:
    """
    Looks at two configurations; no weights are loaded.

    Args:
        source_config (`PreTrainedConfig`): of the model whose caches will be converted.
        target_config (`PreTrainedConfig`): of the model that will use them.
        ks (`Sequence[int]`, *optional*): the k to show; by default those of the paper, and all layers.

    Returns:
        [`PairPlan`]
    """
    against = {"source": refusals(source_config), "target": refusals(target_config)}
    if any(against.values()):
        return PairPlan(against)
    source, target = ModelGeometry.from_config(source_config), ModelGeometry.from_config(target_config)
    widths = sorted((layer.width for layer in source.layers), reverse=True)
    outputs = sum(layer.width for layer in target.layers)
    layers = source.num_layers
    beyond = [k for k in ks or () if not 1 <= k <= layers]
    if beyond:
        raise KVTransferError(
            f"k is {beyond[0]}; expected a number from 1 to {layers}, the number of source layers. Choose a smaller k."
        )
    chosen = [k for k in (ks or (*K_CANDIDATES, layers)) if k <= layers]
    sizes = tuple(MapperSize(k, 2 * outputs * (sum(widths[:k]) + 1)) for k in dict.fromkeys(chosen))
    features = sum(widths)
    return PairPlan(
        against,
        source,
        target,
        sizes,
        statistics_bytes=2 * 2 * 8 * features * (features + outputs),
        notes=tuple(_notes(source, target)),
    )


def _notes(source: ModelGeometry, target: ModelGeometry) -> list[str]:
    notes = []
    shapes = [sorted({(layer.kv_heads, layer.head_dim) for layer in side.layers}) for side in (source, target)]
    if shapes[0] != shapes[1]:
        notes.append(
            "The two sides have different KV heads or head_dim. The maps need no match, but published results are all "
            "on pairs that match."
        )
    if any(layer.sliding_window for layer in source.layers):
        notes.append(
            "The source has sliding-window layers: prefill it with a bare `DynamicCache()`, which keeps every token."
        )
    for name, side in (("source", source), ("target", target)):
        if side.multimodal_positions:
            notes.append(f"Images take 3-D positions in the {name}; only text can be converted.")
    if source.model_type != target.model_type:
        notes.append(
            f"The two are of different model types ({source.model_type}, {target.model_type}). That is fine as long as "
            "they share a tokenizer."
        )
    return notes
