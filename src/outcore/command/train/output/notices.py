"""Messages of libraries, shown once, in one line each."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from outcore.command.terminal import say

LIBRARIES = ("transformers", "trl", "datasets", "accelerate", "peft", "huggingface_hub")
# They warn of kernels that are not installed or not for this machine, of casts, and of what torchao tells torch.
_TALKATIVE = ("bitsandbytes", "torchao", "torch.utils._pytree")
_LONGEST = 400  # characters of a notice; some libraries write pages


@contextmanager
def notices(*, are_shown: bool = True) -> Iterator[None]:
    """Show warnings and the libraries' log lines as notices on standard error, while the block runs.

    Args: are_shown: False: drop them.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    handler = _OnceHandler(are_shown=are_shown)
    loggers, talkative = (list(map(logging.getLogger, names)) for names in (LIBRARIES, _TALKATIVE))
    before = [(log, log.level, log.handlers, log.propagate) for log in (*loggers, *talkative)]
    for log in talkative:
        log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # the handler drops what was said already
        warnings.simplefilter("ignore", DeprecationWarning)  # meant for the authors of libraries
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.* is deprecated")  # PEFT asks by the old name
        # PEFT makes this pattern for fused experts. It does match, but PEFT looks for modules, not for parameters.
        warnings.filterwarnings("ignore", r".*_pattern keys did not match .*: \['[^',]*gate_up_proj'\]")
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch then makes a context itself
        warnings.showwarning = handler.warn
        for log in loggers:
            _set(log, logging.WARNING, [handler], propagate=False)
        try:
            yield
        finally:
            for log, level, handlers, propagate in before:
                _set(log, level, handlers, propagate=propagate)


def _set(log: logging.Logger, level: int, handlers: list[logging.Handler], *, propagate: bool) -> None:
    log.setLevel(level)
    log.handlers, log.propagate = handlers, propagate


@final
class _OnceHandler(logging.Handler):
    """Prints each text once."""

    def __init__(self, *, are_shown: bool) -> None:
        super().__init__(logging.WARNING)
        self._are_shown = are_shown
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())

    def warn(self, message: Warning | str, *_: Any, **__: Any) -> None:
        """Take the place of ``warnings.showwarning``."""
        self._say(str(message))

    def _say(self, text: str) -> None:
        text = " ".join(text.split())
        if self._are_shown and text not in self._said:
            self._said.add(text)
            short = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
            say(f"note: {short}")
