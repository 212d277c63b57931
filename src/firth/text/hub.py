"""Stream the rows of a dataset on the Hugging Face Hub or in a local folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from firth.core.errors import UserError, did_you_mean, list_names, quote
from firth.text.open_text import import_optional
from firth.text.records import NumberedRecords

HUB_PREFIX = "hf:"
HUB_ADDRESS_FORMAT = "hf:owner/name[:config][:split][#column]"
HubResultT = TypeVar("HubResultT")


class HubAddress(NamedTuple):
    """A parsed `hf:owner/name:part:part#column`; the dataset decides which part is the config and which the split."""

    name: str
    parts: tuple[str, ...]
    column: str | None


def parse_hub_address(path: str) -> HubAddress:
    """Parse the address of a dataset.

    >>> parse_hub_address("hf:Salesforce/wikitext:wikitext-2-v1:test#text")
    HubAddress(name='Salesforce/wikitext', parts=('wikitext-2-v1', 'test'), column='text')
    """
    dataset, _, column = path.removeprefix(HUB_PREFIX).partition("#")
    name, *parts = dataset.split(":")
    if not name or len(parts) > 2 or not all(parts):
        raise UserError(f"{path}: not the address of a dataset. Write {HUB_ADDRESS_FORMAT}.")
    return HubAddress(name, tuple(parts), column or None)


class HubDataset:
    """One split of a dataset. The network is not used before the first read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.address = parse_hub_address(path)
        self.datasets_module = import_optional("datasets", f"{path}: reading datasets")
        self.rows_read = 0

    @property
    def column(self) -> str | None:
        return self.address.column

    @cached_property
    def config(self) -> str | None:
        """The named configuration, or None for the default or only one; of several, the user must name one."""
        available = self._call_datasets(self.datasets_module.get_dataset_config_names)
        named = [part for part in self.address.parts if part in available]
        if not named and len(available) > 1 and "default" not in available:
            raise UserError(
                f"{self.path}: has several configurations ({list_names(available)}). Name one: {HUB_ADDRESS_FORMAT}."
            )
        if len(self.address.parts) == 2 and self.address.parts[0] not in available:
            wrong = self.address.parts[0]
            raise UserError(f"{self.path}: no configuration {quote(wrong)}. {did_you_mean(wrong, available)}")
        return self.address.parts[0] if named and self.address.parts[0] in available else None

    @cached_property
    def split(self) -> str:
        """The named split, or `train`, or the only one."""
        available = self._call_datasets(self.datasets_module.get_dataset_split_names, self.config)
        rest = [part for i, part in enumerate(self.address.parts) if i or part != self.config]
        split = rest[0] if rest else ("train" if "train" in available or len(available) != 1 else available[0])
        if split not in available:
            raise UserError(f"{self.path}: no split {quote(split)}. {did_you_mean(split, available)}")
        return str(split)

    @cached_property
    def rows(self) -> Iterable[dict[str, Any]]:
        return self._call_datasets(self.datasets_module.load_dataset, self.config, split=self.split, streaming=True)

    @property
    def published_split(self) -> Any:
        """What the dataset publishes of this split, with `num_examples` and `num_bytes`; None if nothing."""
        info = getattr(self.rows, "info", None)
        return (getattr(info, "splits", None) or {}).get(self.split)

    @property
    def num_rows(self) -> int:
        """Number of rows if it is published, otherwise 0."""
        return int(getattr(self.published_split, "num_examples", None) or 0)

    @property
    def size_bytes(self) -> int:
        """Size of the split if it is published, or else of the dataset, otherwise 0."""
        info = getattr(self.rows, "info", None)
        whole = getattr(info, "dataset_size", None) or getattr(info, "download_size", None)
        return int(getattr(self.published_split, "num_bytes", None) or whole or 0)

    def records(self) -> NumberedRecords:
        """Yield the rows, numbered from 1."""
        self.rows_read = 0
        rows = iter(self.rows)
        while (row := self._wrap_errors(lambda: next(rows, None))) is not None:
            self.rows_read += 1
            yield self.rows_read, row

    def describe(self) -> str:
        parts = [part for part in (self.config, self.split) if part]
        return f"{HUB_PREFIX}{self.address.name} ({', '.join(parts)}) with one document per row"

    def _call_datasets(self, function: Callable[..., HubResultT], *args: Any, **kwargs: Any) -> HubResultT:
        return self._wrap_errors(lambda: function(self.address.name, *args, **kwargs))

    def _wrap_errors(self, call: Callable[[], HubResultT]) -> HubResultT:
        """Call a function and turn any exception of `datasets` and its dependencies into a UserError."""
        try:
            return call()
        except UserError:
            raise
        except Exception as e:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
            advice = "Check the name and the network. A local folder works too: hf:./folder."
            if Path(self.address.name).is_dir():
                advice = "A dataset folder has .parquet, .jsonl, .csv or .txt files, as on the Hub."
            raise UserError(f"{self.path}: cannot be read ({type(e).__name__}: {reason}). {advice}") from None
