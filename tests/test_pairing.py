"""Whether models and tokenizer are those that a mapper was fitted for, and what is no model or tokenizer at all."""

import copy

import pytest
import torch
from transformers import AutoTokenizer

from hf_kvtransfer import KVMapper, PairMismatchError, UnsupportedModelError
from hf_kvtransfer.pairing import weight_sample

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


def cast(model, dtype):
    """As `from_pretrained(…, dtype=…)` loads it, which keeps rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def adapted(config, start=0.3):
    """A model with an adapter, all of whose parameters are away from where they begin."""
    from peft import get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(build("qwen3"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(start * torch.randn_like(parameter))
    return model


def adapters():
    from peft import IA3Config, LNTuningConfig, LoraConfig, OFTConfig, VeraConfig

    return {
        "ia3": IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
        "oft": OFTConfig(target_modules=["k_proj"], r=0, oft_block_size=4),
        "vera": VeraConfig(target_modules=["k_proj"], r=2),
        "norms": LNTuningConfig(target_modules=["input_layernorm"]),
        "embedding": LoraConfig(r=2, target_modules=["embed_tokens"]),
        "tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
        "saved": LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["embed_tokens"]),
        "dora": LoraConfig(r=2, target_modules=["v_proj"], use_dora=True),
    }


@pytest.mark.parametrize("kind", ["ia3", "oft", "vera", "norms", "embedding", "tokens", "saved", "dora"])
def test_an_adapter_of_any_kind_is_noticed_and_known_again(qwen3, mapper, kind):
    model = adapted(adapters()[kind])
    with pytest.raises(PairMismatchError, match="another adapter"):
        mapper.check_pair(source=model)
    its_own = KVMapper.for_pair(model, model)
    its_own.check_pair(source=model, target=adapted(adapters()[kind]))
    its_own.check_pair(source=cast(adapted(adapters()[kind]), torch.bfloat16))
    with pytest.raises(PairMismatchError, match="another adapter"):
        its_own.check_pair(target=qwen3)
    with pytest.raises(PairMismatchError, match="another adapter|other weights"):
        its_own.check_pair(target=adapted(adapters()[kind], start=-0.3))


def test_an_adapter_counts_while_it_is_in_use(mapper, qwen3):
    from peft import LoraConfig

    model = adapted(LoraConfig(r=2, target_modules=["k_proj"]))
    with model.disable_adapter():
        mapper.check_pair(source=model)
    merged = model.merge_and_unload()
    with pytest.raises(PairMismatchError, match="other weights"):
        mapper.check_pair(source=merged)
    KVMapper.for_pair(merged, merged).check_pair(target=merged)


def test_learned_prompts_are_refused(qwen3, mapper):
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    for config in (
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ):
        model = get_peft_model(build("qwen3"), config)
        for use in (lambda m: KVMapper.for_pair(m, qwen3), lambda m: mapper.check_pair(source=m)):
            with pytest.raises(UnsupportedModelError, match="add virtual tokens that no token id stands for"):
                use(model)
        mapper.check_pair(source=model.get_base_model())


@pytest.mark.parametrize("name", ["embed_tokens", "layers.0.self_attn.k_proj", "layers.1.self_attn.v_proj"])
def test_other_weights_are_noticed_where_they_are(mapper, name):
    model = build("qwen3")
    mapper.check_pair(source=model)
    with torch.no_grad():
        model.get_submodule(f"model.{name}").weight.mul_(1.02)  # as a fine-tuned checkpoint, hardly different
    with pytest.raises(PairMismatchError, match="other weights"):
        mapper.check_pair(source=model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_dtype_pass(mapper, qwen3, dtype):
    half = cast(build("qwen3"), dtype)
    mapper.check_pair(source=half)
    KVMapper.for_pair(half, half).check_pair(source=qwen3, target=cast(build("qwen3"), torch.bfloat16))


def test_rows_for_further_tokens_change_nothing(mapper):
    model = build("qwen3")
    before = weight_sample(model)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    after = weight_sample(model)
    assert after["embedding"][: len(before["embedding"])] == before["embedding"]


def test_what_an_earlier_release_stored_is_still_compared(qwen3, mapper):
    """It had three matrices of the first and the last layer, and one size for all adapters."""
    config = copy.deepcopy(mapper.config)
    for side in ("source_weights", "target_weights"):
        sample = getattr(config, side)
        names = [sorted(name for name in sample if name.startswith(f"layers.{index}."))[:3] for index in (0, 1)]
        setattr(config, side, {name: sample[name] for one in names for name in one} | {"adapters": [0.0]})
        assert len(getattr(config, side)) == 7
    earlier = KVMapper(config)
    earlier.check_pair(source=qwen3, target=qwen3)
    with pytest.raises(PairMismatchError, match="other weights"):
        earlier.check_pair(source=build("qwen3", seed=5))
    with pytest.raises(PairMismatchError, match="another adapter"):
        earlier.check_pair(target=adapted(adapters()["ia3"]))
