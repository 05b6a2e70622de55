"""Training's arithmetic on a device, against float64 on the CPU.

The device is named by DRAFTSMITH_TEST_DEVICE, `cpu` where it is absent: `scripts/gpu_check.sh` runs this file on a GPU.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.flex import FlexContext
from draftsmith.drafters.tiles import Tiles
from draftsmith.extract import transformers_backend
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.transformers_backend import run_transformers
from draftsmith.store.codec import decode
from draftsmith.store.reader import Store
from draftsmith.train import distributed
from draftsmith.train import loss as loss_module
from draftsmith.train.loss import ChainLoss
from draftsmith.train.muon import Muon, orthogonalize
from draftsmith.train.packing import pack
from draftsmith.train.predict import open_run, predict
from draftsmith.train.train import run_train
from tests.unit.flex_on_cpu import use_flex
from tests.unit.test_eagle3 import make_sequence
from tests.unit.test_loss import make_batch, make_loss
from tests.unit.test_muon import ALIKE, assert_orthogonalized, with_spectrum
from tests.unit.tiny_run import make_recipe, make_run

DEVICE = torch.device(os.environ.get("DRAFTSMITH_TEST_DEVICE", "cpu"))
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _the_device_is_there() -> None:
    if DEVICE.type == "cuda":
        assert torch.cuda.is_available(), "DRAFTSMITH_TEST_DEVICE asks for a GPU, and torch sees none"
        assert not torch.backends.cuda.matmul.allow_tf32, "float32 must not mean TF32"


def test_training_uses_the_device() -> None:
    from accelerate import Accelerator

    assert Accelerator().device.type == DEVICE.type


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 192), (300, 24), (576, 1728)])
def test_orthogonalized_matrices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = with_spectrum(shape, lambda i: 1 / i)
    (found,) = orthogonalize([matrix.to(DEVICE)], dtype)
    assert found.device.type == DEVICE.type
    assert_orthogonalized(found.cpu(), matrix, alike=ALIKE if dtype == torch.bfloat16 else 0.9999)


@pytest.mark.parametrize("dtype", DTYPES)
def test_muon_minimizes_a_quadratic(dtype: torch.dtype) -> None:
    """A wrong update would show in one step; here are fifty."""
    torch.manual_seed(0)
    wanted = torch.randn(48, 96)
    weight = nn.Parameter(torch.zeros(48, 96, device=DEVICE))
    optimizer = Muon([weight], lr=0.5, dtype=dtype)
    errors = []
    for _ in range(50):
        error = (weight - wanted.to(DEVICE)).pow(2).mean()
        weight.grad = None
        error.backward()
        optimizer.step()
        errors.append(float(error))
    assert errors[-1] < 0.05 * errors[0]
    assert max(errors) <= errors[0] * 1.01


def attended(visible: Tiles | FlexContext, given: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Results and gradients for queries, own scores, keys and values, of float64 on the CPU; `dtype` by autocast."""
    given = [x.detach().requires_grad_() for x in given]
    device = given[0].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        mixed, weights = visible.attend(given[0], given[1], (given[2], given[3]))
    toward = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x) for x in (mixed, weights)]
    gradients = torch.autograd.grad([mixed, weights], given, toward)
    return [x.detach().cpu().double() for x in (mixed, weights, *gradients)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(2, 4, 64), (3, 3, 64), (1, 1, 128), (2, 7, 16)])
