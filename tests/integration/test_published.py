"""A drafter as its authors publish it, named in a recipe: stock vLLM proposes what the authors' formula says, `fc.bias` included."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli.published import for_serving
from draftsmith.config.loading import load_recipe
from draftsmith.config.methods import Drafter
from draftsmith.convert.formats import FORMATS
from draftsmith.drafters import drafter_class
from draftsmith.drafters.checkpoint import UNKNOWN_TARGET, Checkpoint
from draftsmith.run.weights import in_memory
from draftsmith.serve.proposals import verify_served
from draftsmith.target.tensors import load_target_tensors
from tests.integration.conftest import TINY_HEADS, TINY_HIDDEN, TINY_LAYERS, TINY_VOCAB, make_target, write_recipe

pytestmark = pytest.mark.integration

CONFIG: dict[str, Any] = {
    "layer_ids": [TINY_LAYERS], "hidden_size": TINY_HIDDEN, "intermediate_size": 96, "num_layers": 1, "num_attention_heads": TINY_HEADS,
    "num_key_value_heads": TINY_HEADS, "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 512, "vocab_size": TINY_VOCAB,
    "draft_vocab_size": TINY_VOCAB, "noise": 0.0, "fc_bias": True, "attention_bias": True,
}  # fmt: skip


def test_an_eagle_with_a_bias_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    make_target(tmp_path / "target")
    kind = drafter_class("eagle")
    generator = torch.Generator().manual_seed(3)
    shapes = kind.shapes(kind.config_class.from_dict(CONFIG))
    tensors = {name: torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}
    tensors["fc.bias"] *= 5  # without it, draft tokens would be others
    theirs = Checkpoint("eagle", CONFIG, dict(UNKNOWN_TARGET), torch.arange(TINY_VOCAB), in_memory(tensors)).check()
    (tmp_path / "theirs").mkdir()
    FORMATS["eagle"].write(theirs, tmp_path / "theirs")
    path = write_recipe(
        tmp_path, tmp_path / "target", ["Hello"], ["Hi"],
        serve={"method": {"method": "eagle", "model": str(tmp_path / "theirs")}},
    )  # fmt: skip
    method = for_serving(load_recipe(path)).serve.method
    assert isinstance(method, Drafter)
    copy = Path(method.model or "")
    assert copy.parent == tmp_path / "cache" / "drafters"
    found = verify_served(copy, theirs.drafter(load_target_tensors(tmp_path / "target")), tmp_path / "target")
    assert min(found["proposals"]) > 100
