"""
Conversion against what users would do instead, the target's own prefill, by context length, with random weights.

    python -m benchmarks.prefill --shapes smollm2 --lengths 64,1024,4096 --out outputs/prefill.json
    python -m benchmarks.prefill --small

Every row has the ratio to the floor that this machine sets in the same run, what the floating-point counts alone would
give, and what `hf-kvtransfer check --hardware this` predicts. `--figure FILE` draws the rows.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_kvtransfer.cli_bench import latency_tables
from hf_kvtransfer.geometry import ModelGeometry
from hf_kvtransfer.latency import measure_latency, measure_rates
from hf_kvtransfer.latency.random_pair import random_mapper, random_model
from hf_kvtransfer.latency.this_machine import ThisMachine
from hf_kvtransfer.latency.timing import processor_time
from hf_kvtransfer.planning import uniform_support
from hf_kvtransfer.tables import table


# Ways of converting, by name: source layers per map (all there are, if fewer), and what else differs.
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"k": 8},
    "local": {"k": 8, "heads": "local"},
    "all": {"k": 10**6},
    "anchored": {"k": 4, "anchor_layers": 1},
}


def smollm2(layers: int) -> PreTrainedConfig:
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=8192,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )


def qwen3(layers: int, hidden: int, heads: int, *, kv_heads: int = 8, head_dim: int = 128) -> PreTrainedConfig:
    return Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=8192,
        max_position_embeddings=32_768,
    )


# Geometry of the tiny family of the examples, of SmolLM2-135M, and of Qwen3 with fewer and narrower layers.
SHAPES = {
    "tiny": lambda: (
        qwen3(4, 128, 4, kv_heads=2, head_dim=32),
        qwen3(6, 192, 6, kv_heads=2, head_dim=32),
    ),
    "smollm2": lambda: (smollm2(24), smollm2(30)),
    "qwen3": lambda: (qwen3(6, 1024, 16), qwen3(8, 1536, 24)),
}


def measure(shape: str, recipe: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one pair and recipe, with what was predicted of it."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    configs = SHAPES[shape]()
    geometries = [ModelGeometry.from_config(config) for config in configs]
    settings = {**RECIPES[recipe], "k": min(RECIPES[recipe]["k"], geometries[0].num_layers)}
    fields = uniform_support(geometries[0], geometries[1], **settings)
    predicted = ThisMachine(configs[0], configs[1], fields, dtype, device)
    models = [random_model(config, dtype, device) for config in configs]
    mapper = random_mapper(models[0], models[1], fields, dtype, device)
    rows = measure_latency(
        models[0],
        models[1],
        mapper,
        arguments.lengths,
        trials=arguments.trials,
        memory=not arguments.no_memory,
        rates=measure_rates(device, dtype),
    )
    for row in rows:
        row |= {"shape": shape, "recipe": recipe, "processor_time": arguments.processor_time}
        for name in ("source_prefill", "target_prefill", "conversion"):
            row[f"{name}_predicted"] = getattr(predicted, name)(row["context"])
    return rows


def predictions(rows: list[dict[str, Any]]) -> str:
    """How near the predictions came, and how much of the counted speed-up there is."""
    return table(
        ["tokens", "prefill", "predicted / measured", "conversion", "predicted / measured", "of counted speed-up"],
        [
            [
                f"{row['context']:,}",
                f"{1000 * row['target_prefill']:.1f} ms",
                f"{row['target_prefill_predicted'] / row['target_prefill']:.2f}",
                f"{1000 * row['conversion']:.1f} ms",
                f"{row['conversion_predicted'] / row['conversion']:.2f}",
                f"{100 * row['warm_speedup'] / row['counted_speedup']:.0f} %",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="tiny,smollm2,qwen3", help=f"of {', '.join(SHAPES)}, separated by commas")
    parser.add_argument("--recipes", default="full,local,anchored", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--lengths", default="64,256,1024,4096", help="tokens, separated by commas")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the CPU; torch's own choice by default")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, which takes a run more")
    parser.add_argument("--processor-time", action="store_true", help="for a CPU that others use; takes one thread")
    parser.add_argument("--small", action="store_true", help="see that it runs: the tiny shape, short contexts")
    parser.add_argument("--out", type=Path, default=Path("outputs/prefill.json"))
    parser.add_argument("--figure", type=Path, help="draw the rows into this file (extra `plots`)")
    parser.add_argument("--again", type=Path, help="show and draw the rows of this file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.shapes, arguments.recipes, arguments.lengths, arguments.trials = "tiny", "full,anchored", "16,64", 1
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    if arguments.processor_time:
        arguments.threads = 1
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = json.loads(arguments.again.read_text()) if arguments.again else []
    if not rows:
        for shape in arguments.shapes.split(","):
            for recipe in arguments.recipes.split(","):
                torch.manual_seed(0)
                with processor_time() if arguments.processor_time else contextlib.nullcontext():
                    made = measure(shape, recipe, arguments)
                rows += made
                print(f"\n{shape}, {recipe}: {latency_tables(made)}\n\n{predictions(made)}", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if arguments.figure is not None:
        from .latency_figure import draw

        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()
