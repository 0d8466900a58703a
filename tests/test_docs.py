"""The README, the pages of the site and the docstrings: their code runs, their links and commands resolve.

A Python block of a page goes on where the one before it stopped. A title keeps it from running: `in training`
everywhere, `on a GPU` where there is none. Such blocks are compiled only.
"""

import doctest
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import rl_triton

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
RUNS = {"": True, "on a GPU": torch.cuda.is_available(), "in training": False}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    """The title, code and line of every block of a language."""
    text = page.read_text()
    fence = re.compile(
        rf'^(?P<indent> *)```{language}(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^(?P=indent)```$',
        re.M | re.S,
    )
    for match in fence.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield match["title"] or "", textwrap.dedent(match["code"]), line


def anchors(page):
    """The anchors of a page's headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_code_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # What a reader in a clone has at hand.
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    torch.manual_seed(0)
    namespace = {"__name__": page.stem}
    for title, code, line in blocks(page, "python"):
        # Padded, so that a traceback shows the line of the page.
        compiled = compile("\n" * line + code, str(page), "exec")
        if RUNS[title]:
            exec(compiled, namespace)


@every_page
def test_links_resolve(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text)
    for target, anchor in [*links, *re.findall(r'\bsrc(?:set)?="([^"#]*)()"', text)]:
        if re.match(r"\w+:", target):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor.startswith("rl_triton."):
            assert pkgutil.resolve_name(anchor)
        elif anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


@every_page
def test_tests_exist(page):
    for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{page.name} names {file}::{name}"


@every_page
def test_commands_exist(page):
    verbs = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for _, code, _ in blocks(page, "bash"):
        lines = re.sub(r"\\\n", " ", code).splitlines()
        for line in (line.partition("#")[0] for line in lines):
            assert set(re.findall(r"\bmake (\w+)", line)) <= verbs, line
            for script in re.findall(r"\b(?:examples|tests|docs)/[\w/]+\.(?:py|json)\b", line):
                assert (ROOT / script).exists(), line
            for trainer in re.findall(r"\bexamples/(ppo|impala)\.py", line):
                fields = [(ROOT / "examples" / f"{file}.py").read_text() for file in (trainer, "common")]
                known = {
                    name.replace("_", "-") for name in re.findall(r"^    (\w+):", "".join(fields), flags=re.M)
                }
                flags = line.partition(f"{trainer}.py")[2]
                assert set(re.findall(r"--(?:no-)?([\w-]+)", flags)) <= known | {"help"}, line


@pytest.mark.parametrize("name", rl_triton.__all__)
def test_public_names_are_documented(name):
    function = getattr(rl_triton, name)
    tests = doctest.DocTestFinder(recurse=False).find(function, name)
    assert any(test.examples for test in tests)
    for test in tests:
        test.globs |= {"torch": torch, name: function}
        assert doctest.DocTestRunner().run(test).failed == 0
    assert f"`{name}`" in (ROOT / "README.md").read_text()
    assert f"::: rl_triton.{name}\n" in (ROOT / "docs" / "api.md").read_text()


def test_site(tmp_path):
    """A strict build without warnings, whose pages fetch nothing from other hosts."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(https?:[^\" >]*)", page.read_text()
        )
        assert not fetched, f"{page}: {fetched}"
