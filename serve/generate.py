"""Offline inference: a file of prompts to a file of answers, with the target and its drafter or any other method.

Rows are keyed by their prompt and by all that decides the answers, and written as they come: after an end at any moment the same
command continues. Prompts are read as the engine has room for them, so that a data set may be larger than memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.config.loading import digest
from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.config.sampling_options import WITHOUT_SPECULATION, unknown_token
from draftsmith.config.sources import Prompts
from draftsmith.data.chat_template import Unrenderable
from draftsmith.data.conversations import Conversation, RejectedRows
from draftsmith.data.images import image_parts
from draftsmith.data.prompts import read_conversations
from draftsmith.data.turns import Turn, TurnRenderer
from draftsmith.engine import environment
from draftsmith.engine.options import check_options, say_overruled
from draftsmith.engine.process import EngineProcess
from draftsmith.engine.speculation import method_config, target_arguments, usable_options
from draftsmith.run.errors import UserError
from draftsmith.run.progress import Bar, console
from draftsmith.serve.answers_file import KEY, AnswersFile
from draftsmith.serve.evaluation.engine import Counters
from draftsmith.serve.evaluation.statistics import acceptance
from draftsmith.serve.generate_child import Answered, Asked, child
from draftsmith.serve.server import description, served_method
from draftsmith.target.info import TargetInfo, describe_target
from draftsmith.target.prepare import prepare_target
from draftsmith.target.pretrained import tokenizer_of


def run_generate(recipe: Recipe, run_dir: Path, prompts: Prompts, out: Path, *, k: int | None = None) -> dict[str, Any]:
    """Answer all prompts, or those that an unfinished file lacks.

    Args:
        recipe: `target`, `engine`, `serve.method`, `sampling` and `extract` (sizes of batches) are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/` if the method uses the run's own; also for the engine's log.
        prompts: a row's conversation is answered as it stands, without an answer at its end; several questions without answers between
            them are answered in order. Unusable rows are counted.
        out: JSON lines, which extraction reads as prompts with answers.
        k: as in `serve`.

    Returns:
        `answers` in the file, `new` ones, `rows_skipped` by reason, `tokens` and `tokens_per_second` of the new ones, and `acceptance` (None
        without speculation).

    Raises:
        UserError: sampling, method or target do not fit each other, no row can be used, or `out` holds something else.
        DraftsmithError: the engine failed; what was answered is kept.
    """
    check_options(recipe.engine)
    target = describe_target(prepare_target(recipe.target), recipe.target)
    speculative = method_config(
        served_method(recipe, run_dir, k),
        target,
        own_drafter=run_dir / "vllm",
        tensor_parallel_size=recipe.engine.tensor_parallel_size,
    )
    check_sampling(recipe, target, speculative)
    tokenizer = tokenizer_of(target.path, trust_remote_code=target.trust_remote_code)
    renderer = TurnRenderer(tokenizer, recipe.engine.max_model_len)
    rejected = RejectedRows()
    rows = Rows(recipe, target, prompts)
    with AnswersFile(out, rows.keys) as answers:
        done = len(answers)
        if done:
            console.print(
                f"generate: continuing {out}: {done} of {len(rows.keys)} answers are there",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        figures: dict[str, Any] = {"new": 0, "tokens": 0, "tokens_per_second": None, "acceptance": None}
        if done < len(rows.keys):
            console.print(f"generate: {target.name}, {description(speculative)}", highlight=False, soft_wrap=True)
            arguments = engine_arguments(recipe, target, speculative)
            say_overruled("generate", recipe.engine, arguments)
            work = _rendered(rows, recipe, renderer, rejected, done=answers.done)
            log = run_dir / "generate" / "engine.log"
            figures = _answer_all(recipe, arguments, work, renderer, answers, rejected, total=len(rows.keys), log=log)
        answers.order()
        figures["answers"] = len(answers)
    for line in rejected.lines():
        console.print(f"generate: not answered: {line}", highlight=False, markup=False, soft_wrap=True)
    if not figures["answers"]:
        raise UserError(f"No prompt can be answered: {'; '.join(rejected.lines()[:3])}.")
    figures |= {"rows_skipped": rejected.figures(), "out": str(out)}
    console.print(f"generate: {_summary(figures)}", highlight=False, markup=False, soft_wrap=True)
    return figures


def engine_arguments(recipe: Recipe, target: TargetInfo, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`.

    Args:
        speculative: vLLM's `speculative_config`; None for no speculation.
    """
    arguments = usable_options(recipe.engine.options, speculative) | {
        "model": str(target.path), "trust_remote_code": target.trust_remote_code, "dtype": recipe.target.dtype,
        "max_model_len": recipe.engine.max_model_len, "enforce_eager": environment.resolved(recipe.engine).enforce_eager,
        "tensor_parallel_size": recipe.engine.tensor_parallel_size, "max_num_seqs": recipe.extract.max_num_seqs,
        "max_num_batched_tokens": recipe.extract.max_num_batched_tokens, "seed": recipe.seed,
        "disable_log_stats": False,  # the counters come from there
        "use_tqdm_on_load": False,  # its output goes to a log here
    }  # fmt: skip
    if recipe.sampling.logprobs is not None:
        arguments["max_logprobs"] = max(recipe.sampling.logprobs, recipe.engine.options.get("max_logprobs", 20))
    if speculative is not None:
        arguments["speculative_config"] = speculative
    return (
        arguments
        | environment.memory_arguments(recipe.engine)
        | target_arguments(
            target.path, speculative, options=recipe.engine.options, trust_remote_code=target.trust_remote_code
        )
    )


def check_sampling(recipe: Recipe, target: TargetInfo, speculative: dict[str, Any] | None) -> None:
    """Check `sampling` against the target and the method.
    Raises UserError: vLLM would refuse every prompt, after loading the target."""
    options = recipe.sampling
    for name in WITHOUT_SPECULATION if speculative is not None else ():
        if getattr(options, name):
            raise UserError(
                f"`sampling.{name}`: vLLM 0.32 takes it only where it does not speculate. Leave it out, or choose `--method none`."
            )
    if (unknown := unknown_token(options.token_ids(), target.vocab_size)) is not None:
        raise UserError(f"`sampling`: {unknown}.")


# ---- rows ----


@dataclass
class Row:
    """One answer that is wanted."""

    key: str
    conversation: Conversation
    """As it is asked."""
    sample: int
    """0 for the first answer to its prompt."""
    seed: int | None
    turn: Turn | None = None
    """Its turn that is being answered."""
    token_ids: list[int] = field(default_factory=list)
    """The prompt of its first turn."""
    answered: int = 0
    """Tokens of the answers to earlier turns."""


class Rows:
    """The answers that a file of prompts asks for. Iterating reads the file, one row at a time.

    Raises:
        UserError: it is missing, is not a data set, or nothing in it can be used.
    """

    def __init__(self, recipe: Recipe, target: TargetInfo, prompts: Prompts) -> None:
        options, self._prompts = recipe.sampling, prompts
        self._samples, self._greedy = options.n, options.temperature == 0
        seed = recipe.seed if options.seed is None else options.seed
        identity = [target.revision, target.config_hash, target.tokenizer_hash, target.chat_template_hash]
        made_from = [*identity, recipe.target.dtype, _as_json(options.parameters()), None if self._greedy else seed]
        # What is as by default is left out, so that files of before there was such a check can be continued.
        if recipe.engine.max_model_len != EngineConfig().max_model_len:  # at which answers end
            made_from.append(recipe.engine.max_model_len)
        if recipe.engine.options:  # quantization, overrides of the config and others compute other answers
            made_from.append(recipe.engine.model_dump(mode="json")["options"])
        self._made_from = digest(made_from)
        self.keys = [row.key for row in self.read(RejectedRows())]
        """Of all rows, in order."""

    def read(self, rejected: RejectedRows) -> Iterator[Row]:
        """
        Args:
            rejected: collects unusable rows.
        """
        times: dict[int, int] = {}  # the same prompt may occur again
        for conversation in read_conversations(self._prompts, whole=True, rejected=rejected):
            asked = unanswered(conversation)
            again = times[asked.sample_id] = times.get(asked.sample_id, -1) + 1
            for sample in range(self._samples):
                key = digest([self._made_from, asked.sample_id, again, sample])[:16]
                # Of its own, so that sampling depends on neither order nor batch.
                yield Row(key, asked, sample, None if self._greedy else int(key[:8], 16) & 0x7FFFFFFF)


def unanswered(conversation: Conversation) -> Conversation:
    """A conversation without the answer at its end, and so with a question there.

    Of tokens with a loss mask, those before the first that is trained on.
    """
    messages, ids = list(conversation.messages), conversation.token_ids
    while len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages.pop()
    if ids is not None and conversation.loss_mask and True in conversation.loss_mask[1:]:
        ids = ids[: conversation.loss_mask.index(True, 1)]
    return replace(conversation, messages=messages, token_ids=ids, loss_mask=None)


def _rendered(
    rows: Rows, recipe: Recipe, renderer: TurnRenderer, rejected: RejectedRows, *, done: set[str]
) -> Iterator[Row]:
    """Rows that are not done, with their first turn; those that the target cannot be asked are counted."""
    for row in rows.read(rejected):
        if row.key in done:
            continue
        asked = row.conversation
        if image_parts(asked.messages):
            rejected.add("it has images, which `generate` does not read", asked.where)
            continue
        in_turn = len(asked.user_turns()) > 1 and not asked.has_answers
        try:
            turn = renderer.first(asked) if in_turn else Turn(asked, renderer.renderer.prompt(asked))
        except Unrenderable as reason:
            rejected.add(str(reason), asked.where)
            continue
        if not turn.token_ids:
            rejected.add("no tokens", asked.where)
        elif len(turn.token_ids) + _least(recipe) > recipe.engine.max_model_len:
            rejected.add("too long: no room for an answer in engine.max_model_len tokens", asked.where)
        else:
            row.turn, row.token_ids = turn, turn.token_ids
            yield row


def _least(recipe: Recipe) -> int:
    """Tokens that an answer must have room for."""
    return max(1, recipe.sampling.min_tokens)


# ---- answering ----


def _answer_all(
    recipe: Recipe,
    arguments: dict[str, Any],
    work: Iterator[Row],
    renderer: TurnRenderer,
    answers: AnswersFile,
    rejected: RejectedRows,
    *,
    total: int,
    log: Path,
) -> dict[str, Any]:
    """Answer what `work` yields, with as many rows in the engine as it runs at once and as many waiting there.

    Args:
        rejected: collects conversations with turns that could not be asked.
    """
    if (first := next(work, None)) is None:
        return {"new": 0, "tokens": 0, "tokens_per_second": None, "acceptance": None}
    work = chain([first], work)
    sampling = {name: value for name, value in recipe.sampling.parameters().items() if name != "max_tokens"}
    process = EngineProcess(
        child,
        (arguments, sampling),
        name="generate",
        engine=recipe.engine,
        log=log,
        variables=environment.float32_environment(recipe.target.dtype),
        advice="What was answered so far is kept; run the same command again to continue.",
    )
    in_flight: dict[str, Row] = {}
    new = tokens = 0

    def ask(*rows: Row) -> None:
        in_flight.update({row.key: row for row in rows})
        process.send([_asked(row, recipe) for row in rows])

    def fill() -> None:
        room = 2 * recipe.extract.max_num_seqs - len(in_flight)
        rows = [row for _, row in zip(range(room), work, strict=False)]
        if rows:
            ask(*rows)

    try:
        process.receive("while starting")
        started = time.monotonic()
        with Bar("generate", total=total, unit="answers", done=len(answers)) as bar:
            fill()
            while in_flight:
                answer: Answered = process.receive("while answering")
                row = in_flight.pop(answer.name)
                tokens += len(answer.token_ids)
                assert row.turn is not None
                following = renderer.next(
                    row.turn, answer.token_ids, max_tokens=_least(recipe), text=_plain_text(answer, recipe)
                )
                if following is not None:
                    row.turn, row.answered = following, row.answered + len(answer.token_ids)
                    ask(row)
                else:
                    if left := len(row.turn.later):
                        rejected.add(
                            f"the rest of a conversation after {row.turn.number + 1} of its {row.turn.number + 1 + left} user turns: no room for "
                            "another answer in engine.max_model_len tokens, or the chat template refuses the next turn",
                            row.conversation.where,
                        )
                    answers.append(_line(row, answer, renderer, recipe))
                    new += 1
                    bar.update(len(answers), tokens_per_second=tokens / (time.monotonic() - started))
                fill()
        seconds = time.monotonic() - started
        process.send(None)
        counters = Counters(*process.receive("at its end"))
    finally:
        process.close()
    return {
        "new": new,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if tokens else None,
        "acceptance": dict(acceptance(counters)) if "speculative_config" in arguments else None,
    }


def _asked(row: Row, recipe: Recipe) -> Asked:
    assert row.turn is not None
    room = recipe.engine.max_model_len - len(row.turn.token_ids)
    seed = None if row.seed is None else (row.seed + row.turn.number) & 0x7FFFFFFF
    return Asked(row.key, row.turn.token_ids, min(recipe.sampling.max_tokens, room), seed)


def _plain_text(answer: Answered, recipe: Recipe) -> str | None:
    """The answer's text as vLLM returned it; None if that has special tokens, which a chat template would write once more."""
    return answer.text if recipe.sampling.skip_special_tokens else None


