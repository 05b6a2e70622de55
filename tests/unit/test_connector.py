"""What the connector copies from a GPU is what it reads on a CPU, and no more memory is pinned for it than is said."""

import contextlib
import fcntl
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from draftsmith.extract.byte_limit import ByteLimit
from draftsmith.extract.gpu_copy import GpuCopier, Ring
from draftsmith.extract.handoff import FileLocks, HandoffWriter, take_handoff_file
from draftsmith.run.errors import UserError

connector = pytest.importorskip("draftsmith.extract.connector")

BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN = 7, 4, 3, 8


class PretendedCuda:
    """`torch.cuda` where there is none: everything has happened as soon as it is asked for; what was asked is noted."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def Stream(self, device: torch.device) -> Any:
        return mock.Mock(wait_stream=lambda other: self.said.append(f"wait for {other}"))

    def current_stream(self, device: torch.device) -> str:
        return "the model's stream"

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.said.append("copy")
        yield

    def Event(self, *, blocking: bool) -> Any:
        assert blocking, "a thread that spins takes the interpreter from the engine's"
        return mock.Mock(record=lambda: self.said.append("record"), synchronize=lambda: self.said.append("synchronize"))


def cache(layout: str, dtype: torch.dtype) -> torch.Tensor:
    """[blocks, layers, block size, hidden] as vLLM has it, whatever lies side by side in memory."""
    numbers = torch.arange(BLOCKS * BLOCK_SIZE * LAYERS * HIDDEN).to(dtype)
    if layout == "a token's layers":  # what `get_required_kvcache_layout` asks for
        return numbers.view(BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN).transpose(1, 2)
    return numbers.view(BLOCKS, LAYERS, BLOCK_SIZE, HIDDEN)


def gpu_copier(of: torch.Tensor, longest: int = 28) -> tuple[GpuCopier, PretendedCuda]:
    cuda = PretendedCuda()
    return GpuCopier(of, longest, cuda, lambda size: torch.empty(size, dtype=torch.uint8)), cuda


def states_connector(of: torch.Tensor) -> Any:
    """A connector's worker side."""
    made = object.__new__(connector.HiddenStatesConnector)
    made._cache, made._block_size, made._copier, made._running = of, BLOCK_SIZE, None, {}
    made._threads, made._unwritten = ThreadPoolExecutor(2), ByteLimit(1)
    return made


