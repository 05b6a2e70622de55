"""vLLM's OpenAI-compatible server in a process that ends with the one that started it, however that ends.

    python -m draftsmith.serve.server_process PARENT OPTIONS...

PARENT is the number of the process to end with. This one must lead its process group, which is what it ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time


def _end_with(parent: int) -> None:
    """A process that was killed tells nobody, but its children get another parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    # Not the `vllm` program: its CPU build cannot start it.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
