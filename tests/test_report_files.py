"""A report's Markdown and figures: from the same figures the same bytes, and nothing for what wasn't measured."""

import builtins
import re

import pytest

from hf_kvtransfer.errors import KVTransferError, MapperFileError
from hf_kvtransfer.report import FIGURES_FOLDER, MARKDOWN_FILE, REPORT_FILE, TransferReport, measure, write_report
from hf_kvtransfer.report.figures import FIGURES, draw_figures
from hf_kvtransfer.report.wording import CAPTIONS, shown, with_interval

from .test_report import answered, sample


BOTH = ("transferred", "target native")
EMPTY = {
    "fidelity": None,
    "measures": [],
    "drift": None,
    "lengths": [],
    "layers_r2": None,
    "latency": None,
}
SECTIONS = {
    "measures": {"retention", "kept"},
    "fidelity": {"layers"},
    "layers_r2": {"source_layers"},
    "drift": {"drift"},
    "lengths": {"drift"},
    "latency": {"latency"},
}


def tables(text):
    """The tables of a Markdown text, as lists of rows of cells."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block] for block in blocks]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, write_report(sample(), folder)


def test_everything_is_written_and_linked(written):
    folder, paths = written
    assert all(path.is_file() for path in paths)
    assert [path.name for path in paths] == [REPORT_FILE, MARKDOWN_FILE, *(f"{name}.png" for name in FIGURES)]
    assert {path for path in folder.rglob("*") if path.is_file()} == set(paths)
    links = re.findall(r"!\[(.+)\]\((.+)\)", (folder / MARKDOWN_FILE).read_text(encoding="utf-8"))
    assert links == [(CAPTIONS[name], f"{FIGURES_FOLDER}/{name}.png") for name in FIGURES]


def test_the_same_report_gives_the_same_bytes_whatever_the_users_style_is(written, tmp_path):
    import matplotlib

    folder, paths = written
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 30, "image.cmap": "jet"}):
        again = write_report(TransferReport.load(folder), tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_drawing_leaves_the_users_style_alone(tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 20}):
        draw_figures(sample(**{**EMPTY, "fidelity": sample().fidelity}), tmp_path)
        assert matplotlib.rcParams["font.size"] == 20


def test_figures_carry_no_times_and_no_software(written):
    for path in written[1][2:]:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert not [chunk for chunk in (b"tEXt", b"iTXt", b"tIME") if chunk in content]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_missing_section_gives_no_figure(section, tmp_path):
    only = sample(**{name: value for name, value in EMPTY.items() if name != section})
    assert {path.stem for path in draw_figures(only, tmp_path)} == SECTIONS[section]


def test_a_figure_of_an_older_report_does_not_stay(tmp_path):
    draw_figures(sample(**{**EMPTY, "fidelity": sample().fidelity}), tmp_path)
    (tmp_path / FIGURES_FOLDER / "mine.png").write_bytes(b"")
    assert draw_figures(sample(**EMPTY), tmp_path) == []
    assert [path.name for path in (tmp_path / FIGURES_FOLDER).iterdir()] == ["mine.png"]


@pytest.mark.parametrize(
    "sections",
    [
        {"fidelity": {**sample().fidelity, "r2": {"keys": [[None]], "values": [[]]}, "cosine": []}},
        {"layers_r2": {"keys": [[None]], "values": [[-3.0]]}},
        {"layers_r2": {"keys": [[0.5, 0.5], [0.5]], "values": []}},
        {"drift": {"tokens_per_bin": 16, "nll": {}, "kl": [], "agreement": []}},
        {"drift": {"tokens_per_bin": 16, "nll": {"transferred": [None, 4.0]}, "kl": [], "agreement": [None, None]}},
        {"lengths": [{"context": 64, "conditions": {}, "kl": None, "agreement": None}] * 2},
        {"latency": [{"context": 64}]},
        {"latency": [{"context": 64, "conversion": None, "spread": None, "target_prefill": 0.1}]},
        {"measures": [{**sample().measures[0], "conditions": {}, "gap_recovered": None}]},
        {"measures": [measure("q", "nll", "text", {key: [0.0] for key in BOTH}, unit="nats")]},
        {"measures": [measure("q", "m", "task", {key: [float("nan")] for key in BOTH})]},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_sections_with_holes_can_be_shown(sections, tmp_path):
    report = sample(**{**EMPTY, **sections})
    paths = write_report(report, tmp_path)
    assert all(path.is_file() for path in paths)
    assert "nan" not in report.to_markdown()


def test_without_matplotlib_the_figures_say_what_is_missing(tmp_path, monkeypatch):
    imported = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KVTransferError, match=r"hf_kvtransfer\[plots\]"):
        write_report(sample(), tmp_path, figures=True)
    monkeypatch.setattr("hf_kvtransfer.report.writing.find_spec", lambda name: None)
    assert [path.name for path in write_report(sample(), tmp_path)] == [REPORT_FILE, MARKDOWN_FILE]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / FIGURES_FOLDER).write_text("a file")
    with pytest.raises(MapperFileError, match="Nothing can be saved"):
        write_report(sample(), tmp_path)


@pytest.mark.parametrize("name", [REPORT_FILE, MARKDOWN_FILE, FIGURES_FOLDER, f"{FIGURES_FOLDER}/kept.png"])
def test_nothing_is_written_where_one_file_has_no_place(name, tmp_path):
    place = tmp_path / name
    if name == FIGURES_FOLDER:
        place.write_text("mine")
    else:
        place.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(MapperFileError, match=name):
        write_report(sample(), tmp_path)
    assert set(tmp_path.rglob("*")) == before


def test_tables_are_whole_and_show_every_condition_and_share():
    report = sample()
    text = report.to_markdown()
    for rows in tables(text):
        assert len({len(row) for row in rows}) == 1
    for one in report.measures:
        for name, figure in one["conditions"].items():
            row = f"{f'**{name}**' if name == 'transferred' else name} | {with_interval(figure, one['unit'])}"
            assert f"| {row} |" in text
        assert f"| *gap recovered* | {with_interval(one['gap_recovered'])} |" in text
    assert report.judged().headline in text
    assert all(sentence in text for sentence in report.judged().sentences)


def test_text_of_others_breaks_no_table_and_no_figure(tmp_path):
    hostile = "a|b\n| c <script> `d` $\\x$ \\"
    values = answered({hostile: 0.5, "target native": 1.0, "transferred": 1.0, "source alone": 0.5})
    report = sample(
        pair={"source": hostile, "target": "b"},
        settings={"data": hostile, "more": {"path": hostile}},
        measures=[measure(hostile, hostile, "look-up", values, samples=50)],
    )
    text = report.to_markdown()
    assert "<script>" not in re.sub("`[^`]*`", "", text)
    for rows in tables(text):
        assert len({len(row) for row in rows}) == 1
    assert text.count("\n# ") + text.startswith("# ") == 1
    assert write_report(report, tmp_path)


def test_names_that_are_no_utf8_are_written(tmp_path):
    write_report(sample(settings={"data": "caf\udce9.txt"}), tmp_path, figures=False)
    assert TransferReport.load(tmp_path).settings == {"data": "caf\udce9.txt"}


def test_what_is_not_shown_is_a_dash():
    assert with_interval({"value": -19.0, "low": None, "high": None}) == "–"
    assert with_interval(None) == shown(None) == "–"
    assert shown(-1e-9) == "0.0 %"
    assert shown(-0.5) == "−50.0 %"


def test_limits_say_what_was_not_measured():
    text = sample(measures=sample().measures[1:]).to_markdown()
    assert "No look-up into a context was measured" in text
    assert "No context longer than 1,024 tokens was measured" in text
    few = measure("q", "accuracy", "look-up", answered({"target native": 1.0, "transferred": 1.0}, n=8), samples=50)
    assert "only 8 questions" in sample(measures=[few]).to_markdown()
