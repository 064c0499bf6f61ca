"""Rules of the package's source that no linter knows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from tests.support.paths import PACKAGE

MOST_PLACES = 40  # it only shrinks


@cache
def nodes() -> Sequence[tuple[str, ast.AST]]:
    """Every node of the package's syntax trees, with its place."""
    return [
        (f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if not isinstance(node, ast.expr_context | ast.operator)
    ]


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield every call, with its place and the dotted name of what is called, as far as that is one."""
    for place, node in nodes():
        if isinstance(node, ast.Call):
            yield place, ast.unparse(node.func), node


def test_few_places_take_the_whole_configuration() -> None:
    """Those that open, compare, record or check a run; the others take blocks, or values made of some of them."""
    taking = [
        place
        for place, node in nodes()
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None and not place.startswith("config/")
        if "Config" in ast.unparse(node.annotation).split(" | ")
    ]
    assert len(taking) <= MOST_PLACES, "\n".join(taking)


def test_a_mean_is_the_same_in_every_version_of_python() -> None:
    """`sum` of floats is compensated from Python 3.12 on: `statistics.fmean` and `math.fsum` are exact in all."""
    by_sum = [
        place
        for place, node in nodes()
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and ast.unparse(node.left).startswith("sum(")
        and "len(" in ast.unparse(node.right)
    ]
    assert by_sum == []


# `variable`; what `${oc.env:NAME}` reads, and CUDA_VISIBLE_DEVICES, where empty has a meaning.
READERS = {"variable", "is_set", "visible_devices"}
READING = {"get", "setdefault", "__getitem__", "__contains__", "getenv"}


def _reads_one(node: ast.AST) -> bool:
    """Whether a node reads one variable of a mapping that is named `environ`, as os.environ is."""

    def is_environ(tree: ast.AST) -> bool:
        return ast.unparse(tree).rpartition(".")[2] == "environ"

    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            return name in READING and (is_environ(owner) or name == "getenv")
        case ast.Subscript(value=owner, ctx=ast.Load()):
            return is_environ(owner)
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[owner]):
            return is_environ(owner)
    return False


def test_a_variable_is_read_by_one_function_to_which_empty_is_not_set() -> None:
    found = {
        function.name
        for _, function in nodes()
        if isinstance(function, ast.FunctionDef)
        if any(_reads_one(node) for node in ast.walk(function))
    }
    assert found == READERS


# Waits without a limit of their own, each with what ends it.
ENDED_OTHERWISE = {
    "api/training.py": "the process of the training, which ends by itself",
    "checkpoint/saver.py": "the save in flight, whose votes have a limit",
    "data/prefetch.py": "its own thread; in a training the watchdog ends a reader that does not answer",
    "data/remote/fetch.py": "the result of a transfer that has ended",
    "data/remote/stage.py": "copies, whose wait asks for signals",
    "datasets/bucket_download.py": "downloads, each of which has a limit without a byte",
    "doctor/network.py": "collectives, which have the limit of the process group",
    "engine/cpu_op.py": "the result of a thread that has ended",
    "launch/setup_lines.py": "`bash -n`, which reads its input and ends",
    "launch/submit.py": "sbatch, which has its own limit; Ctrl-C ends it",
    "runtime/children.py": "a process that was killed, and `setpriv --version`, which ends at once",
    "runtime/distributed.py": "collectives, which have the limit of the process group, and the watchdog",
    "runtime/workers.py": "the work itself, in processes; Ctrl-C ends it",
    "studies/study_call.py": "runs, each of which ends by itself or by the signal that all get",
    "supervision/lease.py": "its own thread, which was just released",
    "supervision/side_channel.py": "a message that has begun to come",
    "supervision/watchdog.py": "its own thread, which ends the process",
    "training/agreement.py": "collectives, which have the limit of the process group, and the watchdog",
    "training/resume.py": "the save in flight, whose votes have a limit",
    "training/saving.py": "the save in flight, whose votes have a limit",
}
WAITING = {"accept", "acquire", "as_completed", "barrier", "communicate", "get", "join", "recv", "result", "wait"}
WITH_TIMEOUT = {"socket.create_connection", "subprocess.check_call", "subprocess.check_output", "subprocess.run"}


def _has_no_limit(name: str, call: ast.Call) -> bool:
    """Whether a call waits for others, and for however long; `get` and its like take nothing then."""
    if any(keyword.arg == "timeout" for keyword in call.keywords):
        return False
    last = name.rpartition(".")[2]
    is_bare = not call.args and isinstance(call.func, ast.Attribute)
    return name in WITH_TIMEOUT or (last in WAITING and (is_bare or last == "as_completed"))


def test_every_wait_has_a_limit_or_a_reason() -> None:
    """A context variable is read by `get()` too, and a connection by `accept` after `settimeout`."""
    not_waits = {"_planned.get", "_planned_card.get", "server.accept"}
    unlimited = {
        place.partition(":")[0] for place, name, call in calls() if name not in not_waits and _has_no_limit(name, call)
    }
    assert unlimited == ENDED_OTHERWISE.keys()


def test_no_wait_for_a_lock_is_deaf_to_signals() -> None:
    """Python starts a system call again that a signal has ended: only `wait_for_lock`, which polls, hears a flag."""
    deaf = [
        place
        for place, name, call in calls()
        if name.rpartition(".")[2] in ("flock", "lockf")
        and not any(word in ast.unparse(call) for word in ("LOCK_NB", "LOCK_UN"))
    ]
    assert deaf == []
