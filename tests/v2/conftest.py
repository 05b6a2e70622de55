"""What these tests share: a tiny target, drafters of every kind for it, and the check that vLLM took the second runner."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.target.info import TargetInfo, describe_target
from tests.integration.conftest import make_target, train_drafters
from tests.integration.test_lossless import PROMPT, TEMPERATURE

if not {"TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"} <= os.environ.keys():
    raise pytest.UsageError(
        "The tests in tests/v2 need an environment of their own, in which vLLM runs on Triton's interpreter: `make test-v2` "
        "makes it and runs them."
    )

from vllm_as_on_gpus.patches import NOTES, notes

RUNNER = "vllm.v1.worker.cpu.model_runner"
"""A subclass of vllm.v1.worker.gpu.model_runner.GPUModelRunner, which it changes nothing of but the warm-up."""


@pytest.fixture(scope="session", autouse=True)
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every model runner is noted. Set before there is any engine: those to come are forked from one process."""
    folder = tmp_path_factory.mktemp("runners")
    os.environ[NOTES] = str(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def earlier(noted: Path) -> set[str]:
    """What other files of tests have noted."""
    return set(notes(noted))


@pytest.fixture(autouse=True)
def speculators(noted: Path, earlier: set[str]) -> Iterator[None]:
    """Every engine that a test, or a fixture of its file, has started took the second runner; and there was one."""
    yield
    found = [note for name, note in notes(noted).items() if name not in earlier]
    assert found, "no engine was started: nothing was tested"
    assert {note["runner"] for note in found} == {RUNNER}, found


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    """A random Llama with three layers."""
    directory = tmp_path_factory.mktemp("v2") / "target"
    make_target(directory)
    return describe_target(directory)


@pytest.fixture(scope="session")
def drafters(target: TargetInfo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, the run directory of a drafter of each kind that vLLM gives to the second runner (Medusa and P-EAGLE it does not)."""
    options = {
        "eagle": {"kind": "eagle"},
        "eagle3": {"kind": "eagle3", "layer_ids": [1, 2, 3]},
        "eagle3-embeddings": {"kind": "eagle3", "layer_ids": [0, 2, 3]},
        "mlp_speculator": {"kind": "mlp_speculator", "n_predict": 3},
        "dflash": {"kind": "dflash", "num_layers": 2, "layer_ids": [1, 2, 3], "block_size": 4},
        "dspark": {"kind": "dspark", "num_layers": 2, "layer_ids": [1, 2, 3], "block_size": 4},
        "dspark-anchor": {
            "kind": "dspark",
            "num_layers": 2,
            "layer_ids": [1, 2, 3],
            "block_size": 3,
            "sample_from_anchor": True,
        },
    }
    folder = tmp_path_factory.mktemp("drafters")
    return train_drafters(target.path, folder, options, prompt=PROMPT, temperature=TEMPERATURE)
