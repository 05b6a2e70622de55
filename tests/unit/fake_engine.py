"""Fake engines on a simulated clock: every step takes a planted time and accepts a planted number of tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from draftsmith.config import recipe
from draftsmith.serve.evaluation.engine import Counters, EngineSpec, Generated, StepTimes
from draftsmith.serve.evaluation.in_flight import ConstantLoad, Request, Timing
from draftsmith.serve.evaluation.schema import Execution
from tests.unit.tiny_run import make_run

COSTS = {
    1: {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.5}, 4: {0: 1.05, 1: 1.2, 2: 1.3, 3: 2.0}, 8: {0: 1.02, 1: 1.9, 2: 2.5, 3: 3.0},
}  # fmt: skip
"""Planted step cost by sequences at once and K; 0: with an idle drafter."""
ACCEPTED = [3, 1, 0, 2]
"""Planted: draft tokens accepted in each step, of three; cut at K."""


class Engine:
    """An engine of which every step takes a planted time."""

    started: list[EngineSpec] = []  # noqa: RUF012
    log = Path()

    def __init__(self, config: EngineSpec) -> None:
        self.config = config
        self.total = Counters(0, 0, 0, (0,) * config.num_speculative_tokens)
        self.factor = 1.0
        """How much slower it is than planted."""
        self.token = 7
        self.schedule: Any = (config.speculative or {}).get("num_speculative_tokens_per_batch_size")
        self.started.append(config)

    def at(self, batch: int) -> tuple[int, float]:
        """K and the seconds of a step with so many sequences."""
        k, schedule = self.config.num_speculative_tokens, self.schedule
        if schedule:
            running = min(batch, self.config.max_num_seqs)
            k = next(k for first, last, k in schedule if first <= running <= last)
        costs = COSTS.get(batch, COSTS[8]) | ({} if schedule else {0: 1.0})
        return k, 0.05 * costs[k] * self.factor

    def draft_by_load(self, ranges: Any) -> None:
        self.schedule = ranges

    def generate(
        self, prompts: Any, *, max_tokens: int, temperature: float | None = None
    ) -> tuple[list[Generated], float]:
        k, cost = self.at(len(prompts))
        answers = []
        for _ in prompts:
            steps: list[int] = []
            while 1 + sum(steps) + len(steps) < max_tokens:
                steps.append(min(ACCEPTED[len(steps) % len(ACCEPTED)], k))
            tokens = [self.token] * min(max_tokens, 1 + sum(steps) + len(steps))
            answers.append(
                Generated(tokens, "length", cost * len(steps), 0.0, (k,) * len(steps) if k else (), tuple(steps))
            )
            if k:
                by_position = tuple(sum(step > i for step in steps) for i in range(self.config.num_speculative_tokens))
                self.total = Counters(
                    self.total.drafts + len(steps),
                    self.total.draft_tokens + k * len(steps),
                    self.total.accepted + sum(steps),
                    tuple(a + b for a, b in zip(self.total.accepted_per_position, by_position, strict=True)),
                )
        return answers, sum(cost * len(answer.accepted) for answer in answers)

    def step_times(self, prompt: Sequence[int], steps: int) -> StepTimes:
        k, seconds = self.at(1)
        drafts = [0.01 * k] * (steps - 1) + [3.0] if k else []
        return StepTimes([seconds] * (steps - 1) + [9.0], drafts)  # the machine is disturbed in the last

    def begin_load(self, requests: Sequence[Request], in_flight: int) -> None:
        engine = SteppedEngine(self)
        self.load = ConstantLoad(
            engine, requests, in_flight, sampling=lambda longest: longest, clock=lambda: engine.now
        )

    def advance_load(self, tokens: int) -> bool:
        return self.load.advance(tokens)

    def end_load(self) -> list[Timing]:
        return self.load.timings()

    def logit_margin(self, context: list[int], token: int, other: int) -> float | None:
        return None

    def margins_read_again(
        self, prompts: Sequence[Any], answers: Sequence[Any], piece: int
    ) -> list[list[float | None]]:
        return [[None] * len(answer) for answer in answers]

    def execution(self) -> Execution:
        eager_method = (self.config.speculative or {}).get("method") in ("ngram", "suffix", "medusa")
        return {"model_runner": "V2", "async_scheduling": not eager_method}

    def counters(self) -> Counters:
        return self.total

    def close(self) -> None:
        pass


class SteppedEngine:
    """What `ConstantLoad` drives in place of vLLM's `LLMEngine`: a new request has one token in its first step, and then what
    is accepted and one more in each."""

    def __init__(self, of: Engine) -> None:
        self.of, self.now = of, 0.0
        self.running: dict[str, tuple[int, list[int], int]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], longest: int) -> None:
        self.running[name] = (longest, [], 0)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def step(self) -> list[Any]:
        k, cost = self.of.at(len(self.running))
        self.now += cost
        outputs = []
        for name, (longest, tokens, steps) in list(self.running.items()):
            new = 1 + (min(ACCEPTED[(steps - 1) % len(ACCEPTED)], k) if steps else 0)
            tokens += [self.of.token] * min(new, longest - len(tokens))
            self.running[name] = (longest, tokens, steps + 1)
            finished = len(tokens) == longest
            if finished:
                del self.running[name]
            answer = SimpleNamespace(token_ids=list(tokens), spec_decode_metrics=None)
            outputs.append(SimpleNamespace(request_id=name, outputs=[answer], finished=finished))
        return outputs


def sorted_by_category(folder: Path, *, prompts: int = 72) -> dict[str, str]:
    """The source of a suite whose first half is of one category and the rest of another, in a run of `make_recipe_and_run`. Prompt n has n as
    its id, and as its only token."""
    words = Tokenizer(models.WordLevel({str(n): n for n in range(prompts)}, unk_token="0"))
    words.save(str(folder / "target" / "tokenizer.json"))
    rows = [
        {"question_id": n, "category": ("math", "writing")[2 * n // prompts], "turns": [str(n)]} for n in range(prompts)
    ]
    (folder / "sorted.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return {"path": str(folder / "sorted.jsonl")}


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *, gib: float) -> None:
    """A GPU of so much memory in place of the CPU, for a run of `make_recipe_and_run`, whose engines take 2 GiB and little more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a pretended GPU")
    properties = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def make_recipe_and_run(folder: Path) -> tuple[recipe.Recipe, Path]:
    """A recipe of 16 prompts, and a run whose drafter is a config alone."""
    make_run(folder)
    rows = [json.dumps({"id": str(n), "prompt": f"question {n}"}) for n in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    tokenizer = {
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    drafter = folder / "run" / "vllm"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    save_file({"layer": torch.zeros(4, 4)}, drafter / "model.safetensors")
    source = {"path": str(folder / "prompts.jsonl")}
    hardware = {
        "device": "d", "matmul_tflops": 1e-6, "memory_gb_per_second": 1e-3, "store_mb_per_second": 1, "load_mb_per_second": 1,
        "prefill_utilization": 1, "decode_utilization": 1, "train_utilization": 1,
    }  # fmt: skip
    found = recipe.Recipe.model_validate({
        "name": "run", "target": {"model": str(folder / "target"), "dtype": "float32"}, "engine": {"max_model_len": 100},
        "extract": {"prompts": source, "max_num_seqs": 32}, "evaluate": {"suites": {"questions": {"prompts": source}}},
        "tune": {"k": [1, 2, 3], "concurrency": [1, 4, 8], "tokens": 41},
        "plan": {"prompt_tokens": 1, "response_tokens": 1, "hardware": hardware},
    })  # fmt: skip
    return found, folder / "run"
