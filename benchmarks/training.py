"""Training a mapper for a short while, from its closed form."""

import sys
import tempfile
from typing import Any

import torch
from torch import nn

from hf_kvtransfer import KVMapper
from hf_kvtransfer.training import KVMapperTrainer, KVTrainingArguments, TokenRows, with_form


def trained(
    mapper: KVMapper,
    source: nn.Module,
    target: nn.Module,
    tokenizer: Any,
    texts: list[str],
    *,
    form: str,
    options: dict[str, Any] | None = None,
    tokens: int = 128,
    rows: int = 1000,
    **arguments: Any,
) -> KVMapper:
    """
    A mapper of another form, trained on the calibration text.

    Args:
        mapper ([`KVMapper`]): the closed form; left as it is.
        source (`PreTrainedModel`): the model that reads.
        target (`PreTrainedModel`): the model that answers.
        tokenizer (`PreTrainedTokenizerBase`): of both.
        texts (`list[str]`): the calibration text.
        form (`str`): a key of `hf_kvtransfer.maps.MAPS`.
        options (`dict`, *optional*): arguments of the form.
        tokens (`int`, *optional*, defaults to 128): of a training row.
        rows (`int`, *optional*, defaults to 1000): how many there are.
        **arguments: of `KVTrainingArguments`, where they differ from the ones below.
    """
    torch.manual_seed(0)
    # A linear one is a copy, too.
    made = with_form(mapper, form, **(options or {}))
    frozen = {id(model): [parameter.requires_grad for parameter in model.parameters()] for model in (source, target)}
    with tempfile.TemporaryDirectory() as folder:
        settings = KVTrainingArguments(
            folder,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            logging_strategy="no",
            disable_tqdm=not sys.stderr.isatty(),
            **{"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "per_device_train_batch_size": 8, **arguments},
        )
        dataset = TokenRows(texts, tokenizer, sequence_length=tokens, num_sequences=rows)
        KVMapperTrainer(made, settings, source=source, target=target, train_dataset=dataset).train()
    for model in (source, target):
        for parameter, was in zip(model.parameters(), frozen[id(model)], strict=True):
            parameter.requires_grad_(was)
    return made.eval()
