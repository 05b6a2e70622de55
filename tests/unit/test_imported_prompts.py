"""Imported stores tell which suites were trained on: the user's words are found in the tokens again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from draftsmith.store.imported_prompts import Questions
from tests.families import save_tokenizer

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path)
    found: Any = AutoTokenizer.from_pretrained(tmp_path)
    found.add_tokens(["<|start|>", "<|end|>"], special_tokens=True)
    return found


TALKS = [
    [
        ("user", "Why is the sky blue?"),
        ("assistant", "It scatters."),
        ("user", "And red?"),
        ("assistant", "Later it does."),
    ],
    [("system", "You are terse."), ("user", "Name a bird."), ("assistant", "Owl.")],
]


@pytest.mark.parametrize("template", [CHATML, PLAIN])
@pytest.mark.parametrize("talk", TALKS)
def test_the_questions_are_found_again(tokenizer: Any, template: str, talk: list[tuple[str, str]]) -> None:
    tokenizer.chat_template = template
    messages = [{"role": role, "content": content} for role, content in talk]
    ids: list[int] = []
    mask: list[bool] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
        mask += [False] * (len(before) - len(ids)) + [True] * len(answer)
        ids = before + answer
    found = Questions(tokenizer).of(torch.tensor(ids), torch.tensor(mask))
    assert found == [content for role, content in talk if role == "user"]


def test_without_a_template_everything_before_an_answer_is_the_question(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ids = tokenizer("Name a bird. Owl.", add_special_tokens=False)["input_ids"]
    answer = torch.arange(len(ids)) >= 13
    assert Questions(tokenizer).of(torch.tensor(ids), answer) == ["Name a bird."]
    assert Questions(tokenizer).of(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) == ["Name a bird. Owl."]
