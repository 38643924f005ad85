"""A small lab: a tool call can be valid JSON, survive a casual type check, and still be the wrong call.

A model answers "is Killam open on Tuesday?" with text: {"name": "get_hours", "arguments": {"building": "Killam",
"weekday": 2}}. Three layers stand between that text and a function, and each can fail while the others hold:

    1. bytes that parse     UTF-8, one JSON object, no key twice, no number that JSON does not have
    2. a name in the table  exactly; a near miss is a wrong name, not a hint at the right one
    3. arguments that fit   the declared keys and no more, exact types, values the function is defined for

The trap is in layer 3. Python's bool is a subclass of int, so isinstance(True, int) holds, True == 1, and
{1: "Monday"}[True] is "Monday": a weekday of true never crashes, it answers for a day nobody asked about. So types
are compared with `type(value) is wanted`, and nothing is repaired: turning "2" into 2, or filling in a day, is a
guess at what the model meant. A refusal with a reason can go back to the model; a guess cannot.

What this is not: no JSON Schema, no unions or nested optionals, no streaming, no authorization and no idempotency
(for those, the dispatcher), and no benchmark of any model. It reads text and gives verdicts.
"""

import argparse
import contextlib
import errno
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

MAX_CALL_SIZE = 1_048_576  # of one call, in bytes (str: characters); --calls holds no more than this in memory
MAX_DEPTH = 32  # a call needs 2; the decoder recurses, and text nested deeply enough would exhaust its stack
MAX_REASON_CHARS = 200

# Per tool: the keys that must be there, every key that may be with its exact type, and what a value of that type
# must satisfy besides. The checks below know no tool; a second one is a second entry.
TOOLS: dict[str, dict[str, Any]] = {
    "get_hours": {
        "required": ("building", "weekday"),
        "types": {"building": str, "weekday": int},
        "constraints": {"building": lambda text: text.strip() != "", "weekday": lambda day: 0 <= day <= 6},
    },
}
FIXTURES = (
    ("ok-killam-tuesday", '{"name": "get_hours", "arguments": {"building": "Killam", "weekday": 2}}'),
    ("string-weekday", '{"name": "get_hours", "arguments": {"building": "Killam", "weekday": "2"}}'),
    ("bool-weekday", '{"name": "get_hours", "arguments": {"building": "Killam", "weekday": true}}'),
    ("extra-open", '{"name": "get_hours", "arguments": {"building": "Killam", "weekday": 2, "open": true}}'),
    ("unknown-tool", '{"name": "get_open_now", "arguments": {"building": "Killam", "weekday": 2}}'),
)
MUST_FAIL = {"string-weekday", "bool-weekday", "extra-open", "unknown-tool"}


@dataclass(frozen=True)
class Verdict:
    ok: bool
    reason: str  # one line of printable ASCII, at most MAX_REASON_CHARS
    fixture_id: str


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # two readers may keep different ones, and would then see different calls
        raise ValueError(f"duplicate key among: {[key for key, _ in pairs]}")
    return found


def _number(text: str) -> int | float:
    if not math.isfinite(number := float(text)):  # NaN, Infinity, 1e400, or an integer as large as that
        raise ValueError(f"number out of range: {text}")
    return int(text) if text.lstrip("-").isdigit() else number


# The json module alone is too kind: it reads NaN, keeps the last of two equal keys, and guesses UTF-16 from bytes.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_int=_number, parse_float=_number, parse_constant=_number
)


