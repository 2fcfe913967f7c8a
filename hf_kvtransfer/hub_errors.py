"""What the Hub refuses, or why it can't be reached, in sentences."""

import os
from collections.abc import Iterator
from typing import Any, NoReturn

from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import HubError, MapperFileError


def check_repository(repo_id: Any, tags: Any) -> None:
    """
    Raises [`HubError`] for what the Hub needn't be asked about.

    Args:
        repo_id (`str`): what is to be published.
        tags (`list[str]`, *optional*): those of its card.
    """
    if not isinstance(repo_id, str):
        raise HubError(
            f'{repo_id!r} is no name of a repository (it is no text); expected "name" or "organisation/name". Choose '
            "another."
        )
    if tags is not None and not (isinstance(tags, list | tuple) and all(isinstance(tag, str) for tag in tags)):
        raise HubError(
            f'`tags` of the card of {repo_id} is {tags!r}; expected a list of texts. Write one tag as `["tag"]`.'
        )


def refuse_upload(repo_id: str, error: Exception) -> NoReturn:
    """
    Raises [`HubError`] in place of an error of the Hub's client.

    Args:
        repo_id (`str`): what was to be published.
        error (`Exception`): what the client, its HTTP library or hf_xet raised; their types differ between releases.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join((getattr(error, "server_message", None) or str(error)).split())
    if isinstance(error, HFValidationError):
        raise HubError(
            f'{repo_id!r} is no name of a repository ({reason}); expected "name" or "organisation/name". Choose '
            "another."
        ) from error
    if isinstance(error, OfflineModeIsEnabled):
        raise HubError(
            f"{repo_id} can't be published while `HF_HUB_OFFLINE` is set; expected a connection to the Hub. Unset it."
        ) from error
    if status == 401:
        raise HubError(
            f"The Hub doesn't know the token that {repo_id} was to be published with ({reason}); expected a valid one. "
            "Run `hf auth login` again, or check `HF_TOKEN` and `token=`."
        ) from error
    if status == 403:
        raise HubError(
            f"The token may not write to {repo_id} ({reason}); expected one with write access to it. Use another "
            "token or name, or pass `create_pr=True` to propose the change to its owner."
        ) from error
    if status == 404:
        raise HubError(
            f"There is no such repository or branch as {repo_id} names ({reason}); expected one that the token may "
            "see. Check the name and `revision`."
        ) from error
    if status == 412:
        raise HubError(
            f"Somebody else has published to {repo_id} in the meantime ({reason}), and nothing was changed; expected "
            "it to stay as it was. Look at what is there, and push again."
        ) from error
    cause = " ".join(str(error.__cause__ or "").split())
    if cause not in reason:  # some clients repeat it, some leave it out
        reason = f"{reason} {cause}"
    raise HubError(
        f"{repo_id} could not be published ({type(error).__name__}: {reason}); expected a Hub that takes all files. "
        "What was published before is as it was. Push again: what has arrived isn't sent twice."
    ) from error


def explain_download(path: Any, error: BaseException, revision: Any = None) -> None:
    """
    Raises [`MapperFileError`] if the Hub is why a mapper could not be loaded; returns if something else is.

    Args:
        path (`str` or `os.PathLike`): the repository, or a folder.
        error (`BaseException`): what loading raised.
        revision (`str`, *optional*): the branch, tag or commit that was asked for.
    """
    if os.path.isdir(str(path)):
        return
    causes = list(_chain(error))
    statuses = {getattr(getattr(cause, "response", None), "status_code", None) for cause in causes}
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        raise MapperFileError(
            f"{path} has no revision {revision!r} on the Hub; expected one of its branches, tags or commits. Leave "
            "`revision` out for the main branch."
        ) from error
    if statuses & {401, 403} or any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        raise MapperFileError(
            f"The Hub shows no repository {path}: there is none, or it is private or gated and the token may not see "
            "it; expected the name of a mapper, or of a folder. Check the name; for a private one run `hf auth login` "
            "or pass `token=`."
        ) from error
    if any(isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled) for cause in causes):
        raise MapperFileError(
            f"{path} is no folder and not completely in the local cache, and the Hub isn't asked or can't be reached; "
            "expected a mapper that was fetched before. Check the connection, `HF_HUB_OFFLINE`, `local_files_only` and "
            "`cache_dir`."
        ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