def test_attention(kv_heads: int, group: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention's kernels, whose sizes differ from call to call, against tiles."""
    if DEVICE.type == "cpu":
        use_flex(monkeypatch)
    for lengths in ([(400, 150), (30, 9), (33, 10)], [(300, 20)], [(90, 40), (128, 1)]):
        batch = pack([make_sequence(*each, seed) for seed, each in enumerate(lengths)], steps=2)
        every_row = torch.arange(len(batch.documents))
        for queries, window in ((batch.loss_weights.sum(1).nonzero()[:, 0], None), (every_row, None), (every_row, 70)):
            torch.manual_seed(0)
            given = [torch.randn(len(queries), kv_heads, group, n, dtype=torch.float64) for n in (size, 3)]
            given[0] /= size**0.5
            given += torch.randn(2, kv_heads, len(batch.documents), size, dtype=torch.float64).unbind()
            exact = attended(Tiles(batch, queries, kv_heads * group, window=window), given, torch.float64)
            context = FlexContext(batch.to(DEVICE), queries.to(DEVICE), window=window)
            found = attended(context, [x.float().to(DEVICE) for x in given], dtype)
            for one, other in zip(found, exact, strict=True):
                # Hopper's products in float32 kernels are of three TF32 parts, or of IEEE numbers.
                assert (one - other).norm() <= (2e-5 if dtype == torch.float32 else 0.02) * other.norm()


def on_device(loss: ChainLoss, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients, computed on the device in float32 or under autocast; float64 on the CPU."""
    moved = copy.deepcopy(loss).float().to(DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        value = moved(batch.to_dtype(torch.float32).to(DEVICE)).loss
    value.backward()
    gradients = [p.grad.cpu().double() for p in moved.drafter.parameters() if p.grad is not None]
    return value.detach().cpu().double(), gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cross_entropy", "kl", "total_variation"])
def test_loss_and_gradients(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks of rows, so that sums over chunks are tested."""
    monkeypatch.setattr(loss_module, "_LEAST_ROWS", 4)
    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(loss_module, "_LOGITS_AT_ONCE_ON_GPU", 1)
    batch = make_batch()
    loss = make_loss(loss=name)
    exact = loss(batch).loss
    exact.backward()
    expected = [p.grad for p in loss.drafter.parameters() if p.grad is not None]
    loss.zero_grad()
    value, gradients = on_device(loss, batch, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(value, exact.detach(), rtol=tolerance, atol=tolerance)
    assert len(gradients) == len(expected) > 5
    for found, wanted in zip(gradients, expected, strict=True):
        assert wanted is not None
        alike = F.cosine_similarity(found.flatten(), wanted.flatten(), dim=0)
        assert alike > (0.9999 if dtype == torch.float32 else 0.98)
        torch.testing.assert_close(found.norm(), wanted.norm(), rtol=5 * tolerance, atol=1e-6)


KINDS: dict[str, dict] = {
    "eagle": {"drafter": {"kind": "eagle"}, "lr": 1e-2, "muon_lr": 3e-2},
    "eagle3": {
        "drafter": {"kind": "eagle3", "draft_vocab_size": 60},
        "loss_vocab_size": 40,
        "lr": 1e-2,
        "muon_lr": 3e-2,
    },
    "p_eagle": {
        "drafter": {"kind": "p_eagle", "num_layers": 2, "num_depths": 3, "draft_vocab_size": 60},
        "lr": 1e-2,
        "muon_lr": 3e-2,
    },
    "dflash": {
        "drafter": {"kind": "dflash", "block_size": 4, "draft_vocab_size": 60},
        "loss_vocab_size": 40,
        "lr": 1e-2,
        "muon_lr": 3e-2,
    },
    "dspark": {
        "drafter": {"kind": "dspark", "block_size": 4, "markov_rank": 4, "draft_vocab_size": 60},
        "loss_vocab_size": 40,
        "lr": 1e-2,
        "muon_lr": 3e-2,
    },
    "medusa": {"drafter": {"kind": "medusa", "num_heads": 2}, "lr": 1e-2},
    "mlp_speculator": {"drafter": {"kind": "mlp_speculator"}, "ttt_loss_decay": 1.0, "train_lm_head": True, "lr": 1e-2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("on-device")
    make_run(path)
    return path


def trained(folder: Path, run: Path, kind: str, precision: str) -> dict[str, float]:
    """Predicted acceptance lengths."""
    run.mkdir(parents=True)
    (run / "store").symlink_to(folder / "run" / "store")
    recipe = make_recipe(folder, **KINDS[kind], precision=precision)
    found: dict[str, float] = run_train(recipe, run)["predicted_acceptance_length"]
    return found


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> dict[str, dict[str, float]]:
    """Predictions of every kind trained on the CPU in float32, in a process that sees no GPU."""
    program = (
        "import json, sys; from pathlib import Path; from tests.unit.test_on_device import KINDS, trained; "
        "folder = Path(sys.argv[1]); "
        "found = {kind: trained(folder, folder / 'on-cpu' / kind, kind, 'float32') for kind in KINDS}; "
        "print(); print(json.dumps(found))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_whole_training(
    folder: Path, on_cpu: dict[str, dict[str, float]], tmp_path: Path, kind: str, precision: str
) -> None:
    """Initialization, loop, predictions and the checkpoint. On a CPU in float32 both trainings are the same one, so this shows only
    that a training repeats itself."""
    found = trained(folder, tmp_path / "run", kind, precision)
    assert found.keys() == on_cpu[kind].keys()
    for k, expected in on_cpu[kind].items():
        # 10%: two other draft tokens of 34 held-out rows are 0.06.
        assert found[k] == pytest.approx(expected, rel=1e-6 if precision == "float32" and DEVICE.type == "cpu" else 0.1)


def test_float32_does_not_mean_tf32_in_training(folder: Path, tmp_path: Path) -> None:
    """NVIDIA's containers begin with TF32 (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        trained(folder, tmp_path / "run", "eagle3", "float32")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_predictions_of_a_finished_run(folder: Path, tmp_path: Path, kind: str) -> None:
    """`draftsmith predict` puts the drafter, the batches and the target's head on the device, as training does."""
    found = trained(folder, tmp_path / "run", kind, "float32")
    recipe = make_recipe(folder, **KINDS[kind], precision="float32")
    assert open_run(recipe, tmp_path / "run", None).device.type == DEVICE.type
    greedy = predict(recipe, tmp_path / "run")
    assert greedy["predicted_acceptance_length"] == pytest.approx(found, abs=1e-3)
    sampled = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"temperature": 0.8})})
    lengths = predict(sampled, tmp_path / "run")["predicted_acceptance_length"]
    assert lengths.keys() == found.keys()
    assert lengths["1"] > 1


@pytest.mark.parametrize("mode", ["generate", "prefill"])
def test_states_by_transformers_are_on_the_cpu_again(folder: Path, mode: str) -> None:
    """`extract.backend: transformers` computes on the device what the store holds."""
    recipe = make_recipe(folder)
    recipe = recipe.model_copy(update={"extract": recipe.extract.model_copy(update={"mode": mode})})
    stored = Store(folder / "run" / "store")
    requests = [
        ExtractRequest(
            one.sample_id,
            one.held_out,
            one.token_ids[:6].tolist() if mode == "generate" else one.token_ids.tolist(),
            18,
        )
        for one in (stored[row] for row in range(3))
    ]
    layer_ids = stored.identity.layer_ids
    for row, found in enumerate(run_transformers(recipe, folder / "target", layer_ids, requests)):
        expected = stored[row]
        kept = len(expected.hidden_states)
        assert found.saved_token_ids.device.type == "cpu"
        assert found.saved_token_ids[:kept].tolist() == expected.token_ids[:kept].tolist()
        kept_states = found.states
        states = decode(kept_states.data, kept_states.form, kept_states.shape, torch.float32)
        torch.testing.assert_close(states[:kept], expected.hidden_states, rtol=1e-3, atol=1e-3)


class Taken(Exception):
    """With the device that is taken."""


def take(device: object) -> None:
    raise Taken(device)


@pytest.mark.parametrize("gpu", [False, True])
def test_transformers_take_the_gpu_that_is_there(folder: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(transformers_backend, "reference_model", lambda *_, **__: SimpleNamespace(to=take))
    with pytest.raises(Taken, match="cuda" if gpu else "cpu"):
        list(run_transformers(make_recipe(folder), folder / "target", (1,), []))


@pytest.mark.parametrize("gpu", [False, True])
def test_predictions_take_the_gpu_that_is_there(folder: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SimpleNamespace(drafter=lambda tensors: SimpleNamespace(to=take))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("draftsmith.train.predict.Checkpoint.load", lambda directory: saved)
    with pytest.raises(Taken, match="cuda" if gpu else "cpu"):
        open_run(make_recipe(folder), folder / "run", None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_drafter_is_sharded_over_the_devices_that_training_takes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded: list[Any] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: None)
    monkeypatch.setattr(distributed, "_KEPT_ALIVE", [])
    monkeypatch.setattr(distributed, "init_device_mesh", lambda *mesh: mesh)
    monkeypatch.setattr(distributed, "fully_shard", lambda module, mesh: sharded.append((module, mesh)))
    accelerator: Any = SimpleNamespace(num_processes=4, device=torch.device(device))
    drafter = nn.Linear(2, 2)
    assert distributed.prepare(accelerator, drafter, shard=True) is drafter
    assert sharded == [(drafter, (device, (4,)))]
