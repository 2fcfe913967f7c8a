"""`CachedFeatures`: what both models make of some text, captured once and read by every training run."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from .._version import __version__
from ..calibration.attention import QueryRecord
from ..digests import file_digest
from ..errors import CalibrationError, MapperFileError, PairMismatchError
from ..geometry import ModelGeometry, tokenizer_fingerprint
from ..mapper import KVMapper
from ..pairing import _different_weights, weight_sample
from ..saving import check_writable
from .batches import FEATURES, anchor_output, capture_batch
from .queries import attention_settings, attention_tensors, read_attention
from .rows import TokenRows


MANIFEST_NAME = "features.json"
_ATTENTION_NAME = "attention.safetensors"
_FORMAT = 1


class CachedFeatures(Dataset[dict[str, Tensor]]):
    """
    Captured features on disk, as a dataset for [`KVMapperTrainer`] or the plain `transformers.Trainer`: what both
    models made of each row of tokens, so that a run needs neither model for the content and attention losses, and no
    prefill for the KL.

    A row of `T` tokens takes `T · (source width + target width) · 2` numbers, a width being `Σ kv_heads · head_dim`
    over the layers.

    Args:
        folder (`str` or `os.PathLike`): where [`~CachedFeatures.capture`] has put them.
        anchor_layers (`int`, *optional*): whose anchor's output to read, for mappers with one.

    Raises:
        [`MapperFileError`]: if they are missing or damaged.
        [`CalibrationError`]: if the anchor wasn't captured.
    """

    def __init__(self, folder: str | os.PathLike[str], anchor_layers: int | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        if anchor_layers is not None and anchor_layers not in self.manifest["anchors"]:
            raise CalibrationError(
                f"The features in {self.folder} were captured with anchors of {self.manifest['anchors']} layers; "
                f"expected {anchor_layers} among them. Capture them again into another folder, with this anchor."
            )
        self.anchor_layers = anchor_layers
        self.attention = self._read_attention()
        self._ends: list[int] = []
        for shard in self.manifest["shards"]:
            path = self.folder / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise MapperFileError(
                    f"{path} is missing or not as long as it was written ({shard['bytes']} bytes); expected all files "
                    f"that {MANIFEST_NAME} names. Delete the folder and capture the features again."
                )
            self._ends.append((self._ends[-1] if self._ends else 0) + shard["rows"])
        self._open: dict[int, Any] = {}

    @classmethod
    def capture(
        cls,
        folder: str | os.PathLike[str],
        source: nn.Module,
        target: nn.Module,
        tokenizer: Any,
        rows: TokenRows,
        *,
        anchors: Sequence[int] = (),
        queries: int = 0,
        batch_size: int = 8,
        dtype: torch.dtype | None = None,
    ) -> "CachedFeatures":
        """
        Runs both models over all rows and writes what they made of them; or, if the folder holds just that, reads it.
        It appears in one step when all is written.

        Args:
            folder (`str` or `os.PathLike`): where the features belong; made if missing.
            source (`PreTrainedModel`): the model whose caches are converted.
            target (`PreTrainedModel`): the model that uses them.
            tokenizer (`PreTrainedTokenizerBase`): the one that both share.
            rows ([`TokenRows`]): the text.
            anchors (`Sequence[int]`, *optional*): `anchor_layers` of the mappers that will be trained on them.
            queries (`int`, *optional*, defaults to 0):
                At how many log-spaced tokens of a row the target's queries are kept, for the attention loss; 32, say.
            batch_size (`int`, *optional*, defaults to 8): rows in a forward pass, and in a file.
            dtype (`torch.dtype`, *optional*): to store keys and values in; as the models cache them by default.

        Returns:
            [`CachedFeatures`]: with the first of `anchors`, if any.

        Raises:
            [`CalibrationError`]: if the folder holds features of other models or another text.
            [`MapperFileError`]: if nothing can be written there.
        """
        final, anchor = Path(folder), next(iter(anchors), None)
        if dtype is not None and not dtype.is_floating_point:
            raise CalibrationError(
                f"`dtype` is {dtype}; expected a floating-point one, such as torch.bfloat16: keys and values are "
                "stored in it."
            )
        wanted = {
            "format": _FORMAT,
            "source": ModelGeometry.from_model(source).to_dict(),
            "target": ModelGeometry.from_model(target).to_dict(),
            "source_weights": weight_sample(source),
            "target_weights": weight_sample(target),
            "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
            "rows_sha256": rows.digest,
            "anchors": sorted(anchors),
            "queries": queries,
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }
        wanted = json.loads(json.dumps(wanted))  # as it reads when it comes back from the file
        if (final / MANIFEST_NAME).exists():
            found = cls(final, anchor)
            different = [name for name, value in wanted.items() if found.manifest.get(name) != value]
            if different:
                raise CalibrationError(
                    f"The folder {final} holds features that differ in {', '.join(different)}; expected those of these "
                    "models and this text. Capture into another folder, or delete this one."
                )
            found.verify()
            return found
        if final.is_dir() and any(final.iterdir()):
            raise CalibrationError(
                f"The folder {final} holds other files than captured features; expected none, or none yet. Capture "
                "into another folder."
            )
        check_writable(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        try:
            shards: list[dict[str, Any]] = []
            attention: list[QueryRecord] = []
            for start in tqdm(range(0, len(rows), batch_size), desc="Capturing features", disable=None):
                ids = rows.rows[start : start + batch_size]
                batch, attention = capture_batch(source, target, ids, queries=queries)
                tensors = _stored(batch, target, ids, sorted(anchors), dtype)
                path = staging / f"features-{len(shards):05d}.safetensors"
                save_file(tensors, path)
                shards.append(
                    {"file": path.name, "rows": len(ids), "bytes": path.stat().st_size, "digest": file_digest(path)}
                )
            if attention:
                save_file(attention_tensors(attention), staging / _ATTENTION_NAME)
            body = {
                **wanted,
                "attention": attention_settings(attention),
                "dataset": rows.name,
                "hf_kvtransfer": __version__,
                "shards": shards,
            }
            (staging / MANIFEST_NAME).write_text(json.dumps(body, indent=2, sort_keys=True), encoding="utf-8")
            staging.chmod(0o755)  # temporary folders are private to their maker
            os.replace(staging, final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return cls(final, anchor)

    def check(self, mapper: KVMapper) -> None:
        """
        Raises [`PairMismatchError`] if these are features of another pair than the mapper's, or tokenized in another
        way, or read with another anchor.
        """
        config = mapper.config
        differences = []
        for side in ("source", "target"):
            mine, theirs = config.geometry(side), ModelGeometry.from_dict(self.manifest[side])
            found = mine.differences(theirs) or _different_weights(
                getattr(config, f"{side}_weights"), self.manifest[f"{side}_weights"]
            )
            differences += [f"{side} model: {difference}" for difference in found]
        if config.tokenizer_fingerprint not in (None, self.manifest["tokenizer_fingerprint"]):
            differences.append("another tokenizer")
        anchors = (config.anchor_layers, config.anchor_start), (self.anchor_layers, 0)
        if None not in (config.anchor_layers, self.anchor_layers) and anchors[0] != anchors[1]:
            differences.append(f"read with an anchor of {self.anchor_layers} layers, which is not the mapper's")
        if differences:
            raise PairMismatchError(
                f"The features in {self.folder} are not those of this mapper's pair ({'; '.join(differences)}); "
                "expected features captured with its two models and its anchor. Capture them again."
            )

    def verify(self) -> None:
        """Compares all files with the digests of what was written, and raises [`MapperFileError`] on a difference."""
        for shard in self.manifest["shards"]:
            if file_digest(self.folder / shard["file"]) != shard["digest"]:
                raise MapperFileError(
                    f"{self.folder / shard['file']} has other bytes than were written; expected them as they were. "
                    "Delete the folder and capture the features again."
                )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = next(number for number, end in enumerate(self._ends) if index < end)
        row = index - (self._ends[number - 1] if number else 0)
        if number not in self._open:
            path = self.folder / self.manifest["shards"][number]["file"]
            try:
                self._open[number] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise MapperFileError(
                    f"{path} can't be read ({error}); expected captured features. Delete the folder and capture them "
                    "again."
                ) from error
        file = self._open[number]
        names = {name: name for name in ("input_ids", *FEATURES)}
        if self.attention:
            names["queries"] = "queries"
        if self.anchor_layers is not None:
            names["hidden"] = f"hidden_{self.anchor_layers}"
        return {name: file.get_slice(stored)[row] for name, stored in names.items()}

    def _read_attention(self) -> list[QueryRecord]:
        settings, path = self.manifest["attention"], self.folder / _ATTENTION_NAME
        if not settings:
            return []
        try:
            return read_attention(settings, load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise MapperFileError(
                f"How the target attends can't be read from {path} ({error}); expected what was written with the "
                "features. Delete the folder and capture them again."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Open files don't travel to the workers of a data loader.
        return {**self.__dict__, "_open": {}}


def _stored(
    batch: dict[str, Tensor], target: nn.Module, ids: Tensor, anchors: Sequence[int], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    tensors = {name: value if dtype is None else value.to(dtype) for name, value in batch.items()}
    for layers in anchors:
        tensors[f"hidden_{layers}"] = anchor_output(target, ids, layers)
    return {name: tensor.contiguous().cpu() for name, tensor in {"input_ids": ids, **tensors}.items()}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}")
        for name in ("source", "target"):
            ModelGeometry.from_dict(manifest[name])
        needed = {"shards", "anchors", "attention", "source_weights", "target_weights", "tokenizer_fingerprint"}
        if needed - manifest.keys():
            raise ValueError(f"it lacks {sorted(needed - manifest.keys())}")
        for shard in manifest["shards"]:
            if (
                not all(isinstance(shard[name], int) for name in ("rows", "bytes"))
                or Path(shard["file"]).name != shard["file"]
            ):
                raise ValueError(f"a file is described as {shard}")
        if not all(isinstance(depth, int) for depth in manifest["anchors"]):
            raise ValueError(f"its anchors are {manifest['anchors']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MapperFileError(
            f"No captured features can be read from {folder} ({error}); expected a folder that this release's "
            "`CachedFeatures.capture` has written. Capture them again."
        ) from error
    return dict(manifest)
