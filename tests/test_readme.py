"""The README's snippets run as they stand there, on the tiny family."""

import re

import pytest
import torch
from transformers import TextStreamer

from hf_kvtransfer import KVMapper
from hf_kvtransfer._compat import TRANSFORMERS_VERSION

from .conftest import FAMILY, ROOT


README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def names(family_model, family_tokenizer, tmp_path, monkeypatch):
    """What the snippets take for granted."""
    source, target = family_model("small"), family_model("large")
    mapper = KVMapper.fit(
        source,
        target,
        str(FAMILY / "data" / "calibration.jsonl"),
        tokenizer=family_tokenizer,
        sequence_length=64,
        num_sequences=30,
        token_stride=1,
    )
    mapper.save_pretrained(tmp_path / "org" / "qwen3-14b-to-32b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(KVMapper, "push_to_hub", lambda self, name: None)
    (tmp_path / "my_texts.jsonl").write_bytes((FAMILY / "data" / "calibration.jsonl").read_bytes())
    conversation = (
        "Story: Anna put the kettle in the garden. Ben put the lamp in the attic. Where is the kettle? In the"
    )
    inputs = family_tokenizer(conversation, return_tensors="pt")
    with torch.no_grad():
        source_cache = source(**inputs)
    return {
        "source": source,
        "target": target,
        "tokenizer": family_tokenizer,
        "conversation": conversation,
        "inputs": inputs,
        "source_cache": source_cache,
        "mapper": mapper,
        "KVMapper": KVMapper,
        "TextStreamer": TextStreamer,
    }


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.split("\n", 1)[0][:40])
def test_a_snippet_runs_as_it_stands(snippet, names, monkeypatch, allow_deprecated):
    if "num_sequences" not in snippet:
        # The published number of sequences would take the test a minute.
        fit = KVMapper.fit
        monkeypatch.setattr(KVMapper, "fit", lambda *args, **kwargs: fit(*args, num_sequences=20, **kwargs))
    if TRANSFORMERS_VERSION >= (5, 24):
        allow_deprecated("past_key_values")
    snippet = snippet.replace("k=8", "k=2")  # the tiny source has four layers
    exec(snippet, names)
    assert isinstance(names["mapper"], KVMapper)
    if "output" in names:
        assert names["output"].shape[1] > names["inputs"].input_ids.shape[1]


def test_the_two_commands_are_those_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("python3 dev.py demo", "python3 dev.py test"):
        assert f"```bash\n{command}\n```" in README
        assert re.search(rf"^{re.escape(command)}$", ci, flags=re.MULTILINE)
