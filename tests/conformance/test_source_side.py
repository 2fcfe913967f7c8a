"""Source caches of every kind: the target goes on from the converted cache as the source goes on from its own."""

import copy
import functools

import accelerate
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from hf_kvtransfer import KVMapper, SourceCacheError, TransferredCache
from hf_kvtransfer._compat import cache_keyword, output_cache

from ..architectures import build
from .settings import BATCH, EAGER_ONLY, NAMES, PADDED, SINGLE, Prompt, loaded, prepared, random_ids, setting
from .sources import SOURCES, read


by_name = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES])
MORE = random_ids(3, 3, seed=30)
# These keep what their sliding layers can still see and no more.
WINDOWED = ("a_static_cache",)


def grown(prompt: Prompt) -> Prompt:
    """The prompt with three tokens more."""
    ids = torch.cat([prompt.ids, MORE[: prompt.ids.shape[0]]], 1)
    return Prompt(ids, torch.cat([prompt.mask, torch.ones_like(ids[:, :3])], 1))


def identity(model) -> KVMapper:
    return KVMapper.for_pair(model, model).set_as_identity()


def masked(prompt: Prompt) -> dict:
    return {"attention_mask": prompt.mask} if bool((prompt.mask == 0).any()) else {}


def check(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=tolerance * float(theirs.abs().max()))


@functools.cache
def without_cache(name: str, prompt: Prompt) -> torch.Tensor:
    """The logits of the three tokens more."""
    whole = grown(prompt)
    with torch.no_grad():
        return loaded(name)(**whole.first(whole.tokens), use_cache=False).logits[:, -3:]


def dequantised(cache: DynamicCache) -> DynamicCache:
    plain = DynamicCache()
    for index, layer in enumerate(cache.layers):
        keys, values = (layer._dequantize(part) for part in (layer._quantized_keys, layer._quantized_values))
        plain.update(keys, values, index)
    return plain


@by_name
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("prompt", [BATCH, PADDED], ids=["batch", "padded"])
def test_a_source_cache_of_every_kind(name, kind, prompt, record_property):
    model, mapper = loaded(name), setting(name, "identity").mapper
    made = SOURCES[kind](model, prompt)
    if kind in WINDOWED and setting(name, "identity").is_sliding:
        with pytest.raises(
            SourceCacheError, match=r"has seen 16 tokens but holds only the last [56].*bare `DynamicCac"
        ):
            mapper.convert(made, **masked(prompt))
        record_property("source", [name, kind, "refused"])
        return
    converted = mapper.convert(made, hold_back=0, **masked(prompt))
    assert [layer.get_seq_length() for layer in converted.layers] == [prompt.tokens] * 3
    logits = read(model, grown(prompt), converted, prompt.tokens).logits
    if kind == "an_fp8_cache":  # what was rounded is, on both sides; what is new is not
        check(logits, read(model, grown(prompt), dequantised(made), prompt.tokens).logits)
    elif "quantised" in kind:
        check(logits, read(model, grown(prompt), made, prompt.tokens).logits, 2e-3)
    else:
        check(logits, without_cache(name, prompt))
    record_property("source", [name, kind, "exact"])


def generated(model, prompt: Prompt, cache=None, **options):
    keyword = {} if cache is None else {cache_keyword(model.generate): cache}
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(input_ids=prompt.ids, attention_mask=prompt.mask, **options, **keyword)


def after(prompt: Prompt, output) -> Prompt:
    """All that was generated from a prompt, as a prompt."""
    rows = output.sequences.shape[0] // prompt.mask.shape[0]
    new = torch.ones(output.sequences.shape[0], output.sequences.shape[1] - prompt.tokens, dtype=torch.long)
    return Prompt(output.sequences, torch.cat([prompt.mask.repeat_interleave(rows, dim=0), new], 1))


@by_name
@pytest.mark.parametrize("prompt", [BATCH, PADDED], ids=["batch", "padded"])
def test_the_cache_that_generate_leaves_lacks_the_last_token(name, prompt):
    chosen = setting(name, "identity")
    output = generated(chosen.model, prompt, DynamicCache())
    written = after(prompt, output)
    converted = chosen.mapper.convert(output, hold_back=0, **masked(written))
    assert converted.get_seq_length() == written.tokens - 1
    expected = Prompt(written.ids, written.mask)
    chosen.generate(written, converted).check(chosen.reference(expected))


@by_name
def test_what_generate_makes_itself(name):
    """Full attention is kept whole. Sliding windows are not, and what to do instead is said."""
    chosen = setting(name, "identity")
    output = generated(chosen.model, SINGLE)
    if chosen.is_sliding:
        with pytest.raises(SourceCacheError, match=r"has seen 19 tokens but holds only the last 5.*bare `DynamicCache"):
            chosen.mapper.convert(output)
    else:
        written = after(SINGLE, output)
        chosen.generate(written, chosen.mapper.convert(output, hold_back=0)).check(chosen.reference(written))


@by_name
def test_rows_of_beams_and_return_sequences(name):
    chosen = setting(name, "identity")
    output = generated(chosen.model, BATCH, DynamicCache(), num_return_sequences=2, do_sample=True)
    written = after(BATCH, output)
    converted = chosen.mapper.convert(output_cache(output), hold_back=0)
    chosen.generate(written, converted).check(chosen.reference(written))


