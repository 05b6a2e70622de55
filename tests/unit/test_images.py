"""Images in prompts: parts of messages, what identifies them, where they are refused, and their way into requests and stores."""

import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoProcessor, LlamaConfig

from draftsmith.config.recipe import Recipe
from draftsmith.config.sources import Prompts
from draftsmith.data.conversations import Conversation, RejectedRows, parse
from draftsmith.data.images import image_bytes, image_parts, image_size, text_of
from draftsmith.data.prompts import load_prompts, split
from draftsmith.data.turns import TurnRenderer
from draftsmith.extract import extract
from draftsmith.extract.extract import _check_images
from draftsmith.extract.requests import ExtractRequest, Requests, requests_of
from draftsmith.run.errors import UserError
from draftsmith.serve.evaluation.suites import render_suite
from draftsmith.store.codec import Form
from draftsmith.store.format import Sequence
from draftsmith.store.reader import Store
from draftsmith.target.info import TargetInfo
from tests.families import save_tokenizer
from tests.seeing import IMAGE, save_image, save_llava_processor
from tests.unit.test_store import open_writer


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def write_rows(path: Path, *contents: Any) -> Path:
    rows = [{"messages": [{"role": "user", "content": content}]} for content in contents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def look(image: Path | str, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"type": "image", "image": str(image)}, {"type": "text", "text": text}]


# ---- rows ----

any_part = st.one_of(
    st.tuples(st.just("text"), st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)),
    st.tuples(st.sampled_from(["path", "file url", "data url", "image_url"]), st.binary(max_size=20)),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(parts=st.lists(any_part, min_size=1, max_size=6))
def test_parts_keep_their_order_and_images_their_bytes(tmp_path: Path, parts: list[tuple[str, Any]]) -> None:
    content: list[dict[str, Any]] = []
    for number, (kind, value) in enumerate(parts):
        if kind == "text":
            content.append({"type": "text", "text": value})
            continue
        file = tmp_path / f"ä {number}.png"
        file.write_bytes(value)
        source = {"path": file.name, "file url": file.as_uri()}.get(kind, data_url(value))
        in_url = {"type": "image_url", "image_url": {"url": source}}
        content.append(in_url if kind == "image_url" else {"type": "image", "image": source})
    row = {"messages": [{"role": "user", "content": content}]}
    try:
        found = parse(row, "jsonl", where="line 1", fallback_id="1", whole=True, folder=tmp_path)
    except ValueError:
        assert not "".join(value for kind, value in parts if kind == "text").strip()
        assert all(kind == "text" for kind, _ in parts)
        return
    said = found.messages[0]["content"]
    if all(kind == "text" for kind, _ in parts):
        assert said == "\n".join(value for _, value in parts)
        return
    assert [part["type"] for part in said] == ["text" if kind == "text" else "image" for kind, _ in parts]
    for part, (kind, value) in zip(said, parts, strict=True):
        if kind == "text":
            assert part["text"] == value
        else:
            assert part["sha256"] == hashlib.sha256(value).hexdigest()
            assert image_bytes(part) == value


@pytest.mark.parametrize(
    ("role", "part", "said"),
    [
        ("user", {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "an image is a web address"),
        ("user", {"type": "image", "image": "none.png"}, "not a readable file; relative paths start in "),
        ("user", {"type": "image", "image": "."}, "not a readable file"),
        ("user", {"type": "image", "image": "data:image/png;base64,???"}, "the data URL of an image is not"),
        ("user", {"type": "image", "image": "data:image/png,abc"}, "the data URL of an image is not"),
        ("user", {"type": "image"}, "no 'image'"),
        ("user", {"type": "image", "image": 3}, "must be a string that is not empty"),
        ("assistant", {"type": "image", "image": "a.png"}, "nor images in a `user` message"),
        ("system", {"type": "image", "image": "a.png"}, "nor images in a `user` message"),
    ],
)
def test_a_row_with_an_unusable_image_is_named(tmp_path: Path, role: str, part: dict[str, Any], said: str) -> None:
    save_image(tmp_path / "a.png", 0)
    rows = [{"role": role, "content": [part]}, {"role": "user", "content": "What is it?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": rows}))
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1: .*") as refused:
        load_prompts(Prompts(path=str(tmp_path / "rows.jsonl")))
    assert said in str(refused.value)


