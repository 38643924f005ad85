"""How dear the module is, against a floor taken in the same run.

    python -B .github/scripts/benchmark.py [--json] [--quick]

The floor of an operation is what no implementation can leave out: SHA-256 over the canonical bytes of the very
documents that the operation has to digest or emit, each encoded by one `json.JSONEncoder` built beforehand. The keys
of each document are those of section 12 of the contract and the values come from the call and the package it gave;
before anything is timed, each document must have the digest that the package, or the module's public function, names.

    read dispatch       request, fingerprint, principal reference, model result, call binding
    approved write      those and the status reference and the approval: seven
    local replay        those of a read and the status reference
    validate_result     request, principal reference, model result, call binding; of a write, the status reference too
    to_openai_responses those of its validation, and the model result once more, for the text that goes out

A principal reference counts although the module remembers it. Binding a proposal, which already writes the text of
each of its values, and granting an approval stand outside the clock, as do the dispatcher and the ledger, which each
batch gets new.

Every round times one batch of each contestant, floor and operation next to each other, forwards and backwards by
turns. Shown are the median of each and the median of the rounds' ratios: a busy machine slows both sides of a round,
and the ratio holds. Processor time is counted, except for whole processes and on Windows. The collector of cycles is
off within a batch, as it is in `timeit`, and catches up between batches.

`--quick` takes fewer rounds, for a first look. `--json` prints the figures instead of the table: seconds for one
operation, or bytes. The exit code is 0 whenever everything could be measured, targets met or missed: a shared machine
is no judge. It is 1 when an operation does not do its work. Nothing is written to the tree.
"""

import argparse
import ast
import gc
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tool_dispatcher as td

ROOT = Path(__file__).resolve().parents[2]
MODULE = ROOT / "tool_dispatcher.py"
FIXTURE = ROOT / "tool-cases.json"
FIXTURE_BYTES = 65_000
DEEP_LEVELS = 4_096
FEW_CALLS, MANY_CALLS = 1_000, 10_000
FEW_RECORDS, MANY_RECORDS = 100, 90_000
MEMORY_WRITES = 2_000
MEMORY_BYTES = 2_048
BATCH = 50  # calls: some milliseconds, so that floor and operation of one round meet the same machine
LOADS = 4  # fixtures a batch
COMMAND_SECONDS = 120

NOW = 1_767_225_600
PRINCIPAL = td.Principal("tenant-a", "user-1")
APPROVER = "human-reviewer-1"
SPECS = {spec.name: spec for spec in td.MockShop().tools()}
OWN_ORDER: dict[str, object] = {"order_ref": "ORDER-7"}
REFUND: dict[str, object] = {"order_ref": "ORDER-7", "reason": "damaged"}

Document: TypeAlias = Mapping[str, object]
Batch: TypeAlias = list[Callable[[], object]]
Contestant: TypeAlias = Callable[[], float]  # takes one sample: the seconds for one operation


