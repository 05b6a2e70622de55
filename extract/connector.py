"""A vLLM KV connector that hands over the target's hidden states of each finished request in a file.

vLLM's `extract_hidden_states` method would keep the chosen layers' states in the KV cache. Our vLLM plugin has it hand over each
step's states instead, and this connector keeps them in ordinary memory, in a pool with the blocks and slots of a layer of the
target that attends to whole sequences: vLLM's own block table then says where a request's states are, in chunks and after
preemption too. When a request finishes, the connector gathers its states from the pool, checks and encodes them, and writes them
to the handoff directory, where the driver takes the file.

    scheduler process:  request_finished -> build_connector_meta  (which blocks hold which tokens)
    worker process:     take             -> each step's states into the pool
                        get_finished     -> gather, encode; in a thread: write, rename into place

States are encoded here, at once, because passes over memory dominate the cost: less is written and read afterwards, and every
engine encodes its own.

The worker process learns of a finished request in the engine's next step. A server's engine takes that step by itself; a
program that steps an engine must keep stepping until the file is there.

The connector also works in vLLM's own server (docs/extraction-server.md). There, clients write `kv_transfer_params` as they
like: they learn the name of their file from the answer and cannot choose it, and the files hold unencoded states.

A handoff file (extract/handoff.py) covers the tokens that the target read. The last sampled token was never read.
"""

from __future__ import annotations

import secrets
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from draftsmith.extract.byte_limit import ByteLimit
from draftsmith.extract.gpu_copy import GpuCopier
from draftsmith.extract.handoff import FileLocks, HandoffWriter, handoff_file
from draftsmith.extract.states_pool import StatesPool
from draftsmith.run.errors import UserError
from draftsmith.run.process import lower_priority
from draftsmith.store.codec import EncodedStates, Form, encode_states

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Keys of a request's `kv_transfer_params`.
FILE_KEY = "draftsmith_handoff_file"
"""In a finished request: the name of the file with its states, inside the handoff directory."""
NAME_KEY = "draftsmith_name"
"""What the handoff file is named after (`handoff_file`). Only with `names_from_requests`. Such a request is saved even if it
ends as aborted, which is how vLLM ends one that produced a stop string."""
FORM_KEY = "draftsmith_form"
"""How the states are encoded (`codec.Form`). Only with `names_from_requests`."""
DISCARD_KEY = "draftsmith_discard"
"""Save nothing for this request."""
PROMPT_ONLY_KEY = "draftsmith_prompt_only"
"""Save only the states of the prompt."""
# The same in the words of vLLM's example connector, with `shared_storage_path`.
PATH_KEY = "hidden_states_path"
"""In a finished request: the path of the file. What a client asks for is ignored."""
OUTPUT_TOO_KEY = "include_output_tokens"
"""Save the states of the response, too."""

_MAX_UNWRITTEN_BYTES = 1 << 30
"""On a CPU: bytes of states, before they are encoded, that may wait in memory for the disk before the engine waits too. On a GPU they
wait in the pool."""


@dataclass
class _Save:
    request_id: str
    file: str
    token_ids: list[int]
    block_ids: list[int]
    form: Form | None
    """None: unencoded, for any program to read."""


