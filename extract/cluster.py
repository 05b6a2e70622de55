"""Extraction on the machines of a Ray cluster. The only module that imports Ray.

On each machine one actor runs the engines (`worker.run_engines`), which write shard files into the store's directory, a folder
that all machines mount. The driver hands out requests in batches, receives a report for each finished shard, and alone
publishes the manifest: a shard counts once the driver has adopted it.

A machine is dead when Ray says so or when all its engines have failed. Its requests that are in no adopted shard go to the
others. If it is still alive somewhere and keeps writing, its files are never adopted and are removed in the end.
"""

from __future__ import annotations

import queue
import secrets
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.extract.handoff_folder import handoff_folder, locked_folder
from draftsmith.extract.job import engine_job, handoff_bytes, sequences_in_a_step, store_identity
from draftsmith.extract.requests import ExtractRequest
from draftsmith.extract.worker import run_engines
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.progress import console
from draftsmith.store.format import CorruptStore, Shard, StoreIdentity
from draftsmith.store.writer import StoreWriter
from draftsmith.target.info import describe_target
from draftsmith.target.prepare import prepare_target

_SECONDS_BETWEEN_REPORTS = 1.0
_SECONDS_TO_STOP = 60.0


@dataclass(frozen=True)
class Report:
    """What happened on a machine since its last report. Actor to driver."""

    shards: list[Shard]
    """Finished shards in the store's directory."""
    open_sequences: int
    open_tokens: int
    """Sequences and tokens that are in no finished shard yet."""
    room: int
    """Requests that the machine could take now."""
    failure: str | None
    """Why the machine has given up."""
    users_mistake: bool
    """The failure is a `UserError` and ends the run."""


class MachineActor:
    """The actor: one machine's engines."""

    def __init__(self, recipe: Recipe, identity: StoreIdentity, directory: Path, name: str) -> None:
        self._recipe, self._identity, self._directory, self._name = recipe, identity, directory, name
        # What the engines take (`Job.window`), and half as many more to keep them busy until the driver's next answer.
        self._capacity = 3 * sequences_in_a_step(recipe.extract)
        self._inbox: queue.SimpleQueue[ExtractRequest | None] = queue.SimpleQueue()
        self._finished_shards: queue.SimpleQueue[Shard] = queue.SimpleQueue()
        # Requests received from the driver, passed on to the engines, and in shards.
        self._given = self._passed_on = self._written = 0
        self._unwritten = (0, 0)  # sequences that are finished and in no shard yet, and their tokens
        self._failure: str | None = None
        self._users_mistake = False
        self._news = threading.Event()
        self._news.set()  # there is room for requests
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def exchange(self, requests: list[ExtractRequest]) -> Report:
        """Take more requests; wait a moment for something to report."""
        self._given += len(requests)
        for request in requests:
            self._inbox.put(request)
        self._news.wait(_SECONDS_BETWEEN_REPORTS)
        self._news.clear()
        failure, users_mistake = self._failure, self._users_mistake  # first: the report then has all shards before it
        shards = [self._finished_shards.get() for _ in range(self._finished_shards.qsize())]
        return Report(shards, *self._unwritten, max(0, self._room()), failure, users_mistake)

    def stop(self) -> None:
        """End the engines, after all requests are finished."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._extract()
        except BaseException as error:
            self._users_mistake = isinstance(error, UserError)
            self._failure = str(error) if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {error}"
            self._news.set()

    def _extract(self) -> None:
        if not (self._directory / _marker(self._name)).is_file():
            raise UserError(
                f"The store's folder {self._directory} is not the one that the driver writes to. Put the run on a file system "
                "that all machines mount at the same path (`--runs`)."
            )
        target = describe_target(prepare_target(self._recipe.target), self._recipe.target)
        identity = store_identity(self._recipe, target, self._identity.layer_ids)
        self._identity.require_fields(
            vars(identity),
            self._directory,
            way_out="All machines need the same target: pin `target.revision`, or put its directory on a shared file system.",
        )
        tokens = sequences_in_a_step(self._recipe.extract) * self._recipe.engine.max_model_len
        room = handoff_bytes(self._recipe, self._identity, tokens=tokens)
        with (
            _local_folder() as logs,
            handoff_folder(logs, room) as handoff,
            closing(
                run_engines(
                    engine_job(self._recipe, target, self._identity, room),
                    self._requests(),
                    self._recipe.engine,
                    num_workers=self._recipe.extract.workers,
                    logs=logs,
                    handoff=handoff,
                    store=self._directory,
                )
            ) as progress,
        ):
            for shard, sequences, tokens in progress:
                self._unwritten = sequences, tokens
                if shard is not None:
                    self._written += shard.sequences
                    self._finished_shards.put(shard)
                if shard is not None or self._room() >= self._capacity // 4:
                    self._news.set()

    def _requests(self) -> Iterator[ExtractRequest | None]:
        """The driver's requests, for the engines; None while there are none and engines have something to report."""
        while True:
            try:
                request = self._inbox.get(block=self._passed_on == self._written)
            except queue.Empty:
                yield None
                continue
            if request is None:
                return
            self._passed_on += 1
            yield request

    def _room(self) -> int:
        """Requests that the engines could take now."""
        finished = self._written + self._unwritten[0]
        return self._capacity - (self._given - finished)


