"""A cache that the target has partly read itself serves every way to generate as a plain converted one does."""

import pytest
import torch
from transformers import DynamicCache

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword

from .limits import limit_of
from .settings import Prompt, Setting, setting
from .ways import WAYS


NAMES = ("qwen3", "gemma3", "gpt_neox")
SAMPLE = (
    "greedy",
    "beams",
    "several_return_sequences",
    "assisted_decoding",
    "left_padding",
    "left_padding_with_beams",
    "a_question_after_the_context",
    "new_ids_with_left_padding",
    "chunked_prefill",
    "one_context_for_many_questions",
)


class AnchoredSetting(Setting):
    """A model and itself: its first two layers, first and last tokens native, and identities for what is left."""

    def __init__(self, plain: Setting) -> None:
        self.__dict__.update(plain.__dict__)
        self.mapper = KVMapper.for_pair(
            self.model,
            self.model,
            support=[None, None, [2]],
            anchor_layers=1,
            exact_prefix=2,
            exact_suffix=1,
        )
        self._caches = {}
        with torch.no_grad():
            for part in self.mapper.layers[2].children():
                torch.nn.init.eye_(part.weight)

    def cache(self, prompt: Prompt, hold_back: int = 1) -> DynamicCache:
        if (prompt, hold_back) not in self._caches:
            cache = DynamicCache()
            with torch.no_grad():
                self.source(**prompt.first(prompt.tokens), use_cache=True, **{cache_keyword(self.source): cache})
            mask = prompt.mask if bool((prompt.mask == 0).any()) else None
            self._caches[prompt, hold_back] = self.mapper.convert(
                cache, attention_mask=mask, hold_back=hold_back, target=self.model, input_ids=prompt.ids
            )
        return self._caches[prompt, hold_back].fork()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES])
def anchored(request):
    return AnchoredSetting(setting(request.param, "identity"))


@pytest.mark.parametrize("way", SAMPLE)
def test_an_anchored_cache_serves_as_any_other(anchored, way):
    limit = limit_of(way, anchored)
    if limit is not None:
        with pytest.raises(limit.error, match=limit.sentence):
            list(WAYS[way](anchored))
        return
    for result, expected in WAYS[way](anchored):
        result.check(expected)
