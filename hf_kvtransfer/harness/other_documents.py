"""Which document stands in for another where a control needs a different one."""

from collections.abc import Hashable, Sequence
from typing import Any

from ..errors import KVTransferError


def other_documents(requests: Sequence[Any]) -> dict[str, str]:
    """
    For each text that requests read, the first text of the next document that reads another one. Several requests may
    be about one document, such as the options of a question. Empty texts stand for nothing.

    Args:
        requests (`Sequence[Instance]`): of lm-evaluation-harness, their text first among their arguments.

    Raises:
        [`KVTransferError`]: if all are about one document.
    """
    documents: dict[Hashable, str] = {}
    texts: dict[str, Hashable] = {}
    for request in requests:
        text = request.args[0]
        key = text if request.doc_id is None else (request.task_name, request.doc_id)
        if text:
            documents.setdefault(key, text)
            texts.setdefault(text, key)
    keys = list(documents)
    place = {key: index for index, key in enumerate(keys)}
    others = {}
    for text, key in texts.items():
        following = (documents[keys[(place[key] + step) % len(keys)]] for step in range(1, len(keys)))
        other = next((other for other in following if other != text), None)
        if other is None:
            raise KVTransferError(
                "All requests are about one and the same document; expected two or more for the condition "
                "'different_document'. Raise `--limit`, or use another condition."
            )
        others[text] = other
    return others
