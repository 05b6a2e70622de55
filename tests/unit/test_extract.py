"""What the engine is asked, and what goes into the store with its answer."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.recipe import Recipe
from draftsmith.data.chat_template import Renderer
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.image_renderer import ImageRenderer
from draftsmith.data.overlap import TRAINING_PROMPTS, numbers_of, read_prompts_file
from draftsmith.extract.extract import run_extract
from draftsmith.extract.job import store_identity
from draftsmith.extract.requests import ExtractRequest, Requests, tokenized
from draftsmith.extract.sequences import Extracted, checked
from draftsmith.extract.worker import Progress
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.store.codec import encode_states
from draftsmith.store.format import StoreIdentity
from draftsmith.store.reader import Store
from draftsmith.store.writer import ShardMaker
from tests.unit.chat_templates import GEMMA
from tests.unit.test_rendering import chat, make_tokenizer


def recipe(mode: str, **options: object) -> Recipe:
    extract = {"prompts": {"path": "p"}, "mode": mode, "max_tokens": 10, **options}
    sections = {"extract": extract, "engine": {"max_model_len": 64}}
    return Recipe.model_validate({"name": "r", "target": {"model": "owner/name"}} | sections)


def requests_for(
    of: Recipe, tokenizer: Any, conversations: list[Conversation], rejected: RejectedRows, *, held_out: bool = False
) -> list[ExtractRequest]:
    renderer, images = Renderer(tokenizer), ImageRenderer(Path())
    return [one for talk in conversations for one in tokenized(of, renderer, images, talk, rejected, held_out=held_out)]


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
    rejected = RejectedRows()
    (found,) = requests_for(recipe(mode), tokenizer, conversations, rejected, held_out=True)
    assert (found.sample_id, found.held_out) == (conversations[0].sample_id, True)
    text = tokenizer.decode(found.prompt_token_ids)
    if mode == "generate":
        assert text == "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\n"
        assert (found.max_tokens, found.loss_mask) == (10, None)
    else:
        assert text == "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nthe answer<end_of_turn>\n"
        learned = [i for i, learn in zip(found.prompt_token_ids, found.loss_mask, strict=True) if learn]
        assert tokenizer.decode(learned) == "the answer<end_of_turn>"
        assert found.max_tokens == 1
    first = {reason: entry["first"] for reason, entry in rejected.figures().items()}
    assert first.pop("too long: no room for an answer in engine.max_model_len tokens") == "line 2"
    assert first.pop("the chat template refuses it: System role not supported") == "line 3"
    assert first == ({} if mode == "generate" else {"no token to train on": "line 4"})


def test_the_answer_in_tokens_is_not_asked():
    """`turns: all` reads rows whole, and the target answers what is before the row's own answer."""
    tokenizer = make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    conversations = [
        Conversation("masked", token_ids=[5, 6, 7, 8], loss_mask=[False, False, True, False], where="line 1"),
        Conversation("plain", token_ids=[5, 6], where="line 2"),
        Conversation("answer", token_ids=[5, 6], loss_mask=[True, True], where="line 3"),
    ]
    rejected = RejectedRows()
    found = requests_for(recipe("generate", turns="all"), tokenizer, conversations, rejected)
    assert [(one.prompt_token_ids, one.loss_mask) for one in found] == [([5, 6], None), ([5, 6], None)]
    assert rejected.figures() == {"`loss_mask` leaves no prompt before the answer": {"rows": 1, "first": "line 3"}}


def test_the_mask_goes_into_the_store():
    def stored(request: ExtractRequest, response: list[int]):
        saved = torch.tensor([*request.prompt_token_ids, *response[:-1]], dtype=torch.int32)
        states = encode_states(torch.ones(len(saved), 1, 2), "none")
        return checked(Extracted(request, request.prompt_token_ids, [False] * 3, response, saved, states))

    given = stored(ExtractRequest(1, False, [4, 5, 6], 1, [False, True, True]), [])
    assert (given.token_ids.tolist(), given.loss_mask.tolist()) == ([4, 5, 6], [False, True, True])
    answered = stored(ExtractRequest(1, False, [4, 5, 6], 2), [8, 9])
    assert answered.token_ids.tolist() == [4, 5, 6, 8, 9]
    assert answered.loss_mask.tolist() == [False, False, False, True, True]
    assert answered.states.shape == (4, 1, 2)


