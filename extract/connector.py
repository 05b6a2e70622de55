"""Our vLLM KV connector: hands the target's hidden states of each finished request to the driver.

vLLM's `extract_hidden_states` method keeps the chosen layers' states in a KV cache group of their own, so they
are paged, chunked and preempted like any cache. When a request finishes, this connector gathers its states from
the cache, checks and encodes them, and writes them to a handoff directory, where the driver takes the file.

    scheduler process:  request_finished -> build_connector_meta  (which blocks hold which tokens)
    worker process:     get_finished     -> gather, encode; in a thread: write, rename into place

They are encoded here, at once, because a pass over memory is most of what any step costs: they are still in the core's cache,
what is written and read afterwards is smaller, and every engine encodes its own.

The worker hears of a finished request in the engine's next step. An engine that vLLM runs itself (a server's) takes
that step without being asked; a program that steps an engine must step on until the file is there.

It also works in vLLM's own server (docs/extraction-server.md), whose clients write `kv_transfer_params` as they
like: they learn the name of their file from the answer, and have no say in it. Their files hold the plain states.

A handoff file (extract/handoff.py) has the tokens that were inputs of the target (a last sampled token never was).
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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

from draftsmith.extract.gpu_copy import Copy, GpuCopier
from draftsmith.extract.handoff import HandoffWriter, spool_file
from draftsmith.run.errors import UserError
from draftsmith.run.process import lower_priority
from draftsmith.store.codec import EncodedStates, Form, encode_states

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SPOOL_KEY = "draftsmith_spool_file"
"""In a finished request's `kv_transfer_params`: the file name, inside the handoff directory, of its states."""
NAME_KEY = "draftsmith_name"
"""In a request's `kv_transfer_params`: what its handoff file is named after (`spool_file`). Only with `names_from_requests`.
Such a request is saved even when it ends as aborted, which is how vLLM ends one that met a stop string."""
FORM_KEY = "draftsmith_form"
"""In a request's `kv_transfer_params`: what form its states are to have (`codec.Form`). Only with `names_from_requests`."""
DISCARD_KEY = "draftsmith_discard"
"""In a request's `kv_transfer_params`: save nothing for it."""
PROMPT_ONLY_KEY = "draftsmith_prompt_only"
"""In a request's `kv_transfer_params`: save the states of the prompt alone."""

_WRITES_IN_FLIGHT = 64
"""On a CPU: requests whose states may wait in memory for the disk; past that the engine waits too. Of a GPU's, `gpu_copy` limits
the bytes."""


@dataclass
class _Save:
    request_id: str
    file: str
    token_ids: list[int]
    block_ids: list[int]
    form: Form | None
    """None: plain states, as any program reads them."""