def test_a_relative_path_needs_a_local_file_of_prompts() -> None:
    row = {"messages": [{"role": "user", "content": look("a.png")}]}
    with pytest.raises(ValueError, match="no local file beside which"):
        parse(row, "jsonl", where="row 1", fallback_id="1", whole=True)


def test_an_image_is_its_bytes_wherever_they_lie(tmp_path: Path) -> None:
    def only(folder: Path, source: str) -> Conversation:
        (found,) = load_prompts(Prompts(path=str(write_rows(folder / "rows.jsonl", look(source)))))
        return found

    first, second = save_image(tmp_path / "a.png", 1), save_image(tmp_path / "b.png", 2)
    (tmp_path / "other").mkdir()
    shutil.copy(first, tmp_path / "other" / "c.png")
    same = [only(tmp_path, "a.png"), only(tmp_path / "other", "c.png"), only(tmp_path, data_url(first.read_bytes()))]
    assert len({one.sample_id for one in same}) == 1
    assert only(tmp_path, "b.png").sample_id != same[0].sample_id
    shutil.copy(second, first)
    assert only(tmp_path, "a.png").sample_id == only(tmp_path, "b.png").sample_id
    with pytest.raises(ValueError, match="has changed since"):
        image_bytes(image_parts(same[0].messages)[0])
    first.unlink()
    with pytest.raises(ValueError, match="cannot be read any more"):
        image_bytes(image_parts(same[0].messages)[0])


def test_the_same_question_about_another_picture_is_another_prompt(tmp_path: Path) -> None:
    for seed in range(4):
        save_image(tmp_path / f"{seed}.png", seed)
    rows = write_rows(tmp_path / "rows.jsonl", *(look(f"{seed}.png") for seed in (0, 1, 1, 2, 3)))
    held = write_rows(tmp_path / "held.jsonl", look("0.png"))
    recipe = recipe_for(rows, held_out={"path": str(held)})
    rejected = RejectedRows()
    found = list(split(recipe.extract, whole=False, rejected=rejected))
    assert [(one.where, held_out) for one, held_out in found] == [
        ("line 2", False),
        ("line 4", False),
        ("line 5", False),
        ("line 1", True),
    ]
    assert {reason: one["first"] for reason, one in rejected.figures().items()} == {
        "as in the held-out prompts": "line 1",
        "the same conversation occurs twice": "line 3",
    }


def test_an_image_is_a_word_of_the_text() -> None:
    parts = [{"type": "image", "image": "/a", "sha256": "12ab"}, {"type": "text", "text": "What is it?"}]
    assert text_of(parts) == "12ab\nWhat is it?"
    assert text_of("Why?") == "Why?"