@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("layout", ["a token's layers", "a layer's tokens"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_from_a_gpu(tokens: int, layout: str, dtype: torch.dtype) -> None:
    """Which slots of which blocks are gathered, and in which order."""
    of = cache(layout, dtype)
    expected = torch.cat([of[block].transpose(0, 1) for block in (5, 0, 3)])[:tokens]
    save = mock.Mock(token_ids=list(range(tokens)), block_ids=[5, 0, 3])
    assert torch.equal(states_connector(of)._on_cpu(save), expected)
    copier, cuda = gpu_copier(of)
    found = copier.start([5, 0, 3], tokens)
    assert found.states.dtype == dtype
    assert found.states.is_contiguous()
    assert torch.equal(found.states, expected)
    assert cuda.said == ["wait for the model's stream", "copy", "record"]


@pytest.mark.parametrize("form", ["none", "lossless"])
def test_a_gpu_s_states_are_written_and_their_room_is_free_again(form: Any, tmp_path: Path) -> None:
    of = cache("a token's layers", torch.float32)
    ours = states_connector(of)
    ours._copier, cuda = gpu_copier(of)
    ours._writer = HandoffWriter(tmp_path, reuse_files=True)
    for name in ("one", "two"):
        ours._start_copy(connector._Save(name, f"{name}.safetensors", [7, 8, 9], [2], form))
    for name in ("one", "two"):
        ours._running.pop(name).result()
        tokens, states = take_handoff_file(tmp_path / f"{name}.safetensors")
        assert tokens.tolist() == [7, 8, 9]
        assert tuple(states.shape) == (3, LAYERS, HIDDEN)
    assert cuda.said.count("synchronize") == 2
    assert not ours._copier._ring._taken

    of[2, 0, 0, 0] = torch.inf
    ours._start_copy(connector._Save("bad", "bad.safetensors", [7], [2], form))
    with pytest.raises(ValueError, match="request bad"):
        ours._running["bad"].result()
    assert not ours._copier._ring._taken, "what could not be written leaves no room taken"


def test_a_cpu_s_states_never_come_near_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock(side_effect=AssertionError))
    ours = states_connector(cache("a token's layers", torch.float32))
    ours._writer = HandoffWriter(tmp_path, reuse_files=True)
    for number in range(3):
        ours._start_copy(connector._Save(str(number), f"{number}.safetensors", [7], [number], "none"))
    for writing in ours._running.values():
        writing.result()
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_the_longest_sequence_has_room_and_torch_rounds_nothing_up() -> None:
    asked: list[int] = []

    def pinned(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(0, dtype=torch.uint8)

    of = torch.empty(2, 4, 16, 4096, dtype=torch.bfloat16, device="meta")
    GpuCopier(of, 4096, PretendedCuda(), pinned)
    GpuCopier(of, 131072, PretendedCuda(), pinned)
    assert asked == [2**30, 2**33]
    assert asked[1] >= 131072 * 4 * 4096 * 2


@pytest.mark.parametrize("seed", range(20))
def test_regions_of_a_ring_never_overlap(seed: int) -> None:
    chooser = random.Random(seed)
    ring = Ring(torch.zeros(64 * 256, dtype=torch.uint8))
    held: list[tuple[Any, int]] = []
    for number in range(1, 200):
        size = chooser.choice([1, 256, 700, 5000, 64 * 256])
        while ring._room(-(-size // 256) * 256) is None:
            region, mark = held.pop(chooser.randrange(len(held)))
            assert (region.memory == mark).all(), "somebody else wrote into it"
            region.give_back()
        region = ring.take(size)
        assert len(region.memory) >= size
        region.memory.fill_(number % 251)
        held.append((region, number % 251))
    with pytest.raises(ValueError, match="bytes do not fit a buffer"):
        ring.take(64 * 256 + 1)


def test_who_finds_no_room_waits_for_it() -> None:
    ring = Ring(torch.zeros(4 * 256, dtype=torch.uint8))
    first, second = ring.take(2 * 256), ring.take(2 * 256)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(ring.take(3 * 256)))
    waiting.start()
    second.give_back()
    assert not found, "the first is still in the way"
    first.give_back()
    waiting.join(30)
    assert found[0].start == 0


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


def test_the_words_of_vllm_s_example_connector(tmp_path: Path) -> None:
    """Its clients find the path in the answer, and a lock that is free once the file is written; they choose neither."""
    made = object.__new__(connector.HiddenStatesConnector)
    made._names_from_requests, made._finished, made._locks = False, [], FileLocks()
    made._as_vllm, made._directory = True, str(tmp_path)
    asked = {"hidden_states_path": "/elsewhere/evil.safetensors", "draftsmith_name": "mine"}
    for number, (params, tokens) in enumerate(
        [(None, [1, 2]), (asked, [1, 2]), (asked | {"include_output_tokens": True}, [1, 2, 3])]
    ):
        request = SimpleNamespace(
            request_id=str(number), kv_transfer_params=params, status=None, prompt_embeds=None, prompt_token_ids=[1, 2],
            all_token_ids=[1, 2, 3, 4],
        )  # fmt: skip
        kept, answer = made.request_finished(request, [0])
        assert kept
        assert made._finished[-1].token_ids == tokens
        path = Path(answer["hidden_states_path"])
        assert (path.parent, path.name) == (tmp_path, answer["draftsmith_handoff_file"])
        with open(f"{path}.lock") as lock:
            for finished in (None, {"another"}):
                made.update_connector_output(SimpleNamespace(finished_sending=finished))
                with pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            made.update_connector_output(SimpleNamespace(finished_sending={str(number)}))
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert len(list(tmp_path.iterdir())) == 3
