"""What is served is what was trained: extract, train, convert with the real target; then stock vLLM's proposals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith import stage
from draftsmith.checkpoint import Checkpoint
from draftsmith.convert.convert import run_convert
from draftsmith.drafters import drafter_class
from draftsmith.drafters.base import Drafter
from draftsmith.errors import UserError
from draftsmith.extract.extract import run_extract
from draftsmith.recipe import load_recipe
from draftsmith.store import Sequence
from draftsmith.target import load_target_tensors
from draftsmith.train.packing import pack
from draftsmith.train.train import SNAPSHOT, run_train
from tests.integration.conftest import demo_prompts, in_soak, write_recipe
from tests.integration.test_extract import reference_states

pytestmark = pytest.mark.integration

K = 3
NEAR_TIE = 1e-3
"""Logits; float32 sums taken in another order differ by less, and a real difference between modules by far more."""


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small run up to `vllm/`: recipe path and run directory."""
    folder = tmp_path_factory.mktemp("served")
    options = {
        "drafter": {"draft_vocab_size": 2048},
        "epochs": 1,
        "tokens_per_step": 512,
        "save_every_steps": 2,
        "tracker": "wandb",
    }
    recipe_path = write_recipe(
        folder, smollm2, demo_prompts(40), ["What is a comet?", "Name three rivers."],
        extract={"max_num_seqs": 42, "max_tokens": 32}, train=options,
    )  # fmt: skip
    recipe = load_recipe(recipe_path)
    run_extract(recipe, folder / "run")
    run_train(recipe, folder / "run")
    run_convert(recipe, folder / "run")
    return recipe_path, folder / "run"