def _check_depth(text: str) -> None:
    depth, in_string = 0, False  # one flat pass, before a recursive decoder sees any of the text
    for token in re.finditer(r'\\.|["\[\]{}]', text):  # an escape is one token, so \" ends no string
        in_string ^= token[0] == '"'
        depth += 0 if in_string else {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def parse_call(raw: str | bytes) -> dict[str, Any]:
    """Layer 1: from text or UTF-8 bytes to a dict with exactly `name` and `arguments`, or ValueError saying why not."""
    if type(raw) is not str and type(raw) is not bytes:
        raise ValueError("a call must be str or bytes")
    if len(raw) > MAX_CALL_SIZE:
        raise ValueError(f"call too long, the limit is {MAX_CALL_SIZE}")
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw  # its error is a ValueError too, and names the byte
    if text.startswith("\ufeff"):
        raise ValueError("starts with a byte-order mark; save as UTF-8 without one")
    if text.count("[") + text.count("{") > MAX_DEPTH:  # fewer brackets cannot nest deeper
        _check_depth(text)
    try:
        call = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    json.dumps(call, ensure_ascii=False).encode("utf-8")  # a ValueError when a string holds half a surrogate pair
    if type(call) is not dict:
        raise ValueError("call must be an object")
    if call.keys() != {"name", "arguments"}:
        raise ValueError(f"call keys must be 'arguments' and 'name', got: {sorted(call)}")
    return call


def _find_fault(call: dict[str, Any]) -> str | None:
    """Layers 2 and 3: what is wrong with a parsed call. TOOLS alone says what is right; no tool is named here."""
    name, arguments = call["name"], call["arguments"]
    if type(name) is not str or name not in TOOLS:  # the type first: a list cannot even be looked up
        return f"unknown tool: {name!r}"
    if type(arguments) is not dict:
        return "arguments must be an object"
    tool = TOOLS[name]
    if missing := set(tool["required"]) - arguments.keys():  # never defaulted
        return f"missing keys: {sorted(missing)}"
    if extra := arguments.keys() - tool["types"].keys():  # never ignored: the model believed they mattered
        return f"extra keys: {sorted(extra)}"
    for key, wanted in tool["types"].items():
        if key in arguments and type(value := arguments[key]) is not wanted:  # isinstance would let True pass as int
            return f"type drift on {key}: wanted {wanted.__name__}, got {type(value).__name__}={value!r}"
    for key, holds in tool["constraints"].items():
        if key in arguments and not holds(arguments[key]):
            return f"constraint failed on {key}: {arguments[key]!r}"
    return None


def check_call(fixture_id: str, raw: str | bytes) -> Verdict:
    """Judge one raw call. Never raises, whatever the model wrote; the first layer that fails gives the reason."""
    try:
        fault = _find_fault(parse_call(raw))
    except Exception as error:  # ValueError is layer 1; any other, a constraint with no answer, and that is no yes
        fault = str(error) or repr(error)
    # The model wrote part of that text: escape what could move a cursor or break the table, then cut.
    reason = re.sub("[^ -~]", lambda odd: ascii(odd[0])[1:-1], (fault or "contract ok")[: MAX_REASON_CHARS + 1])
    reason = reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 3] + "..."
    return Verdict(fault is None, reason, fixture_id)


def check_lines(source: BinaryIO, rejected: BinaryIO) -> Iterator[Verdict]:
    """Judge one call a line, holding one line at most; `rejected` gets the refused lines byte for byte."""
    number = 0
    while chunk := source.readline(MAX_CALL_SIZE + 1):
        number += 1
        line = chunk.removesuffix(b"\n")
        if len(line) <= MAX_CALL_SIZE and not line.strip(b" \t\r"):
            continue
        verdict = check_call(f"line-{number}", line)
        if not verdict.ok:
            rejected.write(line)
            while not chunk.endswith(b"\n") and (chunk := source.readline(MAX_CALL_SIZE)):  # an overlong line
                rejected.write(chunk.removesuffix(b"\n"))
            rejected.write(b"\n")
        yield verdict


def _print_table(verdicts: Iterable[Verdict], noun: str) -> int:
    total = failed = 0
    print("fixture_id\tok\treason")
    for verdict in verdicts:
        total, failed = total + 1, failed + (not verdict.ok)
        print(f"{verdict.fixture_id}\t{verdict.ok}\t{verdict.reason}")
    print(f"\n{failed}/{total} {noun} failed the contract", flush=True)
    return failed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # the message would repeat the arguments
        raise ValueError("usage: contract_guard.py [--calls FILE|-] [--rejected FILE]")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 as wanted; 1 a call was refused, or the fixtures drifted; 2 the input is unusable."""
    parser = _Parser(description="Check raw tool calls against an exact contract.", allow_abbrev=False)
    parser.add_argument("--calls", metavar="FILE", help="one raw call a line, - for stdin (default: the five fixtures)")
    parser.add_argument("--rejected", metavar="FILE", help="write the refused lines here, replacing what it held")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(newline="\n")  # the same bytes on every system
    try:
        options = parser.parse_args(argv)
        if options.calls is None:
            if options.rejected is not None:
                raise ValueError("--rejected needs --calls")
            verdicts = [check_call(fixture_id, raw) for fixture_id, raw in FIXTURES]
            _print_table(verdicts, "fixtures")
            return 0 if {verdict.fixture_id for verdict in verdicts if not verdict.ok} == MUST_FAIL else 1
        with contextlib.ExitStack() as files:
            if options.calls == "-" and sys.stdin is None:
                raise ValueError("stdin is closed")
            source = sys.stdin.buffer if options.calls == "-" else files.enter_context(open(options.calls, "rb"))
            keep = os.devnull if options.rejected is None else options.rejected
            with contextlib.suppress(OSError):  # no such file yet, or stdin is no file: then they are not the same
                if keep != os.devnull and os.path.samestat(os.fstat(source.fileno()), os.stat(keep)):
                    raise ValueError("--rejected is the input file; writing it would empty the input")
            return 1 if _print_table(check_lines(source, files.enter_context(open(keep, "wb"))), "calls") else 0
    except ValueError as error:
        message = str(error)
    except OSError as error:
        # `| head` closed the pipe: EPIPE, on Windows EINVAL. Errors of open() carry a filename.
        if error.filename is None and error.errno in (errno.EPIPE, errno.EINVAL):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail again
            return 1  # what nobody read is not a pass
        message = error.strerror or "cannot read or write"  # str(error) would show the path
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
