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


def end_with(parent: int) -> None:
    """End this process's group when `parent` is gone. Returns at once."""

    def watch() -> None:
        while os.getppid() == parent:  # a process that was killed tells nobody, but its children get another parent
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    # Not the `vllm` program: its CPU build cannot start it.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