@pytest.mark.parametrize("spoil", ["tokens", "length"])
def test_states_of_other_tokens_are_refused(spoil: str):
    saved = torch.tensor([4, 5, 7 if spoil == "tokens" else 6, 8], dtype=torch.int32)
    states = encode_states(torch.ones(3 if spoil == "length" else 4, 1, 2), "none")
    request = ExtractRequest(1, False, [4, 5, 6], 2)
    with pytest.raises(DraftsmithError, match="should have states"):
        checked(Extracted(request, [4, 5, 6], [False] * 3, [8, 9], saved, states))


def test_samples_have_ids_of_their_own_and_the_first_the_conversations():
    options = {"temperature": 0.7, "samples": 3}
    tokenizer = make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    conversations = [Conversation(text, chat(text, "b")[:1]) for text in ("a", "c")]
    found = requests_for(recipe("generate", **options), tokenizer, conversations, RejectedRows())
    assert len({request.sample_id for request in found}) == 6
    assert {conversation.sample_id for conversation in conversations} < {request.sample_id for request in found}
    assert (
        len(requests_for(recipe("generate", **options), tokenizer, conversations, RejectedRows(), held_out=True)) == 2
    )


def test_later_turns_are_asked_after_the_first():
    tokenizer = make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    talk = Conversation("talk", [*chat("one", "old answer"), *chat("two", "old")])
    (found,) = requests_for(recipe("generate", turns="all"), tokenizer, [talk], RejectedRows())
    assert "old answer" not in tokenizer.decode(found.prompt_token_ids)
    assert found.later == ([{"role": "user", "content": "two"}],)
    assert found.conversation is not None
    assert [m["content"] for m in found.conversation.messages] == ["one"]


any_text = st.text(st.characters(codec="utf-8"), max_size=20)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": any_text}), min_size=1, max_size=3)
any_request = st.builds(
    ExtractRequest,
    sample_id=st.integers(0, 2**63 - 1),
    held_out=st.booleans(),
    prompt_token_ids=st.lists(st.integers(0, 200_000), min_size=1, max_size=5),
    max_tokens=st.integers(1, 1000),
    loss_mask=st.none() | st.lists(st.booleans(), min_size=1, max_size=5),
    conversation=st.none()
    | st.builds(Conversation, id=st.just("x"), messages=messages, tools=st.none() | st.just([{"name": "f"}])),
    later=st.lists(messages, max_size=2).map(tuple),
    images=st.lists(st.fixed_dictionaries({"image": any_text, "sha256": any_text}), max_size=2).map(tuple),
    image_tokens=st.none() | st.integers(0, 1000),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(requests=st.lists(any_request, max_size=5))
def test_requests_come_back_from_disk(tmp_path: Path, requests: list[ExtractRequest]) -> None:
    def plain(request: ExtractRequest) -> dict[str, Any]:  # a conversation's id is not needed any more
        talk = request.conversation
        return vars(request) | {"conversation": talk and (talk.messages, talk.tools)}

    kept = Requests(tmp_path, iter(requests))
    assert len(kept) == len(requests)
    pairs = list(zip(kept, kept, strict=True))  # two readers at once
    assert [plain(a) for a, _ in pairs] == [plain(b) for _, b in pairs] == [plain(request) for request in requests]
    assert kept.digest == Requests(tmp_path, requests).digest
    if requests:
        changed = [*requests[:-1], ExtractRequest(**vars(requests[-1]) | {"max_tokens": 1001})]
        assert kept.digest != Requests(tmp_path, changed).digest
    assert not list(tmp_path.iterdir())


def of_prompts(folder: Path, rows: list[str], **options: Any) -> Recipe:
    """A recipe with these prompts and a target that no engine could answer with."""
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    target = folder / "target"
    LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2).save_pretrained(target)
    make_tokenizer(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>").save_pretrained(
        target
    )
    extract = {
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "held_out_fraction": 0.0,
        "layer_ids": [1],
        "shard_tokens": 1,
    }
    values = {"name": "r", "target": {"model": str(target), "dtype": "float32"}, "extract": extract | options}
    return Recipe.model_validate(values)


