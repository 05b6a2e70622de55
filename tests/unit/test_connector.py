"""The connector writes the states that vLLM handed over, from a CPU as from a GPU, and takes no more memory than is said."""

import fcntl
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from draftsmith.extract.byte_limit import ByteLimit
from draftsmith.extract.gpu_copy import GpuCopier, Ring
from draftsmith.extract.handoff import FileLocks, HandoffWriter, take_handoff_file
from draftsmith.extract.states_pool import StatesPool
from draftsmith.run.errors import UserError
from draftsmith.serve import plugin
from draftsmith.store.codec import EncodedStates, decode

connector = pytest.importorskip("draftsmith.extract.connector")

BLOCKS, BLOCK_SIZE, LAYERS, HIDDEN = 7, 4, 3, 8


class PretendedCuda:
    """`torch.cuda` where there is none: everything has happened as soon as it is asked for; what was asked is noted."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def Event(self, *, blocking: bool) -> Any:
        assert blocking, "a thread that spins takes the interpreter from the engine's"
        return mock.Mock(record=lambda: self.said.append("record"), synchronize=lambda: self.said.append("synchronize"))


def pool(dtype: torch.dtype = torch.float32, blocks: int = BLOCKS) -> StatesPool:
    return StatesPool(blocks, BLOCK_SIZE, LAYERS, HIDDEN, dtype)


def gpu_copier(of: StatesPool) -> tuple[GpuCopier, PretendedCuda]:
    cuda = PretendedCuda()
    return GpuCopier(of, 1, 1, cuda, lambda size: torch.empty(1 << 16, dtype=torch.uint8)), cuda


def states_connector(directory: Path, *, gpu: bool = False) -> Any:
    """A connector's worker side."""
    made = object.__new__(connector.HiddenStatesConnector)
    made._pool, made._copier, made._running, made._connector_metadata = pool(), None, {}, None
    made._threads, made._unwritten = ThreadPoolExecutor(2), ByteLimit(1)
    made._writer = HandoffWriter(directory, reuse_files=True)
    if gpu:
        made._copier, made.cuda = gpu_copier(made._pool)
    return made


def some_states(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, LAYERS, HIDDEN).to(dtype)


def slots(block_ids: list[int], positions: range) -> torch.Tensor:
    return torch.tensor([block_ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions])


def step(worker: Any, saves: list[Any], dropped: list[int], *rows: Any) -> set[str]:
    """A step of vLLM's second runner, with (blocks, positions, states) of each request; returns whose blocks are given back."""
    worker.bind_connector_metadata(connector._Metadata(saves, dropped))
    if rows:
        worker.take(
            torch.cat([slots(blocks, positions) for blocks, positions, _ in rows]), torch.cat([row[-1] for row in rows])
        )
    done = worker.get_finished(set())[0] or set()
    worker.clear_connector_metadata()
    return done


def decoded(states: EncodedStates) -> torch.Tensor:
    if states.form == "none":
        return torch.frombuffer(bytearray(states.data), dtype=torch.float32).view(states.shape)
    return decode(states.data, states.form, states.shape, torch.float32)


def finish(worker: Any, *saves: Any) -> None:
    waiting = {save.request_id for save in saves} - step(worker, list(saves), [])
    while waiting:
        waiting -= step(worker, [], [])


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("form", ["none", "lossless"])
def test_states_of_interleaved_requests(form: Any, gpu: bool, tmp_path: Path) -> None:
    """Prefilled in chunks and decoded side by side, one of them preempted, another dropped; blocks go from one to the next."""
    worker = states_connector(tmp_path, gpu=gpu)
    one, two = some_states(11), some_states(6)
    step(worker, [], [], ([5, 0, 3], range(7), one[:7]))
    # Two's first blocks are taken away after three tokens, and it begins again with others; padding rows hold anything.
    step(worker, [], [], ([5, 0, 3], range(7, 8), one[7:8]), ([1], range(3), some_states(3)))
    worker.take(torch.tensor([-1, -1]), some_states(2))
    step(worker, [], [], ([5, 0, 3], range(8, 11), one[8:]), ([6, 1], range(6), two))
    finish(worker, connector._Save("two", "two.safetensors", list(range(6)), [6, 1], form))
    finish(worker, connector._Save("one", "one.safetensors", list(range(11)), [5, 0, 3, 4], form))
    for name, expected in (("one", one), ("two", two)):
        tokens, states = take_handoff_file(tmp_path / f"{name}.safetensors")
        assert tokens.tolist() == list(range(len(expected)))
        assert torch.equal(decoded(states), expected)
    # A request that was canceled leaves nothing, and who gets its block in the same step keeps what it writes there.
    step(worker, [], [], ([2], range(4), some_states(4)))
    three = some_states(2)
    step(worker, [], [2], ([2], range(2), three))
    finish(worker, connector._Save("three", "three.safetensors", [7, 8], [2], form))
    assert torch.equal(decoded(take_handoff_file(tmp_path / "three.safetensors")[1]), three)
    assert (worker._pool._places < 0).all()
    assert not worker._pool._known.any()
    assert sorted(worker._pool._free) == list(range(BLOCKS))
    if gpu:
        assert worker.cuda.said.count("record") == worker.cuda.said.count("synchronize") == 6
        assert not worker._copier._ring._taken


