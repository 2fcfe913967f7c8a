"""Laws of the geometry: read alike from a config and from a model, whatever wraps it, and refused in sentences."""

import copy
import json
import time
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from torch import nn
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from hf_kvtransfer._compat import output_cache
from hf_kvtransfer.errors import UnsupportedModelError
from hf_kvtransfer.geometry import (
    LayerGeometry,
    ModelGeometry,
    decoder_of,
    refusals,
    text_config,
    tokenizer_fingerprint,
)
from hf_kvtransfer.modules import skeleton

from .architectures import ARCHITECTURES, REFUSED, VOCAB, build, missing, randomise


def config_of(registry: dict[str, Any], name: str) -> Any:
    if name in missing():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    factory = registry[name]
    return (factory[0] if isinstance(factory, tuple) else factory)()


def test_both_supported_releases_have_every_architecture() -> None:
    assert missing() == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_config_and_model_have_the_same_geometry(name: str) -> None:
    config = config_of(ARCHITECTURES, name)
    from_config = ModelGeometry.from_config(config)
    assert from_config == ModelGeometry.from_model(build(name))
    section = config.get_text_config()
    assert from_config.num_layers == section.num_hidden_layers
    assert from_config.hidden_size == section.hidden_size
    assert from_config.query_heads(0) == section.num_attention_heads
    assert {layer.head_dim for layer in from_config.layers} == {16}
    kv_heads = getattr(section, "num_key_value_heads", None) or section.num_attention_heads
    assert {layer.kv_heads for layer in from_config.layers} == {kv_heads}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_geometry_is_the_shape_of_the_cache(name: str) -> None:
    model = build(name)
    geometry = ModelGeometry.from_model(model)
    with torch.no_grad():
        cache = output_cache(model(input_ids=torch.arange(3, 7)[None], use_cache=True))
    assert len(cache.layers) == geometry.num_layers
    for layer, cached in zip(geometry.layers, cache.layers, strict=True):
        assert cached.keys.shape[1::2] == (layer.kv_heads, layer.head_dim)
        assert cached.is_sliding == (layer.sliding_window is not None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_geometry_survives_json(name: str) -> None:
    geometry = ModelGeometry.from_config(config_of(ARCHITECTURES, name))
    again = ModelGeometry.from_dict(json.loads(json.dumps(geometry.to_dict())))
    assert again == geometry
    assert again.differences(geometry) == []


def test_layers_without_rope_are_known() -> None:
    rotary = {
        name: [layer.rotary for layer in ModelGeometry.from_config(config_of(ARCHITECTURES, name)).layers]
        for name in ("smollm3", "cohere2", "exaone4", "llama")
    }
    assert rotary["smollm3"] == [True, False, True]
    assert rotary["cohere2"] == rotary["exaone4"] == [True, False, True]
    assert rotary["llama"] == [True, True, True]


def test_layer_types_and_windows_are_those_of_the_cache() -> None:
    layers = ModelGeometry.from_config(config_of(ARCHITECTURES, "gemma3")).layers
    assert [layer.layer_type for layer in layers] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert [layer.sliding_window for layer in layers] == [6, None, 6]
    assert {layer.layer_type for layer in ModelGeometry.from_config(config_of(ARCHITECTURES, "mistral")).layers} == {
        "full_attention"
    }


def test_offsets_place_the_layers_side_by_side() -> None:
    geometry = ModelGeometry.from_config(config_of(ARCHITECTURES, "llama"))
    assert geometry.layers[0].width == 32
    assert geometry.offsets == (0, 32, 64, 96)


def test_text_section_of_a_wrapper() -> None:
    config = config_of(ARCHITECTURES, "mistral3")
    assert text_config(config) is config.text_config
    geometry = ModelGeometry.from_config(config)
    assert geometry.text_config_name == "text_config"
    model = build("mistral3")
    # The vision tower has as many layers as the text.
    assert decoder_of(model) is model.model.language_model


def test_only_what_matters_for_a_cache_is_a_difference() -> None:
    config = LlamaConfig(**{**ARCHITECTURES["llama"]().to_dict(), "num_hidden_layers": 2})
    geometry = ModelGeometry.from_config(config)
    config._name_or_path = "org/another"
    assert ModelGeometry.from_config(config).differences(geometry) == []
    wider = LlamaConfig(**{**config.to_dict(), "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 3})
    found = geometry.differences(ModelGeometry.from_config(wider))
    assert any("2 layers against 3" in phrase for phrase in found)
    assert any("KV heads 2 against 4 (layer 0 and 1 more)" in phrase for phrase in found)
    assert any("head_dim 16 against 8" in phrase for phrase in found)
    faster = LlamaConfig(**{**config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert geometry.differences(ModelGeometry.from_config(faster)) == [
        "rotary parameter rope_theta 10000.0 against 500000.0"
    ]


def test_spelled_out_defaults_are_no_difference() -> None:
    geometry = ModelGeometry.from_config(ARCHITECTURES["llama"]())
    spelled = copy.deepcopy(geometry.to_dict())
    spelled["rope_parameters"]["partial_rotary_factor"] = 1.0
    assert geometry.differences(ModelGeometry.from_dict(spelled)) == []


def test_checkpoint_is_a_repository_or_a_folder_name(tmp_path: Any) -> None:
    config = ARCHITECTURES["llama"]()
    names = {}
    for path in ("org/model-8B", "gpt", str(tmp_path / "my-model"), "./runs/a", "C:\\models\\b", "~/c", "", "x/y/z"):
        config._name_or_path = path
        names[path] = ModelGeometry.from_config(config).checkpoint
    assert list(names.values()) == ["org/model-8B", "gpt", "my-model", "a", "b", "c", None, "z"]


def test_relative_folder_that_looks_like_a_repository(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = ARCHITECTURES["llama"]()
    config._name_or_path = "private/model"
    assert ModelGeometry.from_config(config).checkpoint == "model"


def test_fields_of_another_version_are_named() -> None:
    with pytest.raises(ValueError, match="another version"):
        ModelGeometry.from_dict({"layers": []})
    with pytest.raises(ValueError, match="another version"):
        ModelGeometry.from_dict({**ModelGeometry.from_config(ARCHITECTURES["llama"]()).to_dict(), "colour": 1})


# Wrappers


def test_compiled_and_bare_models_have_the_geometry_of_the_whole() -> None:
    model = build("llama")
    geometry = ModelGeometry.from_model(model)
    assert ModelGeometry.from_model(torch.compile(model)) == geometry
    assert ModelGeometry.from_model(model.model) == geometry
    assert decoder_of(torch.compile(model)) is model.model
    model.model.layers[1] = torch.compile(model.model.layers[1])
    assert ModelGeometry.from_model(model) == geometry


def test_adapters_leave_the_geometry() -> None:
    peft = pytest.importorskip("peft")
    model = build("llama")
    geometry = ModelGeometry.from_model(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=2))
    assert ModelGeometry.from_model(adapted) == geometry


class Adapted(nn.Module):
    """The shape of a PEFT model: adapters in a registry, and the Transformers model one level down."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peft_config: dict[str, Any] = {}
        self.base = model

    def get_base_model(self) -> nn.Module:
        return self.base


def test_wrappers_are_looked_through_in_any_order() -> None:
    model = build("qwen3")
    assert decoder_of(Adapted(torch.compile(model))) is model.model
    assert decoder_of(torch.compile(Adapted(model))) is model.model


# Skeletons


def test_skeleton_of_a_32b_model_is_quick_and_weightless() -> None:
    config = Qwen3Config(
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
    )
    ModelGeometry.from_config(ARCHITECTURES["qwen3"]())  # imports the architecture, which is not what is timed
    start = time.process_time()
    geometry = ModelGeometry.from_config(config)
    spent = time.process_time() - start
    assert spent < 2.0
    assert geometry.num_layers == 64
    assert geometry.offsets[-1] == 64 * 8 * 128
    assert all(parameter.is_meta for parameter in skeleton(config).parameters())


def test_skeleton_is_built_once_and_leaves_the_config() -> None:
    config = ARCHITECTURES["gemma3"]()
    before = config.to_dict()
    assert skeleton(config) is skeleton(copy.deepcopy(config))
    assert config.to_dict() == before


# Refusals


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_reason(name: str) -> None:
    config = config_of(REFUSED, name)
    word = REFUSED[name][1]
    reasons = refusals(config)
    assert any(word in reason for reason in reasons), reasons
    for reason in reasons:
        assert reason.startswith(config.model_type)
        assert "; use a" in reason
        assert reason.endswith(".")
    with pytest.raises(UnsupportedModelError, match=word):
        ModelGeometry.from_config(config)


@pytest.mark.parametrize("name", ["gpt2", "hunyuan_v1_dense", "mamba", "llama4", "t5", "llama-dynamic"])
def test_loaded_models_are_refused_like_their_configs(name: str) -> None:
    config = config_of(REFUSED, name)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(copy.deepcopy(config))
    assert refusals(model) == refusals(config)
    with pytest.raises(UnsupportedModelError):
        ModelGeometry.from_model(model)


def test_several_reasons_are_all_given() -> None:
    config = transformers.HunYuanDenseV1Config(
        **{
            **REFUSED["hunyuan_v1_dense"][0]().to_dict(),
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        }
    )
    reasons = refusals(config)
    assert any("dynamic" in reason for reason in reasons)
    assert any("key_layernorm" in reason for reason in reasons)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_supported_models_have_no_refusals(name: str) -> None:
    assert refusals(config_of(ARCHITECTURES, name)) == []


def test_layers_concerned_are_numbered() -> None:
    (reason,) = refusals(config_of(REFUSED, "lfm2"))
    assert "layers 0 and 2" in reason


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), nn.ModuleList(), "llama", None])
def test_what_is_no_model_is_refused_in_a_sentence(thing: Any) -> None:
    (reason,) = refusals(thing)
    assert type(thing).__name__ in reason
    assert "from_pretrained" in reason


def test_unknown_config_is_refused_in_a_sentence() -> None:
    class StrangeConfig(transformers.PreTrainedConfig):
        model_type = "strange"

    (reason,) = refusals(StrangeConfig())
    assert "can't build strange" in reason


def test_encoder_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    assert any("learned absolute positions" in reason for reason in refusals(config))


def test_decoder_of_names_what_is_missing() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\.layers"):
        decoder_of(transformers.AutoModel.from_config(config_of(REFUSED, "gpt2")))
    with pytest.raises(UnsupportedModelError, match="Linear"):
        decoder_of(nn.Linear(2, 2))


# Code of models that this package has not seen


class Keys(nn.Module):
    """An attention module to be written by a test."""

    use_rope = True

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.k_norm = nn.RMSNorm(16)
        self.free_norm = nn.RMSNorm(16, elementwise_affine=False)
        for name, value in attributes.items():
            setattr(self, name, value)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return q, k


def apply_rotary_triple(q: Any, k: Any, cos: Any, sin: Any, sections: Any) -> Any:
    return q, k


def path_of(forward: Any, **attributes: Any) -> Any:
    from hf_kvtransfer.key_path import key_path

    return key_path(type("Written", (Keys,), {"forward": forward})(**attributes))


def test_plain_rotation_is_followed() -> None:
    def forward(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_pos_emb(q, self.k_norm(k), cos, sin)
        k = k.transpose(1, 2).contiguous()
        return cache.update(k, v, self.layer_idx)

    path = path_of(forward)
    assert path.rotary
    assert path.problem is None
    assert path.rotate is apply_rotary_pos_emb


def test_weighted_norm_after_rope_is_a_problem_and_a_free_one_is_not() -> None:
    def weighted(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return cache.update(self.k_norm(k), v, self.layer_idx)

    def free(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return cache.update(self.free_norm(k), v, self.layer_idx)

    assert "k_norm" in path_of(weighted).problem
    assert path_of(free).problem is None
    assert path_of(free).rotary


def test_conditions_on_the_module_are_decided() -> None:
    def forward(self, q, k, v, position_embeddings, cache):  # type: ignore[no-untyped-def]
        wanted = self.use_rope and position_embeddings is not None
        if wanted:
            cos, sin = position_embeddings
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return k

    assert path_of(forward).rotary
    skipped = path_of(forward, use_rope=False)
    assert not skipped.rotary
    assert skipped.problem is None


def test_conditions_on_the_data_are_refused() -> None:
    def forward(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        if k.shape[-2] > 100:
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return cache.update(k, v, self.layer_idx)

    assert "condition" in path_of(forward).problem


def test_what_is_not_understood_is_refused() -> None:
    def arithmetic(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k = k * self.scale
        return cache.update(k, v, self.layer_idx)

    def values(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return cache.update(k, k, self.layer_idx)

    def last(self, q, k, v, cos, sin, cache, torch):  # type: ignore[no-untyped-def]
        q, r = apply_rotary_pos_emb(q, k, cos, sin)
        return cache.update(torch.cat((k, r), -1), v, self.layer_idx)

    def twice(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return cache.update(k, v, self.layer_idx)

    def sections(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        q, k = apply_rotary_triple(q, k, cos, sin, self.sections)
        return cache.update(k, v, self.layer_idx)

    def elsewhere(self, q, k, v, cos, sin, cache):  # type: ignore[no-untyped-def]
        return self.attend(q, k, v)

    assert "k * self.scale" in path_of(arithmetic).problem
    assert "values" in path_of(values).problem
    assert "other dimensions" in path_of(last).problem
    assert "not understood" in path_of(twice).problem
    assert "sections" in path_of(sections).problem
    assert "does not write" in path_of(elsewhere).problem


# Tokenizers


VOCABULARY = {letter: index for index, letter in enumerate(["<unk>", "<s>", "</s>", *"abcdefgh", "ab", "cd", "abcd"])}
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd")]


def tokenizer(
    vocabulary: dict[str, int] | None = None,
    merges: list[tuple[str, str]] | None = None,
    lower: bool = False,
    added: tuple[str, ...] = (),
    **values: Any,
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE(vocabulary or VOCABULARY, merges or MERGES, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>", **values
    )


def test_fingerprint_is_of_the_tokens_and_not_of_their_use(tmp_path: Any) -> None:
    first = tokenizer()
    fingerprint = tokenizer_fingerprint(first)
    assert len(fingerprint) == 64
    first(["ab", "abcd ab ab"], padding=True, truncation=True, max_length=2)
    first.padding_side = "left"
    first.model_max_length = 5
    first.chat_template = "{{ messages }}"
    first.name_or_path = "org/elsewhere"
    assert tokenizer_fingerprint(first) == fingerprint
    first.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(again) == fingerprint
    assert tokenizer_fingerprint(copy.deepcopy(again)) == fingerprint


def test_fingerprint_ignores_order_without_meaning() -> None:
    backwards = dict(reversed(list(VOCABULARY.items())))
    assert tokenizer_fingerprint(tokenizer(backwards)) == tokenizer_fingerprint(tokenizer())


def test_fingerprint_ignores_tokens_put_around_a_text() -> None:
    around = tokenizer()
    around.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    assert tokenizer_fingerprint(around) == tokenizer_fingerprint(tokenizer())


def test_fingerprint_sees_what_changes_the_ids() -> None:
    swapped = {**VOCABULARY, "a": VOCABULARY["b"], "b": VOCABULARY["a"]}
    kinds = [
        tokenizer(),
        tokenizer(swapped),
        tokenizer(merges=[MERGES[1], MERGES[0], MERGES[2]]),
        tokenizer(lower=True),
        tokenizer(added=("<tool>",)),
    ]
    assert len({tokenizer_fingerprint(kind) for kind in kinds}) == len(kinds)


def test_fingerprint_sees_the_scores_of_a_unigram_model() -> None:
    def unigram(score: float) -> PreTrainedTokenizerFast:
        backend = Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0), ("b", score)], unk_id=0))
        return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")

    assert tokenizer_fingerprint(unigram(-2.0)) == tokenizer_fingerprint(unigram(-2.0))
    assert tokenizer_fingerprint(unigram(-2.0)) != tokenizer_fingerprint(unigram(-3.0))


def test_fingerprint_of_a_slow_tokenizer_is_of_its_vocabulary() -> None:
    class Slow:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

        def get_added_vocab(self) -> dict[str, int]:
            return {}

    first: Any = Slow({"a": 0, "b": 1})
    second: Any = Slow({"b": 1, "a": 0})
    third: Any = Slow({"a": 1, "b": 0})
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second) != tokenizer_fingerprint(third)


def test_words_of_other_models_are_fingerprinted_too() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    assert len(tokenizer_fingerprint(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))) == 64


def test_randomised_models_differ_by_seed_only() -> None:
    first, second = build("llama"), build("llama")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    randomise(second, seed=1)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert isinstance(ModelGeometry.from_model(first).layers[0], LayerGeometry)
