"""Score the members: ``python examples/tiny_family/score.py``.

Prints the table that README.md quotes, writes it there between its two markers, and writes ``scores.json``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import stories
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3ForCausalLM


HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- scores -->", "<!-- /scores -->"
WINDOW = 512
"""Tokens of held-out text read at a time."""

Question = dict[str, object]


@torch.no_grad()
def predict(model: Qwen3ForCausalLM, prompts: list[list[int]], pad: int) -> list[int]:
    """The most likely next token of every prompt, over the full vocabulary."""
    length = max(map(len, prompts))
    # Padding on the right is never looked at: attention is causal and the last real token is read out.
    ids = torch.tensor([prompt + [pad] * (length - len(prompt)) for prompt in prompts])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    return model.lm_head(hidden[torch.arange(len(prompts)), last]).argmax(-1).tolist()


def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, questions: list[Question], context: bool = True
) -> dict[str, float]:
    """Share of right answers per kind, with the document before the question or without it."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for kind in stories.KINDS:
        asked = [question for question in questions if question["kind"] == kind]
        texts = [f"{question['document'] if context else ''}{question['question']}" for question in asked]
        wanted = [tokenizer.encode(str(question["answer"]), add_special_tokens=False)[0] for question in asked]
        prompts = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in texts]
        found = predict(model, prompts, tokenizer.pad_token_id)
        hits[kind] = [a == b for a, b in zip(found, wanted, strict=True)]
    return {kind: sum(right) / len(right) for kind, right in hits.items()}


def quick_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, split: str, seed: int, count: int
) -> dict[str, float]:
    """``accuracy`` over ``count`` freshly drawn questions per kind, for a look during training."""
    rng = random.Random(seed)
    drawn = [stories.draw_question(rng, kind, 6 + i % 3, split) for kind in stories.KINDS for i in range(count)]
    return accuracy(model, tokenizer, drawn)


def chance(questions: list[Question]) -> dict[str, float]:
    """What picking blindly among the values that the story mentions would score, per kind."""
    odds: dict[str, list[float]] = defaultdict(list)
    for question in questions:
        odds[str(question["kind"])].append(1 / len(question["choices"]))  # type: ignore[arg-type]
    return {kind: sum(values) / len(values) for kind, values in odds.items()}


@torch.no_grad()
def text_loss(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, prose: str) -> float:
    """Mean negative log-likelihood in nats per token, over windows of ``WINDOW`` tokens that do not overlap."""
    ids = [id for line in prose.splitlines() for id in tokenizer.encode(line, add_special_tokens=False)]
    total, tokens = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW):
        window = torch.tensor([ids[start : start + WINDOW]])
        if window.shape[1] < 2:
            break
        logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        tokens += window.shape[1] - 1
    return total / tokens


def table(scores: dict[str, dict[str, dict[str, float] | float]], odds: dict[str, float]) -> str:
    """The scores as a Markdown table, accuracies in per cent."""
    heads = ["member", "context", *stories.KINDS, "text NLL"]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    for member, score in scores.items():
        for context, label in (("native", "its own"), ("none", "none")):
            by_kind = score[context]
            assert isinstance(by_kind, dict)
            cells = [f"{100 * by_kind[kind]:.0f} %" for kind in stories.KINDS]
            loss = f"{score['text_nll']:.2f}" if context == "native" else ""
            lines.append("| " + " | ".join([f"`{member}`", label, *cells, loss]) + " |")
    cells = [f"{100 * odds[kind]:.0f} %" for kind in stories.KINDS]
    lines.append("| " + " | ".join(["chance", "", *cells, ""]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Score the members that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("members", nargs="*", help="folders of members (default: all next to this file)")
    parser.add_argument("--questions", type=Path, default=HERE / "data" / "questions.jsonl")
    parser.add_argument("--dry", action="store_true", help="only print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folders = [Path(member) for member in args.members] or sorted(path.parent for path in HERE.glob("*/config.json"))
    questions = [json.loads(line) for line in args.questions.read_text(encoding="utf-8").splitlines()]
    prose = (HERE / "data" / "text_test.txt").read_text(encoding="utf-8")
    scores: dict[str, dict[str, dict[str, float] | float]] = {}
    for folder in folders:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        scores[folder.name] = {
            "native": accuracy(model, tokenizer, questions),
            "none": accuracy(model, tokenizer, questions, context=False),
            "text_nll": text_loss(model, tokenizer, prose),
        }
    odds = chance(questions)
    lines = table(scores, odds)
    print(lines)
    if args.dry:
        return
    record = json.dumps({"members": scores, "chance": odds}, indent=2)
    (HERE / "scores.json").write_text(record + "\n", encoding="utf-8")
    card = HERE / "README.md"
    before, rest = card.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    card.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
