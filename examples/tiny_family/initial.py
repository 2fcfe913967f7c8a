"""Initial weights that let look-ups be learned in hundreds of steps instead of thousands.

What holds a tiny model up is not the look-up itself but the heads of the first layer that attend to the token one, two
or three back: with normalised queries and keys of 32 dimensions they need weights far from where training starts. So
all embeddings start with one common part, and the first layer's queries and keys start as rotations of one vector read
from that part: head ``h`` attends ``h + 1`` tokens back. Everything else starts at random, and all of it is trained.
"""

from __future__ import annotations

import math

import torch
from transformers import Qwen3ForCausalLM


EMBEDDING_STD = 0.1
LOCAL_FREQUENCY = 0.3
"""Rotary planes slower than this (radians a token) are left out: they do not tell neighbours apart."""

SHARPNESS = 2.0
"""Weight of the first layer's query and key norms: sets how little a head attends to the neighbours of its token."""


@torch.no_grad()
def start_with_local_heads(model: Qwen3ForCausalLM) -> None:
    """Change fresh random weights in place, so that the first layer's heads attend 1, 2, 3, ... tokens back."""
    config = model.config
    size, half = config.head_dim, config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    embeddings = model.model.embed_tokens.weight
    embeddings.mul_(EMBEDDING_STD / config.initializer_range)
    common = torch.sign(torch.randn(config.hidden_size)) * EMBEDDING_STD
    embeddings += common
    unit = common / common.norm()

    frequencies = [theta ** (-i / half) for i in range(half)]
    planes = [i for i, frequency in enumerate(frequencies) if frequency > LOCAL_FREQUENCY]
    share = 1 / math.sqrt(len(planes))
    attention = model.model.layers[0].self_attn
    queries, keys = attention.q_proj.weight, attention.k_proj.weight
    queries.mul_(0.2)
    keys.mul_(0.2)
    for head in range(config.num_key_value_heads):
        key = torch.zeros(size)
        key[planes] = share
        keys[head * size : (head + 1) * size] += torch.outer(key, unit)
    for head in range(config.num_attention_heads):
        query = torch.zeros(size)
        for i in planes:
            angle = -(head + 1) * frequencies[i]
            query[i], query[i + half] = share * math.cos(angle), share * math.sin(angle)
        queries[head * size : (head + 1) * size] += torch.outer(query, unit)
    attention.q_norm.weight.fill_(SHARPNESS)
    attention.k_norm.weight.fill_(SHARPNESS)
