"""From text and conversations to tokens: bytes, which need no files, or a Hugging Face tokenizer.

Of a conversation only what the assistant says is a target. Its tokens are found as follows, in this order:

1. The tokenizer's chat template marks them (`{% generation %}`).
2. The template has no marks: a turn is the text that the template appends to the earlier turns and their
   generation prompt. A template that rewrites earlier turns is rejected.
3. There is no template: a turn is `role:`, a line break, the content, the end token after an answer, and a
   line break; the content of an answer and its end token are targets.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models

from lightning_eff.data.corpus.documents import Turns
from lightning_eff.data.corpus.packing import TokenizedDocument

END_OF_BYTES = 256
"""The end token, after the 256 bytes."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"


class TrainingTokenizer:
    """A tokenizer with an end token, a chat template and the number of tokens.

    Args:
        name: Hugging Face name or folder; None for bytes. Code of a tokenizer is never executed.

    Raises:
        ValueError: The tokenizer cannot be loaded, or has no fast form (`tokenizer.json`).
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> TrainingTokenizer().tokenizer.encode("né").ids
        [110, 195, 169]
    """

    def __init__(self, name: str | None = None) -> None:
        self._hub: Any = None
        self.tokenizer: Tokenizer
        self.eos_id: int | None
        if name is None:  # the bytes of UTF-8, and 256 for the end of a document
            tokens = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<|end|>": END_OF_BYTES}
            self.tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
            self.tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
            self.eos_id = END_OF_BYTES
        else:
            try:
                from transformers import AutoTokenizer
            except ModuleNotFoundError as error:
                msg = f"tokenizer={name!r} needs transformers: pip install 'lightning-eff[hf]'"
                raise ModuleNotFoundError(msg) from error
            try:
                self._hub = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            except (OSError, ValueError, KeyError) as error:
                reason = str(error).strip().splitlines()[0]
                msg = (
                    f"tokenizer={name!r} cannot be loaded: {reason}\n"
                    "  try: a folder with tokenizer.json, or null for bytes;"
                    " a name needs the network or the cache"
                )
                raise ValueError(msg) from error
            if not self._hub.is_fast:
                reason = "has no tokenizer.json: expected one that the library tokenizers can read"
                msg = f"tokenizer={name!r} {reason}"
                raise ValueError(msg)
            self.tokenizer, self.eos_id = self._hub.backend_tokenizer, self._hub.eos_token_id
        self.pad_id = 0 if self.eos_id is None else self.eos_id
        """The token for padding; its positions are masked or have no label."""
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # The name of a special token in a text is encoded as text, not as that token.
        self.tokenizer.encode_special_tokens = True

    def encode_texts(self, texts: Sequence[str]) -> list[TokenizedDocument]:
        """Return the tokens of each text and the end token, all but the first targets."""
        self.tokenizer.encode_special_tokens = True
        documents: list[TokenizedDocument] = []
        for encoding in self.tokenizer.encode_batch(list(texts)):
            ids = encoding.ids
            if self.eos_id is not None and ids and ids[-1] != self.eos_id:
                ids = [*ids, self.eos_id]
            documents.append(TokenizedDocument.from_ids(ids))
        return documents

    def encode_chat(self, turns: Turns) -> TokenizedDocument:
        """Return the tokens of a conversation; what the assistant says are the targets.

        Raises:
            ValueError: The conversation has no answer, or the chat template rejects it.
        """
        if not any(turn["role"] == ASSISTANT and turn["content"] for turn in turns):
            roles = sorted({turn["role"] for turn in turns})
            msg = f"no turn of the role {ASSISTANT!r} has content, so there is no target; roles: {roles}"
            raise ValueError(msg)
        if self._hub is None or self._hub.chat_template is None:
            self.tokenizer.encode_special_tokens = True
            ids = [token for token in self.tokenizer.encode("").ids if token != self.eos_id]
            is_target = [False] * len(ids)
            for turn in turns:
                is_answer = turn["role"] == ASSISTANT
                head, body, tail = (
                    list(self.tokenizer.encode(text, add_special_tokens=False).ids)
                    for text in (f"{turn['role']}:\n", turn["content"], "\n")
                )
                body += [self.eos_id] if is_answer and self.eos_id is not None else []
                ids += [*head, *body, *tail]
                is_target += [False] * len(head) + [is_answer] * len(body) + [False] * len(tail)
            return TokenizedDocument.from_ids(ids, is_target)
        from jinja2 import TemplateError

        try:
            if not MARKED.search(str(self._hub.chat_template)):
                return self._encode_by_prefix(turns)
            made = self._hub.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        except TemplateError as error:
            msg = f"the tokenizer's chat template rejects it: {error}"
            raise ValueError(msg) from error
        return TokenizedDocument.from_ids(made["input_ids"], [bool(mask) for mask in made["assistant_masks"]])

    def _encode_by_prefix(self, turns: Turns) -> TokenizedDocument:
        render = functools.partial(self._hub.apply_chat_template, tokenize=False)
        full: str = render(turns, add_generation_prompt=False)
        spans: list[tuple[int, int]] = []  # answers, as ranges of characters in `full`
        for index, turn in enumerate(turns):
            if turn["role"] == ASSISTANT:
                before = render(turns[:index], add_generation_prompt=True) if index else ""
                after = render(turns[: index + 1], add_generation_prompt=False)
                if not (after.startswith(before) and full.startswith(after)):
                    msg = (
                        "the tokenizer's chat template rewrites earlier turns, so answers cannot be located:"
                        " mark them in the template with {% generation %}"
                    )
                    raise ValueError(msg)
                spans.append((len(before), len(after)))
        self.tokenizer.encode_special_tokens = False  # a template writes special tokens by their names
        made = self.tokenizer.encode(full, add_special_tokens=False)
        is_target = [any(low <= start < high for low, high in spans) for start, _ in made.offsets]
        return TokenizedDocument.from_ids(made.ids, is_target)
