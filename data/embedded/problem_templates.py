"""The kinds of word problem, as data: sentences with choices, ranges of numbers and a chain of steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """One kind of problem; `steps` are (result, left-to-right expression, what it is)."""

    name: str
    facts: tuple[str, ...]
    ask: str
    unit: str
    numbers: dict[str, tuple[int, int]]
    steps: tuple[tuple[str, str, str], ...]


_N = "[the number of|the count of]"


def _template(name: str, facts: str, ask: str, unit: str, numbers: str, *steps: tuple[str, str, str]) -> Template:
    """Reads `facts` one a line and `numbers` as `a:2-40 b:3-9`."""
    ranges = {}
    for part in numbers.split():
        key, low, high = part.replace(":", "-").split("-")
        ranges[key] = (int(low), int(high))
    return Template(name, tuple(line.strip() for line in facts.strip().splitlines()), ask, unit, ranges, steps)


_TWO_PRICES = (
    ("x", "a * b", "the [cost|price] of the {ware}"),
    ("y", "c * d", "the [cost|price] of the {ware2}"),
    ("z", "x + y", "the total [cost|price]"),
)
TEMPLATES = (
    _template(
        "gain",
        """{A} [has|owns|starts with] {a} {thing}.
        {B} gives {A.him} {b} more [{thing}|of them|].""",
        "How many {thing} does {A} have [now|in the end]?",
        "{thing}",
        "a:5-89 b:3-60",
        ("x", "a + b", _N + " {thing} {A} has [now|in the end]"),
    ),
    _template(
        "lose",
        """{A} [has|owns|starts with] {a} {thing}.
        {A.He} [loses|sells|gives away] {b} [of them|{thing}].""",
        "How many {thing} [are left|does {A} still have]?",
        "{thing}",
        "a:12-99 b:3-70",
        ("x", "a - b", _N + " {thing} [left|that remain]"),
    ),
    _template(
        "gain_lose",
        """{A} [picks|buys|collects] {a} {food} [on Monday|in the morning|at the {place}].
        [Later|The next day] {A.he} [picks|buys|collects] {b} more.
        Then {A.he} [eats|sells|gives {B}] {c} of them.""",
        "How many {food} does {A} have [now|left]?",
        "{food}",
        "a:8-60 b:5-40 c:3-50",
        ("x", "a + b", _N + " {food} [before that|at first|{A} had]"),
        ("y", "x - c", _N + " {food} [left|that remain]"),
    ),
    _template(
        "boxes",
        """[There are|{A} has|{A} buys] {a} {boxes} [of {food}|at the {place}].
        [Each|Every] {box} [holds|contains] {b} {food}.""",
        "How many {food} are there [in all|altogether|]?",
        "{food}",
        "a:3-30 b:3-12",
        ("x", "a * b", _N + " {food} in all {boxes}"),
    ),
    _template(
        "boxes_loose",
        """{A} [has|packs|fills] {a} {boxes} with {b} {thing} in each.
        {A.He} also [has|finds] {c} loose {thing}.""",
        "How many {thing} does {A} have [in all|altogether]?",
        "{thing}",
        "a:3-12 b:3-12 c:4-50",
        ("x", "a * b", _N + " {thing} in the {boxes}"),
        ("y", "x + c", _N + " {thing} [in all|altogether]"),
    ),
    _template(
        "boxes_eaten",
        """{A} [brings|takes] {a} {boxes} of {food} to the {place}.
        There are {b} {food} in [each|every] {box}.
        [{B} and {A.his} friends|The children|The guests] eat {c} [of the|] {food}.""",
        "How many {food} [are left|remain]?",
        "{food}",
        "a:3-12 b:4-12 c:5-60",
        ("x", "a * b", _N + " {food} [at first|{A} brings]"),
        ("y", "x - c", _N + " {food} [left|that remain]"),
    ),
    _template(
        "share",
        """{A} has {a} {food}.
        {A.He} [shares|splits|divides] them equally [among|between] {b} [friends|children|people].""",
        "How many {food} does each [one|of them] get?",
        "{food}",
        "a:12-144 b:2-12",
        ("x", "a / b", _N + " {food} for each [one|of them]"),
    ),
    _template(
        "pack",
        """{A} [bakes|buys|gathers] {a} {food} and [gets|finds] {b} more from {B}.
        {A.He} packs [them all|all of them] into {boxes} of {c}.""",
        "How many {boxes} does {A} [fill|need]?",
        "{boxes}",
        "a:10-80 b:5-60 c:3-12",
        ("x", "a + b", _N + " {food} [in all|altogether]"),
        ("y", "x / c", _N + " {boxes}"),
    ),
    _template(
        "two_prices",
        """{A} buys {a} {ware} [for|at] {b} dollars each.
        {A.He} [also buys|buys] {c} {ware2} [for|at] {d} dollars each.""",
        "How much does {A} [pay|spend] [in all|altogether]?",
        "dollars",
        "a:2-9 b:3-12 c:2-9 d:3-12",
        *_TWO_PRICES,
    ),
    _template(
        "change",
        """{A} buys {a} {ware} at the {place} [for|at] {b} dollars each.
        {A.He} [pays with|hands over] {c} dollars.""",
        "How much [change|money] does {A} get back?",
        "dollars",
        "a:2-9 b:3-12 c:20-120",
        ("x", "a * b", "the [cost|price] of the {ware}"),
        ("y", "c - x", "the [change|money that comes back]"),
    ),
    _template(
        "more_than",
        """{A} [has|collects] {a} {thing}.
        {B} [has|collects] {b} [more than {A}|{thing} more than {A.him}].""",
        "How many {thing} do [they|the two] have together?",
        "{thing}",
        "a:5-50 b:3-40",
        ("x", "a + b", _N + " {thing} {B} has"),
        ("y", "a + x", _N + " {thing} [both have|together]"),
    ),
    _template(
        "fewer_than",
        """{A} [has|finds] {a} {thing}.
        {B} [has|finds] {b} [fewer than {A}|{thing} fewer than {A.him}].""",
        "How many {thing} do [they|the two] have together?",
        "{thing}",
        "a:12-70 b:3-50",
        ("x", "a - b", _N + " {thing} {B} has"),
        ("y", "a + x", _N + " {thing} [both have|together]"),
    ),
    _template(
        "times_as_many",
        """{A} [has|finds|sells] {a} {thing}.
        {B} [has|finds|sells] {b} times as many [{thing}|as {A.he} does|].""",
        "How many more {thing} than {A} [is that|is this]?",
        "{thing}",
        "a:4-40 b:3-9",
        ("x", "a * b", _N + " {thing} of {B}"),
        ("y", "x - a", "the difference [to {A}|between them]"),
    ),
    _template(
        "reading",
        """[{A} reads|Each day {A} reads] a book [of|with] {a} pages.
        {A.He} reads {b} pages [a|every] day for {c} days.""",
        "How many pages [are left|remain]?",
        "pages",
        "a:60-250 b:5-25 c:3-9",
        ("x", "b * c", _N + " pages {A} has read"),
        ("y", "a - x", _N + " pages [left|that remain]"),
    ),
    _template(
        "wage",
        """{A} [works|helps] at the {place} for {a} hours.
        {A.He} [earns|gets] {b} dollars an hour.
        [After work|That evening] {A.he} spends {c} dollars on {ware}.""",
        "How much money does {A} have left?",
        "dollars",
        "a:3-12 b:5-15 c:5-80",
        ("x", "a * b", "the money {A} [earns|gets]"),
        ("y", "x - c", "the money [left|that remains]"),
    ),
    _template(
        "trip",
        """{A} [drives|rides|sails] for {a} hours at {b} miles an hour.
        [Then|After a rest] {A.he} goes {c} miles more.""",
        "How [far|many miles] does {A} go [in all|altogether]?",
        "miles",
        "a:2-9 b:5-30 c:4-60",
        ("x", "a * b", "the [first part of the way|distance at first]"),
        ("y", "x + c", "the [whole way|full distance]"),
    ),
    _template(
        "saving",
        """{A} wants [to buy a bike|a bike|a tent] that costs {a} dollars.
        {A.He} [already has|has] {b} dollars and saves {c} dollars [a|every] week.""",
        "How many weeks [does {A} need|must {A} save]?",
        "weeks",
        "a:40-160 b:5-80 c:3-12",
        ("x", "a - b", "the money {A} still needs"),
        ("y", "x / c", _N + " weeks"),
    ),
    _template(
        "ages",
        """{A} is {a} years old.
        {B} is {b} years older than {A}.
        [Their friend|Their teacher|Their neighbour] {C} is {c} years younger than {B}.""",
        "How old is {C}?",
        "years",
        "a:6-40 b:3-40 c:2-30",
        ("x", "a + b", "the age of {B}"),
        ("y", "x - c", "the age of {C}"),
    ),
    _template(
        "difference",
        """{A} [sells|picks|counts] {a} {food} at the {place}.
        {B} [sells|picks|counts] {b} {food}.""",
        "How many more {food} does {A} have than {B}?",
        "{food}",
        "a:20-150 b:8-120",
        ("x", "a - b", "the difference [between them|to {B}]"),
    ),
    _template(
        "three_days",
        """[On Monday|On the first day] {A} [sells|makes] {a} {ware}.
        [On Tuesday|On the second day] {A.he} [sells|makes] {b} {ware}, and on [Friday|the third day] {c}.""",
        "How many {ware} is that [in all|altogether]?",
        "{ware}",
        "a:5-60 b:5-60 c:5-60",
        ("x", "a + b", _N + " {ware} on the first two days"),
        ("y", "x + c", _N + " {ware} [in all|altogether]"),
    ),
    _template(
        "mean",
        """{A} [scores|gets] {a} points in the first game and {b} [points|] in the second.
        In the third game {A.he} [scores|gets] {c}.""",
        "What is {A.his} [average|mean] score [per game|]?",
        "points",
        "a:5-60 b:5-60 c:5-60",
        ("x", "a + b + c", _N + " points in all games"),
        ("y", "x / 3", "the [average|mean]"),
    ),
    _template(
        "practice",
        """{A} [plays|practises] the [flute|piano|drum] for {a} minutes [each|every] morning.
        {A.He} does {b} minutes more in the evening.""",
        "How many minutes is that in {c} days?",
        "minutes",
        "a:4-30 b:4-30 c:3-9",
        ("x", "a + b", _N + " minutes [a day|in one day]"),
        ("y", "x * c", _N + " minutes in {c} days"),
    ),
    _template(
        "tank",
        """A [tank|barrel] at the {place} holds {a} litres of {drink}.
        {A} [fills|takes] {b} [buckets|cans] with {c} litres each from it.""",
        "How many litres of {drink} [are left|remain]?",
        "litres",
        "a:50-250 b:3-12 c:3-12",
        ("x", "b * c", "the {drink} {A} takes"),
        ("y", "a - x", "the {drink} [left|that remains]"),
    ),
    _template(
        "compare_packs",
        """{A} buys {a} {boxes} [of|with] {b} {thing} [each|].
        {B} buys {c} {boxes} [of|with] {d} {thing} [each|].""",
        "How many more {thing} does {A} have than {B}?",
        "{thing}",
        "a:3-12 b:3-12 c:2-9 d:2-12",
        ("x", "a * b", _N + " {thing} {A} has"),
        ("y", "c * d", _N + " {thing} {B} has"),
        ("z", "x - y", "the difference [between them|]"),
    ),
    _template(
        "lose_gain",
        """{A} [has|owns] {a} {ware}.
        {A.He} [sells|loses] {b} of them [at the {place}|].
        [Later|The next day] {A.he} [buys|finds] {c} more.""",
        "How many {ware} does {A} have [now|in the end]?",
        "{ware}",
        "a:12-80 b:3-60 c:5-40",
        ("x", "a - b", _N + " {ware} [left|that remain]"),
        ("y", "x + c", _N + " {ware} [now|in the end]"),
    ),
    _template(
        "boxes_shared",
        """{A} [has|buys] {a} {boxes} with {b} {food} in each.
        {A.He} [shares|divides] all {food} equally among {c} [friends|children].""",
        "How many {food} does each [one|of them] get?",
        "{food}",
        "a:3-12 b:3-12 c:2-9",
        ("x", "a * b", _N + " {food} in all {boxes}"),
        ("y", "x / c", _N + " {food} for each [one|of them]"),
    ),
    _template(
        "times_together",
        """{A} [has|collects] {a} {thing}.
        {B} [has|collects] {b} times as many.""",
        "How many {thing} do [they|the two] have together?",
        "{thing}",
        "a:4-40 b:3-9",
        ("x", "a * b", _N + " {thing} {B} has"),
        ("y", "a + x", _N + " {thing} [both have|together]"),
    ),
    _template(
        "two_jobs",
        """{A} works {a} hours at the {place} for {b} dollars an hour.
        {A.He} works {c} hours on a farm for {d} dollars an hour.""",
        "How much does {A} [earn|get] [in all|altogether]?",
        "dollars",
        "a:2-9 b:5-12 c:2-9 d:5-12",
        ("x", "a * b", "the money from the {place}"),
        ("y", "c * d", "the money from the farm"),
        ("z", "x + y", "the [total|whole] money"),
    ),
    _template(
        "pack_rest",
        """{A} [bakes|buys|gathers] {a} {food}.
        {A.He} gives {b} [of them|] to {B} and packs the others into {boxes} of {c}.""",
        "How many {boxes} does {A} [fill|need]?",
        "{boxes}",
        "a:20-120 b:5-60 c:3-12",
        ("x", "a - b", _N + " {food} [left|that remain]"),
        ("y", "x / c", _N + " {boxes}"),
    ),
    _template(
        "pay_both",
        """{A} buys {a} {ware} [for|at] {b} dollars each and a bag for {c} dollars.
        {A.He} [pays with|hands over] {d} dollars.""",
        "How much [change|money] does {A} get back?",
        "dollars",
        "a:2-9 b:3-12 c:3-30 d:30-150",
        ("x", "a * b", "the [cost|price] of the {ware}"),
        ("y", "x + c", "the total [cost|price]"),
        ("z", "d - y", "the [change|money that comes back]"),
    ),
)
UNSEEN = frozenset({"lose_gain", "boxes_shared", "times_together", "two_jobs", "pack_rest", "pay_both"})
