"""What calibration keeps of a pair of models: sums between every source and every target layer, on two splits.

From these any k, λ or support is solved without touching a model again, and parts that were summed by different
processes can be merged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CalibrationError
from ..features import KINDS, Support
from .layout import FeatureLayout
from .moments import Moments
from .weighted import WeightedMoments


if TYPE_CHECKING:
    import os

    from ..geometry import LayerGeometry, ModelGeometry
    from .capture import Content
    from .sample import AttentionSample


SPLITS = ("fit", "heldout")


def head_local_width(source: ModelGeometry, target: LayerGeometry) -> int:
    """How many features of one kind a KV head of a target layer has that reads its own heads of all source layers."""
    return Support(tuple(range(source.num_layers)), heads="local").width(source, target, 0)


def bytes_needed(
    source: ModelGeometry,
    target: ModelGeometry,
    layout: FeatureLayout,
    dtype: torch.dtype,
    attention_rows: bool = False,
) -> int:
    """
    Bytes of the large sums, from geometries alone.

    Args:
        source (`ModelGeometry`): Of the model whose cache is read.
        target (`ModelGeometry`): Of the model whose cache is predicted.
        layout ([`FeatureLayout`]): What is summed.
        dtype (`torch.dtype`): Precision of the sums.
        attention_rows (`bool`, *optional*, defaults to `False`): Whether there are sums of attention-weighted rows.
    """
    width, outputs = layout.source_width(source, target), layout.target_width(target)
    numbers = len(SPLITS) * len(layout.names) * width * (width + outputs)
    for layer in target.layers if attention_rows else ():
        own = head_local_width(source, layer)
        numbers += len(KINDS) * layer.kv_heads * own * (own + layer.head_dim)
    return numbers * dtype.itemsize


class CalibrationStatistics:
    """
    Moments of RoPE-free keys and of values between all layers of a source and all layers of a target.

    Args:
        source (`ModelGeometry`): Geometry of the model whose cache is read.
        target (`ModelGeometry`): Geometry of the model whose cache is predicted.
        tokenizer_fingerprint (`str`): Fingerprint of the tokenizer that both share.
        calibration (`dict`, *optional*):
            What the sums were made from: `dataset`, `sequences`, `sequence_length` and `token_stride` in tokens,
            `heldout_fraction`, `versions`, … All of it is saved; statistics merge only if `token_stride` agrees.
        manifest (`dict`, *optional*):
            What tells the two checkpoints from others, such as `source_weights` and `target_weights`, a few numbers of
            each. Saved too; statistics merge only if these samples agree.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float64`): Precision of the large sums.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where the sums live.
        layout ([`FeatureLayout`], *optional*): What is summed beyond the plain features; nothing by default.
        attention_rows (`bool`, *optional*, defaults to `False`): Whether there are sums of attention-weighted rows.
        disk (`str` or `os.PathLike`, *optional*): A folder on the disk that holds the large sums instead of memory.

    Attributes:
        splits (`dict[str, dict[str, Moments]]`):
            `splits["fit" | "heldout"]["keys" | "values"]`, or one system for both if the features are joint.
        weighted (`dict[tuple[int, str], WeightedMoments]`):
            By target layer and kind, the sums of attention-weighted rows of the `"fit"` split; empty unless asked for.
        sample ([`AttentionSample`], *optional*):
            A few held-out sequences with the target's queries, to score maps by what attention reads of them.
    """

    def __init__(
        self,
        source: ModelGeometry,
        target: ModelGeometry,
        tokenizer_fingerprint: str,
        calibration: dict[str, Any] | None = None,
        manifest: dict[str, Any] | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        layout: FeatureLayout | None = None,
        attention_rows: bool = False,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.calibration: dict[str, Any] = copy.deepcopy(calibration) if calibration else {}
        self.manifest: dict[str, Any] = copy.deepcopy(manifest) if manifest else {}
        self.layout = layout or FeatureLayout()
        widths = self.layout.source_width(source, target), self.layout.target_width(target)
        self.splits = {
            split: {name: Moments(*widths, dtype, device, disk) for name in self.layout.names} for split in SPLITS
        }
        self.weighted = {
            (index, kind): WeightedMoments(
                layer.kv_heads, head_local_width(source, layer), layer.head_dim, dtype, device, disk
            )
            for index, layer in enumerate(target.layers if attention_rows else ())
            for kind in KINDS
        }
        self.sample: AttentionSample | None = None

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens summed in each split."""
        return {split: moments[self.layout.names[0]].count for split, moments in self.splits.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the large sums."""
        return self.splits["fit"][self.layout.names[0]].dtype

    def to(self, device: torch.device | str) -> CalibrationStatistics:
        """Move the sums to a device, in place. Returns `self`."""
        for moments in self.splits.values():
            for name in self.layout.names:
                moments[name] = moments[name].to(device)
        for key, weighted in self.weighted.items():
            tensors = {name: tensor.to(device) for name, tensor in weighted.tensors().items()}
            self.weighted[key] = type(weighted).from_tensors(weighted.count, tensors)
        return self

    def take(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """Copy sums of the same shape, wherever they live. Returns `self`."""
        pairs: list[Any] = [
            (self.splits[split][name], other.splits[split][name]) for split in SPLITS for name in self.layout.names
        ]
        pairs += [(mine, other.weighted[key]) for key, mine in self.weighted.items()]
        for mine, theirs in pairs:
            for name, tensor in mine.tensors().items():
                tensor.copy_(theirs.tensors()[name])
            mine.count = theirs.count
        self.calibration, self.manifest, self.sample = other.calibration, other.manifest, other.sample
        return self

    def with_kind(self, kind: str, other: CalibrationStatistics) -> CalibrationStatistics:
        """
        Take over one kind from statistics of the same rows, in which the other kind was left out.

        Args:
            kind (`str`): `"keys"` or `"values"`.
            other (`CalibrationStatistics`): Of the same pair and text; its sums are shared, not copied.

        Returns:
            `CalibrationStatistics`: `self`.

        Raises:
            CalibrationError: If they aren't of the same rows, or hold both kinds in one.
        """
        if self.layout != other.layout or self.layout.joint or not self._has_same_rows(other, kind):
            raise CalibrationError(
                f"The {kind} of other statistics can't be taken over: expected two collections of the same text, one "
                "of each kind, without joint features. Collect both with the same arguments but `kinds`."
            )
        for split in SPLITS:
            self.splits[split][kind] = other.splits[split][kind]
        self.weighted |= {key: sums for key, sums in other.weighted.items() if key[1] == kind}
        self.calibration["kinds"] = list(KINDS)
        return self

    def moments(self, split: str, kind: str) -> Moments:
        """
        The moments of one split that hold a kind, `"keys"` or `"values"`.

        Raises:
            CalibrationError: If the split is unknown, or holds no tokens.
        """
        if split not in SPLITS:
            raise CalibrationError(f"There is no split {split!r}; the splits are {' and '.join(map(repr, SPLITS))}.")
        moments = self.splits[split][self.layout.name(kind)]
        if moments.count == 0:
            raise CalibrationError(
                f"The {split!r} split of these statistics holds no tokens. Calibrate on at least two sequences "
                "(text is packed into sequences of `sequence_length` tokens: less if there is little text), with a "
                '`heldout_fraction` above zero if held-out figures are wanted, which `k="auto"` needs.'
            )
        return moments

    def features(self, support: Support, kind: str, layer: int, anchor_depth: int | None = None) -> list[list[slice]]:
        """Where the features of one map lie among the moments' columns, per group: [`FeatureLayout.features`]."""
        return self.layout.features(support, kind, self.source, self.target, layer, anchor_depth)

    def outputs(self, kind: str) -> list[slice]:
        """Where each target layer's outputs of a kind lie among the moments' columns."""
        return self.layout.outputs(kind, self.target)

    def update(
        self,
        split: str,
        source_keys: torch.Tensor,
        source_values: torch.Tensor,
        target_keys: torch.Tensor,
        target_values: torch.Tensor,
    ) -> None:
        """
        Add tokens to a split of statistics with the plain layout, or with joint features.

        Args:
            split (`str`): `"fit"` or `"heldout"`.
            source_keys (`torch.Tensor` of shape `[tokens, Dx]`): RoPE-free keys of all source layers.
            source_values (`torch.Tensor` of shape `[tokens, Dx]`): Values of all source layers.
            target_keys (`torch.Tensor` of shape `[tokens, Dy]`): RoPE-free keys of all target layers.
            target_values (`torch.Tensor` of shape `[tokens, Dy]`): Values of all target layers.

        Raises:
            CalibrationError: If the split is unknown or a shape doesn't fit.
        """
        from .capture import Content

        self.update_content(split, Content(source_keys, source_values), Content(target_keys, target_values))

    def update_content(self, split: str, source: Content, target: Content, summed: Sequence[str] = KINDS) -> None:
        """
        Add tokens to a split.

        Args:
            split (`str`): `"fit"` or `"heldout"`.
            source (`Content`): Of all source layers, with as many previous tokens as the layout asks for.
            target (`Content`): Of all target layers, with the hidden states that the layout asks for.
            summed (`Sequence[str]`, *optional*): Which kinds; both by default, and always where they are joint.

        Raises:
            CalibrationError: If the split is unknown or a shape doesn't fit.
        """
        if split not in SPLITS:
            raise CalibrationError(f"There is no split {split!r}; the splits are {' and '.join(map(repr, SPLITS))}.")
        tokens = [(source.keys, source.values), *source.previous]
        for name in self.layout.names:
            if name in KINDS and name not in summed:
                continue
            kinds = [KINDS.index(kind) for kind in KINDS if self.layout.name(kind) == name]
            x = [pair[kind] for pair in tokens for kind in kinds] + [hidden.to(source.keys) for hidden in target.hidden]
            y = [(target.keys, target.values)[kind] for kind in kinds]
            self.splits[split][name].update(*(part[0] if len(part) == 1 else torch.cat(part, 1) for part in (x, y)))

    def merge(self, other: CalibrationStatistics) -> CalibrationStatistics:
        """
        Add the sums of another part of the same calibration, in place.

        Args:
            other (`CalibrationStatistics`): Statistics of the same pair over other text; left unchanged.

        Returns:
            `CalibrationStatistics`: `self`.

        Raises:
            CalibrationError: If the models, the tokenizer or the token stride differ.
        """
        if other is self or self._has_same_rows(other):
            raise CalibrationError(
                "Statistics of the same text can't be merged: every token would count twice. Collect the parts of a "
                "calibration from different text."
            )
        for side, mine, theirs in (("source", self.source, other.source), ("target", self.target, other.target)):
            differences = mine.differences(theirs)
            weights = f"{side}_weights"
            if not differences and self.manifest.get(weights) != other.manifest.get(weights):
                differences = ["their weights differ, or were loaded in another dtype"]
            if differences:
                raise CalibrationError(
                    f"Statistics of different {side} models can't be merged ({'; '.join(differences)}): merge only "
                    "statistics that were collected from the same pair of checkpoints."
                )
        if self.tokenizer_fingerprint != other.tokenizer_fingerprint:
            raise CalibrationError(
                f"Statistics of different tokenizers can't be merged ({self.tokenizer_fingerprint} and "
                f"{other.tokenizer_fingerprint}): tokenize all parts of a calibration alike."
            )
        strides = self.calibration.get("token_stride"), other.calibration.get("token_stride")
        if strides[0] != strides[1]:
            raise CalibrationError(
                f"Statistics with different token strides can't be merged ({strides[0]} and {strides[1]}): collect "
                "all parts of a calibration with the same `token_stride`."
            )
        if self.layout != other.layout or self.weighted.keys() != other.weighted.keys():
            raise CalibrationError(
                f"Statistics of different features can't be merged ({self.layout}, {len(self.weighted)} weighted maps; "
                f"{other.layout}, {len(other.weighted)}): collect all parts of a calibration with the same recipe."
            )
        for split in SPLITS:
            for name in self.layout.names:
                self.splits[split][name].merge(other.splits[split][name])
        for key, moments in self.weighted.items():
            moments.merge(other.weighted[key])
        self.sample = self.sample or other.sample
        self.calibration = _merged_description(self.calibration, other.calibration)
        return self

    def _has_same_rows(self, other: CalibrationStatistics, kind: str = KINDS[0]) -> bool:
        rows = self.calibration.get("rows_sha256")
        counted = any(other.splits[split][other.layout.name(kind)].count for split in SPLITS)
        return bool(rows) and counted and rows == other.calibration.get("rows_sha256")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """
        Write to a folder, atomically: whatever happens on the way, the folder holds the old statistics or the new.

        Args:
            folder (`str` or `os.PathLike`): Made if missing. Statistics already in it are replaced.
        """
        from .storage import save_statistics

        save_statistics(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], mmap: bool = True, verify: bool = True) -> CalibrationStatistics:
        """
        Read from a folder.

        Args:
            folder (`str` or `os.PathLike`): Where [`~CalibrationStatistics.save`] wrote.
            mmap (`bool`, *optional*, defaults to `True`):
                Map the file into memory instead of reading it; `False` when the statistics will be updated.
            verify (`bool`, *optional*, defaults to `True`):
                Compare the checksum and look for values that aren't finite, which reads the file once.

        Raises:
            MapperFileError: If a file is missing, truncated, damaged, or contradicts the geometry.
        """
        from .storage import load_statistics

        return load_statistics(folder, mmap=mmap, verify=verify)


def _merged_description(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(mine)
    # A merged collection has no single stream of rows that it could be resumed on.
    merged["rows_sha256"] = None
    for name, value in theirs.items():
        if name in ("sequences", "tokens") and name in merged:
            merged[name] += value
        elif name == "rows_sha256":
            continue
        elif name not in merged:
            merged[name] = copy.deepcopy(value)
        elif merged[name] != value:
            # Both are true of a part: keep each once, in order, whatever was merged before.
            both = {repr(item): item for item in (*_as_list(merged[name]), *_as_list(value))}
            merged[name] = [both[key] for key in sorted(both)]
    return merged


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
