"""The whole path on real weights: SmolLM2-135M-Instruct, and the same with six of its middle layers removed."""

import pytest
import torch

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword
from hf_kvtransfer.evaluation import conditions, context_value_kept, gap_recovered, prefill, prefix_nll

from .conftest import load_example


pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]


@pytest.fixture(scope="module")
def mapper(smollm2):
    source, target, tokenizer = smollm2
    example = load_example("smollm2")
    return KVMapper.fit(
        source,
        target,
        example.calibration_texts(example.CALIBRATION),
        tokenizer=tokenizer,
        preset="heo2026",
        k=8,
        sequence_length=256,
        num_sequences=40,
        token_stride=1,
        batch_size=4,
        dtype=torch.float32,
    )


def test_the_fit_holds_out_of_sample(mapper):
    scores = mapper.config.scores["r2"]
    assert scores["fit"]["keys_mean"] > scores["heldout"]["keys_mean"] > 0.5
    assert mapper.config.geometry("source").num_layers == 24
    assert mapper.config.geometry("target").num_layers == 30


def test_the_transfer_lies_between_source_alone_and_target_native(mapper, smollm2, tmp_path):
    source, target, tokenizer = smollm2
    mapper.save_pretrained(tmp_path)
    loaded = KVMapper.from_pretrained(tmp_path)
    texts = [path.read_text(encoding="utf-8") for path in load_example("smollm2").TEST]
    results = prefix_nll(
        conditions(source, target, loaded), texts, tokenizer, prefix=128, scored=64, max_chunks=12, progress=False
    )
    nll = {name: result.mean_nll() for name, result in results.items()}
    print("\nNLL of 64 tokens after 128 tokens of context, in nats per token:")
    for name, value in nll.items():
        print(f"  {name:20s} {value:.3f}")
    native, alone, transferred = (nll[name] for name in ("target native", "source alone", "transferred"))
    print(f"  gap recovered {gap_recovered(transferred, alone, native):.0%}", end=", ")
    print(f"context value kept {context_value_kept(transferred, nll['no context'], native):.0%}")
    assert native < transferred < alone
    assert nll["different document"] > alone
    assert nll["random mapper"] > alone
    assert transferred < nll["no context"]


def test_generate_goes_on_from_the_converted_cache(mapper, smollm2):
    source, target, tokenizer = smollm2
    inputs = tokenizer("In the beginning God created the heaven and the", return_tensors="pt")
    keyword = cache_keyword(target.generate)
    cache = mapper.convert(prefill(source, inputs.input_ids), source=source, target=target, tokenizer=tokenizer)
    output = target.generate(**inputs, max_new_tokens=8, do_sample=False, **{keyword: cache})
    assert output.shape[1] == inputs.input_ids.shape[1] + 8
    assert tokenizer.decode(output[0, inputs.input_ids.shape[1] :]).startswith(" earth")
