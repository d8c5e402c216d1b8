"""Config groups that Hydra cannot find itself: the pages in recipes/, and the decoders of conf/decoder_variants.yaml.

A page is merged in three places (conf/train.yaml has the order): its `defaults` as recipe/<name>; its body as
page/<name>; its section `pretrained`, the numbers for pretrained targets, as page_scale/<name>_pretrained, with
scale=pretrained. After them come the groups that replace parts of a page (data, schedule, hardware), and last a recipe
of a user's own. The sections `decoder` and `benchmark` are merged into the page's own choices of these groups, so that
others chosen on the command line keep their files' values. data=gsm8k and data=jsonl choose scale=pretrained; other
data may do so, too.
"""

from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from dspec.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
VARIANTS = CONF / "decoder_variants.yaml"
SCALES = ("embedded", "pretrained")  # choices of the group `scale`: a page's own numbers, or its `pretrained` section's
_LOGGING = {  # plain messages on stdout, for every program
    "version": 1,
    "formatters": {"plain": {"format": "%(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"}},
    "root": {"level": "INFO", "handlers": ["console"]},
    "disable_existing_loggers": False,
}


def pages(folder: Path) -> list[Path]:
    """The recipes under `folder`, without composed/ (generated from them)."""
    return sorted(path for path in folder.rglob("*.yaml") if path.parent.name != "composed")


def register_groups() -> None:
    """Makes recipes/, their scales and conf/decoder_variants.yaml choices of Hydra's groups."""
    store_recipes(ROOT / "recipes")
    store_variants(VARIANTS, CONF / "decoder")


def store_recipes(folder: Path) -> None:
    """Makes each page a choice of the group `recipe`: recipe=dspark, recipe=sweeps/<name>."""
    store = ConfigStore.instance()
    store.store(group="hydra/job_logging", name="terse", node=_LOGGING, package="hydra.job_logging")
    for scale in SCALES:  # empty: conf/train.yaml merges the page's section by its name
        store.store(group="scale", name=scale, node={}, package="_global_")
    for path in pages(folder):
        page, name = yaml.safe_load(path.read_text("utf-8")), path.stem
        group = "/".join(("recipe", *path.relative_to(folder).parts[:-1]))
        if group == "recipe":  # a page for conf/train.yaml
            page = _split(store, name, page)
        else:
            page = _numbers_of_benchmarks(store, name, page)
        store.store(group=group, name=name, node=page, package="_global_")


def _split(store: ConfigStore, name: str, page: dict[str, Any]) -> dict[str, Any]:
    """Stores the page's parts; returns its defaults, which name the body and the page's own choices."""
    chosen = {group: choice for entry in page.pop("defaults", []) for group, choice in entry.items()}
    if decoders := page.pop("decoder", {}):
        # a label goes with a decoder however it is chosen: it tells its weights apart in tables and comparisons
        page["decoder"] = {key: {"label": node.pop("label")} for key, node in decoders.items() if "label" in node}
        merged = {key: _store_page_numbers(store, f"decoder.{key}", name, key, node) for key, node in decoders.items()}
        chosen["override /decoder"] = [merged.get(choice, choice) for choice in chosen["override /decoder"]]
    if benchmarks := page.pop("benchmark", {}):
        choice = chosen["override /benchmark"]
        chosen["override /benchmark"] = _store_page_numbers(store, "benchmark", name, choice, benchmarks)
    if pretrained := page.pop("pretrained", {}):
        store.store(group="page_scale", name=f"{name}_pretrained", node=pretrained, package="_global_")
    store.store(group="page", name=name, node=page, package="_global_")
    return {"defaults": [*({group: choice} for group, choice in chosen.items()), {"override /page": name}]}


def _numbers_of_benchmarks(store: ConfigStore, name: str, page: dict[str, Any]) -> dict[str, Any]:
    """The page with its numbers for its own choice of benchmarks on top of that choice: another choice replaces
    both."""
    key = "override /benchmark"
    for entry in page.get("defaults", []):
        if isinstance(entry, dict) and isinstance(entry.get(key), str) and "benchmark" in page:
            entry[key] = _store_page_numbers(store, "benchmark", name, entry[key], page.pop("benchmark"))
    return page


def _store_page_numbers(store: ConfigStore, package: str, page: str, choice: str, numbers: dict[str, Any]) -> str:
    """Stores the page's numbers for one decoder or benchmark on top of the chosen file; returns that choice's name."""
    group = package.partition(".")[0]
    node = {"defaults": [f"/{group}/{choice}@_here_", "_self_"], **numbers}
    store.store(group=f"{group}/{page}", name=choice, node=node, package=package)
    return f"{page}/{choice}"


def has_pretrained(page: str) -> bool:
    """Whether recipes/<page>.yaml has numbers for pretrained targets; a user's own page has none."""
    path = ROOT / "recipes" / f"{page}.yaml"
    return path.is_file() and "pretrained" in yaml.safe_load(path.read_text("utf-8"))


def store_variants(table: Path, decoders: Path) -> None:
    """Makes each line of `table` a choice of the group `decoder`: a file of `decoders` with the line's changes.

    Raises UserError for a line that sets a key its decoder does not have.
    """
    lines = variants(table)
    for name, line in lines.items():
        named, changed = line["decoder"], {key: value for key, value in line.items() if key != "decoder"}
        origin = lines[named]["decoder"] if named in lines else named
        settings = yaml.safe_load((decoders / f"{origin}.yaml").read_text("utf-8"))
        if unknown := sorted(changed.keys() - settings.keys()):
            raise UserError(f"{table}: {name} sets {', '.join(unknown)}, which decoder={origin} does not have")
        if line.get("weights") == "base":
            follow = {key: f"${{decoder.{named}.{key}}}" for key in settings}
            changed = {key: value for key, value in follow.items() if key not in ("_target_", "label")} | changed
        node = {"defaults": [f"{origin}@_here_", "_self_"], **changed}
        ConfigStore.instance().store(group="decoder", name=name, node=node, package=f"decoder.{name}")


def variants(table: Path) -> dict[str, dict[str, Any]]:
    """The lines of conf/decoder_variants.yaml by name."""
    return dict(yaml.safe_load(table.read_text("utf-8")))
