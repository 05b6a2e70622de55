"""Prompts with images, rendered with the template of the target's processor. The engine expands the images' placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.data.chat_template import Renderer, Unrenderable
from draftsmith.data.conversations import Conversation
from draftsmith.data.images import image_parts, image_size
from draftsmith.target.pretrained import processor_of

_NO_TEXT = {"type": "text", "text": ""}


class ImageRenderer:
    """Renders prompts with images.

    Args:
        target_dir: the target as a Hugging Face directory. Its processor is loaded for the first prompt.
        processor_options: vLLM's `mm_processor_kwargs`, which change how many tokens an image takes.
        trust_remote_code: whether the target's own code may run.
    """

    def __init__(
        self, target_dir: Path, *, processor_options: Mapping[str, Any] = {}, trust_remote_code: bool = False
    ) -> None:
        self._target_dir, self._options, self._trust_remote_code = target_dir, processor_options, trust_remote_code

    @cached_property
    def _processor(self) -> Any:
        return processor_of(self._target_dir, trust_remote_code=self._trust_remote_code)

    @cached_property
    def _renderer(self) -> Renderer:
        tokenizer = self._processor.tokenizer
        tokenizer.chat_template = self._processor.chat_template or tokenizer.chat_template
        return Renderer(tokenizer)

    def prompt(self, conversation: Conversation) -> tuple[list[int], int]:
        """Token ids with a placeholder for each image, and the number of tokens that these become in addition.

        Raises:
            UserError: the target reads no images, or its processor cannot be used here.
            Unrenderable: the chat template refuses the conversation or leaves images out, or an image cannot be decoded.
        """
        # Templates with a place for images expect lists of parts in every message.
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in conversation.messages
        ]
        blind = [
            message | {"content": [_NO_TEXT if part["type"] == "image" else part for part in message["content"]]}
            for message in messages
        ]
        images = image_parts(messages)
        text = self._renderer.prompt_text(replace(conversation, messages=messages))
        # A template for texts leaves them out, or writes the whole list into the text.
        if any(image["sha256"] in text for image in images) or text == self._renderer.prompt_text(
            replace(conversation, messages=blind)
        ):
            raise Unrenderable("the chat template has no place for images")
        try:
            sizes = [image_size(image) for image in images]
            expanded = self._processor._get_num_multimodal_tokens(image_sizes=sizes, **self._options)[
                "num_image_tokens"
            ]
        except ValueError as reason:  # also of the processor, for example for an image that is far wider than high
            raise Unrenderable(str(reason)) from None
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids), sum(expanded) - len(images)
