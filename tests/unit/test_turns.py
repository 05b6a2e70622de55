"""Extraction and evaluation ask the target the same tokens, tools included, in the first turn and in later ones."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.config.recipe import Recipe
from draftsmith.data.chat_template import Renderer
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.image_renderer import ImageRenderer
from draftsmith.data.prompts import load_prompts
from draftsmith.data.turns import TurnRenderer
from draftsmith.extract import worker
from draftsmith.extract.requests import Requests, requests_of, tokenized
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation import evaluate
from draftsmith.serve.evaluation.suites import load_suite, render_suite
from tests.unit.chat_templates import HARMONY
from tests.unit.test_rendering import BOS, EOS, SPECIAL, TEMPLATES, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
TALK = Conversation(
    "talk",
    [
        {"role": "user", "content": "what is said"},
        {"role": "assistant", "content": "of old"},
        {"role": "user", "content": "and then"},
    ],
    tools=TOOLS,
)
RECIPE = Recipe.model_validate(
    {
        "name": "r", "target": {"model": "owner/name"}, "engine": {"max_model_len": 600},
        "extract": {"prompts": {"path": "p"}, "turns": "all", "max_tokens": 10},
    }
)  # fmt: skip


def tokenizer_of(kind: str) -> Any:
    return make_tokenizer(TEMPLATES[kind], SPECIAL[kind], BOS.get(kind), EOS[kind])


@pytest.mark.parametrize("kind", ["llama3", "qwen3", "mistral"])
def test_a_conversation_with_tools_is_the_same_tokens_in_extraction_and_evaluation(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    (request,) = tokenized(RECIPE, Renderer(tokenizer), ImageRenderer(Path()), TALK, RejectedRows(), held_out=False)
    turns = TurnRenderer(tokenizer, 600)
    suite = render_suite(turns, "talks", [TALK], max_tokens=10)
    (asked,) = suite.prompts
    assert "look_up" in tokenizer.decode(asked.token_ids)
    assert asked.token_ids == request.prompt_token_ids

    answer = tokenizer("the answer is 12")["input_ids"] + [tokenizer.eos_token_id]
    extracted = worker._Turn(request, 0, request.prompt_token_ids, request.conversation, answer)
    extracted_next = worker._Conversations(tokenizer, 600).next_turn(extracted)
    asked_next = turns.next(asked, answer, max_tokens=suite.max_tokens)
    assert extracted_next is not None
    assert asked_next is not None
    assert asked_next.token_ids == extracted_next.prompt_token_ids
    text = tokenizer.decode(asked_next.token_ids)
    assert "look_up" in text
    assert "the answer is 12" in text
    assert "of old" not in text, "the target reads its own answers"
    assert (asked.id, asked_next.id) == ("talk", "talk/turn-2")
    assert turns.next(asked_next, answer, max_tokens=10) is None, "there is no third turn"


def test_a_turn_that_does_not_fit_ends_the_conversation() -> None:
    tokenizer = tokenizer_of("qwen3")
    first = TurnRenderer(tokenizer, 600).first(TALK)
    room = len(first.token_ids) + 20
    assert TurnRenderer(tokenizer, room).next(first, [5] * 10, max_tokens=10) is None


REASONING = "<|channel|>analysis<|message|>so the user said 12<|end|>"
CALL = "<|start|>assistant<|channel|>commentary<|message|>model<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (f"{REASONING}{ANSWER}the answer is 34<|return|>", "the answer is 34"),
        (f"{REASONING}{ANSWER}no<|end|>{CALL}{ANSWER}yes", "yes"),
        (REASONING.removesuffix("<|end|>"), ""),  # cut off before there was an answer
        (f"{REASONING}{ANSWER}", ""),
        ("<|message|>the answer is 34<|return|>", "the answer is 34"),
        ("the answer is 34<|return|>", "the answer is 34"),
    ],
)
def test_reasoning_between_special_tokens_is_not_the_next_turn_s_context(answer: str, said: str) -> None:
    special = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer = make_tokenizer(HARMONY, special, eos="<|return|>")
    talk = Conversation("talk", TALK.messages)
    turns = TurnRenderer(tokenizer, 600)
    ids = tokenizer(answer)["input_ids"]
    expected = (
        "<|start|>user<|message|>what is said<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{said}<|end|>"
        "<|start|>user<|message|>and then<|end|><|start|>assistant"
    )
    engine_s = tokenizer.decode(ids, skip_special_tokens=True)
    for text in (None, engine_s):
        following = turns.next(turns.first(talk), ids, max_tokens=10, text=text)
        assert following is not None
        assert tokenizer.decode(following.token_ids) == expected
    assert turns.decode(ids) == said
    (request,) = tokenized(RECIPE, Renderer(tokenizer), ImageRenderer(Path()), talk, RejectedRows(), held_out=False)
    extracted = worker._Turn(request, 0, request.prompt_token_ids, request.conversation, ids)
    extracted_next = worker._Conversations(tokenizer, 600).next_turn(extracted)
    assert extracted_next is not None
    assert extracted_next.prompt_token_ids == following.token_ids


def test_prompts_whose_tools_the_template_drops_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    turns = TurnRenderer(tokenizer_of("gemma"), 600)
    without = Conversation("plain", TALK.messages)
    assert [turn.id for turn in render_suite(turns, "talks", [TALK, without], max_tokens=10).prompts] == ["plain"]
    assert "left out of the suite `talks`: 1 x the chat template has no place for tools (first: talk)" in "".join(
        capsys.readouterr()
    )
    with pytest.raises(
        UserError, match=r"No prompt of the suite `talks` can be used: 1 x the chat template has no place"
    ):
        render_suite(turns, "talks", [TALK], max_tokens=10)


def test_held_out_prompts_that_cannot_be_asked_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Extraction has left out the long one, and says so; nobody chose these rows one by one, as those of a suite of its own."""
    look_up: dict[str, Any] = {"function": {"name": "look_up", "arguments": "{}"}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [look_up]},
        {"role": "tool", "content": "12"},
        {"role": "user", "content": "why"},
    ]
    for name, rows in {
        "train": [{"prompt": "and then"}],
        "held-out": [{"prompt": "what is said"}, {"prompt": "word " * 100}, {"messages": called}],
    }.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = str(tmp_path / "held-out.jsonl")
    sections = {
        "engine": {"max_model_len": 100},
        "extract": {"prompts": {"path": str(tmp_path / "train.jsonl")}, "held_out": {"path": path}, "max_tokens": 10},
        "evaluate": {"suites": {"held_out": {"prompts": "held_out"}, "mine": {"prompts": {"path": path}}}},
    }
    recipe = Recipe.model_validate({"name": "r", "target": {"model": "owner/name"}} | sections)
    turns = TurnRenderer(tokenizer_of("qwen3"), 100)
    suite = evaluate._rendered(recipe, turns, "held_out", load_suite(recipe, "held_out"))
    assert [turn.conversation.text for turn in suite.prompts] == ["what is said"]
    said = capsys.readouterr().err
    left_out = "evaluate: left out of the suite `held_out`: 1 x "
    assert f"{left_out}too long: no room for 10 response tokens in engine.max_model_len tokens (first: line 2)" in said
    assert f"{left_out}it has no user turn to answer (first: line 3)" in said
    with pytest.raises(UserError, match=r"Prompt `00002` of the suite `mine` has \d+ tokens"):
        evaluate._rendered(recipe, turns, "mine", load_suite(recipe, "mine"))


