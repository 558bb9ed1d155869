"""Small tasks that SmolLM2-135M can learn in minutes: prompts with three chat examples, strict scoring, a fair split.

A split never shares an item between training, held-out prompts and the examples shown in each prompt. For pairs of
things the *unordered* pair decides: knowing 3 + 5 = 8 gives 5 + 3 = 8 away. The examples are the same for every seed:
they move the untrained model's score more than anything else, and seeds should be comparable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

HELD_OUT_PROMPTS = 40
SHOTS = 3
# One example of each length.
NEXT_SHOTS = (("7",), ("41",), ("158",))
# Common words; the first letters differ often enough to sort by.
WORD_LIST = (
    "apple bread chair dance eagle field glass house island jacket kitchen lemon music night ocean paper queen river "
    "stone table uncle village water yellow zebra bridge candle doctor engine forest garden hammer insect jungle"
)
WORDS = tuple(WORD_LIST.split())


@dataclass(frozen=True)
class Item:
    """A question, its only right answer, and the key that must not be on both sides of the split."""

    question: str
    answer: str
    key: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task with its split; `shots` are the examples in every prompt."""

    name: str
    shots: tuple[Item, ...]
    train: tuple[Item, ...]
    held_out: tuple[Item, ...]

    def messages(self, item: Item) -> list[dict[str, str]]:
        """The chat of one item: three examples, then the question."""
        turns: list[dict[str, str]] = []
        for shot in self.shots:
            turns += [{"role": "user", "content": shot.question}, {"role": "assistant", "content": shot.answer}]
        return [*turns, {"role": "user", "content": item.question}]

    def prompts(self, seed: int) -> Iterator[Item]:
        """Training items without end: shuffled, none a second time before all came once."""
        order = random.Random(seed)  # noqa: S311
        while True:
            yield from order.sample(self.train, len(self.train))


class UnknownTaskError(ValueError):
    """No task has this name."""


def make_task(name: str, seed: int) -> Task:
    """The task and its split for this seed; raises UnknownTaskError."""
    if name not in TASKS:
        raise UnknownTaskError(f"task: must be one of {', '.join(TASKS)}, got {name!r}")
    fixed = random.Random(name)  # noqa: S311
    items = TASKS[name](fixed)
    keys = sorted({item.key for item in items})
    shots = NEXT_SHOTS if name == "next" else fixed.sample(keys, SHOTS)
    rest = [key for key in keys if key not in shots]
    random.Random(f"{name} {seed}").shuffle(rest)  # noqa: S311
    held_out, train = split_keys(rest, items)
    by_key = {key: [item for item in items if item.key == key] for key in shots}
    return Task(name, tuple(by_key[key][0] for key in shots), train, held_out)


def split_keys(keys: Sequence[tuple[str, ...]], items: Sequence[Item]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Held-out and training items: whole keys are held out until there are enough prompts."""
    members: dict[tuple[str, ...], list[Item]] = {key: [] for key in keys}
    for item in items:
        if item.key in members:
            members[item.key].append(item)
    wanted = min(HELD_OUT_PROMPTS, sum(map(len, members.values())) * 2 // 5)
    held_out: list[Item] = []
    train: list[Item] = []
    for key in keys:
        (held_out if len(held_out) < wanted else train).extend(members[key])
    return tuple(held_out), tuple(train)


def reward(answer: str, text: str, stopped: bool) -> float:
    """1 when the completion is exactly the answer and the model ended it itself, else 0."""
    return float(stopped and text == answer)


def next_number(chance: random.Random) -> list[Item]:
    return [Item(f"What number comes after {n}?", str(n + 1), (str(n),)) for n in range(1, 1000)]


def sums(chance: random.Random) -> list[Item]:
    return [
        Item(f"What is {a} + {b}?", f"<answer>{a + b}</answer>", (str(min(a, b)), str(max(a, b))))
        for a in range(10)
        for b in range(10)
    ]


def swap(chance: random.Random) -> list[Item]:
    return [Item(f"Swap the two words: {a} {b}", f"{b} {a}", key) for a, b, key in word_pairs()]


def sort(chance: random.Random) -> list[Item]:
    items = [Item(f"Sort the two words: {a} {b}", " ".join(key), key) for a, b, key in word_pairs()]
    # One order a pair, at random: half of the answers repeat the question, half do not.
    chance.shuffle(items)
    return list({item.key: item for item in items}.values())


def copy(chance: random.Random) -> list[Item]:
    triples = [chance.sample(WORDS, 3) for _ in range(1000)]
    unique = {tuple(sorted(words)): words for words in triples}
    return [Item(f"Copy the words: {' '.join(words)}", " ".join(words), key) for key, words in unique.items()]


def word_pairs() -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Both orders of each pair of words, with the pair's key."""
    for first, second in combinations(sorted(WORDS), 2):
        yield first, second, (first, second)
        yield second, first, (first, second)


TASKS: dict[str, Callable[[random.Random], list[Item]]] = {
    "next": next_number,
    "sums": sums,
    "swap": swap,
    "sort": sort,
    "copy": copy,
}
