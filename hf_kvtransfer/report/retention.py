"""From one value per question or chunk and condition to a measure of the report, with paired intervals."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

from ..errors import KVTransferError
from ..evaluation.intervals import bootstraps
from ..evaluation.measures import context_value_kept, gap_recovered, normalised_retention
from .schema import Measure, plain


TRANSFERRED, NATIVE, SOURCE = "transferred", "target native", "source alone"
RAW, RANDOM, ANCHOR = "source cache raw", "random mapper", "anchor alone"
DIFFERENT, NOTHING = "different document", "no context"

CONDITIONS = (NATIVE, TRANSFERRED, ANCHOR, SOURCE, RAW, RANDOM, DIFFERENT, NOTHING)
"""In the order in which they are shown; others come after them."""

Statistic = Callable[[dict[str, float]], float]
"""From the mean of each condition, by name, to a figure."""


def measure(
    task: str,
    metric: str,
    kind: Literal["look-up", "text", "task"],
    values: Mapping[str, Sequence[float]],
    *,
    unit: str = "share",
    higher_is_better: bool = True,
    chance: float | None = None,
    documents: Sequence[Hashable] | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> Measure:
    """
    One measure of a report: the mean of every condition, and what the transfer keeps above the source alone, above no
    context, above a different document, and above chance, each with its 95 % interval. Questions are resampled for all
    conditions together, and in a resample in which the target isn't better than what it is compared with, a share is
    undefined; where that is so in more than one in twenty, so is its interval.

    Args:
        task (`str`): what was asked, for example `"questions"`.
        metric (`str`): what was counted, for example `"accuracy"`.
        kind (`str`):
            `"look-up"` if the answers stand in the context and nowhere else, `"text"` for the likelihood of running
            text, `"task"` for anything else.
        values (`Mapping[str, Sequence[float]]`):
            Per condition one value for each question or chunk, in one order. `"transferred"` and `"target native"` must
            be among them.
        unit (`str`, *optional*, defaults to `"share"`): of the values: `"share"` for those between 0 and 1.
        higher_is_better (`bool`, *optional*, defaults to `True`): whether more is better.
        chance (`float`, *optional*): what guessing reaches; for accuracies.
        documents (`Sequence`, *optional*): which document each value belongs to. Each to its own by default.
        samples (`int`, *optional*, defaults to 2000): how often questions are drawn.
        seed (`int`, *optional*, defaults to 0): of the draw.

    Returns:
        `dict`: a [`Measure`].

    Raises:
        [`KVTransferError`]: if a condition that is needed is missing, or has another number of values than the others.
    """
    lacking = [name for name in (TRANSFERRED, NATIVE) if name not in values]
    if lacking:
        raise KVTransferError(
            f"The measure {metric!r} of {task!r} has the conditions {sorted(values)}; expected {lacking[0]!r} among "
            "them. Ask the same questions under all `conditions`."
        )
    wanted = {f"mean of {name}": _mean(name) for name in values}
    wanted |= {f"over {name}": _difference(name) for name in values if name != TRANSFERRED}
    shares = {
        "gap_recovered": (gap_recovered, SOURCE),
        "context_value_kept": (context_value_kept, NOTHING),
        "content_kept": (gap_recovered, DIFFERENT),
    }
    for name, (share, floor) in shares.items():
        if floor in values:
            wanted[name] = _share(share, _mean(floor), higher_is_better)
    if chance is not None:
        guessed = float(chance)
        wanted["normalised_retention"] = _share(normalised_retention, lambda mean: guessed, higher_is_better)
    found = bootstraps(values, wanted, documents=documents, samples=samples, seed=seed)
    result: Measure = plain(
        {
            "task": task,
            "metric": metric,
            "kind": kind,
            "unit": unit,
            "higher_is_better": higher_is_better,
            "chance": chance,
            "n": len(values[TRANSFERRED]),
            "conditions": {name: found[f"mean of {name}"] for name in values},
            "differences": {name: found[f"over {name}"] for name in values if name != TRANSFERRED},
            **{name: found.get(name) for name in (*shares, "normalised_retention")},
        }
    )
    return result


def _mean(name: str) -> Statistic:
    return lambda mean: mean[name]


def _difference(name: str) -> Statistic:
    return lambda mean: mean[TRANSFERRED] - mean[name]


def _share(share: Callable[[float, float, float], float], floor: Statistic, higher_is_better: bool) -> Statistic:
    """A share of what native is better by than the floor; of nothing, or of less than nothing, there is none."""

    def statistic(mean: dict[str, float]) -> float:
        native, least = mean[NATIVE], floor(mean)
        better = native > least if higher_is_better else native < least
        return share(mean[TRANSFERRED], least, native) if better else float("nan")

    return statistic
