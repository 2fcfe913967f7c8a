"""Laws of the `evaluate` metrics: the figures of the package's own evaluation, however added, and no network."""

import copy
import json
import math
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import evaluate
import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from hf_kvtransfer import KVMapper, KVTransferError
from hf_kvtransfer.calibration.attention import (
    attention_output,
    attention_probabilities,
    boundaries,
    record_queries,
)
from hf_kvtransfer.evaluation import bootstrap, continuation_logits, divergence, measure_fidelity, prefill
from hf_kvtransfer.metrics import KVFidelity, KVRetention
from hf_kvtransfer.report import measure
from hf_kvtransfer.rope import RotaryCodec
from hf_kvtransfer.training import TokenRows

from .conftest import FAMILY, ROOT


PREFIX, SCORED, CHUNKS = 48, 16, 3
NOWHERE = "/dev/null/nowhere"
VALUES = {
    "transferred": [0.9, 0.4, 0.7, 0.8, 0.6, 0.9],
    "target native": [1.0, 0.5, 0.9, 0.8, 0.8, 0.9],
    "source alone": [0.3, 0.5, 0.2, 0.7, 0.1, 0.4],
    "no context": [0.2, 0.2, 0.3, 0.1, 0.2, 0.4],
    "different document": [0.2, 0.1, 0.4, 0.2, 0.2, 0.3],
}
COLUMNS = {name.replace(" ", "_"): values for name, values in VALUES.items()}


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch):
    def connect(*args):
        raise AssertionError(f"connects to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(scope="module")
def pair(family_model):
    """Copies, since the trainer freezes its models."""
    return tuple(copy.deepcopy(family_model(name)) for name in ("small", "large"))


@pytest.fixture(scope="module")
def mapper(pair, family_tokenizer):
    with open(FAMILY / "data" / "calibration.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(60), strict=False)]
    return KVMapper.fit(
        *pair, texts, tokenizer=family_tokenizer, preset="heo2026", k=2, sequence_length=64, num_sequences=24
    )


@pytest.fixture(scope="module")
def text():
    return (FAMILY / "data" / "text_test.txt").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def ids(text, family_tokenizer):
    tokens = family_tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return tokens[:, : CHUNKS * (PREFIX + SCORED)].view(CHUNKS, PREFIX + SCORED)


@pytest.fixture(scope="module")
def measured(pair, mapper, text, family_tokenizer):
    source, target = pair
    sizes = {"prefix": PREFIX, "scored": SCORED, "max_chunks": CHUNKS, "progress": False}
    return measure_fidelity(
        lambda tokens: mapper.convert(prefill(source, tokens), hold_back=0), target, text, family_tokenizer, **sizes
    )


def filled(metric, predictions, references):
    for prediction, reference in zip(predictions, references, strict=True):
        metric.add(prediction=prediction, reference=reference)
    return metric.compute()


@torch.no_grad()
def test_entries_and_attention_outputs_have_the_fidelity_that_is_measured(measured, pair, mapper, ids):
    source, target = pair
    with record_queries(target, positions=boundaries(PREFIX, 32)) as records:
        native = prefill(target, ids[:, :PREFIX])
    made = mapper.convert(prefill(source, ids[:, :PREFIX]), hold_back=0)
    codec = RotaryCodec.from_model(target)
    tables = codec.tables(torch.arange(PREFIX)[None])
    for index, (own, other) in enumerate(zip(native.layers, made.layers, strict=True)):
        keys = [codec.remove(layer.keys, tables, index) for layer in (other, own)]
        for pairs, pooled, heads in (
            (keys, measured.r2_keys, measured.r2_keys_by_head),
            ((other.values, own.values), measured.r2_values, measured.r2_values_by_head),
        ):
            found = filled(KVFidelity(by_head=True), *pairs)
            assert found["r2"] == pytest.approx(pooled[index], abs=1e-6)
            assert found["r2_by_head"] == pytest.approx(heads[index], abs=1e-6)
        outputs = [
            attention_output(attention_probabilities(records[index], layer.keys, before=True), layer.values)
            for layer in (other, own)
        ]
        found = filled(KVFidelity(by_head=True), *outputs)
        assert found["cosine_by_head"] == pytest.approx(measured.cosine[index], abs=1e-6)
        assert found["cosine"] == pytest.approx(float(np.mean(measured.cosine[index])), abs=1e-6)


@torch.no_grad()
def test_logits_have_the_divergence_that_is_measured(measured, pair, mapper, ids):
    source, target = pair
    context, rest = ids[:, :PREFIX], ids[:, PREFIX:]
    made = continuation_logits(target, rest, mapper.convert(prefill(source, context), hold_back=0), scored=SCORED)
    native = continuation_logits(target, rest, prefill(target, context), scored=SCORED)
    found = filled(KVFidelity("logits"), made, native)
    kl, agreement = divergence(native, made)
    assert found == pytest.approx({"kl": float(kl.mean()), "agreement": float(agreement.mean())}, abs=1e-6)
    assert found == pytest.approx({name: measured.means()[name] for name in found}, abs=1e-5)
    assert found["kl"] > 0.01


def test_figures_are_the_same_however_documents_are_added():
    references = torch.randn(4, 2, 5, 3)
    predictions = references + 0.3 * torch.randn_like(references)
    metric = KVFidelity(by_head=True)
    whole = metric.compute(predictions=predictions, references=references)
    assert filled(metric, predictions, references) == whole
    assert metric.compute(predictions=predictions.numpy(), references=references.numpy()) == whole
    assert metric.compute(predictions=predictions.tolist(), references=references.tolist()) == whole
    metric.add_batch(predictions=predictions[:3], references=references[:3])
    assert metric.compute(predictions=predictions[3:], references=references[3:]) == whole
    cut = [[states[0][:, :2], states[1]] for states in (predictions, references)]
    joined = [torch.cat(states, dim=1)[None] for states in cut]
    pooled = KVFidelity()
    one = pooled.compute(predictions=joined[0], references=joined[1])
    assert pooled.compute(predictions=cut[0], references=cut[1]) == pytest.approx(one)
    half = metric.compute(predictions=references.bfloat16(), references=references.bfloat16())
    assert (half["r2"], half["cosine"]) == pytest.approx((1, 1))


@pytest.mark.parametrize("documents", [None, ["a", "a", "b", "b", "c", "d"]])
@pytest.mark.parametrize(("higher_is_better", "chance"), [(True, 0.25), (True, None), (False, None)])
def test_retention_is_what_a_report_says(higher_is_better, chance, documents):
    values = VALUES if higher_is_better else {name: [-value for value in column] for name, column in VALUES.items()}
    columns = {name.replace(" ", "_"): column for name, column in values.items()}
    columns |= {"document": documents} if documents else {}
    options = {"higher_is_better": higher_is_better, "chance": chance}
    metric = KVRetention(**options)
    found = metric.compute(**columns)
    expected = measure("documents", "value", "task", values, documents=documents, **options)
    figures = {name.replace(" ", "_"): figure for name, figure in expected["conditions"].items()}
    shares = ("gap_recovered", "context_value_kept", "content_kept", "normalised_retention")
    figures |= {name: expected[name] for name in shares if expected[name] is not None}
    if higher_is_better:
        drawn = bootstrap(values, lambda mean: mean["transferred"] / mean["target native"], documents=documents)
        figures["retention"] = {"value": drawn.point, "low": drawn.low, "high": drawn.high}
    flat = {
        name if part == "value" else f"{name}_{part}": math.nan if number is None else number
        for name, figure in figures.items()
        for part, number in figure.items()
    }
    assert found == pytest.approx(flat, nan_ok=True, abs=0, rel=0)
    assert ("normalised_retention" in found) == (chance is not None)
    for index in range(len(VALUES["transferred"])):
        metric.add(**{name: column[index] for name, column in columns.items()})
    assert metric.compute() == pytest.approx(found, nan_ok=True, abs=0, rel=0)


def test_a_target_no_better_than_the_source_leaves_no_gap_to_recover():
    found = KVRetention().compute(transferred=torch.ones(3), target_native=np.ones(3), source_alone=[True] * 3)
    assert math.isnan(found["gap_recovered"])
    assert math.isnan(found["gap_recovered_low"])
    assert found["retention"] == 1.0


def test_nothing_is_written_where_nothing_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert KVRetention(cache_dir=NOWHERE).compute(**COLUMNS) == KVRetention(cache_dir=str(tmp_path)).compute(**COLUMNS)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="nowhere"):
        KVRetention(cache_dir=NOWHERE, keep_in_memory=False)


def test_two_processes_compute_what_one_does(tmp_path):
    """Each with its own metric and its own locks; here on two threads, which needs no second import."""

    def compute(process):
        metric = KVRetention(
            num_process=2, process_id=process, experiment_id="two", cache_dir=str(tmp_path), timeout=60
        )
        return metric.compute(**{name: values[3 * process :][:3] for name, values in COLUMNS.items()})

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compute, range(2))) == [KVRetention().compute(**COLUMNS), None]


