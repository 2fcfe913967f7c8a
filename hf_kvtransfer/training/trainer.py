"""`KVMapperTrainer`: trains a mapper with `transformers.Trainer`, frozen models beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import upload_folder
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerState, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from ..errors import CalibrationError
from ..mapper import KVMapper
from ..publishing import push_in_background
from .arguments import KVTrainingArguments
from .batches import FEATURES, anchor_output_of, capture_batch, source_cache
from .cached import CachedFeatures
from .module import KVTransferModule
from .resuming import load_weights, readable
from .scales import estimate_scales


def stacked(rows: list[Any]) -> dict[str, Any]:
    """
    Rows as a batch.

    Raises:
        [`CalibrationError`]: if they are of different lengths.
    """
    lengths = {len(row["input_ids"]) for row in rows if "input_ids" in row}
    if len(lengths) > 1:
        raise CalibrationError(
            f"The rows of one batch have {sorted(lengths)} tokens; expected one length, without padding. Pack the text "
            "with `TokenRows`."
        )
    batch: dict[str, Any] = default_data_collator(rows)
    return batch


class KVMapperTrainer(Trainer):
    """
    `transformers.Trainer` for a mapper. The two models are frozen and live on the trainer: checkpoints, `save_model`
    and `push_to_hub` hold the mapper alone, as `KVMapper.save_pretrained` writes it, and each loads with
    `KVMapper.from_pretrained`.

    Training goes on from the maps that the mapper has, usually the closed form's, whose R² are then in
    `config.scores["closed_form"]`; an evaluation, of other weights, is dropped. Hand-over points of the KL are drawn
    from the seed and the step, so that accumulated batches, several processes and a resumed run all see the same.

    Args:
        mapper ([`KVMapper`]): is trained in place.
        args ([`KVTrainingArguments`]): the losses, and all that `TrainingArguments` has.
        source (`PreTrainedModel`, *optional*):
            The source model; is frozen and moved to the training device. Not needed with [`CachedFeatures`].
        target (`PreTrainedModel`, *optional*):
            The target model, likewise. With [`CachedFeatures`] it is needed by the KL alone.
        train_dataset (`Dataset`, *optional*): [`TokenRows`], [`CachedFeatures`], or any with `input_ids` of one length.
        eval_dataset (`Dataset`, *optional*): likewise. Losses are then reported as `eval_content`, `eval_kl`, …
        **kwargs: as in `transformers.Trainer`.

    Example:

    ```python
    >>> args = KVTrainingArguments("out", content_weight=1.0, kl_weight=1.0, learning_rate=1e-4)
    >>> trainer = KVMapperTrainer(mapper, args, source=source, target=target, train_dataset=TokenRows(texts, tokenizer))
    >>> trainer.train()
    ```

    Raises:
        [`CalibrationError`]: if a model is missing that the losses need.
        [`PairMismatchError`]: if models or features are of another pair than the mapper.

    `train(resume_from_checkpoint=…)` raises [`CalibrationError`] for a checkpoint of another mapper, and
    [`MapperFileError`] for one that is damaged.
    """

    model: Any

    def __init__(
        self,
        mapper: KVMapper,
        args: KVTrainingArguments,
        *,
        source: nn.Module | None = None,
        target: nn.Module | None = None,
        train_dataset: "Dataset[Any] | None" = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, KVTrainingArguments):
            raise CalibrationError(
                f"`args` is a {type(args).__name__}; expected `KVTrainingArguments`, which say what the losses are "
                "made of. It takes every argument of `TrainingArguments`."
            )
        mapper.check_pair(source=source, target=target)
        evaluated = list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]
        datasets = [dataset for dataset in (train_dataset, *evaluated) if dataset is not None]
        cached = [dataset for dataset in datasets if isinstance(dataset, CachedFeatures)]
        for features in cached:
            features.check(mapper)
        module = KVTransferModule(
            mapper,
            args.loss_weights,
            attention=next((features.attention for features in cached), ()),
            shortest_context=args.shortest_context,
            longest_continuation=args.longest_continuation,
        )
        kwargs.setdefault("compute_metrics", module.average)
        # With a tokenizer, Trainer would pad rows that need no padding.
        kwargs.setdefault("data_collator", stacked)
        super().__init__(model=module, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self.module = module
        self.source: Any = _frozen(source, args.device)
        self.target: Any = _frozen(target, args.device)
        if args.label_names is None:
            # Trainer computes metrics only where there are labels.
            self.label_names = ["input_ids"]
        self._measured: dict[str, list[Tensor]] = {}
        if datasets:
            rows = islice(iter(datasets[0]), args.scale_rows)
            estimate_scales(module, (self._completed(self.data_collator([row])) for row in rows))

    # ---------------------------------------------------------------------------------------------------- the losses

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As in `transformers.Trainer`, after adding what the models make of the batch."""
        inputs = self._completed(inputs)
        if self.module.weights.kl:
            inputs["target"] = self.target
            if self.model.training:
                inputs["handover"] = self._handover(inputs["input_ids"].shape[1])
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if self.model.training:
            for name in self.module.figures:
                self._measured.setdefault(name, []).append(outputs[name].mean())
        return (loss, outputs) if return_outputs else loss

    def _completed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch with the features that both models make of it, unless it has them."""
        module, is_captured = self.module, all(name in inputs for name in FEATURES)
        lacks_anchor = module.reads_anchor and "hidden" not in inputs
        needed = ("source", "target") if not is_captured else ("target",) if module.weights.kl or lacks_anchor else ()
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise CalibrationError(
                f"Training needs the {' and the '.join(missing)} model, which the trainer wasn't given; expected "
                "`KVMapperTrainer(mapper, args, source=…, target=…)`. With `CachedFeatures` the content and attention "
                "losses need neither, and the KL and anchors that weren't captured need the target alone."
            )
        completed = {**inputs, "input_ids": inputs["input_ids"].to(self.args.device)}
        if not is_captured:
            queries = self.args.queries if module.weights.attention else 0
            captured, module.attention = capture_batch(
                self.source, self.target, completed["input_ids"], queries=queries
            )
            completed |= {name: value.to(self.args.device) for name, value in captured.items()}
        if lacks_anchor:
            source = source_cache(completed, module.mapper.config.geometry("source"))
            hidden = anchor_output_of(module.mapper, self.target, completed["input_ids"], source)
            completed["hidden"] = hidden.to(self.args.device)
        return completed

    def _handover(self, tokens: int) -> Any:
        # By seed and step: all batches of a step share it, on all processes, and a resumed run draws it again.
        seed = (self.args.seed * 1_000_003 + self.state.global_step) % 2**32
        return self.module.handover(tokens, torch.Generator().manual_seed(seed))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in `transformers.Trainer`; beside the loss its parts, averaged in the same way."""
        if "loss" in logs:
            for name, figures in self._measured.items():
                mean = torch.stack(figures).float().mean()
                logs[name] = round(float(self.accelerator.gather(mean).mean()), 6)
            self._measured = {}
        super().log(logs, *args, **kwargs)

    # ----------------------------------------------------------------------------------------------------- the files

    @contextmanager
    def _mapper_as_model(self) -> Iterator[None]:
        """What Trainer does for a `PreTrainedModel` is wanted for the mapper, not for the module around it."""
        module, self.model = self.model, self.module.mapper
        try:
            yield
        finally:
            self.model = module

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if state_dict is not None:
            state_dict = {name.removeprefix("mapper."): value for name, value in state_dict.items()}
        config = self.module.mapper.config
        config.calibration = {
            **config.calibration,
            "training": {"steps": self.state.global_step, "seed": self.args.seed, "losses": vars(self.module.weights)},
        }
        with self._mapper_as_model():
            super()._save(output_dir, state_dict)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Saves the mapper and publishes it with its card, as `KVMapper.push_to_hub` does. `transformers.Trainer` would
        send whatever lies in `output_dir`: logs, training arguments, files of your own.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`): of the commit.
            blocking (`bool`, *optional*, defaults to `True`): whether to wait until everything is published.
            token (`str`, *optional*): by default `args.hub_token`, or the one of `hf auth login`.
            revision (`str`, *optional*): the branch; by default `args.hub_revision`, or `main`.
            private (`bool`, *optional*): whether a repository that is made now is private.
            **kwargs: `tags` are added to the card's; what else `Trainer` takes describes cards of its own.

        Returns:
            `huggingface_hub.CommitInfo`, or a `Future` of it with `blocking=False`; `None` on all processes but one.

        Raises:
            [`HubError`]: if nothing could be published.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        own = {"token": token, "revision": revision, "private": private, "tags": kwargs.get("tags")}
        job = self._publish(str(self.args.output_dir), commit_message, **own)
        return job.result() if blocking else job

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy, running = self.args.hub_strategy, getattr(self, "push_in_progress", None)
        unfinished = [] if running is None or running.is_done() else running.jobs
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        if unfinished and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        jobs = [self._publish(checkpoint_folder, message)]
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):  # whole checkpoints were asked for
            job = upload_folder(
                repo_id=str(self.hub_model_id),
                folder_path=checkpoint_folder,
                path_in_repo="last-checkpoint" if strategy == HubStrategy.CHECKPOINT else Path(checkpoint_folder).name,
                commit_message=f"{message}, checkpoint",
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                run_as_future=True,
            )
            jobs.append(job)
        self.push_in_progress = PushInProgress([*unfinished, *jobs])

    def _publish(self, folder: str, message: str | None, **given: Any) -> Any:
        usual = {
            "token": self.args.hub_token,
            "revision": self.args.hub_revision,
            "private": self.args.hub_private_repo,
        }
        given = {name: value for name, value in given.items() if value is not None}
        repo_id = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        return push_in_background(folder, repo_id, commit_message=message, **(usual | given))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As in `transformers.Trainer`."""
        with self._mapper_as_model():
            super().create_model_card(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_weights(self.module.mapper, resume_from_checkpoint)
        with readable("the state", resume_from_checkpoint):
            TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))

    def _load_best_model(self) -> None:
        load_weights(self.module.mapper, str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with readable("the optimizer's state", checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with readable("the state of the random generators", checkpoint):
            super()._load_rng_state(checkpoint)


def _frozen(model: nn.Module | None, device: torch.device) -> nn.Module | None:
    if model is None:
        return None
    model = model.eval().requires_grad_(False)
    # What a device map has spread out, and what is quantised, stays where it is.
    placed = getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)
    return model if placed else model.to(device)
