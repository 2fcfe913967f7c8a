"""A report holds what was measured, exactly, and refuses what isn't laid out as documented."""

import json
import math
import random
import typing

import numpy as np
import pytest
import torch

from hf_kvtransfer.errors import MapperFileError
from hf_kvtransfer.evaluation import Interval
from hf_kvtransfer.report import REPORT_FILE, TransferReport, measure, schema, write_report
from hf_kvtransfer.report.report import TIMES

from .conftest import ROOT


CONDITIONS = {
    "source alone": 0.8,
    "target native": 1.0,
    "transferred": 0.95,
    "source cache raw": 0.02,
    "random mapper": 0.3,
    "different document": 0.05,
    "no context": 0.0,
    "anchor alone": 0.7,
}


def answered(shares, n=120, seed=0):
    """Right and wrong answers with these shares of right ones, to within one answer."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return {name: [float(place < round(share * n)) for place in order] for name, share in shares.items()}


def texts(levels, n=40, seed=0):
    """NLL of chunks that are hard or easy for all conditions alike."""
    generator = np.random.default_rng(seed)
    hard, noise = generator.normal(0, 0.3, n), generator.normal(0, 0.004, (len(levels), n))
    return {name: list(level + hard + noise[row]) for row, (name, level) in enumerate(levels.items())}


LEVELS = {
    "source alone": 4.92,
    "target native": 4.389,
    "transferred": 4.395,
    "random mapper": 5.87,
    "different document": 4.42,
    "no context": 4.467,
    "anchor alone": 4.40,
}


def sample(**changes):
    """A report with every section, of made-up figures."""
    curve = {name: [level + 0.02 * math.exp(-place) for place in range(8)] for name, level in LEVELS.items()}
    sections = {
        "pair": {"source": "org/small", "target": "org/large", "source_revision": "0" * 40},
        "mapper": {
            "preset": "auto",
            "map_type": "linear",
            "k": 4,
            "anchor_layers": 1,
            "anchor_start": 0,
            "exact_prefix": 4,
            "exact_suffix": 0,
            "parameters": 377_600,
            "cost_share": 0.38,
            "cost_tokens": 128,
            "calibration": {"tokens": {"fit": 57_600}, "data": "calibration.jsonl"},
        },
        "settings": {"seed": 0, "data": "text_test.txt", "split": "test", "prefix": 128},
        "versions": {"hf_kvtransfer": "0.1.0", "transformers": "5.24.0"},
        "fidelity": {
            "r2": {
                "keys": [[1.0, 1.0], [0.93, 0.9], [0.88, 0.91], [0.8, 0.7]],
                "values": [[1.0, 1.0], [0.9, 0.8], [0.85, 0.8], [0.75, 0.6]],
            },
            "cosine": [[1.0] * 4, [0.99, 0.98, 0.97, 0.99], [0.96, 0.95, float("nan"), 0.97], [0.9, 0.92, 0.85, 0.95]],
            "kl": Interval(0.0023, 0.002, 0.0026),
            "agreement": Interval(0.963, 0.955, 0.97),
            "chunks": 40,
        },
        "measures": [
            measure("questions", "accuracy", "look-up", answered(CONDITIONS), chance=0.14, samples=400),
            measure(
                "stories",
                "nll",
                "text",
                texts(LEVELS),
                unit="nats per token",
                higher_is_better=False,
                samples=400,
            ),
            measure(
                "cloze",
                "accuracy",
                "task",
                answered({"source alone": 0.5, "target native": 0.7, "transferred": 0.65, "no context": 0.3}, seed=1),
                chance=0.25,
                samples=400,
            ),
        ],
        "drift": {
            "tokens_per_bin": 16,
            "nll": curve,
            "kl": [0.002 + 0.0005 * place for place in range(8)],
            "agreement": [0.97 - 0.004 * place for place in range(8)],
        },
        "lengths": [
            {
                "context": context,
                "conditions": {name: level - 0.01 * place for name, level in LEVELS.items()},
                "kl": 0.002 * (1 + place),
                "agreement": 0.97 - 0.01 * place,
            }
            for place, context in enumerate((64, 256, 1024))
        ],
        "layers_r2": {
            "keys": [[0.9 - 0.15 * abs(target - source) for source in range(6)] for target in range(4)],
            "values": [[0.8 - 0.2 * abs(target - source) for source in range(6)] for target in range(4)],
        },
        "latency": [
            {
                "context": context,
                "batch_size": 1,
                "trials": 5,
                "device": "cpu",
                "dtype": "float32",
                "threads": 1,
                "source_prefill": 4e-5 * context,
                "target_prefill": 9e-5 * context,
                "conversion": 3e-5 * context + 1e-3,
                "target_first_token": 9e-5 * context + 1e-3,
                "converted_first_token": 3e-5 * context + 3e-3,
                "spread": {"target_prefill": [8e-5 * context, 1.2e-4 * context]},
                "warm_speedup": 2.5,
                "cold_speedup": 1.2,
                "first_token_speedup": 2.2,
                "conversion_floor": 1e-5 * context,
                "target_prefill_floor": 5e-5 * context,
                "conversion_peak": 1000 * context,
                "target_prefill_peak": 3000 * context,
            }
            for context in (64, 256, 1024)
        ],
        "seconds": 12.5,
        "created": "2026-01-01T00:00:00Z",
    }
    return TransferReport(**{**sections, **changes})


def test_a_report_survives_a_file_exactly(tmp_path):
    report = sample()
    assert TransferReport.from_dict(report.to_dict()) == report
    report.save(tmp_path)
    assert TransferReport.load(tmp_path) == report
    assert TransferReport.load(tmp_path / REPORT_FILE).to_dict() == report.to_dict()


def test_what_is_not_finite_is_null_in_the_file(tmp_path):
    report = sample(seconds=math.inf)
    text = report.save(tmp_path).read_text(encoding="utf-8")

    def refuse(name):
        raise ValueError(name)

    values = json.loads(text, parse_constant=refuse)
    assert values["seconds"] is None
    assert values["fidelity"]["cosine"][2] == [0.96, 0.95, None, 0.97]


def test_sections_may_be_tensors_arrays_tuples_and_intervals():
    values = ((0.5, 0.25), (0.125, 1.0))
    made = [sample(layers_r2={"keys": kind(values), "values": kind(values)}) for kind in (list, np.array, torch.tensor)]
    assert made[0] == made[1] == made[2]
    assert sample().fidelity["kl"] == {"value": 0.0023, "low": 0.002, "high": 0.0026}


def test_fields_that_may_be_null_may_be_missing():
    assert sample(pair={"source": "a", "target": "b"}).pair["target_revision"] is None
    kept = {name: value for name, value in sample().to_dict().items() if name in ("schema_version", "pair", "mapper")}
    report = TransferReport.from_dict(kept)
    assert report.measures == []
    assert report.drift is None
    assert "Not measured" in report.verdict()


def changed(values, path, new):
    """A deep copy with one field replaced, or taken out if `new` is this function."""
    values = json.loads(json.dumps(values))
    place = values
    for step in path[:-1]:
        place = place[step]
    if new is changed:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return values


WRONG = [
    (("schema_version",), 2, "schema_version"),
    (("schema_version",), True, "schema_version"),
    (("schema_version",), changed, "schema_version"),
    (("pair",), changed, "pair"),
    (("pair",), [], "pair"),
    (("pair", "source"), 3, "pair.source"),
    (("pair", "extra"), 3, "pair.extra"),
    (("extra",), 3, "extra"),
    (("mapper", "k"), 2.5, "mapper.k"),
    (("mapper", "k"), True, "mapper.k"),
    (("mapper", "anchor_start"), None, "mapper.anchor_start"),
    (("versions", "torch"), 2, "versions.torch"),
    (("fidelity", "r2", "keys", 1), 0.5, "fidelity.r2.keys[1]"),
    (("fidelity", "r2", "keys", 1, 0), "high", "fidelity.r2.keys[1][0]"),
    (("fidelity", "kl", "low"), [], "fidelity.kl.low"),
    (("measures", 1, "kind"), "texts", "measures[1].kind"),
    (("measures", 1, "kind"), [], "measures[1].kind"),
    (("measures", 0, "n"), 0, "measures[0].n"),
    (("measures", 0, "higher_is_better"), 1, "measures[0].higher_is_better"),
    (("measures", 0, "conditions", "transferred"), 0.5, "measures[0].conditions.transferred"),
    (("measures", 0, "conditions"), changed, "measures[0].conditions"),
    (("measures", 0, "gap_recovered", "value"), "1", "measures[0].gap_recovered.value"),
    (("drift", "tokens_per_bin"), 0, "drift.tokens_per_bin"),
    (("drift", "nll", "transferred"), {}, "drift.nll.transferred"),
    (("drift", "nll", "transferred"), [4.0], "drift.nll.transferred"),
    (("drift", "kl"), [0.1], "drift.kl"),
    (("lengths", 2, "context"), "64", "lengths[2].context"),
    (("latency", 0, "context"), None, "latency[0].context"),
    (("latency", 0, "context"), 0, "latency[0].context"),
    (("latency", 0, "conversion"), "1", "latency[0].conversion"),
    (("latency", 0, "spread"), [1, 2], "latency[0].spread"),
    (("latency", 0, "spread"), {"conversion": [1]}, "latency[0].spread.conversion"),
    (("latency", 0, "device"), 3, "latency[0].device"),
    (("lengths", 2, "context"), 0, "lengths[2].context"),
    (("fidelity", "chunks"), 0, "fidelity.chunks"),
    (("fidelity", "kl", "low"), 5.0, "fidelity.kl.low"),
    (("fidelity", "kl", "high"), 10**400, "fidelity.kl.high"),
    (("measures", 0, "n"), 10**400, "measures[0].n"),
    (("settings", "seed"), 10**400, "settings.seed"),
    (("seconds",), "12", "seconds"),
    (("created",), 12, "created"),
]


@pytest.mark.parametrize(("path", "new", "where"), WRONG, ids=[f"{w[2]}-{i}" for i, w in enumerate(WRONG)])
def test_a_wrong_field_is_refused_by_name(path, new, where, tmp_path):
    values = changed(sample().to_dict(), path, new)
    with pytest.raises(MapperFileError, match=where.replace("[", r"\[").replace(".", r"\.")):
        TransferReport.from_dict(values)
    (tmp_path / REPORT_FILE).write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(MapperFileError):
        TransferReport.load(tmp_path)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, [b"bytes"]])
def test_what_json_cannot_hold_is_refused_before_it_is_saved(value, tmp_path):
    report = sample()
    report.settings["odd"] = value
    with pytest.raises(MapperFileError, match=r"settings\.odd"):
        report.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_nested_too_deep_or_too_large_to_be_written_is_refused():
    report, deep = sample(), []
    for _ in range(10_000):
        deep = [deep]
    for value, field in ((deep, "settings"), (10**5000, r"settings\.odd")):
        report.settings["odd"] = value
        with pytest.raises(MapperFileError, match=f"`{field}` of this report"):
            report.to_dict()


def test_a_name_that_stands_twice_is_refused(tmp_path):
    text = json.dumps(sample().to_dict()).replace('"unit": "share"', '"unit": "share", "unit": "share"', 1)
    (tmp_path / REPORT_FILE).write_text(text)
    with pytest.raises(MapperFileError, match="'unit' stands twice"):
        TransferReport.load(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_report_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / REPORT_FILE).write_bytes(content)
    with pytest.raises(MapperFileError, match=r"report"):
        TransferReport.load(tmp_path)


def test_an_interrupted_save_leaves_the_old_report_and_nothing_else(tmp_path, monkeypatch):
    sample().save(tmp_path)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        sample(seconds=99.0).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [REPORT_FILE]
    assert TransferReport.load(tmp_path) == sample()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(MapperFileError, match="Nothing can be saved"):
        sample().save(tmp_path / "file")


def test_two_reports_of_the_same_inputs_differ_in_times_alone(tmp_path):
    later = {"seconds": 99.0, "created": "2027-02-02T00:00:00Z", "latency": None}
    first, second = sample(), sample(**later)
    assert set(later) == set(TIMES)
    assert first != second
    assert first.without_times() == second.without_times()
    assert first.digest() == second.digest()
    assert sample(settings={"seed": 1}).digest() != first.digest()
    for name, report in (("first", first), ("again", sample())):
        write_report(report, tmp_path / name, figures=False)
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_report_is_not_changed_by_what_is_done_to_its_copy():
    report = sample()
    report.to_dict()["measures"].clear()
    assert len(report.measures) == 3


def fields(kind, where=""):
    """Every field of a section, as a path."""
    for name, of in typing.get_type_hints(kind).items():
        yield f"{where}{name}"
        inside = [one for one in typing.get_args(of) or (of,) if typing.is_typeddict(one)]
        if inside and inside[0] is not schema.Figure:
            yield from fields(inside[0], f"{where}{name}.")


@pytest.mark.parametrize("field", list(fields(TransferReport)))
def test_every_field_is_documented(field):
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    described = [line for line in page.split("## The JSON")[1].splitlines() if line.startswith("| ")]
    assert any(f"`{field}`" in line for line in described), field
