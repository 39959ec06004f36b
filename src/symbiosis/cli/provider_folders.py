"""Checks of the folders of a provider before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from symbiosis.adapters.files import CONFIG
from symbiosis.errors import BadAdapter, SymbiosisError
from symbiosis.server.adapter_store import lock_folder


def check_provider_folders(
    *, uploads: Path | None, jobs: Path | None, adapters: Mapping[str, Path], adapter_root: Path | None
) -> None:
    """Raise what serving with these folders would raise later. Folders of `uploads` and `jobs` are created."""
    if uploads is not None and jobs is not None and uploads.resolve() == jobs.resolve():
        raise SymbiosisError(f"--uploads and --jobs are both {jobs}: give each a folder of its own")
    for folder, what, option in ((uploads, "adapters", "--uploads"), (jobs, "fine-tuning jobs", "--jobs")):
        if folder is None:
            continue
        os.close(lock_folder(folder, what, option))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise SymbiosisError(f"{folder} cannot store {what}: Permission denied; choose another with {option} FOLDER")
    if adapter_root is not None and not adapter_root.is_dir():
        raise SymbiosisError(f"there is no folder {adapter_root}: --adapter-root must be a folder of adapters")
    for name, folder in adapters.items():
        if not (folder / CONFIG).is_file():
            raise BadAdapter(
                f"the adapter {name} in {folder}: there is no {CONFIG}; "
                "expected a folder as `symbiosis finetune --out` or PEFT writes it"
            )
