"""Conversations as their datasets have them: `messages`, ShareGPT's `conversations`, Alpaca's instructions.

- `messages`: a list of `{role, content}`, as tokenizers' chat templates take them.
- ShareGPT: a list of `{from, value}`, with `human`, `gpt` and others for the roles.
- Alpaca: `instruction`, `output` and perhaps `input`, which follows the instruction after an empty line.

A row of the latter two may have a `system` prompt, and one of Alpaca a `history` of earlier pairs. ShareGPT
and Alpaca are recognized where the field `messages` is asked for (`data=chat`) and a row lacks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MESSAGES, SHAREGPT = "messages", "conversations"
ALPACA = ("instruction", "output")
ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
"""The role of each `from` of ShareGPT."""


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Return whether a row has one of the three forms.

    Example:
        >>> is_conversation({"instruction": "Add.", "output": "3"}), is_conversation({"text": "x"})
        (True, False)
    """
    return MESSAGES in row or SHAREGPT in row or all(key in row for key in ALPACA)


def field_value(row: Mapping[str, Any], field: str, location: str) -> Any:
    r"""Return the field of a row; turns of ShareGPT and rows of Alpaca as a list of `{role, content}`.

    Raises:
        KeyError: The row has neither the field nor, for `messages`, another form of a conversation.
        ValueError: A turn of ShareGPT has an unknown `from`.

    Example:
        >>> row = {"instruction": "Add.", "input": "1 2", "output": "3"}
        >>> field_value(row, "messages", "a.json:1")[0]
        {'role': 'user', 'content': 'Add.\n\n1 2'}
    """
    is_any = field == MESSAGES and row.get(MESSAGES) is None
    if is_any and all(row.get(key) is not None for key in ALPACA):
        return _of_alpaca(row)
    if is_any and SHAREGPT in row:
        field = SHAREGPT
    value = row[field]
    is_list = isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value)
    if not is_list or not all("from" in turn and "value" in turn for turn in value):
        return value
    unknown = [turn["from"] for turn in value if turn["from"] not in ROLES]
    if unknown:
        msg = f"{location}: {field!r} has a turn from {unknown[0]!r}: expected one of {', '.join(ROLES)}"
        raise ValueError(msg)
    turns = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in value]
    return turns if turns[0]["role"] == "system" else [*_system(row), *turns]


def _of_alpaca(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    asked, extra = row["instruction"], row.get("input")
    if isinstance(asked, str) and isinstance(extra, str) and extra.strip():
        asked = f"{asked}\n\n{extra}"
    pairs = [*(row.get("history") or []), (asked, row["output"])]
    turns = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*_system(row), *turns]


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []
