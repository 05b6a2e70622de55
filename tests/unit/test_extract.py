"""What the engine is asked, and what goes into the store with its answer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.conversations import Conversation, Skips
from draftsmith.extract.engine import Answer
from draftsmith.extract.extract import ExtractRequest, _checked, _tokenise
from draftsmith.extract.rendering import Renderer
from draftsmith.recipe import Recipe
from tests.unit.chat_templates import GEMMA
from tests.unit.test_rendering import chat, make_tokenizer


def recipe(mode: str) -> Recipe:
    sections = {"extract": {"prompts": {"path": "p"}, "mode": mode, "max_tokens": 10}, "engine": {"max_model_len": 64}}
    return Recipe.model_validate({"name": "r", "target": {"model": "owner/name"}} | sections)


@pytest.mark.parametrize("mode", ["generate", "prefill"])
def test_requests_are_what_fits(mode: str):
    tokenizer = make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    conversations = [
        Conversation("good", chat("a", "the answer"), where="line 1"),
        Conversation("long", chat("word " * 60, "b"), where="line 2"),
        Conversation("system", [{"role": "system", "content": "s"}, *chat("a", "b")], where="line 3"),
        Conversation("tokens", token_ids=[5, 6, 7], loss_mask=[False] * 3, where="line 4"),
    ]
    if mode == "generate":
        conversations = [Conversation(c.id, c.messages[:-1], where=c.where) for c in conversations[:3]]
    skips = Skips()
    (found,) = _tokenise(recipe(mode), Renderer(tokenizer), conversations, skips, held_out=True)
    assert (found.sample_id, found.held_out) == (conversations[0].sample_id, True)
    text = tokenizer.decode(found.prompt_token_ids)
    if mode == "generate":
        assert text == "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
        assert (found.max_tokens, found.loss_mask) == (10, None)
        assert "loss_mask" not in found.identity(), "stores of answered prompts keep their identity"
    else:
        assert text == "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nthe answer<end_of_turn>\n"
        learnt = [i for i, learn in zip(found.prompt_token_ids, found.loss_mask, strict=True) if learn]
        assert tokenizer.decode(learnt) == "the answer<end_of_turn>"
        assert found.max_tokens == 1
    first = {reason: entry["first"] for reason, entry in skips.figures().items()}
    assert first.pop("too long: no room for an answer in engine.max_model_len tokens") == "line 2"
    assert first.pop("the chat template refuses it: System role not supported") == "line 3"
    assert first == ({} if mode == "generate" else {"no token of it is to be learnt": "line 4"})


def test_the_mask_goes_into_the_store(tmp_path: Path):
    tokens = torch.tensor([4, 5, 6], dtype=torch.int32)

    def stored(request: ExtractRequest, response: list[int], *, generate: bool):
        ids = torch.cat([tokens, torch.tensor(response[:-1] if generate else [], dtype=torch.int32)])
        save_file({"token_ids": ids, "hidden_states": torch.ones(len(ids), 1, 2)}, tmp_path / "spooled")
        return _checked(tmp_path, Answer("0", response, "spooled"), request, generate=generate)

    given = stored(ExtractRequest(1, False, [4, 5, 6], 1, [False, True, True]), [9], generate=False)
    assert (given.token_ids.tolist(), given.loss_mask.tolist()) == ([4, 5, 6], [False, True, True])
    answered = stored(ExtractRequest(1, False, [4, 5, 6], 2), [8, 9], generate=True)
    assert answered.token_ids.tolist() == [4, 5, 6, 8, 9]
    assert answered.loss_mask.tolist() == [False, False, False, True, True]
    assert len(answered.hidden_states) == 4
