"""Recipes: what a fit reads, how it chooses, and what it needs to have summed for that."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from .calibration.layout import FeatureLayout
from .errors import CalibrationError
from .geometry import ModelGeometry


CONTEXT_LENGTH = 1024
"""Tokens of context at which the cost of a recipe is counted; the published protocol's prefix."""

MAX_COST = 0.4
"""Share of the target's prefill that a recipe may cost when the number of anchor layers is to be chosen."""

_SAMPLE_TOKENS = 2048
_EXACT_PREFIX = 4
# Shares of the target's layers among which the depth of the anchor is chosen.
_ANCHOR_SHARES = (0.0, 1 / 12, 1 / 6, 1 / 4, 1 / 3)


@dataclass(frozen=True)
class Recipe:
    """
    How a mapper is solved.

    Args:
        selects (`bool`, *optional*, defaults to `False`):
            Whether every map's support and λ are chosen by held-out attention-output error, in which case `None` and
            `"auto"` below leave the choice open.
        k (`int`, `"all"` or `"auto"`, *optional*, defaults to `"auto"`): source layers that each map reads.
        ridge_lambda (`float`, *optional*): λ, on the unnormalised Gram matrix.
        heads (`"full"` or `"local"`, *optional*): which source heads a target head reads.
        joint (`bool`, *optional*): whether keys and values are both read for either.
        window (`int`, *optional*, defaults to 0): previous tokens that are read.
        order (`"ranked"` or `"greedy"`, *optional*): how source layers are found.
        weighted (`bool`, *optional*, defaults to `False`): whether rows are weighted by attention.
        anchor_layers (`int`, list of them, or `"auto"`, *optional*):
            how many of its own layers the target runs, or among which numbers to choose.
        anchor_start (`int` or list of them, *optional*, defaults to 0):
            the first of these layers, or among which to choose. Above 0 what enters it is predicted from the source.
        max_cost (`float`, *optional*):
            What a conversion may cost, as a share of the target's prefill at 1,024 tokens.
        exact_prefix (`int`, *optional*):
            first tokens that the target reads itself. By default 4 where the recipe selects and has an anchor, since
            the first tokens are what attention falls back on; none elsewhere.
        exact_suffix (`int`, *optional*, defaults to 0): last tokens that the target reads itself.
    """

    selects: bool = False
    k: Any = "auto"
    ridge_lambda: float | None = None
    heads: Literal["full", "local"] | None = None
    joint: bool | None = None
    window: int = 0
    order: Literal["ranked", "greedy"] | None = None
    weighted: bool = False
    anchor_layers: Any = None
    anchor_start: Any = 0
    max_cost: float | None = None
    exact_prefix: int | None = None
    exact_suffix: int = 0

    def layout(self, source: ModelGeometry, target: ModelGeometry, memory: int | None = None) -> FeatureLayout:
        """
        What has to be summed for this recipe.

        Args:
            source ([`ModelGeometry`]): of the source.
            target ([`ModelGeometry`]): of the target.
            memory (`int`, *optional*): bytes that the sums may take; joint features are tried where they fit.
        """
        anchors = self.anchors(target.num_layers)
        depths = {start + count for start, count in anchors} | {start for start, _ in anchors if start}
        depths -= {target.num_layers}
        # What is never mapped has no say in how the rest is.
        separate = FeatureLayout(False, self.window, tuple(sorted(depths)), self.tokens_before)
        joint = replace(separate, joint=True)
        if self.joint is not None:
            return joint if self.joint else separate
        width = joint.source_width(source, target)
        # Two splits in float64, and as much again while a system is solved.
        needed = 8 * 3 * width * (width + joint.target_width(target))
        return joint if self.selects and (memory is None or needed <= memory) else separate

    @property
    def tokens_before(self) -> int:
        """How many of the first tokens the target reads itself."""
        if self.exact_prefix is not None:
            return self.exact_prefix
        return _EXACT_PREFIX if self.selects and self.anchor_layers is not None else 0

    @property
    def sample_tokens(self) -> int:
        """Held-out tokens that have to be kept for the choice."""
        return _SAMPLE_TOKENS if self.selects else 0

    @property
    def chooses_anchor(self) -> bool:
        """Whether the anchor is to be chosen among several."""
        return (
            self.anchor_layers == "auto" or isinstance(self.anchor_layers, list) or isinstance(self.anchor_start, list)
        )

    def anchors(self, layers: int) -> list[tuple[int, int]]:
        """
        The anchors to try on a target of so many layers, each as its first layer and how many run; none if the
        recipe has no anchor.
        """
        if self.anchor_layers is None:
            return []
        starts = _as_list(self.anchor_start)
        counts = (
            sorted({round(share * layers) for share in _ANCHOR_SHARES})
            if self.anchor_layers == "auto"
            else _as_list(self.anchor_layers)
        )
        # What is predicted and not run further would be a map like any other.
        return [
            (start, count) for start in starts for count in counts if start + count <= layers and (count or not start)
        ]


