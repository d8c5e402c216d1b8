"""The kinds of function, as data: docstrings with choices, constants and bodies that mean the same."""

from dataclasses import dataclass

# A condition on the element {e} and a change of it: (docstring, code). Templates combine them.
CONDITIONS = (
    ("greater than {k}", "{e} > {k}"),
    ("less than {k}", "{e} < {k}"),
    ("at least {k}", "{e} >= {k}"),
    ("at most {k}", "{e} <= {k}"),
    ("divisible by {k}", "{e} % {k} == 0"),
    ("not divisible by {k}", "{e} % {k} != 0"),
    ("not equal to {k}", "{e} != {k}"),
    ("even and greater than {k}", "{e} % 2 == 0 and {e} > {k}"),
    ("odd and less than {k}", "{e} % 2 == 1 and {e} < {k}"),
)
CHANGES = (
    ("multiplied by {m}", "{e} * {m}"),
    ("increased by {m}", "{e} + {m}"),
    ("decreased by {m}", "{e} - {m}"),
    ("squared and increased by {m}", "{e} * {e} + {m}"),
    ("doubled and decreased by {m}", "{e} * 2 - {m}"),
    ("subtracted from {m}", "{m} - {e}"),
)


@dataclass(frozen=True)
class Template:
    """One kind of function of one argument; `constants` are ranges (`k:2-30`) or pools (`c:word`)."""

    name: str
    kind: str
    names: str
    doc: str
    constants: str
    bodies: tuple[str, ...]


def _collect(item: str, test: str = "") -> tuple[str, ...]:
    """Bodies that build a list of `item`: a comprehension and the loop that spells it out."""
    clause = f" if {test}" if test else ""
    lines = [f"if {test}:", f"    out.append({item})"] if test else [f"out.append({item})"]
    loop = "".join(f"    {line}\n" for line in lines)
    return (
        f"return [{item} for {{e}} in {{arg}}{clause}]",
        f"out = []\nfor {{e}} in {{arg}}:\n{loop}return out",
    )


def _add(name: str, item: str, test: str = "") -> str:
    """The body that adds `item` up in a loop."""
    line = f"    if {test}:\n        {name} += {item}" if test else f"    {name} += {item}"
    return f"{name} = 0\nfor {{e}} in {{arg}}:\n{line}\nreturn {name}"


