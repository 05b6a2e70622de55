"""Drafters that read the target's states without norming them train as if every layer's were of size one, and are saved for states as they
are."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.batch import Batch
from draftsmith.train.predict import predict
from tests.unit.tiny_run import make_recipe, make_run
from tests.unit.training_runs import at_step, losses_of, run_dir, train, weights_of

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = (2.0**9, 2.0**-6, 1.0)
FUSING = {"draft_vocab_size": 60, "fc_norm": False}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3", **FUSING},
    "p_eagle": {"kind": "p_eagle", **FUSING},
    "p_eagle of two layers": {"kind": "p_eagle", "num_layers": 2, **FUSING},
    "dflash": {"kind": "dflash", "block_size": 4, "draft_vocab_size": 60},
    "dspark": {"kind": "dspark", "block_size": 4, "draft_vocab_size": 60},
}


def options_of(name: str) -> dict[str, Any]:
    return {"drafter": KINDS[name], "epochs": 2, "lr": 3e-3, "muon_lr": 1e-2, "state_dropout": 0.1}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of `folder`, with the states of layers multiplied by `SIZES`."""
    path = tmp_path_factory.mktemp("larger")
    make_run(path, sizes=SIZES)
    return path


@pytest.mark.parametrize("name", KINDS)
def test_the_size_of_a_layer_s_states_does_not_matter(folder: Path, larger: Path, name: str) -> None:
    one, other = run_dir(folder, "scales"), run_dir(larger, "scales")
    figures = [train(where, run, **options_of(name)) for where, run in ((folder, one), (larger, other))]
    assert losses_of(one) == losses_of(other)
    assert losses_of(one)[-1] < losses_of(one)[0]
    assert figures[0]["predicted_acceptance_length"] == figures[1]["predicted_acceptance_length"]
    found, expected = weights_of(other / "checkpoint"), weights_of(one / "checkpoint")
    for key, value in expected.items():
        sizes = torch.tensor(SIZES).repeat_interleave(value.shape[-1] // 3)
        wanted = {"fc.weight": lambda w=value, s=sizes: w / s, "mask_hidden": lambda w=value, s=sizes: w * s}
        assert torch.equal(found[key], wanted.get(key, lambda w=value: w)()), key


@pytest.mark.parametrize("name", KINDS)
def test_what_is_saved_reads_states_as_they_are(larger: Path, name: str) -> None:
    directory = run_dir(larger, "saved")
    figures = train(larger, directory, **options_of(name))
    again = predict(make_recipe(larger, **options_of(name)), directory)
    assert again["predicted_acceptance_length"] == figures["predicted_acceptance_length"]


class Killed(BaseException):
    """Stands for the end of the process."""


def killed() -> None:
    raise Killed


def test_a_resumed_run_keeps_its_scales(larger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = run_dir(larger, "whole"), run_dir(larger, "broken")
    options = {**options_of("dspark"), "save_every_steps": 1}
    train(larger, whole, **options)
    with monkeypatch.context() as patched:
        at_step(4, killed, patched)
        with pytest.raises(Killed):
            train(larger, broken, **options)
    # Were they measured again, on other rows, they would be others.
    monkeypatch.setattr("draftsmith.train.setup._state_scales", lambda data: pytest.fail("measured again"))
    train(larger, broken, **options)
    assert losses_of(broken) == losses_of(whole)
    for key, value in weights_of(whole / "checkpoint").items():
        assert torch.equal(value, weights_of(broken / "checkpoint")[key]), key


def test_norms_need_no_scales(larger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.train.setup._state_scales", lambda data: pytest.fail("measured"))
    options = {**options_of("eagle3"), "drafter": {"kind": "eagle3", "draft_vocab_size": 60}}
    assert train(larger, run_dir(larger, "normed"), **options)["published_epoch"]


def test_states_in_float16_do_not_overflow() -> None:
    """A first token's states are often large, and the scale is that of the others."""
    states = torch.full((1, 2, 4), 8000.0, dtype=torch.float16)
    one = torch.zeros(1, 1)
    batch = Batch(states, one.long(), one, one.long()[0], one.long()[0])
    assert batch.divided([0.0625, 2.0]).hidden_states[0, :, 0].tolist() == [128_000, 4000]
