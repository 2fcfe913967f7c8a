"""Seeded generator of short stories whose later questions can only be answered from earlier facts.

A story is a list of facts (who put which thing where, who moved it since, who owns what, how many of what), in one of
two phrasings. *terse*: ``Notes: kettle in garden. lamp in attic. kettle in`` -> `` garden``. *full*: ``Story: Anna put
the kettle in the garden. Where is the kettle? In the`` -> `` garden``. Every document starts with a word of its own
(``Notes:``/``Story:``), so that each thing, name, place and number has its leading space everywhere and stays the same
token; every question starts with a space, so that a document and its question tokenised apart give the same ids as
together. Stories are assigned to a split by a hash of their text: the splits never share a story.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Ben Clara David Emma Frank Grace Henry Irene Jack Kate Leo Maria Nora Oscar Paul Quinn Rosa Sam Tina Victor "
    "Wendy Alice Boris Diana Felix Helen Ivan Julia Karl"
)
THINGS = _words(
    "kettle lamp book key coat hat cup ball clock rope knife spoon drum map ring shoe box bag pen comb candle mirror "
    "basket brush hammer bottle pillow ladder bell plate saddle jar whistle kite mask chair bucket broom scarf coin"
)
PLACES = _words(
    "garden attic cellar kitchen barn shed hall library tower stable office closet garage bakery chapel temple museum "
    "school forest harbor cave market palace tunnel cabin bedroom pantry mill church prison"
)
COUNTABLES = _words(
    "apples eggs stones birds horses letters buttons nails candies onions plums pears ducks sheep roses boats carts "
    "chickens cookies pebbles"
)
NUMBERS = _words("two three four five six seven eight nine ten eleven twelve")

KINDS = ("terse", "full", "moved", "owner", "count")
"""Kinds of question; all but the first are asked in full sentences in the test set."""

SPLITS = {"train": (0, 80), "calibration": (80, 90), "selection": (90, 95), "test": (95, 100)}
"""Which hundredths of the stories' hash space each split owns."""

Piece = tuple[str, bool]
"""A stretch of a story's text, and whether it is an answer."""


@dataclass(frozen=True)
class Fact:
    """One thing a story tells: ``relation`` is place, moved, owner or count; ``value`` is what a question asks for."""

    relation: str
    who: str
    thing: str
    value: str

    @property
    def asked(self) -> str:
        """The relation a question about this fact asks for: a move answers the question for the place."""
        return "place" if self.relation == "moved" else self.relation


FACT_TEXT = {
    ("place", True): " {thing} in {value}.",
    ("moved", True): " {thing} now in {value}.",
    ("owner", True): " {thing} of {value}.",
    ("count", True): " {thing} number {value}.",
    ("place", False): " {who} put the {thing} in the {value}.",
    ("moved", False): " {who} moved the {thing} to the {value}.",
    ("owner", False): " The {thing} belongs to {value}.",
    ("count", False): " {who} counted the {thing}: {value}.",
}
QUESTION_TEXT = {
    ("place", True): " {thing} in",
    ("owner", True): " {thing} of",
    ("count", True): " {thing} number",
    ("place", False): " Where is the {thing}? In the",
    ("owner", False): " Who owns the {thing}? The owner is",
    ("count", False): " How many {thing}? There are",
}
OPENING = {True: "Notes:", False: "Story:"}


def fact_text(fact: Fact, terse: bool) -> str:
    """The sentence that tells ``fact``."""
    return FACT_TEXT[fact.relation, terse].format(who=fact.who, thing=fact.thing, value=fact.value)


def question_text(relation: str, thing: str, terse: bool) -> str:
    """The question for the ``relation`` of ``thing``, up to the answer."""
    return QUESTION_TEXT[relation, terse].format(thing=thing)


def document_text(facts: list[Fact], terse: bool) -> str:
    """All facts as one document, without questions."""
    return OPENING[terse] + "".join(fact_text(fact, terse) for fact in facts)


