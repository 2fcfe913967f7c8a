"""The quality benchmark, on few documents: what it reports is what the package's own measures say."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks import quality, summary
from benchmarks.measuring import measure
from benchmarks.pairs import tiny
from benchmarks.recipes import Way, costs
from hf_kvtransfer import KVMapper
from hf_kvtransfer.costs import conversion_flops


ANCHORED = "auto, 1 anchor layer"
NAMES = ("heo2026", "cachebridge2026", "auto", "auto, last 16 exact", ANCHORED)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    pair = tiny("small", "large", small=True)
    ways = [way for way in pair.ways if way.name in NAMES]
    ways.append(
        Way("trained", "trained", of="auto", trained={"form": "linear", "max_steps": 2, "rows": 16, "kl_weight": 1.0})
    )
    sums = replace(pair.sums["all"], tokens=64, sequences=40, selection=8, sample_tokens=256)
    pair = replace(pair, ways=tuple(ways), questions=pair.questions[::3], sums={"all": sums})
    lines = []
    found = measure(pair, tmp_path_factory.mktemp("bench"), say=lines.append)
    assert any("statistics" in line for line in lines)
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def figures(raw):
    return summary.summary(raw, samples=200)


def test_every_condition_and_control_is_measured(raw, figures):
    names = {
        "source alone",
        "target native",
        "no context",
        "source cache raw",
        "random mapper",
        "different document",
        *NAMES,
        "trained",
    }
    assert set(figures["figures"]) == names
    for values in raw["readings"]["128 + 128"].values():
        assert len(values["nll"]) == len(values["kl"]) == 3
    assert len(figures["against_published"]) == 2 * 6


def test_native_keeps_all_and_no_context_nothing(figures):
    shares = {name: one["text 128 + 128, NLL, kept"][0] for name, one in figures["figures"].items()}
    assert shares["target native"] == 1
    assert shares["no context"] == 0
    assert shares[ANCHORED] > shares["auto"]
    gaps = {name: one["text 128 + 128, NLL, gap"][0] for name, one in figures["figures"].items()}
    assert gaps["target native"] == 1
    assert gaps["source alone"] == 0


def test_a_recipe_that_takes_the_maps_of_another_changes_what_is_read_natively_alone(raw):
    one, other = raw["recipes"]["auto"], raw["recipes"]["auto, last 16 exact"]
    assert one["parameters"] == other["parameters"]
    assert (one["exact_suffix"], other["exact_suffix"]) == (0, 16)
    assert one["cost"]["here"] < other["cost"]["here"]
    texts = raw["readings"]["128 + 128"]
    assert texts["auto, last 16 exact"]["kl"] < texts["auto"]["kl"]


def test_costs_at_large_shapes_keep_numbers_or_shares(family_model, family_tokenizer):
    source, target = family_model("small"), family_model("large")
    mapper = KVMapper.for_pair(source, target, tokenizer=family_tokenizer, support=[[0, 1]] * 6)
    found = costs(mapper.config, 256)
    assert found["here"] == conversion_flops(mapper.config, 256).share_of_prefill
    # Two of Qwen3-14B's forty layers, or twenty.
    assert found["large_same_share"] == pytest.approx(10 * found["large_same_number"])


def test_tables_show_every_recipe_and_the_bars(figures):
    text = summary.tables(figures) + summary.cost_table([figures]) + summary.bar_table([figures])
    for name in (*NAMES, "trained", "target native", "different document"):
        assert f"| {name} |" in text
    assert "nan" not in text
    promises = summary.bars([figures])
    assert len(promises) == 3  # one of the two recipes with a promise was left out
    assert all(isinstance(met, bool) for _, _, met in promises)


def test_the_picture_is_the_same_every_time(figures, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.figure import draw

    for name in ("one.svg", "two.svg"):
        draw([figures], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert math.isfinite((tmp_path / "one.svg").stat().st_size)


def test_a_finished_pair_is_not_measured_again(raw, tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny-small-large.json").write_text(json.dumps(raw), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["quality", "--pairs", "tiny-small-large", "--out", str(tmp_path)])
    quality.main()
    text = capsys.readouterr().out
    assert "--again measures it again" in text
    assert "Promised" in text
    assert (tmp_path / "quality.md").read_text(encoding="utf-8") in text
