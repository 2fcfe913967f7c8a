"""Which features calibration sums, and where each lies among the columns of the moments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CalibrationError
from ..features import KINDS, Support, stream_width


if TYPE_CHECKING:
    from ..geometry import ModelGeometry


BOTH = "keys and values"
"""Name of the moments of joint features, which hold both kinds on both sides."""


@dataclass(frozen=True)
class FeatureLayout:
    """
    What is summed beyond the plain features (the same kind of all source layers).

    Args:
        joint (`bool`, *optional*, defaults to `False`):
            Sum keys and values in one system, so that maps can read both; twice the memory.
        window (`int`, *optional*, defaults to 0): Previous tokens whose features are summed too.
        skip (`int`, *optional*, defaults to 0):
            Tokens at the start of every sequence that are left out, as the target will read them itself.
        anchors (`tuple[int, ...]`, *optional*):
            Depths of the target: the residual stream that enters these layers is summed too, as features.
    """

    joint: bool = False
    window: int = 0
    anchors: tuple[int, ...] = ()
    skip: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The separate systems of moments."""
        return (BOTH,) if self.joint else KINDS

    def name(self, kind: str) -> str:
        """The system that holds a kind."""
        return BOTH if self.joint else kind

    def source_width(self, source: ModelGeometry, target: ModelGeometry) -> int:
        """Number of feature columns of one system."""
        own = source.offsets[-1] * (2 if self.joint else 1) * (1 + self.window)
        return own + len(self.anchors) * stream_width(target)

    def target_width(self, target: ModelGeometry) -> int:
        """Number of output columns of one system."""
        return target.offsets[-1] * (2 if self.joint else 1)

    def outputs(self, kind: str, target: ModelGeometry) -> list[slice]:
        """Where each target layer's outputs of a kind lie."""
        shift = target.offsets[-1] if self.joint and kind == KINDS[1] else 0
        return [slice(shift + start, shift + stop) for start, stop in itertools.pairwise(target.offsets)]

    def features(
        self,
        support: Support,
        kind: str,
        source: ModelGeometry,
        target: ModelGeometry,
        layer: int,
        anchor_depth: int | None = None,
    ) -> list[list[slice]]:
        """
        Where the features of one map lie, per group, in the order in which [`~hf_kvtransfer.features.gather`] puts
        them together.

        Raises:
            CalibrationError: If the support reads what wasn't summed.
        """
        missing = [
            what
            for what, needed in (
                ("joint features", support.joint and not self.joint),
                (f"a window of {support.window} previous tokens", support.window > self.window),
                (f"the residual stream at depth {anchor_depth}", support.anchor and anchor_depth not in self.anchors),
            )
            if needed
        ]
        if missing:
            raise CalibrationError(
                f"These statistics were collected without {' and '.join(missing)} ({self}); expected statistics that "
                "hold what the recipe reads. Collect them again with the same recipe, or choose one without."
            )
        geometry, total = target.layers[layer], source.offsets[-1]
        groups: list[list[slice]] = [[] for _ in range(support.groups(geometry))]
        for lag, read, index in support.blocks(kind):
            start = lag * total * (2 if self.joint else 1) + (total if self.joint and read == KINDS[1] else 0)
            start += source.offsets[index]
            head_dim = source.layers[index].head_dim
            heads = support.heads_read(source.layers[index], geometry)
            for group, (first, number) in zip(groups, heads, strict=True):
                group.append(slice(start + first * head_dim, start + (first + number) * head_dim))
        if support.anchor and anchor_depth is not None:
            for group in groups:
                group.append(self.stream(source, target, anchor_depth))
        return [merged(group) for group in groups]

    def stream(self, source: ModelGeometry, target: ModelGeometry, depth: int) -> slice:
        """Where the features of the target's residual stream at a depth lie."""
        width = stream_width(target)
        stop = self.source_width(source, target) - (len(self.anchors) - 1 - self.anchors.index(depth)) * width
        return slice(stop - width, stop)

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON types."""
        return {**asdict(self), "anchors": list(self.anchors)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FeatureLayout:
        """Reads what `to_dict` wrote."""
        return cls(**{**values, "anchors": tuple(values["anchors"])})


def merged(slices: Sequence[slice]) -> list[slice]:
    """The same columns in the same order, neighbours put together."""
    result: list[slice] = []
    for part in slices:
        if result and result[-1].stop == part.start:
            result[-1] = slice(result[-1].start, part.stop)
        else:
            result.append(part)
    return result
