"""Rows as other tools write them, converted: ShareGPT conversations, Alpaca instructions, implicit prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outcore.core.errors import ConfigError

SHARE_GPT = "rows are ShareGPT conversations: from/value become role/content, human and gpt become user and assistant"
ALPACA = "rows are Alpaca instructions: instruction and input become what the user says, output what the assistant says"

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")


def read_foreign(where: str, fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Rename the fields of a row of ShareGPT or Alpaca; any other row comes back as it is.

    Returns:
        Values by the names that ``records`` knows, and what to tell the user, once; None: nothing.

    Raises:
        ConfigError: An instruction has an input that is not text.
    """
    renamed = {key: _messages(fields[key]) if key in _LISTS else value for key, value in fields.items()}
    if isinstance(renamed.get("conversations"), list) and renamed.get("messages") is None:
        return _from_conversations(renamed), SHARE_GPT
    if isinstance(renamed.get("instruction"), str) and renamed.get("prompt") is None and renamed.get("text") is None:
        found = _from_instruction(where, renamed)
        return (fields, None) if found is None else (found, ALPACA)
    is_renamed = any(renamed[key] is not value for key, value in fields.items())
    return (renamed, SHARE_GPT) if is_renamed else (fields, None)


def with_prompt(where: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the prompt of two answers beside them, as messages if the answers are messages.

    Raises:
        ConfigError: There is no prompt: the answers begin differently, or are neither text nor lists.
    """
    prompt, chosen, rejected = (fields.get(key) for key in ("prompt", "chosen", "rejected"))
    if not (chosen and rejected and type(chosen) is type(rejected)):
        return fields
    is_repeated = isinstance(prompt, str) and isinstance(chosen, list) and _role(chosen[0]) != "assistant"
    if prompt is None or is_repeated:
        if not isinstance(chosen, str | list):
            raise ConfigError(
                f"{where}: expected 'chosen' to be a string or a list of messages, but got {type_name(chosen)}"
            )
        from trl import extract_prompt

        found = extract_prompt({"chosen": chosen, "rejected": rejected}) if chosen[0] == rejected[0] else {}
        if not found.get("prompt"):
            raise ConfigError(
                f"{where}: expected a 'prompt', or that 'chosen' and 'rejected' begin with it, but they begin "
                "differently; give it as 'prompt'"
            )
        return {**fields, **found}
    if isinstance(prompt, str) and isinstance(chosen, list):
        return {**fields, "prompt": [_said("user", prompt)]}
    return fields


def _messages(value: object) -> object:
    """Return ShareGPT's messages, or a single one, with outcore's names."""
    if isinstance(value, dict) and _is_foreign(value):
        return [_message(value)]
    if isinstance(value, list) and any(map(_is_foreign, value)):
        return [_message(item) if _is_foreign(item) else item for item in value]
    return value


def _is_foreign(message: object) -> bool:
    return isinstance(message, dict) and {"from", "value"} <= message.keys()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    return {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": message["value"], **rest}


def _from_conversations(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a conversation to messages. With two answers beside it, it is their prompt."""
    rest = {key: value for key, value in fields.items() if key not in ("conversations", "messages", "system")}
    is_judged = rest.get("chosen") is not None and rest.get("rejected") is not None
    said = _instructed(fields.get("system"), fields["conversations"])
    return {**rest, "prompt" if is_judged else "messages": said}


def _from_instruction(where: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    answers = {"output": "completion", "chosen": "chosen", "rejected": "rejected"}
    found = {answers[key]: fields[key] for key in answers if isinstance(fields.get(key), str)}
    if not found:
        return None
    given = fields.get("input")
    if not isinstance(given, str | None):
        raise ConfigError(f"{where}: expected 'input' to be a string, but got {type_name(given)}")
    asked = "\n\n".join(filter(None, (fields["instruction"], given)))
    rest = {k: v for k, v in fields.items() if k not in ("instruction", "input", "system", "prompt", *answers)}
    return {
        **rest,
        "prompt": _instructed(fields.get("system"), [_said("user", asked)]),
        **{key: [_said("assistant", answer)] for key, answer in found.items()},
    }


def _instructed(system: object, said: list[Any]) -> list[Any]:
    has_own = bool(said) and _role(said[0]) == "system"
    return [_said("system", system), *said] if isinstance(system, str) and system and not has_own else said


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def type_name(value: object) -> str:
    """Return what JSON calls a value's type, for messages."""
    names = {str: "a string", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return "null" if value is None else (names | {dict: "an object"}).get(type(value), type(value).__name__)
