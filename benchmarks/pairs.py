"""The pairs of models that are measured: where they are, what is read, and which recipes are tried on each."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_kvtransfer.calibration import FeatureLayout
from hf_kvtransfer.evaluation import Choice, Question, read_choices, read_questions

from .recipes import BLOCK, EMBEDDED, SMOLLM2, TINY_DOWN, TINY_UP, Way


ROOT = Path(__file__).resolve().parent.parent
FAMILY = ROOT / "examples" / "tiny_family"
EARLY_LAYERS = (3, 5, 7, 9, 11, 13)
MIDDLE_LAYERS = (12, 13, 14, 15, 16, 17)
_SHOTS = 3


@dataclass(frozen=True)
class Sums:
    """
    One collection of statistics.

    Args:
        layout (`FeatureLayout`): what is summed.
        tokens (`int`): tokens of a sequence.
        sequences (`int`): of the calibration text.
        selection (`int`): of the selection text.
        stride (`int`, *optional*, defaults to 1): one token in so many is kept.
        attention_rows (`bool`, *optional*, defaults to `False`): whether rows are summed by attention, too.
        sample_tokens (`int`, *optional*, defaults to 2048): on which recipes are compared.
        anchored_by (`dict`, *optional*):
            A recipe, solved from the sums called `"all"`, whose anchor makes the stream that is summed, in place of the
            target's own.
    """

    layout: FeatureLayout
    tokens: int
    sequences: int
    selection: int
    stride: int = 1
    attention_rows: bool = False
    sample_tokens: int = 2048
    anchored_by: dict[str, Any] | None = None


@dataclass(frozen=True)
class Reading:
    """
    One way of reading the test text.

    Args:
        prefix (`int`): tokens of context.
        scored (`int`): tokens after it.
        chunks (`int`): how many such pieces.
        is_long (`bool`, *optional*, defaults to `False`): whether it takes so long that only the main recipes are read.
    """

    prefix: int
    scored: int
    chunks: int
    is_long: bool = False

    @property
    def name(self) -> str:
        """As in tables."""
        return f"{self.prefix} + {self.scored}"


@dataclass(frozen=True)
class Pair:
    """
    One ordered pair and all that is measured on it.

    Args:
        name (`str`): of files.
        title (`str`): as tables show it.
        source (`Path`): the checkpoint that reads.
        target (`Path`): the checkpoint that answers.
        calibration (`list[str]`): texts that maps are fitted on.
        selection (`list[str]`): texts that recipes are compared on.
        test (`list[str]`): texts that are reported on; several take turns.
        sums (`dict[str, Sums]`): the collections that recipes are solved from, by name.
        ways (`tuple[Way, ...]`): the recipes.
        main (`str`): the recipe that the controls belong to.
        readings (`tuple[Reading, ...]`): of the test texts; the first is the one that costs are counted at.
        questions (`list[Question]`, *optional*): look-ups.
        choices (`dict[str, tuple[list[Choice], list[Choice]]]`, *optional*): multiple choice: questions and shots.
        dtype (`str`, *optional*, defaults to `"float32"`): of the models.
        attention_chunks (`int`, *optional*, defaults to 16): pieces of the first reading on which attention is read.
        bars (`dict`, *optional*): what was promised: `recipes` that keep `kept` at `cost`.
        note (`str`, *optional*): what a reader has to know of the data.
    """

    name: str
    title: str
    source: Path
    target: Path
    calibration: list[str]
    selection: list[str]
    test: list[str]
    sums: dict[str, Sums]
    ways: tuple[Way, ...]
    main: str
    readings: tuple[Reading, ...]
    questions: list[Question] = field(default_factory=list)
    choices: dict[str, tuple[list[Choice], list[Choice]]] = field(default_factory=dict)
    dtype: str = "float32"
    attention_chunks: int = 16
    bars: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def tiny(source: str, target: str, small: bool = False) -> Pair:
    """
    Two members of the tiny family.

    Args:
        source (`str`): the member that reads.
        target (`str`): the member that answers.
        small (`bool`, *optional*, defaults to `False`): few documents, to see that everything runs.
    """
    data = FAMILY / "data"
    calibration = [json.loads(line)["text"] for line in _lines(data / "calibration.jsonl")]
    questions = read_questions(data / "questions.jsonl")
    kinds = dict.fromkeys(question.kind for question in questions)
    if small:
        questions = [q for kind in kinds for q in [q for q in questions if q.kind == kind][:3]]
    up = target == "large"
    layout = FeatureLayout(joint=True, window=1, anchors=(1,) if not up else (1, 2))
    return Pair(
        name=f"tiny-{source}-{target}",
        title=f"Tiny family, {source} → {target}",
        source=FAMILY / source,
        target=FAMILY / target,
        calibration=calibration,
        selection=[q.document + q.question + q.answer + "." for q in read_questions(data / "selection.jsonl")],
        test=[(data / "text_test.txt").read_text(encoding="utf-8")],
        sums={"all": Sums(layout, 256, 60 if small else 600, 10 if small else 40, 1, True)},
        ways=TINY_UP if up else TINY_DOWN,
        main="auto, 1 anchor layer",
        readings=(Reading(128, 128, 3 if small else 50),),
        bars={"recipes": ("auto, 1 anchor layer", "auto, anchor auto"), "cost": 0.5, "kept": 0.95} if up else {},
        questions=questions,
    )


def smollm2(which: str, folder: Path, data: Path) -> Pair:
    """
    SmolLM2-135M-Instruct as the target, and itself without six of its layers as the source.

    Args:
        which (`str`): `"middle"` or `"early"`, the layers that the source lacks.
        folder (`Path`): where the checkpoints are, or are to be made.
        data (`Path`): with WikiText-2 and the multiple choice; public-domain texts take the place of what is missing.
    """
    source, target = folder / f"smollm2-{which}", folder / "smollm2"
    removed = MIDDLE_LAYERS if which == "middle" else EARLY_LAYERS
    if not all((checkpoint / "config.json").exists() for checkpoint in (source, target)):
        _example().make_checkpoints(target, source, removed)
    calibration, selection, test, note = _smollm2_texts(data)
    choices, (sequences, stride) = {}, (72, 2)
    for name, shots, count in (("arc-easy", "dev.json", 40), ("piqa", "test.json", 20)):
        if (data / name / "test.json").is_file():
            asked, shown = read_choices(data / name / "test.json"), read_choices(data / name / shots)[:_SHOTS]
            choices[name] = [choice for choice in asked if choice not in shown][:count], shown
    start, layers = BLOCK
    return Pair(
        name=f"smollm2-{which}",
        title=f"SmolLM2-135M without six {which} layers → SmolLM2-135M",
        source=source,
        target=target,
        calibration=calibration,
        selection=selection,
        test=test,
        sums={
            "all": Sums(
                FeatureLayout(joint=True, anchors=(EMBEDDED, start, start + layers)), 1024, sequences, 8, stride
            ),
            # The maps above a predicted stream are solved on what the target makes of it. Only the prediction matters
            # here, so that the maps are the cheapest there are.
            "anchored": Sums(
                FeatureLayout(joint=True, anchors=(start, start + layers), skip=4),
                1024,
                sequences,
                8,
                stride,
                anchored_by={
                    "preset": "heo2026",
                    "k": 1,
                    "anchor_start": start,
                    "anchor_layers": layers,
                    "exact_prefix": 4,
                },
            ),
            # As many rows as in arXiv 2609.00891: these sums are of one system for each head, layer and kind.
            "weighted": Sums(FeatureLayout(), 1024, 25, 8, 2, True),
        },
        ways=SMOLLM2,
        main="auto, predicted anchor",
        readings=(Reading(1024, 1024, 8, True), Reading(256, 128, 20)),
        choices=choices,
        dtype="bfloat16",
        attention_chunks=1,
        bars={"recipes": ("auto, predicted anchor",), "cost": 0.4, "kept": 0.9 if which == "middle" else 0.75},
        note=note,
    )


def _smollm2_texts(data: Path) -> tuple[list[str], list[str], list[str], str]:
    wikitext = data / "wikitext-2"
    if (wikitext / "valid.txt").is_file() and (wikitext / "test.txt").is_file():
        valid = (wikitext / "valid.txt").read_text(encoding="utf-8")
        # At the end of a line, so that no word is cut.
        cut = valid.index("\n", int(len(valid) * 0.8))
        return [valid[:cut]], [valid[cut:]], [(wikitext / "test.txt").read_text(encoding="utf-8")], "WikiText-2"
    example = _example()
    pieces = example.calibration_texts(example.CALIBRATION)
    cut = len(pieces) * 4 // 5
    tests = [path.read_text(encoding="utf-8") for path in example.TEST]
    note = f"WikiText-2 is not in {data}: the Jargon File and the King James Bible, as in `examples/smollm2.py`"
    return pieces[:cut], pieces[cut:], tests, note


def _example():
    import importlib.util

    spec = importlib.util.spec_from_file_location("smollm2_example", ROOT / "examples" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
