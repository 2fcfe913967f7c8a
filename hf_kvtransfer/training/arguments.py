"""`KVTrainingArguments`: those of Transformers, and what the losses are made of."""

from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.utils import is_accelerate_available

from ..calibration.texts import check_whole
from ..errors import KVTransferError
from .module import LossWeights


@dataclass
class KVTrainingArguments(TrainingArguments):
    """
    Every argument of `transformers.TrainingArguments`, and the following. The weights of the losses combine freely;
    those at zero aren't computed.

    Args:
        content_weight (`float`, *optional*, defaults to 1.0):
            Of the squared error of content-space keys and values, over their variance.
        attention_weight (`float`, *optional*, defaults to 0.0):
            Of the error of attention outputs under the target's own queries.
        kl_weight (`float`, *optional*, defaults to 0.0):
            Of the divergence of the target's next-token distributions on a converted context.
        queries (`int`, *optional*, defaults to 32):
            At how many log-spaced tokens of a row the target's queries are taken, for the attention loss.
        shortest_context (`int`, *optional*, defaults to 16):
            How many tokens are converted at least, before the target takes over, for the KL.
        longest_continuation (`int`, *optional*, defaults to 64):
            How many tokens the target is scored on at most, for the KL.
        scale_rows (`int`, *optional*, defaults to 8):
            On how many of the first training rows the variances of keys and values are measured.
    """

    content_weight: float = field(default=1.0, metadata={"help": "Of the error of content-space keys and values."})
    attention_weight: float = field(default=0.0, metadata={"help": "Of the error of attention outputs."})
    kl_weight: float = field(default=0.0, metadata={"help": "Of the divergence of next-token distributions."})
    queries: int = field(default=32, metadata={"help": "The target's queries per row, for the attention loss."})
    shortest_context: int = field(default=16, metadata={"help": "Tokens converted at least, for the KL."})
    longest_continuation: int = field(default=64, metadata={"help": "Tokens scored at most, for the KL."})
    scale_rows: int = field(default=8, metadata={"help": "Rows on which variances are measured."})
    # All maps are used in every step, and buffers never change: nothing to look for and nothing to send around.
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "As in TrainingArguments; every map is used in every step."}
    )
    ddp_broadcast_buffers: bool | None = field(
        default=False, metadata={"help": "As in TrainingArguments; no buffer changes in training."}
    )

    def __post_init__(self) -> None:
        if not is_accelerate_available():
            raise KVTransferError(
                "Training needs accelerate, and it isn't installed; expected `pip install hf_kvtransfer[train]`."
            )
        super().__post_init__()
        self.loss_weights  # noqa: B018 - refuses what can't be trained on before anything is loaded
        for name in ("queries", "shortest_context", "longest_continuation", "scale_rows"):
            check_whole(name, getattr(self, name), 1)
        if self.gradient_checkpointing:
            raise KVTransferError(
                "`gradient_checkpointing` recomputes the layers of a deep model, and a mapper has none; expected it to "
                "be off. For less memory lower `per_device_train_batch_size` and raise `gradient_accumulation_steps`."
            )

    @property
    def n_gpu(self) -> int:
        """One at most in each process: frozen models aren't copied along by `DataParallel`. Several take `torchrun`."""
        return min(int(super().n_gpu), 1)

    @property
    def loss_weights(self) -> LossWeights:
        """The three weights."""
        return LossWeights(self.content_weight, self.attention_weight, self.kl_weight)
