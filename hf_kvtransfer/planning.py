"""What a mapper for a pair would cost, and whether there can be one, from configurations alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .calibration import FeatureLayout
from .calibration.statistics import SPLITS
from .config import KVMapperConfig
from .costs import ConversionCost, LayerCost, MapShape, conversion_cost, layer_costs
from .errors import KVTransferError, UnsupportedModelError
from .features import KINDS, LayerSupport, Support, stream_width
from .fitting import K_CANDIDATES
from .geometry import ModelGeometry, refusals
from .recipes import CONTEXT_LENGTH, recipe


# Statistics are summed in float64, and solving takes as much again as one split of them.
_SUM_BYTES, _SOLVING = 8, 1.5
_ROWS_PER_UPDATE = 2048


@dataclass(frozen=True)
class PairPlan:
    """
    Args:
        refusals (`dict[str, list[str]]`): per side, `"source"` and `"target"`, every reason against it.
        source (`ModelGeometry`, *optional*): of the source, unless it is refused.
        target (`ModelGeometry`, *optional*): of the target, unless it is refused.
        source_layers (`tuple[LayerCost, ...]`): what each layer of the source takes.
        target_layers (`tuple[LayerCost, ...]`): likewise.
        notes (`tuple[str, ...]`): what is worth knowing of the pair and is no reason against it.
    """

    refusals: dict[str, list[str]]
    source: ModelGeometry | None = None
    target: ModelGeometry | None = None
    source_layers: tuple[LayerCost, ...] = ()
    target_layers: tuple[LayerCost, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_supported(self) -> bool:
        """Whether a mapper can be fitted."""
        return not any(self.refusals.values())


@dataclass(frozen=True)
class Calibration:
    """
    How much text a fit reads.

    Args:
        sequences (`int`, *optional*, defaults to 500): how many.
        sequence_length (`int`, *optional*, defaults to 1024): tokens of each.
        token_stride (`int`, *optional*, defaults to 4): of these, every so many-th is summed.
    """

    sequences: int = 500
    sequence_length: int = 1024
    token_stride: int = 4

    @property
    def tokens(self) -> int:
        """Tokens that are summed."""
        return self.sequences * (self.sequence_length // self.token_stride)


@dataclass(frozen=True)
class RecipePlan:
    """
    What one recipe takes on a pair of models.

    Args:
        k (`int`): source layers that each map reads.
        heads (`str`): `"full"` or `"local"`.
        anchor_layers (`int`, *optional*): of the target's own layers, how many run in every conversion.
        anchor_start (`int`): the first of these.
        maps (`tuple[MapShape, ...]`): of the mapper, and what predicts the stream that enters the anchor.
        layers_read (`tuple[int, ...]`): of the source.
        parameters (`int`): of all maps, biases included.
        statistics_bytes (`int`): of the calibration statistics, both splits, in float64.
        cost ([`ConversionCost`]): of a conversion of 1,024 tokens.
        forward_flops (`int`): operations of both models' passes over the calibration text.
        sum_flops (`int`): operations of the statistics' products.
        solve_flops (`int`): operations of solving all maps once; a recipe that selects solves some of them several
            times.
        sum_bytes (`int`): bytes of statistics that are read and written while they grow.
        excess (`tuple[str, ...]`): what of it exceeds the budget.
    """

    k: int
    heads: str
    anchor_layers: int | None
    anchor_start: int
    maps: tuple[MapShape, ...]
    layers_read: tuple[int, ...]
    parameters: int
    statistics_bytes: int
    cost: ConversionCost
    forward_flops: int
    sum_flops: int
    solve_flops: int
    sum_bytes: int
    excess: tuple[str, ...] = ()

    @property
    def fit_memory(self) -> float:
        """Bytes of main memory that a fit needs beside the two models: statistics, solving, and the mapper."""
        return _SOLVING * self.statistics_bytes + 4 * self.parameters

    def conversion_bytes(self, source: ModelGeometry, target: ModelGeometry, tokens: int, number: int = 2) -> int:
        """
        Bytes that a conversion can't but move: of the source layers that are read, of the converted cache and of the
        maps' weights, each once.

        Args:
            source ([`ModelGeometry`]): of the source.
            target ([`ModelGeometry`]): of the target.
            tokens (`int`): how many are converted.
            number (`int`, *optional*, defaults to 2): bytes of a number; two in bfloat16.
        """
        read = sum(source.layers[layer].width for layer in self.layers_read)
        return number * (2 * tokens * (read + target.offsets[-1]) + self.parameters)


def plan_pair(source_config: Any, target_config: Any) -> PairPlan:
    """
    Looks at two configurations; no weights are loaded.

    Args:
        source_config (`PreTrainedConfig`): of the model whose caches will be converted.
        target_config (`PreTrainedConfig`): of the model that will use them.

    Returns:
        [`PairPlan`]
    """
    against = {"source": refusals(source_config), "target": refusals(target_config)}
    if any(against.values()):
        return PairPlan(against)
    source, target = ModelGeometry.from_config(source_config), ModelGeometry.from_config(target_config)
    layers = layer_costs(source_config), layer_costs(target_config)
    return PairPlan(against, source, target, *layers, notes=tuple(_notes(source, target)))


def plan_recipes(
    pair: PairPlan,
    *,
    ks: Sequence[int] | None = None,
    heads: str = "full",
    anchors: Sequence[int | None] = (None,),
    anchor_start: int = 0,
    calibration: Calibration | None = None,
    memory: float | None = None,
    max_cost: float | None = None,
) -> list[RecipePlan]:
    """
    What recipes take on a pair, from two configurations.

    Args:
        pair ([`PairPlan`]): two models that can be mapped.
        ks (`Sequence[int]`, *optional*): source layers per map; by default those of the paper, and all layers.
        heads (`"full"` or `"local"`, *optional*, defaults to `"full"`): the source heads that a target head reads.
        anchors (`Sequence[int | None]`, *optional*): numbers of anchor layers to show; none by default.
        anchor_start (`int`, *optional*, defaults to 0): the first of these layers.
        calibration ([`Calibration`], *optional*): how much text is read; by default as much as `fit` reads.
        memory (`float`, *optional*): bytes of main memory that a fit may take beside the two models.
        max_cost (`float`, *optional*): what a conversion may cost, as a share of the target's prefill at 1,024 tokens.

    Returns:
        `list[RecipePlan]`: by anchor, then by k.

    Raises:
        [`KVTransferError`]: if the pair has no such recipe, or calibration or budget are no positive numbers.
        [`UnsupportedModelError`]: if one of the two can't be mapped.
    """
    calibration = calibration or Calibration()
    for name, value in (*vars(calibration).items(), ("memory", memory), ("max_cost", max_cost)):
        if value is not None and not value > 0:
            raise KVTransferError(f"`{name}` is {value}; expected a number above 0. Leave it out for the default.")
    if calibration.token_stride > calibration.sequence_length:
        raise KVTransferError(
            f"Every {calibration.token_stride}-th token of sequences of {calibration.sequence_length} was asked for; "
            "expected at least one token per sequence. Choose a smaller `token_stride`."
        )
    source, target = pair.source, pair.target
    if source is None or target is None:
        raise UnsupportedModelError("\n".join(reason for reasons in pair.refusals.values() for reason in reasons))
    depth = source.num_layers
    ks = [k for k in K_CANDIDATES if k < depth] + [depth] if ks is None else ks
    plans = []
    for anchor in anchors:
        for k in dict.fromkeys(ks):
            fields = uniform_support(
                source, target, k, heads=heads, anchor_layers=anchor, anchor_start=0 if anchor is None else anchor_start
            )
            plans.append(_plan(pair, source, target, fields, heads, calibration, memory, max_cost))
    return plans


def chosen_plan(plans: Sequence[RecipePlan]) -> RecipePlan:
    """The costliest of those that keep to the budget, or the cheapest if none does."""
    within = [plan for plan in plans if not plan.excess]
    order = sorted(within or plans, key=lambda plan: plan.cost.total)
    return order[-1] if within else order[0]


def uniform_support(
    source: ModelGeometry,
    target: ModelGeometry,
    k: int,
    *,
    heads: str = "full",
    anchor_layers: int | None = None,
    anchor_start: int = 0,
) -> dict[str, Any]:
    """
    The fields of a [`KVMapperConfig`] of a recipe in which every map reads equally many source layers, those nearest in
    depth.

    Args:
        source ([`ModelGeometry`]): of the source.
        target ([`ModelGeometry`]): of the target.
        k (`int`): source layers that each map reads; with 0 the anchor alone is read.
        heads (`"full"` or `"local"`, *optional*, defaults to `"full"`): the source heads that a target head reads.
        anchor_layers (`int`, *optional*): how many of the target's layers it runs itself.
        anchor_start (`int`, *optional*, defaults to 0): the first of these.

    Raises:
        [`KVTransferError`]: if the pair has no such recipe.
    """
    layers, depth = source.num_layers, target.num_layers
    anchored = anchor_layers is not None
    if not (0 if anchored else 1) <= k <= layers:
        raise KVTransferError(
            f"k is {k}; expected a number from {0 if anchored else 1} to {layers}, the number of source layers. Choose "
            "one of these."
        )
    if anchored and not (anchor_start >= 0 and 0 <= (anchor_layers or 0) <= depth - anchor_start):
        raise KVTransferError(
            f"An anchor of {anchor_layers} layers from layer {anchor_start} on was asked for, of a target that has "
            f"{depth}; expected no more than there are. Choose a smaller one."
        )
    if anchor_start and not anchor_layers:
        raise KVTransferError(
            f"anchor_start is {anchor_start}, and no layers were asked to run from there on; expected one or more of "
            "them. Give `anchor_layers`, too."
        )
    if heads not in ("full", "local"):
        raise KVTransferError(f"heads is {heads!r}; expected 'full' or 'local'. Leave it out for full heads.")
    native = KVMapperConfig(anchor_layers=anchor_layers, anchor_start=anchor_start).native_layers(depth)

    def read(index: int, reads_anchor: bool) -> tuple[int, ...]:
        # Below an anchor that starts above the embedding there is nothing else to read.
        number = k or int(not reads_anchor)
        middle = (index + 0.5) * layers / depth
        first = min(max(round(middle - number / 2), 0), layers - number)
        return tuple(range(first, first + number))

    support: list[Any] = []
    for index in range(depth):
        reads_anchor = anchored and index >= native.stop
        one = Support(read(index, reads_anchor), "local" if heads == "local" else "full", anchor=reads_anchor)
        support.append(None if index in native else dict.fromkeys(KINDS, one.to_dict()))
    return {
        "support": support,
        "anchor_layers": anchor_layers,
        "anchor_start": anchor_start,
        "entry": Support(read(anchor_start, False)).to_dict() if anchor_start else None,
        # As many as a fit by the preset `auto` would leave to the target.
        "exact_prefix": recipe("auto", anchor_layers=anchor_layers, anchor_start=anchor_start).tokens_before,
        "k": k,
    }


def _plan(
    pair: PairPlan,
    source: ModelGeometry,
    target: ModelGeometry,
    fields: dict[str, Any],
    heads: str,
    calibration: Calibration,
    memory: float | None,
    max_cost: float | None,
) -> RecipePlan:
    config = KVMapperConfig(**fields)
    anchor, start = config.anchor_layers, config.anchor_start
    supports = list(_supports(config, target))
    maps = [
        MapShape(support.width(source, layer, stream_width(target)), layer.kv_heads, layer.head_dim, groups)
        for layer, support in supports
        for groups in [support.groups(layer)]
    ]
    entry = config.entry_support()
    if entry is not None:
        maps.append(MapShape(entry.width(source, target.layers[0], 0), 1, stream_width(target)))
    read = {index for _, support in supports for index in support.layers} | set(() if entry is None else entry.layers)
    layout = recipe("auto", anchor_layers=anchor, anchor_start=start, k=config.k).layout(
        source, target, int(memory or 0)
    )
    sums, size = _sums(layout, source, target, calibration.tokens)
    both = (*pair.source_layers, *pair.target_layers)
    plan = RecipePlan(
        k=config.k or 0,
        heads=heads,
        anchor_layers=anchor,
        anchor_start=start,
        maps=tuple(maps),
        layers_read=tuple(sorted(read)),
        parameters=sum(shape.heads * shape.head_dim * (shape.in_features + 1) for shape in maps),
        statistics_bytes=len(SPLITS) * size,
        cost=conversion_cost(
            pair.target_layers,
            maps,
            CONTEXT_LENGTH,
            anchor_layers=anchor,
            anchor_start=start,
            exact_prefix=config.exact_prefix,
        ),
        forward_flops=calibration.sequences * sum(layer.flops(0, calibration.sequence_length) for layer in both),
        sum_flops=sums,
        solve_flops=sum(_solve_flops(shape) for shape in maps),
        sum_bytes=2 * size * -(-calibration.tokens // _ROWS_PER_UPDATE),
    )
    excess = []
    if memory is not None and plan.fit_memory > memory:
        excess.append("memory")
    if max_cost is not None and plan.cost.share_of_prefill > max_cost:
        excess.append("cost")
    return RecipePlan(**{**vars(plan), "excess": tuple(excess)})


def _supports(config: KVMapperConfig, target: ModelGeometry) -> Iterator[tuple[Any, Support]]:
    layers: list[LayerSupport | None] = config.supports()
    for layer, kinds in zip(target.layers, layers, strict=True):
        for support in (kinds or {}).values():
            yield layer, support


def _sums(layout: FeatureLayout, source: ModelGeometry, target: ModelGeometry, tokens: int) -> tuple[int, int]:
    """Operations of a split's products, of which the symmetric one is counted half, and bytes of one split."""
    width, outputs = layout.source_width(source, target), layout.target_width(target)
    systems = len(layout.names)
    return systems * tokens * width * (width + 2 * outputs), systems * _SUM_BYTES * width * (width + outputs)


def _solve_flops(shape: MapShape) -> int:
    """One Cholesky factorisation per group, and two triangular systems per output."""
    width, outputs = shape.in_features, shape.heads * shape.head_dim
    return shape.groups * width**3 // 3 + 2 * width**2 * outputs


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
