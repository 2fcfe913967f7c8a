"""Mappers to a Hub and back, with the real client: what arrives, what doesn't, and what is there after a failure."""

import inspect
import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download
from transformers.utils import PushToHubMixin
from typer.testing import CliRunner

from hf_kvtransfer import EvidenceError, HubError, KVMapper, MapperFileError
from hf_kvtransfer.evidence import record_evidence
from hf_kvtransfer.hub_errors import refuse_upload
from hf_kvtransfer.publishing import push_folder

from .architectures import build
from .fuzzing import identity
from .hub_client import client
from .hub_server import Blob, Faults, Hub, User
from .test_evidence import report_of


PNG = b"\x89PNG\r\n\x1a\n"


# ------------------------------------------------------------------------------------- what the client's process runs


def push(folder, repo_id, **kwargs):
    return as_dict(KVMapper.from_pretrained(folder, min_gap_recovered=False).push_to_hub(repo_id, **kwargs))


def push_saved(folder, repo_id, **kwargs):
    return as_dict(push_folder(folder, repo_id, **kwargs))


def save_and_push(folder, target, **kwargs):
    KVMapper.from_pretrained(folder, min_gap_recovered=False).save_pretrained(target, push_to_hub=True, **kwargs)


def as_dict(commit):
    return {name: getattr(commit, name) for name in ("oid", "commit_message", "pr_url", "pr_revision")}


def pull(name, **kwargs):
    """The first weight of a mapper, which tells these tests' mappers apart, after checking that all are alike."""
    mapper = KVMapper.from_pretrained(name, min_gap_recovered=False, **kwargs)
    values = {float(value) for parameter in mapper.parameters() for value in (parameter.min(), parameter.max())}
    assert len(values) == 1
    return values.pop()


def pull_again(name, **kwargs):
    """A mapper from the Hub, pushed again as it is."""
    mapper = KVMapper.from_pretrained(name, min_gap_recovered=False, **kwargs)
    return as_dict(mapper.push_to_hub(name, token=kwargs["token"]))


def train(folder, settings, **kwargs):
    """Trains two steps and pushes at the end, from a folder that holds more than a mapper."""
    from hf_kvtransfer.training import KVMapperTrainer, KVTrainingArguments

    model = build("qwen3")
    mapper = identity(model)
    with torch.no_grad():
        mapper.layers[0].keys.weight.normal_(std=0.1)
    arguments = KVTrainingArguments(
        str(folder),
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        hub_token="ann",
        **settings,
    )
    rows = [{"input_ids": torch.randint(60, (12,))} for _ in range(2)]
    trainer = KVMapperTrainer(mapper, arguments, source=model, target=model, train_dataset=rows)
    (folder / "secret.txt").write_text("secret")
    trainer.train()
    done = trainer.push_to_hub(**kwargs)
    return as_dict(done if kwargs.get("blocking", True) else done.result())


def command(*arguments, token=None):
    from hf_kvtransfer.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"HF_TOKEN": token})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def raise_refusal(said, cause):
    error = ConnectionError(said)
    error.__cause__ = OSError(cause)
    refuse_upload("org/mapper", error)


def call(method, *args, **kwargs):
    """What the plain client says, as values that can be sent between processes."""
    found = getattr(HfApi(), method)(*args, **kwargs)
    return list(found) if inspect.isgenerator(found) else found


# ---------------------------------------------------------------------------------------------------------- the stage


@pytest.fixture(scope="module")
def server():
    users = {"ann": User("ann", ("org",)), "reads": User("rob", ("org",), can_write=False), "bob": User("bob")}
    with Hub(users) as hub:
        yield hub


@pytest.fixture(scope="module")
def online(server, tmp_path_factory):
    with client(tmp_path_factory.mktemp("home"), HF_ENDPOINT=server.url) as run:
        yield run


