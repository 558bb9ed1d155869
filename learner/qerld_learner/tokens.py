"""Prompts to token ids, in the learner's API process: tokenizer.json and the chat template, without torch.

The policy server takes ids, so this is the only place where a prompt is tokenised.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from qerld_learner.errors import InvalidRequestError, Violation

CHAT_ROLES = ("system", "user", "assistant")


class PromptTokenizer:
    """Turns messages, text or ids into checked prompt ids.

    Args:
        model: Hugging Face folder with config.json and tokenizer.json, checked when the learner opened.

    Attributes:
        vocab_size: Rows of the embedding; every id is below it.
        context: The model's own limit, prompt and completion together, in tokens.
    """

    def __init__(self, model: Path) -> None:
        config: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
        # Importing transformers costs 0.7 s and must not happen when only settings are printed.
        from transformers import PreTrainedTokenizerFast

        # Not AutoTokenizer: that imports torch, 3 s and 400 MB in a process that needs neither.
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))
        self.vocab_size = int(config["vocab_size"])
        self.context = int(config.get("max_position_embeddings", 1 << 20))

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def from_messages(self, messages: Sequence[tuple[str, str]], field: str = "prompt.messages") -> tuple[int, ...]:
        """Render (role, content) turns with the chat template and the generation prompt; return its ids.

        Raises:
            InvalidRequestError: Unknown role, no template, or the template refuses the chat; names `field`.
        """
        roles = ", ".join(CHAT_ROLES)
        violations = [
            Violation(f"{field}.messages[{i}].role", f"{role[:40]!r} is not one of {roles}; name who speaks")
            for i, (role, _) in enumerate(messages)
            if role not in CHAT_ROLES
        ]
        if violations:
            raise InvalidRequestError(violations)
        if not self.has_chat_template:
            raise InvalidRequestError([Violation(field, "the model has no chat template; send text or ids instead")])
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        except jinja2.TemplateError as error:
            raise InvalidRequestError([Violation(field, f"the chat template refuses this chat: {error}")]) from error
        return tuple(ids)

    def from_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of plain text, with the special tokens that the tokenizer itself adds."""
        return tuple(self._tokenizer(text)["input_ids"])

    def check_ids(self, ids: Sequence[int], field: str = "prompt.ids.ids") -> list[Violation]:
        """Return a violation for the first id that the model does not have."""
        for position, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                problem = f"id {token} is outside the vocabulary 0..{self.vocab_size - 1}; use the run's tokenizer"
                return [Violation(f"{field}[{position}]", problem)]
        return []
