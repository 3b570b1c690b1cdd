"""One setting: which values it takes, as pydantic checks them, and how a refusal is worded.

Types, choices and limits are annotations. A value is read strictly, as if it came from JSON. YAML and flags know other
types than JSON. So a value that does not fit is tried again: as the text that was typed, as what this text means, and
as an integer if it is a whole number.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import EnumMeta
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from outcore.command.train.settings.given_settings import GivenSetting, from_yaml, shown
from outcore.core.errors import ConfigError

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_WHOLE = Annotated[int, Field(gt=-(2**63), lt=2**63)]  # what torch and numpy take
_LONG = 12  # the most choices that a message lists; of more, it names the nearest ones
_JUDGED = ("greater", "less", "finite", "name")
_UNNAMED = ("missing", "unexpected_keyword_argument")  # their message does not name the key


def admitted(hint: Any, words: Sequence[str] = (), limit: object = None) -> Any:
    """Return an annotation that says all that is known of a setting.

    Args:
        hint: Annotation of a dataclass's field.
        words: What its text may be; empty: the words of an enumeration in the annotation, else any text.
        limit: Limit of its numbers.
    """
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = words or [word.value for kind in members if _is_enum(kind) for word in kind]
    text = Literal[tuple(words)] if words else str
    numbers = {int: Annotated[_WHOLE, limit], float: Annotated[float, limit]}
    return Union[tuple(numbers.get(m) or _admitted(m, text) for m in members)]  # noqa: UP007 (made at run time)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, EnumMeta)


def _admitted(member: Any, text: Any) -> Any:
    if member is str or _is_enum(member):
        return text
    if member == list[str]:
        return list[text]
    if get_origin(member) is Literal:  # PEFT writes pissa_niter_[number of iters] for any such number
        patterns = [str(word).partition("[")[0] for word in get_args(member) if "[" in str(word)]
        return Union[(member, *(Annotated[str, Field(pattern=rf"^{begun}\d+$")] for begun in patterns))]
    return member


@dataclass(frozen=True)
class CheckedSetting:
    """A setting whose name and value are right by themselves."""

    value: Any
    where: str


@dataclass(frozen=True)
class SettingKind:
    """The values that one setting takes."""

    hint: Any
    default: Any
    """``dataclasses.MISSING`` where there is none, or none that is worth saying."""

    def read(self, given: GivenSetting) -> Any:
        """Return the setting's value from what was given.

        Raises:
            ConfigError: The setting does not take it. No setting takes numbers that are not finite.
        """
        hint: Any = GenericAlias(list, self.hint)  # pydantic takes no configuration for a lone dataclass
        adapter = TypeAdapter(hint, config=_STRICT)
        failures: list[Any] = []
        for reading in _readings(given):
            try:
                value = adapter.validate_json(to_json([reading], inf_nan_mode="constants", fallback=str))[0]
            except ValidationError as error:
                failures.append([{**found, "value": reading} for found in error.errors()])
            except ValueError:  # not even JSON
                failures.append([{"type": "", "msg": "JSON cannot hold it", "loc": (), "input": None, "value": None}])
            else:
                return reading if isinstance(value, float) and value == reading else value  # 3 stays 3, not 3.0
        expected = dict.fromkeys(map(self._expected, max(failures, key=_says)))
        raise ConfigError(
            f"{given.where}: expected {' or '.join(expected)}, but got {shown(given.value)}; {self._repair(given)}"
        )

    def _expected(self, error: Mapping[str, Any]) -> str:
        """Put pydantic's words into a sentence."""
        _, is_usual, said = error["msg"].rpartition("Input should be ")
        if error["type"] == "literal_error" and len(self._words) > _LONG:
            near = difflib.get_close_matches(shown(error["input"]), self._words, n=3, cutoff=0)
            return f"one of {len(self._words)} words, the nearest being {', '.join(near)}"
        if not is_usual:
            key = f" '{error['loc'][-1]}'" if error["type"] in _UNNAMED else ""
            return f"a value that fits ({said.removeprefix('Value error, ')}{key})"
        inside = "" if shown(error["input"]) == shown(error["value"]) else f" for {shown(error['input'])}"
        return f"{'a number ' if said.startswith(('greater', 'less')) else ''}{said}{inside}"

    def _repair(self, given: GivenSetting) -> str:
        near = difflib.get_close_matches(shown(given.value).strip("'"), self._words, n=1)
        if near and near[0] == given.value:  # the word is right, and belongs into a list
            return f"give it as a list: [{near[0]}]"
        if near:
            return f"did you mean '{near[0]}'?"
        return "correct it" + (
            "" if self.default in (MISSING, None) else f", or leave it out for {shown(self.default)}"
        )

    @property
    def _words(self) -> list[str]:
        return list(dict.fromkeys(word for word in _words(self.hint) if isinstance(word, str)))


def _words(hint: Any) -> list[Any]:
    parts = get_args(hint)
    return list(parts) if get_origin(hint) is Literal else [word for part in parts for word in _words(part)]


def _says(errors: Iterable[Mapping[str, Any]]) -> int:
    """Rank how much a failure says: a wrong value of the right type says more than a wrong type."""
    kinds = [error["type"] for error in errors]
    return 2 * any(kind.startswith(_JUDGED) for kind in kinds) + ("literal_error" in kinds) - ("json_invalid" in kinds)


def _readings(given: GivenSetting) -> Iterator[object]:
    value = given.value
    yield value
    if given.text is not None:
        yield given.text
    if isinstance(value, str) and value.lower() in ("none", "null"):
        yield None
    elif isinstance(value, str) and (value := from_yaml(value)) is not None:  # an empty text is not null
        yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