def recipe_of_texts(folder: Path, mode: str, **extract: Any) -> Recipe:
    """Of texts and of tokens, trained on and held out."""
    for name, rows in {
        "texts": [{"text": "what is said"}, {"text": "of old"}],
        "mine": [{"text": "and then"}, {"text": "word"}],
        "tokens": [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}],
    }.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = {name: {"path": str(folder / f"{name}.jsonl")} for name in ("texts", "mine", "tokens")}
    sections = {
        "engine": {"max_model_len": 100},
        "extract": {"prompts": path["texts"], "held_out": path["tokens"], "max_tokens": 10, "mode": mode} | extract,
        "evaluate": {"suites": {"held_out": {"prompts": "held_out"}, "mine": {"prompts": path["mine"]}}},
    }
    return Recipe.model_validate({"name": "r", "target": {"model": "owner/name"}} | sections)


@pytest.mark.parametrize("kind", ["qwen3", "llama3", None])
def test_texts_and_tokens_are_asked_as_extraction_asks_them(tmp_path: Path, kind: str | None) -> None:
    """With a chat template and for a base model; and the text that a server is sent becomes the same tokens."""
    recipe = recipe_of_texts(tmp_path, "generate")
    tokenizer = tokenizer_of(kind or "llama3")
    if kind is None:
        tokenizer.chat_template = None
    turns = TurnRenderer(tokenizer, 100, plain=True)
    for suite in ("held_out", "mine"):
        prompts = load_suite(recipe, suite)
        asked = evaluate._rendered(recipe, turns, suite, prompts).prompts
        extracted = [
            tokenized(recipe, Renderer(tokenizer), ImageRenderer(Path()), one, RejectedRows(), held_out=True)[0]
            for one in prompts
        ]
        assert [turn.token_ids for turn in asked] == [request.prompt_token_ids for request in extracted]
        assert all(turns.next(turn, [5], max_tokens=10) is None for turn in asked)
        for turn in asked:
            sent = turns.renderer.prompt_text(turn.conversation)
            received = tokenizer(sent, add_special_tokens=turns.renderer.plain)["input_ids"]
            assert received[-2:] == turn.token_ids[-2:]
            assert suite == "held_out" or received == turn.token_ids
    contents = [evaluate._content(one) for name in ("held_out", "mine") for one in load_suite(recipe, name)]
    assert len({json.dumps(content[1:]) for content in contents}) == 4, (
        "another text would be taken for the same evaluation"
    )


