"""The target and its drafter behind vLLM's own OpenAI-compatible server."""

import json
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from draftsmith.config.evaluation import RESULTS_VERSION
from draftsmith.config.methods import Method, NoSpeculation, TrainedDrafter
from draftsmith.config.recipe import Recipe
from draftsmith.data.results_in_words import changed_answers
from draftsmith.engine.environment import float32_environment
from draftsmith.engine.flags import flag_name
from draftsmith.engine.options import check_options
from draftsmith.engine.speculation import check_graph_sizes, drafter_sha256, method_config, own_drafter
from draftsmith.run.errors import UserError
from draftsmith.run.progress import console
from draftsmith.serve.schedule import schedule_of
from draftsmith.serve.speculator import is_trained_since, speculator, trains_no_drafter
from draftsmith.serve.vllm_server import VllmServer, require_free, served_names, server_command
from draftsmith.target.info import describe_target
from draftsmith.target.prepare import prepare_target


def serve(
    recipe: Recipe,
    run_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    k: int | None = None,
    api_key: str | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; returns 0 then.

    Args:
        recipe: `target`, `engine`, `serve` and `evaluate` are read.
        run_dir: `runs/NAME`, with the drafter in `vllm/` if the method uses the run's own.
        k: number of speculative tokens. None takes the method's; for the run's own drafter, tuning's schedule, the K that
            evaluation chose, or `evaluate.acceptance_k`, in this order.
        api_key: API key that clients must send; None requires none.

    Raises:
        UserError: the method cannot serve this target, or there is no drafter.
        DraftsmithError: the server ended by itself; with the reason from its log.
    """
    check_options(recipe.engine)
    if api_key is not None and not api_key.strip():
        raise UserError(
            "The API key is empty, with which vLLM lets everyone in. Give one (is the variable set that --api-key names?), or leave --api-key out."
        )
    target = describe_target(prepare_target(recipe.target), recipe.target)
    method = served_method(recipe, run_dir, k)
    speculative = method_config(
        method, target, own_drafter=run_dir / "vllm", tensor_parallel_size=recipe.engine.tensor_parallel_size
    )
    options = recipe.engine.options | recipe.serve.vllm_args
    check_graph_sizes(options, speculative)
    name = (served_names(recipe) or [target.name])[0]
    command = server_command(recipe, target.path, speculative, name=name, host=host, port=port)
    url = _url(recipe, host, port)
    require_free(host, port)
    console.print(f"serve: {name}, {description(speculative)}", highlight=False, soft_wrap=True)

    # A list, whose append needs no lock: an Event's is held for a moment by the wait that the handler interrupts.
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    server = VllmServer(
        command,
        engine=recipe.engine,
        url=url,
        show=sys.stderr.write,
        api_key=api_key,
        variables=float32_environment(recipe.target.dtype),
    )
    try:
        if server.wait_ready(lambda: received):
            example = curl_command(url, name, with_key=api_key is not None)
            console.print(f"serve: ready. Try\n\n{example}\n", highlight=False, soft_wrap=True)
            server.wait_stopped(lambda: received)
        return 0
    finally:
        server.end()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _url(recipe: Recipe, host: str, port: int) -> str:
    """Where this machine reaches the server."""
    tls = any(flag_name(key) == "ssl-certfile" and value for key, value in recipe.serve.vllm_args.items())
    address = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{address}:{port}"


def served_method(recipe: Recipe, run_dir: Path, k: int | None) -> Method:
    """The recipe's method with its number of tokens; without one, the run's own drafter, or what is measured in its place."""
    if trains_no_drafter(recipe, run_dir):
        return _method_alone(recipe, run_dir, k)
    method = recipe.serve.method or own_drafter(run_dir / "vllm")
    own = isinstance(method, TrainedDrafter) and method.model is None
    if own and is_trained_since(run_dir):
        console.print(
            f"The run was trained again since the drafter in {run_dir / 'vllm'} was made from it. `draftsmith convert` makes the new one.",
            highlight=False,
            soft_wrap=True,
        )
    if k is None and own and not (method.num_speculative_tokens or method.num_speculative_tokens_per_batch_size):
        schedule = schedule_of(run_dir, recipe.tune.output)
        if schedule is not None:
            ranges = tuple((first, last, k) for first, last, k in schedule)
            return method.model_copy(update={"num_speculative_tokens_per_batch_size": ranges})
        k = chosen_k(recipe, run_dir, drafter_sha256(run_dir / "vllm")) or recipe.evaluate.acceptance_k
    if k is None or method.method == "none":
        return method
    return _with_k(method, k)


def _method_alone(recipe: Recipe, run_dir: Path, k: int | None) -> Method:
    """The method of a recipe that trains no drafter, with the schedule or the number of tokens that was found best for it, unless the recipe
    gives one."""
    method = recipe.serve.method
    if isinstance(method, NoSpeculation):
        return method
    measured = speculator(recipe, run_dir)
    if k is not None:
        return _with_k(measured.method, k)
    if method is not None and method.model_fields_set & {
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
    }:
        return method
    schedule = schedule_of(run_dir, recipe.tune.output, measured.sha256)
    if schedule is not None:
        ranges = tuple((first, last, tokens) for first, last, tokens in schedule)
        return measured.method.model_copy(update={"num_speculative_tokens_per_batch_size": ranges})
    chosen = chosen_k(recipe, run_dir, measured.sha256)
    return measured.method if chosen is None else _with_k(measured.method, chosen)


def _with_k(method: Method, k: int) -> Method:
    for name in ("num_speculative_tokens", "num_speculative_tokens_per_batch_size"):
        typed = getattr(method, name)
        if name in method.model_fields_set and typed not in (None, k):
            console.print(f"serve: {name} {typed} gives way to {k}", highlight=False, markup=False, soft_wrap=True)
    return method.model_copy(update={"num_speculative_tokens": k, "num_speculative_tokens_per_batch_size": None})


def description(speculative: dict[str, Any] | None) -> str:
    if speculative is None:
        return "without speculation"
    model = f" {speculative['model']}," if "model" in speculative else ""
    by_load = speculative.get("num_speculative_tokens_per_batch_size")
    if by_load:
        tokens = ", ".join(f"{k} at {first} to {last} sequences" for first, last, k in by_load)
        return f"{speculative['method']},{model} speculative tokens by load: {tokens}"
    return f"{speculative['method']},{model} {speculative['num_speculative_tokens']} speculative tokens"


def chosen_k(recipe: Recipe, run_dir: Path, speculates_with: Mapping[str, str]) -> int | None:
    """The K that evaluation chose for this drafter; None if it has not run, or was of another one.

    Args:
        speculates_with: `Speculator.sha256` of what is served.

    Raises UserError: `results.json` is not an evaluation's."""
    path = run_dir / recipe.evaluate.output / "results.json"
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text())
        chosen, measured = int(results["num_speculative_tokens"]), results.get("drafter_sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} is not the results of an evaluation. Delete it, or give the number of speculative tokens with -k."
        ) from None
    if measured == speculates_with:
        if results.get("schema_version") == RESULTS_VERSION and (wrong := changed_answers(results, methods=False)):
            console.print(
                f"[bold yellow]warning:[/] with this drafter the text changed in {escape(str(path))}: {escape('; '.join(wrong))}",
                highlight=False,
                soft_wrap=True,
            )
        return chosen
    console.print(
        f"serve: {path} is not known to be of this drafter; K is not taken from there", highlight=False, soft_wrap=True
    )
    return None


def curl_command(url: str, name: str, *, with_key: bool = False) -> str:
    """An example request as a shell command; the key comes from the shell's environment."""
    body = {"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if with_key else ""
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
