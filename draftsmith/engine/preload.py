"""Imports for the process from which engines are forked (`engine_context`). No model, no device.

Importing vLLM is most of an engine's start; engines forked afterwards pay for it once.
"""

import gc
import os

# This process has no log, and what its imports print would only disturb the terminal.
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)

import vllm  # noqa: E402
import vllm.entrypoints.llm  # noqa: E402

if vllm.platforms.current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker

# Engines collect garbage as they start; objects of imported modules never become garbage.
gc.freeze()
