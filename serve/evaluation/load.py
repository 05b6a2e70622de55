"""Latency and throughput of two servers, baseline and speculative, at several request rates, with vLLM's own load generator.

Batches of a fixed size show what an engine can do; real requests arrive at random times. Both servers are up side by side and
alternate at every rate, with the same prompts at the same moments of a Poisson process.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.config.sampling import Sampling
from draftsmith.engine.environment import float32_environment, is_cpu
from draftsmith.engine.flags import flag_name
from draftsmith.engine.platform import platform_plugins
from draftsmith.engine.speculation import check_graph_sizes
from draftsmith.run.errors import DraftsmithError
from draftsmith.run.progress import Bar
from draftsmith.serve.evaluation.lineup import Placement
from draftsmith.serve.evaluation.partial import PartialResults
from draftsmith.serve.evaluation.schema import AtRate
from draftsmith.serve.plugin.suffix import MEASURING
from draftsmith.serve.vllm_server import VllmServer, server_command
from draftsmith.target.info import TargetInfo

_WARM_UPS = 8
"""Requests before any is timed."""
_FEWEST_FOR_P99 = 100
"""Requests; of fewer the 99th percentile is the slowest one, or between that and the next."""


def at_request_rates(
    recipe: Recipe,
    target: TargetInfo,
    speculative: dict[str, Any],
    prompts: Sequence[str],
    log_dir: Path,
    *,
    suite: str,
    placement: Placement,
    partial: PartialResults,
    add_special_tokens: bool = False,
) -> None:
    """Measure two servers at every rate of `evaluate.request_rates` that `partial` does not have yet.

    Args:
        recipe: `engine`, `serve.vllm_args` (except TLS and names: both listen on loopback) and `evaluate` are read.
        target: the target to serve.
        speculative: vLLM's `speculative_config` of one of the servers.
        prompts: as texts, in the target's chat template if it has one; as many requests are sent at every rate.
        log_dir: folder for the servers' logs.
        suite: the name of the prompts' suite, for the results.
        placement: the machine's room for both.
        add_special_tokens: whether the server adds the tokenizer's special tokens, which a chat template writes itself.

    Raises:
        DraftsmithError: a server ended, or a request failed.
    """
    rates = [rate for rate in recipe.evaluate.request_rates if f"{rate:g}" not in partial.rates]
    if not rates:
        return
    with ExitStack() as ends:
        folder = Path(ends.enter_context(TemporaryDirectory()))
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        key = secrets.token_hex(16)
        servers = _start(recipe, target, speculative, placement, key, log_dir, ends)
        with Bar("request rates", total=len(rates) * len(servers), unit="runs") as bar:
            for number, rate in enumerate(rates):
                at: dict[str, AtRate] = {}
                for name in list(servers)[:: 1 if number % 2 else -1]:
                    client = _client(
                        servers[name].url,
                        rate,
                        len(prompts),
                        target,
                        recipe.evaluate.timing_tokens,
                        folder,
                        recipe.evaluate.sampling,
                        add_special_tokens=add_special_tokens,
                    )
                    at[name] = _ask(client, key, rate, len(prompts), folder / "result.json", log_dir)
                    bar.update(number * len(servers) + len(at))
                partial.rates[f"{rate:g}"] = {
                    "suite": suite,
                    "requests": len(prompts),
                    "num_speculative_tokens": speculative["num_speculative_tokens"],
                    "baseline": at["baseline"],
                    "speculative": at["speculative"],
                }
                partial.save()


def _start(
    recipe: Recipe,
    target: TargetInfo,
    speculative: dict[str, Any],
    placement: Placement,
    key: str,
    log_dir: Path,
    ends: ExitStack,
) -> dict[str, VllmServer]:
    """Both servers, ready; `ends` ends them."""
    servers: dict[str, VllmServer] = {}
    with Bar("start servers", total=2, unit="servers") as bar:
        for (name, config), port, place in zip(
            {"baseline": None, "speculative": speculative}.items(), _free_ports(2), placement.places(), strict=True
        ):
            command = _command(recipe, target, config, port=port, memory_share=place.memory_share)
            log = ends.enter_context((log_dir / f"server-{name}.log").open("w", encoding="utf-8", buffering=1))
            url = f"http://127.0.0.1:{port}"
            servers[name] = VllmServer(
                command,
                engine=recipe.engine,
                url=url,
                show=log.write,
                api_key=key,
                gpus=place.gpus,
                variables={MEASURING: "1", **float32_environment(recipe.target.dtype)},
            )
            ends.callback(servers[name].end)
            if not is_cpu():  # on a GPU each measures the free memory as it starts
                servers[name].wait_ready()
        for number, server in enumerate(servers.values(), start=1):
            server.wait_ready()
            bar.update(number)
    return servers


def check_servers(recipe: Recipe, target: TargetInfo, speculative: Iterable[dict[str, Any] | None]) -> None:
    """Check what can be known before the servers start, which is after hours of other measurements.

    Args:
        recipe: as for `at_request_rates`.
        speculative: vLLM's `speculative_config` of each server that may be measured; None for the baseline.

    Raises:
        UserError: an option is set elsewhere, or a size of CUDA graphs does not fit a number of speculative tokens.
    """
    for config in speculative:
        check_graph_sizes(recipe.engine.options | recipe.serve.vllm_args, config)
        _command(recipe, target, config, port=0, memory_share=1.0)


def _command(
    recipe: Recipe, target: TargetInfo, speculative: dict[str, Any] | None, *, port: int, memory_share: float
) -> list[str]:
    """A server's command line."""
    own = {
        name: value
        for name, value in recipe.serve.vllm_args.items()
        if not flag_name(name).startswith(("ssl", "served"))
    }
    without_tls = recipe.model_copy(update={"serve": recipe.serve.model_copy(update={"vllm_args": own})})
    command = server_command(
        without_tls,
        target.path,
        speculative,
        name=target.name,
        host="127.0.0.1",
        port=port,
        memory_share=memory_share,
    )
    command.append("--no-enable-prefix-caching")  # the same prompts at every rate must cost the same
    # Answers are sampled as the recipe says: what a request does not name would come from the target's generation_config.json, as a repetition
    # penalty. Its end-of-text tokens count all the same.
    return [*command, "--generation-config", "vllm", "--override-generation-config", "{}"]


