"""`TokenRows`: text as rows of token ids, for a trainer that runs the models itself."""

import hashlib
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..calibration.texts import describe_source, iter_texts, pack
from ..errors import CalibrationError


class TokenRows(Dataset[dict[str, Tensor]]):
    """
    Packed rows of token ids, as calibration reads them.

    Args:
        texts: anything that [`iter_texts`] reads: strings, a file, a dataset or the name of one on the Hub.
        tokenizer (`PreTrainedTokenizerBase`): the one that both models share.
        sequence_length (`int`, *optional*, defaults to 1024): tokens in a row.
        num_sequences (`int`, *optional*): rows at most; all of the text by default.
        skip (`int`, *optional*, defaults to 0): rows passed over first, such as those of an evaluation.

    Raises:
        [`CalibrationError`]: if a text can't be read, or there is too little of it.
    """

    def __init__(
        self,
        texts: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sequence_length: int = 1024,
        num_sequences: int | None = None,
        skip: int = 0,
    ) -> None:
        self.name = describe_source(texts)
        limit = None if num_sequences is None else num_sequences + skip
        packed = islice(pack(iter_texts(texts), tokenizer, sequence_length, limit), skip, None)
        rows = [torch.tensor(row, dtype=torch.long) for row in packed]
        if not rows:
            raise CalibrationError(
                f"After the {skip} rows that are skipped no rows are left of {self.name}; expected more text. Pass "
                "more, or a smaller `sequence_length`."
            )
        self.rows = torch.stack(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}

    @property
    def digest(self) -> str:
        """SHA-256 of all token ids."""
        return hashlib.sha256(self.rows.numpy().tobytes()).hexdigest()