# ---- requests ----


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that reads images, without its weights."""
    directory = tmp_path_factory.mktemp("llava")
    save_llava_processor(directory)
    return directory


def recipe_for(rows: Path, **extract: object) -> Recipe:
    options = {"prompts": {"path": str(rows)}, "held_out_fraction": 0, "max_tokens": 10, **extract}
    sections = {"extract": options, "engine": {"max_model_len": 64}}
    return Recipe.model_validate({"name": "r", "target": {"model": "owner/name"}} | sections)


def test_prompts_are_the_processors_before_images_expand(seeing: Path, tmp_path: Path) -> None:
    sizes = [(30, 40), (64, 33)]
    files = [save_image(tmp_path / f"{seed}.png", seed, *size) for seed, size in enumerate(sizes)]
    rows = write_rows(tmp_path / "rows.jsonl", [*look(files[0], "and "), *look(files[1])], "Why?")
    pictures, plain = requests_of(recipe_for(rows), seeing, RejectedRows())
    processor = AutoProcessor.from_pretrained(seeing)
    text = f"<user>{IMAGE}and {IMAGE}What is it?<assistant>"
    assert pictures.prompt_token_ids == processor.tokenizer(text)["input_ids"]
    expanded = processor(text=[text], images=[str(file) for file in files])["input_ids"][0]
    assert pictures.prompt_tokens == len(expanded) > len(pictures.prompt_token_ids)
    assert [part["image"] for part in pictures.images] == [str(file) for file in files]
    assert (plain.images, plain.image_tokens) == ((), None)
    assert [image_size(part) for part in pictures.images] == sizes


def test_requests_stay_the_same_when_images_move(seeing: Path, tmp_path: Path) -> None:
    def digest(folder: Path, seed: int) -> str:
        folder.mkdir()
        save_image(folder / "a.png", seed)
        rows = write_rows(folder / "rows.jsonl", look("a.png"))
        requests = Requests(tmp_path, requests_of(recipe_for(rows), seeing, RejectedRows()))
        assert requests.with_images
        (back,) = requests
        assert back.images[0]["image"] == str(folder / "a.png")
        return requests.digest

    assert digest(tmp_path / "one", 1) == digest(tmp_path / "two", 1) != digest(tmp_path / "three", 2)


def test_images_that_cannot_be_used_leave_their_rows_out(seeing: Path, tmp_path: Path) -> None:
    whole = save_image(tmp_path / "a.png", 1)
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:500])
    (tmp_path / "text.png").write_text("no image")
    pictures = [part for _ in range(12) for part in look(whole, "")]
    contents = [look("a.png"), look("cut.png"), look("text.png"), pictures]
    rejected = RejectedRows()
    (found,) = requests_of(recipe_for(write_rows(tmp_path / "rows.jsonl", *contents)), seeing, rejected)
    assert found.prompt_tokens == len(found.prompt_token_ids) + 3
    assert {reason: one["first"] for reason, one in rejected.figures().items()} == {
        "an image cannot be decoded (OSError)": "line 2",
        "an image cannot be decoded (UnidentifiedImageError)": "line 3",
        "too long: no room for an answer in engine.max_model_len tokens": "line 4",
    }


@pytest.mark.parametrize(
    "template", ["{{ messages[0]['content'] }}", "{% for m in messages %}{{ m['content'][1]['text'] }}{% endfor %}"]
)
def test_a_template_without_a_place_for_images_is_refused(template: str, seeing: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(seeing, target)
    (target / "chat_template.jinja").write_text(template)
    rows = write_rows(tmp_path / "rows.jsonl", look(save_image(tmp_path / "a.png", 1)))
    with pytest.raises(UserError, match="the chat template has no place for images"):
        list(requests_of(recipe_for(rows), target, RejectedRows()))


def test_a_target_that_reads_text_only_is_refused_by_the_row(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=320, hidden_size=64).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", "Why?", look(save_image(tmp_path / "a.png", 1)))
    said = r"The row at line 2 of \S*rows\.jsonl has images\. The target \S+ \(type `llama`\) reads text only: [^\n]+"
    with pytest.raises(UserError, match=said):
        list(requests_of(recipe_for(rows), tmp_path, RejectedRows()))


@pytest.mark.parametrize(
    "options",
    [{"mode": "prefill"}, {"backend": "transformers"}, {"turns": "all"}],
    ids=["prefill", "transformers", "turns"],
)
def test_settings_that_read_no_images_are_refused_by_the_row(
    options: dict[str, Any], seeing: Path, tmp_path: Path
) -> None:
    save_image(tmp_path / "a.png", 1)
    messages = [{"role": "user", "content": "Why?"}] if "turns" in options else []  # also in a later turn
    row = {"messages": [*messages, {"role": "user", "content": look("a.png")}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    said = r"The row at line 1 of \S+ has images, which extraction reads only with `extract.mode: generate`"
    with pytest.raises(UserError, match=said):
        list(requests_of(recipe_for(tmp_path / "rows.jsonl", **options), seeing, RejectedRows()))


def test_a_processor_that_cannot_be_loaded_says_what_is_missing(seeing: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(seeing, target)
    for path in target.glob("*processor_config.json"):
        path.unlink()
    rows = write_rows(tmp_path / "rows.jsonl", look(save_image(tmp_path / "a.png", 1)))
    with pytest.raises(UserError, match=r"has images\. The processor of the target \S+, which images need, cannot be"):
        list(requests_of(recipe_for(rows), target, RejectedRows()))


# ---- the store ----


@pytest.mark.parametrize("form", ["none", "lossless", "int8"])
def test_the_store_has_the_images_of_each_prompt(form: Form, tmp_path: Path) -> None:
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
    shown: dict[int, tuple[str, ...]] = {5: (), 1: tuple(digests[:2]), 3: (), 2: (digests[2],), 9: (digests[0],), 7: ()}
    writer = open_writer(tmp_path, form, 1000, **({"states": "int8"} if form == "int8" else {}))
    for sample_id, images in shown.items():
        ids = torch.randint(0, 50, (7,), dtype=torch.int32)
        states = torch.randn(6, 2, 4)
        writer.append(Sequence(sample_id, False, ids, torch.arange(7) > 2, states, images))
    writer.close()
    store = Store(tmp_path)
    assert list(store.corruptions()) == []
    assert {sequence.sample_id: sequence.images for sequence in store} == shown
    assert all(sequence.loss_mask.tolist() == [False] * 3 + [True] * 4 for sequence in store)


# ---- evaluation ----


def test_evaluation_leaves_prompts_with_images_out(seeing: Path, tmp_path: Path, capsys: Any) -> None:
    save_image(tmp_path / "a.png", 1)
    renderer = TurnRenderer(AutoProcessor.from_pretrained(seeing).tokenizer, 64)
    both = load_prompts(Prompts(path=str(write_rows(tmp_path / "rows.jsonl", "Why?", look("a.png")))))
    assert [turn.conversation.text for turn in render_suite(renderer, "s", both, 8).prompts] == ["Why?"]
    assert "1 x it has images, which evaluation does not measure with" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="No prompt of the suite `s` can be used: 1 x it has images"):
        render_suite(renderer, "s", both[1:], 8)


@pytest.mark.parametrize(("kind", "said"), [("qwen2_5_vl_text", "has M-RoPE"), ("llama", ""), ("gemma3_text", None)])
def test_what_images_mean_for_a_target_is_said(
    kind: str, said: str | None, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
    config = AutoConfig.for_model(kind, **({"rope_parameters": rope} if kind.startswith("qwen") else {}))
    target = TargetInfo(Path(), "the target", "", "", "", None, 4, 64, 320, config)
    monkeypatch.setattr(extract, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="models that see images need torchvision"):
        _check_images(target, {})
    monkeypatch.setattr(extract, "find_spec", lambda package: package)
    if said is None:
        with pytest.raises(UserError, match=r"states of the target .* only through its transformers backend"):
            _check_images(target, {})
        return
    _check_images(target, {})
    printed = capsys.readouterr().err
    assert said in printed
    assert bool(said) == bool(printed)


def test_requests_without_images_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Stores that are finished stay finished."""
    request = ExtractRequest(1, False, [4, 5], 2)
    line = b'{"held_out":false,"max_tokens":2,"prompt_token_ids":[4,5],"sample_id":1}\n'
    assert Requests(tmp_path, [request]).digest == hashlib.sha256(line).hexdigest()
