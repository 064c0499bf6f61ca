"""List, verify or show the checkpoints of a run: `dist-mem checkpoints list|verify|show DIR`.

`list` checks manifests and file sizes, `verify` reads every byte, `show` describes one checkpoint. None of them changes
anything. The exit code is 0 if every check passed, 1 if a checkpoint failed one, 2 if there is no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.manifest import (
    NewerFormatError,
    list_steps,
    read_manifest,
    run_of,
    step_dir,
    verify,
    verify_file,
    verify_size,
)
from dist_mem.checkpoint.retention import rules_by_step, stored_checkpoints
from dist_mem.config import CheckpointConfig, ConfigError, read_config
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, CheckpointError
from dist_mem.runtime.terminal import label_lines, short_digest
from dist_mem.runtime.terminal import table as aligned
from dist_mem.tracking.mlflow.sync import CheckpointCount

_COLUMNS = ("checkpoint", "saved", "bytes", "ranks", "ZeRO", "kept by", "state")


class CheckedCheckpoint(NamedTuple):
    """A checked checkpoint."""

    directory: Path
    manifest: dict[str, Any] | None  # None: cannot be read
    problem: str | None  # None: no check failed
    is_newer: bool = False  # of a newer dist_mem: a start is refused rather than resumed from an older one


def run(action: str, path: Path) -> int:
    """List, verify or show the checkpoints of a run directory, or one checkpoint; return the exit code.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    directories = find(path)
    if action == "show":
        found = _look(directories[-1], verify_size)
        print("\n".join(label_lines(_describe(found))))
        return EXIT_FAILED if found.problem else EXIT_DONE
    is_deep = action == "verify"
    looked = [_look(directory, verify_file if is_deep else verify_size) for directory in directories]
    # A running job may have deleted some meanwhile, which is no damage.
    table = [found for found in looked if not found.problem or found.directory.exists()] or looked
    print("\n".join([*_table(table, path, good="verified" if is_deep else "complete"), *_set_aside(path)]))
    newest = next((found for found in reversed(table) if not found.problem or found.is_newer), None)
    if is_deep and newest is not None and not newest.is_newer:
        print(f"a run would resume from {newest.directory.name}")
    return EXIT_FAILED if any(found.problem for found in table) else EXIT_DONE


def find(path: Path) -> list[Path]:
    """Return the checkpoints of a run directory, oldest first, or the one at `path`.

    Raises:
        CheckpointError: there is none.
    """
    steps = list_steps(path)
    if steps:
        return [step_dir(path, step) for step in steps]
    if (path / "manifest.json").exists():
        return [path]
    raise CheckpointError(f"{path}: no checkpoint; give a run directory or one checkpoint in it")


def _look(directory: Path, check: Callable[[Path, str, dict[str, Any]], None]) -> CheckedCheckpoint:
    manifest = None
    try:
        manifest = read_manifest(directory)
        verify(directory, check)
    except CheckpointError as error:
        problem = str(error).removeprefix(f"{directory}/").removeprefix(f"{directory}: ")
        return CheckedCheckpoint(directory, manifest, problem, isinstance(error, NewerFormatError))
    return CheckedCheckpoint(directory, manifest, None)


def _saving_time(manifest: Mapping[str, Any], directory: Path) -> str:
    """Return when the checkpoint was saved, as text."""
    seconds = manifest.get("time") or (directory / "manifest.json").stat().st_mtime
    return datetime.fromtimestamp(seconds).isoformat(" ", timespec="seconds")


def _num_bytes(manifest: Mapping[str, Any], prefix: str = "") -> int:
    return sum(entry["bytes"] for name, entry in manifest["files"].items() if name.startswith(prefix))


def _table(table: Sequence[CheckedCheckpoint], path: Path, *, good: str) -> Iterator[str]:
    reasons = _rules_by_step(path, table)
    rows: list[Sequence[str]] = [_COLUMNS]
    for directory, manifest, problem, _ in table:
        state = f"BROKEN: {problem}" if problem else good
        if manifest is None:
            rows.append((directory.name, "", "", "", "", "", state))
            continue
        sizes = f"{_num_bytes(manifest):,}", str(manifest.get("world_size", "")), str(manifest.get("zero_stage", ""))
        rows.append(
            (directory.name, _saving_time(manifest, directory), *sizes, reasons.get(manifest["step"], ""), state)
        )
    yield from aligned(rows)


def _rules_by_step(path: Path, table: Sequence[CheckedCheckpoint]) -> dict[int, str]:
    """Return the rules that keep each step, by the configuration of the latest start of the run."""
    steps = list_steps(path)
    if not steps:
        return {}
    configs = [path / "config.yaml", *(found.directory / "config.yaml" for found in reversed(table))]
    for config in configs:
        try:
            rules: CheckpointConfig = read_config(config).checkpoint
        except (ConfigError, OSError):  # a damaged copy for users; each checkpoint has another one
            continue
        found = rules_by_step(stored_checkpoints(path, steps[-1]), rules)
        return {step: ", ".join(names) or "nothing: deleted at the next save" for step, names in found.items()}
    return {}


def _set_aside(path: Path) -> Iterator[str]:
    """Yield a line that names the directories kept for inspection, which no job resumes from."""
    names = sorted(found.name for found in (path / "checkpoints").glob("step-*.*"))
    if names:
        yield f"set aside, for you to inspect and delete: {', '.join(names)}"


def _describe(found: CheckedCheckpoint) -> Iterator[tuple[str, str]]:
    directory, manifest, problem, _ = found
    yield "checkpoint", str(directory)
    yield "state", f"BROKEN: {problem}" if problem else "complete; `verify` reads every byte"
    if manifest is None:
        return
    yield "step", f"{manifest['step']:,}"
    yield "saved", _saving_time(manifest, directory)
    yield "run", str(run_of(directory))
    yield "format", str(manifest["format_version"])
    kinds = sorted({name.split("/")[0] for name in manifest["files"] if "/" in name})
    parts = ", ".join(f"{kind} {_num_bytes(manifest, f'{kind}/'):,}" for kind in kinds)
    yield "bytes", f"{_num_bytes(manifest):,} in {len(manifest['files'])} files ({parts})"
    if "lanes" in manifest:  # an export has none
        yield "ranks", f"{manifest['world_size']}, ZeRO stage {manifest['zero_stage']}"
        yield "lanes", f"{len(manifest['lanes']):,} places"
    if validation := manifest.get("validation"):
        yield (
            "validation",
            f"{validation['loss']:.4f} nats per token, at step {validation['step']} ({validation['measure']})",
        )
    code = {**manifest["versions"], "commit": short_digest(manifest.get("commit") or "not known")}
    yield "code", ", ".join(f"{name} {version}" for name, version in code.items())
    yield "data", short_digest(manifest["data_fingerprint"])
    yield "tokenizer", short_digest(manifest["tokenizer_fingerprint"])
    yield "MLflow run", manifest.get("mlflow_run_id") or "none"


def newest_count(run_dir: Path) -> CheckpointCount | None:
    """Return the count of the newest readable checkpoint; None without one, or if it has no count."""
    for step in reversed(list_steps(run_dir)):
        with suppress(CheckpointError):  # a job also passes it over
            num_points = read_manifest(step_dir(run_dir, step)).get("points")
            return None if num_points is None else CheckpointCount(step, num_points)
    return None
