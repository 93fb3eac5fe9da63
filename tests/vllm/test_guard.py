"""Hooks that do not fit: vLLM stays as it is, one warning names the hook, strict makes it an error."""

from __future__ import annotations

import logging
import sys
import types

import pytest
from gimbal_runtime.vllm import guard
from gimbal_runtime.vllm.guard import Fuse, Hook, HookMismatch, expect, install_hooks

VERSION = "0.32.0"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for one of vLLM's modules."""
    fake = types.ModuleType("fake_vllm_module")
    exec(
        "def choose(self, request): ...\nclass Engine:\n    @staticmethod\n    def run(queue): ...",
        vars(fake),
    )
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fake


def test_expect_returns_what_is_there(module: types.ModuleType) -> None:
    assert expect(module.__name__, "choose", ["self", "request"]) is module.choose
    assert expect(module.__name__, "Engine.run", ["queue"]) is module.Engine.run


@pytest.mark.parametrize(
    ("path", "parameters"),
    [("gone", []), ("Engine.gone", []), ("choose", ["self", "prompt"]), ("Engine.run", ["self", "queue"])],
)
def test_expect_refuses_what_differs(module: types.ModuleType, path: str, parameters: list[str]) -> None:
    with pytest.raises(HookMismatch, match=f"{module.__name__}.{path}"):
        expect(module.__name__, path, parameters)


def test_unfit_hook_warns_once_by_name_and_the_others_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    done: list[str] = []

    def unfit() -> None:
        raise HookMismatch("chooser has another signature")

    hooks = [Hook("unfit", unfit), Hook("fit", lambda: done.append("fit"))]
    with caplog.at_level(logging.WARNING, logger=guard.logger.name):
        assert install_hooks(hooks, VERSION, strict=False) == ["fit"]
    assert done == ["fit"]
    [message] = [record.getMessage() for record in caplog.records if "unfit" in record.getMessage()]
    assert "another signature" in message


def test_unfit_hook_is_an_error_when_strict() -> None:
    def unfit() -> None:
        raise HookMismatch("no such class")

    with pytest.raises(RuntimeError, match=r"unfit.*no such class"):
        install_hooks([Hook("unfit", unfit)], VERSION, strict=True)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", ""])
def test_unknown_version_changes_nothing(version: str) -> None:
    done: list[str] = []
    hooks = [Hook("any", lambda: done.append("any"))]
    assert install_hooks(hooks, version, strict=False) == []
    assert done == []
    with pytest.raises(RuntimeError, match="any"):
        install_hooks(hooks, version, strict=True)


def test_fuse_hands_over_to_vllm_after_the_first_error() -> None:
    fuse = Fuse("test")
    calls: list[str] = []

    def ours() -> str:
        calls.append("ours")
        raise ZeroDivisionError

    assert fuse.run(ours, lambda: "stock") == "stock"
    assert fuse.run(ours, lambda: "stock") == "stock"
    assert calls == ["ours"]
