"""Collecting keys and values one after the other, for pairs whose sums of both don't fit side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..features import KINDS
from .collect import collect
from .statistics import CalibrationStatistics


if TYPE_CHECKING:
    import os


def collect_apart(
    source: nn.Module,
    target: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Callable[[], Any],
    checkpoint_dir: str | os.PathLike[str] | None = None,
    **wishes: Any,
) -> CalibrationStatistics:
    """
    [`collect`] twice, once for each kind: half the sums in memory at a time, for twice the time.

    Args:
        source (`torch.nn.Module`): As in [`collect`].
        target (`torch.nn.Module`): Likewise.
        tokenizer (`PreTrainedTokenizerBase`): Likewise.
        texts (`Callable`): Gives the same text each time it is called.
        checkpoint_dir (`str` or `os.PathLike`, *optional*):
            Each kind is kept in a folder of its own in there, and mapped from its file once it is complete. Without it
            the first kind stays in memory.
        **wishes: As in [`collect`], with a layout without joint features.

    Returns:
        `CalibrationStatistics`: Of both kinds.

    Raises:
        CalibrationError: As [`collect`] does.
    """
    parts = []
    for kind in KINDS:
        folder = None if checkpoint_dir is None else Path(checkpoint_dir) / kind
        part = collect(source, target, tokenizer, texts(), checkpoint_dir=folder, kinds=(kind,), **wishes)
        parts.append(part if folder is None else CalibrationStatistics.load(folder, verify=False))
        del part  # before the next one grows
    return parts[0].with_kind(KINDS[1], parts[1])
