"""What a card shows of a configuration, which people may have edited by hand, is checked before anything is shown."""

from collections.abc import Iterator
from typing import Any

from .errors import MapperFileError


_OBJECT, _TEXT, _WHOLE, _NUMBER, _LIST = "an object", "a text", "a whole number", "a number", "a list"
_TYPES: dict[str, Any] = {_OBJECT: dict, _TEXT: str, _WHOLE: int, _NUMBER: (int, float), _LIST: list}

_FIGURES = tuple(f"scores.evaluation.{name}" for name in ("kl", "agreement"))

# By path; each may be missing or null. An object goes before what it holds, `*` stands for every name or index.
_FIELDS = {
    "digests": _OBJECT,
    "digests.*": _TEXT,
    "preset": _TEXT,
    "map_options": _OBJECT,
    "calibration": _OBJECT,
    "calibration.dataset": _TEXT,
    "calibration.tokens": _OBJECT,
    "calibration.tokens.*": _WHOLE,
    "calibration.sequences": _WHOLE,
    "calibration.sequence_length": _WHOLE,
    "calibration.token_stride": _WHOLE,
    "calibration.training": _OBJECT,
    "calibration.versions": _OBJECT,
    "scores": _OBJECT,
    "scores.r2": _OBJECT,
    "scores.r2.heldout": _OBJECT,
    "scores.r2.heldout.keys_mean": _NUMBER,
    "scores.r2.heldout.values_mean": _NUMBER,
    "scores.evaluation": _OBJECT,
    "scores.evaluation.verdict": _TEXT,
    "scores.evaluation.measures": _LIST,
    "scores.evaluation.measures.*": _OBJECT,
    **dict.fromkeys(_FIGURES, _OBJECT),
    **{f"{figure}.{end}": _NUMBER for figure in _FIGURES for end in ("value", "low", "high")},
}


def check_fields(values: dict[str, Any]) -> None:
    """
    Raises [`MapperFileError`] if a field that a card shows is of another type than `KVMapper.fit` or an evaluation
    writes; the sentence names it.

    Args:
        values (`dict`): the content of a mapper's `config.json`, or its attributes.
    """
    for path, words in _FIELDS.items():
        for place, value in _found(values, path.split("."), ""):
            fits = value is None or (isinstance(value, _TYPES[words]) and not isinstance(value, bool))
            if not fits:
                raise _wrong(place, value, words)


def _found(value: Any, steps: list[str], place: str) -> Iterator[tuple[str, Any]]:
    if not steps:
        yield place, value
        return
    items = enumerate(value) if isinstance(value, list) else (value or {}).items()
    for name, one in items:
        if steps[0] in ("*", name):
            yield from _found(one, steps[1:], f"{place}.{name}".removeprefix("."))


def _wrong(place: str, value: Any, words: str) -> MapperFileError:
    return MapperFileError(
        f"`{place}` in the mapper's configuration is {str(value)[:80]!r}; expected {words}, so that a card can show "
        "it. It was edited by hand or is damaged: correct or remove it, or fetch or fit the mapper again."
    )
