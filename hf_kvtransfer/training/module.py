"""`KVTransferModule`: a mapper that, given a training batch, returns a loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..calibration.attention import QueryRecord
from ..calibration.texts import check_whole
from ..contents import ContentMaker
from ..errors import CalibrationError
from ..features import KINDS
from ..mapper import KVMapper
from ..source import SourceCache
from .batches import FEATURES, counted_positions, source_cache, unflatten
from .handover import HandOver, draw_handover, middle_handover
from .losses import attention_error, content_error, next_token_divergence
from .queries import with_queries
from .scores import keep_as_closed_form


@dataclass(frozen=True)
class LossWeights:
    """
    How much each loss counts; those at zero aren't computed.

    Args:
        content (`float`, *optional*, defaults to 1.0):
            Squared error of content-space keys and values, over the variance of each target layer and kind.
        attention (`float`, *optional*, defaults to 0.0):
            Squared error of attention outputs under the target's own queries, over their own mean square.
        kl (`float`, *optional*, defaults to 0.0):
            Kullback-Leibler divergence, in nats a token, of the target's next-token distributions on a converted
            context from those on its own.
    """

    content: float = 1.0
    attention: float = 0.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        weights = vars(self)
        numbers = all(
            isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
            for weight in weights.values()
        )
        if not numbers or not any(weights.values()) or any(weight < 0 for weight in weights.values()):
            raise CalibrationError(
                f"The losses are weighted {weights}; expected weights of zero or more, and at least one above zero. "
                "Say what the mapper is to be trained on."
            )


@dataclass
class KVTransferOutput(ModelOutput):
    """
    Args:
        loss (`torch.Tensor`): the weighted sum of the losses, averaged over rows.
        content (`torch.Tensor` of shape `[batch]`, *optional*): content-space error of each row, 1 − R² or so.
        attention (`torch.Tensor` of shape `[batch]`, *optional*): attention-output error of each row.
        kl (`torch.Tensor` of shape `[batch]`, *optional*): divergence of each row, in nats a token.
        agreement (`torch.Tensor` of shape `[batch]`, *optional*):
            Share of the continuation's tokens at which the most likely next token is the same.
    """

    loss: Tensor | None = None
    content: Tensor | None = None
    attention: Tensor | None = None
    kl: Tensor | None = None
    agreement: Tensor | None = None


class KVTransferModule(nn.Module):
    """
    Wraps a mapper, whose parameters are its only ones, for `transformers.Trainer` or any other loop. Batches hold
    captured features, as [`CachedFeatures`] and [`capture_batch`] give them. From the first loss in training mode on,
    the mapper's R² are `config.scores["closed_form"]`, and it has no evaluation any more.

    Args:
        mapper ([`KVMapper`]): fitted, or at least with maps.
        weights ([`LossWeights`], *optional*): content-space error alone by default.
        attention (`Sequence[QueryRecord]`, *optional*):
            How each target layer attends, for the attention loss; `CachedFeatures.attention` has it.
        shortest_context (`int`, *optional*, defaults to 16): how many tokens are converted at least, for the KL.
        longest_continuation (`int`, *optional*, defaults to 64): how many tokens are scored at most, for the KL.

    Example:

    ```python
    >>> module = KVTransferModule(mapper, LossWeights(content=1.0, attention=1.0))
    >>> estimate_scales(module, features)
    >>> Trainer(model=module, args=args, train_dataset=features).train()
    >>> module.mapper.save_pretrained("trained")
    ```
    """

    # `forward` has no loss of its own to divide by the number of items: Trainer averages over accumulated batches.
    accepts_loss_kwargs = False

    def __init__(
        self,
        mapper: KVMapper,
        weights: LossWeights | None = None,
        *,
        attention: Sequence[QueryRecord] = (),
        shortest_context: int = 16,
        longest_continuation: int = 64,
    ) -> None:
        super().__init__()
        for name, value in (("shortest_context", shortest_context), ("longest_continuation", longest_continuation)):
            check_whole(name, value, 1)
        if not any(True for _ in mapper.parameters()):
            raise CalibrationError(
                "This mapper has nothing to train; expected one with maps. Fit one with `KVMapper.fit` first, or give "
                "`KVMapper.for_pair` a support."
            )
        self.mapper = mapper
        supports = [support for entry in mapper.config.supports() for support in (entry or {}).values()]
        self.reads_anchor = any(support.anchor for support in supports)
        if mapper.entry is not None:
            # It is read by layers of the target, through which no gradient comes back.
            mapper.entry.requires_grad_(False)
        self.weights = LossWeights() if weights is None else weights
        self.attention = list(attention)
        self.shortest_context = shortest_context
        self.longest_continuation = longest_continuation
        layers = len(mapper.config.geometry("target").layers)
        # Not saved: a checkpoint holds the mapper and nothing else.
        self.register_buffer("variances", torch.ones(layers, len(KINDS)), persistent=False)

    variances: Tensor
    """Of each target layer's keys and values, `[layers, 2]`; see [`estimate_scales`]."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        source_keys: Tensor | None = None,
        source_values: Tensor | None = None,
        target_keys: Tensor | None = None,
        target_values: Tensor | None = None,
        hidden: Tensor | None = None,
        queries: Tensor | None = None,
        target: nn.Module | None = None,
        handover: HandOver | None = None,
        return_loss: bool = True,
    ) -> KVTransferOutput:
        """
        Args:
            input_ids (`torch.Tensor` of shape `[batch, tokens]`, *optional*): needed by the KL.
            source_keys (`torch.Tensor` of shape `[batch, tokens, width]`):
                Of all source layers side by side, rotated, as the source cached them.
            source_values (`torch.Tensor` of shape `[batch, tokens, width]`): likewise.
            target_keys (`torch.Tensor` of shape `[batch, tokens, width]`): the target's own.
            target_values (`torch.Tensor` of shape `[batch, tokens, width]`): likewise.
            hidden (`torch.Tensor` of shape `[batch, tokens, hidden_size + 1]`, *optional*):
                The anchor's output as features, needed by mappers that read one.
            queries (`torch.Tensor` of shape `[batch, queries, width]`, *optional*):
                The target's own, needed by the attention-output error.
            target (`PreTrainedModel`, *optional*): frozen, in evaluation mode; needed by the KL.
            handover ([`HandOver`], *optional*):
                Where the target takes over, for the KL. By default at a random token in training, drawn from torch's
                generator, and in the middle in evaluation.
            return_loss (`bool`, *optional*, defaults to `True`): there is nothing else to return.

        Returns:
            [`KVTransferOutput`]

        Raises:
            [`CalibrationError`]: if the batch lacks what a loss reads.
        """
        given = (source_keys, source_values, target_keys, target_values)
        captured: dict[str, Any] = dict(zip(FEATURES, given, strict=True))
        config = self.mapper.config
        missing = [name for name, value in captured.items() if value is None]
        if hidden is None and self.reads_anchor:
            missing.append("hidden")
        if missing:
            raise CalibrationError(
                f"The batch lacks {', '.join(missing)}; expected what both models made of its rows. Train on "
                "`CachedFeatures`, or with `KVMapperTrainer`, which runs the models itself."
            )
        if self.training and torch.is_grad_enabled():
            keep_as_closed_form(config)
        source = source_cache(captured, config.geometry("source"))
        geometry = config.geometry("target")
        native = unflatten(captured["target_keys"], geometry), unflatten(captured["target_values"], geometry)
        figures: dict[str, Tensor] = {}
        if self.weights.content or self.weights.attention:
            figures |= self._per_layer(source, native, hidden, queries)
        if self.weights.kl:
            if target is None or input_ids is None:
                raise CalibrationError(
                    "The KL loss runs the target over a continuation, and the target or `input_ids` is missing; "
                    "expected both in the call. Use `KVMapperTrainer`, which has the models, or a weight of zero."
                )
            if handover is None:
                handover = self.handover(input_ids.shape[1])
            divergence = next_token_divergence(self.mapper, target, input_ids, source, native, handover)
            figures["kl"], figures["agreement"] = divergence
        loss = sum(weight * figures[name].mean() for name, weight in vars(self.weights).items() if weight)
        detached = {name: figure.detach() for name, figure in figures.items()}
        if not bool(torch.isfinite(torch.as_tensor(loss))):
            raise CalibrationError(
                f"The losses of this batch are {[(name, float(figure.mean())) for name, figure in detached.items()]}; "
                "expected finite ones. The features hold NaN or infinite numbers, or training has run away: capture "
                "them again from models in bfloat16 or float32, or use a smaller learning rate."
            )
        return KVTransferOutput(loss=torch.as_tensor(loss), **detached)

    @property
    def figures(self) -> list[str]:
        """Names of what is measured of each row, in the order of [`KVTransferOutput`]."""
        names = [name for name, weight in vars(self.weights).items() if weight]
        return [*names, "agreement"] if "kl" in names else names

    def average(self, prediction: Any) -> dict[str, float]:
        """A `compute_metrics` for `transformers.Trainer`: the mean of each figure over all rows."""
        arrays = prediction.predictions
        arrays = arrays if isinstance(arrays, tuple) else (arrays,)
        return {name: float(array.mean()) for name, array in zip(self.figures, arrays, strict=True)}

    def handover(self, tokens: int, generator: torch.Generator | None = None) -> HandOver:
        """
        Where the target takes over in rows of so many tokens: at a random one in training, in the middle otherwise.

        Args:
            tokens (`int`): length of the rows.
            generator (`torch.Generator`, *optional*): torch's own by default.
        """
        # The target reads some tokens itself, and at least one has to be left for the maps.
        natively = self.mapper.config.exact_prefix + self.mapper.config.exact_suffix
        shortest = max(self.shortest_context, natively + 1)
        if not self.training:
            return middle_handover(tokens, shortest, self.longest_continuation)
        return draw_handover(tokens, shortest, self.longest_continuation, generator)

    def _per_layer(
        self,
        source: SourceCache,
        native: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        hidden: Tensor | None,
        queries: Tensor | None,
    ) -> dict[str, Tensor]:
        """Content and attention errors, averaged over target layers with maps."""
        codec = self.mapper.codec("target")
        positions = counted_positions(source.num_tokens, source.keys[0].device)
        tables, prefix = codec.tables(positions.target), self.mapper.config.exact_prefix
        records = with_queries(self.attention, queries) if self.weights.attention else None
        errors: dict[str, list[Tensor]] = {"content": [], "attention": []}
        for index, keys, values in ContentMaker(self.mapper, source, positions).contents(0, source.num_tokens, hidden):
            own_keys, own_values = native[0][index], native[1][index]
            content = codec.remove(own_keys, tables, index)
            # What the target reads itself is never mapped, however badly.
            keys, values = (
                torch.cat([own[:, :, :prefix].to(made), made[:, :, prefix:]], dim=2) if prefix else made
                for own, made in ((content, keys), (own_values, values))
            )
            if self.weights.content:
                for kind, (mapped, own) in enumerate(((keys, content), (values, own_values))):
                    errors["content"].append(content_error(mapped, own) / self.variances[index, kind])
            if records is not None:
                rotated = codec.apply(keys, tables, index)
                errors["attention"].append(attention_error(records[index], (rotated, values), (own_keys, own_values)))
        return {name: torch.stack(layers).mean(0) for name, layers in errors.items() if layers}
