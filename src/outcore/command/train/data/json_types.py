"""Types as JSON calls them, for messages."""

from __future__ import annotations


def type_name(value: object) -> str:
    """Return what JSON calls a value's type."""
    names = {
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)
