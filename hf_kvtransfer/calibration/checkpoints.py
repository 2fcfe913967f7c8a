"""What a collection of statistics has saved of itself, and whether another can go on from there."""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..errors import CalibrationError
from ..geometry import ModelGeometry
from .layout import FeatureLayout
from .processes import Shard, wait
from .statistics import CalibrationStatistics
from .storage import STATISTICS_NAME


# What must agree for a collection to go on where it stopped; the batch size and the number of sequences may change.
_SETTINGS = (
    "dataset",
    "sequence_length",
    "token_stride",
    "heldout_fraction",
    "attention_rows",
    "sample_tokens",
    "kinds",
    "anchored_by",
    "source_dtype",
    "target_dtype",
)


@dataclass
class Collection:
    """What a collection is about, before its sums exist: they are large, and a resumed one brings its own."""

    source: ModelGeometry
    target: ModelGeometry
    tokenizer_fingerprint: str
    calibration: dict[str, Any]
    manifest: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    layout: FeatureLayout
    attention_rows: bool
    disk: Path | None

    def begin(
        self, folder: Path | None, resume: bool, rows: Iterator[list[int]], num_sequences: int | None, shard: Shard
    ) -> tuple[CalibrationStatistics, Any]:
        """
        The sums to go on with, of this process: those it has saved if they are to be resumed, else new ones.

        Args:
            folder (`Path`, *optional*): Where the collection is kept.
            resume (`bool`): Whether to go on from what is there.
            rows (`Iterator[list[int]]`): All sequences; those that the sums hold already are passed over.
            num_sequences (`int`, *optional*): Sequences at most.
            shard ([`Shard`]): Which part is this process's own.

        Returns:
            `tuple`: The statistics, and the running hash of the rows passed over.

        Raises:
            CalibrationError: If what is in the folder is of another collection.
        """
        statistics, base = CalibrationStatistics(**vars(self)), 0
        if folder is not None:
            shard.check_others(folder, resume)
        if folder is not None and resume and (folder / STATISTICS_NAME).exists():
            whole = self._saved(folder)
            base = whole.calibration["sequences"]
            # What all have summed before is in the first one's part.
            statistics.take(whole) if shard.rank == 0 else statistics.calibration.update(whole.calibration)
        own = None if folder is None else shard.folder(folder) / STATISTICS_NAME
        if own is not None and shard.world > 1 and not resume:
            own.unlink(missing_ok=True)
        elif own is not None and shard.world > 1 and own.exists():
            part = self._saved(own.parent)
            # What was summed before the last complete save is in there already.
            if part.calibration.get("part") == shard.description(base):
                statistics.take(part)
        if shard.world > 1:
            statistics.calibration["part"] = shard.description(base)
        return statistics, _skip_rows(rows, statistics.calibration, num_sequences)

    def _saved(self, folder: Path) -> CalibrationStatistics:
        found = CalibrationStatistics.load(folder)
        differences = []
        for side, mine, theirs in (("source", self.source, found.source), ("target", self.target, found.target)):
            differences += [f"{side} model: {difference}" for difference in mine.differences(theirs)]
        if found.tokenizer_fingerprint != self.tokenizer_fingerprint:
            differences.append("the tokenizer")
        if found.dtype != self.dtype:
            differences.append(f"dtype is {self.dtype}, was {found.dtype}")
        if found.layout != self.layout:
            differences.append(f"features are {self.layout}, were {found.layout}")
        for name in _SETTINGS:
            given, stored = self.calibration[name], found.calibration.get(name)
            if given != stored:
                differences.append(f"{name} is {given!r}, was {stored!r}")
        # Parts of a manifest are whole configurations, too long for a sentence.
        names = {**self.manifest, **found.manifest}
        differences += [name for name in names if self.manifest.get(name) != found.manifest.get(name)]
        if differences:
            raise _other_collection(folder, "; ".join(differences))
        return found


def _other_collection(folder: Path, what: str) -> CalibrationError:
    return CalibrationError(
        f"The checkpoint in {folder} is of another collection ({what}). Pass another folder as `statistics_dir` "
        "(`checkpoint_dir` of `collect`), or resume=False to start over and replace it."
    )


def _skip_rows(rows: Iterator[list[int]], calibration: dict[str, Any], num_sequences: int | None) -> Any:
    """Pass over the rows that a checkpoint has seen, and check that they are the same. Returns their running hash."""
    done = calibration["sequences"]
    if num_sequences is not None and done > num_sequences:
        raise CalibrationError(
            f"The checkpoint already holds {done} sequences, more than num_sequences = {num_sequences}. Ask for at "
            f"least {done}, or pass resume=False to start over."
        )
    digest = hashlib.sha256()
    for row in islice(rows, done):
        digest.update(array("q", row).tobytes())
    if digest.hexdigest() != calibration.get("rows_sha256"):
        raise CalibrationError(
            f"The first {done} sequences aren't those that the checkpoint has seen: the text, its order or its "
            "tokenization changed, or the statistics were merged. Pass the same text, or resume=False to start over."
        )
    return digest


def finish(statistics: CalibrationStatistics, folder: Path, shard: Shard) -> None:
    """Saves what all processes have summed together, and removes their parts."""
    if shard.rank == 0:
        statistics.save(folder)
    wait(shard)
    if shard.world > 1:
        shutil.rmtree(shard.folder(folder), ignore_errors=True)
