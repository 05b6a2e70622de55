"""One engine at every K does what an engine that was started with that K does: the same proposals, acceptance and text."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.config.recipe import EngineConfig
from draftsmith.engine.speculation import method_config, own_drafter
from draftsmith.serve.evaluation import engine as engine_module
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, SharedEngine, start_engines
from draftsmith.serve.evaluation.in_flight import Request
from draftsmith.target.info import describe_target
from tests.integration import notes_proposals
from tests.integration.conftest import demo_prompts, make_target
from tests.integration.test_evaluate import make_drafter

pytestmark = pytest.mark.integration

KS = (1, 2, 3)
AT_ONCE = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineHost]]:
    """The baseline, an engine for each K, and one for every K."""
    folder = tmp_path_factory.mktemp("shared")
    make_target(folder / "target")
    make_drafter(folder / "vllm", folder / "target")
    target = describe_target(folder / "target")

    def spec(name: str, **changes: Any) -> EngineSpec:
        method = own_drafter(folder / "vllm").model_copy(update=changes)
        speculative = method_config(method, target, own_drafter=folder / "vllm") if changes else None
        return EngineSpec(
            name=name,
            target=str(target.path),
            dtype="float32",
            engine=EngineConfig(max_model_len=256, kv_cache_gib=0.1),
            speculative=speculative,
            max_num_seqs=AT_ONCE,
        )

    specs = [
        spec("baseline"),
        *(spec(f"k{k}", num_speculative_tokens=k) for k in KS),
        spec("every k", num_speculative_tokens_per_batch_size=((1, AT_ONCE, max(KS)),)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_child", notes_proposals.child)
        started = start_engines(specs, folder)
    try:
        yield {host.config.name: host for host in started}
    finally:
        for host in started:
            host.close()


@pytest.fixture(scope="module")
def prompts(hosts: dict[str, EngineHost]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(hosts["baseline"].config.target)
    return [tokenizer(text[:40]).input_ids for text in demo_prompts(10)]


def at(hosts: dict[str, EngineHost], k: int) -> SharedEngine:
    engine = hosts["every k"]
    return SharedEngine(engine, replace(engine.config, k_by_load=((1, AT_ONCE, k),)))


def proposals(host: EngineHost) -> list[Any]:
    return sorted(host._call("proposals"))


def test_a_batch_at_every_k(hosts: dict[str, EngineHost], prompts: list[list[int]]) -> None:
    baseline = [one.token_ids for one in hosts["baseline"].generate(prompts, max_tokens=48)[0]]
    seen = set()
    for k in (3, 1, 2, 3):  # up and down: nothing is left of the K before
        own, shared = hosts[f"k{k}"], at(hosts, k)
        before = own.counters()
        expected, answers = own.generate(prompts, max_tokens=48)[0], shared.generate(prompts, max_tokens=48)[0]
        assert [one.token_ids for one in answers] == [one.token_ids for one in expected] == baseline
        assert [(one.drafted, one.accepted) for one in answers] == [(one.drafted, one.accepted) for one in expected]
        counted = shared.counters()
        assert counted == own.counters() - before
        assert len(counted.accepted_per_position) == k
        assert 0 < counted.accepted < counted.draft_tokens == k * counted.drafts
        found = proposals(hosts["every k"])
        assert found == proposals(own)
        assert {len(tokens) for _, tokens in found} == {k}
        seen.add(counted.drafts)
    assert len(seen) == len(KS), "each K takes another number of steps"
    idle = at(hosts, 0)
    answers, _ = idle.generate(prompts, max_tokens=48)
    assert [one.token_ids for one in answers] == baseline
    assert not any(one.drafted for one in answers)
    assert idle.counters().drafts == 0


def test_steps_one_by_one(hosts: dict[str, EngineHost], prompts: list[list[int]]) -> None:
    (expected,), _ = hosts["baseline"].generate(prompts[:1], max_tokens=24)
    for engine in (hosts["baseline"], hosts["k2"], at(hosts, 2), at(hosts, 1)):
        before = hosts["every k"].counters() if isinstance(engine, SharedEngine) else engine.counters()
        found = engine.step_times(prompts[0], 5)
        assert len(found.steps) == 5
        assert all(0 < seconds < 60 for seconds in found.steps)
        counted = (hosts["every k"] if isinstance(engine, SharedEngine) else engine).counters() - before
        k = engine.config.num_speculative_tokens
        assert counted.drafts >= 5 * (k > 0)
        assert counted.draft_tokens == k * counted.drafts
        assert len(found.drafts) == 5 * (k > 0)
        assert all(0 < draft < step for draft, step in zip(found.drafts, found.steps, strict=False))
        # An answer without room for so many steps; and nothing is left of either.
        assert 0 < len(engine.step_times((prompts[0] * 60)[:252], 8).steps) < 8
        (answer,), _ = engine.generate(prompts[:1], max_tokens=24)
        assert answer.token_ids == expected.token_ids


def test_a_load_at_every_k(hosts: dict[str, EngineHost], prompts: list[list[int]]) -> None:
    requests = [Request(ids, 24, counted=number >= 2) for number, ids in enumerate(prompts * 2)]

    def answered(host: EngineHost) -> list[tuple[Any, ...]]:
        host.begin_load(requests, 2)
        while not host.advance_load(10**6):
            pass
        return [(one.request, one.token_ids, one.drafts, one.accepted) for one in host.end_load()]

    found = {k: answered(at(hosts, k)) for k in (2, 3, 1)}
    for k in KS:
        assert found[k] == answered(hosts[f"k{k}"])
    assert found[1] != found[2] != found[3] != found[1]
