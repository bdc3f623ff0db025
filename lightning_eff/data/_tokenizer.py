"""Tokenize text and conversations with a Hugging Face tokenizer, or into bytes, which needs no files.

data/text.py uses `TrainingTokenizer`. The targets of a conversation are the assistant's tokens. Three methods
find the assistant's tokens, and the first method that applies is used:

1. The tokenizer's chat template marks the assistant's tokens (`{% generation %}`).
2. If the template has no marks, the conversation is rendered twice for each answer: up to the answer, and
   with the answer. The difference of the two texts is the answer. A template that rewrites earlier turns is
   rejected.
3. If there is no template, `DEFAULT_TEMPLATE` is used, which has marks.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models

END_OF_BYTES = "<|end|>"
"""Name of the byte tokenizer's end token, whose id is 256."""
DEFAULT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"

Turns = list[dict[str, str]]
"""A conversation: `role` and `content` of each turn."""
Tokens = tuple[list[int], list[bool]]
"""Tokens, and whether each token is a target."""


class TrainingTokenizer:
    """A fast tokenizer of transformers, by name or folder, or a byte tokenizer; no custom code is executed.

    Example:
        >>> TrainingTokenizer().tokenizer.encode("né").ids
        [110, 195, 169]
    """

    def __init__(self, name: str | None = None) -> None:
        try:
            import transformers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "data/text needs transformers: pip install 'lightning-eff[hf]'"
            ) from error
        if name is None:
            tokens = {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_OF_BYTES: 256}
            of_bytes = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
            of_bytes.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
            self._hub: Any = transformers.PreTrainedTokenizerFast(
                tokenizer_object=of_bytes, eos_token=END_OF_BYTES
            )
        else:
            try:
                self._hub = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            except (OSError, ValueError, KeyError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(
                    f"tokenizer={name!r} cannot be loaded: {reason}\n"
                    "  try: a folder with tokenizer.json, or null for bytes;"
                    " a name needs the network or the cache"
                ) from error
        if not self._hub.is_fast:
            raise ValueError(
                f"tokenizer={name!r} has no tokenizer.json: expected one that the library tokenizers can read"
            )
        self.has_own_template = bool(self._hub.chat_template)
        """Whether the tokenizer came with a chat template."""
        self._hub.chat_template = self._hub.chat_template or DEFAULT_TEMPLATE
        self.tokenizer: Tokenizer = self._hub.backend_tokenizer
        self.eos_id: int | None = self._hub.eos_token_id
        self.pad_id = 0 if self.eos_id is None else self.eos_id
        """The padding token; its positions are masked or have no label."""
        # Token ids may have gaps, so the largest id counts, not the number of tokens.
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # If a text contains the name of a special token, encode it as ordinary text.
        self.tokenizer.encode_special_tokens = True

    def digest(self) -> str:
        """Return a hash of everything that determines a document's tokens."""
        facts = [self.tokenizer.to_str(), str(self._hub.chat_template), str(self._hub.special_tokens_map)]
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, with an end token appended."""
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]  # in parallel
        if self.eos_id is None:
            return encoded
        # Some tokenizers have already appended an end token.
        return [[*ids, self.eos_id] if ids and ids[-1] != self.eos_id else ids for ids in encoded]

    def encode_chat(self, turns: Turns) -> Tokens:
        """Return the tokens of a conversation; the assistant's tokens are the targets.

        Raises:
            ValueError: No assistant turn has content, or the template rejects the conversation.
        """
        if not any(turn["role"] == ASSISTANT and turn["content"] for turn in turns):
            roles = sorted({turn["role"] for turn in turns})
            raise ValueError(
                f"no turn of the role {ASSISTANT!r} has content, so there is no target; roles: {roles}"
            )
        if not MARKED.search(str(self._hub.chat_template)):
            return self._encode_by_prefix(turns)
        made = self._apply(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(made["input_ids"]), [bool(mask) for mask in made["assistant_masks"]]

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of the start of a text, without an end token."""
        # Some tokenizers append an end token to every text, which would end a prompt.
        ids, bare = (self.tokenizer.encode(prompt, add_special_tokens=added).ids for added in (True, False))
        return ids[:-1] if ids != bare and ids[-1] == self.eos_id else ids

    def encode_chat_prompt(self, turns: Turns) -> list[int]:
        """Return the tokens of a conversation up to the start of the assistant's next turn.

        Raises:
            ValueError: The template rejects the conversation.
        """
        made = self._apply(turns, tokenize=True, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])

    def _encode_by_prefix(self, turns: Turns) -> Tokens:
        render = functools.partial(self._apply, tokenize=False)
        full: str = render(turns, add_generation_prompt=False)
        spans: list[tuple[int, int]] = []  # answers, as ranges of characters in `full`
        for index, turn in enumerate(turns):
            if turn["role"] == ASSISTANT:
                before = render(turns[:index], add_generation_prompt=True) if index else ""
                after = render(turns[: index + 1], add_generation_prompt=False)
                if not (after.startswith(before) and full.startswith(after)):
                    raise ValueError(
                        "the tokenizer's chat template rewrites earlier turns, so answers cannot be located:"
                        " mark them in the template with {% generation %}"
                    )
                spans.append((len(before), len(after)))
        self.tokenizer.encode_special_tokens = False  # templates write special tokens by their names
        made = self.tokenizer.encode(full, add_special_tokens=False)
        self.tokenizer.encode_special_tokens = True
        return made.ids, [any(low <= start < high for low, high in spans) for start, _ in made.offsets]

    def _apply(self, turns: Turns, **options: Any) -> Any:
        """Apply the chat template; raise errors of the template as ValueErrors."""
        from jinja2 import TemplateError

        try:
            return self._hub.apply_chat_template(turns, **options)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template rejects it: {error}") from error
        finally:
            self.tokenizer.encode_special_tokens = True  # transformers turns this off for the template
