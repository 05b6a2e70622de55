"""What the connector copies from a GPU is what it reads on a CPU; what it refuses."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from draftsmith.errors import UserError

connector = pytest.importorskip("draftsmith.extract.connector")


@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_from_a_gpu(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the calls to CUDA taken away: which slots of which blocks are gathered, and in which order."""
    block_size, layers, hidden = 4, 3, 8
    reader = object.__new__(connector.HiddenStatesConnector)
    # As vLLM lays it out: in memory all layers' states of a token are side by side.
    in_memory = torch.arange(7 * block_size * layers * hidden).view(7, block_size, layers, hidden).to(dtype)
    reader._cache, reader._block_size, reader._stream = in_memory.transpose(1, 2), block_size, None
    save = mock.Mock(token_ids=list(range(tokens)), block_ids=[5, 0, 3])
    expected = torch.cat([in_memory[block] for block in (5, 0, 3)])[:tokens]
    assert torch.equal(reader._on_cpu(save), expected)

    empty = torch.empty

    def unpinned(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return empty(*arguments, **named)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    found, copied = reader._copy_from_gpu(save)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    copied.record.assert_called_once()
    reader._stream.wait_stream.assert_called_once()  # the model's, which may still be writing


def test_embeddings_are_refused_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.interfaces import EagleModelMixin

    def config(*layer_ids: int) -> Any:
        hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=list(layer_ids))
        draft_model_config = SimpleNamespace(hf_config=hf_config)
        return SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft_model_config))

    monkeypatch.delattr(EagleModelMixin, "keeps_embeddings", raising=False)
    connector._require_true_embeddings(config(1, 30))
    with pytest.raises(UserError, match="Let VLLM_PLUGINS name `draftsmith`"):
        connector._require_true_embeddings(config(0, 30))
    monkeypatch.setattr(EagleModelMixin, "keeps_embeddings", True, raising=False)
    connector._require_true_embeddings(config(0, 30))