class BenchmarkError(Exception):
    """An operation does not do its work, so there is nothing to time; the text says which."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise BenchmarkError(f"wanted {what}")


# ---- Rounds, and what becomes of their times ----


@dataclass(frozen=True)
class Figure:
    """One row. Without a floor, what was measured itself is held against `at_most`; otherwise the ratio is."""

    operation: str
    unit: str  # s or B
    floor: float | None
    measured: float
    ratio: float | None
    at_most: float
    met: bool


# Of the processor: what other processes take is not counted. Windows counts in steps as long as a batch.
CLOCK = time.perf_counter if os.name == "nt" else time.process_time


def seconds_each(batch: Batch, clock: Callable[[], float] = CLOCK) -> float:
    gc.disable()
    try:
        started = clock()
        for work in batch:
            work()
        return (clock() - started) / len(batch)
    finally:
        gc.enable()


class Race:
    """Contestants by name, in rounds; a figure compares two of them."""

    def __init__(self, contestants: Mapping[str, Contestant], rounds: int) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(rounds + 1):
            for name, sample in list(contestants.items())[:: -1 if turn % 2 else 1]:
                seconds = sample()
                if turn:  # the first round warms up
                    self.times[name].append(seconds)

    def figure(self, operation: str, floor: str, measured: str, at_most: float) -> Figure:
        below, above = self.times[floor], self.times[measured]
        ratio = median(one / other for one, other in zip(above, below, strict=True))
        return Figure(operation, "s", median(below), median(above), ratio, at_most, ratio <= at_most)


# ---- Calls, and the documents that stand behind their packages ----


@dataclass(frozen=True)
class Job:
    """A call, ready to be dispatched."""

    call: td.ToolCall
    approvals: tuple[td.Approval, ...] = ()

    @property
    def spec(self) -> td.ToolSpec | None:
        return SPECS.get(self.call.name)

    def dispatched(self, dispatcher: td.Dispatcher) -> td.ResultPackage:
        return dispatcher.dispatch(PRINCIPAL, self.call, approvals=self.approvals, now=NOW)


def job(number: int, tool: str, arguments: object, *, key: str | None = None, turn: str = "a") -> Job:
    """One call with a provider identity of its own."""
    context = td.ExecutionContext(
        provider="openai",
        api_family="responses",
        response_id=f"resp_{turn}_{number:06}",
        call_id=f"call_{turn}_{number:06}",
        operation_id=f"op-{number:06}",
        idempotency_key=key,
        adapter_revision="openai-responses-v1",
    )
    return Job(td.bind_tool_call(td.ModelProposal(tool, arguments), context))


def write_job(number: int) -> Job:
    asked = job(number, "create_refund_draft", REFUND, key=f"refund-key-{number:06}")
    spec = SPECS["create_refund_draft"]
    return replace(asked, approvals=(td.grant_approval(PRINCIPAL, asked.call, spec, approver_id=APPROVER, now=NOW),))


def replay_job(number: int) -> Job:
    """The retry of `write_job(number)`, in a later turn of the provider and without an approval."""
    return job(number, "create_refund_draft", REFUND, key=f"refund-key-{number:06}", turn="b")


def new_dispatcher(done: Sequence[Job] = (), ledger: td.MemoryLedger | None = None) -> td.Dispatcher:
    """A dispatcher over a shop of its own, with these calls behind it."""
    dispatcher = td.Dispatcher(td.MockShop().tools(), ledger=ledger, approvers={APPROVER})
    for each in done:
        each.dispatched(dispatcher)
    return dispatcher


def checked_packages(
    jobs: Sequence[Job], dispatcher: td.Dispatcher, code: str, delivery: str
) -> list[td.ResultPackage]:
    """Dispatch each call once, and see that it ends as it should."""
    packages = []
    for each in jobs:
        package = each.dispatched(dispatcher)
        result = package["model_result"]
        seen = ("OK" if result["error"] is None else result["error"]["code"], result["execution"]["delivery"])
        must(seen == (code, delivery), f"{code} {delivery} of {each.call.name}, not {' '.join(seen)}")
        errors = td.validate_result(PRINCIPAL, each.call, each.spec, package)
        must(not errors, f"a valid package of {each.call.name}: {errors}")
        packages.append(package)
    return packages


ENCODE = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def floor(documents: Sequence[Document]) -> list[str]:
    """The digest of each document, and nothing else."""
    return [hashlib.sha256(ENCODE(document).encode()).hexdigest() for document in documents]


VALIDATED_READ = ("request", "principal reference", "model result", "call binding")
VALIDATED_WRITE = (*VALIDATED_READ, "status reference")
READ = (*VALIDATED_READ, "fingerprint")
REPLAY = (*READ, "status reference")
WRITE = (*REPLAY, "approval")


def documents(each: Job, package: td.ResultPackage, names: Sequence[str]) -> list[Document]:
    """The documents of these names behind a package, each checked against the digest that goes by it."""
    call, spec = each.call, each.spec
    audit = package["protected_audit"]
    contract, binding, downstream = audit["tool_contract"], audit["binding"], audit["downstream"]

    def fields(source: object, *wanted: str) -> dict[str, object]:
        return {name: getattr(source, name) for name in wanted}

    who = fields(PRINCIPAL, "tenant_id", "subject_id")
    context = fields(call.context, *td.ExecutionContext.__dataclass_fields__)
    request_sha256: dict[str, object] = {"request_sha256": binding["request_sha256"]}
    revisions: dict[str, object] = {
        "input_schema_revision": contract["input_schema_revision"],
        "output_schema_revision": contract["output_schema_revision"],
        "effect_revision": contract["effect_revision"],
    }
    pairs: dict[str, tuple[Document, str]] = {
        "request": (who | {"tool": call.name, "arguments": call.arguments} | revisions, binding["request_sha256"]),
        "fingerprint": (
            context | {"purpose": "dispatch"} | request_sha256,
            td.call_fingerprint(PRINCIPAL, call, spec, purpose="dispatch"),
        ),
        "principal reference": (who, audit["principal_ref"].removeprefix("sha256:")),
        "model result": (package["model_result"], binding["result_sha256"]),
        "call binding": (
            who
            | context
            | {"tool_contract": contract, "result_sha256": binding["result_sha256"], "downstream": downstream}
            | request_sha256,
            binding["call_binding_sha256"],
        ),
        "status reference": (
            request_sha256 | {"scope": [*who.values(), call.name, call.context.idempotency_key]},
            (downstream["status_ref"] or "").removeprefix("status_"),
        ),
    }
    for approval in each.approvals:
        about = fields(approval, "approval_id", "approver_id", "expires_at", "policy_revision")
        pairs["approval"] = (context | request_sha256 | revisions | about, approval.approval_digest)
    for name in names:
        document, wanted = pairs[name]
        (seen,) = floor([document])
        # A status reference shows half of its digest.
        must(wanted != "" and seen.startswith(wanted), f"the {name} of {call.name} to have the digest {wanted}")
    return [pairs[name][0] for name in names]


# ---- The rows, in the order of the table ----


def calls(rounds: int) -> list[Figure]:
    """Dispatches, refusals, the check of a package and its way to a provider."""
    numbers = range(BATCH)
    reads = [job(number, "get_order", OWN_ORDER) for number in numbers]
    writes, replays = [*map(write_job, numbers)], [*map(replay_job, numbers)]
    refused = {
        "UNKNOWN_TOOL": [job(number, "drop_tables", OWN_ORDER) for number in numbers],
        "INVALID_ARGUMENTS": [job(number, "get_order", OWN_ORDER | {"is_admin": True}) for number in numbers],
        "NOT_FOUND": [job(number, "get_order", {"order_ref": "ORDER-8"}) for number in numbers],
    }
    read = checked_packages(reads, new_dispatcher(), "OK", "fresh")
    write = checked_packages(writes, new_dispatcher(), "OK", "fresh")
    replay = checked_packages(replays, new_dispatcher(writes), "OK", "local_replay")
    for code, jobs in refused.items():
        checked_packages(jobs, new_dispatcher(), code, "fresh")
    for each, package in [*zip(reads, read, strict=True), *zip(writes, write, strict=True)]:
        payload = td.to_openai_responses(PRINCIPAL, each.call, each.spec, package)
        must(payload["output"] == ENCODE(package["model_result"]), "the model result as the output of the payload")

    def dispatching(jobs: Sequence[Job], done: Sequence[Job] = ()) -> Contestant:
        def sample() -> float:
            dispatch = new_dispatcher(done).dispatch
            return seconds_each(
                [partial(dispatch, PRINCIPAL, each.call, approvals=each.approvals, now=NOW) for each in jobs]
            )

        return sample

    def over(function: Callable[..., object], jobs: Sequence[Job], packages: Sequence[td.ResultPackage]) -> Contestant:
        batch: Batch = [
            partial(function, PRINCIPAL, each.call, each.spec, package)
            for each, package in zip(jobs, packages, strict=True)
        ]
        return partial(seconds_each, batch)

    def digesting(jobs: Sequence[Job], packages: Sequence[td.ResultPackage], names: Sequence[str]) -> Contestant:
        batch: Batch = [
            partial(floor, documents(each, package, names)) for each, package in zip(jobs, packages, strict=True)
        ]
        return partial(seconds_each, batch)

    emitted = "model result"
    race = Race(
        {
            **{code: dispatching(jobs) for code, jobs in refused.items()},
            "read": dispatching(reads),
            "read floor": digesting(reads, read, READ),
            "write": dispatching(writes),
            "write floor": digesting(writes, write, WRITE),
            "replay": dispatching(replays, writes),
            "replay floor": digesting(replays, replay, REPLAY),
            "validate read": over(td.validate_result, reads, read),
            "validate read floor": digesting(reads, read, VALIDATED_READ),
            "validate write": over(td.validate_result, writes, write),
            "validate write floor": digesting(writes, write, VALIDATED_WRITE),
            "emit read": over(td.to_openai_responses, reads, read),
            "emit read floor": digesting(reads, read, (*VALIDATED_READ, emitted)),
            "emit write": over(td.to_openai_responses, writes, write),
            "emit write floor": digesting(writes, write, (*VALIDATED_WRITE, emitted)),
        },
        rounds,
    )
    return [
        race.figure("dispatch of a read", "read floor", "read", 2.0),
        race.figure("dispatch of an approved write", "write floor", "write", 2.5),
        race.figure("dispatch served by local_replay", "replay floor", "replay", 2.0),
        race.figure("validate_result, read", "validate read floor", "validate read", 2.0),
        race.figure("validate_result, write", "validate write floor", "validate write", 2.0),
        race.figure("to_openai_responses, read", "emit read floor", "emit read", 2.2),
        race.figure("to_openai_responses, write", "emit write floor", "emit write", 2.2),
        race.figure("unknown tool, against a read", "read", "UNKNOWN_TOOL", 1.0),
        race.figure("bad input, against a read", "read", "INVALID_ARGUMENTS", 1.0),
        race.figure("not found, against a read", "read", "NOT_FOUND", 1.0),
    ]


def result_sets(rounds: int) -> list[Figure]:
    """One set of many calls, and the same calls in sets of few. Each package answers its call, in another order."""
    jobs = [job(number, "get_order", OWN_ORDER) for number in range(MANY_CALLS)]
    dispatcher = new_dispatcher()
    packages = [each.dispatched(dispatcher) for each in jobs]

    def checking(size: int) -> Contestant:
        batch: Batch = []
        for start in range(0, MANY_CALLS, size):
            asked = [each.call for each in jobs[start : start + size]]
            given = packages[start : start + size][::-1]
            check = partial(td.validate_result_set, PRINCIPAL, asked, SPECS)
            must(not check(given), f"no error in a set of {size}")
            must(len(check(given[1:])) == 1, "one error where one answer is missing")
            batch.append(partial(check, given))
        return partial(seconds_each, batch)

    race = Race({"few": checking(FEW_CALLS), "many": checking(MANY_CALLS)}, rounds)
    return [race.figure(f"validate_result_set, {MANY_CALLS:,} calls against {FEW_CALLS:,}", "few", "many", 11.0)]


def ledgers(rounds: int) -> list[Figure]:
    """An approved write, which asks the ledger for everything it can do, with few and with many records in it."""
    writes = [*map(write_job, range(BATCH))]

    def writing(size: int) -> Contestant:
        ledger = filled_ledger(size)
        checked_packages(writes, new_dispatcher(ledger=ledger), "OK", "fresh")

        def sample() -> float:
            forgotten = ledger.forget(NOW + 1)  # the batch before; what fills the ledger is younger
            must(forgotten == BATCH, "every write in the ledger")
            dispatch = new_dispatcher(ledger=ledger).dispatch
            return seconds_each(
                [partial(dispatch, PRINCIPAL, each.call, approvals=each.approvals, now=NOW) for each in writes]
            )

        return sample

    race = Race({"few": writing(FEW_RECORDS), "many": writing(MANY_RECORDS)}, rounds)
    return [race.figure(f"dispatch, {MANY_RECORDS:,} records against {FEW_RECORDS}", "few", "many", 1.2)]


def filled_ledger(size: int) -> td.MemoryLedger:
    """A ledger of completed writes, each with its call identity, put there through the ledger's own operations."""
    sample = write_job(0)
    donor = td.MemoryLedger()
    sample.dispatched(new_dispatcher(ledger=donor))
    scope = (PRINCIPAL.tenant_id, PRINCIPAL.subject_id, sample.call.name, str(sample.call.context.idempotency_key))
    record = donor.find(scope)
    must(record is not None and record.result is not None, "a completed write under its scope")
    record = cast("td.OperationRecord", record)
    result = cast("td.HandlerResult", record.result)

    ledger = td.MemoryLedger()
    for number in range(size):
        filling = replace(
            record,
            scope=(*scope[:3], f"earlier-key-{number:06}"),
            status_ref=f"status_{number:032x}",
            reserved_at=NOW + 1,
            token=f"{number:032x}",
            state="pending",
            result=None,
        )
        identity = (*scope[:2], "openai", "responses", f"resp_earlier_{number:06}", f"call_earlier_{number:06}")
        must(ledger.bind_call(identity, f"{number:064x}", now=NOW + 1), "a call identity bound")
        must(ledger.reserve(filling) is None, "a scope reserved")
        ledger.complete(filling, replace(result, receipt_id=f"refund-receipt-{number}"))
    return ledger


