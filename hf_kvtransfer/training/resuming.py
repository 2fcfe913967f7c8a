"""Going on from a checkpoint of a training: whether it is of this mapper, and whether it is whole."""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..config import KVMapperConfig
from ..errors import CalibrationError, MapperFileError
from ..mapper import KVMapper
from ..pairing import _different_weights


# What decides which function the weights are of, beside the pair.
_FORM = (
    "map_type",
    "map_options",
    "support",
    "anchor_layers",
    "anchor_start",
    "exact_prefix",
    "exact_suffix",
    "entry",
    "first_token",
)


def load_weights(mapper: KVMapper, folder: str) -> None:
    """
    Loads the weights of a checkpoint into the mapper that is trained.

    Args:
        mapper ([`KVMapper`]): is changed in place.
        folder (`str`): of the checkpoint, which holds a mapper as `KVMapper.save_pretrained` writes it.

    Raises:
        [`CalibrationError`]: if it is of another pair, form or support.
        [`MapperFileError`]: if it is damaged.
    """
    loaded = type(mapper).from_pretrained(folder, dtype=mapper.dtype, min_gap_recovered=False)
    if differences := _differences(mapper.config, loaded.config):
        raise CalibrationError(
            f"The checkpoint in {folder} holds another mapper than the one that is trained ({'; '.join(differences)}); "
            "expected one of the same pair, form and support. Resume from a checkpoint of this run, or train without "
            "`resume_from_checkpoint`."
        )
    mapper.load_state_dict(loaded.state_dict())


def _differences(mine: KVMapperConfig, theirs: KVMapperConfig) -> list[str]:
    found = []
    for side in ("source", "target"):
        of_side = mine.geometry(side).differences(theirs.geometry(side)) or _different_weights(
            getattr(mine, f"{side}_weights"), getattr(theirs, f"{side}_weights")
        )
        found += [f"{side} model: {difference}" for difference in of_side]
    fingerprints = mine.tokenizer_fingerprint, theirs.tokenizer_fingerprint
    if None not in fingerprints and fingerprints[0] != fingerprints[1]:
        found.append("another tokenizer")
    forms = [json.loads(json.dumps({name: getattr(config, name) for name in _FORM})) for config in (mine, theirs)]
    return found + [
        f"`{name}` is {_short(forms[1][name])} there and {_short(forms[0][name])} here"
        for name in _FORM
        if forms[0][name] != forms[1][name]
    ]


def _short(value: Any) -> str:
    return repr(value)[:60]


@contextmanager
def readable(what: str, folder: str | None) -> Iterator[None]:
    """
    Turns whatever reading a file of a checkpoint fails with into a sentence.

    Args:
        what (`str`): is read.
        folder (`str`, *optional*): of the checkpoint.

    Raises:
        [`MapperFileError`]: if the file is truncated, damaged or of another run.
    """
    try:
        yield
    except torch.OutOfMemoryError:  # says nothing about the file
        raise
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise MapperFileError(
            f"In {folder} {what} of an interrupted training can't be used ({error}); expected the files that "
            "`KVMapperTrainer` wrote there. Resume from an earlier checkpoint, or train the mapper that lies there "
            "without `resume_from_checkpoint`."
        ) from error
