"""A model and itself: the one pair whose right answer is known."""

import json

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.evaluation import prefill


@pytest.fixture(scope="module")
def documents(family):
    lines = (family / "data" / "questions.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["document"] for line in lines))


@torch.no_grad()
def next_logits(model, ids, cache=None):
    keywords = {} if cache is None else {cache_keyword(model): cache}
    return model(input_ids=ids, **keywords).logits[:, -1]


def test_the_identity_gives_logits_within_rounding(family_model, family_tokenizer, documents):
    model = family_model("small")
    mapper = KVMapper.for_pair(model, model, tokenizer=family_tokenizer).set_as_identity()
    for document in documents[:20]:
        ids = family_tokenizer(document, return_tensors="pt").input_ids
        cache = mapper.convert(prefill(model, ids), tokenizer=family_tokenizer, source=model, target=model)
        torch.testing.assert_close(
            next_logits(model, ids[:, -1:], cache), next_logits(model, ids), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("preset", ["heo2026", "auto"])
def test_a_fitted_self_mapper_gives_the_same_next_tokens_on_100_prompts(
    family, family_model, family_tokenizer, documents, preset
):
    model = family_model("small")
    mapper = KVMapper.fit(
        model,
        model,
        str(family / "data" / "calibration.jsonl"),
        tokenizer=family_tokenizer,
        preset=preset,
        k=1 if preset == "heo2026" else None,
        sequence_length=128,
        num_sequences=120,
        token_stride=2,
    )
    if preset == "heo2026":
        assert mapper.config.support == [[index] for index in range(model.config.num_hidden_layers)]
    assert mapper.config.scores["r2"]["heldout"]["keys_mean"] > 0.9999
    assert len(documents) >= 100
    for document in documents[:100]:
        inputs = family_tokenizer(document, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        cache = mapper.convert(prefill(model, inputs.input_ids))
        keyword = {cache_keyword(model.generate): cache}
        own = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert torch.equal(own, model.generate(**inputs, max_new_tokens=4, do_sample=False, **keyword)), document


def test_a_fit_does_not_depend_on_positions(family, family_model, family_tokenizer):
    """Fitted at positions 0–127, scored at 0–127 and at 4,000–4,127: held-out R² within 0.01."""
    source, target = family_model("small"), family_model("large")
    mapper = KVMapper.fit(
        source,
        target,
        str(family / "data" / "calibration.jsonl"),
        tokenizer=family_tokenizer,
        k="all",
        sequence_length=128,
        num_sequences=120,
        token_stride=2,
    )
    text = (family / "data" / "text_test.txt").read_text()
    ids = family_tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : 24 * 128].view(24, 128)
    scores = {shift: _r2(mapper, source, target, ids, shift) for shift in (0, 4000)}
    print(f"\nheld-out R² (keys, values) at positions 0–127: {scores[0]}, at 4,000–4,127: {scores[4000]}")
    assert min(scores[0]) > 0.3  # prose of books that neither model nor mapper has seen
    assert scores[4000] == pytest.approx(scores[0], abs=0.01)


@torch.no_grad()
def _r2(mapper, source, target, ids, shift):
    """R² of content keys and of values over all layers, on caches whose positions start at `shift`."""
    positions = torch.arange(shift, shift + ids.shape[1])[None]
    caches = []
    for model in (source, target):
        caches.append(cache := DynamicCache())
        model.model(input_ids=ids, position_ids=positions, use_cache=True, **{cache_keyword(model.model): cache})
    converted = mapper.convert(caches[0], position_ids=positions, hold_back=0)
    codec = mapper.codec("target")
    tables = codec.tables(positions, ids.device)
    scores = []
    for kind in ("keys", "values"):
        error = total = 0.0
        for index, (mine, native) in enumerate(zip(converted.layers, caches[1].layers, strict=True)):
            predicted, actual = getattr(mine, kind), getattr(native, kind)
            if kind == "keys":
                predicted, actual = (codec.remove(keys, tables, index) for keys in (predicted, actual))
            error += float((predicted - actual).square().sum())
            total += float((actual - actual.mean(dim=(0, 2), keepdim=True)).square().sum())
        scores.append(1 - error / total)
    return scores