@pytest.mark.parametrize("place", ["prompts", "held_out", "suite"])
@pytest.mark.parametrize(
    ("text", "message"), [(None, "others.jsonl does not exist"), ('{"ask": "?"}\n', "its keys match no known format")]
)
def test_prompts_are_read_before_a_target_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str | None, message: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the target must not be fetched yet")

    monkeypatch.setattr("draftsmith.extract.extract.prepare_target", refuse)
    monkeypatch.setattr("draftsmith.cli.fit.check_run_fits", refuse)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "?"}\n')
    others = {"path": str(tmp_path / "others.jsonl"), "limit": 1}
    if text is not None:
        (tmp_path / "others.jsonl").write_text(text)
    extract = {"prompts": {"path": str(tmp_path / "prompts.jsonl")}}
    values: dict[str, Any] = {"name": "r", "target": {"model": "a/b"}, "extract": extract}
    if place == "suite":
        values["evaluate"] = {"suites": {"mine": {"prompts": others}}}
    else:
        values["extract"] = extract | {place: others}
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    for command in ("extract", "run"):
        refused = CliRunner().invoke(app, [command, str(tmp_path / "recipe.yaml"), "--runs", str(tmp_path / "runs")])
        assert isinstance(refused.exception, UserError)
        assert message in str(refused.exception)


def some(
    job: Any, requests: Any, engine: Any, *, num_workers: int, logs: Path, handoff: Path, store: Path, stop: int = 2
) -> Iterator[Progress]:
    """In place of engines: a shard for each of the first `stop` requests, then a failure."""
    for number, request in enumerate(requests):
        if number == stop:
            raise DraftsmithError("the engine failed")
        ids = torch.tensor(request.prompt_token_ids, dtype=torch.int32)
        mask = [False] * len(ids)
        states = encode_states(torch.ones(len(ids), 1, 32), job.compression)
        maker = ShardMaker(job.identity, job.compression)
        answer = [7] if job.generate else []
        maker.add(checked(Extracted(request, ids.tolist(), mask, answer, ids, states)))
        yield Progress(None, 1, len(ids))
        yield Progress(maker.write(store / f"shard-{secrets.token_hex(4)}.safetensors"), 0, 0)


def test_an_unfinished_store_of_other_prompts_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by adding to it: what it holds would be trained on."""
    rows = [json.dumps({"prompt": f"question {i}"}) for i in range(4)]
    given = of_prompts(tmp_path, rows)
    monkeypatch.setattr("draftsmith.extract.extract.run_engines", some)
    with pytest.raises(DraftsmithError, match="the engine failed"):
        run_extract(given, tmp_path / "run")
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows[2:]))
    with pytest.raises(UserError, match="holds answers to prompts that are not in this recipe"):
        run_extract(given, tmp_path / "run")
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    (tmp_path / "held-out.jsonl").write_text(rows[0])
    apart = of_prompts(tmp_path, rows, held_out={"path": str(tmp_path / "held-out.jsonl")})
    for other in (apart, of_prompts(tmp_path, rows, held_out_fraction=0.9)):
        with pytest.raises(UserError, match="begun with another split"):
            run_extract(other, tmp_path / "run")
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows + rows[:1]))
    monkeypatch.setattr("draftsmith.extract.extract.run_engines", partial(some, stop=100))
    assert run_extract(given, tmp_path / "run")["sequences"] == 4
    prompts = [texts[0].whole for texts in read_prompts_file(tmp_path / "run" / "store")]
    assert prompts == [numbers_of(f"question {i}").whole for i in range(4)], "what it was made from, each once"
    assert TRAINING_PROMPTS in stage.read(tmp_path / "run" / "store")["files"]


def test_settings_of_answers_are_not_those_of_a_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter which a store of before recorded, finished or not."""
    rows = [json.dumps({"prompt": f"question {i}", "response": "So."}) for i in range(4)]
    others: list[dict[str, Any]] = [
        {},
        {"max_tokens": 512, "held_out_max_tokens": 100},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["\n"], "turns": "all"},
    ]
    recipes = [of_prompts(tmp_path, rows, mode="prefill", **options) for options in others]

    def identity_of_before(recipe: Recipe, *about: Any) -> StoreIdentity:
        fields = {
            "mode",
            "temperature",
            "top_p",
            "top_k",
            "stop",
            "samples",
            "turns",
            "max_tokens",
            "held_out_max_tokens",
        }
        sampling = recipe.extract.model_dump(mode="json", include=fields)
        seed = {"seed": recipe.seed} if recipe.extract.temperature else {}
        return replace(store_identity(recipe, *about), sampling=sampling | seed)

    def no_engines(*_: Any, **__: Any) -> Iterator[Progress]:
        raise AssertionError("it is finished")

    def extract(recipe: Recipe, run: str, engines: Any) -> dict[str, Any]:
        monkeypatch.setattr("draftsmith.extract.extract.run_engines", engines)
        return run_extract(recipe, tmp_path / run)

    for begun in ("now", "before", "before, and sampled"):
        with monkeypatch.context() as changed:
            if begun != "now":
                changed.setattr("draftsmith.extract.extract.store_identity", identity_of_before)
            earlier = recipes[2 if "sampled" in begun else 0]
            changed.setattr("draftsmith.extract.extract.run_engines", some)
            with pytest.raises(DraftsmithError, match="the engine failed"):
                run_extract(earlier, tmp_path / f"unfinished, {begun}")
            changed.setattr("draftsmith.extract.extract.run_engines", partial(some, stop=100))
            run_extract(earlier, tmp_path / f"finished, {begun}")
        for recipe in recipes:
            assert extract(recipe, f"finished, {begun}", no_engines)["sequences"] == 4
        for recipe, engines in zip(recipes, (partial(some, stop=100), no_engines, no_engines), strict=True):
            assert extract(recipe, f"unfinished, {begun}", engines)["sequences"] == 4
    stores = [
        tmp_path / f"{state}, {begun}" / "store"
        for state in ("finished", "unfinished")
        for begun in ("now", "before, and sampled")
    ]
    assert len(Store(*stores)) == 4, "all of one identity"
    with pytest.raises(UserError, match=r"sampling\.mode is 'prefill' there and 'generate' in this run"):
        extract(of_prompts(tmp_path, rows), "finished, now", no_engines)