_GIVE, _ITEM, _ITEMS, _WORDS = "[Return|Give]", "[item|number]", "[items|numbers]", "[strings|words]"
_LIST = "[Return|Give|Build] [a|the] list of"
TEMPLATES = (
    Template(
        "filter",
        "ints",
        "[keep|select|pick|choose]",
        f"{_LIST} the {_ITEMS} of {{arg}} that are {{condition}}.",
        "k:2-40",
        _collect("{e}", "{test}"),
    ),
    Template(
        "map",
        "ints",
        "[change|apply|convert|transform]",
        f"{_LIST} [every item|each number] of {{arg}} {{change}}.",
        "m:2-60",
        _collect("{new}"),
    ),
    Template(
        "filter_map",
        "ints",
        "[pick_and_change|convert_some|adjust]",
        f"[Take|Keep] the {_ITEMS} of {{arg}} that are {{condition}} and return them {{change}}.",
        "k:2-40 m:2-20",
        _collect("{new}", "{test}"),
    ),
    Template(
        "sum_if",
        "ints",
        "[sum_some|add_up|partial_sum]",
        f"[Return|Compute|Give] the sum of the {_ITEMS} of {{arg}} that are {{condition}}.",
        "k:2-40",
        (_add("total", "{e}", "{test}"), "return sum({e} for {e} in {arg} if {test})"),
    ),
    Template(
        "sum_map",
        "ints",
        "[sum_changed|total_of|add_all]",
        f"[Return|Compute|Give] the sum of [all|the] {_ITEMS} of {{arg}}, each {{change}}.",
        "m:2-60",
        (_add("total", "{new}"), "return sum({new} for {e} in {arg})"),
    ),
    Template(
        "count_if",
        "ints",
        "[count_some|how_many|tally]",
        f"[Count the {_ITEMS} of {{arg}} that are|Return how many {_ITEMS} of {{arg}} are] {{condition}}.",
        "k:2-40",
        (_add("count", "1", "{test}"), "return len([{e} for {e} in {arg} if {test}])"),
    ),
    Template(
        "first_if",
        "ints",
        "[find_first|first_match|search]",
        f"[Return|Find|Give] the first {_ITEM} of {{arg}} that is {{condition}}, or {{m}} if there is none.",
        "k:2-40 m:0-9",
        ("for {e} in {arg}:\n    if {test}:\n        return {e}\nreturn {m}",),
    ),
    Template(
        "replace_if",
        "ints",
        "[patch|fix_items|swap_out]",
        f"{_GIVE} {{arg}} with [every|each] {_ITEM} that is {{condition}} replaced by {{m}}.",
        "k:2-40 m:0-9",
        _collect("{m} if {test} else {e}"),
    ),
    Template(
        "branch",
        "int",
        "[choose_value|decide|pick_value]",
        f"{_GIVE} {{m}} if {{arg}} is {{condition}}, [otherwise|else] {{j}}.",
        "k:2-40 m:2-60 j:61-99",
        ("if {test}:\n    return {m}\nreturn {j}", "return {m} if {test} else {j}"),
    ),
    Template(
        "label",
        "int",
        "[label|name_of|describe]",
        _GIVE + ' "{w}" if {arg} is {condition}, [otherwise|else] "{u}".',
        "k:2-40 w:word u:mark",
        ('if {test}:\n    return "{w}"\nreturn "{u}"', 'return "{w}" if {test} else "{u}"'),
    ),
    Template(
        "linear",
        "int",
        "[linear|scale_shift|formula]",
        "[Return|Compute|Give] {arg} times {a} [plus|increased by] {b}.",
        "a:2-30 b:2-60",
        ("return {arg} * {a} + {b}", "result = {arg} * {a}\nreturn result + {b}"),
    ),
    Template(
        "clamp",
        "int",
        "[clamp|limit|bound]",
        "[Limit|Clamp|Bring] {arg} to the range from {a} to {b}.",
        "a:2-30 b:31-90",
        (
            "if {arg} < {a}:\n    return {a}\nif {arg} > {b}:\n    return {b}\nreturn {arg}",
            "return max({a}, min({b}, {arg}))",
        ),
    ),
    Template(
        "sum_to",
        "int",
        "[sum_to|sum_range|add_range]",
        "[Return|Compute] the sum of the numbers from {a} [to|up to] {arg}, in steps of {b}.",
        "a:1-30 b:2-12",
        (
            "total = 0\nfor i in range({a}, {arg} + 1, {b}):\n    total += i\nreturn total",
            "return sum(range({a}, {arg} + 1, {b}))",
        ),
    ),
    Template(
        "multiples",
        "small",
        "[multiples|list_multiples]",
        "[Return|List|Give] the first {arg} multiples of {a}, each increased by {b}.",
        "a:2-30 b:2-40",
        (
            "return [i * {a} + {b} for i in range(1, {arg} + 1)]",
            "out = []\nfor i in range(1, {arg} + 1):\n    out.append(i * {a} + {b})\nreturn out",
        ),
    ),
    Template(
        "steps_down",
        "int",
        "[steps_down|count_steps|countdown]",
        "[Count|Return] how many times {a} can be taken from {arg} while it is [more|greater] than {b}.",
        "a:2-30 b:0-40",
        ("count = 0\nwhile {arg} > {b}:\n    {arg} -= {a}\n    count += 1\nreturn count",),
    ),
    Template(
        "grow",
        "small",
        "[grow|repeat_step|iterate]",
        "[Start|Begin] with {a} and add {b} {arg} times, doubling [the value|it] after each time.",
        "a:1-30 b:2-30",
        ("value = {a}\nfor i in range({arg}):\n    value = (value + {b}) * 2\nreturn value",),
    ),
    Template(
        "slice",
        "ints",
        "[cut|part_of|middle]",
        f"{_GIVE} {{arg}} without its first {{a}} and last {{b}} {_ITEMS}, each {_ITEM} {{change}}.",
        "a:1-3 b:1-3 m:2-30",
        ("return [{new} for {e} in {arg}[{a}:len({arg}) - {b}]]",),
    ),
    Template(
        "largest",
        "ints",
        "[largest|top|best]",
        f"{_GIVE} the {{a}} [largest|greatest] {_ITEMS} of {{arg}}, each {{change}}.",
        "a:2-6 m:2-30",
        ("ordered = sorted({arg}, reverse=True)\nreturn [{new} for {e} in ordered[:{a}]]",),
    ),
    Template(
        "every",
        "ints",
        "[every_nth|skip|stride]",
        f"{_GIVE} every {_ITEM} of {{arg}} at an index divisible by {{a}}, {{change}}.",
        "a:2-6 m:2-30",
        ("return [{new} for {e} in {arg}[::{a}]]",),
    ),
    Template(
        "wrap",
        "text",
        "[wrap|surround|decorate]",
        _GIVE + ' {arg} with "{w}" [in front|before it] and "{p}" [at the end|after it].',
        "w:word p:mark",
        ('return "{w}" + {arg} + "{p}"', 'out = "{w}" + {arg}\nreturn out + "{p}"'),
    ),
    Template(
        "swap_letter",
        "text",
        "[swap_letters|exchange|recode]",
        _GIVE + ' {arg} with every "{c}" [replaced by|turned into] "{d}", in {case} case.',
        "c:letter d:letter case:case",
        (
            'return {arg}.replace("{c}", "{d}").{case}()',
            'out = {arg}.replace("{c}", "{d}")\nreturn out.{case}()',
        ),
    ),
    Template(
        "count_letters",
        "text",
        "[count_letters|letter_count|occurrences]",
        '[Count|Return] how often "{c}" or "{d}" [occurs|appears] in {arg}.',
        "c:letter d:letter",
        (
            'return {arg}.count("{c}") + {arg}.count("{d}")',
            'count = 0\nfor c in {arg}:\n    if c == "{c}" or c == "{d}":\n        count += 1\nreturn count',
        ),
    ),
    Template(
        "drop_letter",
        "text",
        "[drop_letter|without|remove]",
        _GIVE + ' {arg} without the letter "{c}", [repeated|written] {a} times.',
        "c:letter a:2-12",
        (
            'return {arg}.replace("{c}", "") * {a}',
            'out = ""\nfor c in {arg}:\n    if c != "{c}":\n        out += c\nreturn out * {a}',
        ),
    ),
    Template(
        "join_words",
        "words",
        "[join|glue|combine]",
        f"[Join|Combine] the {_WORDS} of {{arg}} " + 'with "{p}" and [add|put] "{w}" at the end.',
        "p:mark w:word",
        ('return "{p}".join({arg}) + "{w}"', 'out = "{p}".join({arg})\nreturn out + "{w}"'),
    ),
    Template(
        "long_words",
        "words",
        "[long_words|filter_words|wordy]",
        f"{_GIVE} the {_WORDS} of {{arg}} " + 'that are longer than {b} and contain "{c}".',
        "b:1-9 c:letter",
        _collect("{e}", 'len({e}) > {b} and "{c}" in {e}'),
    ),
    Template(
        "mark_words",
        "words",
        "[mark_words|tag|suffix_all]",
        f"{_GIVE} the {_WORDS} of {{arg}} " + 'in {case} case, each followed by "{p}{w}".',
        "p:mark w:word case:case",
        _collect('{e}.{case}() + "{p}{w}"'),
    ),
    Template(
        "letters_total",
        "words",
        "[weigh|word_total|length_sum]",
        f"[Return|Compute] the total length of the {_WORDS} of {{arg}}; "
        + 'those [with|that contain] "{c}" count {a} times.',
        "c:letter a:2-12",
        (
            'total = 0\nfor {e} in {arg}:\n    if "{c}" in {e}:\n        total += len({e}) * {a}\n'
            "    else:\n        total += len({e})\nreturn total",
        ),
    ),
)
