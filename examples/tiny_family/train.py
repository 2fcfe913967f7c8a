"""Train one member of the family: ``python examples/tiny_family/train.py small --text kjv.txt``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import score
import stories
import text
import tokenizer as tokenizers
import torch
from batches import Rows
from initial import start_with_local_heads
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging


HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Member:
    """Shape of a member and how it is trained.

    ``alone`` is the share of the steps that have no prose, ``prose`` the share of rows that are prose at last,
    ``tokens`` the size of a batch; ``matrix_rate``, ``rate`` and ``norm_rate`` are the learning rates of the layers'
    matrices, of the embeddings and of the norms.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    steps: int
    seed: int
    alone: float = 0.33
    prose: float = 0.30
    tokens: int = 4096
    matrix_rate: float = 0.02
    rate: float = 3e-3
    norm_rate: float = 0.02


MEMBERS = {
    # Few steps, small batches and few stories: with more of them it becomes as good as the others at every kind.
    "small": Member(4, 128, 384, 4, 2, 32, steps=480, seed=1, alone=0.36, prose=0.85, tokens=2048),
    "large": Member(6, 192, 352, 6, 2, 32, steps=900, seed=5),
    "wide": Member(4, 128, 384, 4, 1, 64, steps=600, seed=3),
}
"""All defaults of every member."""


def build_model(member: Member, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """The member with fresh weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=member.width,
        intermediate_size=member.inner,
        num_hidden_layers=member.layers,
        num_attention_heads=member.heads,
        num_key_value_heads=member.kv_heads,
        head_dim=member.head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    start_with_local_heads(model)
    return model


def build_optimizers(model: Qwen3ForCausalLM, member: Member) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embeddings = [p for name, p in model.named_parameters() if "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=member.matrix_rate, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(embeddings, lr=member.rate, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.AdamW(norms, lr=member.norm_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_at(done: float, step: int) -> float:
    """Share of the full learning rate: a short warm-up, full rate for 40 % of the steps, then a cosine down."""
    warm = min(1.0, (step + 1) / 50)
    return warm * (1.0 if done < 0.4 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - 0.4) / 0.6)))


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean loss. Logits are made only where the weight is not zero, which saves much of the time."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    kept = weights[:, 1:] > 0
    logits = model.lm_head(hidden[kept]).float()
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][kept], reduction="none")
    weight = weights[:, 1:][kept]
    return (losses * weight).sum() / weight.sum()


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the member as a bf16 checkpoint with its tokenizer."""
    saved = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    saved.load_state_dict(model.state_dict())
    saved.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    saved.save_pretrained(folder)
    tokenizers.save_tokenizer(tokenizer, folder)


def store(path: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], rows: Rows, step: int) -> None:
    """Write all that training needs to go on after ``step`` steps; an interruption leaves the older file whole."""
    parts = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save({**parts, "rows": rows.state(), "step": step}, f"{path}.part")
    os.replace(f"{path}.part", path)


def restore(path: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], rows: Rows) -> int:
    """Go back to what ``store`` wrote; returns how many steps were done."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    rows.restore(state["rows"])
    return state["step"]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("member", choices=MEMBERS)
    parser.add_argument("--text", type=Path, required=True, help="the King James Bible, see README.md")
    parser.add_argument("--steps", type=int, help="instead of the member's")
    parser.add_argument("--seed", type=int, help="instead of the member's")
    parser.add_argument("--alone", type=float, help="share of the steps without prose, instead of the member's")
    parser.add_argument("--matrix-rate", type=float, help="instead of the member's")
    parser.add_argument("--rate", type=float, help="instead of the member's")
    parser.add_argument("--prose", type=float, help="share of prose at last, instead of the member's")
    parser.add_argument("--tokens", type=int, help="tokens in a batch, instead of the member's")
    parser.add_argument("--out", type=Path, help="where the member goes (default: next to this file)")
    parser.add_argument("--state", type=Path, help="checkpoint to write, and to resume from if it exists")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=200, help="steps between scores and checkpoints")
    return parser.parse_args()


def main() -> None:
    """Train, resuming from the checkpoint if there is one, and export at every checkpoint."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    names = ("steps", "seed", "alone", "prose", "tokens", "matrix_rate", "rate")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    member = replace(MEMBERS[args.member], **given)
    out = args.out or HERE / args.member
    prose = text.split_chapters(text.read_chapters(args.text))["train"]
    shared = HERE / "tokenizer"
    if not shared.exists():
        tokenizers.save_tokenizer(tokenizers.train_tokenizer(prose), shared)
    tokenizer = AutoTokenizer.from_pretrained(shared)

    torch.manual_seed(member.seed)
    model = build_model(member, tokenizer)
    optimizers = build_optimizers(model, member)
    rows = Rows(tokenizer, prose, member.seed, member.alone, member.prose)
    start = restore(args.state, model, optimizers, rows) if args.state and args.state.exists() else 0
    full = [member.matrix_rate, member.rate, member.norm_rate]

    began = time.perf_counter()
    total, counted = 0.0, 0
    bar = tqdm(range(start, member.steps), initial=start, total=member.steps, disable=not sys.stderr.isatty())
    for step in bar:
        done = step / member.steps
        # Longer rows now and then, later on, so that positions beyond a short row's are known too.
        length = 512 if done > 0.4 and step % 5 == 0 else 128
        ids, weights = rows.batch(member.tokens // length, length, done)
        for optimizer, rate in zip(optimizers, full, strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_at(done, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        total, counted = total + loss.item(), counted + 1
        if (step + 1) % args.every == 0 or step + 1 == member.steps:
            accuracy = score.quick_accuracy(model, tokenizer, "selection", seed=0, count=40)
            line = " ".join(f"{kind} {accuracy[kind]:.2f}" for kind in stories.KINDS)
            bar.write(f"step {step + 1} loss {total / counted:.3f} {line} {time.perf_counter() - began:.0f} s")
            sys.stdout.flush()
            total, counted = 0.0, 0
            export(model, tokenizer, out)
            if args.state:
                store(args.state, model, optimizers, rows, step + 1)


if __name__ == "__main__":
    main()
