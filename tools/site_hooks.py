"""Hooks of mkdocs: pages that are not in docs/, and links between both.

README, CONTRIBUTING, SECURITY and CHANGELOG stand in the root of the repository, where people look for them. The site
shows them under project/. The API reference lists what `firth.api` exports; mkdocstrings writes it from docstrings.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    name: f"project/{name.lower()}" for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
# Types that are in the signatures of the functions, or that programs use beside them.
MORE_NAMES = {
    "Texts and tokens": ["firth.text.Corpus", "firth.text.Document", "firth.tokens.Tokenizer"],
    "Recipes": ["firth.train.Recipe", "firth.tasks.FinetuneRecipe", "firth.generate.config.GenerationConfig"],
    "Models": ["firth.models.config.ModelConfig", "firth.models.model.Model"],
}


def exported_functions() -> dict[str, str]:
    """Return the path of each function of `firth.api`, from its import statements: the site is built without torch."""
    tree = ast.parse((ROOT / "src/firth/api.py").read_text(encoding="utf-8"))
    imports = {
        name.asname or name.name: f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("firth.")
        for name in node.names
    }
    exported = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return {name: imports[name] for name in exported}


def api_page() -> str:
    """The page of the API reference, in the form that mkdocstrings reads."""
    lines = [
        "# API reference",
        "",
        "Every command is a function: `firth.pretrain(...)`. [Python](python.md) has examples.",
        "",
    ]
    lines += ["## Functions", ""]
    for path in exported_functions().values():
        lines += [f"::: {path}", ""]
    for title, paths in MORE_NAMES.items():
        lines += [f"## {title}", ""]
        for path in paths:
            lines += [f"::: {path}", "    options:", "      members: false", ""]
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root and the API reference."""
    for name, path in ROOT_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links between docs/ and the root to where the pages are on the site."""
    in_project = page.file.src_uri.startswith("project/")

    def rewrite(match: re.Match[str]) -> str:
        target = match[2]
        if not in_project and target.removeprefix("../") in ROOT_PAGES and target.startswith("../"):
            target = ROOT_PAGES[target.removeprefix("../")]
        elif in_project and target in ROOT_PAGES:
            target = target.lower()
        elif in_project and target.startswith("docs/"):
            target = "../" + target.removeprefix("docs/")
        return match[1] + target + (match[3] or "") + match[4]

    return LINK.sub(rewrite, markdown)