def test_whole_texts_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that extraction prefills: refused before an engine starts if an evaluation is to follow, and not without one."""
    recipe = recipe_of_texts(tmp_path, "prefill")
    tokenizer = tokenizer_of("qwen3")
    turns = TurnRenderer(tokenizer, 100, plain=True)
    with pytest.raises(UserError, match=r"`held_out` can be used: 2 x it has no user turn to answer"):
        evaluate._rendered(recipe, turns, "held_out", load_suite(recipe, "held_out"))
    monkeypatch.setattr("draftsmith.extract.requests.tokenizer_of", lambda *_, **__: tokenizer)

    def extracted(recipe: Recipe, *, follows: bool) -> int:
        return len([*requests_of(recipe, tmp_path, RejectedRows(), evaluation_follows=follows)])

    with pytest.raises(UserError, match=r"no prompt for the suite `held_out`: of .*tokens\.jsonl nothing is held out"):
        extracted(recipe, follows=True)
    mine = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"only": ("mine",)})})
    for one, follows in ((recipe, False), (mine, True), (recipe_of_texts(tmp_path, "generate"), True)):
        assert extracted(one, follows=follows) == 4


def test_a_template_that_writes_the_date_gives_the_same_requests_tomorrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss, Granite and Llama 3.2 have such templates. A finished store was refused the next day."""
    dated = "{{ strftime_now('%Y') }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer = make_tokenizer(dated, SPECIAL["qwen3"], None, EOS["qwen3"])
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"what is said {n}"}) + "\n" for n in "abc"))
    sections = {"extract": {"prompts": {"path": str(tmp_path / "p.jsonl")}, "held_out_fraction": 0}}
    recipe = Recipe.model_validate({"name": "r", "target": {"model": "owner/name"}} | sections)
    monkeypatch.setattr("draftsmith.extract.requests.tokenizer_of", lambda *_, **__: tokenizer)
    found = []
    for year in (2024, 2025):
        clock = SimpleNamespace(now=lambda year=year: datetime(year, 5, 6))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        turns = TurnRenderer(tokenizer, 100)
        asked = [turns.first(one) for one in load_prompts(recipe.extract.training_prompts)]
        requests = {
            dated: Requests(tmp_path, requests_of(recipe, tmp_path, RejectedRows()), dated=dated).digest
            for dated in (False, True)
        }
        found.append((turns.identity(asked), requests, [turn.token_ids for turn in asked]))
    assert turns.renderer.dated
    assert not TurnRenderer(tokenizer_of("qwen3"), 100).renderer.dated
    assert found[0][2] != found[1][2]
    assert found[0][0] == found[1][0]
    assert found[0][1][True] == found[1][1][True]
    assert found[0][1][False] != found[1][1][False]
    assert len({json.dumps(one) for one in found[0][0]}) == 3
