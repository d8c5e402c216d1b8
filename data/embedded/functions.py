"""Small Python functions: a signature with a docstring is the prompt, the body is the response.

A template is data: docstring, equivalent bodies, ranges for its constants. Tests come from running the first body, so
the bodies are the reference; `tests/data/test_embedded.py` checks that the others agree with it.
"""

import random
from collections.abc import Callable

from data.embedded.function_templates import CHANGES, CONDITIONS, TEMPLATES, Template
from data.embedded.grammar import Accept, RawExample, expand, tidy

ELEMENT = {"xs": "x", "numbers": "n", "values": "v", "nums": "n", "words": "w", "names": "s", "items": "s"}
ARGUMENTS = {
    "ints": ("xs", "numbers", "values", "nums"),
    "int": ("n", "x", "number", "value"),
    "small": ("n", "count", "size", "times"),
    "text": ("text", "s", "word", "line"),
    "words": ("words", "names", "items"),
}
WORDS = ("ant bee cat dog elm fig gem hat ink jam key leaf moon nut oak pea rain sun tea urn van wax yak zoo").split()
LETTERS = "abcdefghiklmnoprstuwy"
MARKS = ("-", "+", "*", "/", ":", "_", "#", "=", ".", "~", "--", "::", "<>", "++")
CASES = ("upper", "lower")
POOLS = {"word": tuple(WORDS), "letter": tuple(LETTERS), "mark": MARKS, "case": CASES}


# Optional guards before a body: (docstring, code), both completed by the constant {g}.
GUARDS = {
    "ints": ("If {arg} is empty, [return|give] {g}.", "if len({arg}) == 0:\n    return {g}"),
    "int": ("If {arg} is [negative|below zero], [return|give] {g}.", "if {arg} < 0:\n    return {g}"),
    "small": ("If {arg} is [zero|0], [return|give] {g}.", "if {arg} == 0:\n    return {g}"),
    "text": ("If {arg} is empty, [return|give] {g}.", 'if {arg} == "":\n    return {g}'),
    "words": ("If {arg} is empty, [return|give] {g}.", "if len({arg}) == 0:\n    return {g}"),
}
GUARDED = 0.8  # fraction of functions with a guard: it makes bodies long enough to be worth drafting
TERSE = 0.15  # fraction of bodies in one-line form, if they have one


def sample(rng: random.Random, accept: Accept, *, unseen: bool) -> RawExample | None:
    """Draws one function, or None if `accept` rejects its signature (no template is held out here)."""
    if unseen:
        raise ValueError("the functions have no unseen templates; use task='problems' with unseen=True")
    template = rng.choice(TEMPLATES)
    constants = _constants(template, rng)
    guard_doc, guard = GUARDS[template.kind] if rng.random() < GUARDED else ("", "")
    if guard:
        constants["g"] = str(rng.randint(-9, 99))
    condition, change = rng.choice(CONDITIONS), rng.choice(CHANGES)
    parts = [condition[0]] * ("{condition}" in template.doc) + [change[0]] * ("{change}" in template.doc)
    signature = f"functions/{template.name}/" + "/".join([*parts, *(f"{k}={v}" for k, v in constants.items())])
    if constants.get("c") == constants.get("d", "") or not accept(signature):
        return None
    arg = rng.choice(ARGUMENTS[template.kind])
    slots: dict[str, object] = {"k": "", "m": "", **constants, "arg": arg, "e": ELEMENT.get(arg, arg)}
    for key, text in zip(("condition", "test", "change", "new"), (*condition, *change), strict=True):
        slots[key] = text.format_map(slots)
    name, doc = expand(template.names, slots, rng), tidy(expand(f"{template.doc} {guard_doc}", slots, rng))
    prompt = f'def {name}({arg}):\n    """{doc}"""'
    choice = min if rng.random() < TERSE else max
    body = choice(template.bodies, key=len)
    response, reference = (_indent(f"{guard}\n{code}".strip().format_map(slots)) for code in (body, template.bodies[0]))
    tests = _tests(f"{prompt}\n{reference}", name, _inputs(template.kind, constants, rng))
    return RawExample(template.name, signature, prompt, response, tests=tests)


def _constants(template: Template, rng: random.Random) -> dict[str, str]:
    constants = {}
    for part in template.constants.split():
        key, space = part.split(":")
        if space in POOLS:
            constants[key] = rng.choice(POOLS[space])
        else:
            low, high = space.split("-")
            constants[key] = str(rng.randint(int(low), int(high)))
    return constants


def _indent(body: str) -> str:
    return "\n".join("    " + line for line in body.split("\n"))


def _inputs(kind: str, constants: dict[str, str], rng: random.Random) -> list[object]:
    """Arguments near the constants, where a wrong operator or an off-by-one error shows."""
    whole = [int(c) for c in constants.values() if c.lstrip("-").isdigit()]
    edges = sorted({c + d for c in whole for d in (-1, 0, 1)})
    near = [*edges, *(2 * c for c in edges)] or [0]
    letters = [c for c in constants.values() if c in LETTERS] * 4 + [*LETTERS, "A", "K"]

    def number() -> int:
        return rng.choice(near) if rng.random() < 0.6 else rng.randint(-9, 90)

    def word() -> str:
        return "".join(rng.choices(letters, k=rng.randint(1, 12)))

    if kind == "small":
        return [0, 1, 2, 3, 5, 8]
    if kind == "int":
        return [*sorted({*near, *(number() for _ in range(6))})]
    if kind == "ints":
        lists = [[number() for _ in range(length)] for length in (4, 7, 7, 9, 12)]
        return [[], *([edge] for edge in edges), *lists]
    if kind == "text":
        return ["", *(word() for _ in range(6))]
    return [[], *([word() for _ in range(rng.randint(2, 5))] for _ in range(6))]


def _tests(source: str, name: str, inputs: list[object]) -> tuple[str, ...]:
    """Asserts that hold for `source`, one of our own bodies and therefore run in this process."""
    space: dict[str, Callable[[object], object]] = {}
    exec(source, space)
    return tuple(f"assert {name}({value!r}) == {space[name](value)!r}" for value in inputs)