def test_each_metric_of_a_combination_takes_its_own():
    logits = torch.randn(2, 6, 4, 9)
    parts = [KVFidelity("logits"), KVRetention(columns=list(COLUMNS))]
    separate = parts[0].compute(predictions=logits[0], references=logits[1]) | parts[1].compute(**COLUMNS)
    combined = evaluate.combine(parts)
    assert combined.compute(predictions=logits[0], references=logits[1], **COLUMNS) == separate
    combined.add_batch(predictions=logits[0], references=logits[1], **COLUMNS)
    assert combined.compute() == separate
    for index in range(6):
        own = {name: values[index] for name, values in COLUMNS.items()}
        combined.add(prediction=logits[0, index], reference=logits[1, index], **own)
    assert combined.compute() == pytest.approx(separate)
    pairs = evaluate.combine({"keys": KVFidelity(), "values": KVFidelity()}, force_prefix=True)
    assert set(pairs.compute(predictions=logits[0], references=logits[1])) == {
        "keys_r2",
        "keys_cosine",
        "values_r2",
        "values_cosine",
    }


def test_what_a_trainer_gives_is_taken():
    found = EvalPrediction(predictions=np.random.randn(3, 4, 9), label_ids=np.random.randn(3, 4, 9))
    figures = KVFidelity("logits").compute(predictions=found.predictions, references=found.label_ids)
    kl, _ = divergence(torch.from_numpy(found.label_ids), torch.from_numpy(found.predictions))
    assert figures["kl"] == pytest.approx(float(kl.mean()))


