"""What the process that engines are forked from imports, once for all of them. No model, no device.

An engine spends most of its start importing vLLM; forked after that, five engines pay for it once.
"""

import gc
import os

# This process has no log; what its imports print at start and end would only disturb the terminal.
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)

import vllm  # noqa: E402
import vllm.entrypoints.llm  # noqa: E402

if vllm.platforms.current_platform.is_cpu():
    import vllm.v1.worker.cpu_worker

# Engines collect garbage as they start; the objects of the imports never become any.
gc.freeze()