def memory(writes: int) -> list[Figure]:
    """What goes when the ledger goes, after everything else is gone; strings of the calls included."""
    ledger = td.MemoryLedger()
    dispatcher = new_dispatcher(ledger=ledger)
    tracemalloc.start()
    try:
        for number in range(writes):
            must(
                write_job(number).dispatched(dispatcher)["model_result"]["status"] == "succeeded",
                "a write that succeeds",
            )
        del dispatcher
        gc.collect()
        with_ledger, _ = tracemalloc.get_traced_memory()
        del ledger
        gc.collect()
        without, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = (with_ledger - without) / writes
    return [Figure("memory a completed write keeps", "B", None, kept, None, MEMORY_BYTES, kept <= MEMORY_BYTES)]


def fixtures(rounds: int, scratch: Path) -> list[Figure]:
    """A full fixture, and one of the same length that ends in a nest."""
    text = repeated_fixture(FIXTURE_BYTES)
    nest = f", {'[' * DEEP_LEVELS}{']' * DEEP_LEVELS}]}}"
    shorter = repeated_fixture(FIXTURE_BYTES - len(nest) + len("]}"))
    must(shorter.endswith("]}"), "the cases at the end of the fixture")
    full, deep = scratch / "full.json", scratch / "deep.json"
    full.write_bytes(text.ljust(FIXTURE_BYTES).encode("ascii"))
    deep.write_bytes((shorter.removesuffix("]}") + nest).ljust(FIXTURE_BYTES).encode("ascii"))
    raw = full.read_bytes()
    must(len(raw) == deep.stat().st_size == FIXTURE_BYTES, f"fixtures of {FIXTURE_BYTES} bytes")
    must(td.load_fixture(full) == json.loads(raw), "the fixture as json.loads reads it")

    def refuse() -> str:
        try:
            td.load_fixture(deep)
        except td.FixtureError as error:
            return str(error)
        return ""

    must("deep" in refuse(), "the deep fixture refused for its depth")
    race = Race(
        {
            "load": lambda: seconds_each([partial(td.load_fixture, full)] * LOADS),
            "floor": lambda: seconds_each([partial(json.loads, raw)] * LOADS),
            "refuse": lambda: seconds_each([refuse] * LOADS),
        },
        rounds,
    )
    return [
        race.figure(f"load_fixture, {FIXTURE_BYTES:,} bytes, against json.loads", "floor", "load", 4.0),
        race.figure(f"refusing {DEEP_LEVELS:,} levels, against loading", "load", "refuse", 1.0),
    ]


