"""Whether models and tokenizer are those that a mapper was fitted for, and what is no model or tokenizer at all."""

import pytest
from transformers import AutoTokenizer

from hf_kvtransfer import KVMapper, PairMismatchError

from .architectures import build
from .conftest import FAMILY


@pytest.fixture(scope="module")
def qwen3():
    return build("qwen3")


@pytest.fixture(scope="module")
def mapper(qwen3):
    return KVMapper.for_pair(qwen3, qwen3, tokenizer=AutoTokenizer.from_pretrained(FAMILY / "small"))


def test_its_own_pair_passes(mapper, qwen3, family_tokenizer):
    mapper.check_pair(source=qwen3, target=qwen3, tokenizer=family_tokenizer)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(("name", "seed"), [("qwen3", 5), ("gpt_neox", 0), ("gemma3", 0), ("qwen3-yarn", 0)])
def test_another_model_is_refused(mapper, side, name, seed):
    with pytest.raises(PairMismatchError, match=f"The {side} model .* is not the one this mapper was fitted for"):
        mapper.check_pair(**{side: build(name, seed=seed)})


@pytest.mark.parametrize("side", ["source", "target"])
def test_what_is_no_model_is_refused(mapper, side):
    with pytest.raises(PairMismatchError, match=f"`{side}` is a str; expected the loaded {side} model"):
        mapper.check_pair(**{side: "org/model"})


def test_another_tokenizer_is_refused(mapper):
    tokenizer = AutoTokenizer.from_pretrained(FAMILY / "small")
    tokenizer.add_tokens(["another"])
    with pytest.raises(PairMismatchError, match="another vocabulary or other merges"):
        mapper.check_pair(tokenizer=tokenizer)


def test_what_is_no_tokenizer_is_refused(mapper):
    with pytest.raises(PairMismatchError, match="`tokenizer` is a dict; expected a tokenizer of Transformers"):
        mapper.check_pair(tokenizer={"a": 1})


def test_an_adapter_is_no_part_of_the_base_and_the_base_none_of_an_adapted_model(qwen3):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build("qwen3"), LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    for fitted, given in ((qwen3, adapted), (adapted, build("qwen3"))):
        with pytest.raises(PairMismatchError, match="another adapter, or one where there was none"):
            KVMapper.for_pair(fitted, fitted).check_pair(source=given)
    KVMapper.for_pair(adapted, adapted).check_pair(source=adapted, target=adapted)
    # An adapter that was never trained changes nothing.
    fresh = get_peft_model(build("qwen3"), LoraConfig(r=2, target_modules=["k_proj"]))
    KVMapper.for_pair(qwen3, qwen3).check_pair(source=fresh)
