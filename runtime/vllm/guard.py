"""Guards: a hook that does not fit the installed vLLM leaves vLLM untouched and says so once (SPEC section 9)."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any, TypeVar

# Under vLLM's logger tree, so that its handlers and level apply in every vLLM process.
logger = logging.getLogger("vllm.gimbal")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time that it is given."""
    logger.warning(message)


SUPPORTED_VERSIONS = ("0.32", "0.33")
"""Releases, as major.minor, whose internals the hooks were written against."""

Result = TypeVar("Result")
inactive: list[str] = []
"""Messages of the hooks that did not fit, in this process."""


class HookMismatch(RuntimeError):
    """vLLM does not look as a hook expects it to."""


@dataclass(frozen=True)
class Hook:
    """One change to vLLM.

    `install` first looks up everything that it needs by `expect`, and only then changes anything: a hook is in
    force as a whole or not at all.
    """

    name: str
    install: Callable[[], None]


def expect(module: str, path: str, parameters: Iterable[str] = ()) -> Any:
    """Returns `module.path`; checks that it is there and, if callable, that its leading parameters are as named.

    Raises:
        HookMismatch: the module or the attribute is missing, or the parameters differ.
    """
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise HookMismatch(f"{module}.{path} is missing ({error})") from error
    found = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    wanted = list(parameters)
    if wanted:
        present = list(inspect.signature(found).parameters)
        if present[: len(wanted)] != wanted:
            raise HookMismatch(
                f"{module}.{path} takes ({', '.join(present)}), not ({', '.join(wanted)}, ...)"
            )
    return found


def patch(module: str, name: str, value: Any) -> None:
    """Rebinds a global of one of vLLM's modules."""
    setattr(importlib.import_module(module), name, value)


def is_supported(version: str) -> bool:
    """Whether the hooks were written against this vLLM version."""
    return ".".join(version.split(".")[:2]) in SUPPORTED_VERSIONS


def install_hooks(hooks: Iterable[Hook], version: str, *, strict: bool) -> list[str]:
    """Installs each hook that fits; returns the names of those in force.

    Args:
        hooks: in the order of installation.
        version: of vLLM, as in `vllm.__version__`.
        strict: a hook that does not fit is an error.

    Raises:
        RuntimeError: `strict`, and a hook does not fit.
    """
    known = is_supported(version)
    active = []
    for hook in hooks:
        try:
            if not known:
                raise HookMismatch(f"vLLM {version} is none of {', '.join(SUPPORTED_VERSIONS)}")
            hook.install()
        except Exception as error:
            message = f"Gimbal hook '{hook.name}' is not active, vLLM's own behaviour stays: {error}"
            inactive.append(message)
            if strict:
                raise RuntimeError(message) from error
            # Every process of a server comes to the same finding: the first one says it.
            logger.log(logging.WARNING if parent_process() is None else logging.DEBUG, message)
        else:
            active.append(hook.name)
    return active


class Fuse:
    """Keeps an error of ours from becoming vLLM's: the first one is logged, then the hook stands aside.

    `run(ours, otherwise)` gives the result of `ours()`, or of `otherwise()` once anything went wrong.

    Args:
        name: of the hook, for the log.
        instead: what happens from then on, for the log.
    """

    def __init__(self, name: str, instead: str = "vLLM's own behaviour continues") -> None:
        self.name = name
        self.instead = instead
        self.blown = False

    def run(self, ours: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
        if not self.blown:
            try:
                return ours()
            except Exception:
                self.blow()
        return otherwise()

    def attempt(self, ours: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Calls `ours(*args, **kwargs)`, or does nothing once anything went wrong."""
        if not self.blown:
            try:
                ours(*args, **kwargs)
            except Exception:
                self.blow()

    def blow(self) -> None:
        """Logs the exception being handled and takes the hook out of service."""
        self.blown = True
        logger.exception("Gimbal hook '%s' failed and is now off; %s", self.name, self.instead)


def once(function: Callable[[], None]) -> Callable[[], None]:
    """vLLM may load a plug-in several times in one process; the change is made the first time only."""
    done = False

    @functools.wraps(function)
    def wrapper() -> None:
        nonlocal done
        if not done:
            function()
            done = True

    return wrapper
