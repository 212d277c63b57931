"""The values that Tab completes in a shell, after `firth --install-completion`.

Commands and names of options are completed by Typer. A value is completed if its option has choices, or a name from a
list: presets, objectives, tasks, kinds of tokenizers. Where nothing fits, the shell completes file names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def list_presets() -> Iterable[str]:
    from firth.models.presets import ARCHITECTURE_FAMILIES, PRESETS

    return [*ARCHITECTURE_FAMILIES, *PRESETS]


def list_objectives() -> Iterable[str]:
    from firth.objectives import OBJECTIVES

    return OBJECTIVES


def list_tasks() -> Iterable[str]:
    from firth.text.examples import TASK_FORMATS

    return TASK_FORMATS


def list_tokenizer_kinds() -> Iterable[str]:
    from firth.tokens.builders import TOKENIZER_KINDS

    return TOKENIZER_KINDS


def list_gguf_dtypes() -> Iterable[str]:
    from firth.commands.export import GGUF_DTYPES

    return GGUF_DTYPES


VALUE_LISTS: dict[str, Callable[[], Iterable[str]]] = {
    "model": list_presets,
    "objective": list_objectives,
    "task": list_tasks,
    "kind": list_tokenizer_kinds,
    "dtype": list_gguf_dtypes,
    "quantize": lambda: ("int8",),
}


def complete_values(name: str, choices: Iterable[str]) -> Callable[[str], list[str]] | None:
    """Return the function that completes the value of an option, or None for one that can be anything."""
    if name not in VALUE_LISTS and not choices:
        return None

    def complete(incomplete: str) -> list[str]:
        values = [*choices] or VALUE_LISTS[name]()
        return sorted(value for value in values if value.startswith(incomplete))

    return complete
