"""From any source of text to packed rows of token ids."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CalibrationError


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu"
DEFAULT_CONFIG = "sample-10BT"
_LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_FILE_SUFFIXES = (*_LINE_SUFFIXES, ".txt")
_DOCUMENTS_AT_ONCE = 32
"""Documents tokenized in one call: enough to keep a fast tokenizer's threads busy, and all that is held in memory."""


def iter_texts(
    source: Any = DEFAULT_DATASET,
    *,
    text_field: str = "text",
    split: str = "train",
    config_name: str | None = None,
    streaming: bool = True,
    whole_file: bool = False,
) -> Iterator[str]:
    """
    Documents from any source of text, one at a time.

    Args:
        source (*optional*, defaults to `"HuggingFaceFW/fineweb-edu"`):
            One of: an iterable of strings or of rows; the path of a local `.txt` file (documents separated by blank
            lines) or `.jsonl` file (one row a line); a `datasets.Dataset`, `IterableDataset` or a dictionary of them;
            the name of a dataset on the Hub.
        text_field (`str`, *optional*, defaults to `"text"`): The field of a row that holds the text.
        split (`str`, *optional*, defaults to `"train"`): Split of a Hub dataset or of a dictionary of datasets.
        config_name (`str`, *optional*):
            Configuration of a Hub dataset; for the default dataset, `"sample-10BT"` if it isn't given.
        streaming (`bool`, *optional*, defaults to `True`): Read a Hub dataset as it goes instead of downloading it.
        whole_file (`bool`, *optional*, defaults to `False`): Take a text file as a single document.

    Returns:
        `Iterator[str]`

    Raises:
        CalibrationError:
            If a file or a field is missing, a text is no string, or the dataset can't be reached. What is only found
            while reading is raised while reading.
    """
    if isinstance(source, Mapping):
        if split not in source:
            raise CalibrationError(f"The dataset has no split {split!r}, it has {', '.join(map(str, source))}.")
        source = source[split]
    if isinstance(source, str) and ("\n" in source or len(source) > 1000):
        raise CalibrationError(
            "Got one long string, which is taken for the name of a file or a dataset: pass a text as a list of strings."
        )
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_file():
            if path.suffix.lower() in _LINE_SUFFIXES:
                return _texts_of(_json_rows(path), text_field, path.name)
            return _file_documents(path, whole_file)
        # A dataset on the Hub is called `name` or `owner/name`; anything else was meant to be a file.
        is_name = isinstance(source, str) and source.count("/") <= 1 and path.suffix.lower() not in _FILE_SUFFIXES
        if not is_name and not path.is_dir():
            raise CalibrationError(f"There is no file {path}: pass an existing .txt or .jsonl file.")
        name = str(source)
        if name == DEFAULT_DATASET and config_name is None:
            config_name = DEFAULT_CONFIG
        return _texts_of(_hub_rows(name, config_name, split, streaming), text_field, name)
    if not isinstance(source, Iterable):
        raise CalibrationError(
            f"Can't read text from {type(source).__name__}: pass strings, a .txt or .jsonl file, a datasets.Dataset "
            "or the name of a dataset on the Hub."
        )
    return _texts_of(source, text_field, describe_source(source))


def describe_source(source: Any) -> str:
    """A short name of a source of text for the manifest: a Hub or file name, or the kind of object; never a folder."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        try:
            is_file = path.exists() or not isinstance(source, str)
        except OSError:  # a text, and no name that a file can have; reading it says so
            is_file = False
        if is_file:
            return path.name
        return f"{source} ({DEFAULT_CONFIG})" if source == DEFAULT_DATASET else str(source)
    builder = getattr(getattr(source, "info", None), "dataset_name", None)
    if builder:
        return str(builder)
    return f"{len(source)} texts" if isinstance(source, (list, tuple)) else type(source).__name__


def _texts_of(items: Iterable[Any], text_field: str, where: str) -> Iterator[str]:
    for number, item in enumerate(items):
        text = item
        if isinstance(item, Mapping):
            if text_field not in item:
                raise CalibrationError(
                    f"Row {number} of {where} has no field {text_field!r}, it has {', '.join(map(str, item))}: name "
                    "the one with the text in `text_field`."
                )
            text = item[text_field]
        if not isinstance(text, str):
            raise CalibrationError(
                f"Text {number} of {where} is of type {type(text).__name__}, expected a string: choose the field with "
                "the text by `text_field`, or join the parts into one string."
            )
        yield text


def _file_documents(path: Path, whole_file: bool) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8") as file:
            if whole_file:
                yield file.read()
                return
            lines: list[str] = []
            for line in file:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines)
                    lines = []
            if lines:
                yield "".join(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} can't be read as UTF-8 text: {error}.") from error


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise CalibrationError(
                            f"Line {number} of {path.name} isn't JSON ({error}): expected one object a line."
                        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} can't be read as UTF-8 text: {error}.") from error


def _hub_rows(name: str, config_name: str | None, split: str, streaming: bool) -> Iterator[Any]:
    # Whatever goes wrong here is the network, the Hub or the name, and each library on the way has its own exception.
    # What the consumer of this generator raises doesn't pass through it.
    try:
        from datasets import load_dataset

        yield from load_dataset(name, config_name, split=split, streaming=streaming)
    except Exception as error:
        raise CalibrationError(
            f"The dataset {name!r} can't be read ({type(error).__name__}: {error}). Check the name, `config_name` and "
            "`split`; offline, pass a local .txt or .jsonl file, a list of strings or a datasets.Dataset instead."
        ) from error


def check_whole(name: str, value: Any, least: int) -> None:
    """Raises [`CalibrationError`] unless an argument is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CalibrationError(f"{name} is {value!r}, expected a whole number, at least {least}.")


