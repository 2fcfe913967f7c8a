"""Plain text tables for the terminal."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    A table with aligned columns, the first to the left and the others to the right.

    Args:
        header (`Sequence[str]`): the columns' names.
        rows (`Sequence[Sequence[str]]`): as many cells each.
    """
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([aligned(lines[0]), rule, *map(aligned, lines[1:])])


def percent(share: float) -> str:
    """A share as a percentage without decimals; a dash for what is not a number."""
    return "–" if share != share else f"{100 * share:.0f} %"
