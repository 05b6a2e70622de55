"""vLLM's OpenAI-compatible server in a process that ends with the one that started it, however that ends.

    python -m draftsmith.serve.server_process PARENT OPTIONS...

PARENT is the id of the process to end with. This process must lead its process group, which ends as a whole.
"""

import os
import runpy
import signal
import sys
import threading
import time


def end_with(parent: int) -> None:
    """End this process's group once `parent` has ended. Returns immediately."""

    def watch() -> None:
        while os.getppid() == parent:  # if the parent is killed, this process gets another one
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    # Not the `vllm` command, which does not start in the CPU build.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
