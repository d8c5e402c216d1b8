"""README and docs: short, every file and link they name exists, every command in them composes, the example runs."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from dspec.config.compose import ROOT, VARIANTS, composed
from dspec.config.recipes import variants

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
CONFIG = {"dspec.train": "train", "data.collect": "train", "data.regenerate": "train", "eval.run": "eval",
          "eval.speed": "speed", "eval.search": "search", "eval.score": "score",
          "eval.profile_steps": "profile_steps", "eval.serving": "serving",
           "eval.serving_study": "serving_study"}  # fmt: skip
ROOMS = ("dspec/", "data/", "eval/", "conf/", "recipes/", "tests/", "docs/")


def commands(page: Path) -> list[str]:
    """`python -m ...` in code blocks and in backticks, each on one line, without comments."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = [line[line.index("python -m ") :] for line in lines if "python -m " in line]
    return [" ".join(line.split(" #")[0].split()) for line in found]


# what stands for something of the user's in commands of the docs; other words in <> are tokens, which Hydra must read
PLACEHOLDERS = r"<(?:time|run|run of (?:dspark|eval\.run)|id|folder|folder or id|drafter folder)>"
COMMANDS = sorted({command for page in PAGES for command in commands(page)})


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short_and_has_the_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.encode()) <= 9000
    assert 'pip install -e ".[test]" && pytest' in text
    assert "pip install -e . && python -m dspec.train recipe=dspark" in text
    assert len((ROOT / "docs" / "pareto.png").read_bytes()) < 150_000


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    found = re.findall(r"`([\w./]+)`", (ROOT / name).read_text("utf-8"))
    missing = [path for path in found if path.startswith(ROOMS) and not (ROOT / path).exists()]
    assert missing == []


def test_every_file_stands_in_the_structure() -> None:
    text = (ROOT / "docs" / "structure.md").read_text("utf-8")
    files = [path for room in ("dspec", "data", "eval") for path in (ROOT / room).rglob("*.py")]
    names = {f"`{path.name}`" for path in files if path.name != "__init__.py"}
    assert sorted(name for name in names if name not in text) == []
    folders = {path.parent.relative_to(ROOT).as_posix() for path in files}
    assert sorted(folder for folder in folders if f"{folder}/" not in text) == []
    named = set(re.findall(r"`(\w+\.py)`", text))
    assert sorted(named - {path.name for path in [*files, *(ROOT / "tests").rglob("*.py")]}) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str) -> None:
    words = shlex.split(re.sub(PLACEHOLDERS, "x", command))
    module, args = words[2], words[3:]
    assert importlib.util.find_spec(module) is not None
    if module not in CONFIG:
        return
    flags = [arg for arg in args if arg.startswith("-")]
    assert set(flags) <= {"-m", "--help", "--cfg"}
    overrides = [arg for arg in args if "=" in arg or arg.startswith("~")]
    assert len(overrides) == len(args) - len(flags) - flags.count("--cfg")
    if "-m" not in flags:
        composed(CONFIG[module], overrides)
        return
    choices = [arg if "[" in arg else re.sub(r",.*", "", arg) for arg in overrides]
    for at, arg in enumerate(overrides):  # each value of a sweep, beside the first of the others
        key, _, values = arg.partition("=")
        for value in [values] if "[" in values else values.split(","):
            composed(CONFIG[module], [*choices[:at], f"{key}={value}", *choices[at + 1 :]])


@pytest.mark.parametrize(("key", "folder"), [("recipe", "recipes"), ("decoder", "conf/decoder")])
def test_messages_name_what_exists(key: str, folder: str) -> None:
    """Recipes and decoders that a string in the code tells a user to choose."""
    files = [path for room in ("dspec", "data", "eval") for path in (ROOT / room).rglob("*.py")]
    strings = [
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    chosen = {name for text in strings for name in re.findall(rf"(?<![\w.]){key}=([a-z]\w*(?:/\w+)?)(?![\w/])", text)}
    known = {path.relative_to(ROOT / folder).with_suffix("").as_posix() for path in (ROOT / folder).rglob("*.yaml")}
    if key == "decoder":
        known |= variants(VARIANTS).keys()
    assert chosen
    assert sorted(chosen - known) == []


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/drafters.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    monkeypatch.chdir(ROOT)
    exec(compile(code, "docs/drafters.md", "exec"), {})
    assert re.search(r"#### 24<\|end\|> \d+$", capsys.readouterr().out.strip())
