"""What was measured of a mapper: as JSON, in words, and as figures."""

from .report import FIGURES_FOLDER, MARKDOWN_FILE, REPORT_FILE, TransferReport
from .retention import measure
from .writing import write_report


__all__ = ["FIGURES_FOLDER", "MARKDOWN_FILE", "REPORT_FILE", "TransferReport", "measure", "write_report"]
