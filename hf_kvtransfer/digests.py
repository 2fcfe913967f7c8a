"""Digests of a mapper's files, recorded in its configuration, which tell that they are as they were saved."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .errors import MapperFileError


CONFIG_FILE = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

# What a conversion depends on. Names that a later release adds, or that people add by hand, may change freely.
_CONFIG_FIELDS = (
    "source_config",
    "target_config",
    "source_geometry",
    "target_geometry",
    "support",
    "map_type",
    "map_options",
    "anchor_layers",
    "anchor_start",
    "entry",
    "exact_prefix",
    "exact_suffix",
    "tokenizer_fingerprint",
    "source_weights",
    "target_weights",
)
_CONFIG_ENTRY = "config"

# Columns of 64-bit numbers that are summed down each chunk: as fast as reading, and one wrong bit always shows.
_COLUMNS = 1024
_CHUNK = _COLUMNS * 8 * 4096  # bytes; 32 MiB


def file_digest(path: Path) -> str:
    """
    A digest that any accidental change of a file changes, at the speed of reading it. It is no signature: it does not
    withstand a change made on purpose.

    Args:
        path (`pathlib.Path`): the file.

    Returns:
        `str`: 32 hexadecimal digits over the file's length and, chunk by chunk, the sums of its 64-bit columns.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    if size:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        for start in range(0, size, _CHUNK):
            chunk = content[start : start + _CHUNK]
            whole = len(chunk) - len(chunk) % (_COLUMNS * 8)
            if whole:
                rows = chunk[:whole].view("<u8").reshape(-1, _COLUMNS)
                digest.update(np.add.reduce(rows, axis=0, dtype=np.uint64).astype("<u8").tobytes())
            digest.update(chunk[whole:].tobytes())
    return digest.hexdigest()[:32]


def config_digest(config: dict[str, Any]) -> str:
    """
    A digest of the fields that a conversion depends on.

    Args:
        config (`dict`): the content of `config.json`.

    Returns:
        `str`: 32 hexadecimal digits.
    """
    content = {name: config[name] for name in _CONFIG_FIELDS if name in config}
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def digests_of(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """
    What `config.json` records as `digests`: one for its own fields, and one for each file of weights.

    Args:
        folder (`pathlib.Path`): a complete checkpoint.
        config (`dict`): the content of its `config.json`.
    """
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.safetensors.index.json"))
    return {_CONFIG_ENTRY: config_digest(config), **{file.name: file_digest(file) for file in files}}


def weights_digest(digests: dict[str, str]) -> str:
    """
    One digest of all files of weights.

    Args:
        digests (`dict[str, str]`): of each file, as [`digests_of`] gives them.

    Returns:
        `str`: 32 hexadecimal digits.
    """
    files = sorted((name, digest) for name, digest in digests.items() if name != _CONFIG_ENTRY)
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]


def check_config(config: dict[str, Any], path: Any, given: Any = None) -> None:
    """
    Raises [`MapperFileError`] if a configuration is not as it was saved. One without digests is taken as it is.

    Args:
        config (`dict`): the content of `config.json`.
        path (`str` or `os.PathLike`): where it was found.
        given ([`KVMapperConfig`], *optional*): the configuration that will be used, as `AutoModel` reads it first.
    """
    recorded = _recorded(config, path)
    if recorded and recorded.get(_CONFIG_ENTRY) != config_digest(config):
        raise MapperFileError(
            f"The `config.json` in {path} is not as it was saved: its content doesn't match its own digest. Fetch or "
            "fit the mapper again; if you changed it on purpose, remove `digests` from it or pass `verify=False`."
        )
    # Both configurations of models are left out, since reading one may fill in defaults.
    names = [name for name in _CONFIG_FIELDS[2:] if hasattr(given, name) and name in config]
    other = [name for name in names if json.loads(json.dumps(getattr(given, name))) != config[name]]
    if recorded and other:
        raise MapperFileError(
            f"`{other[0]}` of the configuration that was given is not the one saved in {path}; expected the "
            "configuration of these weights. Load without `config=`, or pass `verify=False`."
        )


def loaded_files(
    config: dict[str, Any], resolve: Callable[[str], Path | None], variant: str | None = None
) -> dict[str, Path]:
    """
    The files that weights were loaded from and those with a recorded digest, by name, where they exist.

    Args:
        config (`dict`): the content of `config.json`.
        resolve (`Callable`): finds a file of the checkpoint by name, or gives `None`.
        variant (`str`, *optional*): as in `from_pretrained`, where other files than the usual ones are loaded.
    """
    recorded = config.get("digests") or {}
    usual = () if variant or not recorded else (_WEIGHTS, _INDEX)
    names = [*usual, *(name for name in recorded if name != _CONFIG_ENTRY and name not in usual)]
    found = {name: resolve(name) for name in names}
    return {name: file for name, file in found.items() if file is not None}


def check_files(config: dict[str, Any], files: dict[str, Path], path: Any) -> None:
    """
    Raises [`MapperFileError`] if a file is not the one whose digest was recorded.

    Args:
        config (`dict`): the content of `config.json`.
        files (`dict[str, pathlib.Path]`): where each file lies.
        path (`str` or `os.PathLike`): the checkpoint.
    """
    recorded = _recorded(config, path)
    for name, file in files.items() if recorded else ():
        if recorded.get(name) != file_digest(file):
            raise MapperFileError(
                f"{name} in {path} is not the file that was saved with this configuration: it is damaged, or belongs "
                "to another mapper. Fetch it again (from the Hub with `force_download=True`) or fit the mapper again; "
                "if you changed it on purpose, remove `digests` from `config.json` or pass `verify=False`."
            )


def _recorded(config: dict[str, Any], path: Any) -> dict[str, str]:
    recorded = config.get("digests")
    if recorded is not None and not isinstance(recorded, dict):
        raise MapperFileError(
            f"`digests` in the `config.json` of {path} is a {type(recorded).__name__}; expected an object of file "
            "names and digests. Fetch or fit the mapper again, or pass `verify=False`."
        )
    return recorded or {}
