"""Values are checked against the annotations of the constructors that get them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, is_typeddict

import pytest
from omegaconf import OmegaConf

from dspec.config.compose import CONF, ROOT, composed, instantiate
from dspec.config.types import check_types, parameters
from dspec.errors import UserError


class Colour(Enum):
    RED = "red"


class Size(TypedDict):
    rows: int
    share: float


class Sampler:
    def __init__(self, *, temperature: float) -> None:
        self.temperature = temperature


class Thing:
    """A constructor with one parameter of each kind of annotation."""

    def __init__(
        self,
        *,
        whole: int,
        number: float,
        flag: bool,
        text: str,
        mode: Literal["slow", "fast"],
        perhaps: int | None,
        many: Sequence[float],
        pair: tuple[float, float],
        size: Size,
        counts: Mapping[str, int],
        sampler: Sampler,
        build: Callable[[], None] | None,
    ) -> None:
        """Keeps nothing."""


GOOD: dict[str, Any] = {
    "_target_": f"{__name__}.Thing", "whole": 3, "number": 2, "flag": True, "text": "a", "mode": "fast",
    "perhaps": None, "many": [1, 0.5], "pair": [0.1, 1], "size": {"rows": 2, "share": 1}, "counts": {"a": 1},
    "sampler": {"_target_": f"{__name__}.Sampler", "temperature": 0}, "build": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --import-mode=importlib a test file is no importable module."""
    import sys
    from types import ModuleType

    module = ModuleType("things")
    module.Thing, module.Sampler = Thing, Sampler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "things", module)
    for node in (GOOD, GOOD["sampler"]):
        node["_target_"] = "things." + node["_target_"].rpartition(".")[2]


def check(**changed: Any) -> None:
    check_types(OmegaConf.create({"thing": GOOD | changed, "other": 2.5, "word": "x", "unset": None}))


