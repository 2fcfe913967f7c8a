"""
What `benchmarks/gpu.sh` runs: conversion against prefill at the cache geometry of Qwen3-14B → Qwen3-32B.

Some layers of both models are made with random weights, as many as the memory holds. The table scales their times to
the depth of the whole pair, all layers being alike; `--out` has what was measured.
"""

import argparse
import importlib.util
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedConfig, Qwen3Config

from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.latency import measure_latency, measure_rates
from hf_kvtransfer.latency.random_pair import random_mapper, random_model
from hf_kvtransfer.latency.timing import best_of
from hf_kvtransfer.planning import uniform_support
from hf_kvtransfer.tables import table


DEPTHS = 40, 64
LENGTHS = (1024, 4096, 16_384, 32_768, 65_536, 131_072)
RECIPES: dict[str, dict[str, Any]] = {
    "full heads, k = 8": {"k": 8},
    "local heads, k = 8": {"k": 8, "heads": "local"},
}
# Of the memory that is free, what weights, caches and activations of the longest context may take.
_SHARE = 0.8
_MOST_LAYERS = 8


def configs(layers: int, small: bool) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Qwen3-14B and Qwen3-32B with fewer layers, in the same ratio; or the same shape with narrow ones."""
    shapes = ((5120, 17_408, 40), (5120, 25_600, 64)) if not small else ((128, 256, 8), (192, 384, 8))
    depths = (max(round(layers * DEPTHS[0] / DEPTHS[1]), 1), layers)
    made = [
        Qwen3Config(
            num_hidden_layers=depth,
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128 if not small else 16,
            vocab_size=8192,
            max_position_embeddings=LENGTHS[-1],
        )
        for depth, (hidden, inner, heads) in zip(depths, shapes, strict=True)
    ]
    return made[0], made[1]


def layers_that_fit(device: torch.device, tokens: int) -> int:
    """How many layers of the target, with those of the source and the caches that go with them, the GPU holds."""
    free, _ = torch.cuda.mem_get_info(device)
    # In bfloat16: weights of a target layer and of five eighths of a source layer, 20 KB of caches per token, and once
    # the activations of an MLP over all tokens.
    per_layer = 2 * (487e6 + 0.625 * 330e6) + 20e3 * tokens
    return min(int((_SHARE * free - 6 * 25_600 * tokens) / per_layer), _MOST_LAYERS)


@torch.inference_mode()
def attention_rate(tokens: int, device: torch.device, dtype: torch.dtype, backend: SDPBackend) -> float:
    """Operations per second of causal attention at the target's geometry, of which half of the square is counted."""
    states = [torch.randn(1, heads, tokens, 128, device=device).to(dtype) for heads in (64, 8, 8)]
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backend):
        seconds = best_of(lambda: attend(*states, is_causal=True, enable_gqa=True), device)
    return 4 * 64 * 128 * tokens * (tokens + 1) / 2 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="narrow layers and short contexts, on any device")
    parser.add_argument("--layers", type=int, help="of the target; as many as fit, eight at most, by default")
    parser.add_argument("--lengths", help="tokens, separated by commas")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8, help="no longer context is begun that would end after this")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu.json"))
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.small:
        parser.error("There is no CUDA GPU here; --small runs on a CPU, to see that it does.")
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if has_gpu else torch.float32
    lengths = [int(n) for n in arguments.lengths.split(",")] if arguments.lengths else list(LENGTHS)
    if arguments.small:
        lengths = [64, 128]
    layers = arguments.layers or 2
    if not arguments.small and not arguments.layers:
        while lengths and (layers := layers_that_fit(device, lengths[-1])) < 2:
            print(f"Without {lengths.pop():,} tokens: two layers and their caches don't fit into this GPU's memory.")
        if not lengths:
            parser.error("Not even the shortest context fits into this GPU's memory; free some of it.")
    started, rows = time.perf_counter(), []
    rates = measure_rates(device, dtype)
    print(f"{rates.device}, {rates.dtype}: {rates.matmul_flops / 1e12:.3g} TFLOP/s in a large product, ", end="")
    print(f"{rates.copy_bandwidth / 1e9:,.0f} GB/s in a copy; {layers} of {DEPTHS[1]} target layers.", flush=True)
    kernels: dict[str, float] = {}
    if has_gpu:
        for name, backend in (("FlashAttention", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            try:
                kernels[name] = attention_rate(16_384, device, dtype, backend)
            except RuntimeError as error:
                print(f"{name}: not on this GPU ({str(error).splitlines()[0]}).")
    for name, rate in kernels.items():
        print(f"{name} over 16,384 tokens: {rate / 1e12:.3g} TFLOP/s, {rate / rates.matmul_flops:.0%} of a product's.")
    torch.manual_seed(0)
    pair = configs(layers, arguments.small)
    models = [random_model(config, dtype, device) for config in pair]
    geometries = [ModelGeometry.from_config(config) for config in pair]
    has_flash = has_gpu and importlib.util.find_spec("flash_attn") is not None
    for implementation in ("sdpa", *(["flash_attention_2"] if has_flash else [])):
        for model in models:
            model.set_attn_implementation(implementation)
        last = 0.0
        for length in lengths:
            # A context four times as long takes up to sixteen times as long.
            if time.perf_counter() - started + 8 * last > 60 * arguments.minutes:
                print(f"Without {length:,} tokens and more: no time left (--minutes).")
                break
            begun = time.perf_counter()
            try:
                for recipe, settings in RECIPES.items():
                    k = min(settings["k"], geometries[0].num_layers)
                    fields = uniform_support(geometries[0], geometries[1], **{**settings, "k": k})
                    mapper = random_mapper(models[0], models[1], fields, dtype, device)
                    made = measure_latency(*models, mapper, [length], trials=arguments.trials, rates=rates)
                    rows += [{**row, "recipe": recipe, "k": k, "attention": implementation} for row in made]
            except torch.OutOfMemoryError:
                print(f"Without {length:,} tokens and more: out of memory. Fewer --layers take less.")
                break
            last = time.perf_counter() - begun
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"rates": asdict(rates), "kernels": kernels, "layers": [g.num_layers for g in geometries], "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{summary(rows, DEPTHS[1] / layers)}\n\nAll of it took {time.perf_counter() - started:.0f} s.")


def summary(rows: list[dict[str, Any]], scale: float) -> str:
    """Times scaled to the whole pair, and shares of what the GPU does in large products and copies."""
    return table(
        [
            "tokens",
            "recipe",
            "attention",
            "prefill",
            "of matmul",
            "conversion",
            "of matmul",
            "of copy",
            "speed-up",
            "cold",
        ],
        [
            [
                f"{row['context']:,}",
                row["recipe"],
                row["attention"],
                f"{1000 * scale * row['target_prefill']:,.1f} ms",
                f"{row['target_prefill_flops'] / row['target_prefill'] / row['matmul_flops']:.0%}",
                f"{1000 * scale * row['conversion']:,.1f} ms",
                f"{row['conversion_flops'] / row['conversion'] / row['matmul_flops']:.0%}",
                f"{row['conversion_bytes'] / row['conversion'] / row['copy_bandwidth']:.0%}",
                f"{row['warm_speedup']:.1f} ×",
                f"{row['cold_speedup']:.1f} ×",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
