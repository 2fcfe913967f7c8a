"""On real weights: the text that SmolLM2-135M writes on a converted cache is the text it writes on its own."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword


pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]

PROMPTS = 20
NEW_TOKENS = 64


def test_greedy_text_of_a_left_padded_batch(smollm2, family):
    _, model, tokenizer = smollm2
    if tokenizer.pad_token is None:  # older releases don't find it in the GGUF file
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    words = (family / "data" / "text_test.txt").read_text().split()
    # From 5 to 24 words, each from another place.
    prompts = [" ".join(words[500 * i : 500 * i + 5 + i]) for i in range(PROMPTS)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    mask = inputs["attention_mask"]
    assert len(set(mask.sum(-1).tolist())) > PROMPTS // 2
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    own = model.generate(**inputs, **options)

    cache = DynamicCache()
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(**inputs, position_ids=positions, use_cache=True, **{cache_keyword(model): cache})
    mapper = KVMapper.for_pair(model, model, tokenizer=tokenizer).set_as_identity()
    converted = mapper.convert(cache, attention_mask=mask, source=model, target=model, tokenizer=tokenizer)
    transferred = model.generate(**inputs, **options, **{cache_keyword(model.generate): converted})

    texts, mine = (tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in (own, transferred))
    assert own.shape[1] == mask.shape[1] + NEW_TOKENS
    assert mine == texts
