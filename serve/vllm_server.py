"""vLLM's OpenAI-compatible server as a child process: its command line, start and end, and the reason of a failure."""

import errno
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import EngineConfig, Recipe
from draftsmith.engine import environment
from draftsmith.engine.flags import as_flags, flag_name
from draftsmith.engine.speculation import target_arguments, usable_options
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console

_SECONDS_TO_STOP = 20.0
_POLL_SECONDS = 0.5
_LINES_KEPT = 400  # lines of the server's output: enough for a traceback of its engine process and one of its own
_ERROR = re.compile(r"\b\w*(Error|Exception)\b(: .*\S|$)")
_SET_ELSEWHERE = {
    "model": "by the recipe's `target`", "dtype": "by `target.dtype`",
    "max-model-len": "by `engine.max_model_len`", "tensor-parallel-size": "by `engine.tensor_parallel_size`",
    "enforce-eager": "by `engine.enforce_eager`", "trust-remote-code": "by `target.trust_remote_code`",
    "speculative-config": "by `serve.method`", "host": "with --host", "port": "with --port",
    "api-key": "with --api-key, or VLLM_API_KEY in the environment",
    "uds": "with --host and --port: Draftsmith asks the server there whether it is ready",
}  # fmt: skip
"""Options of vLLM's server that Draftsmith sets, and where users set them."""
_NAMES = "served-model-name"
_NO_REASON = (
    "Engine core initialization failed",
    "EngineDeadError",
    "EngineCore encountered",
    "Engine process failed",
    "ulimit -n",
)
"""In errors that only report an earlier one, and in a warning of vLLM's that quotes one."""


