"""The files of a report: which there may be, and that each is what it seems to be."""

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import MapperFileError
from ..saving import check_writable
from .wording import CAPTIONS


REPORT_FILE, MARKDOWN_FILE, FIGURES_FOLDER = "report.json", "report.md", "figures"

FIGURE_FILES = tuple(f"{FIGURES_FOLDER}/{name}.png" for name in CAPTIONS)
"""Paths of all figures that a report can have, in the order in which they are shown."""

_PNG = b"\x89PNG\r\n\x1a\n"


def report_folder(path: str | os.PathLike[str]) -> Path:
    """
    The folder of a report, from it or from the `report.json` in it.

    Args:
        path (`str` or `os.PathLike`): either.

    Raises:
        [`MapperFileError`]: if it is another file.
    """
    path = Path(path)
    if path.is_file():
        if path.name != REPORT_FILE:
            raise MapperFileError(
                f"{path} is a file; expected the folder of a report, or the `{REPORT_FILE}` in it. Pass the folder "
                "that `hf-kvtransfer evaluate --report` wrote."
            )
        return path.parent
    return path


def own_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """
    Those of the named files that are there, after checking that none is a link: it could show any file of this machine.
    A snapshot in the Hub's cache may link to the files of its own repository there.

    Args:
        folder (`pathlib.Path`): where they lie.
        names (`Iterable[str]`): paths relative to it.

    Raises:
        [`MapperFileError`]: if one of them leads elsewhere, or a figure is no PNG.
    """
    root, found = folder.resolve(), []
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    for name in names:
        path = folder / name
        if not path.is_file() and not path.is_symlink():
            continue
        place = path.resolve()
        if not path.is_file() or (place != root / name and place.parent != blobs):
            raise MapperFileError(
                f"{name} in {folder} is a link, or lies behind one; expected a file of this folder, since what a link "
                "leads to may not be meant for others. Put the file itself there, or remove the link."
            )
        if name in FIGURE_FILES and not is_png(path):
            raise MapperFileError(
                f"{name} in {folder} is no PNG; expected a figure of the report. Evaluate the mapper again, or remove "
                "the file."
            )
        found.append(path)
    return found


def is_png(path: Path) -> bool:
    """Whether a file begins as a PNG does."""
    with path.open("rb") as file:
        return file.read(len(_PNG)) == _PNG


def check_places(folder: Path, *others: str) -> None:
    """
    Raises [`MapperFileError`] if a report's files can't be put into a folder, before the first of them is.

    Args:
        folder (`pathlib.Path`): made or not.
        *others (`str`): names of further files that will be put there.
    """
    check_writable(folder)
    check_writable(folder / FIGURES_FOLDER)
    for name in (REPORT_FILE, MARKDOWN_FILE, *FIGURE_FILES, *others):
        check_place(folder / name)


def check_place(path: Path) -> None:
    """Raises [`MapperFileError`] if a folder lies where a file is to be written."""
    if path.is_dir():
        raise MapperFileError(
            f"{path} is a folder; expected a file there, or nothing. Move it away, or choose another folder."
        )