def test_a_dropped_block_is_released_after_what_is_on_its_way_to_it(tmp_path: Path) -> None:
    """Else states of the request that was dropped stay, and pass for the next one's."""
    worker, arrived = states_connector(tmp_path, gpu=True), threading.Event()
    late = mock.Mock(synchronize=lambda: arrived.wait(60))
    with mock.patch.object(worker.cuda, "Event", return_value=late):
        step(worker, [], [], ([2], range(4), some_states(4)))
    worker.bind_connector_metadata(connector._Metadata([], [2]))
    arrived.set()
    worker._copier.last.result()
    assert not worker._pool._known.any()
    assert (worker._pool._places < 0).all()
    assert sorted(worker._pool._free) == list(range(BLOCKS))


@pytest.mark.parametrize("gpu", [False, True])
def test_wrong_states_end_the_engine(gpu: bool, tmp_path: Path) -> None:
    """Not finite; and never handed over, where another request's would be in their place."""
    worker = states_connector(tmp_path, gpu=gpu)
    step(worker, [], [], ([2], range(4), some_states(4)))
    finish(worker, connector._Save("before", "before.safetensors", [1, 2, 3, 4], [2], "none"))
    step(worker, [], [], ([4], range(1, 4), some_states(3)))
    with pytest.raises(ValueError, match=r"did not hand over the states of all 4 tokens \(request missing\)"):
        finish(worker, connector._Save("missing", "missing.safetensors", [1, 2, 3, 4], [4], "none"))
    worker._running.clear()
    step(worker, [], [], ([1], range(1), some_states(1) * torch.inf))
    with pytest.raises(ValueError, match="request bad"):
        finish(worker, connector._Save("bad", "bad.safetensors", [7], [1], "lossless"))


def test_a_step_that_fails_on_its_way_ends_the_engine(tmp_path: Path) -> None:
    worker = states_connector(tmp_path, gpu=True)
    step(worker, [], [], ([2], range(4), some_states(4)))
    worker.take(torch.tensor([BLOCKS * BLOCK_SIZE]), some_states(1))  # a block that there is not
    step(worker, [], [], ([3], range(1), some_states(1)))
    with pytest.raises(IndexError):
        finish(worker, connector._Save("any", "any.safetensors", [1, 2, 3, 4], [2], "none"))
    assert not worker._copier._ring._taken, "what could not be kept leaves no room taken"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_that_of_the_requests_at_once(dtype: torch.dtype) -> None:
    """A cache of a million blocks is reserved, and what is used again is the memory of released blocks."""
    of = pool(dtype, blocks=1_000_000)
    for first in range(0, 300, 3):
        for block in range(first, first + 3):
            of.put(slots([block], range(4)), expected := some_states(4, dtype))
        assert torch.equal(of.get([block], 4), expected)
        of.release(list(range(first, first + 3)))
    assert np.flatnonzero(of._states[:10].float().abs().amax((1, 2, 3)).numpy()).tolist() == [0, 1, 2]