def test_an_extraction_is_finished_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the held-out prompts, which come last here; it is another store than the whole one, and stays as it is."""
    (tmp_path / "held-out.jsonl").write_text(json.dumps({"prompt": "a question apart"}))
    rows = [json.dumps({"prompt": f"question {i}"}) for i in range(4)]
    given = of_prompts(tmp_path, rows, held_out={"path": str(tmp_path / "held-out.jsonl")})
    monkeypatch.setattr("draftsmith.extract.extract.run_engines", partial(some, stop=0))
    with pytest.raises(DraftsmithError, match="the engine failed"):
        run_extract(given, tmp_path / "run")
    with pytest.raises(UserError, match="has no training prompt yet"):
        run_extract(given, tmp_path / "run", finish=True)
    monkeypatch.setattr("draftsmith.extract.extract.run_engines", some)
    with pytest.raises(DraftsmithError, match="the engine failed"):
        run_extract(given, tmp_path / "run")
    found = run_extract(given, tmp_path / "run", finish=True)
    store = Store(tmp_path / "run" / "store")
    assert (len(store.rows(held_out=False)), len(store.rows(held_out=True))) == (2, 1)
    assert (found["sequences"], found["prompts_left_out"]) == (3, 2)
    asked = [numbers_of(f"question {i}").whole for i in range(2)]
    assert [texts[0].whole for texts in read_prompts_file(tmp_path / "run" / "store")] == asked, (
        "no others are trained on"
    )
    capsys.readouterr()
    assert run_extract(given, tmp_path / "run") == run_extract(given, tmp_path / "run", finish=True) == found
    assert capsys.readouterr().err.count("2 prompts were left out with --finish") == 2
    early = stage.read(tmp_path / "run" / "store")
    monkeypatch.setattr("draftsmith.extract.extract.run_engines", partial(some, stop=100))
    whole = run_extract(given, tmp_path / "whole", finish=False)
    assert "prompts_left_out" not in whole
    recorded = stage.read(tmp_path / "whole" / "store")
    assert early is not None
    assert recorded is not None
    assert early["inputs"] != recorded["inputs"] == found["finished_early_from"]
    # Nothing is left out of what is whole already.
    (tmp_path / "whole" / "store" / "stage.json").unlink()
    assert "prompts_left_out" not in run_extract(given, tmp_path / "whole", finish=True)
