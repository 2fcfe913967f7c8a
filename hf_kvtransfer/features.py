"""What a map reads: which source layers, which of their KV heads, which tokens, and the anchor's output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from .geometry import LayerGeometry, ModelGeometry


KINDS = ("keys", "values")


@dataclass(frozen=True)
class Support:
    """
    What one map, of one target layer and one kind (keys or values), reads of the source cache.

    Args:
        layers (`tuple[int, ...]`):
            Source layers, ascending. May be empty if the anchor is read.
        heads (`"full"` or `"local"`, *optional*, defaults to `"full"`):
            Whether every target head reads all KV heads of these layers (arXiv 2608.03893), or only its own
            (arXiv 2609.00891, head-local support; see [`head_map`]).
        joint (`bool`, *optional*, defaults to `False`):
            Whether keys and values are both read, or only the kind that is mapped.
        window (`int`, *optional*, defaults to 0):
            How many previous tokens are read too. The first token's predecessor is that token itself.
        anchor (`bool`, *optional*, defaults to `False`):
            Whether the normalised output of the target's own first layers is read too.
    """

    layers: tuple[int, ...]
    heads: Literal["full", "local"] = "full"
    joint: bool = False
    window: int = 0
    anchor: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether only the layers say anything: full heads, own kind, this token, no anchor."""
        return self == Support(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The support as JSON types."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Support":
        """
        Reads what `to_dict` wrote.

        Raises:
            ValueError: a field is unknown, missing, or of another type.
        """
        try:
            support = cls(**{**values, "layers": tuple(values["layers"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"no support can be read from {dict(values)} ({error})") from error
        whole = (*support.layers, support.window)
        if (
            support.heads not in ("full", "local")
            or not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in whole)
            or not isinstance(support.joint, bool)
            or not isinstance(support.anchor, bool)
        ):
            raise ValueError(f"no support can be read from {dict(values)}")
        return support

    def groups(self, target: LayerGeometry) -> int:
        """How many different feature vectors a token has: one for all target heads, or one for each."""
        return target.kv_heads if self.heads == "local" else 1

    def blocks(self, kind: str) -> Iterator[tuple[int, str, int]]:
        """What of the source is read, in the order of the features: tokens back, kind, source layer."""
        for lag in range(self.window + 1):
            for read in KINDS if self.joint else (kind,):
                for layer in self.layers:
                    yield lag, read, layer

    def heads_read(self, source: LayerGeometry, target: LayerGeometry) -> list[tuple[int, int]]:
        """Per group the source heads that it reads of one layer, as (first, number)."""
        if self.heads == "full":
            return [(0, source.kv_heads)]
        return head_map(source.kv_heads, target.kv_heads)

    def width(self, source: ModelGeometry, target: LayerGeometry, anchor_width: int) -> int:
        """Number of features of one group."""
        heads = (self.heads_read(source.layers[i], target)[0][1] * source.layers[i].head_dim for i in self.layers)
        return sum(heads) * (2 if self.joint else 1) * (1 + self.window) + (anchor_width if self.anchor else 0)


def stream_width(target: ModelGeometry) -> int:
    """Number of features of the target's residual stream: its direction, and the logarithm of its size."""
    return target.hidden_size + 1


def native_layers(start: int, layers: int | None, depth: int) -> range:
    """
    The target layers that an anchor makes: those it runs, and the one after them by its projection alone.

    Args:
        start (`int`): the first layer that runs.
        layers (`int`, *optional*): how many run; `None` without an anchor.
        depth (`int`): number of target layers.
    """
    return range(0) if layers is None else range(start, min(start + layers + 1, depth))


def depth_below(depth: int | None, layer: int) -> int | None:
    """The depth of the residual stream that a target layer can read, if there is one below it."""
    return depth if depth is not None and layer > depth else None


LayerSupport = dict[str, Support]
"""The supports of one target layer, by kind."""


def head_map(source_heads: int, target_heads: int) -> list[tuple[int, int]]:
    """
    Which source heads a target head reads under head-local support, where the two numbers may differ.

    Heads keep their order: with equal numbers each reads its own; if the source has fewer, neighbours share one; if
    it has more, each reads the neighbouring ones that fall to it, the same number for all.

    Args:
        source_heads (`int`): KV heads of the source layer.
        target_heads (`int`): KV heads of the target layer.

    Returns:
        `list[tuple[int, int]]`: per target head the first source head and how many.
    """
    number = -(-source_heads // target_heads)
    return [(min(head * source_heads // target_heads, source_heads - number), number) for head in range(target_heads)]


def as_supports(entry: Any) -> LayerSupport:
    """
    The supports of one target layer from their short forms: a list of source layers (full-head, for both kinds), a
    [`Support`] for both kinds, or one for each kind (also as dictionaries).

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(entry, Support):
        return dict.fromkeys(KINDS, entry)
    if isinstance(entry, Mapping):
        if set(entry) != set(KINDS):
            raise ValueError(f"no supports of keys and values can be read from {dict(entry)}")
        return {
            kind: given if isinstance(given := entry[kind], Support) else Support.from_dict(given) for kind in KINDS
        }
    if not isinstance(entry, Sequence) or isinstance(entry, str):
        raise ValueError(f"no support can be read from {entry!r}")
    return {kind: Support.from_dict({"layers": sorted(entry)}) for kind in KINDS}


def as_json(supports: LayerSupport) -> Any:
    """The inverse of [`as_supports`], in the shortest form."""
    if supports["keys"] == supports["values"] and supports["keys"].is_plain:
        return list(supports["keys"].layers)
    return {kind: support.to_dict() for kind, support in supports.items()}


def gather(
    support: Support,
    kind: str,
    source: ModelGeometry,
    target: LayerGeometry,
    read: Callable[[int, str, int], Tensor],
    anchor: Tensor | None,
) -> list[list[Tensor]]:
    """
    The pieces that make up a token's features, per group, in the order in which maps are solved.

    Args:
        support ([`Support`]): what is read.
        kind (`str`): what is mapped, `"keys"` or `"values"`.
        source ([`ModelGeometry`]): of the source.
        target ([`LayerGeometry`]): of the target layer.
        read (`Callable`):
            `read(lag, kind, layer)`: content of one source layer, `[..., kv_heads · head_dim]`, so many tokens back.
        anchor (`torch.Tensor` of shape `[..., hidden_size + 1]`, *optional*): the anchor's output, as features.
    """
    pieces: list[list[Tensor]] = [[] for _ in range(support.groups(target))]
    for lag, kind_read, layer in support.blocks(kind):
        content, geometry = read(lag, kind_read, layer), source.layers[layer]
        for group, (first, number) in zip(pieces, support.heads_read(geometry, target), strict=True):
            group.append(content.narrow(-1, first * geometry.head_dim, number * geometry.head_dim))
    if support.anchor and anchor is not None:
        for group in pieces:
            group.append(anchor)
    return pieces
