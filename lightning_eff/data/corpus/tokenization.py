"""From text and conversations to tokens: bytes, which need nothing, or a Hugging Face tokenizer.

Of a conversation only what the assistant says is a target. Where that is, in this order:

1. the tokenizer's chat template marks it (`{% generation %}`);
2. the template has no marks: a turn is what the template adds to the turns before it and their prompt for an
   answer; a template that rewrites earlier turns is refused;
3. there is no template: a turn is `role:`, a line break, the content, the end token where the assistant has
   spoken, and a line break; the content of an answer and its end token are targets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models

from lightning_eff.data.corpus.documents import Turns
from lightning_eff.data.corpus.packing import TokenizedDocument

END_OF_BYTES = 256
"""The end token behind the 256 bytes."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are the bytes of UTF-8, and 256 for the end of a document.

    Example:
        >>> byte_tokenizer().encode("né").ids
        [110, 195, 169]
    """
    tokens = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<|end|>": END_OF_BYTES}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class Vocabulary:
    """A tokenizer with what training needs besides: an end token, a chat template, the number of tokens.

    Args:
        name: Hugging Face name or folder; None for bytes. Code that lies beside a tokenizer is never run.

    Raises:
        ValueError: There is no such tokenizer, or it has no fast form (`tokenizer.json`).
        ModuleNotFoundError: transformers is not installed.
    """

    def __init__(self, name: str | None = None) -> None:
        self._hub: Any = None if name is None else _load(name)
        self.tokenizer: Tokenizer = byte_tokenizer() if self._hub is None else self._hub.backend_tokenizer
        self.end: int | None = END_OF_BYTES if self._hub is None else self._hub.eos_token_id
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = (
            True  # a text that holds a special token's name keeps it as text
        )

    @property
    def size(self) -> int:
        """One more than the largest token."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fill(self) -> int:
        """A token for places that nobody looks at."""
        return 0 if self.end is None else self.end

    def of_texts(self, texts: Sequence[str]) -> list[TokenizedDocument]:
        """Return each text as tokens, all but the first of them targets, the end token behind."""
        self.tokenizer.encode_special_tokens = True
        return [TokenizedDocument.of(self._ended(each.ids)) for each in self.tokenizer.encode_batch(list(texts))]

    def _ended(self, ids: list[int]) -> list[int]:
        missing = self.end is not None and ids and ids[-1] != self.end
        return [*ids, self.end] if missing and self.end is not None else ids

    def of_chat(self, turns: Turns) -> TokenizedDocument:
        """Return a conversation as tokens, of which those that the assistant says are targets.

        Raises:
            ValueError: It has no answer, or the chat template cannot take it.
        """
        if not any(turn["role"] == ASSISTANT and turn["content"] for turn in turns):
            roles = sorted({turn["role"] for turn in turns})
            text = f"no turn of the role {ASSISTANT!r} says anything, so there is no target; roles: {roles}"
            raise ValueError(text)
        template = None if self._hub is None else self._hub.chat_template
        if template is None:
            return self._plain(turns)
        from jinja2 import TemplateError

        try:
            return self._marked(turns) if MARKED.search(str(template)) else self._by_prefix(turns)
        except TemplateError as error:
            text = f"the tokenizer's chat template refuses it: {error}"
            raise ValueError(text) from error

    def _plain(self, turns: Turns) -> TokenizedDocument:
        ids = [each for each in self.tokenizer.encode("").ids if each != self.end]
        counts = [False] * len(ids)
        for turn in turns:
            answers = turn["role"] == ASSISTANT
            head, body, tail = (self._bare(text) for text in (f"{turn['role']}:\n", turn["content"], "\n"))
            body += [self.end] if answers and self.end is not None else []
            ids += [*head, *body, *tail]
            counts += [False] * len(head) + [answers] * len(body) + [False] * len(tail)
        return TokenizedDocument.of(ids, counts)

    def _bare(self, text: str) -> list[int]:
        self.tokenizer.encode_special_tokens = True
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _marked(self, turns: Turns) -> TokenizedDocument:
        made = self._hub.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        return TokenizedDocument.of(made["input_ids"], [bool(each) for each in made["assistant_masks"]])

    def _by_prefix(self, turns: Turns) -> TokenizedDocument:
        whole = self._render(turns)
        spans: list[tuple[int, int]] = []
        for index, turn in enumerate(turns):
            if turn["role"] == ASSISTANT:
                before = self._render(turns[:index], prompt=True) if index else ""
                after = self._render(turns[: index + 1])
                if not (after.startswith(before) and whole.startswith(after)):
                    text = (
                        "the tokenizer's chat template rewrites earlier turns, so it does not tell where"
                        " answers are: mark them in it with {% generation %}"
                    )
                    raise ValueError(text)
                spans.append((len(before), len(after)))
        self.tokenizer.encode_special_tokens = False  # a template writes special tokens by their names
        made = self.tokenizer.encode(whole, add_special_tokens=False)
        counts = [any(low <= start < high for low, high in spans) for start, _ in made.offsets]
        return TokenizedDocument.of(made.ids, counts)

    def _render(self, turns: Turns, *, prompt: bool = False) -> str:
        return self._hub.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)


def _load(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        text = f"tokenizer={name!r} is read by transformers: pip install 'lightning-eff[hf]'"
        raise ModuleNotFoundError(text) from error
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        text = (
            f"tokenizer={name!r} cannot be loaded: {reason}\n"
            "  try: a folder with tokenizer.json, or null for bytes; a name needs the network or the cache"
        )
        raise ValueError(text) from error
    if not loaded.is_fast:
        text = f"tokenizer={name!r} has no tokenizer.json: expected one that the library tokenizers can read"
        raise ValueError(text)
    return loaded
