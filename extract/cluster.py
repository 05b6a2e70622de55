"""Extraction on the machines of a Ray cluster. The only module that imports Ray.

On each machine one actor runs the engines, as `engine.run_engines` does here, and writes shard files into the store's
directory, which all machines see. The driver hands out prompts in pieces, hears of each finished shard, and alone
publishes the manifest: a shard counts once the driver has adopted it. States pass neither through the driver nor through
Ray.

A machine is dead when Ray says so or when all its engines have failed. What it was given and no adopted shard holds goes
to the others. If it still lives somewhere and goes on writing, nobody listens: its files are left over and are removed.
"""

from __future__ import annotations

import queue
import secrets
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.config.recipe import Recipe
from draftsmith.extract.handoff_folder import handoff_folder, locked_folder
from draftsmith.extract.requests import ExtractRequest
from draftsmith.run.errors import DraftsmithError, UserError
from draftsmith.run.process import disable_malloc_trim
from draftsmith.run.progress import console
from draftsmith.store.format import CorruptStore, Shard, StoreIdentity
from draftsmith.store.writer import ShardMaker, StoreWriter, most_bytes

_SECONDS_BETWEEN_REPORTS = 1.0
_SECONDS_TO_STOP = 60.0


@dataclass(frozen=True)
class Report:
    """What has happened on a machine since its last report. Actor to driver."""

    shards: list[Shard]
    """Finished, in the store's directory."""
    open_sequences: int
    open_tokens: int
    """What waits to be written into the next shard."""
    room: int
    """Prompts it could take now."""
    failure: str | None
    """Why the machine has given up."""
    mistake: bool
    """The failure is the user's to mend and ends the run."""


class Machine:
    """The actor: the engines of one machine, and the shards that they fill."""

    def __init__(self, recipe: Recipe, identity: StoreIdentity, directory: Path, name: str) -> None:
        self._recipe, self._identity, self._directory, self._name = recipe, identity, directory, name
        # As many as the engines take (`Job.window`), and half as many to hand to them before the driver answers.
        self._capacity = 3 * recipe.extract.max_num_seqs * recipe.extract.workers
        self._inbox: queue.SimpleQueue[ExtractRequest | None] = queue.SimpleQueue()
        self._finished_shards: queue.SimpleQueue[Shard] = queue.SimpleQueue()
        self._maker = self._full = ShardMaker(identity, recipe.extract.compression)  # gathering, and being written
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="draftsmith-store")
        self._writing: Future[None] | None = None
        self._shards_written = 0
        self._given = self._handed_on = self._finished = 0  # prompts: by the driver, to the engines, and answered
        self._failure: str | None = None
        self._mistake = False
        self._news = threading.Event()
        self._news.set()  # that there is room
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def exchange(self, requests: list[ExtractRequest]) -> Report:
        """Take more prompts; wait a moment for something to report."""
        self._given += len(requests)
        for request in requests:
            self._inbox.put(request)
        self._news.wait(_SECONDS_BETWEEN_REPORTS)
        self._news.clear()
        failure, mistake = self._failure, self._mistake  # first: all shards finished before are in the report
        shards = [self._finished_shards.get() for _ in range(self._finished_shards.qsize())]
        room = max(0, self._capacity - (self._given - self._finished))
        makers = {id(maker): maker for maker in (self._full, self._maker)}.values()
        sequences, tokens = sum(len(one.sample_ids) for one in makers), sum(one.tokens for one in makers)
        return Report(shards, sequences, tokens, room, failure, mistake)

    def stop(self) -> None:
        """End the engines; to be called when everything is answered."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._extract()
        except BaseException as error:
            self._mistake = isinstance(error, UserError)
            self._failure = str(error) if isinstance(error, DraftsmithError) else f"{type(error).__name__}: {error}"
            self._news.set()

    def _extract(self) -> None:
        from draftsmith.extract.extract import extracted_sequences, spool_sequences, store_identity
        from draftsmith.target.info import describe_target
        from draftsmith.target.prepare import prepare_target

        if not (self._directory / _marker(self._name)).is_file():
            raise UserError(
                f"The store's folder {self._directory} is not the one that the driver writes to. Put the run on a file system "
                "that all machines mount under the same path (`--runs`)."
            )
        target = describe_target(prepare_target(self._recipe.target), self._recipe.target)
        here = store_identity(self._recipe, target, self._identity.layer_ids)
        self._identity.require_fields(
            vars(here),
            self._directory,
            way_out="All machines need the same target: pin `target.revision`, or put its directory where all see it.",
        )
        waiting = spool_sequences(self._recipe.extract)
        handoff = most_bytes(
            self._identity, self._recipe.extract.compression, tokens=waiting * self._recipe.engine.max_model_len,
            sequences=waiting,
        )  # fmt: skip
        disable_malloc_trim()
        with (
            _local_folder() as folder,
            handoff_folder(folder, handoff) as handoff_files,
            self._behind,
            closing(
                extracted_sequences(self._recipe, target, self._identity, self._requests(), folder, handoff_files)
            ) as sequences,
        ):
            for sequence in sequences:
                self._maker.add(sequence)
                self._finished += 1
                if self._maker.tokens >= self._recipe.extract.shard_tokens:
                    self._close_shard()
                if self._given - self._finished <= self._capacity * 3 // 4:
                    self._news.set()
            self._wait_for_shard()

    def _requests(self) -> Iterator[ExtractRequest | None]:
        """What the driver gave, for the engines. When they run dry, what they made is written: it may be all there is."""
        while True:
            idle = self._handed_on == self._finished
            if idle:
                if self._inbox.empty() and self._maker.tokens:
                    self._close_shard()
                self._wait_for_shard()  # nobody else would hear that it failed
            try:
                request = self._inbox.get(block=idle)
            except queue.Empty:
                yield None
                continue
            if request is None:
                return
            self._handed_on += 1
            yield request

    def _close_shard(self) -> None:
        """Have the open shard written, while the engines are heard. The one before is waited for: memory holds two at most."""
        self._wait_for_shard()
        self._full, self._maker = self._maker, ShardMaker(self._identity, self._recipe.extract.compression)
        self._writing = self._behind.submit(self._write_shard, self._full)

    def _wait_for_shard(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write_shard(self, full: ShardMaker) -> None:
        path = self._directory / f"shard-{self._name}-{self._shards_written:05d}.safetensors"
        self._finished_shards.put(full.write(path))
        self._shards_written += 1
        self._news.set()


@contextmanager
def _local_folder() -> Iterator[Path]:
    """A folder on this machine's own disk, for logs, and for handoff files where memory has no room for them.

    Of an actor that fails the logs stay, until the next one comes: the error names them.
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
    """Have all requests answered by the machines of a Ray cluster, and their shards adopted by `writer`.

    Args:
        requests: read as machines have room.
        directory: the store's, on a file system that all machines mount under this path.

    Yields:
        Now and then, how many sequences there are, and how many tokens they have. Both go back when a machine dies.

    Raises:
        UserError: Ray, a cluster, enough machines or the common file system is missing, or a machine cannot do what the
            recipe asks.
        DraftsmithError: every machine failed; with the reason of the last.
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
                name = secrets.token_hex(4)  # nobody else's, a machine of an earlier driver included
                (directory / _marker(name)).touch()
                actor = ray.remote(Machine).options(**resources, scheduling_strategy=_only_on(node))
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
    """Ray's of the actor `Machine`."""
    address: str
    given: dict[int, ExtractRequest] = field(default_factory=dict)
    """By sample id: what it was given and no adopted shard holds."""
    open_sequences: int = 0
    open_tokens: int = 0


