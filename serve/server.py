"""The target and its drafter behind vLLM's own OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith import vllm_env
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.progress import console
from draftsmith.recipe import Recipe
from draftsmith.serve.speculation import speculative_config
from draftsmith.target import prepare_target, target_name

_SECONDS_TO_STOP = 20.0


def serve(recipe: Recipe, run_dir: Path, *, host: str = "127.0.0.1", port: int = 8000, k: int | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        recipe: `target`, `engine` and `evaluate` are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/`.
        host: address to listen on.
        port: port to listen on.
        k: number of speculative tokens; None takes the one that evaluation chose, or `evaluate.acceptance_k`.

    Returns:
        0 when it was stopped.

    Raises:
        UserError: there is no drafter.
        DraftsmithError: the server ended by itself.
    """
    drafter_dir = run_dir / "vllm"
    k = k or chosen_k(recipe, run_dir)
    speculative = speculative_config(drafter_dir, k)
    name = target_name(recipe.target)
    command = server_command(recipe, prepare_target(recipe.target), speculative, name=name, host=host, port=port)
    environment = os.environ | vllm_env.vllm_environment(recipe.engine)
    # The server keeps its engine in a process of its own; a program that drives one engine does not.
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    console.print(f"serve: {name} with {drafter_dir}, {k} speculative tokens", highlight=False)

    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    # Its own session: Ctrl-C reaches us alone, and vLLM's children are in one group with it.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"
        while process.poll() is None and not stop.is_set() and not _healthy(url):
            stop.wait(0.5)
        if process.poll() is None and not stop.is_set():
            console.print(f"serve: ready. Try\n\n{curl_command(url, name)}\n", highlight=False, soft_wrap=True)
        while process.poll() is None and not stop.is_set():
            stop.wait(0.5)
        if not stop.is_set():
            raise DraftsmithError(
                f"vLLM's server ended by itself with status {process.returncode}; what it printed above says why."
            )
        return 0
    finally:
        _end_group(process)
        for number, handler in previous.items():
            signal.signal(number, handler)


def chosen_k(recipe: Recipe, run_dir: Path) -> int:
    """The K that evaluation found fastest, or `evaluate.acceptance_k` where it has not run."""
    path = run_dir / recipe.evaluate.output / "results.json"
    if not path.is_file():
        return recipe.evaluate.acceptance_k
    try:
        return int(json.loads(path.read_text())["num_speculative_tokens"])
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is not an evaluation's results. Delete it, or name the number of tokens with -k."
        ) from None


def server_command(
    recipe: Recipe, target_dir: Path, speculative: dict[str, Any], *, name: str, host: str, port: int
) -> list[str]:
    """The command line of vLLM's server. The `vllm` program is not used: its CPU build cannot start it."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(target_dir), "--served-model-name", name, "--host", host, "--port", str(port),
        "--dtype", recipe.target.dtype, "--max-model-len", str(recipe.engine.max_model_len),
        "--tensor-parallel-size", str(recipe.engine.tensor_parallel_size),
        "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    for key, value in vllm_env.memory_arguments(recipe.engine).items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    if recipe.engine.enforce_eager:
        command.append("--enforce-eager")
    return command


def curl_command(url: str, name: str) -> str:
    """A command that asks the server something."""
    body = {"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Wait for the server to leave, then make sure that nothing it started is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            console.print("serve: the server does not stop; ending it", highlight=False)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
