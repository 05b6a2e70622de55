"""Imports for the process from which engines are forked (`engine_context`). No model, no device.

Importing vLLM is most of an engine's start; engines forked afterwards pay for it once.
"""

import gc
import os
from contextlib import suppress

# This process has no log, and what its imports print would only disturb the terminal.
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)

# An installation that does not fit together raises anything. Engines then import vLLM themselves, and tell what is wrong; without this
# process they could not even be started.
with suppress(Exception):
    import vllm
    import vllm.entrypoints.llm

    if vllm.platforms.current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker

# Engines collect garbage as they start; objects of imported modules never become garbage.
gc.freeze()
