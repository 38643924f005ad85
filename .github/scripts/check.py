"""The project's own check: what `.ci/run` and the workflow run.

    python -B .github/scripts/check.py [STEP]...

Steps, all of them where none is named:

    fixture   the shipped fixture, in the four interpreter modes
    tests     the README's four test commands, up to the first that fails; with each Python >= 3.11 found here
    readme    everything else that the README shows
    lint      format, lint, types, shell, workflows
    package   both distributions built, the wheel installed and run in an empty environment

`lint` and `package` install the pinned maintainers' tools in a temporary environment. Nothing is written to the tree,
and that is checked. The last line counts the tests of one mode, as they really ran.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from check_readme import read_blocks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MODES = ("-B", "-O -B", "-B -W error", "-O -B -W error")
TEST_COMMANDS = [f"python {flags} -m unittest discover -s . -p test_tool_dispatcher.py" for flags in MODES]
TEST_COUNT = 120
FIXTURE_REPORT = {"passed": True, "case_count": 18, "step_count": 23}
WHEEL_FILES = {"contract_guard.py", "tool-cases.json", "tool_dispatcher.py"}
OTHER_PYTHONS = ("3.12", "3.13", "3.14")
COMMAND_SECONDS = 900


class CheckError(Exception):
    """Something does not hold; the text says what."""


def run(
    command: list[str], *, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without standard input and keep what it prints."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=COMMAND_SECONDS,
        check=False,
    )


def must(command: list[str], *, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command that has to succeed; return its standard output."""
    done = run(command, cwd=cwd, environment=environment)
    if done.returncode:
        raise CheckError(f"{shlex.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def tree_state() -> str | None:
    """Return what git sees besides the commit, ignored files too; None outside a clone."""
    if not (ROOT / ".git").exists():
        return None
    return must(["git", "status", "--porcelain", "--ignored", "--untracked-files=all"])


@dataclass
class Count:
    """What a run of the suite says of itself; a failing test counts once, however many of its subtests fail."""

    passed: int = 0
    failed: int = 0

    @classmethod
    def of(cls, done: subprocess.CompletedProcess[str]) -> "Count":
        ran = re.search(r"^Ran (\d+) tests?\b", done.stderr, re.MULTILINE)
        if not ran:
            return cls(0, 1)
        red = set(re.findall(r"^(?:ERROR|FAIL|UNEXPECTED SUCCESS): .*?\((\S+?)\)", done.stderr, re.MULTILINE))
        failed = max(len(red), 1) if done.returncode else 0
        verdict = re.search(r"^(?:OK|FAILED)\b.*", done.stderr, re.MULTILINE)
        idle = sum(map(int, re.findall(r"(?:skipped|expected failures)=(\d+)", verdict[0] if verdict else "")))
        return cls(max(int(ran[1]) - failed - idle, 0), failed)


def check_readme_commands() -> None:
    """Refuse a README whose POSIX blocks show other test commands than those that `tests` runs."""
    shown = {
        shlex.join(shlex.split(line, comments=True))
        for block in read_blocks(README.read_text(encoding="utf-8"))
        if block.language in {"sh", "bash"}
        for line in block.text.splitlines()
        if "unittest discover" in line
    }
    if shown != set(TEST_COMMANDS):
        surplus, missing = sorted(shown - set(TEST_COMMANDS)), sorted(set(TEST_COMMANDS) - shown)
        raise CheckError(f"the README's shell blocks show other test commands: {surplus}, and lack {missing}")


@dataclass
class Check:
    """The steps, and what they share: a scratch folder, the tools installed in it, and the count of the tests."""

    scratch: Path
    count: Count | None = field(default=None, init=False)

    def fixture(self) -> None:
        for flags in MODES:
            command = f"python {flags} tool_dispatcher.py --fixture tool-cases.json"
            report = json.loads(must([sys.executable, *command.split()[1:]]))
            seen = {name: report.get(name) for name in FIXTURE_REPORT}
            if seen != FIXTURE_REPORT:
                raise CheckError(f"{command} reports {seen}, not {FIXTURE_REPORT}")

    def tests(self) -> None:
        self.suite(sys.executable)
        for version in OTHER_PYTHONS:
            # A version manager's stand-in on the path needs the variable; everything else ignores it.
            environment = {"PYENV_VERSION": version}
            python = shutil.which(f"python{version}")
            if python and not run([python, "--version"], environment=environment).returncode:
                self.suite(python, environment)
        if README.exists():
            check_readme_commands()

    def suite(self, python: str, environment: dict[str, str] | None = None) -> None:
        """Run the suite in each mode, up to the first that fails; all have to run the same number of tests."""
        for command in TEST_COMMANDS:
            done = run([python, *command.split()[1:]], environment=environment)
            earlier, self.count = self.count, Count.of(done)
            shown = f"{Path(python).name}{command.removeprefix('python')}: {self.count.passed} passed"
            if done.returncode:
                raise CheckError(f"{shown}, {self.count.failed} failed; no later mode ran\n{done.stdout}{done.stderr}")
            if earlier and self.count != earlier:
                raise CheckError(f"{shown}, but {earlier.passed} in an earlier mode\n{done.stderr}")
            if README.exists() and self.count.passed != TEST_COUNT:
                raise CheckError(f"{shown}; there have to be {TEST_COUNT}, none of them skipped\n{done.stderr}")
            print(f"  {shown}", flush=True)

    def readme(self) -> None:
        if README.exists():
            shown = must([sys.executable, "-B", "-X", "utf8", ".github/scripts/check_readme.py"])
            print(f"  {shown.strip()}", flush=True)

    @cached_property
    def tools(self) -> dict[str, str]:
        """Install the pinned tools; return the environment in which they are found first."""
        programs = self.new_environment("tools", "--requirement", str(ROOT / ".github/requirements-ci.txt"))
        return {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])}

    def new_environment(self, name: str, *requirements: str) -> Path:
        """Make an empty virtual environment, install into it, and return its folder of programs."""
        must([sys.executable, "-m", "venv", str(self.scratch / name)])
        programs = self.scratch / name / ("Scripts" if os.name == "nt" else "bin")
        must([str(programs / "python"), "-m", "pip", "install", "--quiet", *requirements])
        return programs

    def lint(self) -> None:
        workflows = [str(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
        failures = []
        for command in (
            ["ruff", "format", "--no-cache", "--check", "--diff"],
            ["ruff", "check", "--no-cache"],
            ["mypy", "--cache-dir", os.devnull],
            ["shellcheck", ".ci/run"],
            ["actionlint", *workflows],
            ["zizmor", "--offline", "--no-progress", "--quiet", "--persona=pedantic", "--strict-collection", ".github"],
        ):
            program = shutil.which(command[0], path=self.tools["PATH"]) or command[0]
            try:
                must([program, *command[1:]], environment=self.tools)
            except CheckError as error:
                failures.append(str(error).replace(program, command[0], 1))
            else:
                print(f"  {command[0]} {command[1]}" if command[0] == "ruff" else f"  {command[0]}", flush=True)
        if failures:
            raise CheckError("\n".join(failures))

    def package(self) -> None:
        dist, unpacked, elsewhere = (self.scratch / name for name in ("dist", "unpacked", "elsewhere"))
        elsewhere.mkdir()
        python = shutil.which("python", path=self.tools["PATH"]) or "python"
        # The source distribution is built from the tree, and the wheel from the source distribution.
        must([python, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)], environment=self.tools)
        (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")

        with zipfile.ZipFile(wheel) as archive:
            files = {name for name in archive.namelist() if ".dist-info/" not in name}
        if files != WHEEL_FILES:
            raise CheckError(f"the wheel holds {sorted(files)}, not {sorted(WHEEL_FILES)}")

        with tarfile.open(source) as archive:
            archive.extractall(unpacked, filter="data")
        (project,) = unpacked.iterdir()
        if (ROOT / ".git").exists():
            tracked = must(["git", "ls-files", "-z"]).rstrip("\0").split("\0")
            if missing := [name for name in tracked if not (project / name).exists()]:
                raise CheckError(f"the source distribution lacks {missing}")
        must([sys.executable, *TEST_COMMANDS[0].split()[1:]], cwd=project)

        programs = self.new_environment("empty", "--no-index", "--no-deps", str(wheel))
        name = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        report = json.loads(must([str(programs / name)], cwd=elsewhere))
        if not report.get("passed"):
            raise CheckError(f"the installed {name} does not pass its own fixture")
        must([str(programs / "contract-guard")], cwd=elsewhere)
        version = wheel.name.split("-")[1]
        if version not in must([str(programs / name), "--version"], cwd=elsewhere):
            raise CheckError(f"{name} --version does not name {version}, the version of the wheel")


STEPS = ("fixture", "tests", "readme", "lint", "package")


def main(steps: list[str]) -> int:
    """Run the steps; return 0 when each of them holds and the tree is as it was."""
    if unknown := set(steps) - set(STEPS):
        print(f"no such step: {', '.join(sorted(unknown))}; there are: {', '.join(STEPS)}", file=sys.stderr)
        return 2
    failures = []
    before = tree_state()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        check = Check(Path(scratch))
        for step in steps or STEPS:
            print(f"{step}:", flush=True)
            started = time.monotonic()
            try:
                getattr(check, step)()
            except (CheckError, subprocess.TimeoutExpired, OSError, ValueError) as error:
                failures.append(step)
                print(f"{error}\n{step} FAILED", flush=True)
            else:
                print(f"  ok, {time.monotonic() - started:.1f} s", flush=True)
    if tree_state() != before:
        failures.append("clean tree")
        print(f"the check left something in the tree:\n{tree_state()}before it:\n{before}", flush=True)
    if failures:
        print(f"FAILED: {', '.join(failures)}")
    if check.count:
        print(f"{check.count.passed} passed, {check.count.failed} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