def repeated_fixture(limit: int) -> str:
    """The shipped cases, again and again under new ids, as long as they fit."""
    fixture: dict[str, Any] = json.loads(FIXTURE.read_bytes())
    shipped, fixture["cases"] = fixture["cases"], []
    text = ""
    while True:
        number = len(fixture["cases"])
        fixture["cases"].append(shipped[number % len(shipped)] | {"id": f"case-{number:03}"})
        longer = json.dumps(fixture)
        if len(longer) > limit:
            return text
        text = longer


def processes(rounds: int, scratch: Path) -> list[Figure]:
    """The command line, and the import by a host; each sample is a process of its own."""
    command = [sys.executable, "-B", str(MODULE), "--fixture", str(FIXTURE)]
    report = json.loads(output_of(command))
    must(report["passed"] is True, "the shipped fixture to pass on the command line")
    plain = [sys.executable, "-B", "-c", "import argparse, json, hashlib"]
    race = Race(
        {
            "command line": lambda: seconds_each([partial(output_of, command)], time.perf_counter),
            "floor": lambda: seconds_each([partial(output_of, plain)], time.perf_counter),
        },
        rounds,
    )
    figures = [race.figure("command line, against three imports", "floor", "command line", 2.2)]

    def importing(statement: str) -> Contestant:
        program = f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\nstarted = time.perf_counter()\n{statement}\n"
        program += "print(time.perf_counter() - started)"
        # Isolated, so that nothing in the environment decides where byte code lies, and without `site`, which imports
        # some of these modules on some machines.
        interpreter = [sys.executable, "-I", "-S", "-X", f"pycache_prefix={scratch / 'byte-code'}"]
        output_of([*interpreter, "-c", program])  # fills the cache
        return lambda: float(output_of([*interpreter, "-B", "-c", program]))

    race = Race(
        {
            "module": importing("import tool_dispatcher"),
            "floor": importing(f"import {', '.join(standard_modules())}"),
        },
        rounds,
    )
    must(any((scratch / "byte-code").rglob("tool_dispatcher.*.pyc")), "byte code of the module in the cache")
    return [*figures, race.figure("import, against its standard modules", "floor", "module", 1.6)]


