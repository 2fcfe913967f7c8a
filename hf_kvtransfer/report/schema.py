"""What a report holds, as types, and the check that something is of such a type."""

import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ..errors import MapperFileError


SCHEMA_VERSION = 1

LOOKUP, TEXT, TASK = "look-up", "text", "task"


class Figure(TypedDict):
    """
    A figure and the interval it lies in. Any of the three is `None` where it is undefined.

    Keys:
        value (`float`): the figure of everything that was measured.
        low (`float`): lower end of its 95 % interval.
        high (`float`): upper end.
    """

    value: float | None
    low: float | None
    high: float | None


class Pair(TypedDict):
    """
    Keys:
        source (`str`): name or folder of the checkpoint that reads.
        target (`str`): of the one that goes on.
        source_revision (`str`, *optional*): commit on the Hub, where it came from there.
        target_revision (`str`, *optional*): the same for the target.
    """

    source: str
    target: str
    source_revision: str | None
    target_revision: str | None


class Mapper(TypedDict):
    """
    Keys:
        preset (`str`, *optional*): the recipe that was followed.
        map_type (`str`): functional form of the maps.
        k (`int`, *optional*): source layers that each target layer reads; the most, where they differ.
        anchor_layers (`int`, *optional*): layers of its own that the target runs over the context.
        anchor_start (`int`): the first of them.
        exact_prefix (`int`): first tokens that the target reads itself.
        exact_suffix (`int`): last tokens that it reads itself.
        parameters (`int`): numbers in the maps.
        cost_share (`float`, *optional*):
            floating-point operations of a conversion as a share of the target's prefill.
        cost_tokens (`int`, *optional*): of a context of how many tokens.
        calibration (`dict`): the configuration's `calibration`: data, token counts and versions of the fit.
    """

    preset: str | None
    map_type: str
    k: int | None
    anchor_layers: int | None
    anchor_start: int
    exact_prefix: int
    exact_suffix: int
    parameters: int
    cost_share: float | None
    cost_tokens: int | None
    calibration: dict[str, Any]


class HeadR2(TypedDict):
    """
    Keys:
        keys (`list[list[float]]`): R² of content keys, per target layer and KV head.
        values (`list[list[float]]`): R² of values, likewise.
    """

    keys: list[list[float | None]]
    values: list[list[float | None]]


class LayerR2(TypedDict):
    """
    Keys:
        keys (`list[list[float]]`): held-out R² of the keys of each target layer from each source layer alone.
        values (`list[list[float]]`): the same for values.
    """

    keys: list[list[float | None]]
    values: list[list[float | None]]


class FidelitySection(TypedDict):
    """
    Keys:
        r2 (`HeadR2`): on the text of the evaluation.
        cosine (`list[list[float]]`): of attention outputs, converted to native, per target layer and query head.
        kl (`Figure`): mean `KL(native ‖ transferred)` of next-token distributions, in nats per token.
        agreement (`Figure`): share of tokens for which the most likely next token is the same.
        chunks (`int`): how many chunks of text these are means of.
    """

    r2: HeadR2
    cosine: list[list[float | None]]
    kl: Figure
    agreement: Figure
    chunks: int


class Measure(TypedDict):
    """
    One measure under all conditions. [`measure`] makes one.

    Keys:
        task (`str`): what was asked, for example `"questions"` or `"wikitext-2"`.
        metric (`str`): what was counted, for example `"accuracy"` or `"nll"`.
        kind (`str`):
            `"look-up"`: answers stand in the context and nowhere else; `"text"`: likelihood of running text;
            `"task"`: anything else.
        unit (`str`): `"share"` for one between 0 and 1, else in words: `"nats per token"`.
        higher_is_better (`bool`): whether more is better.
        chance (`float`, *optional*): what guessing reaches.
        n (`int`): questions or chunks.
        conditions (`dict[str, Figure]`): by the condition's name.
        differences (`dict[str, Figure]`, *optional*):
            transferred − condition, by the condition's name, in the measure's unit; paired.
        gap_recovered (`Figure`, *optional*): (transferred − source alone) / (native − source alone).
        context_value_kept (`Figure`, *optional*): (no context − transferred) / (no context − native).
        content_kept (`Figure`, *optional*):
            (transferred − different document) / (native − different document): what is kept beyond that which the
            converted cache of any document gives.
        normalised_retention (`Figure`, *optional*): (transferred − chance) / (native − chance).
    """

    task: str
    metric: str
    kind: Literal["look-up", "text", "task"]
    unit: str
    higher_is_better: bool
    chance: float | None
    n: int
    conditions: dict[str, Figure]
    differences: dict[str, Figure] | None
    gap_recovered: Figure | None
    context_value_kept: Figure | None
    content_kept: Figure | None
    normalised_retention: Figure | None


class Drift(TypedDict):
    """
    Keys:
        tokens_per_bin (`int`): tokens that are averaged in one bin, counted from the hand-over.
        nll (`dict[str, list[float]]`): per condition, mean of each bin in nats per token.
        kl (`list[float]`): of the transfer to native, per bin, in nats per token.
        agreement (`list[float]`): share of tokens with the same most likely next token, per bin.
    """

    tokens_per_bin: int
    nll: dict[str, list[float | None]]
    kl: list[float | None]
    agreement: list[float | None]