@contextmanager
def _local_folder() -> Iterator[Path]:
    """A folder on this machine's own disk, for logs, and for handoff files if memory has no room for them.

    A failed actor's logs, which its error names, stay until the next actor starts.
    """
    with locked_folder(Path(tempfile.gettempdir()), "draftsmith-machine-") as folder:
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


def extract_on_machines(
    recipe: Recipe,
    identity: StoreIdentity,
    requests: Iterable[ExtractRequest],
    writer: StoreWriter,
    directory: Path,
) -> Iterator[tuple[int, int]]:
    """Run all requests on the machines of a Ray cluster; `writer` adopts their shards.

    Args:
        requests: read as machines have room.
        directory: the store's, on a file system that all machines mount at this path.

    Yields:
        From time to time, the number of sequences and of their tokens. Both decrease when a machine dies.

    Raises:
        UserError: Ray, a cluster, enough machines or the shared file system is missing, or a machine cannot do what the
            recipe asks.
        DraftsmithError: every machine failed; with the last one's reason.
    """
    directory = directory.resolve()
    for path in directory.glob(_marker("*")):
        path.unlink()  # left by a run that was killed
    with _connection() as ray:
        nodes = _nodes(ray, recipe)
        console.print(f"extract: on {', '.join(node['NodeManagerAddress'] for node, _ in nodes)}", highlight=False)
        machines: list[_Machine] = []
        try:
            for node, resources in nodes:
                name = secrets.token_hex(4)  # unique, also among machines of earlier drivers
                (directory / _marker(name)).touch()
                actor = ray.remote(MachineActor).options(**resources, scheduling_strategy=_only_on(node))
                handle = actor.remote(recipe, identity, directory, name)
                machines.append(_Machine(handle, node["NodeManagerAddress"]))
            yield from balance_tokens(ray, machines, requests, writer)
            stopping = [machine.handle.stop.remote() for machine in machines]
            ray.wait(stopping, num_returns=len(stopping), timeout=_SECONDS_TO_STOP)
        finally:
            for machine in machines:
                ray.kill(machine.handle)
            for path in directory.glob(_marker("*")):
                path.unlink()


@dataclass
class _Machine:
    """The driver's side of a machine."""

    handle: Any
    """Ray's handle of its `MachineActor`."""
    address: str
    given: dict[int, ExtractRequest] = field(default_factory=dict)
    """By sample id: its requests that are in no adopted shard."""
    open_sequences: int = 0
    open_tokens: int = 0


