"""The command that writes a mapper's model card: `hf-kvtransfer card`."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import typed_errors


def card(
    folder: Annotated[Path, typer.Argument(help="The folder of the mapper.")],
    report: Annotated[
        Path | None,
        typer.Option(help="The folder with the report and figures of these weights; copied beside the mapper."),
    ] = None,
    repo_id: Annotated[str | None, typer.Option(help="Where it will be published: organisation/name.")] = None,
    source: Annotated[str | None, typer.Option(help="What the card calls a source that isn't on the Hub.")] = None,
    target: Annotated[str | None, typer.Option(help="The same for the target.")] = None,
) -> None:
    """Write README.md, the model card, into a mapper's folder; what was written into it by hand is kept."""
    from .cards import write_card

    with typed_errors():
        print(write_card(folder, report, name=repo_id, source=source, target=target))
