"""Run what README.md shows, and fail where the text and the program differ.

    python -B .github/scripts/check_readme.py [README]

A fenced block that can be run carries a marker, an HTML comment on the line before its fence:

    marker                        languages           what happens
    <!-- check: run -->           sh, bash            the block runs as one script, under `-eu`
    <!-- check: python -->        python, py          the block runs exactly as printed, under `-B -W error`
    <!-- check: powershell -->    powershell, pwsh    runs in PowerShell; where there is none, its `python` commands run
    <!-- check: sql -->           sql                 runs statement by statement in SQLite in memory, `:names` bound
    <!-- check: none, REASON -->  any                 nothing; the reason says why

`exit N` after a comma expects that exit status of a `run` or `python` block: `<!-- check: run, exit 1 -->`.

A `text` or `json` block without a marker that comes next after a marked block is its output: everything a terminal
would show (SQL: the rows, tab-separated), without trailing blanks. `...` alone on a line stands for any number of
lines, also none; `...` within a line stands for any text. A block with no output after it only has to succeed.

All blocks of one README share one temporary copy of the repository, in reading order (SQL blocks one database), so
nothing is written to the tree and a later block sees what an earlier one made. `python` is the interpreter that runs
this script. A block in one of the languages above without a marker is an error, and so is a marker of no known kind,
one that stands before no block, and one before a block of another language.

Every name of the form `test_...` in backticks must be a test method of test_tool_dispatcher.py.
"""

import ast
import difflib
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE = "test_tool_dispatcher"
LANGUAGES = {
    "run": {"sh", "bash"},
    "python": {"python", "py"},
    "powershell": {"powershell", "pwsh"},
    "sql": {"sql"},
}
RUNNABLE = {"shell", "console", "zsh", "ps1"}.union(*LANGUAGES.values())
OUTPUT = {"text", "json"}
ELISION = "..."
BLOCK_SECONDS = 300  # the longest block is four runs of a suite that takes seconds
DIFF_LINES = 24