class Length(TypedDict):
    """
    Keys:
        context (`int`): tokens of context.
        conditions (`dict[str, float]`): NLL after it in nats per token, by the condition's name.
        kl (`float`): of the transfer to native, in nats per token.
        agreement (`float`): share of tokens with the same most likely next token.
    """

    context: int
    conditions: dict[str, float | None]
    kl: float | None
    agreement: float | None


def plain(value: Any) -> Any:
    """
    A value as JSON holds it: tuples become lists, NumPy's and torch's numbers Python's, intervals figures, and what is
    not finite `None`.

    Args:
        value: dictionaries, lists, numbers, texts, `None`, and what is named above.
    """
    if hasattr(value, "point") and hasattr(value, "low") and hasattr(value, "high"):
        value = {"value": value.point, "low": value.low, "high": value.high}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def checked(value: Any, expected: Any, where: str) -> Any:
    """
    A value of the type that a section of the report has. Keys that may be `None` may be missing.

    Args:
        value: JSON values, as [`plain`] gives them.
        expected: `bool`, `int`, `float`, `str`, a `TypedDict`, or a list, dictionary, literal or union of them.
        where (`str`): the field's path, for the error.

    Returns:
        The value, completed by the keys that were missing.

    Raises:
        [`MapperFileError`]: names the first field that is of another type.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return _json(value, where)
    if typing.is_typeddict(expected):
        return _section(value, expected, where)
    if origin is types.UnionType:
        return None if value is None else checked(value, arguments[0], where)
    if origin is Literal:
        if value not in arguments:
            raise wrong(where, value, "one of " + ", ".join(f'"{name}"' for name in arguments))
        return value
    if origin is list:
        if not isinstance(value, list):
            raise wrong(where, value, "a list")
        return [checked(one, arguments[0], f"{where}[{index}]") for index, one in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise wrong(where, value, "an object with names")
        return {key: checked(one, arguments[1], f"{where}.{key}") for key, one in value.items()}
    fits = isinstance(value, int | float if expected is float else expected)
    if not fits or (isinstance(value, bool) and expected is not bool):
        raise wrong(where, value, _WORDS[expected])
    return _representable(value, where)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


_SECONDS = ("source_prefill", "target_prefill", "conversion", "target_first_token", "converted_first_token")
_LATENCY: dict[str, Any] = {
    "context": int,
    "device": str | None,
    "dtype": str | None,
    "spread": dict[str, list[float | None] | None] | None,
    **dict.fromkeys(_SECONDS, float | None),
    "warm_speedup": float | None,
    "cold_speedup": float | None,
    "conversion_floor": float | None,
    "target_prefill_floor": float | None,
    "conversion_peak": float | None,
    "target_prefill_peak": float | None,
}


def checked_latency(rows: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """
    The rows of `measure_latency`, of which those fields are checked that tables and figures show.

    Args:
        rows (`list[dict]`, *optional*): JSON values.

    Raises:
        [`MapperFileError`]: names the first field that is of another type.
    """
    for index, row in enumerate(rows or ()):
        for name, kind in _LATENCY.items():
            checked(row.get(name), kind, f"latency[{index}].{name}")
        for name, ends in (row.get("spread") or {}).items():
            if ends is not None and (len(ends) != 2 or None in ends):
                raise wrong(f"latency[{index}].spread.{name}", ends, "the lowest and the highest time")
    return rows


def _section(value: Any, expected: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, value, f"an object with {', '.join(expected.__annotations__)}")
    fields = typing.get_type_hints(expected)
    for name in value:
        if name not in fields:
            raise wrong(f"{where}.{name}", value[name], f"no such field, but {', '.join(fields)}")
    for name, kind in fields.items():
        if name not in value and type(None) not in typing.get_args(kind):
            raise wrong(f"{where}.{name}", "missing", "it to be there")
    found = {name: checked(value.get(name), kind, f"{where}.{name}") for name, kind in fields.items()}
    if expected is Figure and None not in (found["low"], found["high"]) and found["low"] > found["high"]:
        raise wrong(f"{where}.low", found["low"], f"no more than the upper end, {found['high']}")
    return found


def _json(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return checked(value, dict[str, Any], where)
    if isinstance(value, list):
        return checked(value, list[Any], where)
    if value is None or isinstance(value, bool | int | float | str):
        return _representable(value, where)
    raise wrong(where, value, "something that JSON can hold")


def _representable(value: Any, where: str) -> Any:
    """Python's whole numbers have no end, unlike what is computed and drawn with them."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise wrong(where, value, "a number that a float can hold")
    return value


def wrong(where: str, given: Any, expected: str) -> MapperFileError:
    """The error for a field that isn't laid out as documented: its path, what it is, and what was expected."""
    if isinstance(given, int) and abs(given) > sys.float_info.max:
        given = f"a number of {given.bit_length()} bits"  # Python writes out only so many digits
    return MapperFileError(
        f"`{where}` of this report is {str(given)[:80]!r}; expected {expected}. If it was read from a file, that is "
        "damaged or of another release: evaluate the mapper again."
    )
