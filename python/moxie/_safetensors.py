"""The tensors of a checkpoint: one file, several, or a folder with an index of shards. Reads only what is asked for.

BF16 needs ml_dtypes: the safetensors library has no other NumPy type for it.
"""

import json
import os
from pathlib import Path
from typing import Any

from moxie._errors import InvalidArgumentError, UnavailableError

INDEX = "model.safetensors.index.json"
STORAGE = ("BF16", "F32")  # what a layer's weights can be


def libraries() -> Any:
    """The safetensors module, with ml_dtypes registered in NumPy."""
    try:
        import ml_dtypes  # noqa: F401  (registers bfloat16)
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise UnavailableError(
            f"moxie.checkpoint needs the packages safetensors and ml_dtypes ({error.name} is missing): "
            "pip install 'moxie-moe[checkpoint]'"
        ) from error
    return safetensors


class Tensors:
    """Names, shapes and values of the tensors under a path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._safe_open = libraries().safe_open
        self._open: dict[Path, tuple[Any, frozenset[str]]] = {}  # shard, its names
        self.path = Path(path)
        self.files: dict[str, Path] = {}  # of each tensor
        if self.path.is_dir():
            self._read_folder()
        elif self.path.is_file():
            self._add_file(self.path)
        else:
            raise InvalidArgumentError(
                f"checkpoint {self.path} does not exist, must be a .safetensors file or a folder"
            )

    def _read_folder(self) -> None:
        index = self.path / INDEX
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                self.files = {str(name): self.path / str(file) for name, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidArgumentError(f"{index} is no index of shards: {error!r}") from error
            self.path = index
            return
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise InvalidArgumentError(f"folder {self.path} has neither {INDEX} nor a .safetensors file")
        for file in files:
            self._add_file(file)
        if len(files) == 1:
            self.path = files[0]

    def _add_file(self, file: Path) -> None:
        self.files.update((name, file) for name in self._shard(file, "")[1])

    def _shard(self, file: Path, tensor: str) -> tuple[Any, frozenset[str]]:
        if file not in self._open:
            if not file.is_file():
                raise InvalidArgumentError(f"file {file} does not exist; {self.path} says that it has tensor {tensor}")
            try:
                shard = self._safe_open(str(file), framework="np")
                self._open[file] = shard, frozenset(shard.keys())
            except Exception as error:  # the library raises classes of its own
                raise InvalidArgumentError(f"file {file} is no whole safetensors file: {error}") from error
        return self._open[file]

    def _slice(self, name: str) -> Any:
        if name not in self.files:
            raise InvalidArgumentError(f"tensor {name} is missing in {self.path}")
        file = self.files[name]
        shard, names = self._shard(file, name)
        if name not in names:
            raise InvalidArgumentError(f"tensor {name} is missing in {file}, where {self.path} says it is")
        return shard.get_slice(name)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *, shape: tuple[int, ...] | None = None, rows: range | None = None) -> Any:
        """The tensor, or some of its first dimension. `shape` is that of the whole tensor."""
        part = self._slice(name)
        seen, kind = tuple(part.get_shape()), part.get_dtype()
        if shape is not None and seen != shape:
            raise InvalidArgumentError(f"tensor {name} of {self.files[name]} is {list(seen)}, must be {list(shape)}")
        if kind not in STORAGE:
            raise InvalidArgumentError(
                f"tensor {name} of {self.files[name]} is {kind}, must be {' or '.join(STORAGE)}; "
                "convert or dequantise the checkpoint first"
            )
        if rows is None:
            return part[:]
        # The library reads no empty slices.
        return part[rows.start : rows.stop] if len(rows) > 0 else part[0:1][:0]


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json in the folder of a checkpoint; empty when there is none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError(f"{file} is no JSON: {error}") from error
    return config if isinstance(config, dict) else {}