def balance_tokens(
    ray: Any, machines: list[_Machine], requests: Iterable[ExtractRequest], writer: StoreWriter
) -> Iterator[tuple[int, int]]:
    """The driver's loop; yields and raises as `extract_on_machines`. Dead machines are removed from the list `machines`."""
    pending = iter(requests)
    returned: deque[ExtractRequest] = deque()  # by machines that died
    sequences = tokens = 0  # adopted
    reports = {machine.handle.exchange.remote([]): machine for machine in machines}
    while True:
        (reference,), _ = ray.wait(list(reports), num_returns=1)
        machine = reports.pop(reference)
        failure, room = None, 0
        try:
            report: Report = ray.get(reference)
            for shard in report.shards:
                for sample_id in writer.adopt(shard):
                    machine.given.pop(sample_id)
                sequences += shard.sequences
                tokens += shard.tokens
            machine.open_sequences, machine.open_tokens = report.open_sequences, report.open_tokens
            failure, room = report.failure, report.room
            if report.users_mistake:
                raise UserError(f"On the machine {machine.address}: {failure}")
        except (ray.exceptions.RayError, CorruptStore, ValueError) as error:
            failure = str(error)
        if failure is not None:
            machines.remove(machine)
            message = f"The machine {machine.address} failed: {failure.strip()}"
            if not machines:
                raise DraftsmithError(f"{message}\nNo machine is left. Run the stage again to continue.")
            console.print(f"extract: {message}\nThe other machines take over.", style="yellow", markup=False)
            returned.extend(machine.given.values())
            ray.kill(machine.handle)
        else:
            batch: list[ExtractRequest] = []
            while len(batch) < room:
                request = returned.popleft() if returned else next(pending, None)
                if request is None:
                    break
                batch.append(request)
            machine.given |= {request.sample_id: request for request in batch}
            reports[machine.handle.exchange.remote(batch)] = machine
        yield (
            sequences + sum(machine.open_sequences for machine in machines),
            tokens + sum(machine.open_tokens for machine in machines),
        )
        if not returned and not any(machine.given for machine in machines):
            request = next(pending, None)
            if request is None:
                return
            returned.append(request)


def _marker(name: str) -> str:
    """A file in the store's directory by which a machine knows that it sees the driver's directory."""
    return f".machine-{name}"


@contextmanager
def _connection() -> Iterator[Any]:
    """Ray, connected to this machine's cluster."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "`extract.machines` needs Ray on every machine: `pip install -e '.[ray]'` in Draftsmith's folder. Leave `extract.machines` out to "
            "extract on this machine alone."
        ) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address="auto", logging_level="warning")
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            "`extract.machines` needs a Ray cluster that this machine belongs to, and none can be connected to "
            f"({str(error).strip().splitlines()[0]}). Start one with `ray start --head` here and `ray start "
            "--address=HEAD:6379` on the others."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _nodes(ray: Any, recipe: Recipe) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """The machines to use, as Ray describes them, each with the resources to reserve: GPUs for its engines, or all its
    cores if no machine of the cluster has a GPU."""
    options = recipe.extract
    gpus = options.workers * recipe.engine.tensor_parallel_size
    alive = [node for node in ray.nodes() if node["Alive"]]
    if any(node["Resources"].get("GPU", 0) for node in alive):
        usable = [(node, {"num_gpus": gpus}) for node in alive if node["Resources"].get("GPU", 0) >= gpus]
        what = f"{gpus} GPUs (`extract.workers` times those of an engine)"
    else:
        usable = [
            (node, {"num_cpus": int(node["Resources"]["CPU"])})
            for node in alive
            if node["Resources"].get("CPU", 0) >= 1
        ]
        what = "at least one core"
    wanted = max(1, len(usable)) if options.machines == "all" else options.machines
    assert wanted is not None
    if len(usable) < wanted:
        raise UserError(
            f"`extract.machines: {options.machines}` needs {wanted} machines with {what}, and of the {len(alive)} machines in "
            f"the Ray cluster {len(usable)} have that. Add machines (`ray start`), or ask for fewer."
        )
    return usable[:wanted]


def _only_on(node: dict[str, Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