def _line(row: Row, answer: Answered, renderer: TurnRenderer, recipe: Recipe) -> dict[str, Any]:
    """An answer's line: a row of `messages`, or of `input_ids` with a `loss_mask` for a prompt without a chat template."""
    assert row.turn is not None
    asked = row.turn.conversation
    found: dict[str, Any] = {KEY: row.key, "id": asked.id + (f"/sample-{row.sample + 1}" if row.sample else "")}
    if asked.messages:
        found["messages"] = renderer.with_answer(asked, answer.token_ids, _plain_text(answer, recipe)).messages
        if asked.tools:
            found["tools"] = asked.tools
    else:
        found["input_ids"] = [*row.token_ids, *answer.token_ids]
        found["loss_mask"] = [0] * len(row.token_ids) + [1] * len(answer.token_ids)
        if asked.document is not None:
            found["text"] = asked.document
    found |= {
        "response": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(row.turn.token_ids),
        "response_tokens": len(answer.token_ids) + row.answered,
    }
    return found | ({"logprobs": answer.logprobs} if answer.logprobs is not None else {})


def _summary(figures: dict[str, Any]) -> str:
    text = f"{figures['answers']} answers in {figures['out']}"
    if not figures["new"]:
        return f"{text}, all of them from before"
    text += f"; {figures['new']} new ones with {figures['tokens']} tokens, {figures['tokens_per_second']:.4g} a second"
    found = figures["acceptance"]
    if found is None:
        return text
    positions = ", ".join(f"{share:.2f}" for share in found["acceptance_per_position"])
    return f"{text}; acceptance length {found['acceptance_length']:.2f} ({found['drafts']} drafts, accepted by position: {positions or 'none'})"


def _as_json(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: sorted(value.items()) if name == "logit_bias" else value for name, value in parameters.items()}