def split_of(facts: list[Fact]) -> str:
    """The split that owns a story, by a hash of its full sentences."""
    digest = hashlib.sha256(document_text(facts, terse=False).encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % 100
    return next(name for name, (low, high) in SPLITS.items() if low <= bucket < high)


def draw_facts(rng: random.Random, kind: str, count: int) -> list[Fact]:
    """``count`` facts for a story of ``kind``; moves come after the fact that they overrule."""
    things = rng.sample(THINGS, count)
    places = rng.sample(PLACES, count)
    relations = ["place"] * count
    if kind == "moved":
        moves = max(1, round(count * 0.4)) if count > 1 else 0
        puts = [Fact("place", rng.choice(NAMES), things[i], places[i]) for i in range(count - moves)]
        facts = list(puts)
        for i in range(moves):
            thing = rng.choice(puts).thing
            # Anywhere after the thing was last mentioned, so that "the last sentences" is no shortcut.
            start = max(at for at, fact in enumerate(facts) if fact.thing == thing) + 1
            where = rng.randint(start, len(facts))
            facts.insert(where, Fact("moved", rng.choice(NAMES), thing, places[count - moves + i]))
        return facts
    if kind in ("owner", "count"):
        of_kind = max(1, round(count * 0.65))
        relations = [kind] * of_kind + ["place"] * (count - of_kind)
        rng.shuffle(relations)
    if kind == "owner":
        owners = rng.sample(NAMES, count)
        # Some things are both put somewhere and owned: whoever put a thing there need not own it.
        things = [rng.choice(things) if relation == "place" else things[i] for i, relation in enumerate(relations)]
        seen: set[tuple[str, str]] = set()
        for i, relation in enumerate(relations):
            while (relation, things[i]) in seen:
                things[i] = rng.choice(THINGS)
            seen.add((relation, things[i]))
        return [
            Fact(r, rng.choice(NAMES), thing, owners[i] if r == "owner" else places[i])
            for i, (r, thing) in enumerate(zip(relations, things, strict=True))
        ]
    counted = rng.sample(COUNTABLES, count)
    return [
        Fact("count", rng.choice(NAMES), counted[i], rng.choice(NUMBERS))
        if relation == "count"
        else Fact("place", rng.choice(NAMES), things[i], places[i])
        for i, relation in enumerate(relations)
    ]


def draw_story(rng: random.Random, kind: str, count: int, split: str) -> list[Fact]:
    """Facts of a story that belongs to ``split``."""
    while True:
        facts = draw_facts(rng, kind, count)
        if split_of(facts) == split:
            return facts


def answers(facts: list[Fact]) -> dict[tuple[str, str], str]:
    """The answer to every question that ``facts`` settle; later facts overrule earlier ones."""
    return {(fact.asked, fact.thing): fact.value for fact in facts}


def choices(facts: list[Fact], relation: str) -> list[str]:
    """Every value in the story that could answer a question for ``relation``, wrong ones and old ones included."""
    return sorted({fact.value for fact in facts if fact.asked == relation})


def asked_relation(kind: str) -> str:
    """What questions of ``kind`` ask for."""
    return kind if kind in ("owner", "count") else "place"


def ask_all(rng: random.Random, facts: list[Fact], terse: bool, limit: int) -> Iterator[Piece]:
    """Up to ``limit`` questions that ``facts`` settle, each with its answer and a full stop."""
    known = list(answers(facts).items())
    rng.shuffle(known)
    for (relation, thing), value in known[:limit]:
        yield question_text(relation, thing, terse), False
        yield f" {value}", True
        yield ".", False


def told_story(
    rng: random.Random, kind: str, count: int, split: str, terse: bool | None = None, mixed: float = 0.0
) -> Iterator[Piece]:
    """A story with questions and answers inline, as in training.

    Half of the stories ask everything at the end; the others ask in between too, so that early questions are about
    few facts. ``mixed`` is the chance that questions come in the other phrasing than the facts.
    """
    facts = draw_story(rng, kind, count, split)
    if terse is None:
        terse = kind == "terse" or (kind != "full" and rng.random() < 0.3)
    ask_terse = not terse if rng.random() < mixed else terse
    yield OPENING[terse], False
    told = 0
    if rng.random() < 0.5 and count > 2:
        told = rng.randint(1, count - 1)
        for fact in facts[:told]:
            yield fact_text(fact, terse), False
        yield from ask_all(rng, facts[:told], ask_terse, rng.randint(1, 3))
    for fact in facts[told:]:
        yield fact_text(fact, terse), False
    yield from ask_all(rng, facts, ask_terse, count)


def draw_question(rng: random.Random, kind: str, count: int, split: str) -> dict[str, object]:
    """One test question of ``kind`` over ``count`` facts; ``moved`` questions are always about a thing that moved."""
    facts = draw_story(rng, kind, count, split)
    relation, terse = asked_relation(kind), kind == "terse"
    asked = [fact for fact in facts if fact.relation == ("moved" if kind == "moved" else relation)]
    thing = rng.choice(asked).thing
    return {
        "kind": kind,
        "facts": count,
        "document": document_text(facts, terse),
        "question": question_text(relation, thing, terse),
        "answer": " " + answers(facts)[relation, thing],
        "choices": [" " + value for value in choices(facts, relation)],
    }
