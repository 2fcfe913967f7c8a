"""What a report says, in words: the least that its figures show, never the best that they allow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..evaluation.measures import context_value_kept
from .retention import ANCHOR, DIFFERENT, NATIVE, NOTHING, RANDOM, SOURCE, TRANSFERRED
from .schema import LOOKUP, TASK, TEXT, Figure, Length, Measure
from .wording import SHARE, SHARES, listed, shown, titled, with_interval


NOT_MEASURED = "not measured"
HOPELESS = "hopeless"
TEXT_ONLY = "keeps text but not look-ups"
WORSE = "no better than the source"
UNKNOWN = "look-ups not shown"
SOME = "keeps some"
MOST = "keeps most"
NEAR = "near native"

LEVELS = (NOT_MEASURED, HOPELESS, TEXT_ONLY, WORSE, UNKNOWN, SOME, MOST, NEAR)
"""From the worst to the best."""

# Shares of what a context is worth. Less than the first of look-ups is lost; more than the second is most; from the
# third on it is near native.
LOST_BELOW, MOST_ABOVE, NEAR_FROM = 0.1, 0.5, 0.9

# What survives of a context, from the strictest comparison to the mildest.
_KEPT = ("content_kept", "context_value_kept", "normalised_retention")

_HEADLINES = {
    NOT_MEASURED: "Not measured: by no measure is the native target shown to be better than a control.",
    HOPELESS: "Hopeless: nothing is shown to survive that another document, or the source alone, wouldn't give.",
    TEXT_ONLY: "Keeps text but not look-ups: what stands in a context and nowhere else is lost.",
    WORSE: "No better than the source alone, by one measure or by all of them.",
    UNKNOWN: "Look-ups not shown: something of a context survives, but nothing says that its facts do.",
    SOME: "Keeps some: not everywhere is more than half of what a context is worth shown to survive.",
    MOST: "Keeps most: more than half of what a context is worth survives wherever that was measured.",
    NEAR: "Near native: nine tenths or more of what a context is worth survive wherever that was measured.",
}


@dataclass(frozen=True)
class Verdict:
    """
    Args:
        level (`str`): one of [`LEVELS`].
        sentences (`list[str]`): the figures it rests on, and what else has to be said.
    """

    level: str
    sentences: list[str] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The level as a sentence."""
        return _HEADLINES[self.level]

    def __str__(self) -> str:
        return " ".join([self.headline, *self.sentences])


def judge(measures: Sequence[Measure], lengths: Sequence[Length] = (), *, has_anchor: bool = False) -> Verdict:
    """
    The verdict over the measures of a report, by the rules in `docs/report.md`: the lower ends of intervals count, and
    of all measures the weakest.

    Args:
        measures (`Sequence[Measure]`): of the report.
        lengths (`Sequence[Length]`, *optional*): of the report.
        has_anchor (`bool`, *optional*, defaults to `False`):
            Whether the mapper runs layers of the target that could do without the source.

    Returns:
        [`Verdict`]
    """
    telling = [one for one in measures if _tells(one)]
    sentences = []
    for kind in (LOOKUP, TASK, TEXT):
        of_kind = [one for one in telling if one["kind"] == kind] or [one for one in measures if one["kind"] == kind]
        if of_kind:
            weakest = min(of_kind, key=lambda one: (_least(one), _gap(one) is None))
            sentences.append(_numbers(weakest))
    return Verdict(_level(telling), [*sentences, *_by_length(lengths), *_reservations(measures, telling, has_anchor)])


def _level(measures: Sequence[Measure]) -> str:
    if not measures:
        return NOT_MEASURED
    lookups = [one for one in measures if one["kind"] == LOOKUP]
    # An answer that became likelier is not yet a right one: where answers are counted, that decides.
    lookups = [one for one in lookups if one["unit"] == SHARE] or lookups
    others = [one for one in measures if one["kind"] != LOOKUP and _survives(one) and not _is_behind(one)]
    if not any(map(_survives, lookups)):
        if not others:
            return HOPELESS
        if lookups:
            return TEXT_ONLY
    gaps = [one for one in measures if _gap(one) is not None]
    if any(map(_is_behind, measures)) or (gaps and not any(map(_is_ahead, gaps))):
        return WORSE
    if not lookups:
        return UNKNOWN
    least = min(map(_least, measures))
    return NEAR if least >= NEAR_FROM else MOST if least > MOST_ABOVE else SOME


def _tells(measure: Measure) -> bool:
    """
    Whether there is anything to keep by this measure. Of look-ups there isn't where the native target itself answers
    as if it had been given another document, even if that is better than no context.
    """
    content = measure["content_kept"]
    if measure["kind"] == LOOKUP and content is not None and content["low"] is None:
        return False
    return any(_low(measure, share) is not None for share in _KEPT)


def _low(measure: Measure, share: str) -> float | None:
    """
    The lower end of a share's interval. Where every question is answered alike no resample differs from another, so it
    is held to what n questions can show at all: up to 3 / n may still go wrong (the "rule of three", 95 %).
    """
    figure = _share(measure, share)
    if figure is None or figure["low"] is None:
        return None
    return min(figure["low"], 1 - 3 / measure["n"])


