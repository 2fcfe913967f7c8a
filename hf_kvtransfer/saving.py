"""Writing a mapper so that an interruption leaves a whole one, and loading it so that nothing is silently wrong."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from .digests import CONFIG_FILE, check_config, check_files, digests_of, loaded_files
from .errors import KVTransferError, MapperFileError
from .evidence import bind_evidence, check_evidence
from .hub_errors import explain_download


# A folder inside the mapper's own that holds a complete newer mapper while its files are being moved out of it.
_COMMITTED = ".saved"

_HUB_KEYWORDS = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")


def save_atomically(save: Callable[..., None], folder: str | os.PathLike[str], **kwargs: Any) -> None:
    """
    Calls `save(staging, **kwargs)` on a folder beside `folder`, records the digests of what it wrote, and puts the
    files in place. Whenever it is interrupted, [`load_checked`] finds either the old mapper or the new one: the staged
    folder is first renamed into `folder`, which is one step, and is what is loaded as long as it is there.

    Args:
        save (`Callable`): writes a complete checkpoint into the folder it is given.
        folder (`str` or `os.PathLike`): where the checkpoint belongs; made if missing. Other files in it are kept, but
            weights of an earlier save are removed.

    Raises:
        [`MapperFileError`]: if `folder` exists and is not a folder.
    """
    final = Path(folder)
    if final.exists() and not final.is_dir():
        raise MapperFileError(f"{final} is a file; expected a folder to save the mapper in. Choose another path.")
    check_writable(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        save(staging, **kwargs)
        _record_digests(staging)
        staging.chmod(0o755)  # temporary folders are private to their maker
        final.mkdir(exist_ok=True)
        finish_interrupted(final)
        for litter in final.glob(f"{_COMMITTED}-*"):
            shutil.rmtree(litter, ignore_errors=True) if litter.is_dir() else litter.unlink()
        os.replace(staging, final / _COMMITTED)
        finish_interrupted(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_writable(folder: str | os.PathLike[str]) -> None:
    """
    Raises [`MapperFileError`] if nothing can be written to a folder, made or not; before work is done, not after.

    Args:
        folder (`str` or `os.PathLike`): where something will be saved.
    """
    try:
        with suppress(FileNotFoundError):
            os.stat(folder)  # a name that no file can have shows here
        place = Path(folder).absolute()
        while not place.exists():
            place = place.parent
        if place.is_dir():
            with tempfile.TemporaryFile(dir=place):
                return
        reason = f"{place} is a file"
    except (OSError, ValueError, TypeError) as error:
        reason = str(error)
    raise MapperFileError(
        f"Nothing can be saved in {folder!r} ({reason}); expected a folder that can be written to. Choose another."
    )


def _record_digests(folder: Path) -> None:
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text(encoding="utf-8"))
    config["digests"] = digests_of(folder, config)
    bind_evidence(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def finish_interrupted(final: Path) -> None:
    """
    Puts the files of a committed save in place, also of one that was interrupted here earlier.

    Args:
        final (`pathlib.Path`): the mapper's folder.
    """
    committed = final / _COMMITTED
    if not committed.is_dir():
        return
    written = sorted(path for path in committed.iterdir() if path.is_file())
    for path in written:
        beside = committed.with_name(f"{_COMMITTED}-{path.name}")
        beside.unlink(missing_ok=True)
        try:
            os.link(path, beside)
        except OSError:  # no hard links on this file system
            shutil.copyfile(path, beside)
        os.replace(beside, final / path.name)
    names = {path.name for path in written}
    for stale in final.glob("model*.safetensors*"):
        if stale.name not in names:
            stale.unlink()
    done = Path(tempfile.mkdtemp(prefix=f"{_COMMITTED}-", dir=final))
    os.replace(committed, done / "files")
    shutil.rmtree(done, ignore_errors=True)


def load_checked(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """
    Calls a `from_pretrained` and refuses a checkpoint of which anything is missing, superfluous, or not as it was
    saved.

    Args:
        load (`Callable`): the `from_pretrained` of the class above.
        path (`str` or `os.PathLike`): a folder, or a repository on the Hub.
        verify (`bool`, *optional*, defaults to `True`): whether to compare the files with the digests in the
            configuration. A configuration without digests is loaded without.
        min_gap_recovered (`float` or `False`, *optional*): what the mapper must have shown ([`check_evidence`]).
        **kwargs: as in `PreTrainedModel.from_pretrained`.

    Raises:
        [`MapperFileError`]: if files are missing or damaged, or weights don't belong to the configuration.
        [`EvidenceError`]: if the mapper hasn't shown what was asked.
    """
    wants_info, verify = kwargs.pop("output_loading_info", False), kwargs.pop("verify", True)
    minimum = kwargs.pop("min_gap_recovered", None)
    if (committed := _committed(path)) is not path and "config" in kwargs:
        kwargs["config"] = load.__self__.config_class.from_pretrained(committed)  # type: ignore[attr-defined]
    path = committed
    config = _read_config(load.__self__.config_class, path, kwargs)  # type: ignore[attr-defined]
    if config and verify:
        check_config(config, path, kwargs.get("config"))
    # Before the weights are fetched and read. Where there is no configuration, loading itself says so.
    if config or minimum is not None:
        check_evidence(config, path, minimum)
    try:
        mapper, info = load(path, *args, output_loading_info=True, **kwargs)
    except (KVTransferError, MemoryError):
        raise
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise MapperFileError(
            f"The weights in {path} don't fit its configuration ({error}); expected files of one and the same mapper. "
            "Fetch or fit the mapper again."
        ) from error
    except Exception as error:  # what a damaged file leads to depends on the release
        explain_download(path, error, kwargs.get("revision"))
        raise MapperFileError(
            f"No mapper could be loaded from {path}: {error} Expected a folder or Hub repository with a `config.json` "
            "and safetensors weights written by `KVMapper.save_pretrained`. If the files are damaged, fetch or fit "
            "the mapper again."
        ) from error
    wrong = {kind: sorted(map(str, info.get(kind) or ())) for kind in ("missing_keys", "unexpected_keys")}
    wrong["mismatched_keys"] = [str(key) for key in info.get("mismatched_keys") or ()]
    found = {kind: keys for kind, keys in wrong.items() if keys}
    if found:
        kind, keys = next(iter(found.items()))
        raise MapperFileError(
            f"The weights in {path} don't fit its configuration: {len(keys)} {kind.replace('_', ' ')} (first: "
            f"{keys[0]}); expected files of one and the same mapper. Fetch or fit the mapper again."
        )
    if config and verify:
        names = loaded_files(config, lambda name: _resolve(path, name, kwargs), kwargs.get("variant"))
        check_files(config, names, path)
    return (mapper, info) if wants_info else mapper


def _committed(path: Any) -> Any:
    """The folder to load from: a save that was interrupted while its files were put in place is complete inside."""
    if isinstance(path, str | os.PathLike) and (Path(path) / _COMMITTED).is_dir():
        return Path(path) / _COMMITTED
    return path


def _resolve(path: Any, name: str, kwargs: dict[str, Any]) -> Path | None:
    """Where a file of the checkpoint lies on this machine, or `None`."""
    keywords = {key: kwargs[key] for key in _HUB_KEYWORDS if kwargs.get(key) is not None}
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        found = Path(path) / keywords.get("subfolder", "") / name
        return found if found.is_file() else None
    if name != CONFIG_FILE:
        keywords["local_files_only"] = True  # they have just been loaded from there
    elif kwargs.get("force_download"):
        keywords["force_download"] = True
    try:
        found = cached_file(
            str(path),
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **keywords,
        )
    except (OSError, ValueError):  # loading itself says what is wrong
        return None
    return None if found is None else Path(found)


def _read_config(config_class: Any, path: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint's configuration as it is in the file, after checking that a mapper can be built from it."""
    file = None if path is None else _resolve(path, CONFIG_FILE, kwargs)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise MapperFileError(
            f"The `config.json` in {path} can't be read ({error}); expected the JSON object that "
            "`KVMapper.save_pretrained` writes. Fetch or fit the mapper again."
        ) from error
    config_class.check_values(config)
    return config
