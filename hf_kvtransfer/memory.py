"""How much memory there is, and room on the disk where it isn't enough."""

import math
import os
import tempfile
from contextlib import suppress

import torch

from .errors import CalibrationError


def available_memory() -> int:
    """Bytes of main memory that can be used without swapping; a cautious guess where the system doesn't tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    disk: str | os.PathLike[str] | None = None,
) -> torch.Tensor:
    """
    A tensor of zeros, in memory or mapped from a file.

    The file is deleted at once where the system allows it, so that nothing is left of it whatever becomes of the
    process; its blocks are in memory while they are worked on, and the system writes them out when it needs the room.

    Args:
        shape (`tuple[int, ...]`): its shape.
        dtype (`torch.dtype`): its dtype.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): where it lives, if in memory.
        disk (`str` or `os.PathLike`, *optional*): a folder on the disk that holds it instead; made if missing.

    Raises:
        [`CalibrationError`]: if the disk has no room for it.
    """
    size = math.prod(shape)
    if disk is None or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    os.makedirs(disk, exist_ok=True)
    handle, path = tempfile.mkstemp(prefix=".sums-", dir=disk)
    try:
        if hasattr(os, "posix_fallocate"):
            # A disk that is full shows here, and not as a signal that ends the process in the middle of a sum.
            try:
                os.posix_fallocate(handle, 0, size * dtype.itemsize)
            except OSError as error:
                raise CalibrationError(
                    f"The disk of {disk} has no room for sums of {size * dtype.itemsize:,} bytes ({error.strerror}); "
                    "expected as much to be free. Pass a folder on another disk, or sum fewer features: a published "
                    "preset, or dtype=torch.float32."
                ) from error
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        with suppress(PermissionError):
            os.unlink(path)
