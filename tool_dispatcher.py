"""A trusted-boundary dispatcher for model tool calls: standard library only, one module, in reading order.

A language model proposes a tool name and arguments. Nothing it says is trusted. The host binds the proposal to
a principal and a provider turn, and the call passes a fixed list of gates; only then does a handler run, and its
output passes a gate of its own:

    model proposal (name + arguments)              untrusted
      -> host context, call identity               who asks, in which provider turn
      -> registry, exact input                     a tool that exists, the arguments it declares
      -> authorization                             now, for this principal
      -> idempotency, business state, approval     writes only: once, still right, a human said yes to this call
      -> deadline, reservation, handler            reserved as pending before anything happens
      -> output contract
      -> model_result  --------------------------> provider adapter -> model
      -> protected_audit with three digests -----> stays with the host

Read it top to bottom. Each section uses only sections above it:

     1 contract names and limits      6 digests                          11 provider adapters
     2 errors                         7 approval                         12 mock shop
     3 portable JSON                  8 result package and its check     13 fixture
     4 principal, proposal, binding   9 ledger                           14 command line
     5 tool contracts                10 dispatcher

Time, identity and keys are passed in: there is no clock, no randomness and no environment before the command line.

A paragraph sign cites the contract that this module implements: §2 limits, §3 portable JSON and errors, §4 principal,
proposal and context, §5 tool contracts, §6 the mock tools, §7 gates, §8 approval, §9 ledger, §10 the unknown and the
status query, §11 result package, §12 digests, §13 checking a package, §14 adapters, §15 fixture, §17 command line.
"""

import errno
import hashlib
import json
import os
import re
import stat
import sys
import threading
import unicodedata
from binascii import a2b_base64
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import count, repeat
from math import isfinite
from operator import attrgetter, lt
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, TypeAlias, TypedDict, cast, get_args

__version__ = "1.0.0"

# fmt: off
__all__ = [
    "APPROVAL_TTL_SECONDS", "AUDIT_SCHEMA_VERSION", "DISPATCHER_REVISION", "DISPATCHER_SOURCE_LABEL", "ERROR_CATALOG",
    "FIXTURE_SCHEMA_VERSION", "MAX_CASES", "MAX_FIXTURE_BYTES", "MAX_IDENTIFIER_CHARS", "MAX_JSON_DEPTH",
    "MAX_JSON_NODES", "MAX_LEDGER_ENTRIES", "MAX_MEMBERS", "MAX_PORTABLE_UNIX_SECONDS", "MAX_ROLES",
    "MAX_SAFE_INTEGER", "MAX_STEPS_PER_CASE", "MAX_STRING_CHARS", "MODEL_RESULT_SCHEMA_VERSION", "PROVIDER_PROFILES",
    "SENSITIVE_FIELD_NAMES", "Approval", "CallIdentity", "ContractError", "Dispatcher", "Downstream", "ErrorPolicy",
    "ExecutionContext", "FieldRule", "FixtureError", "FixtureIOError", "FixtureReport", "HandlerResult",
    "HostContextError", "Invocation", "JsonObject", "JsonValue", "Ledger", "LedgerCapacityError", "LedgerStateError",
    "MemoryLedger", "MockShop", "ModelProposal", "ModelResult", "NotStarted", "OperationRecord", "PortableJsonError",
    "Principal", "ProtectedAudit", "Receipt", "ReceiptQuery", "ResultContractError", "ResultPackage", "Scope",
    "ToolCall", "ToolContract", "ToolContractError", "ToolSpec", "Trace", "approval_digest", "bind_tool_call",
    "call_binding_digest", "call_fingerprint", "canonical_json", "digest", "error_package", "grant_approval",
    "load_fixture", "main", "mock_dispatcher", "parse_json", "request_digest", "result_digest", "run_fixture",
    "success_package", "to_anthropic_messages", "to_gemini_interactions", "to_openai_responses",
    "to_provider_payload", "validate_fixture", "validate_handler_result", "validate_host_context", "validate_result",
    "validate_result_set",
]
# fmt: on


# ==== 1. Contract names and limits (§2, §11) ==========================================================================

FIXTURE_SCHEMA_VERSION: Final = "tool-cases-v2"
MODEL_RESULT_SCHEMA_VERSION: Final = "tool-model-result-v2"
AUDIT_SCHEMA_VERSION: Final = "tool-audit-v2"
DISPATCHER_REVISION: Final = "offline-dispatcher-v2"
DISPATCHER_SOURCE_LABEL: Final = "offline-dispatcher"

MAX_FIXTURE_BYTES: Final = 65_536  # UTF-8 bytes; a fixture is read no further than one byte past it
MAX_JSON_DEPTH: Final = 32  # nested containers; far below every recursion limit, and no tool call needs more
MAX_JSON_NODES: Final = 65_536  # values in one document, counted with repetition, so shared or cyclic containers end
MAX_STRING_CHARS: Final = 65_536
MAX_MEMBERS: Final = 1_024  # of one array or object
MAX_SAFE_INTEGER: Final = 9_007_199_254_740_991  # 2**53 - 1: the same integer in every JSON reader
MAX_IDENTIFIER_CHARS: Final = 255
MAX_ROLES: Final = 32
MAX_CASES: Final = 256
MAX_STEPS_PER_CASE: Final = 256
MAX_PORTABLE_UNIX_SECONDS: Final = 253_402_300_799  # 9999-12-31T23:59:59Z: the last second with a four-digit year
APPROVAL_TTL_SECONDS: Final = 60
MAX_LEDGER_ENTRIES: Final = 100_000

# The contract bounds one string and the number of values; their product is 4 Gi characters. So the sum is bounded too.
_MAX_TEXT_CHARS: Final = 16_777_216
# A tool's arguments or data stand in a document, at most two levels deep and beside less than these margins of values
# and characters, and it must stay in the domain (§3).
_MAX_PAYLOAD_DEPTH: Final = MAX_JSON_DEPTH - 2
_VALUES_BESIDE_PAYLOAD: Final = 64
_CHARS_BESIDE_PAYLOAD: Final = 16_384

# (provider, api_family) -> adapter_revision: the only three profiles a call can be bound to.
PROVIDER_PROFILES: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("openai", "responses"): "openai-responses-v1",
        ("anthropic", "messages"): "anthropic-messages-v1",
        ("google", "interactions"): "gemini-interactions-v1",
    }
)

_UNREGISTERED_NAME: Final = "(unregistered)"  # stands for a proposed name that is no identifier; never a tool's name
_UNREGISTERED: Final = "unregistered"  # stands for each revision of a tool that is not registered

Status: TypeAlias = Literal["succeeded", "failed", "unknown"]
Outcome: TypeAlias = Literal["not_started", "committed", "unknown"]
Delivery: TypeAlias = Literal["fresh", "local_replay", "receipt_reconciled"]
Recovery: TypeAlias = Literal[
    "none", "correct_input", "request_approval", "retry_after", "query_status", "human_review"
]
Category: TypeAlias = Literal[
    "contract", "authorization", "business", "conflict", "approval", "execution", "dependency"
]
Effect: TypeAlias = Literal["read", "write"]
Purpose: TypeAlias = Literal["dispatch", "query_status"]
OperationState: TypeAlias = Literal["pending", "succeeded", "not_started"]

_STATUSES: Final = get_args(Status)
_OUTCOMES: Final = get_args(Outcome)
_DELIVERIES: Final = get_args(Delivery)
_RECOVERIES: Final = get_args(Recovery)


class ErrorPolicy(NamedTuple):
    """What one error code means: for the model (`safe_message`, `recovery`) and for the host (`outcome`)."""

    category: Category
    outcome: Outcome
    recovery: Recovery
    safe_message: str
    retry_after_ms: int | None = None


# §11. The messages are fixed: no handler, argument or exception text ever gets into them.
ERROR_CATALOG: Final[Mapping[str, ErrorPolicy]] = MappingProxyType(
    {
        "UNKNOWN_TOOL": ErrorPolicy("contract", "not_started", "correct_input", "No such tool is registered."),
        "INVALID_ARGUMENTS": ErrorPolicy(
            "contract", "not_started", "correct_input", "The arguments do not match the tool's input contract."
        ),
        "IDEMPOTENCY_KEY_REQUIRED": ErrorPolicy(
            "contract", "not_started", "correct_input", "A write needs an idempotency key from the host."
        ),
        "NOT_FOUND": ErrorPolicy("authorization", "not_started", "none", "Nothing by this reference is available."),
        "BUSINESS_RULE_VIOLATION": ErrorPolicy(
            "business", "not_started", "human_review", "The current state does not allow this operation."
        ),
        "CALL_ID_CONFLICT": ErrorPolicy(
            "conflict", "not_started", "human_review", "This provider call already stands for another request."
        ),
        "IDEMPOTENCY_CONFLICT": ErrorPolicy(
            "conflict", "not_started", "human_review", "This idempotency key already stands for another operation."
        ),
        "STATUS_CONFLICT": ErrorPolicy(
            "conflict", "unknown", "human_review", "The operation on record does not match this status query."
        ),
        "APPROVAL_REQUIRED": ErrorPolicy(
            "approval", "not_started", "request_approval", "A human approval is needed before this operation."
        ),
        "APPROVAL_INVALID": ErrorPolicy(
            "approval", "not_started", "request_approval", "No approval given is valid for this call now."
        ),
        "TIMEOUT_BEFORE_EXECUTE": ErrorPolicy(
            "execution", "not_started", "retry_after", "Time ran out before the operation started.", 1_000
        ),
        "RATE_LIMIT": ErrorPolicy(
            "dependency", "not_started", "retry_after", "The service is limiting requests; nothing was done.", 1_000
        ),
        "TOOL_ERROR": ErrorPolicy(
            "execution", "not_started", "human_review", "The tool failed before anything was done."
        ),
        "OUTPUT_CONTRACT_VIOLATION": ErrorPolicy(
            "execution", "unknown", "human_review", "The tool's answer broke its contract and was withheld."
        ),
        "OUTCOME_UNKNOWN": ErrorPolicy(
            "execution", "unknown", "query_status", "It is not known whether this took effect. Do not run it again."
        ),
    }
)

# The four codes by which a handler can say that nothing happened (§5).
_NOT_STARTED_CODES: Final = frozenset({"TIMEOUT_BEFORE_EXECUTE", "RATE_LIMIT", "TOOL_ERROR", "BUSINESS_RULE_VIOLATION"})
_WRITE_ONLY_CODES: Final = frozenset(
    {
        "IDEMPOTENCY_KEY_REQUIRED",
        "IDEMPOTENCY_CONFLICT",
        "APPROVAL_REQUIRED",
        "APPROVAL_INVALID",
        "OUTCOME_UNKNOWN",
    }
)


# ==== 2. Errors (§3) ==================================================================================================


class ContractError(ValueError):
    """Root of everything this module raises on purpose: the host or a file broke the contract."""


class PortableJsonError(ContractError):
    """A value is outside the portable JSON domain; the text says where (`$.cases[3].now`) and what was wanted."""

    def __init__(self, wanted: str, path: str = "") -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.path = path  # grows from the inside out, as the error passes each container

    def __str__(self) -> str:
        return _clipped(f"${self.path}: {self.wanted}")


class FixtureError(ContractError):
    """A fixture breaks the format of §15, or refers to what does not exist."""


class FixtureIOError(FixtureError):
    """A fixture cannot be read; the text never shows a local path."""


class HostContextError(ContractError):
    """The host passed a malformed principal, context, time, deadline, approvals or reference: a programmer error."""


class ToolContractError(ContractError):
    """A tool contract that cannot work; raised when the dispatcher is built, not at the first call."""


class ResultContractError(ContractError):
    """A result package that must not be built or must not leave: it is not what its call gives."""


class LedgerStateError(ContractError):
    """A ledger operation outside its state: completing or releasing what was never reserved."""


class LedgerCapacityError(ContractError):
    """The ledger is full; new work is refused before any side effect, records are never dropped to make room."""


def _clipped(text: str, limit: int = 300) -> str:
    """Error texts are bounded: a long one loses its middle, where the least of the meaning is."""
    return text if len(text) <= limit else f"{text[: limit - 60]} ... {text[-50:]}"


def _quoted(text: str) -> str:
    """An untrusted string for an error text: bounded, ASCII, control characters escaped."""
    return ascii(text if len(text) <= 40 else text[:40] + "...")


_PLAIN_MEMBER: Final = r"[A-Za-z_][A-Za-z0-9_-]{0,39}"


def _member(key: str) -> str:
    """One step of a JSON path: `.name`, or `['...']` for a key that is no plain name."""
    return f".{key}" if re.fullmatch(_PLAIN_MEMBER, key) else f"[{_quoted(key)}]"


# ==== 3. Portable JSON (§3) ===========================================================================================

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]


class _RepeatedKey:
    """Stands in a decoded document for an object that repeats a key, until the check names its path."""

    def __init__(self, key: str) -> None:
        self.key = key


class _Walk:
    """What one walk over a value may take, and what it has seen."""

    __slots__ = ("chars", "max_chars", "max_values", "plain", "values")

    def __init__(self, depth: int = MAX_JSON_DEPTH) -> None:
        payload = depth < MAX_JSON_DEPTH
        self.max_values = MAX_JSON_NODES - (_VALUES_BESIDE_PAYLOAD if payload else 0)
        self.max_chars = _MAX_TEXT_CHARS - (_CHARS_BESIDE_PAYLOAD if payload else 0)
        self.values = self.chars = 0
        self.plain = True  # no float and no key beyond ASCII: the standard encoder's bytes are RFC 8785's


def _snapshot(value: object, depth: int = MAX_JSON_DEPTH) -> tuple[JsonValue, bool]:
    """Copy `value`, at most `depth` containers deep, into the portable domain or raise `PortableJsonError`.

    Returns the copy and whether it is plain (see `_canonical`). One pass checks and copies, so what was checked is
    what is kept, whatever happens to the original. Types are exact: a subclass could answer differently at its next
    reading, so none of its methods is ever called.
    """
    walk = _Walk(depth)
    copy = _copied(value, depth, walk)
    return copy, walk.plain


def _copied(value: object, room: int, walk: _Walk) -> JsonValue:
    """The recursive step of `_snapshot`: `room` more levels may come."""
    walk.values += 1
    if walk.values > walk.max_values:
        raise PortableJsonError(f"wanted at most {walk.max_values} values")
    if type(value) is str:
        _check_text(value, walk)
        return value
    if value is None or type(value) is bool:
        return value
    if type(value) is int or type(value) is float:
        walk.plain &= type(value) is int
        return _number(value)
    if type(value) is _RepeatedKey:
        raise PortableJsonError("wanted each key once, found a duplicate", _member(value.key))
    if type(value) is list:
        _check_container(value, room)
        items: list[JsonValue] = []
        for index, item in enumerate(value):
            try:
                items.append(_copied(item, room - 1, walk))
            except PortableJsonError as error:
                error.path = f"[{index}]{error.path}"
                raise
        return items
    if type(value) is dict:
        _check_container(value, room)
        members: JsonObject = {}
        for key, item in list(value.items()):  # somebody else may change it meanwhile
            if type(key) is not str:
                raise PortableJsonError("wanted strings as keys")
            try:
                _check_text(key, walk)
                walk.plain &= key.isascii()
                members[key] = _copied(item, room - 1, walk)
            except PortableJsonError as error:
                error.path = _member(key) + error.path
                raise
        return members
    raise PortableJsonError("wanted null, a boolean, a number, a string, an array or an object")


def _check_container(value: Sized, room: int) -> None:
    if room == 0:
        raise PortableJsonError("nested too deep")
    if len(value) > MAX_MEMBERS:
        raise PortableJsonError(f"wanted at most {MAX_MEMBERS} members")


def _check_text(text: str, walk: _Walk) -> None:
    if len(text) > MAX_STRING_CHARS:
        raise PortableJsonError(f"wanted at most {MAX_STRING_CHARS} characters in one string")
    walk.chars += len(text)
    if walk.chars > walk.max_chars:
        raise PortableJsonError(f"wanted at most {walk.max_chars} characters in all strings together")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PortableJsonError("wanted no lone surrogate in a string") from None


def _number(number: float) -> float:
    if type(number) is int:
        if not -MAX_SAFE_INTEGER <= number <= MAX_SAFE_INTEGER:
            raise PortableJsonError(f"wanted an integer between -{MAX_SAFE_INTEGER} and {MAX_SAFE_INTEGER}")
    elif not isfinite(number):
        raise PortableJsonError("wanted a finite number")
    # A float of this size has no fraction: RFC 8785 would write it as an integer that no reader takes back (§3).
    elif MAX_SAFE_INTEGER < abs(number) < 1e21:
        raise PortableJsonError("wanted a number whose text is no integer beyond the safe range")
    return number


class _Decoding:
    """The hooks of one decoding. They know no path, so they let through what may be wrong and call it doubtful."""

    def __init__(self) -> None:
        self.doubtful = False
        self.sizes: list[int] = []  # of the objects

    def quickly(self, text: str) -> Any:
        return self._decoder(object_hook=self._counted).decode(text)

    def with_repeated_keys(self, text: str) -> Any:
        """With a `_RepeatedKey` for each object that has one. Takes a third longer."""
        return self._decoder(object_pairs_hook=self._members).decode(text)

    def _decoder(self, **hook: Any) -> json.JSONDecoder:
        return json.JSONDecoder(parse_int=self._integer, parse_float=self._float, parse_constant=self._float, **hook)

    def _counted(self, members: dict[str, Any]) -> dict[str, Any]:
        self.sizes.append(len(members))
        return members

    def _members(self, pairs: list[tuple[str, Any]]) -> dict[str, Any] | _RepeatedKey:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                return _RepeatedKey(key)
            members[key] = value
        return members

    def _integer(self, digits: str) -> int:
        value = int(digits[:18])  # enough to be out of range; Python itself refuses to convert 5,000 digits
        self.doubtful |= not -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER
        return value

    def _float(self, literal: str) -> float:
        self.doubtful = True
        return float(literal)  # 1e400 becomes infinity, `NaN` a NaN


