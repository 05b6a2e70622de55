"""What is served is what was trained: extract, train, convert with the real target; then stock vLLM's proposals.

Other kinds than EAGLE-3 soak: `test_kinds.py` serves all, tiny and with random weights.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from draftsmith.cli import app
from draftsmith.config.loading import load_recipe
from draftsmith.convert.convert import convert_checkpoint, read, recognize, run_convert
from draftsmith.drafters.checkpoint import Checkpoint
from draftsmith.engine import speculation
from draftsmith.extract.extract import run_extract
from draftsmith.run import stage
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.serve.proposals import Served, compare_proposals, record
from draftsmith.target.tensors import load_target_tensors
from draftsmith.train.snapshot import SNAPSHOT
from draftsmith.train.train import run_train
from tests.integration.conftest import FAKE_KERNELS, demo_prompts, load_drafter, write_recipe
from tests.soak import SOAKING, in_soak

pytestmark = pytest.mark.integration

K = 3
PROMPTS, TOKENS, POSITIONS = (32, 128, 2000) if SOAKING else (12, 96, 500)
"""Prompts that are answered, the longest answers, and the positions at which every chain step's proposals are compared, each step counted on its own. A step that follows another proposal than the
drafter's is not comparable and not counted. `compare_proposals` allows one in 200, ties all, to differ at each step."""


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
        folder,
        smollm2,
        demo_prompts(40),
        ["What is a comet?", "Name three rivers."],
        extract={"max_num_seqs": 42, "max_tokens": 32},
        train=options,
    )
    recipe = load_recipe(recipe_path)
    run_extract(recipe, folder / "run")
    with pytest.MonkeyPatch.context() as patch:  # of somebody without an account
        patch.setenv("HOME", str(folder))
        for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        run_train(recipe, folder / "run")
    run_convert(recipe, folder / "run")
    return recipe_path, folder / "run"


@pytest.fixture(scope="module")
def served(run: tuple[Path, Path], smollm2: Path) -> Served:
    (found,) = record_runs([run[1]], smollm2)
    return found


