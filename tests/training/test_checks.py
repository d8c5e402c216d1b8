"""Settings that are rejected before anything runs (precisions and strategies: tests/test_precision.py)."""

import pytest

from dspec.errors import UserError
from dspec.training.checks import check_accelerator


@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_gpu_is_asked_for_only_where_there_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_accelerator(name)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=rf"trainer\.accelerator={name}: torch sees no CUDA GPU here.*=cpu"):
        check_accelerator(name)


@pytest.mark.parametrize("name", ["cpu", "auto", "mps"])
def test_other_accelerators_need_no_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_accelerator(name)