_ESCAPE: Final = rb"(?s)\\."
_ALL_BUT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[{,:]}'))
_ONE_KIND: Final = bytes.maketrans(b"[{]}", b"(())")


def _outside_strings(raw: bytes) -> bytes:
    """The brackets, braces, commas and colons outside strings, without a look at anything else.

    Of a text cut at its quotes, every other piece stands outside the strings. Two quotes side by side change nothing in
    that, so most strings are gone before the cut.
    """
    unescaped = re.sub(_ESCAPE, b"", raw) if b"\\" in raw else raw
    structure = unescaped.translate(None, _ALL_BUT_STRUCTURE).replace(b'""', b"")
    return b"".join(structure.split(b'"')[::2])


def _check_nesting(outside: bytes) -> None:
    """Before the recursive decoder sees the text, and without recursion."""
    nest = outside.translate(_ONE_KIND, b",:")
    for _ in range(MAX_JSON_DEPTH):
        nest = nest.replace(b"()", b"")  # takes away one level, the innermost; what is left is deeper or not closed
    if b"()" in nest or nest.count(b"(") > MAX_JSON_DEPTH:
        raise PortableJsonError(f"nested too deep: wanted at most {MAX_JSON_DEPTH} levels")


def parse_json(raw: bytes) -> JsonValue:
    """Decode at most `MAX_FIXTURE_BYTES` of strict UTF-8 JSON, or raise `PortableJsonError` (§3)."""
    if type(raw) is not bytes:
        raise PortableJsonError("wanted bytes")
    if len(raw) > MAX_FIXTURE_BYTES:
        raise PortableJsonError(f"wanted at most {MAX_FIXTURE_BYTES} bytes")
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise PortableJsonError(
            "wanted no byte-order mark: save as UTF-8 without BOM (PowerShell: Set-Content -Encoding utf8NoBOM)"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PortableJsonError(f"wanted UTF-8, which byte {error.start} is not") from None
    outside = _outside_strings(raw)
    _check_nesting(outside)
    decoding = _Decoding()
    try:
        value: JsonValue = decoding.quickly(text)
    except json.JSONDecodeError as error:
        raise PortableJsonError(f"wanted JSON; line {error.lineno}, column {error.colno}: {error.msg}") from None
    # Every rule for values stands in `_snapshot`; here it is only asked whether its walk can be spared, for loading a
    # fixture takes less than half the time without it.
    sizes = decoding.sizes
    members = sum(sizes)
    doubtful = (
        decoding.doubtful
        or "\\u" in text  # which alone can make a lone surrogate
        or members != outside.count(b":")  # each colon wrote a member: a repeated key lost one
        or max(sizes, default=0) > MAX_MEMBERS
        or outside.count(b",") - (members - len(sizes)) >= MAX_MEMBERS  # the commas in arrays, at the most
    )  # and the other limits follow from the number of bytes
    return _snapshot(decoding.with_repeated_keys(text))[0] if doubtful else value


def _encoder() -> Callable[[object], str]:
    """The standard encoder, with the settings that come closest to RFC 8785.

    `JSONEncoder.encode` sets up its C encoder anew for each document. Keeping one saves a tenth of a dispatch; where an
    interpreter has none to keep, or another signature for it, the public method gives the same text.
    """
    standard = json.JSONEncoder(
        ensure_ascii=False, sort_keys=True, separators=(",", ":"), check_circular=False, allow_nan=False
    )
    try:
        make: Any = json.encoder.c_make_encoder  # type: ignore[attr-defined]
        # No memory of containers, no indent, the two separators; keys sorted, none skipped, no NaN.
        kept = make(None, standard.default, json.encoder.encode_basestring, None, ":", ",", True, False, False)
    except (AttributeError, TypeError):
        return standard.encode
    return lambda value: "".join(kept(value, 0))


# Also writes the text of a snapshot: its floats keep their point (`2.0`), so reading it back gives the same types.
_ENCODE: Final = _encoder()
_json_string: Final = json.encoder.encode_basestring  # the same text for one string, in a quarter of the time
_decode: Final = json.JSONDecoder().raw_decode


def canonical_json(value: object) -> str:
    """The one deterministic encoding: RFC 8785 within the portable domain; `PortableJsonError` outside it."""
    return _canonical(*_snapshot(value))


def _canonical(value: object, plain: bool) -> str:
    """Encode what is known to be portable, and plain or not.

    The standard encoder gives RFC 8785's bytes but for two things: how a float is written, and the order of keys when
    one has a character beyond U+FFFF. A document without a float and with ASCII keys is written six times as fast.
    """
    return _ENCODE(value) if plain else _canonical_slowly(value)


def _canonical_slowly(value: object) -> str:
    if type(value) is float:
        return _ecmascript_number(value)
    if type(value) is list:
        return f"[{','.join(map(_canonical_slowly, value))}]"
    if type(value) is dict:
        # RFC 8785, 3.2.3: keys in the order of their UTF-16 code units.
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return f"{{{','.join(f'{_ENCODE(key)}:{_canonical_slowly(value[key])}' for key in keys)}}}"
    return _ENCODE(value)


def _ecmascript_number(number: float) -> str:
    """RFC 8785, 3.2.2.3: `repr` has the shortest digits already; only where the point stands differs."""
    if number == 0:
        return "0"  # minus zero too
    mantissa, _, exponent = repr(abs(number)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    padded = whole + fraction
    digits = padded.lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(padded) - len(digits))  # the number is 0.DIGITS * 10**point
    digits = digits.rstrip("0")
    sign = "-" if number < 0 else ""
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1:+d}"


def digest(value: object) -> str:
    """SHA-256 of the canonical bytes, 64 lowercase hex characters. It binds content; it is not a signature."""
    return _sha256(canonical_json(value))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _same(one: object, other: object) -> bool:
    """Type-exact equality of portable values: `1`, `True` and `1.0` are three different values."""
    if one is other:  # as most names of a call are; an approved write takes a hundredth less
        return True
    if type(one) is not type(other):
        return False
    if type(one) is dict and type(other) is dict:
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if type(one) is list and type(other) is list:
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _exact_fields(value: object, names: Set[str], path: str, errors: list[str]) -> bool:
    """Whether `value` is an object with exactly these fields; otherwise `errors` says which are wrong."""
    if type(value) is not dict:
        errors.append(f"{path}: wanted an object")
        return False
    for key in value:
        if type(key) is not str:  # nor compared with one: that would run its code
            errors.append(f"{path}: wanted strings as keys")
            return False
    if value.keys() == names:
        return True
    errors.extend(f"{path}.{name}: missing" for name in sorted(names - value.keys()))
    extra = sorted(value.keys() - names)
    errors.extend(_clipped(f"{path}{_member(name)}: not a field here") for name in extra[:10])
    if len(extra) > 10:
        errors.append(f"{path}: {len(extra) - 10} more that are not fields here")
    return False


# ==== 4. Principal, proposal, context, binding (§4) ===================================================================


def _is_identifier(value: object) -> bool:
    """1 to `MAX_IDENTIFIER_CHARS` printable characters, not blank: no control character, no lone surrogate."""
    return type(value) is str and 0 < len(value) <= MAX_IDENTIFIER_CHARS and value.isprintable() and not value.isspace()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, from the host's session: identifiers, and at most `MAX_ROLES` sorted, unique roles."""

    tenant_id: str
    subject_id: str
    roles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelProposal:
    """What the model said. Untrusted: any value of any shape, until `bind_tool_call`."""

    name: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """The provider turn and the operation, from the host's adapter: identifiers; a read may have no key."""

    provider: str
    api_family: str
    response_id: str
    call_id: str
    operation_id: str
    idempotency_key: str | None
    adapter_revision: str


_CONTEXT_NAMES: Final = tuple(ExecutionContext.__dataclass_fields__)
_context_values: Final = attrgetter(*_CONTEXT_NAMES)


class _Bound(NamedTuple):
    """What binding found: a snapshot of proposal and context, and what is wrong with the context."""

    name: str
    context: ExecutionContext
    arguments_json: str | None  # which gives the same types back; out of reach, each reader parses a copy of its own
    texts: Mapping[str, str]  # what the digests (§12) cover of arguments and context: the canonical text of each value
    wrong: str  # for gate 1 (§7) to raise, where the host expects it; then `texts` has the arguments only

    def arguments(self) -> JsonObject | None:
        arguments: JsonObject | None = None if self.arguments_json is None else _decode(self.arguments_json)[0]
        return arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A proposal bound to a context. Made by `bind_tool_call`; one built by hand is snapshotted wherever it is used."""

    proposal: ModelProposal
    context: ExecutionContext
    # Not an `__init__` field, so `dataclasses.replace` does not carry it to a call with another proposal.
    _bound: _Bound | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The proposed name, or `"(unregistered)"` for one that is no identifier."""
        return _bound(self).name

    @property
    def arguments(self) -> JsonObject | None:
        """A fresh copy of the arguments, or None when they are no object of the portable domain."""
        return _bound(self).arguments()


def bind_tool_call(proposal: ModelProposal, context: ExecutionContext) -> ToolCall:
    """Snapshot a proposal, of whatever shape, into a call of this context (§4).

    Nothing in the proposal raises: a name that is no identifier becomes `"(unregistered)"`, arguments that are no
    object of the portable domain become None, and the gates answer with a result. `HostContextError` only when
    `proposal` or `context` is of another type or was made without its fields.
    """
    if type(proposal) is not ModelProposal:
        raise HostContextError("proposal: wanted a ModelProposal")
    if type(context) is not ExecutionContext:
        raise HostContextError("context: wanted an ExecutionContext")
    try:
        context = replace(context)  # the caller may still hold the other one
        name, given = proposal.name, proposal.arguments
    except AttributeError:
        raise HostContextError("proposal, context: wanted values with all their fields") from None
    try:
        arguments, plain = _snapshot(given, _MAX_PAYLOAD_DEPTH)
    except PortableJsonError:
        arguments, plain = None, True
    if type(arguments) is not dict:
        arguments, plain = None, True
    wrong = _wrong_context(context)
    texts = {} if wrong else dict(zip(_CONTEXT_NAMES, map(_json_name, _context_values(context)), strict=True))
    texts["arguments"] = _canonical(arguments, plain)
    call = ToolCall(ModelProposal(name if _is_identifier(name) else _UNREGISTERED_NAME, arguments), context)
    arguments_json = None if arguments is None else _ENCODE(arguments)
    # With a context of its own: that of the call is in everybody's reach, and frozen is no lock.
    object.__setattr__(call, "_bound", _Bound(call.proposal.name, replace(context), arguments_json, texts, wrong))
    return call


def _bound(call: ToolCall) -> _Bound:
    """The call's snapshot; of a call built by hand, one made now, so each entry point takes it once."""
    return call._bound or cast("_Bound", bind_tool_call(call.proposal, call.context)._bound)


_IDENTIFIER_WANTED: Final = f"wanted a string of 1 to {MAX_IDENTIFIER_CHARS} printable characters, not blank"


def _json_name(value: str | None) -> str:
    """The canonical text of an identifier or None."""
    return "null" if value is None else _json_string(value)


def _is_optional_identifier(value: object) -> bool:
    return value is None or _is_identifier(value)