@pytest.fixture(scope="module")
def served(run: tuple[Path, Path], smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return record(run[1], smollm2, tmp_path_factory.mktemp("recorded"), max_tokens=96)


def record(run_dir: Path, smollm2: Path, folder: Path, *, max_tokens: int) -> dict:
    """Everything stock vLLM proposed for 32 prompts: `record_proposals.py`."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [[{"role": "user", "content": text}] for text in demo_prompts(72)[40:]]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    method = drafter_class(Checkpoint.load(run_dir / "checkpoint").kind).vllm_method
    arguments = [smollm2, run_dir / "vllm", method, K, max_tokens, folder / "prompts.json", folder / "out.json"]
    script = Path(__file__).with_name("record_proposals.py")
    subprocess.run([sys.executable, script, *map(str, arguments)], check=True, timeout=800)
    return json.loads((folder / "out.json").read_text())


def load_drafter(run_dir: Path, target: Path) -> Drafter:
    checkpoint = Checkpoint.load(run_dir / "checkpoint")
    kind = drafter_class(checkpoint.kind)
    config = kind.config_class.from_dict(checkpoint.config)
    drafter = kind.make(config, load_target_tensors(target), checkpoint.draft_token_ids)
    drafter.load_state_dict(checkpoint.tensors)
    return drafter.eval()


def test_trained_equals_served(run: tuple[Path, Path], served: dict, smollm2: Path) -> None:
    compared = check_proposals(load_drafter(run[1], smollm2), served, smollm2)
    assert compared[0] >= 2000, compared


OTHER_KINDS = {
    "eagle": {"kind": "eagle"},
    "medusa": {"kind": "medusa", "num_heads": K},
    "medusa-shared-head": {"kind": "medusa", "num_heads": K + 1, "num_layers": 2, "bias": True, "shared_head": True},
}


@pytest.mark.parametrize("name", ["eagle", "medusa", pytest.param("medusa-shared-head", marks=in_soak)])
def test_trained_equals_served_for_other_kinds(
    run: tuple[Path, Path], name: str, smollm2: Path, tmp_path: Path
) -> None:
    """From the same store."""
    # A few steps of training are enough: what they start from already guesses some tokens right.
    drafter = f"train.drafter={json.dumps(OTHER_KINDS[name])}"
    options = [drafter, "train.tracker=null", "train.epochs=0.2", f"evaluate.k={[K]}"]
    recipe = load_recipe(run[0], options)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "store").symlink_to(run[1] / "store")
    run_train(recipe, run_dir)
    run_convert(recipe, run_dir)
    served = record(run_dir, smollm2, tmp_path, max_tokens=32)
    compared = check_proposals(load_drafter(run_dir, smollm2), served, smollm2)
    assert sum(compared) >= 2000, compared
    assert served["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0


def check_proposals(drafter: Drafter, served: dict, smollm2: Path) -> list[int]:
    """Every proposal of vLLM is the module's own first choice for that context, near-ties apart.

    Returns:
        How many were compared, by chain step.
    """
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    # The longest context of each request holds all its shorter ones.
    longest: dict[str, list[int]] = {}
    for proposal in served["proposals"]:
        request = proposal["request"]
        if len(proposal["context"]) > len(longest.get(request, [])):
            longest[request] = proposal["context"]
    chains = {}
    for request, tokens in longest.items():
        ids = torch.tensor(tokens)
        states = reference_states(model, ids[:-1], drafter.config.layer_ids)
        # Every row counts: its proposal is wanted wherever serving may have drafted from it.
        sequence = Sequence(0, False, torch.cat([ids, ids[-1:]]), torch.ones(len(ids) + 1, dtype=torch.bool), states)
        batch = pack([sequence], steps=K)
        with torch.no_grad():
            steps = drafter.chain(batch, steps=K, own_guesses=True)
            # Logits over a whole vocabulary are large: kept are each row's choice, and what its logits are made of.
            chains[request] = [((step.normed @ step.head.T).argmax(-1), step.normed, step.head) for step in steps]

    compared, different = [0] * K, [0] * K
    for proposal in served["proposals"]:
        chain = chains[proposal["request"]]
        row = len(proposal["context"]) - 2  # p: the context's last token is x_{p+1}
        for k, proposed in enumerate(proposal["draft"]):
            best = int(drafter.draft_token_ids[chain[k][0][row]])
            compared[k] += 1
            if proposed != best:
                different[k] += 1
                theirs = (drafter.draft_token_ids == proposed).nonzero()
                assert len(theirs) == 1, f"vLLM proposed {proposed}, which is not in the draft vocabulary"
                logits = chain[k][2].detach() @ chain[k][1][row]
                gap = float(logits.max() - logits[theirs[0, 0]])
                assert gap < NEAR_TIE, f"step {k + 1}, position {row}: not a near-tie, the logits differ by {gap}"
                break  # the chain goes on from another token
    for k in range(K):
        assert different[k] <= 0.005 * compared[k], (compared, different)
    return compared


def test_acceptance_is_real(served: dict) -> None:
    """Stock vLLM, without our package, accepts some of what this drafter proposes."""
    drafts = served["counters"]["vllm:spec_decode_num_drafts"]
    accepted = served["counters"]["vllm:spec_decode_num_accepted_tokens"]
    assert drafts > 1000
    assert accepted > 0.05 * drafts, "a drafter that is misread is never right; this one was trained for seconds only"


def test_tracking_needs_no_account(run: tuple[Path, Path]) -> None:
    assert list((run[1] / "wandb").glob("offline-run-*/*.wandb")), "wandb was asked for, and logs offline"


def test_training_again_does_nothing_and_foreign_stores_are_refused(run: tuple[Path, Path], smollm2: Path) -> None:
    recipe_path, run_dir = run
    before = (run_dir / "checkpoint" / "stage.json").read_bytes()
    run_train(load_recipe(recipe_path), run_dir)
    assert (run_dir / "checkpoint" / "stage.json").read_bytes() == before
    with pytest.raises(UserError, match=r"layers \[7\]"):
        run_train(load_recipe(recipe_path, ["train.drafter.layer_ids=[7, 30]"]), run_dir)


def test_interrupted_training_ends_like_an_uninterrupted_one(
    run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop after a snapshot, run again: the checkpoint's tensors are those of the run that was never stopped."""
    from draftsmith.train import train as module

    recipe_path, whole = run
    interrupted = tmp_path / "run"
    interrupted.mkdir()
    (interrupted / "store").symlink_to(whole / "store")
    write, calls = module._write_snapshot, []

    def write_and_die(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_snapshot", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        run_train(load_recipe(recipe_path), interrupted)
    assert (interrupted / "checkpoint" / SNAPSHOT).exists()
    assert stage.read(interrupted / "checkpoint") is None
    monkeypatch.undo()
    run_train(load_recipe(recipe_path), interrupted)
    first, second = Checkpoint.load(whole / "checkpoint"), Checkpoint.load(interrupted / "checkpoint")
    assert first.tensors.keys() == second.tensors.keys()
    for name, value in first.tensors.items():
        assert torch.equal(value, second.tensors[name]), name
    assert not (interrupted / "checkpoint" / SNAPSHOT).exists()