def standard_modules() -> list[str]:
    """What the module imports at its top level."""
    names: list[str] = []
    for node in ast.parse(MODULE.read_bytes()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            names.append(node.module)
    must(
        {name.partition(".")[0] for name in names} <= sys.stdlib_module_names, "only standard modules at the top level"
    )
    return names


def output_of(command: list[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", timeout=COMMAND_SECONDS, check=False
    )
    must(done.returncode == 0, f"exit code 0 of {command[1:]}, not {done.returncode}\n{done.stderr}".rstrip())
    return done.stdout


# ---- The table ----


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "B":
        return f"{value:,.0f} B"
    return f"{value * 1e3:,.2f} ms" if value >= 1e-3 else f"{value * 1e6:.2f} us"


def table(figures: Sequence[Figure]) -> str:
    rows = [("operation", "floor", "measured", "ratio", "at most", "")]
    for each in figures:
        rows.append(
            (
                each.operation,
                shown(each.floor, each.unit),
                shown(each.measured, each.unit),
                "-" if each.ratio is None else f"{each.ratio:.2f} x",
                shown(each.at_most, each.unit) if each.ratio is None else f"{each.at_most:.1f} x",
                "met" if each.met else "MISSED",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index in (0, 5) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    met = sum(each.met for each in figures)
    return "\n".join([*lines, f"{met} of {len(figures)} targets met"])


def measured(quick: bool) -> list[Figure]:
    share = 6 if quick else 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        return [
            *calls(240 // share),
            *result_sets(12 // share),
            *ledgers(60 // share),
            *memory(MEMORY_WRITES),
            *fixtures(150 // share, Path(scratch)),
            *processes(48 // share, Path(scratch)),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the module against a floor taken in the same run.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: less than half a minute, less steady")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        figures = measured(options.quick)
    except (BenchmarkError, td.ContractError, subprocess.TimeoutExpired, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    interpreter = f"{platform.python_implementation()} {platform.python_version()}"
    if options.json:
        print(json.dumps({"interpreter": interpreter, "figures": [asdict(each) for each in figures]}, indent=2))
    else:
        print(f"{interpreter}, {platform.system()} {platform.machine()}, {time.monotonic() - started:.0f} s\n")
        print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