@by_name
def test_a_source_that_goes_on_reading_is_converted_again(name):
    """Conversion takes nothing from the source: it goes on, and only what is new is converted and appended."""
    chosen, whole = setting(name, "identity"), grown(BATCH)
    read(chosen.model, BATCH, cache := DynamicCache())
    converted = chosen.mapper.convert(cache, hold_back=0)
    check(read(chosen.model, whole, cache, BATCH.tokens).logits, without_cache(name, BATCH))
    chosen.mapper.convert(cache, into=converted)
    check(read(chosen.model, whole, converted, whole.tokens - 1).logits, without_cache(name, BATCH)[:, -1:])


PRECISE = ["llama", "qwen3", "gemma3", "phi3", "cohere", "gpt_neox", "mistral3", "smollm3"]


@functools.cache
def in_dtype(name: str, dtype: torch.dtype):
    model = prepared(build(name, dtype=dtype))
    if dtype == torch.float64:  # grouped products of experts have no such kernel
        model.set_experts_implementation("eager")
    if name in EAGER_ONLY:
        model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PRECISE])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_source_and_target_may_differ(name, source, target):
    one, other, whole = in_dtype(name, source), in_dtype(name, target), grown(BATCH)
    read(one, BATCH, cache := DynamicCache())
    converted = identity(one).convert(cache, hold_back=0, source=one, target=other)
    assert converted.layers[0].keys.dtype == source
    logits = read(other, whole, converted, BATCH.tokens).logits
    assert converted.layers[0].keys.dtype == logits.dtype == target
    halves = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
    check(logits, without_cache(name, BATCH), max(halves[source], halves[target]))


@by_name
def test_in_double_precision_a_conversion_costs_no_more_than_its_rotation(name):
    """RoPE is computed in float32, on either side; everything else is exact to the last digits."""
    model, whole = in_dtype(name, torch.float64), grown(BATCH)
    read(model, BATCH, cache := DynamicCache())
    converted = identity(model).double().convert(cache, hold_back=0)
    with torch.no_grad():
        expected = model(**whole.first(whole.tokens), use_cache=False).logits[:, -3:]
    check(read(model, whole, converted, BATCH.tokens).logits, expected, 1e-5)


class TestModelsThatAreWrapped:
    @staticmethod
    def exact(model, mapper: KVMapper, plain=None) -> None:
        """As source and as target, checked against the mapper's manifest."""
        read(model, SINGLE, cache := DynamicCache())
        converted = mapper.convert(cache, source=model, target=model)
        keyword = {cache_keyword(model.generate): converted}
        options = {"attention_mask": SINGLE.mask, "max_new_tokens": 4, "do_sample": False}
        own = (plain or model).generate(input_ids=SINGLE.ids, use_cache=False, **options)
        assert isinstance(converted, TransferredCache)
        assert torch.equal(model.generate(input_ids=SINGLE.ids, **options, **keyword), own)
        assert converted.get_seq_length() == SINGLE.tokens + 3

    @pytest.mark.parametrize("offload", ["cpu", "disk"])
    def test_offloaded_weights(self, offload, tmp_path):
        """accelerate's hooks bring each layer's weights back when it runs; between runs the model holds none."""
        plain = loaded("qwen3")
        model = copy.deepcopy(plain)
        if offload == "cpu":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        self.exact(model, identity(plain), plain)

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_a_device_map_that_splits_the_layers(self, name, tmp_path):
        loaded(name).save_pretrained(tmp_path / "model")
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "weights"), dtype=torch.float32
        )
        assert model.hf_device_map["model.layers.1"] == "disk"
        self.exact(prepared(model), identity(loaded(name)), loaded(name))

    def test_a_compiled_model(self):
        """A wrapper whose forward passes are traced with the converted cache, sliding layers included, in them."""
        name, whole = "gemma3", grown(SINGLE)
        model = torch.compile(copy.deepcopy(loaded(name)), backend="eager")
        read(model, SINGLE, cache := DynamicCache())
        converted = identity(loaded(name)).convert(cache, hold_back=0, source=model, target=model)
        check(read(model, whole, converted, SINGLE.tokens).logits, without_cache(name, SINGLE))
        torch.compiler.reset()

    def test_a_model_compiled_in_place(self):
        """Here `generate` runs the compiled forward pass too."""
        model = copy.deepcopy(loaded("llama"))
        model.compile(backend="eager")
        self.exact(model, identity(loaded("llama")), loaded("llama"))
        torch.compiler.reset()

    @pytest.mark.parametrize("name", ["llama", "gemma3", "mistral3"])
    def test_a_model_with_an_adapter(self, name):
        """LoRA changes what is cached; the wrapped model is source and target like any other."""
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(loaded(name)), config).eval()
        self.exact(model, identity(model))


def test_a_static_cache_within_its_window():
    """Windows that have not been reached hold everything, whatever the class of the layer."""
    model, prompt = loaded("gemma3"), Prompt(SINGLE.ids[:, :5], SINGLE.mask[:, :5])
    cache = StaticCache(config=model.config, max_cache_len=20)
    read(model, prompt, cache)
    converted = identity(model).convert(cache, hold_back=0)
    whole = Prompt(SINGLE.ids[:, :8], SINGLE.mask[:, :8])
    with torch.no_grad():
        expected = model(**whole.first(8), use_cache=False).logits[:, -3:]
    check(read(model, whole, converted, 5).logits, expected)