def _is_time(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_PORTABLE_UNIX_SECONDS


def _are_roles(roles: Any) -> bool:
    """Of a list or tuple: sorted and unique, so that one set of roles has one spelling."""
    return len(roles) <= MAX_ROLES and all(map(_is_identifier, roles)) and all(map(lt, roles, roles[1:]))


_ROLES_WANTED: Final = f"wanted at most {MAX_ROLES} identifiers, sorted and unique"


def _wrong_context(context: ExecutionContext) -> str:
    """What gate 1 will say of this context; empty when it is well formed."""
    for name in ("provider", "api_family", "response_id", "call_id", "operation_id", "adapter_revision"):
        if not _is_identifier(getattr(context, name)):
            return f"context.{name}: {_IDENTIFIER_WANTED}"
    if not _is_optional_identifier(context.idempotency_key):
        return f"context.idempotency_key: {_IDENTIFIER_WANTED}, or None"
    if PROVIDER_PROFILES.get((context.provider, context.api_family)) != context.adapter_revision:
        return "context: wanted a provider, api_family and adapter_revision of PROVIDER_PROFILES"
    return ""


def validate_host_context(principal: Principal, call: ToolCall, *, now: int) -> None:
    """Raise `HostContextError` unless the host's own part is well formed: gate 1 of every call (§7).

    `now` is in Unix seconds, 0 to `MAX_PORTABLE_UNIX_SECONDS`. Nothing the model controls is judged.
    """
    _check_host_at(principal, call, now)


def _check_host_at(principal: Principal, call: ToolCall, now: object) -> _Bound:
    bound = _check_host(principal, call)
    if not _is_time(now):
        raise HostContextError(f"now: wanted an int of seconds from 0 to {MAX_PORTABLE_UNIX_SECONDS}")
    return bound


def _check_host(principal: Principal, call: ToolCall) -> _Bound:
    """Returns the snapshot that was judged."""
    try:
        if type(principal) is not Principal:
            raise HostContextError("principal: wanted a Principal")
        if not (_is_identifier(principal.tenant_id) and _is_identifier(principal.subject_id)):
            raise HostContextError(f"principal: tenant_id and subject_id: {_IDENTIFIER_WANTED}")
        if type(principal.roles) is not tuple or not _are_roles(principal.roles):
            raise HostContextError(f"principal.roles: {_ROLES_WANTED}, in a tuple")
        if type(call) is not ToolCall:
            raise HostContextError("call: wanted a ToolCall")
        bound = _bound(call)
    except AttributeError:  # made without its `__init__`
        raise HostContextError("principal, call: wanted values with all their fields") from None
    if bound.wrong:
        raise HostContextError(bound.wrong)
    return bound


# ==== 5. Tool contracts (§5) ==========================================================================================


def _freeze(owner: object, name: str) -> None:
    """Put a read-only copy in place of a mapping; what is no mapping is left for the contract check to refuse."""
    value = getattr(owner, name)
    if isinstance(value, Mapping):
        object.__setattr__(owner, name, MappingProxyType(dict(value)))


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What one field must be. Types are exact (`True` is no integer, `2.0` is not `2`); bounds are inclusive.

    `type` is `str`, `int`, `bool`, `float`, `list` or `dict`; only `float`, JSON's number, also takes an int. Lengths
    are of strings (stripped of blanks, for `min_length`) and lists, in characters and items; `pattern` matches in
    full; `items` and `fields` are nested rules, without which a list or dict takes anything portable; `enum` compares
    type-exactly. `equals_argument` (outputs only) names the input argument that the value must repeat.
    """

    type: type
    nullable: bool = field(default=False, kw_only=True)
    min_length: int | None = field(default=None, kw_only=True)
    max_length: int | None = field(default=None, kw_only=True)
    enum: Iterable[JsonValue] | None = field(default=None, kw_only=True)
    pattern: str | None = field(default=None, kw_only=True)
    minimum: float | None = field(default=None, kw_only=True)
    maximum: float | None = field(default=None, kw_only=True)
    items: "FieldRule | None" = field(default=None, kw_only=True)
    fields: "Mapping[str, FieldRule] | None" = field(default=None, kw_only=True)
    equals_argument: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _freeze(self, "fields")
        if isinstance(self.enum, list | tuple | set | frozenset):
            try:
                members = tuple(_snapshot(member)[0] for member in self.enum)
            except PortableJsonError:
                members = ()  # no value could equal it: refused, as an empty one is
            object.__setattr__(self, "enum", members)


@dataclass(frozen=True, slots=True)
class HandlerResult:
    """What a handler returns. `observed_at` is UTC, `YYYY-MM-DDTHH:MM:SSZ`; the last three are identifiers or None."""

    data: JsonObject
    producer_revision: str
    resource_revision: str | None
    observed_at: str
    request_id: str | None = None
    receipt_id: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The downstream's own evidence that an operation took effect: `result` carries a `receipt_id`."""

    status_ref: str
    request_sha256: str
    result: HandlerResult


class NotStarted(Exception):
    """Raised by a handler that can prove nothing happened. Any other exception of a write leaves it unknown.

    `code` is `TIMEOUT_BEFORE_EXECUTE`, `RATE_LIMIT`, `TOOL_ERROR` or `BUSINESS_RULE_VIOLATION`; with another code the
    exception proves nothing.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a handler gets. A real downstream needs the key and the reference to be idempotent itself.

    `timeout_ms` is told, not enforced; `now` is in Unix seconds. `idempotency_key` and `status_ref` are None for reads.
    """

    principal: Principal
    arguments: JsonObject
    operation_id: str
    idempotency_key: str | None
    status_ref: str | None
    request_sha256: str
    timeout_ms: int
    now: int


@dataclass(frozen=True, slots=True)
class ReceiptQuery:
    """What `find_receipt` gets: enough to ask the downstream about an earlier operation, nothing to run it again."""

    principal: Principal
    arguments: JsonObject
    idempotency_key: str
    status_ref: str
    request_sha256: str
    now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool: its input and output contract, its revisions and its callbacks (§5).

    `authorize` and `business_rule` get the principal and a copy of the arguments; only `True` itself passes, anything
    else, or an exception, refuses. `find_receipt` is how a write's unknown outcome can be reconciled; without one it
    stays unknown. `timeout_ms` is in milliseconds, `max_output_bytes` in bytes of canonical JSON, `max_output_depth`
    in nested containers (a flat object is 1). A `Dispatcher` refuses a contract that cannot work.
    """

    name: str
    description: str
    effect: Effect
    arguments: Mapping[str, FieldRule]
    output: Mapping[str, FieldRule]
    input_schema_revision: str
    output_schema_revision: str
    effect_revision: str
    handler_revision: str
    producer_revision: str
    policy_revision: str
    source_label: str
    authorize: Callable[[Principal, JsonObject], bool]
    handler: Callable[[Invocation], HandlerResult]
    business_rule: Callable[[Principal, JsonObject], bool] | None = None
    find_receipt: Callable[[ReceiptQuery], Receipt | None] | None = None
    timeout_ms: int = 1_000
    max_output_bytes: int = 4_096
    max_output_depth: int = 4
    # Not carried over by `dataclasses.replace`: that `_check_spec` found the contract sound, and what the digests (§12)
    # cover of it, kept by `_contract_texts`.
    _sound: bool = field(default=False, init=False, repr=False, compare=False)
    _texts: Mapping[str, str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _freeze(self, "arguments")
        _freeze(self, "output")


_REVISION_FIELDS: Final = (
    "input_schema_revision",
    "output_schema_revision",
    "effect_revision",
    "handler_revision",
    "producer_revision",
    "policy_revision",
)
_TYPE_NAMES: Final[Mapping[type, str]] = MappingProxyType(
    {str: "a string", int: "an integer", bool: "a boolean", float: "a number", list: "an array", dict: "an object"}
)
_TOOL_NAME: Final = r"[A-Za-z0-9_-]{1,64}"  # what all three providers take


def _check_spec(spec: object) -> None:
    """Raise `ToolContractError` for a contract that cannot work; once found sound, it stays so."""
    if type(spec) is not ToolSpec:
        raise ToolContractError("tools: wanted ToolSpec objects")
    try:
        if not spec._sound:
            _check_spec_values(spec)
            object.__setattr__(spec, "_sound", True)
    except AttributeError:  # made without its `__init__`
        raise ToolContractError("tools: wanted ToolSpec objects with all their fields") from None


def _check_spec_values(spec: ToolSpec) -> None:
    if type(spec.name) is not str or not re.fullmatch(_TOOL_NAME, spec.name):
        raise ToolContractError("name: wanted 1 to 64 of A-Z a-z 0-9 _ -")
    where = spec.name
    if type(spec.description) is not str or not spec.description.strip():
        raise ToolContractError(f"{where}.description: wanted text")
    if type(spec.effect) is not str or spec.effect not in ("read", "write"):
        raise ToolContractError(f"{where}.effect: wanted 'read' or 'write'")
    for name in _REVISION_FIELDS:
        value = getattr(spec, name)
        if not _is_identifier(value) or value == _UNREGISTERED:
            raise ToolContractError(f"{where}.{name}: {_IDENTIFIER_WANTED}, other than '{_UNREGISTERED}'")
    if not _is_identifier(spec.source_label) or spec.source_label == DISPATCHER_SOURCE_LABEL:
        raise ToolContractError(f"{where}.source_label: {_IDENTIFIER_WANTED}, other than the dispatcher's own")
    for name in ("authorize", "handler"):
        if not callable(getattr(spec, name)):
            raise ToolContractError(f"{where}.{name}: wanted a callable")
    for name in ("business_rule", "find_receipt"):
        value = getattr(spec, name)
        if value is not None and (spec.effect == "read" or not callable(value)):
            raise ToolContractError(f"{where}.{name}: wanted None, or a callable on a write (a read never asks it)")
    for name in ("timeout_ms", "max_output_bytes", "max_output_depth"):
        value = getattr(spec, name)
        if type(value) is not int or not 1 <= value <= MAX_SAFE_INTEGER:
            raise ToolContractError(f"{where}.{name}: wanted an integer from 1 to {MAX_SAFE_INTEGER}")
    if spec.max_output_depth > _MAX_PAYLOAD_DEPTH:
        raise ToolContractError(f"{where}.max_output_depth: wanted at most {_MAX_PAYLOAD_DEPTH}")
    _check_rules(spec.arguments, f"{where}.arguments", _MAX_PAYLOAD_DEPTH, None)
    _check_rules(spec.output, f"{where}.output", spec.max_output_depth, spec.arguments)


def _check_rules(rules: object, path: str, room: int, arguments: Mapping[str, FieldRule] | None) -> None:
    """Check the rules of one object, which has `room` nested containers; `arguments` is None for an input."""
    if not isinstance(rules, Mapping):
        raise ToolContractError(f"{path}: wanted a mapping of FieldRule")
    for name, rule in rules.items():
        if not _is_identifier(name):
            raise ToolContractError(f"{path}: wanted field names that are identifiers")
        if arguments is not None and _is_sensitive_name(name):
            raise ToolContractError(f"{path}{_member(name)}: reads as a credential or control field")
        _check_rule(rule, path + _member(name), room, arguments)


def _check_rule(rule: object, path: str, room: int, arguments: Mapping[str, FieldRule] | None) -> None:
    if type(rule) is not FieldRule:
        raise ToolContractError(f"{path}: wanted a FieldRule")
    if not any(rule.type is kind for kind in _TYPE_NAMES):
        raise ToolContractError(f"{path}.type: wanted str, int, bool, float, list or dict")
    if type(rule.nullable) is not bool:
        raise ToolContractError(f"{path}.nullable: wanted a bool")
    for name, types in (
        ("min_length", (str, list)),
        ("max_length", (str, list)),
        ("pattern", (str,)),
        ("minimum", (int, float)),
        ("maximum", (int, float)),
        ("items", (list,)),
        ("fields", (dict,)),
    ):
        if getattr(rule, name) is not None and rule.type not in types:
            raise ToolContractError(f"{path}.{name}: does not fit {_TYPE_NAMES[rule.type]}")
    _check_bounds(rule, path)
    if rule.pattern is not None:
        try:
            re.compile(rule.pattern if type(rule.pattern) is str else "(")
        except (re.error, RecursionError, OverflowError, Warning):
            raise ToolContractError(f"{path}.pattern: wanted a regular expression") from None
    if rule.equals_argument is not None:
        named = arguments.get(rule.equals_argument) if arguments and type(rule.equals_argument) is str else None
        if named is None or not (named.type is rule.type or {named.type, rule.type} == {int, float}):
            raise ToolContractError(f"{path}.equals_argument: wanted, in an output, an argument of the same type")
    if rule.type in (list, dict) and room < 2:
        raise ToolContractError(f"{path}: declared deeper than its values may nest")
    if rule.items is not None:
        _check_rule(rule.items, f"{path}.items", room - 1, arguments)
    if rule.fields is not None:
        _check_rules(rule.fields, path, room - 1, arguments)
    if rule.enum is not None:
        _check_enum(rule, path)


def _check_bounds(rule: FieldRule, path: str) -> None:
    for low_name, high_name in (("min_length", "max_length"), ("minimum", "maximum")):
        low, high = getattr(rule, low_name), getattr(rule, high_name)
        for name, bound in ((low_name, low), (high_name, high)):
            if bound is not None and not _is_fitting_bound(rule, name, bound):
                raise ToolContractError(f"{path}.{name}: wanted a bound that fits the field's type")
        if low is not None and high is not None and low > high:
            raise ToolContractError(f"{path}.{low_name}: wanted no more than {high_name}")


def _is_fitting_bound(rule: FieldRule, name: str, bound: object) -> bool:
    if name.endswith("_length"):
        return type(bound) is int and 0 <= bound <= MAX_SAFE_INTEGER
    return (type(bound) is int and abs(bound) <= MAX_SAFE_INTEGER) or (
        rule.type is float and type(bound) is float and isfinite(bound)
    )


def _check_enum(rule: FieldRule, path: str) -> None:
    """Each value passes the rest of the rule, which has been checked by now."""
    errors: list[str] = []
    rest = replace(rule, enum=None, equals_argument=None)
    for member in rule.enum if type(rule.enum) is tuple else ():
        _check_value(rest, member, path, {}, errors)
    if not rule.enum or type(rule.enum) is not tuple or errors:
        raise ToolContractError(
            f"{path}.enum: wanted a list, tuple or set of values that fit the rule's type and bounds"
        )


def _check_fields(
    rules: Mapping[str, FieldRule], value: Any, path: str, arguments: JsonObject, errors: list[str]
) -> None:
    """Exact fields, each by its rule: the input and the output contract alike. `value` is portable."""
    if _exact_fields(value, rules.keys(), path, errors):
        for name, rule in rules.items():
            _check_value(rule, value[name], f"{path}.{name}", arguments, errors)


def _check_value(rule: FieldRule, value: JsonValue, path: str, arguments: JsonObject, errors: list[str]) -> None:
    if rule.equals_argument is not None and not _same(value, arguments.get(rule.equals_argument)):
        errors.append(f"{path}: wanted the value of the argument {rule.equals_argument}")
    if value is None and rule.nullable:
        return
    kind = type(value)
    if kind is not rule.type and not (rule.type is float and kind is int):
        errors.append(f"{path}: wanted {_TYPE_NAMES[rule.type]}")
        return
    if rule.enum is not None and not any(map(_same, repeat(value), rule.enum)):
        errors.append(f"{path}: wanted one of the declared values")
    if type(value) is str or type(value) is list:
        if rule.min_length is not None and len(value.strip() if type(value) is str else value) < rule.min_length:
            errors.append(f"{path}: wanted a length of at least {rule.min_length}")
        if rule.max_length is not None and len(value) > rule.max_length:
            errors.append(f"{path}: wanted a length of at most {rule.max_length}")
            return  # the pattern is spared what it may take very long for
        if rule.pattern is not None and type(value) is str and not re.fullmatch(rule.pattern, value):
            errors.append(f"{path}: wanted the declared pattern")
        if rule.items is not None and type(value) is list:
            for index, item in enumerate(value):
                _check_value(rule.items, item, f"{path}[{index}]", arguments, errors)
    elif type(value) is int or type(value) is float:
        if rule.minimum is not None and value < rule.minimum:
            errors.append(f"{path}: wanted at least {rule.minimum}")
        if rule.maximum is not None and value > rule.maximum:
            errors.append(f"{path}: wanted at most {rule.maximum}")
    elif type(value) is dict and rule.fields is not None:
        _check_fields(rule.fields, value, path, arguments, errors)


# Names that never leave in a tool's output, at any level: credentials, and what names a principal, call, operation,
# receipt or digest. Compared in full and folded, so `Access-Token` is one and `tokenizer` is not.
# fmt: off
SENSITIVE_FIELD_NAMES: Final = frozenset(
    {
        "access_key", "access_token", "api_key", "api_token", "approval_digest", "approval_id", "auth_token",
        "authorization", "aws_secret_access_key", "bearer", "bearer_token", "call_binding_sha256", "call_id",
        "client_secret", "cookie", "cookies", "credential", "credentials", "csrf_token", "encryption_key", "id_token",
        "idempotency_key", "jwt", "oauth_token", "operation_id", "passphrase", "passwd", "password", "principal_ref",
        "private_key", "proxy_authorization", "pwd", "receipt_id", "refresh_token", "request_digest", "request_id",
        "request_sha256", "response_id", "result_sha256", "secret", "secret_access_key", "secret_key",
        "session_cookie", "session_key", "session_token", "set_cookie", "signing_key", "ssh_key", "status_ref",
        "subject_id", "tenant_id", "token", "x_api_key", "xsrf_token",
    }
)
# fmt: on
_FOLDED_SENSITIVE: Final = frozenset(name.replace("_", "") for name in SENSITIVE_FIELD_NAMES)
_SEPARATORS: Final = r"[\W_]+"
# "Bearer" with a token-shaped word (a digit, a joint, a step from lower to upper case, or 20 characters in it), or a
# PEM private key. "bearer of news" is neither.
_BETWEEN: Final = r"""[\s\x85\u1680\u2028\u2029:="']++"""  # a scheme and its word
_CREDENTIAL: Final = rf"""(?ax) (?<![A-Za-z0-9]) (?i:bearer) {_BETWEEN}
            (?: (?= [\w.~+/=-]{{6}} ) [\w.~+/=-]*? (?: [\d_~+=] | [a-z][A-Z] ) | [\w~+=-]{{20}} )
      | (?<![A-Za-z0-9]) (?: Bearer | BEARER ) {_BETWEEN} (?= [\w.~+/=-]{{6}} ) [\w.~+/=-]*? \w[.-]\w
      | (?i: -----BEGIN\ [A-Z0-9\ ]*PRIVATE\ KEY )"""
# "Basic" with a word; whether that is a credential, `_is_basic_credential` says. "Basic training" is none.
_BASIC: Final = rf"(?ai)(?<![a-z0-9])basic{_BETWEEN}([\w+/-]{{4,}}+)(={{0,2}})"
# What Unicode calls default ignorable: nothing is shown for it, so it could split a name without a trace.
_INVISIBLE: Final = (
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def _visible(text: str) -> str:
    """Compatibility forms and invisible characters folded away; marks stand apart from their letters."""
    if text.isascii():
        return text
    # In pieces: sorting the marks of one long run takes quadratic time.
    pieces = (text[start : start + 1_024] for start in range(0, len(text), 1_024))
    return re.sub(_INVISIBLE, "", "".join(unicodedata.normalize("NFKD", piece) for piece in pieces))


def _is_sensitive_name(name: str) -> bool:
    # Long names are not kept.
    return _reads_sensitive(name) if len(name) <= MAX_IDENTIFIER_CHARS else _reads_sensitive.__wrapped__(name)


@lru_cache(maxsize=1_024)  # a tool answers with the same names each time
def _reads_sensitive(name: str) -> bool:
    return re.sub(_SEPARATORS, "", _visible(_visible(name).casefold())) in _FOLDED_SENSITIVE


def _is_credential(text: str) -> bool:
    if not _may_hold_credential(text):
        return False
    visible = _visible(text)
    return bool(re.search(_CREDENTIAL, visible)) or any(
        _is_basic_credential(*found) for found in re.findall(_BASIC, visible)
    )


def _is_basic_credential(word: str, padding: str) -> bool:
    """RFC 7617: the base64 of `user:password`; or what looks like base64 and nothing else."""
    mixed = len(word) >= 12 and any(map(str.isdigit, word)) and not (word.islower() or word.isupper())
    try:
        decoded = a2b_base64(word + "=" * (-len(word) % 4))
    except ValueError:
        decoded = b""
    return bool(padding) or mixed or (decoded.find(b":") > 0 and decoded.isascii() and decoded.decode().isprintable())


def _may_hold_credential(text: str) -> bool:
    """Quick to say no: each credential that is looked for has one of three words in it."""
    lowered = _visible(text).lower()
    return "bearer" in lowered or "basic" in lowered or "private key" in lowered


def _check_sensitive(value: JsonValue, strings: bool, path: str, errors: list[str]) -> None:
    """No credential or control name as a key and, where `strings` may hold one, no evident credential, at any level."""
    if type(value) is str:
        if strings and _is_credential(value):
            errors.append(f"{path}: reads as a credential")
    elif type(value) is dict:
        for key, item in value.items():
            if _is_sensitive_name(key):
                errors.append(f"{path}{_member(key)}: reads as a credential or control field")
            if strings or type(item) is not str:
                _check_sensitive(key, strings, path + _member(key), errors)
                _check_sensitive(item, strings, path + _member(key), errors)
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_sensitive(item, strings, f"{path}[{index}]", errors)


_TIMESTAMP_FORM: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z"


def _is_timestamp(value: object) -> bool:
    """UTC, to the second, and a date that exists."""
    return type(value) is str and len(value) == 20 and _exists(value)  # only what is short is kept there


@lru_cache(maxsize=64)  # many results share a second
def _exists(timestamp: str) -> bool:
    if not re.fullmatch(_TIMESTAMP_FORM, timestamp):
        return False
    try:
        return datetime.fromisoformat(timestamp).hour == int(timestamp[11:13])  # newer versions read 24:00 as 00:00
    except ValueError:
        return False


@lru_cache(maxsize=64)  # many calls share a second
def _timestamp(now: int) -> str:
    # Plain arithmetic: the platform's own conversion ends at the year 3000 on Windows.
    return f"{(datetime(1970, 1, 1) + timedelta(seconds=now)).isoformat()}Z"


def validate_handler_result(spec: ToolSpec, call: ToolCall, result: object) -> list[str]:
    """Every way in which `result` breaks the output contract of `spec` for this call (§5).

    Never raises for anything in `result`.
    """
    try:
        _check_spec(spec)
        arguments = call.arguments
    except ContractError as error:
        return [str(error)]
    except AttributeError:  # made without its `__init__`
        return ["call: wanted a ToolCall with all its fields"]
    return _checked_output(spec, arguments, result)[1]


_MAX_ERRORS: Final = 100  # of one list; what else was found is counted


def _bounded(errors: list[str]) -> list[str]:
    """At most `_MAX_ERRORS` texts, each of bounded length."""
    kept = [_clipped(error) for error in errors[:_MAX_ERRORS]]
    return kept if len(errors) <= _MAX_ERRORS else [*kept, f"... and {len(errors) - _MAX_ERRORS} more"]


_result_values: Final = attrgetter(*HandlerResult.__dataclass_fields__)


class _Checked(NamedTuple):
    """A handler's result that holds, as read once: strings, None and a snapshot of the data."""

    data: JsonObject
    producer_revision: str
    resource_revision: str | None
    observed_at: str
    request_id: str | None
    receipt_id: str | None
    data_json: str  # which gives the same types back, for the ledger's copy
    canonical: str  # text of the data, for the digest


def _checked_output(spec: ToolSpec, arguments: JsonObject | None, result: object) -> tuple[_Checked | None, list[str]]:
    """The one check of the output contract: the snapshot, or None and the errors."""
    if type(result) is not HandlerResult:
        return None, ["result: wanted a HandlerResult"]
    try:
        # Read once: whoever returned it may still hold it.
        values = _result_values(result)
    except AttributeError:
        return None, ["result: wanted a HandlerResult with all its fields"]
    return _checked_values(spec, arguments, *values)


def _checked_values(
    spec: ToolSpec,
    arguments: JsonObject | None,
    given: object,
    producer_revision: object,
    resource_revision: object,
    observed_at: object,
    request_id: object,
    receipt_id: object,
) -> tuple[_Checked | None, list[str]]:
    """`_checked_output`, of the fields of a result."""
    errors: list[str] = []
    if not _same(producer_revision, spec.producer_revision):
        errors.append("producer_revision: wanted the registered producer's")
    if not _is_timestamp(observed_at):
        errors.append("observed_at: wanted an existing UTC time as YYYY-MM-DDTHH:MM:SSZ")
    if not all(map(_is_optional_identifier, (resource_revision, request_id, receipt_id))):
        errors.append(f"resource_revision, request_id, receipt_id: {_IDENTIFIER_WANTED}, or None, each")
    try:
        data, plain = _snapshot(given, spec.max_output_depth)
    except PortableJsonError as error:
        return None, [*errors, _clipped(f"data{error.path}: {error.wanted}")]
    if type(data) is not dict:
        return None, [*errors, "data: wanted an object"]
    data_json = _ENCODE(data)
    canonical = data_json if plain else _canonical(data, plain)
    if len(canonical if canonical.isascii() else canonical.encode()) > spec.max_output_bytes:
        # What is too long is not looked into: the rest would take long as well.
        return None, _bounded([*errors, f"data: wanted at most {spec.max_output_bytes} bytes of canonical JSON"])
    _check_fields(spec.output, data, "data", arguments or {}, errors)
    _check_sensitive(data, _may_hold_credential(data_json), "data", errors)
    if errors:
        return None, _bounded(errors)
    evidence: Any = (producer_revision, resource_revision, observed_at, request_id, receipt_id, data_json, canonical)
    return _Checked(data, *evidence), []


# ==== 6. Digests (§12) ================================================================================================
#
# Three digests tie a package together: the request digest says "same business intent", the result digest "this is
# what the model was shown", the call binding "for this call, by this contract, with this evidence". The others serve
# the gates. None is a signature: whoever can write the package can compute them; the host checks them against its own
# principal, call and contract.


class ToolContract(TypedDict):
    """The contract a call ran under; a tool that is not registered has none of the six revisions."""

    name: str
    input_schema_revision: str
    output_schema_revision: str
    effect_revision: str
    handler_revision: str
    producer_revision: str
    policy_revision: str


class Downstream(TypedDict):
    """The downstream's identifiers: of its request, of its receipt, and of the operation in the ledger."""

    request_id: str | None
    receipt_id: str | None
    status_ref: str | None


def _template(document: object) -> str:
    """The canonical text of a document, in which each `"%(name)s"` is a gap to be filled with a canonical text."""
    return canonical_json(document).replace('"%(', "%(").replace(')s"', ")s")


def _template_of(*names: str) -> str:
    """`_template_of("a", "b")` is `{"a":%(a)s,"b":%(b)s}`; filled, it is the canonical text of an object of these keys.

    The digests of a call cover the same few values. With each of them written once, a dispatch takes a tenth less.
    """
    return _template({name: f"%({name})s" for name in names})


# What each digest covers: exactly the keys of §12.

# Of the six revisions, those that change what a request asks for.
_REQUEST_REVISIONS: Final = ("input_schema_revision", "output_schema_revision", "effect_revision")

_PRINCIPAL_TEMPLATE: Final = _template_of("tenant_id", "subject_id")
_REQUEST_TEMPLATE: Final = _template_of("tenant_id", "subject_id", "tool", "arguments", *_REQUEST_REVISIONS)
_FINGERPRINT_TEMPLATE: Final = _template_of(*_CONTEXT_NAMES, "purpose", "request_sha256")
_APPROVAL_TEMPLATE: Final = _template_of(
    *_CONTEXT_NAMES,
    "request_sha256",
    *_REQUEST_REVISIONS,
    "policy_revision",
    "approval_id",
    "approver_id",
    "expires_at",
)
_BINDING_TEMPLATE: Final = _template_of(
    "tenant_id", "subject_id", *_CONTEXT_NAMES, "tool_contract", "request_sha256", "result_sha256", "downstream"
)
_STATUS_TEMPLATE: Final = _template(
    {
        "scope": ["%(tenant_id)s", "%(subject_id)s", "%(tool)s", "%(idempotency_key)s"],
        "request_sha256": "%(request_sha256)s",
    }
)


class _Asked:
    """One call by one contract, with its request digest: what every package, approval and record is made from.

    Of what `_check_host` and `_check_spec` have let through; for the public digests there is `_portable_texts`.
    """

    def __init__(self, principal: Principal, bound: _Bound, spec: ToolSpec | None) -> None:
        self.principal = principal
        self.bound = bound
        self.context = bound.context
        self.spec = spec
        self.arguments = bound.arguments()  # for the checks of this module; no callback gets this copy
        self.contract = _tool_contract(bound.name, spec)
        # The canonical text of each value that more than one digest covers.
        self.texts = texts = {**bound.texts, **_contract_texts(self.contract, spec)}
        texts["tenant_id"] = _json_string(principal.tenant_id)
        texts["subject_id"] = _json_string(principal.subject_id)
        self.request_sha256 = _sha256(_REQUEST_TEMPLATE % texts)
        texts["request_sha256"] = _json_string(self.request_sha256)


def _tool_contract(name: str, spec: ToolSpec | None) -> ToolContract:
    if spec is None:
        return cast("ToolContract", {"name": name, **dict.fromkeys(_REVISION_FIELDS, _UNREGISTERED)})
    return {
        "name": name,
        "input_schema_revision": spec.input_schema_revision,
        "output_schema_revision": spec.output_schema_revision,
        "effect_revision": spec.effect_revision,
        "handler_revision": spec.handler_revision,
        "producer_revision": spec.producer_revision,
        "policy_revision": spec.policy_revision,
    }


def _contract_texts(contract: Any, spec: ToolSpec | None) -> Mapping[str, str]:
    """Kept with the spec, for a tenth of a read, unless it is that of another tool: that must leave no trace."""
    own = spec is not None and spec.name == contract["name"]
    kept = spec._texts if spec is not None and own else None
    if kept is not None:
        return kept
    texts = {revision: _json_string(contract[revision]) for revision in _REVISION_FIELDS}
    texts |= {"tool": _json_string(contract["name"]), "tool_contract": _ENCODE(contract)}
    if own:
        object.__setattr__(spec, "_texts", texts)
    return texts


def request_digest(principal: Principal, call: ToolCall, spec: ToolSpec | None) -> str:
    """Who wants what from which contract; without the idempotency key on purpose: it says "same business intent".

    Arguments outside the portable domain, or that are no object, count as `null`. For this digest and the next three,
    anything else in principal, context or contract that is not portable is a `PortableJsonError`, an argument of
    another type a `HostContextError`.
    """
    return _sha256(_REQUEST_TEMPLATE % _portable_texts(principal, call, spec))


def _portable_texts(principal: Principal, call: ToolCall, spec: ToolSpec | None, **given: object) -> dict[str, str]:
    """The texts of `_Asked`, and of what is given, where nobody has checked the values: they must be portable."""
    try:
        bound = _bound(call)
        contract: Any = _tool_contract(bound.name, spec)
        values: Any = dict(zip(_CONTEXT_NAMES, _context_values(bound.context), strict=True)) | contract | given
        values |= {"tool": bound.name, "tool_contract": contract}
        values |= {"tenant_id": principal.tenant_id, "subject_id": principal.subject_id}
    except AttributeError:
        raise HostContextError("principal, call, spec: wanted values with all their fields") from None
    values, plain = _snapshot(values)
    texts = {name: _canonical(value, plain) for name, value in values.items()}
    return texts | {"arguments": bound.texts["arguments"]}


def result_digest(model_result: Mapping[str, object]) -> str:
    """Exactly what the model is shown; `PortableJsonError` for what is not portable."""
    return digest(model_result)


def call_binding_digest(
    principal: Principal,
    call: ToolCall,
    spec: ToolSpec | None,
    request_sha256: str,
    result_sha256: str,
    downstream: Downstream,
) -> str:
    """Request and result, bound to one principal, provider turn, operation, key, contract and evidence."""
    texts = _portable_texts(
        principal, call, spec, request_sha256=request_sha256, result_sha256=result_sha256, downstream=downstream
    )
    return _sha256(_BINDING_TEMPLATE % texts)


def call_fingerprint(principal: Principal, call: ToolCall, spec: ToolSpec | None, *, purpose: Purpose) -> str:
    """What one provider call identity stands for: a request, a context and a purpose (gate 2)."""
    request_sha256 = request_digest(principal, call, spec)
    texts = _portable_texts(principal, call, spec, request_sha256=request_sha256, purpose=purpose)
    return _sha256(_FINGERPRINT_TEMPLATE % texts)


def _fingerprint(asked: _Asked, purpose: Purpose) -> str:
    return _sha256(_FINGERPRINT_TEMPLATE % {**asked.texts, "purpose": _json_string(purpose)})


def approval_digest(
    principal: Principal, call: ToolCall, spec: ToolSpec, *, approval_id: str, approver_id: str, expires_at: int
) -> str:
    """What a human said yes to: this call, by this contract, until this second (§8)."""
    texts = _portable_texts(
        principal,
        call,
        spec,
        request_sha256=request_digest(principal, call, spec),
        approval_id=approval_id,
        approver_id=approver_id,
        expires_at=expires_at,
    )
    return _sha256(_APPROVAL_TEMPLATE % texts)


@lru_cache(maxsize=1_024)  # a principal makes many calls
def _principal_ref(tenant_id: str, subject_id: str) -> str:
    """A teaching hash, not keyed pseudonymisation: whoever can guess both identifiers can recompute it."""
    texts = {"tenant_id": _json_string(tenant_id), "subject_id": _json_string(subject_id)}
    return f"sha256:{_sha256(_PRINCIPAL_TEMPLATE % texts)}"


Scope: TypeAlias = tuple[str, str, str, str]  # tenant, subject, tool, idempotency key


def _scope(asked: _Asked) -> Scope:
    """Within which a key is unique. A call without a key has an empty one, which no record has."""
    principal, context = asked.principal, asked.context
    return (principal.tenant_id, principal.subject_id, asked.bound.name, context.idempotency_key or "")


def _status_ref(asked: _Asked) -> str:
    """Opaque to callers (§9): names an operation without telling whose or what it is."""
    return f"status_{_sha256(_STATUS_TEMPLATE % asked.texts)[:32]}"


# ==== 7. Approval (§8) ================================================================================================


@dataclass(frozen=True, slots=True)
class Approval:
    """A human's yes to one call until `expires_at` (Unix seconds, exclusive).

    Trusted for the channel it comes from: the digest binds it to the call, it does not prove who made it.
    """

    approval_id: str
    operation_id: str
    call_id: str
    provider: str
    api_family: str
    adapter_revision: str
    idempotency_key: str | None
    tool_name: str
    subject_id: str
    input_schema_revision: str
    policy_revision: str
    approval_digest: str
    expires_at: int
    approver_id: str


def grant_approval(
    principal: Principal,
    call: ToolCall,
    spec: ToolSpec,
    *,
    approver_id: str,
    now: int,
    ttl_seconds: int = APPROVAL_TTL_SECONDS,
) -> Approval:
    """Record that `approver_id` said yes to this call at `now`, for 1 to `APPROVAL_TTL_SECONDS` seconds.

    `HostContextError` on malformed values, `ToolContractError` on a spec that cannot work. Whether the approver may
    approve is decided when the approval is used.
    """
    bound = _check_host_at(principal, call, now)
    _check_spec(spec)
    if spec.name != bound.name:
        raise HostContextError("spec: wanted the ToolSpec of the call")
    if not _is_identifier(approver_id):
        raise HostContextError(f"approver_id: {_IDENTIFIER_WANTED}")
    if type(ttl_seconds) is not int or not 1 <= ttl_seconds <= APPROVAL_TTL_SECONDS:
        raise HostContextError(f"ttl_seconds: wanted an int from 1 to {APPROVAL_TTL_SECONDS}")
    if not _is_time(now + ttl_seconds):
        raise HostContextError("now: wanted room for the approval's lifetime")
    return _new_approval(_Asked(principal, bound, spec), approver_id, now + ttl_seconds)


def _new_approval(asked: _Asked, approver_id: str, expires_at: int) -> Approval:
    # No randomness in the core: the id follows from what it is about, so the same yes has the same id.
    about = f"{_fingerprint(asked, 'dispatch')} {approver_id} {expires_at}"
    return Approval(*_fitting_approval(asked, f"approval_{_sha256(about)[:32]}", approver_id, expires_at))


def _fitting_approval(asked: _Asked, approval_id: str, approver_id: str, expires_at: int) -> tuple[Any, ...]:
    """The one approval of this id, approver and expiry that fits the call, as its fields in their order."""
    context, contract = asked.context, asked.contract
    own = {
        "approval_id": _json_string(approval_id),
        "approver_id": _json_string(approver_id),
        "expires_at": str(expires_at),
    }
    return (
        approval_id,
        context.operation_id,
        context.call_id,
        context.provider,
        context.api_family,
        context.adapter_revision,
        context.idempotency_key,
        contract["name"],
        asked.principal.subject_id,
        contract["input_schema_revision"],
        contract["policy_revision"],
        _sha256(_APPROVAL_TEMPLATE % {**asked.texts, **own}),
        expires_at,
        approver_id,
    )


_approval_values: Final = attrgetter(*Approval.__dataclass_fields__)


def _approval_holds(approval: object, asked: _Asked, approvers: frozenset[str], now: int) -> bool:
    """Whether this is a yes to this call now, by somebody who may say it. Never raises, whatever `approval` is."""
    if type(approval) is not Approval:
        return False
    try:
        given = _approval_values(approval)
    except AttributeError:  # made without its `__init__`
        return False
    approval_id, *_, expires_at, approver_id = given
    if not _is_identifier(approval_id) or not _is_identifier(approver_id) or not _is_time(expires_at):
        return False
    if approver_id not in approvers or approver_id == asked.principal.subject_id:
        return False
    if not now < expires_at <= now + APPROVAL_TTL_SECONDS:
        return False
    return all(map(_same, given, _fitting_approval(asked, approval_id, approver_id, expires_at)))


# ==== 8. Result package and its check (§11, §13) ======================================================================


class ErrorBody(TypedDict):
    """An error of the catalog, as the model sees it; `retry_after_ms` in milliseconds."""

    code: str
    category: Category
    safe_message: str
    recovery: Recovery
    retry_after_ms: int | None


class Execution(TypedDict):
    """What became of the operation, and what evidence the answer rests on."""

    outcome: Outcome
    delivery: Delivery
    complete: bool
    truncated: bool


class Provenance(TypedDict):
    """Where the answer comes from, and how far its text may be trusted."""

    source_label: str
    producer_revision: str
    resource_revision: str | None
    observed_at: str
    trust: Literal["untrusted_data", "trusted_control"]


class ModelResult(TypedDict):
    """The projection for the model: nothing in it names a principal, call, receipt or digest."""

    schema_version: str
    status: Status
    data: JsonObject | None
    error: ErrorBody | None
    execution: Execution
    provenance: Provenance


class ProviderContext(TypedDict):
    """The provider turn that a package answers."""

    provider: str
    api_family: str
    response_id: str
    call_id: str
    adapter_revision: str


class Binding(TypedDict):
    """The three digests, each 64 lowercase hex characters."""

    request_sha256: str
    result_sha256: str
    call_binding_sha256: str


class ProtectedAudit(TypedDict):
    """The projection for the host: who, which call, which contract, which evidence. It never goes to the model."""

    schema_version: str
    visibility: Literal["protected_audit"]
    operation_id: str
    principal_ref: str
    provider_context: ProviderContext
    tool_contract: ToolContract
    binding: Binding
    downstream: Downstream
    redactions: list[str]


class ResultPackage(TypedDict):
    """What every call ends in: both projections, tied by the three digests in `protected_audit.binding`."""

    model_result: ModelResult
    protected_audit: ProtectedAudit


def success_package(
    principal: Principal,
    call: ToolCall,
    spec: ToolSpec,
    result: HandlerResult,
    *,
    delivery: Delivery,
    status_ref: str | None = None,
) -> ResultPackage:
    """Project a handler's result; `ResultContractError` when it breaks the output contract or cannot be (§11).

    `status_ref` is the reference of a write's operation, None for a read.
    """
    asked = _checked_ask(principal, call, spec)
    if asked.spec is None:
        raise ResultContractError("spec: wanted a ToolSpec; a tool that is not registered has no success")
    checked, errors = _checked_output(spec, asked.arguments, result)
    if checked is not None:
        errors += _impossible(asked, None, delivery, status_ref, checked.receipt_id)
    if checked is None or errors:
        raise ResultContractError("; ".join(errors[:10]))
    return _success(asked, spec, checked, delivery, status_ref)[0]


def error_package(
    principal: Principal,
    call: ToolCall,
    spec: ToolSpec | None,
    code: str,
    *,
    now: int,
    status_ref: str | None = None,
) -> ResultPackage:
    """Project an error of the catalog, observed at `now`; `ResultContractError` when it cannot be (§11).

    `spec` is None exactly for a tool that is not registered.
    """
    asked = _checked_ask(principal, call, spec)
    if type(code) is not str or code not in ERROR_CATALOG:
        raise ResultContractError("code: wanted a code of ERROR_CATALOG")
    if not _is_time(now):
        raise ResultContractError(f"now: wanted an int of seconds from 0 to {MAX_PORTABLE_UNIX_SECONDS}")
    errors = _impossible(asked, code, "fresh", status_ref)
    if errors:
        raise ResultContractError("; ".join(errors))
    return _failure(asked, code, _timestamp(now), status_ref)[0]


def _checked_ask(principal: Principal, call: ToolCall, spec: ToolSpec | None) -> _Asked:
    """Of values that no gate has seen yet: `ResultContractError` when one is malformed."""
    try:
        bound = _check_host(principal, call)
        if spec is not None:
            _check_spec(spec)
    except (HostContextError, ToolContractError) as error:
        raise ResultContractError(str(error)) from None
    return _Asked(principal, bound, spec)


def _impossible(
    asked: _Asked, code: str | None, delivery: object, status_ref: object, receipt_id: object = None
) -> list[str]:
    """What cannot be (§13): another tool, a write's answer on a read, a reference that is missing or another's.

    `code` is None for a success.
    """
    errors: list[str] = []
    spec = asked.spec
    if spec is None:
        if code not in ("UNKNOWN_TOOL", "CALL_ID_CONFLICT"):
            errors.append("spec: wanted a ToolSpec, for every answer about a registered tool")
    elif spec.name != asked.bound.name:
        errors.append("spec: wanted the ToolSpec of the call's own tool")
    elif code == "UNKNOWN_TOOL":
        errors.append("error.code: the tool is registered")
    write = spec is not None and spec.effect == "write"
    if type(delivery) is not str or delivery not in _DELIVERIES:
        errors.append(f"execution.delivery: wanted one of {', '.join(_DELIVERIES)}")
    elif delivery != "fresh" and not write:
        errors.append("execution.delivery: wanted fresh, for a read")
    elif delivery == "receipt_reconciled" and receipt_id is None:
        errors.append("downstream.receipt_id: wanted the receipt that reconciled")
    if code in _WRITE_ONLY_CODES and not write:
        errors.append("error.code: only a write can end so")
    if code is None and spec is not None and _input_errors(spec, asked.arguments):
        errors.append("data: wanted no success for arguments that break the input contract")
    needed = write and (code is None or code in ("OUTCOME_UNKNOWN", "OUTPUT_CONTRACT_VIOLATION"))
    if status_ref is None:
        if needed:
            errors.append("downstream.status_ref: wanted the operation's reference")
    elif not needed and not (write and code in _NOT_STARTED_CODES):
        errors.append("downstream.status_ref: wanted null, for a refusal, a conflict or a read")
    elif asked.context.idempotency_key is None or not _same(status_ref, _status_ref(asked)):
        errors.append("downstream.status_ref: wanted the reference of this call's own operation")
    return errors


def _input_errors(spec: ToolSpec, arguments: JsonObject | None) -> list[str]:
    errors: list[str] = []
    _check_fields(spec.arguments, arguments, "arguments", {}, errors)
    return errors


# A package, and the canonical text of its `model_result`: hashed here, emitted by the adapters.
_Built: TypeAlias = tuple[ResultPackage, str]


def _success(asked: _Asked, spec: ToolSpec, checked: _Checked, delivery: Delivery, status_ref: str | None) -> _Built:
    """`checked.data` goes into the package as it is, and its text into that of the result.

    So the data is written once, and a read takes an eighth less than with the result encoded as a whole.
    """
    producer, resource, observed_at = checked.producer_revision, checked.resource_revision, checked.observed_at
    model_result = _success_result(checked.data, delivery, spec.source_label, producer, resource, observed_at)
    text = _SUCCESS_TEMPLATE % {
        "data": checked.canonical,
        "delivery": _json_string(delivery),
        "source_label": _json_string(spec.source_label),
        "producer_revision": _json_string(producer),
        "resource_revision": _json_name(resource),
        "observed_at": _json_string(observed_at),
    }
    downstream: Downstream = {
        "request_id": checked.request_id,
        "receipt_id": checked.receipt_id,
        "status_ref": status_ref,
    }
    return _package(asked, model_result, text, downstream)


def _success_result(
    data: Any, delivery: Any, source_label: str, producer_revision: str, resource_revision: str | None, observed_at: str
) -> ModelResult:
    return {
        "schema_version": MODEL_RESULT_SCHEMA_VERSION,
        "status": "succeeded",
        "data": data,
        "error": None,
        "execution": {"outcome": "committed", "delivery": delivery, "complete": True, "truncated": False},
        "provenance": {
            "source_label": source_label,
            "producer_revision": producer_revision,
            "resource_revision": resource_revision,
            "observed_at": observed_at,
            "trust": "untrusted_data",
        },
    }


_SUCCESS_TEMPLATE: Final = _template(
    _success_result(
        "%(data)s",
        "%(delivery)s",
        "%(source_label)s",
        "%(producer_revision)s",
        "%(resource_revision)s",
        "%(observed_at)s",
    )
)


def _failure(asked: _Asked, code: str, observed_at: str, status_ref: str | None) -> _Built:
    policy = ERROR_CATALOG[code]
    model_result: ModelResult = {
        "schema_version": MODEL_RESULT_SCHEMA_VERSION,
        "status": "unknown" if policy.outcome == "unknown" else "failed",
        "data": None,
        "error": {
            "code": code,
            "category": policy.category,
            "safe_message": policy.safe_message,
            "recovery": policy.recovery,
            "retry_after_ms": policy.retry_after_ms,
        },
        "execution": {"outcome": policy.outcome, "delivery": "fresh", "complete": True, "truncated": False},
        "provenance": {
            "source_label": DISPATCHER_SOURCE_LABEL,
            "producer_revision": DISPATCHER_REVISION,
            "resource_revision": None,
            "observed_at": observed_at,
            "trust": "trusted_control",
        },
    }
    downstream: Downstream = {"request_id": None, "receipt_id": None, "status_ref": status_ref}
    return _package(asked, model_result, _ENCODE(model_result), downstream)


def _package(asked: _Asked, model_result: ModelResult, text: str, downstream: Downstream) -> _Built:
    """The one place that puts a package together and ties it with its digests; `text` is the canonical result."""
    context = asked.context
    result_sha256 = _sha256(text)
    tied = {"result_sha256": _json_string(result_sha256), "downstream": _ENCODE(downstream)}
    package: ResultPackage = {
        "model_result": model_result,
        "protected_audit": {
            "schema_version": AUDIT_SCHEMA_VERSION,
            "visibility": "protected_audit",
            "operation_id": context.operation_id,
            "principal_ref": _principal_ref(asked.principal.tenant_id, asked.principal.subject_id),
            "provider_context": {
                "provider": context.provider,
                "api_family": context.api_family,
                "response_id": context.response_id,
                "call_id": context.call_id,
                "adapter_revision": context.adapter_revision,
            },
            "tool_contract": asked.contract,
            "binding": {
                "request_sha256": asked.request_sha256,
                "result_sha256": result_sha256,
                "call_binding_sha256": _sha256(_BINDING_TEMPLATE % {**asked.texts, **tied}),
            },
            "downstream": downstream,
            "redactions": [],
        },
    }
    return package, text


def validate_result(principal: Principal, call: ToolCall, spec: ToolSpec | None, package: object) -> list[str]:
    """Every way in which `package` is not what this principal, call and contract can give (§13).

    Whatever is in the package, the answer is a list of errors, empty for a good one; nothing is raised. The check
    rebuilds the one package that may stand there, digests and all, from the few parts that a handler or the clock
    decides, and, when these hold, reports every difference: well-formed is not enough, and no field can be forgotten.
    """
    return _validated(principal, call, spec, package)[1]


def _validated(
    principal: Principal, call: ToolCall, spec: ToolSpec | None, package: Any
) -> tuple[_Built | None, list[str]]:
    """The package as rebuilt, which shares nothing with the one given, or None and the errors."""
    try:
        asked = _checked_ask(principal, call, spec)
    except ResultContractError as error:
        return None, [str(error)]
    errors: list[str] = []
    if not _has_package_shape(package, errors):
        return None, _bounded(errors)
    wanted = _rebuilt(asked, package, errors)
    if wanted is not None:
        _differences(wanted[0], package, "$", errors)
    return (None, _bounded(errors)) if errors else (wanted, [])


# fmt: off
_PARTS: Final[Any] = (
    ResultPackage, ModelResult, ErrorBody, Execution, Provenance,
    ProtectedAudit, ProviderContext, ToolContract, Binding, Downstream,
)
# fmt: on
# The field names of each: one list of names serves types and checks.
_FIELDS: Final[Mapping[Any, Set[str]]] = {part: part.__annotations__.keys() for part in _PARTS}


def _has_package_shape(package: Any, errors: list[str]) -> bool:
    """Exact fields, from the outside in: an object that is wrong is not looked into."""
    if not _exact_fields(package, _FIELDS[ResultPackage], "$", errors):
        return False
    result, audit = package["model_result"], package["protected_audit"]
    return (
        _exact_fields(result, _FIELDS[ModelResult], "$.model_result", errors)
        and _exact_fields(result["execution"], _FIELDS[Execution], "$.model_result.execution", errors)
        and _exact_fields(result["provenance"], _FIELDS[Provenance], "$.model_result.provenance", errors)
        and _exact_fields(audit, _FIELDS[ProtectedAudit], "$.protected_audit", errors)
        and _exact_fields(
            audit["provider_context"], _FIELDS[ProviderContext], "$.protected_audit.provider_context", errors
        )
        and _exact_fields(audit["tool_contract"], _FIELDS[ToolContract], "$.protected_audit.tool_contract", errors)
        and _exact_fields(audit["binding"], _FIELDS[Binding], "$.protected_audit.binding", errors)
        and _exact_fields(audit["downstream"], _FIELDS[Downstream], "$.protected_audit.downstream", errors)
    )


def _rebuilt(asked: _Asked, seen: ResultPackage, errors: list[str]) -> _Built | None:
    """The one package that may stand where `seen` stands, from the few parts that a handler or the clock decides."""
    model_result, downstream = seen["model_result"], seen["protected_audit"]["downstream"]
    provenance, delivery = model_result["provenance"], model_result["execution"]["delivery"]
    status_ref, spec = downstream["status_ref"], asked.spec
    body: object = model_result["error"]
    if body is None:
        if spec is None:
            errors.append("$.model_result.error: wanted an error, for a tool that is not registered")
            return None
        checked, output_errors = _checked_values(
            spec,
            asked.arguments,
            model_result["data"],
            spec.producer_revision,  # the one that is seen is compared with the others
            provenance["resource_revision"],
            provenance["observed_at"],
            downstream["request_id"],
            downstream["receipt_id"],
        )
        errors += [f"$.model_result: {error}" for error in output_errors]
        errors += _impossible(asked, None, delivery, status_ref, downstream["receipt_id"])
        return None if checked is None or errors else _success(asked, spec, checked, delivery, status_ref)
    if not _exact_fields(body, _FIELDS[ErrorBody], "$.model_result.error", errors):
        return None
    code: object = cast("ErrorBody", body)["code"]
    if type(code) is not str or code not in ERROR_CATALOG:
        errors.append("$.model_result.error.code: wanted a code of the catalog")
        return None
    if not _is_timestamp(provenance["observed_at"]):
        errors.append("$.model_result.provenance.observed_at: wanted an existing UTC time as YYYY-MM-DDTHH:MM:SSZ")
    errors += _impossible(asked, code, delivery, status_ref)
    return None if errors else _failure(asked, code, provenance["observed_at"], status_ref)


def _differences(wanted: Mapping[str, object], seen: Any, path: str, errors: list[str]) -> None:
    """Type-exact. The objects have their exact fields by now, and the wanted `data` was copied from what is seen."""
    for name, value in wanted.items():
        other = seen[name]
        # In the process that made a package, most of its strings are the very same: the check takes a fortieth less.
        if value is other or (name == "data" and type(value) is type(other)):
            continue
        if type(value) is dict:
            _differences(value, other, f"{path}.{name}", errors)
        elif type(value) is not type(other) or value != other:
            errors.append(f"{path}.{name}: not what this principal, call and contract give")


_CallKey: TypeAlias = tuple[str, str, str, str]  # provider, api_family, response_id, call_id


def validate_result_set(
    principal: Principal,
    calls: Sequence[ToolCall],
    registry: Mapping[str, ToolSpec],
    packages: Sequence[object],
) -> list[str]:
    """Check the answers to several calls, in any order: each call has one package, and it is its own (§13).

    Linear in the number of calls; never raises for anything in `packages`.
    """
    if not all(type(given) is list or type(given) is tuple for given in (calls, packages)):
        return ["calls, packages: wanted a list or tuple of each"]
    errors: list[str] = []
    open_calls: dict[_CallKey, tuple[int, ToolCall]] = {}
    for index, call in enumerate(calls):
        try:
            context = _check_host(principal, call).context
        except HostContextError as error:
            errors.append(f"calls[{index}]: {error}")
            continue
        key = (context.provider, context.api_family, context.response_id, context.call_id)
        if key in open_calls:
            errors.append(f"calls[{index}]: the same provider call as calls[{open_calls[key][0]}]")
        else:
            open_calls[key] = (index, call)
    answered: dict[_CallKey, int] = {}
    for index, package in enumerate(packages):
        where = f"packages[{index}]"
        found = _call_key(package, where, errors)
        if found is None:
            continue
        if found in answered:
            errors.append(f"{where}: a second answer to the call of packages[{answered[found]}]")
        elif found not in open_calls:
            errors.append(f"{where}: answers none of the calls")
        else:
            answered[found] = index
            call = open_calls[found][1]
            errors += [
                f"{where}: {text}" for text in validate_result(principal, call, registry.get(call.name), package)
            ]
    errors += [f"calls[{index}]: no answer" for key, (index, _) in open_calls.items() if key not in answered]
    return _bounded(errors)


def _call_key(package: object, where: str, errors: list[str]) -> _CallKey | None:
    """Which call a package says it answers, or None when it says nothing readable."""
    shape_errors: list[str] = []
    if _has_package_shape(package, shape_errors):
        context = cast("ResultPackage", package)["protected_audit"]["provider_context"]
        key = (context["provider"], context["api_family"], context["response_id"], context["call_id"])
        if all(map(_is_identifier, key)):
            return key
        shape_errors.append("$.protected_audit.provider_context: wanted identifiers")
    errors += [f"{where}: {text}" for text in shape_errors]
    return None


# ==== 9. Ledger (§9) ==================================================================================================

CallIdentity: TypeAlias = tuple[str, str, str, str, str, str]  # tenant, subject, provider, api_family, response, call


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One reservation of a scope: enough to tell whether a call means the same operation, and what became of it.

    `profile` is (provider, api_family, adapter_revision); `revisions` are those of output, effect, handler and
    producer; `reserved_at` is in Unix seconds; `token` tells reservations of one scope apart. `result` is there when
    succeeded, `code` when not started.
    """

    scope: Scope
    request_sha256: str
    profile: tuple[str, str, str]
    revisions: tuple[str, str, str, str]
    status_ref: str
    reserved_at: int
    token: str
    state: OperationState = "pending"
    result: HandlerResult | None = None
    code: str | None = None


class Ledger(Protocol):
    """All idempotency state. Any object with these six operations takes the place of `MemoryLedger`.

    Each must be atomic and, once it has returned, as durable as the host needs: `reserve` is what stops a second
    execution, and it does so only if no other process can see the scope free after it returned None. A ledger that
    cannot take new work raises `LedgerCapacityError` from `bind_call` or `reserve`; it never drops a record.
    """

    def bind_call(self, identity: CallIdentity, fingerprint: str, *, now: int) -> bool:
        """Bind a provider call to what it stands for; False when it is bound to another fingerprint already."""

    def find(self, scope: Scope) -> OperationRecord | None:
        """The latest record of a scope, in whatever state."""

    def find_by_status_ref(self, status_ref: str) -> OperationRecord | None:
        """The latest record with this reference; a released one still answers."""

    def reserve(self, record: OperationRecord) -> OperationRecord | None:
        """Insert a pending record and return None, or return the pending or succeeded one that holds the scope."""

    def complete(self, record: OperationRecord, result: HandlerResult) -> OperationRecord:
        """Set to succeeded if this very reservation is still pending; return what is recorded now."""

    def release(self, record: OperationRecord, code: str) -> OperationRecord:
        """Set to not started if this very reservation is still pending: the scope is free; return what is recorded."""


class MemoryLedger:
    """The ledger of one process: thread-safe, bounded, gone with the process.

    It holds at most `MAX_LEDGER_ENTRIES` operations and, counted apart, as many call identities. Full, it refuses new
    ones with `LedgerCapacityError`; dropping a record to make room would permit a second execution.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for dictionary work only, never while anybody's code runs
        self._calls: dict[CallIdentity, tuple[str, int]] = {}  # -> fingerprint, bound at; never changed once there
        self._by_scope: dict[Scope, OperationRecord] = {}  # the latest reservation of each scope
        self._by_ref: dict[str, OperationRecord] = {}  # all of those, and released ones that another intent replaced

    def bind_call(self, identity: CallIdentity, fingerprint: str, *, now: int) -> bool:
        with self._lock:
            bound = self._calls.get(identity)
            if bound is None:
                if len(self._calls) >= MAX_LEDGER_ENTRIES:
                    raise LedgerCapacityError(f"the ledger holds {MAX_LEDGER_ENTRIES} call identities")
                self._calls[identity] = bound = (fingerprint, now)
            return bound[0] == fingerprint

    def find(self, scope: Scope) -> OperationRecord | None:
        with self._lock:
            return self._by_scope.get(scope)

    def find_by_status_ref(self, status_ref: str) -> OperationRecord | None:
        with self._lock:
            return self._by_ref.get(status_ref)

    def reserve(self, record: OperationRecord) -> OperationRecord | None:
        with self._lock:
            current = self._by_scope.get(record.scope)
            if current is not None and current.state != "not_started":
                return current
            if record.status_ref not in self._by_ref and len(self._by_ref) >= MAX_LEDGER_ENTRIES:
                raise LedgerCapacityError(f"the ledger holds {MAX_LEDGER_ENTRIES} operations")
            self._put(record)
            return None

    def complete(self, record: OperationRecord, result: HandlerResult) -> OperationRecord:
        return self._settle(record, "succeeded", result=result)

    def release(self, record: OperationRecord, code: str) -> OperationRecord:
        return self._settle(record, "not_started", code=code)

    def _settle(
        self,
        record: OperationRecord,
        state: OperationState,
        *,
        result: HandlerResult | None = None,
        code: str | None = None,
    ) -> OperationRecord:
        with self._lock:
            current = self._by_scope.get(record.scope)
            if current is None:
                raise LedgerStateError("this scope was never reserved")
            if current.state != "pending" or current.token != record.token:
                return current
            settled = replace(current, state=state, result=result, code=code)
            self._put(settled)
            return settled

    def _put(self, record: OperationRecord) -> None:
        self._by_scope[record.scope] = record
        self._by_ref[record.status_ref] = record

    def forget(self, before: int) -> int:
        """Drop what was reserved or bound earlier than `before` (Unix seconds), but never a pending operation.

        The host's retention decision: a forgotten key can be executed again, and a forgotten call identity can stand
        for another request. Returns how many operations went.
        """
        with self._lock:
            kept = {
                ref: record
                for ref, record in self._by_ref.items()
                if record.state == "pending" or record.reserved_at >= before
            }
            forgotten = len(self._by_ref) - len(kept)
            self._by_ref = kept
            self._by_scope = {scope: record for scope, record in self._by_scope.items() if record.status_ref in kept}
            self._calls = {identity: bound for identity, bound in self._calls.items() if bound[1] >= before}
            return forgotten


# ==== 10. Dispatcher (§7, §10) ========================================================================================

Trace: TypeAlias = list[tuple[str, str]]


class Dispatcher:
    """The gates. It knows no tool: what it dispatches is what it was built with."""

    def __init__(
        self, tools: Iterable[ToolSpec], *, ledger: Ledger | None = None, approvers: Iterable[str] = frozenset()
    ) -> None:
        """`tools` are the registry, `approvers` the allowlist of human approvers; `ToolContractError` if unusable."""
        registry: dict[str, ToolSpec] = {}
        if not isinstance(tools, Iterable):
            raise ToolContractError("tools: wanted an iterable of ToolSpec")
        for spec in tools:
            _check_spec(spec)
            if spec.name in registry:
                raise ToolContractError(f"{spec.name}: the name is taken twice")
            registry[spec.name] = spec
        if isinstance(approvers, str | bytes) or not isinstance(approvers, Iterable):
            raise ToolContractError("approvers: wanted a set of identifiers, not one string")
        allowed = tuple(approvers)
        if not all(map(_is_identifier, allowed)):
            raise ToolContractError(f"approvers: {_IDENTIFIER_WANTED}, each")
        self.registry: Mapping[str, ToolSpec] = MappingProxyType(registry)
        self._ledger: Ledger = MemoryLedger() if ledger is None else ledger
        self._approvers = frozenset(allowed)
        self._reservations = count(1)

    def dispatch(
        self,
        principal: Principal,
        call: ToolCall,
        *,
        approvals: Sequence[Approval] = (),
        now: int,
        deadline: int | None = None,
        trace: Trace | None = None,
    ) -> ResultPackage:
        """Take one call through the gates of §7, in their order, to its result package.

        `now` and `deadline` are in Unix seconds; `trace`, a list, gets one `(gate, verdict)` pair a gate, with no
        business data; an exception adds none. `HostContextError` for a mistake of the host, `LedgerCapacityError` when
        the ledger is full, and whatever else a ledger raises while it looks up or reserves: all before the handler ran.
        A `KeyboardInterrupt` or `SystemExit` passes through and leaves a write pending.
        """
        run = _Passage(self, principal, call, now, trace)
        try:
            approvals = _dispatch_extras(approvals, deadline)
            run.context()  # 1
            run.call_identity("dispatch")  # 2
            spec = run.registry()  # 3
            run.input(spec)  # 4
            run.authorization(spec)  # 5
            mine = None  # a read reserves nothing
            if spec.effect == "write":
                run.idempotency_key()  # 6
                mine = run.idempotency(spec)  # 7
                run.business_state(spec)  # 8
                run.approval(approvals)  # 9
            run.deadline(deadline)  # 10
            run.capacity()
            reserved = run.reservation(spec, mine)  # 11
            returned = run.handler(spec, reserved)  # 12
            checked = run.output(spec, reserved, returned)  # 13
            return run.record(spec, reserved, checked, "fresh")  # 14
        except _Stop as stop:
            return stop.package

    def query_operation_status(
        self,
        principal: Principal,
        call: ToolCall,
        *,
        status_ref: str,
        expected_request_sha256: str,
        now: int,
        trace: Trace | None = None,
    ) -> ResultPackage:
        """Find out what became of an operation, through the gates of §10. It never runs the handler.

        `status_ref` and `expected_request_sha256` come from the audit record of the call in question; this `call` has
        the same arguments and key and a provider call identity of its own. `HostContextError` as in `dispatch`.
        """
        run = _Passage(self, principal, call, now, trace)
        try:
            _check_references(status_ref, expected_request_sha256)
            run.context()
            run.call_identity("query_status")
            spec = run.registry()
            run.input(spec)
            run.authorization(spec)
            record = run.status_reference(status_ref)
            run.operation(spec, record, expected_request_sha256)
            checked = run.receipt(spec, record)
            return run.record(spec, record, checked, "receipt_reconciled")
        except _Stop as stop:
            return stop.package


def _dispatch_extras(approvals: object, deadline: object) -> tuple[Approval, ...]:
    """What `dispatch` alone takes from its host: part of gate 1. Each approval is looked at by gate 9."""
    if deadline is not None and not _is_time(deadline):
        raise HostContextError(f"deadline: wanted None or an int of seconds from 0 to {MAX_PORTABLE_UNIX_SECONDS}")
    if type(approvals) is tuple:  # as by default; a dispatch takes a fiftieth less
        return approvals
    with suppress(Exception):  # whatever a strange sequence does when it is read
        if issubclass(type(approvals), Sequence) and not issubclass(type(approvals), str | bytes | bytearray):
            return tuple(cast("Sequence[Approval]", approvals))
    raise HostContextError("approvals: wanted a sequence of Approval")


_STATUS_REF_FORM: Final = r"status_[0-9a-f]{32}"
_SHA256_FORM: Final = r"[0-9a-f]{64}"


def _check_references(status_ref: object, expected_request_sha256: object) -> None:
    """What `query_operation_status` alone takes from its host: part of gate 1."""
    if type(status_ref) is not str or not re.fullmatch(_STATUS_REF_FORM, status_ref):
        raise HostContextError("status_ref: wanted 'status_' and 32 lowercase hex characters")
    if type(expected_request_sha256) is not str or not re.fullmatch(_SHA256_FORM, expected_request_sha256):
        raise HostContextError("expected_request_sha256: wanted 64 lowercase hex characters")


def _copy_of(principal: Principal) -> Principal:
    """For each callback its own: frozen is not out of reach."""
    return Principal(principal.tenant_id, principal.subject_id, principal.roles)


class _Stop(Exception):
    """A gate has the answer."""

    def __init__(self, package: ResultPackage) -> None:
        self.package = package


class _Passage:
    """One call on its way through the gates, one method a gate: it returns what later gates need, or raises `_Stop`."""

    def __init__(
        self, dispatcher: Dispatcher, principal: Principal, call: ToolCall, now: int, trace: Trace | None
    ) -> None:
        self._dispatcher = dispatcher
        self._ledger = dispatcher._ledger
        self._principal = principal
        self._call = call
        self._now = now
        self._trace = trace
        self._asked: _Asked  # from gate 1 on
        self._fingerprint: str  # from gate 2 on
        self._full: LedgerCapacityError | None = None  # set when the call identity could not be bound

    # How a gate ends.

    def _passed(self, gate: str) -> None:
        if self._trace is not None:
            self._trace.append((gate, "pass"))

    def _stopped(self, gate: str, code: str, status_ref: str | None = None) -> _Stop:
        if self._trace is not None:
            self._trace.append((gate, code))
        package, _ = _failure(self._asked, code, _timestamp(self._now), status_ref)
        return _Stop(package)

    def _answered(
        self, gate: str, spec: ToolSpec, checked: _Checked, delivery: Delivery, status_ref: str | None
    ) -> ResultPackage:
        if self._trace is not None:
            self._trace.append((gate, f"OK {delivery}"))
        return _success(self._asked, spec, checked, delivery, status_ref)[0]

    # Gates of both entry points.

    def context(self) -> None:
        """The host's own part: its mistakes are raised, and nothing has run yet."""
        if self._trace is not None and type(self._trace) is not list:
            raise HostContextError("trace: wanted a list or None")
        bound = _check_host_at(self._principal, self._call, self._now)
        self._asked = _Asked(_copy_of(self._principal), bound, self._dispatcher.registry.get(bound.name))
        self._passed("context")

    def call_identity(self, purpose: Purpose) -> None:
        """One provider call stands for one request, valid or not, and for one purpose."""
        principal, context = self._asked.principal, self._asked.context
        identity = (
            principal.tenant_id,
            principal.subject_id,
            context.provider,
            context.api_family,
            context.response_id,
            context.call_id,
        )
        self._fingerprint = fingerprint = _fingerprint(self._asked, purpose)
        try:
            same = self._ledger.bind_call(identity, fingerprint, now=self._now)
        except LedgerCapacityError as full:
            # A full ledger must still answer about the operations it has (§9). The identity stays unbound: nothing runs
            # for it, which `capacity` sees to, and once there is room again it can still be bound to anything.
            self._full, same = full, True
        if same is not True:
            raise self._stopped("call_identity", "CALL_ID_CONFLICT")
        self._passed("call_identity")

    def registry(self) -> ToolSpec:
        if self._asked.spec is None:
            raise self._stopped("registry", "UNKNOWN_TOOL")
        self._passed("registry")
        return self._asked.spec

    def input(self, spec: ToolSpec) -> None:
        if _input_errors(spec, self._asked.arguments):
            raise self._stopped("input", "INVALID_ARGUMENTS")
        self._passed("input")

    def authorization(self, spec: ToolSpec) -> None:
        if not self._says_true(spec.authorize):
            raise self._stopped("authorization", "NOT_FOUND")
        self._passed("authorization")

    def _says_true(self, rule: Callable[[Principal, JsonObject], bool]) -> bool:
        try:
            return rule(_copy_of(self._asked.principal), self._arguments()) is True
        except Exception:  # a rule that fails has not said yes
            return False

    def _arguments(self) -> JsonObject:
        """A fresh copy for each callback. From gate 4 on they are an object."""
        return self._asked.bound.arguments() or {}

    # What is known about an operation: shared by gates 7 and 11 and by the query.

    def _operation(self, spec: ToolSpec, token: str = "") -> OperationRecord:
        """The pending record that this call would reserve: what every record on file is compared with."""
        context = self._asked.context
        return OperationRecord(
            scope=_scope(self._asked),
            request_sha256=self._asked.request_sha256,
            profile=(context.provider, context.api_family, context.adapter_revision),
            revisions=(
                spec.output_schema_revision,
                spec.effect_revision,
                spec.handler_revision,
                spec.producer_revision,
            ),
            status_ref=_status_ref(self._asked),
            reserved_at=self._now,
            token=token,
        )

    def _answer_from(self, gate: str, spec: ToolSpec, record: OperationRecord | None, mine: OperationRecord) -> None:
        """Stop with what a pending or succeeded record says; a free key passes."""
        if record is None or record.state == "not_started":
            return
        if not _same_operation(record, mine):
            raise self._stopped(gate, "IDEMPOTENCY_CONFLICT")
        if record.state != "succeeded":
            raise self._stopped(gate, "OUTCOME_UNKNOWN", mine.status_ref)
        raise _Stop(self._replay(gate, spec, record))

    def _replay(self, gate: str, spec: ToolSpec, record: OperationRecord) -> ResultPackage:
        """The recorded result, by today's output contract, as a copy that shares nothing with the record."""
        checked, _ = _checked_output(spec, self._asked.arguments, record.result)
        if checked is None:
            raise self._stopped(gate, "OUTPUT_CONTRACT_VIOLATION", record.status_ref)
        return self._answered(gate, spec, checked, "local_replay", record.status_ref)

    # Gates of `dispatch`.

    def idempotency_key(self) -> None:
        if self._asked.context.idempotency_key is None:
            raise self._stopped("idempotency_key", "IDEMPOTENCY_KEY_REQUIRED")
        self._passed("idempotency_key")

    def idempotency(self, spec: ToolSpec) -> OperationRecord:
        earlier = self._ledger.find(_scope(self._asked))
        # The count tells this dispatcher's reservations apart, `after` tells them from those that went before.
        after = None if earlier is None else earlier.token
        token = _sha256(f"{self._fingerprint} {next(self._dispatcher._reservations)} {after}")[:32]
        mine = self._operation(spec, token)
        self._answer_from("idempotency", spec, earlier, mine)
        self._passed("idempotency")
        return mine

    def business_state(self, spec: ToolSpec) -> None:
        if spec.business_rule is not None and not self._says_true(spec.business_rule):
            raise self._stopped("business_state", "BUSINESS_RULE_VIOLATION")
        self._passed("business_state")

    def approval(self, approvals: Sequence[object]) -> None:
        if not approvals:
            raise self._stopped("approval", "APPROVAL_REQUIRED")
        allowed = self._dispatcher._approvers
        if not any(_approval_holds(approval, self._asked, allowed, self._now) for approval in approvals):
            raise self._stopped("approval", "APPROVAL_INVALID")
        self._passed("approval")

    def deadline(self, deadline: int | None) -> None:
        if deadline is not None and self._now >= deadline:
            raise self._stopped("deadline", "TIMEOUT_BEFORE_EXECUTE")
        self._passed("deadline")

    def capacity(self) -> None:
        """No gate of its own: a full ledger takes no new work, also no read, whose call it could not bind."""
        if self._full is not None:
            raise self._full

    def reservation(self, spec: ToolSpec, mine: OperationRecord | None) -> OperationRecord | None:
        """The scope of a write, reserved as pending before the handler; a read has none."""
        if mine is None:
            return None
        existing = self._ledger.reserve(mine)
        if existing is not None:
            self._answer_from("reservation", spec, existing, mine)
            raise self._stopped("reservation", "OUTCOME_UNKNOWN", mine.status_ref)
        self._passed("reservation")
        return mine

    def handler(self, spec: ToolSpec, reserved: OperationRecord | None) -> object:
        invocation = Invocation(
            principal=_copy_of(self._asked.principal),
            arguments=self._arguments(),
            operation_id=self._asked.context.operation_id,
            idempotency_key=None if reserved is None else self._asked.context.idempotency_key,
            status_ref=None if reserved is None else reserved.status_ref,
            request_sha256=self._asked.request_sha256,
            timeout_ms=spec.timeout_ms,
            now=self._now,
        )
        try:
            returned = spec.handler(invocation)
        except Exception as error:  # whatever a handler raises ends here, interrupts excepted
            code = _not_started_code(error)
            if reserved is None:
                code = code or "TOOL_ERROR"
            elif code is None or not self._released(reserved, code):
                code = "OUTCOME_UNKNOWN"
            _log_raised(spec.name)
            raise self._stopped("handler", code, reserved.status_ref if reserved else None) from None
        self._passed("handler")
        return returned

    def _released(self, reserved: OperationRecord, code: str) -> bool:
        try:
            return self._ledger.release(reserved, code).state == "not_started"
        except Exception:  # then the scope is still pending, and so is the answer
            return False

    def output(self, spec: ToolSpec, reserved: OperationRecord | None, returned: object) -> _Checked:
        checked, _ = _checked_output(spec, self._asked.arguments, returned)
        if checked is None:
            raise self._stopped("output", "OUTPUT_CONTRACT_VIOLATION", reserved.status_ref if reserved else None)
        self._passed("output")
        return checked

    # Gates of `query_operation_status`.

    def status_reference(self, status_ref: str) -> OperationRecord:
        record = self._ledger.find_by_status_ref(status_ref)
        if record is None or record.scope[:2] != _scope(self._asked)[:2]:
            raise self._stopped("status_reference", "NOT_FOUND")
        self._passed("status_reference")
        return record

    def operation(self, spec: ToolSpec, record: OperationRecord, expected_request_sha256: str) -> None:
        """The record means this very operation; one that is settled answers at once."""
        if expected_request_sha256 != self._asked.request_sha256 or not _same_operation(record, self._operation(spec)):
            raise self._stopped("operation", "STATUS_CONFLICT")
        if record.state == "succeeded":
            raise _Stop(self._replay("operation", spec, record))
        if record.state == "not_started" and record.code in _NOT_STARTED_CODES:
            raise self._stopped("operation", record.code, record.status_ref)
        self._passed("operation")

    def receipt(self, spec: ToolSpec, record: OperationRecord) -> _Checked:
        """The downstream's evidence, believed only as far as it fits the record and the output contract."""
        query = ReceiptQuery(
            principal=_copy_of(self._asked.principal),
            arguments=self._arguments(),
            idempotency_key=record.scope[3],
            status_ref=record.status_ref,
            request_sha256=record.request_sha256,
            now=self._now,
        )
        try:
            receipt: object = None if spec.find_receipt is None else spec.find_receipt(query)
        except Exception:  # no evidence either way
            receipt = None
        if receipt is None:
            raise self._stopped("receipt", "OUTCOME_UNKNOWN", record.status_ref)
        checked, _ = _checked_output(spec, self._asked.arguments, _receipt_result(receipt, record))
        if checked is None or checked.receipt_id is None:
            raise self._stopped("receipt", "STATUS_CONFLICT")
        self._passed("receipt")
        return checked

    # The last gate of both.

    def record(
        self, spec: ToolSpec, reserved: OperationRecord | None, checked: _Checked, delivery: Delivery
    ) -> ResultPackage:
        """Complete a write's reservation, then project. Whoever completes first decides what is shown."""
        if reserved is None:
            return self._answered("record", spec, checked, delivery, None)
        kept = HandlerResult(_decode(checked.data_json)[0], *checked[1:6])  # shares nothing with the package
        try:
            recorded = self._ledger.complete(reserved, kept)
            succeeded = recorded.state == "succeeded" and _same_operation(recorded, reserved)
            mine = recorded.result is kept or _same_result(recorded.result, kept)
        except Exception:  # the handler has run: whatever is wrong with the ledger, the outcome is unknown
            succeeded = False
        if not succeeded:
            raise self._stopped("record", "OUTCOME_UNKNOWN", reserved.status_ref)
        if not mine:
            return self._replay("record", spec, recorded)
        return self._answered("record", spec, checked, delivery, reserved.status_ref)


def _same_operation(record: OperationRecord, mine: OperationRecord) -> bool:
    """The one comparison of a record with a call: scope, intent, profile, revisions, reference; no operation id."""
    return (
        record.scope == mine.scope
        and record.request_sha256 == mine.request_sha256
        and record.profile == mine.profile
        and record.revisions == mine.revisions
        and record.status_ref == mine.status_ref
    )


def _same_result(one: HandlerResult | None, other: HandlerResult) -> bool:
    return type(one) is HandlerResult and all(map(_same, _result_values(one), _result_values(other)))


def _receipt_result(receipt: object, record: OperationRecord) -> object:
    """What a receipt says, if it is one for this very operation."""
    try:
        fits = (
            type(receipt) is Receipt
            and _same(receipt.status_ref, record.status_ref)
            and _same(receipt.request_sha256, record.request_sha256)
        )
        return cast("Receipt", receipt).result if fits else None
    except AttributeError:  # made without its `__init__`
        return None


def _not_started_code(error: Exception) -> str | None:
    """The code by which a handler proved that nothing happened, or None."""
    try:
        code = error.code if isinstance(error, NotStarted) else None
    except Exception:  # an exception class can be as hostile as its handler
        return None
    return code if type(code) is str and code in _NOT_STARTED_CODES else None


def _log_raised(tool: str) -> None:
    """What a handler raised is for the host's log and for nothing else; the package never carries it.

    A log that fails itself must not change the answer, which is settled by now.
    """
    logging: Any = sys.modules.get("logging")
    if logging is None:  # then nobody listens; to import it for that takes a twentieth of a run of the command line
        return
    with suppress(Exception):
        logger = logging.getLogger("tool_dispatcher")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())  # without a logging set-up, the host's console stays clean
        logger.warning("the handler of %s raised", tool, exc_info=True)


# ==== 11. Provider adapters (§14) =====================================================================================


def to_openai_responses(principal: Principal, call: ToolCall, spec: ToolSpec | None, package: object) -> dict[str, Any]:
    """A `function_call_output` item; `ResultContractError` unless the whole package holds for this call."""
    text, _ = _for_model(principal, call, spec, package, "openai")
    return {"type": "function_call_output", "call_id": _bound(call).context.call_id, "output": text}


def to_anthropic_messages(
    principal: Principal, call: ToolCall, spec: ToolSpec | None, package: object
) -> dict[str, Any]:
    """A `tool_result` block; `ResultContractError` unless the whole package holds for this call."""
    text, status = _for_model(principal, call, spec, package, "anthropic")
    return {
        "type": "tool_result",
        "tool_use_id": _bound(call).context.call_id,
        "content": [{"type": "text", "text": text}],
        "is_error": status != "succeeded",
    }


def to_gemini_interactions(
    principal: Principal, call: ToolCall, spec: ToolSpec | None, package: object
) -> dict[str, Any]:
    """A follow-up interaction; `ResultContractError` unless the whole package holds for this call."""
    text, _ = _for_model(principal, call, spec, package, "google")
    bound = _bound(call)
    return {
        "previous_interaction_id": bound.context.response_id,
        "input": [
            {
                "type": "function_result",
                "name": bound.name,
                "call_id": bound.context.call_id,
                "result": [{"type": "text", "text": text}],
            }
        ],
    }


_ADAPTERS: Final = MappingProxyType(
    {
        "openai": to_openai_responses,
        "anthropic": to_anthropic_messages,
        "google": to_gemini_interactions,
    }
)


def to_provider_payload(principal: Principal, call: ToolCall, spec: ToolSpec | None, package: object) -> dict[str, Any]:
    """The payload that fits `call.context.provider`; `ResultContractError` as in the adapter it chooses."""
    try:
        provider = _check_host(principal, call).context.provider
    except HostContextError as error:
        raise ResultContractError(str(error)) from None
    return _ADAPTERS[provider](principal, call, spec, package)


def _for_model(
    principal: Principal, call: ToolCall, spec: ToolSpec | None, package: object, provider: str
) -> tuple[str, Status]:
    """The only way to a payload: profile and whole package checked; out come its result, as text, and its status."""
    rebuilt, errors = _validated(principal, call, spec, package)
    if rebuilt is None:
        raise ResultContractError("; ".join(errors[:10]))
    if _bound(call).context.provider != provider:
        raise ResultContractError(f"call: wanted a call of {provider}")
    sound, text = rebuilt
    return text, sound["model_result"]["status"]


# ==== 12. Mock shop (§6) ==============================================================================================


_MOCK_APPROVER: Final = "human-reviewer-1"

_ORDER_REF: Final = FieldRule(str, min_length=1, max_length=64)
_SAME_ORDER_REF: Final = replace(_ORDER_REF, equals_argument="order_ref")
_ORDER_STATUS: Final = FieldRule(str, enum=("paid", "pending", "refunded"))
_REASON: Final = FieldRule(str, enum=("duplicate", "damaged", "other"))
_SAME_REASON: Final = replace(_REASON, equals_argument="reason")
_DRAFT_ID: Final = FieldRule(str, pattern=r"DRAFT-[1-9][0-9]*", max_length=64)


@dataclass(slots=True)
class Order:
    """One order of the mock shop; `status` is `paid`, `pending` or `refunded`."""

    tenant_id: str
    owner_id: str
    status: str
    revision: str


class MockShop:
    """A downstream to dispatch to: orders, refund drafts (never a real refund), receipts, and one fault to inject.

    It is not idempotent itself, on purpose: a second execution would show in `side_effect_count`.
    """

    FAILURES: Final = (
        "none",
        "timeout_before_execute",
        "timeout_after_commit",
        "timeout_after_commit_receipt_unavailable",
        "rate_limit",
        "tool_error",
    )

    def __init__(self) -> None:
        self.orders = {
            "ORDER-7": Order("tenant-a", "user-1", "paid", "order-7-r3"),
            "ORDER-8": Order("tenant-a", "user-2", "paid", "order-8-r2"),
            "ORDER-9": Order("tenant-b", "user-1", "paid", "order-9-r4"),
        }
        self._lock = threading.Lock()  # from the check of an order to the draft that depends on it
        self.side_effect_count = 0  # drafts really created
        self._receipts: dict[str, Receipt] = {}  # by status reference, of drafts whose receipt can be asked for
        self._failure = "none"  # of the next handler run

    def inject(self, failure: str) -> None:
        """Let the next handler run fail in one of the ways of `FAILURES`; `ValueError` for another."""
        if failure not in self.FAILURES:
            raise ValueError(f"failure: wanted one of {', '.join(self.FAILURES)}")
        self._failure = failure

    def tools(self) -> tuple[ToolSpec, ToolSpec]:
        """The two tools of the shop: `get_order`, a read, and `create_refund_draft`, a write."""
        return (
            ToolSpec(
                name="get_order",
                description="Look up one order by its reference.",
                effect="read",
                arguments={"order_ref": _ORDER_REF},
                output={"order_ref": _SAME_ORDER_REF, "status": _ORDER_STATUS},
                input_schema_revision="get-order-input-v1",
                output_schema_revision="get-order-output-v2",
                effect_revision="read-order-v1",
                handler_revision="get-order-handler-v2",
                producer_revision="orders-mock-v2",
                policy_revision="get-order-policy-v1",
                source_label="orders",
                authorize=self._may_see,
                handler=self._get_order,
                timeout_ms=500,
                max_output_bytes=256,
                max_output_depth=1,
            ),
            ToolSpec(
                name="create_refund_draft",
                description="Draft a refund for one paid order; a person decides whether it is made.",
                effect="write",
                arguments={"order_ref": _ORDER_REF, "reason": _REASON},
                output={"draft_id": _DRAFT_ID, "order_ref": _SAME_ORDER_REF, "reason": _SAME_REASON},
                input_schema_revision="refund-draft-input-v1",
                output_schema_revision="refund-draft-output-v2",
                effect_revision="create-refund-draft-v1",
                handler_revision="refund-draft-handler-v2",
                producer_revision="refunds-mock-v2",
                policy_revision="refund-draft-policy-v1",
                source_label="refunds",
                authorize=self._may_see,
                handler=self._create_refund_draft,
                business_rule=self._is_paid,
                find_receipt=lambda query: self._receipts.get(query.status_ref),
                timeout_ms=800,
                max_output_bytes=384,
                max_output_depth=1,
            ),
        )

    def _may_see(self, principal: Principal, arguments: JsonObject) -> bool:
        """Own tenant, and own order or `support_admin`. All else looks alike: it is not found."""
        order = self.orders.get(cast("str", arguments["order_ref"]))
        return (
            order is not None
            and order.tenant_id == principal.tenant_id
            and (order.owner_id == principal.subject_id or "support_admin" in principal.roles)
        )

    def _is_paid(self, _principal: Principal, arguments: JsonObject) -> bool:
        return self.orders[cast("str", arguments["order_ref"])].status == "paid"

    def _get_order(self, invocation: Invocation) -> HandlerResult:
        self._fail_before(self._next_failure())
        order_ref = cast("str", invocation.arguments["order_ref"])
        order = self.orders[order_ref]
        return HandlerResult(
            data={"order_ref": order_ref, "status": order.status},
            producer_revision="orders-mock-v2",
            resource_revision=order.revision,
            observed_at=_timestamp(invocation.now),
        )

    def _create_refund_draft(self, invocation: Invocation) -> HandlerResult:
        with self._lock:
            failure = self._next_failure()
            self._fail_before(failure)
            # The gate saw the order paid; it may have changed since. The rule must hold where the change is made.
            if not self._is_paid(invocation.principal, invocation.arguments):
                raise NotStarted("BUSINESS_RULE_VIOLATION")
            self.side_effect_count += 1
            number = self.side_effect_count
            result = HandlerResult(
                data={"draft_id": f"DRAFT-{number}", **invocation.arguments},
                producer_revision="refunds-mock-v2",
                resource_revision=f"draft-{number}-r1",
                observed_at=_timestamp(invocation.now),
                request_id=f"refund-request-{number}",
                receipt_id=f"refund-receipt-{number}",
            )
            status_ref = cast("str", invocation.status_ref)
            if failure != "timeout_after_commit_receipt_unavailable":
                self._receipts[status_ref] = Receipt(status_ref, invocation.request_sha256, result)
            if failure.startswith("timeout_after_commit"):
                raise TimeoutError("the answer of the refund service did not come in time")
            return result

    def _next_failure(self) -> str:
        failure, self._failure = self._failure, "none"
        return failure

    def _fail_before(self, failure: str) -> None:
        if failure.upper() in _NOT_STARTED_CODES:
            raise NotStarted(failure.upper())


def mock_dispatcher(shop: MockShop) -> Dispatcher:
    """A dispatcher over the shop's two tools, with one approver, `human-reviewer-1` (§6)."""
    return Dispatcher(shop.tools(), approvers={_MOCK_APPROVER})


# ==== 13. Fixture (§15) ===============================================================================================

_Check: TypeAlias = tuple[Callable[[Any], bool], str]  # whether a value is right, and what was wanted
_Table: TypeAlias = Mapping[str, _Check]  # the fields of one object of the format, and what each must be


def _one_of(*values: str) -> _Check:
    known = frozenset(values)
    return (lambda value: type(value) is str and value in known), f"wanted one of {', '.join(values)}"


_AN_IDENTIFIER: Final[_Check] = (_is_identifier, _IDENTIFIER_WANTED)
_AN_IDENTIFIER_OR_NULL: Final[_Check] = (_is_optional_identifier, f"{_IDENTIFIER_WANTED}, or null")
_AN_OBJECT: Final[_Check] = (lambda value: type(value) is dict, "wanted an object")
_A_LIST: Final[_Check] = (lambda value: type(value) is list, "wanted an array")

_FIXTURE_FIELDS: Final[_Table] = {
    "schema_version": _one_of(FIXTURE_SCHEMA_VERSION),
    "contract": _AN_OBJECT,
    "cases": _A_LIST,
}
_CONTRACT_FIELDS: Final[_Table] = {
    "model_result": _one_of(MODEL_RESULT_SCHEMA_VERSION),
    "protected_audit": _one_of(AUDIT_SCHEMA_VERSION),
}
_CASE_FIELDS: Final[_Table] = {"id": _AN_IDENTIFIER, "principal": _AN_OBJECT, "steps": _A_LIST}
_PRINCIPAL_FIELDS: Final[_Table] = {
    "tenant_id": _AN_IDENTIFIER,
    "subject_id": _AN_IDENTIFIER,
    "roles": (lambda value: type(value) is list and _are_roles(value), _ROLES_WANTED),
}
_STEP_FIELDS: Final[_Table] = {
    "step_id": _AN_IDENTIFIER,
    "action": _one_of("dispatch", "query_status"),
    "proposal": _AN_OBJECT,
    "execution_context": _AN_OBJECT,
    "approval": _one_of("none", "valid", "expired", "mismatched"),
    "now": (
        lambda value: type(value) is int and 0 <= value <= MAX_PORTABLE_UNIX_SECONDS - APPROVAL_TTL_SECONDS,
        f"wanted an integer of seconds from 0 to {MAX_PORTABLE_UNIX_SECONDS - APPROVAL_TTL_SECONDS}",
    ),
    "failure": _one_of(*MockShop.FAILURES),
    "status_ref_from": _AN_IDENTIFIER_OR_NULL,
    "expected": _AN_OBJECT,
}
_PROPOSAL_FIELDS: Final[_Table] = {"name": _AN_IDENTIFIER, "arguments": _AN_OBJECT}
_CONTEXT_FIELDS: Final[_Table] = {
    "provider": _AN_IDENTIFIER,
    "api_family": _AN_IDENTIFIER,
    "response_id": _AN_IDENTIFIER,
    "call_id": _AN_IDENTIFIER,
    "operation_id": _AN_IDENTIFIER,
    "idempotency_key": _AN_IDENTIFIER_OR_NULL,
    "adapter_revision": _AN_IDENTIFIER,
}
_EXPECTED_FIELDS: Final[_Table] = {
    "code": (_one_of("OK", *ERROR_CATALOG)[0], "wanted OK or a code of the error catalog"),
    "status": _one_of(*_STATUSES),
    "outcome": _one_of(*_OUTCOMES),
    "recovery": _one_of(*_RECOVERIES),
    "delivery": _one_of(*_DELIVERIES),
    "data": (lambda value: value is None or type(value) is dict, "wanted an object or null"),
    "side_effect_count": (
        lambda value: type(value) is int and 0 <= value <= MAX_SAFE_INTEGER,
        f"wanted an integer from 0 to {MAX_SAFE_INTEGER}",
    ),
}
_AFTER_COMMIT: Final = frozenset(failure for failure in MockShop.FAILURES if failure.startswith("timeout_after_commit"))
_WRITES: Final = frozenset(spec.name for spec in MockShop().tools() if spec.effect == "write")


def _check_object(value: object, table: _Table, path: str, errors: list[str], member: str = "") -> JsonObject:
    """Exact fields, each by the table. What comes back holds only the fields that are right."""
    if type(value) is dict and len(value) == len(table):
        for name, item in value.items():
            if type(name) is not str or name not in table or not table[name][0](item):
                break
        else:
            return value
    # The loop gives up at the first fault, and loading takes two fifths less with it; from here on, each fault is said.
    path += member
    exact = _exact_fields(value, table.keys(), path, errors)
    if type(value) is not dict or not (exact or all(type(key) is str for key in value)):
        return {}
    known: JsonObject = {name: value[name] for name in table if name in value}
    wrong = [name for name, item in known.items() if not table[name][0](item)]
    errors.extend(f"{path}.{name}: {table[name][1]}" for name in wrong)
    return {name: item for name, item in known.items() if name not in wrong}


def validate_fixture(value: object) -> list[str]:
    """All the ways in which `value` is no fixture of §15, with JSON paths; bounded, and never raises."""
    return _bounded(_checked_fixture(value)[1])


def _checked_fixture(value: object) -> tuple[object, list[str]]:
    """A copy, and what is wrong with it."""
    try:
        value = _snapshot(value)[0]
    except PortableJsonError as error:
        return value, _format_errors(value, _Walk()) or [str(error)]
    return value, _format_errors(value)


def _format_errors(value: object, walk: _Walk | None = None) -> list[str]:
    """What breaks the format and, of a value not known to be portable, each part of it that is not.

    There is one walk for all parts, so that what they share is counted for each.
    """
    errors: list[str] = []
    fixture = _check_object(value, _FIXTURE_FIELDS, "$", errors)
    if "contract" in fixture:
        _check_object(fixture["contract"], _CONTRACT_FIELDS, "$", errors, ".contract")
    cases: Any = fixture.get("cases", [])
    if "cases" in fixture and not 1 <= len(cases) <= MAX_CASES:
        errors.append(f"$.cases: wanted 1 to {MAX_CASES} cases")
    ids: set[str] = set()
    for index, case in enumerate(cases[:MAX_CASES]):
        if len(errors) > _MAX_ERRORS:
            break
        _check_case(case, f"$.cases[{index}]", ids, walk, errors)
    return errors


def _check_unique(owner: JsonObject, name: str, seen: set[str], path: str, errors: list[str]) -> None:
    value = owner.get(name)
    if type(value) is str:
        if value in seen:
            errors.append(f"{path}.{name}: wanted an id of its own")
        seen.add(value)


def _check_case(value: object, path: str, ids: set[str], walk: _Walk | None, errors: list[str]) -> None:
    case = _check_object(value, _CASE_FIELDS, path, errors)
    _check_unique(case, "id", ids, path, errors)
    if "principal" in case:
        _check_object(case["principal"], _PRINCIPAL_FIELDS, path, errors, ".principal")
    steps: Any = case.get("steps", [])
    if "steps" in case and not 1 <= len(steps) <= MAX_STEPS_PER_CASE:
        errors.append(f"{path}.steps: wanted 1 to {MAX_STEPS_PER_CASE} steps")
    earlier: set[str] = set()
    for index, step in enumerate(steps[:MAX_STEPS_PER_CASE]):
        _check_step(step, f"{path}.steps[{index}]", earlier, walk, errors)


def _check_step(value: object, path: str, earlier: set[str], walk: _Walk | None, errors: list[str]) -> None:
    step = _check_object(value, _STEP_FIELDS, path, errors)
    proposal: JsonObject = {}
    if "proposal" in step:
        proposal = _check_object(step["proposal"], _PROPOSAL_FIELDS, path, errors, ".proposal")
        if walk is not None:
            _check_portable(proposal.get("arguments"), f"{path}.proposal.arguments", walk, errors)
    if "execution_context" in step:
        context = _check_object(step["execution_context"], _CONTEXT_FIELDS, path, errors, ".execution_context")
        provider: Any = context.get("provider")
        family: Any = context.get("api_family")
        revision = context.get("adapter_revision")
        if None not in (provider, family, revision) and PROVIDER_PROFILES.get((provider, family)) != revision:
            wanted = "wanted a provider, api_family and adapter_revision that go together"
            errors.append(f"{path}.execution_context: {wanted}")
    if "expected" in step:
        expected = _check_object(step["expected"], _EXPECTED_FIELDS, path, errors, ".expected")
        if walk is not None:
            _check_portable(expected.get("data"), f"{path}.expected.data", walk, errors)
        if expected.get("code") == "OK" and expected.get("recovery", "none") != "none":
            errors.append(f"{path}.expected.recovery: wanted none for OK")
    action, source = step.get("action"), step.get("status_ref_from")
    if action == "dispatch" and source is not None:
        errors.append(f"{path}.status_ref_from: wanted null for a dispatch")
    if action == "query_status":
        errors.extend(
            f"{path}.{name}: wanted none for a query" for name in ("approval", "failure") if step.get(name) != "none"
        )
        if source not in earlier:
            errors.append(f"{path}.status_ref_from: wanted the step_id of an earlier step of this case")
    if step.get("failure") in _AFTER_COMMIT and "name" in proposal and proposal["name"] not in _WRITES:
        errors.append(f"{path}.failure: wanted a write, which alone can commit")
    _check_unique(step, "step_id", earlier, path, errors)


_LEVELS_ABOVE_PAYLOAD: Final = 6  # fixture, cases, case, steps, step, and the proposal or what is expected


def _check_portable(value: object, path: str, walk: _Walk, errors: list[str]) -> None:
    try:
        _copied(value, MAX_JSON_DEPTH - _LEVELS_ABOVE_PAYLOAD, walk)
    except PortableJsonError as error:
        errors.append(f"{path}{error.path}: {error.wanted}")


def load_fixture(path: str | os.PathLike[str]) -> JsonObject:
    """Read, decode and check a fixture file (§15); `FixtureIOError` or `FixtureError`, never with a local path."""
    raw = _read_fixture(path)
    try:
        value = parse_json(raw)
    except PortableJsonError as error:
        raise FixtureError(f"the fixture cannot be decoded: {error}") from None
    _refuse(_format_errors(value))
    return cast("JsonObject", value)


def _refuse(errors: list[str]) -> None:
    if errors:
        more = [f"... and {len(errors) - 15} more"] if len(errors) > 15 else []
        raise FixtureError("\n  ".join(["the fixture breaks its format:", *map(_clipped, errors[:15]), *more]))


def _read_fixture(path: str | os.PathLike[str]) -> bytes:
    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # a FIFO without a writer would block

    try:
        # No buffer, which would read ahead of the limit.
        with open(os.fspath(path), "rb", buffering=0, opener=without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FixtureIOError("the fixture is not a regular file")
            raw = b""
            while part := file.read(MAX_FIXTURE_BYTES + 1 - len(raw)):
                raw += part
            return raw
    except FileNotFoundError:
        raise FixtureIOError("the fixture does not exist") from None
    except IsADirectoryError:
        raise FixtureIOError("the fixture is a directory, not a file") from None
    except PermissionError:
        raise FixtureIOError("the fixture cannot be read: no permission, or a directory") from None
    except FixtureIOError:
        raise
    except (OSError, TypeError, ValueError):
        raise FixtureIOError("the fixture cannot be read: wanted the path of a file") from None


class Mismatch(TypedDict):
    """One field in which a step ended otherwise than its fixture expects."""

    field: str
    expected: JsonValue
    actual: JsonValue


class StepReport(TypedDict):
    """How one step ended."""

    step_id: str
    actual_code: str
    status: Status
    outcome: Outcome
    recovery: Recovery
    delivery: Delivery
    side_effect_count: int
    validation_errors: list[str]
    mismatches: list[Mismatch]
    passed: bool


class CaseReport(TypedDict):
    """How the steps of one case ended."""

    case_id: str
    passed: bool
    steps: list[StepReport]


class FixtureReport(TypedDict):
    """How the cases that ran ended: `passed` when each step ended as expected."""

    schema_version: str
    case_count: int
    step_count: int
    passed: bool
    cases: list[CaseReport]


def run_fixture(fixture: object, *, case_ids: Iterable[str] | None = None) -> FixtureReport:
    """Run each case against a shop and dispatcher of its own and compare (§15); `FixtureError` on an invalid fixture.

    `case_ids` runs, and counts, only those cases; an unknown one is a `FixtureError` that lists the ids.
    """
    fixture, errors = _checked_fixture(fixture)
    _refuse(errors)
    return _run_cases(cast("JsonObject", fixture), case_ids, lambda report, _trace, _package, _payload: report)


# What becomes of one step's report: (report, trace, package, provider payload) -> the report as shown.
_Shown: TypeAlias = Callable[[StepReport, Trace, ResultPackage, "dict[str, Any] | None"], StepReport]


def _run_cases(fixture: JsonObject, case_ids: Iterable[str] | None, shown: _Shown) -> FixtureReport:
    cases = cast("list[dict[str, Any]]", fixture["cases"])
    known = [case["id"] for case in cases]
    wanted = known if case_ids is None else list(case_ids)
    if not wanted or not all(name in known for name in wanted):
        listed = ", ".join(name if name.isascii() else _quoted(name) for name in known[:40])
        more = f", and {len(known) - 40} more" if len(known) > 40 else ""
        raise FixtureError(f"no such case; the cases are: {listed}{more}")
    reports = [_run_case(case, f"$.cases[{i}]", shown) for i, case in enumerate(cases) if case["id"] in wanted]
    return {
        "schema_version": FIXTURE_SCHEMA_VERSION,
        "case_count": len(reports),
        "step_count": sum(len(report["steps"]) for report in reports),
        "passed": all(report["passed"] for report in reports),
        "cases": reports,
    }


def _run_case(case: dict[str, Any], path: str, shown: _Shown) -> CaseReport:
    shop = MockShop()
    dispatcher = mock_dispatcher(shop)
    who = case["principal"]
    principal = Principal(who["tenant_id"], who["subject_id"], tuple(who["roles"]))
    packages: dict[str, ResultPackage] = {}
    reports: list[StepReport] = []
    for index, step in enumerate(case["steps"]):
        call = bind_tool_call(ModelProposal(**step["proposal"]), ExecutionContext(**step["execution_context"]))
        spec = dispatcher.registry.get(call.name)
        trace: Trace = []
        shop.inject(step["failure"])
        if step["action"] == "dispatch":
            approvals = _step_approvals(principal, call, spec, step["approval"], step["now"])
            package = dispatcher.dispatch(principal, call, approvals=approvals, now=step["now"], trace=trace)
        else:
            audit = packages[step["status_ref_from"]]["protected_audit"]
            status_ref = audit["downstream"]["status_ref"]
            if status_ref is None:
                raise FixtureError(f"{path}.steps[{index}].status_ref_from: that step has no status reference")
            package = dispatcher.query_operation_status(
                principal,
                call,
                status_ref=status_ref,
                expected_request_sha256=audit["binding"]["request_sha256"],
                now=step["now"],
                trace=trace,
            )
        packages[step["step_id"]] = package
        errors = validate_result(principal, call, spec, package)
        payload = None
        try:
            payload = to_provider_payload(principal, call, spec, package)
        except ResultContractError as error:
            errors.append(str(error))
        report = _step_report(step, package, shop.side_effect_count, errors)
        reports.append(shown(report, trace, package, payload))
    return {"case_id": case["id"], "passed": all(report["passed"] for report in reports), "steps": reports}


def _step_approvals(
    principal: Principal, call: ToolCall, spec: ToolSpec | None, kind: str, now: int
) -> tuple[Approval, ...]:
    if kind == "none" or spec is None:
        return ()
    if kind == "expired":
        return (_new_approval(_Asked(principal, _bound(call), spec), _MOCK_APPROVER, now - 1),)
    valid = grant_approval(principal, call, spec, approver_id=_MOCK_APPROVER, now=now)
    return (valid if kind == "valid" else replace(valid, approval_digest="0" * 64),)


def _step_report(step: dict[str, Any], package: ResultPackage, side_effects: int, errors: list[str]) -> StepReport:
    result = package["model_result"]
    error, execution = result["error"], result["execution"]
    actual: JsonObject = {
        "code": "OK" if error is None else error["code"],
        "status": result["status"],
        "outcome": execution["outcome"],
        "recovery": "none" if error is None else error["recovery"],
        "delivery": execution["delivery"],
        "data": result["data"],
        "side_effect_count": side_effects,
    }
    mismatches: list[Mismatch] = [
        {"field": name, "expected": step["expected"][name], "actual": actual[name]}
        for name in _EXPECTED_FIELDS
        if not _same(step["expected"][name], actual[name])
    ]
    return {
        "step_id": step["step_id"],
        "actual_code": cast("str", actual["code"]),
        "status": result["status"],
        "outcome": execution["outcome"],
        "recovery": cast("Recovery", actual["recovery"]),
        "delivery": execution["delivery"],
        "side_effect_count": side_effects,
        "validation_errors": errors,
        "mismatches": mismatches,
        "passed": not errors and not mismatches,
    }


# ==== 14. Command line (§17) ==========================================================================================

_USAGE: Final = """\
error: unknown or incomplete argument; usage:
  [--fixture PATH] [--case ID]... [--format json|table] [--explain] [--packages] [--version]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a fixture and report. 0: all as expected; 1: some step differs; 2: unusable fixture or arguments."""
    try:
        options = _arguments(argv)
        if options.version:
            names = (FIXTURE_SCHEMA_VERSION, MODEL_RESULT_SCHEMA_VERSION, AUDIT_SCHEMA_VERSION, DISPATCHER_REVISION)
            return _print("\n".join((f"tool_dispatcher {__version__}", *names)), 0)
        beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tool-cases.json")
        path = beside if options.fixture is None else options.fixture

        def shown(report: StepReport, trace: Trace, package: ResultPackage, payload: object) -> StepReport:
            extra: dict[str, object] = {}
            if options.explain:
                extra["gates"] = [list(pair) for pair in trace]
            if options.packages:
                extra |= {"package": package, "provider_payload": payload}
            return cast("StepReport", {**report, **extra})

        report = _run_cases(load_fixture(path), options.case, shown)
    except _UnusableArguments:
        return _fail(_USAGE)
    except FixtureError as error:
        return _fail(f"error: {error}")
    text = _table(report) if options.format == "table" else json.dumps(report, indent=2)
    return _print(text, 0 if report["passed"] else 1)


class _UnusableArguments(Exception):
    pass


def _arguments(argv: Sequence[str] | None) -> Any:
    import argparse  # noqa: PLC0415 - a host that imports this module does not need it

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            # argparse's own message repeats the argument, which may hold anything.
            raise _UnusableArguments

    parser = Parser(
        prog="tool_dispatcher.py",
        allow_abbrev=False,
        description="Run a fixture of model tool calls through the dispatcher and compare with what it expects.",
    )
    parser.add_argument("--fixture", metavar="PATH", help="a tool-cases-v2 file (default: tool-cases.json beside this)")
    parser.add_argument("--case", metavar="ID", action="append", help="run only this case (may be repeated)")
    parser.add_argument(
        "--format", choices=("json", "table"), default="json", help="json (default), or a table to read"
    )
    parser.add_argument("--explain", action="store_true", help="add the gates each step went through")
    parser.add_argument("--packages", action="store_true", help="add both projections and the provider payload")
    parser.add_argument("--version", action="store_true", help="print the version and the contract names")
    return parser.parse_args(argv)


def _table(report: FixtureReport) -> str:
    """For people: one line a step, verdict first; what was asked for, indented below; a summary line last."""
    lines: list[str] = []
    passed = 0
    for case in report["cases"]:
        for step in case["steps"]:
            passed += step["passed"]
            verdict = "PASS" if step["passed"] else "FAIL"
            name = _ascii(f"{case['case_id']}/{step['step_id']}")
            what = f"{step['actual_code']}, {step['outcome']}, {step['delivery']}, effects {step['side_effect_count']}"
            lines.append(f"{verdict}  {name:<44}  {what}")
            for mismatch in step["mismatches"]:
                expected, actual = json.dumps(mismatch["expected"]), json.dumps(mismatch["actual"])
                lines.append(f"      {mismatch['field']}: expected {expected}, got {actual}")
            lines += [f"      invalid: {_ascii(error)}" for error in step["validation_errors"]]
            extra = cast("dict[str, Any]", step)
            lines += [f"      {gate:<16} {verdict}" for gate, verdict in extra.get("gates", ())]
            for part in ("package", "provider_payload"):
                if part in extra:
                    lines += [
                        f"      {part}:",
                        *(f"      {line}" for line in json.dumps(extra[part], indent=2).split("\n")),
                    ]
    lines.append(f"{passed} of {report['step_count']} steps as expected, in {report['case_count']} cases")
    return "\n".join(lines)


def _ascii(text: str) -> str:
    """For any console: whatever it cannot show is escaped."""
    return text.encode("ascii", "backslashreplace").decode()


def _print(text: str, verdict: int) -> int:
    """Write the report; a reader that has gone away (`| head`) is no error, a full disk or no stdout at all is."""
    if sys.stdout is None:
        return _fail("error: there is no standard output to report to")
    try:
        print(text, flush=True)
    except OSError as error:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or the flush at exit would fail once more
        # Windows reports a closed pipe as EINVAL.
        return verdict if error.errno in (errno.EPIPE, errno.EINVAL) else _fail("error: the report cannot be written")
    return verdict


def _fail(message: str) -> int:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(_ascii(message), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