def _client(
    url: str,
    rate: float,
    count: int,
    target: TargetInfo,
    max_tokens: int,
    folder: Path,
    sampling: Sampling,
    *,
    add_special_tokens: bool,
) -> list[str]:
    """The load generator's command line."""
    return [
        sys.executable, "-m", "draftsmith.serve.evaluation.load_client", str(os.getpid()), "--backend", "openai", "--base-url", url,
        "--model", str(target.path), "--served-model-name", target.name, "--dataset-name", "custom",
        "--dataset-path", str(folder / "prompts.jsonl"), "--custom-output-len", str(max_tokens), "--num-prompts", str(count),
        # Prompts in a chat template have its first token already.
        "--skip-chat-template", "--extra-body", json.dumps({"add_special_tokens": add_special_tokens}), "--disable-shuffle",
        "--request-rate", str(rate), "--seed", "0", "--num-warmups", str(_WARM_UPS),
        *_sampling_flags(sampling),
        "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json",
        *(["--trust-remote-code"] if target.trust_remote_code else []),
    ]  # fmt: skip


def _sampling_flags(sampling: Sampling) -> list[str]:
    flags = ["--temperature", f"{sampling.temperature:g}"]
    if sampling.greedy:
        return flags
    return [
        *flags,
        "--top-p",
        f"{sampling.top_p:g}",
        *([] if sampling.top_k is None else ["--top-k", str(sampling.top_k)]),
    ]


def _ask(command: Sequence[str], key: str, rate: float, count: int, result: Path, log_dir: Path) -> AtRate:
    """One run of the load generator."""
    environment = os.environ | {
        "VLLM_PLUGINS": ",".join(platform_plugins()), "VLLM_LOGGING_LEVEL": "WARNING", "OPENAI_API_KEY": key, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    result.unlink(missing_ok=True)
    with (log_dir / "load-client.log").open("w") as log:
        done = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False, start_new_session=True
        )
    said = json.loads(result.read_text()) if done.returncode == 0 and result.is_file() else None
    if said is None or said["completed"] != count:
        what = (
            f"ended with status {done.returncode}"
            if said is None
            else f"had {count - said['completed']} of {count} requests fail"
        )
        raise DraftsmithError(
            f"vLLM's load generator {what} at {rate:g} requests per second; see {log_dir / 'load-client.log'} and the servers' "
            "logs beside it."
        )
    p99 = count >= _FEWEST_FOR_P99
    return {
        "requests_per_second": said["request_throughput"],
        "tokens_per_second": said["output_throughput"],
        "first_token_seconds": said["median_ttft_ms"] / 1000,
        "first_token_seconds_p99": said["p99_ttft_ms"] / 1000 if p99 else None,
        "seconds_per_token": said["median_tpot_ms"] / 1000,
        "seconds_per_token_p99": said["p99_tpot_ms"] / 1000 if p99 else None,
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
