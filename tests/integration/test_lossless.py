"""Speculation changes speed, not text: sampled answers follow the distribution of plain sampling, for every method.

Two engines of the same tiny target draw tens of thousands of answers each, one of them speculating. Counts of short pieces of
the answers are held against each other with a chi-square test of homogeneity (Pearson; two samples of the same size), at a
level divided by the number of tests. A method that accepts wrongly must be found out by the same test.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import LlamaForCausalLM

from draftsmith.convert.convert import run_convert
from draftsmith.drafters import kinds
from draftsmith.extract.extract import run_extract
from draftsmith.methods import AnyMethod, Mtp
from draftsmith.recipe import Engine, load_recipe
from draftsmith.serve.engine import EngineConfig, EngineHost, Generated, start_engines
from draftsmith.serve.speculation import method_config, own_drafter
from draftsmith.target import TargetInfo, describe_target
from draftsmith.train.train import run_train
from tests.integration.conftest import SOAKING, demo_prompts, in_soak, make_mtp_target, make_target, write_recipe

pytestmark = pytest.mark.integration

SAMPLES, TOKENS, AT_ONCE = 20_000 if SOAKING else 4_000, 5, 512
TEMPERATURE = 0.2
"""Of a random target's nearly even distribution it leaves a few likely tokens, so that guesses are accepted and rejected."""
LEVEL = 1e-3
"""Of all tests of a run together."""
K = 3
PIECES = ((0,), (1,), (2,), (0, 1), (1, 2), (2, 3), (1, 2, 3))
"""Positions in the answer that are counted together; the first token is the target's own."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    directory = tmp_path_factory.mktemp("lossless") / "target"
    make_target(directory)
    return describe_target(directory)


@pytest.fixture(scope="module")
def methods(target: TargetInfo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any] | None]:
    """vLLM's `speculative_config` by name: of a drafter of every kind, made for this target, and of the other methods."""
    folder = tmp_path_factory.mktemp("drafters")
    found: dict[str, dict[str, Any] | None] = {}
    for kind in kinds() if SOAKING else ():
        recipe = load_recipe(
            write_recipe(
                folder, target.path, demo_prompts(24), ["What is a comet?", "Name three rivers."],
                extract={"backend": "transformers", "max_tokens": 24, "temperature": TEMPERATURE},
                train={"drafter": {"kind": kind}, "epochs": 2, "tokens_per_step": 256, "chain_steps": 2},
                evaluate={"k": [1, 2, K], "acceptance_k": K},
            )
        )  # fmt: skip
        run_extract(recipe, folder / "run")
        run_dir = folder / kind
        run_dir.mkdir()
        (run_dir / "store").symlink_to(folder / "run" / "store")
        run_train(recipe, run_dir)
        run_convert(recipe, run_dir)
        method = own_drafter(run_dir / "vllm").model_copy(update={"num_speculative_tokens": K})
        found[kind] = method_config(method, target, own_drafter=run_dir / "vllm")
    # The target as its own draft model: its guesses, greedy ones, are good, and so a bug in accepting them shows.
    others: list[dict[str, Any]] = [{"method": "draft_model", "model": str(target.path)}]
    if SOAKING:
        others += [{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}, {"method": "suffix"}]
    for other in others:
        method = TypeAdapter(AnyMethod).validate_python(other)
        found[other["method"]] = method_config(method, target, own_drafter=Path("none"))
    return found


class _AcceptsWrongly(EngineConfig):
    """An engine with the planted bug."""

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | {"worker_extension_cls": "tests.integration.accepts_wrongly.Extension"}


