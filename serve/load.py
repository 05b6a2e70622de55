"""Latency and throughput of two servers, plain and speculative, at several request rates, by vLLM's own load generator.

Batches of a fixed size say what an engine can do; people's requests come when they come. Both servers are up side by side and
take turns at every rate, with the same prompts at the same moments of a Poisson process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.progress import Bar
from draftsmith.recipe import Recipe
from draftsmith.serve import results as res
from draftsmith.serve.vllm_server import VllmServer, server_command
from draftsmith.target import TargetInfo

_WARM_UPS = 8
"""Requests before any is timed."""


def at_request_rates(
    recipe: Recipe, target: TargetInfo, speculative: dict[str, Any], prompts: Sequence[str], log_dir: Path
) -> dict[str, res.Rate]:
    """Ask two servers at every rate of `evaluate.request_rates`.

    Args:
        recipe: `engine`, `serve.options` and `evaluate` are read.
        target: what is served.
        speculative: vLLM's `speculative_config` of one of the servers.
        prompts: in the target's chat template; as many requests are sent at every rate.
        log_dir: folder for the servers' logs.

    Returns:
        By rate, as the recipe writes it.

    Raises:
        DraftsmithError: a server ended, or a request failed.
    """
    options = recipe.evaluate
    rates = options.request_rates
    found: dict[str, dict[str, res.AtRate]] = {}
    with ExitStack() as ends, TemporaryDirectory(dir=log_dir) as folder:
        rows = Path(folder) / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        servers: dict[str, VllmServer] = {}
        for name, config in (("plain", None), ("speculative", speculative)):
            port = _free_port()
            command = server_command(
                recipe, target.path, config, name=target.name, host="127.0.0.1", port=port, memory_share=0.5
            )
            log = ends.enter_context((log_dir / f"server-{name}.log").open("w"))
            servers[name] = VllmServer(command, recipe=recipe, url=f"http://127.0.0.1:{port}", show=log.write)
            ends.callback(servers[name].end)
        with Bar("start servers", total=len(servers), unit="servers") as bar:
            for number, server in enumerate(servers.values(), start=1):
                server.wait_ready(threading.Event())
                bar.update(number)
        with Bar("request rates", total=len(rates) * len(servers), unit="runs") as bar:
            done = 0
            for number, rate in enumerate(rates):
                for name in list(servers)[:: 1 if number % 2 else -1]:
                    at_rate = _ask(servers[name].url, rate, rows, len(prompts), target, options.speed_tokens, log_dir)
                    found.setdefault(f"{rate:g}", {})[name] = at_rate
                    done += 1
                    bar.update(done)
    return {rate: {"plain": both["plain"], "speculative": both["speculative"]} for rate, both in found.items()}


def _ask(
    url: str, rate: float, rows: Path, count: int, target: TargetInfo, max_tokens: int, log_dir: Path
) -> res.AtRate:
    """One run of the load generator."""
    result = rows.parent / "result.json"
    command = [
        sys.executable, "-m", "draftsmith.serve.load_client", "--backend", "openai", "--base-url", url,
        "--model", str(target.path), "--served-model-name", target.name, "--dataset-name", "custom",
        "--dataset-path", str(rows), "--custom-output-len", str(max_tokens), "--num-prompts", str(count),
        # The prompts are in the chat template already, its first token included.
        "--skip-chat-template", "--extra-body", json.dumps({"add_special_tokens": False}), "--disable-shuffle",
        "--request-rate", str(rate), "--seed", "0", "--num-warmups", str(_WARM_UPS), "--temperature", "0",
        "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99", "--disable-tqdm",
        "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    with (log_dir / "load-client.log").open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    said = json.loads(result.read_text()) if code == 0 and result.is_file() else None
    if said is None or said["completed"] != count:
        what = (
            f"ended with status {code}" if said is None else f"had {count - said['completed']} of {count} requests fail"
        )
        raise DraftsmithError(
            f"vLLM's load generator {what} at {rate:g} requests a second; see {log_dir / 'load-client.log'} and the servers' "
            "logs beside it."
        )
    return {
        "requests_per_second": said["request_throughput"],
        "tokens_per_second": said["output_throughput"],
        "first_token_seconds": said["median_ttft_ms"] / 1000,
        "first_token_seconds_p99": said["p99_ttft_ms"] / 1000,
        "seconds_per_token": said["median_tpot_ms"] / 1000,
        "seconds_per_token_p99": said["p99_tpot_ms"] / 1000,
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
