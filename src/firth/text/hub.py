"""Read a dataset of the Hugging Face Hub, or one in a local folder, row by row, without keeping it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from firth.core.errors import UserError, did_you_mean
from firth.text.open_text import import_optional
from firth.text.records import NumberedRecords

HUB_PREFIX = "hf:"
HUB_ADDRESS_FORMAT = "hf:owner/name[:config][:split][#column]"
HubResultT = TypeVar("HubResultT")


class HubAddress(NamedTuple):
    """`hf:owner/name:part:part#column`; which part is the config and which the split, the dataset itself tells."""

    name: str
    parts: tuple[str, ...]
    column: str | None


def parse_hub_address(path: str) -> HubAddress:
    """
    >>> parse_hub_address("hf:Salesforce/wikitext:wikitext-2-v1:test#text")
    HubAddress(name='Salesforce/wikitext', parts=('wikitext-2-v1', 'test'), column='text')
    """
    place, _, column = path.removeprefix(HUB_PREFIX).partition("#")
    name, *parts = place.split(":")
    if not name or len(parts) > 2 or not all(parts):
        raise UserError(f"{path}: not the address of a dataset. Write {HUB_ADDRESS_FORMAT}.")
    return HubAddress(name, tuple(parts), column or None)


class HubDataset:
    """One split of a dataset. Nothing is asked of the network before it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.address = parse_hub_address(path)
        self.datasets_module = import_optional("datasets", f"{path}: reading datasets")

    @property
    def column(self) -> str | None:
        return self.address.column

    @cached_property
    def config(self) -> str | None:
        """The configuration that is named, or the only one; several are the user's choice."""
        there = self._call_datasets(self.datasets_module.get_dataset_config_names)
        named = [part for part in self.address.parts if part in there]
        if not named and len(there) > 1 and "default" not in there:
            raise UserError(
                f"{self.path}: has several configurations ({abbreviate_names(there)}). Name one: {HUB_ADDRESS_FORMAT}."
            )
        if len(self.address.parts) == 2 and self.address.parts[0] not in there:
            wrong = self.address.parts[0]
            raise UserError(f"{self.path}: no configuration {wrong!r}. {did_you_mean(wrong, there)}")
        return self.address.parts[0] if named and self.address.parts[0] in there else None

    @cached_property
    def split(self) -> str:
        """The split that is named, or `train`, or the only one."""
        there = self._call_datasets(self.datasets_module.get_dataset_split_names, self.config)
        rest = [part for i, part in enumerate(self.address.parts) if i or part != self.config]
        wanted = rest[0] if rest else ("train" if "train" in there or len(there) != 1 else there[0])
        if wanted not in there:
            raise UserError(f"{self.path}: no split {wanted!r}. {did_you_mean(wanted, there)}")
        return str(wanted)

    @cached_property
    def rows(self) -> Iterable[dict[str, Any]]:
        return self._call_datasets(self.datasets_module.load_dataset, self.config, split=self.split, streaming=True)

    @property
    def size_bytes(self) -> int:
        """How much there is to read, where the dataset says so."""
        info = getattr(self.rows, "info", None)
        return int(getattr(info, "dataset_size", None) or getattr(info, "download_size", None) or 0)

    def records(self) -> NumberedRecords:
        """Its rows, numbered from 1."""
        number = 0
        rows = iter(self.rows)
        while (row := self._wrap_errors(lambda: next(rows, None))) is not None:
            number += 1
            yield number, row

    def describe(self) -> str:
        parts = [part for part in (self.config, self.split) if part]
        return f"{HUB_PREFIX}{self.address.name} ({', '.join(parts)}) with one document per row"

    def _call_datasets(self, function: Callable[..., HubResultT], *args: Any, **kwargs: Any) -> HubResultT:
        return self._wrap_errors(lambda: function(self.address.name, *args, **kwargs))

    def _wrap_errors(self, call: Callable[[], HubResultT]) -> HubResultT:
        """Say in one or two lines what `datasets_module` and the libraries below it could not do, of whatever kind it is."""
        try:
            return call()
        except UserError:
            raise
        except Exception as e:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
            advice = "Is the name right, and is there a network? A local folder may be named as well: hf:./folder."
            if Path(self.address.name).is_dir():
                advice = "It must be a folder of data files as the Hub has them: .parquet, .jsonl, .csv or .txt."
            raise UserError(f"{self.path}: cannot be read ({type(e).__name__}: {reason}). {advice}") from None


def abbreviate_names(names: Iterable[str], max_names: int = 12) -> str:
    names = list(names)
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")
