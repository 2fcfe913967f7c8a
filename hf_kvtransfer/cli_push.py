"""`hf-kvtransfer push`."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import typed_errors


def push(
    folder: Annotated[Path, typer.Argument(help="The folder of a mapper, as `fit` or `save_pretrained` writes it.")],
    repo_id: Annotated[str, typer.Argument(help='The repository on the Hub, "organisation/name"; made if missing.')],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="For a repository that is made now; the namespace's own default."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The branch, made if missing; main by default.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option(help="First line of the commit.")] = None,
) -> None:
    """Publish a mapper with its card, report and figures in one commit, and no other file of the folder."""
    from .mapper import KVMapper
    from .publishing import push_folder

    with typed_errors():
        if not folder.is_dir():
            raise typer.BadParameter(f"{folder} is no folder of a mapper.")
        KVMapper.from_pretrained(folder)  # refuses what is damaged, and warns of a mapper without evidence
        commit = push_folder(
            folder, repo_id, private=private, revision=revision, create_pr=create_pr, commit_message=message
        )
        print(f"Published {commit.repo_url.repo_id} in commit {commit.oid}: {commit.pr_url or commit.commit_url}")
