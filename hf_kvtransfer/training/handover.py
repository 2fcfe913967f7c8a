"""Where the target takes over from the source, in the KL loss."""

from typing import NamedTuple

import torch

from ..errors import CalibrationError


class HandOver(NamedTuple):
    """
    Args:
        context (`int`): how many tokens are converted.
        continuation (`int`): how many tokens after them the target reads, and is scored on.
    """

    context: int
    continuation: int


def draw_handover(
    tokens: int, shortest_context: int, longest_continuation: int, generator: torch.Generator | None = None
) -> HandOver:
    """
    A random hand-over point, and a continuation of random length after it.

    Args:
        tokens (`int`): length of the rows.
        shortest_context (`int`): how many tokens are converted at least.
        longest_continuation (`int`): how many are scored at most.
        generator (`torch.Generator`, *optional*): torch's own by default.

    Raises:
        [`CalibrationError`]: if the rows are too short for any.
    """
    _check(tokens, shortest_context)
    context = int(torch.randint(shortest_context, tokens, (), generator=generator))
    longest = min(longest_continuation, tokens - context)
    return HandOver(context, int(torch.randint(1, longest + 1, (), generator=generator)))


def middle_handover(tokens: int, shortest_context: int, longest_continuation: int) -> HandOver:
    """The hand-over of evaluations: in the middle of a row, with the longest continuation that there is room for."""
    _check(tokens, shortest_context)
    context = max(tokens // 2, shortest_context)
    return HandOver(context, min(longest_continuation, tokens - context))


def _check(tokens: int, shortest_context: int) -> None:
    if tokens <= shortest_context:
        raise CalibrationError(
            f"The rows have {tokens} tokens, and at least {shortest_context} are to be converted before the target "
            "takes over; expected longer rows. Raise `sequence_length`, or lower `shortest_context`."
        )
