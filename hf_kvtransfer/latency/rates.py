"""What this machine can do at most, measured: multiply matrices and copy memory."""

from dataclasses import dataclass
from typing import Any

import torch

from .timing import best_of


# Large enough to keep all units of a processor busy, small enough to take less than a second on a slow one.
_CPU_SIDE, _ACCELERATOR_SIDE = 1536, 8192
# A copy of less is all overhead, one of more no slower per byte: it is too large for any processor's caches.
_SMALLEST_COPY, _LARGEST_COPY = 2**16, 2**27


@dataclass(frozen=True)
class MachineRates:
    """
    What a device does at most, in one dtype and with the threads in use.

    Args:
        device (`str`): its name, `"cpu"` or that of the accelerator.
        dtype (`str`): such as `"bfloat16"`.
        threads (`int`): of the CPU.
        matmul_flops (`float`): floating-point operations per second in a large product of matrices.
        copy_bandwidth (`float`): bytes per second, read and written together, in a large copy.
    """

    device: str
    dtype: str
    threads: int
    matmul_flops: float
    copy_bandwidth: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> MachineRates:
    """
    Measures a device: the best of several runs each, a second or two in all.

    Args:
        device (`torch.device`): which one.
        dtype (`torch.dtype`): of the matrices.
    """
    side = _CPU_SIDE if device.type == "cpu" else _ACCELERATOR_SIDE
    return MachineRates(
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        matmul_flops=matmul_rate(side, side, side, device, dtype),
        copy_bandwidth=copy_bandwidth(_LARGEST_COPY, device),
    )


@torch.inference_mode()
def matmul_rate(rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> float:
    """
    Floating-point operations per second of `[rows, inputs] × [inputs, outputs]`.

    Args:
        rows (`int`): of the first matrix.
        inputs (`int`): its columns.
        outputs (`int`): columns of the second one.
        device (`torch.device`): where they are.
        dtype (`torch.dtype`): of both.
    """
    left: Any = torch.randn(rows, inputs, device=device).to(dtype)
    # As the weights of a model are stored.
    right: Any = torch.randn(outputs, inputs, device=device).to(dtype)
    return 2 * rows * inputs * outputs / best_of(lambda: torch.nn.functional.linear(left, right), device)


def copy_bandwidth(size: int, device: torch.device) -> float:
    """
    Bytes per second, read and written together, of copying so many bytes. Small copies stay in a processor's caches.

    Args:
        size (`int`): bytes that are copied, within limits between which it makes a difference.
        device (`torch.device`): from where to where.
    """
    size = min(max(size, _SMALLEST_COPY), _LARGEST_COPY)
    old = torch.ones(size, dtype=torch.uint8, device=device)
    new = torch.empty_like(old)
    times = 3 if size > 2**24 else 20
    return 2 * size / best_of(lambda: new.copy_(old), device, times=times)


def device_name(device: torch.device) -> str:
    """What a device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
