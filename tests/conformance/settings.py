"""One architecture under one law: the model, its converted caches, and what it must compute without any cache."""

import copy
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import cache_keyword

from ..architectures import ARCHITECTURES, VOCAB, build, missing
from .by_hand import by_hand, map_entries, read_entries


NAMES = sorted(set(ARCHITECTURES) - set(missing()))
LAWS = ("identity", "random")
NEW_TOKENS = 5
# In the oldest supported releases, SDPA leaves out the soft cap on gemma2's attention.
EAGER_ONLY = ("gemma2",)


@dataclass(frozen=True)
class Prompt:
    """Token ids and mask, `[batch, tokens]`; compared by identity, so that it can be a key."""

    ids: Tensor
    mask: Tensor

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def positions(self) -> Tensor:
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def first(self, tokens: int) -> dict[str, Tensor]:
        """The arguments of a forward pass over the first tokens."""
        return {
            "input_ids": self.ids[:, :tokens],
            "attention_mask": self.mask[:, :tokens],
            "position_ids": self.positions[:, :tokens],
        }


def random_ids(rows: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _prompt(rows: int, tokens: int, seed: int, padding: Sequence[int] = ()) -> Prompt:
    ids, mask = random_ids(rows, tokens, seed), torch.ones(rows, tokens, dtype=torch.long)
    for row, pads in enumerate(padding):
        ids[row, :pads], mask[row, :pads] = 0, 0
    return Prompt(ids, mask)


# All but the short one are longer than the sliding windows of the registry, which span 6 tokens.
BATCH = _prompt(2, 16, seed=1)
SINGLE = _prompt(1, 16, seed=2)
SHORT = _prompt(1, 4, seed=3)
PADDED = _prompt(3, 16, seed=4, padding=(5, 0, 11))
REPEATED = Prompt(random_ids(1, 6, seed=5).repeat(1, 3), torch.ones(1, 18, dtype=torch.long))


@dataclass
class Result:
    """The new tokens `[rows, steps]`, and the logits that chose them, one `[rows, vocabulary]` per step, if known."""

    tokens: Tensor
    logits: Sequence[Tensor] | None = None

    def check(self, expected: "Result") -> None:
        """Fails unless the two agree, as far as both know."""
        if self.logits is not None and expected.logits is not None:
            assert len(self.logits) == len(expected.logits)
            for step, (mine, theirs) in enumerate(zip(self.logits, expected.logits, strict=True)):
                size = float(theirs.abs().max())
                torch.testing.assert_close(
                    mine, theirs, rtol=0, atol=1e-4 * size, msg=lambda text, step=step: f"step {step}: {text}"
                )
        assert torch.equal(self.tokens, expected.tokens)


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Random models stop at random; without an end token every step is compared."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@functools.cache
def loaded(name: str) -> PreTrainedModel:
    model = prepared(build(name))
    if name in EAGER_ONLY:
        model.set_attn_implementation("eager")
    return model


@functools.cache
def eager(name: str) -> PreTrainedModel:
    """The same weights with the model's plainest attention, for the reference."""
    model = copy.deepcopy(loaded(name))
    model.set_attn_implementation("eager")
    return model


def neighbour(name: str) -> str:
    """Another architecture, so that each is a source once and both sides differ in all that they can."""
    return NAMES[(NAMES.index(name) + 1) % len(NAMES)]


def random_mapper(source: PreTrainedModel, target: PreTrainedModel) -> KVMapper:
    mapper = KVMapper.for_pair(source, target, support=[[0, 2], [1], [0, 1, 2]])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return mapper


class Setting:
    """
    A target model, a mapper into it, and the reference.

    Args:
        name (`str`): the target, a key of `ARCHITECTURES`.
        law (`str`):
            `"identity"`: the model's own cache, converted by the identity, equals the model without a cache.
            `"random"`: a neighbour's cache, converted by random maps, equals a forward pass without a cache in which
            the mapped keys and values are injected by hand.
    """

    def __init__(self, name: str, law: str) -> None:
        self.name, self.law = name, law
        self.model, self.eager = loaded(name), eager(name)
        if law == "identity":
            self.source_name = name
            self.mapper = KVMapper.for_pair(self.model, self.model).set_as_identity()
        else:
            self.source_name = neighbour(name)
            self.mapper = random_mapper(loaded(self.source_name), self.model)
        self.source = loaded(self.source_name)
        self._caches: dict = {}
        self._references: dict = {}

    @property
    def windows(self) -> list[int | None]:
        return [layer.sliding_window for layer in self.mapper.config.geometry("target").layers]

    @property
    def is_sliding(self) -> bool:
        return any(self.windows)

    @property
    def is_all_sliding(self) -> bool:
        return all(self.windows)

    @property
    def keyword(self) -> str:
        return cache_keyword(self.model.generate)

    def cache(self, prompt: Prompt, hold_back: int = 1) -> DynamicCache:
        """What is under test: the converted cache of a prompt, converted once and forked for each use."""
        if (prompt, hold_back) not in self._caches:
            cache = DynamicCache()
            with torch.no_grad():
                self.source(**prompt.first(prompt.tokens), use_cache=True, **{cache_keyword(self.source): cache})
            mask = prompt.mask if bool((prompt.mask == 0).any()) else None
            self._caches[prompt, hold_back] = self.mapper.convert(cache, attention_mask=mask, hold_back=hold_back)
        return self._caches[prompt, hold_back].fork()

    def by_hand(self, prompt: Prompt, hold_back: int = 1):
        """A context in which the eager twin, run without a cache, is what the converted cache must equal."""
        if self.law == "identity":
            return nullcontext()
        entries = read_entries(eager(self.source_name), **prompt.first(prompt.tokens - hold_back))
        heads = [layer.kv_heads for layer in self.mapper.config.geometry("target").layers]
        return by_hand(self.eager, map_entries(self.mapper, entries, heads))

    def reference(
        self, prompt: Prompt, *, whole: Prompt | None = None, hold_back: int = 1, seed: int = 0, **options
    ) -> Result:
        """
        What `generate` gives without any cache.

        Args:
            prompt (`Prompt`): what was converted.
            whole (`Prompt`, *optional*): what is generated from, if it is longer.
            hold_back (`int`): how many tokens of the prompt were not converted.
            seed (`int`): of the sampling.
            **options: of `generate`.
        """
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
        key = (prompt, whole, hold_back, seed, repr(sorted(options.items())))
        if key not in self._references:
            given = whole or prompt
            with self.by_hand(prompt, hold_back):
                torch.manual_seed(seed)
                output = self.eager.generate(
                    input_ids=given.ids,
                    attention_mask=given.mask,
                    use_cache=False,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **options,
                )
            self._references[key] = Result(output.sequences[:, given.tokens :], output.logits)
        return self._references[key]

    def generate(
        self,
        prompt: Prompt,
        cache: DynamicCache | None = None,
        *,
        fed: int | None = None,
        seed: int = 0,
        keyword: str | None = None,
        **options,
    ) -> Result:
        """
        `generate` with the converted cache.

        Args:
            prompt (`Prompt`): its ids and mask.
            cache (`DynamicCache`, *optional*): by default the converted cache of the prompt.
            fed (`int`, *optional*): pass only so many of the last ids, and the whole mask.
            seed (`int`): of the sampling.
            keyword (`str`, *optional*): the name under which the cache is passed.
            **options: of `generate`.
        """
        ids = prompt.ids if fed is None else prompt.ids[:, prompt.tokens - fed :]
        inputs = {"input_ids": ids, "attention_mask": prompt.mask}
        if "inputs_embeds" in options:
            del inputs["input_ids"]
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
        torch.manual_seed(seed)
        output = self.model.generate(
            **inputs,
            **{keyword or self.keyword: self.cache(prompt) if cache is None else cache},
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        start = 0 if "inputs_embeds" in options else ids.shape[1]
        return Result(output.sequences[:, start:], output.logits)

    @torch.no_grad()
    def forward(self, cache: DynamicCache, ids: Tensor) -> Tensor:
        """The logits of a plain forward pass over further tokens."""
        return self.model(input_ids=ids, use_cache=True, **{cache_keyword(self.model): cache}).logits


class NativeSetting(Setting):
    """The same model with a cache of its own, to show that a limitation is one of transformers."""

    def __init__(self, setting: Setting) -> None:
        self.__dict__.update(setting.__dict__)

    def cache(self, prompt: Prompt, hold_back: int = 1) -> DynamicCache:
        cache = DynamicCache(config=self.model.config.get_text_config())
        with torch.no_grad():
            tokens = prompt.tokens - hold_back
            self.model(**prompt.first(tokens), use_cache=True, **{cache_keyword(self.model): cache})
        return cache


@functools.cache
def setting(name: str, law: str) -> Setting:
    return Setting(name, law)