def chi_square(one: Counter[Any], other: Counter[Any]) -> float:
    """Probability that two samples of the same size and distribution differ by as much or more.

    Values seen less than ten times in both together count as one, or the statistic is not chi-square distributed.
    """
    rare = {value for value in one.keys() | other.keys() if one[value] + other[value] < 10}
    cells = [(one[value], other[value]) for value in one.keys() | other.keys() if value not in rare]
    cells.append((sum(one[value] for value in rare), sum(other[value] for value in rare)))
    used = [(a, b) for a, b in cells if a + b]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in used)
    if len(used) < 2:
        return 1.0
    of_freedom = torch.tensor((len(used) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(of_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def smallest(plain: list[Generated], other: list[Generated]) -> float:
    """The smallest of the tests' probabilities, times their number (Bonferroni)."""
    found = []
    for piece in PIECES:
        counts = [
            Counter(
                tuple(answer.token_ids[i] if i < len(answer.token_ids) else -1 for i in piece) for answer in answers
            )
            for answers in (plain, other)
        ]
        found.append(chi_square(*counts))
    return min(found) * len(found)


def test_the_test_itself() -> None:
    """It calls equal distributions different as often as it says, and finds one token that comes up too often."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.softmax(torch.randn(300, generator=draw) * 1.5, 0)

    def sample(weights: torch.Tensor) -> Counter[int]:
        return Counter(torch.multinomial(weights, SAMPLES, replacement=True, generator=draw).tolist())

    probabilities = torch.tensor([chi_square(sample(weights), sample(weights)) for _ in range(400)])
    for level in (0.05, 0.2, 0.5):
        assert abs(float((probabilities < level).float().mean()) - level) < 4 * (level * (1 - level) / 400) ** 0.5
    shifted = weights.clone()
    shifted[weights.argmax()] *= 2  # of 300 tokens, one
    assert chi_square(sample(weights), sample(shifted / shifted.sum())) < 1e-6


# What repeats gives n-gram lookup something to find.
PROMPT = list(b"one two three one two three one two ")


def drawn(
    target: TargetInfo, arms: dict[str, dict[str, Any] | None], folder: Path
) -> tuple[dict[str, list[Generated]], EngineHost]:
    """Answers of an engine of each arm, and the first arm's engine, still running."""
    configs = [
        (_AcceptsWrongly if name == "accepts wrongly" else EngineConfig)(
            name=name.replace(" ", "-"), target=str(target.path), dtype="float32",
            engine=Engine(max_model_len=256, kv_cache_gib=1.0), speculative=config, max_num_seqs=AT_ONCE,
            memory_share=1 / len(arms),
        )
        for name, config in arms.items()
    ]  # fmt: skip
    hosts = start_engines(configs, folder)
    try:
        answers = {
            name: host.generate([PROMPT] * SAMPLES, max_tokens=TOKENS, temperature=TEMPERATURE)[0]
            for name, host in zip(arms, hosts, strict=True)
        }
    except BaseException:
        hosts[0].close()
        raise
    finally:
        for host in hosts[1:]:
            host.close()
    return answers, hosts[0]


def hold_against_plain(answers: dict[str, list[Generated]]) -> dict[str, float]:
    """By method, the smallest probability; guesses must have been accepted, and rightly rejected, to be tested."""
    found = {name: smallest(answers["plain"], other) for name, other in answers.items() if name != "plain"}
    for name in found:
        accepted = sum(sum(answer.accepted) for answer in answers[name])
        drafted = sum(sum(answer.drafted) for answer in answers[name])
        print(name, found[name], accepted, drafted)
        assert len(answers[name]) == SAMPLES
        assert 0 < accepted < drafted + (name == "accepts wrongly"), name
    return found


def test_sampled_answers_follow_the_target(target: TargetInfo, methods: dict[str, Any], tmp_path: Path) -> None:
    answers, plain = drawn(target, {"plain": None, **methods, "accepts wrongly": methods["draft_model"]}, tmp_path)
    with plain, torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(target.path)(torch.tensor([PROMPT])).logits[0, -1]
        first, second = logits.topk(2).indices.tolist()
        assert plain.gap(PROMPT, first, second) == pytest.approx(float(logits[first] - logits[second]), abs=1e-3)
        assert plain.gap(PROMPT, first, int(logits.argmin())) is None
    found = hold_against_plain(answers)
    assert found.pop("accepts wrongly") < LEVEL / len(methods)
    for name in methods:
        assert found[name] * len(methods) > LEVEL, (name, found[name])


@in_soak
def test_a_target_s_own_layers_are_checked_rightly(tmp_path: Path) -> None:
    """`mtp`, on a tiny target with random weights."""
    make_mtp_target(tmp_path / "target")
    target = describe_target(tmp_path / "target")
    config = method_config(Mtp(method="mtp"), target, own_drafter=Path("none"))
    answers, plain = drawn(target, {"plain": None, "mtp": config}, tmp_path)
    plain.close()
    assert hold_against_plain(answers)["mtp"] > LEVEL
