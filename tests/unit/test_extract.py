"""What the engine is asked, and what goes into the store with its answer."""

import pytest
import torch

from draftsmith.conversations import Conversation, Skips
from draftsmith.errors import DraftsmithError
from draftsmith.extract.engine import Extracted
from draftsmith.extract.extract import ExtractRequest, _checked, _tokenise
from draftsmith.extract.rendering import Renderer
from draftsmith.recipe import Recipe
from tests.unit.chat_templates import GEMMA
from tests.unit.test_rendering import chat, make_tokenizer


def recipe(mode: str, **options: object) -> Recipe:
    extract = {"prompts": {"path": "p"}, "mode": mode, "max_tokens": 10, **options}
    sections = {"extract": extract, "engine": {"max_model_len": 64}}
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


def test_the_mask_goes_into_the_store():
    def stored(request: ExtractRequest, response: list[int]):
        saved = torch.tensor([*request.prompt_token_ids, *response[:-1]], dtype=torch.int32)
        states = torch.ones(len(saved), 1, 2)
        return _checked(Extracted("1", request.prompt_token_ids, [False] * 3, response, saved, states), request)

    given = stored(ExtractRequest(1, False, [4, 5, 6], 1, [False, True, True]), [])
    assert (given.token_ids.tolist(), given.loss_mask.tolist()) == ([4, 5, 6], [False, True, True])
    answered = stored(ExtractRequest(1, False, [4, 5, 6], 2), [8, 9])
    assert answered.token_ids.tolist() == [4, 5, 6, 8, 9]
    assert answered.loss_mask.tolist() == [False, False, False, True, True]
    assert len(answered.hidden_states) == 4


@pytest.mark.parametrize("spoil", ["tokens", "length"])
def test_states_of_other_tokens_are_refused(spoil: str):
    saved = torch.tensor([4, 5, 7 if spoil == "tokens" else 6, 8], dtype=torch.int32)
    states = torch.ones(3 if spoil == "length" else 4, 1, 2)
    with pytest.raises(DraftsmithError, match="should have states"):
        _checked(Extracted("1", [4, 5, 6], [False] * 3, [8, 9], saved, states), ExtractRequest(1, False, [4, 5, 6], 2))


def test_samples_have_ids_of_their_own_and_the_first_the_conversations():
    options = {"temperature": 0.7, "samples": 3}
    tokenizer = make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    conversations = [Conversation(text, chat(text, "b")[:1]) for text in ("a", "c")]
    found = list(_tokenise(recipe("generate", **options), Renderer(tokenizer), conversations, Skips(), held_out=False))
    assert len({request.sample_id for request in found}) == 6
    assert {conversation.sample_id for conversation in conversations} < {request.sample_id for request in found}
    assert (
        len(list(_tokenise(recipe("generate", **options), Renderer(tokenizer), conversations, Skips(), held_out=True)))
        == 2
    )


def test_later_turns_are_asked_after_the_first():
    tokenizer = make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    talk = Conversation("talk", [*chat("one", "old answer"), *chat("two", "old")])
    (found,) = _tokenise(recipe("generate", turns="all"), Renderer(tokenizer), [talk], Skips(), held_out=False)
    assert "old answer" not in tokenizer.decode(found.prompt_token_ids)
    assert found.later == ([{"role": "user", "content": "two"}],)
    assert found.conversation is not None
    assert [m["content"] for m in found.conversation.messages] == ["one"]