def test_the_examples_of_the_page_run(pair, mapper, ids, family_tokenizer, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = re.findall("```python\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    rows = TokenRows([text], family_tokenizer, sequence_length=64, num_sequences=2)
    results = []
    for example in examples:
        names = {"source": pair[0], "target": pair[1], "mapper": mapper, "ids": ids, "rows": rows}
        exec(compile(example, "docs/metrics.md", "exec"), names)
        results.append(capsys.readouterr().out)
        if "figures" in names:
            assert math.isfinite(names["figures"]["context_value_kept"])
            assert names["figures"]["no_context"] > names["figures"]["target_native"]
    assert "eval_content" in results[1]
    assert "eval_kl" in results[1]


ENTRIES = torch.ones(2, 2, 3, 4)
UNLIKE = [ENTRIES[0], ENTRIES[0, :1]]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: KVFidelity("keys?"), "is unknown; expected one of"),
        (lambda: KVFidelity(by_heads=True), "which it doesn't know"),
        (lambda: KVFidelity().compute(), "was given nothing"),
        (lambda: KVFidelity().compute(predictions=ENTRIES), "got no references"),
        (lambda: KVFidelity().compute(predictions=ENTRIES, references=ENTRIES[:1]), "2 predictions and 1 references"),
        (lambda: KVFidelity().compute(predictions=ENTRIES, references=ENTRIES[:, :, :2]), "expected one shape"),
        (lambda: KVFidelity().compute(predictions=ENTRIES[0, 0], references=ENTRIES[0, 0]), r"of shape \[4\]"),
        (lambda: KVFidelity().compute(predictions=ENTRIES / 0, references=ENTRIES), "NaN or infinite"),
        (lambda: KVFidelity().compute(predictions=["a"], references=["b"]), "that are no tensors"),
        (lambda: KVFidelity().compute(predictions=3, references=3), "that are no tensors"),
        (
            lambda: KVFidelity().compute(predictions=UNLIKE, references=UNLIKE),
            "same for all",
        ),
        (lambda: KVFidelity().compute(predictions=ENTRIES, references=ENTRIES, by_head=True), "belong to the metric"),
        (lambda: KVFidelity().compute(predictions=[], references=[]), "was given nothing"),
        (lambda: KVFidelity().compute(predictions=[[[1.0], [1.0, 2.0]]], references=[[[1.0]]]), "that are no tensors"),
        (lambda: KVRetention(chance="1/4"), "as `chance`"),
        (lambda: KVRetention(columns=["transferred"]), "got `columns`"),
        (lambda: KVRetention(columns=[*COLUMNS, "native"]), "got `columns`"),
        (lambda: KVRetention().compute(), "was given nothing"),
        (lambda: KVRetention().compute(transferred=[1.0]), "without"),
        (lambda: KVRetention().compute(native=[1.0], transferred=[1.0]), "expected its columns"),
        (lambda: KVRetention().compute(predictions=[1.0], references=[1.0]), "was given nothing"),
        (lambda: KVRetention().compute(transferred=[1.0], target_native=[1.0, 2.0]), "expected as many in each"),
        (lambda: KVRetention().compute(transferred=[1.0], target_native=[math.nan]), "expected one finite number"),
        (lambda: KVRetention().compute(transferred=[1.0], target_native=[[1.0]]), "expected one finite number"),
        (lambda: KVRetention().compute(transferred=1.0, target_native=[1.0]), "expected a list"),
        (lambda: KVRetention(samples=0).compute(**COLUMNS), "one sample or more"),
    ],
)
def test_what_does_not_fit_is_refused(call, sentence):
    with pytest.raises(KVTransferError, match=sentence):
        call()


def test_a_column_comes_with_every_batch_or_with_none_and_a_refusal_spoils_nothing():
    metric = KVRetention()
    metric.add_batch(transferred=[1.0], target_native=[1.0], source_alone=[0.0])
    metric.add_batch(transferred=[1.0], target_native=[1.0])
    with pytest.raises(KVTransferError, match="for some questions only"):
        metric.compute()
    assert metric.compute(**COLUMNS) == KVRetention().compute(**COLUMNS)