def balance_tokens(
    ray: Any, machines: list[_Machine], requests: Iterable[ExtractRequest], writer: StoreWriter
) -> Iterator[tuple[int, int]]:
    """The driver's loop, as `extract_on_machines`. Machines that die are taken off the list `machines`."""
    pending = iter(requests)
    returned: deque[ExtractRequest] = deque()  # of machines that died
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
            if report.mistake:
                raise UserError(f"On the machine {machine.address}: {failure}")
        except (ray.exceptions.RayError, CorruptStore, ValueError) as error:
            failure = str(error)
        if failure is not None:
            machines.remove(machine)
            said = f"The machine {machine.address} failed: {failure.strip()}"
            if not machines:
                raise DraftsmithError(f"{said}\nNo machine is left. Run the stage again to continue.")
            console.print(f"extract: {said}\nThe other machines take over.", style="yellow", markup=False)
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
    """A file that the driver puts into the store's directory for a machine to see."""
    return f".machine-{name}"


@contextmanager
def _connection() -> Iterator[Any]:
    """Ray, connected to the cluster that this machine belongs to."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "`extract.machines` needs Ray, on every machine: pip install 'draftsmith[ray]'. Leave `extract.machines` out to "
            "extract on this machine alone."
        ) from None
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address="auto", logging_level="warning")
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            "`extract.machines` needs a Ray cluster that this machine belongs to, and there is none to connect to "
            f"({str(error).strip().splitlines()[0]}). Start one with `ray start --head` here and `ray start "
            "--address=HEAD:6379` on the others."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _nodes(ray: Any, recipe: Recipe) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """The machines to use, Ray's descriptions, each with the resources to ask of it: GPUs for its engines, or, where no
    machine of the cluster has any, all its cores."""
    options = recipe.extract
    gpus = options.workers * recipe.engine.tensor_parallel_size
    alive = [node for node in ray.nodes() if node["Alive"]]
    if any(node["Resources"].get("GPU", 0) for node in alive):
        usable = [(node, {"num_gpus": gpus}) for node in alive if node["Resources"].get("GPU", 0) >= gpus]
        what = f"{gpus} GPUs (`extract.workers` times `engine.tensor_parallel_size`)"
    else:
        usable = [
            (node, {"num_cpus": int(node["Resources"]["CPU"])})
            for node in alive
            if node["Resources"].get("CPU", 0) >= 1
        ]
        what = "a core for Ray's use"
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