def test_what_fits_passes() -> None:
    check()
    check(perhaps=4, mode="slow", build={"_target_": "things.Sampler", "_partial_": True})
    check(number="${other}", many=[])
    check(text="${unset}")  # the program sets it later
    check(whole="???")  # refused elsewhere, with how to set it


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"whole": 1.5}, "thing.whole=1.5 must be an integer"),
        ({"whole": True}, "thing.whole=true must be an integer"),
        ({"whole": None}, "thing.whole=null must be an integer"),
        ({"whole": "${other}"}, "thing.whole=2.5 must be an integer"),
        ({"number": "x"}, "thing.number=x must be a number"),
        ({"number": False}, "thing.number=false must be a number"),
        ({"flag": 2}, "thing.flag=2 must be true or false"),
        ({"text": 7}, "thing.text=7 must be a string: quote it, 'thing.text=\"7\"'"),
        ({"mode": "mid"}, "thing.mode=mid must be slow or fast"),
        ({"perhaps": "x"}, "thing.perhaps=x must be an integer or null"),
        ({"many": 0.5}, "thing.many=0.5 must be a list of numbers"),
        ({"many": ["x"]}, 'thing.many=["x"] must be a list of numbers'),
        ({"many": "ab"}, "thing.many=ab must be a list of numbers"),
        ({"pair": [1]}, "thing.pair=[1] must be a list of 2 numbers"),
        ({"size": {"rows": 1.5}}, "thing.size.rows=1.5 must be an integer"),
        ({"size": {"raws": 1}}, "unknown key thing.size.raws"),
        ({"size": 3}, "thing.size=3 must be a section"),
        ({"counts": {"a": "x"}}, "thing.counts.a=x must be an integer"),
        ({"sampler": 3}, "thing.sampler=3 must be a section with a _target_"),
        ({"sampler": GOOD["sampler"] | {"temperature": "x"}}, "thing.sampler.temperature=x must be a number"),
        ({"build": "x"}, "thing.build=x must be null"),
        ({"wole": 1}, "unknown key thing.wole: Thing takes no wole (did you mean whole?)"),
        ({"_target_": "things.Nothing"}, "thing._target_=things.Nothing cannot be imported"),
    ],
)
def test_what_does_not_fit_is_one_line(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refused:
        check(**changed)
    assert str(refused.value).startswith(line)


def test_instantiate_checks_first() -> None:
    """Also where nothing checked the whole config: in eval.lm_eval, say."""
    cfg = OmegaConf.create({"sampler": {"_target_": "things.Sampler", "temperature": "x"}})
    with pytest.raises(UserError, match=r"sampler\.temperature=x must be a number"):
        instantiate(cfg.sampler)


RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
PARTS = [f"method/{path.parent.name}={path.stem}" for path in sorted((CONF / "method").glob("*/*.yaml"))]
CHOICES = {
    group: [f"{group}={path.stem}" for path in sorted((CONF / group).glob("*.yaml"))]
    for group in ("target", "data", "logger", "decoder", "benchmark")
}
COMPOSED: list[tuple[str, list[str]]] = [
    *[("train", [f"recipe={recipe}"]) for recipe in RECIPES],
    *[("train", ["recipe=jacobi_forcing", part]) for part in PARTS],
    *[("train", ["benchmark=tiny", choice]) for group in ("target", "data", "logger") for choice in CHOICES[group]],
    ("eval", [f"{g}=[{','.join(c.partition('=')[2] for c in CHOICES[g])}]" for g in ("decoder", "benchmark")]),
    ("speed", []),
    ("profile_steps", []),
    ("search", ["recipe=sweeps/jacobi_config"]),
    ("serving", ["recipe=sweeps/serving_load"]),
    ("serving_study", ["recipe=sweeps/serving_calibration"]),
]
UNSET = {"target=hf": "target.path=x", "data=jsonl": "data.source.path=x"}


@pytest.mark.parametrize(
    ("base", "args"), COMPOSED, ids=lambda value: " ".join(value) if type(value) is list else value
)
def test_every_value_of_the_configs_has_an_annotation(base: str, args: list[str]) -> None:
    cfg = composed(base, [*args, *(UNSET[arg] for arg in args if arg in UNSET)])
    found = list(unchecked(OmegaConf.to_container(cfg, resolve=False)))
    assert found == []


def unchecked(node: Any, path: str = "") -> Iterator[str]:
    """Paths of values under a `_target_` that nothing could be said about."""
    if not isinstance(node, dict):
        return
    known = parameters(node["_target_"]) if "_target_" in node else {}
    for name, value in node.items():
        where = f"{path}.{name}".lstrip(".")
        if known and name not in ("_target_", "_partial_") and vague(known.get(name, known.get("**", Any)), value):
            yield where
        yield from unchecked(value, where)


def vague(hint: Any, value: Any) -> bool:
    options = get_args(hint) if get_origin(hint) is not None and type(None) in get_args(hint) else (hint,)
    if isinstance(value, dict) and "_target_" not in value:
        return not any(is_typeddict(o) or (get_origin(o) and get_args(o)[-1] is not Any) for o in options)
    return any(option is Any or isinstance(option, str) for option in options)


def test_help_and_the_composed_config_import_no_torch(tmp_path: Path) -> None:
    """`--help` and `--cfg job` stay quick."""
    import os
    import subprocess
    import sys

    code = "import sys\nfrom dspec.train import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    for option in (["--help"], ["--cfg", "job"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *option],
            check=False, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


class Lenient:
    """Annotations of which a plain value may be right, and none at all."""

    def __init__(
        self,
        *,
        anything: Any = 0,
        bare=0,  # type: ignore[no-untyped-def]
        real: Real = 0,  # type: ignore[assignment]
        colour: Colour = Colour.RED,
        items: Sequence = (),  # type: ignore[type-arg]
        bounded: Annotated[int, "at least 0"] = 0,
        **more: Any,
    ) -> None:
        """Keeps nothing."""


@pytest.mark.parametrize(
    "given",
    [{"anything": 3}, {"bare": "x"}, {"real": 0.5}, {"colour": "red"}, {"items": [1]}, {"bounded": 2}, {"other": [1]}],
)
def test_values_that_may_be_right_pass(given: dict[str, Any]) -> None:
    check_types(OmegaConf.create({"a": {"_target_": f"{__name__}.Lenient", **given}}))


def test_a_target_that_cannot_be_called_is_named_with_its_section() -> None:
    with pytest.raises(UserError, match=r"^a\._target_=math.pi is a float"):
        check_types(OmegaConf.create({"a": {"_target_": "math.pi"}}))
    with pytest.raises(UserError, match=r"^a\._target_=nowhere.X cannot be imported"):
        check_types(OmegaConf.create({"a": {"_target_": "nowhere.X"}}))
    with pytest.raises(UserError, match=r"a\.bounded=true must be an integer"):
        check_types(OmegaConf.create({"a": {"_target_": f"{__name__}.Lenient", "bounded": True}}))
    with pytest.raises(UserError, match=r"a\.whole=\"4\" must be an integer"):
        check_types(OmegaConf.create({"a": {**GOOD, "whole": "4"}}))
    with pytest.raises(UserError, match=r"a\.size lacks share"):
        check_types(OmegaConf.create({"a": {**GOOD, "size": {"rows": 2}}}))
    check_types(OmegaConf.create({"a": {**GOOD, "flag": 1}}))


def test_interpolated_values_are_checked_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEDS", "3")
    cfg = composed("train", ["recipe=dspark", 'seed="${oc.decode:${oc.env:SEEDS}}"', "optimizer.cycles=${seed}"])
    assert cfg.evaluation.seed == cfg.optimizer.cycles == 3