@dataclass
class _Metadata(KVConnectorMetadata):
    saves: list[_Save]
    dropped: list[int]
    """Blocks of requests that ended without being saved."""


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector.

    Its `kv_connector_extra_config`:
        handoff_directory: an existing folder for the files.
        shared_storage_path: the same in the words of vLLM's example connector, for its clients: the folder is made, a response
            also has the path of its file, a `.lock` file is locked until the file is written, and only the prompt's states are
            saved unless a request asks for more.
        names_from_requests: whether a request may name its file (`NAME_KEY`) and choose its encoding (`FORM_KEY`). For
            engines whose requests all come from one program: on a server, a client that knows another's name could overwrite
            its file.

    Raises:
        UserError: the engine uses prefix caching or context parallelism, or runs without our plugin; or, from
            `register_kv_caches`, the handoff directory cannot be written to.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise UserError(
                "Hidden states are not known to be correct with vLLM's prefix caching, which this engine uses. "
                "Start it with --no-enable-prefix-caching."
            )
        parallel = vllm_config.parallel_config
        if parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1:
            raise UserError(
                "With context parallelism, which this engine uses, no process has the hidden states of a whole text. Start it without "
                "--prefill-context-parallel-size and --decode-context-parallel-size, and use --tensor-parallel-size."
            )
        _require_plugin()
        assert kv_cache_config is not None
        self._blocks = kv_cache_config.num_blocks
        self._group, self._block_size = _states_group(kv_cache_config)

        # Scheduler side.
        self._names_from_requests = self._kv_transfer_config.get_from_extra_config("names_from_requests", False) is True
        self._finished: list[_Save] = []  # not passed to the worker process yet
        self._dropped: list[int] = []  # likewise
        shared = self._kv_transfer_config.get_from_extra_config("shared_storage_path", None)
        self._as_vllm = shared is not None
        self._directory = self._kv_transfer_config.get_from_extra_config("handoff_directory", shared)
        self._locks = FileLocks()

        # Worker side. Other tensor-parallel ranks than the first have the same states, and do nothing.
        self._writer: HandoffWriter | None = None
        self._pool: StatesPool | None = None
        self._copier: GpuCopier | None = None  # if the model is on a GPU
        self._running: dict[str, tuple[_Save, Future[None]]] = {}  # files being written, by request id
        self._threads = ThreadPoolExecutor(
            2,
            thread_name_prefix="draftsmith-handoff",
            initializer=lower_priority if current_platform.is_cpu() else None,
        )
        self._unwritten = ByteLimit(_MAX_UNWRITTEN_BYTES)

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note a finished request. True keeps its blocks until the worker process has written its file."""
        asked = request.kv_transfer_params or {}
        name, form = (asked.get(NAME_KEY), asked.get(FORM_KEY)) if self._names_from_requests else (None, None)
        aborted = request.status == RequestStatus.FINISHED_ABORTED and name is None
        without_ids = request.prompt_embeds is not None  # nothing would say later which tokens the states belong to
        if asked.get(DISCARD_KEY) or aborted or without_ids or not block_ids:
            self._dropped.extend(block_ids)
            return False, None
        prompt_only = asked.get(PROMPT_ONLY_KEY) or (self._as_vllm and not asked.get(OUTPUT_TOO_KEY))
        # The last token of an answered request was sampled and never read: it has no state.
        token_ids = request.prompt_token_ids if prompt_only else request.all_token_ids[:-1]
        # Not named after vLLM's request id either: a server's clients choose most of it (X-Request-Id).
        file = handoff_file(secrets.token_hex(16) if name is None else name)
        self._finished.append(_Save(request.request_id, file, list(token_ids), list(block_ids), form))
        if not self._as_vllm:
            return True, {FILE_KEY: file}
        path = Path(self._directory, file).absolute()
        self._locks.hold(request.request_id, path)
        return True, {FILE_KEY: file, PATH_KEY: str(path)}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = _Metadata(self._finished, self._dropped)
        self._finished, self._dropped = [], []
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        self._locks.release(connector_output.finished_sending or ())

    def get_finished_count(self) -> int:
        return 1  # the rank that writes; the others do not report

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        if get_tensor_model_parallel_rank() != 0:
            return
        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        ((name, layer),) = layers.items()
        directory = _checked_directory(self._directory, make=self._as_vllm)
        self._writer = HandoffWriter(directory, reuse_files=self._names_from_requests)
        sizes = (layer.num_heads, layer.head_size)  # vLLM's names for layers and hidden size
        dtype = layer.kv_cache_torch_dtype
        self._pool = StatesPool(self._blocks, self._block_size, *sizes, dtype)
        if kv_caches[name].is_cuda:
            tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            self._copier = GpuCopier(self._pool, tokens * sizes[0] * sizes[1] * dtype.itemsize, tokens)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._pool is not None and isinstance(connector_metadata, _Metadata) and connector_metadata.dropped:
            keeper = self._pool if self._copier is None else self._copier
            keeper.release(connector_metadata.dropped)  # before this step gives the blocks to others

    def take(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Keep a step's states. Our vLLM plugin calls it.

        Args:
            slots: int64 [N], where vLLM keeps keys and values of each row; negative in rows that are padding.
            states: [N, L, H], written over by the next step.
        """
        if self._pool is None:
            return
        if self._copier is not None:
            self._copier.start(slots, states)
        else:
            self._pool.put(slots.cpu(), states.cpu())  # no copy on a CPU; other devices wait for it

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start copying newly finished requests; return the ids of requests whose files are written.

        vLLM frees a request's blocks when it is returned here, and keeps stepping until then. For the blocks, the end of the
        copy would do; waiting for the file as well lets an otherwise idle engine learn that writing failed.

        Raises:
            Exception: a target cannot have written such states, or a file could not be written (disk full); ends the engine.
        """
        if self._pool is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, _Metadata)
            for save in metadata.saves:
                self._running[save.request_id] = save, self._start_writing(save)
        done = {request_id for request_id, (_, writing) in self._running.items() if writing.done()}
        for request_id in done:
            save, writing = self._running.pop(request_id)
            writing.result()
            self._pool.release(save.block_ids)
        return done or None, None

    def _start_writing(self, save: _Save) -> Future[None]:
        if self._copier is not None:
            return self._threads.submit(self._encode_and_write, save, self._copier.last)
        states = self._gathered(save)
        size = states.nbytes
        self._unwritten.take(size)
        # Encoded at once, between two steps: in a thread beside the engine's it takes half as long again and stalls all of
        # them (docs/log.md).
        writing = self._threads.submit(self._write, save, _encoded(save, states))
        writing.add_done_callback(lambda _: self._unwritten.give_back(size))
        return writing

    def _encode_and_write(self, save: _Save, copied: Future[None] | None) -> None:
        if copied is not None:
            copied.result()
        self._write(save, _encoded(save, self._gathered(save)))

    def _gathered(self, save: _Save) -> torch.Tensor:
        """A request's states [M, L, H]. Those of a single block are the pool's own, which keeps them until they are written."""
        assert self._pool is not None
        try:
            return self._pool.get(save.block_ids, len(save.token_ids)).contiguous()
        except ValueError as error:
            raise ValueError(
                f"{error} (request {save.request_id}). Please report this with your vLLM version"
            ) from None

    def _write(self, save: _Save, states: torch.Tensor | EncodedStates) -> None:
        assert self._writer is not None
        self._writer.write(save.file, save.token_ids, states)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=True)


def _encoded(save: _Save, states: torch.Tensor) -> torch.Tensor | EncodedStates:
    try:
        return states if save.form is None else encode_states(states, save.form)
    except ValueError as error:
        raise ValueError(
            f"{error} (request {save.request_id}). If the target overflows in its dtype, choose another one (`target.dtype`)"
        ) from None


def _checked_directory(given: Any, *, make: bool) -> Path:
    """The folder for the files, made if that is asked, after a trial: an engine that cannot write must fail as it starts.

    Raises:
        UserError: none is named, or it cannot be written to.
    """
    where = "handoff_directory, in kv_connector_extra_config of vLLM's --kv-transfer-config,"
    if not isinstance(given, str) or not given:
        raise UserError(f"{where} must name a folder for the hidden-state files; it is {given!r}.")
    try:
        if make:
            Path(given).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=given).close()
    except OSError as error:
        raise UserError(
            f"{where} is {Path(given).absolute()}, where no file can be written ({error.strerror}). Create that folder "
            "with write permission for the engine's user, or name another one. If the engine runs on several machines, all of them "
            "must see it under this path."
        ) from None
    return Path(given)


def _require_plugin() -> None:
    """Raise UserError if our vLLM plugin is not loaded, which hands over the states, and corrects those of layer id 0 on GPUs."""
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

    if not getattr(CacheOnlyAttentionLayer, "hands_states_over", False):
        raise UserError(
            "Extraction of hidden states needs Draftsmith's vLLM plugin, and it is not loaded here. Let VLLM_PLUGINS name "
            "`draftsmith`, or unset it, and use a vLLM that this Draftsmith supports."
        )


def _states_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Index of the KV cache group whose blocks and slots the states have, and its block size in tokens.

    Raises:
        ValueError: it is none of a cache for whole sequences.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.first_spec
        if any("cache_only_layers." in name for name in group.layer_names) and isinstance(spec, FullAttentionSpec):
            return number, spec.block_size
    raise ValueError("vLLM has no KV cache group of whole sequences with the layer that hands over hidden states")
