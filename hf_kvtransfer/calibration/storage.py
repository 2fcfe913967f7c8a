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
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from ..errors import CalibrationError, MapperFileError
from ..features import KINDS
from ..geometry import ModelGeometry
from .layout import FeatureLayout
from .moments import Moments
from .sample import AttentionSample
from .statistics import SPLITS, CalibrationStatistics
from .weighted import WeightedMoments


STATISTICS_NAME = "statistics.json"
_DATA_PREFIX = "moments-"
_LOCK_NAME = ".lock"
_FORMAT = 3
_BLOCK_BYTES = 1 << 24
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}


def save_statistics(statistics: CalibrationStatistics, folder: str | os.PathLike[str]) -> None:
    """See [`CalibrationStatistics.save`]."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{split}.{system}.{name}": tensor
        for split in SPLITS
        for system, moments in statistics.splits[split].items()
        for name, tensor in moments.tensors().items()
    }
    for (layer, kind), weighted in statistics.weighted.items():
        tensors |= {f"weighted.{layer}.{kind}.{name}": tensor for name, tensor in weighted.tensors().items()}
    sample = statistics.sample
    if sample is not None:
        tensors |= {f"sample.{name}": tensor for name, tensor in sample.tensors().items()}
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _temporary(folder) as path:
        digest = _write(tensors, path)
        data_name = f"{_DATA_PREFIX}{digest[:16]}.safetensors"
        _commit(path, folder / data_name)
    body = {
        "format": _FORMAT,
        "data": {"file": data_name, "bytes": (folder / data_name).stat().st_size, "sha256": digest},
        "counts": {
            split: {system: moments.count for system, moments in statistics.splits[split].items()} for split in SPLITS
        },
        "layout": statistics.layout.to_dict(),
        "weighted": sorted({layer for layer, _ in statistics.weighted}),
        "sample": sample.description() if sample is not None else None,
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
        layout = FeatureLayout.from_dict(body["layout"])
        counts = {(split, system): int(body["counts"][split][system]) for split in SPLITS for system in layout.names}
        dtype = {"float64": torch.float64, "float32": torch.float32}[body["dtype"]]
        statistics = CalibrationStatistics.__new__(CalibrationStatistics)
        statistics.source, statistics.target, statistics.layout = source, target, layout
        statistics.tokenizer_fingerprint = body["tokenizer_fingerprint"]
        statistics.calibration, statistics.manifest = body["calibration"], body["manifest"]
        weighted = [(int(layer), kind) for layer in body["weighted"] for kind in KINDS]
        sample = body["sample"]
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

    widths = layout.source_width(source, target), layout.target_width(target)
    shapes = {"mean_x": widths[:1], "mean_y": widths[1:], "sxx": (widths[0],) * 2, "sxy": widths, "syy": widths[1:]}
    statistics.splits = {}
    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())

            def read(prefix: str) -> dict[str, torch.Tensor]:
                found = {name.removeprefix(prefix): file.get_tensor(name) for name in names if name.startswith(prefix)}
                for name, tensor in found.items():
                    if verify and not _is_finite(tensor):
                        raise MapperFileError(f"{path}: {prefix}{name} isn't finite. {advice}")
                return found if mmap else {name: tensor.clone() for name, tensor in found.items()}

            for split in SPLITS:
                statistics.splits[split] = {}
                for system in layout.names:
                    tensors = read(f"{split}.{system}.")
                    for name, shape in shapes.items():
                        tensor = tensors.get(name)
                        expected = dtype if name in ("sxx", "sxy") else torch.float64
                        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != expected:
                            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                            raise MapperFileError(
                                f"{path}: {split}.{system}.{name} is {found}, expected {expected} {list(shape)} from "
                                f"the geometry. {advice}"
                            )
                    statistics.splits[split][system] = Moments.from_tensors(counts[split, system], tensors)
            statistics.weighted = {
                (layer, kind): WeightedMoments.from_tensors(
                    counts["fit", layout.name(kind)], read(f"weighted.{layer}.{kind}.")
                )
                for layer, kind in weighted
            }
            statistics.sample = AttentionSample.from_tensors(sample, read("sample.")) if sample is not None else None
    except (KeyError, TypeError) as error:
        raise MapperFileError(f"{path} lacks a part that {STATISTICS_NAME} names ({error}). {advice}") from error
    except SafetensorError as error:
        raise MapperFileError(f"{path} isn't a readable safetensors file ({error}). {advice}") from error
    return statistics


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """
    Keeps others from writing statistics to a folder while it lasts. The system lets go of it with the process, however
    that ends, so that nothing stale is left.

    Raises:
        CalibrationError: Somebody else is at it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise CalibrationError(
            f"Another process is collecting statistics in {folder}; expected a folder that nobody else writes to. Wait "
            "until it has finished, or pass another folder as `statistics_dir` (`checkpoint_dir` of `collect`)."
        ) from error
    try:
        yield
    finally:
        lock.release()


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
            f"{path} has format {body.get('format')!r}, this version of hf_kvtransfer reads {_FORMAT}: collect the "
            "statistics again, or update hf_kvtransfer if theirs is the newer format."
        )
    return body


def _write(tensors: dict[str, torch.Tensor], path: Path) -> str:
    """
    A safetensors file, and its SHA-256: the length of the header, the header, all tensors. Piece by piece, as the sums
    may be larger than memory, and `safetensors.torch` would first copy all of them.
    """
    # The format asks for no order. Large tensors of wide numbers first: mapped, each then lies where it may, and the
    # large ones where products of them are fastest.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, -item[1].numel(), item[0]))
    entries, stop = {}, 0
    for name, tensor in ordered:
        start, stop = stop, stop + tensor.numel() * tensor.dtype.itemsize
        dtype = _DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % 64)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in (len(header).to_bytes(8, "little"), header):
            file.write(part)
            digest.update(part)
        for _, tensor in ordered:
            for piece in tensor.view(-1).split(_BLOCK_BYTES // 8):
                content = piece.cpu().numpy().data
                file.write(content)
                digest.update(content)
    return digest.hexdigest()


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
