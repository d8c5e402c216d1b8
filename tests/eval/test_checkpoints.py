"""What is read of the config of the run that made a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspec.errors import UserError
from eval.checkpoints import run_config


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"method": {"layout": "x"}}, 'method.layout="x"'),
        ({"method": {"layout": "block_size"}}, 'method.layout="block_size"'),
        ({"method": {"layout": 8}}, "method.layout=8"),
        ({"data": ["block_size"]}, r'data=\["block_size"\]'),
        ({"data": {"policy": "chat"}}, 'data.policy="chat"'),
    ],
)
def test_text_in_place_of_a_section_is_refused(tmp_path: Path, sections: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"method": {}, "target": {}} | sections))
    with pytest.raises(UserError, match=rf"config\.json has {says}, no section: restore it"):
        run_config(tmp_path)


def test_half_a_prompt_policy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"method": {}, "target": {}, "data": {"policy": {"system": "x"}}}))
    with pytest.raises(UserError, match=r"data\.policy lacks thinking: restore it"):
        run_config(tmp_path)


def test_a_run_without_these_sections(tmp_path: Path) -> None:
    for sections in ({}, {"data": None}, {"data": {"policy": None}}, {"method": {"layout": None}}):
        (tmp_path / "config.json").write_text(json.dumps({"method": {}, "target": {}} | sections))
        assert run_config(tmp_path)["target"] == {}