class VllmServer:
    """A running server. It ends with this process, however that ends; `end` leaves none of its processes behind."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        engine: EngineConfig,
        url: str,
        show: Callable[[str], object],
        api_key: str | None = None,
        gpus: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it with a `server_command` and return immediately.

        Args:
            url: where it will listen.
            show: called with every line of its output.
            api_key: API key that clients must send; None takes VLLM_API_KEY, if set.
            gpus: to run on, as in CUDA_VISIBLE_DEVICES; empty for those that this process sees.
            variables: more environment variables.
        """
        values = os.environ | environment.vllm_environment(engine) | environment.only_these_gpus(gpus)
        values.update(variables or {})
        if api_key is not None:
            values["VLLM_API_KEY"] = api_key  # not on the command line, which every user of the machine can read
        # Unlike the engines that Draftsmith drives, the server runs its engine in a process of its own.
        del values["VLLM_ENABLE_V1_MULTIPROCESSING"]
        self.url = url
        # Its own session: Ctrl-C reaches only this process, and vLLM's children are in one group with the server.
        self._process = subprocess.Popen(
            command, env=values, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._said: deque[str] = deque(maxlen=_LINES_KEPT)
        self._echo = threading.Thread(target=self._read, args=(show,), daemon=True)
        self._echo.start()

    def wait_ready(self, stopped: Callable[[], object] = lambda: False) -> bool:
        """Block until it answers; False if `stopped` is true before. Raises DraftsmithError: it ended by itself."""
        return self._wait(stopped, lambda: _healthy(self.url))

    def wait_stopped(self, stopped: Callable[[], object]) -> None:
        """Block until `stopped` is true. Raises DraftsmithError: it ended by itself."""
        self._wait(stopped, lambda: False)

    def end(self) -> None:
        """Stop the server, then kill whatever it started that is left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                console.print("serve: the server does not stop; killing it", highlight=False)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._echo.join(_SECONDS_TO_STOP)  # for its last output

    def _wait(self, stopped: Callable[[], object], done: Callable[[], bool]) -> bool:
        while not stopped():
            if self._process.poll() is not None:
                self._echo.join(_SECONDS_TO_STOP)
                raise DraftsmithError(
                    f"vLLM's server ended by itself with status {self._process.returncode}: {failure_reason(list(self._said))}"
                )
            if done():
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _read(self, show: Callable[[str], object]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            self._said.append(text.rstrip())
            # Where nobody reads it any more, or the disk is full: the pipe must be read all the same, or the server stops.
            with suppress(OSError, ValueError):
                show(text)


def server_command(
    recipe: Recipe,
    target_dir: Path,
    speculative: dict[str, Any] | None,
    *,
    name: str,
    host: str,
    port: int,
    memory_share: float = 1.0,
) -> list[str]:
    """The command line of vLLM's server, in a process that ends with this one.

    Args:
        recipe: `target`, `engine` and `serve.vllm_args`, which comes before `engine.options`, are read.
        speculative: vLLM's `speculative_config`; None for the baseline.
        name: the model's name for clients, unless `serve.vllm_args.served_model_name` has others.
        memory_share: its part of the memory that the recipe grants, for servers side by side.

    Raises UserError: an option is set elsewhere.
    """
    command = [
        sys.executable, "-m", "draftsmith.serve.server_process", str(os.getpid()),
        "--model", str(target_dir), "--served-model-name", *(served_names(recipe) or [name]), "--host", host, "--port", str(port),
        "--dtype", recipe.target.dtype, "--max-model-len", str(recipe.engine.max_model_len),
        "--tensor-parallel-size", str(recipe.engine.tensor_parallel_size),
    ]  # fmt: skip
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    options, own = (usable_options(section, speculative) for section in (recipe.engine.options, recipe.serve.vllm_args))
    own = {key: value for key, value in own.items() if flag_name(key) != _NAMES}
    named = next((key for key in own if flag_name(key) == "hf-overrides"), "")
    if isinstance(own.get(named), dict):
        options = options | {"hf_overrides": options.get("hf_overrides", {}) | own[named]}
    arguments = environment.memory_arguments(recipe.engine, share=memory_share) | target_arguments(
        target_dir, speculative, options=options, trust_remote_code=recipe.target.trust_remote_code
    )
    if "hf_overrides" in arguments:  # all parts are in it; of an option that is given twice vLLM takes the last
        own.pop(named, None)
    command += _flags(arguments)
    if environment.resolved(recipe.engine).enforce_eager:
        command.append("--enforce-eager")
    if recipe.target.trust_remote_code:
        command.append("--trust-remote-code")
    replaced = {flag_name(key) for key in own}
    given = {flag_name(key) for key in arguments}
    shared = {key: value for key, value in options.items() if flag_name(key) not in replaced | given}
    return command + _flags(shared) + _flags(own)


def served_names(recipe: Recipe) -> list[str]:
    """The names under which clients may ask for the model, if the recipe has any in `serve.vllm_args.served_model_name`."""
    found = next((value for key, value in recipe.serve.vllm_args.items() if flag_name(key) == _NAMES), None)
    return [str(name) for name in (found if isinstance(found, list) else [found] if found else [])]


def failure_reason(lines: Sequence[str]) -> str:
    """Why a program ended, from its log: the last error that does not only report an earlier one, or the last line.

    Earlier errors may be clients'. A message on the following line (pydantic's) is included.
    """
    for number in reversed(range(len(lines))):
        match = _ERROR.search(lines[number])
        if match and not any(text in lines[number] for text in _NO_REASON):
            following = lines[number + 1 :] if "validation error" in match[0] else []
            return " ".join(text.strip() for text in (match[0], *following[:2]))
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Options as flags of vLLM's command line. Raises UserError: one of them is set elsewhere."""
    for key in options:
        if (name := flag_name(key)) in _SET_ELSEWHERE:
            raise UserError(f"`serve.vllm_args.{key}` is set elsewhere: {_SET_ELSEWHERE[name]}.")
    return as_flags(options)


def require_free(host: str, port: int) -> None:
    """Raises UserError: another program listens there already. Its answers would be taken for the new server's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As vLLM does: connections that are closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"Another program is listening on port {port} of {host or 'this machine'}. Stop it, or choose another with --port."
                ) from None
            raise UserError(
                f"vLLM cannot listen on port {port} of {host}: {error.strerror or error}. Choose others with --host and --port."
            ) from None


def _healthy(url: str) -> bool:
    # The certificate may name another host, and a proxy cannot reach this address.
    unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), unverified)
    try:
        with opener.open(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # URLError is one of the first; the second is not HTTP
        return False
