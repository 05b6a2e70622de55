"""Speculation changes speed, not text, on the second runner: greedy answers are the baseline's, sampled ones follow the target's
probabilities, with every method that vLLM gives to this runner."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.config.drafters import KINDS
from draftsmith.config.methods import Mtp
from draftsmith.config.recipe import EngineConfig
from draftsmith.engine.speculation import method_config
from draftsmith.serve.evaluation.engine import EngineSpec, start_engines
from draftsmith.target.info import TargetInfo, describe_target
from tests.integration.conftest import demo_prompts, make_mtp_target
from tests.integration.test_lossless import PROMPT, compare_with_target, configs_of, configs_of_others, draw

pytestmark = pytest.mark.timeout(3600)  # a quarter of an hour is not enough for so many engines on one core

SAMPLES = 128
PLANTED = 1.5
"""How much too readily the planted bug accepts draft tokens: so few answers find no smaller one."""
LEVEL = 1e-3
SCHEDULE = [[1, 2, 3], [3, 4, 1], [5, 8, 0]]
"""K by the sequences that run: falling to none and rising again as answers end."""


BLOCKS = {"dflash", "dspark", "dspark-anchor"}


@pytest.fixture(scope="module", params=["chains", "blocks"])
def configs(request: pytest.FixtureRequest, target: TargetInfo, drafters: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Half of the methods at a time, each with the draft model, in which a bug is planted."""
    blocks = request.param == "blocks"
    found = configs_of(target, {name: run for name, run in drafters.items() if (name in BLOCKS) == blocks})
    for name, config in found.items():
        if name.startswith("dspark"):  # vLLM's CPU build is asked for another method
            config["method"] = KINDS["dspark"].serving.method
    others = configs_of_others(target, [])
    return found | ({"draft_model": others["draft_model"]} if blocks else others)


def same_as_baseline(target: TargetInfo, configs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Greedy answers of an engine of each method are the baseline's, with draft tokens accepted and rejected; and its drafts are timed."""
    engines = [
        EngineSpec(
            name=name,
            target=str(target.path),
            dtype="float32",
            engine=EngineConfig(max_model_len=256, kv_cache_gib=0.1),
            speculative=config,
            max_num_seqs=8,
        )
        for name, config in ({"baseline": None} | configs).items()
    ]
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [tokenizer(text[:40]).input_ids for text in (PROMPT, *demo_prompts(9))]
    hosts = start_engines(engines, folder)
    try:
        expected = [one.token_ids for one in hosts[0].generate(prompts, max_tokens=32)[0]]
        assert len(set(map(tuple, expected))) == len(prompts)
        assert {host.execution()["model_runner"] for host in hosts} == {"V2"}
        for host in hosts[1:]:
            answers, _ = host.generate(prompts, max_tokens=32)
            assert [one.token_ids for one in answers] == expected, host.config.name
            counted = host.counters()
            assert 0 < counted.accepted <= counted.draft_tokens, (host.config.name, counted)
            # The target as its own draft model is always right.
            assert counted.accepted < counted.draft_tokens or host.config.name == "draft_model", counted
            times = host.step_times(prompts[0], 3)
            assert len(times.drafts) == len(times.steps) == 3, times
            assert all(0 < draft < step for draft, step in zip(times.drafts, times.steps, strict=True)), times
        assert hosts[0].step_times(prompts[0], 1).drafts == []
    finally:
        for host in hosts:
            host.close()


def test_greedy_answers_are_the_baseline_s(
    target: TargetInfo, configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    if "mlp_speculator" in configs:
        by_load = configs["mlp_speculator"] | {"num_speculative_tokens_per_batch_size": SCHEDULE}
        configs = configs | {"mlp_speculator-by-load": by_load}
    same_as_baseline(target, configs, tmp_path)


def test_a_target_s_own_layers(tmp_path: Path) -> None:
    """`mtp`, on a target of its own."""
    make_mtp_target(tmp_path / "target")
    target = describe_target(tmp_path / "target")
    config = method_config(Mtp(method="mtp"), target, own_drafter=Path("none"))
    assert config is not None
    same_as_baseline(target, {"mtp": config}, tmp_path)


def test_sampled_answers_follow_the_target(
    target: TargetInfo, configs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    answers, baseline = draw(target, configs, (PLANTED,), tmp_path, long=False, samples=SAMPLES)
    baseline.close()
    found = compare_with_target(target, answers)
    level = LEVEL / len(found)
    assert found["draft_model"][1].power(PLANTED, level / 2) > 0.999, "too few answers"
    assert found[f"planted {PLANTED}"][0] < level
    for name in ("baseline", *configs):
        assert found[name][0] > level, (name, found[name][0])
