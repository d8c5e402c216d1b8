"""Short stories from a grammar: the free text of the corpus, with more entropy than the other two tasks."""

import random

from data.embedded.grammar import Accept, RawExample, capitalise, expand, tidy

HEROES = (
    "fox owl bear hen goat mouse otter crow duck frog hare lamb mole pony robin snail toad wolf badger beaver "
    "baker miller sailor farmer tailor painter teacher doctor king queen knight wizard giant ghost child girl "
    "boy twin cook nurse"
).split()
THINGS = (
    "well lamp bell key boat kite drum clock coin map ladder mirror lantern bridge tower garden river hill "
    "cave door window chair basket bottle letter ring hat coat cloud star moon storm tree seed stone wheel "
    "candle feather shell rope"
).split()
NAMES = "Pim Lulu Otto Mira Bo Tilda Hob Nell Rufus Wren Jory Ansel Dot Figgy Moss Petra Quill Sorrel".split()

PROMPTS = (
    "[Write|Tell me|Make up] a [short|little|brief] story about {a} and {b}.",
    "[Please tell|Please write] a story [about|with] {a} and {b}.",
    "[I would like|Can I have] a [short|little] story [about|with] {a} and {b}.",
)
OPENINGS = (
    "[Once|Long ago|One winter|Many years ago], {a} named {name} [lived|slept|worked] [near|beside|behind] {b}.",
    "{name} [was|had always been] {a} who [loved|feared|dreamed of] [nothing so much as {b}|one thing, {b}].",
    "[Every|Each] [morning|night|spring] {a} called {name} [went|walked|ran] to [look at|sit by|visit] {b}.",
    "[In a quiet|In a windy|At the edge of a small] [valley|village|town|wood] {name} the {hero} [found|saw] {b}.",
    "[Nobody|No one] [knew|could say] why {name} the {hero} [kept|wanted|needed] {b}.",
)
TROUBLES = (
    "[One day|That night|Then] the {thing} was [gone|broken|covered with snow|full of bees].",
    "[But|Sadly,] the {thing} [made a strange noise|began to shake|turned blue|would not stay still].",
    "[An old|A tired|A lost] {other} [came by|knocked|arrived] and asked [for the {thing}|for bread|what it was for].",
    "It was [cold|late|raining|very dark], and {name} felt [alone|hungry|afraid|sleepy].",
    "[The others|The neighbours|Some friends] [laughed|whispered|sang] [about the {thing}|all day|at the {hero}].",
    "[Under|Inside|Next to] the {thing} there was [a tiny door|a note|a sleeping {other}|some gold].",
)
TURNS = (
    "{name} [thought|waited] [for a while|for three days|until noon] and then [built|drew|found] [a new one|a plan].",
    "[So|At last] the {hero} [asked|called|followed] {a2}, who [knew|remembered] [a song|the way|an old trick].",
    "With [a long stick|a warm soup|some string|great care] {name} [fixed|hid|cleaned|moved] the {thing}.",
    "[The {other}|A voice] said, [do not worry|look again|be kind|go home], and [smiled|left|fell asleep].",
    "[Step by step|Slowly|Without a word] they [carried|pulled|rolled] [it|the {thing}] [home|to the sea|up the road].",
)
ENDINGS = (
    "[From then on|After that|Since that day] {name} [was never|never felt] [alone|sad|lost] again.",
    "[In the end|And so] the {thing} [shone|stayed] [there|in its place|bright] [for many years|until morning].",
    "They [shared|ate|found] [a cake|some bread|a pie] and [laughed|danced|slept] [all night|under the stars].",
    "And [if you listen|on quiet nights] you can [still|] [hear|see] the {hero} [sing|by the {thing}].",
    "[That is why|This is how] [each|every] {hero} [likes|keeps|fears] [the|any] {thing} [today|now|].",
    "{name} [went home|lay down|sat down] and [told|wrote] [everyone|the {other}] [the whole story|about it].",
)


def sample(rng: random.Random, accept: Accept, *, unseen: bool) -> RawExample | None:
    """Draws one story, or None if `accept` refuses its pair of nouns (no template is held out here)."""
    if unseen:
        raise ValueError("the stories have no unseen templates; use task='problems' with unseen=True")
    hero, thing = rng.choice(HEROES), rng.choice(THINGS)
    signature = f"stories/{hero}/{thing}"
    if not accept(signature):
        return None
    other = rng.choice([word for word in HEROES if word != hero])
    slots = {"hero": hero, "thing": thing, "other": other, "name": rng.choice(NAMES)}
    slots |= {"a": _article(hero), "b": _article(thing), "a2": _article(other)}
    parts = [OPENINGS, TROUBLES, TURNS, ENDINGS]
    if rng.random() < 0.4:
        parts.insert(2, TROUBLES)
    if rng.random() < 0.25:
        del parts[2]
    chosen: list[str] = []
    for pool in parts:
        chosen.append(rng.choice([line for line in pool if line not in chosen]))
    response = " ".join(capitalise(tidy(expand(line, slots, rng))) for line in chosen)
    return RawExample("story", signature, tidy(expand(rng.choice(PROMPTS), slots, rng)), response)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
