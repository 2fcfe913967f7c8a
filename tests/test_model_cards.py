"""`model_cards/`: what its scripts write, commands that exist, and cards of what was measured."""

import importlib.util
import json
import re
import shlex

import pytest
import typer

from hf_kvtransfer.cli import app

from .conftest import ROOT


CARDS = ROOT / "model_cards"
RECIPES = sorted((CARDS / "recipes").glob("*.md"))
PAIRS = json.loads((CARDS / "pairs.json").read_text(encoding="utf-8"))["pairs"]


@pytest.fixture(scope="module")
def written():
    """What the script would write, by path."""
    spec = importlib.util.spec_from_file_location("build_recipe_cards", ROOT / "scripts" / "build_recipe_cards.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.recipe_cards()


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
