"""Write ``reference.md`` from the docstrings of the public names.

Run ``python docs/make_reference.py`` after a docstring has changed. A test compares the page with what this writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import outcore
from outcore import optim
from outcore.device.recorder import Recorder
from outcore.engine.optimizer import StreamedOptimizer
from outcore.integrations.transformers import OutcoreMixin
from outcore.losses import chunked
from outcore.spec.timeline import Timeline

PAGE = Path(__file__).with_name("reference.md")
_HEAD = """# API reference

Everything that a program may use, made from the docstrings by [make_reference.py](make_reference.py).
What is not listed here is not public and may change.

"""
# What public functions hand out. The constructors are not for users; of the recorder only what reads it is.
_BESIDE = {
    "optimizer": (StreamedOptimizer, "what `outcore.prepare` returns as the optimizer", None),
    "recorder": (Recorder, "what `optimizer.recording()` gives", ("timeline", "exposed_s")),
    "timeline": (Timeline, "what `recorder.timeline()` returns", None),
}
_SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Memory|Order|Cost|Shapes): ?(.*)$")


def page() -> str:
    """The whole page as Markdown."""
    functions = [n for n in outcore.__all__ if inspect.isfunction(getattr(outcore, n))]
    errors = [n for n in outcore.__all__ if n.endswith("Error")]
    values = [n for n in outcore.__all__ if n not in (*functions, *errors)]
    parts = [_HEAD, "## Functions\n\n"]
    for name in functions:
        parts.append(_entry(f"outcore.{name}", getattr(outcore, name)))
    parts.append(_entry("outcore.losses.chunked", chunked))
    parts.append(_entry("outcore.optim.check", optim.check))
    parts.append("## Values\n\n")
    for name in values:
        parts.append(_class(f"outcore.{name}", getattr(outcore, name)))
    parts += [_class(f"outcore.optim.{kind.__name__}", kind) for kind in (optim.Lion, optim.Rule, optim.State)]
    parts.append("## What these hand out\n\n")
    for name, (kind, what, members) in _BESIDE.items():
        names = members or _public(kind)
        parts.append(f"### `{name}`\n\n`{kind.__name__}`: {what}.\n\n{_described(kind)}{_members(kind, names)}")
    parts.append("## Integrations\n\n")
    parts.append(_class("outcore.integrations.transformers.OutcoreMixin", OutcoreMixin))
    parts.append(
        "## Errors\n\nAll of them are `outcore.OutcoreError`.\n\n| error | also a | raised for |\n|---|---|---|\n"
    )
    parts += [_error(name) for name in errors]
    return "".join(parts)


def _entry(name: str, function: Callable[..., Any], level: str = "###") -> str:
    text = f"{level} `{name}`\n\n```python\n{_signature(name.rpartition('.')[2], function)}\n```\n\n"
    return text + _markdown(inspect.getdoc(function) or "")


def _class(name: str, kind: type) -> str:
    text = f"### `{name}`\n\n{_described(kind)}"
    constructor = vars(kind).get("__init__")
    if constructor is not None and "Args:" in (constructor.__doc__ or ""):
        text += _entry(kind.__name__, constructor, level="####")
    if kind is OutcoreMixin:  # its methods are the Trainer's
        return text
    return text + _members(kind, _public(kind))


def _public(kind: type) -> tuple[str, ...]:
    """Its own members, and those of other classes of the package that it is made from."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "outcore"]
    return tuple(dict.fromkeys(n for base in bases for n in vars(base) if not n.startswith("_")))


def _described(kind: type) -> str:
    return _markdown(inspect.getdoc(kind) or "")


def _members(kind: type, names: Sequence[str]) -> str:
    """Properties as a list, then methods."""
    own = [(name, inspect.getattr_static(kind, name)) for name in names]
    text = "".join(f"- `.{name}`: {_first_line(v.fget)}\n" for name, v in own if isinstance(v, property))
    text += "\n" if text else ""
    for name, value in own:
        method = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        method = inspect.unwrap(method) if callable(method) else method
        if inspect.isfunction(method) and method.__doc__:
            text += _entry(f"{kind.__name__}.{name}", method, level="####")
    return text


def _error(name: str) -> str:
    kind = getattr(outcore, name)
    plain = ("object", "BaseException", "Exception", "OutcoreError")
    others = [base.__name__ for base in kind.__mro__[1:] if base.__name__ not in plain]
    return f"| `outcore.{name}` | {', '.join(f'`{n}`' for n in others)} | {_first_line(kind)} |\n"


def _first_line(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _signature(name: str, function: Callable[..., Any]) -> str:
    """One parameter a line where one line would be too long."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    parameters = [re.sub(r": '(.*?)'", r": \1", str(p)) for p in own]  # annotations are strings
    kinds = [p.kind for p in own]
    keyword = inspect.Parameter.KEYWORD_ONLY
    if keyword in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(keyword), "*")
    returns = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= 110:
        return line
    return f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returns}"


def _markdown(docstring: str) -> str:
    """A docstring's text, its sections as lists."""
    text = "\n".join(_lines(docstring)).replace("``", "`")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n\n"


def _lines(docstring: str) -> Iterator[str]:
    is_list = False
    for line in docstring.splitlines():
        section = _SECTION.match(line)
        if section:
            is_list = not section[2]
            yield from ("", f"**{section[1]}**" + (f": {section[2]}" if section[2] else ""), "")
        elif is_list and re.match(r"^    \S", line):
            name, colon, rest = line.strip().partition(":")
            yield f"- `{name}`:{rest}" if colon else f"- {line.strip()}"
        else:
            is_list = is_list and line.startswith(" ")
            yield line.strip() if is_list else line


if __name__ == "__main__":
    PAGE.write_text(page())
