"""The pages in `docs/` say of every refusal and every architecture what the code says."""

import re
import subprocess
import sys

import pytest
import transformers
from packaging.version import Version

from .conftest import ROOT
from .refusals import error_types, raised


TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall("“(.+?)”", TROUBLESHOOTING)


def fits(quote, sentence):
    """Whether a quotation is from a sentence; `…` stands for anything in between."""
    return re.search(".*?".join(map(re.escape, re.split("…", quote))), sentence, re.DOTALL) is not None


@pytest.mark.parametrize(("kind", "sentence", "place"), raised(), ids=[place for _, _, place in raised()])
def test_every_refusal_is_explained(kind, sentence, place):
    section = next(part for part in TROUBLESHOOTING.split("\n## ") if f"`{kind}`" in part.splitlines()[0])
    assert any(fits(quote, sentence) for quote in re.findall("“(.+?)”", section)), f"{place}: {sentence}"


@pytest.mark.parametrize("quote", QUOTES)
def test_nothing_is_explained_that_is_not_refused(quote):
    assert any(fits(quote, sentence) for _, sentence, _ in raised()), quote


def test_every_type_of_error_has_its_section():
    assert not [kind for kind in error_types() if f"`{kind}`" not in TROUBLESHOOTING]


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="written on the newest release")
def test_the_support_table_is_up_to_date():
    script = ROOT / "scripts" / "support_table.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
