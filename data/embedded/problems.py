"""Word problems: facts, distractors and a question; the response writes out one operation per step.

A template is data: sentences with choices, ranges for its numbers and a chain of steps. Ranges are sampled
until every step gives a whole number in bounds, so no template needs code of its own.
"""

import random
from dataclasses import dataclass

from data.embedded.grammar import Accept, RawExample, capitalise, expand, tidy
from data.embedded.problem_templates import TEMPLATES, UNSEEN, Template


@dataclass(frozen=True)
class Person:
    """A name with its pronouns, reachable from a slot as `{A.he}`."""

    name: str
    he: str
    him: str
    his: str

    @property
    def He(self) -> str:  # noqa: N802 - the capital is what the slot prints
        return capitalise(self.he)

    def __str__(self) -> str:
        return self.name


_SHE, _HE = ("she", "her", "her"), ("he", "him", "his")
PEOPLE = tuple(
    Person(name, *pronouns)
    for names, pronouns in (
        (
            "Ada Bea Cora Dina Elsa Fay Gina Hana Iris Jana Kira Lena Mina Nora Olga Rosa Sara Tess Uma Vera",
            _SHE,
        ),
        ("Abel Ben Carl Dan Emil Finn Gus Hugo Ivan Jon Karl Leo Max Nils Omar Paul Rory Sam Tom Wim", _HE),
    )
    for name in names.split()
)
POOLS = {
    "thing": "marbles stickers stamps coins shells cards buttons beads stones badges pencils crayons".split(),
    "food": "apples pears plums cookies muffins oranges lemons peaches buns carrots onions eggs".split(),
    "ware": "books lamps mugs plates hats scarves kites chairs drums clocks bowls brushes".split(),
    "box": ["box/boxes", "bag/bags", "crate/crates", "basket/baskets", "jar/jars", "tray/trays", "tin/tins"],
    "place": "market school farm library park harbour station museum".split(),
    "drink": ["water", "milk", "juice", "oil", "paint"],
}
DISTRACTORS = (
    "{A} is {n} years old.",
    "The {place} [opens|closes] at {m} o'clock.",
    "It is {n} degrees [outside|at the {place}].",
    "{A.his} [house|flat] has {m} windows.",
    "The [walk|ride] to the {place} takes {n} minutes.",
    "[A|The] bus to the {place} [comes|leaves] every {n} minutes.",
    "{B} has {m} [cats|cousins|friends].",
    "There are {n} people at the {place}.",
)
_FIRST = "[||First, |To start, |We begin: ]"
_MIDDLE = "[||Then |Next, |After that, |Now ]"
_LAST = "[||Finally, |Then |So |Last, ]"
_STEP = (
    "{what} is {sum} = {value}.",
    "we find {what}: {sum} = {value}.",
    "{sum} = {value}, which is {what}.",
    "to get {what}, [work out|compute] {sum} = {value}.",
    "[with|from] {sum} = {value} we [know|have] {what}.",
    "since {sum} = {value}, {what} is {value}.",
)
_OPEN = (
    "",
    "",
    "[We want|We need|We look for] {what}.",
    "[Let us|We can] [solve this|do this|take it] [step by step|in order|slowly].",
)
_CLOSE = (
    "",
    "[The answer is|So the answer is|That makes|This gives|In all it is] {value} {unit}.",
    "{what} is {value}.",
)


def sample(rng: random.Random, accept: Accept, *, unseen: bool) -> RawExample | None:
    """Draws one problem, or None if its numbers do not work out or `accept` refuses its signature."""
    template = rng.choice([entry for entry in TEMPLATES if (entry.name in UNSEEN) == unseen])
    given = {key: rng.randint(low, high) for key, (low, high) in template.numbers.items()}
    signature = f"problems/{template.name}/" + ",".join(f"{key}={value}" for key, value in given.items())
    values = _solve(template, given)
    if values is None or not accept(signature):
        return None
    slots = _words(rng) | {key: str(value) for key, value in values.items()}
    prompt = _question(template, slots, rng)
    response, answer = _worked(template, slots, rng), str(slots[template.steps[-1][0]])
    return RawExample(template.name, signature, prompt, f"{response}\n#### {answer}", answer=answer)


def _solve(template: Template, given: dict[str, int]) -> dict[str, int] | None:
    values = dict(given)
    for result, expression, _ in template.steps:
        first, *rest = expression.split()
        total = values[first]
        for operator, name in zip(rest[::2], rest[1::2], strict=True):
            right = values[name] if name in values else int(name)
            if operator == "/" and total % right:
                return None
            total = {"+": total + right, "-": total - right, "*": total * right, "/": total // right}[operator]
        if not 2 <= total <= 400:
            return None
        values[result] = total
    return values


def _words(rng: random.Random) -> dict[str, object]:
    slots: dict[str, object] = dict(zip("ABC", rng.sample(PEOPLE, 3), strict=True))
    for pool, words in POOLS.items():
        slots[pool], slots[pool + "2"] = rng.sample(words, 2)
    slots["box"], slots["boxes"] = str(slots["box"]).split("/")
    return slots | {"n": str(rng.randint(10, 60)), "m": str(rng.randint(3, 12))}


def _question(template: Template, slots: dict[str, object], rng: random.Random) -> str:
    sentences = list(template.facts)
    if rng.random() < 0.35:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(DISTRACTORS))
    parts = [expand(sentence, slots, rng) for sentence in (*sentences, template.ask)]
    return tidy(" ".join(capitalise(part) for part in parts))


def _worked(template: Template, slots: dict[str, object], rng: random.Random) -> str:
    last = len(template.steps) - 1
    goal = slots | {"what": template.steps[last][2], "value": slots[template.steps[last][0]]}
    lines = [_line(rng.choice(_OPEN), goal, rng)]
    for index, (result, expression, what) in enumerate(template.steps):
        lead = "" if last == 0 else _FIRST if index == 0 else _LAST if index == last else _MIDDLE
        terms = " ".join(str(slots.get(word, word)) for word in expression.split())
        filled = slots | {"what": what, "sum": terms, "value": slots[result]}
        lines.append(_line(lead + rng.choice(_STEP), filled, rng))
    lines.append(_line(rng.choice(_CLOSE), goal | {"unit": template.unit}, rng))
    return rng.choice((" ", "\n")).join(line for line in lines if line)


def _line(pattern: str, slots: dict[str, object], rng: random.Random) -> str:
    """Fills the phrase first and its names second, as `what` and `unit` hold slots themselves."""
    inner: dict[str, object] = {key: slots[key] for key in ("what", "unit", "sum", "value") if key in slots}
    return capitalise(tidy(expand(pattern.format_map(inner), slots, rng)))