def _survives(measure: Measure) -> bool:
    """Whether more is kept than another document gives; where that gives all, more than no context or guessing does."""
    for share in _KEPT:
        figure, low = _share(measure, share), _low(measure, share)
        if figure is not None and low is not None:
            return low > 0 and (measure["kind"] != LOOKUP or (figure["value"] or 0.0) >= LOST_BELOW)
    return False


def _least(measure: Measure) -> float:
    """
    The share that is shown to be kept at least, and not more than what is recovered of the gap. In running text another
    document is often worth nearly as much as the context: there is little to measure content by, and only beating it
    counts.
    """
    shares = [share for share in _KEPT if share != "content_kept" or measure["kind"] != TEXT]
    lows = [low for low in (_low(measure, share) for share in shares) if low is not None]
    gap = _gap(measure)
    return min([*lows, *([gap] if gap is not None else [])], default=0.0) if lows else 0.0


def _is_too_small(measure: Measure) -> bool:
    """Whether it is the number of questions that keeps a measure from being near native."""
    least = _least(measure)
    return least < NEAR_FROM and least == 1 - 3 / measure["n"]


def _gap(measure: Measure) -> float | None:
    """What is recovered of the gap, if the native target is shown to be better than the source."""
    gap = measure["gap_recovered"]
    return gap["value"] if gap is not None and gap["low"] is not None else None


def _is_behind(measure: Measure) -> bool:
    gap = _gap(measure)
    return gap is not None and gap <= 0


def _is_ahead(measure: Measure) -> bool:
    gap = measure["gap_recovered"]
    return gap is not None and gap["low"] is not None and gap["low"] > 0


def _numbers(measure: Measure) -> str:
    names = [name for name in (TRANSFERRED, NATIVE, SOURCE, DIFFERENT, NOTHING) if name in measure["conditions"]]
    asked = [f"{name} {shown(measure['conditions'][name]['value'], measure['unit'])}" for name in names]
    figures = {words: _share(measure, share) for share, words in SHARES.items()}
    kept = [f"{words} {with_interval(one)}" for words, one in figures.items() if one is not None]
    unit = "" if measure["unit"] == SHARE else f" in {measure['unit']}"
    parts = "; ".join(", ".join(part) for part in (asked, kept) if part)
    return f"{titled(measure)}{unit} with n = {measure['n']:,}: {parts}."


def _by_length(lengths: Sequence[Length]) -> list[str]:
    kept = []
    for row in sorted(lengths, key=lambda row: row["context"]):
        values = [row["conditions"].get(name) for name in (TRANSFERRED, NOTHING, NATIVE)]
        transferred, nothing, native = (float("nan") if value is None else value for value in values)
        if native < nothing:
            kept.append((row["context"], context_value_kept(transferred, nothing, native)))
    if len(kept) < 2:
        return []
    words = [f"{shown(value)} after {context:,} tokens" for context, value in (kept[0], kept[-1])]
    return [f"Context value kept in text: {' and '.join(words)}."]


def _reservations(measures: Sequence[Measure], telling: Sequence[Measure], has_anchor: bool) -> list[str]:
    """Everything that the level alone would hide."""

    def no_better_than(name: str) -> Callable[[Measure], bool]:
        return lambda one: (least := _better_by(one, name)) is not None and least <= 0

    controls = {name for one in measures for name in one["conditions"]}
    said = {
        "On {} the cache of a different document, converted, isn't shown to do worse.": lambda one: (
            (figure := _share(one, "content_kept")) is not None and figure["low"] is not None and figure["low"] <= 0
        ),
        "On {} the native target isn't shown to be better than the source alone: there is no gap to recover.": (
            lambda one: _gap(one) is None and SOURCE in one["conditions"]
        ),
        "On {} the transfer isn't shown to be better than the source alone.": (
            lambda one: _gap(one) is not None and not _is_ahead(one)
        ),
        "On {} the anchor alone isn't shown to do worse: nothing shows that the source's cache adds anything.": (
            no_better_than(ANCHOR)
        ),
        "On {} there are too few questions or chunks to show more than 1 − 3 / n: ask more.": _is_too_small,
        "On {} a random mapper isn't shown to do worse: nothing shows that the maps matter.": no_better_than(RANDOM),
    }
    found = [(sentence, [titled(one) for one in telling if holds(one)]) for sentence, holds in said.items()]
    result = [
        sentence.format("everything measured" if 1 < len(names) == len(telling) else listed(names))
        for sentence, names in found
        if names
    ]
    if has_anchor and ANCHOR not in controls:
        result.append("The anchor alone was not measured: nobody knows what the source's cache adds to it.")
    if not any(one["kind"] == LOOKUP for one in telling):
        result.append("No look-ups were measured for which the context is worth anything to the native target.")
    missing = [name for name in (SOURCE, DIFFERENT, NOTHING) if measures and name not in controls]
    if missing:
        result.append(f"Not measured for comparison: {listed(missing)}.")
    return result


def _better_by(measure: Measure, name: str) -> float | None:
    """By how much the transfer is shown to be better than a condition, in the measure's unit."""
    figure = (measure["differences"] or {}).get(name)
    if figure is None or figure["low"] is None or figure["high"] is None:
        return None
    return figure["low"] if measure["higher_is_better"] else -figure["high"]


def _share(measure: Measure, name: str) -> Figure | None:
    return cast(dict[str, Any], measure)[name]
