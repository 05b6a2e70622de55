"""The target and its drafter behind vLLM's own OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftsmith import vllm_env
from draftsmith.errors import DraftsmithError, UserError
from draftsmith.methods import Drafter, Method
from draftsmith.progress import console
from draftsmith.recipe import Recipe
from draftsmith.serve.speculation import check_graph_sizes, method_config, own_drafter
from draftsmith.serve.tune import schedule_of
from draftsmith.target import describe_target, prepare_target

_SECONDS_TO_STOP = 20.0
_LINES_KEPT = 400
"""Of what the server prints: a traceback of its engine's process, and one of its own."""
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: .*\S")
_SET_ELSEWHERE = {
    "model": "by the recipe's `target`", "served-model-name": "by the recipe's `target`", "dtype": "by `target.dtype`",
    "max-model-len": "by `engine.max_model_len`", "tensor-parallel-size": "by `engine.tensor_parallel_size`",
    "enforce-eager": "by `engine.enforce_eager`", "speculative-config": "by `serve.method`", "host": "with --host",
    "port": "with --port", "api-key": "with --api-key, or VLLM_API_KEY in the environment",
}  # fmt: skip
"""Options of vLLM's server that Draftsmith gives it, and where users say what."""
_AS_JSON = {"allowed-origins", "allowed-methods", "allowed-headers"}
"""Lists that its command line takes as one JSON text."""
_NO_REASON = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered", "Engine process failed")
"""In errors that only say that there was another one before."""


