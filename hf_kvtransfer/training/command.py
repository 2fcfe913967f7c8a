"""`hf-kvtransfer train`: from command-line arguments to a trained mapper."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Subset
from transformers import HfArgumentParser

from ..calibration.texts import DEFAULT_DATASET
from ..errors import CalibrationError
from ..loading import load_model, load_tokenizer
from ..mapper import KVMapper
from ..tables import table
from .arguments import KVTrainingArguments
from .cached import CachedFeatures
from .forms import with_form
from .rows import TokenRows
from .trainer import KVMapperTrainer


@dataclass
class TrainCommandArguments:
    """
    What is trained, and on what.

    Args:
        mapper (`str`): a fitted mapper, a folder or a name on the Hub.
        source (`str`): its source model, likewise.
        target (`str`): its target model, likewise.
        text (`str`, *optional*, defaults to `"HuggingFaceFW/fineweb-edu"`):
            A `.txt` or `.jsonl` file, or a dataset on the Hub.
        sequence_length (`int`, *optional*, defaults to 1024): tokens in a row.
        train_sequences (`int`, *optional*, defaults to 500): rows to train on at most.
        eval_sequences (`int`, *optional*, defaults to 16):
            Rows before them that losses are reported on, before and after training; with 0, the first `scale_rows` of
            those that are trained on.
        features (`str`, *optional*):
            Folder in which to keep what both models make of the text, for this run and for others.
        form (`str`, *optional*): functional form to give a linear mapper: `"residual"` or `"mlp"`.
        hidden (`int`, *optional*, defaults to 1024): units in each hidden layer of that form.
        source_revision (`str`, *optional*): branch, tag or commit of the source.
        target_revision (`str`, *optional*): of the target.
        mapper_revision (`str`, *optional*): of the mapper.
        dtype (`str`, *optional*, defaults to `"auto"`): of both models' weights.
        trust_remote_code (`bool`, *optional*, defaults to `False`): run model code that comes with a checkpoint.
    """

    mapper: str = field(metadata={"help": "A fitted mapper: a folder or a name on the Hub."})
    source: str = field(metadata={"help": "The model that reads: a folder or a name on the Hub."})
    target: str = field(metadata={"help": "The model that goes on: a folder or a name on the Hub."})
    text: str = field(default=DEFAULT_DATASET, metadata={"help": "A .txt or .jsonl file, or a dataset on the Hub."})
    sequence_length: int = field(default=1024, metadata={"help": "Tokens in a row."})
    train_sequences: int = field(default=500, metadata={"help": "Rows to train on at most."})
    eval_sequences: int = field(
        default=16, metadata={"help": "Rows before them for reporting losses; 0: training rows."}
    )
    features: str | None = field(
        default=None, metadata={"help": "Folder to keep what both models make of the text, for this run and others."}
    )
    form: str | None = field(default=None, metadata={"help": 'Form to give a linear mapper: "residual" or "mlp".'})
    hidden: int = field(default=1024, metadata={"help": "Units in each hidden layer of that form."})
    source_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the source."})
    target_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the target."})
    mapper_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the mapper."})
    dtype: str = field(default="auto", metadata={"help": "Of both models' weights."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that comes with a checkpoint."})


def train_from_arguments(argv: Sequence[str] | None = None) -> KVMapperTrainer:
    """
    Trains a mapper as command-line arguments say: those of [`TrainCommandArguments`] and of [`KVTrainingArguments`],
    which has every `TrainingArguments`. The trained mapper is saved to `output_dir`, beside Trainer's own files; losses
    before training are printed beside those after.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments; those of the process by default.

    Returns:
        [`KVMapperTrainer`]: after training and an evaluation.
    """
    types: Any = (TrainCommandArguments, KVTrainingArguments)
    parser = HfArgumentParser(types, prog="hf-kvtransfer train", description="Train a fitted mapper further.")
    command, args = parser.parse_args_into_dataclasses(args=list(sys.argv[1:] if argv is None else argv))
    args.eval_on_start = True
    trainer = make_trainer(command, args)
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", trained.metrics)
    trainer.save_metrics("train", trained.metrics)
    measured = trainer.evaluate()
    trainer.log_metrics("eval", measured)
    trainer.save_metrics("eval", measured)
    if trainer.is_world_process_zero():
        print(_before_and_after(trainer, measured, command.eval_sequences))
    if args.push_to_hub:
        trainer.push_to_hub()
    return trainer


def _before_and_after(trainer: KVMapperTrainer, after: dict[str, float], held_out: int) -> str:
    """A table of the losses; those before are the first that were logged, also of a run that was resumed since."""
    before = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    names = ["loss", *trainer.module.figures]
    lines = [[name, *(f"{figures[f'eval_{name}']:.5f}" for figures in (before, after))] for name in names]
    rows: Any = trainer.eval_dataset
    kind = "held-out rows" if held_out else "rows, which were trained on"
    return f"\n{table([f'on {len(rows)} {kind}', 'before training', 'after'], lines)}"


def make_trainer(command: TrainCommandArguments, args: KVTrainingArguments) -> KVMapperTrainer:
    """
    Loads what a run needs.

    Raises:
        [`KVTransferError`]: if a model, the tokenizer, the mapper or the text can't be used.
    """
    for name, least in (("eval_sequences", 0), ("train_sequences", 1)):
        if getattr(command, name) < least:
            raise CalibrationError(
                f"`{name}` is {getattr(command, name)}; expected {least} or more. Say how many rows of text there are."
            )
    mapper = KVMapper.from_pretrained(command.mapper, revision=command.mapper_revision, min_gap_recovered=False)
    if command.form is not None and command.form != mapper.config.map_type:
        mapper = with_form(mapper, command.form, hidden=command.hidden)
    tokenizer = load_tokenizer(
        command.source, revision=command.source_revision, trust_remote_code=command.trust_remote_code
    )
    mapper.check_pair(tokenizer=tokenizer)
    source, target = (
        load_model(name, revision=revision, dtype=command.dtype, trust_remote_code=command.trust_remote_code)
        for name, revision in ((command.source, command.source_revision), (command.target, command.target_revision))
    )
    config = mapper.config
    # What an anchor further up puts out depends on the mapper, and is computed as it is needed.
    anchors = () if config.anchor_layers is None or config.anchor_start else (config.anchor_layers,)
    lengths = {"sequence_length": command.sequence_length}
    datasets: dict[str, Any] = {}
    if command.eval_sequences:
        datasets["eval"] = TokenRows(command.text, tokenizer, num_sequences=command.eval_sequences, **lengths)
    datasets["train"] = TokenRows(
        command.text, tokenizer, num_sequences=command.train_sequences, skip=command.eval_sequences, **lengths
    )
    if command.features is not None:
        # One process writes, the others of the same run read.
        with args.main_process_first(desc="capturing features"):
            datasets = {
                split: CachedFeatures.capture(
                    f"{command.features}/{split}",
                    source.to(args.device),
                    target.to(args.device),
                    tokenizer,
                    rows,
                    anchors=anchors,
                    queries=args.queries if args.attention_weight else 0,
                    batch_size=args.per_device_eval_batch_size,
                )
                for split, rows in datasets.items()
            }
    trained_on = datasets["train"]
    return KVMapperTrainer(
        mapper,
        args,
        source=source,
        target=target,
        train_dataset=trained_on,
        eval_dataset=datasets.get("eval", Subset(trained_on, range(min(args.scale_rows, len(trained_on))))),
        processing_class=tokenizer,
    )