def pack(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int = 1024,
    num_sequences: int | None = 500,
) -> Iterator[list[int]]:
    """
    Concatenate documents and cut them into full rows: every token is real, none is padding and none is lost between
    two rows.

    If the tokenizer starts a document with its BOS token, each document starts with it here, and so does every row, as
    in use: attention falls back on the first token. Otherwise the EOS token stands between two documents, if there is
    one. Empty documents are skipped. The last, incomplete row is dropped,
    unless it is the only one and holds at least two tokens.

    Args:
        texts (`Iterable[str]`): Documents, read only as far as needed.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer that both models share.
        sequence_length (`int`, *optional*, defaults to 1024): Tokens per row.
        num_sequences (`int`, *optional*, defaults to 500): Rows at most; `None` for as many as there are.

    Returns:
        `Iterator[list[int]]`: Rows of `sequence_length` token ids. Warns at the end if there were fewer of them than
        `num_sequences`.

    Raises:
        CalibrationError: If an argument is impossible, or there is too little text for a single row.
    """
    check_whole("sequence_length", sequence_length, 2)
    if num_sequences is not None:
        check_whole("num_sequences", num_sequences, 1)
    return _pack(texts, tokenizer, sequence_length, num_sequences)


def _pack(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, sequence_length: int, num_sequences: int | None
) -> Iterator[list[int]]:
    produced = 0
    bos = starting_token(tokenizer)
    buffer: list[int] = []
    for document in _tokenized(texts, tokenizer, bos):
        buffer.extend(document)
        start = 0
        while True:
            lead = [] if bos is None or buffer[start : start + 1] == [bos] else [bos]
            stop = start + sequence_length - len(lead)
            if stop > len(buffer):
                break
            yield lead + buffer[start:stop]
            start = stop
            produced += 1
            if produced == num_sequences:
                return
        del buffer[:start]
    if produced == 0:
        if len(buffer) < 2:
            raise CalibrationError(
                f"The text has {len(buffer)} tokens, too few to calibrate on: pass more text. Some hundred thousand "
                "tokens are usual."
            )
        yield buffer
        produced = 1
    if num_sequences is not None:
        warnings.warn(
            f"The text was enough for {produced} of {num_sequences} sequences of {sequence_length} tokens; "
            "calibration goes on with those. For a better fit pass more text, or a smaller `sequence_length`.",
            UserWarning,
            stacklevel=2,
        )


def starting_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS token, if the tokenizer starts a text with it."""
    starts = tokenizer.bos_token_id is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]
    return tokenizer.bos_token_id if starts else None


def _tokenized(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, bos: int | None) -> Iterator[list[int]]:
    """Token ids of each document, with what stands before it."""
    separator = tokenizer.eos_token_id if bos is None else bos
    iterator = iter(texts)
    first = True
    while batch := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
        for text in batch:
            if not isinstance(text, str):
                raise CalibrationError(
                    f"A text is of type {type(text).__name__}, expected a string: pass rows through `iter_texts`."
                )
        try:
            # Documents may be longer than the model's window, which the tokenizer would otherwise warn about.
            rows = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        except TypeError as error:  # lone surrogates, which are no text
            raise CalibrationError(
                f"A text is no valid Unicode ({error}): expected strings without lone surrogates. Clean the text, for "
                'example with `text.encode("utf-8", "replace").decode()`.'
            ) from error
        for ids in rows:
            if not ids:
                continue
            yield [separator, *ids] if separator is not None and (bos is not None or not first) else list(ids)
            first = False
