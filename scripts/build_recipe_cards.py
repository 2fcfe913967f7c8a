"""Writes the recipe cards of the paper's six pairs from `model_cards/pairs.json`, or checks that they are so."""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
CARDS = ROOT / "model_cards"
sys.path.insert(0, str(ROOT))

# How many of its own layers the target runs in the example with an anchor.
ANCHOR_LAYERS = 4


def recipe_cards() -> dict[Path, str]:
    """The text of every recipe card, by its path."""
    import jinja2
    from transformers import AutoConfig

    from hf_kvtransfer.planning import plan_pair
    from hf_kvtransfer.recipes import CONTEXT_LENGTH

    data = json.loads((CARDS / "pairs.json").read_text(encoding="utf-8"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(CARDS),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("recipe.md.jinja")
    configs = {name: AutoConfig.for_model(**values) for name, values in data["models"].items()}
    cards = {}
    for pair in data["pairs"]:
        plan = plan_pair(configs[pair["source"]], configs[pair["target"]])
        cards[CARDS / "recipes" / f"{pair['name']}.md"] = template.render(
            **{**pair, "source": side(pair["source"], plan.source), "target": side(pair["target"], plan.target)},
            expected=list(expected(plan, pair["k"])),
            tokens=f"{CONTEXT_LENGTH:,}",
        )
    return cards


def side(name: str, geometry: Any) -> dict[str, Any]:
    """What a card says of one checkpoint."""
    heads = sorted({f"{layer.kv_heads} × {layer.head_dim}" for layer in geometry.layers})
    return {
        "name": name,
        "short": name.split("/")[-1].removesuffix("-BF16"),
        "layers": geometry.num_layers,
        "heads": ", ".join(heads),
        "hidden_size": f"{geometry.hidden_size:,}",
    }


def expected(plan: Any, k: int) -> Iterator[list[str]]:
    """Size and cost of three mappers of a pair, one row of a table each."""
    from hf_kvtransfer.cli_options import in_bytes, in_words
    from hf_kvtransfer.planning import plan_recipes

    recipes = {
        f"as published: all KV heads of {k} layers": {},
        f"head-local, {k} layers": {"heads": "local"},
        f"head-local, and {ANCHOR_LAYERS} layers of the target's own": {"heads": "local", "anchors": [ANCHOR_LAYERS]},
    }
    for name, fields in recipes.items():
        one = plan_recipes(plan, ks=[k], **fields)[0]
        yield [
            name,
            in_words(one.parameters),
            in_bytes(2 * one.parameters),
            in_bytes(one.statistics_bytes),
            f"{100 * one.cost.share_of_prefill:.1f} %",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the cards")
    mode.add_argument("--check", action="store_true", help="fail if the cards are not what would be written")
    arguments = parser.parse_args()
    stale = 0
    for path, text in recipe_cards().items():
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        if arguments.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif written != text:
            stale = 1
            print(f"{path.relative_to(ROOT)} is not up to date: run `python scripts/build_recipe_cards.py --write`.")
            print("\n".join(difflib.unified_diff(written.splitlines(), text.splitlines(), lineterm="", n=0)))
    return stale


if __name__ == "__main__":
    sys.exit(main())
