"""What the commands share: options, errors as sentences, sizes in words."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .errors import KVTransferError


Source = Annotated[str, typer.Argument(help="The model that reads: a folder or a name on the Hub.")]
Target = Annotated[str, typer.Argument(help="The model that goes on: a folder or a name on the Hub.")]
SourceRevision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the source on the Hub.")]
TargetRevision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the target on the Hub.")]
Dtype = Annotated[str, typer.Option(help='Of both models\' weights: "auto", "bfloat16", "float32", …')]
Device = Annotated[str | None, typer.Option(help='"cuda", "cpu", … or a device map such as "auto".')]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with a checkpoint.")]


@contextmanager
def typed_errors() -> Iterator[None]:
    """What a user can mend is a sentence on standard error, not a traceback; progress bars are for terminals."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    except KVTransferError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("Interrupted.", code=130)


def fail(sentence: str, code: int = 1) -> NoReturn:
    print(f"hf-kvtransfer: {sentence}", file=sys.stderr)
    raise typer.Exit(code)


def parsed_k(value: str) -> Any:
    if value in ("auto", "all"):
        return value
    if not (value.isascii() and value.isdecimal()):
        raise typer.BadParameter(f'{value!r} is not a number of layers, "all" or "auto".')
    return int(value)


def tokenizer_or_none(name: str, revision: str | None, trust_remote_code: bool) -> Any:
    """A target checkpoint need not carry its tokenizer; where it does, `fit` compares the two."""
    from .loading import load_tokenizer

    try:
        return load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    except KVTransferError:
        if any(Path(name).glob("tokenizer*")):  # it has one, which is damaged
            raise
        return None


def in_words(number: int) -> str:
    for unit, name in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def in_bytes(number: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:.0f} B"