@pytest.fixture
def hub(server):
    """The server with nothing in it and nothing wrong with it."""
    server.faults = Faults()
    for everything in (server.repositories, server.objects, server.xorbs, server.requests):
        everything.clear()
    return server


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of mappers of which every weight is one number, saved in one file or in shards."""
    model, place = build("qwen3"), tmp_path_factory.mktemp("mappers")

    def make(value, **kwargs):
        folder = place / f"{value}-{len(kwargs)}"
        if not folder.exists():
            mapper = identity(model)
            with torch.no_grad():
                for parameter in mapper.parameters():
                    parameter.fill_(value)
            mapper.save_pretrained(folder, **kwargs)
        return folder

    return make


@pytest.fixture
def evaluated(saved, tmp_path):
    """A mapper's folder with a report of it, a figure, and much that is nobody's business."""
    folder = tmp_path / "evaluated"
    shutil.copytree(saved(3.0), folder)
    report = report_of(KVMapper.from_pretrained(folder, min_gap_recovered=False).config)
    record_evidence(folder, report)
    report.save(folder)
    (folder / "report.md").write_text(report.to_markdown(["figures/retention.png"]))
    (folder / "figures").mkdir()
    (folder / "figures" / "retention.png").write_bytes(PNG)
    for name in (
        "secret.txt",
        ".env",
        "training_args.bin",
        "other.safetensors",
        "figures/notes.txt",
        "figures/mine.png",
        "runs/log",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    (folder / "checkpoint-1").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "checkpoint-1")
    return folder


def content(folder):
    """The files of a saved mapper, without a card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


WITH_REPORT = {"config.json", "model.safetensors", "README.md", "report.json", "report.md", "figures/retention.png"}


