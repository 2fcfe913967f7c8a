"""Writing a mapper so that a failure leaves the old one, and loading it so that nothing is silently missing."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .errors import MapperFileError


def save_atomically(save: Callable[..., None], folder: str | os.PathLike[str], **kwargs: Any) -> None:
    """
    Calls `save(staging, **kwargs)` on a folder beside `folder` and moves the finished files in, weights first and the
    configuration last. Weights of an earlier save that the new one doesn't have (other shards) are removed at the end.

    Args:
        save (`Callable`): writes a complete checkpoint into the folder it is given.
        folder (`str` or `os.PathLike`): where the checkpoint belongs; made if missing. Other files in it are kept.

    Raises:
        [`MapperFileError`]: if `folder` exists and is not a folder.
    """
    final = Path(folder)
    if final.exists() and not final.is_dir():
        raise MapperFileError(f"{final} is a file; expected a folder to save the mapper in. Choose another path.")
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        save(staging, **kwargs)
        written = sorted((path for path in staging.iterdir()), key=lambda path: path.name == "config.json")
        final.mkdir(exist_ok=True)
        for path in written:
            os.replace(path, final / path.name)
        names = {path.name for path in written}
        for stale in final.glob("model*.safetensors*"):
            if stale.name not in names:
                stale.unlink()
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_checked(load: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
    """
    Calls a `from_pretrained` and refuses a checkpoint of which anything is missing or superfluous.

    Raises:
        [`MapperFileError`]: if files are missing or damaged, or weights don't belong to the configuration.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    try:
        mapper, info = load(path, *args, output_loading_info=True, **kwargs)
    except MapperFileError:
        raise
    except (OSError, SafetensorError, EOFError) as error:
        raise MapperFileError(
            f"No mapper could be loaded from {path}: {error} Expected a folder or Hub repository with a `config.json` "
            "and safetensors weights written by `KVMapper.save_pretrained`. If the files are damaged, fetch or fit "
            "the mapper again."
        ) from error
    except RuntimeError as error:
        if "size mismatch" not in str(error) and "mismatch" not in str(error):
            raise
        raise MapperFileError(
            f"The weights in {path} don't fit its configuration ({error}); expected files of one and the same mapper. "
            "Fetch or fit the mapper again."
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
    return (mapper, info) if wants_info else mapper
