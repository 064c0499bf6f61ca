"""Write a directory from which a trained model can be loaded anywhere."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import add_checkpoint, output_folder
from dist_mem.errors import UnusableError

PLACE = ("use a trained model", 11)
EXAMPLE = "runs/demo --out models/demo"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument(
        "run", type=Path, help="a run directory, a checkpoint in it, or CONFIG.yaml for an untrained one"
    )
    added.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help="data.path=FOLDER if the data and their tokenizer have moved, tracking.uri=URL",
    )
    add_checkpoint(added)
    added.add_argument("--out", type=output_folder, required=True, metavar="FOLDER", help="directory to write")
    added.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default: fp32)"
    )
    added.add_argument(
        "--format",
        choices=["dist_mem", "transformers", "peft"],
        default="dist_mem",
        help="transformers: for that library too | peft: what LoRA has learned (default: dist_mem)",
    )
    added.add_argument("--mlflow", action="store_true", help="log the export to the run's MLflow run, as a model")
    added.add_argument("--register", metavar="NAME", help="with --mlflow: register it as a new version of this model")
    added.add_argument("--alias", metavar="ALIAS", help="with --register: give the new version this alias")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    if options.register is not None and not options.mlflow:
        raise UnusableError(f"--register {options.register}: only with --mlflow, which logs the export; add it")
    if options.alias is not None and options.register is None:
        raise UnusableError(f"--alias {options.alias}: only with --register NAME, whose new version gets it; add it")
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.evaluation.export import Registration
    from dist_mem.evaluation.export import run as run_command

    return run_command(
        options.run,
        registration=Registration(options.register, options.alias) if options.mlflow else None,
        out=options.out,
        checkpoint=options.checkpoint,
        precision=options.precision,
        layout=options.format,
        overrides=options.overrides,
    )
