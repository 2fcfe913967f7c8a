"""`hf-kvtransfer evaluate`: one command from a fitted mapper to a folder that can be published."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from hf_kvtransfer import KVMapper
from hf_kvtransfer.cli import app
from hf_kvtransfer.errors import EvidenceError
from hf_kvtransfer.evaluation import run
from hf_kvtransfer.report import TransferReport

from .conftest import FAMILY


QUESTIONS = FAMILY / "data" / "questions.jsonl"
DATA = ("--data", FAMILY / "data" / "text_test.txt")
SIZES = ("--prefix", 32, "--scored", 16, "--chunks", 2, "--questions", QUESTIONS, "--questions-per-kind", 1)
PAIR = (FAMILY / "small", FAMILY / "large")


def invoke(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


@pytest.fixture(scope="module")
def mapper(tmp_path_factory, family_model, family_tokenizer):
    """A saved mapper; it need not be good."""
    models = [family_model(name) for name in ("small", "large")]
    support = {kind: {"layers": [0, 2]} for kind in ("keys", "values")}
    made = KVMapper.for_pair(*models, tokenizer=family_tokenizer, support=[support] * 6)
    made.init_weights()
    folder = tmp_path_factory.mktemp("mapper") / "small-to-large"
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(mapper, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "small-to-large"
    shutil.copytree(mapper, folder)
    choices = folder.parent / "choices.jsonl"
    rows = [{"centerpiece": f"{n}?", "options": ["one", "two or three"], "correct_options_idx": [0]} for n in range(3)]
    choices.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = invoke(*PAIR, folder, *DATA, *SIZES, "--lengths", "16, 24", "--choices", choices, "--shots", 1, "--bench")
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_one_command_makes_a_folder_that_can_be_published(evaluated, mapper):
    folder, output = evaluated
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    figures = {name for name in names if name.endswith(".png")}
    assert names - figures == {"config.json", "model.safetensors", "README.md", "report.json", "report.md"}
    assert {"figures/retention.png", "figures/drift.png", "figures/layers.png", "figures/latency.png"} <= figures
    assert (folder / "model.safetensors").read_bytes() == (mapper / "model.safetensors").read_bytes()
    report = TransferReport.load(folder)
    assert [row["context"] for row in report.lengths] == [16, 24, 32]
    assert [row["context"] for row in report.latency] == [16, 24, 32]
    assert {one["task"].partition(":")[0] for one in report.measures} == {"text", "questions", "choices"}
    named = {"texts": "text_test.txt", "questions": "questions.jsonl", "choices": "choices.jsonl"}
    assert named.items() <= report.settings.items()
    assert str(FAMILY) not in json.dumps(report.to_dict())
    for name in ("target native", "transferred", "different document", "gap recovered", "terse", "choices, accuracy"):
        assert name in output
    assert str(report.verdict()) in output
    assert "README.md" in output


def test_the_mapper_carries_its_evidence_from_then_on(evaluated, mapper):
    loaded = KVMapper.from_pretrained(evaluated[0], min_gap_recovered=-1e9)  # five questions show little
    assert loaded.config.scores["evaluation"]["report"] == TransferReport.load(evaluated[0]).digest()
    with pytest.raises(EvidenceError):
        KVMapper.from_pretrained(evaluated[0], min_gap_recovered=0.99)
    with pytest.raises(EvidenceError, match="carries no evaluation"):
        KVMapper.from_pretrained(mapper, min_gap_recovered=0.99)


def test_another_folder_gets_a_copy_and_an_interrupted_one_goes_on(mapper, tmp_path, monkeypatch):
    arguments = (*PAIR, mapper, *DATA, *SIZES, "--no-figures", "--report", tmp_path / "out")
    asked, made = run.asked, []

    def interrupted(*given):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(given)
        return asked(*given)

    monkeypatch.setattr(run, "asked", interrupted)
    assert invoke(*arguments).exit_code == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".evaluation"]
    changed = invoke(*arguments, "--seed", 1)
    assert changed.exit_code == 1
    assert "another evaluation, which differs in seed" in changed.output
    monkeypatch.setattr(run, "asked", lambda *given: made.append(given) or asked(*given))
    resumed = invoke(*arguments)
    assert resumed.exit_code == 0, resumed.output
    assert len(made) == 5
    assert "figures" not in resumed.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md", "report.json", "report.md"}
    # Once more, of what lies there now: the same, all of it anew.
    report = TransferReport.load(tmp_path / "out")
    assert invoke(*arguments).exit_code == 0
    assert TransferReport.load(tmp_path / "out").without_times() == report.without_times()
    assert len(made) == 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("org/absent-mapper", *DATA), "org/absent-mapper"),
        (("{mapper}", "--data", "absent.txt"), "There is no file absent.txt"),
        (("{mapper}", *DATA, "--questions", "absent.jsonl"), "No questions could be read from absent.jsonl"),
        (("{mapper}", *DATA, "--choices", "absent.jsonl"), "No multiple choice could be read from absent.jsonl"),
        (("{mapper}", *DATA, "--lengths", "many"), "is not a list of whole numbers"),
        (("{mapper}", *DATA, "--prefix", "1"), "expected a whole number of at least 2"),
        (("{mapper}", *DATA, "--scored", 10**30), "expected a whole number of at least 1 and at most"),
        (("{mapper}", *DATA, "--seed", -1), "Invalid value for '--seed'"),
        (("{mapper}", *DATA, "--statistics", "absent"), "absent"),
        (("{mapper}", *DATA, "--report", "{file}"), "is a file"),
        (("{mapper}", *DATA, "--report", "{other}"), "holds another mapper than"),
    ],
)
def test_what_can_not_be_evaluated_is_refused_in_words(mapper, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    other = KVMapper.from_pretrained(mapper, min_gap_recovered=False)
    other.init_weights()
    other.layers[0].keys.bias.data += 1
    other.save_pretrained(tmp_path / "other")
    places = {"mapper": mapper, "file": tmp_path / "file", "other": tmp_path / "other"}
    before = (tmp_path / "other" / "config.json").read_bytes()
    result = invoke(*PAIR, *(str(argument).format(**places) for argument in arguments))
    assert result.exit_code in (1, 2), result.output
    assert sentence in " ".join(result.output.replace("│", " ").split())
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert (tmp_path / "other" / "config.json").read_bytes() == before


def test_a_mapper_of_the_hub_needs_a_folder_for_its_report(mapper, monkeypatch):
    load = KVMapper.from_pretrained
    monkeypatch.setattr(KVMapper, "from_pretrained", lambda name, **options: load(mapper, **options))
    result = invoke(*PAIR, "org/small-to-large", *DATA)
    assert result.exit_code == 1
    assert "say with --report where" in result.output
