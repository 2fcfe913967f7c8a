"""One calibration shared by several processes: who reads which sequences, and how their sums become one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ..errors import CalibrationError
from .statistics import CalibrationStatistics


_PREFIX = "process-"
# Numbers per message: what NCCL is handed of sums in main memory has to be copied to its device.
_PIECE = 1 << 24


@dataclass(frozen=True)
class Shard:
    """
    Which part of a calibration is this process's own.

    Args:
        rank (`int`, *optional*, defaults to 0): Its number.
        world (`int`, *optional*, defaults to 1): How many there are.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def current(cls) -> Shard:
        """This process's, of an initialised `torch.distributed`; all of it if there is none."""
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size())
        return cls()

    def owns(self, index: int, is_sampled: bool) -> bool:
        """Whether it reads a sequence. Those of the sample all go to the first, so that their order stays."""
        return self.rank == (0 if is_sampled else index % self.world)

    def description(self, base: int) -> dict[str, int]:
        """What tells an unfinished part, on top of so many sequences, from others."""
        return {"rank": self.rank, "processes": self.world, "after": base}

    def folder(self, folder: Path) -> Path:
        """Where this process keeps its part until all have finished."""
        return folder if self.world == 1 else folder / f"{_PREFIX}{self.rank}-of-{self.world}"

    def check_others(self, folder: Path, resume: bool) -> None:
        """
        Looks for parts that another number of processes has left; removes them if they aren't to be resumed.

        Raises:
            CalibrationError: If they are.
        """
        parts = sorted(folder.glob(f"{_PREFIX}*-of-*"))
        others = [part for part in parts if not part.name.endswith(f"-of-{self.world}")]
        if others and resume:
            raise CalibrationError(
                f"{folder} holds {others[0].name}, a part of an unfinished collection by another number of processes "
                f"than {self.world}; expected to go on with as many as before. Start as many, or pass resume=False to "
                "start over."
            )
        for part in others if self.rank == 0 else ():
            shutil.rmtree(part, ignore_errors=True)


def wait(shard: Shard) -> None:
    """Until all processes have come here."""
    if shard.world > 1:
        distributed.barrier()


def pool(statistics: CalibrationStatistics) -> None:
    """
    Adds up what all processes have summed, in place, with the formula of Chan, Golub and LeVeque for the means of all:
    each ends up with the same, that of one process to rounding. The sample is the first process's.
    """
    for systems in statistics.splits.values():
        for moments in systems.values():
            moments.pool(_sum)
    for key in sorted(statistics.weighted):
        statistics.weighted[key].pool(_sum)
    sample: list[Any] = [statistics.sample]
    distributed.broadcast_object_list(sample, src=0)
    statistics.sample = sample[0]


def _sum(tensor: torch.Tensor) -> None:
    """Over all processes, in place."""
    is_nccl = distributed.get_backend() == "nccl"
    for piece in tensor.view(-1).split(_PIECE):
        moved = piece.cuda() if is_nccl else piece
        distributed.all_reduce(moved)
        if moved is not piece:
            piece.copy_(moved)


@contextmanager
def launched() -> Iterator[Shard]:
    """
    While it lasts, this process takes part in what `torchrun` or `accelerate launch` has started, if it was started by
    them: `torch.distributed` is initialised, and its own accelerator is the current one.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world <= 1 or distributed.is_initialized():
        yield Shard.current()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Shard.current()
    finally:
        distributed.destroy_process_group()
