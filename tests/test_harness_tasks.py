"""The tasks that the package ships, and the programs that run them."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from hf_kvtransfer.cli import app
from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.harness import MODEL, tasks_path
from hf_kvtransfer.harness.tasks import documents

from .conftest import ROOT


class Loader(yaml.SafeLoader):
    """Task files without the functions that they name."""


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def test_the_program_of_the_harness_knows_the_model_once_a_task_is_named_by_its_path(family):
    task = tasks_path() / "kvtransfer_stories_mc.yaml"
    models = f"source={family / 'small'},target={family / 'large'},condition=native"
    arguments = ["--model", MODEL, "--model_args", models, "--limit", "2"]
    result = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments, "--include_path", str(tasks_path()), "--tasks", str(task)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "|kvtransfer_stories_mc|" in result.stdout


def test_registering_ours_keeps_the_models_of_the_harness():
    """In a process of its own: the harness fills its registry once, when nothing is in it."""
    code = (
        "from hf_kvtransfer.harness import register; register();"
        "from lm_eval.api.registry import model_registry as known; print('hf' in known, 'hf_kvtransfer' in known)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.split() == ["True", "True"], result.stderr


def test_our_program_hands_every_argument_over(monkeypatch):
    handed = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: handed.append(sys.argv[1:]))
    before = list(sys.argv)
    for arguments in (["--tasks", "a,b", "-x"], ["ls", "tasks", "--include_path=mine"], ["run", "--help"], []):
        assert CliRunner().invoke(app, ["lm-eval", *arguments]).exit_code == 0
    assert handed == [
        ["--tasks", "a,b", "-x", "--include_path", str(tasks_path())],
        ["ls", "tasks", "--include_path=mine"],
        ["run", "--help"],
        [],
    ]
    assert sys.argv == before


def test_our_program_shows_the_help_of_the_harness_and_where_tasks_are(capfd):
    result = CliRunner().invoke(app, ["lm-eval", "run", "--help"])
    assert result.exit_code == 0
    assert "--num_fewshot" in result.output + capfd.readouterr().out
    assert CliRunner().invoke(app, ["lm-eval", "--tasks_path"]).output.strip() == str(tasks_path())


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    result = CliRunner().invoke(app, ["lm-eval", "ls"])
    assert result.exit_code == 1
    assert "hf_kvtransfer[eval]" in result.output


class TestFiles:
    def test_all_are_in_the_package(self):
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        patterns = re.search(r'^"hf_kvtransfer\.harness\.tasks" = (\[.*\])$', settings, re.MULTILINE)
        packed = {path for pattern in json.loads(patterns[1]) for path in tasks_path().glob(pattern)}
        there = {path for path in tasks_path().rglob("*") if path.is_file() and not path.suffix.startswith(".py")}
        assert packed == there

    @pytest.mark.parametrize("path", sorted(tasks_path().glob("*.yaml")), ids=lambda path: path.stem)
    def test_a_task_has_the_name_of_its_file_and_documents(self, path):
        task = yaml.load(path.read_text(encoding="utf-8"), Loader)
        module, function = task["custom_dataset"].split(".")
        assert (task["task"], module, task["tag"]) == (path.stem, "documents", "kvtransfer")
        assert len(getattr(documents, function)()[task["test_split"]]) >= 100

    @pytest.mark.parametrize(("name", "origin"), [("stories.jsonl", "questions.jsonl"), ("text.txt", "text_test.txt")])
    def test_the_data_is_the_held_out_data_of_the_family(self, family, name, origin):
        assert (tasks_path() / "data" / name).read_bytes() == (family / "data" / origin).read_bytes()


class TestDocuments:
    def test_a_missing_word_has_come_before(self):
        whole = documents.passages()["test"]["text"]
        for row in documents.cloze()["test"]:
            assert row["word"].strip() in row["context"]
            assert not row["context"].endswith(" ")
            assert any(text.startswith(row["context"] + row["word"]) for text in whole)

    def test_passages_are_the_text_in_order(self):
        text = (tasks_path() / "data" / "text.txt").read_text(encoding="utf-8")
        place = 0
        for passage in documents.passages()["test"]["text"]:
            place = text.index(passage, place) + len(passage)
            assert len(passage.split()) < 300

    def test_other_files_can_be_given(self, tmp_path):
        row = {"kind": "k", "document": "A in b.", "question": " A in", "answer": " b", "choices": [" b", " c"]}
        (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        assert documents.stories(questions=str(tmp_path / "mine.jsonl"), source="x")["test"].to_list() == [row]
        (tmp_path / "mine.txt").write_text("Again and again. " * 40, encoding="utf-8")
        assert len(documents.passages(text=str(tmp_path / "mine.txt"))["test"]) > 0

    @pytest.mark.parametrize("content", [None, "", "[]", '{"kind": 1}', "no json", b"\xff", '{"document": "d"'])
    def test_files_without_stories(self, tmp_path, content):
        path = tmp_path / "mine.jsonl"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(KVTransferError, match="No stories could be read"):
            documents.stories(questions=str(path))

    def test_an_answer_that_is_no_choice(self, tmp_path):
        row = {"kind": "k", "document": "A in b.", "question": " A in", "answer": "b", "choices": [" b", " c"]}
        (tmp_path / "mine.jsonl").write_text(json.dumps(row), encoding="utf-8")
        with pytest.raises(KVTransferError, match="the answer among them"):
            documents.stories(questions=str(tmp_path / "mine.jsonl"))

    def test_texts_without_passages(self, tmp_path):
        path = tmp_path / "mine.txt"
        with pytest.raises(KVTransferError, match="No text could be read"):
            documents.passages(text=str(path))
        path.write_text("Too short.", encoding="utf-8")
        with pytest.raises(KVTransferError, match="is too short"):
            documents.passages(text=str(path))
        path.write_text(" ".join("abcdefghijklmnopqrstuvwxyz" * 3) + ".", encoding="utf-8")
        with pytest.raises(KVTransferError, match="no passage in which a word comes again"):
            documents.cloze(text=str(path))