class TestPublishing:
    def test_the_bytes_on_the_hub_are_those_that_were_saved_in_one_commit(self, hub, online, saved, tmp_path):
        commit = online(push, saved(1.0), "org/mapper", token="ann", commit_message="First", commit_description="Why")
        files = hub.files("org/mapper")
        assert files.pop("README.md").startswith(b"---\n")
        assert files == content(saved(1.0))
        newest, _ = hub.history("org/mapper")
        assert (newest.oid, newest.title, newest.description) == (commit["oid"], "First", "Why")
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 1.0

    @pytest.mark.parametrize("way", ["folder", "mapper", "save_pretrained"])
    def test_nothing_else_in_the_folder_is_sent(self, hub, online, evaluated, way):
        if way == "save_pretrained":
            online(save_and_push, evaluated, evaluated, repo_id="org/mapper", token="ann")
        else:
            online({"folder": push_saved, "mapper": push}[way], evaluated, "org/mapper", token="ann")
        files = hub.files("org/mapper")
        assert set(files) == WITH_REPORT
        assert all(files[name] == (evaluated / name).read_bytes() for name in WITH_REPORT - {"README.md"})
        assert b"figures/retention.png" in files["README.md"]
        assert len(hub.history("org/mapper")) == 2
        assert not any(b"secret" in blob for blob in [*files.values(), *hub.objects.values()])

    def test_a_path_that_a_configuration_names_is_not_followed(self, hub, online, evaluated):
        path = evaluated / "config.json"
        config = json.loads(path.read_text())
        config["digests"]["../secret.safetensors"] = "0" * 32
        path.write_text(json.dumps(config))
        (evaluated.parent / "secret.safetensors").write_text("secret")
        with pytest.raises(MapperFileError, match=r"lacks \.\./secret.safetensors"):
            online(push_saved, evaluated, "org/mapper", token="ann")
        assert not hub.requests

    @pytest.mark.parametrize(
        "name",
        ["figures/kept.png", "figures", "report.json", "report.md", "README.md", "config.json", "model.safetensors"],
    )
    def test_a_link_is_not_followed(self, hub, online, evaluated, name):
        elsewhere, place = evaluated.parent / "elsewhere", evaluated / name
        if place.exists():
            place.rename(elsewhere)
        else:
            elsewhere.write_bytes(PNG + b"secret")
        place.symlink_to(elsewhere)
        if name == "report.md":  # which is written anew
            online(push_saved, evaluated, "org/mapper", token="ann")
            assert set(hub.files("org/mapper")) == WITH_REPORT
            return
        with pytest.raises(MapperFileError, match="is a link, or lies behind one"):
            online(push_saved, evaluated, "org/mapper", token="ann")
        assert not hub.requests

    def test_a_snapshot_in_the_cache_of_the_hub_may_link_to_its_own_files(self, hub, online, evaluated, tmp_path):
        online(push_saved, evaluated, "org/mapper", token="ann")
        snapshot = online(snapshot_download, "org/mapper", cache_dir=tmp_path / "cache", token="ann")
        assert (Path(snapshot) / "config.json").is_symlink()
        online(push_saved, snapshot, "org/copy", token="ann")
        assert set(hub.files("org/copy")) == WITH_REPORT

    def test_what_is_sent_as_figures_and_words_is_of_the_report(self, hub, online, evaluated):
        (evaluated / "report.md").write_text("# secret\n")
        online(push_saved, evaluated, "org/mapper", token="ann")
        assert b"secret" not in hub.files("org/mapper")["report.md"]
        (evaluated / "figures" / "kept.png").write_text("secret")
        with pytest.raises(MapperFileError, match=r"figures/kept.png in .* is no PNG"):
            online(push_saved, evaluated, "org/mapper", token="ann")

    def test_a_report_is_sent_by_the_name_of_its_file_too(self, hub, online, saved, evaluated):
        online(push, saved(3.0), "org/mapper", token="ann", report_dir=evaluated / "report.json")
        assert set(hub.files("org/mapper")) == WITH_REPORT
        with pytest.raises(MapperFileError, match="is a file; expected the folder of a report"):
            online(push, saved(3.0), "org/mapper", token="ann", report_dir=evaluated / "report.md")

    def test_a_report_from_another_folder_comes_with_the_mapper(self, hub, online, saved, evaluated, tmp_path):
        shutil.copytree(evaluated, tmp_path / "report", ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
        online(push, saved(3.0), "org/mapper", token="ann", report_dir=tmp_path / "report")
        assert set(hub.files("org/mapper")) == WITH_REPORT
        assert json.loads(hub.files("org/mapper")["config.json"])["scores"]["evaluation"]["measures"]

    def test_a_report_of_another_recipe_does_not(self, hub, online, saved, evaluated, tmp_path):
        path = evaluated / "report.json"
        report = json.loads(path.read_text())
        path.write_text(json.dumps({**report, "mapper": {**report["mapper"], "preset": "heo2026"}}))
        with pytest.raises(EvidenceError, match="The report is of another mapper: `preset`"):
            online(push, saved(3.0), "org/mapper", token="ann", report_dir=evaluated)
        with pytest.raises(MapperFileError, match="No report could be read from"):
            online(push, saved(3.0), "org/mapper", token="ann", report_dir=tmp_path / "nowhere")
        assert not hub.requests

    def test_arguments_are_those_of_transformers(self):
        ours, theirs = (inspect.signature(owner.push_to_hub).parameters.items() for owner in (KVMapper, PushToHubMixin))
        assert not [name for name, parameter in theirs if dict(ours)[name].default != parameter.default]

    def test_a_repository_of_ones_own_needs_no_namespace(self, hub, online, saved):
        online(push, saved(1.0), "mapper", token="ann")
        assert set(hub.repositories) == {"ann/mapper"}

    def test_tags_are_added_to_the_card(self, hub, online, saved):
        online(push, saved(1.0), "org/mapper", token="ann", tags=["mine"])
        assert b"- mine\n" in hub.files("org/mapper")["README.md"].split(b"---\n")[1]

    def test_pushing_the_same_again_makes_no_commit(self, hub, online, saved):
        first = online(push, saved(1.0), "org/mapper", token="ann")
        assert online(push, saved(1.0), "org/mapper", token="ann")["oid"] == first["oid"]

    def test_what_is_no_longer_of_this_mapper_goes_in_the_same_commit(self, hub, online, saved, evaluated, tmp_path):
        online(push_saved, evaluated, "org/mapper", token="ann")
        repository = hub.repositories["org/mapper"]
        files = {**repository.find("main").files, "notes.md": Blob(b"mine"), "sub/model.safetensors": Blob(b"mine")}
        repository.refs["refs/heads/main"] = repository.add(repository.find("main"), "by hand", "", files).oid
        online(push_saved, saved(4.0, max_shard_size="4KB"), "org/mapper", token="ann")
        sharded = set(content(saved(4.0, max_shard_size="4KB")))
        assert len(sharded) > 3
        assert set(hub.files("org/mapper")) == sharded | {"README.md", "notes.md", "sub/model.safetensors"}
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 4.0
        online(push_saved, saved(1.0), "org/mapper", token="ann")
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 1.0

    def test_a_mapper_from_the_hub_is_pushed_again_with_its_report(self, hub, online, evaluated, tmp_path):
        online(push_saved, evaluated, "org/mapper", token="ann")
        before = hub.files("org/mapper")
        online(pull_again, "org/mapper", token="ann", cache_dir=tmp_path)
        assert hub.files("org/mapper") == before

    def test_prose_written_into_the_card_stays(self, hub, online, saved, evaluated):
        online(push_saved, evaluated, "org/mapper", token="ann")
        repository = hub.repositories["org/mapper"]
        card = repository.find("main").files["README.md"].content + "\n## Äpfel\n\nOn the Hub.\n".encode()
        files = {**repository.find("main").files, "README.md": Blob(card)}
        repository.refs["refs/heads/main"] = repository.add(repository.find("main"), "by hand", "", files).oid
        online(push, saved(1.0), "org/mapper", token="ann")
        assert "## Äpfel\n\nOn the Hub.\n".encode() in hub.files("org/mapper")["README.md"]
        assert b"retention.png" not in hub.files("org/mapper")["README.md"]
        # A card in the folder that nobody wrote into gives way to the one on the Hub, else it is the newer one.
        (evaluated / "README.md").write_bytes(card.split(b"\n## \xc3\x84pfel")[0] + b"\n")
        online(push_saved, evaluated, "org/mapper", token="ann")
        assert b"On the Hub." in hub.files("org/mapper")["README.md"]
        (evaluated / "README.md").write_bytes(card.replace(b"On the Hub.", b"In the folder."))
        online(push_saved, evaluated, "org/mapper", token="ann")
        assert b"In the folder." in hub.files("org/mapper")["README.md"]
        assert b"On the Hub." not in hub.files("org/mapper")["README.md"]


class TestRevisions:
    def test_every_revision_is_loaded_by_branch_tag_and_commit(self, hub, online, saved, tmp_path):
        first = online(push, saved(1.0), "org/mapper", token="ann")
        online(call, "create_tag", "org/mapper", tag="v1", token="ann")
        online(push, saved(2.0), "org/mapper", token="ann")
        online(push, saved(3.0), "org/mapper", token="ann", revision="trial/one")
        found = {
            revision: online(pull, "org/mapper", revision=revision, cache_dir=tmp_path)
            for revision in ("main", "v1", first["oid"], "trial/one")
        }
        assert found == {"main": 2.0, "v1": 1.0, first["oid"]: 1.0, "trial/one": 3.0}

    def test_a_pull_request_of_somebody_else_leaves_the_branch(self, hub, online, saved, tmp_path):
        first = online(push, saved(1.0), "org/mapper", token="ann")
        proposed = online(push, saved(2.0), "org/mapper", token="bob", create_pr=True)
        assert proposed["pr_url"] == f"{hub.url}/org/mapper/discussions/1"
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 1.0
        assert online(pull, "org/mapper", revision=proposed["pr_revision"], cache_dir=tmp_path) == 2.0
        assert hub.history("org/mapper")[0].oid == first["oid"]

    def test_private(self, hub, online, saved, tmp_path):
        online(push, saved(1.0), "org/mapper", token="ann", private=True)
        assert hub.repositories["org/mapper"].private
        assert online(pull, "org/mapper", token="reads", cache_dir=tmp_path) == 1.0
        for kwargs in ({}, {"token": "bob"}, {"token": "wrong"}):
            with pytest.raises(MapperFileError, match=r"The Hub shows no repository org/mapper: .* private"):
                online(pull, "org/mapper", cache_dir=tmp_path / "other", **kwargs)


class TestFailures:
    def test_an_interrupted_upload_publishes_nothing(self, hub, online, saved, tmp_path):
        online(push, saved(1.0), "org/mapper", token="ann")
        before = hub.history("org/mapper")
        hub.faults = Faults(break_uploads_after=1000)
        with pytest.raises(HubError, match=r"org/mapper could not be published \(.*model.safetensors"):
            online(push, saved(2.0), "org/mapper", token="ann")
        assert hub.history("org/mapper") == before
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 1.0
        hub.faults = Faults()
        online(push, saved(2.0), "org/mapper", token="ann")
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 2.0

    def test_an_interrupted_commit_publishes_nothing_and_sends_nothing_twice(self, hub, online, saved):
        hub.faults = Faults(break_commits=True)
        with pytest.raises(HubError, match="org/mapper could not be published"):
            online(push, saved(2.0), "org/mapper", token="ann")
        assert not hub.files("org/mapper")
        hub.faults = Faults()
        hub.requests.clear()
        online(push, saved(2.0), "org/mapper", token="ann")
        assert not [path for method, path in hub.requests if method == "PUT"]

    def test_what_somebody_else_publishes_meanwhile_is_not_mixed_with_it(self, hub, online, saved, tmp_path):
        online(push, saved(1.0), "org/mapper", token="ann")
        repository = hub.repositories["org/mapper"]

        def another():
            made = repository.add(repository.find("main"), "another", "", repository.find("main").files)
            repository.refs["refs/heads/main"] = made.oid

        hub.faults = Faults(before_commit=another)
        with pytest.raises(HubError, match="Somebody else has published to org/mapper"):
            online(push, saved(2.0), "org/mapper", token="ann")
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 1.0

    @pytest.mark.parametrize(
        ("repo_id", "kwargs", "sentence", "asks"),
        [
            ("org/mapper", {}, "There is no token to publish org/mapper with", False),
            ("org/mapper", {"token": False}, "There is no token to publish org/mapper with", False),
            (
                "org/mapper",
                {"token": "wrong"},
                "doesn't know the token .*Invalid credentials",
                True,
            ),
            ("org/mapper", {"token": "reads"}, "The token may not write to org/mapper", True),
            ("other/mapper", {"token": "ann"}, "The token may not write to other/mapper", True),
            ("or g/mapper", {"token": "ann"}, "'or g/mapper' is no name of a repository", False),
            ("a/b/c", {"token": "ann"}, "'a/b/c' is no name of a repository", False),
            (5, {"token": "ann"}, "5 is no name of a repository", False),
            ("org/mapper", {"token": "ann", "tags": 5}, "is 5; expected a list of texts", False),
            ("org/mapper", {"token": "ann", "tags": "abc"}, "is 'abc'; expected a list of texts", False),
            ("ann/m", {"token": "ann", "revision": "refs/pr/9"}, "no such repository or branch as ann/m names", True),
        ],
    )
    def test_a_refusal_is_a_sentence_and_publishes_nothing(self, hub, online, saved, repo_id, kwargs, sentence, asks):
        with pytest.raises(HubError, match=sentence):
            online(push, saved(1.0), repo_id, **kwargs)
        assert bool(hub.requests) is asks
        assert not any(hub.files(name) for name in hub.repositories)

    @pytest.mark.parametrize("size", ["abc", -5, 0, True, "0GB", "5", [], 2.5])
    def test_a_size_that_is_none(self, hub, online, saved, size):
        with pytest.raises(MapperFileError, match="`max_shard_size` is"):
            online(push, saved(1.0), "org/mapper", token="ann", max_shard_size=size)
        assert not hub.requests

    def test_a_cause_is_said_once(self):
        with pytest.raises(HubError, match="no route") as refusal:
            raise_refusal("no route", "no route")
        assert str(refusal.value).count("no route") == 1
        with pytest.raises(HubError, match="broke off no route"):
            raise_refusal("broke off", "no route")

    def test_a_mapper_without_maps(self, hub):
        with pytest.raises(MapperFileError, match="This mapper has no maps, so nobody could use it"):
            KVMapper.for_pair(build("qwen3"), build("qwen3")).push_to_hub("org/mapper", token="ann")

    def test_a_report_of_other_weights(self, hub, online, evaluated, saved):
        KVMapper.from_pretrained(saved(1.0), min_gap_recovered=False).save_pretrained(evaluated)
        with pytest.raises(EvidenceError, match=r"`report.json` in .* is not the one"):
            online(push_saved, evaluated, "org/mapper", token="ann")
        assert not hub.requests


class TestLoading:
    @pytest.mark.parametrize(
        ("name", "kwargs", "sentence"),
        [
            ("org/none", {}, "The Hub shows no repository org/none: there is none"),
            ("org/none", {"token": "ann"}, "The Hub shows no repository org/none: there is none"),
            ("org/mapper", {"token": "wrong"}, "The Hub shows no repository org/mapper"),
            ("org/mapper", {"revision": "none"}, "org/mapper has no revision 'none' on the Hub"),
            ("org/mapper", {"revision": "1" * 40}, "org/mapper has no revision '1111"),
            ("org/mapper", {"local_files_only": True}, "org/mapper is no folder and not completely in the local cache"),
        ],
    )
    def test_what_is_not_there_is_said_in_a_sentence(self, hub, online, saved, tmp_path, name, kwargs, sentence):
        online(push, saved(1.0), "org/mapper", token="ann")
        with pytest.raises(MapperFileError, match=sentence) as refusal:
            online(pull, name, cache_dir=tmp_path, **kwargs)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("missing", "sentence"),
        [
            ("config.json", "The weights in org/mapper don't fit its configuration"),
            ("model.safetensors", "No mapper could be loaded from org/mapper: .* a file named"),
        ],
    )
    def test_a_missing_file(self, hub, online, saved, tmp_path, missing, sentence):
        online(push, saved(1.0), "org/mapper", token="ann")
        repository = hub.repositories["org/mapper"]
        commit = repository.find("main")
        left = {path: blob for path, blob in commit.files.items() if path != missing}
        repository.commits[commit.oid] = replace(commit, files=left)
        with pytest.raises(MapperFileError, match=sentence):
            online(pull, "org/mapper", cache_dir=tmp_path)

    def test_a_corrupted_download_is_refused_and_fetched_again(self, hub, online, saved, tmp_path):
        online(push, saved(1.0), "org/mapper", token="ann")
        hub.faults = Faults(flip_a_bit_of="model.safetensors")
        with pytest.raises(MapperFileError, match=r"model.safetensors in org/mapper is not .*`force_download=True`"):
            online(pull, "org/mapper", cache_dir=tmp_path)
        hub.faults = Faults()
        assert online(pull, "org/mapper", cache_dir=tmp_path, force_download=True) == 1.0

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_half_a_file_is_refused(self, hub, online, saved, tmp_path, name):
        online(push, saved(1.0), "org/mapper", token="ann")
        hub.faults = Faults(cut_short=name)
        with pytest.raises(MapperFileError):
            online(pull, "org/mapper", cache_dir=tmp_path)
        hub.faults = Faults()
        assert online(pull, "org/mapper", cache_dir=tmp_path, force_download=True) == 1.0

    def test_a_download_that_breaks_off_is_gone_on_with(self, hub, online, saved, tmp_path):
        online(push, saved(1.0), "org/mapper", token="ann")
        hub.faults = Faults(stop_after=500)
        with suppress(MapperFileError):  # newer releases of the client try again on their own
            online(pull, "org/mapper", cache_dir=tmp_path)
        assert hub.faults.stop_after is None
        assert online(pull, "org/mapper", cache_dir=tmp_path) == 1.0

    def test_offline_what_was_fetched_before_is_loaded(self, hub, online, saved, tmp_path):
        online(push, saved(1.0), "org/mapper", token="ann")
        assert online(pull, "org/mapper", cache_dir=tmp_path / "cache") == 1.0
        hub.requests.clear()
        with client(tmp_path / "home", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") as offline:
            assert offline(pull, "org/mapper", cache_dir=tmp_path / "cache") == 1.0
            with pytest.raises(MapperFileError, match="org/other is no folder and not completely in the local cache"):
                offline(pull, "org/other", cache_dir=tmp_path / "cache")
            with pytest.raises(HubError, match="can't be published while `HF_HUB_OFFLINE` is set"):
                offline(push, saved(1.0), "org/mapper", token="ann")
        assert not hub.requests


class TestCommandLine:
    def test_push(self, hub, online, evaluated):
        options = ("--private", "--revision", "trial", "--message", "From the shell")
        code, output = online(command, "push", evaluated, "org/mapper", *options, token="ann")
        assert code == 0, output
        assert f"Published org/mapper in commit {hub.history('org/mapper', 'trial')[0].oid}: {hub.url}" in output
        assert set(hub.files("org/mapper", "trial")) == WITH_REPORT
        assert hub.history("org/mapper", "trial")[0].title == "From the shell"
        assert hub.repositories["org/mapper"].private
        code, output = online(command, "push", evaluated, "org/mapper", "--create-pr", token="ann")
        assert f"{hub.url}/org/mapper/discussions/1" in output

    @pytest.mark.parametrize("damage", ["weights", "shape", "nothing there", "no folder"])
    def test_a_damaged_folder_never_reaches_the_hub(self, hub, online, evaluated, damage):
        weights = evaluated / "model.safetensors"
        if damage == "weights":
            weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
        elif damage == "shape":
            weights.write_bytes(weights.read_bytes()[:-100])
        elif damage == "nothing there":
            (evaluated / "config.json").unlink()
        else:
            shutil.rmtree(evaluated)
        code, output = online(command, "push", evaluated, "org/mapper", token="ann")
        assert code != 0
        assert "Traceback" not in output
        assert str(evaluated)[:40] in output.replace("\n", "")
        assert not hub.requests

    def test_a_refusal_is_one_sentence(self, hub, online, evaluated):
        code, output = online(command, "push", evaluated, "org/mapper")
        assert code == 1
        assert output.startswith("hf-kvtransfer: There is no token to publish org/mapper with")


class TestXet:
    """The way that large files go by default; the other tests take the older one, which can be interrupted at will."""

    def test_the_bytes_on_the_hub_are_those_that_were_saved(self, hub, evaluated, saved, tmp_path):
        mapper = KVMapper.from_pretrained(saved(1.0), min_gap_recovered=False)
        with torch.no_grad():
            mapper.layers[0].keys.weight.normal_()
        mapper.save_pretrained(tmp_path / "random")
        with client(tmp_path / "home", HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="0") as run:
            for name, folder in (("org/evaluated", evaluated), ("org/random", tmp_path / "random")):
                run(push_saved, folder, name, token="ann")
                for file, bytes_there in hub.files(name).items():
                    assert file == "README.md" or bytes_there == (folder / file).read_bytes()
            assert run(pull, "org/evaluated", cache_dir=tmp_path / "cache") == 3.0
        assert hub.xorbs
        assert not [path for method, path in hub.requests if method == "PUT"]


class TestTrainer:
    @pytest.mark.parametrize("kwargs", [{}, {"blocking": False, "commit_message": "Done", "tags": ["mine"]}])
    def test_push_to_hub_sends_the_mapper_alone(self, hub, online, tmp_path, kwargs):
        folder = tmp_path / "trained"
        commit = online(train, folder, {"save_strategy": "no"}, **kwargs)
        assert commit["commit_message"] == kwargs.get("commit_message", "End of training")
        assert (folder / "training_args.bin").exists()
        files = hub.files("ann/trained")  # named after the folder, as by transformers
        assert (b"- mine\n" in files.pop("README.md")) is bool(kwargs)
        assert files == {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}

    @pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
    def test_pushes_while_it_trains(self, hub, online, tmp_path, strategy):
        settings = {"push_to_hub": True, "hub_strategy": strategy, "hub_always_push": True, "save_total_limit": 1}
        online(train, tmp_path / "out", {**settings, "hub_model_id": "org/mapper", "hub_revision": "trial"})
        titles = {commit.title for commit in hub.history("org/mapper", "trial")}
        assert {"Training in progress, step 1", "Training in progress, step 2"} <= titles
        files = hub.files("org/mapper", "trial")
        whole = {name for name in files if name.startswith("last-checkpoint/")}  # asked for by that strategy
        assert ("last-checkpoint/optimizer.pt" in whole) is (strategy == "checkpoint")
        assert set(files) - whole == {"config.json", "model.safetensors", "README.md"}
        assert set(hub.files("org/mapper")) == set()


class TestTheServer:
    """It says what the client understands, on calls that publishing and loading don't make."""

    def test_lists(self, hub, online, evaluated, tmp_path):
        online(push_saved, evaluated, "org/mapper", token="ann")
        online(call, "create_branch", "org/mapper", branch="other", token="ann")
        assert online(call, "whoami", token="ann")["name"] == "ann"
        assert set(online(call, "list_repo_files", "org/mapper")) == {*WITH_REPORT, ".gitattributes"}
        tree = {entry.path: entry for entry in online(call, "list_repo_tree", "org/mapper")}
        assert set(tree) == {"figures", ".gitattributes", *(name for name in WITH_REPORT if "/" not in name)}
        assert tree["model.safetensors"].lfs.size == (evaluated / "model.safetensors").stat().st_size
        assert [ref.name for ref in online(call, "list_repo_refs", "org/mapper").branches] == ["main", "other"]
        folder = online(snapshot_download, "org/mapper", cache_dir=tmp_path)
        assert set(os.listdir(folder)) == {name.split("/")[0] for name in (*WITH_REPORT, ".gitattributes")}

    @pytest.mark.parametrize(
        ("asked", "status", "part"),
        [("bytes=500-", 206, slice(500, None)), ("bytes=0-9", 206, slice(10)), ("bytes=90000-", 416, slice(0))],
    )
    def test_a_part_of_a_file(self, hub, online, evaluated, asked, status, part):
        online(push_saved, evaluated, "org/mapper", token="ann")
        address = f"{hub.url}/org/mapper/resolve/main/model.safetensors"
        try:
            answer = urlopen(Request(address, headers={"Range": asked}))
        except HTTPError as error:
            answer = error
        with answer:
            assert (answer.status, answer.read()) == (status, (evaluated / "model.safetensors").read_bytes()[part])