MARKER = re.compile(r"\s*<!--\s*check:\s*(?P<kind>\w*)\s*(?:,\s*(?P<note>.*?))?\s*-->\s*")
FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)[^`]*")
TEST_NAME = re.compile(r"`(?:\w+\.)*(test_\w+)`")
ASSIGNMENT = re.compile(r"\$(?P<env>env:)?(?P<name>\w+)\s*=\s*(?P<value>.+)")
VARIABLE = re.compile(r"\$(?P<env>env:)?(?P<name>\w+)")
HERE = {"$PWD", "$PWD.Path", "(Get-Location)", "(Get-Location).Path", "Get-Location", "'.'"}


class ReadmeError(ValueError):
    """One place where README.md and the project differ."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"README.md:{line}: {problem}")


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its fence, `kind` and `note` are its marker's."""

    line: int
    language: str
    text: str
    kind: str | None = None
    note: str = ""


def read_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text in order, each with its marker."""
    marker: re.Match[str] | None = None
    marker_line = 0
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        if fence := FENCE.fullmatch(line):
            body = []
            for _, inner in lines:
                closing = inner.strip()
                if closing.startswith(fence["fence"]) and set(closing) == {fence["fence"][0]}:
                    break
                body.append(inner.removeprefix(fence["indent"]))
            else:
                raise ReadmeError(number, "this fence is never closed")
            kind, note = (marker["kind"], marker["note"] or "") if marker else (None, "")
            yield Block(number, fence["language"].lower(), "".join(f"{inner}\n" for inner in body), kind, note)
            marker = None
        elif line.strip():
            if marker:
                raise ReadmeError(marker_line, "this marker does not stand right before a fenced block")
            marker, marker_line = MARKER.fullmatch(line), number
            if not marker and re.search(r"<!--\s*check\b", line):
                raise ReadmeError(number, "a marker stands alone on its line, as `<!-- check: KIND -->`")
    if marker:
        raise ReadmeError(marker_line, "this marker does not stand right before a fenced block")


def pair_with_output(blocks: list[Block]) -> Iterator[tuple[Block, Block | None]]:
    """Yield each block that is to be run, with the one that shows its output; refuse markers that do not fit."""
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.kind is None:
            if block.language in RUNNABLE:
                raise ReadmeError(block.line, f"a {block.language} block needs a marker, such as `<!-- check: run -->`")
        elif block.kind == "none":
            if not block.note:
                raise ReadmeError(block.line, "`check: none` needs a reason after a comma")
        elif block.kind not in LANGUAGES:
            raise ReadmeError(block.line, f"no such marker: {block.kind!r}; known: none, {', '.join(LANGUAGES)}")
        elif block.language not in LANGUAGES[block.kind]:
            raise ReadmeError(block.line, f"`check: {block.kind}` stands before a block of language {block.language!r}")
        else:
            shown = following and following.kind is None and following.language in OUTPUT
            yield block, following if shown else None


def differences(excerpt: str, output: str) -> str | None:
    """Return a short diff of the excerpt against the output, or None where the excerpt is true."""
    real = [line.rstrip() for line in output.rstrip().splitlines()]
    shown = [line.rstrip() for line in excerpt.rstrip().splitlines()]
    segments: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == ELISION:
            segments.append([])
        else:
            segments[-1].append(line)
    patterns = [[re.escape(line).replace(re.escape(ELISION), ".*") for line in segment] for segment in segments]

    def fits(segment: list[str], at: int) -> bool:
        window = real[at : at + len(segment)]
        return len(window) == len(segment) and all(map(re.fullmatch, segment, window))

    position = 0
    for index, segment in enumerate(patterns):
        highest = len(real) - len(segment)
        low = max(position, highest) if index == len(patterns) - 1 else position
        starts = range(low, (min(0, highest) if index == 0 else highest) + 1)
        found = next((start for start in starts if fits(segment, start)), None)
        if found is None:
            diff = list(difflib.unified_diff(segments[index], real[position:], "README", "output", n=1, lineterm=""))
            return "\n".join([*diff[:DIFF_LINES], *(["(the diff goes on)"] if len(diff) > DIFF_LINES else [])])
        position = found + len(segment)
    return None


class Runner:
    """Runs blocks in one temporary copy of the repository; what a block shows comes back as text."""

    def __init__(self, scratch: Path) -> None:
        self.copy = scratch / "repository"
        shutil.copytree(ROOT, self.copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        self.scratch = scratch
        programs = scratch / "bin"
        programs.mkdir()
        if os.name != "nt":
            for name in ("python", "python3"):
                program = programs / name
                program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
                program.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONIOENCODING": "utf-8",
        }
        self.database = sqlite3.connect(":memory:", isolation_level=None)

    def start(self, command: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
        """Run one command in the copy; return its exit status and all that it printed."""
        done = subprocess.run(
            command,
            cwd=self.copy,
            env=self.environment | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=BLOCK_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout

    def run(self, block: Block) -> tuple[int, str]:
        return self.start([block.language, "-eu", "-c", block.text])

    def python(self, block: Block) -> tuple[int, str]:
        program = self.scratch / f"readme_line_{block.line}.py"
        program.write_text(block.text, encoding="utf-8")
        return self.start([sys.executable, "-B", "-W", "error", str(program)], {"PYTHONPATH": str(self.copy)})

    def powershell(self, block: Block) -> tuple[int, str]:
        if not (shell := shutil.which("pwsh")):
            return self.without_powershell(block)
        program = self.scratch / f"readme_line_{block.line}.ps1"
        strict = "$ErrorActionPreference = 'Stop'\n$PSNativeCommandUseErrorActionPreference = $true\n"
        program.write_text(strict + block.text, encoding="utf-8")
        return self.start([shell, "-NoProfile", "-NonInteractive", "-File", str(program)])

    def without_powershell(self, block: Block) -> tuple[int, str]:
        """Run the block's python commands in order, up to the first that fails; other commands are left out."""
        values: dict[tuple[bool, str], str] = {}
        shown = ""

        def substitute(text: str) -> str:
            def value(found: re.Match[str]) -> str:
                key = bool(found["env"]), found["name"].lower()
                if key not in values:
                    raise ReadmeError(block.line, f"{found[0]} has no value that can be read without PowerShell")
                return values[key]

            return VARIABLE.sub(value, text)

        for line in block.text.replace("`\n", " ").splitlines():
            statement = re.sub(r"(^|\s)#.*", "", line).strip()
            if found := ASSIGNMENT.fullmatch(statement):
                value = found["value"].strip()
                if value in HERE:
                    values[bool(found["env"]), found["name"].lower()] = str(self.copy)
                elif re.fullmatch(r"'[^']*'|\"[^\"]*\"", value):
                    literal = value[1:-1] if value[0] == "'" else substitute(value[1:-1])
                    values[bool(found["env"]), found["name"].lower()] = literal
            elif found := re.fullmatch(r"(?:&\s*)?python\s+(?P<arguments>.+)", statement):
                arguments = shlex.split(substitute(re.split(r"\s\|\s", found["arguments"])[0]).replace("\\", "/"))
                environment = {name.upper(): value for (env, name), value in values.items() if env}
                status, output = self.start([sys.executable, *arguments], environment)
                shown += output
                if status:
                    return status, shown
        return 0, shown

    def sql(self, block: Block) -> tuple[int, str]:
        class NamesAsValues(dict[str, str]):
            def __missing__(self, name: str) -> str:
                return name

        rows: list[tuple[object, ...]] = []
        statement = ""
        for line in block.text.splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                try:
                    rows += self.database.execute(statement, NamesAsValues())
                except sqlite3.Error as error:
                    return 1, f"{error}, in\n{statement}"
                statement = ""
        if re.sub(r"--.*", "", statement).strip():
            return 1, f"this statement does not end:\n{statement}"
        return 0, "\n".join("\t".join(map(str, row)) for row in rows)


def check_block(runner: Runner, block: Block, excerpt: Block | None) -> None:
    """Run one block and compare what it shows with what the README shows."""
    wanted = re.fullmatch(r"(?:exit (?P<status>\d+))?", block.note)
    if not wanted or (block.note and block.kind not in {"run", "python"}):
        raise ReadmeError(block.line, f"not understood in this marker: {block.note!r}")
    run: Callable[[Block], tuple[int, str]] = getattr(runner, block.kind or "")
    try:
        status, output = run(block)
    except subprocess.TimeoutExpired:
        raise ReadmeError(block.line, f"this block ran for more than {BLOCK_SECONDS} seconds") from None
    expected = int(wanted["status"] or 0)
    if status != expected:
        tail = "\n".join(output.splitlines()[-DIFF_LINES:])
        raise ReadmeError(block.line, f"this block ended with {status}, not {expected}; its last lines:\n{tail}")
    if excerpt and (diff := differences(excerpt.text, output)):
        raise ReadmeError(excerpt.line, f"this is not what the block at line {block.line} shows:\n{diff}")


def check_test_names(text: str) -> Iterator[ReadmeError]:
    """Yield an error for each test that the README names and the suite does not have."""
    tree = ast.parse((ROOT / f"{SUITE}.py").read_text(encoding="utf-8"))
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for number, line in enumerate(text.splitlines(), start=1):
        for name in TEST_NAME.findall(line):
            if name not in methods | {SUITE}:
                yield ReadmeError(number, f"the suite has no test named {name}")


def main() -> int:
    """Check README.md, or the file named on the command line; report every difference, not just the first."""
    readme = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    problems: list[ReadmeError] = list(check_test_names(text))
    try:
        pairs = list(pair_with_output(list(read_blocks(text))))
    except ReadmeError as error:
        problems.append(error)
        pairs = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        runner = Runner(Path(scratch))
        for block, excerpt in pairs:
            if os.name == "nt" and block.kind == "run":
                print(f"README.md:{block.line}: left out, a POSIX shell block", flush=True)
                continue
            try:
                check_block(runner, block, excerpt)
            except ReadmeError as error:
                problems.append(error)
        runner.database.close()
    for problem in problems:
        print(problem)
    print(f"README.md: {len(pairs)} blocks, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
