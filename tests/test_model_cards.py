"""`model_cards/`: what its scripts write, commands that exist, and cards of what was measured."""

import importlib.util
import json
import re
import shlex
import shutil

import pytest
import typer
from huggingface_hub import ModelCard

from hf_kvtransfer import EvidenceError, KVMapper
from hf_kvtransfer._compat import TRANSFORMERS_VERSION
from hf_kvtransfer.cli import app
from hf_kvtransfer.report import TransferReport

from .conftest import ROOT


CARDS = ROOT / "model_cards"
RECIPES = sorted((CARDS / "recipes").glob("*.md"))
PAIRS = json.loads((CARDS / "pairs.json").read_text(encoding="utf-8"))["pairs"]


def load_script(name):
    """A script of `scripts/` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


MADE = load_script("build_model_cards")
FOLDERS = sorted(path.parent.name for path in CARDS.glob("*/report.json"))


@pytest.fixture(scope="module")
def written():
    """What the script would write, by path."""
    return load_script("build_recipe_cards").recipe_cards()


def test_there_is_one_for_each_pair_of_the_paper():
    assert [path.stem for path in RECIPES] == sorted(pair["name"] for pair in PAIRS)
    assert len(PAIRS) == 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_committed_card_is_what_the_script_writes(path, written):
    assert path.read_text(encoding="utf-8") == written[path]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["name"])
def test_the_size_that_is_counted_is_the_published_one(pair, written):
    published = rf"\| as published: .*? \| {re.escape(pair['published']['parameters'])} \|"
    assert re.search(published, written[CARDS / "recipes" / f"{pair['name']}.md"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_command_can_be_typed(path):
    commands = typer.main.get_command(app).commands
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert [line.split()[1] for line in lines] == ["check", "fit", "fit", "evaluate", "push"]
    for line in lines:
        program, name, *arguments = shlex.split(line)
        assert program == "hf-kvtransfer"
        commands[name].make_context(name, arguments)  # what can't be parsed raises


def test_every_folder_has_its_recipe_and_its_line_in_the_overview():
    linked = re.findall(r"\]\(([^)/]*)/README\.md\)", (CARDS / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == FOLDERS
    assert set(FOLDERS) <= set(MADE.PAIRS)
    assert {"tiny-small-to-large", "tiny-large-to-small"} <= set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
class TestCompleteFolders:
    def test_card_and_report_say_what_was_measured(self, name, tmp_path):
        copy = shutil.copytree(CARDS / name, tmp_path / name)
        MADE.write_words(name, copy)
        for file in ("README.md", "report.md"):
            same = (copy / file).read_bytes() == (CARDS / name / file).read_bytes()
            assert same, f"{name}/{file} is not up to date: run `python scripts/build_model_cards.py --cards-only`."

    def test_it_is_complete(self, name):
        card = ModelCard.load(CARDS / name / "README.md")
        report = TransferReport.load(CARDS / name)
        figures = re.findall(r"\]\((figures/.*?)\)", card.text)
        assert len(figures) >= 5
        assert all((CARDS / name / figure).stat().st_size > 10_000 for figure in figures)
        for condition in ("target native", "source alone", "random mapper", "different document", "no context"):
            assert all(condition in measure["conditions"] for measure in report.measures)
        assert {measure["kind"] for measure in report.measures} == {"look-up", "text"}
        assert len(card.data.eval_results) > 10
        assert sum(path.stat().st_size for path in (CARDS / name).rglob("*")) < 4 * 2**20

    def test_it_shows_no_path_of_the_machine_that_made_it(self, name):
        for path in (CARDS / name).rglob("*.[mj][ds]*"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|Users)/", text), path


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in FOLDERS if name.startswith("tiny")])
def test_the_snippet_runs_as_pasted_in_a_clone(name, monkeypatch, allow_deprecated, capsys):
    monkeypatch.chdir(ROOT)
    if TRANSFORMERS_VERSION >= (5, 24):
        allow_deprecated("past_key_values")
    names = {}
    card = (CARDS / name / "README.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert "Where is the kettle? In the garden" in capsys.readouterr().out


def test_the_gate_lets_through_what_was_shown_to_keep_enough():
    KVMapper.from_pretrained(CARDS / "tiny-small-to-large", min_gap_recovered=0.9)
    with pytest.raises(EvidenceError, match="has no gap recovered"):  # the large model needs no help from the small one
        KVMapper.from_pretrained(CARDS / "tiny-large-to-small", min_gap_recovered=0.1)