PRESETS: dict[str, Recipe] = {
    "auto": Recipe(selects=True),
    # Heo et al., arXiv 2608.03893: full-head, top-k layers by R² of single-layer probes, λ = 0.01.
    "heo2026": Recipe(ridge_lambda=0.01, heads="full", joint=False, order="ranked"),
    # CacheBridge, arXiv 2609.00891: head-local, rows weighted by attention.
    "cachebridge2026": Recipe(ridge_lambda=0.01, heads="local", joint=False, order="ranked", weighted=True),
}


def recipe(preset: str = "auto", **changes: Any) -> Recipe:
    """
    A preset with changes.

    Args:
        preset (`str`, *optional*, defaults to `"auto"`): a key of `PRESETS`.
        **changes: fields of [`Recipe`]; `None` leaves the preset's.

    Raises:
        [`CalibrationError`]: if there is no such preset, or a value is impossible.
    """
    if not isinstance(preset, str) or preset not in PRESETS:
        raise CalibrationError(f"There is no preset {preset!r}; the presets are {', '.join(map(repr, PRESETS))}.")
    known = {field.name for field in fields(Recipe)} - {"selects"}
    for name in changes:
        if name not in known:
            raise CalibrationError(f"A recipe has no {name!r}; expected one of {', '.join(sorted(known))}.")
    changed = replace(PRESETS[preset], **{name: value for name, value in changes.items() if value is not None})
    return _checked(changed)


def _checked(given: Recipe) -> Recipe:
    if given.ridge_lambda is not None:
        given = replace(given, ridge_lambda=_number("ridge_lambda", given.ridge_lambda))
    if given.max_cost is not None:
        # A share: beyond a few prefills a limit is none.
        given = replace(given, max_cost=min(_number("max_cost", given.max_cost), 1e6))
    flags = (True, False)
    for name, choices in (
        ("heads", ("full", "local")),
        ("order", ("ranked", "greedy")),
        ("joint", flags),
        ("weighted", flags),
    ):
        if getattr(given, name) not in (*choices, None):
            raise CalibrationError(
                f"{name} is {getattr(given, name)!r}, expected {' or '.join(map(repr, choices))}. Leave it out for the "
                "preset's own."
            )
    for name in ("window", "exact_prefix", "exact_suffix"):
        if getattr(given, name) is not None and not _is_count(getattr(given, name)):
            raise CalibrationError(f"{name} is {getattr(given, name)!r}, expected a whole number of tokens, 0 or more.")
    anchor, start = given.anchor_layers, given.anchor_start
    if anchor not in (None, "auto") and not (_as_list(anchor) and all(map(_is_count, _as_list(anchor)))):
        raise CalibrationError(f'anchor_layers is {anchor!r}, expected "auto" or a whole number of layers, 0 or more.')
    if not _as_list(start) or not all(map(_is_count, _as_list(start))) or (start != 0 and anchor is None):
        raise CalibrationError(
            f"anchor_start is {start!r}, expected a whole number, the first layer that the target runs, and with it "
            "`anchor_layers`, how many of them."
        )
    if not given.selects and (given.chooses_anchor or given.max_cost is not None):
        raise CalibrationError(
            'The number of anchor layers and `max_cost` are weighed only by the preset "auto"; expected a whole number '
            "of `anchor_layers` and no `max_cost` with a published preset."
        )
    other = given.joint or given.window or given.anchor_layers is not None or given.heads == "full"
    if given.weighted and (other or given.selects):
        raise CalibrationError(
            "Rows can be weighted by attention only for head-local features of one kind and token, without an anchor "
            "and by a published preset; expected `weighted=False` beside joint, window, full heads, anchor_layers or "
            'the preset "auto". Choose one of the two.'
        )
    return given


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise CalibrationError(f"{name} is {value!r}, expected a finite number of at least 0.")
    return number


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
