"""`draftsmith generate` without vLLM's engine: rows, keys, continuing, what is refused; and that vLLM takes its parameters."""

import dataclasses
import fcntl
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.extraction import ExtractConfig
from draftsmith.config.recipe import Recipe
from draftsmith.config.sampling_options import WITHOUT_SPECULATION, SamplingOptions
from draftsmith.config.sources import Prompts
from draftsmith.data.prompts import load_prompts
from draftsmith.engine import process
from draftsmith.extract.job import engine_job, store_identity
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.serve import generate
from draftsmith.serve.answers_file import AnswersFile
from draftsmith.serve.generate_child import Answered
from draftsmith.target.info import describe_target
from tests.families import save_tokenizer
from tests.unit.tiny_run import VOCAB, make_run

QUESTIONS = ["Why?", "Where to?", "How many are there?", "When?", "Why?"]
ROWS: list[dict[str, Any]] = [
    *({"prompt": question} for question in QUESTIONS),
    {"id": "talk", "messages": [
        {"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "to be left out"},
    ]},
    {"id": "turns", "messages": [{"role": "user", "content": "First"}, {"role": "user", "content": "Second"}]},
]  # fmt: skip
TEXTS = [{"text": "Once upon a time"}, {"id": "second", "text": "It was"}]
TOKENS = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]}, {"input_ids": [5, 6]}]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    make_run(tmp_path)
    save_tokenizer(tmp_path / "target")
    for name, rows in (("prompts", ROWS), ("texts", TEXTS), ("tokens", TOKENS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate({
        "name": "run", "target": {"model": str(tmp_path / "target"), "dtype": "float32"}, "engine": {"max_model_len": 128},
        "extract": {"prompts": {"path": "unused"}, "max_num_seqs": 2}, "serve": {"method": {"method": "ngram"}},
    })  # fmt: skip


def with_sampling(recipe: Recipe, **sampling: Any) -> Recipe:
    return recipe.model_copy(update={"sampling": SamplingOptions.model_validate(sampling)})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an engine of its own in the place of vLLM's: answers tell what was asked; it may die after some."""
    monkeypatch.setattr(process, "engine_context", lambda: multiprocessing.get_context("fork"))

    def use(dies_after: int | None = None) -> None:
        def child(pipe: Any, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
            assert arguments["speculative_config"]["method"] == "ngram"
            pipe.send(None)
            answered = 0
            while (given := pipe.recv()) is not None:
                for one in reversed(given):
                    if answered == dies_after:
                        os._exit(3)
                    answered += 1
                    text = f"{len(one.token_ids)} read, {one.max_tokens} at most, seed {one.seed}"
                    ids = [ord(letter) - 32 for letter in text.replace(" ", "~")]
                    pipe.send(Answered(one.name, ids, text, "stop", None))
            pipe.send((10, 30, 12, (8, 3, 1)))

        monkeypatch.setattr(generate, "child", child)

    return use


def run(recipe: Recipe, folder: Path, name: str = "prompts.jsonl", out: str = "answers.jsonl") -> dict[str, Any]:
    return generate.run_generate(recipe, folder / "run", Prompts(path=str(folder / name)), folder / out)


def lines(folder: Path, out: str = "answers.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / out).read_text().splitlines()]


# ---- answers ----


def test_every_layout_is_answered_in_the_prompts_order(
    recipe: Recipe, tmp_path: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine()
    figures = run(recipe, tmp_path)
    found = lines(tmp_path)
    assert [row["id"] for row in found] == ["00001", "00002", "00003", "00004", "00005", "talk", "turns"]
    assert len({row["key"] for row in found}) == len(ROWS)
    assert [row["messages"][0]["content"] for row in found[:5]] == QUESTIONS
    for row in found:
        assert row["messages"][-1] == {"role": "assistant", "content": row["response"]}
    assert [message["content"] for message in found[5]["messages"][:-1]] == ["One", "Two", "Three"]
    roles = [message["role"] for message in found[6]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"], "each turn after the answer to the one before"
    assert figures["answers"] == figures["new"] == len(ROWS)
    assert figures["acceptance"]["acceptance_length"] == pytest.approx(2.2)
    said = capsys.readouterr().err
    assert "acceptance length 2.20 (10 drafts, accepted by position: 0.80, 0.30, 0.10)" in said
    assert "ngram, 3 speculative tokens" in said


def test_prompts_without_a_chat_template_are_answered(
    recipe: Recipe, tmp_path: Path, engine: Callable[..., None]
) -> None:
    engine()
    run(recipe, tmp_path, "texts.jsonl", "texts.out")
    run(recipe, tmp_path, "tokens.jsonl", "tokens.out")
    texts, tokens = lines(tmp_path, "texts.out"), lines(tmp_path, "tokens.out")
    assert [(row["id"], row["text"]) for row in texts] == [("00001", "Once upon a time"), ("second", "It was")]
    assert tokens[0]["input_ids"][:2] == [1, 2]
    assert tokens[0]["response"].startswith("2 read"), "what was trained on is no prompt"
    for row in texts + tokens:
        assert sum(row["loss_mask"]) == row["response_tokens"] == len(row["input_ids"]) - row["prompt_tokens"]


def test_extraction_reads_the_answers(recipe: Recipe, tmp_path: Path, engine: Callable[..., None]) -> None:
    engine()
    run(recipe, tmp_path)
    talks = load_prompts(Prompts(path=str(tmp_path / "answers.jsonl")), whole=True)
    assert [talk.messages for talk in talks] == [row["messages"] for row in lines(tmp_path)]
    for name in ("texts", "tokens"):
        run(recipe, tmp_path, f"{name}.jsonl", f"{name}-out.jsonl")
        rows = load_prompts(Prompts(path=str(tmp_path / f"{name}-out.jsonl")), whole=True)
        assert [row.token_ids for row in rows] == [row["input_ids"] for row in lines(tmp_path, f"{name}-out.jsonl")]
        assert all(row.has_answers and row.loss_mask for row in rows)


def test_each_answer_has_its_own_seed(recipe: Recipe, tmp_path: Path, engine: Callable[..., None]) -> None:
    engine()
    sampled = with_sampling(recipe, n=2, temperature=0.8, seed=3)
    run(sampled, tmp_path)
    found = lines(tmp_path)
    assert len(found) == 2 * len(ROWS)
    assert [row["id"] for row in found[:3]] == ["00001", "00001/sample-2", "00002"]
    assert len({row["response"].partition("seed")[2] for row in found if row["id"] != "turns"}) == len(found) - 1
    run(sampled, tmp_path, out="again.jsonl")
    assert lines(tmp_path, "again.jsonl") == found
    run(with_sampling(recipe, n=2, temperature=0.8, seed=4), tmp_path, out="other.jsonl")
    assert not {row["response"] for row in lines(tmp_path, "other.jsonl")} & {row["response"] for row in found}
    run(with_sampling(recipe, temperature=0), tmp_path, out="greedy.jsonl")
    assert all(row["response"].endswith("seed None") for row in lines(tmp_path, "greedy.jsonl"))


def test_answers_end_with_the_engine_s_length_and_long_prompts_are_counted(
    recipe: Recipe, tmp_path: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine()
    rows = [{"text": "x" * 120}, {"text": "x" * 128}, {"text": "x" * 5}, {"image": 1}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = run(with_sampling(recipe, max_tokens=50), tmp_path, "long.jsonl")
    assert [row["response"].partition(",")[0] for row in lines(tmp_path)] == ["120 read", "5 read"]
    assert [row["response"].split(", ")[1] for row in lines(tmp_path)] == ["8 at most", "50 at most"]
    assert sum(reason["rows"] for reason in figures["rows_skipped"].values()) == 2
    assert "generate: not answered: 1 x too long" in capsys.readouterr().err


# ---- continuing ----


@pytest.mark.parametrize("dies_after", [0, 3, 7])
def test_an_interrupted_run_continues(
    recipe: Recipe, tmp_path: Path, engine: Callable[..., None], dies_after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine()
    run(recipe, tmp_path, out="whole.jsonl")
    engine(dies_after)
    with pytest.raises(DraftsmithError, match=r"What was answered so far is kept; run the same command again"):
        run(recipe, tmp_path)
    kept = lines(tmp_path)
    assert len(kept) <= dies_after
    torn = (tmp_path / "whole.jsonl").read_bytes()[:25]
    with (tmp_path / "answers.jsonl").open("ab") as file:
        file.write(torn)
    engine()
    figures = run(recipe, tmp_path)
    assert figures["new"] == len(ROWS) - len(kept)
    assert lines(tmp_path) == lines(tmp_path, "whole.jsonl")
    engine(0)  # and is not asked anything
    capsys.readouterr()
    assert run(recipe, tmp_path)["new"] == 0
    assert "7 answers in" in (said := capsys.readouterr().err)
    assert "all of them from before" in said


def test_more_answers_per_prompt_continue_a_file(recipe: Recipe, tmp_path: Path, engine: Callable[..., None]) -> None:
    engine()
    run(with_sampling(recipe, seed=1), tmp_path)
    before = lines(tmp_path)
    assert run(with_sampling(recipe, seed=1, n=3), tmp_path)["new"] == 2 * len(ROWS)
    assert [row for row in lines(tmp_path) if "/sample-" not in row["id"]] == before


def test_other_answers_are_left_alone(recipe: Recipe, tmp_path: Path, engine: Callable[..., None]) -> None:
    engine()
    run(recipe, tmp_path)
    out = tmp_path / "answers.jsonl"
    good = out.read_bytes()
    with pytest.raises(UserError, match=r"line 1: an answer to another prompt, of another target, or with other"):
        run(with_sampling(recipe, top_p=0.5), tmp_path)
    assert out.read_bytes() == good
    for content in (b"my thesis", b"my thesis\n", good[:-40] + b"\n" + good, b'{"a": 1}\n', b"\0" * 30):
        out.write_bytes(content)
        with pytest.raises(UserError, match=r"not an answer of `draftsmith generate`|answer to another"):
            run(recipe, tmp_path)
        assert out.read_bytes() == content
    with pytest.raises(UserError, match=r"is a folder.*--out"):
        run(recipe, tmp_path, out=".")


@pytest.mark.parametrize("engine_section", [{"options": {"quantization": "fp8"}}, {"max_model_len": 256}])
def test_answers_of_another_engine_are_not_mixed(
    recipe: Recipe, tmp_path: Path, engine: Callable[..., None], engine_section: dict[str, Any]
) -> None:
    engine()
    run(recipe, tmp_path)
    changed = recipe.engine.model_copy(update=engine_section)
    with pytest.raises(UserError, match=r"answer to another"):
        run(recipe.model_copy(update={"engine": changed}), tmp_path)


def test_earlier_answers_of_a_conversation_are_what_was_written(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM cuts what stopped an answer off its text, and not off its tokens."""
    monkeypatch.setattr(process, "engine_context", lambda: multiprocessing.get_context("fork"))

    def child(pipe: Any, arguments: dict[str, Any], sampling: dict[str, Any]) -> None:
        pipe.send(None)
        while (given := pipe.recv()) is not None:
            for one in given:
                pipe.send(Answered(one.name, [ord(letter) - 33 for letter in "YesEND"], "Yes", "stop", None))
        pipe.send((10, 30, 12, (8, 3, 1)))

    monkeypatch.setattr(generate, "child", child)
    for skips, text in (
        (True, "Yes"),
        (False, "YesEND"),
    ):  # with special tokens in the text, it is made from the tokens
        sampled = with_sampling(recipe, skip_special_tokens=skips)
        run(sampled, tmp_path, out=f"{skips}.jsonl")
        talk = next(row for row in lines(tmp_path, f"{skips}.jsonl") if row["id"] == "turns")
        said = [one["content"].replace(" ", "") for one in talk["messages"]]
        assert said == ["First", text, "Second", text]


def test_one_process_writes(tmp_path: Path) -> None:
    with AnswersFile(tmp_path / "a.jsonl", ["k"]), pytest.raises(UserError, match="Another process is writing"):
        AnswersFile(tmp_path / "a.jsonl", ["k"])
    AnswersFile(tmp_path / "a.jsonl", ["k"]).close()


def test_a_file_that_was_replaced_before_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process puts its answers into order and ends while another has the file open and not yet locked."""
    path, keys, flock = tmp_path / "a.jsonl", ["k", "l"], fcntl.flock
    first = AnswersFile(path, keys)
    for key in reversed(keys):
        first.append({"key": key})

    def end_the_other(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.order()
        first.close()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", end_the_other)
    with AnswersFile(path, [*keys, "m"]) as second:
        second.append({"key": "m"})
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["k", "l", "m"]


# ---- parameters ----

LEFT_OUT = {
    "detokenize", "output_kind", "stream_interval", "skip_clone", "extra_args", "flat_logprobs", "logprob_token_ids", "prompt_logprobs",
    "prompt_logprob_token_ids", "prompt_logprob_start", "skip_reading_prefix_cache", "routed_experts_prompt_start",
    "trace_decode_token_ids", "output_text_buffer_length", "watermarking",
}  # fmt: skip
"""Of vLLM's: how answers are handed over, scores of prompts, and what is for debugging."""
EVERY: dict[str, Any] = {
    "n": 2, "max_tokens": 9, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "stop": "end", "stop_token_ids": [3], "ignore_eos": True,
    "bad_words": ["no"], "logit_bias": {"5": 1.5}, "allowed_token_ids": [5, 6], "logprobs": 2, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": 7, "repetition_detection": {"max_pattern_size": 3, "min_count": 3},
}  # fmt: skip


def test_sampling_has_vllm_s_parameters_and_defaults() -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    theirs = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert SamplingOptions.model_fields.keys() == theirs - LEFT_OUT == EVERY.keys()
    usual = SamplingParams()
    for name in SamplingOptions.model_fields.keys() - {"max_tokens", "seed"}:
        assert (getattr(SamplingOptions(), name) or None) == (getattr(usual, name) or None), name


def test_vllm_takes_every_parameter() -> None:
    pytest.importorskip("vllm")
    from draftsmith.serve.generate_child import Asked, _parameters

    options = SamplingOptions.model_validate(EVERY)
    given = {name: value for name, value in options.parameters().items() if name != "max_tokens"}
    assert given.keys() == EVERY.keys() - {"n", "seed", "max_tokens"}
    made = _parameters(given, Asked("a", [1], 9, 4))
    for name in EVERY.keys() - {"n", "seed", "structured_outputs", "repetition_detection", "stop", "logit_bias"}:
        assert getattr(made, name) == EVERY[name], name
    assert (made.stop, made.logit_bias, made.seed, made.n) == (["end"], {5: 1.5}, 4, 1)
    assert made.structured_outputs.regex == "a+"
    assert made.repetition_detection.min_count == 3
    assert SamplingOptions().parameters() == {"temperature": 1.0, "max_tokens": 256}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 2.5}, {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 1.5}, {"presence_penalty": 2.5},
        {"frequency_penalty": -3}, {"repetition_penalty": 0}, {"repetition_penalty": float("inf")}, {"stop": [""]}, {"bad_words": [""]},
        {"stop_token_ids": [-1]}, {"logit_bias": {"a": 1}}, {"logit_bias": {1: 200}}, {"min_tokens": 9, "max_tokens": 8}, {"n": 0},
        {"allowed_token_ids": []}, {"structured_outputs": {}}, {"structured_outputs": {"regex": "a", "json": "{}"}},
        {"structured_outputs": {"regex": "a", "regexp": "b"}}, {"repetition_detection": {"size": 1}}, {"best_of": 2},
    ],
)  # fmt: skip
def test_parameters_out_of_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingOptions.model_validate(wrong)


def test_parameters_are_checked_before_an_engine_starts(recipe: Recipe, tmp_path: Path) -> None:
    for name in WITHOUT_SPECULATION:
        value: Any = 0.1 if name == "min_p" else {1: 1.0}
        with pytest.raises(
            UserError, match=rf"`sampling\.{name}`: vLLM 0\.32 takes it only where it does not speculate"
        ):
            run(with_sampling(recipe, **{name: value}), tmp_path)
        target = describe_target(tmp_path / "target")
        generate.check_sampling(with_sampling(recipe, **{name: value}), target, None)
    with pytest.raises(
        UserError, match=rf"`stop_token_ids` has the token {VOCAB}, and the target's vocabulary has {VOCAB}"
    ):
        run(with_sampling(recipe, stop_token_ids=[1, VOCAB]), tmp_path)
    assert not (tmp_path / "answers.jsonl").exists()


def test_engines_get_what_the_recipe_says(recipe: Recipe, tmp_path: Path) -> None:
    target = describe_target(tmp_path / "target")
    found = generate.engine_arguments(with_sampling(recipe, logprobs=30), target, {"method": "ngram"})
    assert found["speculative_config"] == {"method": "ngram"}
    assert (found["max_model_len"], found["max_num_seqs"], found["max_logprobs"]) == (128, 2, 30)
    assert found["disable_log_stats"] is False
    assert "speculative_config" not in generate.engine_arguments(recipe, target, None)
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    assert found.keys() - {field.name for field in dataclasses.fields(EngineArgs)} == set()


# ---- the same in extraction ----


def test_extraction_samples_with_them_too(recipe: Recipe, tmp_path: Path) -> None:
    target = describe_target(tmp_path / "target")
    further = {
        "stop_token_ids": [3], "min_tokens": 2, "bad_words": ["no"], "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
    }  # fmt: skip
    plain = store_identity(recipe, target, (1, 2))
    assert not further.keys() & plain.sampling.keys(), "stores of before are those of now"
    options = ExtractConfig.model_validate({"prompts": {"path": "p"}, **further})
    changed = recipe.model_copy(update={"extract": options})
    identity = store_identity(changed, target, (1, 2))
    assert further.items() <= identity.sampling.items()
    assert further.items() <= engine_job(changed, target, identity, 1 << 30).sampling.items()
    for wrong, said in (
        ({"min_p": 0.1}, "no `min_p` where it speculates"),
        ({"logit_bias": {1: 1}}, "no `logit_bias` where it speculates"),
        ({"min_tokens": 300}, "more than the longest answer, 256"),
        ({"backend": "transformers", "repetition_penalty": 1.1}, "`repetition_penalty` needs `backend: vllm`"),
        ({"temperature": 3}, "less than or equal to 2"),
    ):
        with pytest.raises(ValidationError, match=said):
            ExtractConfig.model_validate({"prompts": {"path": "p"}, **wrong})
    prefilled = ExtractConfig.model_validate({"prompts": {"path": "p"}, "mode": "prefill", "min_tokens": 2})
    assert prefilled.further_sampling() == {}


# ---- the command ----


def test_command(recipe: Recipe, tmp_path: Path, engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    monkeypatch.chdir(tmp_path)
    written = recipe.model_dump(mode="json", exclude_none=True) | {"serve": {"method": {"method": "suffix"}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    base = ["generate", "recipe.yaml", "prompts.jsonl", "--out", "a.jsonl", "--limit", "3"]
    for method in (
        ["--method", "ngram"],
        ["--method", "{method: ngram, prompt_lookup_max: 4}"],
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
    ):
        done = CliRunner().invoke(app, [*base, *method, "-s", "sampling.temperature=0", "--json"])
        assert done.exit_code == 0, done.output
    assert len(lines(tmp_path, "a.jsonl")) == 3
    for arguments, said in (
        (["generate", "recipe.yaml", "nothing.jsonl", "--out", "b"], "There is no file or folder nothing.jsonl here"),
        ([*base, "--format", "csv"], "`--format csv`"),
        ([*base, "--method", "lookahead"], "`serve.method.method` is `lookahead`"),
        ([*base, "--method", "{"], "neither a method's name nor YAML"),
    ):
        failed = CliRunner().invoke(app, arguments)
        assert isinstance(failed.exception, UserError), failed.output
        assert said in str(failed.exception)


def test_turns_that_are_not_asked_are_said(
    recipe: Recipe, tmp_path: Path, engine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first answer the second turn has no room left."""
    engine()
    figures = run(
        recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_model_len": 60})}), tmp_path
    )
    talk = next(row for row in lines(tmp_path) if row["id"] == "turns")
    assert [message["role"] for message in talk["messages"]] == ["user", "assistant"]
    (reason,) = figures["rows_skipped"].items()
    assert reason[0].startswith("the rest of a conversation after 1 of its 2 user turns: no room")
    assert "generate: not answered: 1 x the rest of a conversation" in capsys.readouterr().err
