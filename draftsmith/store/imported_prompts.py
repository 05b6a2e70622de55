"""The questions in imported sequences, of which only the tokens are known: by them evaluation tells later what was trained on."""

from __future__ import annotations

from typing import Any

import torch

_WORD = "0qzj0"
"""A word in place of a question, to see what the chat template puts around one."""


class Questions:
    """Finds the user's words in tokens.

    Args:
        tokenizer: the target's. Without a chat template everything before an answer is a question.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = self._around() if tokenizer.chat_template else ("", "")

    def of(self, token_ids: torch.Tensor, loss_mask: torch.Tensor) -> list[str]:
        """The questions before each answer, in order; the whole text if nothing is before one.

        Args:
            token_ids: int [N].
            loss_mask: bool [N], True in answers.
        """
        ids, mask = token_ids.tolist(), loss_mask.tolist()
        found, begun = [], 0
        for place in range(1, len(ids)):
            if mask[place] and not mask[place - 1]:
                found.append(self._question(ids[begun:place]))
            if not mask[place] and mask[place - 1]:
                begun = place
        return [text for text in found if text] or [self._tokenizer.decode(ids, skip_special_tokens=True)]

    def _question(self, ids: list[int]) -> str:
        text = str(self._tokenizer.decode(ids))
        if self._before and self._before in text:
            return text.rpartition(self._before)[2].removesuffix(self._after).strip()
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def _around(self) -> tuple[str, str]:
        """The template's text before a question, from its last special token on, and after it, up to the answer; both empty where a template
        takes no lone question."""
        try:
            asked = [{"role": "user", "content": _WORD}]
            text = self._tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        except Exception:  # a template may raise anything
            return "", ""
        before, found, after = str(text).partition(_WORD)
        ids = self._tokenizer(before, add_special_tokens=False)["input_ids"]
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        last = max((place for place, token in enumerate(ids) if token in special), default=0)
        return (str(self._tokenizer.decode(ids[last:])), after) if found else ("", "")
