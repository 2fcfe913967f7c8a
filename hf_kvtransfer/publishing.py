"""Putting a mapper on the Hub: one commit of its files, and of nothing else."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub import run_as_future as in_background
from huggingface_hub.errors import HfHubHTTPError

from ._version import __version__
from .digests import CONFIG_FILE, check_config, check_files, weights_digest
from .errors import HubError, KVTransferError, MapperFileError
from .evidence import evaluation_of, read_config, record_evidence, report_in
from .hub_errors import check_repository, refuse_upload
from .report.files import FIGURE_FILES, MARKDOWN_FILE, REPORT_FILE, is_png, own_files, report_folder
from .report.report import write_whole


_CARD_FILE = "README.md"
_REPORT_FILES = (REPORT_FILE, MARKDOWN_FILE, *FIGURE_FILES)
_WEIGHT_FILES = ("model*.safetensors", "model*.safetensors.index.json")
_ALL_FILES = (*_WEIGHT_FILES, *_REPORT_FILES)


def push_mapper(
    mapper: Any,
    repo_id: str,
    *,
    report_dir: str | os.PathLike[str] | None = None,
    max_shard_size: int | str | None = "50GB",
    **repository: Any,
) -> CommitInfo:
    """
    Saves a mapper and publishes it with a card, see [`push_folder`].

    Args:
        mapper ([`KVMapper`]): fitted, or otherwise filled.
        repo_id (`str`): the repository, `"name"` or `"organisation/name"`; made if missing.
        report_dir (`str` or `os.PathLike`, *optional*):
            The folder that `hf-kvtransfer evaluate --report` wrote, or the `report.json` in it: report and figures are
            published too, and the summary goes into the configuration. By default the folder that the mapper was
            loaded from, if its weights are still those.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): as in `PreTrainedModel.save_pretrained`.
        **repository: `private`, `revision`, `create_pr`, `token`, `commit_message`, … as in [`push_folder`].

    Returns:
        `huggingface_hub.CommitInfo`: with the commit's `oid`, its address, and that of a pull request.

    Raises:
        [`EvidenceError`]: if the report is of another mapper.
        [`HubError`]: if nothing could be published.
        [`MapperFileError`]:
            if the mapper has no maps, there is no report, one of its files is a link, or `max_shard_size` is no size.
    """
    from .report import TransferReport

    if not len(mapper.layers):
        raise MapperFileError(
            "This mapper has no maps, so nobody could use it; expected a fitted one to publish. Use `KVMapper.fit`."
        )
    check_repository(repo_id, repository.get("tags"))
    _check_shard_size(max_shard_size)
    with tempfile.TemporaryDirectory() as staging:
        folder = Path(staging) / "mapper"
        mapper.save_pretrained(folder, max_shard_size=max_shard_size or "50GB")
        origin = Path(str(mapper.name_or_path or staging))
        if report_dir is None and (origin / REPORT_FILE).is_file() and _same_weights(folder, origin):
            report_dir = origin
        if report_dir is not None:
            report_dir = report_folder(report_dir)
            record_evidence(folder, TransferReport.load(report_dir))
            _copy(own_files(report_dir, (*_REPORT_FILES, _CARD_FILE)), report_dir, folder)
        return push_folder(folder, repo_id, **repository)


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: bool | str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    tags: list[str] | None = None,
) -> CommitInfo:
    """
    Publishes a saved mapper in one commit: weights, configuration, a card, and if the folder holds them its report and
    figures, with the Markdown that follows from the report. Other files of the folder are not sent, and links are
    refused. Weights, report and figures of an earlier mapper are removed by the same commit, other files of the
    repository are kept, and so is what people wrote into the card, in the folder or else on the Hub. Unless everything
    has arrived nothing is published.

    Args:
        folder (`str` or `os.PathLike`): what [`KVMapper.save_pretrained`] wrote; nothing in it is changed.
        repo_id (`str`): the repository, `"name"` or `"organisation/name"`; made if missing.
        private (`bool`, *optional*): whether a repository that is made now is private; the namespace's own default.
        revision (`str`, *optional*): the branch, made if missing; by default `main`.
        create_pr (`bool`, *optional*, defaults to `False`): whether to open a pull request instead.
        token (`str` or `bool`, *optional*): by default the one of `hf auth login` or of `HF_TOKEN`.
        commit_message (`str`, *optional*, defaults to `"Upload KVMapper"`): its first line.
        commit_description (`str`, *optional*): what follows it.
        tags (`list[str]`, *optional*): added to those of the card.

    Returns:
        `huggingface_hub.CommitInfo`: with the commit's `oid`, its address, and that of a pull request.

    Raises:
        [`EvidenceError`]: if the report in the folder is of other weights.
        [`HubError`]: if nothing could be published, or `repo_id` or `tags` are no names.
        [`MapperFileError`]: if the folder holds no mapper, or a damaged one, or one of its files is a link.
    """
    folder = Path(folder)
    check_repository(repo_id, tags)
    files, report = _mapper_files(folder), report_in(folder)
    figures = own_files(folder, FIGURE_FILES) if report is not None else []
    own_card = own_files(folder, [_CARD_FILE])
    if token is False or (token in (None, True) and get_token() is None):
        raise HubError(
            f"There is no token to publish {repo_id} with; expected one that may write there. Run `hf auth login`, set "
            "`HF_TOKEN`, or pass `token=`."
        )
    api = HfApi(token=token, library_name="hf_kvtransfer", library_version=__version__)
    with tempfile.TemporaryDirectory() as staging:
        _copy([folder / CONFIG_FILE, *figures], folder, Path(staging))
        if report is not None:
            _copy(own_files(folder, [REPORT_FILE]), folder, Path(staging))
            # Written anew: what lies in the folder may be of another report.
            text = report.to_markdown([path.relative_to(folder).as_posix() for path in figures])
            write_whole(Path(staging), MARKDOWN_FILE, text)
        staged = own_files(Path(staging), _REPORT_FILES)
        with _said_in_words(repo_id):
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/pr/"):
                _make_branch(api, repo_id, revision, create_pr)
            there = api.model_info(repo_id, revision=revision)
            published = {file.rfilename for file in there.siblings or ()}

            def fetch(name: str) -> bytes | None:
                if name not in published:
                    return None
                return Path(api.hf_hub_download(repo_id, name, revision=there.sha)).read_bytes()

            stays = set() if staged else _fetch_report(fetch, published, Path(staging))
            existing = fetch(_CARD_FILE)
        card = _card(repo_id, Path(staging), own_card, existing, tags)
        additions = {path.relative_to(folder).as_posix(): path for path in files}
        additions |= {path.relative_to(staging).as_posix(): path for path in staged}
        outdated = {name for name in published if _is_among(name, _ALL_FILES)} - set(additions) - stays
        with _said_in_words(repo_id):
            return api.create_commit(
                repo_id,
                [
                    *(CommitOperationAdd(name, path) for name, path in additions.items()),
                    CommitOperationAdd(_CARD_FILE, card.encode()),
                    *(CommitOperationDelete(name) for name in sorted(outdated)),
                ],
                commit_message=commit_message or "Upload KVMapper",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                parent_commit=there.sha,  # what somebody else has published since is not mixed with this
            )


def push_in_background(folder: str | os.PathLike[str], repo_id: str, **repository: Any) -> "Future[CommitInfo]":
    """
    As [`push_folder`], of a copy of the mapper alone and without waiting for the upload, so that the folder may change.

    Args:
        folder (`str` or `os.PathLike`): what [`KVMapper.save_pretrained`] wrote; a report in it is not sent.
        repo_id (`str`): the repository.
        **repository: as in [`push_folder`].

    Returns:
        `concurrent.futures.Future`: of the `CommitInfo`. One upload runs after the other.

    Raises:
        [`MapperFileError`]: if the folder holds no mapper, or a damaged one.
    """
    files, staging = _mapper_files(Path(folder)), tempfile.TemporaryDirectory()
    _copy(files, Path(folder), Path(staging.name))

    def publish() -> CommitInfo:
        with staging:
            return push_folder(staging.name, repo_id, **repository)

    return in_background(publish)


def _mapper_files(folder: Path) -> list[Path]:
    """Configuration and weights of a folder, after comparing them with their digests."""
    config = read_config(folder)
    own_files(folder, [CONFIG_FILE])
    check_config(config, folder)
    recorded = config.get("digests") or {}
    # By what lies there and not by what the configuration names, which could be any path.
    weights = {path.name: path for path in _files(folder, _WEIGHT_FILES) if not recorded or path.name in recorded}
    missing = sorted(set(recorded) - set(weights) - {"config"})
    if missing or not weights:
        raise MapperFileError(
            f"The mapper in {folder} lacks {missing[0] if missing else 'its weights'}; expected every file that was "
            "saved with its configuration. Fetch or fit the mapper again."
        )
    check_files(config, weights, folder)
    return [folder / CONFIG_FILE, *weights.values()]


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return own_files(folder, [path.name for pattern in patterns for path in sorted(folder.glob(pattern))])


def _copy(files: Iterable[Path], folder: Path, to: Path) -> None:
    for path in files:
        place = to / path.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)


def _check_shard_size(size: Any) -> None:
    fits = size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0)
    if not fits and isinstance(size, str):
        fits = re.fullmatch(r"\s*(?=[^a-z]*[1-9])\d+(\.\d+)?\s*[kmgt]b\s*", size.lower()) is not None
    if not fits:
        raise MapperFileError(
            f"`max_shard_size` is {size!r}; expected a number of bytes, or a size such as `5GB` or `200MB`. Leave it "
            "out for one file of up to 50 GB."
        )


def _same_weights(folder: Path, other: Path) -> bool:
    one, another = (read_config(place).get("digests") or {} for place in (folder, other))
    return bool(one) and weights_digest(one) == weights_digest(another)


def _is_among(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a path in the repository fits one of the patterns, from its beginning to its end."""
    return any(PurePosixPath("/", name).match(f"/{pattern}") for pattern in patterns)


