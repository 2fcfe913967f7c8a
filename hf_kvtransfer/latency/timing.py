"""Timing several ways of doing something on a machine that others use too."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


_clocks: list[Callable[[], float]] = [time.perf_counter]


@contextmanager
def processor_time() -> Iterator[None]:
    """
    Within this, times are those of this process's processor, and not of the clock on the wall: with one thread the same
    on a machine that does nothing else, and steady on one that does. Of no use for accelerators.
    """
    _clocks.append(time.process_time)
    try:
        yield
    finally:
        _clocks.pop()


def synchronise(device: torch.device) -> None:
    """Waits until a device has done what it was given; on a CPU it always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def now(device: torch.device) -> float:
    """The time in seconds, once a device has done what it was given."""
    synchronise(device)
    return _clocks[-1]()


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """How long a call takes, until the device is done with it."""
    start = now(device)
    call()
    return now(device) - start


def best_of(call: Callable[[], Any], device: torch.device, *, times: int = 3) -> float:
    """
    The shortest of several times of a call, after one that doesn't count: what the hardware can do.

    Args:
        call (`Callable`): what is timed.
        device (`torch.device`): what it runs on.
        times (`int`, *optional*, defaults to 3): how often.
    """
    call()
    return min(seconds_of(call, device) for _ in range(times))


def interleaved(ways: Mapping[str, Callable[[], Mapping[str, float]]], trials: int) -> dict[str, list[float]]:
    """
    Runs all ways in turn, several times, and begins each turn with another one, so that whatever slows the machine
    down for a while slows all of them.

    Args:
        ways (`Mapping[str, Callable]`): each returns the times, in seconds, that it has measured.
        trials (`int`): how often; a first time that isn't counted comes on top.

    Returns:
        `dict[str, list[float]]`: the times in seconds, one per trial, by the name that the way gave them.
    """
    names = list(ways)
    times: dict[str, list[float]] = {}
    for trial in range(-1, trials):
        first = trial % len(names)
        for name in names[first:] + names[:first]:
            for what, seconds in ways[name]().items():
                if trial >= 0:
                    times.setdefault(what, []).append(seconds)
    return times
