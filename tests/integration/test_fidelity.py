"""The verdict on speculative answers with real engines, in bfloat16, where rounding alone makes some of them differ."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.config.recipe import EngineConfig
from draftsmith.serve.evaluation import fidelity
from draftsmith.serve.evaluation.engine import EngineHost, EngineSpec, start_engines
from draftsmith.serve.evaluation.schema import Control, Fidelity
from tests.integration.conftest import demo_prompts
from tests.soak import in_soak

pytestmark = pytest.mark.integration

PROMPTS, TOKENS, DTYPE = 45, 48, "bfloat16"


@dataclass(frozen=True, kw_only=True)
class _LeaksStates(EngineSpec):
    """An engine with the planted fault."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"worker_extension_cls": "tests.integration.leaks_states.Extension"}


@in_soak
def test_rounding_is_excused_and_a_planted_fault_is_not(smollm2: Path, tmp_path: Path, every_core: None) -> None:
    """The target drafts for itself: nearly all draft tokens are right, so nearly all tokens come from verification."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in demo_prompts(PROMPTS)
    ]
    speculative = {"method": "draft_model", "model": str(smollm2), "num_speculative_tokens": 3}
    common: Any = {
        "target": str(smollm2), "dtype": DTYPE, "engine": EngineConfig(max_model_len=2048, kv_cache_gib=3), "max_num_seqs": PROMPTS,
        "memory_share": 1 / 3,
    }  # fmt: skip
    configs = [
        EngineSpec(name="baseline", **common),
        EngineSpec(name="right", speculative=speculative, **common),
        _LeaksStates(name="wrong", speculative=speculative, **common),
    ]
    names = [f"p{n}" for n in range(PROMPTS)]
    hosts = start_engines(configs, tmp_path)
    try:
        baseline, right, wrong = ([*host.generate(prompts, max_tokens=TOKENS)[0]] for host in hosts)
        against = fidelity.control(hosts[0], prompts, baseline, piece=4, batch_size=PROMPTS, max_model_len=2048)
        verdicts = [_verdict(hosts[0], names, prompts, baseline, answers, against) for answers in (right, wrong)]
    finally:
        for host in hosts:
            host.close()
    print(against["tokens"], against["differing"], verdicts)
    assert 0 < against["tokens"] <= sum(len(answer.token_ids) for answer in baseline)
    assert verdicts[0]["verdict"] in ("identical", "near_ties"), verdicts[0]
    assert verdicts[1]["verdict"] == "wrong", verdicts[1]
    # Most of what the fault does is near-ties, which by themselves excuse everything.
    assert verdicts[1]["differing"] > 5 * verdicts[1]["mismatches"]
    assert verdicts[1]["rate_p_value"] < fidelity.LEVEL


def _verdict(
    engine: EngineHost,
    names: list[str],
    prompts: list[list[int]],
    baseline: list[Any],
    answers: list[Any],
    against: Control,
) -> Fidelity:
    found = fidelity.differences(names, baseline, answers, k=3)
    fidelity.add_margins(
        found,
        dict(zip(names, prompts, strict=True)),
        dict(zip(names, baseline, strict=True)),
        dict(zip(names, answers, strict=True)),
        engine.logit_margin,
        fidelity.NEAR_TIE[DTYPE],
    )
    return fidelity.judge(found, names, baseline, against)