def record_runs(run_dirs: list[Path], smollm2: Path) -> list[Served]:
    """Everything stock vLLM proposed for some prompts."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [[{"role": "user", "content": text}] for text in demo_prompts(40 + PROMPTS)[40:]]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    folders = [run_dir / "vllm" for run_dir in run_dirs]
    drafters = [(folder, speculation.speculative_config(folder, K)["method"]) for folder in folders]
    return record(drafters, smollm2, prompts, k=K, max_tokens=TOKENS)


def test_trained_equals_served(run: tuple[Path, Path], served: Served, smollm2: Path) -> None:
    compared = compare_proposals(served, load_drafter(run[1], smollm2), smollm2)
    assert len(compared) == K
    assert min(compared) >= POSITIONS, compared


OTHER_KINDS = {
    "eagle": {"kind": "eagle"},
    "p_eagle": {"kind": "p_eagle", "num_layers": 2, "num_depths": K, "draft_vocab_size": 2048},
    "dflash": {"kind": "dflash", "block_size": K + 1, "draft_vocab_size": 2048},
    "dspark": {"kind": "dspark", "block_size": K + 1, "draft_vocab_size": 2048},
    "dspark-anchor": {"kind": "dspark", "block_size": K, "draft_vocab_size": 2048, "sample_from_anchor": True},
    "medusa": {"kind": "medusa", "num_heads": K},
    "mlp_speculator": {"kind": "mlp_speculator", "n_predict": K},
    "medusa-shared-head": {"kind": "medusa", "num_heads": K + 1, "num_layers": 2, "bias": True, "shared_head": True},
}


@pytest.fixture(scope="module")
def others(
    run: tuple[Path, Path], smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Served]]:
    """Of each kind: a run from the same store, and what vLLM proposed."""
    run_dirs = {}
    for name, options in OTHER_KINDS.items():
        # A few steps of training are enough: what they start from already guesses some tokens right.
        drafter = f"train.drafter={json.dumps(options)}"
        overrides = [drafter, "train.tracker=null", "train.epochs=0.2", f"evaluate.k={[K]}"]
        recipe = load_recipe(run[0], overrides)
        run_dirs[name] = run_dir = tmp_path_factory.mktemp(name) / "run"
        run_dir.mkdir()
        (run_dir / "store").symlink_to(run[1] / "store")
        run_train(recipe, run_dir)
        run_convert(recipe, run_dir)
    found = {}
    ours = {
        name
        for name, run_dir in run_dirs.items()
        if speculation.needs_plugin(run_dir / "vllm") or speculation.needs_mend(run_dir / "vllm")
    }
    for names in (run_dirs.keys() - ours, ours):  # stock vLLM, and with our plugin
        served = record_runs([run_dirs[name] for name in names], smollm2)
        found |= {name: (run_dirs[name], one) for name, one in zip(names, served, strict=True)}
    return found


@in_soak
@pytest.mark.timeout(1800)  # the first trains and serves all
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_trained_equals_served_for_other_kinds(
    others: dict[str, tuple[Path, Served]], name: str, smollm2: Path
) -> None:
    run_dir, served = others[name]
    compared = compare_proposals(served, load_drafter(run_dir, smollm2), smollm2)
    assert len(compared) == K
    assert min(compared) >= POSITIONS, compared
    assert len({proposal["draft"][-1] for proposal in served.proposals}) > 20, (
        "one that ignores its context would be equal too"
    )
    assert served.counters["vllm:spec_decode_num_accepted_tokens"] > 0


def test_acceptance_is_real(served: Served) -> None:
    """Stock vLLM, without our package, accepts some of what this drafter proposes."""
    drafts = served.counters["vllm:spec_decode_num_drafts"]
    accepted = served.counters["vllm:spec_decode_num_accepted_tokens"]
    assert drafts > POSITIONS
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


@in_soak
def test_interrupted_training_ends_like_an_uninterrupted_one(
    run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop after a snapshot, run again: the checkpoint's tensors are those of the run that was never stopped."""
    from draftsmith.train import train as module

    recipe_path, whole = run
    interrupted = tmp_path / "run"
    interrupted.mkdir()
    (interrupted / "store").symlink_to(whole / "store")
    write, calls = module.write_snapshot, []

    def write_and_die(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_snapshot", write_and_die)
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


def test_8_bit_weights_are_read_as_written(run: tuple[Path, Path], smollm2: Path, tmp_path: Path) -> None:
    """By vLLM's own loader: its proposals are those of the weights that the checkpoints hold."""
    folders = [tmp_path / scheme for scheme in (("int8", "fp8") if SOAKING else ("int8",))]
    for folder in folders:
        convert_checkpoint(run[1] / "checkpoint", folder, to="vllm", quantize=folder.name)
    prompts = [[*AutoTokenizer.from_pretrained(smollm2)(text).input_ids] for text in demo_prompts(8)]
    drafters = [(folder, "eagle3") for folder in folders]
    found = record(drafters, smollm2, prompts, k=K, max_tokens=32, recorder=FAKE_KERNELS)
    for folder, served in zip(folders, found, strict=True):
        held = read(folder, recognize(folder))
        compared = compare_proposals(served, held.drafter(load_target_tensors(smollm2)), smollm2)
        assert len(compared) == K
        assert min(compared) > 100, compared
        with pytest.raises(DraftsmithError, match="computes other draft tokens"):
            compare_proposals(served, load_drafter(run[1], smollm2), smollm2)


def test_a_conversion_is_verified_in_vllm(run: tuple[Path, Path], smollm2: Path, tmp_path: Path) -> None:
    """The one form of 8-bit weights that vLLM has a kernel for on CPUs."""
    command = [
        "convert",
        str(run[1] / "checkpoint"),
        "--to",
        "vllm",
        "--out",
        str(tmp_path / "out"),
        "--verify",
        "--json",
    ]
    done = CliRunner().invoke(app, [*command, "--quantize", "int8-dynamic", "--target", str(smollm2)])
    assert done.exit_code == 0, done.output
    verified = json.loads(done.stdout)["verified"]
    assert 0 < verified["relative_difference"] < 0.05
    assert verified["served"]["accepted"] > 0