def serve(
    recipe: Recipe,
    run_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    k: int | None = None,
    api_key: str | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        recipe: `target`, `engine`, `serve` and `evaluate` are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/` where the method takes the run's own.
        host: address to listen on.
        port: port to listen on.
        k: number of speculative tokens; None takes the method's, and for the run's own drafter what tuning chose (by load),
            or the one that evaluation chose, or `evaluate.acceptance_k`.
        api_key: what clients have to show; None lets everybody in.

    Returns:
        0 when it was stopped.

    Raises:
        UserError: the method cannot serve this target, or there is no drafter.
        DraftsmithError: the server ended by itself; with the reason that it printed.
    """
    target = describe_target(prepare_target(recipe.target), recipe.target)
    method = _method(recipe, run_dir, k)
    speculative = method_config(
        method, target, own_drafter=run_dir / "vllm", tensor_parallel_size=recipe.engine.tensor_parallel_size
    )
    check_graph_sizes(recipe.serve.options, speculative["num_speculative_tokens"] if speculative else 0)
    command = server_command(recipe, target.path, speculative, name=target.name, host=host, port=port)
    environment = os.environ | vllm_env.vllm_environment(recipe.engine)
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key  # not on the command line, which everybody on the machine can read
    # The server keeps its engine in a process of its own; a program that drives one engine does not.
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    console.print(f"serve: {target.name}, {_in_words(speculative)}", highlight=False, soft_wrap=True)

    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    # Its own session: Ctrl-C reaches us alone, and vLLM's children are in one group with it.
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said: deque[str] = deque(maxlen=_LINES_KEPT)
    echo = threading.Thread(target=_echo, args=(process, said), daemon=True)
    echo.start()
    try:
        scheme = "https" if recipe.serve.options.get("ssl_certfile") else "http"
        url = f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"
        while process.poll() is None and not stop.is_set() and not _healthy(url):
            stop.wait(0.5)
        if process.poll() is None and not stop.is_set():
            example = curl_command(url, target.name, with_key=api_key is not None)
            console.print(f"serve: ready. Try\n\n{example}\n", highlight=False, soft_wrap=True)
        while process.poll() is None and not stop.is_set():
            stop.wait(0.5)
        if not stop.is_set():
            echo.join(_SECONDS_TO_STOP)
            raise DraftsmithError(
                f"vLLM's server ended by itself with status {process.returncode}: {reason_of_death(list(said))}"
            )
        return 0
    finally:
        _end_group(process)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _method(recipe: Recipe, run_dir: Path, k: int | None) -> Method:
    """The recipe's way of speculating with its number of tokens; without one, the run's own drafter."""
    drafter_dir = run_dir / "vllm"
    method = recipe.serve.method or own_drafter(drafter_dir)
    own = isinstance(method, Drafter) and method.model is None
    if k is None and own and not (method.num_speculative_tokens or method.num_speculative_tokens_per_batch_size):
        schedule = schedule_of(run_dir, recipe.tune.output)
        if schedule is not None:
            ranges = tuple((first, last, k) for first, last, k in schedule)
            return method.model_copy(update={"num_speculative_tokens_per_batch_size": ranges})
        k = chosen_k(recipe, run_dir)
    if k is None or method.method == "none":
        return method
    return method.model_copy(update={"num_speculative_tokens": k, "num_speculative_tokens_per_batch_size": None})


def _in_words(speculative: dict[str, Any] | None) -> str:
    if speculative is None:
        return "without speculation"
    model = f" {speculative['model']}," if "model" in speculative else ""
    by_load = speculative.get("num_speculative_tokens_per_batch_size")
    if by_load:
        tokens = ", ".join(f"{k} at {first} to {last} sequences" for first, last, k in by_load)
        return f"{speculative['method']},{model} speculative tokens by load: {tokens}"
    return f"{speculative['method']},{model} {speculative['num_speculative_tokens']} speculative tokens"


def _echo(process: subprocess.Popen[bytes], said: deque[str]) -> None:
    """Show what the server prints, and keep its end."""
    assert process.stdout is not None
    for line in process.stdout:
        text = line.decode(errors="replace")
        sys.stderr.write(text)
        said.append(text.rstrip())
    sys.stderr.flush()


def reason_of_death(lines: Sequence[str]) -> str:
    """What a log says of why a program ended: its last error that is not only that there was one, or its last words.

    Earlier errors may be clients'. Where the message is on the line after (pydantic's), that goes with it.
    """
    for number in reversed(range(len(lines))):
        match = _ERROR.search(lines[number])
        if match and not any(text in lines[number] for text in _NO_REASON):
            following = lines[number + 1 :] if "validation error" in match[0] else []
            return " ".join(text.strip() for text in (match[0], *following[:2]))
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


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
    recipe: Recipe, target_dir: Path, speculative: dict[str, Any] | None, *, name: str, host: str, port: int
) -> list[str]:
    """The command line of vLLM's server, in a process that ends with this one."""
    command = [
        sys.executable, "-m", "draftsmith.serve.server_process", str(os.getpid()),
        "--model", str(target_dir), "--served-model-name", name, "--host", host, "--port", str(port),
        "--dtype", recipe.target.dtype, "--max-model-len", str(recipe.engine.max_model_len),
        "--tensor-parallel-size", str(recipe.engine.tensor_parallel_size),
    ]  # fmt: skip
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    for key, value in vllm_env.memory_arguments(recipe.engine).items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    if recipe.engine.enforce_eager:
        command.append("--enforce-eager")
    return command + _flags(recipe.serve.options)


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options as vLLM's command line has them.

    Raises:
        UserError: one of them is set elsewhere.
    """
    flags: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-").removeprefix("--")
        if name in _SET_ELSEWHERE:
            raise UserError(f"`serve.options.{key}` is set elsewhere: {_SET_ELSEWHERE[name]}.")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif name in _AS_JSON:
            flags += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{name}", *(json.dumps(one) if isinstance(one, dict) else str(one) for one in value)]
        elif value is not None:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def curl_command(url: str, name: str, *, with_key: bool = False) -> str:
    """A command that asks the server something; the key is taken from the shell."""
    body = {"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if with_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _healthy(url: str) -> bool:
    try:
        # The certificate may be made for another name than this machine's loopback address.
        with urllib.request.urlopen(f"{url}/health", timeout=2, context=ssl._create_unverified_context()) as answer:
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