def test_a_cpu_s_states_never_come_near_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock(side_effect=AssertionError))
    worker = states_connector(tmp_path)
    saves = [connector._Save(str(number), f"{number}.safetensors", [7], [number], "none") for number in range(3)]
    for number in range(3):
        step(worker, [], [], ([number], range(1), some_states(1)))
    finish(worker, *saves)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_the_largest_step_has_room_and_torch_rounds_nothing_up() -> None:
    asked: list[int] = []

    def pinned(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(0, dtype=torch.uint8)

    token = 4 * 4096 * 2
    for tokens in (8192, 131072):
        GpuCopier(pool(), tokens * token, tokens, PretendedCuda(), pinned)
    assert asked == [2**30, 2**33]
    assert asked[1] >= 131072 * (token + 8)


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
    waiting.join(0.1)
    assert waiting.is_alive(), "the first is still in the way"
    first.give_back()
    waiting.join(30)
    assert found[0].start == 0


def test_extraction_is_refused_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

    monkeypatch.delattr(CacheOnlyAttentionLayer, "hands_states_over", raising=False)
    with pytest.raises(UserError, match="Let VLLM_PLUGINS name `draftsmith`"):
        connector._require_plugin()
    monkeypatch.setattr(CacheOnlyAttentionLayer, "hands_states_over", True, raising=False)
    connector._require_plugin()


def test_the_plugin_hands_over_with_our_connector_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        def __init__(self) -> None:
            self.impl = SimpleNamespace(do_kv_cache_update="vLLM's")

        def get_kv_cache_spec(self, vllm_config: Any) -> str:
            return "of states"

    module: Any = ModuleType("vllm.model_executor.models.extract_hidden_states")
    module.CacheOnlyAttentionLayer = Layer
    plugin._in_extraction(module)
    monkeypatch.setattr(plugin, "_whole_sequence_spec", lambda vllm_config, apart_from: "a target layer's")
    assert module.CacheOnlyAttentionLayer.hands_states_over
    for path, expected in ((None, "of states"), ("other", "of states"), (connector.__name__, "a target layer's")):
        layer = Layer()
        config = SimpleNamespace(kv_transfer_config=path and SimpleNamespace(kv_connector_module_path=path))
        assert layer.get_kv_cache_spec(config) == expected
        assert (layer.impl.do_kv_cache_update == "vLLM's") == (expected == "of states")
    taken: list[Any] = []
    monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: False)
    monkeypatch.setattr(
        "vllm.distributed.kv_transfer.get_kv_transfer_group",
        lambda: SimpleNamespace(take=lambda slots, states: taken.append((slots, states))),
    )
    layer.impl.do_kv_cache_update(layer, "states", "cache", "slots")
    monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: True)
    layer.impl.do_kv_cache_update(layer, "states", "cache", "slots")
    assert taken == [("slots", "states")]


def test_which_layer_s_slots_the_states_have() -> None:
    """One that keeps all tokens; of a target with sliding windows alone, such a cache is made for them."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from tests.benchmarks.bench_tokens import _config

    sizes: Any = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    sliding, full = SlidingWindowSpec(**sizes, sliding_window=32), FullAttentionSpec(**sizes)
    mamba = MambaSpec(shapes=((4,),), dtypes=(torch.float32,), block_size=64)

    def chosen(**specs: Any) -> Any:
        return plugin._whole_sequence_spec(_config(specs, hybrid=True), apart_from=type(None))

    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert chosen(a=mamba, b=sliding, c=full) == full
    assert chosen(a=latent) == latent
    assert chosen(a=sliding) == FullAttentionSpec(**sizes, sliding_window=32)
    with pytest.raises(RuntimeError, match="attention layers"):
        chosen(a=mamba)

    def group(*specs: Any) -> tuple[int, int]:
        groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
        groups[-1].layer_names.append("cache_only_layers.4")
        return connector._states_group(SimpleNamespace(kv_cache_groups=groups))  # type: ignore[no-any-return]

    assert group(sliding, full) == (1, 16)
    with pytest.raises(ValueError, match="no KV cache group of whole sequences"):
        group(full, sliding)


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
            request_id=str(number),
            kv_transfer_params=params,
            status=None,
            prompt_embeds=None,
            prompt_token_ids=[1, 2],
            all_token_ids=[1, 2, 3, 4],
        )
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


@pytest.mark.parametrize("gpu", [False, True])
def test_states_of_a_gpu_go_through_a_copier(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for a step's states; and on a GPU's machine the writing threads need not give way to the model."""
    monkeypatch.setattr(connector, "current_platform", SimpleNamespace(is_cpu=lambda: not gpu))
    monkeypatch.setattr(connector, "_require_plugin", lambda: None)
    monkeypatch.setattr(connector, "_states_group", lambda _: (0, BLOCK_SIZE))
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 0)
    layer = SimpleNamespace(num_heads=LAYERS, head_size=HIDDEN, kv_cache_torch_dtype=torch.bfloat16)
    monkeypatch.setattr(connector, "get_layers_from_vllm_config", lambda *_: {"cache": layer})
    copiers: list[Any] = []
    monkeypatch.setattr(connector, "GpuCopier", lambda *given: copiers.append(given))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=10),
        kv_transfer_config=SimpleNamespace(
            get_from_extra_config=lambda key, default: {"handoff_directory": str(tmp_path)}.get(key, default)
        ),
    )
    made = connector.HiddenStatesConnector(config, connector.KVConnectorRole.WORKER, SimpleNamespace(num_blocks=BLOCKS))
    made.register_kv_caches({"cache": SimpleNamespace(is_cuda=gpu)})
    assert (made._threads._initializer is None) == gpu
    assert [given[1:] for given in copiers] == ([(10 * LAYERS * HIDDEN * 2, 10)] if gpu else [])