@dataclass
class _Metadata(KVConnectorMetadata):
    saves: list[_Save] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector.

    Its `kv_connector_extra_config`:
        spool_directory: an existing folder for the files.
        names_from_requests: whether a request may name its file (`NAME_KEY`) and say what its states are encoded in
            (`FORM_KEY`). For an engine whose every request comes from one program; on a server, a client that knows another's
            name could overwrite its file.

    Raises:
        UserError: the engine uses prefix caching, or is asked for layer id 0 without our plugin; or (`register_kv_caches`) the
            handoff directory cannot be written to.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise UserError(
                "Hidden states are not known to be right with vLLM's prefix caching, and this engine uses it. "
                "Start it with --no-enable-prefix-caching."
            )
        _require_true_embeddings(vllm_config)
        self._group, self._block_size = _hidden_states_group(kv_cache_config)

        # Scheduler side.
        self._names_from_requests = self._kv_transfer_config.get_from_extra_config("names_from_requests", False) is True
        self._finished: list[_Save] = []  # not yet told to the worker

        # Worker side.
        self._spool: HandoffWriter | None = None  # of the rank that writes
        self._cache: torch.Tensor | None = None  # [blocks, layers, block size, hidden]
        self._writes = True  # other tensor-parallel ranks hold the same states and must not write
        self._running: dict[str, Future[None]] = {}  # by request id, its file being written
        self._copier: GpuCopier | None = None  # where the cache is a GPU's
        self._threads = ThreadPoolExecutor(
            2,
            thread_name_prefix="draftsmith-handoff",
            initializer=lower_priority if current_platform.is_cpu() else None,
        )
        self._slots = threading.BoundedSemaphore(_WRITES_IN_FLIGHT)

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note a finished request; True keeps its blocks until the worker has written its file."""
        asked = request.kv_transfer_params or {}
        name, form = (asked.get(NAME_KEY), asked.get(FORM_KEY)) if self._names_from_requests else (None, None)
        aborted = request.status == RequestStatus.FINISHED_ABORTED and name is None
        without_ids = request.prompt_embeds is not None  # nobody could tell later what the states are of
        if asked.get(DISCARD_KEY) or aborted or without_ids or not block_ids:
            return False, None
        # Of an answered request the last token was sampled and never an input: it has no state.
        token_ids = request.prompt_token_ids if asked.get(PROMPT_ONLY_KEY) else request.all_token_ids[:-1]
        # Not named after vLLM's id of the request either: a client of a server chooses most of it (X-Request-Id).
        file = spool_file(secrets.token_hex(16) if name is None else name)
        self._finished.append(_Save(request.request_id, file, list(token_ids), list(block_ids), form))
        return True, {SPOOL_KEY: file}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        saves, self._finished = self._finished, []
        return _Metadata(saves)

    def get_finished_count(self) -> int:
        return 1  # only rank 0 reports, so nobody may wait for the other ranks

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        (name,) = layers
        self._cache = kv_caches[name]
        if self._cache.shape[2] != self._block_size:
            raise ValueError(
                f"the hidden-states cache has blocks of {self._cache.shape[2]} tokens, its spec says {self._block_size}"
            )
        self._writes = get_tensor_model_parallel_rank() == 0
        if self._writes:
            directory = _spool_directory(self._kv_transfer_config.get_from_extra_config("spool_directory", None))
            self._spool = HandoffWriter(directory, writes_over=self._names_from_requests)
            if self._cache.is_cuda:
                self._copier = GpuCopier(self._cache, self._vllm_config.model_config.max_model_len)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # vLLM has put the states into the cache; they are gathered when the request is finished

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the copies of newly finished requests; name the requests whose files are written.

        vLLM frees a request's blocks when it is named here, and goes on stepping until then. The copy alone would do
        for the blocks; waiting for the file as well lets an engine that has nothing else to do hear that it failed.

        Raises:
            Exception: states are not what a target can have written, or a file could not be written, the disk being full for
                one; this ends the engine.
        """
        if self._writes and self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, _Metadata)
            for save in metadata.saves:
                self._start_copy(save)
        done = {request_id for request_id, writing in self._running.items() if writing.done()}
        for request_id in done:
            self._running.pop(request_id).result()
        return done or None, None

    def _start_copy(self, save: _Save) -> None:
        if self._copier is not None:
            copy = self._copier.start(save.block_ids, len(save.token_ids))
            writing = self._threads.submit(self._encode_and_write, save, copy)
        else:
            self._slots.acquire()
            # Encoded at once, with the cores to itself: in a thread beside the engine's it takes half as much time again, in
            # moments that stop all of them (docs/log.md).
            writing = self._threads.submit(self._write, save, _encoded(save, self._on_cpu(save)))
            writing.add_done_callback(lambda _: self._slots.release())
        self._running[save.request_id] = writing

    def _on_cpu(self, save: _Save) -> torch.Tensor:
        """A request's states [M, L, H]. Those of a single block are where they are: nobody else gets it before they are written."""
        assert self._cache is not None
        rows, count = self._cache.transpose(1, 2), len(save.token_ids)  # one token's states side by side, as in memory
        parts = [
            rows[block, : count - at]
            for at, block in zip(range(0, count, self._block_size), save.block_ids, strict=False)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def _encode_and_write(self, save: _Save, copy: Copy) -> None:
        try:
            copy.copied.synchronize()
            self._write(save, _encoded(save, copy.states))
        finally:
            copy.region.give_back()

    def _write(self, save: _Save, states: torch.Tensor | EncodedStates) -> None:
        assert self._spool is not None
        self._spool.write(save.file, save.token_ids, states)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=True)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return "LBNHC"  # all layers' states of one token side by side


def _encoded(save: _Save, states: torch.Tensor) -> torch.Tensor | EncodedStates:
    try:
        return states if save.form is None else encode_states(states, save.form)
    except ValueError as error:
        raise ValueError(
            f"{error} (request {save.request_id}). If the target overflows in its dtype, choose another, `target.dtype`"
        ) from None


def _spool_directory(given: Any) -> Path:
    """The folder for the files, tried out: an engine that cannot write must fail as it starts.

    Raises:
        UserError: there is none, or nothing can be written there.
    """
    where = "spool_directory, in kv_connector_extra_config of vLLM's --kv-transfer-config,"
    if not isinstance(given, str) or not given:
        raise UserError(f"{where} must name the folder for the files with hidden states; it is {given!r}.")
    try:
        tempfile.TemporaryFile(dir=given).close()
    except OSError as error:
        raise UserError(
            f"{where} is {Path(given).absolute()}, and no file can be written there ({error.strerror}). Make that folder "
            "with write permission for the engine's user, or name another one."
        ) from None
    return Path(given)


def _require_true_embeddings(vllm_config: VllmConfig) -> None:
    """Raises UserError where layer id 0 is asked for and `serve/plugin`, which mends its states, is not loaded."""
    from vllm.model_executor.models.interfaces import EagleModelMixin

    speculative = vllm_config.speculative_config
    asked = speculative.draft_model_config.hf_config if speculative else None
    if 0 in getattr(asked, "eagle_aux_hidden_state_layer_ids", ()) and not getattr(
        EagleModelMixin, "keeps_embeddings", False
    ):
        raise UserError(
            "On GPUs vLLM's eager mode gives wrong states for layer id 0, the embeddings, which Draftsmith's plugin for vLLM mends. "
            "It is not loaded here. Let VLLM_PLUGINS name `draftsmith`, or unset it, and use a vLLM that this Draftsmith "
            "knows; or leave layer id 0 out."
        )


def _hidden_states_group(kv_cache_config: KVCacheConfig | None) -> tuple[int, int]:
    """Index of the KV cache group that holds hidden states, and its block size in tokens."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    assert kv_cache_config is not None
    groups = kv_cache_config.kv_cache_groups
    found = [
        (number, group.kv_cache_spec.block_size)
        for number, group in enumerate(groups)
        if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)
    ]
    if not found and len(groups) == 1:  # plain attention throughout: the states share the target's one group
        found = [(0, groups[0].kv_cache_spec.block_size)]
    if len(found) != 1:
        raise ValueError(
            f"expected one KV cache group of hidden states, found {len(found)}; this target is not supported"
        )
    return found[0]