# ------------------------------------------------------------------------------------------------- what is published


def _make_branch(api: HfApi, repo_id: str, branch: str, create_pr: bool) -> None:
    try:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    except HfHubHTTPError as error:
        # A pull request can be opened by those who may not make a branch, as long as somebody else has.
        if not (create_pr and error.response.status_code == 403):
            raise


def _fetch_report(fetch: Callable[[str], bytes | None], published: Iterable[str], staging: Path) -> set[str]:
    """
    Fetches the published report and its figures, if it is the one that the configuration in `staging` has the summary
    of, as after pushing a mapper again that was loaded from the Hub. Gives the names of what was fetched.
    """
    from .report import TransferReport

    summary, content = evaluation_of(read_config(staging)), fetch(REPORT_FILE)
    if summary is None or content is None:
        return set()
    try:
        is_same = TransferReport.from_dict(json.loads(content)).digest() == summary.get("report")
    except (ValueError, MapperFileError):  # of another release, or damaged: it can't be vouched for
        return set()
    names = {name for name in published if is_same and _is_among(name, _REPORT_FILES)}
    for name in names:
        place = staging / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(fetch(name) or b"")
        if name in FIGURE_FILES and not is_png(place):
            place.unlink()  # stays where it is, but the card doesn't show it
    return names


def _card(repo_id: str, staging: Path, own: list[Path], existing: bytes | None, tags: list[str] | None) -> str:
    """The card of what lies in `staging`; what people wrote into their own, or else into that on the Hub, is kept."""
    from .cards import write_card

    def written(before: bytes | None) -> str:
        path = staging / _CARD_FILE
        if before is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(before)
        return write_card(staging, name=repo_id).read_bytes().decode()

    card = written(None)
    edited = written(own[0].read_bytes()) if own else card
    if edited.split() != card.split():
        card = edited
    elif existing is not None:
        card = written(existing)
    if tags:
        tagged: Any = ModelCard(card)
        tagged.data.tags = list(dict.fromkeys([*(tagged.data.tags or ()), *tags]))
        card = str(tagged)
    return card


@contextmanager
def _said_in_words(repo_id: str) -> Iterator[None]:
    try:
        yield
    except (KVTransferError, MemoryError):
        raise
    except Exception as error:  # of the client, its HTTP library or hf_xet, which differ between releases
        refuse_upload(repo_id, error)
