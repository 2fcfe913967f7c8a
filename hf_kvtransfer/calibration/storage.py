"""Statistics on disk: one safetensors file with the sums, one JSON file that describes it and commits it.

The JSON file names the data file it belongs to, and replacing it is the last step of a save. So a save that dies on
the way leaves the old pair of files in place, and a folder never holds a description of something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import MapperFileError
from ..geometry import ModelGeometry
from .moments import Moments
from .statistics import KINDS, SPLITS, CalibrationStatistics, total_width


STATISTICS_NAME = "statistics.json"
_DATA_PREFIX = "moments-"
_FORMAT = 1
_BLOCK_BYTES = 1 << 24


def save_statistics(statistics: CalibrationStatistics, folder: str | os.PathLike[str]) -> None:
    """See [`CalibrationStatistics.save`]."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{split}.{kind}.{name}": tensor.detach().contiguous()
        for split in SPLITS
        for kind in KINDS
        for name, tensor in statistics.splits[split][kind].tensors().items()
    }
    with _temporary(folder) as path:
        save_file(tensors, path)
        digest = _sha256(path)
        data_name = f"{_DATA_PREFIX}{digest[:16]}.safetensors"
        _commit(path, folder / data_name)
    body = {
        "format": _FORMAT,
        "data": {"file": data_name, "bytes": (folder / data_name).stat().st_size, "sha256": digest},
        "counts": {split: {kind: statistics.splits[split][kind].count for kind in KINDS} for split in SPLITS},
        "dtype": str(statistics.dtype).removeprefix("torch."),
        "source": statistics.source.to_dict(),
        "target": statistics.target.to_dict(),
        "tokenizer_fingerprint": statistics.tokenizer_fingerprint,
        "calibration": statistics.calibration,
        "manifest": statistics.manifest,
    }
    with _temporary(folder) as path:
        path.write_text(json.dumps({**body, "sha256": _body_digest(body)}, indent=2, sort_keys=True), encoding="utf-8")
        _commit(path, folder / STATISTICS_NAME)
    for stale in folder.glob(f"{_DATA_PREFIX}*.safetensors"):
        if stale.name != data_name:
            # Somebody may still have it mapped, which some systems don't let us delete; the next save tries again.
            with contextlib.suppress(OSError):
                stale.unlink()


def load_statistics(folder: str | os.PathLike[str], mmap: bool = True, verify: bool = True) -> CalibrationStatistics:
    """See [`CalibrationStatistics.load`]."""
    folder = Path(folder)
    body = _read_body(folder / STATISTICS_NAME)
    advice = "Collect the statistics again, or copy the folder again if it was copied."
    try:
        path = folder / body["data"]["file"]
        size, digest = body["data"]["bytes"], body["data"]["sha256"]
        source, target = ModelGeometry.from_dict(body["source"]), ModelGeometry.from_dict(body["target"])
        counts = {(split, kind): int(body["counts"][split][kind]) for split in SPLITS for kind in KINDS}
        dtype = {"float64": torch.float64, "float32": torch.float32}[body["dtype"]]
        statistics = CalibrationStatistics.__new__(CalibrationStatistics)
        statistics.source, statistics.target = source, target
        statistics.tokenizer_fingerprint = body["tokenizer_fingerprint"]
        statistics.calibration, statistics.manifest = body["calibration"], body["manifest"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MapperFileError(
            f"{folder / STATISTICS_NAME} doesn't describe calibration statistics ({error!r}). {advice}"
        ) from error
    if not path.is_file():
        raise MapperFileError(f"{path} is missing, though {STATISTICS_NAME} names it. {advice}")
    if path.stat().st_size != size:
        raise MapperFileError(f"{path} has {path.stat().st_size} bytes, expected {size}: it was cut short. {advice}")
    if verify and _sha256(path) != digest:
        raise MapperFileError(f"{path} doesn't match its checksum: it was damaged. {advice}")

    widths = total_width(source), total_width(target)
    shapes = {"mean_x": widths[:1], "mean_y": widths[1:], "sxx": (widths[0],) * 2, "sxy": widths, "syy": widths[1:]}
    statistics.splits = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for split in SPLITS:
                statistics.splits[split] = {}
                for kind in KINDS:
                    tensors = {name: file.get_tensor(f"{split}.{kind}.{name}") for name in shapes}
                    for name, tensor in tensors.items():
                        expected = dtype if name in ("sxx", "sxy") else torch.float64
                        if tuple(tensor.shape) != shapes[name] or tensor.dtype != expected:
                            raise MapperFileError(
                                f"{path}: {split}.{kind}.{name} is {tensor.dtype} {list(tensor.shape)}, expected "
                                f"{expected} {list(shapes[name])} from the geometry. {advice}"
                            )
                        if verify and not _is_finite(tensor):
                            raise MapperFileError(f"{path}: {split}.{kind}.{name} isn't finite. {advice}")
                    if not mmap:
                        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
                    statistics.splits[split][kind] = Moments.from_tensors(counts[split, kind], tensors)
    except SafetensorError as error:
        raise MapperFileError(f"{path} isn't a readable safetensors file ({error}). {advice}") from error
    return statistics


def _read_body(path: Path) -> dict[str, Any]:
    advice = "Collect the statistics again with `calibration.collect`, or pass the folder they were saved in."
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MapperFileError(f"There are no calibration statistics at {path}. {advice}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise MapperFileError(f"{path} can't be read ({error}). {advice}") from error
    if not isinstance(body, dict) or body.pop("sha256", None) != _body_digest(body):
        raise MapperFileError(f"{path} doesn't match its own checksum: it was edited or damaged. {advice}")
    if body.get("format") != _FORMAT:
        raise MapperFileError(
            f"{path} has format {body.get('format')!r}, this version of hf_kvtransfer reads {_FORMAT}: update it."
        )
    return body


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _is_finite(tensor: torch.Tensor) -> bool:
    # In pieces: the mask of a whole Gram matrix would be an eighth of its size again.
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(_BLOCK_BYTES))


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A path in the same folder, so that renaming is atomic; gone afterwards unless it was renamed."""
    path = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _commit(path: Path, destination: Path) -> None:
    # The bytes must be on the disk before the name is, or a power cut leaves the name with nothing behind it.
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(path, destination)
