"""A report's files: `report.json`, `report.md` and its figures."""

import os
from importlib.util import find_spec
from pathlib import Path

from .figures import draw_figures
from .files import MARKDOWN_FILE, check_places
from .report import TransferReport, write_whole


def write_report(report: TransferReport, folder: str | os.PathLike[str], *, figures: bool | None = None) -> list[Path]:
    """
    Writes a report into a folder, as a rule the mapper's: `report.json`, `report.md`, and `figures/*.png`.

    Args:
        report ([`TransferReport`]): what was measured.
        folder (`str` or `os.PathLike`): made if missing.
        figures (`bool`, *optional*): whether to draw figures; by default if matplotlib is installed.

    Returns:
        `list[pathlib.Path]`: what was written.

    Raises:
        [`KVTransferError`]: if figures are asked for and matplotlib isn't installed.
        [`MapperFileError`]: if nothing can be written there.
    """
    folder = Path(folder)
    check_places(folder)
    written = [report.save(folder)]
    drawn = draw_figures(report, folder) if figures or (figures is None and find_spec("matplotlib")) else []
    text = report.to_markdown([path.relative_to(folder).as_posix() for path in drawn])
    return [*written, write_whole(folder, MARKDOWN_FILE, text), *drawn]
