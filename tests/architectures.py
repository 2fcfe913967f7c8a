"""Tiny random models of many architectures, each with what makes it special for RoPE.

`ARCHITECTURES` are supported, `REFUSED` are not. A line here is all that a new architecture needs to be tested.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


VOCAB = 128

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TWO_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4_096,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2_048,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    # Queries are scaled by the position in steps of this length, so deeper layers agree only within the first step.
    "original_max_position_embeddings": 16_384,
    "llama_4_scaling_beta": 0.1,
}


def _config(name: str, **values: Any) -> Callable[[], PreTrainedConfig]:
    """A factory of the config class of that name; `_ABSENT` leaves out a value that all others have."""

    def make() -> PreTrainedConfig:
        # Copies, as some config classes write into the dictionaries that they are given.
        chosen = copy.deepcopy({key: value for key, value in {**_SMALL, **values}.items() if value is not _ABSENT})
        return getattr(transformers, name)(**chosen)

    make.config_name = name  # type: ignore[attr-defined]
    return make


_ABSENT = object()


def _wrapped(name: str, text: str, vision: dict[str, Any], **values: Any) -> Callable[[], PreTrainedConfig]:
    def make() -> PreTrainedConfig:
        section = {**_SMALL, "model_type": text, **values}
        return getattr(transformers, name)(text_config=copy.deepcopy(section), vision_config=copy.deepcopy(vision))

    make.config_name = name  # type: ignore[attr-defined]
    return make


def _olmo3() -> PreTrainedConfig:
    """YaRN where attention is full; newer releases have rotary parameters by layer type, and ignore flat ones."""
    make = _config("Olmo3Config", layer_types=_TWO_TYPES, sliding_window=6, rope_parameters=_YARN)
    if "full_attention" not in make().rope_parameters:
        return make()
    by_type = {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    return _config("Olmo3Config", layer_types=_TWO_TYPES, sliding_window=6, rope_parameters=by_type)()


_olmo3.config_name = "Olmo3Config"  # type: ignore[attr-defined]

_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,  # as many as the text has, so that depth alone can't tell the decoder
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("LlamaConfig", **_HEAD),
    "llama-llama3": _config("LlamaConfig", **_HEAD, rope_parameters=_LLAMA3),
    "llama-yarn": _config("LlamaConfig", **_HEAD, rope_parameters=_YARN),
    "llama-linear": _config(
        "LlamaConfig", **_HEAD, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    ),
    "mistral": _config("MistralConfig", **_HEAD, sliding_window=None),
    "mistral-sliding": _config("MistralConfig", **_HEAD, sliding_window=6),
    "ministral3": _config("Ministral3Config", **_HEAD, sliding_window=None, rope_parameters=_MINISTRAL3_ROPE),
    "mistral3": _wrapped(
        "Mistral3Config", "ministral3", _PIXTRAL, **_HEAD, sliding_window=None, rope_parameters=_MINISTRAL3_ROPE
    ),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", **_HEAD),
    "qwen3-yarn": _config("Qwen3Config", **_HEAD, rope_parameters=_YARN),
    "qwen3_moe": _config("Qwen3MoeConfig", **_HEAD, **_MOE),
    "phi3": _config(
        "Phi3Config", rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    ),
    "gemma2": _config("Gemma2Config", **_HEAD, layer_types=_TWO_TYPES, sliding_window=6),
    "gemma3": _config(
        "Gemma3TextConfig",
        **_HEAD,
        layer_types=_TWO_TYPES,
        sliding_window=6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    ),
    "olmo2": _config("Olmo2Config"),
    "olmo3": _olmo3,
    "granite": _config("GraniteConfig", attention_multiplier=0.25),
    "cohere": _config("CohereConfig", use_qk_norm=True),
    "cohere2": _config("Cohere2Config", **_HEAD, layer_types=_TWO_TYPES, sliding_window=6),
    "glm4": _config("Glm4Config", **_HEAD),
    "gpt_neox": _config(
        "GPTNeoXConfig",
        num_key_value_heads=_ABSENT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    ),
    "stablelm": _config("StableLmConfig", qk_layernorm=True),
    "stablelm-half": _config(
        "StableLmConfig",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "starcoder2": _config("Starcoder2Config", sliding_window=None),
    "gpt_oss": _config(
        "GptOssConfig",
        **_HEAD,
        layer_types=_TWO_TYPES,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_YARN,
    ),
    "smollm3": _config("SmolLM3Config", no_rope_layers=[1, 0, 1], use_sliding_window=False),
    "exaone4": _config("Exaone4Config", **_HEAD, layer_types=_TWO_TYPES, sliding_window=6, sliding_window_pattern=2),
    "nanochat": _config("NanoChatConfig"),
    "modernbert_decoder": _config(
        "ModernBertDecoderConfig", num_key_value_heads=_ABSENT, layer_types=_TWO_TYPES, local_attention=12
    ),
}

_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 4_096,
    "factor": 4.0,
}


def _plain(name: str, **values: Any) -> Callable[[], PreTrainedConfig]:
    """A factory for configs whose fields have names of their own."""

    def make() -> PreTrainedConfig:
        return getattr(transformers, name)(**copy.deepcopy(values))

    make.config_name = name  # type: ignore[attr-defined]
    return make


# By name: the config, and a word that the sentence must hold.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "llama-dynamic": (_config("LlamaConfig", **_HEAD, rope_parameters=_DYNAMIC), "dynamic RoPE"),
    "phi3-longrope": (
        _config("Phi3Config", rope_parameters=_LONGROPE, original_max_position_embeddings=4_096),
        "longrope RoPE",
    ),
    "hunyuan_v1_dense": (
        _config("HunYuanDenseV1Config", **_HEAD, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
        "key_layernorm",
    ),
    "deepseek_v2": (_config("DeepseekV2Config", **_MLA), "latent"),
    "deepseek_v3": (_config("DeepseekV3Config", **_MLA), "latent"),
    "gpt2": (_plain("GPT2Config", **_GPT2), "learned absolute positions"),
    "opt": (
        _plain(
            "OPTConfig",
            vocab_size=VOCAB,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        "learned absolute positions",
    ),
    "bloom": (_plain("BloomConfig", vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), "ALiBi"),
    "falcon-alibi": (
        _plain(
            "FalconConfig",
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            alibi=True,
        ),
        "ALiBi",
    ),
    "mpt": (_plain("MptConfig", vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4), "ALiBi"),
    "t5": (
        _plain("T5Config", vocab_size=VOCAB, d_model=64, d_ff=64, d_kv=16, num_layers=2, num_heads=4),
        "encoder-decoder",
    ),
    "bart": (
        _plain(
            "BartConfig",
            vocab_size=VOCAB,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
        ),
        "encoder-decoder",
    ),
    "mamba": (_plain("MambaConfig", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), "recurrent"),
    "mamba2": (
        _plain(
            "Mamba2Config",
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=16,
            n_groups=1,
        ),
        "recurrent",
    ),
    "jamba": (_config("JambaConfig", num_experts=2), "recurrent"),
    "bamba": (_config("BambaConfig", **_MAMBA, attn_layer_indices=[1]), "recurrent"),
    "qwen3_next": (_config("Qwen3NextConfig", **_HEAD, **_MOE, num_hidden_layers=4), "linear_attention"),
    "lfm2": (_config("Lfm2Config", layer_types=["conv", "full_attention", "conv"]), "conv"),
    "gemma3n": (
        _config(
            "Gemma3nTextConfig",
            **_HEAD,
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
            laurel_rank=8,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=VOCAB,
        ),
        "shares keys and values",
    ),
    "llama4": (_config("Llama4TextConfig", **_HEAD, num_local_experts=2, intermediate_size_mlp=64), "complex"),
    "rwkv": (_plain("RwkvConfig", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), "recurrent"),
}


def missing() -> list[str]:
    """The architectures of the registry that this release of Transformers doesn't have."""
    factories = {**ARCHITECTURES, **{name: factory for name, (factory, _) in REFUSED.items()}}
    return sorted(name for name, factory in factories.items() if not hasattr(transformers, factory.config_name))


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """
    A model of the registry with random weights, large enough that attention is far from uniform.

    Args:
        name (`str`):
            A key of `ARCHITECTURES`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            The dtype of the weights.
        seed (`int`, *optional*, defaults to 0):
            Another seed gives another model of the same architecture.
    """
    config = ARCHITECTURES[name]()
    wrapper = config.get_text_config() is not config
    auto = transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Gives matrices weights of standard deviation 0.2 and all vectors (norms, biases) values away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.2 * noise if parameter.ndim > 1 else 1.0 + 0.3 * noise)
