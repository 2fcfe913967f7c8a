"""What an evaluation is given, looked at before the work: numbers, tokenizer, rows of files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import KVTransferError


Row = TypeVar("Row")

MOST = 2**31 - 1
MOST_SAMPLES = 100_000
"""Draws of documents: all are held at once, and intervals no longer change long before."""


def check_whole(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Raises [`KVTransferError`] unless an argument is a whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise KVTransferError(
            f"`{name}` is {_shown(value)}; expected a whole number of at least {least} and at most {most}."
        )


def check_draws(seed: Any, samples: Any) -> None:
    """Raises [`KVTransferError`] unless both can be used for what is drawn."""
    check_whole("seed", seed, 0, 2**32 - 1)
    check_whole("samples", samples, 1, MOST_SAMPLES)


def check_tokenizer(tokenizer: Any) -> None:
    """Raises [`KVTransferError`] unless something can be a tokenizer."""
    if not callable(tokenizer) or not hasattr(tokenizer, "bos_token_id"):
        raise KVTransferError(
            f"`tokenizer` is of type {type(tokenizer).__name__}; expected the tokenizer of both models. Load it with "
            "`AutoTokenizer.from_pretrained`."
        )


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates, of which there are no tokens."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def text_problem(name: str, text: Any) -> str | None:
    """What keeps a field from being text."""
    if not isinstance(text, str):
        return f"`{name}` is of type {type(text).__name__}, not a string"
    return None if is_unicode(text) else f"`{name}` has lone surrogates"


def texts_problem(name: str, texts: Any) -> str | None:
    """What keeps a field from being a list of texts."""
    if not isinstance(texts, (list, tuple)):
        return f"`{name}` is of type {type(texts).__name__}, not a list"
    return next((problem for text in texts if (problem := text_problem(name, text))), None)


def read_rows(path: str | os.PathLike[str], make: Callable[[Any], Row]) -> list[Row]:
    """
    Reads a file of one JSON object a line.

    Args:
        path (`str` or `os.PathLike`): of the file.
        make (`Callable`): from such an object to a row; whatever it raises is said with the number of the line.

    Raises:
        `OSError`: if the file can't be read.
        `ValueError`: naming the line that is wrong, or if there is none.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError(f"it is of type {type(row).__name__}, not an object")
                rows.append(make(row))
            except KeyError as error:
                raise ValueError(f"line {number}: the field {error} is missing") from error
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from error
    if not rows:
        raise ValueError("it is empty")
    return rows


def _shown(value: Any) -> str:
    """A value in few letters; Python writes no whole number of thousands of digits."""
    if isinstance(value, int) and abs(value) > 10**40:
        return f"a number of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]} …"
