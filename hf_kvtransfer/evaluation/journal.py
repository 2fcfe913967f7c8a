"""Results of an evaluation, kept one by one, so that one that was interrupted goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..errors import KVTransferError
from ..saving import check_writable


JOURNAL_FILE = "journal.jsonl"


class Journal:
    """
    A file of one JSON object a line: first what the results depend on, then each result as soon as it is there. A line
    that was not written to its end is dropped, and all lines after a damaged one.

    Args:
        folder (`str` or `os.PathLike`, *optional*): where the file lies; made if missing. Without it nothing is kept.
        inputs (`dict`): JSON values that tell this evaluation from others, by name.
        restart (`bool`, *optional*, defaults to `False`): whether results of an earlier evaluation are thrown away.

    Raises:
        [`KVTransferError`]: if the folder holds results of other inputs.
        [`MapperFileError`]: if nothing can be written there.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, inputs: dict[str, Any], restart: bool = False) -> None:
        self._path: Path | None = None
        # Where each result begins in the file: they are read back one at a time.
        self._places: dict[tuple[str, int], int] = {}
        if folder is None:
            return
        check_writable(folder)
        self._path = Path(folder) / JOURNAL_FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if restart:
            self._path.unlink(missing_ok=True)
        if not (self._path.exists() and self._read(self._path, inputs)):
            self._path.write_bytes(b"")
            _append(self._path, {"inputs": inputs})

    def results(
        self, task: str, units: Sequence[Any], make: Callable[[Any], Any], *, progress: bool = True
    ) -> Iterator[Any]:
        """
        The results of a task in the order of its units, made or read back.

        Args:
            task (`str`): its name, which the bar shows.
            units (`Sequence`): what there is to do.
            make (`Callable`): from a unit to its result, JSON values.
            progress (`bool`, *optional*, defaults to `True`): whether to show a bar, on a terminal only.
        """
        for index, unit in enumerate(tqdm(units, desc=task, disable=None if progress else True)):
            place = self._places.get((task, index))
            if place is not None and self._path is not None:
                yield _line_at(self._path, place)["result"]
                continue
            line = {"task": task, "index": index, "result": make(unit)}
            if self._path is not None:
                self._places[task, index] = _append(self._path, line)
            # As it will be read back.
            yield json.loads(json.dumps(line))["result"]

    def _read(self, path: Path, inputs: dict[str, Any]) -> bool:
        """Notes what the file holds of these inputs; whether it holds anything whole."""
        place = 0
        with path.open("rb") as file:
            for raw in file:
                line = _parsed(raw)
                if line is None:
                    break
                if place == 0:
                    _compare(path, line.get("inputs"), inputs)
                else:
                    self._places[line["task"], line["index"]] = place
                place += len(raw)
        os.truncate(path, place)
        return place > 0


def _compare(path: Path, held: Any, inputs: dict[str, Any]) -> None:
    held = held if isinstance(held, dict) else {}
    expected = json.loads(json.dumps(inputs))
    names = sorted({*held, *expected})
    different = [name for name in names if held.get(name) != expected.get(name)]
    if different:
        raise KVTransferError(
            f"{path} holds results of another evaluation, which differs in {', '.join(different)}; expected "
            "one of the same models, mapper, data and settings. Ask for those again, choose another folder, or "
            "start anew with `restart=True` (`--restart`)."
        )


def _append(path: Path, line: dict[str, Any]) -> int:
    """Adds a line; where it begins."""
    body = json.dumps(line)
    with path.open("ab") as file:
        place = file.tell()
        file.write(f"{_checksum(body)} {body}\n".encode())
    return place


def _line_at(path: Path, place: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(place)
        line = _parsed(file.readline())
    if line is None:
        raise KVTransferError(
            f"{path} was changed while it was in use; expected no one else to write there. Start the evaluation again."
        )
    return line


def _parsed(raw: bytes) -> dict[str, Any] | None:
    checksum, _, body = raw.decode("utf-8", "replace").rpartition("\n")[0].partition(" ")
    if not raw.endswith(b"\n") or checksum != _checksum(body):
        return None
    line: dict[str, Any] = json.loads(body)
    return line


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
